"""Which steps are dispatched together, and the loops that run them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

from spmdtrain import MeshSpec, UserError
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.sampling import CountedBatches, IndexedBatch, stack_batches
from spmdtrain.sharding.placement import make_placement
from spmdtrain.step.dispatch import (
    Dispatch,
    Repeat,
    choose_dispatch,
    may_group,
    repeated,
    update_program,
)
from spmdtrain.step.exact import FixedOrder
from spmdtrain.step.state import TrainState

MOST = 6  # steps of a dispatch
ONE: dict[str, Any] = {"mesh": MeshSpec(devices=(0,)), "global_batch_size": 8}


def step(state: jax.Array, batch: jax.Array, is_last: Any) -> tuple[jax.Array, dict[str, Any]]:
    """Has a state whose bits depend on the order and the number of the steps."""
    state = jnp.sin(state * 1.7 + batch.sum())
    return state, {"sum": batch.sum(), "is_last": is_last}


program = jax.jit(repeated(step, Repeat.COUNTED))


@pytest.mark.slow
@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, MOST), min_size=1, max_size=5))
def test_a_counted_loop_has_the_same_bits_however_steps_are_grouped(sizes: list[int]) -> None:
    batches = np.random.default_rng(0).normal(size=(sum(sizes), 3)).astype(np.float32)

    def after(sizes: list[int]) -> tuple[np.ndarray, list[float]]:
        state, start, sums = jnp.ones(4), 0, []
        for size in sizes:
            stacked = stack_batches(list(batches[start : start + size]), MOST)
            state, output = program(state, CountedBatches(stacked, np.int32(size)))
            assert output["is_last"].tolist() == [n == size - 1 for n in range(MOST)]
            assert not output["sum"][size:].any()
            sums += output["sum"][:size].tolist()
            start += size
        return np.asarray(state), sums

    single, each = after([1] * sum(sizes))
    grouped, found = after(sizes)
    np.testing.assert_array_equal(grouped, single)
    assert found == each == [float(jnp.sum(x)) for x in batches]


@pytest.mark.parametrize("repeat", [Repeat.SCAN, Repeat.UNROLLED, Repeat.COUNTED])
def test_an_indexed_batch_has_indices_of_each_step(repeat: Repeat) -> None:
    arrays = jnp.arange(10.0)
    indices = np.array([[1, 2], [5, 7]], np.int32)
    batches: Any = IndexedBatch(indices, arrays)
    if repeat is Repeat.COUNTED:
        batches = CountedBatches(batches, np.int32(2))

    def add(total: jax.Array, batch: Any, is_last: Any) -> Any:
        return total + batch.arrays[batch.indices].sum(), (batch.indices, is_last)

    total, (seen, is_last) = jax.jit(repeated(add, repeat))(jnp.float32(0), batches)
    assert total == 15
    np.testing.assert_array_equal(seen, indices)
    assert is_last.tolist() == [False, True]


def shapes(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def state_of(params: Any, model_state: Any = ()) -> TrainState:
    scalar: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return TrainState(scalar, params, (), {}, model_state, scalar)


@pytest.mark.parametrize(
    ("options", "state", "expected"),
    [
        ({}, state_of(shapes(2**24 - 2)), True),
        ({}, state_of(shapes(2**24)), False),  # more than 64 MiB
        ({}, state_of(shapes(4), {"mean": shapes(4)}), False),
        ({"mesh": MeshSpec(data=8)}, state_of(shapes(4)), False),
        ({"jit": False}, state_of(shapes(4)), False),
    ],
)
def test_steps_may_be_grouped_on_a_cpu_with_one_device(
    options: dict[str, Any], state: Any, expected: bool
) -> None:
    config = RunConfig(**(ONE | options))
    placement = make_placement(config)
    assert may_group(config, placement, state) == expected
    assert not may_group(config, placement, state, FixedOrder(placement, 8))


@pytest.mark.parametrize(("processes", "expected"), [((0, 1), True), ((0, 0, 1, 1), False)])
def test_steps_are_grouped_in_all_processes_or_in_none(
    processes: tuple[int, ...], expected: bool
) -> None:
    config = RunConfig(**ONE)
    placement: Any = SimpleNamespace(
        devices=[SimpleNamespace(platform="cpu", process_index=x) for x in processes],
        strategy=make_placement(config).strategy,
    )
    assert may_group(config, placement, state_of(shapes(4))) == expected


def test_the_loop_of_an_accelerator_has_a_fixed_number_of_steps() -> None:
    placement: Any = SimpleNamespace(devices=[SimpleNamespace(platform="gpu")])
    traced = jax.make_jaxpr(convolution)(shapes(8, 256)).jaxpr
    found = choose_dispatch(3, placement, state_of(shapes(4)), shapes(8, 256), traced, None)
    assert found == Dispatch(3, Repeat.SCAN)
    assert [found.program_steps(n) for n in (1, 3)] == [1, 3]
    assert [found.repeat_of(n) for n in (1, 3)] == [Repeat.NONE, Repeat.SCAN]


def choose(
    forward: Any,
    batch: Any,
    params: Any = None,
    *,
    steps: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Dispatch:
    params = shapes(4) if params is None else params
    optimizer = optimizer or optax.sgd(0.1)
    update = update_program(optimizer, params, jax.eval_shape(optimizer.init, params))
    traced = jax.make_jaxpr(forward)(batch).jaxpr
    placement = make_placement(RunConfig(**ONE))
    return choose_dispatch(steps, placement, state_of(params), batch, traced, update)


def products(count: int, x: jax.Array) -> jax.Array:
    """Has `count` products of 2 * 8 * 256 * 256 operations."""
    weights = jnp.ones((256, 256))
    for _ in range(count):
        x = x @ weights
    return x


def elementwise(x: jax.Array) -> jax.Array:
    """Has 5,000 operations on 2,048 elements."""
    return jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, length=5000)[0]


def printing(x: jax.Array) -> jax.Array:
    jax.debug.print("sum {}", x.sum())
    return x


def until_small(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda x: x.sum() > 1, lambda x: x / 2, x)


def convolution(x: jax.Array) -> jax.Array:
    return jax.lax.conv(x[None, None], jnp.ones((1, 1, 3, 3)), (1, 1), "SAME")


@pytest.mark.parametrize(
    ("steps", "forward", "batch", "expected"),
    [
        (None, partial(products, 300), shapes(8, 256), Dispatch(10, Repeat.COUNTED)),
        (None, partial(products, 100), shapes(8, 256), Dispatch(31, Repeat.COUNTED)),
        (None, partial(products, 10), shapes(8, 256), Dispatch(50, Repeat.COUNTED)),
        (None, partial(products, 340), shapes(8, 256), Dispatch()),
        (None, jnp.sum, shapes(8, 2**14), Dispatch(10, Repeat.COUNTED)),  # 512 KiB
        (None, jnp.sum, shapes(8, 2**14 + 1), Dispatch()),
        (None, elementwise, shapes(8, 256), Dispatch()),
        (None, printing, shapes(8, 256), Dispatch()),
        (None, until_small, shapes(8, 256), Dispatch()),
        (None, convolution, shapes(8, 256), Dispatch()),
        (3, convolution, shapes(8, 256), Dispatch(3, Repeat.UNROLLED)),
        (3, partial(products, 400), shapes(8, 256), Dispatch(3, Repeat.COUNTED)),
    ],
)
def test_small_steps_are_grouped(
    steps: int | None, forward: Any, batch: Any, expected: Dispatch
) -> None:
    assert choose(forward, batch, steps=steps) == expected


@pytest.mark.parametrize(
    "operation",
    [jnp.linalg.svd, jnp.linalg.inv, jnp.linalg.eigh, jnp.linalg.qr, jnp.linalg.cholesky],
)
def test_steps_with_a_decomposition_of_a_matrix_are_not_grouped(operation: Any) -> None:
    def decompose(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda x: x + jax.tree.leaves(operation(x))[0].sum(), updates), state

    optimizer = optax.GradientTransformation(lambda params: (), decompose)
    assert choose(operation, shapes(8, 8)) == Dispatch()
    assert choose(jnp.sum, shapes(8, 8), shapes(8, 8), optimizer=optimizer) == Dispatch()


@pytest.mark.parametrize(("width", "steps"), [(64, 50), (256, 19), (512, 1)])
def test_the_products_of_the_optimizer_count(width: int, steps: int) -> None:
    found = choose(jnp.sum, shapes(8, 8), shapes(width, width), optimizer=optax.contrib.muon(0.1))
    assert found.steps == steps


def test_the_larger_the_state_the_fewer_steps_are_grouped() -> None:
    for count, steps in ((2**21, 50), (2**22, 39), (2**24 - 2, 10)):
        found = choose(jnp.sum, shapes(8, 4), shapes(count))
        assert found == Dispatch(steps, Repeat.COUNTED)


def test_a_state_whose_types_change_cannot_be_in_a_loop() -> None:
    def count(state: Any, batch: Any, is_last: Any) -> Any:
        return {"params": state["params"], "count": state["count"] + 0.5}, is_last

    state = {"params": jnp.ones(3), "count": jnp.int32(0)}
    batches = CountedBatches(np.zeros((2, 4), np.float32), np.int32(2))
    message = r"count of the state is int32\[\] before a step and float32\[\] after it"
    with pytest.raises(UserError, match=message):
        repeated(count, Repeat.COUNTED)(state, batches)


def test_only_optimizers_that_keep_the_types_of_their_state_are_grouped_by_default() -> None:
    def counting(by: float) -> optax.GradientTransformation:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return updates, state + by

        return optax.GradientTransformation(lambda params: jnp.int32(0), update)

    params = shapes(4)
    for optimizer, expected in [
        (optax.adam(1e-3), True),
        (counting(1), True),
        (counting(0.5), False),
        (optax.lbfgs(), False),  # needs the loss
    ]:
        state = jax.eval_shape(optimizer.init, params)
        assert (update_program(optimizer, params, state) is not None) == expected
