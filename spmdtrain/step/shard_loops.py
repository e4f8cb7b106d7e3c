"""Loops over the virtual shards of a device, with sums over the virtual shards of all devices."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from spmdtrain.errors import UserError
from spmdtrain.tree import path_name
from spmdtrain.xla.jaxpr import evaluate, inner_jaxprs, variables
from spmdtrain.xla.padding_rules import CALLS

PyTree = Any
Leaves = list[jax.Array]
VIRTUAL_SHARD = "virtual_shard"
"""The name under which the code of one virtual shard adds up values over all of them."""
_REPEATS = frozenset(("broadcast_in_dim", "iota"))
"""Operations that repeat a smaller array."""


def tree_loop(
    function: Callable[[jax.Array], tuple[PyTree, PyTree]], turns: int
) -> tuple[PyTree, PyTree]:
    """Evaluates a function for each turn, and adds up its first results as a binary tree.

    The loops are nested, with two turns each, so that one sum for each level is in memory instead
    of one for each turn. The function is traced once, because its results may have static parts
    that differ between traces: the function of a `SumMetric`, for example.

    Args:
      function: Maps the number of a turn to (summands, values).
      turns: Number of turns, a power of two.

    Returns:
      The sums, and the values with a leading dim of `turns`.
    """
    first_turn = jnp.zeros((), jnp.int32)
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(first_turn)
    of_sums, of_values = map(jax.tree.structure, shapes)
    summands = jax.tree.leaves(shapes[0])

    def one(turn: jax.Array) -> tuple[Leaves, Leaves]:
        leaves = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, turn)
        return leaves[: len(summands)], leaves[len(summands) :]

    def level(turns: int) -> Callable[[jax.Array], tuple[Leaves, Leaves]]:
        if turns == 1:
            return one
        half = level(turns // 2)

        def add(total: Leaves, first: jax.Array) -> tuple[Leaves, Leaves]:
            sums, values = half(first)
            return jax.tree.map(jnp.add, total, sums), values

        def both(first: jax.Array) -> tuple[Leaves, Leaves]:
            zeros = [jnp.zeros(x.shape, x.dtype) for x in summands]
            return jax.lax.scan(add, zeros, first + jnp.arange(2, dtype=jnp.int32) * (turns // 2))

        return both

    sums, values = level(turns)(first_turn)
    levels = turns.bit_length() - 1
    values = [x.reshape(turns, *x.shape[levels:]) for x in values]
    return jax.tree.unflatten(of_sums, sums), jax.tree.unflatten(of_values, values)


def synchronized_loops(
    function: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]],
    slices: PyTree,
    *,
    turns: int,
    shards: int,
    reduce: Callable[[Leaves], Leaves],
) -> tuple[PyTree, PyTree]:
    """Evaluates a function for each virtual shard of this device, and adds up its first results.

    The function may call `jax.lax.psum` or `pmean` over `VIRTUAL_SHARD`, and be differentiated: a
    batch normalization has to know the statistics of the whole batch before the next layer can be
    computed. So the loop over the virtual shards ends before each such sum, and another one
    continues after it. The values that a later loop needs are kept for each virtual shard, as
    training without virtual shards keeps the activations of the device's part of the batch.

    Args:
      function: Maps the number of a turn and the slices of the turn to (summands, shared). Shared
        results are the same for all virtual shards.
      slices: Arrays of leading dim `turns`.
      turns: Number of virtual shards of this device, a power of two.
      shards: Number of virtual shards of all devices.
      reduce: Maps sums over this device's virtual shards to sums over all virtual shards.

    Returns:
      The sums over this device's virtual shards, and the shared results.

    Raises:
      UserError: If a shared result may differ between virtual shards, or if the function adds up
        values over them in a loop of its own.
    """
    jaxpr, consts, shapes = _trace(function, slices, shards)
    count = len(jax.tree.leaves(shapes[0]))
    cutter = _Cutter(jaxpr, count)
    names = map(path_name, (path for path, _ in jax.tree_util.tree_leaves_with_path(shapes[1])))
    for name, x in zip(names, jaxpr.outvars[count:], strict=True):
        if not hasattr(x, "val") and x in cutter.differing:
            raise UserError(
                f"exact: the model state {name} depends on the examples of one virtual shard or on "
                "its random numbers, so it would differ between virtual shards. Supported are the "
                "batch statistics of BatchNorm (nnx, linen) and BatchNormalization (Keras), and "
                "state that depends on neither, such as counters"
            )

    turn, *rows = jaxpr.invars
    by_turn = dict(zip(rows, jax.tree.leaves(slices), strict=True))  # with an entry for each turn
    whole = dict(zip(jaxpr.constvars, consts, strict=True))
    totals: dict[int, jax.Array] = {}

    def read(x: Any, now: jax.Array) -> jax.Array:
        if x is turn:
            return now
        return by_turn[x][now] if x in by_turn else whole[x]

    for segment in cutter.segments():
        sums, kept = tree_loop(partial(segment.evaluate, read), turns)
        cuts = len(segment.cuts)
        reduced = reduce(sums[:cuts]) if cuts else []
        # With an entry for each turn as well. XLA would move operations on a value that is the
        # same in each turn out of the loop, and fuse them with the reduction.
        repeated = [jnp.broadcast_to(x, (turns, *x.shape)) for x in reduced]
        by_turn |= zip((*segment.cuts, *segment.kept), (*repeated, *kept), strict=True)
        totals |= zip(segment.sums, sums[cuts:], strict=True)

    def shared(atom: Any) -> Any:
        if hasattr(atom, "val"):
            return jnp.asarray(atom.val)
        return by_turn[atom][0] if atom in by_turn else whole[atom]

    results = [totals[i] for i in range(count)] + list(map(shared, jaxpr.outvars[count:]))
    found: tuple[PyTree, PyTree] = jax.tree.unflatten(jax.tree.structure(shapes), results)
    return found


def _trace(
    function: Callable[[jax.Array, PyTree], PyTree], slices: PyTree, shards: int
) -> tuple[Any, list[Any], PyTree]:
    """Traces `function` (see `synchronized_loops`).

    Returns:
      A jaxpr with the sums over the virtual shards outside of inner functions, whose arguments are
      the number of the turn and the leaves of its slices; its constants; the shapes of its results.
    """
    structure = jax.tree.structure(slices)
    first = jax.ShapeDtypeStruct((), jnp.int32)
    given = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in jax.tree.leaves(slices)]
    axes = [(VIRTUAL_SHARD, shards)]

    def of_leaves(turn: jax.Array, *leaves: jax.Array) -> PyTree:
        return function(turn, jax.tree.unflatten(structure, leaves))

    nested, shapes = jax.make_jaxpr(of_leaves, axis_env=axes, return_shape=True)(first, *given)
    of_flat = partial(_flat, nested.jaxpr, nested.consts)
    flat = jax.make_jaxpr(of_flat, axis_env=axes)(first, *given)
    results = [True] * len(flat.jaxpr.outvars)
    jaxpr, _ = partial_eval.dce_jaxpr(flat.jaxpr, results, instantiate=True)
    return jaxpr, flat.consts, shapes


def _flat(jaxpr: Any, consts: Iterable[Any], *args: Any) -> list[Any]:
    """Evaluates a jaxpr with the sums over the virtual shards outside of inner functions."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else known[atom]

    for equation in jaxpr.eqns:
        inner = list(inner_jaxprs(equation))
        if not inner or not _is_cut(equation):
            _require_sum(equation)
            results = evaluate(jaxpr, equation, read)
        elif equation.primitive.name in CALLS:
            closed = next(x for x in equation.params.values() if hasattr(x, "eqns"))
            consts = getattr(closed, "consts", ())
            results = _flat(inner[0], consts, *map(read, equation.invars))
        else:
            raise UserError(
                "exact: the model computes batch statistics in a loop or a branch "
                f"({equation.primitive.name}), which virtual shards cannot leave together: call "
                "its layers one by one instead of by jax.lax.scan, and set microbatches to 1"
            )
        known |= dict(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _is_cut(equation: Any) -> bool:
    """Returns whether an equation adds up values over the virtual shards, itself or within."""
    return any(getattr(x, "name", None) == VIRTUAL_SHARD for x in equation.effects)


def _require_sum(equation: Any) -> None:
    """Raises `UserError` for a collective over the virtual shards that is not a sum over all."""
    name, groups = equation.primitive.name, equation.params.get("axis_index_groups")
    if _is_cut(equation) and (name != "psum" or groups is not None):
        what = name if groups is None else f"{name} with axis_index_groups"
        raise UserError(
            f"exact: the model computes {what} over the parts of a batch: supported are sums and "
            "means over the whole batch"
        )


@dataclass(frozen=True)
class _Segment:
    """The equations between two sums over the virtual shards.

    Attributes:
      jaxpr: The equations. The results are the summands, then the values of `kept`.
      cuts: The results of the sums over all virtual shards that follow. They belong to the first
        summands.
      sums: Of the other summands, the numbers among the summands of the function.
      kept: Variables whose values later segments need, or which are shared results.
    """

    jaxpr: Any
    cuts: Sequence[Any]
    sums: Sequence[int]
    kept: Sequence[Any]

    def evaluate(
        self, read: Callable[[Any, jax.Array], jax.Array], turn: jax.Array
    ) -> tuple[Leaves, Leaves]:
        """Returns the summands and the values of `kept` of a turn.

        `read` returns the value of a variable in a turn.
        """
        values = [read(x, turn) for x in self.jaxpr.invars]
        results = jax.core.eval_jaxpr(self.jaxpr, (), *values)
        summands = len(self.cuts) + len(self.sums)
        return results[:summands], results[summands:]


class _Cutter:
    """A cut of a jaxpr at its sums over the virtual shards.

    An equation is in the first segment that can evaluate it. Equations that need only constants,
    such as parameters, and those that repeat a smaller array are in each segment that needs them,
    because their results for each virtual shard would take more memory.

    Args:
      jaxpr: A jaxpr whose arguments differ between virtual shards and whose constants do not.
      summands: Number of its results that are added up; the others are shared.

    Attributes:
      differing: Variables that may differ between virtual shards.
    """

    def __init__(self, jaxpr: Any, summands: int) -> None:
        self.differing = set(jaxpr.invars)
        self._jaxpr, self._summands = jaxpr, summands
        self._cuts: list[Any] = []
        self._level: dict[Any, int] = {}  # the number of sums before a variable is known
        self._maker: dict[Any, int] = {}  # the number of the equation that computes a variable
        self._again: set[int] = set()  # the numbers of equations that are in several segments
        varying = set(jaxpr.invars)  # these and the sums over the virtual shards
        for number, equation in enumerate(jaxpr.eqns):
            given, results = variables(equation.invars), equation.outvars
            level = max(map(self._level_of, given), default=0)
            if _is_cut(equation):
                self._cuts.append(equation)
                self._level |= dict.fromkeys(results, level + 1)
                varying.update(results)
                continue
            self._level |= dict.fromkeys(results, level)
            self._maker |= dict.fromkeys(results, number)
            if not self.differing.isdisjoint(given):
                self.differing.update(results)
            if not varying.isdisjoint(given):
                varying.update(results)
            if varying.isdisjoint(given) or equation.primitive.name in _REPEATS:
                self._again.add(number)

    def segments(self) -> list[_Segment]:
        """Returns the segments in their order."""
        outs = self._jaxpr.outvars
        levels = range(1 + max(map(self._level_of, (*self._level, *outs)), default=0))
        cuts = [[x for x in self._cuts if self._level_of(x.invars[0]) == n] for n in levels]
        sums = [[i for i in range(self._summands) if self._level_of(outs[i]) == n] for n in levels]
        totals = [[x.invars[0] for x in cuts[n]] + [outs[i] for i in sums[n]] for n in levels]
        shared = [x for x in variables(outs[self._summands :]) if x in self._maker]
        kept: list[list[Any]] = [[x for x in shared if self._level[x] == n] for n in levels]
        parts = [self._part(n, [*totals[n], *kept[n]]) for n in levels]
        for _, reads in parts:
            for x in reads:
                if x in self._maker and x not in kept[self._level[x]]:
                    kept[self._level[x]].append(x)
        return [
            _Segment(
                self._jaxpr.replace(
                    constvars=[],
                    invars=parts[n][1],
                    outvars=[*totals[n], *kept[n]],
                    eqns=[self._jaxpr.eqns[number] for number in parts[n][0]],
                    effects=set(),
                ),
                cuts=[x.outvars[0] for x in cuts[n]],
                sums=sums[n],
                kept=kept[n],
            )
            for n in levels
        ]

    def _part(self, level: int, results: Sequence[Any]) -> tuple[list[int], list[Any]]:
        """Returns the numbers of the equations of a segment, and the variables that it reads."""
        numbers: set[int] = set()
        reads: dict[Any, None] = {}
        own = [x for x, n in self._maker.items() if self._level[x] == level]
        todo = variables([*results, *(x for x in own if self._maker[x] not in self._again)])
        while todo:
            x = todo.pop()
            number = self._maker.get(x)
            if number is None or (number not in self._again and self._level[x] != level):
                reads[x] = None
            elif number not in numbers:
                numbers.add(number)
                todo += variables(self._jaxpr.eqns[number].invars)
        return sorted(numbers), list(reads)

    def _level_of(self, atom: Any) -> int:
        return 0 if hasattr(atom, "val") else self._level.get(atom, 0)
