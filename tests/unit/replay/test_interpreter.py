"""The evaluation of a program operation by operation: its results, and the first one not finite."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from spmdtrain.replay.interpreter import Cell, Interpreter, Stage, layer_of

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)


def interpret(function: Callable[..., Any], **arguments: Any) -> tuple[list[Cell], Interpreter]:
    """The results of a function of arrays by name; those beginning with `w` are parameters."""
    closed = jax.make_jaxpr(lambda given: function(**given))(arguments)
    interpreter = Interpreter("")
    given = dict(sorted(arguments.items()))
    return interpreter.run(closed.jaxpr, closed.consts, given, "w"), interpreter


def loops(x: Any) -> Any:
    def forward(carry: Any, row: Any) -> Any:
        return jnp.tanh(carry + row), carry * row

    carry, rows = jax.lax.scan(forward, x[0], x)
    back, _ = jax.lax.scan(lambda carry, row: (carry * 0.5 + row, None), carry, x, reverse=True)
    counted = jax.lax.while_loop(
        lambda state: state[0] < 3, lambda state: (state[0] + 1, state[1] * 2.0), (0, x)
    )
    chosen = jax.lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, jnp.exp], x)
    return carry, rows, back, counted, chosen


def derivatives(x: Any) -> Any:
    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return 2 * x

    doubled.defvjp(lambda x: (2 * x, x), lambda x, change: (change * x,))

    @jax.checkpoint
    def block(x: Any) -> Any:
        return jax.nn.relu(doubled(x)) + jax.nn.softmax(x)

    return jax.value_and_grad(lambda x: (block(x) ** 2).sum())(x)


def on_devices(x: Any) -> Any:
    mesh = jax.make_mesh((4, 2), ("data", "other"), axis_types=(AxisType.Auto,) * 2)
    split, whole = PartitionSpec("data"), PartitionSpec()

    def body(x: Any) -> Any:
        total = jax.lax.psum(x, "data")
        index = jax.lax.axis_index("data")
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        moved = jax.lax.ppermute(x, "data", [(n, (n + 1) % 4) for n in range(4)])
        carry, rows = jax.lax.scan(lambda carry, row: (carry + row, carry), moved[0], x)
        chosen = jax.lax.cond(index > 1, lambda x: x, lambda x: -x, x)
        return total, gathered.sum() * jnp.ones(2) * index, carry[None], rows, chosen

    specs = (whole, split, split, split, split)
    # Over one axis of two, with the check that replicated results are; and without.
    first = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=specs, axis_names={"data"})
    both = jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=specs, check_vma=False)
    return jax.jit(first)(x), both(x)


@pytest.mark.parametrize("function", [loops, derivatives, on_devices])
def test_results_are_those_of_the_program(function: Callable[..., Any]) -> None:
    cells, interpreter = interpret(function, x=X)
    expected = jax.tree.leaves(jax.jit(function)(X))
    assert len(cells) == len(expected)
    for cell, array in zip(cells, expected, strict=True):
        assert cell.value.shape == array.shape and cell.value.dtype == array.dtype
        np.testing.assert_allclose(cell.value, array, rtol=1e-5)
        assert cell.mark.is_finite and cell.mark.origin is None
    # The devices of the last function choose different branches, which are not entered.
    assert interpreter.not_entered == ({"cond"} if function is on_devices else set())


def test_infinities_count_from_where_they_arise_and_masks_from_where_they_become_nan() -> None:
    def masked(x: Any) -> Any:
        scores = jnp.where(x > 2, x, -jnp.inf)
        return scores - scores.max(1, keepdims=True)

    def overflowing(x: Any) -> Any:
        large = jnp.exp(x * 1000)
        return large - large

    def dropped(x: Any) -> Any:
        return jnp.where(x > 0, jnp.log(x), 0.0)

    ((cell,), _) = interpret(masked, x=X)
    origin = cell.mark.origin
    assert origin is not None and origin.primitive == "sub" and cell.mark.has_nan
    assert origin.operands[0] == "float32[8,4]: 32 of 32 -inf"
    assert origin.frames[0][2].endswith("masked")

    ((cell,), interpreter) = interpret(overflowing, x=X)
    origin = cell.mark.origin
    assert origin is not None and origin.primitive == "exp"
    assert origin.operands == ("float32[8,4]: -1000 to 1000",)
    assert interpreter.became_nan[origin.number].primitive == "sub"

    ((cell,), _) = interpret(lambda x: jnp.where(x > 0, x, jnp.inf).sum(), x=X)
    entered = cell.mark.entered
    assert cell.mark.origin is None and entered is not None and not cell.mark.is_finite
    assert entered.operands == ("float32[]: inf",) and entered.frames[0][2].endswith("<lambda>")

    ((cell,), _) = interpret(dropped, x=X)
    assert cell.mark.is_finite and cell.mark.origin is None


def test_infinities_and_nan_that_are_joined_and_taken_apart_have_operations_of_their_own() -> None:
    # As the loss and the gradients in one all-reduce.
    def joined(x: Any) -> Any:
        overflow, nan = jnp.exp(x * 1000), jnp.sqrt(x - 2)
        both = jnp.concatenate([overflow, nan])
        rows = jnp.stack([overflow, nan])
        of_rows = jax.lax.map(lambda row: row * 1.5, rows)
        return both[:8], both[8:], of_rows[0], of_rows[1]

    cells, _ = interpret(joined, x=X)
    origins = [cell.mark.origin for cell in cells]
    names = [origin and origin.primitive for origin in origins]
    assert names == ["exp", "sqrt", "exp", "sqrt"]


def test_an_operation_has_the_place_where_the_user_called_it() -> None:
    def layer(w: Any, x: Any) -> Any:
        with jax.named_scope("bad"):
            return jnp.where(x > 2, 0.0, jnp.log(w * 0))

    # The function of JAX is traced once, and its second call is the one that counts.
    jnp.where(jnp.asarray(X) > 2, 0.0, jnp.zeros_like(X))

    def loss(w_first: Any, w_second: Any, x: Any) -> Any:
        return layer(w_second, x * w_first).sum()

    parameters = {"w_first": X, "w_second": X}
    ((value,), interpreter) = interpret(
        lambda **given: jax.jvp(  # as the step differentiates
            lambda first, second: loss(first, second, given["x"]),
            (given["w_first"], given["w_second"]),
            (given["w_first"], given["w_second"]),
        )[0],
        **parameters,
        x=X,
    )
    origin = value.mark.origin
    assert origin is not None
    assert (origin.primitive, origin.modules, origin.stage) == ("log", "bad", Stage.FORWARD)
    assert origin.parameter == "w_second"
    assert origin.frames[0][2].endswith("layer")
    assert origin.frames[0][1] == layer.__code__.co_firstlineno + 2
    assert set(interpreter.peaks) == {("w_first", Stage.FORWARD), ("w_second", Stage.FORWARD)}


def test_layers_are_the_folders_of_their_parameters() -> None:
    assert layer_of("state/params/blocks/3/kernel") == "state/params/blocks/3"
    assert layer_of("params/blocks/kernel[2]") == "params/blocks[2]"
    assert layer_of("scale") == "scale"
