"""Data of other libraries as datasets: real objects of Grain, Hugging Face, pandas and Arrow."""

import operator
from collections.abc import Callable
from typing import Any

import datasets
import grain
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from spmdtrain import Subset
from spmdtrain.data.datasets import as_dataset, classes_of
from spmdtrain.errors import UserError

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
