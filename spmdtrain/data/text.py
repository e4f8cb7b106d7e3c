"""Text as tokens: a source of records with text as a source of documents."""

import hashlib
import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmdtrain.data.datasets import blocks_of
from spmdtrain.data.documents import check_source
from spmdtrain.data.indexable import read_examples
from spmdtrain.data.libraries import known_as
from spmdtrain.data.tokenizer import ByteTokenizer, load_tokenizer
from spmdtrain.errors import BadRecordError, UserError, did_you_mean, printable


class Tokenized:
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

    def __len__(self) -> int:
        return len(self.source)

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

    def fingerprint(self) -> str:
        """Returns a hash of the tokenizer, the options, and the source's fingerprint if any."""
        parts = [self._tokenizer.fingerprint, self.field, self.append]
        if hasattr(self.source, "fingerprint"):
            parts.append(self.source.fingerprint())
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int) -> str:
        """Returns the name of a record for messages: its number, and its file if known.

        Args:
          index: The number of the record.
        """
        if hasattr(self.source, "describe"):
            return f"{self.source.describe(index)} (record {index})"
        return f"record {index}"

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
