"""The files of a source: their paths in order, and a check that they have not changed since."""

import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any, NoReturn, cast

from etils import epath

from spmdtrain.errors import StorageError, UserError, printable
from spmdtrain.record.storage import failures, file_system, is_url, one_line

Path = str | os.PathLike[str]
Files = Path | Sequence[Path]
"""A file, a folder, a pattern with `*`, `?` or `[...]`, or a list of these."""

_PATTERN = frozenset("*?[")
_SMALL = 2**20  # bytes of a file whose digest is of all of it
_PARTS, _PART = 8, 2**15  # number and bytes of the parts of a larger one, the first and last too
_THREADS = 16  # which read these, because a network file system answers slowly


@dataclass(frozen=True)
class SourceFile:
    """A file of a source, as it was when the source was created.

    Attributes:
      path: A local path, or a `gs://` URL.
      version: The time of modification of a local file in ns; the generation of an object.
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
            otherwise gcsfs requests the ranges that are read, and no other bytes.

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
            found = _of_object(content.details)
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
    """Returns the files of a source, local or at `gs://` URLs.

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
        found = _objects(store.glob(path, detail=True)) if is_pattern else _in_bucket(store, path)
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
        found = [file for file in found if file.path.lower().endswith(tuple(suffixes))]
        if not found:
            raise UserError(
                f"{printable(path)}: the folder holds no {kind} ({', '.join(suffixes)})"
            )
    return sorted(found, key=lambda file: file.path)


def _in_folder(path: str, suffixes: Sequence[str]) -> Iterator[str]:
    """Yields the visible files of a local folder with these endings, at any depth."""
    for folder, names in _visible_folders(path):
        for name in filter(_is_visible, names):
            if name.lower().endswith(tuple(suffixes)):
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
        for file in _objects(store.find(url, detail=True))
        if all(map(_is_visible, file.path.partition(folder)[2].strip("/").split("/")))
    ]


def _objects(found: dict[str, dict[str, Any]]) -> list[SourceFile]:
    return [
        SourceFile(f"gs://{name}", *_of_object(status))
        for name, status in found.items()
        if status["type"] == "file"
    ]


def _of_object(status: dict[str, Any]) -> tuple[int, int]:
    """Returns size and generation of an object from gcsfs's description."""
    return int(status["size"]), int(status.get("generation") or 0)


def _source_file(path: str) -> SourceFile:
    try:
        return SourceFile(path, *_status(path))
    except FileNotFoundError:
        raise UserError(f"{printable(path)}: no such file") from None


def _status(path: str) -> tuple[int, int, int, int]:
    """Returns size, version, time of change and inode of a file."""
    if is_url(path):
        return *_of_object(file_system(path).info(path)), 0, 0
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
