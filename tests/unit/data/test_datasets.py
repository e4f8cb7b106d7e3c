"""Datasets from single examples and objects of other libraries, with every kind of value."""

import collections
import itertools
import json
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import grain
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_helpers import Counter, CounterIterator, as_text, batches

from spmdtrain import JsonLinesSource, ParquetSource, Stream, Subset
from spmdtrain.data.datasets import as_dataset, classes_of
from spmdtrain.data.examples import IndexableDataset
from spmdtrain.data.streams import ShardedStream, as_stream
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


def refusal_of_rows(source: Any, *indices: int) -> str:
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
    message = refusal_of_rows(kind(failing), 5, 3)
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
    assert refusal_of_rows(Source(lambda i: {"text": "To be", "y": i}), 2) == (
        "field 'text' of example 2 of a Source is text: a batch holds numbers. Give "
        "Packed(Tokenized(source, tokenizer, field='text'), length), or leave it out by a map "
        "function: grain.MapDataset.source(source).map(function)"
    )


# -- objects of other libraries --------------------------------------------------------------------

NUMBERS = grain.MapDataset.range(10)
EXAMPLES = NUMBERS.map(lambda i: {"x": np.full(2, i, np.float32), "y": i})


def column(data: Any, *indices: int, name: str = "y") -> list[Any]:
    """The values of a field in the rows of a dataset."""
    found: list[Any] = as_dataset(data).rows(np.array(indices))[name].tolist()
    return found


def refusal(data: Any) -> str:
    with pytest.raises(UserError) as caught:
        as_dataset(data).rows(np.array([0, 1]))
    return str(caught.value)


# -- Grain -----------------------------------------------------------------------------------------


def test_transformations_of_grain_that_keep_random_access_are_respected() -> None:
    shuffled = EXAMPLES.seed(3).shuffle()
    order = [example["y"] for example in shuffled]
    assert sorted(order) == list(range(10)) != order
    assert column(shuffled, *range(10)) == order
    assert column(EXAMPLES[2:8], 0, 5) == [2, 7]
    assert column(EXAMPLES.repeat(2), 12) == [2]
    assert len(as_dataset(EXAMPLES.repeat(2))) == 20
    tens = EXAMPLES.map(lambda example: example | {"y": example["y"] * 10})
    assert column(grain.MapDataset.mix([EXAMPLES, tens], [1, 1]), 4, 5) == [2, 20]
    assert column(grain.MapDataset.concatenate([EXAMPLES, tens]), 4, 15) == [4, 50]
    # A random_map draws by index, so that an example is the same whenever it is read.
    noise = NUMBERS.random_map(lambda i, generator: {"y": generator.random()}, seed=1)
    assert column(noise, 3, 4) == column(noise, 4, 3)[::-1] == [noise[3]["y"], noise[4]["y"]]


def test_a_map_dataset_reads_several_examples_of_its_source_at_once() -> None:
    class Counting:
        calls = 0

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            raise AssertionError("examples are read one by one")

        def _getitems(self, indices: Any) -> list[int]:
            self.calls += 1
            return list(indices)

    source = Counting()
    doubled = grain.MapDataset.source(source).map(lambda value: value * 2)
    assert as_dataset(doubled).rows(np.array([3, 1])).tolist() == [6, 2]
    assert source.calls == 2  # one of them for example 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EXAMPLES.repeat(), r"without end .* leave .repeat\(\) out"),
        (lambda: EXAMPLES.batch(4), r"batches .*batch_size=4.* leave .batch\(\) out"),
        (lambda: EXAMPLES.batch(4).map(operator.itemgetter("y")), r"leave .batch\(\) out"),
        (lambda: EXAMPLES.filter(lambda e: e["y"] % 2 == 1), r"\.filter\(\) .*Subset\(data, "),
        (lambda: EXAMPLES.to_iter_dataset(), "grain.IterDataset is not a dataset: a stream"),
        (lambda: iter(EXAMPLES), "grain.DatasetIterator is not a dataset: a stream"),
        (lambda: loader(), "grain.DataLoader is not a dataset: a stream .* Give its source"),
        (lambda: grain.MapDataset.source([b"a", b"b"]), r"is bytes: .*\.map\(decode\)"),
    ],
)
def test_a_pipeline_of_grain_without_single_examples_is_refused_with_what_to_write(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        as_dataset(make()).rows(np.array([0, 1]))


def loader() -> Any:
    sampler = grain.samplers.SequentialSampler(3)
    return grain.DataLoader(data_source=NUMBERS, sampler=sampler)


def test_the_ways_out_that_the_messages_name_work() -> None:
    data = EXAMPLES.filter(lambda example: example["y"] % 2 == 1)
    left = Subset(data, np.array([i for i in range(len(data)) if data[i] is not None]))
    assert column(left, *range(5)) == [1, 3, 5, 7, 9]
    with pytest.raises(UserError, match="example 0 of a grain FilterMapDataset is None"):
        Subset(data, np.arange(3)).rows(np.arange(2))
    pairs = grain.MapDataset.source(EXAMPLES.batch(2))
    assert column(pairs, 1) == [[2, 3]]


# -- lists -----------------------------------------------------------------------------------------


def test_a_list_of_records_is_a_dataset() -> None:
    records = [{"x": [1.0, i], "y": i} for i in range(4)]
    assert column(records, 3, 0, name="x") == [[1.0, 3.0], [1.0, 0.0]]
    pairs = as_dataset([(np.zeros(2), i) for i in range(4)]).rows(np.array([2]))
    assert [part.tolist() for part in pairs] == [[[0, 0]], [2]]
    assert as_dataset([5, 6, 7]).rows(np.array([2, 0])).tolist() == [7, 5]


@pytest.mark.parametrize("data", [[np.zeros(4), np.zeros(4)], [[1, 2], [3, 4]]])
def test_a_list_of_arrays_could_mean_two_things_and_is_refused(data: Any) -> None:
    assert refusal(data) == (
        "a list of arrays is not a dataset, because it could mean several examples or several "
        "arrays: give np.stack(data) if each is an example, tuple(data) if each holds all "
        "examples of a field"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["To be", "or not"], "example 0 of a list is text"),
        ([{"x": 1}, {"x": [1, 2]}], r"'x' of a list has the shape \(\) in example 0 and \(2,\)"),
        ("train.npz", "a str is not a dataset: 'train.npz'"),
    ],
)
def test_a_list_that_holds_no_numbers_is_refused(data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_dataset(data)


# -- tables ----------------------------------------------------------------------------------------

FRAME = pd.DataFrame(
    {
        "x": [1.5, 2.0, 3.0],
        "y": np.array([1, 2, 3], np.int8),
        "v": [np.array([0, i]) for i in range(3)],
        "n": pd.array([4, 5, 6], "Int64"),
    }
)
TABLE = pa.table(
    {
        "x": pa.chunked_array([[1, 2], [3]], pa.int16()),
        "l": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32())),
        "f": pa.array([[[1], [2]]] * 3, pa.list_(pa.list_(pa.int8(), 1), 2)),
        "b": [True, False, True],
    }
)


def shapes(data: Any) -> dict[str, str]:
    found = as_dataset(data).rows(np.array([2, 0]))
    return {name: f"{values.dtype}{list(values.shape)}" for name, values in found.items()}


def test_a_data_frame_of_pandas_is_a_dataset_of_its_columns() -> None:
    assert shapes(FRAME) == {"x": "float64[2]", "y": "int8[2]", "v": "int64[2, 2]", "n": "int64[2]"}
    # By position, whatever the index is.
    assert column(FRAME.sort_values("x", ascending=False), 0, 2) == [3, 1]
    assert as_dataset(FRAME["y"]).rows(np.array([1])).tolist() == [2]


def test_a_table_of_arrow_is_a_dataset_of_its_columns() -> None:
    expected = {"x": "int16[2]", "l": "float32[2, 2]", "f": "int8[2, 2, 1]", "b": "bool[2]"}
    (batch,) = TABLE.combine_chunks().to_batches()
    assert shapes(TABLE) == shapes(batch) == expected
    assert column(TABLE, 2, 0, name="l") == column(batch, 2, 0, name="l") == [[5, 6], [1, 2]]
    twice = pa.concat_tables([TABLE, TABLE]).slice(2, 3)
    assert column(twice, 0, 1, name="l") == [[5, 6], [1, 2]]
    assert column(twice.combine_chunks(), 2, name="b") == [False]


def test_columns_that_are_not_numbers_are_named_at_once() -> None:
    frame = FRAME.assign(
        t=["a", "b", "c"], when=pd.to_datetime(["2020"] * 3), m=pd.array([1, None, 3], "Int64")
    )
    assert refusal(frame) == (
        "columns of a pandas.DataFrame are not numbers of one shape: 't' (str), 'when' "
        "(datetime64[us]), 'm' (Int64, 1 missing). Leave them out, data.drop(columns=['t', 'when', "
        "'m']); train on text by Packed(Tokenized(source, tokenizer, field=NAME), length)"
    )
    table = pa.table({"t": ["a", "b"], "n": [1, None], "r": [[1], [1, 2]], "y": [1, 2]})
    message = refusal(table)
    assert "'t' (string), 'n' (int64, 1 null), 'r' (lists of 1 to 2 values)." in message
    assert "data.drop_columns(['t', 'n', 'r'])" in message
    with pytest.raises(UserError, match=r"several columns of a pandas\.DataFrame are named 'x'"):
        as_dataset(pd.concat([FRAME, FRAME], axis=1))


def test_a_data_frame_of_polars_is_recognized_although_it_has_rows() -> None:
    """Polars is no dependency of the tests: this class has what is used of its own."""
    content = {"to_arrow": lambda self: TABLE, "rows": lambda self: [], "__len__": lambda self: 3}
    frame = type("DataFrame", (), {"__module__": "polars.dataframe.frame"} | content)()
    assert column(frame, 1, name="x") == [2]


# -- Hugging Face ----------------------------------------------------------------------------------


def hugging_face(columns: dict[str, Any], **features: Any) -> Any:
    """A `datasets.Dataset`; by its constructor, because from_dict hashes with dill, which warns."""
    kinds = datasets.Features(features) if features else None
    table = pa.table(columns, schema=kinds and kinds.arrow_schema)
    info = datasets.DatasetInfo(features=kinds)
    return datasets.Dataset(datasets.table.InMemoryTable(table), info=info, fingerprint="of-test")


DIGITS = hugging_face(
    {"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "y": [0, 1, 0]},
    x=datasets.List(datasets.Value("float64")),
    y=datasets.ClassLabel(names=["zero", "one"]),
)


def test_a_map_style_dataset_of_hugging_face_is_a_dataset_with_its_classes() -> None:
    assert shapes(DIGITS) == {"x": "float64[2, 2]", "y": "int64[2]"}
    assert shapes(DIGITS.with_format("numpy")) == {"x": "float32[2, 2]", "y": "int64[2]"}
    assert shapes(DIGITS.with_format(None, columns=["y"])) == {"y": "int64[2]"}
    assert column(DIGITS.select([2, 1, 0]), 0, 2, name="x") == [[5, 6], [1, 2]]
    assert column(DIGITS.with_format("pandas"), 1, name="x") == [[3, 4]]
    assert classes_of(as_dataset(DIGITS)) == ("zero", "one")


def test_images_of_hugging_face_are_decoded() -> None:
    images = hugging_face(
        {
            "image": [
                datasets.Image().encode_example(np.full((2, 3, 3), i, np.uint8)) for i in (7, 9)
            ]
        },
        image=datasets.Image(),
    )
    found = as_dataset(images).rows(np.array([1, 0]))["image"]
    assert (found.dtype, found.shape, found[:, 0, 0, 0].tolist()) == (
        np.uint8,
        (2, 2, 3, 3),
        [9, 7],
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (hugging_face({"text": ["a", "b"], "y": [1, 2]}), r"'text' \(text\).*\(\['text'\]\)"),
        (hugging_face({"t": [[1], [1, 2]]}), r"'t' \(lists of 1 to 2 values\)"),
        (hugging_face({"t": [1, None]}), r"'t' \(int64, 1 null\)"),
        (datasets.DatasetDict(train=DIGITS, test=DIGITS), r"in \['test', 'train'\]"),
        (DIGITS.to_iterable_dataset(), "IterableDataset is not a dataset: a stream"),
    ],
)
def test_a_dataset_of_hugging_face_without_numbers_is_refused(data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_dataset(data).rows(np.array([0, 1]))


# -- every kind of value, whatever its source is ---------------------------------------------------

ignore_warnings = pytest.mark.filterwarnings("ignore::Warning")  # of the libraries


@dataclass(frozen=True)
class Records:
    """Records as the iterable of a `Stream`."""

    records: list[Any]

    def __iter__(self) -> CounterIterator:
        counter = Counter(0, 1, 0, example=None)
        counter.numbers = self.records  # type: ignore[assignment]
        return Values(counter)


class Values(CounterIterator):
    def __next__(self) -> Any:
        if self.position == len(self.counter.numbers):
            raise StopIteration
        self.position += 1
        return self.counter.numbers[self.position - 1]


def table(records: list[Any]) -> pa.Table:
    return pa.Table.from_pylist(records)


def parquet(records: list[Any], folder: Path) -> Any:
    pyarrow.parquet.write_table(table(records), folder / "x.parquet")
    return ParquetSource(str(folder / "x.parquet"))


def json_lines(records: list[Any], folder: Path) -> Any:
    (folder / "x.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return JsonLinesSource(str(folder / "x.jsonl"), list(records[0]), cache_dir=str(folder))


def hugging_face_dataset(records: list[Any]) -> Any:
    return datasets.Dataset(datasets.table.InMemoryTable(table(records)), fingerprint="of-test")


def generated(records: list[Any]) -> Any:
    return datasets.IterableDataset.from_generator(lambda: iter(records))


def py_dataset(records: list[Any]) -> Any:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
    keras = pytest.importorskip("keras", reason="Keras is an extra")
    values = [record["x"] for record in records]
    if "{" in str(values):
        pytest.skip("its batches are dictionaries of arrays")
    column = np.stack(values) if isinstance(values[0], np.ndarray) else values
    methods = {"__len__": lambda self: 1, "__getitem__": lambda self, index: {"x": column}}
    return type("Batches", (keras.utils.PyDataset,), methods)()


SOURCES: dict[str, Callable[[list[Any], Path], Any]] = {
    "list": lambda records, _: records,
    "grain": lambda records, _: grain.MapDataset.source(records),
    "grain stream": lambda records, _: grain.MapDataset.source(records).to_iter_dataset(),
    "own stream": lambda records, _: Stream(lambda index, count: Records(records)),
    "arrow": lambda records, _: table(records),
    "hugging face": lambda records, _: hugging_face_dataset(records),
    "hugging face stream": lambda records, _: hugging_face_dataset(records).to_iterable_dataset(),
    "hugging face stream, arrow": lambda records, _: (
        hugging_face_dataset(records).to_iterable_dataset().with_format("arrow")
    ),
    "hugging face generator": lambda records, _: generated(records),
    "parquet": parquet,
    "json lines": json_lines,
    "batches": lambda records, _: py_dataset(records),
}
PYTHON = {"list", "grain", "grain stream", "own stream"}
JSON = PYTHON | {"json lines"}


def formatted(records: list[Any]) -> list[Any]:
    """Map-style data and a stream of Hugging Face in format numpy."""
    data = hugging_face_dataset(records)
    return [x.with_format("numpy") for x in (data, data.to_iterable_dataset())]


def first_rows(data: Any) -> Any:
    """The first two examples as a batch."""
    if (stream := as_stream(data)) is None:
        return as_dataset(data).rows(np.arange(2))
    found, _ = next(iter(batches(ShardedStream(stream, 1), 2, 1)))
    return found


ARRAYS: dict[str, tuple[list[Any], Any, set[str]]] = {
    "numbers": ([1, 2], np.array([1, 2]), {*SOURCES}),
    "floats": ([1.5, 2.0], np.array([1.5, 2.0]), {*SOURCES}),
    "booleans": ([True, False], np.array([True, False]), {*SOURCES}),
    "a float, then a number": ([1.5, 2], np.array([1.5, 2.0]), {*SOURCES}),
    "a list": ([[1, 2, 3], [4, 5, 6]], np.array([[1, 2, 3], [4, 5, 6]]), {*SOURCES}),
    "a list of floats": ([[1.5, 2.0], [0.0, 1.0]], np.array([[1.5, 2], [0, 1]]), {*SOURCES}),
    "a list of booleans": ([[True], [False]], np.array([[True], [False]]), {*SOURCES}),
    "a list of lists": ([[[1], [2]], [[3], [4]]], np.array([[[1], [2]], [[3], [4]]]), {*SOURCES}),
    "a dictionary": (
        [{"b": 1, "c": [1.5]}, {"b": 2, "c": [2.5]}],
        {"b": np.array([1, 2]), "c": np.array([[1.5], [2.5]])},
        {*SOURCES},
    ),
    "a list of dictionaries": (
        [[{"b": 1}, {"b": 2}], [{"b": 3}, {"b": 4}]],
        [{"b": np.array([1, 3])}, {"b": np.array([2, 4])}],
        {*SOURCES},
    ),
    "a tuple": ([(1, 2.5), (3, 4.5)], (np.array([1, 3]), np.array([2.5, 4.5])), PYTHON),
    "bfloat16": ([jax.numpy.bfloat16(1)] * 2, np.ones(2, jax.numpy.bfloat16), PYTHON),
    **{
        f"{dtype.__name__}{list(shape)}": (
            [np.full(shape, value, dtype)[()] for value in (1, 0)],
            np.stack([np.full(shape, value, dtype) for value in (1, 0)]),
            {*SOURCES} - {"json lines"},
        )
        for dtype in (np.int8, np.uint16, np.int32, np.float32, np.float64, np.bool_)
        for shape in ((), (3,))
    },
}


QUICK = ("a float, then a number", "a list", "a dictionary", "int8[3]")


@ignore_warnings
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "kind", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in ARRAYS]
)
def test_a_kind_of_value_is_the_same_array_from_every_source(
    kind: str, source: str, tmp_path: Path
) -> None:
    values, expected, sources = ARRAYS[kind]
    if source not in sources:
        pytest.skip("has no such values")
    found = first_rows(SOURCES[source]([{"x": value} for value in values], tmp_path))["x"]
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(expected))
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (got.dtype, got.tolist()) == (wanted.dtype, wanted.tolist())


REFUSED: dict[str, tuple[list[Any], set[str]]] = {
    "text": (["a", "b"], {*SOURCES}),
    "a list of text": ([["a"], ["b"]], {*SOURCES}),
    "text in a dictionary": ([{"b": "a"}, {"b": "c"}], {*SOURCES}),
    "bytes": ([b"a", b"b"], {*SOURCES} - {"json lines"}),
    "None": ([1, None], {*SOURCES}),
    "only None": ([None, None], {*SOURCES}),
    "None in a list": ([[1.5, 2], [1.5, None]], {*SOURCES}),
    "None in a dictionary": ([{"b": 1}, {"b": None}], {*SOURCES}),
    "lists of other lengths": ([[1], [1, 2]], {*SOURCES}),
    "a ragged list": ([[[1], [1, 2]]] * 2, {*SOURCES}),
    "a number, then a float": ([1, 2.5], JSON | {"hugging face generator"}),
    "a boolean, then a number": ([True, 2], JSON | {"hugging face generator"}),
    "a number, then a list": ([1, [1]], JSON | {"hugging face generator"}),
    "too large for 64 bits": ([2**70, 1], JSON),
    "a masked array": ([np.ma.masked_equal([1, 2], 2)] * 2, PYTHON),
    "a random key": ([jax.random.key(0)] * 2, PYTHON),
    "a structured array": ([np.zeros(2, "i4, f4")] * 2, PYTHON),
    "a long double": ([np.longdouble(1)] * 2, PYTHON),
    "a time": ([np.datetime64("2020-01-01")] * 2, PYTHON),
    "an object": ([object()] * 2, PYTHON),
}


@ignore_warnings
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", REFUSED)
def test_other_values_are_refused_by_field_from_every_source(
    kind: str, source: str, tmp_path: Path
) -> None:
    values, sources = REFUSED[kind]
    if source not in sources:
        pytest.skip("has no such values")
    with pytest.raises(UserError, match=r"'x('|/b')|column x"):
        first_rows(SOURCES[source]([{"x": value} for value in values], tmp_path))


@ignore_warnings
@pytest.mark.parametrize("kind", ["float64[]", "int8[]", "int8[3]", "bool[]", "numbers", "a list"])
def test_a_format_of_hugging_face_gives_a_stream_the_dtypes_of_map_style_data(kind: str) -> None:
    values, _, _ = ARRAYS[kind]
    one, other = (first_rows(x)["x"] for x in formatted([{"x": value} for value in values]))
    assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())


@ignore_warnings
def test_numbers_beside_images_keep_their_dtypes_and_a_missing_one_is_named() -> None:
    image = datasets.Image().encode_example(np.zeros((2, 3, 3), np.uint8))
    features = datasets.Features(
        {"image": datasets.Image(), "y": datasets.Value("int8"), "w": datasets.Value("float64")}
    )
    for last, source in itertools.product((1, None), ("map", "stream")):
        columns = {"image": [image] * 2, "y": [1, last], "w": [0.1, 0.2]}
        memory = datasets.table.InMemoryTable(pa.table(columns, schema=features.arrow_schema))
        info = datasets.DatasetInfo(features=features)
        data = datasets.Dataset(memory, info=info, fingerprint="of-test")
        if source == "stream":
            data = data.to_iterable_dataset()
        if last is None:
            with pytest.raises(UserError, match="'y'"):
                first_rows(data)
            continue
        found = {name: f"{x.dtype}{list(x.shape)}" for name, x in first_rows(data).items()}
        assert found == {"image": "uint8[2, 2, 3, 3]", "y": "int8[2]", "w": "float64[2]"}


@ignore_warnings
def test_a_stream_of_lists_resumes_in_the_middle_with_the_same_arrays() -> None:
    records = [{"x": [number, number + 1], "y": number / 2} for number in range(20)]
    for data in (*formatted(records)[1:], hugging_face_dataset(records).to_iterable_dataset()):
        stream = as_stream(data)
        assert stream is not None
        whole = list(batches(ShardedStream(stream, 1), 4, 8))
        assert whole[0][0]["x"].tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
        for done in (1, 3, 5, 7):  # the last ones are in the second epoch
            found = batches(
                ShardedStream(stream, 1), 4, 8, start=done, positions=as_text(whole[done - 1][1])
            )
            for (one, _), (other, _) in zip(found, whole[done:], strict=True):
                assert [x.tolist() for x in one.values()] == [x.tolist() for x in other.values()]
