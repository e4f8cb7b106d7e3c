"""The file `hashes.jsonl`: hashes of the state after some steps of a run."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from etils import epath

from spmdtrain.errors import StorageError, UserError
from spmdtrain.files.storage import failures, folder_of, one_line
from spmdtrain.files.validation import (
    LARGEST_LOG,
    Malformed,
    check,
    parse_object,
    read_bytes,
    without_other_fields,
)

HASHES_FILE = "hashes.jsonl"


@dataclass(frozen=True)
class StateHash:
    """A hash of the state after a step.

    Attributes:
      sums: The checksum of each array by its path, in the order of the state.
      loss: The loss before the step's update; None if it is not known.
    """

    step: int
    sums: Mapping[str, str] = field(default_factory=dict)
    loss: float | None = None

    @property
    def hash(self) -> str:
        return hash_of_sums(self.sums)

    def to_json(self) -> dict[str, Any]:
        """Returns the line of the file."""
        known = {} if self.loss is None else {"loss": self.loss}
        return {"step": self.step, "hash": self.hash} | known | {"arrays": dict(self.sums)}


@dataclass(frozen=True)
class ResumedAt:
    """The step from which a later start has resumed: hashes of later steps are void.

    It is -1 for a start that continues nothing.
    """

    step: int

    def to_json(self) -> dict[str, Any]:
        """Returns the line of the file."""
        return {"resumed": self.step}


def hash_of_sums(sums: Mapping[str, str]) -> str:
    """Returns the hash of a state as 16 hexadecimal digits, which does not depend on its sharding.

    It is the beginning of the SHA-256 of the paths and the checksums of all arrays, in any order.
    """
    return hashlib.sha256(json.dumps(dict(sums), sort_keys=True).encode()).hexdigest()[:16]


class _Line(TypedDict):
    """A line of the file with a hash."""

    step: int
    hash: str
    loss: NotRequired[float]
    arrays: dict[str, str]


class _ResumedLine(TypedDict):
    """A line of the file with the step of a resume."""

    resumed: int


def read_hashes(workdir: str) -> dict[int, StateHash]:
    """Returns the hashes of a run by step; none if there is no file.

    The file has the lines of all starts. The line of a resume voids earlier lines with later steps,
    because another trajectory has replaced these states. Lines that are not valid are left out,
    because a kill may have cut off any start's last line.

    Raises:
      StorageError: If the file cannot be read.
      UserError: If it is not a regular file.
    """
    path = folder_of(workdir) / HASHES_FILE
    try:
        lines = read_bytes(path, LARGEST_LOG).split(b"\n")[:-1]
    except FileNotFoundError:
        return {}
    except UserError:
        raise
    except failures(path) as error:
        raise StorageError(f"{path} cannot be read: {one_line(error)}") from error
    found: dict[int, StateHash] = {}
    for line in lines:
        if (each := _parsed(path, line)) is None:
            continue
        last = each.step if isinstance(each, ResumedAt) else each.step - 1
        while found and next(reversed(found)) > last:
            found.popitem()
        if isinstance(each, StateHash):
            found[each.step] = each
    return found


def _parsed(path: epath.Path, line: bytes) -> StateHash | ResumedAt | None:
    try:
        content = parse_object(line)
        if "resumed" in content:
            check(without_other_fields(content, _ResumedLine), _ResumedLine, path.name)
            return ResumedAt(content["resumed"])
        check(without_other_fields(content, _Line), _Line, path.name)
    except Malformed:
        return None
    return StateHash(content["step"], content["arrays"], content.get("loss"))
