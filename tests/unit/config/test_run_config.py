import dataclasses
import functools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from spmdtrain import Loop
from spmdtrain.config.options import (
    CollectiveOptions,
    MeshSpec,
    ParameterServerOptions,
    ShardingOptions,
)
from spmdtrain.config.run_config import Purpose, RunConfig, config_as_json, derive_seed, own_code
from spmdtrain.errors import UserError
from spmdtrain.sharding.mesh import resolve, scale_learning_rate

settings = hypothesis.settings(max_examples=200, deadline=None, derandomize=True)


# --- How long a run is ---


@pytest.mark.parametrize(
    ("epochs", "examples", "batch", "steps"),
    [
        (1, 100, 10, 10),
        (1, 101, 10, 11),
        (2, 101, 10, 21),  # not 22: a batch that an epoch ends in belongs to the next one too
        (3, 5, 32, 1),
        (7, 5, 32, 2),
        (10, 1, 1, 10),
        (3, 10**9, 7, 428_571_429),
    ],
)
def test_total_steps_are_the_examples_of_all_epochs_over_the_batch_rounded_up(
    epochs: int, examples: int, batch: int, steps: int
) -> None:
    assert RunConfig(epochs=epochs, global_batch_size=batch).total_steps(examples) == steps


def test_steps_are_a_total_whatever_the_data() -> None:
    config = RunConfig(steps=17, global_batch_size=8)
    assert (config.total_steps(1), config.total_steps(10**6)) == (17, 17)


def test_the_batch_size_of_a_configuration_that_is_not_resolved_is_refused() -> None:
    with pytest.raises(UserError, match="resolve_config"):
        RunConfig(epochs=1).total_steps(100)


def test_a_run_without_a_length_is_refused() -> None:
    with pytest.raises(UserError, match="epochs or steps"):
        RunConfig(global_batch_size=8).total_steps(100)


@pytest.mark.slow
@settings
@hypothesis.given(st.integers(1, 200), st.integers(1, 300), st.integers(1, 6))
def test_epoch_e_ends_at_the_step_that_holds_its_last_example(
    examples: int, batch: int, epochs: int
) -> None:
    config = RunConfig(epochs=epochs, global_batch_size=batch)
    total = config.total_steps(examples)
    # Counted out along the stream: the steps whose batches hold an epoch's last example.
    ends = {position // batch + 1 for position in range(examples - 1, total * batch, examples)}
    assert {step for step in range(1, total + 1) if config.ends_epoch(step, examples)} == ends
    assert total == math.ceil(epochs * examples / batch)


# --- Cadences ---


def steps_where(chosen: Any, upto: int) -> list[int]:
    return [step for step in range(1, upto + 1) if chosen(step)]


def test_by_default_a_run_in_epochs_evaluates_and_saves_where_they_end() -> None:
    config = RunConfig(epochs=3, global_batch_size=4)
    assert steps_where(lambda step: config.evaluates_at(step, 10), 8) == [3, 5, 8]
    assert steps_where(lambda step: config.saves_at(step, 10), 8) == [3, 5, 8]


def test_by_default_a_run_in_steps_evaluates_each_epoch_and_saves_each_500_steps() -> None:
    config = RunConfig(steps=1200, global_batch_size=4)
    assert steps_where(lambda step: config.evaluates_at(step, 2000), 1200) == [500, 1000]
    assert steps_where(lambda step: config.evaluates_at(step, 1600), 1200) == [400, 800, 1200]
    assert steps_where(lambda step: config.saves_at(step, 1600), 1200) == [500, 1000]


def test_a_cadence_that_is_given_takes_the_place_of_the_default() -> None:
    config = RunConfig(epochs=3, global_batch_size=4, eval_every_steps=3, checkpoint_every_steps=4)
    assert steps_where(lambda step: config.evaluates_at(step, 10), 8) == [3, 6]
    assert steps_where(lambda step: config.saves_at(step, 10), 8) == [4, 8]


def test_saves_by_seconds_take_the_place_of_those_by_default_alone() -> None:
    seconds = RunConfig(epochs=3, global_batch_size=4, checkpoint_every_seconds=60)
    assert steps_where(lambda step: seconds.saves_at(step, 10), 8) == []
    both = dataclasses.replace(seconds, checkpoint_every_steps=7)
    assert steps_where(lambda step: both.saves_at(step, 10), 8) == [7]


def test_the_first_and_the_last_step_are_logged_and_each_tenth() -> None:
    config = RunConfig()
    assert steps_where(lambda step: config.logs_at(step, 25), 25) == [1, 10, 20, 25]
    third = RunConfig(log_every=3)
    assert steps_where(lambda step: third.logs_at(step, 7), 7) == [1, 3, 6, 7]


def test_the_steps_to_profile_are_a_range() -> None:
    assert RunConfig().profile_range() is None
    assert RunConfig(profile_steps="5:10").profile_range() == (5, 10)
    assert RunConfig(profile_steps="7:7").profile_range() == (7, 7)


@pytest.mark.parametrize("value", ["5", "5:", ":5", "10:5", "0:5", "-1:5", "a:b", "1:2:3", ""])
def test_a_range_to_profile_that_is_none_is_refused_as_it_was_written(value: str) -> None:
    with pytest.raises(UserError, match=f"profile_steps is {value!r}"):
        RunConfig(profile_steps=value)


# --- Values that no run could have ---


def refusal(**fields: Any) -> str:
    with pytest.raises(UserError) as caught:
        RunConfig(**fields)
    return str(caught.value)


def test_the_defaults_pass() -> None:
    RunConfig()
    RunConfig(keep_best=0, data_threads=0, learning_rate=0.0, epochs=1)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize(
    "name",
    [
        "global_batch_size",
        "batch_size_per_device",
        "learning_rate_base_batch_size",
        "cpu_devices",
        "log_every",
        "eval_every_steps",
        "checkpoint_every_steps",
        "checkpoint_every_seconds",
        "keep_latest",
    ],
)
def test_what_must_be_above_zero_is_named_with_its_value(name: str, value: float) -> None:
    assert f"{name} is {value}: it must be" in refusal(**{name: value})


@pytest.mark.parametrize("name", ["epochs", "steps", "keep_best", "data_threads"])
def test_what_may_be_zero_may_not_be_less(name: str) -> None:
    assert f"{name} is -1: it must be 0 or more" in refusal(**{name: -1})


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, -math.inf])
def test_a_learning_rate_is_a_finite_number_not_below_zero(value: float) -> None:
    assert f"learning_rate is {value}: it must be a finite" in refusal(learning_rate=value)
    table = {32: 0.1, 64: value}
    assert f"learning_rate_table[64] is {value}" in refusal(learning_rate_table=table)


@pytest.mark.parametrize("size", [0, -32])
def test_the_batch_sizes_of_a_learning_rate_table_are_above_zero(size: int) -> None:
    message = refusal(learning_rate_table={size: 0.1, 32: 0.2})
    assert "learning_rate_table" in message
    assert str(size) in message


@pytest.mark.parametrize("axis", ["replica", "data", "fsdp", "expert", "context", "tensor"])
@pytest.mark.parametrize("size", [0, -2])
def test_a_mesh_axis_has_a_size_above_zero_or_is_the_rest(axis: str, size: int) -> None:
    with pytest.raises(UserError, match=f"mesh.{axis} is {size}"):
        MeshSpec(**{axis: size})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [{"epochs": 2, "steps": 30}, {"global_batch_size": 64, "batch_size_per_device": 8}],
)
def test_two_fields_that_say_the_same_are_refused_with_both_values(fields: dict[str, int]) -> None:
    message = refusal(**fields)
    for name, value in fields.items():
        assert f"{name} is {value}" in message
    assert "give one of the two" in message


@pytest.mark.parametrize("name", ["resume", "learning_rate_scaling", "best_direction"])
def test_a_word_that_is_none_of_the_choices_is_refused_from_python_too(name: str) -> None:
    message = refusal(**{name: "lineal"})
    assert name in message
    assert "lineal" in message


@pytest.mark.parametrize("name", ["steps", "epochs", "global_batch_size", "log_every"])
def test_a_count_that_is_no_whole_number_is_refused_from_python_too(name: str) -> None:
    assert f"{name} is 2.5" in refusal(**{name: 2.5})


# --- An invalid configuration does not exist ---


@pytest.mark.parametrize(
    ("options", "fields", "expected"),
    [
        (MeshSpec, {"data": 0}, "mesh.data is 0: it must be 1 or more"),
        (MeshSpec, {"fsdp": "2"}, "mesh.fsdp is '2': it must be a whole number"),
        (MeshSpec, {"tensor": 2**63}, "mesh.tensor is 9223372036854775808: it must be below 2^63"),
        (ShardingOptions, {"min_size": 0}, "sharding.min_size is 0: it must be above 0"),
        (ShardingOptions, {"offload": "all"}, "sharding.offload is 'all'."),
        (CollectiveOptions, {"timeout": math.nan}, "collectives.timeout is nan: it must be above"),
        (CollectiveOptions, {"reduction": "ring"}, "collectives.reduction is 'ring'."),
        (ParameterServerOptions, {"max_shards": 0}, "servers.max_shards is 0: it must be"),
        (
            ParameterServerOptions,
            {"max_staleness": -1},
            "servers.max_staleness is -1: it must",
        ),
        (RunConfig, {"log_every": 0}, "log_every is 0: it must be above 0"),
        (RunConfig, {"mesh": {"data": 2}}, "mesh is {'data': 2}: it must be a MeshSpec"),
        (RunConfig, {"strategy": "psychic"}, "there is no strategy 'psychic'."),
        (RunConfig, {"epochs": 1, "steps": 1}, "epochs is 1 and steps is 1: give one of the two"),
    ],
)
def test_an_invalid_value_is_refused_when_the_object_is_constructed(
    options: Any, fields: dict[str, Any], expected: str
) -> None:
    for construct in (options, lambda **changes: dataclasses.replace(options(), **changes)):
        with pytest.raises(UserError) as caught:
            construct(**fields)
        assert str(caught.value).startswith(expected)


@dataclass(frozen=True, kw_only=True)
class Derived(RunConfig):
    hidden: int = 3
    parameters: int = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "parameters", self.hidden**2)


@dataclass(frozen=True, kw_only=True)
class Silent(RunConfig):
    hidden: int = 3

    def __post_init__(self) -> None:
        assert self.hidden > 0


def test_a_config_with_fields_that_it_computes_itself_is_checked_before_them() -> None:
    assert Derived(hidden=4, steps=2).parameters == 16
    with pytest.raises(UserError, match="steps is -1"):
        Derived(steps=-1)


def test_a_config_that_overrides_the_checks_is_checked_where_it_is_used() -> None:
    config = Silent(steps=-1)
    with pytest.raises(UserError, match="steps is -1"):
        resolve(config, batch_shards=1)
    with pytest.raises(UserError, match="steps is -1"):
        Loop(config)


# --- The global batch ---


def test_a_batch_size_per_device_becomes_a_global_one() -> None:
    config = resolve(RunConfig(batch_size_per_device=12), batch_shards=8)
    assert (config.global_batch_size, config.batch_size_per_device) == (96, None)


def test_a_global_batch_size_stays_what_it_is_and_is_32_by_default() -> None:
    assert resolve(RunConfig(global_batch_size=40), batch_shards=8).global_batch_size == 40
    assert resolve(RunConfig(), batch_shards=8).global_batch_size == 32


@pytest.mark.parametrize(
    ("batch", "shards", "arithmetic", "nearest"),
    [(30, 8, "30 = 3 * 8 + 6", "24 would"), (5, 8, "5 = 0 * 8 + 5", "8 would")],
)
def test_a_batch_that_does_not_divide_is_refused_with_the_arithmetic(
    batch: int, shards: int, arithmetic: str, nearest: str
) -> None:
    with pytest.raises(UserError) as caught:
        resolve(RunConfig(global_batch_size=batch), batch_shards=shards)
    message = str(caught.value)
    assert f"global_batch_size is {batch}: it does not divide over {shards} devices" in message
    assert arithmetic in message
    assert nearest in message


@dataclass(frozen=True, kw_only=True)
class Wider(RunConfig):
    width: int = 3
    cache: Path = Path("somewhere")


def test_resolving_keeps_an_experiments_own_fields_and_a_second_time_changes_nothing() -> None:
    config = Wider(
        width=5,
        learning_rate=0.1,
        learning_rate_scaling="linear",
        learning_rate_base_batch_size=16,
        batch_size_per_device=8,
    )
    once = resolve(config, batch_shards=4)
    assert (type(once), once.width) == (Wider, 5)
    assert once.learning_rate == pytest.approx(0.2)
    assert resolve(once, batch_shards=4) == once


# --- The learning rate against the batch ---


@pytest.mark.parametrize(
    ("scaling", "batch", "expected"),
    [
        ("none", 256, 0.1),
        ("linear", 256, 0.8),
        ("linear", 16, 0.05),
        ("sqrt", 128, 0.2),
        ("sqrt", 8, 0.05),
    ],
)
def test_the_learning_rate_is_scaled_from_its_base_batch(
    scaling: Any, batch: int, expected: float
) -> None:
    config = RunConfig(
        learning_rate=0.1,
        learning_rate_scaling=scaling,
        learning_rate_base_batch_size=32,
        global_batch_size=batch,
    )
    assert scale_learning_rate(config) == pytest.approx(expected, rel=1e-12)
    assert resolve(config, batch_shards=8).learning_rate == pytest.approx(expected, rel=1e-12)


def test_a_batch_per_device_is_scaled_by_the_global_batch_it_makes() -> None:
    config = RunConfig(
        learning_rate=0.1,
        learning_rate_scaling="linear",
        learning_rate_base_batch_size=32,
        batch_size_per_device=32,
    )
    assert resolve(config, batch_shards=8).learning_rate == pytest.approx(0.8)


@pytest.mark.parametrize(
    "missing", [{"learning_rate": 0.1}, {"learning_rate_base_batch_size": 32}, {}]
)
def test_scaling_without_its_base_is_refused(missing: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="learning_rate_base_batch_size"):
        resolve(RunConfig(learning_rate_scaling="sqrt", **missing), batch_shards=8)


@pytest.mark.parametrize(
    ("batch", "expected"), [(32, 1e-3), (40, 1e-3), (248, 1e-3), (256, 4e-3), (2048, 4e-3)]
)
def test_a_table_gives_the_rate_of_the_largest_batch_not_above(batch: int, expected: float) -> None:
    config = RunConfig(learning_rate_table={256: 4e-3, 32: 1e-3}, global_batch_size=batch)
    assert resolve(config, batch_shards=8).learning_rate == expected


def test_a_batch_below_a_tables_smallest_is_refused_with_both_sizes() -> None:
    config = RunConfig(learning_rate_table={256: 4e-3, 32: 1e-3}, global_batch_size=24)
    with pytest.raises(UserError, match=r"32.* 24"):
        resolve(config, batch_shards=8)


def test_a_table_and_a_scaling_exclude_each_other() -> None:
    config = RunConfig(learning_rate_table={32: 1e-3}, learning_rate_scaling="linear")
    with pytest.raises(UserError, match="is linear: give one of the two"):
        resolve(config, batch_shards=8)


# --- Seeds ---


def test_the_seeds_of_each_purpose_are_what_they_always_were() -> None:
    seeds = {seed: [derive_seed(seed, purpose) for purpose in Purpose] for seed in (0, 1, 2)}
    assert seeds == {
        0: [3574520024, 2703155516, 4242545964, 2035511234],
        1: [345234309, 1251908647, 3990789490, 2127035294],
        2: [3240649371, 1961308417, 2863440205, 3837723628],
    }, "a change of derive_seed changes how every existing run and checkpoint would continue"


def test_seeds_and_purposes_share_no_derived_seed() -> None:
    derived = [derive_seed(seed, purpose) for seed in range(-50, 1000) for purpose in Purpose]
    assert len(set(derived)) == len(derived)
    assert all(0 <= seed < 2**32 for seed in derived)


# --- As JSON ---


def test_the_configuration_as_json_reads_back_as_it_was() -> None:
    config = Wider(
        steps=10,
        learning_rate_table={32: 1e-3},
        mesh=MeshSpec(data=2, devices=(0, "cpu:3")),
        cache=Path("a/b"),
    )
    plain = config_as_json(config)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert set(plain) == {field.name for field in dataclasses.fields(Wider)}
    unsaid = {"replica": None, "fsdp": None, "expert": None, "context": None, "tensor": None}
    assert plain["mesh"] == {"data": 2, "devices": [0, "cpu:3"]} | unsaid
    assert plain["learning_rate_table"] == {"32": 1e-3}
    assert (plain["steps"], plain["epochs"], plain["shuffle"]) == (10, None, True)
    assert (plain["cache"], plain["width"]) == (str(Path("a/b")), 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(RunConfig):
    """An option of an experiment's own."""

    sizes: tuple[int, ...] = ()


@pytest.mark.parametrize(
    "fields",
    [{"seed": 2**63}, {"steps": 10**400}, {"seed": -(2**63)}, {"sizes": (1, 2**64)}],
)
def test_an_integer_that_no_checkpoint_can_hold_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^(seed|steps|sizes) is .*: it must be below 2\^63"):
        Own(**fields)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda x: x + 1,
        lambda: functools.partial(lambda x, n: x + n, n=1),
        lambda: ((lambda x: x),),
        lambda: {"act": lambda x: x},
        lambda: type("Scale", (), {})(),
    ],
    ids=["function", "partial", "tuple", "dict", "object"],
)
def test_a_field_that_is_a_function_has_the_same_text_in_every_process(make: Any) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class WithFunction(RunConfig):
        act: Any

    first, second = WithFunction(act=make()), WithFunction(act=make())
    assert str(first.act) != str(second.act)  # of two addresses
    assert config_as_json(first)["act"] == config_as_json(second)["act"]
    assert own_code(first) == {"act": first.act} and own_code(RunConfig()) == {}


def test_a_config_may_have_slots() -> None:
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config(RunConfig):
        steps: int | None = 7
        extra: int = 1

    assert (Config().steps, Config(extra=2).extra) == (7, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume_anyway": "no"}, "resume_anyway is 'no': it must be True or False"),
        ({"jit": None}, "jit is None: it must be True or False"),
        ({"data_on_device": 2}, "data_on_device is 2: it must be True or False"),
        ({"epochs": True}, "epochs is True: it must be a whole number"),
        ({"learning_rate": True}, "learning_rate is True: it must be a number"),
    ],
)
def test_a_truth_value_is_not_a_number_and_a_number_not_a_truth_value(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        RunConfig(**options)
    assert str(error.value) == message


def test_a_device_is_given_by_its_index_or_name() -> None:
    with pytest.raises(UserError, match=r"mesh.devices has 1.5: give the index of a device"):
        MeshSpec(devices=(0, 1.5))  # type: ignore[arg-type]
