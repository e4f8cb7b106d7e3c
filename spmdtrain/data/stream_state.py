"""States of iterators as text, which is stored in checkpoints.

The text is JSON. Values without a JSON type (bytes, arrays, tuples, keys other than text) are
stored under a tag. Pickle would run code that is in the checkpoint.
"""

import base64
import json
from typing import Any

import numpy as np

_TAG = "__stored_as__"


class UnsupportedStateError(ValueError):
    """A state holds a value that cannot be stored."""


def as_text(state: Any) -> str:
    """Converts a state to text.

    Args:
      state: Numbers, text, bytes, NumPy arrays of numbers, and lists, tuples and dictionaries of
        them.

    Raises:
      UnsupportedStateError: If it holds another value.
    """
    return json.dumps(_plain(state), separators=(",", ":"))


def from_text(text: str) -> Any:
    """Returns the state that `as_text` has stored; `ValueError` if the text is malformed."""
    try:
        return _restored(json.loads(text))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: _plain(item) for key, item in value.items()}
        return _tagged("dict", [[_plain(key), _plain(item)] for key, item in value.items()])
    if type(value) is tuple:
        return _tagged("tuple", [_plain(item) for item in value])
    if isinstance(value, (bytes, bytearray)):
        return _tagged("bytes", base64.b64encode(value).decode())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return _tagged("array", [value.dtype.str, list(value.shape), content])
    raise UnsupportedStateError(f"a value of type {type(value).__module__}.{type(value).__name__}")


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {_TAG: tag, "value": value}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _restored(item) for key, item in value.items()}
    tag, content = value[_TAG], value["value"]
    if tag == "dict":
        return {_restored(key): _restored(item) for key, item in content}
    if tag == "tuple":
        return tuple(_restored(item) for item in content)
    if tag == "bytes":
        return base64.b64decode(content)
    if tag == "array":
        name, shape, data = content
        dtype = np.dtype(name)
        if dtype.kind not in "biufc":
            raise ValueError(f"an array of {dtype}")
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    raise ValueError(f"unknown tag {tag!r}")
