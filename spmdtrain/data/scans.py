"""Scans of all records of a source, by one process of a machine, with a cached result."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.record.user_folders import cache_folder, keep_file, locked, make_folder

SAMPLES = 16  # records whose content is part of the name of a cached file
CACHE_DELAY = 0.1  # seconds; the result of a faster scan is not cached
_DIGEST = hashlib.sha256().digest_size * 2  # hexadecimal digits at the beginning of a cached file


def scan_folder() -> Path:
    """Returns the folder of the cached results."""
    return cache_folder() / "data"


def source_key(
    source: Any, contents: Callable[[Sequence[int]], Iterable[bytes]], *options: object
) -> bytes:
    """Returns a hash of a source for `cached_scan`.

    It is a hash of the number of records, of the content of 16 of them, of the options, and of
    `source.fingerprint()` if there is such a method.

    Args:
      contents: Returns the content of records by their numbers.
      *options: What else the scan depends on.
    """
    count = len(source)
    digest = hashlib.sha256(f"{count} {options}\n".encode())
    if hasattr(source, "fingerprint"):
        digest.update(f"{source.fingerprint()}\n".encode())
    samples = np.unique(np.linspace(0, max(count - 1, 0), min(count, SAMPLES)).astype(np.int64))
    for content in contents(samples.tolist()):
        digest.update(f"{len(content)}\n".encode())
        digest.update(content)
    return digest.digest()


def cached_scan(
    kind: str,
    key: bytes,
    scan: Callable[[], np.ndarray],
    work: str,
    *,
    dtype: Any = np.int32,
    is_valid: Callable[[np.ndarray], bool] = lambda array: True,
) -> np.ndarray:
    """Returns the result of a scan from the user's cache folder, or scans.

    Of several processes on this machine, one scans and the others wait for its result. It is an
    array (n,), read-only; a memory map if it comes from a file.

    Args:
      kind: The kind of the result, which is part of the file's name.
      key: Everything that the result depends on, or a hash of it.
      scan: Returns the result. It is cached if this took more than `CACHE_DELAY`.
      work: What the scan does, such as "counting tokens", for the line of a process that waits.
      is_valid: Whether a result from the cache still holds.
    """
    path = scan_folder() / f"{kind}-{hashlib.sha256(kind.encode() + key).hexdigest()}"

    def load() -> np.ndarray | None:
        found = _load(path, np.dtype(dtype))
        return found if found is not None and is_valid(found) else None

    if (found := load()) is not None:
        return found
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without a cache folder every process scans
            make_folder(path.parent)
            stack.enter_context(locked(path, work))
        if (found := load()) is not None:
            return found
        started = time.perf_counter()
        array = scan()
        array.flags.writeable = False
        if time.perf_counter() - started > CACHE_DELAY:
            keep_file(path, _digest(path, array) + array.tobytes())
    return array


def _load(path: Path, dtype: np.dtype[Any]) -> np.ndarray | None:
    """Returns the array of a cached file; None if the file is missing, corrupted or renamed."""
    try:
        size = path.stat().st_size - _DIGEST
        if not path.is_file() or size < 0 or size % dtype.itemsize:
            return None
        # An empty memory map is an error.
        array = np.memmap(path, dtype, "r", _DIGEST) if size else np.zeros(0, dtype)
        with path.open("rb") as file:
            digest = file.read(_DIGEST)
    except OSError:
        return None
    return array if digest == _digest(path, array) else None


def _digest(path: Path, array: np.ndarray) -> bytes:
    digest = hashlib.sha256(f"{path.name}\n".encode())
    digest.update(array.data)
    return digest.hexdigest().encode()
