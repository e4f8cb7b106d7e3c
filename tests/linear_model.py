"""The smallest model there is to train: four numbers to one, by squared error."""

import os
import signal
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from spmdtrain import CallbackContext, Trainer
from spmdtrain.document.terminal import Terminal


def squared_error(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    """Of batches (x, y)."""
    x, y = batch
    return {"loss": (model(x) - y) ** 2}


class Interrupting:
    """Validation data of which the second read of an evaluation sends SIGTERM, once `armed`."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y, self.armed = x, y, False

    def arm(self, step: int, event: CallbackContext) -> None:
        """As a callback: arms the data at a step."""
        self.armed = event.step == step

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.armed and indices[0] > 0:
            self.armed = False
            os.kill(os.getpid(), signal.SIGTERM)
        return self.x[indices], self.y[indices]


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
