"""Keras callbacks within a run: early stopping, learning rates, files."""

import dataclasses
import hashlib
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.adapters.base import Variables
from spmdtrain.distributed import process_group
from spmdtrain.distributed.first_call import call_together
from spmdtrain.errors import UserError
from spmdtrain.keras.internals import profiles_steps
from spmdtrain.keras.model import KerasOptimizer, import_keras
from spmdtrain.record.validation import check
from spmdtrain.step import hyperparameters
from spmdtrain.step.metrics import OF_EPOCH
from spmdtrain.step.state import TrainState
from spmdtrain.train.callbacks import CallbackContext
from spmdtrain.tree import path_name

if TYPE_CHECKING:
    from spmdtrain.trackers.tensorboard import EpochEvents

_CHANGES_RATE = ("ReduceLROnPlateau", "LearningRateScheduler")
_BEGINS_EPOCHS = ("LearningRateScheduler", "LambdaCallback")
_WRITES_FILES = ("ModelCheckpoint", "CSVLogger")
_BUILT_IN = ("TerminateOnNaN", "TensorBoard")


class KerasCallbacks:
    """Calls Keras callbacks at the events of a run, with the model and optimizer of the step.

    The callbacks are Keras' own objects, called in their order at the end of an epoch, after the
    evaluation of its last step if there is one. Before a callback that reads the model or its
    optimizer is called, these get the values of the step. A learning rate or values that a callback
    assigns replace the values in the state. At the end of a fit, the model and its optimizer have
    the trained values.

    Args:
      optimizer: The model's Keras optimizer; None if another one trains.
      directions: Whether the lowest or the highest value of a metric is the best.

    Raises:
      UserError: If a callback or one of its options cannot be used.
    """

    name = "keras"

    writes_into_model = True

    def __init__(
        self,
        model: Any,
        optimizer: KerasOptimizer | None,
        callbacks: Sequence[Any],
        directions: Mapping[str, str],
    ) -> None:
        self._model, self._optimizer, self._directions = model, optimizer, directions
        self._given = list(callbacks)
        _check_saved_optimizer(model, optimizer, callbacks)
        kinds = [callback_kind(callback) for callback in callbacks]
        if set(_CHANGES_RATE) <= set(kinds):
            raise UserError(
                f"{' and '.join(_CHANGES_RATE)} both set the learning rate of the next epoch: give "
                "one of them"
            )
        self._active = {
            f"{kind}_{number}": callback
            for number, (kind, callback) in enumerate(zip(kinds, callbacks, strict=True))
            if kind not in _BUILT_IN
        }
        self._epoch_means: dict[str, float] | None = None  # of an epoch that is not reported yet
        self._epoch = 0  # the number of epochs that have ended
        self._epoch_step = 0  # the step with which the last one has ended
        self._saved: dict[str, int] = {}  # the last step that `save_freq` has counted, by callback
        self._events: list[EpochEvents] = []  # of this fit, in process 0
        self._begun = False  # whether `on_epoch_begin` was called for the epoch in progress
        self._is_last = False  # whether the run ends with the epoch that is not reported yet
        self._logs: dict[str, float] = {}  # of the last reported epoch

    # -- events --------------------------------------------------------------------------------

    def fit_start(self, event: CallbackContext) -> None:
        """Begins the training of the callbacks; raises `UserError` if the run cannot have one."""
        from spmdtrain.trackers.tensorboard import EpochEvents

        self._check_run(event.trainer.config)
        self._events = [
            EpochEvents(callback.log_dir)
            for callback in self._given
            if _kind(callback) == "TensorBoard"
            and not _is_in_workdir(callback, event.trainer)
            and process_group.is_chief()
        ]
        state = self.state_dict()
        self._model.stop_training = False
        for name, callback in self._active.items():
            callback.set_model(self._model)
            callback.set_params({"verbose": 0, "epochs": event.trainer.config.epochs})
            if _kind(callback) in _CHANGES_RATE:
                self._check_changeable_rate(callback, event.trainer.state.opt_state)
            if _kind(callback) == "CSVLogger" and event.step:
                callback.append = True  # the rows of the epochs before a resume
            if _reads_values(callback):
                self._copy_to_model(event)
            before = self._assignable()
            if self._runs_here(name):
                callback.on_train_begin({})
            if _kind(callback) == "LambdaCallback" and not event.step:
                self._keep_if_assigned(event, callback, before)
        if event.step:  # `on_train_begin` has reset what a checkpoint has restored
            self.load_state_dict(state)
        else:
            self._epoch, self._begun, self._logs = 0, False, {}
            self._epoch_step, self._saved = 0, {}
        if not self._begun and self._epoch_means is None:
            self._begin_epoch(event)

    def step(self, event: CallbackContext) -> None:
        """Saves the files of `save_freq`.

        Also reports an epoch whose evaluation was interrupted by a signal and is not resumed.
        """
        if self._epoch_means is not None:
            self._end_epoch(event, {})
        for name, callback in self._active.items():
            frequency: Any = getattr(callback, "save_freq", "epoch")
            if frequency == "epoch" or event.step - self._saved.get(name, 0) < frequency:
                continue
            self._saved[name] = event.step
            self._copy_to_model(event)
            if self._runs_here(name):
                batch = event.step - self._epoch_step
                path = str(callback.filepath).format(epoch=self._epoch + 1, batch=batch)
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                save = "save_weights" if callback.save_weights_only else "save"
                getattr(self._model, save)(path, overwrite=True)
                if callback.verbose > 0:
                    event.trainer.terminal.line(f"epoch {self._epoch + 1}: model saved to {path}")

    def epoch_end(self, event: CallbackContext) -> None:
        """Reports an epoch, unless its evaluation follows."""
        self._epoch_means = {n: x for n, x in event.metrics.items() if n not in OF_EPOCH}
        self._epoch = int(event.metrics["epoch"])  # that of the history
        self._epoch_step = event.step
        self._begun, self._is_last = False, event.is_last
        if not event.evaluates:
            self._end_epoch(event, {})

    def evaluation(self, event: CallbackContext) -> None:
        """Reports an epoch with the metrics of the validation."""
        if self._epoch_means is not None:
            self._end_epoch(event, {f"val_{name}": x for name, x in event.metrics.items()})

    def fit_end(self, event: CallbackContext) -> None:
        """Assigns the trained values to the model, and ends the training of the callbacks."""
        if self._epoch_means is not None:
            self._end_epoch(event, {})
        trainer = event.trainer
        optimizer, state = self._optimizer, trainer.state
        if optimizer is not None and state is not None and optimizer.averages_params:
            trainer.state = self._averaged(optimizer, state)
        self._copy_to_model(event)
        for events in self._events:
            events.close()
        for name, callback in self._active.items():
            before = self._assignable()
            if self._runs_here(name):
                callback.on_train_end(dict(self._logs))
            if _kind(callback) == "LambdaCallback" and trainer.state is not None:
                self._keep_if_assigned(event, callback, before)
            if getattr(callback, "restore_best_weights", False) and trainer.state is not None:
                trainer.state = self._with_values_of_model(trainer.state)

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the callbacks as JSON values."""
        states = {
            # Some attributes exist only after `on_train_begin`.
            name: {key: _as_json(getattr(callback, key, None)) for key in _states_of(callback)}
            for name, callback in self._active.items()
        }
        return {
            "epoch": self._epoch,
            "epoch_step": self._epoch_step,
            "saved": self._saved,
            "begun": self._begun,
            # A signal may interrupt the evaluation for which the epoch waits.
            "epoch_means": _as_json(self._epoch_means),
            "logs": _as_json(self._logs),
            "callbacks": states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved state; raises `UserError` if it is of other callbacks."""
        check(state, dict, "keras callbacks")
        states = state["callbacks"]
        if states.keys() != self._active.keys():
            raise UserError(
                f"the checkpoint has the Keras callbacks {sorted(states)}, and this run has "
                f"{sorted(self._active)}: give the same"
            )
        self._epoch, self._begun = state["epoch"], state["begun"]
        self._epoch_step, self._saved = state["epoch_step"], state["saved"]
        self._epoch_means, self._logs = map(_from_json, (state["epoch_means"], state["logs"]))
        for name, callback in self._active.items():
            for key in _states_of(callback):
                setattr(callback, key, _from_json(states[name][key]))

    # -- calls ---------------------------------------------------------------------------------

    def _end_epoch(self, event: CallbackContext, validation: Mapping[str, float]) -> None:
        """Reports an epoch to the callbacks, and begins the next one."""
        assert self._epoch_means is not None
        # In Keras' order. Callbacks add the learning rate to it, for the callbacks after them.
        logs = dict(sorted(self._epoch_means.items())) | dict(sorted(validation.items()))
        after_evaluation = [name for name, x in self._active.items() if _needs_validation(x)]
        config = event.trainer.config
        # With these options, an epoch may end without an evaluation.
        at_other_steps = config.eval_every_steps is not None or config.eval_at_checkpoints
        if after_evaluation and not validation and not at_other_steps:
            raise UserError(
                f"{_kind(self._active[after_evaluation[0]])} uses a metric 'val_...', but the end "
                "of an epoch has no evaluation: pass validation to fit, or use a metric of the "
                f"training ({', '.join(logs)})"
            )
        names = [name for name in self._active if validation or name not in after_evaluation]
        rate = hyperparameters.learning_rate(event.trainer.state.opt_state)
        trained = {} if rate is None else {"learning_rate": float(rate)}
        for events in self._events:
            events.add(self._epoch - 1, logs | trained)
        self._epoch_means, self._logs = None, dict(logs)
        self._call(event, names, "on_epoch_end", self._epoch - 1, logs)
        if not self._is_last and not self._model.stop_training:
            self._begin_epoch(event)

    def _begin_epoch(self, event: CallbackContext) -> None:
        """Calls `on_epoch_begin` of the callbacks that have one."""
        self._begun = True
        names = [name for name, x in self._active.items() if _kind(x) in _BEGINS_EPOCHS]
        self._call(event, names, "on_epoch_begin", self._epoch, {})

    def _call(
        self,
        event: CallbackContext,
        names: Sequence[str],
        hook: str,
        epoch: int,
        logs: dict[str, float],
    ) -> None:
        """Calls a method of callbacks and applies what they assign or request."""
        for name in names:
            callback = self._active[name]
            changes_rate = _kind(callback) in _CHANGES_RATE
            if changes_rate:
                trainer = event.trainer
                old = hyperparameters.changeable_learning_rate(trainer.state.opt_state)
                self._model.optimizer.learning_rate = old
            if logs:
                _check_monitor(callback, logs)
            if getattr(callback, "mode", "") == "auto":
                callback.mode = self._mode(callback)
            if _reads_values(callback):
                self._copy_to_model(event)
            before = self._assignable()
            if self._runs_here(name):
                getattr(callback, hook)(epoch, logs)
            if _kind(callback) == "LambdaCallback":
                self._keep_if_assigned(event, callback, before)
            if changes_rate:
                new = process_group.broadcast(float(self._model.optimizer.learning_rate))
                if new != old:
                    trainer.state = hyperparameters.with_learning_rate(trainer.state, new)
                    trainer.terminal.line(f"learning rate {old:g} -> {new:g}: {_kind(callback)}")
        if self._model.stop_training:
            event.trainer.stop()

    def _copy_to_model(self, event: CallbackContext) -> None:
        """Assigns the values of the step to the model and its optimizer."""
        assert event.trainer.model is self._model  # the property assigns the values to it
        if self._optimizer is not None and event.trainer.state is not None:
            self._optimizer.assign_state(event.trainer.state.opt_state)

    def _assignable(self) -> list[Any]:
        """Returns the arrays of the model and its optimizer, which an assignment replaces."""
        optimizer = [] if self._optimizer is None else self._model.optimizer.variables
        return [v.value for v in (*self._model.weights, *optimizer)]

    def _keep_if_assigned(self, event: CallbackContext, callback: Any, before: list[Any]) -> None:
        """Continues with the values that a callback has assigned, the same in all processes."""
        after = self._assignable()
        replaced = [x is not y for x, y in zip(before, after, strict=True)]
        count = len(self._model.weights)  # those of the optimizer follow
        assigned = process_group.gather((any(replaced[:count]), any(replaced)))
        of_model, of_any = (any(each) for each in zip(*assigned, strict=True))
        if not of_any:
            return
        trainer, kind = event.trainer, _kind(callback)
        if of_model and trainer.config.ema_decay is not None:
            raise UserError(
                f"{kind} assigns weights, and with ema_decay={trainer.config.ema_decay:g} it finds "
                "the moving average in the model instead of the parameters: leave ema_decay out"
            )
        old = hyperparameters.learning_rate(trainer.state.opt_state)
        if process_group.count() > 1:
            values = {str(number): np.asarray(x) for number, x in enumerate(after)}
            digests = {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in values.items()}
            process_group.agree(
                "", {f"value that {kind} has left in variable {n}": x for n, x in digests.items()}
            )
        state = self._with_values_of_model(trainer.state) if of_model else trainer.state
        if self._optimizer is not None:
            opt_state = jax.tree.map(_like, state.opt_state, self._optimizer.read_state())
            state = dataclasses.replace(state, opt_state=opt_state)
        trainer.state = state
        new = hyperparameters.learning_rate(state.opt_state)
        if old is not None and new is not None and float(old) != float(new):
            trainer.terminal.line(f"learning rate {float(old):g} -> {float(new):g}: {kind}")

    @staticmethod
    def _averaged(optimizer: KerasOptimizer, state: TrainState) -> TrainState:
        """Returns a state with copies of the moving averages as its parameters."""

        def average(params: Any, opt_state: Any) -> Any:
            return jax.tree.map(jnp.copy, optimizer.average(params, opt_state))

        places = jax.tree.map(lambda x: x.sharding, state.params)
        program = jax.jit(average, out_shardings=places)
        params = call_together(program, state.params, state.opt_state)
        return dataclasses.replace(state, params=params)

    def _with_values_of_model(self, state: TrainState) -> TrainState:
        """Returns a state with the values that a callback has assigned to the model."""
        values = {v.path: np.array(v.value) for v in self._model.weights}

        def place(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            return _like(leaf, values[path_name(path)])

        of_model = {name: getattr(state, name) for name in Variables._fields}
        placed = {n: jax.tree_util.tree_map_with_path(place, x) for n, x in of_model.items()}
        return dataclasses.replace(state, **placed)

    def _runs_here(self, name: str) -> bool:
        """Returns whether this process calls a callback; only process 0 writes files."""
        return _kind(self._active[name]) not in _WRITES_FILES or process_group.rank() == 0

    def _mode(self, callback: Any) -> str:
        """Returns the direction of a metric, which Keras finds only in its own training loop."""
        metric = callback.monitor.removeprefix("val_")
        if metric not in self._directions and not metric.endswith("_loss"):
            raise UserError(
                f"{_kind(callback)}: it is not known whether a low or a high {metric!r} is better: "
                "give mode='min' or mode='max'"
            )
        return self._directions.get(metric, "min")

    def _check_changeable_rate(self, callback: Any, opt_state: Any) -> None:
        """Checks that a callback can change the learning rate, which is a number in the state."""
        try:
            hyperparameters.changeable_learning_rate(opt_state)
        except UserError as error:
            if self._optimizer is None:
                raise UserError(f"{_kind(callback)}: {error}") from None
            raise UserError(
                f"{_kind(callback)} changes the learning rate, and a schedule of the optimizer "
                f"{self._model.optimizer.name!r} computes it: give the optimizer a number, or "
                "leave the callback out"
            ) from None

    def _check_run(self, config: Any) -> None:
        for callback in self._given:
            kind = _kind(callback)
            if config.evaluated_by == "evaluator" and _needs_validation(callback):
                raise UserError(
                    f"{kind} uses a metric 'val_...' and needs the evaluations of the training, "
                    "and evaluated_by is 'evaluator': use a metric of the training, or leave "
                    "evaluated_by out"
                )
            restores = getattr(callback, "restore_best_weights", False)
            if restores and config.ema_decay is not None:
                raise UserError(
                    f"{kind}: restore_best_weights keeps the values of the model, which with "
                    f"ema_decay={config.ema_decay:g} are the moving average and not the "
                    "parameters: leave one of them out"
                )
            if restores and config.workdir is not None:
                raise UserError(
                    "EarlyStopping: restore_best_weights keeps the values in memory, and a resumed "
                    "run would have lost them: leave it out; the checkpoint with the best "
                    "evaluation is kept (keep_best), and trainer.restore(which='best') loads it"
                )


def _kind(callback: Any) -> str:
    return type(callback).__name__  # checked by `callback_kind`


def _like(leaf: jax.Array, value: np.ndarray) -> jax.Array:
    """Returns a value with the sharding of an array of the state."""
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])


def _reads_values(callback: Any) -> bool:
    """Returns whether a callback may read the values of the model or its optimizer."""
    keeps = getattr(callback, "restore_best_weights", False)
    return bool(keeps or _kind(callback) in ("ModelCheckpoint", "LambdaCallback"))


def _check_saved_optimizer(
    model: Any, optimizer: KerasOptimizer | None, callbacks: Sequence[Any]
) -> None:
    """Checks that the files of `ModelCheckpoint` hold the optimizer that trains, or none."""
    saves = any(type(each).__name__ == "ModelCheckpoint" for each in callbacks)
    if saves and optimizer is None and model.optimizer is not None:
        raise UserError(
            f"ModelCheckpoint: its files would hold the optimizer {model.optimizer.name!r} of "
            "model.compile, and another one trains: compile the model with optimizer=None, or do "
            "not pass optimizer"
        )


def _needs_validation(callback: Any) -> bool:
    """Returns whether a callback reads a metric of the validation."""
    if not hasattr(callback, "monitor"):
        return False
    named = "{val_" in str(getattr(callback, "filepath", ""))
    watches = _kind(callback) != "ModelCheckpoint" or callback.save_best_only
    return bool(named or (watches and callback.monitor.startswith("val_")))


def _check_monitor(callback: Any, logs: Mapping[str, float]) -> None:
    """Checks that the metric exists that a callback watches; Keras only warns."""
    watches = hasattr(callback, "monitor") and getattr(callback, "save_best_only", True)
    if watches and callback.monitor not in logs:
        raise UserError(
            f"{_kind(callback)}: there is no metric {callback.monitor!r}: there are "
            f"{', '.join(logs)}. Metrics that are not means are computed for the validation data "
            "only, as 'val_...'"
        )


def _is_in_workdir(callback: Any, trainer: Any) -> bool:
    """Returns whether the run writes event files to the folder of a `TensorBoard` callback."""
    if (workdir := trainer.config.workdir) is None:
        return False
    # "logs" is the default, which the workdir replaces.
    return str(callback.log_dir).rstrip("/") in (
        *("logs", workdir.rstrip("/")),
        f"{workdir.rstrip('/')}/tensorboard",
    )


def _states_of(callback: Any) -> tuple[str, ...]:
    return MAPPED_CALLBACKS[_kind(callback)].state


def _as_json(value: Any) -> Any:
    """Returns a number or metrics as JSON values; numbers that are not finite become names."""
    if isinstance(value, Mapping):
        return {name: _as_json(x) for name, x in value.items()}
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else str(float(value))


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _from_json(x) for name, x in value.items()}
    return float(value) if isinstance(value, str) else value


# -- The Keras callbacks that a run can have, and the constructor options that it uses -------------


@dataclass(frozen=True)
class MappedCallback:
    """A class of Keras callbacks in a run.

    Attributes:
      options: The constructor parameters that have the same effect as in Keras.
      refused: Parameters that must have their default, and what to use instead.
      state: The attributes that decide what the callback does next; they are saved in checkpoints.
    """

    options: frozenset[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()


_WATCHES = frozenset({"monitor", "mode", "verbose"})
_HOOKS = ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end")
_EACH_STEP = "for each step pass callbacks=[{'log': f}] and log_every=1"
MAPPED_CALLBACKS: Mapping[str, MappedCallback] = {
    "EarlyStopping": MappedCallback(
        _WATCHES
        | {"min_delta", "patience", "baseline", "restore_best_weights", "start_from_epoch"},
        state=("best", "wait", "best_epoch", "stopped_epoch"),
    ),
    "ReduceLROnPlateau": MappedCallback(
        _WATCHES | {"factor", "patience", "min_delta", "cooldown", "min_lr"},
        state=("best", "wait", "cooldown_counter"),
    ),
    "ModelCheckpoint": MappedCallback(
        _WATCHES
        | {"filepath", "save_best_only", "save_weights_only", "initial_value_threshold"}
        | {"save_freq"},
        state=("best",),
    ),
    "LearningRateScheduler": MappedCallback(frozenset({"schedule", "verbose"})),
    "CSVLogger": MappedCallback(frozenset({"filename", "separator", "append"})),
    "LambdaCallback": MappedCallback(
        frozenset(_HOOKS), dict.fromkeys(("on_train_batch_begin", "on_train_batch_end"), _EACH_STEP)
    ),
    # Every run ends with an error at a loss or a state that is NaN or infinite.
    "TerminateOnNaN": MappedCallback(frozenset({"raise_error"})),
    # Keras calls `write_graph` "not supported".
    "TensorBoard": MappedCallback(
        frozenset({"log_dir", "write_graph"}),
        {
            "histogram_freq": "pass callbacks that log a Histogram (docs/trackers.md)",
            "write_images": "pass callbacks that log an Image (docs/trackers.md)",
            "write_steps_per_second": "leave it out: examples_per_second is written",
            "update_freq": "leave it out, and pass log_every for the steps between two points",
            "profile_batch": "leave it out, and pass profile_steps",
            "embeddings_freq": "leave it out",
            "embeddings_metadata": "leave it out",
        },
    ),
}


def callback_kind(callback: Any) -> str:
    """Returns the name of the class of a Keras callback, one of `MAPPED_CALLBACKS`.

    Raises `UserError` if it is of another class, or has an option that a run does not use.
    """
    kind = type(callback).__name__
    if kind not in MAPPED_CALLBACKS or type(callback) is not getattr(
        import_keras().callbacks, kind
    ):
        if kind == "BackupAndRestore":
            raise UserError(
                "the Keras callback BackupAndRestore cannot be used: leave it out, and pass "
                f"workdir={str(callback.backup_dir)!r}; a run with a workdir saves and resumes"
            )
        raise UserError(
            f"the Keras callback {kind} cannot be used: {', '.join(MAPPED_CALLBACKS)} can; write "
            "another as an object with methods named after events (docs/callbacks.md)"
        )
    if kind == "LambdaCallback":  # its other hooks are keyword arguments
        own = [name for name in vars(callback) if name.startswith("on_")]
        if unknown := [name for name in own if name not in _HOOKS]:
            raise UserError(
                f"LambdaCallback: {unknown[0]} cannot be used: {', '.join(_HOOKS)} can; "
                f"{_EACH_STEP}"
            )
        return kind
    if kind == "ModelCheckpoint" and callback.save_freq != "epoch":
        _check_save_freq(callback)
    parameters = inspect.signature(type(callback)).parameters
    for name, advice in MAPPED_CALLBACKS[kind].refused.items():
        if name == "profile_batch":  # not an attribute
            value, default = profiles_steps(callback), False
        else:
            value, default = getattr(callback, name), parameters[name].default
        if value != default:
            raise UserError(f"{kind}: {name}={value!r} cannot be used: {advice}")
    return kind


def _check_save_freq(callback: Any) -> None:
    """Raises `UserError` if a file that is saved every N steps would need metrics of the step."""
    names = {name for _, name, _, _ in Formatter().parse(str(callback.filepath)) if name}
    if callback.save_best_only or names - {"epoch", "batch"}:
        raise UserError(
            f"ModelCheckpoint: save_freq={callback.save_freq} saves between the ends of epochs, "
            "where metrics are not known: leave save_best_only out, name {epoch} and {batch} alone "
            "in filepath, or leave save_freq out"
        )
