"""The sentinel: every injected fault is found, and its device is named."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from gradient_faults import NONE, SIGN, examples, fault, model, objective, with_fault
from helpers import saved_steps, status
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain import DeviceFaultError, MeshSpec, RunConfig, Trainer, TrainState, UserError
from spmdtrain.files.run_events import read_events
from spmdtrain.sharding.placement import use_placement
from spmdtrain.terminal import Terminal
from spmdtrain.train.sentinel_program import GradientSums
from spmdtrain.train.sentinel_verdict import FaultKind, Verdict, find_faulty

X, Y = examples()


def trainer(**options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": model(),
        "objective": objective,
        "optimizer": optax.adam(1e-3),
        "freeze": ("^fault",),
        "global_batch_size": 16,
        "terminal": Terminal(quiet=True),
    }
    return Trainer(**defaults | options)


class Checked:
    """The devices of a trainer, with a fault in some of the runs of a check."""

    def __init__(self, **options: Any) -> None:
        self.trainer = trainer(**options)
        self.state = self.trainer.functions.init(0)
        self.of, self.runs = NONE, range(0)
        outer = self

        class Sums(GradientSums):
            run = 0

            def __call__(self, state: TrainState, *given: Any) -> np.ndarray:
                self.run += 1
                active = (self.run - 1) in outer.runs
                return super().__call__(with_fault(state, outer.of if active else NONE), *given)

        self.sums = Sums(self.trainer.functions, self.trainer.placement)

    def verdict(self, of: np.ndarray = NONE, runs: range = range(3), start: int = 0) -> Any:
        self.of, self.runs, self.sums.run = of, runs, 0
        rows = slice(start, start + 16)
        with use_placement(self.trainer.placement):
            batch = jax.device_put((X[rows], Y[rows]), self.trainer.placement.batch)
            return self.sums.compare(self.state, batch)

    def gradient(self, leaf: int, element: int, device: int, start: int) -> float:
        """An element of a device's true gradient of another batch: what it may leave behind."""
        rows = slice(start + 2 * device, start + 2 * device + 2)
        params = jax.device_get(self.state.params)

        def loss(weights: Any) -> Any:
            out = np.tanh(X[rows] @ np.asarray(weights["first"])) if False else None
            del out
            import jax.numpy as jnp

            return ((jnp.tanh(X[rows] @ weights["first"]) @ weights["second"] - Y[rows]) ** 2).sum()

        found = jax.grad(loss)({k: v for k, v in params.items() if k != "fault"})
        flat = jax.tree.leaves(found)[leaf].ravel()
        return float(flat[element % flat.size])


@pytest.fixture(scope="module")
def checked() -> Checked:
    return Checked()
