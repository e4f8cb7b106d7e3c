"""One pass over a dataset in its order: exact means, or predictions."""

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from spmdtrain.adapters.base import Variables
from spmdtrain.data.datasets import Dataset, fingerprint
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError
from spmdtrain.step.metrics import Means

PyTree = Any
# Placed rows, the mask of those that count, and what the batch's key derives from.
Batches = Iterable[tuple[PyTree, jax.Array, np.ndarray]]


def evaluate(
    step: Callable[..., Any], variables: Variables, batches: Batches, *, in_flight: int
) -> dict[str, float]:
    """Weighted means of the objective's values over all batches."""
    means = Means()
    for sums in _late((step(variables, *batch) for batch in batches), in_flight):
        means.add(sums)
    return means.result()


def predict(
    step: Callable[..., Any],
    variables: Variables,
    batches: Batches,
    num_examples: int,
    batch_size: int,
    *,
    in_flight: int,
) -> PyTree:
    """What `step` gives for every example: a pytree of NumPy arrays of leading dim N, in order."""
    parts = list(_late((_checked(step, variables, *batch) for batch in batches), in_flight))
    whole = jax.tree.map(lambda *xs: np.concatenate([x[:batch_size] for x in xs]), *parts)
    return jax.tree.map(lambda x: x[:num_examples], whole)


def check_same_data(dataset: Dataset, batch_size: int) -> None:
    """Raise `UserError` where the processes of a job would not evaluate the same."""
    if process_group.count() > 1:
        process_group.check_same({"data": fingerprint(dataset), "global_batch_size": batch_size})


def _checked(
    step: Callable[..., Any],
    variables: Variables,
    rows: PyTree,
    mask: jax.Array,
    draw: np.ndarray,
) -> PyTree:
    output = step(variables, rows, mask, draw)
    for leaf in jax.tree.leaves(output):
        if leaf.ndim == 0 or leaf.shape[0] != mask.shape[0]:
            raise UserError(
                f"predict returned an array of shape {leaf.shape}: it must hold a row for each "
                f"of the {mask.shape[0]} examples of the batch"
            )
    return output


def _late(outputs: Iterator[Any], in_flight: int) -> Iterator[Any]:
    """Outputs on the host, each fetched when `in_flight` later steps have been dispatched."""
    waiting: collections.deque[Any] = collections.deque()
    for output in outputs:
        waiting.append(output)
        if len(waiting) > in_flight:
            yield jax.device_get(waiting.popleft())
    for output in waiting:
        yield jax.device_get(output)
