"""Derivatives: of which values JAX takes them, and those that users define by `jax.custom_jvp`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.xla.jaxpr import evaluate, variables

# Their rules compute each element alone, or along the dims that the function combines itself.
_TRUSTED = (Path(jax.__file__).parent, Path(__file__).parents[1])


def may_combine_more(equation: Any) -> bool:
    """Returns whether the rule of a `custom_jvp_call` may combine what its function does not.

    Args:
        equation: The equation. The functions of JAX and of this package are known not to.
    """
    where = str(equation.params["call_jaxpr"].jaxpr.debug_info.func_src_info)
    file = Path(where.rpartition(" at ")[2].rpartition(":")[0])  # "relu at /folder/file.py:71"
    return not any(file.is_relative_to(folder) for folder in _TRUSTED)


def trace_derivatives(equation: Any) -> Any:
    """Traces an equation together with its derivatives in forward mode.

    Args:
        equation: The equation.

    Returns:
        A closed jaxpr of (values of the equation's variables, tangents of those that are inexact)
        -> (results, tangents of those that are inexact).
    """
    given = variables(equation.invars)
    jaxpr = equation.params["call_jaxpr"].jaxpr  # for its debug information
    changing = [variable for variable in given if is_inexact(variable.aval)]

    def run(values: list[jax.Array], tangents: list[jax.Array]) -> Any:
        known = dict(zip(given, values, strict=True))

        def function(*changed: jax.Array) -> list[jax.Array]:
            read = known | dict(zip(changing, changed, strict=True))
            return evaluate(jaxpr, equation, read.__getitem__)

        results, derivatives = jax.jvp(function, [known[x] for x in changing], tangents)
        kept = [d for x, d in zip(results, derivatives, strict=True) if is_inexact(x)]
        return results, kept

    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in (*given, *changing)]
    return jax.make_jaxpr(run)(shapes[: len(given)], shapes[len(given) :])


def is_differentiated(x: jax.Array) -> bool:
    """Returns whether the derivative that JAX takes while it traces this call may pass through `x`.

    It does not where JAX knows the derivative of `x` to be 0: of a constant, an integer, or a value
    under `stop_gradient`.

    Args:
        x: A value in the function whose gradient is taken; not in a function within it that is
            traced alone, such as one under `jax.jit` or in a loop.
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
    """Returns whether an array, or its abstract value, has a dtype with derivatives.

    Args:
        x: The array.
    """
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
