"""Text as tokens: tokenizers from files, the end of documents, and records without text."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain import Packed, ParquetSource, Tokenized, UserError
from spmdtrain.data.text import load_tokenizer

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
