"""Functions that each replica computes on its own examples, and reductions of their results.

Everywhere else in spmdtrain values are global. The values of replicas have their own type, so that
they cannot be mistaken for global ones: they must be reduced first.
"""

from collections.abc import Callable
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import Placement, current_strategy, use_placement
from spmdtrain.step.metrics import Sums, counted, mean
from spmdtrain.strategies import AXES, DEFAULT
from spmdtrain.tree import named_leaves, path_name

PyTree = Any


class NotReducedError(UserError, TypeError):
    """A per-replica value was used as a global one."""


@jax.tree_util.register_pytree_node_class
class PerReplica:
    """A value for each replica, returned by `per_replica`. It must be reduced before use.

    Other operations, such as arithmetic or calls of `jnp`, raise `NotReducedError`, a `TypeError`.
    It can be passed to another `per_replica`, where each replica gets its own value, and can be
    returned from a jitted function because it is a pytree: `jax.tree` functions see the arrays of
    all replicas.
    """

    def __init__(self, stacked: PyTree, examples: int) -> None:
        self._stacked = stacked  # arrays of leading dim R, in the order of the batch's parts
        self._examples = examples  # number of examples of each replica

    def sum(self) -> PyTree:
        """Returns the sum over the replicas: global arrays of the shape of a replica's value."""
        return jax.tree.map(lambda x: x.sum(0), self._stacked)

    def mean(self, weights: jax.typing.ArrayLike | None = None) -> PyTree:
        """Returns the mean over all examples, in f32.

        `stack().mean(0)` is the mean over the replicas, of a gradient for example.

        Args:
          weights: (B,), the weights of the global batch's examples. By default 1.

        Returns:
          Arrays (...) if each replica's value has shape (b, ...); 0 if all weights are 0.

        Raises:
          UserError: If a value has no leading dim of the replica's b examples.
        """
        return jax.tree.map(lambda x: _mean_over_examples(x, weights), self._by_example())

    def gather(self) -> PyTree:
        """Returns the values of all examples in the batch's order.

        Returns:
          Arrays (B, ...) if each replica's value has shape (b, ...).

        Raises:
          UserError: If a value has no leading dim of examples. `stack` works for such values.
        """
        return _replicate(self._by_example())

    def _by_example(self) -> PyTree:
        for name, x in named_leaves(self._stacked).items():
            if x.shape[1:2] != (self._examples,):
                raise UserError(
                    f"each replica's {name or 'value'} has shape {x.shape[1:]}, without a leading "
                    f"dim of its {self._examples} examples: return values by example, or reduce "
                    "them by sum() or stack()"
                )
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self._stacked)

    def stack(self) -> PyTree:
        """Returns the values of the R replicas: global arrays with a new leading dim of R."""
        return _replicate(self._stacked)

    def local(self) -> list[PyTree]:
        """Returns the values of the replicas on this process's devices, as NumPy arrays.

        Raises:
          UserError: While JAX traces, because there are no values.
        """
        parts = jax.tree.map(_local_parts, self._stacked)
        flat: Any = jax.tree.flatten(parts, is_leaf=lambda x: isinstance(x, list))
        leaves, treedef = flat
        return [treedef.unflatten(replica) for replica in zip(*leaves, strict=True)]

    def tree_flatten(self) -> tuple[tuple[PyTree], int]:
        return (self._stacked,), self._examples

    @classmethod
    def tree_unflatten(cls, examples: int, children: tuple[PyTree]) -> "PerReplica":
        return cls(*children, examples)

    def __repr__(self) -> str:
        return f"PerReplica({jax.tree.map(jnp.shape, self._stacked)})"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotReducedError(
            "a per-replica value is not a global value: reduce it first by sum(), mean(), "
            "gather() or stack(), or read local()"
        )

    __array__ = __float__ = __int__ = __index__ = __bool__ = __complex__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = (
        _refuse
    )
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __eq__ = __ne__ = _refuse
    __len__ = __iter__ = __getitem__ = __format__ = _refuse
    __hash__ = object.__hash__


def per_replica(function: Callable[..., PyTree], batch: PyTree, *whole: PyTree) -> PerReplica:
    """Calls `function(examples, *whole)` on each replica with its own part of the batch.

    Gradients that `function` computes are gradients for its replica's examples alone. In it,
    replicas communicate only through collectives over `BATCH_AXES` (a gradient *through* `psum` is
    that of all replicas' sums), and `current_strategy()` is the default strategy. If a replica has
    several devices (tensor parallelism), each computes all of it.

    Args:
      function: Returns arrays.
      batch: Global arrays of leading dim B, and `PerReplica` values, of which each replica gets its
        own.
      *whole: Arguments that every replica gets in full, parameters for example.

    Returns:
      The values of the replicas.

    Raises:
      UserError: If B does not divide over the replicas, or in another `per_replica`.
      NotReducedError: If an argument of `whole` holds a `PerReplica`.
    """
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise UserError(
            "per_replica was called in per_replica, where all values belong to a replica"
        )
    if replicas_in(whole):
        raise NotReducedError(
            "per_replica: an argument that every replica gets in full holds a PerReplica: reduce "
            "it first, or pass it with the batch, so that each replica gets its own value"
        )
    placement = current_strategy()
    flat: Any = jax.tree.flatten(batch, is_leaf=_is_per_replica)
    parts, treedef = flat
    examples = _examples(batch, placement.batch_shards)

    def own(part: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x[0], part._stacked) if _is_per_replica(part) else part

    def local(parts: list[PyTree], *whole: PyTree) -> PyTree:
        with use_placement(Placement(DEFAULT, None)):
            value = function(treedef.unflatten(map(own, parts)), *whole)
        return jax.tree.map(_with_replica_dim, value)

    split, replicated = PartitionSpec(BATCH_AXES), PartitionSpec()
    # Without the check of varying axes, because replicas may compute anything.
    program = jax.shard_map(
        local,
        mesh=placement.mesh or _mesh_of_one(placement),
        in_specs=(split, *[replicated] * len(whole)),
        out_specs=split,
        check_vma=False,
    )
    return PerReplica(program(parts, *whole), examples)


def reduce(
    op: Literal["sum", "mean", "SUM", "MEAN"], value: PyTree, *, axis: Literal[0] | None = None
) -> PyTree:
    """Reduces a value of the replicas to a global one, as `tf.distribute.Strategy.reduce` does.

    Args:
      op: "sum" or "mean", also in upper case.
      value: A `PerReplica`. If there is one replica, as under the default strategy, also arrays:
        the value of that replica.
      axis: None reduces over the replicas; 0 over the replicas and their examples, the leading dim
        of each replica's value.

    Returns:
      Global arrays: of the shape of a replica's value, without its leading dim if axis is 0.

    Raises:
      UserError: If op or axis is another, a value has no dim of examples, or `value` is not a
        `PerReplica` although there are several replicas.
    """
    method = str(op).lower()
    if method not in ("sum", "mean"):
        raise UserError(f"reduce: op is {op!r}.{did_you_mean(str(op), ['sum', 'mean'])}")
    if axis not in (None, 0):
        raise UserError(f"reduce: axis is {axis!r}: it must be None (replicas) or 0 (examples)")
    if not _is_per_replica(value):
        if replicas_in(value):
            raise UserError("reduce: give one PerReplica, not a tree of them")
        if (replicas := current_strategy().batch_shards) > 1:
            raise UserError(
                f"reduce: the value is a {type(value).__name__}, and there are {replicas} "
                "replicas: give the PerReplica that per_replica returned"
            )
        examples = {jnp.shape(x)[:1] for x in jax.tree.leaves(value)}
        size = next(iter(examples))[0] if len(examples) == 1 and () not in examples else 0
        value = PerReplica(jax.tree.map(lambda x: jnp.asarray(x)[None], value), size)
    if axis is None:
        return jax.tree.map(lambda x: getattr(x, method)(0), value._stacked)
    if method == "mean":
        return value.mean()
    return jax.tree.map(lambda x: x.sum(0), value._by_example())


def replicas_in(tree: PyTree) -> list[PerReplica]:
    """Returns the `PerReplica` values in a tree."""
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_per_replica) if _is_per_replica(x)]


def _is_per_replica(x: Any) -> bool:
    return isinstance(x, PerReplica)


def _examples(batch: PyTree, replicas: int) -> int:
    """Returns the number of examples of each replica; checks that the batch divides."""
    leaves = jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_per_replica)
    earlier = [x for _, x in leaves if _is_per_replica(x)]
    arrays = {path_name(path): jnp.shape(x) for path, x in leaves if not _is_per_replica(x)}
    for value in earlier:
        if {x.shape[0] for x in jax.tree.leaves(value._stacked)} - {replicas}:
            raise UserError(
                f"per_replica: {value!r} does not have the {replicas} replicas of this strategy"
            )
    for name, shape in arrays.items():
        what = f"per_replica: the batch's {name or 'array'}"
        if not shape:
            raise UserError(f"{what} is a single number: it needs a leading dim of examples")
        if shape[0] % replicas:
            raise UserError(
                f"{what} has {shape[0]} examples, which do not divide over {replicas} replicas"
            )
    counts = {shape[0] for shape in arrays.values()}
    if len(counts) > 1:
        raise UserError(f"per_replica: the batch's arrays differ in their examples: {arrays}")
    if not counts and not earlier:
        raise UserError("per_replica: the batch holds no arrays")
    return counts.pop() // replicas if counts else earlier[0]._examples


def _with_replica_dim(x: Any) -> jax.Array:
    if not isinstance(x, (bool, int, float, complex, jax.Array, np.ndarray, np.generic)):
        raise UserError(
            f"per_replica: the function returned a {type(x).__name__}: it must return arrays"
        )
    return jnp.asarray(x)[None]


def _mesh_of_one(placement: Placement) -> Mesh:
    """Returns a mesh of one device, so that the axes have names without a mesh, too."""
    return Mesh(np.array(placement.devices).reshape([1] * len(AXES)), AXES)


def _replicate(tree: PyTree) -> PyTree:
    """Replicates arrays that are split over processes; leaves others to XLA."""

    def whole(x: jax.Array) -> jax.Array:
        if isinstance(x, jax.core.Tracer) or x.is_fully_addressable:
            return x
        assert isinstance(x.sharding, NamedSharding)
        places = NamedSharding(x.sharding.mesh, PartitionSpec())
        replicated: jax.Array = jax.jit(lambda x: x, out_shardings=places)(x)
        return replicated

    return jax.tree.map(whole, tree)


def _mean_over_examples(x: jax.Array, weights: jax.typing.ArrayLike | None) -> jax.Array:
    weights = jnp.asarray(
        jnp.ones(x.shape[0], jnp.float32) if weights is None else weights, jnp.float32
    )
    if weights.shape != x.shape[:1]:
        raise UserError(
            f"mean: weights of shape {weights.shape} for {x.shape[0]} examples: give one for each"
        )
    weights = weights.reshape(-1, *[1] * (x.ndim - 1))
    total = weights.sum()
    sums = counted(x.astype(jnp.float32), jnp.broadcast_to(weights, x.shape)).sum(0)
    return mean(Sums(sums, total))


def _local_parts(x: jax.Array) -> list[np.ndarray]:
    if isinstance(x, jax.core.Tracer):
        raise UserError("local() was called in a jitted function, where there are no values")
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    # A part holds several replicas if the compiler placed the values on fewer devices.
    return [row for start in sorted(parts) for row in np.asarray(parts[start])]
