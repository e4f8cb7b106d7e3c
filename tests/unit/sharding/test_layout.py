"""Where every leaf of the state lives: what rules and strategies make of it, and refuse."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from spmdtrain import FunctionModel, Loop, Trainer
from spmdtrain.checkpoints.restore import Wanted, whole_state
from spmdtrain.config.options import MeshSpec, ShardingOptions
from spmdtrain.config.run_config import RunConfig
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import Placement, make_placement
from spmdtrain.sharding.rules import (
    GatherPolicy,
    Rule,
    check_placed,
    checked_rules,
    describe_sharding,
)
from spmdtrain.step.program import StepPlan, plan_step
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves

P = PartitionSpec
EVERY_AXIS = MeshSpec(data=2, fsdp=2, tensor=2)
BATCH_AXES_ALONE = MeshSpec(data=4, fsdp=2)


def shaped(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def small() -> dict[str, Any]:
    """Parameters by name."""
    return {
        "hidden": [{"kernel": shaped(12, 8), "bias": shaped(8)}, {"kernel": shaped(8, 6)}],
        "scale": shaped(),
    }


def state_of(
    params: Any, optimizer: optax.GradientTransformation | None = None, *, average: bool = False
) -> TrainState:
    """An abstract state, of Adam where no optimizer is given."""

    def init(params: Any) -> TrainState:
        made = (optimizer or optax.adam(1e-3)).init(params)
        averaged = params if average else {}
        return TrainState(jnp.int32(0), params, made, averaged, {"mean": 1.0}, jax.random.key(0))

    found: TrainState = jax.eval_shape(init, params)
    return found


def placement_of(strategy: str, mesh: MeshSpec | None = None) -> Placement:
    return make_placement(RunConfig(strategy=strategy, mesh=mesh or MeshSpec()))


def layout(
    params: Any,
    *rules: Rule,
    strategy: str = "mirrored",
    mesh: MeshSpec | None = None,
    optimizer: optax.GradientTransformation | None = None,
    average: bool = False,
    **options: Any,
) -> Layout:
    """The layout of a state; arrays of any size are split unless `min_size` is given."""
    state = state_of(params, optimizer, average=average)
    sharding = ShardingOptions(**{"min_size": 1} | options)
    return Layout(state, placement_of(strategy, mesh), rules, sharding)


def plain(spec: PartitionSpec) -> PartitionSpec:
    """Without what a spec says of dims that are whole."""
    entries = list(spec)
    while entries and not entries[-1]:
        entries.pop()
    return P(*entries)


def specs(params: Any, *rules: Rule, **options: Any) -> dict[str, PartitionSpec]:
    """The specs of a state by the leaves' names."""
    found = layout(params, *rules, **options)
    return {name: plain(s.spec) for name, s in named_leaves(found.shardings).items()}


def refusal(params: Any, *rules: Rule, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        layout(params, *rules, **options)
    return str(caught.value)


def split_in(found: dict[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """Those that are not whole on each device."""
    return {name: spec for name, spec in found.items() if spec != P()}


# --- Names ---


def test_leaves_are_named_by_their_path() -> None:
    names = set(named_leaves(state_of(small(), average=True)))
    parameters = {"hidden/0/kernel", "hidden/0/bias", "hidden/1/kernel", "scale"}
    for field in ("params", "opt_state/0/mu", "opt_state/0/nu", "averaged"):
        assert {f"{field}/{name}" for name in parameters} <= names
    assert {"step", "key", "model_state/mean", "opt_state/0/count"} <= names


# --- Rules ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule("a", P("fsdp"), "in the model"), "has gather='in the model': it must be Gat"),  # type: ignore[arg-type]
        (lambda: Rule("a", P(1)), "has the axis 1: give names"),
        (lambda: checked_rules(Rule("a", P())), "give a list of Rule"),
        (lambda: checked_rules([("a", P())]), "give a list of Rule"),
    ],
)
def test_what_is_no_rule_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


# --- Which rule a leaf gets ---


def test_the_first_rule_that_matches_wins() -> None:
    found = specs(
        small(),
        Rule("hidden/1/kernel", P("tensor", "fsdp")),
        Rule("kernel$", P("fsdp")),
        Rule(".*", P()),
        mesh=EVERY_AXIS,
    )
    assert {name: spec for name, spec in found.items() if name.startswith("params/")} == {
        "params/hidden/0/kernel": P("fsdp"),
        "params/hidden/0/bias": P(),
        "params/hidden/1/kernel": P("tensor", "fsdp"),
        "params/scale": P(),
    }


def test_a_rule_matches_anywhere_in_the_path_but_not_beyond_its_anchors() -> None:
    found = specs(small(), Rule("^params/hidden/0", P("fsdp")), mesh=BATCH_AXES_ALONE)
    assert found["params/hidden/0/bias"] == found["params/hidden/0/kernel"] == P("fsdp")
    assert found["params/hidden/1/kernel"] == P()
    assert found["opt_state/0/mu/hidden/0/kernel"] == P("fsdp")  # it goes where its parameter goes
    found = specs(small(), Rule("idden/1/kern", P("fsdp")), mesh=BATCH_AXES_ALONE)
    assert {name.split("hidden/")[1] for name in split_in(found)} == {"1/kernel"}


@pytest.mark.parametrize("strategy", ["mirrored", "one_device", "hybrid"])
def test_what_no_rule_matches_is_replicated(strategy: str) -> None:
    found = layout(small(), strategy=strategy, average=True)
    assert found.replicates_params
    for name, sharding in named_leaves(found.shardings).items():
        assert isinstance(sharding, NamedSharding) and sharding.spec == P(), name
        assert sharding.is_fully_replicated and sharding.memory_kind == "device"


def test_under_the_default_strategy_all_is_on_one_device_whatever_the_rules_say() -> None:
    found = layout(small(), Rule("kernel", P("tensor")), Rule("nothing", P()), strategy="default")
    one = SingleDeviceSharding(jax.devices()[0])
    assert set(named_leaves(found.shardings).values()) == {one}
    assert set(named_leaves(found.on_device).values()) == {one}
    assert found.replicates_params


def test_on_one_device_rules_hold_and_split_nothing() -> None:
    found = layout(small(), Rule("kernel", P("tensor")), strategy="one_device")
    assert found.replicates_params
    kernel = found.shardings.params["hidden"][0]["kernel"]
    assert kernel.spec == P("tensor") and kernel.shard_shape((12, 8)) == (12, 8)


# --- Optimizers ---

BIG = {"a": {"kernel": shaped(256, 128), "bias": shaped(128)}, "b": shaped(128, 512)}
IN_TENSOR = Rule("a/kernel", P(None, "tensor"))


def masked() -> optax.GradientTransformation:
    """Adam for kernels; nothing is kept of the bias."""
    return optax.masked(optax.adam(1e-3), lambda params: jax.tree.map(lambda x: x.ndim > 1, params))


OPTIMIZERS: dict[str, tuple[Callable[[], optax.GradientTransformation], int]] = {
    # What makes it, and how many leaves of a parameter's shape it keeps for the three.
    "sgd": (lambda: optax.sgd(0.1), 0),
    "momentum": (lambda: optax.sgd(0.1, momentum=0.9), 3),
    "adam": (lambda: optax.adam(1e-3), 6),
    "adamw": (lambda: optax.adamw(1e-3), 6),
    "lion": (lambda: optax.lion(1e-3), 3),
    "adafactor": (lambda: optax.adafactor(1e-3), 1),  # of the bias alone, too small to factor
    "unfactored": (lambda: optax.adafactor(1e-3, min_dim_size_to_factor=1024), 3),
    "chained": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), 6),
    "masked": (masked, 4),
    "injected": (lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), 6),
    "accumulated": (lambda: optax.MultiSteps(optax.adam(1e-3), 4), 9),
    "partitioned": (
        lambda: optax.partition(
            {"one": optax.adam(1e-3), "other": optax.sgd(0.1, momentum=0.9)},
            {"a": {"kernel": "one", "bias": "other"}, "b": "other"},
        ),
        4,
    ),
}


@pytest.mark.parametrize(
    ("strategy", "rules"),
    [
        ("mirrored", []),
        ("mirrored", [IN_TENSOR]),
        ("fully_sharded", []),
        ("fully_sharded", [IN_TENSOR]),
        ("tensor_parallel", [IN_TENSOR]),
        ("fully_sharded+tensor_parallel", [IN_TENSOR]),
        ("hybrid+fully_sharded", []),
        ("zero", [IN_TENSOR]),
        ("central_storage", [IN_TENSOR]),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_an_optimizer_keeps_of_a_parameter_goes_where_that_goes(
    name: str, strategy: str, rules: list[Rule]
) -> None:
    make, count = OPTIMIZERS[name]
    state = state_of(BIG, make())
    found = layout(BIG, *rules, optimizer=make(), strategy=strategy, replicated_limit=2**40)
    shapes, shardings = named_leaves(state), named_leaves(found.on_device)
    following = 0
    for of, leaf in shapes.items():
        owner = next((n for n in ("a/kernel", "a/bias", "b") if of.endswith(f"/{n}")), None)
        if not of.startswith("opt_state/") or owner is None:
            assert of.startswith("params/") or shardings[of].spec == P()
            continue
        parameter = shardings[f"params/{owner}"]
        if leaf.shape == shapes[f"params/{owner}"].shape:
            following += 1
            if strategy != "zero":
                assert plain(shardings[of].spec) == plain(parameter.spec), of
            else:
                assert shardings[of].num_devices == 8 and not shardings[of].is_fully_replicated
        else:  # a factored moment does not follow its parameter's rule, which has other dims
            assert "tensor" not in shardings[of].spec, of
        shardings[of].shard_shape(leaf.shape)  # it divides
    assert following == count
    tensor = found.shardings.params["a"]["kernel"].mesh.shape["tensor"]
    if strategy == "fully_sharded" and not rules:
        assert tensor == 1 and plain(shardings["params/b"].spec) == P(None, "fsdp")


def test_the_memory_of_lbfgs_is_split_as_its_parameter() -> None:
    found = specs(
        BIG, IN_TENSOR, strategy="tensor_parallel", optimizer=optax.lbfgs(), replicated_limit=2**40
    )
    assert found["params/a/kernel"] == P(None, "tensor")
    assert found["opt_state/0/diff_params_memory/a/kernel"] == P(None, None, "tensor")
    assert found["opt_state/0/diff_params_memory/a/bias"] == P()


def test_factored_moments_are_split_by_their_own_shape() -> None:
    found = specs(
        BIG,
        Rule("a/kernel", P("tensor", "fsdp")),
        strategy="fully_sharded+tensor_parallel",
        optimizer=optax.adafactor(1e-3),
        min_size=200,
    )
    assert found["params/a/kernel"] == P("tensor", "fsdp")
    assert found["opt_state/0/v_col/a/kernel"] == P("fsdp")  # 256
    assert found["opt_state/0/v_row/a/kernel"] == P()  # 128, below min_size
    assert found["opt_state/0/v_col/b"] == P("fsdp")  # 512
    assert found["opt_state/0/v/a/kernel"] == P()  # of one element: a placeholder
    given_by_name = specs(
        BIG, Rule("opt_state/.*v_row/a/kernel", P("data")), Rule("a/kernel", P("fsdp")),
        optimizer=optax.adafactor(1e-3), mesh=MeshSpec(data=2, fsdp=4),
    )  # fmt: skip
    assert split_in(given_by_name) == {
        "params/a/kernel": P("fsdp"),
        "opt_state/0/v_row/a/kernel": P("data"),
    }


def test_rules_may_be_about_the_optimizer_alone() -> None:
    found = specs(
        {"w": shaped(16, 8)},
        Rule("^opt_state/.*mu/", P(None, "data")),
        Rule("w", P("tensor")),
        mesh=MeshSpec(data=4, tensor=2),
    )
    assert split_in(found) == {
        "params/w": P("tensor"),
        "opt_state/0/mu/w": P(None, "data"),
        "opt_state/0/nu/w": P("tensor"),
    }


@pytest.mark.parametrize("strategy", ["mirrored", "fully_sharded"])
def test_an_average_goes_where_its_parameters_go(strategy: str) -> None:
    rules = [Rule("^params/hidden/0/kernel", P(None, "tensor"))]
    found = specs(small(), *rules, strategy=strategy, average=True, mesh=EVERY_AXIS)
    for name in named_leaves(small()):
        assert found[f"averaged/{name}"] == found[f"params/{name}"]
    assert found["averaged/hidden/0/kernel"][1] == "tensor"


def test_parameters_may_be_a_single_array() -> None:
    found = layout(shaped(16, 8), Rule("^params$", P(None, "tensor")), mesh=EVERY_AXIS)
    moments = found.shardings.opt_state[0]
    for sharding in (found.shardings.params, moments.mu, moments.nu):
        assert sharding.spec == P(None, "tensor")
    assert moments.count.spec == P() and not found.replicates_params
    found = layout(shaped(16, 8), strategy="fully_sharded", average=True)
    assert plain(found.shardings.averaged.spec) == P("fsdp")
    assert not found.replicates_params
    x = jax.device_put(np.zeros((16, 8), np.float32), found.shardings.params)
    assert jax.jit(found.gather)(x).sharding.is_fully_replicated


# --- What strategies split ---


FSDP = "fully_sharded"
DATA_2 = MeshSpec(data=2, fsdp=4)
IN_TWO = P(None, ("tensor", "data"))
FSDP_TENSOR = ("fsdp", "tensor")
IN_THREE = P(None, ("data", "fsdp", "tensor"))
WHOLE: PartitionSpec = P()


@pytest.mark.parametrize(
    ("shape", "strategy", "mesh", "rule", "parameter", "moment"),
    [
        # The largest dim that divides.
        ((16,), FSDP, None, None, P("fsdp"), P("fsdp")),
        ((16, 8), FSDP, None, None, P("fsdp"), P("fsdp")),
        ((8, 16), FSDP, None, None, P(None, "fsdp"), P(None, "fsdp")),
        ((16, 16), FSDP, None, None, P("fsdp"), P("fsdp")),  # of equal dims the first
        ((8, 24, 24), FSDP, None, None, P(None, "fsdp"), P(None, "fsdp")),
        ((100, 8), FSDP, None, None, P(None, "fsdp"), P(None, "fsdp")),  # 100 does not divide
        ((7, 9), FSDP, None, None, WHOLE, WHOLE),
        ((), FSDP, None, None, WHOLE, WHOLE),
        ((0, 8), FSDP, None, None, WHOLE, WHOLE),
        ((8, 1), FSDP, None, None, P("fsdp"), P("fsdp")),
        # Zero splits the optimizer's state alone, both together split it twice, replicas nothing.
        ((8, 16), "zero", None, None, WHOLE, P(None, "data")),
        ((16, 8), "zero+fully_sharded", DATA_2, None, P("fsdp"), P("fsdp", "data")),
        ((16, 8), "hybrid+fully_sharded", None, None, P("fsdp"), P("fsdp")),
        ((16,), "hybrid+zero", None, None, WHOLE, P("data")),
        # A strategy adds its axis to what a rule says.
        ((16, 8), FSDP, EVERY_AXIS, P("tensor"), P("tensor", "fsdp"), P("tensor", "fsdp")),
        ((16, 8), FSDP, EVERY_AXIS, P(None, "tensor"), P("fsdp", "tensor"), P("fsdp", "tensor")),
        ((16, 8), FSDP, EVERY_AXIS, IN_TWO, P("fsdp", IN_TWO[1]), P("fsdp", IN_TWO[1])),
        ((16, 8), FSDP, BATCH_AXES_ALONE, P("fsdp"), P("fsdp"), P("fsdp")),  # it is there
        ((16, 8), FSDP, EVERY_AXIS, P(FSDP_TENSOR), P(FSDP_TENSOR), P(FSDP_TENSOR)),
        # No dim is free.
        ((16, 8), FSDP, EVERY_AXIS, P("tensor", "data"), P("tensor", "data"), P("tensor", "data")),
        # A rule that says nothing of any dim, and one that says that the array is replicated.
        ((16, 8), FSDP, BATCH_AXES_ALONE, P(None), P("fsdp"), P("fsdp")),
        ((16, 8), FSDP, BATCH_AXES_ALONE, P(None, None), P("fsdp"), P("fsdp")),
        ((16, 8), FSDP, BATCH_AXES_ALONE, P(), WHOLE, WHOLE),
        ((16, 8), FSDP, None, P(), WHOLE, WHOLE),
        ((16, 8), "zero", None, P(), WHOLE, WHOLE),
        ((16, 8), "zero+central_storage", None, P(), WHOLE, WHOLE),
        # A dim that a rule splits over one device is free, and always divides.
        ((16, 9), FSDP, None, P("tensor", None), P("fsdp"), P("fsdp")),
        ((7,), "mirrored", None, P("fsdp"), P("fsdp"), P("fsdp")),
        # A rule may split a dim over several axes.
        ((3, 16), "mirrored", EVERY_AXIS, IN_THREE, IN_THREE, IN_THREE),
        ((4, 8), "tensor_parallel", None, IN_TWO, IN_TWO, IN_TWO),
    ],
)
def test_a_parameter_and_its_moments_are_split_by_its_rule_and_the_strategy(
    shape: tuple[int, ...],
    strategy: str,
    mesh: MeshSpec | None,
    rule: PartitionSpec | None,
    parameter: PartitionSpec,
    moment: PartitionSpec,
) -> None:
    rules = [] if rule is None else [Rule("w", rule)]
    found = specs({"w": shaped(*shape)}, *rules, strategy=strategy, mesh=mesh, average=True)
    assert found["params/w"] == found["averaged/w"] == parameter
    assert found["opt_state/0/mu/w"] == found["opt_state/0/nu/w"] == moment
    others = {name: spec for name, spec in found.items() if not name.endswith("/w")}
    assert others and not split_in(others)


def test_an_array_below_the_least_size_is_left_whole() -> None:
    params = {"over": shaped(8, 16), "under": shaped(8, 15)}
    found = specs(params, strategy="fully_sharded", min_size=128)
    assert (found["params/over"], found["params/under"]) == (P(None, "fsdp"), P())
    assert found["opt_state/0/mu/under"] == P()
    default = ShardingOptions().min_size
    state = state_of({"over": shaped(default), "under": shaped(default - 8)})
    sharded = Layout(state, placement_of("fully_sharded"), (), ShardingOptions()).shardings
    assert sharded.params["over"].spec == P("fsdp")
    assert sharded.params["under"].spec == P()


def device_bytes(sharding: NamedSharding, leaf: Any) -> int:
    return int(np.prod(sharding.shard_shape(leaf.shape), dtype=int)) * leaf.dtype.itemsize


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 24), max_size=4),
    st.integers(2, 8),
    st.sampled_from(["fully_sharded", "zero"]),
    st.integers(1, 64),
)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_an_array_is_split_over_the_axis_wherever_a_dim_allows_it(
    shape: list[int], count: int, strategy: str, min_size: int
) -> None:
    mesh = MeshSpec(devices=tuple(range(count)))
    found = layout({"w": shaped(*shape)}, strategy=strategy, mesh=mesh, min_size=min_size)
    leaf, moment = shaped(*shape), found.shardings.opt_state[0].mu["w"]
    held = int(np.prod(shape, dtype=int)) * 4
    fits = any(n % count == 0 for n in shape) and held // 4 >= min_size
    assert device_bytes(moment, leaf) == (held // count if fits else held)
    parameter = device_bytes(found.shardings.params["w"], leaf)
    assert parameter == (held if strategy == "zero" else device_bytes(moment, leaf))


@pytest.mark.slow
@given(st.lists(st.integers(1, 24), min_size=1, max_size=3), st.data())
@settings(deadline=None, derandomize=True, max_examples=50)
def test_beside_a_rules_axis_it_is_split_wherever_a_free_dim_allows_it(
    shape: list[int], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    rule = Rule("w", P(*[None] * dim, "tensor"))
    mesh = MeshSpec(fsdp=4, tensor=2)
    options: dict[str, Any] = {"strategy": "fully_sharded+tensor_parallel", "mesh": mesh}
    if shape[dim] % 2:
        message = refusal({"w": shaped(*shape)}, rule, **options)
        assert f"dim {dim} of shape {tuple(shape)} does not divide over tensor=2" in message
        return
    found = layout({"w": shaped(*shape)}, rule, **options).shardings.params["w"]
    free = [n for other, n in enumerate(shape) if other != dim and n % 4 == 0]
    parts = int(np.prod(shape)) * 4 // device_bytes(found, shaped(*shape))
    assert parts == (8 if free else 2)
    if free:
        (axis,) = [d for d, entry in enumerate(found.spec) if entry == "fsdp"]
        assert shape[axis] == max(free)


# --- In host memory ---


def kinds(**options: Any) -> dict[str, set[str]]:
    """The memory kinds of each field's arrays, and of all scalars."""
    params = {"w": shaped(16, 8), "b": shaped(8)}
    found: dict[str, set[str]] = {}
    made = layout(params, average=True, **options)
    state = state_of(params, average=True)
    shapes = named_leaves(state)
    for name, sharding in named_leaves(made.shardings).items():
        field = name.split("/")[0] if shapes[name].shape else "scalars"
        found.setdefault(field, set()).add(str(sharding.memory_kind))
    on_device = named_leaves(made.on_device).values()
    assert {sharding.memory_kind for sharding in on_device} == {"device"}
    return found


FIELDS = ("params", "opt_state", "averaged", "scalars")
HOST = dict.fromkeys(FIELDS, "pinned_host") | {"scalars": "device"}
DEVICE = dict.fromkeys(FIELDS, "device")


@pytest.mark.parametrize(
    ("strategy", "options", "found"),
    [
        ("central_storage", {}, HOST),
        ("zero+central_storage", {}, HOST),
        ("hybrid+central_storage", {}, HOST),
        ("central_storage", {"offload": "state"}, HOST),
        ("zero+central_storage", {"offload": "state"}, HOST),
        ("hybrid+central_storage", {"offload": "state"}, HOST),
        ("central_storage", {"offload": "optimizer"}, DEVICE | {"opt_state": "pinned_host"}),
        ("mirrored", {}, DEVICE),
        ("one_device", {}, DEVICE),
        ("zero", {}, DEVICE),
        ("fully_sharded", {}, DEVICE),
        ("hybrid", {}, DEVICE),
    ],
)
def test_the_memory_in_which_a_strategy_keeps_each_field(
    strategy: str, options: dict[str, Any], found: dict[str, str]
) -> None:
    expected = {field: {kind} for field, kind in found.items()}
    assert kinds(strategy=strategy, **options) == expected


# --- Claims that do not hold ---


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ([("embedding", P("fsdp")), (".*", P())], "embedding"),
        ([(".*", P()), ("kernel", P("fsdp"))], "kernel"),  # earlier ones leave nothing to it
        ([("kernel", P()), ("kernel", P("fsdp")), (".*", P())], "kernel"),
        ([("^step$", P())], "^step$"),  # no rule is about the step or the key
        ([("^key$", P())], "^key$"),
    ],
)
def test_a_rule_that_matches_nothing_is_refused(rules: list[tuple[str, P]], left: str) -> None:
    message = refusal(small(), *(Rule(pattern, spec) for pattern, spec in rules))
    assert message == f"sharding rules that match no leaf of the state: ['{left}']"


def test_an_axis_that_the_mesh_does_not_have_is_refused_by_name() -> None:
    assert refusal(small(), Rule("kernel", P("tensr")), Rule(".*", P())) == (
        "params/hidden/0/kernel: the rule 'kernel' splits dim 0 over 'tensr', which is not an axis "
        "of the mesh. Did you mean 'tensor'?"
    )


@pytest.mark.parametrize(
    ("shape", "spec", "dim", "axes", "arithmetic"),
    [
        ((7, 8), P("fsdp"), 0, "fsdp=2", "7 = 3 * 2 + 1"),
        ((8, 7), P(None, "tensor"), 1, "tensor=2", "7 = 3 * 2 + 1"),
        ((6, 8), P(("data", "fsdp")), 0, "data=2 * fsdp=2", "6 = 1 * 4 + 2"),
        ((3, 2), P(None, ("data", "tensor")), 1, "data=2 * tensor=2", "2 = 0 * 4 + 2"),
    ],
)
def test_a_dim_that_does_not_divide_is_refused_with_the_arithmetic(
    shape: tuple[int, ...], spec: PartitionSpec, dim: int, axes: str, arithmetic: str
) -> None:
    mesh = EVERY_AXIS if "tensor" in axes else MeshSpec(data=2, fsdp=2, devices=(0, 1, 2, 3))
    message = refusal({"w": shaped(*shape)}, Rule("w", spec), mesh=mesh)
    assert message.startswith(f"params/w: dim {dim} of shape {shape} does not divide over {axes} ")
    assert f"({arithmetic}): make it a multiple of " in message
    assert message.endswith(", such as 8, or give a rule that does not split it (now 'w')") or (
        ", such as 4, or give a rule" in message
    )


def test_a_spec_of_more_dims_than_the_leaf_has_is_refused() -> None:
    message = refusal({"w": shaped(8)}, Rule("w", P("fsdp", "tensor")))
    assert "params/w has shape (8,), 1 dims" in message
    assert "'w' gives it a spec of 2" in message
    message = refusal({"w": shaped()}, Rule("w", P("fsdp")))
    assert "params/w has shape (), 0 dims" in message


@pytest.mark.parametrize(
    "strategy",
    ["mirrored", "fully_sharded", "tensor_parallel", "fully_sharded+tensor_parallel", "hybrid"],
)
def test_a_mesh_axis_that_no_rule_uses_is_refused(strategy: str) -> None:
    options: dict[str, Any] = {"strategy": strategy, "mesh": MeshSpec(tensor=2)}
    message = refusal(small(), Rule("kernel", P("fsdp")), **options)
    assert f"mesh axis tensor=2 is not used: under strategy {strategy} " in message
    assert "none of the 1 rules names it" in message


def test_a_loops_mesh_axis_that_no_rule_uses_is_refused() -> None:
    with (
        pytest.raises(UserError, match="tensor=4"),
        Loop(steps=1, mesh=MeshSpec(tensor=4)) as loop,
    ):
        loop.start(lambda key: {"params": jnp.ones((4, 4)), "opt_state": {}})


# --- Nothing large is silently replicated ---

GIANT = {"embed": shaped(50257, 7), "w": shaped(16, 16)}
HELD = "1.41 MB"
ALLOWED = Rule("embed", P())


@pytest.mark.parametrize(
    ("strategy", "leaf", "rules", "sizes", "arithmetic"),
    [
        ("fully_sharded", "params", [], "fsdp=8", "50257 = 6282 * 8 + 1, 7 = 0 * 8 + 7"),
        ("zero", "opt_state/0/mu", [], "data=8", "50257 = 6282 * 8 + 1, 7 = 0 * 8 + 7"),
        (
            "tensor_parallel",
            "params",
            [Rule("w", P("tensor"))],
            "tensor=2",
            None,  # only rules split over it, and which would is not the framework's to say
        ),
        (
            "hybrid+fully_sharded+tensor_parallel",
            "params",
            [Rule("w", P("tensor"))],
            "fsdp=2 and tensor=2",
            "50257 = 25128 * 2 + 1, 7 = 3 * 2 + 1",
        ),
    ],
)
def test_a_large_replicated_leaf_is_rejected_with_its_size_and_a_fix(
    strategy: str, leaf: str, rules: list[Rule], sizes: str, arithmetic: str | None
) -> None:
    message = refusal(GIANT, *rules, strategy=strategy)
    assert message.startswith(f"{leaf}/embed, shape (50257, 7), would be replicated, ")
    assert f"would be replicated, {HELD}: strategy {strategy} splits over {sizes}, " in message
    if arithmetic is None:
        assert (
            "only rules split over that. Give a rule for it: PartitionSpec() replicates" in message
        )
    else:
        assert f"({arithmetic})" in message
        assert "Make a dim divide, or give a rule for it: PartitionSpec() replicates" in message
    assert "sharding.replicated_limit" in message
    # And each of these fixes it.
    assert specs(GIANT, ALLOWED, *rules, strategy=strategy)["params/embed"] == P()
    assert specs(GIANT, *rules, strategy=strategy, replicated_limit=50257 * 7 * 4)
    refusal(GIANT, *rules, strategy=strategy, replicated_limit=50257 * 7 * 4 - 1)
    assert specs({**GIANT, "embed": shaped(50264, 8)}, *rules, strategy="fully_sharded")
    # Below the least size it is none of the strategy's business.
    if not rules:
        assert specs(GIANT, strategy=strategy, min_size=50257 * 7 + 1)
        refusal(GIANT, strategy=strategy, min_size=50257 * 7)


def test_a_giant_that_tensor_parallelism_has_no_rule_for_is_refused_though_it_would_divide() -> (
    None
):
    params = {"embed": shaped(1024, 1024), "w": shaped(16, 16)}
    message = refusal(params, Rule("w", P("tensor")), strategy="tensor_parallel")
    assert message.startswith("params/embed, shape (1024, 1024), would be replicated")
    both = [Rule("w", P("tensor")), Rule("embed", P("tensor"))]
    assert specs(params, *both, strategy="tensor_parallel")["opt_state/0/nu/embed"] == P("tensor")


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("mirrored", ()),
        ("hybrid", ()),
        ("central_storage", ()),
        ("one_device", ()),
        ("fully_sharded", (2,)),
        ("zero", (2,)),
    ],
)
def test_a_giant_is_whole_where_the_strategy_says_so_or_on_a_single_device(
    strategy: str, devices: tuple[int, ...]
) -> None:
    assert not split_in(specs(GIANT, strategy=strategy, mesh=MeshSpec(devices=devices)))


def test_another_axis_of_a_rule_is_enough() -> None:
    rule = Rule("embed", P(None, "tensor"))
    params = {"embed": shaped(50257, 14)}
    found = specs(params, rule, strategy="fully_sharded", mesh=MeshSpec(fsdp=4, tensor=2))
    assert found["params/embed"] == P(None, "tensor")
    # But not one over an axis of a single device.
    message = refusal(params, Rule("embed", P(None, "tensor")), strategy="fully_sharded")
    assert "would be replicated" in message


# --- In the step ---


def arrays(found: Layout, like: Any) -> Any:
    """Parameters in their places."""
    return jax.tree.map(
        lambda x, where: jax.device_put(np.ones(x.shape, x.dtype), where),
        like,
        found.shardings.params,
    )


def computed(function: Callable[[Any], Any], params: Any) -> dict[str, PartitionSpec]:
    """The specs of what a compiled function of parameters gives."""
    result = jax.jit(lambda params: function(jax.tree.map(lambda x: x + 1, params)))(params)
    return {name: plain(x.sharding.spec) for name, x in named_leaves(result).items()}


def test_the_model_reads_parameters_split_at_most_as_the_rules_say() -> None:
    params = {"w": shaped(16, 8), "stack": shaped(4, 16, 8), "wide": shaped(8, 16)}
    rules = [
        Rule("stack", P(None, "fsdp"), GatherPolicy.PER_LAYER),
        Rule("wide", P("tensor", "fsdp")),
    ]
    found = layout(params, *rules, strategy="fully_sharded", mesh=EVERY_AXIS)
    assert not found.replicates_params
    whole = computed(found.gather, arrays(found, params))
    assert whole == {"w": P(), "stack": P(None, "fsdp"), "wide": P("tensor")}


def test_replicated_parameters_are_read_as_they_are() -> None:
    params = {"w": shaped(16, 8)}
    for strategy in ("mirrored", "zero", "central_storage"):
        found = layout(params, strategy=strategy)
        assert found.replicates_params and found.gather(params) is params
    split = layout(params, Rule("w", P("tensor")), mesh=EVERY_AXIS)
    assert not split.replicates_params and split.gather(params) is params


def test_gradients_are_reduced_to_where_the_optimizers_state_is() -> None:
    params = {"w": shaped(16, 8), "b": shaped(3)}
    found = layout(params, strategy="zero")
    values = arrays(found, params)
    assert computed(found.gradients, values) == {"w": P("data"), "b": P()}
    split = jax.device_put(values["w"], NamedSharding(values["w"].sharding.mesh, P("data")))
    state = state_of(params)
    updated = jax.jit(lambda w: found.at_rest({"w": w, "b": values["b"]}))(split)
    assert state.params.keys() == updated.keys()
    assert updated["w"].sharding.is_fully_replicated
    found = layout(params, strategy="fully_sharded")
    assert computed(found.gradients, arrays(found, params)) == {"w": P("fsdp"), "b": P()}
    assert layout(params).gradients(params) is params and layout(params).at_rest(params) is params


# --- What is where it should be ---

MESH = make_placement(RunConfig(mesh=EVERY_AXIS))


def tree_of(**specs: PartitionSpec) -> tuple[dict[str, jax.Array], dict[str, NamedSharding]]:
    assert MESH.mesh is not None
    shardings = {name: NamedSharding(MESH.mesh, spec) for name, spec in specs.items()}
    return {name: jax.device_put(np.ones((8, 4)), s) for name, s in shardings.items()}, shardings


def test_what_is_in_its_place_passes_however_its_spec_is_written() -> None:
    tree, asked = tree_of(a=P("fsdp"), b=P(None, "tensor"), c=P(("data", "fsdp")))
    check_placed(tree, asked, "now")
    _, alike = tree_of(a=P("fsdp", None), b=P(None, ("tensor",)), c=P(("data", "fsdp"), None))
    check_placed(tree, alike, "now")
    assert MESH.mesh is not None
    one = {"a": SingleDeviceSharding(jax.devices()[0])}
    check_placed({"a": jnp.ones(3)}, one, "now")


@pytest.mark.parametrize(
    ("has", "asked", "words"),
    [
        (P(), P("fsdp"), "is replicated, but its rules require P('fsdp')"),
        (P("fsdp"), P(), "is P('fsdp'), but its rules require replicated"),
        (P("fsdp"), P(None, "fsdp"), "is P('fsdp'), but its rules require P(None, 'fsdp')"),
        (P("fsdp"), P("tensor"), "is P('fsdp'), but its rules require P('tensor')"),
        (
            P(("data", "fsdp")),
            P(("fsdp", "data")),
            "is P(('data', 'fsdp')), but its rules require P(('fsdp', 'data'))",
        ),
    ],
)
def test_what_is_elsewhere_is_refused_by_name_with_both_places(
    has: PartitionSpec, asked: PartitionSpec, words: str
) -> None:
    tree, _ = tree_of(right=P("tensor"), wrong=has)
    _, shardings = tree_of(right=P("tensor"), wrong=asked)
    with pytest.raises(UserError) as caught:
        check_placed({"params": tree}, {"params": shardings}, "after lunch")
    assert str(caught.value) == f"after lunch, params/wrong of shape (8, 4) {words}"


def test_another_memory_is_another_place() -> None:
    tree, asked = tree_of(w=P("fsdp"))
    host = asked["w"].with_memory_kind("pinned_host")
    with pytest.raises(UserError, match=r"require P\('fsdp'\), in host memory$"):
        check_placed(tree, {"w": host}, "now")
    moved = {"w": jax.device_put(tree["w"], host)}
    check_placed(moved, {"w": host}, "now")
    with pytest.raises(UserError, match=r"is P\('fsdp'\), in host memory, but .* P\('fsdp'\)$"):
        check_placed(moved, asked, "now")


def test_another_device_is_another_place() -> None:
    one, other = (SingleDeviceSharding(jax.devices()[number]) for number in (0, 3))
    x = jax.device_put(np.ones(3), one)
    with pytest.raises(UserError, match="now, x of shape"):
        check_placed({"x": x}, {"x": other}, "now")
    assert describe_sharding(one) == "on 1 device"


# --- The trainer looks whether it is so ---

X = np.ones((16, 32), np.float32)


def squared_error(model: Any, batch: Any) -> dict[str, jax.Array]:
    return {"loss": ((model(batch) - 1) ** 2).mean(-1)}


def trainer(**options: Any) -> Trainer:
    """Fully sharded, so that what is replicated is in the wrong place."""
    defaults: dict[str, Any] = {
        "model": partial(nnx.Linear, 32, 8),
        "objective": squared_error,
        "optimizer": optax.adam(0.1),
        "strategy": "fully_sharded",
        "sharding": ShardingOptions(min_size=64),
        "global_batch_size": 16,
        "terminal": Terminal(quiet=True),
    }
    return Trainer(**defaults | options)


def replicated(fitted: Trainer, tree: Any) -> Any:
    return jax.tree.map(lambda _: fitted.placement.replicated, tree)


WRONG = "params/kernel of shape (32, 8) is replicated, but its rules require P('fsdp', None)"


@pytest.mark.slow
def test_a_state_initialized_with_another_sharding_stops_the_run() -> None:
    fitted = trainer()
    steps = fitted.functions
    places = replicated(fitted, steps.shardings)
    steps._jit_init = jax.jit(steps._init, out_shardings=places)
    with pytest.raises(UserError) as caught:
        fitted.fit(X, steps=1)
    assert str(caught.value) == f"after the initialization, {WRONG}"


@pytest.mark.slow
def test_a_state_restored_with_another_sharding_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(workdir=str(tmp_path)).fit(X, steps=1)
    assert trainer(workdir=str(tmp_path)).fit(X, steps=2).step == 2
    fitted = trainer(workdir=str(tmp_path))

    def elsewhere(abstract: Any, shardings: Any) -> Wanted:
        return whole_state(abstract, replicated(fitted, shardings))

    monkeypatch.setattr("spmdtrain.train.starting_state.whole_state", elsewhere)
    with pytest.raises(UserError) as caught:
        fitted.fit(X, steps=3)
    assert str(caught.value) == f"as restored, {WRONG}"


def test_a_step_that_changes_a_sharding_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = trainer()
    steps = fitted.functions
    places = (steps.shardings, fitted.placement.batch)
    after = (replicated(fitted, steps.shardings), fitted.placement.replicated)
    step = plan_step(steps, X[:16]).program().__wrapped__
    wrong = jax.jit(step, in_shardings=places, out_shardings=after)
    monkeypatch.setattr(StepPlan, "program", lambda *_: wrong)
    with pytest.raises(UserError) as caught:
        fitted.fit(X, steps=2)
    assert str(caught.value) == f"after the first step, {WRONG}"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "zero", "fully_sharded"])
def test_a_state_that_is_where_it_should_be_is_trained(strategy: str) -> None:
    fitted = trainer(strategy=strategy, ema_decay=0.9)
    assert fitted.fit(X, steps=2).step == 2
    check_placed(fitted.state, fitted.functions.shardings, "at the end")
    assert fitted.state is not None
    kernel = fitted.state.params["kernel"]
    assert kernel.addressable_shards[0].data.shape == (
        (4, 8) if strategy == "fully_sharded" else (32, 8)
    )


def test_a_model_whose_parameters_are_one_array_is_trained_fully_sharded() -> None:
    model = FunctionModel(lambda key: jnp.ones((32, 8)), lambda w, x: x @ w)
    fitted = trainer(model=model)
    fitted.fit(X, steps=2)
    assert fitted.state is not None
    for leaf in (fitted.state.params, fitted.state.opt_state[0].mu):
        assert leaf.addressable_shards[0].data.shape == (4, 8)
