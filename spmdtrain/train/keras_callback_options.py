"""The Keras callbacks that a run can have, and the constructor options that it uses."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from spmdtrain.adapters.keras import import_keras
from spmdtrain.adapters.keras_internals import profiles_steps
from spmdtrain.errors import UserError


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
