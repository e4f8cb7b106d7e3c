"""Documents: random access to 1-D arrays of tokens, and the lengths of all of them."""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmdtrain.data.indexable import describe, read_examples
from spmdtrain.data.libraries import from_library
from spmdtrain.data.progress import delayed_progress
from spmdtrain.data.tables import HuggingFaceDataset
from spmdtrain.errors import UserError, printable
from spmdtrain.files.cache_files import keep_file
from spmdtrain.files.user_folders import cache_folder

_BATCH = 1024  # documents read at once by a scan
_SAMPLES = 16  # documents whose content is part of the name of a cached file
_DIGEST = hashlib.sha256().digest_size * 2  # hexadecimal digits at the beginning of a cached file
_LARGEST = np.iinfo(np.int32).max

CACHE_DELAY = 1.0  # seconds; the result of a faster scan is not cached


def check_source(source: Any, what: str) -> None:
    """Checks that a source has random access to single records.

    Args:
      source: The source.
      what: The purpose of the source, for messages: "packed".

    Raises:
      UserError: If it has not.
    """
    checked = from_library(source)  # streams, and what Grain's MapDataset must not do
    if checked is not source and not isinstance(checked, HuggingFaceDataset):
        raise UserError(f"a {describe(source)} cannot be {what}: give Tokenized(table, tokenizer)")
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise UserError(
            f"a {type(source).__name__} cannot be {what}: give an object with __len__ and "
            "__getitem__(int), whose items are single documents"
        )


def read_documents(
    documents: Any, indices: Sequence[int], field: str | None = None
) -> list[np.ndarray]:
    """Reads documents, several at once if `documents` has `__getitems__`.

    Args:
      documents: A source of 1-D arrays of integers, or of records that hold one.
      indices: Their numbers.
      field: The field of the records with the tokens.

    Returns:
      Their tokens, int32 (n,) each.

    Raises:
      UserError: If a document cannot be read, or is not a 1-D array of integers that fit int32.
    """
    indices = [int(index) for index in indices]
    if not indices:
        return []
    found = read_examples(documents, indices)
    return [_tokens(document, index, field) for document, index in zip(found, indices, strict=True)]


def _tokens(document: Any, index: int, field: str | None) -> np.ndarray:
    if field is not None:
        if not isinstance(document, dict) or field not in document:
            has = f"fields {list(document)}" if isinstance(document, dict) else "no fields"
            raise UserError(f"document {index} has {has}, but field is {printable(field)!r}")
        document = document[field]
    tokens = None if isinstance(document, (str, bytes, dict)) else np.asarray(document)
    if tokens is not None and tokens.size == 0 and tokens.ndim == 1:
        return np.zeros(0, np.int32)  # an empty list is an array of floats
    if tokens is None or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        given = f"a {type(document).__name__}" if tokens is None else f"{tokens.dtype}"
        shape = "" if tokens is None else f"{list(tokens.shape)}"
        raise UserError(
            f"document {index} is {given}{shape}, not a 1-D array of tokens: "
            "Tokenized(source, tokenizer) makes tokens of text, and Packed(..., field=...) takes "
            "those of a record"
        )
    if not np.can_cast(tokens.dtype, np.uint16) and (
        int(tokens.min()) < 0 or tokens.max() > _LARGEST
    ):
        raise UserError(
            f"document {index} has tokens from {tokens.min()} to {tokens.max()}: tokens are from 0 "
            f"to {_LARGEST}"
        )
    return tokens.astype(np.int32, copy=False)


def document_lengths(documents: Any, field: str | None = None) -> np.ndarray:
    """Returns the number of tokens of every document.

    They come from `documents.lengths()` if there is such a method. If not, all documents are read
    once; a result that took more than a second is cached in the user's cache folder. The name of
    the file is a hash of the number of documents, of 16 of them, and of `documents.fingerprint()`
    if there is such a method.

    Args:
      documents: A source of 1-D arrays of integers, or of records that hold one.
      field: The field of the records with the tokens.

    Returns:
      int32 (number of documents,), read-only.

    Raises:
      UserError: If a document is not an array of tokens, or `lengths()` does not return as many
        numbers as there are documents.
    """
    count = len(documents)
    if hasattr(documents, "lengths"):
        lengths = np.asarray(documents.lengths())
        good = lengths.shape == (count,) and lengths.dtype.kind in "iu"
        if not good or (count and (lengths.min() < 0 or lengths.max() > _LARGEST)):
            raise UserError(
                f"lengths() of a {type(documents).__name__} returned {lengths.dtype}"
                f"{list(lengths.shape)} for {count} documents: it must return the number of tokens "
                "of each"
            )
        lengths = lengths.astype(np.int32, copy=False).view()
        lengths.flags.writeable = False
        return lengths

    def scan() -> np.ndarray:
        lengths = np.zeros(count, np.int32)
        with delayed_progress("counting tokens", count) as advance:
            for start in range(0, count, _BATCH):
                indices = range(start, min(start + _BATCH, count))
                found = read_documents(documents, indices, field)
                lengths[start : start + _BATCH] = [len(tokens) for tokens in found]
                advance(start + len(found))
        return lengths

    return cached("lengths", _fingerprint(documents, field), scan)


def _fingerprint(documents: Any, field: str | None) -> bytes:
    count = len(documents)
    digest = hashlib.sha256(f"{count} {field}\n".encode())
    if hasattr(documents, "fingerprint"):
        digest.update(f"{documents.fingerprint()}\n".encode())
    samples = np.unique(np.linspace(0, max(count - 1, 0), min(count, _SAMPLES)).astype(np.int64))
    for tokens in read_documents(documents, samples.tolist(), field):
        digest.update(f"{len(tokens)}\n".encode())
        digest.update(tokens.tobytes())
    return digest.digest()


def cached(kind: str, key: bytes, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns an array of int32 from the user's cache folder, or computes it.

    Args:
      kind: The kind of the array, which is part of the file's name.
      key: Everything that the array depends on, or a hash of it.
      compute: Returns the array. The result is cached if this took more than `CACHE_DELAY`.

    Returns:
      int32 (n,), read-only; a memory map if it comes from a file.
    """
    name = f"{kind}-{hashlib.sha256(kind.encode() + key).hexdigest()}"
    path = cache_folder() / "data" / name
    if (found := _load(path)) is not None:
        return found
    started = time.perf_counter()
    array = compute()
    array.flags.writeable = False
    if time.perf_counter() - started > CACHE_DELAY:
        keep_file(path, _digest(path, array) + array.tobytes())
    return array


def _load(path: Path) -> np.ndarray | None:
    """Returns the array of a cached file; None if the file is missing, corrupted or renamed."""
    try:
        size = path.stat().st_size - _DIGEST
        if not path.is_file() or size <= 0 or size % 4:
            return None
        array = np.memmap(path, np.int32, "r", _DIGEST)
        with path.open("rb") as file:
            digest = file.read(_DIGEST)
    except OSError:
        return None
    return array if digest == _digest(path, array) else None


def _digest(path: Path, array: np.ndarray) -> bytes:
    digest = hashlib.sha256(f"{path.name}\n".encode())
    digest.update(array.data)
    return digest.hexdigest().encode()
