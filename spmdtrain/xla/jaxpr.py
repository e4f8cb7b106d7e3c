"""Equations of jaxprs: iteration, evaluation, rules of derivatives, recomputation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import source_info_util
from jax.sharding import AxisType

# -- Iteration over the equations of a jaxpr, and their evaluation one by one ----------------------

CALLS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    }
)
"""Operations that call a program once."""


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation of an open jaxpr, including those of loops, branches and functions."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation):
            yield from equations(inner)


def constrains_sharding(jaxpr: Any) -> bool:
    """Returns whether an operation of an open jaxpr constrains the sharding of arrays."""
    return any(map(_is_constraint, equations(jaxpr)))


def _is_constraint(equation: Any) -> bool:
    if equation.primitive.name == "reshard":
        # JAX gives a gradient the mesh of the value; on automatic axes that constrains nothing.
        mesh = equation.params["dst_sharding"].mesh
        return not all(kind is AxisType.Auto for kind in mesh.axis_types)
    return equation.primitive.name in ("sharding_constraint", "shard_map")


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Yields the open jaxprs in an equation's parameters: a loop's body, branches, a function."""
    for inner, _ in inner_programs(equation):
        yield inner


def inner_programs(equation: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yields the open jaxprs in an equation's parameters, each with its constants."""
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(part, "jaxpr", part)  # the open jaxpr of a closed one
            if hasattr(inner, "eqns"):
                yield inner, getattr(part, "consts", ())


def scan_operands(equation: Any) -> tuple[int, int]:
    """Returns how many of the operands of a `scan` are constants and how many are carried.

    The constants are its first operands, the carried values follow.
    """
    params = equation.params
    if "ft_in" in params:  # JAX 0.11 and later
        constants, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
        return constants, carried
    return params["num_consts"], params["num_carry"]


def evaluate(jaxpr: Any, equation: Any, read: Callable[[Any], Any]) -> list[Any]:
    """Returns the results of an equation of an open jaxpr; `read` returns a variable's value."""
    given = variables(equation.invars)
    alone = jaxpr.replace(
        constvars=[],
        invars=given,
        outvars=equation.outvars,
        eqns=[equation],
        effects=equation.effects,
    )
    values: list[Any] = jax.core.eval_jaxpr(alone, (), *map(read, given))
    return values


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the distinct variables among the operands of an equation, without the literals."""
    return list(dict.fromkeys(x for x in atoms if not hasattr(x, "val")))


def source_frames(equation: Any) -> Iterator[Any]:
    """Yields the frames of the source that an equation comes from, outside of JAX, innermost first.

    JAX keeps none of some operations that it derives.
    """
    yield from source_info_util.user_frames(equation.source_info.traceback)


def is_of_jax(jaxpr: Any) -> bool:
    """Returns whether an open jaxpr is of a function of JAX itself, such as `jnp.where`."""
    return _file_of(jaxpr.debug_info).is_relative_to(_TRUSTED[0])


# -- Derivatives: the values that JAX differentiates, and the rules that users define for them -----

Function = Callable[..., list[jax.Array]]

# Their rules compute each element alone, or along the dims that the function combines itself.
_TRUSTED = (Path(jax.__file__).parent, Path(__file__).parents[1])
_WRAPPERS = "custom_derivatives.py"  # JAX's, of users' rules


def may_combine_more(equation: Any) -> bool:
    """Returns whether a rule for derivatives may combine what its function does not.

    `equation` calls a `custom_jvp` or a `custom_vjp`. The rules of JAX and of this package are
    known not to.
    """
    is_forward = equation.primitive.name == "custom_jvp_call"
    rule = equation.params.get("jvp_jaxpr_fun" if is_forward else "bwd")
    file = _file_of(getattr(rule, "debug_info", None))
    if is_forward and file.name == _WRAPPERS:  # `defjvps`
        file = _file_of(equation.params["call_jaxpr"].jaxpr.debug_info)
    is_known = any(file.is_relative_to(folder) for folder in _TRUSTED)
    return not is_known or file.name == _WRAPPERS  # the wrapper of a `custom_gradient`


def backward_rule(equation: Any) -> str:
    """Returns the rule for gradients that an equation calls, `NAME at FILE:LINE`; "" without one.

    It is the rule of a `custom_vjp` that is not differentiated yet.
    """
    rule = getattr(equation.params.get("bwd"), "debug_info", None)
    return str(getattr(rule, "func_src_info", None) or "")


def _file_of(debug_info: Any) -> Path:
    where = str(getattr(debug_info, "func_src_info", None))  # "relu at /folder/file.py:71"
    return Path(where.rpartition(" at ")[2].rpartition(":")[0])


def trace_derivatives(equation: Any) -> Any:
    """Traces an equation together with its derivatives in forward mode.

    Returns:
      A closed jaxpr of (values of the equation's variables, tangents of those that are inexact) ->
      (results, tangents of those that are inexact).
    """

    def run(function: Function, values: list[jax.Array], tangents: list[jax.Array]) -> Any:
        results, derivatives = jax.jvp(function, values, tangents)
        kept = [d for x, d in zip(results, derivatives, strict=True) if is_inexact(x)]
        return results, kept

    changing = [x for x in variables(equation.invars) if is_inexact(x.aval)]
    return _trace(equation, run, changing)


def trace_gradients(equation: Any) -> Any:
    """Traces an equation together with its derivatives in reverse mode.

    Returns:
      A closed jaxpr of (values of the equation's variables, cotangents of the inexact results) ->
      (results, gradients of the variables that are inexact).
    """

    def run(function: Function, values: list[jax.Array], cotangents: list[jax.Array]) -> Any:
        def inexact(*values: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
            results = function(*values)
            return [x for x in results if is_inexact(x)], results

        _, backward, results = jax.vjp(inexact, *values, has_aux=True)
        return results, backward(cotangents)

    return _trace(equation, run, [x for x in equation.outvars if is_inexact(x.aval)])


def _trace(equation: Any, run: Callable[..., Any], changes: list[Any]) -> Any:
    """Traces `run` of (the equation as a function, its inexact operands, arrays like `changes`)."""
    given = variables(equation.invars)
    jaxpr = equation.params["call_jaxpr"].jaxpr  # for its debug information
    changing = [variable for variable in given if is_inexact(variable.aval)]

    def traced(values: list[jax.Array], like_changes: list[jax.Array]) -> Any:
        known = dict(zip(given, values, strict=True))

        def function(*changed: jax.Array) -> list[jax.Array]:
            read = known | dict(zip(changing, changed, strict=True))
            return evaluate(jaxpr, equation, read.__getitem__)

        return run(function, [known[x] for x in changing], like_changes)

    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in (*given, *changes)]
    return jax.make_jaxpr(traced)(shapes[: len(given)], shapes[len(given) :])


def is_differentiated(x: jax.Array) -> bool:
    """Returns whether the derivative that JAX takes while it traces this call may pass through `x`.

    It does not where JAX knows the derivative of `x` to be 0: of a constant, an integer, or a value
    under `stop_gradient`. `x` is a value in the function whose gradient is taken; not in a function
    within it that is traced alone, such as one under `jax.jit` or in a loop.
    """
    found = []

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    def forward(x: Any) -> tuple[Any, None]:
        found.append(x.perturbed)
        return x.value, None

    same.defvjp(forward, lambda _, change: (change,), symbolic_zeros=True)
    try:
        same(x)
    except NotImplementedError:  # in a `shard_map` without `jit`; then it may
        return is_inexact(x)
    return any(found)


def is_inexact(x: Any) -> bool:
    """Returns whether an array, or its abstract value, has a dtype with derivatives."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


# -- Values that a branch computes again, instead of receiving them --------------------------------
#
# If a branch uses a value that is also needed outside of it, XLA writes the value to memory in each
# execution, also in those that skip the branch. It also compiles the code outside differently,
# which changes last bits. Therefore a branch computes cheap values again, from arrays that are in
# memory anyway.

PyTree = Any

_NAMES = """
abs add and broadcast_in_dim clamp conj convert_element_type copy cos div eq erf exp exp2 expm1 ge
gt imag integer_pow is_finite le log log1p log2 logistic lt max min mul ne neg not one_minus_square
or pow real rem reshape rsqrt select_n sign sin sqrt square squeeze sub tanh xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
"""Primitives that are computed again: XLA fuses them into one pass over their operands."""
_CALLS = frozenset(("jit", "pjit"))
_PLACES = frozenset(("sharding_constraint",))


def recomputable(
    function: Callable[..., tuple[PyTree, PyTree]], *args: PyTree, beside: bool = False
) -> tuple[PyTree, Callable[[], PyTree]]:
    """Evaluates a function that returns two results, the second for use in a branch.

    The branch computes the elementwise operations that the second result needs again, from the
    first result, the arguments, and the results of all other operations (products, reductions,
    collectives, loops).

    Args:
      function: A traceable function that returns (first, second).
      *args: Its arguments, pytrees of arrays.
      beside: Whether the second result is computed again beside the first one instead of after it:
        not from the first result, and from scalars that XLA cannot recognize, so that it does not
        reuse what it computes for the first. It then fuses sums of both into one pass over their
        operands.

    Returns:
      The first result, and a function that computes the second one; call it in the branch.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    jaxpr = closed.jaxpr
    structures = [jax.tree.structure(part) for part in shapes]
    size = len(jax.tree.leaves(shapes[0]))
    first, second = jaxpr.outvars[:size], jaxpr.outvars[size:]
    # Equations by the variables that they define, without those whose values are in memory anyway.
    known = set() if beside else {x for x in first if not _is_literal(x)}
    again = {
        x: equation
        for equation in jaxpr.eqns
        if _is_elementwise(equation) or (beside and equation.primitive.name in _PLACES)
        for x in equation.outvars
        if x not in known
    }
    needed: set[Any] = set()
    waiting = [x for x in second if not _is_literal(x)]
    while waiting:
        if (x := waiting.pop()) not in needed:
            needed.add(x)
            waiting += [y for y in again[x].invars if not _is_literal(y)] if x in again else []
    # In the order of the jaxpr, so that a program is the same in each process and start.
    given = [x for x in needed if x not in again]
    defined = [*jaxpr.constvars, *jaxpr.invars, *(y for e in jaxpr.eqns for y in e.outvars)]
    given.sort(key={x: place for place, x in enumerate(defined)}.__getitem__)
    inner = jaxpr.replace(
        constvars=[],
        invars=given,
        outvars=second,
        eqns=[e for e in jaxpr.eqns if any(x in needed and x in again for x in e.outvars)],
        effects=set(),
    )
    whole = jaxpr.replace(outvars=[*first, *given])
    values = _evaluated(whole, closed.consts, *jax.tree.leaves(args))

    def recompute() -> PyTree:
        operands = values[size:]
        if beside:
            operands = [x if jnp.ndim(x) else jax.lax.optimization_barrier(x) for x in operands]
        found = _evaluated(inner, (), *operands)
        return jax.tree.unflatten(structures[1], found)

    return jax.tree.unflatten(structures[0], values[:size]), recompute


def _evaluated(jaxpr: Any, constants: Sequence[Any], *args: Any) -> list[jax.Array]:
    """Returns the results of a jaxpr as arrays, also Python numbers, which are constant results.

    The state of `optax.contrib.dog` has one.
    """
    values = jax.core.eval_jaxpr(jaxpr, constants, *args)
    return [
        jnp.asarray(x, y.aval.dtype) if _is_literal(y) else x
        for x, y in zip(values, jaxpr.outvars, strict=True)
    ]


def _is_elementwise(equation: Any) -> bool:
    """Returns whether each element of an equation's results needs one element of each operand."""
    if equation.primitive.name in _CALLS:
        return all(_is_elementwise(e) for inner in inner_jaxprs(equation) for e in inner.eqns)
    return equation.primitive.name in _ELEMENTWISE


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")
