"""Norms and finite flags in the pass of the update: values, and each element that is not finite."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from spmdtrain.step.health import FLAGS, fused_evaluation

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
PARAMS: dict[str, Any] = {
    "a": {"kernel": jnp.linspace(-1, 1, 12).reshape(3, 4)},
    "b": jnp.ones(3),
}
GRADIENTS = jax.tree.map(lambda x: jnp.sin(7 * x), PARAMS)


def updated(state: Any, gradients: Any) -> tuple[Any, tuple[Any, Any]]:
    scaled = jax.tree.map(lambda x: x / 3, gradients)
    updates, opt_state = OPTIMIZER.update(scaled, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    after = SimpleNamespace(params=params, opt_state=opt_state, model_state={})
    return after, (scaled, updates)


@jax.jit
def step(state: Any, gradients: Any) -> Any:
    def run(state: Any, gradients: Any) -> Any:
        after, changes = updated(state, gradients)
        return Found(after.params, after.opt_state), changes

    found, checks = fused_evaluation(run, state, gradients)
    before = SimpleNamespace(**state, model_state={})
    place = SingleDeviceSharding(jax.devices()[0])
    places = SimpleNamespace(
        opt_state=jax.tree.map(lambda _: place, state["opt_state"]), model_state={}
    )
    flags = checks.flags(jnp.float32(0), before, found.state, places)
    return found.params, found.opt_state, checks.norms, flags


@jax.tree_util.register_pytree_node_class
class Found:
    """The first result of an update."""

    def __init__(self, params: Any, opt_state: Any) -> None:
        self.params, self.opt_state = params, opt_state

    @property
    def state(self) -> Any:
        return SimpleNamespace(params=self.params, opt_state=self.opt_state, model_state={})

    def tree_flatten(self) -> Any:
        return (self.params, self.opt_state), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> "Found":
        return cls(*children)


def start() -> dict[str, Any]:
    return {"params": PARAMS, "opt_state": OPTIMIZER.init(PARAMS)}


def test_the_state_has_the_same_bits_and_norms_are_those_of_all_elements() -> None:
    after, (scaled, updates) = jax.jit(
        lambda state, gradients: (lambda found: ((found[0].params, found[0].opt_state), found[1]))(
            updated(state, gradients)
        )
    )(start(), GRADIENTS)
    params, opt_state, norms, flags = step(start(), GRADIENTS)
    for one, other in zip(
        jax.tree.leaves((params, opt_state)), jax.tree.leaves(after), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    expected = [optax.tree.norm(tree) for tree in (params, scaled, updates)]
    np.testing.assert_allclose(norms, expected, rtol=1e-6)
    assert flags.all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["params", "opt_state"])
def test_one_element_that_is_not_finite_is_found_and_named(name: str, value: float) -> None:
    state = start()
    if name == "params":
        state["params"] = {**PARAMS, "b": PARAMS["b"].at[1].set(value)}
    else:
        adam = state["opt_state"][1][0]
        nu = {**adam.nu, "b": adam.nu["b"].at[1].set(value)}
        state["opt_state"] = (
            state["opt_state"][0],
            (adam._replace(nu=nu), *state["opt_state"][1][1:]),
        )
    flags = dict(zip(FLAGS, step(state, GRADIENTS)[3].tolist(), strict=True))
    assert not flags[name]
    assert flags["loss"] and flags["model_state"]
    if name == "params":
        assert flags["opt_state"]


def test_large_elements_whose_squares_are_infinite_are_finite() -> None:
    state = start()
    state["params"] = {**PARAMS, "b": PARAMS["b"] * 1e30}
    assert step(state, GRADIENTS)[3].all()
