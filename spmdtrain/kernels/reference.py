"""The context in which every operation of this folder uses its reference implementation."""

from contextlib import AbstractContextManager

import jax

OPTIMIZED = "optimized_implementation"
"""Name of the scope of `optimized_implementation`."""

# A context of JAX, so that a trace cached with kernels is not reused without them.
_reference = jax.make_user_context(default_value=False)


def reference_kernels() -> AbstractContextManager[None]:
    """Returns a context in which operations are traced as plain JAX, without kernels.

    The products of the trace are those of the model's mathematics, which an implementation may
    compute more than once, or skip.
    """
    return _reference(True)


def uses_reference() -> bool:
    """Returns whether the context is active."""
    return bool(_reference.value)


def optimized_implementation() -> AbstractContextManager[None]:
    """Returns the scope of plain JAX code whose products are not those of the reference.

    Its trace shows that products have to be counted in a trace of the reference. Kernels need no
    scope, because a trace shows them.
    """
    return jax.named_scope(OPTIMIZED)
