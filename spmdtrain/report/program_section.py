"""The section about the program: configuration, versions, devices, shardings, collectives."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.document.blocks import Block, Fact, FactsBlock, Section, TableBlock, Width
from spmdtrain.document.terminal import byte_size, number
from spmdtrain.errors import foreign
from spmdtrain.record.readers import is_number
from spmdtrain.report.run_data import RunData, object_in

_ABSENT = "not set"
_MOST_LEAVES = 400
_FOLDED_ABOVE = 12  # rows of a table
_MOST_DIFFERENCES = 30  # without a click
_HIDDEN = {"workdir"}


def program_section(runs: Sequence[RunData]) -> Section:
    """Returns the section about what was run; of several runs, differing fields are shown first."""
    blocks: list[Block] = []
    fields = [flat_fields(run.config) for run in runs]
    if len(runs) > 1 and (rows := _differences(fields)):
        names = [run.name for run in runs]
        title = f"Differences between the runs ({len(rows)} fields)"
        folded = len(rows) > _MOST_DIFFERENCES
        blocks.append(TableBlock(["field", *names], rows, title=title, folded=folded))
    elif len(runs) > 1 and all(fields):
        blocks.append(FactsBlock([Fact("differences between the runs", "none")], width=Width.FULL))
    if len(runs) == 1 and fields[0]:
        blocks += _configuration(fields[0])
    environments = _environments(runs)
    blocks += environments
    for run in runs:
        blocks += _program(run, f" of {run.name}" if len(runs) > 1 else "")
    for run, of in zip(runs, fields, strict=True):
        if of:
            name = f" of {run.name}" if len(runs) > 1 else ""
            all_rows = [[field, value] for field, value in of.items()]
            title = f"All {len(of)} fields of the configuration{name}"
            blocks.append(TableBlock(["field", "value"], all_rows, title=title, folded=True))
    return Section("What was run", blocks)


def flat_fields(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fields of a configuration with their values as text; nested ones with a dot."""
    flat: dict[str, str] = {}

    def add(prefix: str, content: Mapping[str, Any]) -> None:
        for name, value in content.items():
            if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
                add(f"{prefix}{name}.", value)
            else:
                flat[foreign(prefix + name, 100)] = shown_value(value)

    add("", config)
    return flat


def shown_value(value: Any) -> str:
    """Returns a value of a configuration as text."""
    if value is None:
        return _ABSENT
    if isinstance(value, str):
        return foreign(value, 300)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list) and not any(isinstance(x, (dict, list)) for x in value):
        return foreign(", ".join(map(shown_value, value)) or "none", 300)
    return foreign(json.dumps(value), 300)


def _differences(fields: Sequence[Mapping[str, str]]) -> list[list[str]]:
    names = dict.fromkeys(name for of in fields for name in of if name not in _HIDDEN)
    rows = [[name, *(of.get(name, "") for of in fields)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _configuration(fields: Mapping[str, str]) -> list[Block]:
    """Returns the fields of the experiment, and the fields that differ from framework defaults."""
    defaults = flat_fields(config_as_json(RunConfig()))
    groups = {name.split(".")[0] for name in defaults}
    own = [Fact(n, v) for n, v in fields.items() if n.split(".")[0] not in groups]
    changed = [
        Fact(name, value, f"default: {defaults.get(name, _ABSENT)}")
        for name, value in fields.items()
        if name not in _HIDDEN
        and name.split(".")[0] in groups
        and defaults.get(name, _ABSENT) != value
    ]
    found: list[Block] = []
    if own:
        found.append(FactsBlock(own, "The experiment's own fields"))
    if changed:
        found.append(FactsBlock(changed, "Fields that differ from the framework's defaults"))
    return found


def _environments(runs: Sequence[RunData]) -> list[Block]:
    """Returns versions and devices: two lists for one run, a table for several."""
    facts = [_devices(run) for run in runs]
    versions = [
        {foreign(n, 60): foreign(v, 60) for n, v in object_in(run.config_file, "versions").items()}
        for run in runs
    ]
    if len(runs) == 1:
        lists = {"Devices and program": facts[0], "Versions": versions[0]}
        return [
            FactsBlock([Fact(name, value) for name, value in of.items()], title)
            for title, of in lists.items()
            if of
        ]
    together = [of | found for of, found in zip(facts, versions, strict=True)]
    names = dict.fromkeys(name for of in together for name in of)
    rows = [[name, *(of.get(name, "") for of in together)] for name in names]
    if not rows:
        return []
    columns = ["", *(run.name for run in runs)]
    return [TableBlock(columns, rows, title="Devices, program and versions")]


def _devices(run: RunData) -> dict[str, str]:
    content, program = run.config_file, run.program
    facts: dict[str, str] = {}
    count = content.get("devices", program.get("devices"))
    if type(count) is int:
        facts["devices"] = f"{count:,} x {foreign(content.get('device_kind', 'device'), 60)}"
    processes = run.events.starts[-1].processes if run.events.starts else None
    if processes is not None:
        facts["processes"] = f"{processes:,}"
    if isinstance(mesh := content.get("mesh"), str):
        facts["mesh"] = foreign(mesh, 200)
    elif axes := object_in(program, "mesh"):
        facts["mesh"] = foreign(", ".join(f"{axis}={size}" for axis, size in axes.items()), 200)
    if isinstance(strategy := run.config.get("strategy"), str):
        facts["strategy"] = foreign(strategy, 100)
    if type(parameters := program.get("parameters")) is int:
        facts["parameters"] = f"{parameters:,}"
    if is_number(flops := program.get("flops_per_step")):
        facts["FLOPs per step"] = _scaled(flops)
    if is_number(peak := program.get("peak_flops_per_device")):
        facts["peak of a device"] = f"{_scaled(peak)}/s"
    skipped = object_in(content, "skipped_records")
    bad = {foreign(k, 40): v for k, v in skipped.items() if type(v) is int and v > 0}
    if bad:
        facts["bad records left out"] = ", ".join(f"{k} {v:,}" for k, v in bad.items())
    return facts


def _scaled(flops: float) -> str:
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if flops >= 10**power:
            return f"{flops / 10**power:.3g} {prefix}FLOP"
    return f"{number(flops)} FLOP"


def _program(run: RunData, of: str) -> list[Block]:
    blocks: list[Block] = []
    if rows := _collectives(run.program.get("collectives")):
        columns = ["collective", "axes", "count", "bytes"]
        title = f"Collectives of one step{of}"
        blocks.append(TableBlock(columns, rows, frozenset({2, 3}), title=title))
    rows, count = _shardings(run.program.get("sharding"))
    if rows:
        title = f"Parameters and where they lie{of}"
        title += (
            f" (the first {len(rows):,} of {count:,})" if count > len(rows) else f" ({count:,})"
        )
        columns = ["parameter", "shape", "dtype", "sharding", "bytes per device"]
        folded = len(rows) > _FOLDED_ABOVE or bool(of)
        blocks.append(TableBlock(columns, rows, frozenset({4}), title=title, folded=folded))
    return blocks


def _collectives(found: Any) -> list[list[str]]:
    rows = []
    for item in found if isinstance(found, list) else []:
        if not isinstance(item, dict) or not is_number(item.get("bytes")):
            continue
        axes = item.get("axes")
        names = ", ".join(map(str, axes)) if isinstance(axes, list) else ""
        count = item.get("count")
        rows.append(
            [
                foreign(item.get("kind", ""), 60),
                foreign(names, 100),
                f"{count:,}" if type(count) is int else "",
                byte_size(round(item["bytes"])),
            ]
        )
    return rows


def _shardings(found: Any) -> tuple[list[list[str]], int]:
    items = [x for x in found if isinstance(x, dict)] if isinstance(found, list) else []
    rows = []
    for item in items[:_MOST_LEAVES]:
        shape, size = item.get("shape"), item.get("bytes_per_device")
        dims = [x for x in shape if type(x) is int] if isinstance(shape, list) else []
        rows.append(
            [
                foreign(item.get("path", ""), 200),
                " x ".join(map(str, dims)) or "scalar",
                foreign(item.get("dtype", ""), 40),
                foreign(item.get("spec", ""), 200),
                byte_size(round(size)) if is_number(size) else "",
            ]
        )
    return rows, len(items)
