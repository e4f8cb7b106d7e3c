"""Charts and tables of a notebook's cells."""

import itertools
import math
import re

import hypothesis
import hypothesis.strategies as st

from spmdtrain.document.blocks import Fact, FactsBlock, NoteBlock, TableBlock
from spmdtrain.document.notebook import Curve, as_html, chart

settings = hypothesis.settings(max_examples=100, deadline=None, derandomize=True)


def points(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line of a chart."""
    return [
        [(float(x), float(y)) for x, y in (point.split(",") for point in line.split())]
        for line in re.findall('<polyline points="([^"]*)"', svg)
    ]


@settings
@hypothesis.given(st.lists(st.floats(), min_size=1, max_size=1500))
@hypothesis.example([1e-300, 1e-200])
@hypothesis.example([1.7e308, -1.7e308, 1.0])
def test_a_curve_of_any_values_is_drawn_within_the_chart(values: list[float]) -> None:
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, value)
    finite = [value for value in values if abs(value) < 1e300]
    assert len(curve.points) <= 401 and bool(curve.points) == bool(finite)
    svg = chart("loss", {"train": curve})
    assert bool(svg) == bool(finite)
    for line in points(svg):
        assert all(68 <= x <= 552 and 21.9 <= y <= 162.1 for x, y in line)
        assert [x for x, _ in line] == sorted(x for x, _ in line)
    # The first value is the first point, and larger values are higher.
    if finite:
        assert curve.points[0][1] == finite[0]
    heights = [y for line in points(svg) for _, y in line]
    drawn = sorted(zip((value for _, value in curve.points), heights, strict=True))
    assert all(y >= after - 0.2 for (_, y), (_, after) in itertools.pairwise(drawn))


def test_a_long_curve_keeps_its_shape() -> None:
    curve = Curve()
    for step in range(100_000):
        curve.add(step, math.exp(-step / 20_000))
    assert 200 < len(curve.points) <= 401 and curve.points[-1] == (
        99_999,
        math.exp(-99_999 / 20_000),
    )
    (line,) = points(chart("loss", {"train": curve}))
    (x0, y0), (x1, y1), (x2, y2) = line[0], line[len(line) // 2], line[-1]
    # The axis is logarithmic, so an exponential is a straight line.
    assert abs((y1 - y0) / (x1 - x0) - (y2 - y1) / (x2 - x1)) < 1e-3


def test_all_text_is_escaped() -> None:
    bad = "<script>&\x1b"
    found = as_html(
        TableBlock([bad], [[bad]], title=bad, note=bad),
        FactsBlock([Fact(bad, bad, bad)], title=bad),
        NoteBlock(bad),
    ) + chart(bad, {bad: Curve([(0, 1.0)])})
    assert (
        "<script>" not in found and "\x1b" not in found and found.count("&lt;script&gt;&amp;") >= 9
    )


def test_a_table_keeps_its_columns_and_marks() -> None:
    block = TableBlock(["name", "bytes per\ndevice"], [["a", "1"], ["b", "2"]], frozenset({1}))
    assert re.sub(r' (style|scope)="[^"]*"', "", as_html(block)) == (
        "<table><thead><tr><th>name</th><th>bytes per device</th></tr></thead><tbody>"
        "<tr><td>a</td><td>1</td></tr><tr><td>b</td><td>2</td></tr></tbody></table>"
    )
