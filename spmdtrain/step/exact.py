"""Steps with the same bits on any number of devices."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from spmdtrain.adapters.base import Variables
from spmdtrain.config.run_config import RunConfig
from spmdtrain.errors import UserError
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.gradients import (
    ON_ONE_DEVICE,
    GradientOutput,
    GradientRule,
    Inputs,
    Loss,
    SumOrder,
    accumulation_dtype,
    pairwise,
    to_mean,
    tree_sum,
)
from spmdtrain.step.metrics import EvaluationSums, PredictedRows, Sums
from spmdtrain.step.objective import eval_key
from spmdtrain.step.optimizer import ExtraArguments, Update, Updated, extra_names
from spmdtrain.strategies import DEFAULT
from spmdtrain.tree import path_name, promoted
from spmdtrain.xla.compiler import Value
from spmdtrain.xla.jaxpr import equations, evaluate, inner_jaxprs, variables
from spmdtrain.xla.padding_rules import CALLS

# -- Checks of what cannot have the same bits on any number of devices -----------------------------


def check_exact(config: RunConfig, placement: Placement, reduction: Any) -> None:
    """Raises `UserError` if a run with `exact` cannot have the same bits on any number of devices.

    `reduction` is the user's reduction of gradients; None without.
    """
    shards = config.exact
    assert shards is not None
    for axis in reversed(placement.shared_axes):
        size = placement.size(axis.name)
        raise UserError(
            _message(
                f"mesh.{axis.name} is {size}, over which {axis.adds_up} in another order",
                "leave it out",
            )
        )
    if reduction is not None:
        raise UserError(
            _message("a reduction function is given, with an order of its own", "leave it out")
        )
    check_exact_shards(shards, placement.batch_shards)


def check_exact_shards(shards: int, devices: int) -> None:
    """Raises `UserError` if the virtual shards do not divide over the devices of a batch."""
    if shards < 2 * devices or shards % devices:
        raise UserError(
            f"exact is {shards} on {devices} devices: each needs at least two virtual "
            f"shards, and equally many. Give a power of two from {2 * devices} on, and the "
            "same one wherever the bits should be the same; the number of devices must be a power "
            "of two"
        )


def check_one_weight(needed: Mapping[str, Any]) -> None:
    """Raises `UserError` if gradients need a sum of the whole batch before they are computed.

    `needed` has the sums that they need, by the term of the loss.
    """
    if any(isinstance(x, Sums) for x in needed.values()):
        raise UserError(
            _message(
                "the weights of the loss depend on trained parameters",
                "take them from the batch, or put jax.lax.stop_gradient around them",
            )
        )
    if needed:
        raise UserError(
            _message("the loss is a Combination of means with several weights", "return one loss")
        )


def check_exact_optimizer(optimizer: optax.GradientTransformation) -> None:
    """Raises `UserError` if an optimizer evaluates the loss itself."""
    if evaluates := sorted({"value_fn", "obj_fn", "grad_fn"} & set(extra_names(optimizer))):
        raise UserError(
            _message(
                f"the optimizer evaluates the loss ({', '.join(evaluates)})", "choose another one"
            )
        )


def _message(why: str, fix: str) -> str:
    return f"exact: {why}, so the bits would depend on the number of devices: {fix}"


# -- Loops over the virtual shards of a device, with sums over the virtual shards of all devices

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


# -- Evaluation of an optimizer so that its bits do not depend on how the state is split -----------

_CALLS = frozenset(("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call"))
_NAMES = """
cholesky conv_general_dilated cumlogsumexp cumprod cumsum dot_general eig eigh householder_product
lu pallas_call polynomial qr ragged_dot_general reduce reduce_prod reduce_window reduce_window_sum
scatter-add scatter-mul scatter_add scatter_mul shard_map svd triangular_solve tridiagonal_solve
"""
_REFUSED = frozenset(_NAMES.split())
"""Primitives that add up in an order which may depend on how their operands are split."""
_PRODUCTS = frozenset(("mul", "integer_pow", "one_minus_square", "square"))
_SMALL = 2**16  # elements up to which every device adds up all of an array
_OPTIONS: Mapping[str, Mapping[str, Value]] = {
    # Without partitioning, on one device, the simplifier sees other programs, and for example
    # replaces a division by a product with the reciprocal, which has other bits.
    "cpu": {"xla_disable_hlo_passes": "algsimp"},
    # Not measured. Without autotuning, the algorithms of matrix products and convolutions do not
    # depend on timings.
    "gpu": {
        "xla_gpu_autotune_level": 0,
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_exclude_nondeterministic_ops": True,
    },
}
"""XLA options that keep the kernels of a step independent of the number of devices."""


@dataclass(frozen=True)
class FixedOrder(SumOrder):
    """Sums over all elements of an array, in an order that does not depend on the devices.

    An array is cut into a number of slices that does not depend on the devices. A loop adds up the
    elements of one slice after the other, and a binary tree adds up the sums of the slices.

    `shards` is the number of slices of a large array, and of the virtual shards of a batch: a power
    of two, at least twice the devices.
    """

    placement: Placement
    shards: int

    is_fixed = True

    def check(
        self, config: RunConfig, reduction: Any, optimizer: optax.GradientTransformation
    ) -> None:
        check_exact(config, self.placement, reduction)
        check_exact_optimizer(optimizer)

    def rule(self) -> GradientRule:
        return Exact(self.placement, self.shards)

    def update(self, update: Any) -> Any:
        return ExactUpdate(**vars(update), order=self)

    def evaluation(self, evaluate: Any) -> Any:
        return exact_evaluation(evaluate, self)

    def compiler_options(self, platform: str) -> Mapping[str, Value]:
        return _OPTIONS.get("gpu" if platform in ("cuda", "rocm") else platform, {})

    def check_devices(self, devices: int) -> None:
        check_exact_shards(self.shards, devices)

    def check_rows(self, rows: int, microbatches: int = 1, name: str = "global_batch_size") -> None:
        """Raises `UserError` if a global batch does not divide over the virtual shards.

        Each of them has `microbatches` parts.
        """
        parts = self.shards * microbatches
        if rows % parts:
            of_microbatches = f" times {microbatches} microbatches" * (microbatches > 1)
            raise UserError(
                f"exact is {self.shards} and {name} is {rows}, which does not divide over "
                f"{self.shards} virtual shards{of_microbatches}: give a multiple of {parts}"
            )

    def check_apart(self, why_parts_differ: Callable[[int], str | None]) -> None:
        if why := why_parts_differ(self.shards):
            raise UserError(
                f"exact={self.shards} evaluates each virtual shard apart, and the objective's "
                "values in an evaluation may depend on other examples of the batch, on its size or "
                f"on an example's position in it ({why}): evaluate without exact"
            )

    def evaluate(
        self, function: Callable[..., PyTree], *args: PyTree, zero: jax.Array | None = None
    ) -> PyTree:
        """Returns `function(*args)`, with each sum over all elements of an array in this order.

        If the function adds to products, `zero` is an integer 0 that XLA does not know to be 0: see
        `_rounded`.

        Raises:
          UserError: If it computes anything else whose order may depend on the devices.
        """
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        values = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), self.total, zero)
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    def total(self, x: jax.Array) -> jax.Array:
        """Returns the sum of all elements, a scalar; each device adds up its own slices."""
        # Split over the largest dim that divides, as strategies split it.
        dims = [dim for dim, size in enumerate(x.shape) if size and size % self.shards == 0]
        if x.size >= _SMALL and dims:
            return self._of_split(x, max(dims, key=lambda dim: x.shape[dim]))
        x = jax.lax.with_sharding_constraint(x, self.placement.replicated)
        slices = self.shards if x.size >= _SMALL else 2
        return _of_slices(jnp.pad(x.ravel(), (0, -x.size % slices)).reshape(slices, -1))

    def _of_split(self, x: jax.Array, dim: int) -> jax.Array:
        turns = self.shards // self.placement.batch_shards

        def local(x: jax.Array) -> jax.Array:
            parts = x.reshape(*x.shape[:dim], turns, -1, *x.shape[dim + 1 :])
            sums = jax.lax.map(jnp.sum, jnp.moveaxis(parts, dim, 0))
            return jax.lax.all_gather(sums, BATCH_AXES, tiled=True)

        split = PartitionSpec(*[None] * dim, BATCH_AXES)
        sums = jax.shard_map(
            local,
            mesh=self.placement.mesh,
            in_specs=split,
            out_specs=PartitionSpec(),
            check_vma=False,
        )(x)
        return tree_sum(sums)


def _of_slices(slices: jax.Array) -> jax.Array:
    """Returns the sum of slices (count, ...); a loop keeps XLA from fusing it with other code."""
    return tree_sum(jax.lax.map(jnp.sum, slices))


def in_loop_of_one_turn(
    function: Callable[[PyTree, jax.Array], PyTree], values: PyTree, before: Sequence[jax.Array]
) -> PyTree:
    """Returns `function(values, zero)`, compiled apart from the code around it.

    XLA does not fuse the code of a loop with code outside of it. Without the loop, the last
    operations before the function, and so its bits, would depend on the number of devices: on one
    device XLA would fuse the function with the gradients. XLA cannot remove the loop, because it
    does not know the number of its turns.

    XLA's CPU client does not order the collectives of a loop with those outside: without a data
    dependency its threads may wait in different ones, forever. So for each collective of the step,
    the loop has to need its result, or it has to need a result of the loop.

    Args:
      function: Returns values of the same shapes, each of which differs from the given one. Its
        second argument is an integer 0 that XLA does not know to be 0.
      before: With `values`, the results of all collectives before the loop.
    """
    turns = 2 - exist(before).astype(jnp.int32)  # 1, which XLA does not know

    def body(given: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
        return given[0] + 1, function(given[1], given[0])

    first = (jnp.zeros((), jnp.int32), values)
    return jax.lax.while_loop(lambda given: given[0] < turns, body, first)[1]


def exist(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns True, as a scalar that depends on the arrays and that XLA does not know.

    Random keys among the arrays are ignored.
    """
    numbers = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.number)]
    count = sum(
        (jnp.isfinite(x).sum(dtype=jnp.int32) for x in numbers), start=jnp.zeros((), jnp.int32)
    )
    return count >= 0  # a count is never negative


def _evaluate(
    jaxpr: Any,
    consts: Any,
    args: Any,
    total: Callable[[jax.Array], jax.Array],
    zero: jax.Array | None,
) -> list[Any]:
    """Evaluates a jaxpr with `total` in place of sums over all dims, and rounded products."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else known[atom]

    def of_branch(branch: Any, *args: Any) -> list[Any]:
        return _evaluate(branch.jaxpr, branch.consts, args, total, zero)

    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, list(inner_jaxprs(equation))
        given = [read(x) for x in equation.invars]
        if name in _CALLS and inner:
            closed = next(x for x in equation.params.values() if hasattr(x, "consts"))
            results = _evaluate(closed.jaxpr, closed.consts, given, total, zero)
        elif name == "reduce_sum" and _is_total(equation):
            results = [total(given[0])]
        else:
            if name == "cond":
                _check_branches(equation)
                branches = [partial(of_branch, each) for each in equation.params["branches"]]
                results = jax.lax.switch(given[0], branches, *given[1:])
            else:
                _check(equation)
                results = evaluate(jaxpr, equation, read)
            if name in _PRODUCTS and zero is not None:
                results = [_rounded(x, zero) for x in results]
        known.update(zip(equation.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _rounded(product: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns a product that is rounded before anything is added to it.

    LLVM replaces a product and a sum by a fused multiply-add, which rounds once instead of twice,
    in some loops and not in others: that depends on their length, and so on how an array is split.
    It does not do so if integer arithmetic is between the two. `zero` is an integer 0 that the
    compiler does not know to be 0.
    """
    if not jnp.issubdtype(product.dtype, jnp.floating):
        return product
    kind = jnp.dtype(f"int{8 * product.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(product, kind) ^ zero.astype(kind)
    return jax.lax.bitcast_convert_type(bits, product.dtype)


def _is_total(equation: Any) -> bool:
    """Returns whether a sum is over all dims of several floating-point numbers."""
    x = equation.invars[0].aval
    is_whole = len(equation.params["axes"]) == x.ndim
    return bool(is_whole and x.size > 1 and jnp.issubdtype(x.dtype, jnp.inexact))


def _check_branches(equation: Any) -> None:
    """Raises `UserError` if a branch of a `cond` adds up a whole array.

    XLA's CPU client does not order the collectives of a branch with others.
    """
    for each in (x for branch in inner_jaxprs(equation) for x in equations(branch)):
        if each.primitive.name == "reduce_sum" and _is_total(each):
            raise UserError(
                "exact: the optimizer adds up an array in a branch, as optax.MultiSteps and "
                "optax.apply_if_finite do with clipping by global norm: use microbatches in "
                "place of MultiSteps, or leave the clipping out"
            )


def _check(equation: Any, *, in_loop: bool = False) -> None:
    """Raises `UserError` for an operation whose bits may depend on the devices."""
    # A loop is not evaluated by its parts, so its products cannot be rounded.
    kinds = [x.aval.dtype for x in equation.outvars if equation.primitive.name in _PRODUCTS]
    if in_loop and any(jnp.issubdtype(kind, jnp.inexact) for kind in kinds):
        raise _refusal("multiplies in a loop")
    if equation.primitive.name == "reduce_sum":
        x = equation.invars[0].aval
        if x.size > 1 and jnp.issubdtype(x.dtype, jnp.inexact):
            raise _refusal("adds up some dims of an array")
    if equation.primitive.name in ("reduce_max", "reduce_min") and (
        len(equation.params["axes"]) < equation.invars[0].aval.ndim
    ):
        # Its bits do not depend on the order, but those of what is computed from it may.
        raise _refusal("takes the maximum of some dims of an array")
    if equation.primitive.name in _REFUSED:
        raise _refusal(f"computes {equation.primitive.name}")
    for part in inner_jaxprs(equation):
        for each in part.eqns:
            _check(each, in_loop=True)


def _refusal(what: str) -> UserError:
    return UserError(
        f"exact: the optimizer {what}, whose bits may depend on how the state is split. "
        "Elementwise optimizers (sgd, adam, adamw, lion) and clipping by global norm are exact"
    )


# -- Gradients with the same bits on any number of devices -----------------------------------------
#
# The batch is split into virtual shards of contiguous rows, whose number does not depend on the
# devices. Each device computes its virtual shards one after the other in a loop, whose body has the
# same shapes everywhere, and so the same kernels. The sums over virtual shards are added up in the
# order of one binary tree: its lower levels in nested loops on each device, the others over
# devices. Batch statistics are such sums in the middle of the computation (see
# `synchronized_loops`).

ON_VIRTUAL_SHARD = Placement(DEFAULT, None, batch_axis=VIRTUAL_SHARD)
"""The placement of code that computes one virtual shard."""
Evaluate = Callable[[Variables, PyTree, jax.Array, jax.Array], EvaluationSums]
"""(variables, batch, mask, draw) -> sums: see `Forward.evaluate`."""


@dataclass(frozen=True)
class Exact(GradientRule):
    """A gradient rule whose results do not depend on the number of devices.

    `shards` is the number of virtual shards: a power of two, at least twice the devices.
    """

    shards: int

    @property
    def part_placement(self) -> Placement:
        return ON_VIRTUAL_SHARD

    @property
    def parts(self) -> int:
        return self.shards

    @property
    def gathers_params(self) -> bool:
        return True

    @property
    def own_draws(self) -> bool:
        return True

    @property
    def traced_on(self) -> Placement:
        return self.part_placement

    def over_parts(self, sums: PyTree) -> PyTree:
        """Raises `UserError` for sums over all virtual shards that gradients need beforehand."""
        check_one_weight(sums)
        return sums

    def __call__(self, loss: Loss, inputs: Inputs) -> GradientOutput:
        """Returns the gradients of the weighted mean loss of a global batch.

        The leading dim of the batch is a multiple of the virtual shards, and each of them draws
        from a random key that derives from the step's.
        """
        turns = self.shards // self.placement.batch_shards

        def local(*given: PyTree) -> GradientOutput:
            inputs = Inputs(*given)
            shards = jax.tree.map(lambda x: x.reshape(turns, -1, *x.shape[1:]), inputs.batch)
            first = jax.lax.axis_index(BATCH_AXES) * turns

            def of_turn(turn: jax.Array, rows: PyTree) -> tuple[PyTree, PyTree]:
                shard_key = jax.random.fold_in(inputs.key, first + turn)
                of_shard = inputs._replace(batch=rows, key=shard_key)
                output = loss.gradients(of_shard, self.over_parts)
                wide = jax.tree.map(
                    lambda x: x.astype(accumulation_dtype(x.dtype)), output.gradients
                )
                return (wide, output.metrics), output.model_state

            with use_placement(self.part_placement):
                sums, after = synchronized_loops(
                    of_turn,
                    shards,
                    turns=turns,
                    shards=self.shards,
                    reduce=partial(pairwise, axes=BATCH_AXES),
                )
            gradients, metrics = pairwise(sums, BATCH_AXES)
            gradients = jax.tree.map(lambda x, like: x.astype(like.dtype), gradients, inputs.params)
            return GradientOutput(to_mean(gradients, metrics), metrics, after)

        whole, rows = PartitionSpec(), PartitionSpec(BATCH_AXES)
        return jax.shard_map(
            local,
            mesh=self.placement.mesh,
            in_specs=(whole, whole, whole, rows, whole),
            out_specs=whole,
            check_vma=False,
        )(*inputs)


def exact_evaluation(evaluate: Evaluate, order: FixedOrder) -> Evaluate:
    """Returns an evaluation of a batch whose sums do not depend on the number of devices.

    `evaluate` evaluates a batch or a part of it (see `BatchChecks.check_evaluation`).
    """
    turns = order.shards // order.placement.batch_shards

    def local(
        variables: Variables, batch: PyTree, mask: jax.Array, draw: jax.Array
    ) -> EvaluationSums:
        shards = jax.tree.map(lambda x: x.reshape(turns, -1, *x.shape[1:]), (batch, mask))
        first = jax.lax.axis_index(BATCH_AXES) * turns

        def of_turn(turn: jax.Array) -> tuple[PyTree, PyTree]:
            rows, of_rows = jax.tree.map(lambda x: x[turn], shards)
            own = jax.random.key_data(jax.random.fold_in(eval_key(draw), first + turn))
            found = evaluate(variables, rows, of_rows, own)
            values = {n: x for n, x in found.items() if isinstance(x, PredictedRows)}
            return {n: x for n, x in found.items() if n not in values}, values

        with use_placement(ON_ONE_DEVICE):
            sums, values = tree_loop(of_turn, turns)
        sums = pairwise(sums, BATCH_AXES)
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), values)
        return sums | jax.lax.all_gather(rows, BATCH_AXES, tiled=True)

    def run(
        variables: Variables, batch: PyTree, mask: jax.Array, draw: jax.Array
    ) -> EvaluationSums:
        assert mask.shape[0] % order.shards == 0, mask.shape
        whole, rows = PartitionSpec(), PartitionSpec(BATCH_AXES)
        found: EvaluationSums = jax.shard_map(
            local,
            mesh=order.placement.mesh,
            in_specs=(whole, rows, rows, whole),
            out_specs=whole,
            check_vma=False,
        )(variables, batch, mask, draw)
        return found

    return run


@dataclass(frozen=True, kw_only=True)
class ExactUpdate(Update):
    """An `Update` whose results do not depend on how the state is split over devices.

    `order` is the order of its sums, for example of a global norm.
    """

    order: FixedOrder

    def init(self, params: PyTree) -> PyTree:
        """Returns the optimizer's initial state, which may hold a norm of the parameters."""
        return self.order.evaluate(super().init, params)

    def __call__(
        self,
        params: PyTree,
        opt_state: PyTree,
        gradients: PyTree,
        extra: ExtraArguments,
        before: Sequence[jax.Array] = (),
    ) -> Updated:
        def apply(params: PyTree, opt_state: PyTree, gradients: PyTree) -> tuple[PyTree, ...]:
            of_loop = dataclasses.replace(extra, grad=gradients)
            new = super(ExactUpdate, self).__call__(params, opt_state, gradients, of_loop)
            return new.params, new.opt_state, new.updates

        def in_order(given: tuple[PyTree, ...], zero: jax.Array) -> tuple[PyTree, ...]:
            used = _as_dtypes_of(gradients, given[2])
            params, opt_state, updates = self.order.evaluate(apply, *given[:2], used, zero=zero)
            return params, opt_state, _as_dtypes_of(given[2], updates), used

        # Updates leave the loop in the place of the gradients. If these stayed the same, XLA would
        # move what depends on them alone out of the loop. The gradients leave it in a fourth place,
        # so that their norm, which needs a collective, is computed after the loop. The place has a
        # dtype that holds the values of both.
        *_, updates = jax.eval_shape(apply, params, opt_state, gradients)
        place = jax.tree.map(lambda x, y: x.astype(promoted(x.dtype, y.dtype)), gradients, updates)
        given = (params, opt_state, place, gradients)
        params, opt_state, found, gradients = in_loop_of_one_turn(in_order, given, before)
        return Updated(params, opt_state, _as_dtypes_of(updates, found), gradients)


def _as_dtypes_of(like: PyTree, tree: PyTree) -> PyTree:
    """Returns a pytree of arrays in the dtypes of `like`, which has the same structure."""
    return jax.tree.map(lambda x, y: y.astype(x.dtype), like, tree)
