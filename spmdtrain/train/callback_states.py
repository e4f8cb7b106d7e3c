"""The states of callback objects, which checkpoints contain."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmdtrain.errors import UserError, foreign


class CallbackStates:
    """The states of the callback objects that have one.

    Such an object has the methods `state_dict() -> dict` of JSON values and
    `load_state_dict(dict)`. A checkpoint identifies its state by its attribute `name`, or by the
    name of its class.

    Raises:
      UserError: If an object has only one of the methods, or two have the same name.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks: dict[str, Any] = {}
        for callback in callbacks:
            kind = type(callback).__name__
            methods = [hasattr(callback, name) for name in ("state_dict", "load_state_dict")]
            if any(methods) and not all(methods):
                raise UserError(f"callback {kind} needs both state_dict and load_state_dict")
            if not all(methods):
                continue
            name = getattr(callback, "name", kind)
            if name in self._callbacks:
                raise UserError(
                    f"two callbacks are named {name!r}, by which a checkpoint finds their states: "
                    "give one of them another attribute `name`"
                )
            self._callbacks[name] = callback
        self._initial = self.to_json()

    def to_json(self) -> dict[str, Any]:
        """Returns the state of each object by name, as JSON values, for the manifest.

        Raises `UserError` if a state is not JSON, or contains NaN or infinity.
        """
        states = {}
        for name, callback in self._callbacks.items():
            try:
                # A copy, because the callback may change what it has returned.
                states[name] = json.loads(json.dumps(callback.state_dict(), allow_nan=False))
            except (TypeError, ValueError) as error:
                raise UserError(f"the state of callback {name} is not JSON: {error}") from error
        return states

    def reset(self) -> None:
        """Gives all objects the states that they had when they were passed to the trainer."""
        if self.to_json() != self._initial:
            for name, state in self._initial.items():
                self._callbacks[name].load_state_dict(json.loads(json.dumps(state)))

    def restore(self, saved: Mapping[str, Any], log: Callable[[str], None]) -> None:
        """Gives the objects the states that `to_json` returned for a checkpoint.

        `log` receives a line for each state without a callback, and each callback without a state.
        Raises `UserError` if a callback cannot use its state.
        """
        for name in saved.keys() - self._callbacks.keys():
            known = foreign(name, 100)
            log(f"callback {known} is in the checkpoint and not in this run: its state is ignored")
        for name, callback in self._callbacks.items():
            if name not in saved:
                log(f"callback {name} is not in the checkpoint: it starts with its initial state")
                continue
            try:
                callback.load_state_dict(saved[name])
            except Exception as error:
                why = foreign(f"{type(error).__name__}: {error}", 300)
                raise UserError(
                    f"callback {name} cannot use its state in the checkpoint: {why}. Give the "
                    "callback another attribute `name` to start with its initial state"
                ) from error
