"""The top of the page: status, length, duration and best metric of each run."""

import datetime
import time
from collections.abc import Sequence
from typing import Any

from spmdtrain.document.blocks import Fact, NoteBlock, Section, StatsBlock, TableBlock, Tone
from spmdtrain.document.terminal import number
from spmdtrain.errors import foreign
from spmdtrain.record.readers import Activity, Column, shares, spans
from spmdtrain.record.run_files import Split, Status
from spmdtrain.report.curve_sections import last_values
from spmdtrain.report.run_data import RunData

TONES = {
    Status.RUNNING: Tone.ACTIVE,
    Status.FINISHED: Tone.GOOD,
    Status.FAILED: Tone.BAD,
    Status.PREEMPTED: Tone.WARNING,
}
_MOST_METRICS = 3
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
        if (text := _silence(run))
    ]
    top: Any = StatsBlock(_facts(runs[0])) if len(runs) == 1 else _table(runs)
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


def _facts(run: RunData) -> list[Fact]:
    facts = [_progress(run)]
    if (taken := duration_of(run)) is not None:
        facts.append(Fact("duration", length(taken[0]), taken[1]))
    if (best := best_value(run)) is not None:
        name, step, value = best
        facts.append(Fact(f"best {name}", number(value), f"at step {step:,}"))
    for name, value in list(last_values(run, Split.TEST).items())[:_MOST_METRICS]:
        facts.append(Fact(f"test {name}", number(value)))
    speed = run.performance.columns.get("examples_per_second") or run.metrics.get(
        Split.EPOCH, "examples_per_second"
    )
    if speed is not None and speed.last is not None:
        facts.append(Fact("examples/s", number(speed.last[1])))
    if (share := goodput(run)) is not None:
        facts.append(Fact("goodput", f"{share:.0%}", "in new steps"))
    return facts


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
    values = [(v, step) for step, v in zip(*column.by_step(), strict=True) if v is not None]
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


def _table(runs: Sequence[RunData]) -> TableBlock:
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
    return block if ranking else _without(block, {4, 5})


def _without(block: TableBlock, left_out: set[int]) -> TableBlock:
    kept = [n for n in range(len(block.columns)) if n not in left_out]
    return TableBlock(
        [block.columns[n] for n in kept],
        [[row[n] for n in kept] for row in block.rows],
        numeric=frozenset(range(2, len(kept))),
        colors=block.colors,
    )


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
