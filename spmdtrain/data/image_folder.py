"""Folders of images, a class a folder, as a dataset: decoded and resized in threads as asked for.

Which files there are, in which order, and to which split each belongs, are functions of their
names alone.
"""

import collections
import contextlib
import functools
import hashlib
import itertools
import math
import numbers
import operator
import os
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from etils import epath

from spmdtrain.data.image_cache import ImageCache
from spmdtrain.data.image_decoding import (
    OTHER_SUFFIXES,
    SUFFIXES,
    UndecodableError,
    check_file_size,
    decode,
    load_pillow,
)
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError, UserError, did_you_mean, printable
from spmdtrain.files.storage import failures, is_url, one_line
from spmdtrain.terminal import Terminal, byte_size

SPLITS: Mapping[str, float] = {"train": 0.8, "validation": 0.1, "test": 0.1}

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
        _check_splits(splits)
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
        found = _find(self.folder)
        self.classes = tuple(found)
        every = [f"{name}/{file}" for name, files in found.items() for file in files]
        self.files = tuple(_of_split(self.folder, every, split, splits))
        self.skipped = {}
        if broken == "skip":
            self._skip_broken(split)
        place = {name: label for label, name in enumerate(self.classes)}
        labels = [place[_class_of(file)] for file in self.files]
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
        if lost := sorted({_class_of(file) for file in skipped} - {_class_of(f) for f in whole}):
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


# -- what there is ---------------------------------------------------------------------------------


def split_of(file: str, splits: Mapping[str, float] = SPLITS) -> str:
    """The split that a file belongs to, by its path below the folder, with "/".

    The first 53 bits of the path's SHA-256 are a number in [0, 1); the fractions of the splits,
    in their order, divide that interval.
    """
    digest = hashlib.sha256(file.encode(errors="surrogateescape")).digest()
    number = (int.from_bytes(digest[:8], "big") >> 11) / 2**53
    *others, last = splits
    ends = itertools.accumulate(splits.values())
    return next((name for name, end in zip(others, ends, strict=False) if number < end), last)


def _of_split(
    folder: epath.Path, files: Iterable[str], split: str | None, splits: Mapping[str, float]
) -> list[str]:
    """The files of a split, or all. Raises `UserError` where the split is empty."""
    if split is None:
        return list(files)
    by_split: dict[str, list[str]] = {name: [] for name in splits}
    for file in files:
        by_split[split_of(file, splits)].append(file)
    if not by_split[split]:
        counts = ", ".join(f"{name} {len(held)}" for name, held in by_split.items())
        raise UserError(
            f"{printable(folder)}: the split {split!r} is empty ({counts}): files fall to splits "
            "by their names, so few files need larger fractions"
        )
    return by_split[split]


def _class_of(file: str) -> str:
    return file.partition("/")[0]


def _find(folder: epath.Path) -> dict[str, list[str]]:
    """The names of images by class, both sorted. Raises `UserError` where they lie otherwise."""
    shown = printable(folder)
    if not folder.is_dir():
        raise UserError(f"{shown}: {'not a' if folder.exists() else 'no such'} folder")
    here = _listed(folder)
    if stray := [name for name, is_folder in here if not is_folder and _kind(name) in SUFFIXES]:
        raise UserError(
            f"{shown}: {len(stray)} images lie beside the folders of the classes, the first "
            f"{stray[0]!r}: each belongs into the folder of its class"
        )
    others = collections.Counter[str]()
    above = [_real(folder, [])]
    classes = [name for name, is_folder in here if is_folder]
    found = {name: sorted(_images(folder / name, above, others)) for name in classes}
    if not found:
        raise UserError(f"{shown}: holds no folders: a class of images is a folder")
    if others:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(others.items()))
        _tell_once(f"{shown}: files of kinds that are not read are left out: {kinds}")
    if empty := [name for name, files in found.items() if not files]:
        kinds = ", ".join(sorted(SUFFIXES))
        raise UserError(
            f"{printable(folder / empty[0])}: holds no images ({kinds}), so it is no class: take "
            "the folder away, or fill it"
        )
    return found


def _images(
    folder: epath.Path, above: Sequence[str], others: collections.Counter[str], prefix: str = ""
) -> Iterator[str]:
    """The images in the folder of a class, those in folders of it too.

    `above` are the folders that it is in, without links; `others` is where pictures of other kinds
    are counted.
    """
    above = [*above, _real(folder, above)]
    for name, is_folder in _listed(folder):
        if is_folder:
            yield from _images(folder / name, above, others, f"{prefix}{name}/")
        elif (kind := _kind(name)) in SUFFIXES:
            yield prefix + name
        elif kind in OTHER_SUFFIXES:
            others[kind] += 1


def _real(folder: epath.Path, above: Iterable[str]) -> str:
    """Where a folder is, links followed. Raises `UserError` where that is above itself."""
    if is_url(folder):
        return str(folder)
    real = os.path.realpath(folder)
    if any(os.path.commonpath([real, one]) == real for one in above):
        raise UserError(
            f"{printable(folder)}: a link to {printable(real)}, which it is in itself: all images "
            "there would count again and again. Take the link away"
        )
    return real


def _listed(folder: epath.Path) -> list[tuple[str, bool]]:
    """What is in a folder: names, and which are folders. By code points, without hidden ones."""
    try:
        if is_url(folder):
            names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
            # To ask for each would be a request a file.
            known = SUFFIXES | OTHER_SUFFIXES
            found = [(n, _kind(n) not in known and (folder / n).is_dir()) for n in names]
        else:
            with os.scandir(folder) as entries:
                found = [(e.name, _is_folder(e)) for e in entries if not e.name.startswith(".")]
    except failures(folder) as error:
        raise UserError(f"{printable(folder)}: cannot be read: {one_line(error)}") from error
    return sorted(found)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Of a link, what it leads to; False where that is nowhere, or in a circle."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _kind(name: str) -> str:
    """What a name ends with, in lower case: `.png`."""
    return os.path.splitext(name)[1].lower()


@functools.cache
def _tell_once(line: str) -> None:
    """However many splits there are of the same folder."""
    if process_group.is_chief():
        print(line, file=sys.stderr, flush=True)


# -- options ---------------------------------------------------------------------------------------


def _check_choice(what: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UserError(f"there is no {what} {value!r}.{did_you_mean(value, known)}")


def _check_splits(splits: Mapping[str, float]) -> None:
    """Raise `UserError` unless the splits are fractions that add up to 1."""
    if not isinstance(splits, Mapping) or not splits:
        raise UserError(f"splits is {splits!r}: it must be fractions by name, at least one")
    for name, fraction in splits.items():
        if not isinstance(fraction, numbers.Real) or isinstance(fraction, bool):
            raise UserError(f"splits must be fractions: {name} is {fraction!r}")
    parts = " + ".join(f"{name} {fraction:g}" for name, fraction in splits.items())
    if not all(fraction > 0 for fraction in splits.values()):
        raise UserError(f"splits must be positive fractions: {parts}")
    if not math.isclose(total := sum(splits.values()), 1, abs_tol=1e-9):
        raise UserError(f"splits must add up to 1: {parts} = {total:g}")


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
