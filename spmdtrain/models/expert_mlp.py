"""MLPs of experts for the blocks of decoders, and the values of their routers."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.config.options import check_values
from spmdtrain.errors import UserError
from spmdtrain.kernels.experts import Dot, experts


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """The experts of each block, of which a router chooses some for each token.

    Attributes:
      count: Number of experts.
      top_k: Number of experts for each token.
      normalize: Whether the weights of a token's experts, their probabilities, are divided by their
        sum.

    Raises:
      UserError: If `top_k` is not from 1 to `count`.
    """

    count: int
    top_k: int
    normalize: bool = True

    def __post_init__(self) -> None:
        check_values(self, RoutedExperts)
        if not 1 <= self.top_k <= self.count:
            raise UserError(
                f"each token has {self.top_k} of {self.count} experts: it must have at least 1, "
                "and at most all"
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """The values of a model's routers; see `ExpertOutput`.

    Attributes:
      balance: f32 (B,), the load-balance loss, the mean over layers: 1 if all experts are equally
        probable.
      z: f32 (B,), the mean over layers of the squared normalizer of the logits.
      entropy: f32 (B,), the mean over layers of the entropy of the probabilities, in nats.
      load: f32 (B, layers, experts), the number of choices for each expert; for one layer (B,
        experts).
      overflow: f32 scalar, the number of layers that gathered all tokens.
    """

    balance: jax.Array
    z: jax.Array
    entropy: jax.Array
    load: jax.Array
    overflow: jax.Array

    @classmethod
    def over_layers(cls, layers: "Routing") -> "Routing":
        """Returns the values of a model from the values of its layers.

        Args:
          layers: The values of the layers; the first dim of each array is the layer.
        """
        balance, z, entropy = (x.mean(0) for x in (layers.balance, layers.z, layers.entropy))
        load = jnp.swapaxes(layers.load, 0, 1)
        return cls(balance, z, entropy, load, layers.overflow.sum())


def peak_load(load: Any) -> Any:
    """Returns the load of the busiest expert divided by the mean load, averaged over layers.

    It is 1 if all experts are chosen equally often, and the number of experts over `top_k` if all
    tokens choose the same.

    Args:
      load: A JAX or NumPy array (..., layers, experts): the number of choices for each expert.
    """
    return (load.max(-1) / load.mean(-1)).mean(-1)


def expert_mlp(
    x: jax.Array, weights: dict[str, jax.Array], config: RoutedExperts
) -> tuple[jax.Array, Routing]:
    """Computes each token with the SwiGLU of some of the experts.

    The router computes in f32.

    Args:
      x: (B, T, width).
      weights: `router` (width, experts), `gate` and `up` (experts, width, hidden), `down` (experts,
        hidden, width).
      config: The experts.

    Returns:
      (B, T, width), and the values of the router.
    """
    # On a TPU, a product of f32 arrays is one of bfloat16 by default.
    precise = jax.lax.Precision.HIGHEST
    router = weights["router"].astype(jnp.float32)
    logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), router, precision=precise)
    kernels = {name: weights[name] for name in ("gate", "up", "down")}
    y = experts(x, logits, kernels, _swiglu, top_k=config.top_k, normalize=config.normalize)
    return y.output, Routing(y.balance, y.z, y.entropy, y.load, y.overflow)


def _swiglu(rows: jax.Array, kernels: dict[str, jax.Array], dot: Dot) -> jax.Array:
    active = jax.nn.silu(dot(rows, kernels["gate"])) * dot(rows, kernels["up"])
    return dot(active, kernels["down"])
