"""Small models that the experiments share; nothing in the library depends on them."""

import itertools
from collections.abc import Sequence

import jax
from flax import nnx

from spmdtrain.errors import UserError


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
