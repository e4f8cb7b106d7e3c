"""The residual stream between the blocks of a transformer, split over devices."""

import jax

from spmdtrain.sharding.placement import constrain_sharding


def split_residual(x: jax.Array) -> jax.Array:
    """Returns a residual stream, (B, T, width), with its tokens split over "context" and "tensor".

    Each device of "tensor" then adds, normalizes and drops out its part of the tokens alone, and
    keeps only this part for the backward pass. The sum over "tensor" at the end of each half of a
    block becomes a reduce-scatter, and the next half gathers the tokens after its norm. In the
    forward pass both together send as many bytes as the all-reduce; the backward pass gathers the
    tokens once more (sequence parallelism, Korthikanti et al. 2022, arXiv:2205.05198). Tokens that
    do not divide over "tensor" are whole on each of its devices.

    Args:
      x: (B, T, width).
    """
    return constrain_sharding(x, "batch", ("context", "tensor"), None)
