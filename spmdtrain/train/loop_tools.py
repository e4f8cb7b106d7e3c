"""Data and programs of a `Loop` that do not depend on its steps."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from spmdtrain.config.run_config import Purpose, RunConfig, derive_seed
from spmdtrain.data.loader import check_fits, ordered_batches
from spmdtrain.data.sampling import Augment, process_rows
from spmdtrain.data.training_data import run_dataset
from spmdtrain.distributed.first_call import Together
from spmdtrain.errors import UserError
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.batch_checks import check_partitioned
from spmdtrain.step.objective import eval_key
from spmdtrain.step.optimizer_record import OptimizerRecord
from spmdtrain.step.per_replica import NotReducedError, replicas_in
from spmdtrain.step.state import TrainState
from spmdtrain.train.loop_checks import check_batch
from spmdtrain.train.metrics_reader import MetricsReader
from spmdtrain.train.session import RunSession

PyTree = Any


@dataclass(frozen=True)
class PlacedState:
    """The shapes and shardings of a loop's state, as a `Trainable`."""

    abstract_state: TrainState
    shardings: TrainState
    initial_hyperparameters: Mapping[str, Any]
    optimizer_record: OptimizerRecord = field(default_factory=OptimizerRecord)
    metric_names: None = None
    base: None = None


@dataclass
class StartedLoop:
    """The parts of a loop that exist once `start` has returned.

    Attributes:
      augment: (example, NumPy generator) -> example.
      state: The state after the last recorded step.
    """

    run: RunSession
    layout: Layout
    augment: Augment | None
    state: TrainState
    reader: MetricsReader


class LoopTools:
    """Batches of evaluations, placement of arrays and compiled functions. The base of `Loop`."""

    config: RunConfig
    placement: Placement
    _parts: StartedLoop | None

    @property
    def mesh(self) -> Mesh | None:
        """The device mesh; None under the default strategy."""
        return self.placement.mesh

    def eval_batches(self, data: Any) -> Iterator[tuple[PyTree, jax.Array]]:
        """Returns an iterator over the batches of a dataset, in order; each example occurs once.

        Args:
          data: A dataset, or arrays in a tuple or dictionary.

        Returns:
          Pairs (rows, mask), placed on the mesh. The mask, (B,), is 0 for rows that pad the last
          batch: a weight for `weighted_mean`.
        """
        batches, _ = ordered_batches(
            run_dataset(data, self.config),
            self.config.eval_batch_size or self.config.resolved_batch_size,
            self.placement.batch,
            threads=self.config.data_threads,
        )
        return batches

    def eval_key(self, number: int) -> jax.Array:
        """Returns the random key of batch `number` of an evaluation, counted from 0.

        It is the same in each evaluation.

        Args:
          number: Number of the batch.
        """
        draw = np.array([derive_seed(self.config.seed, Purpose.EVAL), number], np.uint32)
        key: jax.Array = jax.jit(eval_key, out_shardings=self.placement.replicated)(draw)
        return key

    def shard_batch(self, batch: PyTree) -> PyTree:
        """Returns a global batch as arrays that are split over the mesh.

        Args:
          batch: NumPy arrays of a leading dim of examples, the same in all processes.
        """
        check_batch(batch, self.placement.batch_shards)
        sharding = self.placement.batch

        def placed(leaf: Any) -> jax.Array:
            array = np.asarray(leaf)
            check_fits(array)
            local = array[process_rows(sharding, len(array))]
            return jax.make_array_from_process_local_data(sharding, local, array.shape)

        return jax.tree.map(placed, batch)

    def gather_params(self, params: PyTree) -> PyTree:
        """Returns the parameters of the state, gathered if the strategy splits them.

        Call it in a step. Without it XLA may move activations instead of parameters, which costs
        less for small batches and more for large ones.

        Args:
          params: The parameters of the state that the step receives.

        Raises:
          UserError: Before `start`.
        """
        if self._parts is None:
            raise UserError("the loop has not begun: call start(init) first")
        return self._parts.layout.gather(params)

    def compile(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Compiles any other function of arrays.

        Args:
          function: A function of arrays, such as the computation of an evaluation.

        Returns:
          The function, compiled; each process gets its whole result. It raises `NotReducedError` if
          the result holds a `PerReplica`.
        """

        def reduced(*args: PyTree) -> PyTree:
            found = function(*args)
            if replicas_in(found):
                raise NotReducedError(
                    "the function of compile() returns a PerReplica, but each process must get the "
                    "whole result: reduce the values in the function, or use jax.jit, which "
                    "leaves them on their devices"
                )
            return found

        check = partial(check_partitioned, placement=self.placement)
        jitted = Together(jax.jit(reduced, out_shardings=self.placement.replicated), check=check)

        def call(*args: PyTree) -> PyTree:
            with use_placement(self.placement):
                return jitted(*jax.tree.map(_in_device_memory, args))

        return call


def _in_device_memory(x: Any) -> Any:
    if isinstance(x, jax.Array) and x.sharding.memory_kind == "pinned_host":
        return jax.device_put(x, x.sharding.with_memory_kind("device"))
    return x
