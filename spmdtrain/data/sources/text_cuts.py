"""Scanners that find where the examples of a text begin, from pieces of it."""

from typing import Protocol

import numpy as np

_NONE = np.zeros(0, np.int64)
_LF, _CR = 10, 13


class Scanner(Protocol):
    """A scan of a text in pieces. Examples without content are left out."""

    def feed(self, piece: bytes) -> np.ndarray:
        """Returns where examples begin, int64, without those that were returned before.

        `piece` has the next bytes of the text, at least one.
        """
        ...

    def finish(self) -> np.ndarray:
        """Returns where the other examples begin."""
        ...


class LineScanner:
    """A scanner for lines that are not empty, or for paragraphs: lines between empty ones.

    A line ends with LF or CR LF.
    """

    def __init__(self, *, paragraphs: bool) -> None:
        self._paragraphs = paragraphs
        self._after_empty = True  # whether the previous line is empty, or there is none
        self._position = 0  # of the next piece
        self._start = 0  # of the line that is not complete
        self._last = 0  # byte of the previous piece

    def feed(self, piece: bytes) -> np.ndarray:
        content = np.frombuffer(piece, np.uint8)
        ends = np.flatnonzero(content == _LF)
        # The byte before each end.
        before = content[ends - 1]
        if len(ends) and ends[0] == 0:
            before[0] = self._last
        ends += self._position
        self._position, self._last = self._position + len(piece), piece[-1]
        if not len(ends):
            return _NONE
        starts = np.concatenate([[self._start], ends[:-1] + 1])
        self._start = int(ends[-1]) + 1
        return self._examples(starts, ends - starts, before)

    def finish(self) -> np.ndarray:
        length = self._position - self._start
        return self._examples(np.array([self._start]), np.array([length]), np.array([self._last]))

    def _examples(self, starts: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        empty = (lengths == 0) | ((lengths == 1) & (last == _CR))
        chosen = ~empty
        if self._paragraphs:
            chosen &= np.concatenate([[self._after_empty], empty[:-1]])
            self._after_empty = bool(empty[-1])
        return starts[chosen]


class SeparatorScanner:
    """A scanner for the texts between separators that hold more than white space."""

    def __init__(self, separator: bytes) -> None:
        self._separator = separator
        self._rest = b""  # the end of the previous pieces, where a separator may begin
        self._position = 0  # of `_rest`
        self._start = 0  # of the example that is not complete
        self._has_text = False  # whether it holds more than white space, before `_rest`

    def feed(self, piece: bytes) -> np.ndarray:
        content, found, begin = self._rest + piece, [], 0
        while (end := content.find(self._separator, begin)) >= 0:
            if self._has_text or content[begin:end].strip():
                found.append(self._start)
            begin = end + len(self._separator)
            self._start, self._has_text = self._position + begin, False
        kept = max(begin, len(content) - len(self._separator) + 1)
        self._has_text = self._has_text or bool(content[begin:kept].strip())
        self._rest, self._position = content[kept:], self._position + kept
        return np.array(found, np.int64)

    def finish(self) -> np.ndarray:
        has_text = self._has_text or bool(self._rest.strip())
        return np.array([self._start] if has_text else [], np.int64)
