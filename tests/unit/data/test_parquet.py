"""Parquet files as sources: the record at each index, threads, buckets, and files that fail."""

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_gcs import Stored, fake_gcs
from helpers import BOUND, environment
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain.data.datasets import as_dataset, blocks_of, fingerprint
from spmdtrain.data.sources.files import BlockCache
from spmdtrain.data.sources.parquet import ParquetSource
from spmdtrain.errors import StorageError, UserError


def write(path: Path, columns: dict[str, Any], group: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


def plain(value: Any) -> Any:
    """Returns a value without NumPy's types."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, list):
        return [plain(each) for each in value]
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def record(number: int, text: str, tokens: list[int]) -> dict[str, Any]:
    return {
        "number": number,
        "flag": number % 2 == 0,
        "text": text,
        "data": text.encode(),
        "tokens": tokens,
        "pair": [len(text), len(tokens)],
        "words": [text[:1], text] * len(tokens),
        "nested": {"x": len(text), "y": text},
    }


RECORDS = st.builds(
    record,
    st.integers(-(2**63), 2**63 - 1),
    st.text(max_size=9),
    st.lists(st.integers(0, 9), max_size=3),
)
SCHEMA = pa.schema(
    {
        "number": pa.int64(),
        "flag": pa.bool_(),
        "text": pa.dictionary(pa.int32(), pa.string()),
        "data": pa.binary(),
        "tokens": pa.list_(pa.int64()),
        "pair": pa.list_(pa.int8(), 2),
        "words": pa.large_list(pa.string()),
        "nested": pa.struct({"x": pa.int32(), "y": pa.large_string()}),
    }
)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    records=st.lists(RECORDS, min_size=1, max_size=9),
    cut=st.integers(0, 9),
    group=st.integers(1, 4),
    data=st.data(),
)
def test_the_record_at_an_index_is_the_row_of_the_tables_one_after_another(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[dict[str, Any]],
    cut: int,
    group: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("data")
    for number, part in enumerate((records[:cut], records[cut:])):
        table = pa.Table.from_pylist(part, schema=SCHEMA)
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group)
    source = ParquetSource(folder, cached_row_groups=2)
    assert len(source) == len(records) == source.blocks[-1]
    indices = data.draw(st.lists(st.integers(0, len(records) - 1), max_size=20))
    assert plain(source.__getitems__(indices)) == [records[index] for index in indices]
    assert [plain(source[index]) for index in range(len(source))] == records
    pair = source[0]["pair"]
    assert (pair.dtype, pair.shape) == (np.int8, (2,))


def test_columns_of_numbers_are_a_dataset_whose_blocks_are_the_row_groups(tmp_path: Path) -> None:
    images = np.arange(7 * 6, dtype=np.float32).reshape(7, 2, 3)
    labels = np.arange(7, dtype=np.uint8)
    lists = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), 3), 2
    )
    tokens = [[i, i + 1] for i in range(7)]
    for name, part in {"a": slice(0, 5), "b": slice(5, 7)}.items():
        columns = {"image": lists[part], "label": pa.array(labels[part]), "tokens": tokens[part]}
        write(tmp_path / f"{name}.parquet", columns, group=3)
    dataset = as_dataset(ParquetSource(tmp_path))
    assert isinstance(dataset, ParquetSource)
    assert dataset.blocks.tolist() == [0, 3, 5, 7]
    indices = np.array([6, 0, 4, 4, 3])
    rows = dataset.rows(indices)
    assert {n: str(x.dtype) for n, x in rows.items()} == {
        **{"image": "float32", "label": "uint8"},
        "tokens": "int64",
    }
    np.testing.assert_array_equal(rows["image"], images[indices])
    np.testing.assert_array_equal(rows["label"], labels[indices])
    np.testing.assert_array_equal(rows["tokens"], np.array(tokens)[indices])
    assert fingerprint(dataset)["arrays"]["image"] == "float32[2, 3]"


class Counting(ParquetSource):
    reads: ClassVar[list[int]] = []

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        self.reads.append(len(indices))
        return super().__getitems__(indices)


def test_a_map_function_of_grain_keeps_the_row_groups_together(tmp_path: Path) -> None:
    source = Counting(write(tmp_path / "a.parquet", {"text": ["a", "bc", "", "d"]}, group=2))
    mapped = grain.MapDataset.source(source).seed(1).map(lambda row: {"n": len(row["text"])})
    dataset = as_dataset(mapped.random_map(lambda row, random: row))
    assert np.asarray(blocks_of(dataset)).tolist() == [0, 2, 4]
    assert dataset.rows(np.array([3, 0, 1]))["n"].tolist() == [1, 1, 2]
    assert source.reads == [3, 1]  # example 0, for the dtypes
    for other in (mapped.shuffle(seed=1), mapped[::2], mapped.repeat(2)):
        assert blocks_of(as_dataset(other)) is None


def test_lists_of_lists_of_one_shape_are_arrays(tmp_path: Path) -> None:
    images = np.arange(12).reshape(2, 3, 2)
    pq.write_table(pa.table({"x": images.tolist()}), tmp_path / "a.parquet")
    found = as_dataset(ParquetSource(tmp_path / "a.parquet")).rows(np.array([1, 0]))
    np.testing.assert_array_equal(found["x"], images[::-1], strict=True)
    tensors = pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(images)})
    pq.write_table(tensors, tmp_path / "b.parquet")
    for data in (ParquetSource(tmp_path / "b.parquet"), tensors):
        found = as_dataset(data).rows(np.array([1, 0]))
        np.testing.assert_array_equal(found["x"], images[::-1], strict=True)


def test_threads_decode_a_row_group_once_and_a_failed_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", {"n": range(40)}, group=10)
    source = ParquetSource(path, cached_row_groups=4)
    decoded, read = [], pq.ParquetFile.read_row_group

    def slow(file: Any, number: int, *rest: Any) -> Any:
        decoded.append(number)
        time.sleep(0.05)
        if len(decoded) == 1:
            raise MemoryError("once")
        return read(file, number, *rest)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", slow)
    with pytest.raises(UserError, match="row group 3: not enough memory to decode it"):
        source[35]
    decoded.clear()
    decoded.append(-1)
    found: list[list[int]] = []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(40)
        found.append((source.rows(order)["n"] - order).tolist())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0] * 40] * 8
    assert sorted(decoded) == [-1, 0, 1, 2, 3]


def test_blocks_are_loaded_at_the_same_time_if_the_cache_holds_them() -> None:
    meeting = threading.Barrier(4)

    def load(number: int) -> int:
        if number == 7:
            raise ValueError("raised by get")
        meeting.wait(timeout=BOUND)
        return number + 10

    cache = BlockCache[int](5)
    cache.prefetch([0, 1, 2, 3, 7], load)  # would wait forever one by one
    assert [cache.get(number, lambda _: -1) for number in (0, 1, 2, 3, 7)] == [10, 11, 12, 13, -1]
    cache.prefetch(range(10, 16), load)  # more than the cache holds: nothing is loaded
    assert cache.get(10, lambda _: -1) == -1


def test_only_the_last_row_groups_are_kept_and_none_goes_to_another_process(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.parquet", {"n": np.arange(100_000)}, group=10_000)
    source = ParquetSource(path, cached_row_groups=2)
    empty = len(pickle.dumps(source))
    assert [int(row["n"]) for row in source.__getitems__(range(0, 100_000, 9_999))] == [
        *range(0, 100_000, 9_999)
    ]
    assert len(pickle.dumps(source)) == empty < 4000
    assert pickle.loads(pickle.dumps(source))[77_777]["n"] == 77_777


def test_empty_row_groups_and_files_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"n": pa.array([], pa.int64())})
    write(tmp_path / "b.parquet", {"n": [5, 6, 7]})
    source = ParquetSource(tmp_path)
    assert source.blocks.tolist() == [0, 2, 3]
    assert source.rows(np.arange(3))["n"].tolist() == [5, 6, 7]
    with pytest.raises(UserError, match=r"a\.parquet: the file holds no rows"):
        ParquetSource(tmp_path / "a.parquet")
    with pytest.raises(IndexError):
        source[3]


# -- files that fail -------------------------------------------------------------------------------


def refusal(read: Callable[[], Any], kind: type[Exception] = UserError) -> str:
    with pytest.raises(kind) as caught:
        read()
    return str(caught.value)


def test_a_null_is_named_when_its_row_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"text": ["a"] * 3, "n": [1, 2, 3]})
    path = write(tmp_path / "b.parquet", {"text": ["a"] * 5, "n": [1, 2, 3, None, 5]})
    source = ParquetSource(tmp_path)
    assert source[5] == {"text": "a", "n": 3} and source[5]["n"].dtype == np.int64
    expected = (
        f"{path}: row 3: column 'n' is null, or holds a null: fill or remove such rows, or choose "
        "other columns"
    )
    assert refusal(lambda: source.__getitems__([0, 7, 6])) == expected
    only = ParquetSource(tmp_path, columns=["n"])
    assert refusal(lambda: only.rows(np.array([0, 6]))) == expected
    write(tmp_path / "c.parquet", {"t": [[1], [2, None]]})
    nested = ParquetSource(tmp_path / "c.parquet")
    assert nested[0]["t"].tolist() == [1]
    assert "c.parquet: row 1: column 't' is null" in refusal(lambda: nested[1])


def test_text_that_is_not_utf8_is_named_when_its_row_is_read(tmp_path: Path) -> None:
    text = pa.array([b"good", b"\xff"]).view(pa.string())
    source = ParquetSource(write(tmp_path / "a.parquet", {"text": text}))
    assert source[0]["text"] == "good"
    assert "a.parquet: row 1: column 'text' is text, but not UTF-8" in refusal(lambda: source[1])


def test_what_is_no_array_of_numbers_is_named_with_what_to_write(tmp_path: Path) -> None:
    columns = {"text": ["ab", "c"], "tokens": [[1, 2], [3]], "n": [1, 2]}
    path = write(tmp_path / "a.parquet", columns)
    indices = np.array([0, 1])
    assert "field 'text' of example 0 of a ParquetSource is text: a batch holds numbers" in refusal(
        lambda: ParquetSource(path).rows(indices)
    )
    assert "(2,) in example 0 and (1,) in example 1: the examples of a batch need one" in refusal(
        lambda: ParquetSource(path, ["n", "tokens"]).rows(indices)
    )
    assert ParquetSource([path]).describe(1) == f"{path}: row 1"


@pytest.mark.parametrize(
    ("other", "options", "expected"),
    [
        ({"n": [1.5], "t": ["a"]}, {}, "b.parquet: column 'n' is double, but int64 in "),
        ({"n": [1]}, {}, "b.parquet: has no column 't', but "),
        ({"n": [1], "t": ["a"], "u": [1]}, {}, "b.parquet: has a column 'u', which "),
        ({"n": [1]}, {"columns": ["n", "t"]}, "b.parquet: there is no column 't'."),
        ({"n": [1]}, {"columns": ["nn"]}, "a.parquet: there is no column 'nn'. Did you mean 'n'?"),
        ({"n": [1]}, {"columns": "n"}, "columns is 'n': it must be a list of names"),
        ({"n": [1]}, {"columns": ["n", "n"]}, "columns: the name 'n' occurs twice"),
        ({"n": [1]}, {"cached_row_groups": 0}, "cached_row_groups is 0"),
    ],
)
def test_schemas_that_differ_and_wrong_options_are_named(
    tmp_path: Path, other: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    write(tmp_path / "a.parquet", {"n": [1, 2], "t": ["a", "b"]})
    write(tmp_path / "b.parquet", other)
    assert expected in refusal(lambda: ParquetSource(tmp_path, **options))


def test_files_that_differ_in_other_columns_alone_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"n": [1, 2], "t": ["a", "b"]})
    write(tmp_path / "b.parquet", {"u": [1.5], "n": [3]})
    assert ParquetSource(tmp_path, ["n"]).rows(np.arange(3))["n"].tolist() == [1, 2, 3]


def test_a_file_that_is_truncated_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"n": range(1000)})
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(lambda: ParquetSource(path))
    assert message.startswith(f"{path}: cannot be decoded: ")
    assert message.endswith("not a Parquet file: write it again, or leave it out")
    path.write_bytes(b"")
    assert refusal(lambda: ParquetSource(path)).startswith(f"{path}: cannot be decoded: ")


def test_a_row_group_that_is_corrupted_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    random = np.random.default_rng(0).integers(0, 2**60, 4000)
    path = write(tmp_path / "a.parquet", {"n": random}, group=1000)
    place = pq.read_metadata(path).row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 40] = b"\xff" * 40
    path.write_bytes(content)
    source = ParquetSource(path)
    assert source[3999]["n"] == random[3999]
    assert f"{path}: row group 2: cannot be decoded: " in refusal(lambda: source[2500])


@pytest.mark.parametrize("how", ["removed", "changed", "touched", "a folder"])
def test_a_file_that_changes_or_vanishes_is_named(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "a.parquet", {"n": range(10)})
    source = ParquetSource(path, cached_row_groups=1)
    assert source[0]["n"] == 0
    path.rename(tmp_path / "b.parquet")
    if how == "removed":
        message = refusal(lambda: source[9], StorageError)
        assert message == (
            f"{path}: the file has been removed since the run started: restore it, and start again"
        )
    elif how == "a folder":
        path.mkdir()
        assert refusal(lambda: source[9]) == f"{path}: not a regular file"
    else:
        time.sleep(0.01)
        write(path, {"n": range(11 if how == "changed" else 10)})
        message = refusal(lambda: source[9])
        assert f"{path}: the file has changed since the run started (" in message
        assert (" bytes at the start, " in message) == (how == "changed")


# -- in a bucket -----------------------------------------------------------------------------------

IN_A_BUCKET = """
import sys
import numpy as np
from spmdtrain.data.sources.files import BlockCache
from spmdtrain.data.sources.parquet import ParquetSource
source = ParquetSource("gs://bucket/data")
print([str(file) for file in source.files], source.blocks.tolist())
print(source[4], [row["text"] for row in source.__getitems__([6, 0, 5])])
print(len(ParquetSource("gs://bucket/data/*.parquet")), len(ParquetSource("gs://bucket/data/b/c.pq")))
for given in ("gs://bucket/data/x*", "gs://bucket/none", "gs://bucket/other", "az://bucket/data"):
    try:
        ParquetSource(given)
    except ValueError as error:
        print(error)
small = ParquetSource("gs://bucket/data", columns=["n"], cached_row_groups=1)
for line in sys.stdin:
    try:
        print(small.rows(np.array([0, 6]))["n"].tolist(), flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.slow
def test_files_may_be_in_a_bucket(tmp_path: Path) -> None:
    names = ["a.parquet", "b/c.pq", "b/_temporary/d.parquet"]
    with fake_gcs() as storage:
        for number, name in enumerate(names):
            numbers = range(5 * number, 5 * number + 5)
            columns = {"text": [f"t{n}" for n in numbers], "n": numbers}
            content = write(tmp_path / "x.parquet", columns, group=3).read_bytes()
            storage.objects[f"data/{name}"] = Stored(content, number + 1)
        storage.objects["other/a.txt"] = Stored(b"text", 9)
        process = subprocess.Popen(
            [sys.executable, "-c", IN_A_BUCKET],
            env=environment() | storage.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None and process.stdout is not None
        with process, process.stdin as ask, process.stdout as answers:
            lines = [next(answers).strip() for _ in range(7)]
            found = []
            stored = storage.objects["data/b/c.pq"]
            for change in (stored, Stored(stored.content, 77), None):
                storage.objects["data/b/c.pq"] = change or stored
                if change is None:
                    del storage.objects["data/b/c.pq"]
                print("next", file=ask, flush=True)
                found.append(next(answers).strip())
    assert lines == [
        "['gs://bucket/data/a.parquet', 'gs://bucket/data/b/c.pq'] [0, 3, 5, 8, 10]",
        "{'text': 't4', 'n': np.int64(4)} ['t6', 't0', 't5']",
        "5 5",
        "gs://bucket/data/x*: no file matches this pattern",
        "gs://bucket/none: no such file or folder",
        "gs://bucket/other: the folder holds no Parquet files (.parquet, .pq)",
        "az://bucket/data: URLs of data must be gs:// or s3:// URLs, not az://",
    ]
    assert found[0] == "[0, 6]"
    assert found[1].startswith("UserError gs://bucket/data/b/c.pq: the file has changed since")
    assert found[2].startswith("StorageError gs://bucket/data/b/c.pq: the file has been removed")
