"""The gate of peers that train with spmdtrain: it stands before the batches of a segment."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
from gate import Gate
from work import Work

from spmdtrain.checkpoints.save import Checkpoints
from spmdtrain.data import loader
from spmdtrain.data.sampling import CountedBatches
from spmdtrain.train import executor


def install(gate: Gate, work: Work, state: Callable[[], Any]) -> None:
    """Makes the next `fit` wait at the gate between segments.

    Args:
        gate: The gate.
        work: The workload, with the steps of a segment.
        state: Returns the state of the run, which is complete when its arrays are.
    """
    train_batches, save = loader.train_batches, Checkpoints.save
    saving: list[Checkpoints] = []  # one for each save of the segment

    def record_save(self: Checkpoints, *arguments: Any, **options: Any) -> None:
        saving.append(self)
        save(self, *arguments, **options)

    def gated(*arguments: Any, **options: Any) -> Iterator[Any]:
        """Yields the batches; waits at the gate after all steps of a segment are complete."""
        due = count = 0
        for batch in train_batches(*arguments, **options):
            if count >= due:
                jax.block_until_ready(state())
                for checkpoints in saving:  # pending writes belong to this segment
                    checkpoints.wait()
                gate.wait(steps=count - due + work.segment, saves=len(saving)) or os._exit(0)
                saving.clear()
                due = count + work.segment
            leading = jax.tree.leaves(batch)[0].shape[0]
            steps = leading if leading != work.batch_size else 1
            steps = int(batch.count) if isinstance(batch, CountedBatches) else steps
            count += steps
            yield batch
            if count == steps:
                jax.block_until_ready(state())
                gate.mark("first step")

    Checkpoints.save = record_save  # type: ignore[method-assign]
    vars(executor)["train_batches"] = gated
