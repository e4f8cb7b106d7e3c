"""Terminal output of plans: tables and sentences."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from spmdtrain.document.terminal import Terminal, byte_size, duration
from spmdtrain.plan.phrases import (
    advice_figures,
    all_notes,
    assumptions,
    buffer_source,
    group_collectives,
    measured_sentence,
    memory_by_kind,
    sent_sentence,
    step_seconds,
    time_parts,
    uses_measured_rates,
    utilization_kind,
    verdict,
)
from spmdtrain.step.flops import SHORT_CONVENTION

_MOST_ROWS = 12
_MOST_BUFFERS = 8
_WIDE = 100  # columns of a terminal
_FULL = 0.8  # fraction of a device's memory from which on the largest temporaries are listed


def show_plan(terminal: Terminal, plan: dict[str, Any]) -> None:
    """Prints the tables and notes of one plan, as returned by `plan_as_json`."""
    terminal.line(
        f"{plan['topology']}: {plan['chips']} chip{'s' if plan['chips'] > 1 else ''}, "
        f"{plan['placement']}; "
        f"global batch {plan['global_batch_size']}"
    )
    memory = plan["memory"]
    terminal.console.print(_memory(memory))
    terminal.line(verdict(plan))
    if memory["buffers"] and (memory["limit"] or 0) * _FULL < memory["peak"]:
        terminal.console.print(_buffers(memory["buffers"]))
    if plan["collectives"]:
        terminal.console.print(_collectives(plan["collectives"], terminal.console.width))
        terminal.line(sent_sentence(plan["sent"]))
    if plan["time"]:
        terminal.console.print(_time(plan))
    elif plan["flops"]["step"]:
        terminal.line(f"model FLOPs of a step: {plan['flops']['model']:.4g} ({SHORT_CONVENTION})")
    if plan["measured"]:
        terminal.line(measured_sentence(plan))
    for note in all_notes(plan):
        terminal.line(f"note: {note}")
    if plan["time"]:
        terminal.line(assumptions(plan))


def show_advice(terminal: Terminal, plan: dict[str, Any]) -> None:
    """Prints the advice for a plan, as returned by `plan_as_json`."""
    for each in plan["advice"]:
        terminal.line(f"advice: {_advice(each)}")


def _memory(memory: dict[str, Any]) -> Table:
    table = Table("memory of a device", "")
    table.columns[1].justify = "right"
    for kind, size in memory_by_kind(memory).items():
        table.add_row(kind, "unknown" if size is None else byte_size(size))
    table.add_section()
    table.add_row("peak", byte_size(memory["peak"]))
    return table


def _buffers(buffers: Sequence[dict[str, Any]]) -> Table:
    table = Table("largest temporaries", "bytes", "shape on a device", "source")
    table.columns[1].justify = "right"
    for buffer in buffers[:_MOST_BUFFERS]:
        times = f"{buffer['count']} x " if buffer["count"] > 1 else ""
        size = times + byte_size(buffer["bytes"])
        table.add_row(buffer["use"], size, buffer["shape"], buffer_source(buffer))
    return table


def _collectives(collectives: Sequence[dict[str, Any]], width: int) -> Table:
    """Returns a table of collectives, grouped by kind and source line, the longest first.

    A narrow terminal omits the columns of arrays and sources; `--json` has them.
    """
    rows = group_collectives(collectives)
    names = ("collective", "axes", "times", "bytes", "time", "overlap", "carries", "source")
    table = Table(*names[: None if width >= _WIDE else -2])
    for column in table.columns[2:5]:
        column.justify = "right"
    for column in table.columns[:6]:
        column.no_wrap = True
    for row in rows[:_MOST_ROWS]:
        table.add_row(
            row.kind,
            " ".join(row.axes) or "?",
            f"{row.times:g}",
            byte_size(int(row.bytes)),
            "" if row.seconds is None else step_seconds(row.seconds),
            "yes" if row.overlapped else "no",
            *((row.carries, row.source) if width >= _WIDE else ()),
        )
    if len(rows) > _MOST_ROWS:
        table.caption = f"and {len(rows) - _MOST_ROWS} shorter ones"
    return table


def _time(plan: dict[str, Any]) -> Table:
    time = plan["time"]
    table = Table("time of a step", "", "from")
    table.columns[1].justify = "right"
    for name, seconds, source in time_parts(time):
        table.add_row(name, step_seconds(seconds), source)
    table.add_section()
    table.add_row("lower bound", step_seconds(time["bound"]))
    table.add_row(f"estimate, mostly {time['rules']}", step_seconds(time["estimate"]))
    again = plan["flops"]["again"]
    table.add_row("model FLOPs", f"{plan['flops']['model']:.4g}", SHORT_CONVENTION)
    if again:
        table.add_row("recomputed FLOPs", f"{again:.4g}")
    on_cpu = uses_measured_rates(plan)
    if time["utilization"] is not None and not on_cpu:
        name = f"MFU, {utilization_kind(time)}"
        table.add_row(name, f"{time['utilization']:.1%}", SHORT_CONVENTION)
    table.add_row("examples/s", f"{time['examples_per_second']:,.0f}")
    if time["tokens_per_second"]:
        table.add_row("tokens/s", f"{time['tokens_per_second']:,.0f}")
    table.add_row(f"all {time['steps']:,} steps", duration(time["run"]))
    if on_cpu:
        return table
    table.add_row("chip-hours", f"{time['chip_hours']:,.3g}")
    return table


def _advice(advice: dict[str, Any]) -> str:
    if advice["with_options"] is None:
        tried = f" (tried {'; '.join(advice['tried'])})" if advice["tried"] else ""
        return f"{advice['finding']}\n  no known option fixes it{tried}"
    changes = [
        f"{name} {before} -> {after}" if before else f"{name} {after}"
        for name, before, after in advice_figures(advice)
    ]
    return f"{advice['finding']}\n  {advice['options']}: {', '.join(changes)}"


# -- several topologies ----------------------------------------------------------------------------


def show_scaling(
    terminal: Terminal, plans: Sequence[dict[str, Any]], changes: Sequence[str]
) -> None:
    """Prints a table of several plans (`plan_as_json`) and the changes from each to the next."""
    terminal.console.print(_side_by_side(plans))
    for change in changes:
        terminal.line(change)


def _side_by_side(plans: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "topology", "chips", "fits", "memory", "estimate", "examples/s", "MFU", "collectives"
    )
    for plan in plans:
        time, memory = plan["time"], plan["memory"]
        kinds: dict[str, float] = defaultdict(float)
        for each in plan["collectives"]:
            kinds[each["kind"]] += each["bytes"] * each["times"]
        table.add_row(
            plan["topology"],
            str(plan["chips"]),
            {True: "yes", False: "no", None: "?"}[plan["fits"]],
            byte_size(memory["peak"]),
            step_seconds(time["estimate"]) if time else "",
            f"{time['examples_per_second']:,.0f}" if time else "",
            f"{time['utilization']:.1%}" if time and time["utilization"] is not None else "",
            ", ".join(f"{kind} {byte_size(int(size))}" for kind, size in kinds.items()),
        )
    return table
