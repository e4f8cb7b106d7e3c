"""The starts of the runs as a timeline, and their time by use."""

from collections.abc import Mapping, Sequence
from typing import Any

from spmdtrain.document.blocks import (
    Block,
    ChartBlock,
    LegendEntry,
    Section,
    TableBlock,
    altair,
    chart_block,
)
from spmdtrain.record.readers import Activity, RunStart, Span, shares, spans
from spmdtrain.report.overview import clock, length
from spmdtrain.report.run_data import RunData

_MOST_STARTS = 20
_MOST_INTERVALS = 12  # of a start
_DOWN_SHARE = 0.25  # of the time up: a longer time down is drawn shorter
_ROW = 26  # pixels
# The colors by number: what is useful is blue, what repeats it orange, waiting gray.
_COLORS = {
    Activity.STEP: 0,
    Activity.REPEATED: 1,
    Activity.EVALUATE: 2,
    Activity.SAVE: 4,
    Activity.COMPILE: 5,
    Activity.RESTORE: 3,
    Activity.LOAD: 7,
    Activity.START: 6,
    Activity.HOST: 8,
    Activity.DOWN: 9,
}


def history_section(runs: Sequence[RunData]) -> Section:
    """Returns the section about starts, failures and time; empty for runs without events."""
    blocks: list[Block] = []
    began = [run for run in runs if run.events.starts]
    if began:
        blocks.append(_shares(began))
    for run in began:
        name = f", {run.name}" if len(runs) > 1 else ""
        starts = run.events.starts
        if len(runs) == 1 or len(starts) > 1:
            blocks += [_timeline(starts, name), _table(run, name)]
    return Section("Where the time went", blocks)


def _shares(runs: Sequence[RunData]) -> ChartBlock:
    """Returns a bar for each run, divided by activity."""
    rows, legend = [], {}
    for run in runs:
        seconds = shares(spans(run.events.starts))
        total = sum(seconds.values()) or 1.0
        at = 0.0
        for activity in _COLORS:
            if (part := seconds.get(activity, 0.0)) > 0:
                share, time = f"{part / total:.1%}", length(part)
                row = {"run": run.name, "what": activity, "share": share, "time": time}
                rows.append(row | {"begin": at, "end": at + part / total})
                legend[activity] = f"{share}, {time}" if len(runs) == 1 else ""
                at += part / total
    alt = altair()
    names = [run.name for run in runs]
    chart = (
        alt.Chart(alt.NamedData("shares"))
        .mark_bar(height={"band": 0.8})
        .encode(
            x=alt.X("begin:Q", title=None, axis=alt.Axis(format="%"), scale=alt.Scale(nice=False)),
            x2="end:Q",
            y=_rows_axis("run", names, hidden=len(runs) == 1),
            color=_color(),
            tooltip=["run:N", "what:N", "share:N", "time:N"],
        )
    )
    return chart_block(
        "Share of the wall-clock time",
        chart,
        {"shares": rows},
        height=len(runs) * _ROW + 10,
        legend=_legend(legend),
    )


def _legend(values: Mapping[Activity, str]) -> list[LegendEntry]:
    """Returns the legend of the activities in `values`, each with its text."""
    return [
        LegendEntry(activity, color, values[activity])
        for activity, color in _COLORS.items()
        if activity in values
    ]


def _color() -> Any:
    alt = altair()
    domain = sorted(_COLORS, key=lambda activity: _COLORS[activity])
    return alt.Color("what:N", scale=alt.Scale(domain=[str(x) for x in domain]), legend=None)


def _rows_axis(name: str, order: Sequence[str], *, hidden: bool) -> Any:
    alt = altair()
    axis = None if hidden else alt.Axis(title=None, labelLimit=140)
    return alt.Y(f"{name}:N", sort=list(order), axis=axis)


def _timeline(starts: Sequence[RunStart], name: str) -> ChartBlock:
    """Returns a row for each start over the wall-clock time."""
    first = max(0, len(starts) - _MOST_STARTS)
    found = [span for span in spans(starts, _MOST_INTERVALS) if span.start >= first]
    shifted, is_shorter = _shortened(found)
    origin = shifted[0][0] if shifted else 0.0
    unit, unit_name = _unit(max((end for _, end in shifted), default=0.0) - origin)
    rows = []
    labels = [f"start {n + 1}" for n in range(first, len(starts))]
    for span, (begin, end) in zip(found, shifted, strict=True):
        rows.append(
            {
                "start": f"start {span.start + 1}",
                "what": span.activity,
                "begin": (begin - origin) / unit,
                "end": (end - origin) / unit,
                "time": length(span.end - span.begin),
                "step": f"{span.step:,}",
            }
        )
    alt = altair()
    chart = (
        alt.Chart(alt.NamedData("spans"))
        .mark_bar(height={"band": 0.72})
        .encode(
            x=alt.X("begin:Q", title=unit_name, scale=alt.Scale(nice=False)),
            x2="end:Q",
            y=_rows_axis("start", labels, hidden=False),
            color=_color(),
            tooltip=["start:N", "what:N", "time:N", alt.Tooltip("step:N", title="up to step")],
        )
    )
    note = (
        "Between two readings the order of the phases is not recorded; they stand in the order in "
        "which a run passes through them."
    )
    if is_shorter:
        note += " Long times down are drawn shorter."
    if first:
        note += f" The first {first:,} starts are left out."
    title = f"Starts over time{name}"
    height = len(labels) * _ROW + 10
    legend = _legend(dict.fromkeys((span.activity for span in found), ""))
    return chart_block(title, chart, {"spans": rows}, height=height, note=note, legend=legend)


def _shortened(found: Sequence[Span]) -> tuple[list[tuple[float, float]], bool]:
    """Returns begin and end of each span, long times down shortened, and whether any was."""
    up = sum(s.end - s.begin for s in found if s.activity is not Activity.DOWN)
    longest = max(_DOWN_SHARE * up, 1.0)
    removed, is_shorter = 0.0, False
    shifted = []
    for span in found:
        begin = span.begin - removed
        if span.activity is Activity.DOWN and span.end - span.begin > longest:
            removed += span.end - span.begin - longest
            is_shorter = True
        shifted.append((begin, span.end - removed))
    return shifted, is_shorter


def _unit(seconds: float) -> tuple[float, str]:
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * size:
            return size, name
    return 1.0, "seconds"


def _table(run: RunData, name: str) -> TableBlock:
    starts = run.events.starts
    first = max(0, len(starts) - _MOST_STARTS)
    found = spans(starts)
    rows = []
    for number in range(first, len(starts)):
        start = starts[number]
        own = shares([span for span in found if span.start == number])
        is_last = number == len(starts) - 1
        end = start.status or ("" if is_last and run.status_name == "running" else "killed")
        rows.append(
            [
                f"{number + 1}",
                clock(start.time),
                f"{start.step:,} to {start.last_step:,}",
                length(start.seconds),
                _or_blank(own.get(Activity.DOWN)),
                _or_blank(own.get(Activity.REPEATED)),
                f"{end}: {start.reason}" if start.reason else end or "running",
            ]
        )
    columns = ["start", "began", "steps", "duration", "down before", "repeated", "end"]
    return TableBlock(columns, rows, frozenset({0, 3, 4, 5}), title=f"Starts{name}")


def _or_blank(seconds: float | None) -> str:
    return "" if seconds is None else length(seconds)
