"""The samples, images, histograms and tables that a run has logged, from `media.jsonl`."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from etils import epath

from spmdtrain.document.blocks import MediaType
from spmdtrain.errors import UserError, foreign
from spmdtrain.files import no_follow
from spmdtrain.files.storage import failures, is_url
from spmdtrain.files.validation import Malformed, read_bytes
from spmdtrain.report.metric_columns import is_number

_LARGEST_PICTURE = 2**22  # bytes
_PNG = b"\x89PNG\r\n\x1a\n"
_LONGEST_NAME = 200
LONGEST_TEXT = 4000
_MOST_ROWS = 50  # of a table
_MOST_COLUMNS = 100
_LONGEST_LIST = 10_001  # the rows of a table, the edges of bins
_MOST_ITEMS = 200


class MediaKind(enum.StrEnum):
    """The kinds of items."""

    IMAGE = "image"
    FIGURE = "figure"
    TEXT = "text"
    HISTOGRAM = "histogram"
    TABLE = "table"


@dataclass(frozen=True)
class MediaItem:
    """One item of `media.jsonl`.

    Attributes:
      split: Such as `eval`.
      name: The name that the run gave.
      file: The picture's path in the workdir, if it is an image or a figure.
      captions: The texts of the images in the picture, row by row.
      edges: The edges of a histogram's bins, one more than `counts`.
      columns: The titles of a table's columns.
      rows: The cells of the first rows of a table.
      row_count: The number of all its rows.
    """

    step: int
    split: str
    name: str
    kind: MediaKind
    file: str = ""
    captions: Sequence[str] = ()
    text: str = ""
    edges: Sequence[float] = ()
    counts: Sequence[float] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    row_count: int = 0


@dataclass
class MediaLog:
    """The items of `media.jsonl` in the order of the file; of very many, the last steps only.

    Attributes:
      invalid: Number of lines that are not valid.
      dropped: Number of older items that are left out.
    """

    items: list[MediaItem] = field(default_factory=list)
    invalid: int = 0
    dropped: int = 0

    def add(self, content: Mapping[str, Any]) -> None:
        """Adds the object of a line; counts it as invalid if it is not an item."""
        try:
            self.items.append(_parse_item(content))
        except Malformed:
            self.invalid += 1
        if len(self.items) >= 2 * _MOST_ITEMS:
            kept = sorted(range(len(self.items)), key=lambda n: (self.items[n].step, n))
            self.dropped += len(kept) - _MOST_ITEMS
            self.items = [self.items[n] for n in sorted(kept[-_MOST_ITEMS:])]

    def newest(self) -> Sequence[MediaItem]:
        """Returns the items, the newest first. An item that was logged again counts once."""
        unique = {(x.step, x.split, x.name, n): x for n, x in _numbered(self.items)}
        return sorted(unique.values(), key=lambda item: -item.step)


def _numbered(items: Sequence[MediaItem]) -> list[tuple[int, MediaItem]]:
    """Returns each item with its number among the items of the same step, split and name.

    A step that is repeated after a restart logs the same items again, with the same files.
    """
    counts: dict[Any, int] = {}
    seen: dict[Any, int] = {}
    numbered = []
    for item in items:
        key = (item.step, item.split, item.name)
        if item.file and (key, item.file) in seen:
            numbered.append((seen[key, item.file], item))
            continue
        counts[key] = counts.get(key, -1) + 1
        if item.file:
            seen[key, item.file] = counts[key]
        numbered.append((counts[key], item))
    return numbered


def _parse_item(content: Mapping[str, Any]) -> MediaItem:
    """Returns the item of a line; raises `Malformed` if it is not valid."""
    step, kind = content.get("step"), content.get("kind")
    if type(step) is not int or step < 0 or kind not in tuple(MediaKind):
        raise Malformed("not an item")
    split, name = (foreign(content.get(key) or "", _LONGEST_NAME) for key in ("split", "name"))
    item: dict[str, Any] = {"step": step, "split": split, "name": name, "kind": MediaKind(kind)}
    match MediaKind(kind):
        case MediaKind.IMAGE | MediaKind.FIGURE:
            captions = [_cell(x) for x in _list(content.get("captions", []))]
            return MediaItem(**item, file=_inner_path(content.get("file")), captions=captions)
        case MediaKind.TEXT:
            return MediaItem(**item, text=_string(content.get("text"))[:LONGEST_TEXT])
        case MediaKind.HISTOGRAM:
            edges, counts = _numbers(content.get("edges")), _numbers(content.get("counts"))
            if len(edges) != len(counts) + 1 or not counts:
                raise Malformed("edges must be one more than counts")
            return MediaItem(**item, edges=edges, counts=counts)
        case MediaKind.TABLE:
            columns = [_cell(x) for x in _list(content.get("columns"), _MOST_COLUMNS)]
            rows = [[_cell(x) for x in _list(row)] for row in _list(content.get("rows"))]
            if any(len(row) != len(columns) for row in rows):
                raise Malformed("a row has another number of cells than there are columns")
            return MediaItem(**item, columns=columns, rows=rows[:_MOST_ROWS], row_count=len(rows))


def _list(value: Any, most: int = _LONGEST_LIST) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed("not a list")
    if len(value) > most:
        raise Malformed(f"a list of {len(value):,} entries, more than {most:,}")
    return value


def _numbers(value: Any) -> list[float]:
    numbers = _list(value)
    if not all(is_number(x) for x in numbers):
        raise Malformed("not numbers")
    return numbers


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Malformed("not a text")
    return value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return foreign("" if value is None else value, _LONGEST_NAME)


def _inner_path(value: Any) -> str:
    """Returns the path of a file below `media/`; raises `Malformed` if it leads elsewhere."""
    path = PurePosixPath(_string(value))
    parts = path.parts
    if "\0" in str(path) or path.is_absolute() or ".." in parts or parts[:1] != ("media",):
        raise Malformed("not a file below media/")
    if len(parts) < 2:
        raise Malformed("not a file below media/")
    return str(path)


def read_picture(folder: epath.Path, file: str) -> tuple[bytes, MediaType]:
    """Returns the content and the type of a picture, whose path is relative to the workdir.

    A link is not followed, because another user may have written the workdir, and the page may be
    given away. Raises `UserError` if the file cannot be read, or is neither PNG nor SVG.
    """
    try:
        if is_url(folder):
            content = read_bytes(folder / file, _LARGEST_PICTURE)
        else:
            content = no_follow.read_file(folder, file, _LARGEST_PICTURE)
    except UserError:
        raise
    except failures(folder) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if content.startswith(_PNG):
        return content, MediaType.PNG
    if file.endswith(".svg") and b"<svg" in content[:4096]:
        return content, MediaType.SVG
    raise UserError(f"{file} is neither a PNG nor an SVG file")
