"""Lines, paragraphs and JSON records of text files, by index."""

import json
import operator
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from spmdtrain.data.examples import array_or_value
from spmdtrain.data.sources.files import Files
from spmdtrain.data.sources.indexed_parts import IndexedParts, Scanner
from spmdtrain.errors import BadRecordError, UserError, did_you_mean, printable

# -- Scanners that find where the examples of a text begin, from pieces of it ----------------------

_NONE = np.zeros(0, np.int64)
_LF, _CR = 10, 13


class LineScanner:
    """A scanner for lines that are not empty, or for paragraphs: lines between empty ones.

    A line ends with LF or CR LF.
    """

    def __init__(self, *, paragraphs: bool) -> None:
        self._paragraphs = paragraphs
        self._after_empty = True  # whether the previous line is empty, or there is none
        self._position = 0  # of the next piece
        self._start = 0  # of the line that is not complete
        self._last = 0  # byte of the previous piece

    def feed(self, piece: bytes) -> np.ndarray:
        content = np.frombuffer(piece, np.uint8)
        ends = np.flatnonzero(content == _LF)
        # The byte before each end.
        before = content[ends - 1]
        if len(ends) and ends[0] == 0:
            before[0] = self._last
        ends += self._position
        self._position, self._last = self._position + len(piece), piece[-1]
        if not len(ends):
            return _NONE
        starts = np.concatenate([[self._start], ends[:-1] + 1])
        self._start = int(ends[-1]) + 1
        return self._examples(starts, ends - starts, before)

    def finish(self) -> np.ndarray:
        length = self._position - self._start
        return self._examples(np.array([self._start]), np.array([length]), np.array([self._last]))

    def _examples(self, starts: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        empty = (lengths == 0) | ((lengths == 1) & (last == _CR))
        chosen = ~empty
        if self._paragraphs:
            chosen &= np.concatenate([[self._after_empty], empty[:-1]])
            self._after_empty = bool(empty[-1])
        return starts[chosen]


class SeparatorScanner:
    """A scanner for the texts between separators that hold more than white space."""

    def __init__(self, separator: bytes) -> None:
        self._separator = separator
        self._rest = b""  # the end of the previous pieces, where a separator may begin
        self._position = 0  # of `_rest`
        self._start = 0  # of the example that is not complete
        self._has_text = False  # whether it holds more than white space, before `_rest`

    def feed(self, piece: bytes) -> np.ndarray:
        content, found, begin = self._rest + piece, [], 0
        while (end := content.find(self._separator, begin)) >= 0:
            if self._has_text or content[begin:end].strip():
                found.append(self._start)
            begin = end + len(self._separator)
            self._start, self._has_text = self._position + begin, False
        kept = max(begin, len(content) - len(self._separator) + 1)
        self._has_text = self._has_text or bool(content[begin:kept].strip())
        self._rest, self._position = content[kept:], self._position + kept
        return np.array(found, np.int64)

    def finish(self) -> np.ndarray:
        has_text = self._has_text or bool(self._rest.strip())
        return np.array([self._start] if has_text else [], np.int64)


# -- Lines, paragraphs and other parts of text files, and JSON records, by index -------------------

_COUNTED = 2**22  # bytes whose lines are counted at once
_BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"


class _TextParts(IndexedParts):
    """Parts of text files by index."""

    def __init__(
        self,
        files: Files,
        suffixes: Sequence[str],
        kind: str,
        separator: str,
        cache_dir: str | os.PathLike[str] | None,
    ) -> None:
        self._separator = separator
        make_scanner = partial(_scanner, separator)
        super().__init__(files, suffixes, kind, make_scanner, separator, cache_dir)

    def describe(self, index: int) -> str:
        """Returns the file of an example and its line there, for messages.

        Args:
          index: The number of the example.
        """
        file, number = self._place(index)
        (position,) = self._positions(file, number, number).tolist()
        line = 1
        for start in range(0, position, _COUNTED):
            line += self._text.read(file, start, min(_COUNTED, position - start)).count(b"\n")
        return f"{self._indexed[file].source}: line {line:,}"

    def _texts(self, indices: Sequence[int]) -> list[str]:
        """Returns parts of the text."""
        parts = zip(self._parts(indices), indices, strict=True)
        return [self._decoded(content, index, start == 0) for (content, start), index in parts]

    def _decoded(self, content: bytes, index: int, is_first: bool) -> str:
        if self._separator not in ("\n", "\n\n"):
            content = content.split(self._separator.encode(), 1)[0].strip(b"\r\n")
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise BadRecordError(f"{self.describe(index)}: not UTF-8: {error}") from error
        return text.removeprefix(_BOM if is_first else "").rstrip("\r\n")


class TextSource(_TextParts):
    """The lines or paragraphs of text files as examples: `{"text": str}`.

    One scan finds where they begin; the positions are cached in the user's cache folder, 8 bytes
    each. Files compressed by gzip or zstd, and remote files, are copied there, decompressed. Empty
    lines are skipped.

    Args:
      files: A file, a folder, a pattern, or a list of these: UTF-8, plain, `.gz` or `.zst`.
      separator: The text between examples. The default is the end of a line; with a blank line,
        an empty line between lines, examples are paragraphs. Any other text, such as
        `<|endoftext|>`, is not part of the examples, nor are the ends of lines around it.
      cache_dir: The local folder for positions and copies. The default is `data` in the user's
        cache folder.

    Raises:
      UserError: If there are no such files, one cannot be decompressed, or there is no text.
      StorageError: If a file cannot be read, or the folder cannot be written.
    """

    def __init__(
        self,
        files: Files,
        separator: str = "\n",
        *,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(separator, str) or not separator:
            raise UserError(
                f"separator is {separator!r}: it must be text, such as '\\n' for lines or '\\n\\n' "
                "for paragraphs"
            )
        super().__init__(files, (".txt", ".text"), "text files", separator, cache_dir)

    def __getitem__(self, index: int) -> dict[str, str]:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, str]]:
        """Returns several examples by their numbers."""
        return [{"text": text} for text in self._texts(indices)]


class JsonLinesSource(_TextParts):
    """The lines of JSON Lines files as examples: dictionaries of their values.

    Lists of numbers are arrays, int64 or float64. The files are indexed as by `TextSource`.

    Args:
      files: A file, a folder, a pattern, or a list of these: plain, `.gz` or `.zst`.
      fields: Names of the fields to keep, which each line must have. The default is all.
      cache_dir: The local folder for positions and copies. The default is `data` in the user's
        cache folder.

    Raises:
      UserError: If there are no such files, one cannot be decompressed, or there is no text.
      StorageError: If a file cannot be read, or the folder cannot be written.
    """

    def __init__(
        self,
        files: Files,
        fields: Sequence[str] | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(fields, str) or (fields is not None and not len(fields)):
            raise UserError(f"fields is {fields!r}: it must be a list of names, or None for all")
        super().__init__(files, (".jsonl", ".ndjson"), "JSON Lines files", "\n", cache_dir)
        self._fields = None if fields is None else tuple(fields)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns several examples by their numbers."""
        texts = self._texts(indices)
        return [self._record(text, index) for text, index in zip(texts, indices, strict=True)]

    def _record(self, text: str, index: int) -> dict[str, Any]:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadRecordError(f"{self.describe(index)}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise BadRecordError(
                f"{self.describe(index)}: holds {type(record).__name__}, not an object with "
                'fields: each line must be as {"text": "..."}'
            )
        for field in self._fields or ():
            if field not in record:
                raise BadRecordError(
                    f"{self.describe(index)}: there is no field {printable(field)!r}."
                    f"{did_you_mean(field, record)}"
                )
        return {name: array_or_value(record[name]) for name in self._fields or record}


def _scanner(separator: str) -> Scanner:
    if separator in ("\n", "\n\n"):
        return LineScanner(paragraphs=separator == "\n\n")
    return SeparatorScanner(separator.encode())
