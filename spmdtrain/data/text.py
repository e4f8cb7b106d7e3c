"""Text as tokens: documents, tokenizers, and rows of packed documents."""

import hashlib
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spmdtrain.data.datasets import HuggingFaceDataset, blocks_of, from_library, known_as
from spmdtrain.data.examples import BatchedDataset, describe, read_examples
from spmdtrain.data.order import BLOCKS_PER_GROUP
from spmdtrain.data.sources.files import (
    BlockCache,
    cached_scan,
    delayed_progress,
    scan_folder,
    source_key,
)
from spmdtrain.errors import BadRecordError, UserError, did_you_mean, import_extra, printable
from spmdtrain.record.storage import one_line

# -- Text as tokens: a source of records with text as a source of documents ------------------------


class FromRecords:
    """Documents that are made of the records of a source, one of each record.

    Attributes:
      source: The records.
    """

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    @property
    def blocks(self) -> np.ndarray | None:
        """The blocks of the source."""
        return blocks_of(self.source)

    def reserve_blocks(self, count: int) -> None:
        """Keeps at least this number of the source's blocks in memory, if it keeps any.

        Args:
          count: Number of blocks.
        """
        if hasattr(self.source, "reserve_blocks"):
            self.source.reserve_blocks(count)

    def describe(self, index: int) -> str:
        """Returns the name of a record for messages: its number, and its file if known.

        Args:
          index: The number of the record.
        """
        if hasattr(self.source, "describe"):
            return f"{self.source.describe(index)} (record {index})"
        return f"record {index}"

    def _hash(self, *parts: Any) -> str:
        """Returns a hash of what makes the documents, and of the source's fingerprint if any."""
        if hasattr(self.source, "fingerprint"):
            parts = (*parts, self.source.fingerprint())
        return hashlib.sha256(repr([*parts]).encode()).hexdigest()


class Tokenized(FromRecords):
    """The text of a source's records as tokens, one document for each record.

    Item i is the tokens of record i, int32 (n,). `Packed` makes rows of fixed length of them.

    Args:
      source: A table of pandas, Polars or Arrow; or an object with `__len__` and
        `__getitem__(int)`, and optionally `__getitems__(list of int)`, `blocks`, `fingerprint()`
        and `describe(int)`, which names a record in messages. A record is a dictionary with text
        in one field, or the text itself; text is `str` or UTF-8 `bytes`.
      tokenizer: "bytes", a file of Hugging Face's tokenizers (`.json`), or a SentencePiece model
        (`.model`). Nothing is downloaded.
      field: The field with the text, for records that are dictionaries.
      append: A token at the end of every document, so that a model learns where one ends: its
        name, such as `</s>`, or its number. With "bytes", 256 is a number that no byte has. The
        default is none.

    Attributes:
      source: The records; of a table, the texts of its column.
      field: The field with the text.
      append: The number of the last token of every document, or None.
      vocabulary_size: Tokens are from 0 to `vocabulary_size` - 1.

    Raises:
      UserError: If the tokenizer cannot be loaded, or does not have the token `append`.
    """

    def __init__(
        self,
        source: Any,
        tokenizer: str | os.PathLike[str],
        field: str = "text",
        *,
        append: str | int | None = None,
    ) -> None:
        self.source, self.field = _records(source, field), field
        self._tokenizer = load_tokenizer(tokenizer)
        self.vocabulary_size = self._tokenizer.vocabulary_size
        self.append = None if append is None else self._end(append)

    def _end(self, append: str | int) -> int:
        """Returns the number of the token that ends documents."""
        size = self.vocabulary_size
        if isinstance(append, str):
            if (token := self._tokenizer.token(append)) is None:
                raise UserError(
                    f"append is {printable(append)!r}: the tokenizer has no such token. Give the "
                    f"name of one, or a number from 0 to {size - 1}"
                )
            return token
        if isinstance(self._tokenizer, ByteTokenizer):
            size += 1
        if isinstance(append, bool) or not isinstance(append, int) or not 0 <= append < size:
            raise UserError(f"append is {append!r}: tokens are numbers from 0 to {size - 1}")
        self.vocabulary_size = max(self.vocabulary_size, append + 1)
        return append

    def __getitem__(self, index: int) -> np.ndarray:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Returns several documents by their numbers. Their texts are tokenized together.

        Raises:
          BadRecordError: If a record cannot be read, has no text, or cannot be tokenized.
        """
        indices = list(indices)
        records = read_examples(self.source, indices)
        texts = [self._text(record, i) for i, record in zip(indices, records, strict=True)]
        try:
            documents = self._tokenizer.encode(texts)
        except Exception:
            self._find_failing(texts, indices)
            raise
        if self.append is None:
            return documents
        end = np.array([self.append], np.int32)
        return [np.concatenate([document, end]) for document in documents]

    def fingerprint(self) -> str:
        """Returns a hash of the tokenizer, the options, and the source's fingerprint if any."""
        return self._hash(self._tokenizer.fingerprint, self.field, self.append)

    def encode(self, text: str) -> np.ndarray:
        """Returns the tokens of a text, such as a prompt, int32 (n,). Appends no token.

        Args:
          text: The text.
        """
        return self._tokenizer.encode([text])[0]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Returns the text of tokens.

        Args:
          tokens: Integers (n,). The text ends before the first token `append`.
        """
        numbers = [int(token) for token in tokens]
        if self.append is not None and self.append in numbers:
            numbers = numbers[: numbers.index(self.append)]
        return self._tokenizer.decode(numbers)

    def _text(self, record: Any, index: int) -> str:
        """Returns the text of a record. Raises `BadRecordError` if there is none."""
        value = record
        if isinstance(record, dict):
            if self.field not in record:
                names = [printable(name) for name in record]
                raise BadRecordError(
                    f"{self.describe(index)}: there is no field {printable(self.field)!r} with "
                    f"text.{did_you_mean(self.field, names)} Give its name: "
                    "Tokenized(source, tokenizer, field=...)"
                )
            value = record[self.field]
        if isinstance(value, str):
            return value
        if not isinstance(value, bytes):
            where = f"field {printable(self.field)!r}" if value is not record else "the record"
            raise BadRecordError(
                f"{self.describe(index)}: {where} is {type(value).__name__}, not text (str or "
                "UTF-8 bytes)"
            )
        if isinstance(self._tokenizer, ByteTokenizer):
            return value.decode("utf-8", "surrogateescape")
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRecordError(
                f"{self.describe(index)}: text that is not UTF-8: {error}"
            ) from error

    def _find_failing(self, texts: Sequence[str], indices: Sequence[int]) -> None:
        """Raises `BadRecordError` for the first text that cannot be tokenized alone."""
        for text, index in zip(texts, indices, strict=True):
            try:
                self._tokenizer.encode([text])
            except Exception as error:
                reason = " ".join(str(error).split())
                raise BadRecordError(
                    f"{self.describe(index)}: cannot be tokenized: {reason}"
                ) from error


def _records(source: Any, field: str) -> Any:
    """Returns the records of a source, which for a table are the texts of a column."""
    names = known_as(source)
    if not names & {"pandas.DataFrame", "polars.DataFrame", "pyarrow.Table", "pyarrow.RecordBatch"}:
        check_source(source, "tokenized")
        return source
    is_arrow = "pyarrow.Table" in names or "pyarrow.RecordBatch" in names
    columns = [str(name) for name in (source.schema.names if is_arrow else source.columns)]
    if field not in columns:
        raise UserError(
            f"the table has no column {printable(field)!r} with text.{did_you_mean(field, columns)}"
        )
    return source[field].to_pylist() if is_arrow else source[field].to_list()


# -- Tokenizers: text to tokens and back, from a file or byte by byte ------------------------------

_BYTES = 256


class Tokenizer(Protocol):
    """Text to tokens and back.

    Attributes:
      vocabulary_size: Tokens are from 0 to `vocabulary_size` - 1.
      fingerprint: A text that differs for tokenizers with different tokens.
    """

    vocabulary_size: int
    fingerprint: str

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of each text, int32 (n,)."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        ...

    def token(self, name: str) -> int | None:
        """Returns the token with this name, such as `</s>`; None if there is none."""
        ...


def load_tokenizer(tokenizer: str | os.PathLike[str]) -> Tokenizer:
    """Returns a tokenizer.

    It is "bytes"; a file of Hugging Face's tokenizers, `.json`; or a SentencePiece model, `.model`.
    Nothing is downloaded.

    Raises:
      UserError: If there is no such file, it is not a tokenizer, or its library is not installed.
    """
    name = os.fspath(tokenizer)
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.suffix not in (".json", ".model"):
        raise UserError(
            f"tokenizer is {printable(name)!r}: give 'bytes', a file of Hugging Face's tokenizers "
            "(tokenizer.json), or a SentencePiece model (.model). Nothing is downloaded"
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"tokenizer: {one_line(error)}") from error
    if path.suffix == ".json":
        return JsonTokenizer(path, content)
    return SentencePieceTokenizer(path, content)


class ByteTokenizer:
    """UTF-8 bytes as tokens."""

    vocabulary_size = _BYTES
    fingerprint = "bytes"

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        contents = [text.encode("utf-8", "surrogateescape") for text in texts]
        return [np.frombuffer(content, np.uint8).astype(np.int32) for content in contents]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < _BYTES).decode("utf-8", "replace")

    def token(self, name: str) -> int | None:
        content = name.encode()
        return content[0] if len(content) == 1 else None

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns tokens, and the first and last + 1 character of each, int32 (n, 2)."""
        spans = []
        for text in texts:
            sizes = [len(char.encode("utf-8", "surrogateescape")) for char in text]
            first = np.repeat(np.arange(len(text), dtype=np.int32), sizes)
            spans.append(np.stack([first, first + 1], axis=-1))
        return list(zip(self.encode(texts), spans, strict=True))


class JsonTokenizer:
    """A tokenizer of Hugging Face's library `tokenizers`.

    Special tokens are not added, and texts are neither cut nor padded, whatever the file says:
    packing and the end-of-document token are the dataset's.

    Raises:
      UserError: If it is not a tokenizer, or the library is not installed.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        library = import_extra("tokenizers", "tokenizers", "tokenizer files")
        try:
            self._tokenizer = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises no class of its own
            raise UserError(
                f"tokenizer: {printable(path)}: not a file of Hugging Face's tokenizers: "
                f"{one_line(error)}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary_size = _size(self._tokenizer)
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def token(self, name: str) -> int | None:
        token: int | None = self._tokenizer.token_to_id(name)
        return token

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns tokens, and the first and last + 1 character of each, int32 (n, 2)."""
        # Not `encode_batch_fast`, which does not count characters.
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(each.ids, np.int32), np.array(each.offsets, np.int32).reshape(-1, 2))
            for each in found
        ]


def _size(tokenizer: Any) -> int:
    # Not `get_vocab_size`, which counts the tokens: their numbers may have gaps.
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


class SentencePieceTokenizer:
    """A SentencePiece model.

    Raises:
      UserError: If it is not a SentencePiece model, or the library is not installed.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        library = import_extra("sentencepiece", "sentencepiece", "SentencePiece models")
        try:
            self._model = library.SentencePieceProcessor(model_proto=content)
        except Exception as error:  # the library raises no class of its own
            raise UserError(
                f"tokenizer: {printable(path)}: not a SentencePiece model: {one_line(error)}"
            ) from error
        self.vocabulary_size = int(self._model.get_piece_size())
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(tokens, np.int32) for tokens in self._model.encode(list(texts))]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._model.decode(list(tokens))
        return text

    def token(self, name: str) -> int | None:
        token = int(self._model.piece_to_id(name))
        return token if self._model.id_to_piece(token) == name else None


# -- Documents: random access to 1-D arrays of tokens, and the lengths of all of them --------------

_BATCH = 1024  # documents read at once by a scan
_LARGEST = np.iinfo(np.int32).max
_COUNTING = "counting tokens"


def check_source(source: Any, what: str) -> None:
    """Raises `UserError` if a source has no random access to single records.

    `what` is the purpose of the source, for messages: "packed".
    """
    checked = from_library(source)  # streams, and what Grain's MapDataset must not do
    if isinstance(checked, BatchedDataset):
        raise UserError(
            f"a {describe(source)} cannot be {what}: its items are batches. Give the source from "
            "which it makes them"
        )
    if checked is not source and not isinstance(checked, HuggingFaceDataset):
        raise UserError(f"a {describe(source)} cannot be {what}: give Tokenized(table, tokenizer)")
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise UserError(
            f"a {type(source).__name__} cannot be {what}: give an object with __len__ and "
            "__getitem__(int), whose items are single documents"
        )


@dataclass(frozen=True)
class WeightedTokens:
    """A document whose tokens have weights in the loss, as `Chat` makes them.

    Attributes:
      tokens: int32 (n,).
      weights: f32 (n,), the weight of the prediction of each token.
    """

    tokens: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def read_documents(
    documents: Any, indices: Sequence[int], field: str | None = None
) -> list[np.ndarray]:
    """Reads documents, several at once if `documents` has `__getitems__`: int32 (n,) each.

    `documents` has 1-D arrays of integers, `WeightedTokens`, or records that hold one in `field`.

    Raises:
      UserError: If a document cannot be read, or is not a 1-D array of integers that fit int32.
    """
    return [document.tokens for document in read_weighted(documents, indices, field)]


def read_weighted(
    documents: Any, indices: Sequence[int], field: str | None = None
) -> list[WeightedTokens]:
    """Reads documents with the weights of their tokens, which are 1 if the documents have none."""
    indices = [int(index) for index in indices]
    if not indices:
        return []
    read = []
    for document, index in zip(read_examples(documents, indices), indices, strict=True):
        if isinstance(document, WeightedTokens):
            read.append(document)
        else:
            tokens = _tokens(document, index, field)
            read.append(WeightedTokens(tokens, np.ones(len(tokens), np.float32)))
    return read


def _tokens(document: Any, index: int, field: str | None) -> np.ndarray:
    if field is not None:
        if not isinstance(document, dict) or field not in document:
            has = f"fields {list(document)}" if isinstance(document, dict) else "no fields"
            raise UserError(f"document {index} has {has}, but field is {printable(field)!r}")
        document = document[field]
    tokens = None if isinstance(document, (str, bytes, dict)) else np.asarray(document)
    if tokens is not None and tokens.size == 0 and tokens.ndim == 1:
        return np.zeros(0, np.int32)  # an empty list is an array of floats
    if tokens is None or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        given = f"a {type(document).__name__}" if tokens is None else f"{tokens.dtype}"
        shape = "" if tokens is None else f"{list(tokens.shape)}"
        raise UserError(
            f"document {index} is {given}{shape}, not a 1-D array of tokens: "
            "Tokenized(source, tokenizer) makes tokens of text, and Packed(..., field=...) takes "
            "those of a record"
        )
    if not np.can_cast(tokens.dtype, np.uint16) and (
        int(tokens.min()) < 0 or tokens.max() > _LARGEST
    ):
        raise UserError(
            f"document {index} has tokens from {tokens.min()} to {tokens.max()}: tokens are from 0 "
            f"to {_LARGEST}"
        )
    return tokens.astype(np.int32, copy=False)


def document_lengths(documents: Any, field: str | None = None) -> np.ndarray:
    """Returns the number of tokens of every document: int32 (number of documents,), read-only.

    They come from `documents.lengths()` if there is such a method. If not, all documents are read
    once by one process of each machine, and the result is cached in the user's cache folder by
    their `source_key`. The arguments are as for `read_documents`.

    Raises:
      UserError: If a document is not an array of tokens, or `lengths()` does not return as many
        numbers as there are documents.
    """
    count = len(documents)
    if hasattr(documents, "lengths"):
        lengths = np.asarray(documents.lengths())
        good = lengths.shape == (count,) and lengths.dtype.kind in "iu"
        if not good or (count and (lengths.min() < 0 or lengths.max() > _LARGEST)):
            raise UserError(
                f"lengths() of a {type(documents).__name__} returned {lengths.dtype}"
                f"{list(lengths.shape)} for {count} documents: it must return the number of tokens "
                "of each"
            )
        lengths = lengths.astype(np.int32, copy=False).view()
        lengths.flags.writeable = False
        return lengths

    def scan() -> np.ndarray:
        lengths = np.zeros(count, np.int32)
        with delayed_progress(_COUNTING, count) as advance:
            for start in range(0, count, _BATCH):
                indices = range(start, min(start + _BATCH, count))
                found = read_documents(documents, indices, field)
                lengths[start : start + _BATCH] = [len(tokens) for tokens in found]
                advance(start + len(found))
        return lengths

    key = source_key(documents, lambda indices: _contents(documents, indices, field), field)
    return cached_scan("lengths", key, scan, _COUNTING)


def _contents(documents: Any, indices: Sequence[int], field: str | None) -> list[bytes]:
    return [tokens.tobytes() for tokens in read_documents(documents, indices, field)]


# -- Packing: several documents in each row of a fixed number of tokens ----------------------------

_ALGORITHM = 1  # changes with the result of `best_fit`, whose row counts are cached
# Threads that read ahead may be in the next group of shuffled windows.
_WINDOWS_READ = 2 * BLOCKS_PER_GROUP
_DOCUMENTS_SHOWN = 5  # names in the description of a row
_WINDOWS_KEPT = 4 * _WINDOWS_READ  # assignments, of 50 kB each for 4,096 documents
_TOKENS_KEPT = 2**24  # of documents longer than a row, which several rows need


def best_fit(lengths: Iterable[int], capacity: int) -> tuple[list[int], int]:
    """Assigns each piece to the fullest row that has room for it, or to a new row.

    Returns the row of each piece, and the number of rows. Pieces have 1 to `capacity` tokens; in
    descending order of their lengths this is best-fit-decreasing bin packing.
    """
    rows_with: dict[int, list[int]] = {}  # by number of free tokens
    spaces = 0  # bit n is set if a row has n free tokens
    assigned, count = [], 0
    for length in lengths:
        if large_enough := spaces >> length:
            space = length + (large_enough & -large_enough).bit_length() - 1
            rows = rows_with[space]
            row = rows.pop()
            if not rows:
                spaces ^= 1 << space
        else:
            row, space = count, capacity
            count += 1
        assigned.append(row)
        if left := space - length:
            rows_with.setdefault(left, []).append(row)
            spaces |= 1 << left
    return assigned, count


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents: a document, or a part of one that is longer than a row.

    Attributes:
      documents: The number of each piece's document, integers (n,).
      starts: The piece's first token within the document, int32 (n,).
      sizes: Tokens of the piece, int32 (n,).
    """

    documents: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


@dataclass(frozen=True)
class Assignment:
    """The rows of one window.

    Attributes:
      pieces: The pieces of all rows, ordered by row, with the numbers of documents in the window.
      first: The first piece of each row, then the number of pieces, int64 (rows + 1,).
    """

    pieces: Pieces
    first: np.ndarray


def assign(lengths: np.ndarray, capacity: int) -> Assignment:
    """Assigns the documents of a window to rows. Documents longer than a row are split.

    `lengths` are the tokens of each document, int32 (n,); `capacity` is the tokens of a row.
    """
    counts = -(-lengths // capacity)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    first_piece = np.cumsum(counts) - counts
    starts = (np.arange(len(documents)) - first_piece[documents]) * capacity
    sizes = np.minimum(lengths[documents] - starts, capacity)
    order = np.argsort(-sizes, kind="stable")
    rows, count = best_fit(sizes[order].tolist(), capacity)
    by_row = np.argsort(rows, kind="stable")
    first = np.searchsorted(np.asarray(rows, np.int64)[by_row], np.arange(count + 1))
    order = order[by_row]
    pieces = Pieces(documents[order], starts[order].astype(np.int32), sizes[order].astype(np.int32))
    return Assignment(pieces, first)


class RecentDocuments:
    """A thread-safe LRU cache of documents. Pickling drops its content.

    Its capacity is in tokens. The most recent document is kept even if it is longer.
    """

    def __init__(self, tokens: int) -> None:
        self._limit = tokens
        self._documents: OrderedDict[int, WeightedTokens] = OrderedDict()
        self._tokens, self._lock = 0, threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), (self._limit,)

    def find(self, index: int) -> WeightedTokens | None:
        """Returns a document; None if it is not cached."""
        with self._lock:
            if index in self._documents:
                self._documents.move_to_end(index)
            return self._documents.get(index)

    def put(self, index: int, document: WeightedTokens) -> None:
        """Caches a document, and drops the least recently used ones beyond the capacity."""
        with self._lock:
            if index in self._documents:
                return
            self._documents[index] = document
            self._tokens += len(document)
            while self._tokens > self._limit and len(self._documents) > 1:
                self._tokens -= len(self._documents.popitem(last=False)[1])


class Packed:
    """Documents packed into rows of a fixed number of tokens, as a dataset.

    The documents are divided into windows of consecutive documents. Best-fit-decreasing packs the
    documents of a window into as few rows as possible. A document longer than a row is split into
    pieces of at most a row; in each piece positions begin at 0. A document without tokens is left
    out.

    Rows are a function of the lengths of all documents, which are read once and cached: see
    `document_lengths`. Only the number of rows of each window is kept; the assignment of a window
    is computed when one of its rows is read. Each token is in exactly one row, whatever the order
    in which the rows are read.

    Windows have `window` documents each and ignore block boundaries, so small blocks do not leave
    rows half empty. A window reads at most one block more than its documents fill. If the documents
    have `reserve_blocks(count)`, they keep the blocks of a group of shuffled windows in memory: 16
    windows, with documents of 2 kB about 130 MB.

    A row is a dictionary: `tokens`, int32 (length,); `segments`, int32 (length,), 1 for the first
    document of the row, 2 for the second and so on, 0 for padding; `positions`, int32 (length,),
    within the piece; `weights`, f32 (length,), 1 where a token is predicted from earlier tokens of
    its document (position > 0), else 0. Documents of a `Chat` have the weight 1 only for tokens of
    the assistant.

    Args:
      documents: A source of 1-D arrays of integers: an object with `__len__` and
        `__getitem__(int)`, and optionally `__getitems__(list of int)`, `lengths()` (the number of
        tokens of every document) and `fingerprint()` (a text that changes with the documents).
      length: Tokens of a row.
      window: Number of documents that are packed together.
      field: The field with the tokens, if the documents are records: dictionaries.

    Attributes:
      documents: The documents.
      length: Tokens of a row.
      window: Number of documents that are packed together.
      field: The field with the tokens, or None.
      blocks: int64 (m + 1,), the first row of each window that has rows, then the number of rows.
      empty: Number of documents without tokens.
      tokens: Number of tokens of all documents.

    Raises:
      UserError: If an argument is invalid, a document is not an array of tokens, or none has any.
    """

    def __init__(
        self, documents: Any, length: int, window: int = 4096, *, field: str | None = None
    ) -> None:
        for name, value in (("length", length), ("window", window)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise UserError(f"{name} is {value!r}: it must be a number of at least 1")
        check_source(documents, "packed")
        self.documents, self.length, self.window = documents, int(length), int(window)
        self.field = field
        self._lengths = document_lengths(documents, field)
        self.tokens = int(self._lengths.sum(dtype=np.int64))
        self.empty = len(self._lengths) - int(np.count_nonzero(self._lengths))
        if not self.tokens:
            raise UserError(f"the {len(self._lengths)} documents to pack have no tokens")
        self._first_rows = np.concatenate([[0], np.cumsum(self._row_counts(), dtype=np.int64)])
        self.blocks = np.unique(self._first_rows)
        self._reserve_blocks()
        self._assignments: BlockCache[Assignment] = BlockCache(_WINDOWS_KEPT)
        self._long_documents = RecentDocuments(_TOKENS_KEPT)

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Reads rows.

        Args:
          indices: Their numbers, int (n,).

        Returns:
          `tokens`, `segments`, `positions`, all int32 (n, length), and `weights`, f32 (n, length).

        Raises:
          UserError: If a document has another length than when all lengths were read.
        """
        indices = np.asarray(indices, np.int64)
        pieces, counts = self._pieces(indices)
        sizes = pieces.sizes
        read, of_piece = np.unique(pieces.documents, return_inverse=True)
        texts = self._read(read)
        starts = pieces.starts.tolist()
        parts = [
            (texts[i], slice(start, start + size))
            for i, start, size in zip(of_piece.tolist(), starts, sizes.tolist(), strict=True)
        ]
        tokens = np.concatenate([text.tokens[part] for text, part in parts])

        number = np.arange(len(sizes)) - np.repeat(np.cumsum(counts) - counts, counts)
        row_of = np.repeat(np.arange(len(indices)), counts)
        filled = np.bincount(row_of, sizes, minlength=len(indices))
        is_token = np.arange(self.length) < filled[:, None]
        shape = (len(indices), self.length)
        found = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")}
        found["tokens"][is_token] = tokens
        found["segments"][is_token] = np.repeat(number + 1, sizes)
        found["positions"][is_token] = np.arange(len(tokens)) - np.repeat(
            np.cumsum(sizes) - sizes, sizes
        )
        weights = np.zeros(shape, np.float32)
        weights[is_token] = np.concatenate([text.weights[part] for text, part in parts])
        return found | {"weights": np.where(found["positions"] > 0, weights, np.float32(0))}

    def describe(self, index: int) -> str:
        """Returns the names of the documents of a row.

        Args:
          index: The number of the row.
        """
        pieces, _ = self._pieces(np.array([index]))
        numbers = np.unique(pieces.documents).tolist()
        describe = getattr(self.documents, "describe", "document {}".format)
        shown = "; ".join(str(describe(number)) for number in numbers[:_DOCUMENTS_SHOWN])
        more = len(numbers) - _DOCUMENTS_SHOWN
        return f"{shown}; and {more} more" if more > 0 else shown

    def _reserve_blocks(self) -> None:
        """Reserves cache for the blocks of one group of shuffled windows."""
        blocks = blocks_of(self.documents)
        if blocks is None or not hasattr(self.documents, "reserve_blocks"):
            return
        starts = np.arange(0, len(self._lengths), self.window)
        ends = np.minimum(starts + self.window, len(self._lengths))
        first = np.searchsorted(blocks, starts, side="right") - 1
        last = np.searchsorted(blocks, ends - 1, side="right") - 1
        self.documents.reserve_blocks(_WINDOWS_READ * int((last - first + 1).max()))

    def _pieces(self, indices: np.ndarray) -> tuple[Pieces, np.ndarray]:
        """Returns the pieces of rows, with numbers of documents, and how many each row has."""
        windows = np.searchsorted(self._first_rows, indices, side="right") - 1
        within = indices - self._first_rows[windows]
        documents, starts, sizes = [], [], []
        for window, row in zip(windows.tolist(), within.tolist(), strict=True):
            found = self._assignments.get(window, self._assign)
            pieces, of_row = found.pieces, slice(*found.first[row : row + 2])
            documents.append(pieces.documents[of_row] + np.int64(window * self.window))
            starts.append(pieces.starts[of_row])
            sizes.append(pieces.sizes[of_row])
        counts = np.array([len(row) for row in sizes])
        return Pieces(*map(np.concatenate, (documents, starts, sizes))), counts

    def _lengths_of(self, window: int) -> np.ndarray:
        return self._lengths[window * self.window : (window + 1) * self.window]

    def _assign(self, window: int) -> Assignment:
        return assign(self._lengths_of(window), self.length)

    def _row_counts(self) -> np.ndarray:
        """Returns the number of rows of each window."""

        def count_rows() -> np.ndarray:
            counts = np.zeros(-(-len(self._lengths) // self.window), np.int32)
            with delayed_progress("packing", len(counts)) as advance:
                for window in range(len(counts)):
                    counts[window] = len(self._assign(window).first) - 1
                    advance(window + 1)
            return counts

        key = hashlib.sha256(f"{_ALGORITHM} {self.length} {self.window}\n".encode())
        key.update(self._lengths.data)
        return cached_scan("rows", key.digest(), count_rows, "packing")

    def _read(self, indices: np.ndarray) -> list[WeightedTokens]:
        """Reads documents; those longer than a row are kept for the rows of their other pieces."""
        lengths = self._lengths[indices]
        texts: dict[int, WeightedTokens] = {}
        for index in indices[lengths > self.length].tolist():
            if (kept := self._long_documents.find(index)) is not None:
                texts[index] = kept
        missing = [index for index in indices.tolist() if index not in texts]
        for index, text in zip(
            missing, read_weighted(self.documents, missing, self.field), strict=True
        ):
            if len(text) != self._lengths[index]:
                raise UserError(
                    f"document {index} has {len(text)} tokens, but had {self._lengths[index]} when "
                    "all documents were counted: they have changed since then. If this is "
                    f"intended, delete {scan_folder()} and start again"
                )
            texts[index] = text
            if len(text) > self.length:
                self._long_documents.put(index, text)
        return [texts[index] for index in indices.tolist()]
