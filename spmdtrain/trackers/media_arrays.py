"""Arrays of media: their checks, and copies that can be fetched later."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.errors import UserError


def shape_and_dtype(array: Any, expected: str) -> tuple[tuple[int, ...], Any]:
    """Returns shape and dtype of an array, which may be a list, or abstract.

    Raises `UserError` if it is not an array (the message begins with `expected`), or if this
    process does not have all of it.
    """
    if isinstance(array, (list, tuple)):
        array = np.asarray(array)
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise UserError(f"{expected}, and not a {type(array).__name__}")
    if (
        isinstance(array, jax.Array)
        and not isinstance(array, jax.core.Tracer)
        and not (array.is_fully_addressable or array.is_fully_replicated)
    ):
        raise UserError(
            f"an array of shape {array.shape} is split over processes: gather it first, for "
            "example by a jitted function whose result is replicated"
        )
    return tuple(array.shape), array.dtype


def check_numbers(dtype: Any, what: str) -> None:
    """Raises `UserError` unless a dtype holds real numbers; `what` begins the message."""
    kinds = (jnp.integer, jnp.floating, jnp.bool_)
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise UserError(f"{what} of dtype {dtype}: it takes real numbers")


def detached_array(array: Any) -> Any:
    """Returns a copy of an array; the copy of a JAX array begins to be copied to the host."""
    if array is None:
        return None
    if not isinstance(array, jax.Array):
        return np.array(array)
    if array.is_fully_replicated:
        array = array.addressable_data(0)  # so that this process alone can copy it
    copy = jnp.copy(array)  # the array itself may be donated to the next step
    copy.copy_to_host_async()
    return copy


def plain_cell(value: Any) -> str | float | None:
    """Returns a cell of a table as a JSON value; dates and very large integers become text."""
    # Readers of JSON refuse or round integers of more than 64 bits.
    plain = value.item() if isinstance(value, np.generic) else value
    is_time = isinstance(value, np.datetime64 | np.timedelta64)  # with ns, an integer
    is_large = isinstance(plain, int) and abs(plain) >= 2**63
    is_plain = isinstance(plain, str | int | float | None) and not (is_time or is_large)
    return plain if is_plain else str(value)
