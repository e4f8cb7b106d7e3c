"""Sources without the records that cannot be read."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain import Packed, SkipBadRecords, StorageError, Tokenized, UserError
from spmdtrain.data.datasets import as_dataset, blocks_of


class Numbers:
    """The numbers from 0 on, in blocks of 4, some of which cannot be read."""

    def __init__(self, count: int, bad: set[int], error: type[Exception] = ValueError) -> None:
        self.count, self.bad, self.error = count, bad, error
        self.blocks = np.append(np.arange(0, count, 4), count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise self.error(f"{index} is bad")
        return index


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
    with pytest.raises(UserError, match="not a generator"):
        SkipBadRecords(number for number in range(3))
    with pytest.raises(UserError, match="max_bad_records is '3'"):
        SkipBadRecords(Numbers(3, set()), "3")  # type: ignore[arg-type]


def test_packed_documents_of_what_is_left() -> None:
    class Documents(Numbers):
        def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]
            return np.full(2, super().__getitem__(index))

    packed = Packed(SkipBadRecords(Documents(6, {1, 4})), 4)
    tokens = as_dataset(packed).rows(np.arange(len(packed)))["tokens"]
    assert sorted(tokens.ravel().tolist()) == [0, 0, 2, 2, 3, 3, 5, 5]


def test_records_without_text_are_left_out_around_tokenized() -> None:
    texts = ["ab", None, "c"]
    source = SkipBadRecords(Tokenized(texts, "bytes"))
    assert [source[index].tolist() for index in range(len(source))] == [[97, 98], [99]]
