"""Callbacks: functions that a run calls at events."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.train.loop_checks import as_floats


class CallbackEvent(enum.StrEnum):
    """The events at which callbacks are called."""

    FIT_START = "fit_start"
    STEP = "step"  # a step was dispatched; its metrics are pending
    LOG = "log"  # with the train metrics of a step, whose state cannot be read any more
    EPOCH_END = "epoch_end"  # with the epoch's means; before its evaluation and checkpoint
    EVALUATION = "evaluation"  # with the validation metrics
    CHECKPOINT = "checkpoint"
    FIT_END = "fit_end"  # with the test metrics if there is a test split


@dataclass
class CallbackContext:
    """The argument of a callback. `trainer.stop()` ends the run after this step."""

    trainer: Any  # a Trainer; this module cannot import it
    event: CallbackEvent
    step: int
    metrics: dict[str, float]
    """The metrics of the event; callbacks of `log` and `evaluation` may add others."""

    def __setattr__(self, name: str, value: Any) -> None:
        # `event.metrics |= {...}` adds to the dictionary, and assigns it again.
        if self.__dict__.get(name, value) is not value:
            raise UserError(f"event.{name} cannot be replaced: to add metrics, use event.metrics")
        object.__setattr__(self, name, value)


class FrozenMetrics(dict[str, Any]):
    """Metrics that a callback cannot change, because they are written already."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UserError(
            "event.metrics cannot be changed here: only callbacks of 'log' and 'evaluation' may "
            "add metrics, and none may change a computed one"
        )

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy is a plain dictionary

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse


class AddableMetrics(FrozenMetrics):
    """Computed metrics that are about to be written; a callback may add others."""

    def __init__(self, computed: Mapping[str, float]) -> None:
        super().__init__(computed)
        self._computed = dict(computed)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._computed:
            self._refuse()
        dict.__setitem__(self, name, value)

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def __ior__(self, given: Any) -> "AddableMetrics":  # type: ignore[override,misc]
        self.update(given)
        return self

    def with_added(self) -> dict[str, float]:
        """Returns the computed metrics, then those added; raises `UserError` for non-numbers."""
        added = {name: x for name, x in self.items() if name not in self._computed}
        return self._computed | (as_floats(added, "the callback's") if added else {})


Callback = Callable[[CallbackContext], None]
Callbacks = Mapping[str, Callback | list[Callback]]
"""One function or several, by the name of a `CallbackEvent`."""


def by_event(callbacks: Callbacks) -> dict[CallbackEvent, list[Callback]]:
    """Returns the functions of every event.

    Args:
      callbacks: One function or several, by the name of an event.

    Raises:
      UserError: If an event does not exist, or a callback is no function.
    """
    if not isinstance(callbacks, Mapping):
        raise UserError(
            f"callbacks is a {type(callbacks).__name__}: it must be a dictionary of events, for "
            f'example {{"log": f}}. The events are: {", ".join(CallbackEvent)}'
        )
    found: dict[CallbackEvent, list[Callback]] = {moment: [] for moment in CallbackEvent}
    for name, functions in callbacks.items():
        if name not in found:
            raise UserError(f"there is no event {name!r} for callbacks.{did_you_mean(name, found)}")
        given = functions if isinstance(functions, list) else [functions]
        for function in given:
            if not callable(function):
                raise UserError(
                    f"callbacks[{name!r}] is a {type(function).__name__}: it must be a function of "
                    "the event, or a list of such functions"
                )
        found[CallbackEvent(name)] += given
    return found


class CallbackRunner:
    """Calls the callbacks of a trainer and records which event is being handled.

    Args:
      trainer: The trainer that callbacks receive.
      callbacks: Functions by event.
      state_at_steps: Whether the trainer has the state after each step (see `Backend`).

    Raises:
      UserError: If an event does not exist, or a callback is no function.
    """

    def __init__(self, trainer: Any, callbacks: Callbacks, *, state_at_steps: bool) -> None:
        self._trainer, self._state_at_steps = trainer, state_at_steps
        self._functions = by_event(callbacks)
        self.event: CallbackEvent | None = None
        """The event whose callbacks are running."""
        self.stop_requested = False
        """Whether `Trainer.stop` was called since the fit began; the same in all processes."""

    def has(self, event: CallbackEvent) -> bool:
        """Returns whether an event has callbacks."""
        return bool(self._functions[event])

    def check_readable(self) -> None:
        """Checks that no callback is running whose step has another state than the newest one.

        Raises:
          UserError: If such a callback is running.
        """
        late = {CallbackEvent.LOG} | (set() if self._state_at_steps else {CallbackEvent.STEP})
        if self.event in late:
            raise UserError(
                f"the state cannot be read in a {self.event} callback: the outputs of a step are "
                "read later, when the trainer already holds the state of another step. "
                f"Read it at {', '.join(event for event in CallbackEvent if event not in late)}"
            )

    def request_stop(self) -> None:
        """Makes the step in progress the last one; see `Trainer.stop`."""
        if process_group.count() > 1 and self.event is None:
            raise UserError(
                "stop() was called outside a callback. With several processes, call it in a "
                "callback: that is the only point where all processes agree to stop"
            )
        self.stop_requested = True

    def __call__(
        self, event: CallbackEvent, step: int, metrics: dict[str, float] | None = None
    ) -> None:
        """Calls the callbacks of an event.

        Args:
          event: The event.
          step: The step that it belongs to.
          metrics: Its metrics; none by default.
        """
        self.event = event
        values = FrozenMetrics({}) if metrics is None else metrics
        try:
            for function in self._functions[event]:
                function(CallbackContext(self._trainer, event, step, values))
        finally:
            self.event = None
        if self.has(event):  # all processes call them, and process 0 decides
            self.stop_requested = process_group.broadcast(self.stop_requested)
