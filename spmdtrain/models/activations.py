"""Activation functions with gradients for training."""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def squared_relu(x: jax.Array) -> jax.Array:
    """Returns the square of positive values, and 0 for others (arXiv:2109.08668).

    Its gradient needs only the positive part. The gradient of `jax.nn.relu` also needs a
    stored mask of the positive values, which a TPU packs into bits.

    Args:
      x: Any shape.
    """
    return jnp.square(jax.nn.relu(x))


@squared_relu.defjvp
def _squared_relu_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    positive = jnp.maximum(primals[0], 0)
    return jnp.square(positive), 2 * positive * tangents[0]
