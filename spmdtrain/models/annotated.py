"""Parameters that are annotated with logical names of their dims."""

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.sharding.rules import AxisRules

# Over "tensor" each device has some of the heads and hidden values, so that each half of a block
# ends with one sum over it (see `split_residual`).
AXIS_RULES = AxisRules(
    {
        "vocab": "tensor",
        "embed": "fsdp",
        "heads": "tensor",
        "kv_heads": "tensor",
        "mlp": "tensor",
        "experts": "expert",
    }
)
"""The axis of each name. Parameters carry these rules; `axis_rules` of a run replace entries."""


def normal_param(
    rngs: nnx.Rngs, shape: tuple[int, ...], *, std: float, names: tuple[str | None, ...]
) -> nnx.Param[jax.Array]:
    """Returns a parameter with draws of a normal distribution of mean 0, f32.

    Args:
      rngs: Its stream `params` is used.
      shape: The shape.
      std: The standard deviation.
      names: For each dim the logical name, or None for a dim that is never split.
    """
    return annotated_param(std * jax.random.normal(rngs.params(), shape, jnp.float32), names)


def annotated_param(value: jax.Array, names: tuple[str | None, ...]) -> nnx.Param[jax.Array]:
    """Returns a parameter whose annotation a run reads.

    Args:
      value: The array.
      names: For each dim the logical name, or None for a dim that is never split.
    """
    # Without eager sharding, because Flax would need axes of a mesh in place of names.
    rules = AXIS_RULES.pairs
    return nnx.Param(value, eager_sharding=False, out_sharding=names, sharding_rules=rules)
