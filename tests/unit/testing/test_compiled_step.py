"""What a test may claim about a compiled step; each claim is seen to fail where it is false."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmdtrain import MeshSpec, Trainer
from spmdtrain.config.options import CollectiveOptions
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MLP
from spmdtrain.sharding.placement import current_strategy
from spmdtrain.testing.compiled_step import CompiledStep, compiled_step

P = PartitionSpec
BATCH = (np.zeros((32, 16), np.float64), np.zeros(32, np.int64))
GRADIENTS = 4 * (16 * 24 + 24 + 24 * 4 + 4)


def squared_error(model: Any, batch: Any) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": ((model(x) - y[:, None]) ** 2).mean(-1)}


def mirrored(**options: Any) -> Trainer:
    return Trainer(
        **{"objective": squared_error} | options,
        model=MLP(16, [24], 4, rngs=nnx.Rngs(0)),
        optimizer=optax.adam(1e-3),
        mesh=MeshSpec(data=8),
        strategy="mirrored",
        collectives=CollectiveOptions(reduction="automatic"),
        terminal=Terminal(quiet=True),
    )


@pytest.fixture(scope="module")
def step() -> CompiledStep:
    """A mirrored MLP's."""
    return compiled_step(mirrored(), BATCH)


def compiled(mesh: Mesh, function: Callable[..., Any], **specs: P) -> CompiledStep:
    """A function of f32 (1024, 512), with the specs of its argument and result."""
    shardings = [NamedSharding(mesh, specs[name]) for name in ("into", "out")]
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    jitted = jax.jit(function, in_shardings=shardings[0], out_shardings=shardings[1])
    return CompiledStep(jitted.lower(x).compile(), mesh)


@pytest.fixture(scope="module")
def gathers() -> CompiledStep:
    """A step that gathers 1 MiB over fsdp, and reduces it over data."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def function(x: jax.Array) -> jax.Array:
        rows = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("data")))
        return rows.reshape(2, 512, 512).sum(0)

    return compiled(mesh, function, into=P("data", "fsdp"), out=P())


def refused(claim: Callable[..., None], *args: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        claim(*args, **options)
    return str(caught.value)


# --- A mirrored model ---


def test_a_mirrored_step_has_one_all_reduce_over_data_and_nothing_else(step: CompiledStep) -> None:
    step.assert_count(1, "all-reduce", axes="data")
    step.assert_no("all-gather")
    (only,) = step.collectives
    assert GRADIENTS <= only.bytes <= GRADIENTS + 16  # and the loss's sum and weight


def test_wrong_claims_of_a_mirrored_step_fail(step: CompiledStep) -> None:
    message = refused(step.assert_no, "all-reduce")
    first, *listed = message.splitlines()
    assert first == "expected no all-reduce, but found 1:"
    (line,) = listed
    assert line.split()[:5] == ["*", "all-reduce", "over", "data=8", "2.04"]
    assert "jit(train_step)" in line  # the operation it comes from
    assert refused(step.assert_count, 2, "all-reduce", axes="data").startswith(
        "expected 2 all-reduce over data=8, but found 1:"
    )
    refused(step.assert_count, 1, "all-reduce", larger_than=GRADIENTS + 16)
    refused(step.assert_count, 1, "all-reduce", axes="fsdp")
    message = refused(step.assert_count, 1, "all-gather", larger_than="1 MB")
    assert message.startswith("expected 1 all-gather above 1.00 MB, but found 0:")
    assert "*" not in message.splitlines()[1]  # existing operations, none of which is meant


def test_nothing_is_run_and_shapes_do_as_well_as_arrays(step: CompiledStep) -> None:
    trainer = mirrored()
    shapes = (jax.ShapeDtypeStruct((32, 16), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32))
    again = compiled_step(trainer, shapes)
    assert trainer.state is None
    assert again.collectives == step.collectives
    assert again.memory.temp_size_in_bytes >= 0
    assert "all-reduce" in again.text
    assert isinstance(again.compiled, jax.stages.Compiled)


def test_the_model_knows_the_mesh_that_its_step_is_compiled_for() -> None:
    def objective(model: nnx.Module, batch: Any) -> dict[str, jax.Array]:
        assert current_strategy().name == "mirrored"
        assert current_strategy().batch_shards == 8
        return squared_error(model, batch)

    compiled_step(mirrored(objective=objective), BATCH).assert_count(1, "all-reduce", axes="data")


def test_a_trainer_without_compiled_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="jit is off"):
        compiled_step(mirrored(jit=False), BATCH)


# --- Split arrays ---


def test_all_gathers_are_seen_with_their_axis_and_size(gathers: CompiledStep) -> None:
    gathers.assert_count(1, "all-gather", axes="fsdp")
    gathers.assert_count(1, "all-gather", larger_than="1 MB", axes=("fsdp",))
    gathers.assert_no("all-gather", larger_than="1.1 MB")
    gathers.assert_no("all-gather", axes="data")
    gathers.assert_no("all-gather", axes=("data", "fsdp"))
    message = refused(gathers.assert_no, "all-gather", larger_than="1 MB")
    assert message.startswith("expected no all-gather above 1.00 MB, but found 1:")
    marked = [line.split() for line in message.splitlines() if line.startswith("  *")]
    assert [line[1:6] for line in marked] == [["all-gather", "over", "fsdp=4", "1.05", "MB"]]
    assert len(message.splitlines()) == 1 + len(gathers.collectives)


def test_above_is_more_than(gathers: CompiledStep) -> None:
    (size,) = [one.bytes for one in gathers.collectives if one.kind == "all-gather"]
    assert size == 2**20
    gathers.assert_no("all-gather", larger_than=size)
    gathers.assert_no("all-gather", larger_than="1 MiB")
    gathers.assert_no("all-gather", larger_than="1024KiB")
    refused(gathers.assert_no, "all-gather", larger_than=size - 1)
    refused(gathers.assert_no, "all-gather", larger_than="1023.9 KiB")
    refused(gathers.assert_no, "all-gather", larger_than="1048 kb")


def test_over_means_exactly_these_axes() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    step = compiled(mesh, jnp.sin, into=P(("data", "fsdp")), out=P())
    step.assert_count(1, "all-gather", axes=("fsdp", "data"))
    step.assert_count(0, "all-gather", axes="data")
    assert "over data=2 fsdp=4" in refused(step.assert_no, "all-gather", axes=("fsdp", "data"))


def test_collectives_of_axes_that_cannot_be_read_let_no_claim_over_axes_hold(
    gathers: CompiledStep,
) -> None:
    # Compiled for eight devices, and shown as if there were two.
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    step = CompiledStep(gathers.compiled, mesh)
    for count in (0, 1):
        message = refused(step.assert_count, count, "all-gather", axes="data")
        assert "the axes of some are unknown" in message
        assert "over unknown axes" in message
    step.assert_count(1, "all-gather")


def test_one_device_has_no_collectives() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",), axis_types=(AxisType.Auto,))
    for shown in (mesh, None):
        step = CompiledStep(compiled(mesh, jnp.sin, into=P("data"), out=P()).compiled, shown)
        step.assert_no("all-gather")
        assert "the step has no collectives" in refused(step.assert_count, 1, "all-gather")
    with pytest.raises(ValueError, match="'data'"):
        step.assert_no("all-gather", axes="data")


# --- Misspellings ---


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("all_gather", {}, r"kind of collective 'all_gather'\. Did you mean 'all-gather'\?"),
        ("allreduce", {}, r"kind of collective 'allreduce'\. Did you mean 'all-reduce'\?"),
        ("all-gather-start", {}, r"Did you mean 'all-gather'\?"),
        ("all-gather", {"axes": "fdsp"}, r"no axis 'fdsp'\. Did you mean 'fsdp'\?"),
        ("all-gather", {"axes": ("data", "dta")}, r"no axis 'dta'\. Did you mean 'data'\?"),
        ("all-gather", {"axes": ()}, "names no axis"),
        ("all-gather", {"larger_than": "1 MiBs"}, r"unknown unit 'MiBs'\. Did you mean 'MiB'\?"),
        ("all-gather", {"larger_than": "1 M"}, r"unknown unit 'M'"),
        ("all-gather", {"larger_than": "1000"}, "'1000' is not a size"),
        ("all-gather", {"larger_than": "1,5 MB"}, "'1,5 MB' is not a size"),
        ("all-gather", {"larger_than": "-1 MB"}, "'-1 MB' is not a size"),
        ("all-gather", {"larger_than": ""}, "'' is not a size"),
        ("all-gather", {"larger_than": -1}, "-1 is not a size"),
        ("all-gather", {"larger_than": True}, "True is not a size"),
        ("all-gather", {"larger_than": None}, "None is not a size"),
    ],
)
def test_a_misspelling_is_no_claim_that_holds(
    gathers: CompiledStep, kind: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gathers.assert_no(kind, **options)
    with pytest.raises(ValueError, match=message):
        gathers.assert_count(1, kind, **options)
