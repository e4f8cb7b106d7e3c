"""Text and documents as tokens: tokenizers from files, and rows of packed documents."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdtrain import Packed, ParquetSource, Tokenized, UserError
from spmdtrain.data.datasets import as_dataset, fingerprint
from spmdtrain.data.sampling import TrainBatches
from spmdtrain.data.sources import files
from spmdtrain.data.sources.files import BlockCache
from spmdtrain.data.text import (
    RecentDocuments,
    WeightedTokens,
    best_fit,
    document_lengths,
    load_tokenizer,
)

TEXTS = [f"{i} green bottles, hanging on the wall" for i in range(99, 0, -1)] + ["Grüße, 🐦"]
SPECIAL = "<|end|>"


@pytest.fixture(scope="module")
def json_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of `tokenizers`: byte-level BPE, which would add a token, cut and pad."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    end = tokenizer.token_to_id(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL} $A", special_tokens=[(SPECIAL, end)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    path = tmp_path_factory.mktemp("json") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model."""
    import sentencepiece

    path = tmp_path_factory.mktemp("model") / "text.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS),
            model_writer=file,
            vocab_size=300,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    return path


@pytest.fixture(params=["bytes", "json", "model"])
def tokenizer(request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.param
    yield name if name == "bytes" else str(request.getfixturevalue(f"{name}_file"))


def test_every_text_is_read_back_from_its_tokens(tokenizer: str) -> None:
    documents = Tokenized([{"text": text, "id": i} for i, text in enumerate(TEXTS)], tokenizer)
    found = documents.__getitems__(list(range(len(TEXTS))))
    assert [documents.decode(tokens) for tokens in found] == TEXTS
    for index, tokens in enumerate(found):
        assert tokens.dtype == np.int32 and tokens.ndim == 1
        np.testing.assert_array_equal(documents[index], tokens)  # a batch changes nothing
        np.testing.assert_array_equal(documents.encode(TEXTS[index]), tokens)
    largest = max(tokens.max() for tokens in found)
    assert largest < documents.vocabulary_size == load_tokenizer(tokenizer).vocabulary_size
    sizes = {"bytes": 256, "json": 300}
    assert documents.vocabulary_size == sizes.get(load_kind(tokenizer), documents.vocabulary_size)
    longest = {"bytes": 37, "json": 20, "model": 36}  # the first text has 37 characters
    assert 4 < len(found[0]) <= longest[load_kind(tokenizer)]  # neither cut nor padded
    again = pickle.loads(pickle.dumps(documents))  # as a worker process gets it
    np.testing.assert_array_equal(again[3], found[3])
    assert again.fingerprint() == documents.fingerprint()


def load_kind(tokenizer: str) -> str:
    return tokenizer.rpartition(".")[2]


@pytest.mark.parametrize(
    ("kind", "append", "number", "size"),
    [
        ("bytes", 256, 256, 257),
        ("bytes", "\n", 10, 256),
        ("json", SPECIAL, 0, 300),
        ("json", 7, 7, 300),
        ("model", "</s>", 2, None),
    ],
)
def test_a_token_ends_every_document(
    kind: str, append: Any, number: int, size: int | None, request: pytest.FixtureRequest
) -> None:
    file = kind if kind == "bytes" else request.getfixturevalue(f"{kind}_file")
    plain = Tokenized(TEXTS, file)
    documents = Tokenized(TEXTS, file, append=append)
    assert documents.append == number
    np.testing.assert_array_equal(documents[5], [*plain[5], number])
    assert documents.vocabulary_size == (size or plain.vocabulary_size)
    assert documents.decode([*documents[5], 65, 66]) == TEXTS[5]
    assert documents.fingerprint() != plain.fingerprint()


@given(content=st.binary(max_size=40))
def test_bytes_that_are_not_utf8_are_tokens_too(content: bytes) -> None:
    np.testing.assert_array_equal(Tokenized([content], "bytes")[0], list(content))


class Shards:
    """Records that know their file."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records
        self.blocks = np.array([0, 2, len(records)])

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return self.records[index]

    def describe(self, index: int) -> str:
        return f"part-1.parquet: row {index - 2}"

    def fingerprint(self) -> str:
        return str(len(self.records))


def test_records_may_be_text_themselves_and_blocks_are_those_of_the_source() -> None:
    documents = Tokenized(Shards(["ab", b"c", {"text": "\u00e9"}]), "bytes")
    assert [each.tolist() for each in documents.__getitems__([2, 0])] == [[195, 169], [97, 98]]
    assert documents.blocks is not None and documents.blocks.tolist() == [0, 2, 3]
    assert Tokenized(["a"], "bytes").blocks is None
    packed = Packed(documents, 4)
    assert sorted(packed.rows(np.arange(2))["tokens"].ravel()) == [0, 0, 0, 97, 98, 99, 169, 195]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"txt": "a", "id": 1},
            r"part-1.parquet: row 1 \(record 3\): there is no field 'text' with text. Did you mean "
            r"'txt'\? Give its name: Tokenized\(source, tokenizer, field=...\)$",
        ),
        ({"text": 5}, "field 'text' is int, not text"),
        ({"text": None}, "field 'text' is NoneType"),
        (np.zeros(2), "the record is ndarray"),
        ("\ud800", "cannot be tokenized"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_record_without_text_is_named(record: Any, message: str, json_file: Path) -> None:
    documents = Tokenized(Shards(["a", "b", "c", record]), json_file)
    with pytest.raises(
        UserError, match=rf"record 3.*{message}" if "part" not in message else message
    ):
        documents.__getitems__([0, 3])
    assert documents[0].tolist() == documents.encode("a").tolist()
    with pytest.raises(UserError, match=r"^record 1: "):
        Tokenized(["a", record], json_file)[1]


def test_a_record_of_a_parquet_file_is_named_with_its_file(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    for name in "ab":
        table = pa.table({"text": ["x", "y", "z"], "id": [1, 2, 3]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=2)
    source = ParquetSource(str(tmp_path))
    assert Tokenized(source, "bytes")[5].tolist() == [ord("z")]
    with pytest.raises(UserError, match=r"b.parquet: row 2 \(record 5\): field 'id' is int64"):
        Tokenized(source, "bytes", field="id")[5]


def test_collections_of_other_libraries_hold_text_too() -> None:
    import datasets
    import grain
    import pandas as pd
    import pyarrow as pa

    columns: dict[str, list[Any]] = {"id": [1, 2], "text": ["ab", "c"]}
    records = [{"text": text} for text in columns["text"]]
    for source in (
        records,
        pd.DataFrame(columns),
        pa.table(columns),
        # Not from_dict, which hashes with dill, which warns.
        datasets.Dataset(pa.table(columns), fingerprint="columns"),
        grain.MapDataset.source(records),
        grain.MapDataset.source(["AB", "C"]).map(str.lower),
    ):
        found = Tokenized(source, "bytes").__getitems__([1, 0])
        assert [tokens.tolist() for tokens in found] == [[99], [97, 98]], type(source)
    with pytest.raises(UserError, match=r"no column 'txt' with text\. Did you mean 'text'"):
        Tokenized(pd.DataFrame(columns), "bytes", field="txt")
    with pytest.raises(UserError, match=r"grain.IterDataset is not a dataset"):
        Tokenized(grain.MapDataset.source(records).to_iter_dataset(), "bytes")
    with pytest.raises(UserError, match="repeats without end"):
        Packed(grain.MapDataset.source([[1, 2]]).repeat(), 4)
    assert len(Packed(grain.MapDataset.source([[1, 2], [3]]), 4)) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: "gpt2", "tokenizer is 'gpt2': give 'bytes', .* Nothing is downloaded$"),
        (lambda folder: folder / "missing.json", "No such file .*missing.json"),
        (lambda folder: folder / "other.json", "other.json: not a file of Hugging Face's"),
        (lambda folder: folder / "other.model", "other.model: not a SentencePiece model"),
    ],
)
def test_what_is_no_tokenizer(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    for suffix in ("json", "model"):
        (tmp_path / f"other.{suffix}").write_text("{}")
    with pytest.raises(UserError, match=message):
        Tokenized(["a"], make(tmp_path))


@pytest.mark.parametrize("append", ["</s>", -1, 300, True, 1.0])
def test_a_last_token_that_is_none(append: Any, json_file: Path) -> None:
    with pytest.raises(UserError, match=rf"append is '?{append}"):
        Tokenized(["a"], json_file, append=append)
    assert Tokenized(["a"], json_file, append=299).vocabulary_size == 300


def test_what_has_no_random_access_is_refused() -> None:
    with pytest.raises(UserError, match="a list_iterator cannot be tokenized"):
        Tokenized(iter(["a"]), "bytes")


# -- packed documents: which tokens are in which row, and the share of real tokens -----------------


class Documents:
    """Documents of distinct tokens, with a record of the reads."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths_: list[int] = list(lengths)
        self.ends = np.cumsum([0, *lengths])
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths_)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.arange(self.ends[index], self.ends[index] + self.lengths_[index])

    def __getitems__(self, indices: list[int]) -> list[np.ndarray]:
        self.reads += indices
        return [self[index] for index in indices]


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60).filter(any)


@pytest.mark.slow
@given(lengths=LENGTHS, length=st.integers(1, 24), window=st.integers(1, 20), data=st.data())
@settings(deadline=None)
def test_every_token_is_in_one_row_with_its_document_and_position(
    lengths: list[int], length: int, window: int, data: st.DataObject
) -> None:
    documents = Documents(lengths)
    packed = Packed(documents, length, window)
    rows = packed.rows(np.arange(len(packed)))
    assert {name: (x.shape, str(x.dtype)) for name, x in rows.items()} == {
        "tokens": ((len(packed), length), "int32"),
        "segments": ((len(packed), length), "int32"),
        "positions": ((len(packed), length), "int32"),
        "weights": ((len(packed), length), "float32"),
    }
    real = rows["segments"] > 0
    np.testing.assert_array_equal(np.sort(rows["tokens"][real]), np.arange(sum(lengths)))
    assert packed.tokens == sum(lengths) and packed.empty == lengths.count(0)
    # A piece: a document and a row. Pieces start at multiples of the row's length.
    document = np.searchsorted(documents.ends, rows["tokens"], side="right") - 1
    offset = rows["tokens"] - documents.ends[document]
    np.testing.assert_array_equal((offset % length)[real], rows["positions"][real])
    for row in range(len(packed)):
        segments, count = rows["segments"][row], int(real[row].sum())
        assert real[row, :count].all() and count  # padding is at the end
        changes = np.diff(document[row, :count]) != 0
        np.testing.assert_array_equal(np.diff(segments[:count]), changes)
        assert segments[0] == 1
        assert len({*(document[row, :count] // window)}) == 1  # of one window
    np.testing.assert_array_equal(rows["weights"], (rows["positions"] > 0) & real)
    assert not any(rows[name][~real].any() for name in rows)
    assert packed.blocks[0] == 0 and packed.blocks[-1] == len(packed)
    assert (np.diff(packed.blocks) > 0).all() and len(packed.blocks) <= -(
        -len(lengths) // window
    ) + 1

    # The same rows in any order, and from another dataset of the same documents.
    indices = np.array(data.draw(st.lists(st.integers(0, len(packed) - 1), min_size=1)))
    for other in (packed, Packed(Documents(lengths), length, window)):
        for name, array in other.rows(indices).items():
            np.testing.assert_array_equal(array, rows[name][indices])


@given(lengths=st.lists(st.integers(1, 12), max_size=40), capacity=st.integers(12, 30))
def test_each_piece_is_in_the_fullest_row_that_has_room(lengths: list[int], capacity: int) -> None:
    lengths.sort(reverse=True)
    rows, count = best_fit(lengths, capacity)
    left: list[int] = []
    for length, row in zip(lengths, rows, strict=True):
        room = [space for space in left if space >= length]
        if row == len(left):
            assert not room
            left.append(capacity)
        else:
            assert left[row] == min(room)
        left[row] -= length
    assert count == len(left)


def log_normal(count: int) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(np.log(400), 1.0, count)
    return np.maximum(lengths.astype(np.int32), 1)


class Counted:
    """Documents whose lengths are known, and which are never read."""

    def __init__(self, counts: np.ndarray) -> None:
        self.counts = counts

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> np.ndarray:
        raise AssertionError(index)

    def lengths(self) -> np.ndarray:
        return self.counts


def test_windows_of_4096_log_normal_documents_fill_999_of_1000_tokens() -> None:
    lengths = log_normal(8 * 4096)
    packed = Packed(Counted(lengths), 2048)
    share = lengths.sum() / (len(packed) * 2048)
    assert 0.999 < share <= 1, share
    assert len(packed.blocks) == 9


def test_threads_read_the_same_rows() -> None:
    packed = Packed(Documents(np.minimum(log_normal(500), 300).tolist()), 128, window=64)
    expected = packed.rows(np.arange(len(packed)))["tokens"]
    again = pickle.loads(pickle.dumps(packed))  # as a worker process gets it
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda row: again.rows(np.array([row])), range(len(packed))))
    np.testing.assert_array_equal(np.concatenate([x["tokens"] for x in found]), expected)


def test_a_batch_reads_a_document_once_and_a_split_one_stays_in_memory() -> None:
    documents = Documents([1000, 3, 4])
    packed = Packed(documents, 10)
    documents.reads.clear()
    for start in range(0, len(packed), 7):
        packed.rows(np.arange(start, min(start + 7, len(packed))))
    assert sorted(documents.reads) == [0, 1, 2]


class InBlocks(Documents):
    """Documents that are read in blocks of 10, of which the last two are kept."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.blocks = np.arange(0, len(lengths) + 1, 10)
        self.cache = BlockCache[int](2)
        self.loaded: list[int] = []

    def __getitem__(self, index: int) -> np.ndarray:
        self.cache.get(index // 10, self.load)
        return super().__getitem__(index)

    def load(self, block: int) -> int:
        self.loaded.append(block)
        return block

    def reserve_blocks(self, count: int) -> None:
        self.cache.reserve(count)


def test_a_shuffled_epoch_holds_every_token_once_in_another_order_than_the_next() -> None:
    packed = Packed(Documents([3, 5, 30, 7, 9] * 40), 12, window=25)
    batches = TrainBatches(packed, 1, 0, True, 10**6, np.arange(1))
    epochs = []
    for first in (0, len(packed)):
        rows = [batches[step] for step in range(first, first + len(packed))]
        tokens = np.concatenate([row["tokens"][row["segments"] > 0] for row in rows])
        np.testing.assert_array_equal(np.sort(tokens), np.arange(packed.tokens))
        epochs.append(tokens)
    assert (epochs[0] != epochs[1]).mean() > 0.9


def test_a_shuffled_epoch_loads_the_blocks_of_a_window_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # an earlier scan leaves other blocks
    documents = InBlocks([3, 5, 6, 7, 9] * 200)
    packed = Packed(documents, 12, window=25)
    documents.loaded.clear()
    batches = TrainBatches(packed, 8, 0, True, 10**6, np.arange(8))
    for step in range(len(packed) // 8):
        batches[step]
    # The scan has left the last two. A block of two windows in distant groups is loaded twice.
    assert {*range(98)} <= {*documents.loaded}
    assert len(documents.loaded) <= 140, len(documents.loaded)


def document(length: int) -> WeightedTokens:
    return WeightedTokens(np.zeros(length, np.int32), np.ones(length, np.float32))


def test_the_documents_read_least_recently_are_dropped_first() -> None:
    kept = RecentDocuments(tokens=4)
    for index, length in enumerate((2, 1, 1)):
        kept.put(index, document(length))
    assert kept.find(0) is not None
    kept.put(3, document(2))
    assert [index for index in range(5) if kept.find(index) is not None] == [0, 3]
    kept.put(4, document(9))
    assert [index for index in range(5) if kept.find(index) is not None] == [4]


# -- the scan --------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, in which the result of every scan is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(files, "CACHE_DELAY", 0.0)
    return tmp_path / "spmdtrain" / "data"


def test_lengths_are_counted_once_and_cached_by_content(cache: Path) -> None:
    documents = Documents([5, 0, 7] * 50)
    lengths = document_lengths(documents)
    assert lengths.tolist() == [5, 0, 7] * 50
    assert len(documents.reads) == 150 + 16
    again = Documents([5, 0, 7] * 50)
    np.testing.assert_array_equal(document_lengths(again), lengths)
    assert len(again.reads) == 16  # the samples of its fingerprint alone
    document_lengths(Documents([5, 0, 8] * 50))
    assert len(list(cache.iterdir())) == 2

    (first, *_) = sorted(cache.iterdir(), key=lambda path: path.stat().st_mtime)
    content = bytearray(first.read_bytes())
    content[-4] ^= 1
    for corrupted in (bytes(content), b"", content[:70], content[:-4]):
        first.write_bytes(corrupted)
        np.testing.assert_array_equal(document_lengths(Documents([5, 0, 7] * 50)), lengths)


def test_rows_come_from_the_cached_counts_too(cache: Path) -> None:
    lengths = [5, 0, 7, 9] * 50
    first, second = (Packed(Documents(lengths), 16, window=20) for _ in range(2))
    assert sorted(path.name.partition("-")[0] for path in cache.iterdir()) == ["lengths", "rows"]
    np.testing.assert_array_equal(first.blocks, second.blocks)
    assert Packed(Documents(lengths), 16, window=30).blocks.tolist() != first.blocks.tolist()


def test_a_fingerprint_of_the_documents_tells_those_apart_whose_samples_are_equal(
    cache: Path,
) -> None:
    class Versioned(Documents):
        version = 1

        def fingerprint(self) -> str:
            return str(self.version)

    documents = Versioned([3] * 100)
    document_lengths(documents)
    documents.lengths_[50] = 2  # no sample
    assert document_lengths(documents)[50] == 3
    documents.version = 2
    assert document_lengths(documents)[50] == 2


def test_documents_that_have_changed_since_the_scan_are_named(cache: Path) -> None:
    documents = Documents([3] * 100)
    packed = Packed(documents, 8)
    documents.lengths_[50] = 2
    with pytest.raises(UserError, match=rf"document 50 has 2 tokens, but had 3 .* delete {cache}"):
        packed.rows(np.arange(len(packed)))


def test_tokens_may_be_in_a_field_of_records() -> None:
    records = [{"id": 7, "tokens": np.array([1, 2])}, {"id": 8, "tokens": np.array([3])}]
    packed = Packed(records, 3, field="tokens")
    assert packed.rows(np.array([0]))["tokens"].tolist() == [[1, 2, 3]]
    with pytest.raises(UserError, match=r"document 0 has fields \['id', 'tokens'\], but .* 'ids'"):
        Packed(records, 3, field="ids")


def test_packed_documents_are_a_dataset() -> None:
    packed = Packed([[1, 2, 3], [4]], 4)
    assert as_dataset(packed) is packed
    assert fingerprint(packed)["examples"] == 1
    assert packed.rows(np.array([0]))["tokens"].tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (
            ["a text"],
            r"document 0 is a str, not a 1-D array of tokens: Tokenized\(source, tokenizer\) "
            r"makes tokens of text, and Packed\(..., field=...\) takes those of a record$",
        ),
        ([[1], {"text": "a"}], "document 1 is a dict"),
        ([[1], [0.5]], r"document 1 is float64\[1\]"),
        ([np.ones((2, 2), int)], r"document 0 is int64\[2, 2\]"),
        ([[1, 2**40]], "document 0 has tokens from 1 to 1099511627776: tokens are from 0"),
        ([[1], [-100, 2]], "document 1 has tokens from -100 to 2: tokens are from 0 to 2147483647"),
        ([[], []], "the 2 documents to pack have no tokens"),
        ([], "the 0 documents to pack have no tokens"),
        (iter([[1]]), "a list_iterator cannot be packed"),
        (Counted(np.ones((2, 2), int)), r"lengths\(\) of a Counted returned int64\[2, 2\]"),
        (Counted(np.array([1, -1])), r"returned int64\[2\] for 2 documents"),
    ],
)
def test_what_cannot_be_packed(documents: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Packed(documents, 8)


@pytest.mark.parametrize("name", ["length", "window"])
@pytest.mark.parametrize("value", [0, 2.5, True])
def test_lengths_and_windows_are_positive_numbers(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{name} is {value}: it must be a number of at least 1"):
        Packed([[1]], **({"length": 8} | {name: value}))
