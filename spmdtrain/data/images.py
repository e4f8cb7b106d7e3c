"""Images: folders of image files, decoded on demand, and IDX files."""

import bisect
import collections
import contextlib
import functools
import gzip
import hashlib
import itertools
import math
import numbers
import operator
import os
import stat
import sys
import threading
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
from etils import epath

from spmdtrain.data.image_decoding import (
    OTHER_SUFFIXES,
    SUFFIXES,
    Decoder,
    Decoding,
    UndecodableError,
    check_file_size,
    decode,
)
from spmdtrain.data.read_ahead import usable_cores
from spmdtrain.data.sources.files import delayed_progress
from spmdtrain.distributed import process_group
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import StorageError, UserError, did_you_mean, printable
from spmdtrain.record.storage import failures, file_system, is_url, one_line

# -- The image files of a folder, their order, classes and splits: functions of their names alone

SPLITS: Mapping[str, float] = {"train": 0.8, "validation": 0.1, "test": 0.1}
_MAX_DEPTH = 64  # levels of folders below a class


def check_splits(splits: Mapping[str, float]) -> None:
    """Raises `UserError` unless splits are positive fractions that add up to 1."""
    if not isinstance(splits, Mapping) or not splits:
        raise UserError(
            f"splits is {splits!r}: it must be a dictionary of fractions, with at least one"
        )
    for name, fraction in splits.items():
        if not isinstance(fraction, numbers.Real) or isinstance(fraction, bool):
            raise UserError(f"splits must be fractions: {name} is {fraction!r}")
    parts = " + ".join(f"{name} {fraction:g}" for name, fraction in splits.items())
    if not all(fraction > 0 for fraction in splits.values()):
        raise UserError(f"splits must be positive fractions: {parts}")
    if not math.isclose(total := sum(splits.values()), 1, abs_tol=1e-9):
        raise UserError(f"splits must add up to 1: {parts} = {total:g}")


def split_of(file: str, splits: Mapping[str, float] = SPLITS) -> str:
    """Returns the split that a file belongs to.

    The first 53 bits of the path's SHA-256 are a number in [0, 1). The fractions of the splits, in
    their order, divide that interval. The path is below the folder, with "/".
    """
    digest = hashlib.sha256(file.encode(errors="surrogateescape")).digest()
    number = (int.from_bytes(digest[:8], "big") >> 11) / 2**53
    *others, last = splits
    ends = itertools.accumulate(splits.values())
    return next((name for name, end in zip(others, ends, strict=False) if number < end), last)


def files_of_split(
    folder: epath.Path, files: Iterable[str], split: str | None, splits: Mapping[str, float]
) -> list[str]:
    """Returns the files of a split, or all for None; `UserError` if the split is empty."""
    if split is None:
        return list(files)
    by_split: dict[str, list[str]] = {name: [] for name in splits}
    for file in files:
        by_split[split_of(file, splits)].append(file)
    if not by_split[split]:
        counts = ", ".join(f"{name} {len(part)}" for name, part in by_split.items())
        raise UserError(
            f"{printable(folder)}: the split {split!r} is empty ({counts}): a hash of its name "
            "decides about the split of a file, so few files need larger fractions"
        )
    return by_split[split]


def class_of(file: str) -> str:
    """Returns the class of a file, the first folder of its path."""
    return file.partition("/")[0]


def find_images(folder: epath.Path) -> dict[str, list[str]]:
    """Finds the images in the folders of the classes, which are in `folder`.

    Returns, by class, the paths of the images below the folder of their class; both are sorted.

    Raises:
      UserError: If there is no such folder, no class, an empty class, or an image outside of the
        folders of the classes.
    """
    shown = printable(folder)
    if not folder.is_dir():
        raise UserError(f"{shown}: {'not a' if folder.exists() else 'no such'} folder")
    entries = _listed(folder)
    if stray := [
        name for name, is_folder in entries if not is_folder and _suffix(name) in SUFFIXES
    ]:
        raise UserError(
            f"{shown}: {len(stray)} images are not in the folder of a class, the first is "
            f"{stray[0]!r}: move each into the folder of its class"
        )
    others = collections.Counter[str]()
    parents = [str(folder) if is_url(folder) else os.path.realpath(folder)]
    classes = [name for name, is_folder in entries if is_folder]
    images = {name: sorted(_images(folder / name, parents, others)) for name in classes}
    if not images:
        raise UserError(f"{shown}: holds no folders: each class of images needs a folder")
    if others:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(others.items()))
        _print_once(f"{shown}: files of unsupported formats are ignored: {kinds}")
    if empty := [name for name, files in images.items() if not files]:
        kinds = ", ".join(sorted(SUFFIXES))
        raise UserError(
            f"{printable(folder / empty[0])}: holds no images ({kinds}), so it is not a class: "
            "remove the folder, or add images"
        )
    return images


def _images(
    folder: epath.Path, parents: Sequence[str], others: collections.Counter[str], prefix: str = ""
) -> Iterator[str]:
    """Yields the images in the folder of a class, at any depth.

    `parents` are the real paths of the folders that contain it; `others` counts images of
    unsupported formats. `UserError` if folders are nested too deeply.
    """
    if len(parents) > _MAX_DEPTH:
        raise UserError(f"{printable(folder)}: nested more than {_MAX_DEPTH} levels deep")
    parents = [*parents, _real_path(folder, parents)]
    for name, is_folder in _listed(folder):
        if is_folder:
            yield from _images(folder / name, parents, others, f"{prefix}{name}/")
        elif (suffix := _suffix(name)) in SUFFIXES:
            yield prefix + name
        elif suffix in OTHER_SUFFIXES:
            others[suffix] += 1


def _real_path(folder: epath.Path, parents: Sequence[str]) -> str:
    """Returns the path of a folder with links resolved; refuses a link to one of its parents."""
    if is_url(folder):
        return str(folder)
    if not os.path.islink(folder):  # the parents' links are resolved already
        return os.path.join(parents[-1], folder.name)
    real = os.path.realpath(folder)
    if any(parent == real or parent.startswith(f"{real}{os.sep}") for parent in parents):
        raise UserError(
            f"{printable(folder)}: a link to {printable(real)}, which contains it: images would be "
            "found again and again. Remove the link"
        )
    return real


def _listed(folder: epath.Path) -> list[tuple[str, bool]]:
    """Returns (name, is a folder) of the visible entries of a folder, sorted by code points."""
    try:
        if is_url(folder):
            names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
            # A suffix of an image saves the request that `is_dir` makes for each entry.
            known = SUFFIXES | OTHER_SUFFIXES
            listed = [(n, _suffix(n) not in known and (folder / n).is_dir()) for n in names]
        else:
            with os.scandir(folder) as entries:
                listed = [(e.name, _is_folder(e)) for e in entries if not e.name.startswith(".")]
    except failures(folder) as error:
        raise UserError(f"{printable(folder)}: cannot be read: {one_line(error)}") from error
    return sorted(listed)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Returns whether an entry or a link's target is a folder; False for a broken link."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _suffix(name: str) -> str:
    """Returns the suffix of a name in lower case, such as `.png`."""
    return os.path.splitext(name)[1].lower()


@functools.cache
def _print_once(line: str) -> None:
    """Prints a line on the first process, once for all splits of a folder."""
    if process_group.is_chief():
        print(line, file=sys.stderr, flush=True)


# -- A cache of decoded images on disk -------------------------------------------------------------
#
# The name of an entry is a hash of everything that its pixels depend on, so no entry is ever stale.

_SUM = hashlib.sha256().digest_size  # bytes of the checksum, which precedes the pixels


@dataclass(frozen=True)
class ImageCache:
    """Decoded images of one size in a local folder that processes may share.

    The folder is created if it does not exist; `UserError` if this fails.
    """

    folder: Path
    decoding: Decoding

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            kind = "a broken link" if self.folder.is_symlink() else "a file"
            raise UserError(f"cache_dir: {self.folder} is {kind}: give a folder") from error
        except OSError as error:
            raise UserError(f"cache_dir: {one_line(error)}: give a folder") from error

    def key(self, content: bytes) -> str:
        """Returns the name of the entry for an image file with these bytes."""
        digest = hashlib.sha256(f"{self.decoding.recipe}\n".encode())
        digest.update(content)
        return digest.hexdigest()

    def get(self, key: str) -> np.ndarray | None:
        """Returns a stored image, uint8 (height, width, 3), read-only.

        None if the entry is missing or corrupted; `StorageError` if it cannot be read.
        """
        try:
            stored = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(self._failed(error)) from error
        pixels = stored[_SUM:]
        if stored[:_SUM] != _sum(key, pixels):
            return None
        return np.frombuffer(pixels, np.uint8).reshape(*self.decoding.size, 3)

    def put(self, key: str, image: np.ndarray) -> None:
        """Stores an image, uint8 (height, width, 3), atomically; `StorageError` if this fails."""
        path, pixels = self._path(key), image.tobytes()
        # A name unique to this call, in the folder of the final name, where a rename is atomic.
        temporary = path.with_name(f".{key}.{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(exist_ok=True, parents=True)
            temporary.write_bytes(_sum(key, pixels) + pixels)
            temporary.replace(path)
        except FileNotFoundError:
            return  # the cache is being deleted: the next read of the image stores it again
        except OSError as error:
            with contextlib.suppress(OSError):  # a file left behind is never read
                temporary.unlink()
            raise StorageError(self._failed(error)) from error

    def _failed(self, error: OSError) -> str:
        return (
            f"the image cache in {self.folder}: {one_line(error)}: free some space (this folder "
            "may be deleted at any time), or use cache='none'"
        )

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key


def _sum(key: str, pixels: bytes) -> bytes:
    """Returns the checksum of name and pixels, so that a file with a wrong name is rejected."""
    return hashlib.sha256(key.encode() + pixels).digest()


# -- A dataset of images in one folder for each class, decoded and resized in threads on demand ----
#
# The order of the files and their splits are functions of their names alone, as above.

Broken = Literal["error", "skip"]
Cache = Literal["none", "memory", "disk"]

_SKIP = "Repair or remove it, or use broken='skip' to leave out such files"
_CHANGED = "It was intact when the run started: repair it, and start again"


class BrokenImageError(UserError):
    """A file of a dataset that cannot be decoded."""

    def __init__(self, path: epath.Path | Path, reason: str, advice: str = _SKIP) -> None:
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
      antialias: Whether a pixel of an example is the average over the area of the image that it
        covers. If not, it is interpolated between four pixels, as by Keras'
        `image_dataset_from_directory` and `tf.image.resize`; this needs OpenCV.
      decoder: What decodes JPEG files: "pillow", or "simplejpeg", which is faster and gives the
        pixels of `tf.io.decode_image`.

    Attributes:
      classes: The names of the classes' folders, sorted; the same for all splits. A label is an
        index into it.
      broken: What happens to a file that cannot be decoded.
      decoders: Names and versions of the libraries that decode and resize beside Pillow, part of
        the identity of a run's data.
      files: The files of this split as paths below the folder, with "/"; sorted by class and name.
      skipped: The files left out by `broken="skip"`, with the reason.

    Raises:
      UserError: If the folder does not hold images of this structure, the split is empty, or an
        option is invalid.
    """

    thread_safe = True
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
        antialias: bool = True,
        decoder: Decoder = "pillow",
    ) -> None:
        _check_choice("decoder", decoder, get_args(Decoder))
        if not isinstance(antialias, bool):
            raise UserError(f"antialias is {antialias!r}: it must be True or False")
        _check_choice("broken", broken, get_args(Broken))
        _check_choice("cache", cache, get_args(Cache))
        if os.fspath(folder) == "":
            raise UserError("folder is '': give the folder that holds the folders of the classes")
        check_splits(splits)
        if split is not None:
            _check_choice("split", split, splits)
        if is_url(os.fspath(folder)):
            file_system(os.fspath(folder))
        self.folder = epath.Path(folder).expanduser()
        # The methods of etils' paths would take a tenth of the time to read a small image.
        self._folder = self.folder if is_url(self.folder) else Path(self.folder)
        self.size = checked_size(size)
        self._decoding = Decoding(self.size, antialias, decoder)
        self.decoders = self._decoding.libraries
        self.broken = broken
        self._threads = usable_cores() if threads is None else _checked_threads(threads)
        self._disk = _image_cache(cache, cache_dir, self._decoding)
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
        path = self._folder / file
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
            return decode(content, self._decoding)
        key = self._disk.key(content)
        if (image := self._disk.get(key)) is None:
            image = decode(content, self._decoding)
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


def checked_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """Returns height and width; raises `UserError` if they are not positive numbers of pixels."""
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
    cache: Cache, cache_dir: str | os.PathLike[str] | None, decoding: Decoding
) -> ImageCache | None:
    if cache != "disk":
        if cache_dir is not None:
            raise UserError(f"cache_dir is for cache='disk', but cache is {cache!r}: {cache_dir}")
        return None
    if cache_dir is None or os.fspath(cache_dir) == "":
        raise UserError("cache='disk' needs cache_dir, the folder for decoded images")
    if is_url(os.fspath(cache_dir)):
        raise UserError(f"cache_dir is {cache_dir}: it must be a local folder")
    return ImageCache(Path(cache_dir).expanduser(), decoding)


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


# -- IDX files, the format of MNIST: a header with the shape, then the values; gzipped or not ------
#
# Source: the format's description on the MNIST page of Y. LeCun, C. Cortes and C. Burges.

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PIECE = 2**20  # bytes decompressed at a time
_SAFE_SIZE = 2**26  # bytes up to which an array is allocated before its file's length is checked
_USUAL_RATIO = 20  # of compression; deflate reaches 1032 on zeros alone

_Content = IO[bytes] | gzip.GzipFile


def read_idx(path: str | epath.Path) -> np.ndarray:
    """Reads an IDX file.

    Memory is bounded: a gzip file is decompressed in pieces, up to the size in its header.

    Args:
      path: The file, plain or gzipped.

    Returns:
      The array of the shape and dtype in the header, in native byte order.

    Raises:
      UserError: If the file is missing, is not an IDX file, has a length that contradicts its
        header, or does not fit into memory.
    """
    path = epath.Path(path)
    try:
        if not is_url(path) and not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("it is not a regular file")  # opening a pipe would block
        with path.open("rb") as file:
            return _read(file, path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _read(file: IO[bytes], path: epath.Path) -> np.ndarray:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    compressed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    content: _Content = gzip.GzipFile(fileobj=file) if compressed else file
    magic = content.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES:
        raise UserError(f"{path}: no IDX file (it begins with {magic.hex(' ') or 'nothing'})")
    dtype, dims = np.dtype(_DTYPES[magic[2]]), magic[3]
    sizes = content.read(4 * dims)
    if len(sizes) < 4 * dims:
        raise UserError(
            f"{path}: truncated: {4 + len(sizes)} bytes, but the header alone has {4 + 4 * dims}"
        )
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    expected = 4 + 4 * dims + math.prod(shape) * dtype.itemsize

    def check_length(length: int, more: str = "") -> None:
        if length != expected:
            raise UserError(
                f"{path}: {'truncated' if length < expected else 'too long'}: shape {shape} "
                f"needs {expected:,} bytes, the file has {length:,}{more}"
            )

    if not compressed:
        check_length(size)
    elif expected > max(_SAFE_SIZE, _USUAL_RATIO * size):
        # The length is checked before so much memory is filled.
        length = _skip(content, expected + 1)
        check_length(length, " or more" if length > expected else "")
        content.seek(len(magic) + len(sizes))
    try:
        array = np.empty(shape, dtype)
    except ValueError as error:
        raise UserError(
            f"{path}: NumPy cannot create an array of shape {shape}: {error}"
        ) from error
    except MemoryError as error:
        needed = expected - len(magic) - len(sizes)
        raise UserError(f"{path}: not enough memory for {needed:,} bytes, shape {shape}") from error
    data, filled = array.reshape(-1).view(np.uint8), 0
    while piece := content.read(min(_PIECE, len(data) - filled)):
        data[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
        filled += len(piece)
    length = 4 + len(sizes) + filled
    check_length(length)
    # The last read of a gzip file also compares its checksum.
    check_length(length + len(content.read(1)), " or more")
    return array if dtype.isnative else array.byteswap(inplace=True).view(dtype.newbyteorder("="))


def _skip(content: _Content, end: int) -> int:
    """Reads up to the byte `end`; returns the position, less than `end` if the file is shorter."""
    while piece := content.read(min(_PIECE, end - content.tell())):
        del piece
    return content.tell()


def find_idx(folder: str | os.PathLike[str], name: str = "") -> epath.Path | None:
    """Returns the path of an IDX file, plain or gzipped; None if it does not exist.

    Args:
      folder: The folder, a local path or a URL.
      name: The name of the plain file; the gzipped file has the suffix `.gz` in addition.

    Raises:
      UserError: If `name` is empty.
    """
    if not name:
        raise UserError(
            f"find_idx({str(folder)!r}) lacks the file's name: call find_idx(folder, name), for "
            'example find_idx("data", "train-images-idx3-ubyte"). read_idx(path) reads a file'
        )
    inside = epath.Path(folder)
    return next((p for p in (inside / name, inside / f"{name}.gz") if p.exists()), None)
