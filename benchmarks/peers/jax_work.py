"""FLOPs and dtypes of a training step in JAX, for `Gate.report_work`."""

from collections.abc import Callable
from typing import Any

import jax

from spmdtrain.step.flops import count_flops
from spmdtrain.xla.jaxpr import equations

PRODUCTS = ("dot_general", "conv_general_dilated")


def facts(step: Callable[..., Any], *arguments: Any, params: Any) -> dict[str, Any]:
    """Returns the number of parameters, the FLOPs of the products of a step, and its dtypes.

    Args:
        step: The training step.
        arguments: Its arguments.
        params: The trained parameters.
    """
    jaxpr = jax.make_jaxpr(step)(*arguments)
    products = (x for x in equations(jaxpr.jaxpr) if x.primitive.name in PRODUCTS)
    computed = {str(operand.aval.dtype) for x in products for operand in x.invars}
    leaves = jax.tree.leaves(params)
    return {
        "parameters": sum(x.size for x in leaves),
        "flops": count_flops(jaxpr).total,
        "dtypes": dtypes((str(x.dtype) for x in leaves), computed),
    }


def dtypes(stored: Any, computed: Any) -> str:
    """Returns the dtypes of the parameters and of the operands of products, as text."""
    own, products = ("+".join(sorted(set(names))) for names in (stored, computed))
    return own if own == products or not products else f"{own}, computed in {products}"
