"""Gradients reduced by hand, all-reduced or scattered: the numbers of XLA's own, or an error."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import metrics, run, small_experiment
from jax.sharding import NamedSharding, PartitionSpec
from step_helpers import (
    SHOWS_GRADIENTS,
    check_equal,
    gradients,
    in_loops,
    on,
    run_program,
    tokens_batch,
    tokens_expected,
    tokens_model,
    tokens_objective,
    trainer,
)

from spmdtrain import (
    AxisRules,
    FunctionModel,
    GatherPolicy,
    MeshSpec,
    Rule,
    RunConfig,
    Trainer,
    UserError,
)
from spmdtrain.config.options import CollectiveOptions, ShardingOptions
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import (
    LLAMA_AXIS_RULES,
    MLP,
    TRANSFORMER_RULES,
    Llama,
    LlamaConfig,
    Transformer,
    TransformerConfig,
)
from spmdtrain.models.layers import normal_param
from spmdtrain.sharding.mesh import build_mesh
from spmdtrain.sharding.placement import constrain_sharding, current_strategy, use_placement
from spmdtrain.step.gradients import (
    AllReduced,
    ByXla,
    GradientRule,
    Reduction,
    Scattered,
    all_reduce,
    flattened,
    hierarchical,
    one_device,
)
from spmdtrain.step.program import StepPlan, default_rule, plan_step
from spmdtrain.testing.compiled_step import CompiledStep, compiled_step
from spmdtrain.tree import named_leaves

BATCH = tokens_batch(np.random.default_rng(5))
SPLIT = ShardingOptions(min_size=1)
GRADIENTS = 4 * (5 * 7 + 7 + 1)  # bytes
IN_PARTS = 4 * (36 + 8 + 4)  # the same where each array is filled up to four equal parts
METRICS = 4 * 4


def tokens(**options: Any) -> Trainer:
    return trainer(**{"model": tokens_model(), "objective": tokens_objective} | options)


@cache
def expected() -> dict[str, np.ndarray]:
    return tokens_expected(tokens().functions.init(0).params, BATCH)


@cache
def step(reduction: Reduction | None, strategy: str, microbatches: int = 1) -> CompiledStep:
    of = tokens(reduction=reduction, strategy=strategy, microbatches=microbatches)
    return compiled_step(of, BATCH)


def is_flattened(rule: GradientRule | None) -> bool:
    return isinstance(rule, AllReduced) and rule.reduce is flattened


# -- the same numbers ------------------------------------------------------------------------------

PLACES: dict[str, dict[str, Any]] = {
    "mirrored": {},
    "mirrored in microbatches": {"microbatches": 4},
    "hybrid": {"strategy": "hybrid", "mesh": MeshSpec(replica=2)},
    "hybrid over all in microbatches": {
        "strategy": "hybrid",
        "mesh": MeshSpec(replica=4, data=1, fsdp=2),
        "microbatches": 2,
    },
    "zero in microbatches": {"strategy": "zero", "sharding": SPLIT, "microbatches": 2},
    "central storage": {"strategy": "central_storage"},
    "a mesh of one device": {"mesh": on(1), "microbatches": 2},
}


# `hybrid over all in microbatches` combines these.
NIGHTLY = ("mirrored in microbatches", "hybrid")


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [pytest.param(x, marks=[pytest.mark.nightly] * (x in NIGHTLY)) for x in PLACES],
)
@pytest.mark.parametrize(
    "reduction",
    [
        *(all_reduce, hierarchical),
        *(pytest.param(x, marks=pytest.mark.nightly) for x in (flattened, one_device)),
    ],
)
def test_a_reduction_by_hand_gives_the_numbers_of_the_whole_batch(
    reduction: Reduction, place: str
) -> None:
    check_equal(gradients(tokens(reduction=reduction, **PLACES[place]), BATCH), expected())


@pytest.mark.slow
def test_one_device_sends_along_a_tree_instead_of_an_all_reduce() -> None:
    compiled = compiled_step(tokens(collectives=CollectiveOptions(reduction="one_device")), BATCH)
    sent = [(one.kind, one.bytes) for one in compiled.collectives]
    assert [bytes for kind, bytes in sent if kind == "all-reduce"] == [METRICS]
    permutes = [bytes for kind, bytes in sent if kind == "collective-permute"]
    assert len(permutes) == 3 * 6 and sum(permutes) == 6 * GRADIENTS  # 3 arrays, 8 devices
    assert len(sent) == 1 + len(permutes)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_name_stands_for_its_function() -> None:
    for options, function in (
        (CollectiveOptions(reduction="all_reduce"), all_reduce),
        (CollectiveOptions(reduction="hierarchical"), hierarchical),
    ):
        named = compiled_step(tokens(collectives=options, strategy="hybrid"), BATCH)
        assert named.collectives == step(function, "hybrid").collectives


@pytest.mark.slow
def test_without_a_mesh_there_is_nothing_to_reduce() -> None:
    def never(gradients: Any, axes: Sequence[str]) -> Any:
        raise AssertionError("called without a mesh")

    check_equal(gradients(tokens(reduction=never, strategy="default"), BATCH), expected())


@pytest.mark.nightly
@pytest.mark.slow
def test_a_step_without_jit_reduces_too() -> None:
    check_equal(gradients(tokens(reduction=all_reduce, mesh=on(1), jit=False), BATCH), expected())


# -- what a reduction is given, and what it may do -------------------------------------------------


def differences(reduction: Reduction) -> dict[str, float]:
    """What a user's reduction makes of each gradient, as a multiple of what it should be."""
    found = gradients(tokens(reduction=reduction), BATCH)
    for name in ("loss", "off"):  # these the framework adds up, whatever the reduction does
        np.testing.assert_allclose(found[name], expected()[name], rtol=1e-5)
    return {name: float(found[name].ravel()[0] / x.ravel()[0]) for name, x in expected().items()}


@pytest.mark.slow
def test_a_wrong_reduction_is_seen_in_the_numbers() -> None:
    mean = differences(lambda gradients, axes: jax.lax.pmean(gradients, axes))
    assert mean.pop("loss") == pytest.approx(1) and mean.pop("off") == pytest.approx(1)
    assert mean == pytest.approx(dict.fromkeys(mean, 1 / 8), rel=1e-4)


@pytest.mark.slow
def test_a_reduction_gets_the_gradients_of_what_is_trained_and_the_axes_of_the_batch() -> None:
    seen: list[Any] = []

    def reduction(gradients: Any, axes: tuple[str, ...]) -> Any:
        seen.append((jax.tree.map(jnp.shape, gradients), axes))
        assert jax.lax.axis_size(axes) == 8
        return jax.lax.psum(gradients, axes)

    found = gradients(tokens(reduction=reduction, freeze=("second",), microbatches=2), BATCH)
    check_equal(found, {name: x for name, x in expected().items() if name != "second"})
    shapes = {"first": (5, 7), "second": None, "shift": ()}
    assert all(one == (shapes, ("replica", "data", "fsdp", "expert")) for one in seen) and seen


# -- in the compiled step --------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.slow
def test_hierarchical_sends_between_replicas_each_device_s_part_alone() -> None:
    for microbatches in (1, 4):
        compiled = step(hierarchical, "hybrid", microbatches)
        found: dict[tuple[str, tuple[str, ...]], int] = {}
        for one in compiled.collectives:
            found[one.kind, one.axes] = found.get((one.kind, one.axes), 0) + one.bytes
        assert found == {
            ("reduce-scatter", ("data",)): IN_PARTS,
            ("all-reduce", ("replica",)): IN_PARTS // 4,
            ("all-gather", ("data",)): IN_PARTS,
            ("all-reduce", ("replica", "data")): METRICS,
        }
        mesh = tokens(strategy="hybrid").mesh
        assert mesh is not None and in_loops(compiled.text, mesh) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        *("hybrid", "zero"),
        *(pytest.param(x, marks=pytest.mark.nightly) for x in ("mirrored", "central_storage")),
    ],
)
def test_all_reduce_crosses_once_however_many_microbatches(strategy: str) -> None:
    for microbatches in (1, 4):
        compiled = step(all_reduce, strategy, microbatches)
        over = ("replica", "data") if strategy == "hybrid" else "data"
        compiled.assert_count(1, "all-reduce", axes=over)
        (only,) = compiled.collectives
        assert only.bytes == GRADIENTS + METRICS
        mesh = tokens(strategy=strategy).mesh
        assert mesh is not None and in_loops(compiled.text, mesh) == []


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["automatic", "hierarchical"])
def test_gradients_are_sent_in_the_dtype_asked_for(reduction: Any) -> None:
    options = CollectiveOptions(reduce_dtype="float16", reduction=reduction)
    of = tokens(collectives=options, strategy="hybrid", microbatches=2)
    program = compiled_step(of, BATCH)
    text = re.sub(r"/\*.*?\*/", "", program.text)
    kind = "all-reduce" if reduction == "automatic" else "reduce-scatter"
    sent = re.findall(rf"= \(?(\w+)\[[^=]*? {kind}(?:-start)?\(", text)
    assert "f16" in sent
    found = gradients(of, BATCH, program.compiled)
    for name, value in expected().items():
        assert found[name].dtype == np.float32
        difference = np.abs(found[name] - value).max() / np.abs(value).max()
        assert difference < 5e-3
        exact = name in ("loss", "off")
        assert (difference < 1e-5) == exact, name  # of the metrics not a digit is lost


# -- refused ---------------------------------------------------------------------------------------


def squared_error(model: Any, batch: Any) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": (model(x) - y) ** 2}


class Normalized(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(6, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


PAIRS = (np.ones((16, 6), np.float32), np.ones((16, 6), np.float32))
DROPPED = partial(MLP, 6, [8], 6, dropout=0.5)


def plan(**options: Any) -> StepPlan:
    """Plans a step for PAIRS, whose gradients are all-reduced by hand by default."""
    defaults: dict[str, Any] = {
        "model": partial(MLP, 6, [8], 6),
        "objective": squared_error,
        "optimizer": optax.sgd(0.1),
        "global_batch_size": 16,
        "reduction": all_reduce,
    }
    return plan_step(trainer(**defaults | options).functions, PAIRS)


def asked(name: str | None = None, reduce_dtype: Any = None) -> dict[str, Any]:
    """A reduction by its name, or a dtype, in place of a function."""
    options: Any = {"reduction": name, "reduce_dtype": reduce_dtype}
    return {"reduction": None, "collectives": CollectiveOptions(**options)}


def contrastive(model: Any, batch: Any) -> dict[str, jax.Array]:
    x = model(batch[0])
    return {"loss": jax.nn.logsumexp(x @ x.T, -1)}


def halved(gradients: Any, axes: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.psum(x, axes).astype(jnp.float16), gradients)


DRAWS = "reduction function .*the model or the objective draws random numbers"
NOTHING = "the reduction returns nothing for layers/0/"
TENSOR = {
    "mesh": MeshSpec(data=4, tensor=2),
    "rules": [Rule("layers/0/kernel", PartitionSpec(None, "tensor"))],
}
# Functions that return no gradients, or others; and that are no functions.
NO_GRADIENTS: dict[str, tuple[Any, str]] = {
    "a number": (lambda gradients, axes: 3.0, NOTHING),
    "no arrays": (lambda gradients, axes: {}, NOTHING),
    "sums": (
        lambda gradients, axes: jax.tree.map(lambda x: x.sum(), gradients),
        r"the reduction returns float32\[\]",
    ),
    "one argument": (
        lambda gradients: gradients,
        r"reduction\(gradients, axes\): too many positional",
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    # Where the numbers would be others.
    "batch statistics": (
        {"model": Normalized},
        r"reduction function .*the model carries state \(2 arrays, for example batch statistics\)",
    ),
    "dropout": ({"model": DROPPED}, DRAWS),
    "dropout in microbatches": ({"model": DROPPED, "microbatches": 2}, DRAWS),
    "dropout with remat": ({"model": DROPPED, "remat": "full"}, DRAWS),
    "dropout without jit": ({"model": DROPPED, "jit": False}, DRAWS),
    "split parameters": (
        {"strategy": "fully_sharded", "sharding": SPLIT},
        "reduction function .*the strategy fully_sharded splits the parameters",
    ),
    "rules": (
        TENSOR,
        "reduction function .*the strategy mirrored splits the parameters; use .* without rules",
    ),
    "examples compared": ({"objective": contrastive}, "other examples"),
    # By name: the error says what asked.
    "a name": (
        {"model": Normalized, **asked("hierarchical")},
        r"collectives\.reduction=hierarchical .*shard_map",
    ),
    "a dtype": (
        {"model": Normalized, **asked(reduce_dtype="float16")},
        r"collectives\.reduce_dtype=float16 .*shard_map",
    ),
    "a name without a mesh": ({"strategy": "default", **asked("all_reduce")}, "no mesh"),
    "a dtype without a mesh": ({"strategy": "default", **asked(None, "float16")}, "no mesh"),
    "a name and a function": (
        {"collectives": CollectiveOptions(reduction="all_reduce")},
        r"collectives\.reduction is all_reduce",
    ),
    # What leaves devices apart, also only between groups.
    "gradients as they are": ({"reduction": lambda gradients, axes: gradients}, "layers/0/bias"),
    "sums within groups": (
        {
            "reduction": lambda gradients, axes: jax.lax.psum(gradients, axes[1:]),
            "strategy": "hybrid",
        },
        "different gradients",
    ),
    "a string": ({"reduction": "all_reduce"}, "'all_reduce'.*names"),
    "another dtype": (
        {"reduction": halved},
        r"the reduction returns float16\[.*is given float32\[",
    ),
    **{
        f"{name}, {dtype}": (
            {"reduction": reduction, "collectives": CollectiveOptions(reduce_dtype=dtype)},
            message,
        )
        for name, (reduction, message) in NO_GRADIENTS.items()
        for dtype in (None, "float16")
    },
}


SLOW = (
    *("dropout in microbatches", "dropout with remat", "dropout without jit", "rules"),
    *("split parameters", "examples compared", "sums within groups"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(*row, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, row in REFUSED.items()
    ],
)
def test_a_reduction_that_cannot_be_or_would_change_the_numbers_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan(**options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "by_hand"),
    [
        ({"model": partial(MLP, 6, [8], 6, dropout=0.0)}, True),
        # Rules that say that all is whole, and a strategy that finds nothing large enough to split.
        ({"rules": [Rule("", PartitionSpec())]}, True),
        ({"strategy": "fully_sharded"}, True),
        ({"objective": contrastive, "mesh": on(1)}, True),  # the device sees all examples
        ({"model": DROPPED, "reduction": None}, False),
        ({"objective": contrastive, "reduction": None}, False),
    ],
)
def test_what_is_not_drawn_or_not_split_is_no_reason_to_refuse(
    options: dict[str, Any], by_hand: bool
) -> None:
    assert isinstance(plan(**options).rule, AllReduced if by_hand else ByXla)


@pytest.mark.slow
def test_a_run_ends_with_the_refusal() -> None:
    of = trainer(model=DROPPED, objective=squared_error, global_batch_size=16, reduction=all_reduce)
    with pytest.raises(UserError, match=DRAWS):
        of.fit(PAIRS, steps=1)


@pytest.mark.nightly
@pytest.mark.slow
def test_small_gradients_do_not_vanish_in_float16() -> None:
    def found(**options: Any) -> np.ndarray:
        of = trainer(
            model=partial(MLP, 6, [], 6),
            objective=lambda model, b: {"loss": 1e-7 * (model(b[0]) - b[1]) ** 2},
            **options,
        )
        return gradients(of, PAIRS)["layers/0/kernel"]

    exact, sent = found(), found(collectives=CollectiveOptions(reduce_dtype="float16"))
    np.testing.assert_allclose(sent, exact, rtol=1e-2, atol=1e-3 * np.abs(exact).max())


@pytest.mark.slow
def test_a_large_batch_does_not_overflow_in_float16() -> None:
    rows = 4096
    of = trainer(
        model=partial(MLP, 1, [], 1),
        objective=lambda model, b: {"loss": (model(b[0]) - b[1]) ** 2},
        optimizer=optax.sgd(1e-3),
        collectives=CollectiveOptions(reduce_dtype="float16"),
        global_batch_size=rows,
    )
    x = np.ones((rows, 1), np.float32)
    of.fit((x, 30 * x), steps=1)  # the sum of the gradients is about 4096 * 60
    assert of.state is not None
    bias = of.state.params["layers"]["0"]["bias"]
    np.testing.assert_allclose(np.asarray(bias), [0.06], rtol=0.05)


@pytest.mark.slow
def test_the_command_takes_a_reduction_by_name(tmp_path: Path) -> None:
    done = run(
        small_experiment(tmp_path),
        *("--workdir", tmp_path / "run", "--strategy", "hybrid", "--log-every", 1),
        *("--collectives.reduction", "hierarchical", "--microbatches", 2),
        devices=8,
    )
    assert done.returncode == 0, done.stderr
    assert "reduce-scatter" in done.stdout
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert losses[-1] < losses[0]


# -- where nothing is said -------------------------------------------------------------------------

PACKED: dict[str, dict[str, Any]] = {
    "mirrored": {},
    "mirrored in microbatches": {"microbatches": 4},
    "hybrid": {"strategy": "hybrid"},
    "central storage": {"strategy": "central_storage"},
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PACKED)
def test_on_cpu_gradients_are_packed_into_one_array(place: str) -> None:
    of = tokens(**PACKED[place])
    program = compiled_step(of, BATCH)
    check_equal(gradients(of, BATCH, program.compiled), expected())
    (one,) = program.collectives
    # Rows of 256 for each of three gradients, and of two sums and two weights of the metrics.
    assert (one.kind, one.arrays, one.bytes) == ("all-reduce", 1, 7 * 256 * 4)


@pytest.mark.slow
def test_xla_reduces_them_where_that_is_asked_for() -> None:
    of = tokens(collectives=CollectiveOptions(reduction="automatic"))
    program = compiled_step(of, BATCH)
    check_equal(gradients(of, BATCH, program.compiled), expected())
    assert sum(one.bytes for one in program.collectives) == GRADIENTS + METRICS


def plain(model: Any, batch: Any) -> dict[str, jax.Array]:
    return {"loss": (model(batch) ** 2).mean(-1)}


def contrasts(model: Any, batch: Any) -> dict[str, jax.Array]:
    out = model(batch)
    return {"loss": jax.nn.logsumexp(out @ out.T, -1)}


def prints(model: Any, batch: Any) -> dict[str, jax.Array]:
    jax.debug.callback(lambda x: None, batch.sum())
    return plain(model, batch)


def asks(model: Any, batch: Any) -> dict[str, jax.Array]:
    return {"loss": plain(model, batch)["loss"] * current_strategy().batch_shards}


def lays_out(model: Any, batch: Any) -> dict[str, jax.Array]:
    out = jax.lax.with_sharding_constraint(model(batch), placed())
    return {"loss": out.mean(-1)}


def hints(model: Any, batch: Any) -> dict[str, jax.Array]:
    return {"loss": (constrain_sharding(model(batch), "batch", None) ** 2).mean(-1)}


def draws(model: Any, batch: Any, key: jax.Array) -> dict[str, jax.Array]:
    noise = jax.random.normal(key, batch.shape)
    return {"loss": ((model(batch + noise) - noise) ** 2).mean(-1)}


def draws_nothing(model: Any, batch: Any, key: jax.Array) -> dict[str, jax.Array]:
    return plain(model, batch)


def placed() -> Any:
    return NamedSharding(build_mesh(MeshSpec(data=8)), PartitionSpec(("replica", "data", "fsdp")))


LINEAR = partial(nnx.Linear, 6, 6)
CHANGED = [  # why flattening would change the result, if it would
    (DROPPED, plain, "the model or the objective draws random numbers"),
    (LINEAR, draws, "the model or the objective draws random numbers"),
    (LINEAR, draws_nothing, ""),
    (Normalized, plain, "the model carries state"),
    (LINEAR, contrasts, "depend on other examples of the batch"),
    (LINEAR, prints, "side effects"),
    (LINEAR, asks, "calls current_strategy"),
    (LINEAR, lays_out, "constrains the sharding of arrays itself"),
    (LINEAR, plain, ""),
    (LINEAR, hints, ""),
]


@pytest.mark.parametrize(("model", "objective", "why"), CHANGED)
def test_flattening_is_refused_if_it_would_change_the_result(
    model: Any, objective: Any, why: str
) -> None:
    of = trainer(
        model=model,
        objective=objective,
        global_batch_size=16,
        collectives=CollectiveOptions(reduction="flattened"),
    )
    if why:
        with pytest.raises(UserError, match=f"reduction=flattened .*{why}"):
            plan_step(of.functions, PAIRS[0])
    else:
        assert is_flattened(plan_step(of.functions, PAIRS[0]).rule)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "objective", "why"),
    [
        pytest.param(*row, marks=[pytest.mark.nightly] * (n % 3 > 0))
        for n, row in enumerate(CHANGED)
    ],
)
def test_xla_reduces_them_if_flattening_would_change_the_result_and_says_why(
    model: Any, objective: Any, why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x = np.random.default_rng(2).normal(size=(16, 6)).astype(np.float32)
    losses = []
    for chosen in (None, "automatic"):
        options = CollectiveOptions(reduction=chosen)
        of = trainer(
            model=model,
            objective=objective,
            optimizer=optax.sgd(0.1),
            global_batch_size=16,
            collectives=options,
            terminal=Terminal(),
            workdir=str(tmp_path / str(chosen)),
        )
        losses.append(of.fit(x, steps=3).train["loss"])
        message = " ".join(capsys.readouterr().out.split())  # lines are wrapped
        assert message.count("step compiled") + message.count("step traced") == 1
        if chosen is None:
            assert ("reduced by XLA, because" in message) == bool(why) and why in message, message
            names_option = "batch_statistics='replica' needs 1 collective a step" in message
            assert names_option == (model is Normalized), message
            decisions = json.loads((tmp_path / "None" / "program.json").read_text())["decisions"]
            assert len(decisions) == bool(why) + (model is Normalized)
            assert all(" ".join(each.split()) in message for each in decisions)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6 if why else 1e-5)


@pytest.mark.slow
def test_large_arrays_travel_alone_and_dtypes_apart() -> None:
    mesh = build_mesh(MeshSpec(data=8))
    draws = np.random.default_rng(4)
    shapes = {"large": (1024, 640), "flat": (300,), "one": (), "none": (0, 3), "wide": (2, 2, 5)}
    tree = {
        name: draws.normal(size=(8, *shape)).astype(np.float32) for name, shape in shapes.items()
    }
    tree["half"] = draws.normal(size=(8, 7)).astype(np.float16)

    def local(tree: Any) -> Any:
        own = jax.tree.map(lambda x: x[0], tree)
        return flattened(own, ("data",))

    split, whole = PartitionSpec("data"), PartitionSpec()
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=whole))
    found = program(tree)
    for name, x in tree.items():
        tolerance = 1e-2 if name == "half" else 1e-5
        np.testing.assert_allclose(found[name], x.sum(0), rtol=tolerance, atol=tolerance)
        assert found[name].dtype == x.dtype and found[name].shape == x.shape[1:]
    text = str(jax.make_jaxpr(program)(tree))
    assert len(re.findall(r"psum(?:_invariant)?\[", text)) == 3, text


def test_each_batch_is_judged_by_itself() -> None:
    """What is right for one may be wrong for the next."""

    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        loss = (model(batch["x"]) - batch["y"]) ** 2
        return {"loss": loss * loss.mean() if "together" in batch else loss}

    steps = Trainer(
        model=partial(nnx.Linear, 4, 1),
        objective=objective,
        optimizer=optax.sgd(0.1),
        global_batch_size=8,
        terminal=Terminal(quiet=True),
    ).functions
    alone = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 1), np.float32)}
    for batch, packs in ((alone, True), (alone | {"together": np.ones(8)}, False), (alone, True)):
        plan = plan_step(steps, batch)
        found = is_flattened(plan.rule), plan.reasons == ()
        assert found == (packs, packs), plan.reasons


# -- scattered -------------------------------------------------------------------------------------

SHAPE = TransformerConfig(
    vocabulary=20, rows=24, layers=2, width=16, heads=2, hidden=32, context=8, unroll=False
)
SCATTER = CollectiveOptions(reduction="reduce_scatter")
CLIPPED = optax.chain(optax.clip_by_global_norm(1e-2), SHOWS_GRADIENTS)
SMALL = 400  # bytes: more than the norms' scales and scalars, less than a matrix


def batch() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    weights = generator.choice([0, 0.25, 1, 3], size=(16, 8)).astype(np.float32)
    weights[-5:] = 0  # as padding rows have
    return {"tokens": generator.integers(0, 20, (16, 9)).astype(np.int32), "weights": weights}


def objective(model: Any, batch: dict[str, jax.Array]) -> dict[str, Any]:
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    return {"loss": (model.token_losses(inputs, targets).loss, batch["weights"])}


def transformer(strategy: str = "fully_sharded", **options: Any) -> Trainer:
    defaults = {
        "model": partial(Transformer, SHAPE),
        "objective": objective,
        "optimizer": CLIPPED,
        "global_batch_size": 16,
        "rules": TRANSFORMER_RULES,
        "sharding": ShardingOptions(min_size=100),
        "strategy": strategy,
        "collectives": SCATTER,
    }
    return trainer(**defaults | options)


def numbers(of: Trainer, program: CompiledStep | None = None) -> dict[str, np.ndarray]:
    """The clipped gradients and the loss of the batch at the initial parameters."""
    program = program or compiled_step(of, batch())
    after, output = run_program(program.compiled, of, batch())
    shown = named_leaves(after.opt_state[1].trace) | output.metrics
    return {name: np.asarray(x) for name, x in shown.items()}


@cache
def expected_of_one_device() -> dict[str, np.ndarray]:
    plain = CollectiveOptions()
    return numbers(
        transformer("one_device", collectives=plain, mesh=MeshSpec(devices=(0,)), rules=())
    )


@pytest.mark.slow
def test_the_numbers_are_those_of_one_device_and_no_gradient_is_all_reduced() -> None:
    of = transformer(microbatches=2)
    program = compiled_step(of, batch())
    check_equal(numbers(of, program), expected_of_one_device())
    # Four matrices of the layers and the tied embedding, once each, and nothing of their size.
    program.assert_count(5, "reduce-scatter", axes="fsdp")
    program.assert_no("all-reduce", larger_than=SMALL)
    # The weights of one layer at a time are gathered, in its backward pass again.
    gathers = [x for x in program.collectives if x.kind == "all-gather"]
    assert max(x.bytes for x in gathers) == 4 * SHAPE.width * 3 * SHAPE.width
    assert len(gathers) == 2 * 4 + 1


@pytest.mark.nightly
def test_an_annotated_model_has_these_numbers_too_and_gathers_a_layer_at_a_time() -> None:
    shape = LlamaConfig(
        vocabulary=20, context=8, layers=2, width=16, heads=2, kv_heads=1, hidden=32, unroll=False
    )
    own: dict[str, Any] = {"model": partial(Llama, shape), "rules": ()}
    own["axis_rules"] = LLAMA_AXIS_RULES
    default, alone = {"collectives": CollectiveOptions()}, {"mesh": MeshSpec(devices=(0,))}
    expected = numbers(transformer("one_device", **own | default | alone))
    scattering, replicated = transformer(**own), transformer("mirrored", **own | default)
    program = compiled_step(scattering, batch())
    check_equal(numbers(scattering, program), expected)
    check_equal(numbers(replicated), expected)
    assert is_flattened(plan_step(replicated.functions, batch()).rule)
    gathers = [x for x in program.collectives if x.kind == "all-gather"]
    assert max(x.bytes for x in gathers) == 4 * shape.width * shape.hidden  # not both layers
    assert sum(x.times for x in gathers) == 2 * 2 * 7 + 2  # the embedding and the head once
    in_two_dims = {"axis_rules": AxisRules(dict(LLAMA_AXIS_RULES.pairs) | {"mlp": "data"})}
    of = transformer(**own | in_two_dims, mesh=MeshSpec(data=2, fsdp=4))
    check_equal(numbers(of), expected)


SCATTERED_PLACES: dict[str, dict[str, Any]] = {
    "zero": {"strategy": "zero"},
    "two axes": {"mesh": MeshSpec(data=2, fsdp=4), "remat": "attention"},
    "groups": {"strategy": "hybrid+fully_sharded", "mesh": MeshSpec(replica=2)},
    "half precision": {"collectives": CollectiveOptions(reduce_dtype="float16")},
    "unrolled": {"model": partial(Transformer, replace(SHAPE, unroll=True)), "remat": "full"},
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        *("zero", "half precision"),
        *(pytest.param(x, marks=pytest.mark.nightly) for x in ("two axes", "groups", "unrolled")),
    ],
)
def test_other_placements_give_the_same_numbers(place: str) -> None:
    of = transformer(**SCATTERED_PLACES[place])
    program = compiled_step(of, batch())
    found = numbers(of, program)
    assert isinstance(plan_step(of.functions, batch()).rule, Scattered)
    if place == "half precision":
        for name, value in expected_of_one_device().items():
            np.testing.assert_allclose(found[name], value, atol=2e-3 * np.abs(value).max())
    else:
        check_equal(found, expected_of_one_device(), place)
    assert sum(x.kind == "reduce-scatter" for x in program.collectives) >= 5
    if "two axes" != place != "groups":  # there, the parts are all-reduced over the other axis
        program.assert_no("all-reduce", larger_than=SMALL)


class Annotated(nnx.Module):
    """A product with an annotated parameter, which XLA gathers, and a function of it."""

    def __init__(self, uses: Callable[[jax.Array], jax.Array], *, rngs: nnx.Rngs) -> None:
        self.kernel = normal_param(rngs, (8, 8), std=1.0, names=("embed", None))
        self.uses = uses

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.uses(x @ self.kernel[...])


@pytest.mark.slow
def test_what_cannot_be_scattered_is_refused() -> None:
    with pytest.raises(
        UserError, match="reduce_scatter is for the strategies that split gradients"
    ):
        transformer("mirrored")

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"blocks": jax.random.normal(key, (3, 8, 8))}

    def apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        # A loop of its own: XLA would gather one layer at a time, an explicit gather all of them.
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["blocks"])[0]

    own_loop = trainer(
        model=FunctionModel(init, apply),
        objective=lambda model, batch: {"loss": model(batch["x"]) ** 2},
        rules=[Rule("blocks", PartitionSpec(None, None, None), GatherPolicy.PER_LAYER)],
        strategy="fully_sharded",
        sharding=ShardingOptions(min_size=1),
        collectives=SCATTER,
    )
    rows = {"x": np.ones((64, 8), np.float32)}
    with pytest.raises(UserError, match="params/blocks would be gathered whole"):
        plan_step(own_loop.functions, rows)

    no_loop = trainer(
        model=partial(Annotated, jnp.abs),
        objective=lambda model, batch: {"loss": model(batch["x"]) ** 2},
        axis_rules=AxisRules({"embed": "fsdp"}),
        strategy="fully_sharded",
        collectives=SCATTER,
    )
    with pytest.raises(UserError, match="params/kernel would be gathered whole"):
        plan_step(no_loop.functions, rows)

    def asks(model: Any, batch: dict[str, jax.Array]) -> dict[str, Any]:
        return {"loss": objective(model, batch)["loss"][0] * current_strategy().batch_shards}

    asking = transformer(objective=asks)
    refused = pytest.raises(UserError, match=r"reduction=reduce_scatter .*current_strategy")
    with use_placement(asking.placement), refused:
        plan_step(asking.functions, batch())


def replicated_here(x: jax.Array) -> jax.Array:
    return jax.sharding.reshard(x, PartitionSpec())


def scaled_by_axis(x: jax.Array) -> jax.Array:
    return x * jax.sharding.get_abstract_mesh().shape["fsdp"]


def scaled_by_rules(x: jax.Array) -> jax.Array:
    return x * (1 + len(nn.get_logical_axis_rules()))


@pytest.mark.parametrize(
    "uses", [replicated_here, scaled_by_axis, scaled_by_rules, pytest.param(None, id="nothing")]
)
def test_a_model_that_depends_on_its_context_is_reduced_by_xla(uses: Any) -> None:
    of = trainer(
        model=partial(Annotated, uses or jnp.abs),
        objective=lambda model, batch: {"loss": model(batch["x"]).sum(-1)},
        axis_rules=AxisRules({"embed": "fsdp"}),
    )
    plan = plan_step(of.functions, {"x": np.ones((64, 8), np.float32)})
    reasons = " ".join(plan.reasons)
    assert ("depends on the mesh of JAX's context" in reasons) == (uses is not None)
    assert isinstance(plan.rule, ByXla) if uses else is_flattened(plan.rule)


@pytest.mark.parametrize(
    ("platform", "splits", "chosen"),
    [
        ("tpu", True, Scattered),
        ("tpu", False, ByXla),
        ("cpu", True, ByXla),
        ("gpu", True, ByXla),
    ],
)
def test_only_tpus_scatter_by_default(platform: str, splits: bool, chosen: type) -> None:
    devices = [SimpleNamespace(platform=platform)] * 8
    placement: Any = SimpleNamespace(devices=devices, batch_shards=8)
    layout: Any = SimpleNamespace(splits_gradients=splits, replicates_params=False)
    assert isinstance(default_rule(RunConfig(), placement, layout), chosen)
    automatic = RunConfig(collectives=CollectiveOptions(reduction="automatic"))
    assert isinstance(default_rule(automatic, placement, layout), ByXla)
