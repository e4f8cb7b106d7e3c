"""Whether a state is finite: however small or large the array, and wherever the element."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdtrain.step.health import finite_flags, stays_finite

SHAPES = ((), (3,), (4, 5), (2, 3, 4), (70_000,), (300, 200), (0, 4))
KINDS = (jnp.float32, jnp.bfloat16, jnp.int32)
LEAVES = [(shape, kind) for shape in SHAPES for kind in KINDS]
FLOATS = [n for n, (shape, kind) in enumerate(LEAVES) if kind != jnp.int32 and np.prod(shape)]


def tree(value: float) -> list[jax.Array]:
    return [jnp.full(shape, value).astype(kind) for shape, kind in LEAVES]


@pytest.fixture(scope="module", params=[1, 8], ids=["one", "mesh"])
def places(request: pytest.FixtureRequest) -> list[NamedSharding]:
    mesh = Mesh(np.array(jax.devices()[: request.param]), ("data",))
    return [NamedSharding(mesh, PartitionSpec())] * len(LEAVES)


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 3e38, -3e38])
def test_what_is_finite_is(value: float, places: list[NamedSharding]) -> None:
    assert stays_finite(tree(0.0), tree(value), places)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    leaf=st.sampled_from(FLOATS),
    where=st.floats(0, 1, exclude_max=True),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_one_element_that_is_not_is_seen(
    leaf: int, where: float, value: float, places: list[NamedSharding]
) -> None:
    after = tree(1.0)
    flat = after[leaf].ravel()
    after[leaf] = flat.at[int(where * flat.size)].set(value).reshape(after[leaf].shape)
    assert not stays_finite(tree(1.0), after, places)


def test_a_scalar_that_was_infinite_before_is_meant_so(places: list[NamedSharding]) -> None:
    assert stays_finite([jnp.inf], [jnp.asarray(jnp.inf)], places[:1])
    assert not stays_finite([jnp.inf], [jnp.asarray(jnp.nan)], places[:1])
    assert not stays_finite([jnp.ones(3)], [jnp.full(3, jnp.inf)], places[:1])


@pytest.mark.parametrize(
    ("is_last", "param", "expected"),
    [
        (False, 1.0, [True, True, True, True]),  # found after the last step of the dispatch
        (True, 1.0, [True, True, False, True]),
        (False, np.nan, [True, False, False, True]),
    ],
)
def test_within_a_dispatch_the_optimizer_is_checked_after_the_last_step_or_a_bad_one(
    is_last: bool, param: float, expected: list[bool]
) -> None:
    place = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())

    def state(param: float, moment: float) -> SimpleNamespace:
        params, moments = jnp.full((3, 4), param), [jnp.full((3, 4), moment)]
        return SimpleNamespace(params=params, opt_state=moments, model_state={})

    places = SimpleNamespace(params=place, opt_state=[place], model_state={})
    before, after, last = state(1.0, 1.0), state(param, np.inf), jnp.array(is_last)
    flags = finite_flags(jnp.array(1.0), before, after, places, is_last=last)
    assert flags.tolist() == expected
