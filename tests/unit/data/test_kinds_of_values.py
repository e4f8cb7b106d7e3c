"""Every kind of value gives the same array, or is refused by name, whatever its source is."""

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import grain
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from stream_helpers import Counter, CounterIterator, as_text, batches

from spmdtrain import JsonLinesSource, ParquetSource, Stream, UserError
from spmdtrain.data.datasets import as_dataset
from spmdtrain.data.streams import ShardedStream, as_stream

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of the libraries


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


def hugging_face(records: list[Any]) -> Any:
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
    "hugging face": lambda records, _: hugging_face(records),
    "hugging face stream": lambda records, _: hugging_face(records).to_iterable_dataset(),
    "hugging face stream, arrow": lambda records, _: (
        hugging_face(records).to_iterable_dataset().with_format("arrow")
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
    data = hugging_face(records)
    return [x.with_format("numpy") for x in (data, data.to_iterable_dataset())]


def rows(data: Any) -> Any:
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
    found = rows(SOURCES[source]([{"x": value} for value in values], tmp_path))["x"]
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


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", REFUSED)
def test_other_values_are_refused_by_field_from_every_source(
    kind: str, source: str, tmp_path: Path
) -> None:
    values, sources = REFUSED[kind]
    if source not in sources:
        pytest.skip("has no such values")
    with pytest.raises(UserError, match=r"'x('|/b')|column x"):
        rows(SOURCES[source]([{"x": value} for value in values], tmp_path))


@pytest.mark.parametrize("kind", ["float64[]", "int8[]", "int8[3]", "bool[]", "numbers", "a list"])
def test_a_format_of_hugging_face_gives_a_stream_the_dtypes_of_map_style_data(kind: str) -> None:
    values, _, _ = ARRAYS[kind]
    one, other = (rows(x)["x"] for x in formatted([{"x": value} for value in values]))
    assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())


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
                rows(data)
            continue
        found = {name: f"{x.dtype}{list(x.shape)}" for name, x in rows(data).items()}
        assert found == {"image": "uint8[2, 2, 3, 3]", "y": "int8[2]", "w": "float64[2]"}


def test_a_stream_of_lists_resumes_in_the_middle_with_the_same_arrays() -> None:
    records = [{"x": [number, number + 1], "y": number / 2} for number in range(20)]
    for data in (*formatted(records)[1:], hugging_face(records).to_iterable_dataset()):
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
