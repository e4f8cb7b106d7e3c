"""Metrics of an evaluation, accumulated over its batches on the host."""

import math
import numbers
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError
from spmdtrain.step.metrics import (
    ArraySum,
    BatchSums,
    EvaluationSums,
    Means,
    PredictedRows,
    as_function,
    loss_first,
)
from spmdtrain.trackers.base import Media
from spmdtrain.trackers.run_trackers import check_items


class EvaluationTotals:
    """The sums, arrays and predictions of an evaluation's batches, and the metrics of all of them.

    Attributes:
      media: The media that `finish` of a `SumMetric` returned, once `result` was called.
    """

    def __init__(self) -> None:
        self._means = Means()
        self._sums: dict[str, ArraySum] = {}
        self._rows: dict[str, list[PredictedRows]] = {}
        self.media: dict[str, Media] = {}

    def add(self, sums: EvaluationSums) -> None:
        """Adds the sums of a batch, which are on the host."""
        of_means: BatchSums = {}
        for name, value in sums.items():
            if isinstance(value, ArraySum):
                total = np.asarray(value.total, np.float64)
                earlier = self._sums.get(name)
                total = total if earlier is None else earlier.total + total
                self._sums[name] = ArraySum(total, value.finish)
            elif isinstance(value, PredictedRows):
                rows = self._rows.setdefault(name, [])
                if process_group.is_chief():  # the others do not use them
                    rows.append(value)
            else:
                of_means[name] = value
        self._means.add(of_means)

    def result(self, *, without: Collection[str] = ()) -> dict[str, float]:
        """Returns the metrics by name, the loss first. All processes of a job call it.

        `without` names `SumMetric`s that are not computed. Raises `UserError` if a function of the
        user returns neither a number nor media.
        """
        found = self._means.result()
        for name, value in self._sums.items():
            if name in without:
                continue
            finished = value.finish(value.total)
            if isinstance(finished, Media):
                check_items({name: finished}, f"the objective's {name!r}")
                self.media[name] = finished
            else:
                found[name] = _number(name, finished)
        for name, rows in self._rows.items():
            mine = process_group.run_on_all(partial(_of_predictions, name, rows), UserError)
            found[name] = process_group.broadcast(mine)
        return loss_first(found)


def _of_predictions(name: str, batches: list[PredictedRows]) -> float:
    """Returns a metric of all predictions, in the order of the dataset; NaN except in process 0."""
    if not process_group.is_chief():
        return math.nan
    parts = [
        jax.tree.map(lambda x, rows=rows: np.asarray(x)[np.asarray(rows.mask) > 0], _given(rows))
        for rows in batches
    ]
    compute = batches[0].compute
    if hasattr(compute, "of_batches"):
        return _number(name, compute.of_batches([named for _, named in parts]))
    arrays, named = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
    return _number(name, as_function(compute)(*arrays, **named))


def _given(rows: PredictedRows) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    return rows.arrays, rows.named


def _number(name: str, value: Any) -> float:
    array = np.asarray(value) if hasattr(value, "__array__") else value
    if isinstance(array, np.ndarray) and array.size == 1 and array.dtype.kind in "biuf":
        return float(array.reshape(()))
    if isinstance(array, numbers.Real):
        return float(array)
    raise UserError(
        f"the function of the objective's {name!r} returned a {type(value).__name__}"
        f"{f' of shape {array.shape}' if isinstance(array, np.ndarray) else ''}: it must return "
        "one number; return several outputs for several numbers"
    )
