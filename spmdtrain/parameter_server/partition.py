"""Partitions of arrays, optimizers and trainings over parameter servers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain.document.blocks import TableBlock
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import UserError
from spmdtrain.parameter_server.scheduler import BatchResult
from spmdtrain.parameter_server.server import Pulled, Push, PushResult, ServerState
from spmdtrain.step.metrics import Combination
from spmdtrain.step.optimizer import ExtraArguments, Update, evaluates_loss, update_with
from spmdtrain.step.optimizer_record import name_of, parts_of
from spmdtrain.step.state import TREES, TrainState
from spmdtrain.tree import named_leaves, path_name

# -- Partitions of arrays, and of trees of arrays, over parameter servers --------------------------
#
# The three partitioners work as in TensorFlow (`tf.distribute.experimental.partitioners`): they
# split an array along its first dim, and never a scalar.

PyTree = Any
Shape = Sequence[int]


class Partitioner(Protocol):
    """A function that determines the number of shards of an array."""

    def __call__(self, shape: Shape, itemsize: int) -> int:
        """Returns the number of shards: at least 1, at most the first dim.

        `itemsize` is the number of bytes of one element.
        """
        ...


@dataclass(frozen=True)
class FixedShards:
    """Splits each array into the same number of shards, or fewer if it has fewer rows.

    Attributes:
      num_shards: Number of shards.
    """

    num_shards: int

    def __call__(self, shape: Shape, itemsize: int) -> int:
        return _limit(shape, self.num_shards)


@dataclass(frozen=True)
class MinSize:
    """Splits an array into one shard for each `min_shard_bytes` of its size, rounded up.

    Attributes:
      max_shards: Maximum number of shards.
      min_shard_bytes: Size of a shard in bytes.
    """

    max_shards: int = 1
    min_shard_bytes: int = 256 << 10

    def __call__(self, shape: Shape, itemsize: int) -> int:
        filled = math.ceil(math.prod(shape) * itemsize / self.min_shard_bytes)
        return _limit(shape, min(self.max_shards, filled))


@dataclass(frozen=True)
class MaxSize:
    """Splits an array into the fewest shards of whole rows that do not exceed a size.

    Attributes:
      max_shard_bytes: Maximum size of a shard in bytes; a shard has at least one row.
      max_shards: Maximum number of shards, which takes precedence over the size; None for no
        maximum.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __call__(self, shape: Shape, itemsize: int) -> int:
        if not shape or not math.prod(shape):
            return 1
        row = math.prod(shape[1:]) * itemsize
        shards = math.ceil(shape[0] / max(1, self.max_shard_bytes // row))
        return _limit(shape, shards if self.max_shards is None else min(self.max_shards, shards))


def _limit(shape: Shape, shards: int) -> int:
    return max(1, min(shape[0], shards)) if shape else 1


@dataclass(frozen=True)
class RowRange:
    """A range of rows of an array: from `start` to before `stop` along its first dim."""

    start: int
    stop: int


@dataclass(frozen=True)
class Leaf:
    """Shape of an array, and the bytes of one element."""

    shape: tuple[int, ...]
    itemsize: int


def assign_rows(
    leaves: Mapping[str, Leaf], servers: int, partitioner: Partitioner
) -> list[dict[str, RowRange]]:
    """Assigns the rows of arrays to servers; returns each server's rows by the names of the arrays.

    The shards of an array are assigned to the servers with the fewest bytes, the largest arrays
    first. A server that receives several shards of an array receives adjacent ones.

    An array is absent from the result of a server that holds no rows of it. An array that is not
    split is `RowRange(0, first dim)` of one server, and a scalar `RowRange(0, 1)`.
    """
    placed: list[dict[str, RowRange]] = [{} for _ in range(servers)]
    used = [0] * servers  # bytes

    def size(name: str) -> int:
        return math.prod(leaves[name].shape) * leaves[name].itemsize

    for name in sorted(leaves, key=lambda name: (-size(name), name)):
        leaf = leaves[name]
        rows = leaf.shape[0] if leaf.shape else 1
        shards = partitioner(leaf.shape, leaf.itemsize)
        holders = min(shards, servers)
        lightest = sorted(range(servers), key=lambda server: (used[server], server))[:holders]
        for number, server in enumerate(sorted(lightest)):
            # The shards are distributed over the holders as evenly as possible.
            first, after = (_start_of(shards, holders, n) for n in (number, number + 1))
            own = RowRange(_start_of(rows, shards, first), _start_of(rows, shards, after))
            placed[server][name] = own
            used[server] += size(name) * (own.stop - own.start) // max(1, rows)
    return placed


def _start_of(total: int, parts: int, part: int) -> int:
    """Returns the start of a part of a total; with a remainder the first parts are one larger."""
    size, remainder = divmod(total, parts)
    return part * size + min(part, remainder)


@dataclass(frozen=True)
class TreePartition:
    """A partition of a tree of arrays over servers; `whole` and `parts` are abstract.

    Each part has the structure of the whole tree: an array has a first dim of 0 in the part of a
    server that holds no rows of it. Therefore everything that depends on the structure (labels of
    parameters, masks) applies to a part too.
    """

    whole: PyTree
    parts: Sequence[PyTree]

    def cut(self, tree: PyTree, server: int) -> PyTree:
        """Returns a server's part of a tree of this structure, NumPy arrays."""
        return jax.tree.map(
            lambda x, whole, *parts: _cut(np.asarray(x), whole, parts, server),
            tree,
            self.whole,
            *self.parts,
        )

    def join(self, parts: Sequence[PyTree]) -> PyTree:
        """Returns the whole tree from the parts of all servers in their order."""
        return jax.tree.map(lambda whole, *leaves: _join(whole, leaves), self.whole, *parts)

    def map(self, function: Callable[[PyTree], PyTree]) -> "TreePartition":
        """Returns the partition of the output of a function that is applied to each part."""
        return TreePartition(
            jax.eval_shape(function, self.whole),
            [jax.eval_shape(function, part) for part in self.parts],
        )

    def bytes_of(self, server: int) -> int:
        """Returns the size of a server's part in bytes."""
        leaves = jax.tree.leaves(self.parts[server])
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def partition_tree(whole: PyTree, servers: int, partitioner: Partitioner) -> TreePartition:
    """Returns the partition of a tree along the first dims of its (abstract) arrays."""
    leaves = named_leaves(whole)
    shapes = {name: Leaf(tuple(x.shape), x.dtype.itemsize) for name, x in leaves.items()}
    placed = assign_rows(shapes, servers, partitioner)
    return TreePartition(whole, [_part(whole, rows) for rows in placed])


def _part(whole: PyTree, rows: Mapping[str, RowRange]) -> PyTree:
    def part(path: tuple[Any, ...], x: Any) -> jax.ShapeDtypeStruct:
        own = rows.get(path_name(path))
        if own is None:
            return jax.ShapeDtypeStruct((0, *x.shape[1:]), x.dtype)
        shape = (own.stop - own.start, *x.shape[1:]) if x.shape else ()
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree_util.tree_map_with_path(part, whole)


def _is_partitioned(whole: Any, parts: Sequence[Any]) -> bool:
    """Returns False for an array that every server holds whole, such as a step counter."""
    return any(part.shape != whole.shape for part in parts)


def _cut(x: np.ndarray, whole: Any, parts: Sequence[Any], server: int) -> np.ndarray:
    own = parts[server]
    if not _is_partitioned(whole, parts) or own.shape == whole.shape:
        return x
    if not whole.shape:
        return np.zeros(own.shape, own.dtype)
    first = sum(part.shape[0] for part in parts[:server])
    return x[first : first + own.shape[0]]


def _join(whole: Any, parts: Sequence[Any]) -> Any:
    if not _is_partitioned(whole, parts):
        return np.asarray(parts[0])
    if not whole.shape:
        return next(np.asarray(part) for part in parts if not part.shape)
    joined = np.concatenate([np.asarray(part) for part in parts])
    assert joined.shape == whole.shape, (joined.shape, whole.shape)
    return joined


# -- The split of an optimizer into a part that needs whole gradients and one that does not --------

_STEPS = 2  # the second step uses the state that the first one leaves
_LARGE = 1e8  # factor of gradients that every clipping changes


def split_optimizer(
    optimizer: optax.GradientTransformation, trained: TreePartition
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Splits an optimizer into a part for the workers and a part for the servers.

    The first transformations of a chain may need the whole gradient if they keep no state, such as
    clipping by the global norm: they run on the workers.

    Returns:
      The transformation that a worker applies to whole gradients, and the one that each server
      applies to its part. The state of the second has the structure of the whole optimizer's state.

    Raises:
      UserError: If the optimizer cannot be split. Names the transformation.
    """
    if evaluates_loss(optimizer):
        raise UserError(
            f"strategy parameter_server: the optimizer's {name_of(optimizer)} evaluates the loss "
            "at other parameters, and the servers have no batch. Use another strategy, or an "
            "optimizer without evaluations (sgd, adam, adamw)"
        )
    chain = parts_of(optimizer)
    trial = _Trial.of(trained)
    inseparable = [number for number, part in enumerate(chain) if not trial.is_separable(part)]
    count = inseparable[-1] + 1 if inseparable else 0
    for part in chain[:count]:
        if jax.tree.leaves(jax.eval_shape(part.init, trained.whole)):
            keeps = "keeps" if part is chain[count - 1] else f"{name_of(part)} keeps"
            raise UserError(
                f"strategy parameter_server: the optimizer's {name_of(chain[count - 1])} needs the "
                f"whole gradient, and {keeps} a state, of which each server would have only a "
                "part. Use an optimizer that works element by element (sgd, adam, adamw), with "
                "clip_by_global_norm before it if needed"
            )
    if not count:
        return optax.identity(), optimizer
    rest = [_without_update(part) for part in chain[:count]] + list(chain[count:])
    return optax.chain(*chain[:count]), optax.chain(*rest)


def _without_update(part: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an identity whose state has the structure of the state of `part`."""
    return optax.GradientTransformation(
        part.init, lambda updates, state, params=None: (updates, state)
    )


@dataclass(frozen=True)
class _Trial:
    """Random inputs on which the updates of parts are compared with the update of the whole.

    `gradients` has one tree for each step.
    """

    partition: TreePartition
    params: PyTree
    gradients: Sequence[PyTree]

    @classmethod
    def of(cls, partition: TreePartition) -> "_Trial":
        generator = np.random.default_rng(0)
        params, *gradients = (
            jax.tree.map(lambda x: _random(x, generator), partition.whole)
            for _ in range(1 + _STEPS)
        )
        return cls(partition, params, gradients)

    def is_separable(self, part: optax.GradientTransformation) -> bool:
        """Returns whether the updates of the parts, joined, equal the update of the whole.

        The inputs include large gradients, because clipping may leave small ones unchanged. They
        also include a NaN in the first or the last step: a transformation with a state reacts to it
        in a later step, one without a state in the same step.
        """

        @jax.jit
        def run(params: PyTree, gradients: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
            state, updates = part.init(params), params
            for gradient in gradients:
                extra = ExtraArguments(jnp.float32(1.0), gradient)
                updates, state = update_with(part, gradient, state, params, extra)
            return updates, state

        for gradients in self._cases():
            expected = run(self.params, gradients)
            servers = range(len(self.partition.parts))
            results = [
                run(cut(self.params), [cut(x) for x in gradients])
                for cut in (partial(self.partition.cut, server=n) for n in servers)
            ]
            if not _equals_joined(expected, results):
                return False
        return True

    def _cases(self) -> Iterator[list[PyTree]]:
        first, last = self.gradients
        yield [first, last]
        yield [jax.tree.map(lambda x: x * _LARGE, gradient) for gradient in (first, last)]
        yield [_with_nan(first), last]
        yield [first, _with_nan(last)]


def _equals_joined(whole: PyTree, parts: Sequence[PyTree]) -> bool:
    try:
        result = TreePartition(whole, parts).join(parts)
    except (AssertionError, TypeError, ValueError):  # other shapes, or random keys
        return False
    return all(
        x.shape == y.shape and np.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True)
        for x, y in zip(*map(jax.tree.leaves, (whole, result)), strict=True)
    )


def _random(x: Any, generator: np.random.Generator) -> jax.Array:
    return jnp.asarray(generator.standard_normal(x.shape, np.float32), x.dtype)


def _with_nan(tree: PyTree) -> PyTree:
    """Returns the tree with one NaN in its largest array."""
    leaves, structure = jax.tree.flatten(tree)
    largest = max(range(len(leaves)), key=lambda n: leaves[n].size)
    x = leaves[largest]
    leaves[largest] = x.ravel().at[0].set(jnp.nan).reshape(x.shape)
    return jax.tree.unflatten(structure, leaves)


# -- The partition of a training: workers compute gradients, servers hold the state ----------------
#
# The scheme follows `tf.distribute.ParameterServerStrategy` (Li et al., "Scaling Distributed
# Machine Learning with the Parameter Server", OSDI 2014), for any model and any optimizer that can
# be split.


@dataclass(frozen=True)
class Computed:
    """A worker's result for a batch; for the other fields see `BatchResult`.

    Attributes:
      gradients: Gradients of the weighted mean for the trained parameters, after the part of the
        optimizer that runs on the worker, such as clipping.
      model_state: The change of the model state by the batch (see `difference`).
    """

    gradients: PyTree
    model_state: PyTree
    metrics: dict[str, float]
    sums: Mapping[str, Sequence[float]] = field(default_factory=dict)
    combined: dict[str, Combination] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerPartition:
    """The partition of a state over servers, and of the optimizer over workers and servers.

    The optimizer's state and the averaged parameters are partitioned like the parameters; each
    array of the model state is whole on one server. `on_worker` are the transformations that need
    whole gradients, `on_server` is the update that each server applies to its part.
    """

    params: TreePartition
    trained: TreePartition
    opt_state: TreePartition
    averaged: TreePartition
    model_state: TreePartition
    on_worker: optax.GradientTransformation
    on_server: Update

    @classmethod
    def of(
        cls, state: TrainState, update: Update, servers: int, partitioner: Partitioner
    ) -> "ServerPartition":
        """Returns the partition of an abstract state; raises as `split_optimizer` does."""
        params = partition_tree(state.params, servers, partitioner)
        trained = params.map(lambda params: update.partition(params)[0])
        on_worker, on_server = split_optimizer(update.optimizer, trained)
        server_update = Update(on_server, update.frozen, update.ema_decay)
        return cls(
            params=params,
            trained=trained,
            opt_state=params.map(server_update.init),
            averaged=params.map(server_update.first_average),
            model_state=partition_tree(state.model_state, servers, FixedShards(1)),
            on_worker=on_worker,
            on_server=server_update,
        )

    @property
    def trees(self) -> dict[str, TreePartition]:
        """The partition of each tree of the state, by its field."""
        return {name: getattr(self, name) for name in TREES}

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self.params.parts)

    def held_by(self, server: int, state: TrainState) -> ServerState:
        """Returns a server's part of a state."""
        parts = {name: tree.cut(getattr(state, name), server) for name, tree in self.trees.items()}
        return ServerState(**parts, averaged_before=state.averaged_before)

    def state(self, held: Sequence[ServerState], step: int, key: Any) -> TrainState:
        """Returns the whole state, NumPy arrays, from the parts of all servers in their order."""
        whole: dict[str, Any] = {
            name: tree.join([getattr(part, name) for part in held])
            for name, tree in self.trees.items()
        }
        whole |= {"step": np.asarray(step, np.int32), "key": key}
        return TrainState(**whole, averaged_before=held[0].averaged_before)

    def pulled(self, parts: Sequence[Pulled]) -> tuple[PyTree, PyTree]:
        """Returns the whole parameters and model state from the answers of all servers."""
        params = self.params.join([part.params for part in parts])
        return params, self.model_state.join([part.model_state for part in parts])

    def pushes(self, number: int, computed: Computed, parts: Sequence[Pulled]) -> list[Push]:
        """Returns each server's push of a batch, with the version of its pulled part."""
        return [
            Push(
                number=number,
                version=part.version,
                gradients=self.trained.cut(computed.gradients, server),
                model_state=self.model_state.cut(computed.model_state, server),
                loss=computed.metrics["loss"],
            )
            for server, part in enumerate(parts)
        ]


def batch_result(
    number: int,
    metrics: Mapping[str, float],
    results: Sequence[PushResult],
    *,
    sums: Mapping[str, Sequence[float]] | None = None,
    combined: dict[str, Combination] | None = None,
    pulled: int = 0,
    pushed: int = 0,
) -> BatchResult:
    """Returns the result of a batch from the answers of all servers to its pushes.

    The staleness that a server reports for a batch which it had applied before is ignored, because
    this push was not applied. `pulled` and `pushed` are bytes.
    """
    return BatchResult(
        number=number,
        metrics=dict(metrics),
        sums=sums or {},
        combined=combined or {},
        finite=tuple(np.all([result.finite for result in results], axis=0).tolist()),
        staleness=max((result.staleness for result in results if result.is_new), default=0),
        is_stale=any(result.is_stale for result in results),
        pulled=pulled,
        pushed=pushed,
    )


def bytes_in(tree: PyTree) -> int:
    """Returns the size of all arrays of a tree in bytes."""
    return sum(np.asarray(x).nbytes for x in jax.tree.leaves(tree))


def partition_table(partition: ServerPartition) -> TableBlock:
    """Returns the rows of each parameter on each server, and the bytes of the server's part."""
    servers = range(partition.servers)
    shapes = {name: leaf.shape for name, leaf in named_leaves(partition.params.whole).items()}
    parts = [named_leaves(part) for part in partition.params.parts]
    rows = [
        [name, str(shape), *_row_ranges(shape, [part[name].shape for part in parts])]
        for name, shape in shapes.items()
    ]
    sizes = [
        [TrainState.FIELDS[name].title, "", *(byte_size(tree.bytes_of(n)) for n in servers)]
        for name, tree in partition.trees.items()
        if jax.tree.leaves(tree.whole)
    ]
    return TableBlock(
        ["parameter", "shape", *(f"ps {n}" for n in servers)],
        [*rows, *sizes],
        numeric=frozenset(n + 2 for n in servers),
        totals=len(sizes),
    )


def _row_ranges(shape: tuple[int, ...], parts: list[tuple[int, ...]]) -> list[str]:
    """Returns each server's rows of a parameter; an empty text for a server without any."""
    if not shape:
        return ["all" if part == shape else "" for part in parts]
    ranges, first = [], 0
    for part in parts:
        ranges.append(f"{first}:{first + part[0]}" if part[0] else "")
        first += part[0]
    return ["all" if part == shape else rows for part, rows in zip(parts, ranges, strict=True)]
