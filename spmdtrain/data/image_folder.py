"""A dataset of images in one folder for each class, decoded and resized in threads on demand.

The order of the files and their splits are functions of their names alone (see `image_files`).
"""

import bisect
import collections
import contextlib
import functools
import operator
import os
import stat
import sys
import threading
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
from spmdtrain.data.progress import delayed_progress
from spmdtrain.distributed import process_group
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import StorageError, UserError, did_you_mean, printable
from spmdtrain.record.storage import failures, is_url, one_line

Broken = Literal["error", "skip"]
Cache = Literal["none", "memory", "disk"]

_SKIP = "Repair or remove it, or use broken='skip' to leave out such files"
_CHANGED = "It was intact when the run started: repair it, and start again"


class BrokenImageError(UserError):
    """A file of a dataset that cannot be decoded."""

    def __init__(self, path: epath.Path, reason: str, advice: str = _SKIP) -> None:
        super().__init__(f"{printable(path)}: a broken image: {reason}. {advice}")
        self.reason = reason
        self._given = path, reason, advice

    def __reduce__(self) -> tuple[Any, ...]:  # from a worker process to the run
        return BrokenImageError, self._given


class ImageFolder:
    """The images below a folder that holds one folder for each class, as a dataset.

    Args:
      folder: The folder that holds the folders of the classes.
      size: Size of the examples in pixels: one number for both sides, or (height, width). The
        aspect ratio of an image is not kept.
      split: One of `splits`; None for all files.
      splits: Fractions of the files by name of the split. They add up to 1.
      broken: What happens to a file that cannot be decoded. "error": reading it raises an error.
        "skip": all files of the split are decoded once before training, and broken ones are left
        out.
      cache: Whether decoded examples are kept in memory ("memory"), or in files below `cache_dir`
        ("disk").
      cache_dir: The folder of the cache on disk.
      threads: Number of threads that decode. The default is the number of CPU cores.

    Attributes:
      classes: The names of the classes' folders, sorted; the same for all splits. A label is an
        index into it.
      broken: What happens to a file that cannot be decoded.
      files: The files of this split as paths below the folder, with "/"; sorted by class and name.
      skipped: The files left out by `broken="skip"`, with the reason.

    Raises:
      UserError: If the folder does not hold images of this structure, the split is empty, or an
        option is invalid.
    """

    classes: tuple[str, ...]
    files: tuple[str, ...]
    skipped: Mapping[str, str]

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
            raise UserError("folder is '': give the folder that holds the folders of the classes")
        check_splits(splits)
        if split is not None:
            _check_choice("split", split, splits)
        load_pillow()
        self.folder = epath.Path(folder).expanduser()
        self.size = _height_and_width(size)
        self.broken = broken
        self._threads = _cpu_count() if threads is None else _checked_threads(threads)
        self._disk = _image_cache(cache, cache_dir, self.size)
        self._memory: dict[str, Future[np.ndarray]] | None = {} if cache == "memory" else None
        self._lock = threading.Lock()
        self._checked_files = False  # whether all of `files` have been decoded once
        images = find_images(self.folder)
        self.classes = tuple(images)
        paths = [f"{name}/{file}" for name, files in images.items() for file in files]
        self.files = tuple(files_of_split(self.folder, paths, split, splits))
        self.skipped = {}
        self._versions = np.zeros(len(self.files), np.int64)  # 0 for files that were not read yet
        if broken == "skip":
            self._skip_broken(split)
        label_of = {name: label for label, name in enumerate(self.classes)}
        labels = [label_of[class_of(file)] for file in self.files]
        self._labels = np.array(labels, np.int32)

    def __len__(self) -> int:
        return len(self.files)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Decodes examples.

        Args:
          indices: Their indices, int (n,).

        Returns:
          `image`, uint8 (n, height, width, 3), and `label`, int32 (n,).

        Raises:
          BrokenImageError: If a file cannot be decoded.
          UserError: If a file has changed since it was read before.
          StorageError: If a file cannot be read.
        """
        files = [self.files[index] for index in indices]
        images = _empty(len(files), self.size)
        requests: list[tuple[str, Future[np.ndarray]]] = []
        try:
            for file in files:
                requests.append((file, self._decoded(file)))
            for row, (file, image) in enumerate(requests):
                images[row] = self._result(file, image)
        except BaseException:  # including Ctrl-C: the other results are not needed any more
            self._cancel(requests)
            raise
        return {"image": images, "label": self._labels[indices]}

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a worker process receives: no lock, and no images of the cache in memory."""
        memory: dict[str, Any] | None = None if self._memory is None else {}
        return {**self.__dict__, "_lock": None, "_memory": memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_lock": threading.Lock()}

    def _decoded(self, file: str) -> Future[np.ndarray]:
        """Returns the future of a file's image; with `cache="memory"` each file is decoded once."""
        pool = _pool(self._threads)
        if self._memory is None:
            return pool.submit(self._read, file)
        with self._lock:
            image = self._memory.get(file)
            if image is None or image.cancelled() or (image.done() and image.exception()):
                # Also after an error, because the file may have been repaired.
                image = self._memory[file] = pool.submit(self._read, file)
            return image

    def _result(self, file: str, image: Future[np.ndarray]) -> np.ndarray:
        """Waits for the file's image."""
        while True:
            try:
                return image.result()
            except CancelledError:  # by another thread that had requested it too, and failed
                image = self._decoded(file)

    def _cancel(self, requests: Iterable[tuple[str, Future[np.ndarray]]]) -> None:
        """Cancels the images that no thread has started to decode."""
        with self._lock:
            for _, image in requests:
                image.cancel()  # `_decoded` submits a canceled one again

    def _read(self, file: str) -> np.ndarray:
        path = self.folder / file
        advice = _CHANGED if self._checked_files else _SKIP
        try:
            found = [] if is_url(path) else [os.stat(path)]
            for status in found:
                # Opening a pipe would block until another process opens it for writing.
                if not stat.S_ISREG(status.st_mode):
                    raise BrokenImageError(path, "it is not a regular file", advice)
                check_file_size(status.st_size)
            content = path.read_bytes()
            found += [os.stat(path) for _ in found]
        except BrokenImageError:
            raise
        except UndecodableError as error:
            raise BrokenImageError(path, printable(error), advice) from error
        except failures(path) as error:  # never skipped: a failed disk must not reduce the dataset
            raise StorageError(f"{printable(path)}: cannot be read: {one_line(error)}") from error
        try:
            image = self._image(content)
        except UndecodableError as error:
            raise BrokenImageError(path, printable(error), advice) from error
        except MemoryError as error:
            raise UserError(
                f"{printable(path)}: not enough memory to decode it to {_pixels(self.size)}"
            ) from error
        if found:
            self._check_unchanged(file, found)
        return image

    def _image(self, content: bytes) -> np.ndarray:
        if self._disk is None:
            return decode(content, self.size)
        key = self._disk.key(content)
        if (image := self._disk.get(key)) is None:
            image = decode(content, self.size)
            self._disk.put(key, image)
        return image

    def _check_unchanged(self, file: str, found: Iterable[os.stat_result]) -> None:
        """Raises `UserError` if a file has changed since it was read before."""
        place = bisect.bisect_left(self.files, _class_and_name(file), key=_class_and_name)
        first, *others = [hash((x.st_size, x.st_mtime_ns)) or 1 for x in found]
        known = int(self._versions[place]) or first
        if {first, *others} == {known}:
            self._versions[place] = known
        else:
            raise UserError(
                f"{printable(self.folder / file)}: the image has changed since the run read it "
                "before: start again. Files must not change while a run reads them"
            )

    def _skip_broken(self, split: str | None) -> None:
        """Decodes every file once, and leaves out the broken ones."""
        intact, skipped = [], {}
        for file, image in self._decode_all():
            try:
                image.result()
            except BrokenImageError as error:
                skipped[file] = error.reason
            else:
                intact.append(file)
        self._checked_files = True
        if not skipped:
            return
        of_split = "" if split is None else f" of split {split!r}"
        first, reason = next(iter(skipped.items()))
        message = (
            f"{printable(self.folder)}: {len(skipped)} of {len(self.files)} images{of_split} are "
            f"broken; the first is {printable(first)}: {reason}"
        )
        if not intact:
            raise UserError(f"{message}. None is left")
        if lost := sorted({class_of(file) for file in skipped} - {class_of(f) for f in intact}):
            message += f". No example is left of {printable(', '.join(lost))}"
        if process_group.is_chief():
            print(f"{message}. They are left out", file=sys.stderr, flush=True)
        self._versions = self._versions[[file not in skipped for file in self.files]]
        self.files, self.skipped = tuple(intact), skipped

    def _decode_all(self) -> Iterator[tuple[str, Future[np.ndarray]]]:
        """Yields the files with their images, decoded ahead. Shows a bar if it takes long."""
        pending = collections.deque[tuple[str, Future[np.ndarray]]]()
        with contextlib.ExitStack() as stack:
            # If the check ends early, pending images are not decoded.
            stack.callback(self._cancel, pending)
            advance = stack.enter_context(delayed_progress("checking", len(self.files)))
            for done, file in enumerate(self.files):
                pending.append((file, self._decoded(file)))
                if len(pending) > 4 * self._threads:
                    yield pending.popleft()
                advance(done)
            while pending:
                yield pending.popleft()


def _class_and_name(file: str) -> list[str]:
    """Returns the sort key of a file."""
    return file.split("/", 1)


# -- options ---------------------------------------------------------------------------------------


def _check_choice(option: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UserError(f"there is no {option} {value!r}.{did_you_mean(value, known)}")


def _as_integer(value: Any) -> int:
    """Returns an integer, Python's or NumPy's; 0 for anything else."""
    try:
        return 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return 0


def _checked_threads(threads: Any) -> int:
    if (count := _as_integer(threads)) < 1:
        raise UserError(f"threads is {threads!r}: it must be at least 1 (None is one a core)")
    return count


def _height_and_width(size: int | tuple[int, int]) -> tuple[int, int]:
    sides: Any = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    pixels = tuple(map(_as_integer, sides))
    if len(pixels) != 2 or min(pixels) < 1:
        raise UserError(f"size is {size!r}: it must be one number of pixels, or (height, width)")
    height, width = pixels
    _empty(1, (height, width))
    return height, width


def _empty(count: int, size: tuple[int, int]) -> np.ndarray:
    """Allocates the images of `count` examples."""
    try:
        return np.empty((count, *size, 3), np.uint8)
    except (MemoryError, ValueError) as error:  # the latter if no machine could address it
        raise UserError(f"not enough memory for {count:,} images of {_pixels(size)}") from error


def _pixels(size: tuple[int, int]) -> str:
    height, width = size
    return f"{height} x {width} pixels, {byte_size(3 * height * width)} each"


def _image_cache(
    cache: Cache, cache_dir: str | os.PathLike[str] | None, size: tuple[int, int]
) -> ImageCache | None:
    if cache != "disk":
        if cache_dir is not None:
            raise UserError(f"cache_dir is for cache='disk', but cache is {cache!r}: {cache_dir}")
        return None
    if cache_dir is None or os.fspath(cache_dir) == "":
        raise UserError("cache='disk' needs cache_dir, the folder for decoded images")
    if is_url(os.fspath(cache_dir)):
        raise UserError(f"cache_dir is {cache_dir}: it must be a local folder")
    return ImageCache(Path(cache_dir).expanduser(), size)


def _cpu_count() -> int:
    """Returns the number of cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Returns the pool of all datasets, so that datasets read at the same time share the cores."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="images")
    # At exit Python waits until a pool has done all of its pending work, needed or not. A function
    # registered with `atexit` would be called too late to prevent that.
    threading._register_atexit(  # type: ignore[attr-defined]
        pool.shutdown, wait=False, cancel_futures=True
    )
    return pool
