"""XLA presets: which options a run takes, and which replace them."""

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from spmdtrain import RunConfig, UserError
from spmdtrain.sharding.placement import Placement, make_placement
from spmdtrain.step import functions as module
from spmdtrain.step.functions import describe_preset, step_options
from spmdtrain.xla.chips import CHIPS
from spmdtrain.xla.compiler import PRESETS, Flag, Parameters, merge_compiler_options, preset_flags

# XLA:CPU accepts both.
VECTORS, DEPTH = "xla_cpu_prefer_vector_width", "xla_cpu_parallel_codegen_split_count"


def test_each_preset_is_of_a_known_chip_and_each_flag_has_a_reason() -> None:
    assert {chip for chip, _ in PRESETS} <= set(CHIPS)
    for flags in PRESETS.values():
        assert len({flag.name for flag in flags}) == len(flags)
        assert all(flag.name.startswith("xla_") and flag.reason for flag in flags)


def test_a_preset_is_chosen_by_chip_and_placement_of_the_parameters() -> None:
    flags = preset_flags("TPU v5 lite", Parameters.REPLICATED)
    assert flags == PRESETS["v5e", Parameters.REPLICATED]
    assert preset_flags("TPU v5", Parameters.REPLICATED) != flags
    assert preset_flags("cpu", Parameters.REPLICATED) == ()


def test_other_options_replace_those_of_a_preset_and_unknown_ones_are_omitted() -> None:
    sharding = SingleDeviceSharding(jax.devices()[0])
    preset = {VECTORS: 128, DEPTH: 8, "xla_no_such_option": 1}
    options = merge_compiler_options([f"{DEPTH}=16"], {}, sharding, preset)
    assert options == {VECTORS: 128, DEPTH: 16}
    assert merge_compiler_options([], {VECTORS: 256}, sharding, preset) == {VECTORS: 256, DEPTH: 8}
    with pytest.raises(UserError, match="xla_no_such_option"):
        merge_compiler_options(["xla_no_such_option=1"], {}, sharding)


def test_a_run_takes_its_preset_unless_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def flags(kind: str, parameters: Parameters) -> tuple[Flag, ...]:
        assert kind == jax.devices()[0].device_kind
        value = 128 if parameters == Parameters.REPLICATED else 256
        return (Flag(VECTORS, value, "a test"),)

    def found(**options: str) -> tuple[dict[str, object], str]:
        config = RunConfig(**options)  # type: ignore[arg-type]
        placement: Placement = make_placement(config)
        chosen = step_options(config, placement)
        return dict(chosen), describe_preset(config, placement, chosen)

    monkeypatch.setattr(module, "preset_flags", flags)
    assert found() == ({VECTORS: 128}, f"XLA preset: {VECTORS}")
    assert found(strategy="fully_sharded")[0] == {VECTORS: 256}
    assert found(xla_preset="none") == ({}, "")
    assert found(strategy="one_device") == ({}, "")
