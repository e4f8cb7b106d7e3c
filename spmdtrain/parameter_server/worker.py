"""A worker of parameter servers: from parameters and the number of a batch to its gradients."""

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from spmdtrain.adapters.base import Variables
from spmdtrain.config import ParameterServerOptions, RunConfig
from spmdtrain.config_checks import resolve
from spmdtrain.data.datasets import Dataset
from spmdtrain.data.loader import BatchCheck
from spmdtrain.data.sampling import Augment, TrainBatches, all_rows
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.parameter_server.scheduler import Outcome
from spmdtrain.parameter_server.server import PushResult
from spmdtrain.parameter_server.state_partition import Computed, ServerPartition, bytes_in, outcome
from spmdtrain.sharding.placement import Placement, configure_backend, make_placement, use_placement
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


@dataclasses.dataclass(frozen=True)
class RemoteWorker:
    """A worker that pulls what it computes with, and pushes what comes of it."""

    worker: Worker
    division: ServerPartition
    servers: Sequence[Any]

    def __call__(self, number: int) -> Outcome:
        """Make the step of a batch."""
        with phase(Phase.STEP, number + 1):
            return self._step(number)

    def _step(self, number: int) -> Outcome:
        import ray

        parts = ray.get([server.pull.remote(number) for server in self.servers])
        computed = self.worker.compute(number, *self.division.pulled(parts))
        pushes = self.division.pushes(number, computed, parts)
        landed: list[PushResult] = ray.get(
            [server.push.remote(push) for server, push in zip(self.servers, pushes, strict=True)]
        )
        return outcome(
            number,
            computed.metrics,
            landed,
            sums=computed.sums,
            pulled=sum(bytes_in((part.params, part.model_state)) for part in parts),
            pushed=sum(bytes_in((push.gradients, push.model_state)) for push in pushes),
        )


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker is told, wherever it comes.

    Attributes:
        steps: Makes the steps' programs for a configuration, under its placement.
        config: The run's, for one worker with devices of its own.
        key: Of the state.
        servers: The actors.
    """

    steps: Callable[[RunConfig, Placement], StepFunctions]
    config: RunConfig
    division: ServerPartition
    dataset: Dataset
    augment: Augment | None
    key: np.ndarray
    servers: Sequence[Any]

    def __call__(self) -> RemoteWorker:
        """The worker, in its own process."""
        configure_backend(self.config)
        placement = make_placement(self.config)
        # The chief has looked whether the batch divides over devices of its own.
        config = resolve(self.config, batch_shards=placement.batch_shards)
        assert config.global_batch_size is not None
        worker = Worker(
            self.steps(config, placement),
            placement,
            self.division,
            self.dataset,
            batch_size=config.global_batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            threads=config.data_threads,
            augment=self.augment,
            key=self.key,
        )
        return RemoteWorker(worker, self.division, self.servers)


def for_worker(config: RunConfig) -> RunConfig:
    """The configuration of one worker, which mirrors the model over devices of its own."""
    return dataclasses.replace(
        config, strategy="mirrored", workdir=None, servers=ParameterServerOptions()
    )
