"""A multi-layer perceptron."""

import itertools
from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from spmdtrain.errors import UserError
from spmdtrain.sharding.rules import Rule


def mlp_rules(layers: int) -> tuple[Rule, ...]:
    """Returns the sharding rules of an `MLP` for the axis "tensor".

    Layers are split in pairs: each device has some outputs of the first layer and the same inputs
    of the second, so that a pair needs one all-reduce. A last layer without a partner is
    replicated, because the number of classes may not divide.

    Args:
      layers: Number of layers, one more than the hidden widths.
    """
    rules = []
    for first in range(0, layers - 1, 2):
        rules += [
            Rule(f"layers/{first}/kernel$", PartitionSpec(None, "tensor")),
            Rule(f"layers/{first}/bias$", PartitionSpec("tensor")),
            Rule(f"layers/{first + 1}/kernel$", PartitionSpec("tensor", None)),
        ]
    return tuple(rules)


MLP_RULES = mlp_rules(2)
"""The rules of the first two layers, which every MLP with a hidden layer has."""


class MLP(nnx.Module):
    """Dense layers with ReLU between them, from (B, ...) to (B, `features_out`).

    All but the first dim of the input are flattened.

    Args:
      features_in: Number of values of an example.
      hidden: Widths of the hidden layers.
      features_out: Number of outputs.
      dropout: Fraction of the hidden values dropped in training.
      rngs: Random streams of the initialization and of dropout.

    Raises:
      UserError: If a width is below 1, or the dropout is outside [0, 1).
    """

    def __init__(
        self,
        features_in: int,
        hidden: Sequence[int],
        features_out: int,
        *,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = (features_in, *hidden, features_out)
        if min(sizes) < 1:
            raise UserError(f"hidden gives layers of {sizes} values: each must have 1 or more")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout is {dropout}: it must be at least 0 and below 1")
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers[:-1]:
            x = self.dropout(nnx.relu(layer(x)))
        return self.layers[-1](x)
