"""Packing: several documents in each row of a fixed number of tokens."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.data.datasets import blocks_of
from spmdtrain.data.documents import check_source, document_lengths, read_documents
from spmdtrain.data.order import BLOCKS_PER_GROUP
from spmdtrain.data.progress import delayed_progress
from spmdtrain.data.scans import cached_scan, scan_folder
from spmdtrain.data.sources.block_cache import BlockCache
from spmdtrain.errors import UserError

_ALGORITHM = 1  # changes with the result of `best_fit`, whose row counts are cached
# Threads that read ahead may be in the next group of shuffled windows.
_WINDOWS_READ = 2 * BLOCKS_PER_GROUP
_DOCUMENTS_SHOWN = 5  # names in the description of a row
_WINDOWS_KEPT = 4 * _WINDOWS_READ  # assignments, of 50 kB each for 4,096 documents
_TOKENS_KEPT = 2**24  # of documents longer than a row, which several rows need


def best_fit(lengths: Iterable[int], capacity: int) -> tuple[list[int], int]:
    """Assigns each piece to the fullest row that has room for it, or to a new row.

    Returns the row of each piece, and the number of rows. Pieces have 1 to `capacity` tokens; in
    descending order of their lengths this is best-fit-decreasing bin packing.
    """
    rows_with: dict[int, list[int]] = {}  # by number of free tokens
    spaces = 0  # bit n is set if a row has n free tokens
    assigned, count = [], 0
    for length in lengths:
        if large_enough := spaces >> length:
            space = length + (large_enough & -large_enough).bit_length() - 1
            rows = rows_with[space]
            row = rows.pop()
            if not rows:
                spaces ^= 1 << space
        else:
            row, space = count, capacity
            count += 1
        assigned.append(row)
        if left := space - length:
            rows_with.setdefault(left, []).append(row)
            spaces |= 1 << left
    return assigned, count


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents: a document, or a part of one that is longer than a row.

    Attributes:
      documents: The number of each piece's document, integers (n,).
      starts: The piece's first token within the document, int32 (n,).
      sizes: Tokens of the piece, int32 (n,).
    """

    documents: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


@dataclass(frozen=True)
class Assignment:
    """The rows of one window.

    Attributes:
      pieces: The pieces of all rows, ordered by row, with the numbers of documents in the window.
      first: The first piece of each row, then the number of pieces, int64 (rows + 1,).
    """

    pieces: Pieces
    first: np.ndarray


def assign(lengths: np.ndarray, capacity: int) -> Assignment:
    """Assigns the documents of a window to rows. Documents longer than a row are split.

    `lengths` are the tokens of each document, int32 (n,); `capacity` is the tokens of a row.
    """
    counts = -(-lengths // capacity)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    first_piece = np.cumsum(counts) - counts
    starts = (np.arange(len(documents)) - first_piece[documents]) * capacity
    sizes = np.minimum(lengths[documents] - starts, capacity)
    order = np.argsort(-sizes, kind="stable")
    rows, count = best_fit(sizes[order].tolist(), capacity)
    by_row = np.argsort(rows, kind="stable")
    first = np.searchsorted(np.asarray(rows, np.int64)[by_row], np.arange(count + 1))
    order = order[by_row]
    pieces = Pieces(documents[order], starts[order].astype(np.int32), sizes[order].astype(np.int32))
    return Assignment(pieces, first)


class RecentDocuments:
    """A thread-safe LRU cache of documents. Pickling drops its content.

    Its capacity is in tokens. The most recent document is kept even if it is longer.
    """

    def __init__(self, tokens: int) -> None:
        self._limit = tokens
        self._documents: OrderedDict[int, np.ndarray] = OrderedDict()
        self._tokens, self._lock = 0, threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), (self._limit,)

    def find(self, index: int) -> np.ndarray | None:
        """Returns a document; None if it is not cached."""
        with self._lock:
            if index in self._documents:
                self._documents.move_to_end(index)
            return self._documents.get(index)

    def put(self, index: int, document: np.ndarray) -> None:
        """Caches a document, and drops the least recently used ones beyond the capacity."""
        with self._lock:
            if index in self._documents:
                return
            self._documents[index] = document
            self._tokens += len(document)
            while self._tokens > self._limit and len(self._documents) > 1:
                self._tokens -= len(self._documents.popitem(last=False)[1])


class Packed:
    """Documents packed into rows of a fixed number of tokens, as a dataset.

    The documents are divided into windows of consecutive documents. Best-fit-decreasing packs the
    documents of a window into as few rows as possible. A document longer than a row is split into
    pieces of at most a row; in each piece positions begin at 0. A document without tokens is left
    out.

    Rows are a function of the lengths of all documents, which are read once and cached: see
    `document_lengths`. Only the number of rows of each window is kept; the assignment of a window
    is computed when one of its rows is read. Each token is in exactly one row, whatever the order
    in which the rows are read.

    Windows have `window` documents each and ignore block boundaries, so small blocks do not leave
    rows half empty. A window reads at most one block more than its documents fill. If the documents
    have `reserve_blocks(count)`, they keep the blocks of a group of shuffled windows in memory: 16
    windows, with documents of 2 kB about 130 MB.

    A row is a dictionary: `tokens`, int32 (length,); `segments`, int32 (length,), 1 for the first
    document of the row, 2 for the second and so on, 0 for padding; `positions`, int32 (length,),
    within the piece; `weights`, f32 (length,), 1 where a token is predicted from earlier tokens of
    its document (position > 0), else 0.

    Args:
      documents: A source of 1-D arrays of integers: an object with `__len__` and
        `__getitem__(int)`, and optionally `__getitems__(list of int)`, `lengths()` (the number of
        tokens of every document) and `fingerprint()` (a text that changes with the documents).
      length: Tokens of a row.
      window: Number of documents that are packed together.
      field: The field with the tokens, if the documents are records: dictionaries.

    Attributes:
      documents: The documents.
      length: Tokens of a row.
      window: Number of documents that are packed together.
      field: The field with the tokens, or None.
      blocks: int64 (m + 1,), the first row of each window that has rows, then the number of rows.
      empty: Number of documents without tokens.
      tokens: Number of tokens of all documents.

    Raises:
      UserError: If an argument is invalid, a document is not an array of tokens, or none has any.
    """

    def __init__(
        self, documents: Any, length: int, window: int = 4096, *, field: str | None = None
    ) -> None:
        for name, value in (("length", length), ("window", window)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise UserError(f"{name} is {value!r}: it must be a number of at least 1")
        check_source(documents, "packed")
        self.documents, self.length, self.window = documents, int(length), int(window)
        self.field = field
        self._lengths = document_lengths(documents, field)
        self.tokens = int(self._lengths.sum(dtype=np.int64))
        self.empty = len(self._lengths) - int(np.count_nonzero(self._lengths))
        if not self.tokens:
            raise UserError(f"the {len(self._lengths)} documents to pack have no tokens")
        self._first_rows = np.concatenate([[0], np.cumsum(self._row_counts(), dtype=np.int64)])
        self.blocks = np.unique(self._first_rows)
        self._reserve_blocks()
        self._assignments: BlockCache[Assignment] = BlockCache(_WINDOWS_KEPT)
        self._long_documents = RecentDocuments(_TOKENS_KEPT)

    def __len__(self) -> int:
        return int(self._first_rows[-1])

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Reads rows.

        Args:
          indices: Their numbers, int (n,).

        Returns:
          `tokens`, `segments`, `positions`, all int32 (n, length), and `weights`, f32 (n, length).

        Raises:
          UserError: If a document has another length than when all lengths were read.
        """
        indices = np.asarray(indices, np.int64)
        pieces, counts = self._pieces(indices)
        sizes = pieces.sizes
        read, of_piece = np.unique(pieces.documents, return_inverse=True)
        texts = self._read(read)
        parts = zip(of_piece.tolist(), pieces.starts.tolist(), sizes.tolist(), strict=True)
        tokens = np.concatenate([texts[i][start : start + size] for i, start, size in parts])

        number = np.arange(len(sizes)) - np.repeat(np.cumsum(counts) - counts, counts)
        row_of = np.repeat(np.arange(len(indices)), counts)
        filled = np.bincount(row_of, sizes, minlength=len(indices))
        is_token = np.arange(self.length) < filled[:, None]
        shape = (len(indices), self.length)
        found = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")}
        found["tokens"][is_token] = tokens
        found["segments"][is_token] = np.repeat(number + 1, sizes)
        found["positions"][is_token] = np.arange(len(tokens)) - np.repeat(
            np.cumsum(sizes) - sizes, sizes
        )
        return found | {"weights": (found["positions"] > 0).astype(np.float32)}

    def describe(self, index: int) -> str:
        """Returns the names of the documents of a row.

        Args:
          index: The number of the row.
        """
        pieces, _ = self._pieces(np.array([index]))
        numbers = np.unique(pieces.documents).tolist()
        describe = getattr(self.documents, "describe", "document {}".format)
        shown = "; ".join(str(describe(number)) for number in numbers[:_DOCUMENTS_SHOWN])
        more = len(numbers) - _DOCUMENTS_SHOWN
        return f"{shown}; and {more} more" if more > 0 else shown

    def _reserve_blocks(self) -> None:
        """Reserves cache for the blocks of one group of shuffled windows."""
        blocks = blocks_of(self.documents)
        if blocks is None or not hasattr(self.documents, "reserve_blocks"):
            return
        starts = np.arange(0, len(self._lengths), self.window)
        ends = np.minimum(starts + self.window, len(self._lengths))
        first = np.searchsorted(blocks, starts, side="right") - 1
        last = np.searchsorted(blocks, ends - 1, side="right") - 1
        self.documents.reserve_blocks(_WINDOWS_READ * int((last - first + 1).max()))

    def _pieces(self, indices: np.ndarray) -> tuple[Pieces, np.ndarray]:
        """Returns the pieces of rows, with numbers of documents, and how many each row has."""
        windows = np.searchsorted(self._first_rows, indices, side="right") - 1
        within = indices - self._first_rows[windows]
        documents, starts, sizes = [], [], []
        for window, row in zip(windows.tolist(), within.tolist(), strict=True):
            found = self._assignments.get(window, self._assign)
            pieces, of_row = found.pieces, slice(*found.first[row : row + 2])
            documents.append(pieces.documents[of_row] + np.int64(window * self.window))
            starts.append(pieces.starts[of_row])
            sizes.append(pieces.sizes[of_row])
        counts = np.array([len(row) for row in sizes])
        return Pieces(*map(np.concatenate, (documents, starts, sizes))), counts

    def _lengths_of(self, window: int) -> np.ndarray:
        return self._lengths[window * self.window : (window + 1) * self.window]

    def _assign(self, window: int) -> Assignment:
        return assign(self._lengths_of(window), self.length)

    def _row_counts(self) -> np.ndarray:
        """Returns the number of rows of each window."""

        def count_rows() -> np.ndarray:
            counts = np.zeros(-(-len(self._lengths) // self.window), np.int32)
            with delayed_progress("packing", len(counts)) as advance:
                for window in range(len(counts)):
                    counts[window] = len(self._assign(window).first) - 1
                    advance(window + 1)
            return counts

        key = hashlib.sha256(f"{_ALGORITHM} {self.length} {self.window}\n".encode())
        key.update(self._lengths.data)
        return cached_scan("rows", key.digest(), count_rows, "packing")

    def _read(self, indices: np.ndarray) -> list[np.ndarray]:
        """Reads documents; those longer than a row are kept for the rows of their other pieces."""
        lengths = self._lengths[indices]
        texts: dict[int, np.ndarray] = {}
        for index in indices[lengths > self.length].tolist():
            if (kept := self._long_documents.find(index)) is not None:
                texts[index] = kept
        missing = [index for index in indices.tolist() if index not in texts]
        for index, text in zip(
            missing, read_documents(self.documents, missing, self.field), strict=True
        ):
            if len(text) != self._lengths[index]:
                raise UserError(
                    f"document {index} has {len(text)} tokens, but had {self._lengths[index]} when "
                    "all documents were counted: they have changed since then. If this is "
                    f"intended, delete {scan_folder()} and start again"
                )
            texts[index] = text
            if len(text) > self.length:
                self._long_documents.put(index, text)
        return [texts[index] for index in indices.tolist()]
