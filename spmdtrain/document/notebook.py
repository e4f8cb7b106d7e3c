"""Output in the cells of a notebook: one display of a run with its curves, and tables as HTML.

A cell keeps what it shows, without a server or a script. Where HTML is not shown, text is.
"""

import contextlib
import html
import io
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdtrain.document.blocks import FactsBlock, NoteBlock, TableBlock, tick_label
from spmdtrain.document.terminal import LineColor, Point, Terminal, duration, number, splits_table
from spmdtrain.errors import foreign

# -- Charts of curves, as SVG ----------------------------------------------------------------------

_WIDTH, _HEIGHT = 560, 180  # pixels
_LEFT, _TOP, _BOTTOM = 68, 22, 18  # of the plot: room for labels and the legend
_POINTS = 400  # of a curve; with more, every second one is left out
_LARGEST = 1e300  # differences of larger values overflow
_LOGARITHMIC_FROM = 8  # the largest value as a multiple of the smallest one
_COLORS = ("#1f77b4", "#e6550d", "#2ca02c", "#9467bd")  # readable on white and on black


@dataclass
class Curve:
    """Values of a metric by step, at most `_POINTS` of them."""

    kept: list[tuple[int, float]] = field(default_factory=list)
    newest: tuple[int, float] | None = None
    every: int = 1
    """Of this many values the first one is kept."""
    count: int = 0

    def add(self, step: int, value: float) -> None:
        """Adds the value of a step; one that is not finite, or nearly so, is left out."""
        if not abs(value) < _LARGEST:
            return
        self.newest = step, value
        if self.count % self.every == 0:
            self.kept.append(self.newest)
        self.count += 1
        if len(self.kept) > _POINTS:
            self.kept, self.every = self.kept[::2], self.every * 2

    @property
    def points(self) -> list[tuple[int, float]]:
        """The values that are kept, and the newest one."""
        last = [] if self.newest is None or self.newest in self.kept[-1:] else [self.newest]
        return [*self.kept, *last]


def chart(title: str, curves: Mapping[str, Curve]) -> str:
    """Returns a chart as SVG; an empty text without values."""
    drawn = {name: curve.points for name, curve in curves.items() if curve.points}
    if not drawn:
        return ""
    steps = [step for points in drawn.values() for step, _ in points]
    values = [value for points in drawn.values() for _, value in points]
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    logarithmic = low > 0 and high > _LOGARITHMIC_FROM * low
    scaled = math.log if logarithmic else float
    base, span = scaled(low), (scaled(high) - scaled(low)) or 1.0
    plot = _HEIGHT - _TOP - _BOTTOM

    def across(step: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - 8) * (step - first) / ((last - first) or 1)

    def down(value: float) -> float:
        return _TOP + plot * (1 - (scaled(value) - base) / span)

    middle = math.sqrt(low) * math.sqrt(high) if logarithmic else (low + high) / 2
    parts = []
    for value in dict.fromkeys((low, middle, high)):
        y = down(value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="currentColor" stroke-opacity="0.15"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_label(value)}</text>'
        )
    for step, anchor in {first: "start", last: "end"}.items():
        x, y = across(step), _HEIGHT - 4
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{step:,}</text>')
    x = _LEFT
    for color, (name, points) in zip(_COLORS * len(drawn), drawn.items(), strict=False):
        line = " ".join(f"{across(step):.1f},{down(value):.1f}" for step, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if len(points) < 40:
            parts += [
                f'<circle cx="{across(step):.1f}" cy="{down(value):.1f}" r="2" fill="{color}"/>'
                for step, value in points
            ]
        legend = f"{name} {title} {number(points[-1][1])}"
        parts.append(f'<text x="{x}" y="12" fill="{color}">{_escaped(legend)}</text>')
        x += 8 * len(legend)
    label = _escaped(f"{title} by step: {', '.join(drawn)}")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
        f'aria-label="{label}" style="max-width:100%;font:11px sans-serif" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )


# -- Blocks of a document as HTML for a cell, which has no stylesheet ------------------------------

_LONGEST_TEXT = 4000


def _escaped(text: str) -> str:
    return html.escape(foreign(text, _LONGEST_TEXT))


def as_html(*blocks: TableBlock | FactsBlock | NoteBlock) -> str:
    """Returns blocks as HTML; all text is escaped."""
    return "".join(map(_block, blocks))


def _block(block: TableBlock | FactsBlock | NoteBlock) -> str:
    if isinstance(block, NoteBlock):
        return f"<p>{_escaped(block.text)}</p>"
    if isinstance(block, FactsBlock):
        rows = [
            [fact.name, f"{fact.value} ({fact.detail})" if fact.detail else fact.value]
            for fact in block.facts
        ]
        block = TableBlock(["", ""], rows, title=block.title)
    aligned = ["right" if n in block.numeric else "left" for n in range(len(block.columns))]
    parts = ["<table>"]
    if block.title:
        parts.append(f'<caption style="text-align:left">{_escaped(block.title)}</caption>')
    if any(block.columns):
        cells = zip((" ".join(name.split()) for name in block.columns), aligned, strict=True)
        parts += ["<thead>", _row("th", [*cells], ' scope="col"'), "</thead>"]
    parts.append("<tbody>")
    for n, row in enumerate(block.rows):
        tag = "th" if n in block.marked else "td"
        parts.append(_row(tag, [*zip(row, aligned, strict=True)]))
    parts.append("</tbody></table>")
    if block.note:
        parts.append(f"<p><em>{_escaped(block.note)}</em></p>")
    return "".join(parts)


def _row(tag: str, cells: Sequence[tuple[str, str]], attribute: str = "") -> str:
    inside = "".join(
        f'<{tag}{attribute} style="text-align:{side}">{_escaped(text)}</{tag}>'
        for text, side in cells
    )
    return f"<tr>{inside}</tr>"


def run_html(
    title: str,
    last: Mapping[str, Mapping[str, float]],
    curves: Mapping[str, Iterable[tuple[int, Mapping[str, float]]]],
) -> str:
    """Returns the last metrics of a run as a table, and the curves of its loss.

    Args:
      last: The last metrics by split.
      curves: Steps and their metrics, by the name of a curve.
    """
    shown = {split: metrics for split, metrics in last.items() if metrics}
    names = [name for metrics in shown.values() for name in metrics]
    metric = "loss" if "loss" in names else next(iter(names), "")
    drawn = {name: Curve() for name in curves}
    for name, lines in curves.items():
        for step, metrics in lines:
            if metric in metrics:
                drawn[name].add(step, metrics[metric])
    return as_html(splits_table(shown, title)) + chart(metric, drawn)


# -- The display of a run --------------------------------------------------------------------------

_REFRESH = 0.5  # seconds; a browser redraws the whole display each time


@dataclass
class _Progress:
    """The steps or batches that a display shows."""

    description: str
    total: int
    first: int
    done: int
    handle: Any = None
    texts: Sequence[str] = ()
    is_over: bool = False
    began: float = field(default_factory=time.monotonic)
    shown: float = field(default_factory=time.monotonic)

    def text(self) -> str:
        """Returns the progress as one line."""
        seconds = time.monotonic() - self.began
        made = self.done - self.first
        left = duration(seconds / made * (self.total - self.done)) if made else ""
        parts = [f"{self.description} {self.done:,}/{self.total:,}", *self.texts]
        if self.done < self.total and left and not self.is_over:
            parts.append(f"{left} left")
        return "  ".join(parts)


class NotebookTerminal(Terminal):
    """The output of a cell: lines of text, and one display with the progress and the curves.

    The lines of single steps and evaluations are not printed, because the display shows them.

    Args:
      results_only: As for `Terminal`: there is no display either.
    """

    def __init__(self, *, results_only: bool = False) -> None:
        super().__init__(results_only=results_only, optional=True)
        self._runs: list[_Progress] = []  # the innermost last
        self._curves: dict[str, Curve] = {}
        self._metric = ""

    @contextlib.contextmanager
    def progress(self, description: str, *, done: int, total: int) -> Iterator[None]:
        """Shows the progress in one display, which `advance` changes."""
        if self.console.quiet:
            yield
            return
        if not self._runs:
            self._curves, self._metric = {}, ""
        self._runs.append(_Progress(description, total, done, done))
        try:
            yield
        finally:
            run = self._runs.pop()
            if run.handle is not None or (self._curves and not self._runs):
                run.is_over = True
                self._draw_progress(run)

    @property
    def has_bar(self) -> bool:
        """Whether the display of a run is shown, so that log lines are not needed."""
        return bool(self._runs)

    def advance(
        self,
        done: int,
        texts: Sequence[str] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Moves the progress to `done`, and adds metrics to the curves."""
        if not self._runs:
            return
        run = self._runs[-1]
        run.done, run.texts = done, run.texts if texts is None else texts
        self._add(Point("train", done, metrics or {}))
        if len(self._runs) == 1:  # the progress of an evaluation within a run is too short to show
            self._refresh()

    def line(
        self, text: str, color: LineColor = LineColor.PLAIN, *, point: Point | None = None
    ) -> None:
        """Prints a line, or adds its point to the curves of the display."""
        if point is None or not self._runs:
            super().line(text, color)
            return
        self._add(point)
        self._refresh()

    def show(self, *blocks: TableBlock | FactsBlock | NoteBlock) -> None:
        """Shows blocks of a document as HTML, and as text where HTML is not shown."""
        if self.console.quiet:
            return
        with contextlib.redirect_stdout(io.StringIO()) as text:
            super().show(*blocks)
        _display(as_html(*blocks), text.getvalue())

    def _add(self, point: Point) -> None:
        if not self._metric:
            self._metric = "loss" if "loss" in point.metrics else next(iter(point.metrics), "")
        if self._metric in point.metrics:
            curve = self._curves.setdefault(point.curve, Curve())
            curve.add(point.step, point.metrics[self._metric])

    def _refresh(self) -> None:
        if time.monotonic() - self._runs[0].shown >= _REFRESH:
            self._draw_progress(self._runs[0])

    def _draw_progress(self, run: _Progress) -> None:
        run.shown, text = time.monotonic(), run.text()
        bar = f'<progress value="{run.done}" max="{run.total}" style="width:12em"></progress>'
        content = f"<div>{bar} {_escaped(text)}</div>{chart(self._metric, self._curves)}"
        if run.handle is None:
            run.handle = _display(content, text)
        else:
            run.handle.update({"text/html": content, "text/plain": text}, raw=True)


def _display(content: str, text: str) -> Any:
    """Shows HTML in the cell, or the text; returns the handle of the display."""
    from IPython.display import display

    content_by_type = {"text/html": content, "text/plain": text}
    return display(content_by_type, raw=True, display_id=True)  # type: ignore[no-untyped-call]
