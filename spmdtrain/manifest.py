"""The manifest of a checkpoint: what it is, and the check sums by which it is known to be whole."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

from spmdtrain import nofollow
from spmdtrain.errors import UserError
from spmdtrain.identity import Identity
from spmdtrain.storage import is_url

NAME = "manifest.json"
_BOOKS = (NAME, "_CHECKPOINT_METADATA")  # Orbax writes the hour into its own when all is done
_FORMAT = 1


class Damaged(UserError):
    """A checkpoint is not, or not whole, what was once saved. Says which file or parameter."""


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
    """Of every array by its path, see `spmdtrain.sums`."""
    files: Mapping[str, int]
    """Every file's size in bytes; empty on object stores, which check that by themselves."""
    epoch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What `Epochs.so_far` returned of the current epoch up to this step."""

    @property
    def size(self) -> int:
        """Bytes of all files; 0 where they are not known."""
        return sum(self.files.values())

    def write(self, folder: epath.Path) -> None:
        """Write it into a checkpoint's folder, sealed with a digest of its own."""
        content = {"format": _FORMAT} | dataclasses.asdict(self)
        sealed = content | {"sha256": _digest(content)}
        with nofollow.create(folder.parent, f"{folder.name}/{NAME}") as file:
            file.write((json.dumps(sealed, indent=1) + "\n").encode())
            if not is_url(folder):  # before the folder gets its name, as TensorStore does its own
                file.flush()
                os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: epath.Path) -> "Manifest":
        """A checkpoint's manifest. Raises `Damaged` where it is missing or not as written."""
        try:
            content = json.loads((folder / NAME).read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise Damaged(
                f"{NAME} is missing: the save did not end, or something else made it"
            ) from None
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
            raise Damaged(f"{NAME} is not as it was written")
        try:
            if content.pop("format") != _FORMAT:
                raise TypeError
            found = cls(identity=Identity(**content.pop("identity")), **content)
        except (TypeError, KeyError):
            raise UserError(
                f"{folder} was saved by another version of spmdtrain, which this one cannot read"
            ) from None
        if folder.name.isdecimal() and int(folder.name) != found.step:
            raise Damaged(f"it is the checkpoint of step {found.step} under another name")
        return found

    def check_files(self, folder: epath.Path) -> None:
        """Raise `Damaged` naming the first file that is missing or of another size."""
        for name, size in self.files.items():
            try:
                found = (folder / name).stat().length
            except (FileNotFoundError, NotADirectoryError):
                raise Damaged(f"{name} is missing") from None
            if found != size:
                raise Damaged(f"{name} has {found:,} bytes, and had {size:,}")


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


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
