"""The file of a checkpoint with the positions of a stream's shards."""

import hashlib
import json
import os
from collections.abc import Mapping

from etils import epath

from spmdtrain.checkpoints.manifest import CheckpointCorruptedError
from spmdtrain.errors import UserError
from spmdtrain.record import no_follow
from spmdtrain.record.storage import is_url
from spmdtrain.record.validation import LARGEST, Malformed, check, parse_object, read_bytes

NAME = "stream.json"


def write(folder: epath.Path, positions: Mapping[str, str]) -> str:
    """Writes the positions of all shards to a checkpoint that is not published yet.

    Returns the SHA-256 digest of the file, in hex. Without positions it writes nothing and returns
    "".

    Args:
      positions: Positions as text, by the index of the shard.

    Raises:
      UserError: If the positions are larger than `read` accepts.
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
    with no_follow.create(folder.parent, f"{folder.name}/{NAME}") as file:
        file.write(content)
        if not is_url(folder):  # before the folder is renamed
            file.flush()
            os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def read(folder: epath.Path, digest: str) -> dict[str, str]:
    """Returns the positions of all shards; empty if the checkpoint has none.

    `digest` is the result of `write`.

    Raises:
      CheckpointCorruptedError: If the file is missing, malformed, or does not match the digest.
      OSError: If it cannot be read.
    """
    if not digest:
        return {}
    try:
        content = read_bytes(folder / NAME)
        if hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointCorruptedError(f"{NAME} does not match its digest in the manifest")
        positions = parse_object(content)
        check(positions, dict[str, str], NAME)
    except FileNotFoundError:
        raise CheckpointCorruptedError(f"{NAME} is missing") from None
    except Malformed as error:
        raise CheckpointCorruptedError(f"{NAME} is malformed: {error}") from error
    return positions
