"""Terminal output of plans: tables and sentences."""

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
_MOST_PARTS = 4  # parameters with excess traffic
_LONGEST_NAME = 40
_WIDE = 100  # columns of a terminal
_FULL = 0.8  # fraction of a device's memory from which on the largest temporaries are listed
_LARGE_PART = 0.05  # fraction of the excess traffic from which on a parameter is listed
_LARGE_CHANGE = 0.05  # fraction of a step


def show_plan(terminal: Terminal, plan: dict[str, Any]) -> None:
    """Prints the tables and notes of one plan.

    Args:
        terminal: Where to print.
        plan: The plan as returned by `plan_as_json`.
    """
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
    for each in plan["rematerialized"]:
        terminal.line(f"note: {_rematerialized(each)}")
    for note in plan["notes"]:
        terminal.line(f"note: {note}")
    if plan["time"]:
        is_cpu = bool(plan["measured"] and plan["measured"]["chip"])
        terminal.line(_MEASURED_HERE if is_cpu else _ASSUMED)


def show_advice(terminal: Terminal, plan: dict[str, Any]) -> None:
    """Prints the advice for a plan, as returned by `plan_as_json`."""
    for each in plan["advice"]:
        terminal.line(f"advice: {_advice(each)}")


_MEASURED_HERE = (
    "All times are estimates from the speed of products, memory and all-reduces measured on this "
    "machine; they omit the time to start a step, and that convolutions are slower than products."
)
_ASSUMED = (
    "All times are estimates: products at the chip's bfloat16 peak, memory and links at their peak "
    "bandwidths, inputs always ready. The lower bound holds for any step of this program; the "
    "estimate adds the memory traffic of all instructions and ignores caches."
)


def verdict(plan: dict[str, Any]) -> str:
    """Returns a sentence that says whether the step fits, and how much memory is left.

    Args:
        plan: The plan as returned by `plan_as_json`.
    """
    memory = plan["memory"]
    if memory["limit"] is None:
        return f"needs {byte_size(memory['peak'])} per device; device memory limit unknown"
    part = f"{byte_size(memory['peak'])} of {byte_size(memory['limit'])}"
    if plan["fits"]:
        return f"fits: {part}, {1 - memory['peak'] / memory['limit']:.0%} left"
    if memory["temporaries"] is None:
        part += " for the state and the batch alone"
    return f"does not fit: {part}"


def _memory(memory: dict[str, Any]) -> Table:
    table = Table("memory of a device", "")
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
    table.add_row("peak", byte_size(memory["peak"]))
    return table


def _temporaries(memory: dict[str, Any]) -> dict[str, int | None]:
    """Returns the temporaries by use; the remainder are gaps."""
    whole, uses = memory["temporaries"], memory["uses"]
    if whole is None or not uses:
        return {"gradients, activations, temporaries": whole}
    return {**uses, "gaps and compiler internals": max(0, whole - sum(uses.values()))}


def _buffers(buffers: Sequence[dict[str, Any]]) -> Table:
    table = Table("largest temporaries", "bytes", "shape on a device", "source")
    table.columns[1].justify = "right"
    for buffer in buffers[:_MOST_BUFFERS]:
        source = " ".join(filter(None, (buffer["parameter"], _source(buffer))))
        times = f"{buffer['count']} x " if buffer["count"] > 1 else ""
        size = times + byte_size(buffer["bytes"])
        table.add_row(buffer["use"], size, Text(buffer["shape"]), Text(source))
    return table


def _collectives(collectives: Sequence[dict[str, Any]], width: int) -> Table:
    """Returns a table of collectives, grouped by kind and source line, the longest first.

    A narrow terminal omits the columns of arrays and sources; `--json` has them.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for each in collectives:
        key = each["kind"], tuple(each["axes"]), each["overlapped"], _source(each)
        groups[key].append(each)
    rows = sorted(
        groups.items(),
        key=lambda item: -sum((x["seconds"] or 0) or x["bytes"] * 1e-12 for x in item[1]),
    )
    names = ("collective", "axes", "times", "bytes", "time", "overlap", "carries", "source")
    table = Table(*names[: None if width >= _WIDE else -2])
    for column in table.columns[2:5]:
        column.justify = "right"
    for column in table.columns[:6]:
        column.no_wrap = True
    for (kind, axes, overlapped, source), group in rows[:_MOST_ROWS]:
        seconds = [x["seconds"] for x in group]
        table.add_row(
            kind,
            " ".join(axes) or "?",
            f"{sum(x['times'] for x in group):g}",
            byte_size(int(sum(x["bytes"] * x["times"] for x in group))),
            "" if None in seconds else _brief(sum(seconds)),
            "yes" if overlapped else "no",
            *((Text(_carried(group)), Text(source)) if width >= _WIDE else ()),
        )
    if len(rows) > _MOST_ROWS:
        table.caption = f"and {len(rows) - _MOST_ROWS} shorter ones"
    return table


def _carried(collectives: Sequence[dict[str, Any]]) -> str:
    """Returns the parameters that collectives carry, or whose gradients or new values they do."""
    names: dict[str, list[str]] = defaultdict(list)
    for each in collectives:
        for carried in each["carries"]:
            produced = "new " if each["kind"] == "all-gather" else "gradient of "
            names["" if carried["is_parameter"] else produced] += carried["parameters"]
    parts = []
    for prefix, parameters in filter(operator.itemgetter(1), names.items()):
        first, *others = dict.fromkeys(parameters)
        parts.append(f"{prefix}{first}" + (f" and {len(others)} more" if others else ""))
    return ", ".join(parts)


def _source(item: dict[str, Any]) -> str:
    """Returns the source line of an array or collective, else JAX's name of the operation."""
    name = item["op_name"].removeprefix("jit(train_step)/")
    if len(name) > _LONGEST_NAME:
        name = "..." + name[-_LONGEST_NAME:]
    return _short(item["line"]) or name


def _short(line: str) -> str:
    """Returns a source line without the folders above its file."""
    path, _, rest = line.rpartition("/")
    return rest if path else line


def _brief(seconds: float) -> str:
    """Returns a time with three digits: `26.2 ms`, `3.40 us`."""
    below = 0.9995  # larger values round up to the next unit
    unit, scale = ("s", 1.0) if seconds >= below else ("ms", 1e3)
    if seconds < below * 1e-3:
        unit, scale = "us", 1e6
    return f"{seconds * scale:#.3g}".rstrip(".") + f" {unit}"


def _time(plan: dict[str, Any]) -> Table:
    time = plan["time"]
    table = Table("time of a step", "")
    table.columns[1].justify = "right"
    for name, seconds in (
        ("products", time["compute"]),
        ("memory", time["memory"]),
        ("overlapped collectives", time["overlapped"]),
        ("exposed collectives", time["waiting"]),
    ):
        table.add_row(name, _brief(seconds))
    table.add_section()
    table.add_row("lower bound", _brief(time["bound"]))
    table.add_row(f"estimate, mostly {time['rules']}", _brief(time["estimate"]))
    again = plan["flops"]["again"]
    table.add_row("FLOPs", f"{plan['flops']['step'] - again:.4g}")
    if again:
        table.add_row("recomputed FLOPs", f"{again:.4g}")
    on_cpu = plan["measured"] is not None and plan["measured"]["chip"] is not None
    if time["utilization"] is not None and not on_cpu:
        table.add_row("MFU, at most", f"{time['utilization']:.1%}")
    table.add_row("examples/s", f"{time['examples_per_second']:,.0f}")
    if time["tokens_per_second"]:
        table.add_row("tokens/s", f"{time['tokens_per_second']:,.0f}")
    table.add_row(f"all {time['steps']:,} steps", duration(time["run"]))
    if on_cpu:
        return table
    table.add_row("chip-hours", f"{time['chip_hours']:,.3g}")
    return table


def _sent(sent: dict[str, Any]) -> str:
    """Returns a sentence that compares the bytes sent with the minimum of the strategy."""
    text = f"each device sends {byte_size(int(sent['bytes']))} in a step"
    if sent["least"] is None:
        return text
    text += f"; the strategy needs {byte_size(int(sent['least']))}"
    excess = sent["excess"]
    if excess < 0.01 * sent["bytes"]:
        return text
    more = [x for x in sent["by_parameter"] if x["excess"] > _LARGE_PART * excess][:_MOST_PARTS]
    parts = [f"{byte_size(int(x['excess']))} of {x['parameter']} ({x['how']})" for x in more]
    text += f"; {byte_size(int(excess))} are excess"
    return f"{text}: {'; '.join(parts)}" if parts else text


def _measured(plan: dict[str, Any]) -> str:
    measured, time = plan["measured"], plan["time"]
    text = f"measured on {measured['devices']}: {_brief(measured['step'])} per step"
    if time:
        text += f", {measured['step'] / time['estimate']:.2f} times the estimate"
    if measured["peak"]:
        part = measured["peak"] / plan["memory"]["peak"]
        text += f"; peak memory {byte_size(measured['peak'])}, {part:.2f} times the plan"
    return text


def _rematerialized(array: dict[str, Any]) -> str:
    source = " ".join(filter(None, (array["parameter"], _short(array["line"]))))
    return (
        f"{source or 'unknown source'}: {array['shape']} is replicated on every device because XLA "
        f"has no other way to reshard it from {array['given']} to {array['wanted']}; constrain it "
        "to one of the two with spmdtrain.constrain_sharding"
    )


def _advice(advice: dict[str, Any]) -> str:
    before, after = advice["without"], advice["with_options"]
    if after is None:
        tried = f" (tried {'; '.join(advice['tried'])})" if advice["tried"] else ""
        return f"{advice['finding']}\n  no known option fixes it{tried}"
    changes = [f"memory {byte_size(before['peak'])} -> {byte_size(after['peak'])}"]
    if before["sent"]:
        changes.append(f"sent {byte_size(int(before['sent']))} -> {byte_size(int(after['sent']))}")
    if before["estimate"] and after["estimate"]:
        changes.append(f"step {_brief(before['estimate'])} -> {_brief(after['estimate'])}")
    elif after["estimate"]:
        changes.append(f"step {_brief(after['estimate'])}")
    return f"{advice['finding']}\n  {advice['options']}: {', '.join(changes)}"


# -- several topologies ----------------------------------------------------------------------------


def show_scaling(terminal: Terminal, plans: Sequence[dict[str, Any]]) -> None:
    """Prints a table of several topologies and the changes from each to the next.

    Args:
        terminal: Where to print.
        plans: The plans as returned by `plan_as_json`.
    """
    terminal.console.print(_side_by_side(plans))
    for change in describe_changes(plans):
        terminal.line(change)


def describe_changes(plans: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the changes from each plan to the next, as lines."""
    return [
        f"{before['topology']} to {after['topology']}: {event}"
        for before, after in itertools.pairwise(plans)
        for event in events(before, after)
    ]


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
            _brief(time["estimate"]) if time else "",
            f"{time['examples_per_second']:,.0f}" if time else "",
            f"{time['utilization']:.1%}" if time and time["utilization"] is not None else "",
            ", ".join(f"{kind} {byte_size(int(size))}" for kind, size in kinds.items()),
        )
    return table


def events(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yields the qualitative changes between the plans of two topologies.

    Args:
        before: A plan as returned by `plan_as_json`.
        after: The plan of the next topology.
    """
    if before["fits"] != after["fits"] and None not in (before["fits"], after["fits"]):
        yield "fits" if after["fits"] else "no longer fits"
    yield from _shards(before, after)
    yield from _kinds(before, after)
    links = [{each["link"] for each in plan["collectives"]} for plan in (before, after)]
    for link in sorted(x for x in links[1] - links[0] if x.startswith("the network")):
        yield f"collectives cross {link}"
    times = before["time"], after["time"]
    if all(times):
        waits = [time["waiting"] / time["estimate"] for time in times]
        if abs(waits[1] - waits[0]) > _LARGE_CHANGE:
            yield f"only collectives run in {waits[1]:.0%} of a step ({waits[0]:.0%} before)"
        if times[0]["rules"] != times[1]["rules"]:
            yield f"the bottleneck is {times[1]['rules']} ({times[0]['rules']} before)"


def _shards(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yields sharded state whose number of shards grows less than the number of devices."""
    growth = after["devices"] / before["devices"]
    old_rows = {row["name"]: row for row in before["state"]}
    lagging: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for row in after["state"]:
        old = old_rows.get(row["name"], row)
        own, optimizer = (
            row[key] if old[key] > 1 and row[key] / old[key] < growth else None
            for key in ("parts", "optimizer_parts")
        )
        name = f"{row['name']} {row['shape']}"
        if own is not None:
            lagging["", old["parts"], own].append(name)
        elif optimizer is not None:
            lagging["optimizer state of ", old["optimizer_parts"], optimizer].append(name)
    for (prefix, old_parts, parts), names in lagging.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        now = f"{parts} shards" if parts > 1 else "replicated"
        still = "still " if parts == old_parts else ""
        yield (
            f"{prefix}{names[0]}{more}: {still}{now} ({old_parts} shards before) on {growth:g} "
            "times the devices"
        )


def _kinds(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yields parameters or gradients whose kind of collective changes."""
    old, new = _by_parameter(before), _by_parameter(after)
    changed: dict[tuple[bool, str, str], list[str]] = defaultdict(list)
    for (name, is_parameter), kinds in new.items():
        before_kinds = old.get((name, is_parameter), set())
        if before_kinds and kinds != before_kinds:
            key = is_parameter, ", ".join(sorted(before_kinds)), ", ".join(sorted(kinds))
            changed[key].append(name)
    for (is_parameter, old_kinds, new_kinds), names in changed.items():
        prefix = "" if is_parameter else "gradient or new value of "
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{prefix}{names[0]}{more}: sent by {new_kinds} ({old_kinds} before)"


def _by_parameter(plan: dict[str, Any]) -> dict[tuple[str, bool], set[str]]:
    kinds: dict[tuple[str, bool], set[str]] = defaultdict(set)
    for each in plan["collectives"]:
        for carried in each["carries"]:
            for name in carried["parameters"]:
                kinds[name, carried["is_parameter"]].add(each["kind"])
    return kinds
