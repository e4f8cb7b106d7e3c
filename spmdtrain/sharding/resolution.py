"""Resolution of a configuration: its batch size and learning rate on the devices of a run."""

import dataclasses
from typing import TypeVar

from spmdtrain.config.run_config import DEFAULT_GLOBAL_BATCH_SIZE, RunConfig
from spmdtrain.errors import UserError

Config = TypeVar("Config", bound=RunConfig)


def check_inherited(config: RunConfig) -> None:
    """Runs the checks of `RunConfig`, which the class of a configuration may override.

    An experiment's `Config` may define `__post_init__` without `super().__post_init__()`. The
    functions that begin a run therefore call this one. Of an experiment's own fields it checks only
    the size of integers.
    """
    RunConfig.__post_init__(config)


def resolve(config: Config, *, batch_shards: int) -> Config:
    """Returns the configuration with batch size and learning rate computed for the devices.

    In the result `resolved_batch_size` is known, `batch_size_per_device` is None, and
    `learning_rate` is scaled.

    Raises:
      UserError: If the configuration is not valid, or if the global batch does not divide over
        devices and microbatches and `uneven_batch` is `refuse`.
    """
    check_inherited(config)
    if config.batch_size_per_device is not None:
        batch = config.batch_size_per_device * batch_shards
    else:
        batch = config.global_batch_size or DEFAULT_GLOBAL_BATCH_SIZE
    config = dataclasses.replace(config, global_batch_size=batch, batch_size_per_device=None)
    pads = config.uneven_batch == "pad"
    if not pads and batch % batch_shards:
        raise UserError(
            f"global_batch_size is {batch}: it does not divide over {batch_shards} devices "
            f"({batch} = {batch // batch_shards} * {batch_shards} + {batch % batch_shards}); "
            f"{max(1, batch // batch_shards) * batch_shards} would; uneven_batch=pad pads "
            "the batch, with rows that devices compute for nothing (not supported by Loop)"
        )
    parts = batch_shards * config.microbatches
    if not pads and batch % parts:
        raise UserError(
            f"global_batch_size is {batch}: it does not divide over {batch_shards} devices and "
            f"{config.microbatches} microbatches ({batch} = {batch // parts} * {parts} + "
            f"{batch % parts}); {max(1, batch // parts) * parts} would; "
            "uneven_batch=pad pads the batch, with rows that devices compute for nothing (not "
            "supported by Loop)"
        )
    return dataclasses.replace(
        config,
        learning_rate=scale_learning_rate(config),
        learning_rate_scaling="none",
        learning_rate_base_batch_size=None,
        learning_rate_table={},
    )


def scale_learning_rate(config: RunConfig) -> float | None:
    """Returns the learning rate for the configured `global_batch_size`, by table or by scaling.

    Raises:
      UserError: If table and scaling are both set, if the table has no entry for the batch size,
        or if scaling lacks `learning_rate` or `learning_rate_base_batch_size`.
    """
    batch = config.resolved_batch_size
    if config.learning_rate_table:
        if config.learning_rate_scaling != "none":
            raise UserError(
                "learning_rate_table and learning_rate_scaling are both set: give one of the two"
            )
        sizes = [size for size in config.learning_rate_table if size <= batch]
        if not sizes:
            raise UserError(
                f"learning_rate_table begins at batch size {min(config.learning_rate_table)}: "
                f"it has no learning rate for a global batch of {batch}"
            )
        return config.learning_rate_table[max(sizes)]
    if config.learning_rate_scaling == "none":
        return config.learning_rate
    if config.learning_rate is None or config.learning_rate_base_batch_size is None:
        raise UserError(
            f"learning_rate_scaling is {config.learning_rate_scaling}: it needs learning_rate and "
            "learning_rate_base_batch_size, the batch size for which that rate was chosen"
        )
    ratio = batch / config.learning_rate_base_batch_size
    return config.learning_rate * (
        ratio if config.learning_rate_scaling == "linear" else ratio**0.5
    )
