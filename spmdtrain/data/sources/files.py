"""The files of a source: paths, local reads, cached blocks, scans of all records."""

import collections
import contextlib
import functools
import glob
import hashlib
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, TypeVar, cast

import numpy as np
from etils import epath

from spmdtrain.data.order import BLOCKS_PER_GROUP
from spmdtrain.distributed import process_group
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import StorageError, UserError, printable
from spmdtrain.record.storage import (
    failures,
    file_system,
    is_url,
    one_line,
    scheme_of,
    size_and_version,
)
from spmdtrain.record.user_folders import cache_folder, keep_file, locked, make_folder

# -- The files of a source: their paths in order, and a check that they have not changed since -----

FilePath = str | os.PathLike[str]
Files = FilePath | Sequence[FilePath]
"""A file, a folder, a pattern with `*`, `?` or `[...]`, or a list of these."""

_PATTERN = frozenset("*?[")
_SMALL = 2**20  # bytes of a file whose digest is of all of it
_PARTS, _PART = 8, 2**15  # number and bytes of the parts of a larger one, the first and last too
_THREADS = 16  # which read these, because a network file system answers slowly


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, as it was when the source was created.

    Attributes:
      path: A local path, or a URL.
      version: The time of modification of a local file in ns; the generation of an object,
        or a digest of its ETag.
      changed: The time at which content or attributes of a local file changed, in ns.
      inode: The number of a local file in its file system.
      digest: The digest of a local file's content, or of parts of it, if it is large.
    """

    path: str
    size: int
    version: int
    changed: int = 0
    inode: int = 0
    digest: str = ""
    # The last time of change at which the content was that of the digest.
    _compared: list[int] = field(default_factory=list, compare=False, repr=False)

    def __str__(self) -> str:
        return printable(self.path)

    def check_unchanged(self) -> None:
        """Checks that the file still exists and is the same.

        Raises:
          StorageError: If it does not exist, or cannot be read.
          UserError: If it has changed.
        """
        try:
            found = _status(self.path)
        except Exception:  # this is called with each read, and a context manager costs as much
            with self._failures():
                raise
        self._compare(*found)

    def open(self, *, whole: bool = False) -> IO[bytes]:
        """Opens the file for reading; the caller closes it.

        Args:
          whole: Whether it is read from the beginning to the end. Then an object is read ahead;
            otherwise its library requests the ranges that are read, and no other bytes.

        Raises:
          StorageError: If it does not exist, or cannot be read.
          UserError: If it has changed.
        """
        if not is_url(self.path):
            self.check_unchanged()
            with self._failures():
                return open(self.path, "rb")
        with self._failures():
            cache = "readahead" if whole else "none"
            content: Any = file_system(self.path).open(self.path, "rb", cache_type=cache)
            found = size_and_version(content.details)
        self._compare(*found)
        return cast("IO[bytes]", content)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raises failures of storage as `StorageError`."""
        try:
            yield
        except UserError:
            raise
        except FileNotFoundError as error:
            raise StorageError(
                f"{self}: the file has been removed since the run started: restore it, and start "
                "again"
            ) from error
        except failures(self.path) as error:
            self.fail(error)

    def with_digest(self) -> "SourceFile":
        """Returns the file with the digest of its content, unless it is an object.

        The generation identifies an object's content. `StorageError` if the file cannot be read.
        """
        if is_url(self.path):
            return self
        with self._failures():
            return replace(self, digest=_digest(self.path, self.size))

    def _compare(self, size: int, version: int, changed: int = 0, inode: int = 0) -> None:
        same = (size, version) == (self.size, self.version)
        if same and (changed == self.changed or changed in self._compared):
            return
        # A writer can set the time of modification, as `cp -p` does, but not that of a change,
        # which is also that of new permissions, of another name, and of a further link of a backup.
        how = "the same size, but another version"
        if size != self.size:
            how = f"{self.size:,} bytes at the start, {size:,} now"
        elif same and inode != self.inode:
            how = "the same size and time of modification, but another file (inode)"
        elif same:
            how = "the same size and time of modification, but another time of change (ctime)"
            with self._failures():
                if _digest(self.path, self.size) == self.digest:
                    self._compared[:] = [changed]
                    return
                how += " and other content"
        raise UserError(
            f"{self}: the file has changed since the run started ({how}): start again. Files "
            "must not change while a run reads them"
        )

    def fail(self, error: Exception) -> NoReturn:
        """Raises `StorageError` for a failure of storage."""
        raise StorageError(f"{self}: cannot be read: {one_line(error)}") from error


def listed(files: Any) -> list[Any]:
    """Returns the paths that a user has given, one or a list of them. They may have wrong types."""
    one = isinstance(files, (str, bytes, os.PathLike)) or not isinstance(files, Iterable)
    return [files] if one else list(files)


def find_files(files: Files, suffixes: Sequence[str], kind: str) -> tuple[SourceFile, ...]:
    """Returns the files of a source, local or at URLs.

    Folders are searched at any depth; names that begin with `.` or `_` are ignored. The files of a
    folder or of a pattern are sorted by path; a list keeps its order.

    Args:
      suffixes: Endings of the names that a folder is searched for.
      kind: What the files are, for messages: `Parquet files`.

    Raises:
      UserError: If nothing is found, a file is given twice, or one is not a regular file.
      StorageError: If a folder or file cannot be read.
    """
    found: list[SourceFile] = []
    for given in listed(files):
        if not isinstance(given, (str, os.PathLike)) or os.fspath(given) == "":
            raise UserError(
                f"{kind}: {given!r} is not a path: give a file, a folder, a pattern such as "
                f"data/*{suffixes[0]}, or a list of these"
            )
        path = os.fspath(given)
        if not is_url(path):
            path = os.fspath(epath.Path(path).expanduser())
        try:
            found += _files_at(path, suffixes, kind)
        except failures(path) as error:
            if isinstance(error, UserError):
                raise
            raise StorageError(f"{printable(path)}: cannot be read: {one_line(error)}") from error
    if not found:
        raise UserError(f"{kind}: the list of files is empty: give at least one")
    seen = set()
    for file in found:
        place = file.path if is_url(file.path) else os.path.realpath(file.path)
        if place in seen:
            raise UserError(f"{file}: given twice, so its examples would be read twice an epoch")
        seen.add(place)
    if len(found) == 1:
        return (found[0].with_digest(),)
    with ThreadPoolExecutor(_THREADS) as pool:
        return tuple(pool.map(SourceFile.with_digest, found))


def _files_at(path: str, suffixes: Sequence[str], kind: str) -> list[SourceFile]:
    """Returns the files at a path, in a folder, or of a pattern."""
    is_pattern = not _PATTERN.isdisjoint(path)
    if is_url(path):
        store = file_system(path)
        is_pattern = is_pattern and not store.isfile(path)
        if is_pattern:
            found = _objects(scheme_of(path), store.glob(path, detail=True))
        else:
            found = _in_bucket(store, path)
    elif os.path.isdir(path):
        is_pattern = False
        found = [_source_file(each) for each in _in_folder(path, suffixes)]
    elif is_pattern and not os.path.lexists(path):  # the name of a file may hold a `[`
        matches = glob.glob(path, recursive=True)
        found = [_source_file(each) for each in matches if not os.path.isdir(each)]
    else:
        return [_source_file(path)]
    if not found:
        why = "no file matches this pattern" if is_pattern else "no such file or folder"
        if not is_url(path) and not is_pattern:
            why = f"the folder holds no {kind} ({', '.join(suffixes)})"
        raise UserError(f"{printable(path)}: {why}")
    if not is_pattern and found[0].path != path:
        found = [file for file in found if _ends_with(file.path, suffixes)]
        if not found:
            raise UserError(
                f"{printable(path)}: the folder holds no {kind} ({', '.join(suffixes)})"
            )
    return sorted(found, key=lambda file: file.path)


_SHARD = re.compile(r"-\d+-of-\d+(?=$|\.(?:gz|zst)$)")


def _ends_with(path: str, suffixes: Sequence[str]) -> bool:
    """Returns whether a path has one of the endings, perhaps before `-00000-of-00010`."""
    return _SHARD.sub("", path.lower()).endswith(tuple(suffixes))


def _in_folder(path: str, suffixes: Sequence[str]) -> Iterator[str]:
    """Yields the visible files of a local folder with these endings, at any depth."""
    for folder, names in _visible_folders(path):
        for name in filter(_is_visible, names):
            if _ends_with(name, suffixes):
                yield os.path.join(folder, name)


def _visible_folders(path: str) -> Iterator[tuple[str, list[str]]]:
    """Yields folders and the names in them; symbolic links are followed, each folder once."""

    def fail(error: OSError) -> NoReturn:
        raise error

    seen = {os.path.realpath(path)}

    def is_new(folder: str) -> bool:
        real = os.path.realpath(folder)
        return not (real in seen or seen.add(real))  # type: ignore[func-returns-value]

    for folder, folders, names in os.walk(path, onerror=fail, followlinks=True):
        visible = sorted(filter(_is_visible, folders))
        folders[:] = [name for name in visible if is_new(os.path.join(folder, name))]
        yield folder, names


def _is_visible(name: str) -> bool:
    return not name.startswith((".", "_"))


def _in_bucket(store: Any, url: str) -> list[SourceFile]:
    """Returns the visible objects below a URL, or the object with this URL."""
    folder = url.partition("://")[2].rstrip("/")
    return [
        file
        for file in _objects(scheme_of(url), store.find(url, detail=True))
        if all(map(_is_visible, file.path.partition(folder)[2].strip("/").split("/")))
    ]


def _objects(scheme: str, found: dict[str, dict[str, Any]]) -> list[SourceFile]:
    return [
        SourceFile(f"{scheme}://{name}", *size_and_version(status))
        for name, status in found.items()
        if status["type"] == "file"
    ]


def _source_file(path: str) -> SourceFile:
    try:
        return SourceFile(path, *_status(path))
    except FileNotFoundError:
        raise UserError(f"{printable(path)}: no such file") from None


def _status(path: str) -> tuple[int, int, int, int]:
    """Returns size, version, time of change and inode of a file."""
    if is_url(path):
        return *size_and_version(file_system(path).info(path)), 0, 0
    local = os.stat(path)
    if not stat.S_ISREG(local.st_mode):  # opening a pipe would block
        raise UserError(f"{printable(path)}: not a regular file")
    return local.st_size, local.st_mtime_ns, local.st_ctime_ns, local.st_ino


def _digest(path: str, size: int) -> str:
    """Returns a digest of a local file's content, or of parts of it, if it is large."""
    found = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as content:
        if size <= _SMALL:
            found.update(content.read(_SMALL))
        for part in range(_PARTS if size > _SMALL else 0):
            found.update(os.pread(content.fileno(), _PART, part * (size - _PART) // (_PARTS - 1)))
    return found.hexdigest()


# -- Reads of parts of local files, by several threads at once -------------------------------------

SUMMED = 2**16
"""Bytes of a part of a file that has a checksum."""

_OPEN_FILES = 64  # kept open; the limit of a process is often 1,024


class LocalReader:
    """Local files, opened on first use. Memory does not grow with what is read.

    A memory map would need no calls, but a file that is truncated while it is mapped ends the
    process with SIGBUS, and the pages that were read count as memory of the process. Each read
    compares the file with what it was when the source was created.

    Args:
      sums: For each file that is a copy that can be made again, the CRC-32 of each `SUMMED` bytes,
        integers, which are compared on the first read of this part; empty for other files. The
        default is for no copies.
    """

    def __init__(self, files: Sequence[SourceFile], sums: Sequence[np.ndarray] = ()) -> None:
        self._files = files
        self._sums = sums or [np.zeros(0, np.int64) for _ in files]
        self._compared = [np.zeros(len(each), bool) for each in self._sums]
        self._open: BlockCache[_Descriptor] = BlockCache(_OPEN_FILES)

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Returns `size` bytes from `offset` on of a file, given by its number.

        Raises:
          UserError: If the file has changed, or ends before.
          StorageError: If it cannot be read, or is a corrupted copy.
        """
        if len(self._sums[file]):
            for part in range(offset // SUMMED, -(-(offset + size) // SUMMED)):
                self._compare(file, part)
        content = self._read(file, offset, size)
        self._files[file].check_unchanged()
        return content

    def check(self, file: int) -> None:
        """Checks that a file whose content was read before has not changed (`check_unchanged`)."""
        self._files[file].check_unchanged()

    def _read(self, file: int, offset: int, size: int) -> bytes:
        opened, content = self._open.get(file, self._opened), b""
        while len(content) < size:  # Linux reads at most 2 GiB at once
            try:
                more = os.pread(opened.number, size - len(content), offset + len(content))
            except OSError as error:
                self._files[file].fail(error)
            if not more:
                raise UserError(
                    f"{self._files[file]}: the file has been truncated since the run started: "
                    f"{self._files[file].size:,} bytes at the start, {offset + len(content):,} now"
                )
            content = content + more if content else more
        return content

    def _compare(self, file: int, part: int) -> None:
        """Compares a part of a copy with its checksum, once."""
        if self._compared[file][part]:
            return
        copy, start = self._files[file], part * SUMMED
        content = self._read(file, start, min(SUMMED, copy.size - start))
        if zlib.crc32(content) != self._sums[file][part]:
            copy.check_unchanged()
            with contextlib.suppress(OSError):
                os.unlink(copy.path)
            raise StorageError(
                f"{copy}: this copy in the cache was corrupted after it was written, and has been "
                "removed: start again, and it is made from the original"
            )
        self._compared[file][part] = True

    def _opened(self, file: int) -> "_Descriptor":
        return _Descriptor(self._files[file])


class _Descriptor:
    """An open file, which is closed when no thread uses it any more."""

    def __init__(self, file: SourceFile) -> None:
        file.check_unchanged()
        try:
            self.number = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{file}: cannot be read: {error.strerror}") from error

    def __del__(self, close: Any = os.close) -> None:
        if hasattr(self, "number"):
            close(self.number)


# -- A cache of the blocks of a source that were read last, which threads share --------------------

CACHED_BLOCKS = 2 * BLOCKS_PER_GROUP
"""Default number of blocks: threads that read ahead may be in the next group of blocks."""

T = TypeVar("T")

_POOL_THREADS = (
    BLOCKS_PER_GROUP  # blocks in a bucket take long to arrive, and those of a group at once
)


class BlockCache(Generic[T]):
    """A cache of the last used blocks. If several threads need a block, one of them loads it.

    A copy in another process begins empty.
    """

    def __init__(self, size: int = CACHED_BLOCKS) -> None:
        self._size = size
        self._blocks: collections.OrderedDict[int, Future[T]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockCache, (self._size,)

    def reserve(self, size: int) -> None:
        """Keeps at least this number of blocks from now on."""
        with self._lock:
            self._size = max(self._size, size)

    def prefetch(self, numbers: Sequence[int], load: Callable[[int], T]) -> None:
        """Loads several blocks at the same time, if the cache holds so many.

        An error is not raised here, but by the `get` that follows.
        """
        with self._lock:
            missing = [number for number in numbers if number not in self._blocks]
            if len(missing) < 2 or len(numbers) > self._size:
                return
        wait([_pool().submit(self.get, number, load) for number in missing])

    def get(self, number: int, load: Callable[[int], T]) -> T:
        """Returns a block; loads it if it is not in the cache."""
        with self._lock:
            block = self._blocks.get(number)
            is_new = block is None
            if block is None:
                block = self._blocks[number] = Future()
                if len(self._blocks) > self._size:
                    self._blocks.popitem(last=False)
            else:
                self._blocks.move_to_end(number)
        if is_new:
            try:
                block.set_result(load(number))
            except BaseException as error:
                with self._lock:  # so that the next read tries again
                    if self._blocks.get(number) is block:
                        del self._blocks[number]
                block.set_exception(error)
        return block.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Returns the threads that load blocks of all sources."""
    pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="blocks")
    # At exit Python waits until a pool has done all of its pending work, needed or not.
    threading._register_atexit(  # type: ignore[attr-defined]
        pool.shutdown, wait=False, cancel_futures=True
    )
    return pool


# -- Scans of all records of a source, by one process of a machine, with a cached result -----------

SAMPLES = 16  # records whose content is part of the name of a cached file
CACHE_DELAY = 0.1  # seconds; the result of a faster scan is not cached
_DIGEST = hashlib.sha256().digest_size * 2  # hexadecimal digits at the beginning of a cached file


def scan_folder() -> Path:
    """Returns the folder of the cached results."""
    return cache_folder() / "data"


def source_key(
    source: Any, contents: Callable[[Sequence[int]], Iterable[bytes]], *options: object
) -> bytes:
    """Returns a hash of a source for `cached_scan`.

    It is a hash of the number of records, of the content of 16 of them, of the options, and of
    `source.fingerprint()` if there is such a method.

    Args:
      contents: Returns the content of records by their numbers.
      *options: What else the scan depends on.
    """
    count = len(source)
    digest = hashlib.sha256(f"{count} {options}\n".encode())
    if hasattr(source, "fingerprint"):
        digest.update(f"{source.fingerprint()}\n".encode())
    samples = np.unique(np.linspace(0, max(count - 1, 0), min(count, SAMPLES)).astype(np.int64))
    for content in contents(samples.tolist()):
        digest.update(f"{len(content)}\n".encode())
        digest.update(content)
    return digest.digest()


def cached_scan(
    kind: str,
    key: bytes,
    scan: Callable[[], np.ndarray],
    work: str,
    *,
    dtype: Any = np.int32,
    is_valid: Callable[[np.ndarray], bool] = lambda array: True,
) -> np.ndarray:
    """Returns the result of a scan from the user's cache folder, or scans.

    Of several processes on this machine, one scans and the others wait for its result. It is an
    array (n,), read-only; a memory map if it comes from a file.

    Args:
      kind: The kind of the result, which is part of the file's name.
      key: Everything that the result depends on, or a hash of it.
      scan: Returns the result. It is cached if this took more than `CACHE_DELAY`.
      work: What the scan does, such as "counting tokens", for the line of a process that waits.
      is_valid: Whether a result from the cache still holds.
    """
    path = scan_folder() / f"{kind}-{hashlib.sha256(kind.encode() + key).hexdigest()}"

    def load() -> np.ndarray | None:
        found = _load(path, np.dtype(dtype))
        return found if found is not None and is_valid(found) else None

    if (found := load()) is not None:
        return found
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without a cache folder every process scans
            make_folder(path.parent)
            stack.enter_context(locked(path, work))
        if (found := load()) is not None:
            return found
        started = time.perf_counter()
        array = scan()
        array.flags.writeable = False
        if time.perf_counter() - started > CACHE_DELAY:
            keep_file(path, _scan_digest(path, array) + array.tobytes())
    return array


def _load(path: Path, dtype: np.dtype[Any]) -> np.ndarray | None:
    """Returns the array of a cached file; None if the file is missing, corrupted or renamed."""
    try:
        size = path.stat().st_size - _DIGEST
        if not path.is_file() or size < 0 or size % dtype.itemsize:
            return None
        # An empty memory map is an error.
        array = np.memmap(path, dtype, "r", _DIGEST) if size else np.zeros(0, dtype)
        with path.open("rb") as file:
            digest = file.read(_DIGEST)
    except OSError:
        return None
    return array if digest == _scan_digest(path, array) else None


def _scan_digest(path: Path, array: np.ndarray) -> bytes:
    digest = hashlib.sha256(f"{path.name}\n".encode())
    digest.update(array.data)
    return digest.hexdigest().encode()


# -- A progress bar for work before the first step that may take long ------------------------------

PROGRESS_DELAY = 3.0  # seconds before a bar appears
hides_progress = False
"""Whether bars are hidden in this process. It is global because datasets have no configuration."""


@contextmanager
def delayed_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on the first process's terminal once the work takes long.

    Yields a function of the amount of `total` that is done, to be called in one thread.
    """
    terminal = Terminal(quiet=hides_progress or not process_group.is_chief())
    started, has_bar = time.perf_counter(), False
    with ExitStack() as stack:

        def advance(done: int) -> None:
            nonlocal has_bar
            if not has_bar and time.perf_counter() - started > PROGRESS_DELAY:
                stack.enter_context(terminal.progress(description, done=done, total=total))
                has_bar = True
            terminal.advance(done)

        yield advance
