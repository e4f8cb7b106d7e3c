"""The image files of a folder, their order, classes and splits: functions of their names alone."""

import collections
import functools
import hashlib
import itertools
import math
import numbers
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from etils import epath

from spmdtrain.data.image_decoding import OTHER_SUFFIXES, SUFFIXES
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError, printable
from spmdtrain.record.storage import failures, is_url, one_line

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
