"""The page of one or several runs: its top, and the history of the runs."""

import datetime
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from spmdtrain.document.blocks import (
    TICK_LABEL,
    Block,
    ChartBlock,
    Fact,
    LegendEntry,
    NoteBlock,
    Page,
    Section,
    StatsBlock,
    TableBlock,
    Tone,
    altair,
    chart_block,
)
from spmdtrain.document.terminal import number
from spmdtrain.errors import UserError, foreign
from spmdtrain.record.lines import LONG
from spmdtrain.record.readers import Activity, Column, RunStart, Span, shares, spans
from spmdtrain.record.run_files import Split, Status
from spmdtrain.report.sections import (
    RunData,
    checkpoint_section,
    curve_sections,
    last_values,
    layer_section,
    media_section,
    program_section,
)

# -- The page of one or several runs ---------------------------------------------------------------


def run_page(runs: Sequence[RunData]) -> Page:
    """Returns the page of at least one run; sections without content are left out."""
    names = [run.name for run in runs]
    tones = {status.value: tone for status, tone in TONES.items()}
    badges = {}
    if len(runs) == 1 and (status := runs[0].status_name):
        badges[status] = tones.get(status, Tone.PLAIN)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    return Page(
        title=foreign(title, 200),
        subtitle=foreign(runs[0].workdir, 500) if len(runs) == 1 else "",
        badges=badges,
        sections=[
            overview(runs),
            *curve_sections(runs),
            layer_section(runs),
            history_section(runs),
            checkpoint_section(runs),
            media_section(runs),
            program_section(runs),
        ],
    )


def run_names(workdirs: Sequence[str]) -> list[str]:
    """Returns a short name for each workdir: as many last parts of the path as make it unique.

    Raises `UserError` if a workdir is given twice.
    """
    parts = [PurePosixPath(path.rstrip("/") or "/").parts for path in workdirs]
    if len(set(parts)) < len(parts):
        twice = next(path for path, of in zip(workdirs, parts, strict=True) if parts.count(of) > 1)
        raise UserError(f"{twice} is given twice: give each run once")
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(of[-count:]) for of in parts]
        if len(set(names)) == len(names):
            break
    return [foreign(name, 100) for name in names]


# -- The top of the page: status, length, duration and best metric of each run ---------------------

TONES = {
    Status.RUNNING: Tone.ACTIVE,
    Status.FINISHED: Tone.GOOD,
    Status.FAILED: Tone.BAD,
    Status.PREEMPTED: Tone.WARNING,
}
_MOST_METRICS = 3
_MOST_SLOW = 3  # processes
_SILENCE = 600  # seconds without an event after which a running run may have been killed


def overview(runs: Sequence[RunData]) -> Section:
    """Returns the part below the title: values of one run in large type, or a table of several."""
    notes = [
        NoteBlock(f"{_of(run, runs)}{run.status_name}: {reason}", Tone.BAD)
        for run in runs
        if (reason := run.status.get("reason"))
    ]
    faults = [
        NoteBlock(f"{_of(run, runs)}{fault}", Tone.WARNING) for run in runs for fault in run.faults
    ]
    notes += [
        NoteBlock(f"{_of(run, runs)}{text}", Tone.WARNING)
        for run in runs
        for text in (_silence(run), _left_out(run), *_slow(run))
        if text
    ]
    top: Any = StatsBlock(_facts(runs[0])) if len(runs) == 1 else _runs_table(runs)
    return Section("", [top, *notes, *faults])


def _of(run: RunData, runs: Sequence[RunData]) -> str:
    return f"{run.name}: " if len(runs) > 1 else ""


def _silence(run: RunData) -> str:
    """Returns a note if a running run has logged nothing for long, else ""."""
    if run.status_name != Status.RUNNING or not run.events.starts:
        return ""
    silent = time.time() - max(start.last_time for start in run.events.starts)
    if silent < _SILENCE:
        return ""
    return f"no event for {length(silent)}: a run that was killed could not record its end"


def _left_out(run: RunData) -> str:
    """Returns a note if steps have left their updates out, else ""."""
    # A start that resumed before such a step makes it again.
    skipped = (event for event in run.events.events if event["event"] == "skipped")
    found = {event.get("step", 0): event.get("reason", "") for event in skipped}
    if not found:
        return ""
    steps = "1 step has" if len(found) == 1 else f"{len(found):,} steps have"
    return foreign(f"{steps} left the update out, the last one: {found[max(found)]}", 500)


def _slow(run: RunData) -> list[str]:
    """Returns a note for each of the last processes that the others have waited for."""
    notes: dict[str, str] = {}
    for event in run.events.events:
        if event["event"] != "slow":
            continue
        process, at = event.get("process", ""), f"step {event.get('step', 0):,}"
        if "reason" in event:
            notes.pop(process, None)
            notes[process] = f"since {at}: {event['reason']}"
        elif process in notes:
            notes[process] += f"; until {at}"
    return [foreign(note, 500) for note in [*notes.values()][-_MOST_SLOW:]]


def _facts(run: RunData) -> list[Fact]:
    facts = [_progress(run)]
    if (taken := duration_of(run)) is not None:
        facts.append(Fact("duration", length(taken[0]), taken[1]))
    if (best := best_value(run)) is not None:
        name, step, value = best
        facts.append(Fact(f"best {name}", number(value), f"at step {step:,}"))
    for name, value in list(last_values(run, Split.TEST).items())[:_MOST_METRICS]:
        facts.append(Fact(f"test {name}", number(value)))
    if (speed := _speed(run)) is not None:
        facts.append(speed)
    is_long = len(run.events.starts) > 1 or (taken is not None and taken[0] >= LONG)
    if is_long and (share := goodput(run)) is not None:
        facts.append(Fact("goodput", f"{share:.0%}", "in new steps"))
    return facts


def _speed(run: RunData) -> Fact | None:
    """Returns the median of examples/s without the first interval of each start, which compiles."""
    name = "examples_per_second"
    column = run.performance.columns.get(name) or run.metrics.get(Split.EPOCH, name)
    if column is None:
        return None
    steps, values = column.by_step()
    begins = [0, *(start.step for start in run.events.starts)]
    firsts = np.searchsorted(steps, begins, side="right")
    is_steady = ~np.isin(np.arange(len(steps)), firsts)
    for chosen, detail in ((is_steady, "median after the first steps"), (~is_steady, "at first")):
        if (known := values[chosen & ~np.isnan(values)]).size:
            return Fact("examples/s", number(float(np.median(known))), detail)
    return None


def _progress(run: RunData) -> Fact:
    total, epochs = run.config.get("steps"), run.config.get("epochs")
    column = run.metrics.get(Split.EPOCH, "epoch")
    last = None if column is None else column.last
    detail = f"of {total:,}" if type(total) is int else ""
    if type(epochs) is int:
        detail = f"of {epochs:,} epochs" if last is None else f"epoch {last[1]:.0f} of {epochs:,}"
    return Fact("step", f"{run.step:,}", detail)


def best_value(run: RunData) -> tuple[str, int, float] | None:
    """Returns the name, step and value of the best evaluation of a run; None without one."""
    name = run.config.get("best_metric", "loss")
    if not isinstance(name, str):
        return None
    column: Column | None = run.metrics.get(Split.EVAL, name) or run.evaluator.get(Split.EVAL, name)
    if column is None:
        return None
    steps, numbers = (array.tolist() for array in column.by_step())
    values = [(v, step) for step, v in zip(steps, numbers, strict=True) if not math.isnan(v)]
    if not values:
        return None
    largest = run.config.get("best_direction") == "max"
    value, step = (max if largest else min)(values, key=lambda pair: pair[0])
    return name, step, value


def duration_of(run: RunData) -> tuple[float, str] | None:
    """Returns the seconds that a run took, and a note about them; None if they are not known."""
    if starts := run.events.starts:
        first, last = starts[0].time, max(start.last_time for start in starts)
        down = shares(spans(starts)).get(Activity.DOWN, 0.0)
        restarts = len(starts) - 1
        detail = [f"{restarts:,} restart" + ("s" if restarts > 1 else "")] if restarts else []
        detail += [f"{length(down)} down"] if down >= 1 else []
        return last - first, ", ".join(detail) or f"since {clock(first)}"
    seconds = run.metrics.get(Split.EPOCH, "seconds")
    if seconds is None:
        return None
    return seconds.total, "of training"


def goodput(run: RunData) -> float | None:
    """Returns the share of the wall-clock time that went into new steps; None if unknown."""
    column = run.performance.columns.get("goodput")
    if column is not None and column.last is not None:
        return column.last[1]
    found = shares(spans(run.events.starts))
    total = sum(found.values())
    return found.get(Activity.STEP, 0.0) / total if total > 0 else None


def _runs_table(runs: Sequence[RunData]) -> TableBlock:
    """Returns a table with the results of the runs."""
    tests = list(dict.fromkeys(n for run in runs for n in last_values(run, Split.TEST)))
    tests = tests[:_MOST_METRICS]
    bests = [best_value(run) for run in runs]
    ranking = list(dict.fromkeys(best[0] for best in bests if best))
    best_title = f"best {ranking[0]}" if len(ranking) == 1 else "best"
    columns = ["run", "status", "step", "duration", best_title, "at step"]
    rows = []
    for run, best in zip(runs, bests, strict=True):
        taken, result = duration_of(run), last_values(run, Split.TEST)
        metric = f"{best[0]} " if best and len(ranking) > 1 else ""
        rows.append(
            [
                run.name,
                run.status_name,
                f"{run.step:,}",
                "" if taken is None else length(taken[0]),
                "" if best is None else f"{metric}{number(best[2])}",
                "" if best is None else f"{best[1]:,}",
                *(number(result[name]) if name in result else "" for name in tests),
            ]
        )
    marked = _best_of(runs, bests)
    block = TableBlock(
        [*columns, *(f"test {name}" for name in tests)],
        rows,
        numeric=frozenset(range(2, len(columns) + len(tests))),
        marked=frozenset([marked] if marked is not None else []),
        colors=list(range(len(runs))),
    )
    return block if ranking else block.without({4, 5})


def _best_of(runs: Sequence[RunData], bests: Sequence[tuple[str, int, float] | None]) -> int | None:
    """Returns the number of the run with the best value, if all rank by the same metric."""
    ranks = {(run.config.get("best_metric"), run.config.get("best_direction")) for run in runs}
    values = [(best[2], n) for n, best in enumerate(bests) if best is not None]
    if len(ranks) != 1 or len(values) < 2:
        return None
    largest = runs[0].config.get("best_direction") == "max"
    return (max if largest else min)(values)[1]


def clock(time: float) -> str:
    """Returns a time in UTC as `2026-11-25 10:15`; the number itself if it is not a time."""
    try:
        return f"{datetime.datetime.fromtimestamp(time, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):  # a forged file
        return foreign(time, 40)


def length(seconds: float) -> str:
    """Returns a duration with its two largest units: `850 ms`, `42 s`, `3 h 12 min`, `2 d 5 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, inner, inner_name in _UNITS:
        if whole >= size:
            rest = whole % size // inner
            return f"{whole // size:,} {name}" + (f" {rest} {inner_name}" if rest else "")
    return f"{whole} s"


_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


# -- The starts of the runs as a timeline, and their time by use -----------------------------------

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
            blocks += [_timeline(starts, name), _starts_table(run, name)]
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
    axis = alt.Axis(labelExpr=TICK_LABEL)
    chart = (
        alt.Chart(alt.NamedData("spans"))
        .mark_bar(height={"band": 0.72})
        .encode(
            x=alt.X("begin:Q", title=unit_name, axis=axis, scale=alt.Scale(nice=False)),
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


def _starts_table(run: RunData, name: str) -> TableBlock:
    starts = run.events.starts
    first = max(0, len(starts) - _MOST_STARTS)
    found = spans(starts)
    rows = []
    for index in range(first, len(starts)):
        start = starts[index]
        own = shares([span for span in found if span.start == index])
        is_last = index == len(starts) - 1
        end = start.status or ("" if is_last and run.status_name == "running" else "killed")
        rows.append(
            [
                f"{index + 1}",
                clock(start.time),
                _processes(start),
                _SOURCES.get(start.source, start.source),
                f"{start.step:,} to {start.last_step:,}",
                length(start.seconds),
                _or_blank(own.get(Activity.DOWN)),
                "" if start.lost_steps is None else f"{start.lost_steps:,}",
                _or_blank(start.lost_seconds),
                _or_blank(own.get(Activity.REPEATED)),
                f"{end}: {start.reason}" if start.reason else end or "running",
            ]
        )
    columns = ["start", "began", "processes", "state from", "steps", "duration", "down before"]
    columns += ["steps lost", "lost since the last step", "repeated", "end"]
    return TableBlock(columns, rows, frozenset({0, 5, 6, 7, 8, 9}), title=f"Starts{name}")


_SOURCES = {
    "checkpoint": "disk",
    "snapshot": "own memory",
    "partner": "a partner's memory",
    "fork": "another run",
    "initial": "nothing",
}


def _processes(start: RunStart) -> str:
    """Returns the number of processes of a start, and how it differs from the start before."""
    count = "" if start.processes is None else f"{start.processes:,}"
    return f"{count}, {start.change}" if start.change else count


def _or_blank(seconds: float | None) -> str:
    return "" if seconds is None else length(seconds)
