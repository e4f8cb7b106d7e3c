"""Sources of single examples: how they are read and stacked, and what is refused."""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.data.datasets import as_dataset
from spmdtrain.data.examples import IndexableDataset
from spmdtrain.errors import StorageError, UserError


class Source:
    """A source whose examples a function makes, of 6 examples."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class BatchedSource(Source):
    """... which can read several at once."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__(make)
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append(indices)
        return [self.make(index) for index in indices]


def rows(source: Any, *indices: int) -> Any:
    return IndexableDataset(source).rows(np.array(indices))


def refusal(source: Any, *indices: int) -> str:
    with pytest.raises(UserError) as caught:
        rows(source, *indices)
    return str(caught.value)


def test_an_indexable_collection_of_examples_is_a_dataset() -> None:
    collection = [{"x": np.array([i, i + 1]), "y": i * 10} for i in range(5)]
    dataset = as_dataset(collections.UserList(collection))
    assert len(dataset) == 5
    found = dataset.rows(np.array([3, 0]))
    assert found["x"].tolist() == [[3, 4], [0, 1]]
    assert found["y"].tolist() == [30, 0]


values = st.sampled_from(
    [
        np.float32(1.5),
        3,
        2.5,
        True,
        np.arange(3, dtype=np.int8),
        [1, 2],
        [[1.0], [2.0]],
        jnp.ones(2),
    ]
)
trees = st.recursive(
    values,
    lambda inner: (
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1) | st.tuples(inner, inner)
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tree=trees, count=st.integers(1, 4))
def test_examples_of_any_structure_are_stacked_by_field(tree: Any, count: int) -> None:
    def check(found: Any, example: Any) -> None:
        if isinstance(example, dict):
            assert found.keys() == example.keys()
            for name in example:
                check(found[name], example[name])
        elif isinstance(example, tuple):
            assert isinstance(found, tuple)
            for got, given in zip(found, example, strict=True):
                check(got, given)
        else:
            expected = np.stack([np.asarray(example)] * count)
            assert (found.dtype, found.tolist()) == (expected.dtype, expected.tolist())

    check(rows(Source(lambda _: tree), *range(count)), tree)


def test_several_examples_are_read_by_one_call_if_the_source_can() -> None:
    source = BatchedSource(lambda index: index * 10)
    assert rows(source, 4, 0, 4).tolist() == [40, 0, 40]
    assert source.calls == [[4, 0, 4], [0]]  # and example 0 once, for the dtypes


def failing(index: int) -> int:
    return index // (index - 3)


@pytest.mark.parametrize("kind", [Source, BatchedSource])
def test_an_example_that_cannot_be_read_is_named_with_the_line_that_failed(kind: Any) -> None:
    message = refusal(kind(failing), 5, 3)
    line = failing.__code__.co_firstlineno + 1
    assert message == (
        f"example 3 of a {kind.__name__} cannot be read: ZeroDivisionError: integer division or "
        f"modulo by zero ({Path(__file__)}:{line}, in failing)"
    )

    def unreachable(index: int) -> int:
        raise TimeoutError("no answer")

    with pytest.raises(StorageError, match=r"example 5 .*no answer"):
        rows(kind(unreachable), 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i: {"text": "To be", "y": i}, "field 'text' of example 2 of a Source is text"),
        (lambda i: {"a": {"b": ["To", "be"]}}, "field 'a/b' of example 2 of a Source is text"),
        (lambda i: b"\x00", "example 2 of a Source is bytes"),
        (lambda i: {"x": None}, "field 'x' of example 2 of a Source is None"),
        (lambda i: None, "example 2 of a Source is None"),
        (lambda i: {"x": object()}, "holds object, not numbers"),
        (lambda i: {"x": 2**70}, "holds object, not numbers: 1180591620717411303424"),
        (lambda i: {"x": [[1], [1, 2]]}, "'x' of example 2 .* lists of different lengths"),
        (lambda i: {"x": list(range(i))}, r"'x' .* shape \(2,\) in example 2 and \(4,\) in exa"),
        (lambda i: np.zeros(i), r"the value of a Source has the shape \(2,\) in example 2 and"),
        (lambda i: {"x": 1} if i == 2 else {"y": 1}, "4 .* the fields y; example 2 has the fiel"),
        (lambda i: {}, "example 2 of a Source holds no numbers"),
    ],
)
def test_examples_that_cannot_be_stacked_are_refused_with_field_and_example(
    make: Callable[[int], Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        rows(Source(make), 2, 4)


def test_batches_have_the_dtypes_of_example_0_whichever_examples_they_have() -> None:
    found = rows(Source(lambda i: {"x": 0.5 if i == 0 else i, "y": i}), 2, 4)
    assert found["x"].dtype == np.float64 and found["x"].tolist() == [2, 4]
    assert found["y"].dtype == np.int64
    with pytest.raises(UserError, match=r"field 'x' of example 4 .* float64, but int64 in example"):
        rows(Source(lambda i: {"x": 0.5 if i == 4 else i}), 2, 4)


def test_text_is_refused_with_what_trains_on_it() -> None:
    assert refusal(Source(lambda i: {"text": "To be", "y": i}), 2) == (
        "field 'text' of example 2 of a Source is text: a batch holds numbers. Give "
        "Packed(Tokenized(source, tokenizer, field='text'), length), or leave it out by a map "
        "function: grain.MapDataset.source(source).map(function)"
    )
