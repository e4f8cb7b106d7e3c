"""The context in which annotated models run: a mesh for their constraints, and their axis rules."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from spmdtrain.errors import UserError
from spmdtrain.record.storage import one_line
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import Placement, is_under_shard_map
from spmdtrain.sharding.rules import AxisRules, axes_of_entry
from spmdtrain.strategies import AXES

PyTree = Any
T = TypeVar("T")
_ONE_DEVICE = AbstractMesh((1,) * len(AXES), AXES, (AxisType.Auto,) * len(AXES))


class ModelContext:
    """The context in which annotated Flax models expect to be called. Traced under `jit`.

    Constraints of activations (`jax.lax.with_sharding_constraint` with a `PartitionSpec`, Flax's
    `with_logical_constraint`) apply to the mesh of the run, and Flax's `logical_axis_rules` are
    the experiment's. Without annotations and axis rules, it is not active and only calls.
    """

    def __init__(
        self, placement: Placement, axis_rules: AxisRules | None, *, annotated: bool = False
    ) -> None:
        if not isinstance(axis_rules, AxisRules | None):
            raise UserError(
                f"axis_rules is a {type(axis_rules).__name__}: it must be AxisRules(...)"
            )
        self._placement, self._axis_rules = placement, axis_rules
        self.is_active = annotated or axis_rules is not None
        self._explicit = () if axis_rules is None else tuple(axis_rules.explicit)

    def batch_specs(self, batch: PyTree) -> PyTree:
        """Returns the specs of a batch's arrays in the model, for `specs` of `call`."""
        placement = self._placement
        axes = tuple(axis for axis in BATCH_AXES if placement.size(axis) > 1)
        split = PartitionSpec(axes)

        def spec(x: Any) -> PartitionSpec:
            divides = x.ndim > 0 and x.shape[0] % placement.batch_shards == 0
            return split if divides else PartitionSpec()

        return jax.tree.map(spec, batch)

    def call(self, function: Callable[..., T], *args: PyTree, specs: Any = None) -> T:
        """Calls `function(*args)` in the context.

        Args:
          function: A function that does not close over arrays.
          specs: A function that returns the `PartitionSpec`s by argument, for explicit axes. By
            default arguments keep automatic axes.

        Raises:
          UserError: If the model needs explicit axes that are automatic.
        """
        # Under `shard_map` each device computes alone: there is nothing to constrain.
        if not self.is_active or is_under_shard_map(self._placement):
            return function(*args)
        mesh = self._placement.mesh
        with (
            jax.sharding.use_abstract_mesh(_ONE_DEVICE if mesh is None else mesh.abstract_mesh),
            self._flax_rules(),
        ):
            if self._explicit and specs is not None:
                explicit = jax.tree.map(self._only_explicit, specs())
                function = jax.sharding.explicit_axes(
                    function, axes=self._explicit, in_sharding=explicit
                )
            try:
                return function(*args)
            except ValueError as error:
                if "of type Auto" not in str(error):  # JAX has no type for this error
                    raise
                raise UserError(
                    "the model passes out_sharding to an operation, and its axes are automatic: "
                    f"name them in AxisRules(explicit=(...)). {one_line(error)}"
                ) from error

    def _only_explicit(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns a spec without automatic axes, whose use XLA decides."""
        kept = [tuple(a for a in axes_of_entry(e) if a in self._explicit) for e in spec]
        return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in kept))

    @contextlib.contextmanager
    def _flax_rules(self) -> Iterator[None]:
        if self._axis_rules is None:
            yield
            return
        from flax.core import spmd  # slow to import, and only annotated models need it

        with spmd.logical_axis_rules(self._axis_rules.pairs):
            yield
