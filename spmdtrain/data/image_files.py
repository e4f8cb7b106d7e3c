"""The image files of a folder, their classes and splits: functions of their names alone."""

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
from spmdtrain.files.storage import failures, is_url, one_line

SPLITS: Mapping[str, float] = {"train": 0.8, "validation": 0.1, "test": 0.1}


def check_splits(splits: Mapping[str, float]) -> None:
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


def files_of_split(
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


def class_of(file: str) -> str:
    """Returns the class of a file, the first folder of its path."""
    return file.partition("/")[0]


def find_images(folder: epath.Path) -> dict[str, list[str]]:
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
