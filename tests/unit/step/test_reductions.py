"""Gradients reduced by hand, under shard_map: the numbers of XLA's own, or an error."""

import re
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import metrics, run, small_experiment
from jax.sharding import NamedSharding, PartitionSpec
from step_helpers import (
    check_equal,
    gradients,
    in_loops,
    on,
    tokens_batch,
    tokens_expected,
    tokens_model,
    tokens_objective,
    trainer,
)

from spmdtrain import MeshSpec, Rule, Trainer, UserError
from spmdtrain.config.options import CollectiveOptions, ShardingOptions
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MLP
from spmdtrain.sharding.mesh import build_mesh
from spmdtrain.sharding.placement import constrain_sharding, current_strategy
from spmdtrain.step.gradients import Reduction, all_reduce, flattened, hierarchical, one_device
from spmdtrain.step.plan import plan_step
from spmdtrain.testing.compiled_step import CompiledStep, compiled_step

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


def test_one_device_sends_along_a_tree_instead_of_an_all_reduce() -> None:
    compiled = compiled_step(tokens(collectives=CollectiveOptions(reduction="one_device")), BATCH)
    sent = [(one.kind, one.bytes) for one in compiled.collectives]
    assert [bytes for kind, bytes in sent if kind == "all-reduce"] == [METRICS]
    permutes = [bytes for kind, bytes in sent if kind == "collective-permute"]
    assert len(permutes) == 3 * 6 and sum(permutes) == 6 * GRADIENTS  # 3 arrays, 8 devices
    assert len(sent) == 1 + len(permutes)


@pytest.mark.slow
def test_a_name_stands_for_its_function() -> None:
    for options, function in (
        (CollectiveOptions(reduction="all_reduce"), all_reduce),
        (CollectiveOptions(reduction="hierarchical"), hierarchical),
    ):
        named = compiled_step(tokens(collectives=options, strategy="hybrid"), BATCH)
        assert named.collectives == step(function, "hybrid").collectives
    with pytest.raises(UserError, match=r"collectives\.reduction is all_reduce"):
        tokens(collectives=CollectiveOptions(reduction="all_reduce"), reduction=all_reduce)


def test_without_a_mesh_there_is_nothing_to_reduce() -> None:
    def never(gradients: Any, axes: Sequence[str]) -> Any:
        raise AssertionError("called without a mesh")

    check_equal(gradients(tokens(reduction=never, strategy="default"), BATCH), expected())


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


@pytest.mark.parametrize("reduction", ["automatic", "hierarchical"])
def test_gradients_are_sent_in_the_dtype_asked_for(reduction: Any) -> None:
    options = CollectiveOptions(reduce_dtype="float16", reduction=reduction)
    of = tokens(collectives=options, strategy="hybrid", microbatches=2)
    text = re.sub(r"/\*.*?\*/", "", compiled_step(of, BATCH).text)
    kind = "all-reduce" if reduction == "automatic" else "reduce-scatter"
    sent = re.findall(rf"= \(?(\w+)\[[^=]*? {kind}(?:-start)?\(", text)
    assert "f16" in sent
    found = gradients(of, BATCH)
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


def fit(**options: Any) -> None:
    defaults: dict[str, Any] = {
        "model": partial(MLP, 6, [8], 6),
        "objective": squared_error,
        "optimizer": optax.sgd(0.1),
        "global_batch_size": 16,
        "reduction": all_reduce,
    }
    trainer(**defaults | options).fit(PAIRS, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": Normalized},
            r"the model carries state \(2 arrays, for example batch statistics\)",
        ),
        ({"model": DROPPED}, r"the model or the objective draws random numbers"),
        ({"model": DROPPED, "microbatches": 2}, "the model or the objective draws random numbers"),
        ({"model": DROPPED, "remat": "full"}, "the model or the objective draws random numbers"),
        (
            {"strategy": "fully_sharded", "sharding": SPLIT},
            "the strategy fully_sharded splits the parameters",
        ),
        (
            {
                "mesh": MeshSpec(data=4, tensor=2),
                "rules": [Rule("layers/0/kernel", PartitionSpec(None, "tensor"))],
            },
            "the strategy mirrored splits the parameters; use .* without rules",
        ),
    ],
)
def test_where_the_numbers_would_be_others_it_is_an_error(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"reduction function .*{message}"):
        fit(**options)


def test_the_error_names_what_asked() -> None:
    for options, asked in (
        (CollectiveOptions(reduction="hierarchical"), "collectives.reduction=hierarchical"),
        (CollectiveOptions(reduce_dtype="float16"), "collectives.reduce_dtype=float16"),
    ):
        with pytest.raises(UserError, match=f"{asked} .*shard_map"):
            fit(model=Normalized, reduction=None, collectives=options)


def test_an_objective_that_draws_is_refused_by_hand() -> None:
    options = CollectiveOptions(reduction="flattened")
    with pytest.raises(UserError, match=r"reduction=flattened .*random"):
        of = trainer(
            model=partial(nnx.Linear, 4, 4),
            objective=draws,
            optimizer=optax.sgd(0.1),
            global_batch_size=16,
            collectives=options,
        )
        of.fit(PAIRS[0][:, :4], steps=1)


@pytest.mark.slow
def test_what_is_not_drawn_or_not_split_is_no_reason_to_refuse() -> None:
    fit(model=partial(MLP, 6, [8], 6, dropout=0.0))
    # Rules that say that all is whole, and a strategy that finds nothing large enough to split.
    fit(rules=[Rule("", PartitionSpec())])
    fit(strategy="fully_sharded")
    fit(model=DROPPED, reduction=None)


@pytest.mark.slow
def test_without_jit_and_without_a_mesh_it_is_checked_too() -> None:
    with pytest.raises(UserError, match="draws random"):
        fit(model=DROPPED, jit=False)
    for options in (
        CollectiveOptions(reduction="all_reduce"),
        CollectiveOptions(reduce_dtype="float16"),
    ):
        with pytest.raises(UserError, match="no mesh"):
            fit(strategy="default", reduction=None, collectives=options)


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
def test_a_reduction_that_leaves_devices_apart_is_refused() -> None:
    with pytest.raises(UserError, match="layers/0/bias"):
        fit(reduction=lambda gradients, axes: gradients)
    with pytest.raises(UserError, match="different gradients"):  # within the groups alone
        fit(
            reduction=lambda gradients, axes: jax.lax.psum(gradients, axes[1:]),
            strategy="hybrid",
        )
    with pytest.raises(UserError, match=r"'all_reduce'.*names"):
        fit(reduction="all_reduce")


def contrastive(model: Any, batch: Any) -> dict[str, jax.Array]:
    x = model(batch[0])
    likeness = x @ x.T
    return {"loss": -jax.nn.log_softmax(likeness)[jnp.arange(len(x)), jnp.arange(len(x))]}


@pytest.mark.slow
def test_an_objective_that_compares_examples_is_refused_by_hand_alone() -> None:
    with pytest.raises(UserError, match="other examples"):
        fit(objective=contrastive)
    fit(objective=contrastive, reduction=None)
    fit(objective=contrastive, mesh=on(1))  # which sees all of them


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
    check_equal(gradients(of, BATCH), expected())
    (one,) = compiled_step(of, BATCH).collectives
    # Rows of 256 for each of three gradients, and of two sums and two weights of the metrics.
    assert (one.kind, one.arrays, one.bytes) == ("all-reduce", 1, 7 * 256 * 4)


def test_xla_reduces_them_where_that_is_asked_for() -> None:
    of = tokens(collectives=CollectiveOptions(reduction="automatic"))
    check_equal(gradients(of, BATCH), expected())
    found = compiled_step(of, BATCH).collectives
    assert sum(one.bytes for one in found) == GRADIENTS + METRICS


class Drops(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.linear(x))


class Normalizes(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "objective", "why"),
    [
        (Drops, plain, "the model or the objective draws random numbers"),
        (partial(nnx.Linear, 4, 4), draws, "the model or the objective draws random numbers"),
        (partial(nnx.Linear, 4, 4), draws_nothing, ""),
        (Normalizes, plain, "the model carries state"),
        (partial(nnx.Linear, 4, 4), contrasts, "depend on other examples of the batch"),
        (partial(nnx.Linear, 4, 4), prints, "side effects"),
        (partial(nnx.Linear, 4, 4), asks, r"calls current_strategy"),
        (partial(nnx.Linear, 4, 4), lays_out, "constrains the sharding of arrays itself"),
        (partial(nnx.Linear, 4, 4), plain, ""),
        (partial(nnx.Linear, 4, 4), hints, ""),
    ],
)
def test_xla_reduces_them_if_flattening_would_change_the_result_and_says_why(
    model: Any, objective: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.random.default_rng(2).normal(size=(16, 4)).astype(np.float32)
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
        )
        losses.append(of.fit(x, steps=3).train["loss"])
        message = " ".join(capsys.readouterr().out.split())  # lines are wrapped
        assert message.count("step compiled") + message.count("step traced") == 1
        if chosen is None:
            assert ("reduced by XLA, because" in message) == bool(why) and why in message, message
            names_option = "batch_statistics='replica' needs 1 collective a step" in message
            assert names_option == (model is Normalizes), message
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6 if why else 1e-5)


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
        found = plan.reduction is flattened, plan.reasons == ()
        assert found == (packs, packs), plan.reasons
