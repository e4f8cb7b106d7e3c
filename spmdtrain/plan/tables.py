"""What a person sees of plans: tables, and words."""

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from spmdtrain.terminal import Terminal, byte_size, duration

_MOST_ROWS = 12
_MOST_BUFFERS = 8
_MOST_PARTS = 4
_LONGEST_NAME = 40
_WIDE = 100  # columns of a terminal
_FULL = 0.8  # of a device's memory: from there on it is told what fills it
_TOLD = 0.05  # of an excess
_NOTICED = 0.05  # of a step


def show(terminal: Terminal, plan: dict[str, Any]) -> None:
    """Tables of one plan, as `--json` has it."""
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
        terminal.line(_sent(plan["sent"]))
    if plan["time"]:
        terminal.console.print(_time(plan))
    elif plan["flops"]["step"]:
        terminal.line(f"FLOPs of a step: {plan['flops']['step']:.4g}")
    if plan["measured"]:
        terminal.line(_measured(plan))
    for one in plan["rematerialized"]:
        terminal.line(f"note: {_rematerialized(one)}")
    for note in plan["notes"]:
        terminal.line(f"note: {note}")
    if plan["time"]:
        is_cpu = bool(plan["measured"] and plan["measured"]["chip"])
        terminal.line(_MEASURED_HERE if is_cpu else _ASSUMED)


def show_advice(terminal: Terminal, plan: dict[str, Any]) -> None:
    """What would mend the plan, a line each."""
    for one in plan["advice"]:
        terminal.line(f"advice: {_advice(one)}")


_MEASURED_HERE = (
    "All of this is an estimate, by what products, memory and sums over the devices were found to "
    "take here: what it takes to start a step is not in it, nor that convolutions take longer."
)
_ASSUMED = (
    "All of this is an estimate: products at the chip's peak in bfloat16, memory and links at "
    "theirs, and the input never late. No step of this program takes less than the bound; the "
    "estimate reads and writes what each of its instructions does, caches unknown."
)


def verdict(plan: dict[str, Any]) -> str:
    """Whether it fits, in words."""
    memory = plan["memory"]
    if memory["limit"] is None:
        return f"needs {byte_size(memory['peak'])} of each device; what there is nobody knows here"
    part = f"{byte_size(memory['peak'])} of {byte_size(memory['limit'])}"
    if plan["fits"]:
        return f"fits: {part}, {1 - memory['peak'] / memory['limit']:.0%} left"
    if memory["temporaries"] is None:
        part += " for the state and the batch alone"
    return f"does not fit: {part}"


def _memory(memory: dict[str, Any]) -> Table:
    table = Table("bytes on a device", "")
    table.columns[1].justify = "right"
    rows = {
        "parameters": memory["params"],
        "optimizer state": memory["optimizer"],
        "moving average": memory["average"],
        "model state, step, key": memory["other"],
        "inputs": memory["inputs"],
        **_temporaries(memory),
        "results": memory["results"],
        "program": memory["code"],
    }
    for name, size in rows.items():
        if size or size is None:
            table.add_row(name, "unknown" if size is None else byte_size(size))
    table.add_section()
    table.add_row("in all", byte_size(memory["peak"]))
    return table


def _temporaries(memory: dict[str, Any]) -> dict[str, int | None]:
    """What the step makes and forgets, by what it is for; what is left over are gaps."""
    whole, uses = memory["temporaries"], memory["uses"]
    if whole is None or not uses:
        return {"gradients, activations, temporaries": whole}
    return {**uses, "gaps, and the compiler's own": max(0, whole - sum(uses.values()))}


def _buffers(buffers: Sequence[dict[str, Any]]) -> Table:
    """The largest temporary arrays."""
    table = Table("largest temporaries", "bytes", "shape on a device", "from")
    table.columns[1].justify = "right"
    for one in buffers[:_MOST_BUFFERS]:
        where = " ".join(filter(None, (one["parameter"], _where(one))))
        times = f"{one['count']} x " if one["count"] > 1 else ""
        table.add_row(one["use"], times + byte_size(one["bytes"]), Text(one["shape"]), Text(where))
    return table


def _collectives(found: Sequence[dict[str, Any]], width: int) -> Table:
    """Those of one kind that one line makes, together; the longest first.

    On a narrow terminal without what they are of and from, which `--json` has.
    """
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        where = _where(one)
        together[one["kind"], tuple(one["axes"]), one["overlapped"], where].append(one)
    rows = sorted(
        together.items(),
        key=lambda item: -sum((x["seconds"] or 0) or x["bytes"] * 1e-12 for x in item[1]),
    )
    names = ("collective", "over", "times", "bytes", "takes", "beside", "of", "from")
    table = Table(*names[: None if width >= _WIDE else -2])
    for column in table.columns[2:5]:
        column.justify = "right"
    for column in table.columns[:6]:
        column.no_wrap = True
    for (kind, axes, overlapped, where), ones in rows[:_MOST_ROWS]:
        seconds = [x["seconds"] for x in ones]
        table.add_row(
            kind,
            " ".join(axes) or "?",
            f"{sum(x['times'] for x in ones):g}",
            byte_size(int(sum(x["bytes"] * x["times"] for x in ones))),
            "" if None in seconds else _brief(sum(seconds)),
            "other work" if overlapped else "nothing",
            *((Text(_of(ones)), Text(where)) if width >= _WIDE else ()),
        )
    if len(rows) > _MOST_ROWS:
        table.caption = f"and {len(rows) - _MOST_ROWS} shorter ones"
    return table


def _of(collectives: Sequence[dict[str, Any]]) -> str:
    """The parameters that are carried, or what is made of them."""
    names: dict[str, list[str]] = defaultdict(list)
    for one in collectives:
        for carried in one["carries"]:
            made = "new " if one["kind"] == "all-gather" else "gradient of "
            names["" if carried["is_parameter"] else made] += carried["parameters"]
    parts = []
    for what, found in filter(operator.itemgetter(1), names.items()):
        first, *others = dict.fromkeys(found)
        parts.append(f"{what}{first}" + (f" and {len(others)} more" if others else ""))
    return ", ".join(parts)


def _where(one: dict[str, Any]) -> str:
    """The line that something comes from, else what JAX calls the operation."""
    name = one["op_name"].removeprefix("jit(_train)/")
    if len(name) > _LONGEST_NAME:
        name = "..." + name[-_LONGEST_NAME:]
    return _short(one["line"]) or name


def _short(where: str) -> str:
    """A line of the user's without the folders above its file."""
    path, _, rest = where.rpartition("/")
    return rest if path else where


def _brief(seconds: float) -> str:
    """Three digits: `26.2 ms`, `3.40 us`."""
    below = 0.9995  # what is rounded up from there is of the next unit
    unit, scale = ("s", 1.0) if seconds >= below else ("ms", 1e3)
    if seconds < below * 1e-3:
        unit, scale = "us", 1e6
    return f"{seconds * scale:#.3g}".rstrip(".") + f" {unit}"


def _time(plan: dict[str, Any]) -> Table:
    time = plan["time"]
    table = Table("a step, at best", "")
    table.columns[1].justify = "right"
    for name, seconds in (
        ("products", time["compute"]),
        ("memory", time["memory"]),
        ("collectives beside other work", time["overlapped"]),
        ("collectives beside nothing", time["waiting"]),
    ):
        table.add_row(name, _brief(seconds))
    table.add_section()
    table.add_row("no less than", _brief(time["bound"]))
    table.add_row(f"estimate, mostly {time['rules']}", _brief(time["estimate"]))
    again = plan["flops"]["again"]
    table.add_row("FLOPs", f"{plan['flops']['step'] - again:.4g}")
    if again:
        table.add_row("FLOPs computed again", f"{again:.4g}")
    on_cpu = plan["measured"] is not None and plan["measured"]["chip"] is not None
    if time["utilization"] is not None and not on_cpu:
        table.add_row("MFU, at best", f"{time['utilization']:.1%}")
    table.add_row("examples/s", f"{time['examples_per_second']:,.0f}")
    if time["tokens_per_second"]:
        table.add_row("tokens/s", f"{time['tokens_per_second']:,.0f}")
    table.add_row(f"all {time['steps']:,} steps", duration(time["run"]))
    if on_cpu:
        return table
    table.add_row("chip-hours", f"{time['chip_hours']:,.3g}")
    return table


def _sent(sent: dict[str, Any]) -> str:
    """What a device sends in a step, against what it has to."""
    text = f"each device sends {byte_size(int(sent['bytes']))} in a step"
    if sent["least"] is None:
        return text
    text += f"; the strategy needs {byte_size(int(sent['least']))}"
    excess = sent["excess"]
    if excess < 0.01 * sent["bytes"]:
        return text
    more = [x for x in sent["by_parameter"] if x["excess"] > _TOLD * excess][:_MOST_PARTS]
    parts = [f"{byte_size(int(x['excess']))} of {x['parameter']} ({x['how']})" for x in more]
    text += f", and {byte_size(int(excess))} are beyond that"
    return f"{text}: {'; '.join(parts)}" if parts else text


def _measured(plan: dict[str, Any]) -> str:
    measured, time = plan["measured"], plan["time"]
    text = f"measured on {measured['devices']}: a step in {_brief(measured['step'])}"
    if time:
        text += f", {measured['step'] / time['estimate']:.2f} times the estimate"
    if measured["peak"]:
        part = measured["peak"] / plan["memory"]["peak"]
        text += (
            f"; at most {byte_size(measured['peak'])} of a device, {part:.2f} times what is told"
        )
    return text


def _rematerialized(one: dict[str, Any]) -> str:
    where = " ".join(filter(None, (one["parameter"], _short(one["line"]))))
    return (
        f"{where or 'somewhere'}: {one['shape']} is made whole on every device, as XLA cannot go "
        f"from {one['given']} to {one['wanted']} in another way; constrain it to one of the two "
        "before or after (spmdtrain.constrain_sharding)"
    )


def _advice(one: dict[str, Any]) -> str:
    before, after = one["without"], one["with_options"]
    if after is None:
        tried = f" (tried {'; '.join(one['tried'])})" if one["tried"] else ""
        return f"{one['finding']}\n  nothing known here mends it{tried}"
    changes = [f"a device holds {byte_size(before['peak'])} -> {byte_size(after['peak'])}"]
    if before["sent"]:
        changes.append(f"sends {byte_size(int(before['sent']))} -> {byte_size(int(after['sent']))}")
    if before["estimate"] and after["estimate"]:
        changes.append(f"a step {_brief(before['estimate'])} -> {_brief(after['estimate'])}")
    elif after["estimate"]:
        changes.append(f"a step then takes {_brief(after['estimate'])}")
    return f"{one['finding']}\n  {one['options']}: {', '.join(changes)}"


# -- several topologies ----------------------------------------------------------------------------


def show_scaling(terminal: Terminal, plans: Sequence[dict[str, Any]]) -> None:
    """Several topologies, a row each, and what changes from each to the next."""
    terminal.console.print(_side_by_side(plans))
    for change in changes(plans):
        terminal.line(change)


def changes(plans: Sequence[dict[str, Any]]) -> list[str]:
    """What changes from each plan to the next, a line each."""
    return [
        f"{before['topology']} to {after['topology']}: {event}"
        for before, after in itertools.pairwise(plans)
        for event in events(before, after)
    ]


def _side_by_side(plans: Sequence[dict[str, Any]]) -> Table:
    table = Table("topology", "chips", "fits", "a device", "estimate", "examples/s", "MFU", "moves")
    for plan in plans:
        time, memory = plan["time"], plan["memory"]
        kinds: dict[str, float] = defaultdict(float)
        for one in plan["collectives"]:
            kinds[one["kind"]] += one["bytes"] * one["times"]
        table.add_row(
            plan["topology"],
            str(plan["chips"]),
            {True: "yes", False: "no", None: "?"}[plan["fits"]],
            byte_size(memory["peak"]),
            _brief(time["estimate"]) if time else "",
            f"{time['examples_per_second']:,.0f}" if time else "",
            f"{time['utilization']:.1%}" if time and time["utilization"] is not None else "",
            ", ".join(f"{kind} {byte_size(int(size))}" for kind, size in kinds.items()),
        )
    return table


def events(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """What is not just more of the same between two topologies."""
    if before["fits"] != after["fits"] and None not in (before["fits"], after["fits"]):
        yield "fits" if after["fits"] else "does not fit any more"
    yield from _divisions(before, after)
    yield from _kinds(before, after)
    links = [{one["link"] for one in plan["collectives"]} for plan in (before, after)]
    for link in sorted(x for x in links[1] - links[0] if x.startswith("the network")):
        yield f"collectives cross {link}"
    times = before["time"], after["time"]
    if all(times):
        waits = [time["waiting"] / time["estimate"] for time in times]
        if abs(waits[1] - waits[0]) > _NOTICED:
            yield f"only collectives run in {waits[1]:.0%} of a step ({waits[0]:.0%} before)"
        if times[0]["rules"] != times[1]["rules"]:
            yield f"a step is mostly {times[1]['rules']} ({times[0]['rules']} before)"


def _divisions(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """State that is split, and not into as many more parts as there are more devices."""
    grown = after["devices"] / before["devices"]
    was = {row["name"]: row for row in before["state"]}
    stuck: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for row in after["state"]:
        old = was.get(row["name"], row)
        own, optimizer = (
            row[what] if old[what] > 1 and row[what] / old[what] < grown else None
            for what in ("parts", "optimizer_parts")
        )
        name = f"{row['name']} {row['shape']}"
        if own is not None:
            stuck["", old["parts"], own].append(name)
        elif optimizer is not None:
            stuck["the optimizer's state of ", old["optimizer_parts"], optimizer].append(name)
    for (what, old_parts, parts), names in stuck.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        now = f"in {parts} parts" if parts > 1 else "whole"
        still = "still " if parts == old_parts else ""
        yield (
            f"{what}{names[0]}{more}: {still}{now} ({old_parts} before), on {grown:g} times the "
            "devices"
        )


def _kinds(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Parameters, or gradients, that cross in another kind of collective."""
    was, now = _by_parameter(before), _by_parameter(after)
    changed: dict[tuple[bool, str, str], list[str]] = defaultdict(list)
    for (name, is_parameter), kinds in now.items():
        old = was.get((name, is_parameter), set())
        if old and kinds != old:
            changed[is_parameter, ", ".join(sorted(old)), ", ".join(sorted(kinds))].append(name)
    for (is_parameter, old_kinds, new_kinds), names in changed.items():
        what = "" if is_parameter else "what is made of "
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{what}{names[0]}{more}: crosses in {new_kinds} (in {old_kinds} before)"


def _by_parameter(plan: dict[str, Any]) -> dict[tuple[str, bool], set[str]]:
    found: dict[tuple[str, bool], set[str]] = defaultdict(set)
    for one in plan["collectives"]:
        for carried in one["carries"]:
            for name in carried["parameters"]:
                found[name, carried["is_parameter"]].add(one["kind"])
    return found
