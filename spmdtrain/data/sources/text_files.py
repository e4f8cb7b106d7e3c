"""Lines, paragraphs and other parts of text files, and JSON records, by index."""

import hashlib
import itertools
import json
import operator
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from spmdtrain.data.sources.block_cache import BlockCache
from spmdtrain.data.sources.files import Files, find_files
from spmdtrain.data.sources.local_reader import LocalReader
from spmdtrain.data.sources.text_cuts import LineScanner, Scanner, SeparatorScanner
from spmdtrain.data.sources.text_index import index_files
from spmdtrain.errors import BadRecordError, UserError, did_you_mean, printable
from spmdtrain.record.storage import is_url

LARGE = 2**30
"""Bytes of text from which on a source has blocks."""

BLOCK = 2**22
"""Bytes of a block."""

_COUNTED = 2**22  # bytes whose lines are counted at once
_BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"


class _TextParts:
    """Parts of text files by index.

    Attributes:
      blocks: int64 (m+1,), the parts at which blocks of about 4 MiB begin that are read together;
        None for texts smaller than 1 GiB in all.
    """

    blocks: np.ndarray | None

    def __init__(
        self,
        files: Files,
        suffixes: Sequence[str],
        kind: str,
        separator: str,
        cache_dir: str | os.PathLike[str] | None,
    ) -> None:
        found = find_files(files, [s + c for s in suffixes for c in ("", ".gz", ".zst")], kind)
        self._separator = separator
        self._indexed = index_files(found, partial(_scanner, separator), separator, cache_dir)
        texts = [each.text for each in self._indexed]
        self._text = LocalReader(texts, [each.sums() for each in self._indexed])
        self._offsets = LocalReader([each.offsets for each in self._indexed])
        self._ends = np.cumsum([each.count for each in self._indexed])
        if not self._ends[-1]:
            raise UserError(f"{found[0]}: no text in {'it' if len(found) == 1 else 'any file'}")
        self._cache = BlockCache[tuple[np.ndarray, bytes]]()
        large = sum(each.text.size for each in self._indexed) >= LARGE
        self.blocks = self._make_blocks() if large else None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fingerprint(self) -> str:
        """Returns a hash of the files' names, sizes and versions, and of the separator."""
        files = [each.source for each in self._indexed]
        key = [(file.path, file.size, file.version) for file in files]
        return hashlib.sha256(repr((key, self._separator)).encode()).hexdigest()

    def reserve_blocks(self, count: int) -> None:
        """Keeps at least this number of blocks in memory, if there are blocks.

        Args:
          count: Number of blocks.
        """
        self._cache.reserve(count)

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

    def _parts(self, indices: Sequence[int]) -> list[str]:
        """Returns parts of the text. Consecutive ones are read at once."""
        numbers = np.asarray(indices, np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"examples {numbers.min()} to {numbers.max()} of {len(self)}")
        ends = self._ends if self.blocks is None else self.blocks[1:]
        units = np.searchsorted(ends, numbers, side="right")  # files or blocks
        cuts = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(units) != 0)) + 1
        parts = []
        for start, stop in itertools.pairwise([0, *cuts.tolist(), len(numbers)]):
            if start < stop:
                parts += self._consecutive(int(numbers[start]), stop - start)
        return parts

    def _consecutive(self, first: int, count: int) -> list[str]:
        """Returns consecutive parts of one file, or of one block."""
        file, number = self._place(first)
        if self.blocks is None:
            positions = self._positions(file, number, number + count)
            begin = int(positions[0])
            content = self._text.read(file, begin, int(positions[-1]) - begin)
        else:
            block = int(np.searchsorted(self.blocks, first, side="right")) - 1
            positions, content = self._cache.get(block, self._read_block)
            begin = int(positions[0])
            positions = positions[first - self.blocks[block] :][: count + 1]
            self._text.check(file)
        indexed = self._indexed[file]
        if indexed.is_copy and not is_url(indexed.source.path):
            indexed.source.check_unchanged()
        cuts = itertools.pairwise(positions.tolist())
        return [
            self._decoded(content[start - begin : stop - begin], first + number, start == 0)
            for number, (start, stop) in enumerate(cuts)
        ]

    def _decoded(self, content: bytes, index: int, is_first: bool) -> str:
        if self._separator not in ("\n", "\n\n"):
            content = content.split(self._separator.encode(), 1)[0].strip(b"\r\n")
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise BadRecordError(f"{self.describe(index)}: not UTF-8: {error}") from error
        return text.removeprefix(_BOM if is_first else "").rstrip("\r\n")

    def _place(self, index: int) -> tuple[int, int]:
        """Returns the file of a part and its number there."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, index - int(self._ends[file]) + self._indexed[file].count

    def _positions(self, file: int, first: int, last: int) -> np.ndarray:
        """Returns where the parts `first` to `last` of a file begin; int64 (last - first + 1,)."""
        return np.frombuffer(self._offsets.read(file, 8 * first, 8 * (last - first + 1)), "<i8")

    def _make_blocks(self) -> np.ndarray:
        blocks = [0]
        for file, each in enumerate(self._indexed):
            positions = self._positions(file, 0, each.count)
            cuts = np.searchsorted(positions[:-1], np.arange(0, each.text.size, BLOCK))
            first = int(self._ends[file]) - each.count
            blocks += [first + cut for cut in [*np.unique(cuts).tolist(), each.count]]
        return np.unique(np.array(blocks, np.int64))

    def _read_block(self, block: int) -> tuple[np.ndarray, bytes]:
        """Returns the positions of the parts of a block, and its text."""
        assert self.blocks is not None
        first, last = self.blocks[block : block + 2].tolist()
        file, number = self._place(first)
        positions = self._positions(file, number, number + last - first)
        start, stop = int(positions[0]), int(positions[-1])
        return positions, self._text.read(file, start, stop - start)


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
        return [{"text": text} for text in self._parts(indices)]


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
        texts = self._parts(indices)
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
        return {name: _array_or(record[name]) for name in self._fields or record}


def _array_or(value: Any) -> Any:
    """Returns a list of numbers as an array, and any other value as it is."""
    if not isinstance(value, list) or not isinstance(value[:1] and value[0], (int, float, list)):
        return value
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # lists of different lengths
        return value
    return array if array.dtype.kind in "biuf" else value


def _scanner(separator: str) -> Scanner:
    if separator in ("\n", "\n\n"):
        return LineScanner(paragraphs=separator == "\n\n")
    return SeparatorScanner(separator.encode())
