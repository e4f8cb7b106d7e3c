"""Decoded pictures on disk, each under a name made of all that made it, so none is ever stale."""

import contextlib
import hashlib
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spmdtrain.data.image_decoding import recipe
from spmdtrain.errors import StorageError, UserError
from spmdtrain.files.storage import one_line

_SUM = hashlib.sha256().digest_size  # bytes in front of the pixels


@dataclass(frozen=True)
class ImageCache:
    """Pictures of one size, (height, width), in a local folder that processes may share."""

    folder: Path
    size: tuple[int, int]

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            what = "a link to nowhere" if self.folder.is_symlink() else "a file"
            raise UserError(f"cache_dir: {self.folder} is {what}: give a folder") from error
        except OSError as error:
            raise UserError(f"cache_dir: {one_line(error)}: give a folder") from error

    def key(self, content: bytes) -> str:
        """The name of what the bytes of a file are decoded to."""
        height, width = self.size
        made_by = hashlib.sha256(f"{recipe()} {height}x{width}\n".encode())
        made_by.update(content)
        return made_by.hexdigest()

    def get(self, key: str) -> np.ndarray | None:
        """The picture: uint8, (height, width, 3), read-only; None where it is absent or damaged."""
        try:
            stored = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(self._failed(error)) from error
        pixels = stored[_SUM:]
        if stored[:_SUM] != _sum(key, pixels):
            return None
        return np.frombuffer(pixels, np.uint8).reshape(*self.size, 3)

    def put(self, key: str, image: np.ndarray) -> None:
        """Store a picture, whole or not at all. Raises `StorageError`."""
        path, pixels = self._path(key), image.tobytes()
        # A name that no other process or thread writes to, in the folder that it is renamed in.
        temporary = path.with_name(f".{key}.{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(exist_ok=True, parents=True)
            temporary.write_bytes(_sum(key, pixels) + pixels)
            temporary.replace(path)
        except FileNotFoundError:
            return  # somebody deletes the cache just now: the next who asks makes it again
        except OSError as error:
            with contextlib.suppress(OSError):  # nobody reads what stays behind
                temporary.unlink()
            raise StorageError(self._failed(error)) from error

    def _failed(self, error: OSError) -> str:
        return (
            f"the cache of images in {self.folder}: {one_line(error)}: make room (all of this "
            "folder may be deleted at any time), or do without (cache='none')"
        )

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key


def _sum(key: str, pixels: bytes) -> bytes:
    """Over the name too: a file that came under another's is as wrong as a damaged one."""
    return hashlib.sha256(key.encode() + pixels).digest()
