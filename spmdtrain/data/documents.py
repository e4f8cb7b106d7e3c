"""Documents: random access to 1-D arrays of tokens, and the lengths of all of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from spmdtrain.data.batched import BatchedDataset
from spmdtrain.data.indexable import describe, read_examples
from spmdtrain.data.libraries import from_library
from spmdtrain.data.progress import delayed_progress
from spmdtrain.data.scans import cached_scan, source_key
from spmdtrain.data.tables import HuggingFaceDataset
from spmdtrain.errors import UserError, printable

_BATCH = 1024  # documents read at once by a scan
_LARGEST = np.iinfo(np.int32).max
_COUNTING = "counting tokens"


def check_source(source: Any, what: str) -> None:
    """Raises `UserError` if a source has no random access to single records.

    `what` is the purpose of the source, for messages: "packed".
    """
    checked = from_library(source)  # streams, and what Grain's MapDataset must not do
    if isinstance(checked, BatchedDataset):
        raise UserError(
            f"a {describe(source)} cannot be {what}: its items are batches. Give the source from "
            "which it makes them"
        )
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
    """Reads documents, several at once if `documents` has `__getitems__`: int32 (n,) each.

    `documents` has 1-D arrays of integers, or records that hold one in `field`.

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
    """Returns the number of tokens of every document: int32 (number of documents,), read-only.

    They come from `documents.lengths()` if there is such a method. If not, all documents are read
    once by one process of each machine, and the result is cached in the user's cache folder by
    their `source_key`. The arguments are as for `read_documents`.

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
        with delayed_progress(_COUNTING, count) as advance:
            for start in range(0, count, _BATCH):
                indices = range(start, min(start + _BATCH, count))
                found = read_documents(documents, indices, field)
                lengths[start : start + _BATCH] = [len(tokens) for tokens in found]
                advance(start + len(found))
        return lengths

    key = source_key(documents, lambda indices: _contents(documents, indices, field), field)
    return cached_scan("lengths", key, scan, _COUNTING)


def _contents(documents: Any, indices: Sequence[int], field: str | None) -> list[bytes]:
    return [tokens.tobytes() for tokens in read_documents(documents, indices, field)]
