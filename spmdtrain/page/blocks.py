"""The parts of a page: sections of facts, tables, charts, images and texts.

All text may come from untrusted files: the template escapes it.
"""

import base64
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from spmdtrain.page.charts import ChartBlock
from spmdtrain.page.widths import Width


class Tone(enum.StrEnum):
    """The meaning of a color of the page."""

    PLAIN = "plain"
    GOOD = "good"
    ACTIVE = "active"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True)
class Fact:
    """A value with its name, and perhaps a second line."""

    name: str
    value: str
    detail: str = ""
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class StatsBlock:
    """The most important values, in large type."""

    facts: Sequence[Fact]
    kind: ClassVar[str] = "stats"
    width: ClassVar[Width] = Width.FULL


@dataclass(frozen=True)
class FactsBlock:
    """A list of names with their values."""

    facts: Sequence[Fact]
    title: str = ""
    width: Width = Width.COLUMN
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class TableBlock:
    """A table. One that is wider than the page scrolls.

    Attributes:
      numeric: The indices of the columns that are aligned to the right.
      marked: The indices of the rows that are highlighted.
      folded: Whether the table is shown only after a click on the title.
      colors: The number of a color for each row, which is shown in the row's first cell.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()
    title: str = ""
    folded: bool = False
    colors: Sequence[int] = ()
    width: Width = Width.FULL
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class TextBlock:
    """Text with its line breaks, such as a sample of a language model."""

    text: str
    title: str = ""
    width: Width = Width.FULL
    kind: ClassVar[str] = "text"

    @property
    def lines(self) -> Sequence[str]:
        """The lines of the text."""
        return self.text.splitlines()


@dataclass(frozen=True)
class NoteBlock:
    """A sentence that stands out, such as a warning about a file."""

    text: str
    tone: Tone = Tone.PLAIN
    width: ClassVar[Width] = Width.FULL
    kind: ClassVar[str] = "note"


class MediaType(enum.StrEnum):
    """The type of a picture. A browser runs no script of an SVG that it shows as a picture."""

    PNG = "image/png"
    SVG = "image/svg+xml"


@dataclass(frozen=True)
class ImageBlock:
    """A picture, stored in the page. Its title is also the description for screen readers."""

    content: bytes = field(repr=False)
    media_type: MediaType = MediaType.PNG
    title: str = ""
    width: ClassVar[Width] = Width.COLUMN
    kind: ClassVar[str] = "image"

    @property
    def address(self) -> str:
        """The picture as a data URI."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.content).decode()}"


@dataclass(frozen=True)
class GalleryBlock:
    """Small pictures beside one another, such as the samples of one evaluation."""

    images: Sequence[ImageBlock]
    title: str = ""
    width: ClassVar[Width] = Width.FULL
    kind: ClassVar[str] = "gallery"


Block = (
    GalleryBlock
    | StatsBlock
    | FactsBlock
    | TableBlock
    | TextBlock
    | NoteBlock
    | ImageBlock
    | ChartBlock
)


@dataclass(frozen=True)
class Section:
    """A part of a page under one title. It is left out if it has no blocks.

    Attributes:
      title: The title, also in the page's navigation; empty for the part below the page's title.
      note: A sentence under the title.
    """

    title: str
    blocks: Sequence[Block]
    note: str = ""


@dataclass(frozen=True)
class Page:
    """A page. `badges` maps short texts beside the title, such as a status, to their tones."""

    title: str
    sections: Sequence[Section]
    subtitle: str = ""
    badges: Mapping[str, Tone] = field(default_factory=dict)
    footer: str = ""
