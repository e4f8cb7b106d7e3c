"""Folders of images, a class a folder, as a dataset: decoded and resized in threads as asked for.

Which files there are, in which order, and to which split each belongs, are functions of their
names alone.
"""

import collections
import contextlib
import functools
import operator
import os
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from etils import epath

from spmdtrain.data.image_cache import ImageCache
from spmdtrain.data.image_decoding import (
    UndecodableError,
    check_file_size,
    decode,
    load_pillow,
)
from spmdtrain.data.image_files import SPLITS, check_splits, class_of, files_of_split, find_images
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError, UserError, did_you_mean, printable
from spmdtrain.files.storage import failures, is_url, one_line
from spmdtrain.terminal import Terminal, byte_size

Broken = Literal["error", "skip"]
Cache = Literal["none", "memory", "disk"]

_SKIP = "Mend it, or take it away; broken='skip' leaves such files out"
_CHANGED = "It was whole when the run began: mend it, and start again"

_PATIENCE = 3.0  # seconds that looking for broken files takes without a word


class BrokenImageError(UserError):
    """A file of a dataset that cannot be decoded."""

    def __init__(self, path: epath.Path, reason: str, advice: str = _SKIP) -> None:
        super().__init__(f"{printable(path)}: a broken image: {reason}. {advice}")
        self.reason = reason


class ImageFolder:
    """The images below `folder`, where a class is a folder, as a dataset of RGB bytes.

    `size` is that of the examples, for both sides or (height, width); the aspect ratio of a
    picture is not kept. `split` is one of `splits`, fractions of the files by name; None is all
    of them. `broken`: a file that cannot be decoded is an error where it is read, or all files of
    the split are decoded once at first, and such ones left out. `cache`: decoded examples are
    kept in memory, or in files below `cache_dir`. `threads` decode at a time; None is one a core.

    Raises `UserError` for a folder that holds no such images, and for a split that is empty.
    """

    classes: tuple[str, ...]
    """The names of the folders, sorted: of all, whatever the split. A label is a place in it."""
    files: tuple[str, ...]
    """Of this split, below the folder, with "/"; sorted by class, then name."""
    skipped: Mapping[str, str]
    """The files left out, with the reason, where `broken` is "skip"."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size: int | tuple[int, int],
        *,
        split: str | None = None,
        splits: Mapping[str, float] = SPLITS,
        broken: Broken = "error",
        cache: Cache = "none",
        cache_dir: str | os.PathLike[str] | None = None,
        threads: int | None = None,
    ) -> None:
        _check_choice("broken", broken, get_args(Broken))
        _check_choice("cache", cache, get_args(Cache))
        if os.fspath(folder) == "":
            raise UserError("folder is '': it is the folder that holds those of the classes")
        check_splits(splits)
        if split is not None:
            _check_choice("split", split, splits)
        load_pillow()
        self.folder = epath.Path(folder).expanduser()
        self.size = _height_and_width(size)
        self._threads = _cores() if threads is None else _checked_threads(threads)
        self._disk = _image_cache(cache, cache_dir, self.size)
        self._memory: dict[str, Future[np.ndarray]] | None = {} if cache == "memory" else None
        self._lock = threading.Lock()
        self._known_whole = False  # whether the files that are left have been looked at
        found = find_images(self.folder)
        self.classes = tuple(found)
        every = [f"{name}/{file}" for name, files in found.items() for file in files]
        self.files = tuple(files_of_split(self.folder, every, split, splits))
        self.skipped = {}
        if broken == "skip":
            self._skip_broken(split)
        place = {name: label for label, name in enumerate(self.classes)}
        labels = [place[class_of(file)] for file in self.files]
        self._labels = np.array(labels, np.int32)

    def __len__(self) -> int:
        return len(self.files)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """`image`, uint8 (n, height, width, 3), and `label`, int32 (n,).

        Raises `UserError` for a file that is broken, `StorageError` for one that cannot be read.
        """
        files = [self.files[index] for index in indices]
        images = _empty(len(files), self.size)
        asked: list[tuple[str, Future[np.ndarray]]] = []
        try:
            for file in files:
                asked.append((file, self._decoded(file)))
            for row, (file, image) in enumerate(asked):
                images[row] = self._awaited(file, image)
        except BaseException:  # Ctrl-C, too: nobody waits for the rest any more
            self._cancel(asked)
            raise
        return {"image": images, "label": self._labels[indices]}

    def _decoded(self, file: str) -> Future[np.ndarray]:
        """A file's picture, now or soon: of those in memory, each is decoded once."""
        pool = _pool(self._threads)
        if self._memory is None:
            return pool.submit(self._read, file)
        with self._lock:
            known = self._memory.get(file)
            if known is None or known.cancelled() or (known.done() and known.exception()):
                known = self._memory[file] = pool.submit(self._read, file)  # it may be mended now
            return known

    def _awaited(self, file: str, image: Future[np.ndarray]) -> np.ndarray:
        """The file's picture, once it is there."""
        while True:
            try:
                return image.result()
            except CancelledError:  # by another thread, which had asked for it too, and failed
                image = self._decoded(file)

    def _cancel(self, asked: Iterable[tuple[str, Future[np.ndarray]]]) -> None:
        """Leave out those pictures that no thread has begun to decode."""
        with self._lock:
            for _, image in asked:
                image.cancel()  # in memory it then counts as never asked for

    def _read(self, file: str) -> np.ndarray:
        path = self.folder / file
        advice = _CHANGED if self._known_whole else _SKIP
        try:
            if not is_url(path):
                found = os.stat(path)
                # Opening a pipe waits until another process opens it for writing.
                if not stat.S_ISREG(found.st_mode):
                    raise BrokenImageError(path, "it is not a regular file", advice)
                check_file_size(found.st_size)
            content = path.read_bytes()
        except BrokenImageError:
            raise
        except UndecodableError as error:
            raise BrokenImageError(path, printable(error), advice) from error
        except failures(path) as error:  # never skipped: a lost disk must not look like less data
            raise StorageError(f"{printable(path)}: cannot be read: {one_line(error)}") from error
        try:
            if self._disk is None:
                return decode(content, self.size)
            key = self._disk.key(content)
            if (image := self._disk.get(key)) is None:
                image = decode(content, self.size)
                self._disk.put(key, image)
            return image
        except UndecodableError as error:
            raise BrokenImageError(path, printable(error), advice) from error
        except MemoryError as error:
            what = f"no memory to decode it to {_pixels(self.size)}"
            raise UserError(f"{printable(path)}: {what}") from error

    def _skip_broken(self, split: str | None) -> None:
        """Decode every file once, and leave out those that cannot be."""
        whole, skipped = [], {}
        for file, image in self._checked():
            try:
                image.result()
            except BrokenImageError as error:
                skipped[file] = error.reason
            else:
                whole.append(file)
        self._known_whole = True
        if not skipped:
            return
        of_split = "" if split is None else f" of split {split!r}"
        first, reason = next(iter(skipped.items()))
        said = (
            f"{printable(self.folder)}: {len(skipped)} of {len(self.files)} images{of_split} are "
            f"broken; the first is {printable(first)}: {reason}"
        )
        if not whole:
            raise UserError(f"{said}. None is left")
        if lost := sorted({class_of(file) for file in skipped} - {class_of(f) for f in whole}):
            said += f". No example is left of {printable(', '.join(lost))}"
        if process_group.is_chief():
            print(f"{said}. They are left out", file=sys.stderr, flush=True)
        self.files, self.skipped = tuple(whole), skipped

    def _checked(self) -> Iterator[tuple[str, Future[np.ndarray]]]:
        """The files with their pictures, read a little ahead; a bar shows where it takes long."""
        terminal = Terminal(quiet=not process_group.is_chief())
        waiting = collections.deque[tuple[str, Future[np.ndarray]]]()
        began, total, said = time.perf_counter(), len(self.files), False
        with contextlib.ExitStack() as shown:
            # Where the check ends early, what is left is not to be decoded first.
            shown.callback(self._cancel, waiting)
            for done, file in enumerate(self.files):
                waiting.append((file, self._decoded(file)))
                if len(waiting) > 4 * self._threads:
                    yield waiting.popleft()
                if not said and time.perf_counter() - began > _PATIENCE:
                    shown.enter_context(terminal.progress("checking", done=done, total=total))
                    said = True
                terminal.advance(done)
            while waiting:
                yield waiting.popleft()


# -- options ---------------------------------------------------------------------------------------


def _check_choice(what: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UserError(f"there is no {what} {value!r}.{did_you_mean(value, known)}")


def _whole_number(value: Any) -> int:
    """A whole number, NumPy's too; 0 for anything else."""
    try:
        return 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return 0


def _checked_threads(threads: Any) -> int:
    if (found := _whole_number(threads)) < 1:
        raise UserError(f"threads is {threads!r}: at least 1 must decode (None is one a core)")
    return found


def _height_and_width(size: int | tuple[int, int]) -> tuple[int, int]:
    sides: Any = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    found = tuple(map(_whole_number, sides))
    if len(found) != 2 or min(found) < 1:
        raise UserError(f"size is {size!r}: it is one number of pixels, or (height, width)")
    height, width = found
    _empty(1, (height, width))
    return height, width


def _empty(count: int, size: tuple[int, int]) -> np.ndarray:
    """Room for so many examples. Raises `UserError` where there is none."""
    try:
        return np.empty((count, *size, 3), np.uint8)
    except (MemoryError, ValueError) as error:  # the latter for what no machine could address
        raise UserError(f"no memory for {count:,} pictures of {_pixels(size)}") from error


def _pixels(size: tuple[int, int]) -> str:
    height, width = size
    return f"{height} x {width} pixels, {byte_size(3 * height * width)} each"


def _image_cache(
    cache: Cache, cache_dir: str | os.PathLike[str] | None, size: tuple[int, int]
) -> ImageCache | None:
    if cache != "disk":
        if cache_dir is not None:
            raise UserError(f"cache_dir is for cache='disk', and cache is {cache!r}: {cache_dir}")
        return None
    if cache_dir is None or os.fspath(cache_dir) == "":
        raise UserError("cache='disk' needs cache_dir, the folder for decoded images")
    if is_url(os.fspath(cache_dir)):
        raise UserError(f"cache_dir is {cache_dir}: a cache of images is a local folder")
    return ImageCache(Path(cache_dir).expanduser(), size)


def _cores() -> int:
    """The cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """One for all datasets: those read at the same time share the cores."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="images")
    # Python ends only when all that waits in a pool has been done, be it wanted or not. By `atexit`
    # this would come too late.
    threading._register_atexit(  # type: ignore[attr-defined]
        pool.shutdown, wait=False, cancel_futures=True
    )
    return pool
