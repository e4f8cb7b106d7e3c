"""The manifest of a checkpoint: what it is, and the check sums by which it is known to be whole."""

import dataclasses
import datetime
import errno
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
from etils import epath

from spmdtrain.checkpoints.run_identity import Identity
from spmdtrain.errors import UserError, foreign
from spmdtrain.files import no_follow
from spmdtrain.files.storage import is_url, size_and_time
from spmdtrain.files.validation import (
    Malformed,
    OtherFields,
    build,
    check,
    parse_object,
    read_bytes,
)

NAME = "manifest.json"
_BOOKS = (NAME, "_CHECKPOINT_METADATA")  # Orbax writes the hour into its own when all is done
_FORMAT = 1
_LEAF = re.compile(r"([\w<>]+)\[(?:\d{1,18}(?:,\d{1,18})*)?\]", re.ASCII)  # float32[784,128]
_SUM = re.compile("[0-9a-f]{8}")
_LARGEST_ARRAY = 2**63  # bytes
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_CONTROL_CHARACTERS = re.compile(r"[\0-\x1f\x7f-\x9f]")
# What is needed of a configuration, whatever else is in it.
_CONFIG: Mapping[str, Any] = {
    "seed": int,
    "global_batch_size": int | None,
    "best_metric": str,
    "epochs": int | None,
    "steps": int | None,
    "shuffle": Any,
}


class _Epoch(TypedDict):
    """Metrics of an unfinished epoch, as `Epochs.so_far` returns them."""

    steps: int
    seconds: float
    sums: Mapping[str, Sequence[float]]


class CheckpointCorruptedError(UserError):
    """A checkpoint is not, or not whole, what was once saved. Says which file or parameter."""

    def __init__(self, message: str) -> None:
        super().__init__(foreign(message, 1000))  # it quotes the checkpoint


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without loading an array."""

    step: int
    saved_at: str
    """UTC, as ISO 8601 has it."""
    identity: Identity
    metrics: Mapping[str, float] | None
    """Of the evaluation of this very state, if there was one and its best_metric is a number."""
    stopped: bool
    """Whether a callback ended the run here."""
    sums: Mapping[str, str]
    """Of every array by its path, see `spmdtrain.checkpoints.checksums`."""
    files: Mapping[str, int]
    """Every file's size in bytes; empty on object stores, which check that by themselves."""
    epoch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Metrics of the current epoch up to this step (`Epochs.so_far`); empty if not recorded."""

    @property
    def size(self) -> int:
        """Bytes of all files; 0 where they are not known."""
        return sum(self.files.values())

    def write(self, folder: epath.Path) -> None:
        """Write it into a checkpoint's folder, sealed with a digest of its own."""
        content = {"format": _FORMAT} | dataclasses.asdict(self)
        sealed = content | {"sha256": _digest(content)}
        with no_follow.create(folder.parent, f"{folder.name}/{NAME}") as file:
            file.write((json.dumps(sealed, indent=1) + "\n").encode())
            if not is_url(folder):  # before the folder gets its name, as TensorStore does its own
                file.flush()
                os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: epath.Path) -> "Manifest":
        """Returns the manifest of a checkpoint.

        Raises:
          CheckpointCorruptedError: If it is missing or malformed.
        """
        try:
            content = parse_object(read_bytes(folder / NAME))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointCorruptedError(
                f"{NAME} is missing: the save did not end, or something else made it"
            ) from None
        except Malformed as error:
            raise CheckpointCorruptedError(f"{NAME} is not as it was written: {error}") from error
        if content.pop("sha256", None) != _digest(content):
            raise CheckpointCorruptedError(f"{NAME} is not as it was written")
        try:
            if content.pop("format", None) != _FORMAT:
                raise OtherFields("format")
            found = build(cls, content)
            found._check()
        except OtherFields:
            raise UserError(
                f"{folder} was saved by another version of spmdtrain, which this one cannot read"
            ) from None
        except Malformed as error:  # the digest is no signature: anyone can compute it
            raise CheckpointCorruptedError(f"{NAME}: {error}") from error
        if folder.name.isdecimal() and int(folder.name) != found.step:
            raise CheckpointCorruptedError(
                f"it is the checkpoint of step {found.step} under another name"
            )
        return found

    def _check(self) -> None:
        """Raises `Malformed` if a value is none that a save writes, though its type is right."""
        config = self.identity.config
        for name, kind in _CONFIG.items():
            if name not in config:
                raise Malformed(f"identity.config.{name} is missing")
            check(config[name], kind, f"identity.config.{name}")
        check(config.get("best_direction", "min"), Literal["min", "max"], "best_direction")
        check(self.identity.classes, Sequence[str], "identity.dataset.classes")
        if self.epoch:
            check(self.epoch, _Epoch, "epoch")
            if any(len(pair) != 2 for pair in self.epoch["sums"].values()):
                raise Malformed("epoch.sums: not pairs of numbers")
        if self.step < 0:
            raise Malformed(f"step is {self.step}")
        try:
            if datetime.datetime.fromisoformat(self.saved_at).tzinfo is None:
                raise ValueError
        except ValueError:
            raise Malformed(f"saved_at is {self.saved_at[:60]!r}: not a time with a zone") from None
        for name, text in self.identity.leaves.items():
            if not _is_leaf(text):
                what = f"{name[:60]!r} is {text[:60]!r}"
                raise Malformed(f"identity.leaves: {what}, not as float32[784,128]")
        for name, size in self.files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or size < 0 or not _encodes(name):
                raise Malformed(f"files: {name[:60]!r} of {size} bytes is no file of a checkpoint")
        for name, text in self.sums.items():
            if not _SUM.fullmatch(text):
                raise Malformed(f"sums: {name[:60]!r} is {text[:60]!r}, not 8 hexadecimal digits")
        for name in (*self.identity.leaves, *self.sums, *self.files):
            if _CONTROL_CHARACTERS.search(name):
                raise Malformed(f"{name[:60]!r} is no name")

    def check_kinds(self, folder: epath.Path) -> None:
        """Checks that a checkpoint contains regular files and folders only.

        Opening a FIFO would block for ever.
        """
        for root, folders, names in () if is_url(folder) else os.walk(folder):
            for path in [Path(root, name) for name in sorted(folders + names)]:
                try:
                    mode = path.stat().st_mode
                except OSError as error:
                    if error.errno not in _ABSENT:
                        raise  # it cannot be reached now, whatever it is
                    raise CheckpointCorruptedError(
                        f"{path.relative_to(folder)} is missing"
                    ) from None
                whole = stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and not path.is_symlink())
                if not whole:
                    raise CheckpointCorruptedError(
                        f"{path.relative_to(folder)} is not a regular file or folder"
                    )

    def check_files(self, folder: epath.Path) -> None:
        """Raises `CheckpointCorruptedError` if a file is missing or of another size."""
        for name, size in self.files.items():
            try:
                found, _ = size_and_time(folder / name)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                raise CheckpointCorruptedError(f"{name[:200]} is missing") from None
            if found != size:
                raise CheckpointCorruptedError(f"{name} has {found:,} bytes, and had {size:,}")


def sizes(folder: epath.Path) -> dict[str, int]:
    """The size of every file in a checkpoint's folder."""
    if is_url(folder):
        return {}
    files = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(files)
        if path.name not in _BOOKS
    }


def _is_leaf(text: str) -> bool:
    """Returns whether a text describes an array as `float32[784,128]`."""
    if not (found := _LEAF.fullmatch(text)):
        return False
    try:
        is_key = found[1].startswith("key<")
        bits = 64 if is_key else jax.dtypes.itemsize_bits(jnp.dtype(found[1]))
    except (TypeError, ValueError):  # no dtype, or not one of JAX
        return False
    dims = text[text.index("[") + 1 : -1]
    return math.prod(int(dim) for dim in dims.split(",") if dim) * bits < 8 * _LARGEST_ARRAY


def _encodes(name: str) -> bool:
    """Returns whether a text can be a file's name: it has no halves of surrogate pairs."""
    try:
        return bool(os.fsencode(name))
    except UnicodeEncodeError:
        return False


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
