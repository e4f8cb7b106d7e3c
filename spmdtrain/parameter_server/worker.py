"""A worker of a training with parameter servers."""

import dataclasses
import io
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from spmdtrain.adapters.base import Variables
from spmdtrain.config.options import ParameterServerOptions
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import Dataset
from spmdtrain.data.loader import BatchCheck
from spmdtrain.data.sampling import Augment, TrainBatches, all_rows
from spmdtrain.distributed.first_call import Together
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.keras.internals import reduce_by_attributes
from spmdtrain.parameter_server.partition import (
    Computed,
    ServerPartition,
    batch_result,
    bytes_in,
)
from spmdtrain.parameter_server.scheduler import BatchResult
from spmdtrain.parameter_server.server import PushResult
from spmdtrain.sharding.mesh import resolve
from spmdtrain.sharding.placement import Placement, configure_backend, make_placement, use_placement
from spmdtrain.step import metrics
from spmdtrain.step.batch_checks import check_partitioned
from spmdtrain.step.functions import RunFunctions, eager
from spmdtrain.step.gradients import ByXla, Inputs, difference
from spmdtrain.step.metrics import Combination
from spmdtrain.step.optimizer import clipped
from spmdtrain.step.program import plan_step

PyTree = Any


class Worker:
    """Computes the gradients of batches on its own devices, over which it mirrors the model.

    Every worker makes the same batch of a number. `augment` transforms each example on the host.

    Args:
      placement: The mesh of the worker's devices, for which `steps` were made.
      threads: Number of threads that read a batch, each a part of it; with 0 or 1 the calling
        thread reads it.
      key: The random key of the state.
    """

    def __init__(
        self,
        steps: RunFunctions,
        placement: Placement,
        partition: ServerPartition,
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
        # The number of the next batch is not known in advance, so the threads share one batch.
        self._parts = [
            TrainBatches(dataset, batch_size, seed, shuffle, every_step, rows, augment)
            for rows in np.array_split(all_rows(batch_size), max(1, min(threads, batch_size)))
        ]
        self._threads = ThreadPoolExecutor(len(self._parts)) if len(self._parts) > 1 else None
        self._check = BatchCheck()
        self._program = make_gradient_step(steps, partition.on_worker)
        self._is_checked = False

    def compute(self, number: int, params: PyTree, model_state: PyTree) -> Computed:
        """Returns the gradients and metrics of a batch, NumPy arrays."""
        batch = self.read_batch(number)
        with use_placement(self._placement):
            if not self._is_checked:
                plan_step(self._steps, batch)  # checks the batch
                self._is_checked = True
            placed = jax.device_put(batch, self._placement.batch)
            variables = Variables(params, model_state)
            output = self._program(variables, placed, self._key, np.int32(number))
        gradients, state_change, means, sums, combined = jax.tree.map(np.asarray, output)
        metrics = {name: float(value) for name, value in means.items()}
        pairs = dict(zip(sorted(metrics), sums.tolist(), strict=True))
        return Computed(gradients, state_change, metrics, pairs, combined)

    def read_batch(self, number: int) -> PyTree:
        """Reads and checks a batch."""
        run = map if self._threads is None else self._threads.map
        parts = list(run(lambda batches: batches[number], self._parts))
        for part, batches in zip(parts, self._parts, strict=True):
            self._check(part, len(batches.local))
        if len(parts) == 1:
            return parts[0]
        return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


def make_gradient_step(steps: RunFunctions, on_worker: optax.GradientTransformation) -> Any:
    """Returns the jitted step of a worker: gradients without an update.

    It is a function (variables, batch, key, step) -> (gradients of the trained parameters, change
    of the model state, weighted means, stacked sums, combined metrics). `on_worker` is the part of
    the optimizer that is applied to the whole gradient.
    """
    update, placement = steps.update, steps.placement
    rule = steps.rule or ByXla(placement)

    def gradient_step(
        variables: Variables, batch: PyTree, key: jax.Array, step: jax.Array
    ) -> tuple[PyTree, PyTree, dict[str, jax.Array], jax.Array, dict[str, Combination]]:
        step_key = jax.random.fold_in(jax.random.wrap_key_data(key), step)
        trained, frozen = update.partition(variables.params)
        inputs = Inputs(trained, frozen, variables.model_state, batch, step_key)
        computed = rule(steps.loss, inputs)
        means = metrics.batch_means(computed.metrics)
        transformed = clipped(on_worker, computed.gradients, trained, means["loss"])
        change = difference(computed.model_state, variables.model_state)
        sums, combined = metrics.stacked(computed.metrics), metrics.combinations(computed.metrics)
        return transformed, change, means, sums, combined

    if not steps.config.jit:
        return eager(gradient_step)
    replicated = placement.replicated
    compiled = jax.jit(
        gradient_step,
        in_shardings=(replicated, placement.batch, replicated, replicated),
        out_shardings=replicated,
        compiler_options=steps.compiler_options or None,
    )
    return Together(compiled, constant=1, check=partial(check_partitioned, placement=placement))


@dataclasses.dataclass(frozen=True)
class RemoteWorker:
    """A worker that pulls parameters from the servers (Ray actors) and pushes gradients to them."""

    worker: Worker
    partition: ServerPartition
    servers: Sequence[Any]

    def __call__(self, number: int) -> BatchResult:
        """Makes the step of a batch and returns its result."""
        with phase(Phase.STEP, number + 1):
            return self._step(number)

    def _step(self, number: int) -> BatchResult:
        import ray

        parts = ray.get([server.pull.remote(number) for server in self.servers])
        computed = self.worker.compute(number, *self.partition.pulled(parts))
        pushes = self.partition.pushes(number, computed, parts)
        results: list[PushResult] = ray.get(
            [server.push.remote(push) for server, push in zip(self.servers, pushes, strict=True)]
        )
        return batch_result(
            number,
            computed.metrics,
            results,
            sums=computed.sums,
            combined=computed.combined,
            pulled=sum(bytes_in((part.params, part.model_state)) for part in parts),
            pushed=sum(bytes_in((push.gradients, push.model_state)) for push in pushes),
        )


@dataclasses.dataclass(frozen=True)
class WorkerFactory:
    """A pickled description of the work, from which each worker's process makes its worker.

    Attributes:
      config: Configuration of the run for one worker (see `for_worker`).
      augment: Transformation of each example on the host; None for none.
      key: The random key of the state.
      servers: The Ray actors of the servers.
    """

    program: "PickledProgram"
    config: RunConfig
    partition: ServerPartition
    dataset: Dataset
    augment: Augment | None
    key: np.ndarray
    servers: Sequence[Any]

    def __call__(self) -> RemoteWorker:
        """Returns the worker. Call it in the worker's process, whose devices it uses."""
        configure_backend(self.config)
        placement = make_placement(self.config)
        # The chief has only checked that the batch divides over its own devices.
        config = resolve(self.config, batch_shards=placement.batch_shards)
        worker = Worker(
            self.program.load()(config, placement),
            placement,
            self.partition,
            self.dataset,
            batch_size=config.resolved_batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            threads=0 if config.data_threads == "auto" else config.data_threads,
            augment=self.augment,
            key=self.key,
        )
        return RemoteWorker(worker, self.partition, self.servers)


@dataclasses.dataclass(frozen=True)
class PickledProgram:
    """The model, objective and optimizer of a run, for other processes.

    They are pickled separately from the rest, because Keras models need it
    (`reduce_by_attributes`), and because their arrays may use devices, which the worker has to
    configure first. `buffers` has the contents of large arrays, `pickled` everything else.
    """

    pickled: bytes
    buffers: Sequence[pickle.PickleBuffer]

    @classmethod
    def of(cls, steps: Callable[[RunConfig, Placement], RunFunctions]) -> "PickledProgram":
        """Returns the pickle of a function that makes the functions of the step."""
        import ray

        base: Any = ray.cloudpickle.Pickler

        class Pickler(base):  # type: ignore[misc]
            def reducer_override(self, value: Any) -> Any:
                reduced = reduce_by_attributes(value)
                return super().reducer_override(value) if reduced is NotImplemented else reduced

        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        pickler: Any = Pickler(file, protocol=5, buffer_callback=buffers.append)
        pickler.dump(steps)
        return cls(file.getvalue(), buffers)

    def load(self) -> Callable[[RunConfig, Placement], RunFunctions]:
        """Returns a copy of the function. Its arrays cannot be written to."""
        steps: Callable[[RunConfig, Placement], RunFunctions]
        steps = pickle.loads(self.pickled, buffers=self.buffers)
        return steps


def for_worker(config: RunConfig) -> RunConfig:
    """Returns the configuration of one worker, which mirrors the model over its devices."""
    return dataclasses.replace(
        config, strategy="mirrored", workdir=None, servers=ParameterServerOptions()
    )
