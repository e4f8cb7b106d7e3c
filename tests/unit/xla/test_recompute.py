"""Values that a branch computes again: the same values, and no cost outside of the branch."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain.xla.jaxpr import recomputable

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 48)), jnp.float32)


def loss(w: jax.Array) -> jax.Array:
    return jnp.square(jnp.tanh(X @ w)).sum()


def updated(state: Any) -> Any:
    """A step: the new state, and what a branch needs: the scaled gradients and the updates."""
    w, opt_state = state
    gradients = jax.grad(loss)(w) * 0.3
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, w)
    return (optax.apply_updates(w, updates), opt_state), (gradients, updates)


def with_branch(state: Any, needed: jax.Array) -> Any:
    after, changes = recomputable(updated, state)
    norm = optax.tree.norm
    none = jnp.zeros(2)
    return after, jax.lax.cond(needed, lambda: jnp.stack([*map(norm, changes())]), lambda: none)


def passes(compiled: Any) -> int:
    """Returns how often the program writes an array of the size of the parameters."""
    entry = compiled.as_text().rpartition("ENTRY")[2]
    return len(re.findall(r"= f32\[48,48\]\S* (?:fusion|dot)\(", entry))


def test_a_branch_has_the_values_and_the_program_outside_of_it_does_not_change() -> None:
    w = jnp.asarray(np.random.default_rng(1).normal(size=(48, 48)), jnp.float32)
    state = (w, OPTIMIZER.init(w))
    plain = jax.jit(lambda state: updated(state)[0]).lower(state).compile()
    step = jax.jit(with_branch).lower(state, jnp.array(True)).compile()
    after, norms = step(state, jnp.array(True))
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(plain(state)), strict=True):
        np.testing.assert_array_equal(one, other)
    expected = [np.linalg.norm(x) for x in jax.jit(lambda state: updated(state)[1])(state)]
    np.testing.assert_allclose(norms, expected, rtol=1e-5)
    np.testing.assert_array_equal(step(state, jnp.array(False))[1], 0)
    assert passes(step) == passes(plain)


def test_a_constant_of_the_state_is_an_array() -> None:
    """The state of `optax.contrib.dog` has a Python bool after an update."""
    state = {"first": jnp.array(True), "w": jnp.ones(3)}
    after, _ = recomputable(lambda state: ({**state, "first": False}, state["w"]), state)
    assert isinstance(after["first"], jax.Array) and after["first"].dtype == bool
