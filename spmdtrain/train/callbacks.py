"""Callbacks: functions and objects that a run calls at events, and their states."""

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError, did_you_mean, foreign
from spmdtrain.record.run_files import Split
from spmdtrain.trackers.base import Media
from spmdtrain.train.loop_checks import as_floats

# -- The states of callback objects, which checkpoints contain -------------------------------------


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


# -- Callbacks: functions and objects that a run calls at events -----------------------------------


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

    trainer: Any  # a Trainer or a Loop; this module cannot import them
    event: CallbackEvent
    step: int
    metrics: dict[str, float]
    """The metrics of the event; callbacks of `log` and `evaluation` may add others."""
    evaluates: bool = False
    """At `epoch_end`: whether an evaluation of the same step follows."""
    is_last: bool = False
    """At `epoch_end`: whether the run ends with the step."""

    def log(self, media: Mapping[str, Media]) -> None:
        """Logs media for the step of the event; see `Trainer.log`.

        Args:
          media: Name to `Image`, `Text`, `Histogram`, `Table` or `Figure`.
        """
        splits = {CallbackEvent.EVALUATION: Split.EVAL, CallbackEvent.FIT_END: Split.TEST}
        self.trainer.log(media, self.step, split=splits.get(self.event, Split.TRAIN))

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
        """Returns the computed metrics, then the added ones; raises `UserError` for non-numbers."""
        added = {name: x for name, x in self.items() if name not in self._computed}
        return self._computed | (as_floats(added, "the callback's") if added else {})


Callback = Callable[[CallbackContext], None]
CallbackFunctions: TypeAlias = Mapping[str, Callback | list[Callback]]
"""One function or several, by the name of a `CallbackEvent`."""
Callbacks: TypeAlias = CallbackFunctions | Sequence[Any]
"""`CallbackFunctions`, or a list of objects and `CallbackFunctions`. The methods of an object that
are named after events are called at these events; its state is saved if it has the methods
`state_dict` and `load_state_dict`."""


def by_event(callbacks: Callbacks) -> dict[CallbackEvent, list[Callback]]:
    """Returns the functions of every event.

    Raises:
      UserError: If an event does not exist, a callback is no function, or an object has no method
        named after an event.
    """
    found: dict[CallbackEvent, list[Callback]] = {event: [] for event in CallbackEvent}
    for each in listed_callbacks(callbacks):
        for name, given in (each if isinstance(each, Mapping) else _methods(each)).items():
            if name not in found:
                hint = did_you_mean(name, found)
                raise UserError(f"there is no event {name!r} for callbacks.{hint}")
            functions = given if isinstance(given, list) else [given]
            for function in functions:
                if not callable(function):
                    raise UserError(
                        f"callbacks[{name!r}] is a {type(function).__name__}: it must be a "
                        "function of the event, or a list of such functions"
                    )
            found[CallbackEvent(name)] += functions
    return found


def listed_callbacks(callbacks: Any) -> Sequence[Any]:
    """Returns callbacks as a list of objects and `CallbackFunctions`.

    Raises `UserError` if they are not `Callbacks`.
    """
    if isinstance(callbacks, Mapping):
        return [callbacks]
    if isinstance(callbacks, list | tuple):
        return callbacks
    raise UserError(
        f"callbacks is a {type(callbacks).__name__}: it must be a dictionary of events, for "
        'example {"log": f}, or a list of callback objects, for example [EarlyStopping()]. '
        f"The events are: {', '.join(CallbackEvent)}"
    )


def _methods(callback: Any) -> CallbackFunctions:
    """Returns the methods of a callback object by the name of their event."""
    if isinstance(callback, type):
        raise UserError(f"the callback {callback.__name__} is a class: give {callback.__name__}()")
    methods: dict[str, Any] = {str(name): getattr(callback, name, None) for name in CallbackEvent}
    if functions := {name: method for name, method in methods.items() if callable(method)}:
        return functions
    if any(kind.__module__.startswith("keras.") for kind in type(callback).__mro__):
        raise UserError(
            f"a callback is Keras' {type(callback).__name__}: Keras callbacks need a Keras model, "
            "Trainer.from_keras(model, callbacks=[...]); for other models spmdtrain has callbacks "
            "of its own, such as spmdtrain.EarlyStopping"
        )
    raise UserError(
        f"a callback is a {type(callback).__name__}, which has no method named after an event: "
        f"{', '.join(CallbackEvent)}. A function is given with its event: {{'log': f}}"
    )


class CallbackRunner:
    """Calls the callbacks of a trainer or loop, and records which event is being handled.

    Args:
      trainer: The trainer or loop that callbacks receive.
      state_at_steps: Whether the trainer has the state after each step (see `Backend.runs_steps`).

    Raises:
      UserError: If an event does not exist, or a callback is neither a function nor a callback
        object.
    """

    def __init__(self, trainer: Any, callbacks: Callbacks, *, state_at_steps: bool) -> None:
        self._trainer, self._state_at_steps = trainer, state_at_steps
        self._functions = by_event(callbacks)
        given = [] if isinstance(callbacks, Mapping) else callbacks
        self.states = CallbackStates([x for x in given if not isinstance(x, Mapping)])
        self.event: CallbackEvent | None = None
        """The event whose callbacks are running."""
        self.writes_into_model = any(getattr(each, "writes_into_model", False) for each in given)
        """Whether a callback writes the trained values into the user's model."""
        self.step = 0
        """The step of the last event."""
        self.stop_requested = False
        """Whether `stop` of the trainer or loop was called since the run began; the same in all
        processes."""

    def begin(self, *, from_step_zero: bool) -> None:
        """Forgets that a stop was requested.

        Args:
          from_step_zero: Whether a run begins, so that the objects get their initial states.

        Raises:
          UserError: If another process has callbacks of other events.
        """
        self._check_processes()
        self.stop_requested = False
        if from_step_zero:
            self.states.reset()

    def check_events(self, missing: set[str], what: str) -> None:
        """Raises `UserError` if a missing event has callbacks.

        Args:
          missing: The names of the events that do not exist.
          what: The object that does not have them.
        """
        for event in sorted(missing):
            if self.has(CallbackEvent(event)):
                have = ", ".join(each for each in CallbackEvent if each not in missing)
                raise UserError(f"{what} has no event {event!r} for callbacks, but has {have}")

    def has(self, event: CallbackEvent) -> bool:
        return bool(self._functions[event])

    @property
    def may_add_metrics(self) -> bool:
        """Whether a callback of the user runs in evaluations, where it may add metrics."""
        package = __name__.partition(".")[0] + "."
        functions = self._functions[CallbackEvent.EVALUATION]
        return any(not str(getattr(x, "__module__", "")).startswith(package) for x in functions)

    def _check_processes(self) -> None:
        """Raises `UserError` unless all processes have callbacks of the same events.

        All processes handle an event together.
        """
        events = [str(event) for event in CallbackEvent if self.has(event)]
        process_group.agree(
            "the list of events with callbacks",
            ", ".join(events) or "empty",
            "give all processes the same callbacks, and return at once in those that have nothing "
            "to do (jax.process_index())",
        )

    def check_readable(self) -> None:
        """Raises `UserError` in a callback of a step whose state is no longer the newest one."""
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
        self,
        event: CallbackEvent,
        step: int,
        metrics: dict[str, float] | None = None,
        *,
        evaluates: bool = False,
        is_last: bool = False,
    ) -> None:
        """Calls the callbacks of an event.

        Args:
          step: The step that the event belongs to.
          evaluates: Whether an evaluation of the step follows.
          is_last: Whether the run ends with the step.
        """
        self.step = step
        if not self.has(event):
            return
        self.event = event
        values = FrozenMetrics({}) if metrics is None else metrics
        try:
            for function in self._functions[event]:
                function(CallbackContext(self._trainer, event, step, values, evaluates, is_last))
        finally:
            self.event = None
        # All processes call them, and process 0 decides.
        self.stop_requested = process_group.broadcast(self.stop_requested)

    def with_added(
        self, event: CallbackEvent, step: int, computed: dict[str, float]
    ) -> dict[str, float]:
        """Calls the callbacks of an event that may add metrics; returns all, the added ones last.

        Raises `UserError` if one replaces a computed metric, or adds anything but numbers.
        """
        if not self.has(event):
            self.step = step
            return computed
        reported = AddableMetrics(computed)
        self(event, step, reported)
        return reported.with_added()
