"""The multi-layer perceptron."""

import itertools
from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from spmdtrain.errors import UserError
from spmdtrain.sharding.layout import Rule


def mlp_rules(layers: int) -> tuple[Rule, ...]:
    """How an `MLP` with so many layers (one more than hidden widths) splits over "tensor".

    In pairs: of the first layer each device has some of the outputs, of the second the same
    inputs, so that one sum over the devices is all that is exchanged. Only hidden widths are split
    so; a last layer without a partner stays whole, as the task's 10 classes need not divide.
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
"""Those of the first two layers, which every MLP with a hidden layer has."""


class MLP(nnx.Module):
    """Dense layers with relu between them; all but the first dim of the input are flattened.

    (B, ...) to (B, `features_out`), f32. Raises `UserError` for widths below 1 and a dropout
    outside [0, 1).
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
            raise UserError(f"hidden makes layers of {sizes} values: each must have 1 or more")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout is {dropout}: it must be at least 0 and below 1")
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers[:-1]:
            x = self.dropout(nnx.relu(layer(x)))
        return self.layers[-1](x)
