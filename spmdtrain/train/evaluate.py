"""Evaluation and prediction: one pass over a dataset in its order."""

import collections
import math
import numbers
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from spmdtrain.adapters.base import Variables
from spmdtrain.config.run_config import Purpose, RunConfig, derive_seed
from spmdtrain.data.datasets import Dataset, Subset, fingerprint
from spmdtrain.data.loader import ordered_batches
from spmdtrain.data.mixture import components_of
from spmdtrain.data.sampling import padded_size
from spmdtrain.data.training_data import SAME_DATA
from spmdtrain.distributed import process_group
from spmdtrain.distributed.code_digest import source_digests
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError
from spmdtrain.sharding.placement import Placement
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.metrics import (
    ArraySum,
    BatchSums,
    EvaluationSums,
    Means,
    PredictedRows,
    as_function,
    component_metric,
    loss_first,
)
from spmdtrain.trackers.base import Media
from spmdtrain.trackers.run_trackers import check_items
from spmdtrain.train.executor import max_in_flight

PyTree = Any
# Placed rows, the mask of those that count, and what the batch's key derives from.
Batches = Iterator[tuple[PyTree, jax.Array, np.ndarray]]


class Evaluation:
    """Passes over datasets with the functions of a model; `config` has the seed and the threads."""

    def __init__(
        self,
        functions: RunFunctions,
        placement: Placement,
        config: RunConfig,
        terminal: Terminal,
    ) -> None:
        self._functions, self._placement = functions, placement
        self._config, self._terminal = config, terminal
        self._in_flight = max_in_flight(placement)
        self._computed_media: dict[str, Media] = {}  # by the last call of `evaluate`

    def evaluate(
        self,
        variables: Variables,
        dataset: Dataset,
        batch_size: int,
        check_interrupt: Callable[[], None],
    ) -> dict[str, float]:
        """Returns the weighted means and the other metrics of the objective over a dataset.

        Each example counts once. A mixture has these metrics over all its examples, and again over
        each component as "METRIC/NAME".

        Args:
          batch_size: The global batch size; it need not divide the dataset or the devices.
          check_interrupt: Called before each batch; may raise.
        """
        self._check_order(dataset, batch_size)
        components = components_of(dataset)
        whole, parts, done = EvaluationTotals(), dict[str, EvaluationTotals](), 0
        for name, part in (components or {"": dataset}).items():
            what = f"evaluate {name}".rstrip()
            batches = self._batches(what, part, batch_size, check_interrupt, first=done)
            parts[name] = totals = EvaluationTotals()
            with phase(Phase.EVALUATE):
                outputs = (self._functions.evaluate(variables, *batch) for batch in batches)
                for sums in _fetched(outputs, self._in_flight):
                    totals.add(sums)
                    whole.add(sums)
                    done += 1
        metrics = whole.result()
        self._computed_media = whole.media
        for name in components or ():
            # The media are those of all examples.
            of_part = parts[name].result(without=whole.media).items()
            metrics |= {component_metric(metric, name): value for metric, value in of_part}
        return loss_first(metrics)

    def check(self, dataset: Dataset, batch_size: int) -> None:
        """Checks later evaluations, and traces the declared media with the batch of `media`.

        Raises `UserError` if the order of sums cannot be kept, or if media cannot be logged.
        """
        self._check_order(dataset, batch_size)
        if self._functions.media is None:
            return
        number = min(batch_size, len(dataset))
        self._functions.check_media(
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    (number, *np.shape(x)[1:]), jax.dtypes.canonicalize_dtype(x.dtype)
                ),
                dataset.rows(np.arange(1)),
            )
        )

    def _check_order(self, dataset: Dataset, batch_size: int) -> None:
        if not self._functions.order.is_fixed:
            return
        for part in (components_of(dataset) or {"": dataset}).values():
            self._functions.checks.check_evaluation(part.rows(np.arange(1)), batch_size)

    def media(
        self, variables: Variables, dataset: Dataset, batch_size: int
    ) -> Mapping[str, Media] | None:
        """Returns the media of the last `evaluate`, and the declared media of a first batch.

        The declared media are on the devices. Their batch has no padding rows: if it does not
        divide over the devices, each device has the whole batch. Raises `UserError` if two media
        have the same name.
        """
        if self._functions.media is None:
            return self._computed_media or None
        first = Subset(dataset, np.arange(min(batch_size, len(dataset))))
        draw = np.array([derive_seed(self._config.seed, Purpose.EVAL), 0], np.uint32)
        with phase(Phase.EVALUATE):
            batches, _ = ordered_batches(first, len(first), self._placement.batch, padded=False)
            (rows, mask), *_ = batches
            declared: Mapping[str, Media] = self._functions.media(variables, rows, mask, draw)
        if taken := sorted(declared.keys() & self._computed_media):
            raise UserError(f"media and the objective both return {taken[0]!r}: rename one of them")
        return {**self._computed_media, **declared}

    def predict(
        self,
        variables: Variables,
        dataset: Dataset,
        batch_size: int,
        check_interrupt: Callable[[], None],
    ) -> PyTree:
        """Returns predictions as NumPy arrays of leading dim N, in the order of the N examples.

        Args:
          batch_size: The global batch size; it need not divide the dataset or the devices.
          check_interrupt: Called before each batch; may raise.

        Raises:
          UserError: If the shape of an example's prediction depends on the size of its batch.
        """
        batches = self._batches("predict", dataset, batch_size, check_interrupt)
        outputs = (self._checked_predictions(variables, *batch) for batch in batches)
        parts = list(_fetched(outputs, self._in_flight))
        whole = jax.tree.map(lambda *xs: _concatenated(xs, batch_size), *parts)
        return jax.tree.map(lambda x: x[: len(dataset)], whole)

    def _batches(
        self,
        what: str,
        dataset: Dataset,
        batch_size: int,
        check_interrupt: Callable[[], None],
        first: int = 0,
    ) -> Batches:
        """Yields all examples in order, in placed batches; the keys count batches from `first`."""
        size, why_not = padded_size(batch_size, self._placement.batch), None
        if size != batch_size or len(dataset) % batch_size:
            rows = dataset.rows(np.arange(1))
            why_not = self._functions.checks.why_not_padded(rows, size, predict=what == "predict")
        batches, number = ordered_batches(
            dataset,
            batch_size,
            self._placement.batch,
            threads=self._config.data_threads,
            padded=why_not is None,
        )
        seed = derive_seed(self._config.seed, Purpose.EVAL)
        with self._terminal.progress(what, done=0, total=number):
            for done in range(1, number + 1):
                check_interrupt()
                with phase(Phase.LOAD):
                    rows, mask = next(batches)
                yield rows, mask, np.array([seed, first + done - 1], np.uint32)
                self._terminal.advance(done)

    def _checked_predictions(
        self, variables: Variables, rows: PyTree, mask: jax.Array, draw: np.ndarray
    ) -> PyTree:
        output = self._functions.predict(variables, rows, mask, draw)
        for leaf in jax.tree.leaves(output):
            if leaf.ndim == 0 or leaf.shape[0] != mask.shape[0]:
                raise UserError(
                    f"predict returned an array of shape {leaf.shape}: it must hold a row for "
                    f"each of the {mask.shape[0]} examples of the batch"
                )
        return output


def check_same_data(dataset: Dataset, batch_size: int) -> None:
    """Raises `UserError` if the processes of a job would not evaluate the same data or code."""
    if process_group.count() > 1:
        process_group.agree("", source_digests() | {"global_batch_size": batch_size})
        process_group.agree("data", fingerprint(dataset), SAME_DATA)


def _concatenated(parts: Sequence[np.ndarray], batch_size: int) -> np.ndarray:
    """Joins the rows of all batches, without the rows that pad a batch."""
    for part in parts:
        if part.shape[1:] != parts[0].shape[1:]:
            raise UserError(
                f"the model predicts {list(parts[0].shape)} for one batch and {list(part.shape)} "
                "for another: all dims except the first must be independent of the batch, because "
                "predict joins all batches to one array"
            )
    return np.concatenate([part[:batch_size] for part in parts])


def _fetched(outputs: Iterator[Any], in_flight: int) -> Iterator[Any]:
    """Yields outputs on the host, each fetched after `in_flight` later dispatches."""
    pending: collections.deque[Any] = collections.deque()
    for output in outputs:
        pending.append(output)
        if len(pending) > in_flight:
            yield jax.device_get(pending.popleft())
    for output in pending:
        yield jax.device_get(output)


# -- Metrics of an evaluation, accumulated over its batches on the host ----------------------------


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
