"""Files of tokens: windows of a fixed length as a dataset, or documents as a source."""

import hashlib
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.data.sources.files import (
    Files,
    LocalReader,
    SourceFile,
    cached_scan,
    delayed_progress,
    find_files,
    listed,
)
from spmdtrain.errors import BadRecordError, UserError, printable
from spmdtrain.record.storage import is_url, one_line
from spmdtrain.record.validation import read_npy_header

_LARGEST = np.iinfo(np.int32).max
PIECE = 2**22  # tokens of a scan that are read at once
_MILLION = 10**6

# The header of the files of llm.c: 256 integers of 32 bits. By magic number: version and dtype.
_HEADER = 1024
_LLM_C: dict[int, tuple[int, np.dtype[Any]]] = {
    20240520: (1, np.dtype("<u2")),
    20240801: (7, np.dtype("<u4")),
}


@dataclass(frozen=True)
class _Layout:
    """The position, number and dtype of the tokens in a file."""

    offset: int
    count: int
    dtype: np.dtype[Any]


class _TokenFiles:
    """The tokens of several files. `dtype` is for files without a header; None is uint16."""

    def __init__(self, files: Files, dtype: Any) -> None:
        for path in listed(files):
            if isinstance(path, (str, os.PathLike)) and is_url(os.fspath(path)):
                raise UserError(
                    f"{printable(path)}: token files are read at random positions, from a local "
                    "disk: copy them first (gcloud storage cp, aws s3 cp), or use Parquet files"
                )
        self.files = find_files(files, (".bin", ".npy"), "token files")
        wanted = None if dtype is None else _checked_dtype(dtype)
        self.reader = LocalReader(self.files)
        self.layouts = [self._layout(number, wanted) for number in range(len(self.files))]
        self.counts = np.array([layout.count for layout in self.layouts], np.int64)

    def read(self, file: int, start: int, stop: int) -> np.ndarray:
        """Returns the tokens `start` to `stop` of a file, int32."""
        layout = self.layouts[file]
        size = layout.dtype.itemsize
        content = self.reader.read(file, layout.offset + start * size, (stop - start) * size)
        tokens = np.frombuffer(content, layout.dtype)
        if not np.can_cast(layout.dtype, np.uint16):
            outside = (tokens < 0) | (tokens > _LARGEST)
            if outside.any():
                position = int(outside.argmax())
                raise BadRecordError(
                    f"{self.files[file]}: token {start + position:,} is {tokens[position]}: tokens "
                    f"are 0 to {_LARGEST:,}. Is the dtype really {layout.dtype}?"
                )
        return tokens.astype(np.int32)

    def fingerprint(self, *more: object) -> str:
        files = [(file.path, file.size, file.version) for file in self.files]
        dtypes = [str(layout.dtype) for layout in self.layouts]
        return hashlib.sha256(repr((files, dtypes, more)).encode()).hexdigest()

    def _layout(self, number: int, wanted: np.dtype[Any] | None) -> _Layout:
        file = self.files[number]
        if file.path.endswith(".npy"):
            return _npy_layout(file, wanted)
        offset, dtype = 0, np.dtype("<u2") if wanted is None else wanted
        if file.size >= _HEADER:
            magic, version, count = np.frombuffer(self.reader.read(number, 0, 12), "<i4").tolist()
            if magic in _LLM_C and _LLM_C[magic][0] == version:
                offset, dtype = _HEADER, _LLM_C[magic][1]
                _check_dtype(file, dtype, wanted)
                if file.size != offset + count * dtype.itemsize:
                    raise UserError(
                        f"{file}: the header says {count:,} tokens of {dtype}, which are "
                        f"{offset + count * dtype.itemsize:,} bytes, but the file has "
                        f"{file.size:,}: truncated or corrupted"
                    )
        count, rest = divmod(file.size - offset, dtype.itemsize)
        if rest:
            raise UserError(
                f"{file}: {file.size:,} bytes are not a whole number of {dtype} tokens: the file "
                "is truncated, or has another dtype"
            )
        return _Layout(offset, count, dtype)


class TokenFile:
    """Windows of tokens in files, as a dataset for language models.

    A window has `length` + 1 tokens: the inputs are all but the last, the targets all but the
    first. The last window of a file is padded with token 0, which has weight 0.

    Args:
      files: A file, a folder, a pattern, or a list of these. `.npy` holds a 1-D array of integers.
        Any other file holds tokens alone, as nanoGPT writes them, or after the header of llm.c.
      length: Number of tokens to predict in a window.
      dtype: The dtype of files without a header. The default is uint16, little-endian.
      stride: Distance between the beginnings of windows. By default `length`, so that each token is
        predicted once.

    Raises:
      UserError: If there are no such files, one is remote, malformed or of another dtype, or an
        option is out of range.
      StorageError: If a file cannot be read.
    """

    def __init__(
        self, files: Files, length: int, *, dtype: Any = None, stride: int | None = None
    ) -> None:
        self.length = _positive("length", length)
        self.stride = self.length if stride is None else _positive("stride", stride)
        self._tokens = _TokenFiles(files, dtype)
        counts = self._tokens.counts
        windows = np.minimum(
            1 + np.maximum(0, -((self.length + 1 - counts) // self.stride)),
            -((1 - counts) // self.stride),  # each begins before the last token
        )
        windows[counts < 2] = 0  # nothing to predict
        self._ends = np.cumsum(windows)
        if not self._ends[-1]:
            raise UserError(f"{self._tokens.files[0]}: fewer than two tokens: nothing to predict")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns windows.

        Args:
          indices: int64 (n,), their numbers.

        Returns:
          `tokens`, int32 (n, length + 1), and `weights`, f32 (n, length): 1 for targets, 0 for
          padding.

        Raises:
          UserError: If a token is negative or does not fit int32, or a file has changed.
          StorageError: If a file cannot be read.
        """
        rows = np.zeros((len(indices), self.length + 1), np.int32)
        weights = np.zeros((len(indices), self.length), np.float32)
        files = np.searchsorted(self._ends, indices, side="right")
        firsts = np.concatenate([[0], self._ends])[files]
        starts = (np.asarray(indices) - firsts) * self.stride
        stops = np.minimum(starts + self.length + 1, self._tokens.counts[files])
        for row, each in enumerate(
            zip(files.tolist(), starts.tolist(), stops.tolist(), strict=True)
        ):
            tokens = self._tokens.read(*each)
            rows[row, : len(tokens)] = tokens
            weights[row, : len(tokens) - 1] = 1
        return {"tokens": rows, "weights": weights}

    def describe(self, index: int) -> str:
        """Returns the file of a window and its first token there.

        Args:
          index: The number of the window.
        """
        file = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[file - 1]) if file else 0
        return f"{self._tokens.files[file]}: token {(index - first) * self.stride:,}"


class TokenDocuments:
    """The documents in files of tokens, as a source for `Packed`.

    A document ends with the token `end_of_document`, which belongs to it, or with its file. Their
    lengths are found by one scan, whose result is cached in the user's cache folder.

    Args:
      files: A file, a folder, a pattern, or a list of these, as for `TokenFile`.
      end_of_document: The last token of a document, such as 50256 for GPT-2.
      dtype: The dtype of files without a header. The default is uint16, little-endian.

    Raises:
      UserError: If there are no such files or tokens, one is remote, malformed or of another dtype.
      StorageError: If a file cannot be read.
    """

    def __init__(self, files: Files, end_of_document: int, *, dtype: Any = None) -> None:
        end = _as_integer(end_of_document)
        if end is None or not 0 <= end <= _LARGEST:
            raise UserError(
                f"end_of_document is {end_of_document!r}: it must be a token, 0 to {_LARGEST:,}"
            )
        self._tokens, self._end = _TokenFiles(files, dtype), end
        if not self._tokens.counts.any():
            raise UserError(f"{self._tokens.files[0]}: no tokens")
        key = self.fingerprint().encode()
        self._lengths = cached_scan("lengths", key, self._scan, "counting tokens")
        self._ends = np.cumsum(self._lengths, dtype=np.int64)
        self._file_ends = np.cumsum(self._tokens.counts)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        stop = int(self._ends[index])
        file = int(np.searchsorted(self._file_ends, stop))
        first = int(self._file_ends[file] - self._tokens.counts[file])
        return self._tokens.read(file, stop - int(self._lengths[index]) - first, stop - first)

    def __getitems__(self, indices: Sequence[int]) -> list[np.ndarray]:
        """Returns the tokens of several documents, int32 (n,) each, by their numbers."""
        return [self[index] for index in indices]

    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of each document, int32 (number of documents,)."""
        return self._lengths

    def fingerprint(self) -> str:
        """Returns a hash of the files' names, sizes and versions, the dtype and the last token."""
        return self._tokens.fingerprint(self._end)

    def _scan(self) -> np.ndarray:
        """Returns the lengths of all documents, int32."""
        lengths = [np.zeros(0, np.int64)]
        total, done = int(self._tokens.counts.sum()), 0
        with delayed_progress("counting tokens (millions)", total // _MILLION) as advance:
            for file, count in enumerate(self._tokens.counts.tolist()):
                last = 0  # the end of the previous document
                for start in range(0, count, PIECE):
                    tokens = self._tokens.read(file, start, min(start + PIECE, count))
                    ends = np.flatnonzero(tokens == self._end) + start + 1
                    lengths.append(np.diff(ends, prepend=last))
                    last = int(ends[-1]) if len(ends) else last
                    advance((done + start) // _MILLION)
                lengths.append(np.full(int(last < count), count - last))
                done += count
        found = np.concatenate(lengths)
        if (longest := int(found.max())) > _LARGEST:
            raise UserError(
                f"{self._tokens.files[0]}: a document of {longest:,} tokens is too long: does "
                f"token {self._end} end the documents?"
            )
        return found.astype(np.int32)


def _npy_layout(file: SourceFile, wanted: np.dtype[Any] | None) -> _Layout:
    try:
        with file.open() as content:
            shape, _, dtype, offset = read_npy_header(content)
    except (ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: not a .npy file: {one_line(error)}") from error
    if len(shape) != 1 or dtype.kind not in "iu":
        raise UserError(f"{file}: holds {dtype}{list(shape)}, not a 1-D array of integers")
    _check_dtype(file, dtype, wanted)
    if file.size != offset + shape[0] * dtype.itemsize:
        raise UserError(
            f"{file}: the header says {dtype}{list(shape)}, which are "
            f"{offset + shape[0] * dtype.itemsize:,} bytes, but the file has {file.size:,}: "
            "truncated or corrupted"
        )
    return _Layout(offset, shape[0], dtype)


def _check_dtype(file: SourceFile, found: np.dtype[Any], wanted: np.dtype[Any] | None) -> None:
    if wanted is not None and wanted != found:
        raise UserError(f"{file}: its header says {found}, but dtype is {wanted}: leave dtype out")


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype).newbyteorder("<")
    except TypeError:
        found = np.dtype(float)
    if found.kind not in "iu":
        raise UserError(
            f"dtype is {dtype!r}: it must be a type of integers, such as 'uint16' or 'uint32'"
        )
    return found


def _as_integer(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _positive(option: str, value: Any) -> int:
    if (number := _as_integer(value)) is None or number < 1:
        raise UserError(f"{option} is {value!r}: it must be at least 1")
    return number
