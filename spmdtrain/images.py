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
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from etils import epath

from spmdtrain import processes
from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.image_cache import ImageCache
from spmdtrain.image_decoding import SUFFIXES, UndecodableError, decode, load_pillow
from spmdtrain.storage import failures, is_url, one_line
from spmdtrain.terminal import Terminal

SPLITS: Mapping[str, float] = {"train": 0.8, "validation": 0.1, "test": 0.1}

Broken = Literal["error", "skip"]
Cache = Literal["none", "memory", "disk"]

_PATIENCE = 3.0  # seconds that looking for broken files takes without a word


class BrokenImageError(UserError):
    """A file of a dataset that cannot be decoded."""

    def __init__(self, path: epath.Path, reason: str) -> None:
        super().__init__(
            f"{path}: a broken image: {reason}. Mend it, or take it away; broken='skip' leaves "
            "such files out"
        )
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
        if threads is not None and threads < 1:
            raise UserError(f"threads is {threads}: at least 1 must decode (None is one a core)")
        if split is not None:
            _check_choice("split", split, splits)
        load_pillow()
        self.folder = epath.Path(folder).expanduser()
        self.size = _height_and_width(size)
        self._threads = threads or _cores()
        self._disk = _image_cache(cache, cache_dir, self.size)
        self._memory: dict[str, Future[np.ndarray]] | None = {} if cache == "memory" else None
        self._lock = threading.Lock()
        found = _find(self.folder)
        self.classes = tuple(found)
        every = [f"{name}/{file}" for name, files in found.items() for file in files]
        self.files = tuple(_of_split(self.folder, every, split, splits))
        self.skipped = {}
        if broken == "skip":
            self._skip_broken(split)
        place = {name: label for label, name in enumerate(self.classes)}
        labels = [place[file.partition("/")[0]] for file in self.files]
        self._labels = np.array(labels, np.int32)

    def __len__(self) -> int:
        return len(self.files)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """`image`, uint8 (n, height, width, 3), and `label`, int32 (n,).

        Raises `UserError` for a file that is broken or cannot be read.
        """
        decoded = [self._decoded(self.files[index]) for index in indices]
        images = np.empty((len(decoded), *self.size, 3), np.uint8)
        for row, image in enumerate(decoded):
            images[row] = image.result()
        return {"image": images, "label": self._labels[indices]}

    def _decoded(self, file: str) -> Future[np.ndarray]:
        """A file's picture, now or soon: of those in memory, each is decoded once."""
        pool = _pool(self._threads)
        if self._memory is None:
            return pool.submit(self._read, file)
        with self._lock:
            known = self._memory.get(file)
            if known is None or (known.done() and known.exception()):  # it may have been mended
                known = self._memory[file] = pool.submit(self._read, file)
            return known

    def _read(self, file: str) -> np.ndarray:
        path = self.folder / file
        try:
            content = path.read_bytes()
        except failures(path) as error:  # never skipped: a lost disk must not look like less data
            raise UserError(f"{path}: cannot be read: {one_line(error)}") from error
        try:
            if self._disk is None:
                return decode(content, self.size)
            key = self._disk.key(content)
            if (image := self._disk.get(key)) is None:
                image = decode(content, self.size)
                self._disk.put(key, image)
            return image
        except UndecodableError as error:
            raise BrokenImageError(path, str(error)) from error

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
        if not skipped:
            return
        of_split = "" if split is None else f" of split {split!r}"
        first, reason = next(iter(skipped.items()))
        said = (
            f"{self.folder}: {len(skipped)} of {len(self.files)} images{of_split} are broken; the "
            f"first is {first}: {reason}"
        )
        if not whole:
            raise UserError(f"{said}. None is left")
        if processes.is_chief():
            print(f"{said}. They are left out", file=sys.stderr, flush=True)
        self.files, self.skipped = tuple(whole), skipped

    def _checked(self) -> Iterator[tuple[str, Future[np.ndarray]]]:
        """The files with their pictures, read a little ahead; a bar shows where it takes long."""
        terminal = Terminal(quiet=not processes.is_chief())
        waiting = collections.deque[tuple[str, Future[np.ndarray]]]()
        began, total, said = time.perf_counter(), len(self.files), False
        with contextlib.ExitStack() as shown:
            for done, file in enumerate(self.files):
                waiting.append((file, self._decoded(file)))
                if len(waiting) > 4 * self._threads:
                    yield waiting.popleft()
                if not said and time.perf_counter() - began > _PATIENCE:
                    shown.enter_context(terminal.progress("checking", done=done, total=total))
                    said = True
                terminal.advance(done)
            yield from waiting


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
    parts = " + ".join(f"{name} {fraction:g}" for name, fraction in splits.items())
    if not all(fraction > 0 for fraction in splits.values()):
        raise UserError(f"splits must be positive fractions: {parts}")
    if not math.isclose(total := sum(splits.values()), 1, abs_tol=1e-9):
        raise UserError(f"splits must add up to 1: {parts} = {total:g}")
    if split is None:
        return list(files)
    by_split: dict[str, list[str]] = {name: [] for name in splits}
    for file in files:
        by_split[split_of(file, splits)].append(file)
    if not by_split[split]:
        counts = ", ".join(f"{name} {len(held)}" for name, held in by_split.items())
        raise UserError(
            f"{folder}: the split {split!r} is empty ({counts}): files fall to splits by their "
            "names, so few files need larger fractions"
        )
    return by_split[split]


def _find(folder: epath.Path) -> dict[str, list[str]]:
    """The names of images by class, both sorted. Raises `UserError` where they lie otherwise."""
    if not folder.is_dir():
        raise UserError(f"{folder}: {'not a' if folder.exists() else 'no such'} folder")
    here = _listed(folder)
    if stray := [name for name in here if _is_image(name)]:
        raise UserError(
            f"{folder}: {len(stray)} images lie beside the folders of the classes, the first "
            f"{stray[0]!r}: each belongs into the folder of its class"
        )
    found = {name: sorted(_images(folder / name)) for name in here if (folder / name).is_dir()}
    if not found:
        raise UserError(f"{folder}: holds no folders: a class of images is a folder")
    if empty := [name for name, files in found.items() if not files]:
        kinds = ", ".join(sorted(SUFFIXES))
        raise UserError(
            f"{folder / empty[0]}: holds no images ({kinds}), so it is no class: take the folder "
            "away, or fill it"
        )
    return found


def _images(folder: epath.Path, above: str = "") -> Iterator[str]:
    """The images in the folder of a class, those in folders of it too."""
    for name in _listed(folder):
        if _is_image(name):
            yield above + name
        elif (folder / name).is_dir():
            yield from _images(folder / name, f"{above}{name}/")


def _listed(folder: epath.Path) -> list[str]:
    """The names in a folder, sorted by code points, without hidden ones."""
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    except failures(folder) as error:
        raise UserError(f"{folder}: cannot be read: {one_line(error)}") from error


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES


# -- options ---------------------------------------------------------------------------------------


def _check_choice(what: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UserError(f"there is no {what} {value!r}.{did_you_mean(value, known)}")


def _height_and_width(size: int | tuple[int, int]) -> tuple[int, int]:
    sides: Any = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise UserError(f"size is {size}: it is one number of pixels, or (height, width)")
    height, width = sides
    return height, width


def _image_cache(
    cache: Cache, cache_dir: str | os.PathLike[str] | None, size: tuple[int, int]
) -> ImageCache | None:
    if cache != "disk":
        return None
    if cache_dir is None:
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
    return ThreadPoolExecutor(threads, thread_name_prefix="images")
