"""Derivatives: the values that JAX differentiates, and the rules that users define for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.xla.jaxpr import evaluate, variables

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
