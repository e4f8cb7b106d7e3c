"""The manifest of a checkpoint, and its items: what is stored and how."""

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
from typing import IO, Any, Literal, NotRequired, TypedDict

import jax
import jax.numpy as jnp
from etils import epath

from spmdtrain.checkpoints.orbax_import import ocp
from spmdtrain.checkpoints.run_identity import Identity
from spmdtrain.errors import UserError, foreign
from spmdtrain.record import no_follow
from spmdtrain.record.storage import is_url, size_and_time
from spmdtrain.record.validation import (
    LARGEST,
    Malformed,
    OtherFields,
    build,
    check,
    parse_object,
    read_bytes,
)
from spmdtrain.step.state import TrainState
from spmdtrain.tree import is_key, path_name

# -- The manifest of a checkpoint: its description, and the checksums that verify it ---------------

NAME = "manifest.json"
# Files without a recorded size: Orbax writes the time to its own after the manifest is written.
_UNRECORDED = (NAME, "_CHECKPOINT_METADATA")
_FORMAT = 1
_LEAF = re.compile(r"([\w<>]+)\[(?:\d{1,18}(?:,\d{1,18})*)?\]", re.ASCII)  # float32[784,128]
_SUM = re.compile("[0-9a-f]{8}")
_DEEPEST = 32  # folders inside one another; Orbax makes 3
_LARGEST_ARRAY = 2**63  # bytes
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_CONTROL_CHARACTERS = re.compile(r"[\0-\x1f\x7f-\x9f]")
# The fields of a configuration that are read, with their types; others are not checked.
_CONFIG: Mapping[str, Any] = {
    "seed": int,
    "global_batch_size": int | None,
    "best_metric": str,
    "best_direction": Literal["min", "max"],
    "epochs": int | None,
    "steps": int | None,
    "init_from": str | None,
    "skip_steps": Sequence[str | int],
    "shuffle": Any,
    "freeze": Any,
}


class _Epoch(TypedDict):
    """Metrics of an unfinished epoch, as `Epochs.to_json` returns them."""

    steps: int
    seconds: float
    sums: Mapping[str, Sequence[float]]
    watched: NotRequired[Mapping[str, Sequence[float]]]
    """Values of the last steps, as `DivergenceWatch.to_json` returns them."""


class CheckpointCorruptedError(UserError):
    """A checkpoint is corrupted or incomplete. The message names the file or parameter."""

    def __init__(self, message: str) -> None:
        super().__init__(foreign(message, 1000))  # because it quotes the checkpoint


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint, which is read without loading an array.

    Orbax' own metadata (`metrics`, `custom_metadata`) has no digest, and reading it requires the
    import of Orbax.
    """

    step: int
    saved_at: str
    """Time in UTC, ISO 8601."""
    identity: Identity
    metrics: Mapping[str, float] | None
    """Finite metrics of an evaluation of this state; None without an evaluation."""
    stopped: bool
    """Whether a callback ended the run here."""
    sums: Mapping[str, str]
    """Checksum of every array by its path; see `spmdtrain.checkpoints.checksums`."""
    files: Mapping[str, int]
    """Size of every file in bytes; empty on object stores, which verify sizes themselves."""
    epoch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Metrics of the current epoch up to this step (`Epochs.to_json`)."""
    callbacks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """States of the callbacks by name (`CallbackStates.to_json`)."""
    metrics_added: bool = False
    """Whether a later start added the metrics, so the callbacks' states do not include them."""
    stream: str = ""
    """SHA-256 digest of the positions in a stream (`read_positions`); empty without a stream."""

    @property
    def size(self) -> int:
        """Bytes of all files; 0 if their sizes are not recorded."""
        return sum(self.files.values())

    def write(self, folder: epath.Path) -> None:
        """Writes the manifest with its digest to the folder of a checkpoint, or replaces it.

        Args:
          folder: The folder.
        """
        content = {"format": _FORMAT} | dataclasses.asdict(self)
        signed = content | {"sha256": digest(content)}

        def write(file: IO[bytes]) -> None:
            file.write((json.dumps(signed, indent=1) + "\n").encode())
            if not is_url(folder):  # before the folder is renamed; TensorStore syncs its own files
                file.flush()
                os.fsync(file.fileno())

        no_follow.write(folder.parent, f"{folder.name}/{NAME}", write)

    @classmethod
    def read(cls, folder: epath.Path) -> "Manifest":
        """Returns the manifest of a checkpoint.

        Args:
          folder: The folder of the checkpoint.

        Raises:
          CheckpointCorruptedError: If it is missing, malformed or of another step.
          UserError: If another version of spmdtrain has written it.
        """
        try:
            text = read_bytes(folder / NAME)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointCorruptedError(
                f"{NAME} is missing: the save was interrupted, or it is not a checkpoint"
            ) from None
        except Malformed as error:
            raise CheckpointCorruptedError(f"{NAME} is malformed: {error}") from error
        return cls.parse(text, folder)

    @classmethod
    def parse(cls, text: bytes, folder: epath.Path) -> "Manifest":
        """Returns the manifest that a file contains.

        Args:
          text: The content of the file.
          folder: The folder of the checkpoint.

        Raises:
          CheckpointCorruptedError: If it is malformed or of another step.
          UserError: If another version of spmdtrain has written it.
        """
        try:
            content = parse_object(text)
        except Malformed as error:
            raise CheckpointCorruptedError(f"{NAME} is malformed: {error}") from error
        if content.pop("sha256", None) != digest(content):
            raise CheckpointCorruptedError(f"{NAME} does not match its digest")
        try:
            if (found := content.pop("format", None)) != _FORMAT:
                raise OtherFields(f"its format is {found}, not {_FORMAT}")
            manifest = build(cls, content)
            manifest._check()
        except OtherFields as error:
            problem = str(error).partition(". ")[0]  # without the names of known fields
            raise UserError(
                f"{folder} was saved by another version of spmdtrain, which this one cannot read "
                f"({problem}): continue with that version, or use another workdir"
            ) from None
        except Malformed as error:  # the digest is not a signature: anyone can compute it
            raise CheckpointCorruptedError(f"{NAME}: {error}") from error
        if folder.name.isdecimal() and int(folder.name) != manifest.step:
            raise CheckpointCorruptedError(
                f"it is the checkpoint of step {manifest.step} under another name"
            )
        return manifest

    def _check(self) -> None:
        """Raises `Malformed` for a value of the right type that no save writes."""
        config = self.identity.config
        for name, kind in _CONFIG.items():
            if name not in config:
                raise OtherFields(f"identity.config.{name} is missing")
            check(config[name], kind, f"identity.config.{name}")
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
        lora = self.identity.lora
        for name, text in [*self.identity.leaves.items(), *lora.leaves.items()]:
            if not _is_leaf(text):
                leaf = f"{name[:60]!r} is {text[:60]!r}"
                raise Malformed(f"identity.leaves: {leaf}, expected such as float32[784,128]")
        for name, size in self.files.items():
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or size < 0 or not _encodes(name):
                raise Malformed(
                    f"files: {name[:60]!r} of {size} bytes is not a file of a checkpoint"
                )
        for name, text in self.sums.items():
            if not _SUM.fullmatch(text):
                raise Malformed(f"sums: {name[:60]!r} is {text[:60]!r}, not 8 hexadecimal digits")
        for name in (*self.identity.leaves, *lora.leaves, *self.sums, *self.files):
            if _CONTROL_CHARACTERS.search(name):
                raise Malformed(f"{name[:60]!r} is not a valid name")

    def check_kinds(self, folder: epath.Path) -> None:
        """Checks that a checkpoint contains regular files and folders only.

        Opening a FIFO would block for ever.

        Args:
          folder: The folder of the checkpoint; at a URL nothing is checked.

        Raises:
          CheckpointCorruptedError: If an entry is missing or of another kind, or if folders are
            nested too deeply.
          OSError: If an entry cannot be accessed.
        """
        for root, folders, names in () if is_url(folder) else os.walk(folder):
            if len(Path(root).relative_to(folder).parts) > _DEEPEST:
                raise CheckpointCorruptedError("its folders are nested too deeply")
            for path in [Path(root, name) for name in sorted(folders + names)]:
                try:
                    mode = path.stat().st_mode
                except OSError as error:
                    if error.errno not in _ABSENT:
                        raise  # it may exist, but cannot be reached now
                    raise CheckpointCorruptedError(
                        f"{path.relative_to(folder)} is missing"
                    ) from None
                is_regular = stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and not path.is_symlink())
                if not is_regular:
                    raise CheckpointCorruptedError(
                        f"{path.relative_to(folder)} is not a regular file or folder"
                    )

    def check_files(self, folder: epath.Path) -> None:
        """Checks that all recorded files exist with their recorded sizes.

        Args:
          folder: The folder of the checkpoint.

        Raises:
          CheckpointCorruptedError: If a file is missing or of another size.
          OSError: If a file cannot be accessed.
        """
        for name, size in self.files.items():
            try:
                actual, _ = size_and_time(folder / name)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                raise CheckpointCorruptedError(f"{name[:200]} is missing") from None
            if actual != size:
                raise CheckpointCorruptedError(f"{name} has {actual:,} bytes, and had {size:,}")


def sizes(folder: epath.Path) -> dict[str, int]:
    """Returns the size of every file in a checkpoint's folder in bytes; empty for a URL."""
    if is_url(folder):
        return {}
    files = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(files)
        if path.name not in _UNRECORDED
    }


def _is_leaf(text: str) -> bool:
    """Returns whether a text describes an array as `float32[784,128]`."""
    if not (match := _LEAF.fullmatch(text)):
        return False
    try:
        is_key = match[1].startswith("key<")
        bits = 64 if is_key else jax.dtypes.itemsize_bits(jnp.dtype(match[1]))
    except (TypeError, ValueError):  # not a dtype, or not one of JAX
        return False
    dims = text[text.index("[") + 1 : -1]
    return math.prod(int(dim) for dim in dims.split(",") if dim) * bits < 8 * _LARGEST_ARRAY


def _encodes(name: str) -> bool:
    """Returns whether a text can be the name of a file, without unpaired surrogates."""
    try:
        return bool(os.fsencode(name))
    except UnicodeEncodeError:
        return False


def digest(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 digest of a manifest without its entry `sha256`, in hex."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# -- The items of a checkpoint, and what can be stored in them -------------------------------------

PyTree = Any

_ROWS = TrainState.FIELDS.items()
ITEMS: Mapping[str, tuple[str, ...]] = {
    item: tuple(name for name, row in _ROWS if row.item == item)
    for item in ("params", *sorted({row.item for _, row in _ROWS} - {"params"}))
}
"""The fields of the state in each item of a checkpoint; items are read independently. One without
arrays is left out. `training` has what only a resumed run needs."""


def steps_in(folder: epath.Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, ascending.

    A folder that does not exist has none, because in a bucket an empty folder does not exist.
    """

    def is_step(path: epath.Path) -> bool:
        is_number = re.fullmatch("0|[1-9][0-9]*", path.name) is not None
        return is_number and path.is_dir() and bool(ocp.utils.is_checkpoint_finalized(path))

    paths = folder.iterdir() if folder.exists() else ()
    return sorted(int(path.name) for path in paths if is_step(path))


def items_of(fields: Mapping[str, PyTree]) -> dict[str, dict[str, PyTree]]:
    """Returns fields of a state by item, without items that have no arrays."""
    items = {
        item: {name: fields[name] for name in names if name in fields}
        for item, names in ITEMS.items()
    }
    return {item: of_item for item, of_item in items.items() if jax.tree.leaves(of_item)}


def raw_keys(tree: PyTree) -> PyTree:
    """Replaces keys, or their `jax.ShapeDtypeStruct`, by their data: Orbax cannot store keys."""

    def raw(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        if isinstance(leaf, jax.Array):
            return jax.random.key_data(leaf)
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)

    return jax.tree.map(raw, tree)


def check_can_be_saved(state: PyTree) -> None:
    """Checks that Orbax can store a state of arrays or `jax.ShapeDtypeStruct`.

    Raises:
      UserError: If an array is empty, if its dtype cannot be stored, or if Orbax would write two
        arrays to the same place, such as a/b and a.b.
    """
    import tensorstore

    seen: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = path_name(path)
        if 0 in leaf.shape:
            raise UserError(f"{name} has shape {leaf.shape}: an empty array cannot be saved")
        try:
            _ = is_key(leaf) or tensorstore.dtype(leaf.dtype)
        except (ValueError, TypeError):
            raise UserError(
                f"{name} is {leaf.dtype}, which checkpoints cannot store: use another dtype, such "
                "as uint8, or leave workdir out"
            ) from None
        if (stored_name := name.replace("/", ".")) in seen:
            raise UserError(
                f"{seen[stored_name]} and {name} would both be saved as {stored_name}: rename one"
            )
        seen[stored_name] = name


# -- The file of a checkpoint with the positions of a stream's shards ------------------------------

POSITIONS_FILE = "stream.json"


def write_positions(folder: epath.Path, positions: Mapping[str, str]) -> str:
    """Writes the positions of all shards to a checkpoint that is not published yet.

    Returns the SHA-256 digest of the file, in hex. Without positions it writes nothing and returns
    "".

    Args:
      positions: Positions as text, by the index of the shard.

    Raises:
      UserError: If the positions are larger than `read_positions` accepts.
    """
    if not positions:
        return ""
    content = json.dumps({i: positions[i] for i in sorted(positions, key=int)}, indent=1).encode()
    if len(content) > LARGEST:
        shard = max(positions, key=lambda i: len(positions[i]))
        raise UserError(
            f"the states of the stream's iterators are {len(content):,} bytes, and the limit is "
            f"{LARGEST:,}; the largest is that of shard {shard} with {len(positions[shard]):,}: "
            "a state is a position in the data, not the data"
        )
    with no_follow.create(folder.parent, f"{folder.name}/{POSITIONS_FILE}") as file:
        file.write(content)
        if not is_url(folder):  # before the folder is renamed
            file.flush()
            os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def read_positions(folder: epath.Path, digest: str) -> dict[str, str]:
    """Returns the positions of all shards; empty if the checkpoint has none.

    `digest` is the result of `write_positions`.

    Raises:
      CheckpointCorruptedError: If the file is missing, malformed, or does not match the digest.
      OSError: If it cannot be read.
    """
    if not digest:
        return {}
    try:
        content = read_bytes(folder / POSITIONS_FILE)
        if hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointCorruptedError(
                f"{POSITIONS_FILE} does not match its digest in the manifest"
            )
        positions = parse_object(content)
        check(positions, dict[str, str], POSITIONS_FILE)
    except FileNotFoundError:
        raise CheckpointCorruptedError(f"{POSITIONS_FILE} is missing") from None
    except Malformed as error:
        raise CheckpointCorruptedError(f"{POSITIONS_FILE} is malformed: {error}") from error
    return positions
