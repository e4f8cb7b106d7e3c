"""A model whose gradients are wrong on one device, as on hardware that fails without an error."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain import BATCH_AXES, FunctionModel, TrainState

WIDTH = 6
NONE = np.array([-1, 0, 0, 0, 0], np.float32)
SIGN = 31  # the bit


def fault(device: int, *, leaf: int, element: int, bit: int = -1, stale: float = 0.0) -> np.ndarray:
    """A fault of a device: a flipped bit of an element, or a stale value where `bit` is -1."""
    return np.array([device, leaf, element, bit, stale], np.float32)


def model() -> FunctionModel:
    """(B, WIDTH) to (B,). The parameter `fault`, to be frozen, says which device fails."""
    return FunctionModel(_init, _apply)


def objective(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": (model(x) - y) ** 2}


def examples(rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)
    return x, (x.sum(1) ** 2).astype(np.float32)


def with_fault(state: TrainState, of: np.ndarray) -> TrainState:
    """The state whose model has this fault from now on."""
    before = state.params["fault"]
    return dataclasses.replace(
        state, params=state.params | {"fault": jax.device_put(of, before.sharding)}
    )


def _init(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    return {
        "fault": jnp.asarray(NONE),
        "first": jax.random.normal(first, (WIDTH, 16)),
        "second": jax.random.normal(second, (16,)),
    }


def _apply(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    weights = _faulty({k: v for k, v in params.items() if k != "fault"}, params["fault"])
    return jnp.tanh(x @ weights["first"]) @ weights["second"]


@jax.custom_vjp
def _faulty(weights: Any, fault: jax.Array) -> Any:
    return weights


def _forward(weights: Any, fault: jax.Array) -> tuple[Any, jax.Array]:
    return weights, fault


def _backward(fault: jax.Array, gradients: Any) -> tuple[Any, jax.Array]:
    try:
        own = jax.lax.axis_index(BATCH_AXES)
    except NameError:  # XLA divides the step: no device is known
        return gradients, jnp.zeros_like(fault)
    device, leaf, element, bit, stale = fault
    leaves, treedef = jax.tree.flatten(gradients)
    for number, x in enumerate(leaves):
        flat = x.ravel()
        at = element.astype(jnp.int32) % flat.size
        mask = jnp.left_shift(jnp.uint32(1), jnp.maximum(bit, 0).astype(jnp.uint32))
        flipped = jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(flat[at], jnp.uint32) ^ mask, jnp.float32
        )
        wrong = flat.at[at].set(jnp.where(bit < 0, stale, flipped))
        is_hit = (own == device) & (number == leaf)
        leaves[number] = jnp.where(is_hit, wrong, flat).reshape(x.shape)
    return jax.tree.unflatten(treedef, leaves), jnp.zeros_like(fault)


_faulty.defvjp(_forward, _backward)
