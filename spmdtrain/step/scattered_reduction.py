"""The reduction of gradients by which each device gets a part of the sums."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import ParamGathers, SplitDims, use_gathers
from spmdtrain.sharding.rules import axes_of_spec, split_dims
from spmdtrain.step.reductions import Reduction, all_reduce, in_dtype, scale_arrays, scatter

PyTree = Any


@dataclass(frozen=True)
class ScatteredReduction:
    """A reduction of gradients by reduce-scatters, for strategies that split them.

    Parameters that are split over batch axes are gathered explicitly, stacked layers one at a time
    (`ParamGathers`), and their gradients are scattered where the backward pass has computed them.
    Gradients of other parameters are scattered after it, if the optimizer's state is split. What no
    axis splits is all-reduced.

    `dtype` is the dtype of the transfer; None for the dtype of the gradients.
    """

    layout: Layout
    dtype: str | None = None

    def gathers(self, size: int) -> AbstractContextManager[Any]:
        """Returns a context manager in which the layout gathers the devices' parts explicitly.

        `size` is the batch size. The gradients are divided by it before they are added up, which
        keeps the sums within the range of 16 bits.
        """
        return use_gathers(ParamGathers(partial(self._scatter_dims, 1 / size)))

    def finish(self, gradients: PyTree, size: int) -> PyTree:
        """Returns the sums over all batch axes divided by `size`, split as the optimizer's state.

        `size` is the batch size, and `gradients` are each device's share. The gradients of split
        parameters are already scattered and divided over the axes that split them.
        """

        def finish_leaf(x: jax.Array, has: PartitionSpec, wanted: PartitionSpec) -> jax.Array:
            done = set(axes_of_spec(has))
            x = x if done else scale_arrays(x, 1 / size)
            for dim, axes in split_dims(wanted, x.ndim):
                if missing := tuple(axis for axis in axes if axis not in done):
                    x = self._scatter(x, missing, x.ndim + dim)
            done |= set(axes_of_spec(wanted))
            left = [axis for axis in BATCH_AXES if axis not in done]
            return self._reduce(all_reduce, x, [a for a in left if jax.lax.axis_size(a) > 1])

        specs = [self.layout.batch_specs(gradients, field) for field in ("params", "opt_state")]
        return jax.tree.map(finish_leaf, gradients, *specs)

    def _scatter_dims(self, factor: float, x: jax.Array, split: SplitDims) -> jax.Array:
        """Returns this device's part of the sum of `factor` times an array."""
        x = scale_arrays(x, factor)
        for dim, axes in reversed(split):
            x = self._scatter(x, axes, x.ndim + dim)
        return x

    def _scatter(self, x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
        return self._reduce(partial(scatter, dim=dim), x, axes)

    def _reduce(self, reduction: Reduction, x: jax.Array, axes: Any) -> jax.Array:
        if not axes:
            return x
        function = reduction if self.dtype is None else in_dtype(reduction, self.dtype)
        reduced: jax.Array = function(x, tuple(axes))
        return reduced
