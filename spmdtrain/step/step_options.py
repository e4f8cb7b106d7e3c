"""XLA options with which the steps of a run are compiled."""

from collections.abc import Mapping

from spmdtrain.config.run_config import RunConfig
from spmdtrain.sharding.placement import Placement
from spmdtrain.xla.compiler import (
    Flag,
    Parameters,
    Value,
    compiler_options,
    exact_options,
    merge_compiler_options,
    preset_flags,
)


def step_options(config: RunConfig, placement: Placement) -> dict[str, Value]:
    """Returns the XLA options for a step: the user's, and those that other options of the run need.

    Raises:
      UserError: If options contradict each other, or XLA rejects one of the user's.
    """
    platform = placement.devices[0].platform
    ours = compiler_options(config.collectives, platform, gathers=_gathers(placement))
    if config.exact is not None:
        ours |= exact_options(platform)
    flags = {flag.name: flag.value for flag in _flags(config, placement)}
    return merge_compiler_options(config.compiler_options, ours, placement.replicated, flags)


def describe_preset(config: RunConfig, placement: Placement, options: Mapping[str, Value]) -> str:
    """Returns the options that the preset has added, for the log; "" if there are none.

    `options` is the result of `step_options`.
    """
    given = {option.partition("=")[0] for option in config.compiler_options}
    names = [f.name for f in _flags(config, placement) if f.name in options and f.name not in given]
    return f"XLA preset: {', '.join(names)}" if names else ""


def _flags(config: RunConfig, placement: Placement) -> tuple[Flag, ...]:
    if config.xla_preset == "none" or len(placement.devices) == 1:
        return ()
    parameters = Parameters.SHARDED if _gathers(placement) else Parameters.REPLICATED
    return preset_flags(placement.devices[0].device_kind, parameters)


def _gathers(placement: Placement) -> bool:
    return placement.strategy.shards_params or placement.strategy.shards_optimizer
