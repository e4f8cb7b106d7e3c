"""A cache of decoded images on disk.

The name of an entry is a hash of everything that its pixels depend on, so no entry is ever stale.
"""

import contextlib
import hashlib
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spmdtrain.data.image_decoding import recipe
from spmdtrain.errors import StorageError, UserError
from spmdtrain.record.storage import one_line

_SUM = hashlib.sha256().digest_size  # bytes of the checksum, which precedes the pixels


@dataclass(frozen=True)
class ImageCache:
    """Decoded images of one size (height, width) in a local folder that processes may share.

    The folder is created if it does not exist; `UserError` if this fails.
    """

    folder: Path
    size: tuple[int, int]

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            kind = "a broken link" if self.folder.is_symlink() else "a file"
            raise UserError(f"cache_dir: {self.folder} is {kind}: give a folder") from error
        except OSError as error:
            raise UserError(f"cache_dir: {one_line(error)}: give a folder") from error

    def key(self, content: bytes) -> str:
        """Returns the name of the entry for an image file with these bytes."""
        height, width = self.size
        digest = hashlib.sha256(f"{recipe()} {height}x{width}\n".encode())
        digest.update(content)
        return digest.hexdigest()

    def get(self, key: str) -> np.ndarray | None:
        """Returns a stored image, uint8 (height, width, 3), read-only.

        None if the entry is missing or corrupted; `StorageError` if it cannot be read.
        """
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
        """Stores an image, uint8 (height, width, 3), atomically; `StorageError` if this fails."""
        path, pixels = self._path(key), image.tobytes()
        # A name unique to this call, in the folder of the final name, where a rename is atomic.
        temporary = path.with_name(f".{key}.{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(exist_ok=True, parents=True)
            temporary.write_bytes(_sum(key, pixels) + pixels)
            temporary.replace(path)
        except FileNotFoundError:
            return  # the cache is being deleted: the next read of the image stores it again
        except OSError as error:
            with contextlib.suppress(OSError):  # a file left behind is never read
                temporary.unlink()
            raise StorageError(self._failed(error)) from error

    def _failed(self, error: OSError) -> str:
        return (
            f"the image cache in {self.folder}: {one_line(error)}: free some space (this folder "
            "may be deleted at any time), or use cache='none'"
        )

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key


def _sum(key: str, pixels: bytes) -> bytes:
    """Returns the checksum of name and pixels, so that a file with a wrong name is rejected."""
    return hashlib.sha256(key.encode() + pixels).digest()
