"""The parts of a document: sections, facts, tables, charts, images and texts."""

import base64
import copy
import enum
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from spmdtrain.errors import foreign, import_extra

# -- The widths of the parts of a page -------------------------------------------------------------


class Width(enum.StrEnum):
    """The part of the page's width that a block takes on a wide screen; on a phone it takes all."""

    THIRD = "third"
    COLUMN = "column"  # a half
    FULL = "full"


# -- Charts of a page: Vega-Lite specifications made with Altair -----------------------------------
#
# The page's stylesheet defines the colors for light and dark mode, and its script passes them to
# Vega. A chart refers to a color by its number, below `COLORS`, or by the position of a value in
# the domain of the scale, never by the color itself.

COLORS = 10
"""Number of different colors of series. The stylesheet defines them."""
_POINTS_BELOW = 60  # a series with fewer values has a mark at each of them
_LONGEST_NAME = 120
_LOGARITHMIC_FROM = 8
_FAINT = 0.35
# d3's own format for `g` has as few digits as distinguish the ticks: `7e+1` for 70. Ticks are round
# numbers, and nine digits only leave out what floating point adds to them. A logarithmic axis
# leaves labels out by making them empty.
TICK_LABEL = (
    "!datum.label ? '' : datum.value === 0 ? '0'"
    " : abs(datum.value) < 1e-4 || abs(datum.value) >= 1e15"
    " ? replace(format(datum.value, '.9~e'), 'e+', 'e')"
    " : format(datum.value, abs(datum.value) < 1e6 ? ',.9~r' : '.9~s')"
)
"""Vega expression for the label of an axis: as `tick_label`, with up to nine digits."""
PERCENT_LABEL = "datum.value === 0 ? '0' : datum.label"  # d3 writes `0%`


def tick_label(value: float) -> str:
    """Returns a number as a person writes it beside an axis: `0.07`, `1,200`, `1.2M`, `1.2e-5`."""
    value = value or 0.0  # of -0.0
    size = abs(value)
    if size and not 1e-4 <= size < 1e15:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if size >= 0.9995 * unit:
            return f"{value / unit:,.4g}{prefix}"
    return f"{value:,.0f}" if size >= 9999.5 else f"{value:,.4g}"


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
      x: Positions in ascending order.
      y: Values; None is a gap.
      color: The number of its color, from 0; the same number is the same color in all charts.
      mean: Positions and values of a second line, the mean of many values. The line itself is then
        drawn faintly.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: int = 0
    mean: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class LegendEntry:
    """The name of a series beside its color, and its last value."""

    name: str
    color: int
    value: str = ""


@dataclass(frozen=True)
class ChartBlock:
    """A chart.

    Attributes:
      title: The title above the chart; untrusted text.
      spec: The Vega-Lite specification as JSON. It has `"width": "container"`.
      data: The datasets that the specification names: rows, or series of `line_chart`.
      legend: Entries above the chart; empty if the chart has a legend of Vega-Lite.
      note: A line below the chart.
      hover: Whether the values next to the pointer are shown for each series (`line_chart` only).
        The other charts show the `tooltip` of their encoding.
      logarithmic: Whether a button offers a logarithmic axis (`line_chart` only).
    """

    title: str
    spec: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    legend: Sequence[LegendEntry] = ()
    note: str = ""
    width: Width = Width.COLUMN
    hover: bool = False
    logarithmic: bool = False
    kind: ClassVar[str] = "chart"


def altair() -> Any:
    """Returns the module `altair`; raises `UserError` if it is not installed."""
    return import_extra("altair", "report", "charts")


def chart_block(
    title: str,
    chart: Any,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    height: int | None = None,
    note: str = "",
    width: Width = Width.FULL,
    legend: Sequence[LegendEntry] = (),
) -> ChartBlock:
    """Returns the block of an Altair chart.

    Args:
      chart: An Altair chart. Its data are `altair.NamedData(NAME)`, and its encodings have a
        `tooltip`.
      rows: NAME to the rows of the dataset.
      height: The height in pixels; None keeps the height of the chart.
      legend: Entries above the chart, for an encoding with `legend=None`. They wrap on a phone,
        where a legend of Vega-Lite would be cut off.
    """
    size = {"width": "container"} | ({} if height is None else {"height": height})
    spec = chart.properties(**size).to_dict()
    data = {name: {"rows": [dict(row) for row in of]} for name, of in rows.items()}
    return ChartBlock(title, _without_config(spec), data, legend, note, width)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    values: Sequence[str] = (),
    x_title: str = "step",
    percent: bool = False,
    zero: bool = False,
    height: int = 220,
    note: str = "",
    width: Width = Width.COLUMN,
) -> ChartBlock:
    """Returns a chart of lines over a common axis, with a legend and the values at the pointer.

    Args:
      values: The text beside each name in the legend, such as the last value.
      percent: Whether the values are fractions that the vertical axis shows in percent.
      zero: Whether the vertical axis starts at zero.
      height: The height in pixels.
    """
    names = [foreign(line.name, _LONGEST_NAME) for line in series]
    data = [
        {
            "name": name,
            "color": line.color % COLORS,
            "marked": len(line.x) < _POINTS_BELOW,
            "x": list(line.x),
            "mean": None
            if line.mean is None
            else dict(zip("xy", map(list, line.mean), strict=True)),
            "y": [None if v is None or not math.isfinite(v) else v for v in line.y],
        }
        for name, line in zip(names, series, strict=True)
    ]
    texts = values or [""] * len(names)
    legend = [
        LegendEntry(name, line.color % COLORS, text)
        for name, line, text in zip(names, series, texts, strict=True)
    ]
    return ChartBlock(
        title,
        copy.deepcopy(_line_spec(x_title, percent, zero, height)),
        {"series": {"series": data}, "hover": {"rows": []}},
        legend=legend,
        note=note,
        hover=True,
        width=width,
        logarithmic=_spans_magnitudes(series),
    )


def _spans_magnitudes(series: Sequence[Series]) -> bool:
    """Returns whether all values are positive and the largest is many times the smallest."""
    values = [y for line in series for y in line.y if y is not None and math.isfinite(y)]
    return bool(values) and min(values) > 0 and max(values) > _LOGARITHMIC_FROM * min(values)


@functools.cache
def _line_spec(x_title: str, percent: bool, zero: bool, height: int) -> dict[str, Any]:
    """Returns the specification of `line_chart`, cached because Altair takes 50 ms to make it."""
    alt = altair()
    axis = alt.Axis(grid=False, labelExpr=TICK_LABEL)
    x = alt.X("x:Q", title=x_title, scale=alt.Scale(nice=False), axis=axis)
    label = {"format": "~%", "labelExpr": PERCENT_LABEL} if percent else {"labelExpr": TICK_LABEL}
    axis = alt.Axis(tickCount=5, title=None, **label)
    y = alt.Y("y:Q", scale=alt.Scale(zero=zero, nice=True), axis=axis)
    color = alt.Color("color:N", legend=None, scale=alt.Scale(domain=list(range(COLORS))))
    lines = alt.Chart(alt.NamedData("series")).encode(x=x, y=y, color=color)
    lines = lines.encode(
        detail=["series:N", "faint:N"],
        opacity=alt.condition("datum.faint", alt.value(_FAINT), alt.value(1)),
    )
    pointer = alt.Chart(alt.NamedData("hover")).encode(x=x)
    layers = [
        lines.mark_line(strokeWidth=1.6, strokeJoin="round"),
        lines.mark_point(filled=True, size=28).transform_filter("datum.marked"),
        pointer.mark_rule(strokeWidth=1, opacity=0.35),
        pointer.mark_point(filled=True, size=52, opacity=1).encode(y=y, color=color),
    ]
    return _without_config(
        alt.layer(*layers).properties(width="container", height=height).to_dict()
    )


def _without_config(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns a specification without the theme of Altair and the address of the schema."""
    return {name: value for name, value in spec.items() if name not in ("config", "$schema")}


# -- The parts of a page: sections of facts, tables, charts, images and texts ----------------------
#
# A terminal shows notes, facts and tables, a page all of them. All text may come from untrusted
# files: both escape it.


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
    """A table.

    One that is wider than the page scrolls. On a terminal, cells are broken into lines; if that is
    not enough, the `optional` columns are left out, and then each row is printed as several lines.

    Attributes:
      numeric: The indices of the columns that are aligned to the right.
      marked: The indices of the rows that are highlighted.
      note: A line below the table.
      totals: The number of last rows that a rule separates from the others.
      folded: Whether a page shows the table only after a click on the title.
      colors: The number of a color for each row, which a page shows in the row's first cell.
      width: The part of a page's width that it takes.
      whole: The indices of the columns whose cells a terminal never breaks.
      optional: The indices of the columns that a narrow terminal leaves out.
      lines: The columns of each line of a row that is printed as several lines; by default the
        first column, and then all others.
      labels: The words before the cells of a column in such lines, by index; by default the name of
        the column, except for the first one.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()
    title: str = ""
    note: str = ""
    totals: int = 0
    folded: bool = False
    colors: Sequence[int] = ()
    width: Width = Width.FULL
    whole: frozenset[int] = frozenset()
    optional: frozenset[int] = frozenset()
    lines: Sequence[Sequence[int]] = ()
    labels: Mapping[int, str] = field(default_factory=dict)
    kind: ClassVar[str] = "table"

    def without(self, left_out: Collection[int]) -> "TableBlock":
        """Returns the table without some columns, given by their indices.

        Args:
          left_out: Indices of columns.
        """
        kept = [n for n in range(len(self.columns)) if n not in left_out]
        places = {old: new for new, old in enumerate(kept)}

        def moved(columns: Iterable[int]) -> list[int]:
            return [places[n] for n in columns if n in places]

        return replace(
            self,
            columns=[self.columns[n] for n in kept],
            rows=[[row[n] for n in kept] for row in self.rows],
            numeric=frozenset(moved(self.numeric)),
            whole=frozenset(moved(self.whole)),
            optional=frozenset(moved(self.optional)),
            lines=[moved(line) for line in self.lines],
            labels={places[n]: text for n, text in self.labels.items() if n in places},
        )


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
