"""Qualitative changes from the plan for one topology to the plan for the next."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

_LARGE_CHANGE = 0.05  # fraction of a step


def describe_changes(plans: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the changes from each plan to the next, as lines."""
    return [
        f"{before['topology']} to {after['topology']}: {event}"
        for before, after in itertools.pairwise(plans)
        for event in events(before, after)
    ]


def events(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yields the qualitative changes between the plans (`plan_as_json`) of two topologies."""
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
