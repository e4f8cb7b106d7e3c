"""The programs of the sentinel: checksums of each device's gradients, and moves of its examples."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from spmdtrain.adapters.base import Variables
from spmdtrain.checkpoints.checksums import traced_sum
from spmdtrain.data.sampling import IndexedBatch, examples_of
from spmdtrain.distributed import process_group
from spmdtrain.distributed.first_call import Together
from spmdtrain.errors import UserError
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.functions import StepFunctions
from spmdtrain.step.gradients import ON_ONE_DEVICE
from spmdtrain.step.state import TrainState
from spmdtrain.train.sentinel_verdict import (
    FaultKind,
    Verdict,
    differs,
    find_faulty,
    third_roll,
)
from spmdtrain.tree import named_leaves
from spmdtrain.xla.jaxpr import constrains_sharding

PyTree = Any


class GradientSums:
    """Checksums of the gradients that each device computes of one shard of a batch.

    A shard is the part of the batch that one device computes in a step. Each device runs the same
    program, which does not depend on the device: the random key of a shard derives from the number
    of the shard, which moves with its examples. Sharded parameters are gathered first, and nothing
    is reduced. So a shard has the same checksums on every device that computes correctly. The
    computation is the same as in the step, but the gradients differ from the ones that update the
    parameters: batch statistics are computed over the shard, and dropout masks are others.

    A check uses half of the examples of each shard, alternately the first and the second half, so
    its two runs cost as much as the gradients of one step. It uses all examples if they or their
    microbatches cannot be halved.

    Attributes:
      count: Number of shards, and of devices.
      names: Paths of the trained parameters.
      devices: The devices in the order of the shards.

    Raises:
      UserError: If fewer than two devices split the batch, or a device does not compute whole
        examples.
    """

    def __init__(self, functions: StepFunctions, placement: Placement) -> None:
        mesh = placement.mesh
        if mesh is None or placement.batch_shards < 2:
            raise UserError(
                f"sentinel_every: strategy {placement.name} on {len(placement.devices)} device(s) "
                "has no second device that could compute the same examples: use 2 or more"
            )
        for axis in ("expert", "context", "tensor"):
            if (parts := placement.size(axis)) > 1:
                raise UserError(
                    f"sentinel_every: mesh.{axis} is {parts}, so several devices compute an "
                    "example together, which the sentinel does not support: leave one of the two "
                    "out"
                )
        self.count: int = placement.batch_shards
        trained, _ = functions.update.partition(functions.abstract_state.params)
        self.names = list(named_leaves(trained))
        self.devices: list[jax.Device] = list(mesh.devices.ravel())
        self._functions, self._placement = functions, placement
        self._sums: dict[bool, Together] = {}  # by whether batches are `IndexedBatch`
        self._turn = 1  # the half of the examples of the last check
        rows = PartitionSpec(BATCH_AXES)
        move = jax.shard_map(self._move, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
        split = placement.batch
        self._roll = Together(jax.jit(move, in_shardings=split, out_shardings=split))

    def first(self) -> jax.Array:
        """Returns the numbers of the shards, int32 (count,): device i has shard i."""
        numbers = np.arange(self.count, dtype=np.int32)
        place = self._placement.batch
        return jax.make_array_from_callback(numbers.shape, place, lambda index: numbers[index])

    def rolled(self, batch: PyTree, shards: jax.Array) -> tuple[PyTree, jax.Array]:
        """Moves each shard of a batch, and its number, to the next device."""
        if isinstance(batch, IndexedBatch):
            indices, shards = self._roll((batch.indices, shards))
            return IndexedBatch(indices, batch.arrays), shards
        moved: tuple[PyTree, jax.Array] = self._roll((batch, shards))
        return moved

    def __call__(self, state: TrainState, batch: PyTree, shards: jax.Array) -> np.ndarray:
        """Returns the checksums, uint32 (count, parameters), by device. Waits for them.

        Args:
          state: The state before the step.
          batch: The batch of the step, or a rolled one.
          shards: The numbers of the shards on the devices.
        """
        by_index = isinstance(batch, IndexedBatch)
        if by_index not in self._sums:
            with use_placement(self._placement):
                self._check(state, batch)
            self._sums[by_index] = Together(self._compile(by_index=by_index))
        key = jax.random.key_data(state.step_key)
        given = state.variables, batch, key, shards, np.int32(self._turn)
        return np.asarray(self._sums[by_index](*given))

    def compare(self, state: TrainState, batch: PyTree) -> Verdict | None:
        """Computes each shard on two devices, and on a third one if their results differ.

        Returns the devices that differ; None if all results are equal. All processes call it
        together; process 0 decides. `state` is the state before the step of `batch`.
        """
        self._turn = 1 - self._turn
        shards = self.first()
        runs = [self(state, batch, shards)]
        rolled, numbers = self.rolled(batch, shards)
        runs.append(self(state, rolled, numbers))
        # A faulty device may pass its process other numbers than the other processes have.
        if not process_group.broadcast(differs(*runs)):
            return None
        if third_roll(self.count):
            rolled, numbers = self.rolled(rolled, numbers)
        else:
            rolled, numbers = batch, shards
        runs.append(self(state, rolled, numbers))
        found = find_faulty(runs) if process_group.is_chief() else None
        agreed = process_group.broadcast({} if found is None else dataclasses.asdict(found))
        return Verdict(**agreed | {"kind": FaultKind(agreed["kind"])})

    def _compile(self, *, by_index: bool) -> Any:
        layout, split = self._functions.layout, self._placement.batch
        whole, rows = PartitionSpec(), PartitionSpec(BATCH_AXES)

        def sums(
            variables: Variables,
            batch: PyTree,
            key: jax.Array,
            shards: jax.Array,
            turn: jax.Array,
        ) -> jax.Array:
            variables = layout.to_device(variables, lambda shardings: shardings.variables)
            by_shard: jax.Array = jax.shard_map(
                self._local,
                mesh=self._placement.mesh,
                in_specs=(whole, rows, whole, rows, whole),
                out_specs=rows,
                check_vma=False,  # each device computes alone
            )(variables, examples_of(batch), key, shards, turn)
            return by_shard

        replicated = self._placement.replicated
        of_batch: Any = IndexedBatch(split, replicated) if by_index else split
        return jax.jit(
            sums,
            in_shardings=(layout.shardings.variables, of_batch, replicated, split, replicated),
            out_shardings=replicated,
            compiler_options=self._functions.compiler_options or None,
        )

    def _local(
        self,
        variables: Variables,
        batch: PyTree,
        key: jax.Array,
        shards: jax.Array,
        turn: jax.Array,
    ) -> jax.Array:
        """Returns the checksums of this device's gradients, (1, parameters)."""
        functions, size = self._functions, jax.tree.leaves(batch)[0].shape[0]
        parts = functions.gradients.microbatches
        parts = parts if parts % 2 else parts // 2  # an even number keeps the size of a part
        half = size if size % (2 * parts) else size // 2
        batch = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, turn * (size - half), half), batch
        )
        alone = dataclasses.replace(
            functions.gradients, microbatches=parts, reduction=None, placement=ON_ONE_DEVICE
        )
        trained, frozen = functions.update.partition(variables.params)
        own_key = jax.random.fold_in(jax.random.wrap_key_data(key), shards[0])
        with use_placement(ON_ONE_DEVICE):
            output = alone.of_sum(trained, frozen, variables.model_state, batch, own_key)
        return jnp.stack([traced_sum(x) for x in jax.tree.leaves(output.gradients)])[None]

    def _move(self, part: PyTree) -> PyTree:
        """Returns the part of the previous device; the first device gets the part of the last."""
        pairs = [(i, (i + 1) % self.count) for i in range(self.count)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, BATCH_AXES, pairs), part)

    def _check(self, state: TrainState, batch: PyTree) -> None:
        """Raises `UserError` if the objective itself places arrays on the mesh."""

        def shard(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((x.shape[0] // self.count, *x.shape[1:]), x.dtype)

        rows = jax.tree.map(shard, jax.eval_shape(examples_of, batch))
        shards, turn = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((1,), ()))
        shapes = jax.eval_shape(lambda state: (state.variables, state.key), state)
        jaxpr = jax.make_jaxpr(self._local)(shapes[0], rows, shapes[1], shards, turn)
        if constrains_sharding(jaxpr.jaxpr):
            raise UserError(
                "sentinel_every: the objective constrains the sharding of arrays itself, so a "
                "device cannot compute its examples alone: leave sentinel_every out"
            )
