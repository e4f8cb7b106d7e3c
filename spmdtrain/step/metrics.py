"""Weighted sums and means: objectives return per-example values, and the mean is computed here."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.errors import UserError


class WeightedValues(NamedTuple):
    """Values with weights.

    Attributes:
      values: Array of leading dim B.
      weights: Broadcast against `values` from the left: one weight an example, or one a token.
    """

    values: jax.typing.ArrayLike
    weights: jax.typing.ArrayLike


class Sums(NamedTuple):
    """A weighted sum, f32 scalars.

    Attributes:
      total: The sum of the weighted values.
      weight: The sum of the weights.
    """

    total: Any
    weight: Any


def weighted_sums(
    outputs: Mapping[str, Any], batch_size: int, mask: jax.Array | None = None
) -> dict[str, Sums]:
    """Returns the weighted sums of an objective's outputs for a global batch.

    Args:
      outputs: Arrays of leading dim B, `WeightedValues`, or pairs (values, weights), by name. One
        name is "loss".
      batch_size: Number of rows B of the batch.
      mask: (B,), 0 for padding rows.

    Returns:
      The sums by name.

    Raises:
      UserError: If the outputs have another form or shape.
    """
    if not isinstance(outputs, Mapping) or "loss" not in outputs:
        returned = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise UserError(
            f"the objective returned {returned}: it must return a dictionary of per-example values "
            'with "loss" among them'
        )
    check_names(outputs, "the objective's")
    return {
        name: _sums(f"the objective's {name!r}", value, batch_size, mask)
        for name, value in outputs.items()
    }


def component_losses(
    outputs: Mapping[str, Any],
    component: jax.Array,
    names: Sequence[str],
    mask: jax.Array | None = None,
) -> dict[str, Sums]:
    """Returns the weighted sums of the loss over the rows of each component of a mixture.

    Args:
      outputs: The objective's outputs.
      component: int32 (B,), the number of each row's component.
      names: The names of the components.
      mask: (B,), 0 for padding rows.

    Returns:
      The sums by `component_metric`. The weight of a component without rows is 0.

    Raises:
      UserError: If the objective itself returns a metric of such a name.
    """
    if taken := [name for name in names if component_metric("loss", name) in outputs]:
        raise UserError(
            f"the objective's {component_metric('loss', taken[0])!r} has the name of the loss of "
            f"component {taken[0]!r} of the mixture: rename it"
        )
    size = component.shape[0]
    weighted, weights = _weighted("the objective's 'loss'", outputs["loss"], size, mask)
    of_rows = Sums(*(x.reshape(size, -1).sum(1) for x in (weighted, weights)))
    return {
        component_metric("loss", name): Sums(
            *(jnp.where(component == number, x, 0.0).sum() for x in of_rows)
        )
        for number, name in enumerate(names)
    }


def component_metric(metric: str, component: str) -> str:
    """Returns the name of a metric of one component of a mixture."""
    return f"{metric}/{component}"


def check_names(names: Iterable[str], whose: str) -> None:
    """Checks that the names of metrics are strings, and not reserved in the metrics file.

    Args:
      names: The names.
      whose: The start of the error message, for example "the objective's".

    Raises:
      UserError: If a name is not valid.
    """
    for name in names:
        if not isinstance(name, str):
            raise UserError(
                f"{whose} {name!r} has a {type(name).__name__} as its name: use a string"
            )
    for name in ("step", "split", "epoch"):
        if name in names:
            raise UserError(f"{whose} {name!r} is a reserved name in the metrics file: rename it")


def weighted_mean(
    values: jax.typing.ArrayLike, weights: jax.typing.ArrayLike | None = None
) -> jax.Array:
    """Returns the weighted mean of values over a global batch.

    Args:
      values: Array of leading dim B.
      weights: Broadcast against `values` from the left: (B,), or one a token. By default 1. A value
        of weight 0 is ignored, even if it is NaN.

    Returns:
      f32 scalar; 0 if all weights are 0.

    Raises:
      UserError: If the shapes do not fit.
    """
    values = jnp.asarray(values)
    if values.ndim == 0:
        raise UserError("weighted_mean takes the values of a batch, not a single number")
    weighted = values if weights is None else WeightedValues(values, weights)
    size = values.shape[0]
    return mean(_sums("the argument of weighted_mean", weighted, size, None))


def check_no_pairs(outputs: Mapping[str, Any], batch: Any) -> None:
    """Checks that outputs do not have one value for each pair of examples.

    Values of shape (B, B, ...) result from combining (B, 1) with (B,) by mistake. They are accepted
    with explicit weights, or if an array of the batch has such a shape.

    Args:
      outputs: The objective's outputs.
      batch: The batch.

    Raises:
      UserError: If an output has such a shape.
    """
    leaves = jax.tree.leaves(batch)
    pairs = (leaves[0].shape[0],) * 2
    # Rows of B or B + 1 tokens explain such a shape, too.
    if pairs[0] == 1 or any(
        leaf.ndim > 1 and leaf.shape[1] - pairs[1] in (0, 1) for leaf in leaves
    ):
        return
    for name, value in outputs.items():
        if not isinstance(value, tuple) and jnp.shape(value)[:2] == pairs:
            raise UserError(
                f"the objective's {name!r} has shape {jnp.shape(value)}, a value for each pair of "
                f"examples: it seems that ({pairs[0]}, 1) and ({pairs[0]},) were combined. Reshape "
                "one of them; if pairs are intended, return (values, weights)"
            )


def is_of_tokens(loss: Any, batch: Any) -> bool:
    """Returns whether a loss has a value for each token of the examples.

    That is, it has shape (B, T) with T > 1, and an array of the batch holds integers of shape
    (B, T) or (B, more than T). The sum of its weights is then the number of tokens trained on.

    Args:
      loss: The objective's loss, with weights or without.
      batch: The batch.
    """
    shape = jnp.shape(loss[0] if isinstance(loss, tuple) else loss)
    return (
        len(shape) == 2
        and shape[1] > 1
        and any(
            jnp.issubdtype(x.dtype, jnp.integer) and x.ndim == 2 and x.shape[1] >= shape[1]
            for x in jax.tree.leaves(batch)
        )
    )


def check_precise(outputs: Mapping[str, Any]) -> None:
    """Checks that the loss is not computed in 16 bits.

    Their rounding errors are larger than the changes of a loss in training.

    Args:
      outputs: The objective's outputs.

    Raises:
      UserError: If it is.
    """
    value = outputs["loss"]
    dtype = jnp.asarray(value[0] if isinstance(value, tuple) else value).dtype
    if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4:
        raise UserError(
            f"the objective's loss is {dtype}, which is not precise enough for a loss: cast the "
            "model's output to float32 first: model(...).astype(jnp.float32)"
        )


def _sums(what: str, value: Any, batch_size: int, mask: jax.Array | None) -> Sums:
    weighted, weights = _weighted(what, value, batch_size, mask)
    return Sums(weighted.sum(), weights.sum())


def _weighted(
    what: str, value: Any, batch_size: int, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the values times their weights, and the weights, of the shape of the values."""
    if isinstance(value, Mapping):
        raise UserError(
            f"{what} is a dictionary of {', '.join(map(str, value))}: metrics are not nested, so "
            'name each one, for example "aux/accuracy"'
        )
    if isinstance(value, tuple):
        if len(value) != 2:
            raise UserError(f"{what} is a tuple of {len(value)}: return (values, weights)")
        values, weights = jnp.asarray(value[0]), jnp.asarray(value[1], jnp.float32)
        weights = jax.lax.stop_gradient(weights)  # weights are not trained
    else:
        values, weights = jnp.asarray(value), jnp.ones((), jnp.float32)
    if values.ndim == 0 or values.shape[0] != batch_size:
        raise UserError(
            f"{what} has shape {values.shape}: it must hold a value for each of "
            f"the {batch_size} examples of the batch (leading dim {batch_size}), not their mean"
        )
    weights = _expand(what, weights, values)
    if mask is not None:
        weights = weights * _expand(what, mask, values)
    weights = jnp.broadcast_to(weights, values.shape)
    # Values of weight 0 must not change the sum, even if they are NaN.
    return jnp.where(weights == 0, 0.0, values.astype(jnp.float32)) * weights, weights


def _expand(what: str, weights: jax.Array, values: jax.Array) -> jax.Array:
    """Appends dims to `weights`, so that they broadcast from the leading dim on."""
    fits = weights.ndim <= values.ndim and all(
        w in (1, v) for w, v in zip(weights.shape, values.shape, strict=False)
    )
    if not fits:
        raise UserError(
            f"{what} has weights of shape {weights.shape}, which do not "
            f"broadcast against values of shape {values.shape} from the leading dim on"
        )
    return weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))


def loss_first(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics with the loss first, the others by name (JAX sorts them by name)."""
    return dict(sorted(metrics.items(), key=lambda item: (item[0] != "loss", item[0])))


def stacked(sums: Mapping[str, Sums]) -> jax.Array:
    """Returns the sums by sorted name as one array (names, 2), for a single transfer."""
    return jnp.stack([jnp.stack(sums[name]) for name in sorted(sums)])


def mean(sums: Sums) -> jax.Array:
    """Returns the weighted mean; 0 if the weight is 0."""
    return jnp.where(
        sums.weight == 0, 0.0, sums.total / jnp.where(sums.weight == 0, 1, sums.weight)
    )


class Means:
    """Weighted means over many batches, accumulated on the host in f64.

    `nnx.metrics.Average` counts values without weights, and accumulates them in f32.

    Args:
      sums: Initial (total, weight) by name.
    """

    def __init__(self, sums: Mapping[str, Sequence[float]] | None = None) -> None:
        self._sums = {name: np.array(pair, np.float64) for name, pair in (sums or {}).items()}

    def add(self, sums: Mapping[str, Sums]) -> None:
        """Adds the sums of a batch."""
        for name, (total, weight) in sums.items():
            pair = np.array([total, weight], np.float64)
            self._sums[name] = self._sums.get(name, np.zeros(2)) + pair

    def result(self, empty: float = math.nan) -> dict[str, float]:
        """Returns the means by name, the loss first.

        Args:
          empty: The mean if the weight is 0.
        """
        means = {n: float(t / w) if w else empty for n, (t, w) in self._sums.items()}
        return loss_first(means)
