"""Proofs that padding or splitting a batch does not change the values of its rows.

A function of a batch is traced at two batch sizes, and each of its values is classified:

- `FIXED`: the array does not depend on the batch.
- `Rows`: one dim holds the rows of the batch in order. The values of a row depend neither on later
  rows nor on the number of rows. If they depend on the row's index or on earlier rows, they are
  `positional`: padding does not change them, but splitting the batch does.
- `Mixed`: anything else, including every primitive without a rule, and sums over the rows.

A single trace does not show whether a constant or a dim that equals the batch size depends on it
(`values / len(values)`) or equals it by coincidence. The comparison of the two traces shows it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from spmdtrain.xla.row_classes import Classifier
from spmdtrain.xla.traces import FIXED, Mixed, Rows, Value, size_of, traces_of

PyTree = Any


def why_padding_matters(
    function: Callable[[PyTree, PyTree], PyTree], fixed: PyTree, batch: PyTree
) -> str | None:
    """Returns why padding could change the results of a function for the rows of a batch.

    The reason names the source line. It is None if the results are proven unchanged.

    Args:
      function: A traceable function of (fixed, batch); its results have leading dim B, or do not
        depend on the batch.
      fixed: Arguments that are the same for all batches; abstract arrays suffice.
      batch: Arrays of leading dim B > 1; abstract ones suffice.
    """
    results = _results(function, fixed, batch, 2 * size_of(batch))
    if isinstance(results, str):
        return results
    return next((value.why for value in results if isinstance(value, Mixed)), None)


def why_parts_differ(
    function: Callable[[PyTree, PyTree], PyTree],
    fixed: PyTree,
    batch: PyTree,
    parts: int,
    *,
    own_draws: bool = False,
    gradients: bool = False,
    vjps: bool = False,
    axes: Sequence[tuple[str, int]] = (),
    averages: bool = False,
) -> str | None:
    """Returns why a function of a part of a batch could return other values for its rows.

    The result is None if a row's values are proven to depend on this row alone, and on sums over
    all rows of all parts: not on other rows, their number, or its index.

    Args:
      function: See `why_padding_matters`, also for `fixed` and `batch`.
      parts: Number of equal parts.
      own_draws: Whether each part may draw its own random numbers.
      gradients: Whether the function is differentiated. The rules that users have defined are
        examined, too.
      vjps: Whether the function may contain a `jax.custom_vjp` of rows, if its backward pass is
        proven to compute the gradients of each row alone, or sums of such gradients over the rows.
      axes: Named axes, with their sizes, over which the function may add up sums of its rows.
      averages: Whether only the mean of the results over equal parts counts, so that they may
        contain means over the rows.
    """
    other = _other_size(batch, parts)
    results = _results(function, fixed, batch, other, not own_draws, gradients, vjps, axes)
    if isinstance(results, str):
        return results
    for value in results:
        if isinstance(value, Mixed) and not (averages and value.is_mean):
            return value.why
    if any(isinstance(value, Rows) and value.positional for value in results):
        return "the values of an example depend on its position in the batch"
    return None


def why_not_means(
    function: Callable[[PyTree, PyTree], PyTree], fixed: PyTree, batch: PyTree, parts: int
) -> list[tuple[str | None, bool]]:
    """Returns for each number of a batch why its mean over equal parts may be another number.

    `function` is differentiated and returns numbers; see `why_padding_matters` for it, `fixed` and
    `batch`. Each of the equal parts has random numbers of its own.

    Returns:
      The reason, None if the number is proven to be a mean over the rows or independent of them;
      and whether it is proven to be a sum over the rows.
    """
    found = _results(function, fixed, batch, _other_size(batch, parts), False, True, True)
    if isinstance(found, str):
        return [(found, False)] * len(jax.tree.leaves(jax.eval_shape(function, fixed, batch)))
    return [
        (value.why, value.is_sum)
        if isinstance(value, Mixed) and not value.is_mean
        else (None, False)
        for value in found
    ]


def _other_size(batch: PyTree, parts: int) -> int:
    """Returns the number of rows of a part. It is never one: that dim would be broadcast."""
    size = size_of(batch)
    return size // parts if size // parts > 1 else 2 * size


def why_not_sums(function: Callable[[PyTree], PyTree], batch: PyTree) -> str | None:
    """Returns why the results of a function of a batch may not be sums over its rows.

    Such a sum adds up a value of each row, which depends on this row alone. So the sums over any
    parts of a batch, single rows included, add up to the sum over the batch. The result is None if
    all results are proven to be such sums. For `batch` see `why_padding_matters`.
    """
    traced = traces_of(lambda _, rows: function(rows), (), batch, 2 * size_of(batch))
    if isinstance(traced, str):
        return traced
    sizes = size_of(batch), 2 * size_of(batch)
    classifier = Classifier(sizes, positional_draws=True, gradients=False, counts_rows=True)
    rows = [Rows(0) for _ in traced[0].in_avals]
    for value in classifier.closed(*traced, rows):
        if not isinstance(value, Mixed):
            return "a result is the same for each batch" if value is FIXED else "a result has rows"
        if not value.is_sum:
            return value.why
    return None


def _results(
    function: Callable[[PyTree, PyTree], PyTree],
    fixed: PyTree,
    batch: PyTree,
    other: int,
    positional_draws: bool = True,
    gradients: bool = False,
    vjps: bool = False,
    axes: Sequence[tuple[str, int]] = (),
) -> list[Value] | str:
    """Classifies the results by comparing a trace of the batch with one of `other` rows.

    It returns the reason instead if they are not known or hold the rows in another dim.
    """
    traced = traces_of(function, fixed, batch, other, axes)
    if isinstance(traced, str):
        return traced
    first, second = traced
    leaves = len(jax.tree.leaves(fixed))
    arguments: list[Value] = [FIXED] * leaves
    arguments += [Rows(0)] * (len(first.in_avals) - leaves)
    sizes = size_of(batch), other
    classifier = Classifier(sizes, positional_draws, gradients, vjps)
    results = classifier.closed(first, second, arguments)
    for value in results:
        if isinstance(value, Rows) and (value.dim, value.inner) != (0, 1):
            return f"dim {value.dim} of its result holds the rows instead of the leading dim"
    return results
