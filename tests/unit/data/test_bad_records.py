"""Sources without the records that cannot be read."""

import io
import itertools
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from spmdtrain import (
    MappedDataset,
    Mixture,
    Packed,
    RunConfig,
    SkipBadRecords,
    StorageError,
    Subset,
    Tokenized,
    UserError,
)
from spmdtrain.data.datasets import as_dataset, blocks_of, fingerprint, skipped_of
from spmdtrain.data.sources import files
from spmdtrain.data.training_data import run_dataset, training_data
from spmdtrain.record import user_folders


class Numbers:
    """The numbers from 0 on, in blocks of 4, some of which cannot be read."""

    def __init__(self, count: int, bad: set[int], error: type[Exception] = ValueError) -> None:
        self.count, self.bad, self.error = count, bad, error
        self.blocks = np.append(np.arange(0, count, 4), count)
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        if index in self.bad:
            raise self.error(f"{index} is bad")
        return index


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(count=st.integers(1, 30), data=st.data())
def test_every_record_that_can_be_read_is_there_once(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    source = SkipBadRecords(Numbers(count, bad))
    left = [number for number in range(count) if number not in bad]
    assert source.skipped.tolist() == sorted(bad)
    assert as_dataset(source).rows(np.arange(len(source))).tolist() == left
    assert [source[index] for index in range(len(source))] == left
    assert source.describe(len(left) - 1) == f"record {left[-1]}"
    blocks = blocks_of(source)
    assert blocks is not None  # each block has the records of the source's block
    parts = [left[a:b] for a, b in itertools.pairwise(blocks)]
    assert all(number // 4 == i for i, part in enumerate(parts) for number in part)
    with pytest.raises(IndexError):
        source[len(left)]


def test_the_skipped_are_counted_in_the_log_up_to_a_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    SkipBadRecords(Numbers(3000, set()))
    assert capsys.readouterr().err == ""
    SkipBadRecords(Numbers(3000, {2500, 1500}), max_bad_records=2)
    line = capsys.readouterr().err
    assert line.startswith(
        "bad_records: 2 of 3,000 records cannot be read; the first: example 1500 of a Numbers "
        "cannot be read: ValueError: 1500 is bad ("
    )
    assert line.endswith("). They are left out\n")
    with pytest.raises(UserError, match=r"over 2 records of a Numbers .*max_bad_records; .* 0 is"):
        SkipBadRecords(Numbers(10, {0, 4, 5}), max_bad_records=2)
    with pytest.raises(UserError, match="None is left"):
        SkipBadRecords(Numbers(3, {0, 1, 2}))


def test_a_failure_of_storage_is_not_skipped() -> None:
    with pytest.raises(StorageError, match=r"example 7 .* 7 is bad"):
        SkipBadRecords(Numbers(10, {7}, TimeoutError))
    with pytest.raises(UserError, match="has changed"):  # for all records, and not by its content
        SkipBadRecords(Numbers(10, {7}, lambda _: UserError("the file has changed")))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not a generator"):
        SkipBadRecords(number for number in range(3))
    with pytest.raises(UserError, match="max_bad_records is -1: it must be 0 or more"):
        SkipBadRecords(Numbers(4, {1}), max_bad_records=-1)
    with pytest.raises(UserError, match="max_bad_records is '3'"):
        SkipBadRecords(Numbers(3, set()), "3")  # type: ignore[arg-type]


def test_an_image_that_is_truncated_is_skipped() -> None:
    """Pillow raises an `OSError`, which elsewhere is a failure of storage."""
    content = io.BytesIO()
    Image.new("RGB", (64, 64), (9, 9, 9)).save(content, "JPEG")
    files = [content.getvalue(), content.getvalue()[:-200], b"no image", content.getvalue()]

    class Pictures:
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> np.ndarray:
            return np.asarray(Image.open(io.BytesIO(files[index])))

    assert SkipBadRecords(Pictures()).skipped.tolist() == [1, 2]


def test_packed_documents_of_what_is_left() -> None:
    packed = Packed(SkipBadRecords(Documents(6, {1, 4})), 4)
    tokens = as_dataset(packed).rows(np.arange(len(packed)))["tokens"]
    assert sorted(tokens.ravel().tolist()) == [0, 0, 2, 2, 3, 3, 5, 5]


def test_records_without_text_are_left_out_around_tokenized() -> None:
    texts = ["ab", None, "c"]
    source = SkipBadRecords(Tokenized(texts, "bytes"))
    assert [source[index].tolist() for index in range(len(source))] == [[97, 98], [99]]


# -- identity --------------------------------------------------------------------------------------


class Documents(Numbers):
    """Documents of two tokens."""

    def __getitem__(self, index: int) -> np.ndarray:
        return np.full(2, super().__getitem__(index))


def _grain(source: Any) -> Any:
    return grain.MapDataset.source(source).map(lambda x: x)


WRAPPED: dict[str, Callable[[set[int]], Any]] = {
    "alone": lambda bad: SkipBadRecords(Numbers(4000, bad)),
    "mapped": lambda bad: MappedDataset(SkipBadRecords(Numbers(4000, bad)), lambda x: x),
    "subset": lambda bad: Subset(SkipBadRecords(Numbers(4000, bad)), np.arange(3000)),
    "grain": lambda bad: as_dataset(_grain(SkipBadRecords(Numbers(4000, bad)))),
    "packed": lambda bad: Packed(SkipBadRecords(Documents(4000, bad)), 4),
    "text": lambda bad: Packed(
        Tokenized(SkipBadRecords(_grain(Numbers(4000, bad)).map(lambda x: "ab")), "bytes"), 4
    ),
    "mixture": lambda bad: Mixture({"a": (SkipBadRecords(Numbers(4000, bad)), 1.0)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_the_fingerprint_has_the_bad_records(wrapped: str) -> None:
    """Two processes that leave out different records train on different batches."""
    one, other = (fingerprint(WRAPPED[wrapped](bad)) for bad in ({1001}, {1002}))
    if wrapped == "mixture":
        one, other = one["components"]["a"], other["components"]["a"]
    assert one["skipped"].startswith("1 (crc32 ")
    assert one.pop("skipped") != other.pop("skipped")
    one.pop("crc32"), other.pop("crc32")
    assert {k: v for k, v in one.items() if k != "blocks"} == {
        k: v for k, v in other.items() if k != "blocks"
    }
    assert "skipped" not in fingerprint(as_dataset(SkipBadRecords(Numbers(40, set()))))


def test_every_batch_has_the_dtypes_of_the_first_record_that_can_be_read() -> None:
    class Halves(Numbers):
        def __getitem__(self, index: int) -> Any:
            number = super().__getitem__(index)
            return 1.5 if number == 1 else number

    source = Halves(10, {0})
    dataset = as_dataset(SkipBadRecords(source))
    for indices in ([3, 4], [0, 5], [6]):
        assert dataset.rows(np.array(indices)).dtype == np.float64
    source.reads.clear()
    dataset.rows(np.array([2, 3]))
    assert source.reads == [3, 4]  # none for the dtypes


# -- the cache -------------------------------------------------------------------------------------


class Files(Numbers):
    """Numbers of files that do not change."""

    def fingerprint(self) -> str:
        return "files"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, in which the result of every scan is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(files, "CACHE_DELAY", 0.0)
    return tmp_path / "spmdtrain" / "data"


def test_the_bad_records_of_files_are_cached(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for bad in ({7, 90}, set[int]()):
        first = SkipBadRecords(Files(1000 + len(bad), bad))
        line = capsys.readouterr().err
        again = Files(1000 + len(bad), bad)
        np.testing.assert_array_equal(SkipBadRecords(again).skipped, first.skipped)
        assert len(again.reads) == 16 + len(bad) + bool(bad)  # samples, the bad ones, a reason
        assert capsys.readouterr().err == line
    assert len(list(cache.iterdir())) == 2
    with pytest.raises(UserError, match=r"over 1 records .* 7 is bad"):
        SkipBadRecords(Files(1002, {7, 90}), 1)
    # Other functions that decode the same files.
    assert SkipBadRecords(Files(1002, {90})).skipped.tolist() == [90]
    changed = SkipBadRecords(Files(1002, {90, 91}))
    with pytest.raises(UserError, match=rf"91 is bad .*delete {cache}/bad-\* and start again"):
        changed.rows(np.array([90]))


def test_one_process_of_a_machine_scans(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_folders, "NOTICE_DELAY", 0.05)
    # `capsys` would lose lines that a thread writes while another one reads them.
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    scanning, finish, scanned = threading.Event(), threading.Event(), []

    def scan() -> np.ndarray:
        scanned.append(1)
        scanning.set()
        assert finish.wait(10)
        return np.array([3, 1], np.int32)

    def result() -> list[int]:
        found: list[int] = files.cached_scan("lengths", b"key", scan, "counting tokens").tolist()
        return found

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(result)
        assert scanning.wait(10)
        others = [pool.submit(result) for _ in range(2)]
        deadline = time.monotonic() + 5
        while errors.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        finish.set()
        assert first.result() == others[0].result() == others[1].result() == [3, 1]
    assert scanned == [1]
    assert set(errors.getvalue().splitlines()) == {
        "counting tokens: another process does it; waiting for its result"
    }
    assert [path.suffix for path in cache.iterdir()] == [""]  # no lock is left


# -- the option of a run ---------------------------------------------------------------------------

SKIP = RunConfig(steps=1, on_bad_record="skip", max_bad_records=2, global_batch_size=2)


def test_the_option_reaches_the_records_of_mapped_datasets_and_mixtures() -> None:
    def data(bad: set[int]) -> MappedDataset:
        return MappedDataset(Numbers(40, bad), lambda x: x + 1)

    mixture = Mixture(
        {"a": (data({0, 5}), 1), "b": (data({6, 7}), 3), "c": (np.arange(3), 1)},
        {9: {"a": 1, "b": 0, "c": 0}},
    )
    found = run_dataset(mixture, SKIP)
    assert isinstance(found, Mixture) and found.stages == mixture.stages
    assert skipped_of(found) == ["0", "5", "6", "7"]
    assert found.components["c"] is mixture.components["c"]
    assert found.rows(np.arange(len(found))).tolist() == [
        *(i + 1 for i in range(1, 40) if i != 5),
        *(i + 1 for i in range(40) if i not in (6, 7)),
        *range(3),
    ]
    assert run_dataset(found, SKIP) is found  # nothing is read again
    with pytest.raises(UserError, match="over 2 records"):
        run_dataset(data({1, 2, 3}), SKIP)
    assert skipped_of(run_dataset(data({1, 2, 3}), RunConfig(steps=1))) == []


@pytest.mark.parametrize(
    "data",
    [
        {"x": np.arange(4)},
        Subset(np.arange(4), np.arange(2)),
        Packed(SkipBadRecords(Documents(6, {1})), 4),
        Subset(SkipBadRecords(Numbers(6, {1})), np.arange(2)),
    ],
    ids=["arrays", "subset of arrays", "packed", "subset"],
)
def test_the_option_leaves_data_without_bad_records(data: Any) -> None:
    assert skipped_of(run_dataset(data, SKIP)) == skipped_of(as_dataset(data))


def test_the_option_is_refused_where_it_cannot_reach_the_records(tmp_path: Path) -> None:
    for data, write in (
        (Packed(Documents(6, set()), 4), r"Packed\(SkipBadRecords\(documents\), length\)"),
        (Subset(Numbers(6, {1}), np.arange(2)), r"Subset\(SkipBadRecords\(source\), indices\)"),
        (Mixture({"a": (Packed(Documents(6, set()), 4), 1)}), "Packed"),
    ):
        with pytest.raises(UserError, match=f"on_bad_record is 'skip', but a .* write {write}"):
            run_dataset(data, SKIP)
    stream = grain.MapDataset.source(np.arange(9)).to_iter_dataset()
    with pytest.raises(UserError, match="on_bad_record is 'skip', and which records of a stream"):
        training_data(stream, SKIP)
