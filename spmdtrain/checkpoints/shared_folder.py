"""The check that all processes of a job share a folder."""

import secrets
import time
from pathlib import Path

from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError
from spmdtrain.record import no_follow

_MARKER = ".shared-"
_VISIBLE_WITHIN = 45.0  # seconds until a new file is visible on a network file system


def check_shared(folder: Path) -> None:
    """Checks that all processes of the job share an existing local folder.

    Otherwise each would write its part of a checkpoint to its own folder, and no checkpoint would
    be complete. Raises `UserError` if a process has another folder at this path than process 0.
    """
    name = process_group.broadcast(f"{_MARKER}{secrets.token_hex(8)}")
    marker = folder / name
    if process_group.is_chief():
        for left in sorted(folder.glob(f"{_MARKER}*")):  # by a start that was killed here
            no_follow.remove(folder, left.name)
        no_follow.create(folder, name).close()
    process_group.barrier()

    def check() -> None:
        deadline = time.monotonic() + _VISIBLE_WITHIN
        while not marker.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder} in {process_group.name()} is not the folder that "
                    f"{process_group.names()[0]} has there: use a workdir that all processes share"
                )
            time.sleep(0.2)

    try:
        process_group.run_on_all(check, UserError)
    finally:
        if process_group.is_chief():
            marker.unlink()
