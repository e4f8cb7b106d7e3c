"""Lines, paragraphs and JSON records of text files, by index."""

import contextlib
import gzip
import hashlib
import itertools
import json
import operator
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from spmdtrain.data.sources.files import (
    SUMMED,
    BlockCache,
    Files,
    LocalReader,
    SourceFile,
    delayed_progress,
    find_files,
)
from spmdtrain.errors import (
    BadRecordError,
    StorageError,
    UserError,
    did_you_mean,
    import_extra,
    printable,
)
from spmdtrain.record.storage import failures, is_url, one_line
from spmdtrain.record.user_folders import cache_folder, locked, make_folder, replaced

# -- Scanners that find where the examples of a text begin, from pieces of it ----------------------

_NONE = np.zeros(0, np.int64)
_LF, _CR = 10, 13


class Scanner(Protocol):
    """A scan of a text in pieces. Examples without content are left out."""

    def feed(self, piece: bytes) -> np.ndarray:
        """Returns where examples begin, int64, without those that were returned before.

        `piece` has the next bytes of the text, at least one.
        """
        ...

    def finish(self) -> np.ndarray:
        """Returns where the other examples begin."""
        ...


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


# -- The positions of the examples in text files: one scan, kept in the user's cache folder --------
#
# A compressed or remote file is copied, decompressed, to the same folder by that scan, because it
# has no random access.

_PIECE = 2**20  # bytes that are scanned at once
# Compressed bytes that a zstd decompressor gets at once. They become at most 128 MiB, because a
# block has at least 4 bytes, and at most 128 KiB of content.
_FED = 2**12
_MB = 10**6
_VERSION = 3  # of the cached files: increased if their content changes
_SECONDS = 2 * 10**9  # ns: the coarsest time of modification of a file system


@dataclass(frozen=True)
class IndexedText:
    """A text file with random access.

    Attributes:
      source: The file that was given.
      text: The same file, or its decompressed copy.
      offsets: A file of int64: the positions in `text` at which the examples begin, its size, the
        CRC-32 of each `SUMMED` bytes of a copy, the size again, and a CRC-32 of all these.
    """

    source: SourceFile
    text: SourceFile
    offsets: SourceFile

    @property
    def count(self) -> int:
        """Number of examples."""
        return self.offsets.size // 8 - 3 - self._parts

    def sums(self) -> np.ndarray:
        """Returns the CRC-32 of each `SUMMED` bytes of a copy, int64; none for other files."""
        with self.offsets.open() as content:
            content.seek(8 * (self.count + 1))
            return np.frombuffer(content.read(8 * self._parts), "<i8")

    @property
    def is_copy(self) -> bool:
        """Whether `text` is a copy."""
        return self.text.path != self.source.path

    @property
    def _parts(self) -> int:
        return -(-self.text.size // SUMMED) if self.is_copy else 0


def index_files(
    files: Sequence[SourceFile],
    make_scanner: Callable[[], Scanner],
    key: str,
    cache_dir: str | os.PathLike[str] | None,
) -> list[IndexedText]:
    """Returns text files with the positions of their examples, from the cache if possible.

    Args:
      files: The files: plain, or compressed by gzip or zstd; local or remote.
      key: What the scanner depends on.
      cache_dir: The folder for positions and decompressed copies. The default is the folder `data`
        in the user's cache folder.

    Raises:
      UserError: If a file is corrupted, or the folder is not a local one.
      StorageError: If a file cannot be read, or the folder cannot be written.
    """
    if cache_dir is None:
        folder = cache_folder() / "data"
    elif is_url(os.fspath(cache_dir)) or os.fspath(cache_dir) == "":
        raise UserError(f"cache_dir is {os.fspath(cache_dir)!r}: it must be a local folder")
    else:
        folder = Path(cache_dir).expanduser()
    try:
        make_folder(folder)
    except OSError as error:
        raise StorageError(f"cache_dir: {one_line(error)}: choose another folder") from error
    if not folder.is_dir():
        raise UserError(f"cache_dir: {printable(folder)} is not a folder")
    indexed, done = [], 0
    with delayed_progress("indexing (MB)", sum(file.size for file in files) // _MB) as advance:
        for file in files:
            each = _Index(file, folder, key)
            indexed.append(each.get(make_scanner, partial(_advance, advance, done)))
            done += file.size
    return indexed


def _advance(advance: Callable[[int], None], before: int, read: int) -> None:
    advance((before + read) // _MB)


class _Index:
    """The cached files of a text file."""

    def __init__(self, file: SourceFile, folder: Path, key: str) -> None:
        where = file.path if is_url(file.path) else os.path.realpath(file.path)
        digest = hashlib.sha256(f"{_VERSION} {where} {file.size} {file.version}".encode())
        self._file = file
        self._codec = _codec(file)
        # All kinds of examples share the copy.
        copy = folder / f"text-{digest.hexdigest()}"
        self._text = Path(file.path) if self._codec is None else copy
        digest.update(key.encode())
        self._offsets = folder / f"offsets-{digest.hexdigest()}"
        # The time of modification that a copy is given. It differs if anything else writes to it.
        self._copied = file.version // _SECONDS * _SECONDS

    def get(
        self, make_scanner: Callable[[], Scanner], advance: Callable[[int], None]
    ) -> IndexedText:
        """Returns the index. Of several processes on this machine one computes it."""
        try:
            if (found := self._load()) is not None:
                return found
            with locked(self._offsets, f"indexing {self._file}"):
                if (found := self._load()) is None:
                    self._scan(make_scanner(), advance)
                    found = self._load()
        except (StorageError, UserError):
            raise
        except OSError as error:
            raise StorageError(
                f"{self._file}: its index cannot be written to {printable(self._offsets.parent)}: "
                f"{one_line(error)}: free some space, or choose another folder, cache_dir=..."
            ) from error
        if found is None:
            raise StorageError(f"{self._file}: its index has been removed from {self._offsets}")
        return found

    def _load(self) -> IndexedText | None:
        """Returns the index; None if there is none, or it or the copy of the text is corrupted."""
        try:
            (offsets,) = find_files(self._offsets, (), "")
            size = self._checked_size()
            text = self._file
            if self._codec is not None:
                (text,) = find_files(self._text, (), "")
                if text.version != self._copied:
                    return None
        except (UserError, OSError):
            return None
        return IndexedText(self._file, text, offsets) if size == text.size else None

    def _checked_size(self) -> int | None:
        """Returns the size of the text according to the index; None if its CRC-32 is wrong."""
        crc, last = self._initial_crc(), b""
        with open(self._offsets, "rb") as content:
            left = os.fstat(content.fileno()).st_size - 8
            while left > 0 and (piece := content.read(min(_PIECE, left))):
                crc, last, left = zlib.crc32(piece, crc), piece, left - len(piece)
            intact = int.from_bytes(content.read(9), "little") == crc
        return int.from_bytes(last[-8:], "little") if intact else None

    def _initial_crc(self) -> int:
        return zlib.crc32(self._offsets.name.encode())

    def _copy_is_intact(self) -> bool:
        """Returns whether there is a copy to which nothing else has written."""
        try:
            (copy,) = find_files(self._text, (), "")
        except (UserError, OSError):
            return False
        return copy.version == self._copied

    def _scan(self, scanner: Scanner, advance: Callable[[int], None]) -> None:
        """Reads the file once, and writes the positions of its examples and, if needed, a copy."""
        # Another kind of examples may have made the copy, with which other runs may be training.
        copied = self._codec is not None and not self._copy_is_intact()
        crc, total, sums = self._initial_crc(), 0, list[int]()
        with (
            contextlib.closing(self._file.open(whole=True)) as content,
            replaced(self._offsets) as offsets,
            replaced(self._text, self._copied) if copied else contextlib.nullcontext() as text,
        ):
            for piece in self._pieces(content):
                if text is not None:
                    text.write(piece)
                if self._codec is not None:
                    _add_to_sums(sums, total, piece)
                found = scanner.feed(piece).astype("<i8").tobytes()
                offsets.write(found)
                crc, total = zlib.crc32(found, crc), total + len(piece)
                advance(content.tell())
            found = np.array([*scanner.finish(), total, *sums, total], "<i8").tobytes()
            offsets.write(found + zlib.crc32(found, crc).to_bytes(8, "little"))
            self._file.check_unchanged()

    def _pieces(self, content: IO[bytes]) -> Iterator[bytes]:
        """Yields the decompressed content of the file."""
        try:
            yield from _CODECS[self._codec](content)
        except (EOFError, zlib.error, gzip.BadGzipFile, _Corrupted) as error:
            raise UserError(
                f"{self._file}: cannot be decompressed: {one_line(error)}. The file is truncated "
                "or corrupted: write it again, or leave it out"
            ) from error
        except failures(self._file.path) as error:
            if isinstance(error, UserError):
                raise
            self._file.fail(error)


def _add_to_sums(sums: list[int], position: int, piece: bytes) -> None:
    """Adds the bytes of a copy from a position on to the CRC-32 of its parts."""
    for start in range(position - position % SUMMED, position + len(piece), SUMMED):
        if start >= position:
            sums.append(0)
        part = memoryview(piece)[max(start - position, 0) : start - position + SUMMED]
        sums[-1] = zlib.crc32(part, sums[-1])


# -- compression -----------------------------------------------------------------------------------


class _Corrupted(Exception):
    """Content that cannot be decompressed."""


def _codec(file: SourceFile) -> str | None:
    """Returns the compression of a file, "copy" for a plain remote one, None for a plain local one.

    It is detected by content: neither gzip nor zstd begins like UTF-8.
    """
    with contextlib.closing(file.open()) as content:
        try:
            magic = content.read(4)
        except failures(file.path) as error:
            file.fail(error)
    for codec, suffix, begins in (
        ("gzip", ".gz", b"\x1f\x8b"),
        ("zstd", ".zst", b"\x28\xb5\x2f\xfd"),
    ):
        if magic.startswith(begins) or file.path.lower().endswith(suffix):
            return codec
    return "copy" if is_url(file.path) else None


def _plain(content: IO[bytes]) -> Iterator[bytes]:
    while piece := content.read(_PIECE):
        yield piece


def _gunzipped(content: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=content) as file:
        while piece := file.read(_PIECE):
            yield piece


def _unzstd(file: IO[bytes]) -> Iterator[bytes]:
    zstandard = import_extra("zstandard", "zstd", "files compressed by zstd")
    # The stream readers of this library end silently within a truncated frame.
    frame: Any = None
    try:
        while fed := file.read(_FED):
            while fed:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                content = memoryview(frame.decompress(fed))
                for start in range(0, len(content), _PIECE):
                    yield bytes(content[start : start + _PIECE])
                fed = frame.unused_data if frame.eof else b""
                if frame.eof:
                    frame = None
    except zstandard.ZstdError as error:
        raise _Corrupted(error) from error
    if frame is not None:
        raise _Corrupted("the last frame is not complete")


_CODECS: dict[str | None, Callable[[IO[bytes]], Iterator[bytes]]] = {
    None: _plain,
    "copy": _plain,
    "gzip": _gunzipped,
    "zstd": _unzstd,
}
