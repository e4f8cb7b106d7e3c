"""The weighted-sum contract: objectives give per-example values, the mean is taken here."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.errors import UserError


class WeightedValues(NamedTuple):
    """Values of leading dim B and how much each counts.

    `weights` broadcast against `values` from the left: one weight an example, or one a token.
    """

    values: jax.typing.ArrayLike
    weights: jax.typing.ArrayLike


class Sums(NamedTuple):
    """A weighted sum and the total of its weights: two f32 scalars."""

    total: Any
    weight: Any


def weighted_sums(
    outputs: Mapping[str, Any], batch_size: int, mask: jax.Array | None = None
) -> dict[str, Sums]:
    """Sums of what an objective returned for a global batch of B examples.

    `outputs`: by name an array of leading dim B, `WeightedValues`, or a pair (values, weights);
    `loss` is among them. `mask`: (B,), 0 for examples that only fill up the batch. Raises
    `UserError` for anything else.
    """
    if not isinstance(outputs, Mapping) or "loss" not in outputs:
        got = sorted(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
        raise UserError(
            f"the objective returned {got}: it must return a dictionary of per-example values "
            'with "loss" among them'
        )
    check_names(outputs, "the objective's")
    return {
        name: _sums(f"the objective's {name!r}", value, batch_size, mask)
        for name, value in outputs.items()
    }


def check_names(names: Iterable[str], whose: str) -> None:
    """Refuse names of metrics that are none, or mean something else in the metrics file."""
    for name in names:
        if not isinstance(name, str):
            raise UserError(f"{whose} {name!r} is named by a {type(name).__name__}: give it a name")
    for name in ("step", "split", "epoch"):
        if name in names:
            raise UserError(f"{whose} {name!r} is a word of the metrics file: rename it")


def weighted_mean(
    values: jax.typing.ArrayLike, weights: jax.typing.ArrayLike | None = None
) -> jax.Array:
    """The mean of values over a global batch, a f32 scalar; 0 where nothing counts.

    `values`: leading dim B. `weights` broadcast against them from the left: (B,), or one a token;
    what has weight 0 does not count, be it NaN. Raises `UserError` for other shapes.
    """
    values = jnp.asarray(values)
    if values.ndim == 0:
        raise UserError("weighted_mean is of the values of a batch, and is given a single number")
    given = values if weights is None else WeightedValues(values, weights)
    size = values.shape[0]
    return mean(_sums("what weighted_mean is given", given, size, None))


def check_no_pairs(outputs: Mapping[str, Any], batch: Any) -> None:
    """Refuse values of shape (B, B, ...) that no array of the batch explains.

    They come of combining (B, 1) with (B,), and train on nonsense. Given with weights, they are
    taken as meant.
    """
    leaves = jax.tree.leaves(batch)
    pairs = (leaves[0].shape[0],) * 2
    # Rows of B or B + 1 tokens explain it, too.
    if pairs[0] == 1 or any(
        leaf.ndim > 1 and leaf.shape[1] - pairs[1] in (0, 1) for leaf in leaves
    ):
        return
    for name, value in outputs.items():
        if not isinstance(value, tuple) and jnp.shape(value)[:2] == pairs:
            raise UserError(
                f"the objective's {name!r} has shape {jnp.shape(value)}, a value for each pair of "
                f"examples: it seems that ({pairs[0]}, 1) and ({pairs[0]},) were combined. Reshape "
                "one of them; where pairs are meant, give (values, weights)"
            )


def check_precise(outputs: Mapping[str, Any]) -> None:
    """Refuse losses computed in 16 bits: their rounding is larger than what training changes."""
    value = outputs["loss"]
    dtype = jnp.asarray(value[0] if isinstance(value, tuple) else value).dtype
    if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < 4:
        raise UserError(
            f"the objective's loss is {dtype}, which has too few digits for a loss: take the "
            "model's output to float32 before it: model(...).astype(jnp.float32)"
        )


def _sums(what: str, value: Any, batch_size: int, mask: jax.Array | None) -> Sums:
    if isinstance(value, Mapping):
        raise UserError(
            f"{what} is a dictionary of {', '.join(map(str, value))}: metrics are flat, so name "
            'each one by itself, for example "aux/accuracy"'
        )
    if isinstance(value, tuple):
        if len(value) != 2:
            raise UserError(f"{what} is a tuple of {len(value)}: (values, weights)")
        values, weights = jnp.asarray(value[0]), jnp.asarray(value[1], jnp.float32)
        weights = jax.lax.stop_gradient(weights)  # how much a value counts is not trained
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
    # What counts nothing must not spoil the sum either, even where it is NaN.
    counted = jnp.where(weights == 0, 0.0, values.astype(jnp.float32)) * weights
    return Sums(counted.sum(), weights.sum())


def _expand(what: str, weights: jax.Array, values: jax.Array) -> jax.Array:
    """`weights` with dims added at the end, so that they broadcast from the leading dim on."""
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
    """The same metrics in the order people read them (JAX sorts dictionaries by name)."""
    return dict(sorted(metrics.items(), key=lambda item: (item[0] != "loss", item[0])))


def stacked(sums: Mapping[str, Sums]) -> jax.Array:
    """Returns the sums by sorted name in one array, (names, 2), which is fetched at once."""
    return jnp.stack([jnp.stack(sums[name]) for name in sorted(sums)])


def mean(sums: Sums) -> jax.Array:
    """The weighted mean; 0 where nothing counted."""
    return jnp.where(
        sums.weight == 0, 0.0, sums.total / jnp.where(sums.weight == 0, 1, sums.weight)
    )


class Means:
    """Weighted means over many batches, added up on the host in f64."""

    def __init__(self, sums: Mapping[str, Sequence[float]] | None = None) -> None:
        self._sums = {name: np.array(pair, np.float64) for name, pair in (sums or {}).items()}

    def add(self, sums: Mapping[str, Sums]) -> None:
        """Count one batch's sums in."""
        for name, (total, weight) in sums.items():
            pair = np.array([total, weight], np.float64)
            self._sums[name] = self._sums.get(name, np.zeros(2)) + pair

    def result(self, empty: float = math.nan) -> dict[str, float]:
        """Name to mean over everything added; `empty` if nothing counted."""
        means = {n: float(t / w) if w else empty for n, (t, w) in self._sums.items()}
        return loss_first(means)
