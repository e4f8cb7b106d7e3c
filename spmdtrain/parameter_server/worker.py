"""A worker of parameter servers: from parameters and the number of a batch to its gradients."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from spmdtrain.adapters.base import Variables
from spmdtrain.data.datasets import Dataset
from spmdtrain.data.loader import BatchCheck
from spmdtrain.data.sampling import Augment, TrainBatches, all_rows
from spmdtrain.parameter_server.state_partition import Computed, ServerPartition
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.train_step import StepFunctions

PyTree = Any


class Worker:
    """Computes batches on its own devices, over which it mirrors the model.

    Args:
        steps: Of its placement.
        dataset: What batches are made of; any worker makes the same of a number.
        threads: How many read a batch, a part of it each; 0 is none beside this one.
        key: What the randomness of all steps comes from: the state's.
    """

    def __init__(
        self,
        steps: StepFunctions,
        placement: Placement,
        division: ServerPartition,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        threads: int,
        augment: Augment | None,
        key: np.ndarray,
    ) -> None:
        self._placement, self._key = placement, key
        self._steps = steps
        every_step = np.iinfo(np.int64).max
        # Which batch is next nobody knows before: so it is one batch that threads share.
        self._parts = [
            TrainBatches(dataset, batch_size, seed, shuffle, every_step, rows, augment)
            for rows in np.array_split(all_rows(batch_size), max(1, min(threads, batch_size)))
        ]
        self._threads = ThreadPoolExecutor(len(self._parts)) if len(self._parts) > 1 else None
        self._check = BatchCheck()
        self._program = steps.gradient_program(division.on_worker)
        self._settled = False

    def compute(self, number: int, params: PyTree, model_state: PyTree) -> Computed:
        """The gradients of a batch, in NumPy arrays."""
        batch = self._read(number)
        with use_placement(self._placement):
            if not self._settled:
                self._steps.choose_reduction(batch)
                self._settled = True
            placed = jax.device_put(batch, self._placement.batch)
            variables = Variables(params, model_state)
            found = self._program(variables, placed, self._key, np.int32(number))
        gradients, more, means, sums = jax.tree.map(np.asarray, found)
        told = {name: float(value) for name, value in means.items()}
        pairs = dict(zip(sorted(told), sums.tolist(), strict=True))
        return Computed(gradients, more, told, pairs)

    def _read(self, number: int) -> PyTree:
        run = map if self._threads is None else self._threads.map
        parts = list(run(lambda batches: batches[number], self._parts))
        for part, batches in zip(parts, self._parts, strict=True):
            self._check(part, len(batches.local))
        if len(parts) == 1:
            return parts[0]
        return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
