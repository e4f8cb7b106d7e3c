"""Options of `Trainer`, `Trainer.fit` and `Loop` that replace fields of a configuration."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.sampling import Augment
from spmdtrain.errors import UserError, did_you_mean, field_meant
from spmdtrain.sharding.resolution import check_inherited
from spmdtrain.trackers.base import Tracker
from spmdtrain.trackers.run_trackers import check_trackers


def with_options(config: RunConfig, options: Mapping[str, Any], of: str) -> RunConfig:
    """Returns the configuration with some fields replaced.

    Args:
      config: The configuration to change.
      options: New values by field name.
      of: The name of the function or class that received `options`, for the error message.

    Raises:
      UserError: If an option is no field of `config`, or if the result is not valid.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    for name in options:
        if name not in fields:
            raise UserError(f"{of} has no option {name!r}.{did_you_mean(name, fields)}")
    config = dataclasses.replace(config, **options)
    check_inherited(config)
    return config


def validate_trainer_options(config: RunConfig, options: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration with the options of a `Trainer`, which has a built optimizer.

    Args:
      config: The configuration to change.
      options: New values by field name.

    Raises:
      UserError: If an option is unknown or not valid, or has an effect only before the model,
        the optimizer and the data are built (`learning_rate`, its scaling, `data_dir`).
    """
    instead = {
        "learning_rate": "give it to the optimizer, for example optimizer=optax.adam(0.001)",
        "data_dir": "give the data to fit",
    }
    for name, advice in instead.items():
        if name in options:
            raise UserError(f"{name} is for the build(config) of an experiment: {advice}")
    config = with_options(config, options, "Trainer")
    if config.learning_rate_scaling != "none" or config.learning_rate_table:
        raise UserError(
            "learning_rate_scaling and learning_rate_table have no effect in a Trainer, because "
            "its optimizer is already built: call config = resolve_config(config) first, and build "
            "the optimizer with config.learning_rate"
        )
    return config


def with_trackers(
    config: RunConfig, given: Sequence[Tracker | str] | None
) -> tuple[RunConfig, list[Tracker]]:
    """Returns the configuration with the named trackers, and those that are objects.

    Args:
      config: The configuration. Its `trackers` stay if objects alone are given.
      given: Names and objects; None for those of the configuration.

    Raises:
      UserError: If a name is unknown, or an object is no `Tracker`.
    """
    if given is None:
        return config, []
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UserError(
            f"trackers is {given!r}: it must be a list of names and Trackers, for example "
            '["tensorboard", "wandb"]'
        )
    names = tuple(each for each in given if isinstance(each, str))
    own = [each for each in given if not isinstance(each, str)]
    check_trackers(own)
    if names or not given:
        config = dataclasses.replace(config, trackers=names)  # type: ignore[arg-type]
    return config, own


REQUIRED: Any = object()
"""The default of `train` in `fit`, so that a wrong keyword is named before a missing one."""


def check_fit_arguments(train: Any, unknown: Mapping[str, Any], trainer: type) -> None:
    """Refuses keywords that `fit` does not have.

    Args:
      train: The training data.
      unknown: The unknown keywords.
      trainer: The class with `fit`.

    Raises:
      UserError: If there is a keyword, with a suggestion, or no training data.
    """
    parameters = inspect.signature(trainer.fit).parameters.values()  # type: ignore[attr-defined]
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    of_trainer = {field.name for field in dataclasses.fields(RunConfig)}
    of_trainer |= set(inspect.signature(trainer).parameters)
    for name in unknown:
        meant = name if name in of_trainer else field_meant(name, of_trainer.difference(known))
        hint = f" Give {meant!r} to the Trainer." if meant else did_you_mean(name, known)
        raise UserError(f"fit has no option {name!r}.{hint}")
    if train is REQUIRED:
        raise UserError("fit needs training data: fit(train, steps=...), or epochs=...")


def with_totals(
    config: RunConfig,
    epochs: int | None,
    steps: int | None,
    global_batch_size: int | None,
    batch_size_per_device: int | None,
) -> RunConfig:
    """Returns a configuration with the keywords of `Trainer.fit` in place of its own."""
    if epochs is not None or steps is not None:
        config = dataclasses.replace(config, epochs=epochs, steps=steps)
    if global_batch_size is not None or batch_size_per_device is not None:
        config = dataclasses.replace(
            config,
            global_batch_size=global_batch_size,
            batch_size_per_device=batch_size_per_device,
        )
    return config


def check_augment(augment: Augment | None, config: RunConfig) -> None:
    """Raises `UserError` if examples that are augmented are to stay on the devices."""
    if augment is not None and config.data_on_device:
        raise UserError(
            "data_on_device and augment exclude each other, because augment changes the examples "
            "on the host"
        )
