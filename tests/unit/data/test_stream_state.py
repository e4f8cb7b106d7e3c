"""States of iterators as text."""

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from spmdtrain.data.streams import UnsupportedStateError, as_text, from_text

text = st.text(alphabet='aä\0"\\', max_size=5)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)  # the states of NumPy's generators have 128 bits
    | st.floats(allow_nan=False)
    | text
    | st.binary(max_size=9)
)
keys = text | st.integers() | st.sampled_from(["__stored_as__", "value"])
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """Returns a value with its types, which `==` alone does not compare: 1 == 1.0 == True."""
    if isinstance(value, dict):
        return dict, [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    return type(value), value


@hypothesis.given(states)
def test_a_state_is_restored_with_its_types_and_the_order_of_its_keys(state: Any) -> None:
    assert typed(from_text(as_text(state))) == typed(state)


def test_an_array_keeps_dtype_and_shape() -> None:
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::2]
    restored = from_text(as_text({"buffer": array}))["buffer"]
    assert restored.dtype == np.uint16
    np.testing.assert_array_equal(restored, array)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), 1j])
def test_a_value_that_cannot_be_stored_is_named_by_its_type(value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=type(value).__name__):
        as_text({"state": [value]})


@pytest.mark.parametrize(
    "text",
    [
        "[",
        '{"__stored_as__":"pickle","value":""}',
        '{"__stored_as__":"array","value":["<i4",[3],"AAAA"]}',
        '{"__stored_as__":"array","value":["O",[0],""]}',
        '{"__stored_as__":"tuple"}',
        "[" * 10**5,
    ],
)
def test_malformed_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        from_text(text)
