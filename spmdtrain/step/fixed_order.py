"""Evaluation of an optimizer so that its bits do not depend on how the state is split."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmdtrain.errors import UserError
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import Placement
from spmdtrain.step.reductions import tree_sum
from spmdtrain.xla.jaxpr import equations, evaluate, inner_jaxprs

PyTree = Any

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


@dataclass(frozen=True)
class FixedOrder:
    """Sums over all elements of an array, in an order that does not depend on the devices.

    An array is cut into a number of slices that does not depend on the devices. A loop adds up the
    elements of one slice after the other, and a binary tree adds up the sums of the slices.

    `shards` is the number of slices of a large array: a power of two, at least twice the devices.
    """

    placement: Placement
    shards: int

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
