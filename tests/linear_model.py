"""The smallest model there is to train: four numbers to one, by squared error."""

from functools import partial
from typing import Any

import jax
import optax
from flax import nnx

from spmdtrain import Trainer
from spmdtrain.terminal import Terminal


def squared_error(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    """Of batches (x, y)."""
    x, y = batch
    return {"loss": (model(x) - y) ** 2}


def trainer(**options: Any) -> Trainer:
    """One of it, in batches of 8, that prints nothing."""
    defaults: dict[str, Any] = {
        "model": partial(nnx.Linear, 4, 1),
        "objective": squared_error,
        "optimizer": optax.adam(0.05),
        "global_batch_size": 8,
        "terminal": Terminal(quiet=True),
    }
    return Trainer(**defaults | options)
