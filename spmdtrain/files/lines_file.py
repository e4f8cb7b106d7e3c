"""Files of JSON lines that grow during a run."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from etils import epath

from spmdtrain.errors import StorageError
from spmdtrain.files import no_follow
from spmdtrain.files.storage import failures, one_line
from spmdtrain.files.validation import LARGEST_LOG, read_bytes


class LinesFile:
    """A file to which complete lines are appended, also over several starts of a run.

    Args:
      local: The local folder of the file.
      name: The name of the file.
      workdir: The workdir. If it is a URL, an earlier content is copied from there first.
    """

    def __init__(self, local: Path, name: str, workdir: epath.Path) -> None:
        self._local, self._name, self._path = local, name, workdir / name
        try:
            before = read_bytes(self._path, LARGEST_LOG)
            if epath.Path(local) != workdir:
                (local / name).write_bytes(before)
        except FileNotFoundError:
            before = b""
        except failures(self._path) as error:
            raise StorageError(f"{self._path} cannot be read: {one_line(error)}") from error
        self._complete = before.rfind(b"\n") + 1  # bytes of complete lines

    def append(self, content: Mapping[str, Any]) -> None:
        """Appends a line.

        Args:
          content: The content of the line, JSON values.

        Raises:
          StorageError: If the file cannot be written.
        """
        try:
            with self._opened() as file:
                # Removes an incomplete line, which a kill or a full disk may have left.
                file.truncate(min(self._complete, file.tell()))
                file.write(json.dumps(content).encode() + b"\n")
                file.flush()
                self._complete = file.tell()
        except failures(self._path) as error:
            raise StorageError(f"{self._path} cannot be written: {one_line(error)}") from error

    def _opened(self) -> IO[bytes]:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return os.fdopen(no_follow.open_file(self._local, self._name, flags), "ab")
