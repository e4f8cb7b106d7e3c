"""Parts of files by index: one scan finds their positions, and copies what has no random access."""

import contextlib
import gzip
import hashlib
import itertools
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
    scan_folder,
)
from spmdtrain.errors import StorageError, UserError, import_extra, printable
from spmdtrain.record.storage import failures, is_url, one_line
from spmdtrain.record.user_folders import locked, make_folder, replaced


class Scanner(Protocol):
    """A scan of a file in pieces. Examples without content are left out."""

    def feed(self, piece: bytes) -> np.ndarray:
        """Returns where examples begin, int64, without those that were returned before.

        `piece` has the next bytes of the file, at least one. Raises `Corrupted`.
        """
        ...

    def finish(self) -> np.ndarray:
        """Returns where the other examples begin; raises `Corrupted`."""
        ...


class Corrupted(Exception):
    """Content that cannot be decompressed or divided; the message says why."""


LARGE = 2**30
"""Bytes of content from which on a source has blocks."""

BLOCK = 2**22
"""Bytes of a block."""


class IndexedParts:
    """Parts of files by index.

    Args:
      files: The files: plain, or compressed by gzip or zstd.
      suffixes: The endings of their names in a folder, without those of compression.
      kind: What they are, for messages: `text files`.
      make_scanner: Returns the scanner of a file.
      key: What the scanner depends on.
      cache_dir: The folder for positions and copies; by default `data` in the user's cache folder.

    Attributes:
      blocks: int64 (m+1,), the parts at which blocks of about 4 MiB begin that are read together;
        None for files smaller than 1 GiB in all.

    Raises:
      UserError: If there are no such files, one is corrupted, or there is no part.
      StorageError: If a file cannot be read, or the folder cannot be written.
    """

    CONTENT = "text"
    thread_safe = True
    blocks: np.ndarray | None

    def __init__(
        self,
        files: Files,
        suffixes: Sequence[str],
        kind: str,
        make_scanner: Callable[[], Scanner],
        key: str,
        cache_dir: str | os.PathLike[str] | None,
    ) -> None:
        found = find_files(files, [s + c for s in suffixes for c in ("", ".gz", ".zst")], kind)
        self._key = key
        self._indexed = index_files(found, make_scanner, key, cache_dir)
        texts = [each.text for each in self._indexed]
        self._text = LocalReader(texts, [each.sums() for each in self._indexed])
        self._offsets = LocalReader([each.offsets for each in self._indexed])
        self._ends = np.cumsum([each.count for each in self._indexed])
        if not self._ends[-1]:
            where = "it" if len(found) == 1 else "any file"
            raise UserError(f"{found[0]}: no {self.CONTENT} in {where}")
        self._cache = BlockCache[tuple[np.ndarray, bytes]]()
        large = sum(each.text.size for each in self._indexed) >= LARGE
        self.blocks = self._make_blocks() if large else None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def fingerprint(self) -> str:
        """Returns a hash of the files' names, sizes and versions, and of what divides them."""
        files = [each.source for each in self._indexed]
        key = [(file.path, file.size, file.version) for file in files]
        return hashlib.sha256(repr((key, self._key)).encode()).hexdigest()

    def reserve_blocks(self, count: int) -> None:
        """Keeps at least this number of blocks in memory, if there are blocks.

        Args:
          count: Number of blocks.
        """
        self._cache.reserve(count)

    def describe(self, index: int) -> str:
        """Returns the file of an example and its number there, for messages.

        Args:
          index: The number of the example.
        """
        file, number = self._place(index)
        return f"{self._indexed[file].source}: record {number:,}"

    def _parts(self, indices: Sequence[int]) -> list[tuple[bytes, int]]:
        """Returns parts, and where they begin in their files. Consecutive ones are read at once."""
        numbers = np.asarray(indices, np.int64)
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self)):
            raise IndexError(f"examples {numbers.min()} to {numbers.max()} of {len(self)}")
        ends = self._ends if self.blocks is None else self.blocks[1:]
        units = np.searchsorted(ends, numbers, side="right")  # files or blocks
        cuts = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(units) != 0)) + 1
        parts: list[tuple[bytes, int]] = []
        for start, stop in itertools.pairwise([0, *cuts.tolist(), len(numbers)]):
            if start < stop:
                parts += self._consecutive(int(numbers[start]), stop - start)
        return parts

    def _consecutive(self, first: int, count: int) -> list[tuple[bytes, int]]:
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
        return [(content[start - begin : stop - begin], start) for start, stop in cuts]

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


# -- The positions of the examples in files: one scan, kept in the user's cache folder -------------
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
        folder = scan_folder()
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
                    try:
                        self._scan(make_scanner(), advance)
                    except Corrupted as error:
                        raise UserError(
                            f"{self._file}: {error}. The file is truncated, corrupted or of "
                            "another format: write it again, or leave it out"
                        ) from error
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
        except (EOFError, zlib.error, gzip.BadGzipFile, Corrupted) as error:
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
        raise Corrupted(error) from error
    if frame is not None:
        raise Corrupted("the last frame is not complete")


_CODECS: dict[str | None, Callable[[IO[bytes]], Iterator[bytes]]] = {
    None: _plain,
    "copy": _plain,
    "gzip": _gunzipped,
    "zstd": _unzstd,
}
