"""The HTML page of one or several plans, made from the object that `--json` prints."""

import datetime
import enum
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.document.blocks import (
    Block,
    ChartBlock,
    Fact,
    FactsBlock,
    LegendEntry,
    NoteBlock,
    Page,
    Section,
    StatsBlock,
    TableBlock,
    Tone,
    Width,
    altair,
    chart_block,
)
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import NOT_INSTALLED, version_of
from spmdtrain.plan.page_links import (
    BYTES_LABEL,
    MUTED,
    color_scale,
    link_blocks,
    time_axis,
    time_unit,
)
from spmdtrain.plan.tables import (
    advice_figures,
    all_notes,
    assumptions,
    buffer_rows,
    chip_hours,
    compiled_by,
    failure_blocks,
    measured_sentence,
    memory_by_kind,
    rescaling,
    run_time,
    scaled,
    sentence,
    short_line,
    step_seconds,
    uses_measured_rates,
    utilization_kind,
)
from spmdtrain.plan.time_model import Overlap, overlapped_seconds
from spmdtrain.plan.topologies import Compiler
from spmdtrain.step.flops import SHORT_CONVENTION
from spmdtrain.xla.chips import MEASURED

_PACKAGES = ("spmdtrain", "jax", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_FULL = 0.9  # fraction of the limit from which on memory is marked as scarce


def plan_page(
    results: Sequence[dict[str, Any]], changes: Sequence[str], title: str, command: str
) -> Page:
    """Returns the page of the plans for one or several topologies.

    Args:
      results: The plans as returned by `plan_as_json`; a failed one has at least `topology` and
        `error`.
      changes: The qualitative changes from each plan to the next.
    """
    plans = [result for result in results if "state" in result]
    sections = []
    if len(plans) > 1:
        sections.append(Section("Comparison", comparison_blocks(plans, changes)))
    for result in results:
        parts = _sections(result)
        if len(results) == 1:
            sections += parts
        else:  # one section for each topology, so that the navigation stays short
            blocks = [block for part in parts for block in part.blocks]
            note = parts[0].note if parts else ""
            sections.append(Section(str(result["topology"]), blocks, note))
    return Page(
        title=title,
        sections=sections,
        subtitle=command,
        badges=dict(map(_badge, results)),
        footer=_footer(),
    )


def _badge(result: dict[str, Any]) -> tuple[str, Tone]:
    name = result["topology"]
    if "state" not in result:
        return f"{name}: no plan", Tone.BAD
    text, tone = {
        True: ("fits", Tone.GOOD),
        False: ("does not fit", Tone.BAD),
        None: ("limit unknown", Tone.PLAIN),
    }[result["fits"]]
    return f"{name}: {text}", tone


def _footer() -> str:
    versions = {package: version_of(package) for package in _PACKAGES}
    installed = [f"{name} {x}" for name, x in versions.items() if x != NOT_INSTALLED]
    now = datetime.datetime.now(datetime.UTC)
    return f"{', '.join(installed)}; written {now:%Y-%m-%d %H:%M} UTC"


def _sections(result: dict[str, Any]) -> list[Section]:
    """Returns the parts of one plan, or its error."""
    errors = [NoteBlock(f"Error: {result['error']}", Tone.BAD)] if "error" in result else []
    if "state" not in result:
        return [Section("", errors)]
    chips = f"{result['chips']:,} chip" + ("s" if result["chips"] > 1 else "")
    note = (
        f"{result['topology']}: {chips}, {result['placement']}; global batch "
        f"{result['global_batch_size']:,}"
    )
    tone = Tone.WARNING if result["compiler"] in (None, Compiler.STAND_IN) else Tone.PLAIN
    overview: list[Block] = [
        *errors,
        NoteBlock(sentence(compiled_by(result)), tone),
        _stats(result),
    ]
    if result["measured"]:
        overview.append(NoteBlock(sentence(measured_sentence(result))))
    notes = [NoteBlock(sentence(note), Tone.WARNING) for note in all_notes(result)]
    return [
        Section("", overview, note),
        Section("Advice", _advice(result)),
        Section("Step", time_blocks(result)),
        Section("Memory", _memory_of_device(result)),
        Section("Communication", link_blocks(result)),
        Section("Failures", [*failure_blocks(result)]),
        Section("Parameters", parameter_blocks(result)),
        Section("Notes", notes),
    ]


def _stats(plan: dict[str, Any]) -> StatsBlock:
    memory, time, sent = plan["memory"], plan["time"], plan["sent"]
    tone = {True: Tone.GOOD, False: Tone.BAD, None: Tone.PLAIN}[plan["fits"]]
    if plan["fits"] and memory["peak"] > _FULL * memory["limit"]:
        tone = Tone.WARNING
    facts = [Fact("memory of a device", byte_size(memory["peak"]), _limit(plan), tone)]
    if time:
        bound = f"estimate; at least {step_seconds(time['bound'])}"
        facts.append(Fact("a step", step_seconds(time["estimate"]), bound))
        rate = f"{time['examples_per_second']:,.0f} examples/s"
        if time["tokens_per_second"]:
            facts.append(Fact("tokens/s", f"{time['tokens_per_second']:,.0f}", rate))
        else:
            facts.append(Fact("examples/s", f"{time['examples_per_second']:,.0f}"))
        on_cpu = uses_measured_rates(plan)
        if time["utilization"] is not None and not on_cpu:
            detail = f"{utilization_kind(time)}; {SHORT_CONVENTION}; mostly {time['rules']}"
            facts.append(Fact("MFU", f"{time['utilization']:.1%}", detail))
        hours = "" if on_cpu else f"{chip_hours(time)} chip-hours"
        facts.append(Fact(f"all {time['steps']:,} steps", run_time(time["run"]), hours))
    if plan["compiler"] is not None:
        least = sent["least"]
        needed = "" if least is None else f"the strategy needs {byte_size(round(least))}"
        facts.append(Fact("sent by each device", byte_size(round(sent["bytes"])), needed))
    return StatsBlock(facts)


def _limit(plan: dict[str, Any]) -> str:
    memory = plan["memory"]
    if memory["limit"] is None:
        return "the limit is unknown"
    if plan["fits"]:
        left = 1 - memory["peak"] / memory["limit"]
        return f"of {byte_size(memory['limit'])}: fits, {left:.0%} left"
    least = ", without temporaries" if memory["temporaries"] is None else ""
    return f"of {byte_size(memory['limit'])}: does not fit{least}"


def _advice(plan: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for each in plan["advice"]:
        if each["with_options"] is not None:
            blocks.append(NoteBlock(sentence(each["finding"]), Tone.ACTIVE))
            rows = advice_figures(each)
            blocks.append(
                TableBlock(
                    ("", "now", "with the options"),
                    rows,
                    numeric=frozenset({1, 2}),
                    width=Width.COLUMN,
                    title=f"With {each['options']}",
                )
            )
        else:
            text = f"{sentence(each['finding'])} No known option fixes it."
            if each["rescaled"]:
                text += f" {sentence(rescaling(each))}"
            blocks.append(NoteBlock(text, Tone.WARNING))
        if each["tried"]:
            tried = [text.partition(": ")[::2] for text in each["tried"]]
            title = f"{len(tried)} tried without success"
            blocks.append(TableBlock(("options", "result"), tried, title=title, folded=True))
    return blocks


# -- Charts and tables of a plan's page: the time of a step ----------------------------------------

_MOST_ROWS = 8  # of collectives; the others share one
_MOST_LINES = 10  # source lines
_ROW_HEIGHT = 34  # pixels
_TWO_LINES = "split(replace(datum.label, ' over ', '\\nover '), '\\n')"  # a Vega expression


class Part(enum.StrEnum):
    """The kind of a segment of the timeline."""

    PRODUCTS = "products"
    WITH_PRODUCTS = "instructions with products"
    VECTOR = "instructions on the vector unit"
    WAITING = "instructions that wait for memory"
    ELEMENTS = "operations on elements"
    KERNELS = "kernels"
    MEMORY = "memory traffic"
    OVERLAPPED = "overlapped collectives"
    EXPOSED = "exposed collectives"
    HOST = "host gaps"


PART_COLORS = {
    Part.PRODUCTS: 0,
    Part.WITH_PRODUCTS: 0,
    Part.VECTOR: 1,
    Part.WAITING: 3,
    Part.ELEMENTS: 1,
    Part.KERNELS: 4,
    Part.MEMORY: 2,
    Part.OVERLAPPED: 6,
    Part.EXPOSED: 7,
    Part.HOST: 5,
}
"""The number of a color for each part of a step."""


@dataclass(frozen=True)
class Segment:
    """A part of a step in the time model; `start` and `end` are seconds from the start of the step.

    `row` is its row of the timeline.
    """

    row: str
    part: Part
    start: float
    end: float


def timeline(plan: dict[str, Any]) -> list[Segment]:
    """Returns the segments of a step as the time model adds them up, from a plan with times.

    Instructions (or products, if the compiler gives no cycles) with kernels, memory traffic and
    overlapped collectives begin together. On a GPU the memory traffic follows the products, on CPU
    each follows the one before. Then come the exposed collectives, and the time in which the device
    waits for the host. The order within each of them is arbitrary.
    """
    time = plan["time"]
    overlap = Overlap(time["overlap"])
    segments = _instructions(time)
    start = 0.0 if overlap == Overlap.ALL else segments[-1].end
    segments.append(Segment("memory", Part.MEMORY, start, start + time["memory"]))
    serial = overlap == Overlap.NOTHING
    start = segments[-1].end if serial else 0.0
    every: dict[tuple[str, bool], list[tuple[str, int, float]]] = defaultdict(list)
    for each in plan["collectives"]:
        if each["seconds"]:
            name = f"{each['kind']} over {', '.join(each['axes']) or 'unknown axes'}"
            direction = each["direction"] if each["overlapped"] else 0
            every[name, each["overlapped"]].append((name, direction, each["seconds"]))
    classes = {key: overlapped_seconds(members) for key, members in every.items()}
    totals: dict[str, float] = defaultdict(float)
    for (name, _), seconds in classes.items():
        totals[name] += seconds
    shown = sorted(totals, key=lambda name: -totals[name])[:_MOST_ROWS]
    ends = {True: start, False: start + time["overlapped"] if serial else time["busy"]}
    for (name, overlapped), seconds in sorted(classes.items(), key=lambda item: -item[1]):
        part = Part.OVERLAPPED if overlapped else Part.EXPOSED
        row = name if name in shown else "other collectives"
        segments.append(Segment(row, part, ends[overlapped], ends[overlapped] + seconds))
        ends[overlapped] += seconds
    if time["host"]:
        start = max(segment.end for segment in segments)
        segments.append(Segment("host", Part.HOST, start, start + time["host"]))
    return segments


def _instructions(time: dict[str, Any]) -> list[Segment]:
    """Returns the segments of the instructions that run one after another."""
    parts = {Part.PRODUCTS: time["compute"]}
    if (own := time["instructions"]) is not None:
        parts = {
            Part.WITH_PRODUCTS: own["products"],
            Part.VECTOR: own["vector"],
            Part.WAITING: own["memory"],
        }
    if time["elements"]:
        parts[Part.ELEMENTS] = time["elements"]
    if time["kernels"]:
        parts[Part.KERNELS] = time["kernels"]
    segments, start = [], 0.0
    row = "products" if parts.keys() <= {Part.PRODUCTS, Part.KERNELS} else "instructions"
    for part, seconds in parts.items():
        segments.append(Segment(row, part, start, start + seconds))
        start += seconds
    return segments


def time_blocks(plan: dict[str, Any]) -> list[Block]:
    """Returns the blocks that show the time of a step and its FLOPs, from `plan_as_json`."""
    blocks: list[Block] = []
    if plan["time"]:
        blocks.append(_time_chart(plan))
    if plan["flops"]["step"]:
        blocks.append(_facts(plan))
    if plan["flops"]["by_line"]:
        blocks.append(_flops(plan["flops"]))
    return blocks


def _time_chart(plan: dict[str, Any]) -> ChartBlock:
    alt = altair()
    time, segments = plan["time"], timeline(plan)
    unit, scale = time_unit(time["estimate"])
    rows = [
        {
            "row": segment.row,
            "part": segment.part,
            "color": PART_COLORS[segment.part],
            "start": segment.start * scale,
            "end": segment.end * scale,
            "time": step_seconds(segment.end - segment.start),
        }
        for segment in segments
    ]
    order = list(dict.fromkeys(segment.row for segment in segments))
    end = 1.01 * scale * max(time["estimate"], *(segment.end for segment in segments))
    scale_of_x = alt.Scale(domain=[0, end], nice=False)
    bars = (
        alt.Chart(alt.NamedData("parts"))
        .mark_bar(height={"band": 0.7})
        .encode(
            x=alt.X("start:Q", axis=time_axis(alt, unit), scale=scale_of_x),
            x2="end:Q",
            y=alt.Y("row:N", sort=order, title=None, axis=alt.Axis(labelExpr=_TWO_LINES)),
            color=color_scale(alt),
            tooltip=[alt.Tooltip("row:N"), alt.Tooltip("part:N"), alt.Tooltip("time:N")],
        )
    )
    marks = [
        {"name": name, "at": time[key] * scale, "time": step_seconds(time[key])}
        for name, key in (("lower bound", "bound"), ("estimate", "estimate"))
    ]
    at = alt.Chart(alt.NamedData("marks")).encode(
        x="at:Q", tooltip=[alt.Tooltip("name:N"), alt.Tooltip("time:N")]
    )
    rules = [at.mark_rule(strokeWidth=2, strokeDash=[5, 3])]
    for mark, height in zip(marks, (-18, -4), strict=True):  # above the plot, in two lines
        align = "left" if mark["at"] < end / 2 else "right"
        text = at.transform_filter(alt.datum.name == mark["name"])
        text = text.mark_text(align=align, baseline="bottom", y=height)
        rules.append(text.encode(text="name:N"))
    used = dict.fromkeys(segment.part for segment in segments if segment.end > segment.start)
    totals = dict.fromkeys(Part, 0.0)
    for segment in segments:
        totals[segment.part] += segment.end - segment.start
    legend = [LegendEntry(part, PART_COLORS[part], step_seconds(totals[part])) for part in used]
    return chart_block(
        "A step in the time model",
        alt.layer(bars, *rules),
        {"parts": rows, "marks": marks},
        height=_ROW_HEIGHT * len(order),
        note=(
            f"Dashed: the lower bound, {step_seconds(time['bound'])}, and the estimate, "
            f"{step_seconds(time['estimate'])}. The order of collectives is not that of the "
            "program. " + assumptions(plan)
        ),
        legend=legend,
    )


def _facts(plan: dict[str, Any]) -> FactsBlock:
    """Returns the counted FLOPs and the rates that the times follow from."""
    flops, chip = plan["flops"], plan["chip"]
    model = f"{scaled(flops['model'])}FLOP"
    facts = [Fact("of the model", model, f"all devices; {SHORT_CONVENTION}")]
    if flops["again"]:
        facts.append(Fact("recomputed", f"{scaled(flops['again'])}FLOP", "all devices"))
    if flops["device"] is not None:
        facts.append(Fact("compiled program", f"{scaled(flops['device'])}FLOP", "a device"))
    elif plan["time"]:
        facts.append(Fact("compiled program", "unknown", "see the notes"))
    if chip is not None:
        per = "a chip" if chip["devices"] == 1 else f"a chip of {chip['devices']} devices"
        measured = chip["source"].startswith(MEASURED)
        peak = "products" if measured else "bfloat16 peak"
        facts += [
            Fact(peak, f"{scaled(chip['flops'])}FLOP/s", per),
            *(
                [
                    Fact(
                        "float32 products" if measured else "float32 peak (TF32)",
                        f"{scaled(chip['float32_flops'])}FLOP/s",
                        per,
                    )
                ]
                if chip["float32_flops"]
                else []
            ),
            Fact("memory bandwidth", f"{scaled(chip['bandwidth'])}B/s", per),
            *(
                Fact(kind, f"{scaled(rate)} elements/s", per)
                for kind, rate in chip["element_rates"].items()
            ),
            Fact("source", chip["source"]),
        ]
    facts += [
        Fact(
            f"kernel {each['name']}",
            "unknown" if each["flops"] is None else f"{scaled(each['flops'])}FLOP",
            f"{each['times']:g} times, {step_seconds(each['seconds'])}; from {each['basis']}"
            if each["basis"]
            else f"{each['times']:g} times, {step_seconds(each['seconds'])}; see the notes",
        )
        for each in plan["kernels"]
    ]
    return FactsBlock(facts, title="FLOPs of a step, and rates")


def _flops(flops: dict[str, Any]) -> TableBlock:
    lines = sorted(flops["by_line"].items(), key=lambda item: -item[1])
    rows = [
        (short_line(line), f"{scaled(count)}FLOP", f"{count / flops['step']:.1%}")
        for line, count in lines[:_MOST_LINES]
    ]
    if len(lines) > _MOST_LINES:
        rest = sum(count for _, count in lines[_MOST_LINES:])
        more = f"{len(lines) - _MOST_LINES} more"
        rows.append((more, f"{scaled(rest)}FLOP", f"{rest / flops['step']:.1%}"))
    return TableBlock(
        ("source line", "all devices", "part"),
        rows,
        numeric=frozenset({1, 2}),
        title="FLOPs by source line",
        width=Width.COLUMN,
    )


# -- Charts and tables of a plan's page: the memory of a device ------------------------------------

# The number of a color for each kind. Kinds of the same color are rarely both visible.
MEMORY_COLORS = {
    "parameters": 0,
    "optimizer state": 4,
    "moving average": 6,
    "model state, step, key": 8,
    "inputs": 5,
    "gradients, activations, temporaries": 2,
    "gradients and updates": 1,
    "activations": 2,
    "parameters, gathered or converted": 3,
    "other temporaries": 7,
    "gaps and compiler internals": 9,
    "results": 6,
    "program": 8,
    "padding of state and inputs": 5,
}
_UNFOLDED_FROM = 0.8  # fraction of the limit from which on the largest temporaries are unfolded
_LIMIT_SHOWN = 0.1  # fraction of the limit from which on the axis reaches to the limit


def _memory_of_device(plan: dict[str, Any]) -> list[Block]:
    """Returns the blocks that show the memory of one device, from `plan_as_json`."""
    memory = plan["memory"]
    blocks: list[Block] = [_memory_chart(memory)]
    if memory["buffers"]:
        is_full = memory["limit"] is not None and memory["peak"] > _UNFOLDED_FROM * memory["limit"]
        blocks.append(_buffers(memory["buffers"], folded=not is_full))
    return blocks


def _percent(size: int | None, whole: int) -> str:
    return f"{size / whole:.1%}" if size and whole else ""


def _memory_chart(memory: dict[str, Any]) -> ChartBlock:
    """Returns a bar of the memory by kind, and the limit unless the bar is tiny beside it."""
    alt = altair()
    peak, limit = memory["peak"], memory["limit"]
    rows, start = [], 0
    legend = []
    for kind, size in memory_by_kind(memory).items():
        text = "unknown" if size is None else byte_size(size)
        rows.append(
            {
                "kind": kind,
                "color": MEMORY_COLORS[kind],
                "start": start,
                "end": start + (size or 0),
                "size": text,
                "part": _percent(size, peak),
            }
        )
        start += size or 0
        legend.append(LegendEntry(kind, MEMORY_COLORS[kind], text))
    shows_limit = limit is not None and peak >= _LIMIT_SHOWN * limit
    end = max(peak, start, limit if shows_limit else 0)
    axis = alt.Axis(labelExpr=BYTES_LABEL, labelSeparation=8, grid=False)
    x = alt.X("start:Q", title=None, axis=axis, scale=alt.Scale(domain=[0, end * 1.02], nice=False))
    bars = (
        alt.Chart(alt.NamedData("memory"))
        .mark_bar(height={"band": 0.8})
        .encode(
            x=x,
            x2="end:Q",
            color=color_scale(alt),
            tooltip=[
                alt.Tooltip("kind:N"),
                alt.Tooltip("size:N", title="bytes"),
                alt.Tooltip("part:N", title="of the peak"),
            ],
        )
    )
    limits = []
    if shows_limit:
        limits = [{"limit": limit, "text": f"limit {byte_size(limit)}"}]
    rule = alt.Chart(alt.NamedData("limit")).encode(x="limit:Q")
    marks = rule.mark_rule(strokeWidth=3)
    text = rule.mark_text(align="right", baseline="bottom", dx=4, y=-3).encode(text="text:N")
    note = "The limit is unknown." if limit is None else ""
    if limit is not None and not shows_limit:
        note = (
            f"The limit, {byte_size(limit)}, lies far to the right: "
            f"{100 * peak / limit:.2g} % of it is used."
        )
    chart = alt.layer(bars, marks, text)
    data = {"memory": rows, "limit": limits}
    title = "Memory of a device at the peak"
    return chart_block(title, chart, data, height=64, note=note, legend=legend)


def _buffers(buffers: list[dict[str, Any]], *, folded: bool) -> TableBlock:
    return TableBlock(
        ("use", "bytes", "on a device", "parameter, source"),
        buffer_rows(buffers),
        numeric=frozenset({1}),
        title="Largest temporary arrays",
        folded=folded,
    )


# -- Tables of a plan's page: the parameters and where they lie ------------------------------------

_MOST_PARAMETERS = 16  # parameters that are visible without a click
_MOST_FOLDED = 1000
_COLUMNS = (
    *("parameter", "shape", "dtype", "sharding", "parts", "bytes"),
    *("optimizer", "its parts", "together"),
)


def parameter_blocks(plan: dict[str, Any]) -> list[Block]:
    """Returns the parameters of `plan_as_json` with their bytes on a device, largest first."""
    state = sorted(plan["state"], key=lambda row: -_bytes(row))
    blocks: list[Block] = [
        _parameters_table(state[:_MOST_PARAMETERS], "Parameters, the largest first")
    ]
    rest = state[_MOST_PARAMETERS:]
    if rest:
        size = byte_size(sum(map(_bytes, rest)))
        title = f"{len(rest):,} smaller parameters, {size} with their optimizer state"
        if len(rest) > _MOST_FOLDED:
            title += f"; the largest {_MOST_FOLDED:,}"
        blocks.append(_parameters_table(rest[:_MOST_FOLDED], title, folded=True))
    return blocks


def _bytes(row: dict[str, Any]) -> int:
    return int(row["bytes"] + row["optimizer_bytes"] + row["average_bytes"])


def _parameters_table(
    state: list[dict[str, Any]], title: str, *, folded: bool = False
) -> TableBlock:
    rows = [
        (
            row["name"],
            row["shape"],
            row["dtype"],
            row["spec"],
            f"{row['parts']:,}",
            byte_size(row["bytes"]),
            byte_size(row["optimizer_bytes"]),
            f"{row['optimizer_parts']:,}" if row["optimizer_bytes"] else "",
            byte_size(_bytes(row)),
        )
        for row in state
    ]
    return TableBlock(
        _COLUMNS, rows, numeric=frozenset({4, 5, 6, 7, 8}), title=title, folded=folded
    )


# -- Charts and tables of a plan's page: the comparison of several topologies ----------------------

_VISIBLE = 0.05  # fraction of the limit from which on memory is shown as a part of it


def comparison_blocks(plans: Sequence[dict[str, Any]], changes: Sequence[str]) -> list[Block]:
    """Returns the blocks that compare topologies.

    The plans are as returned by `plan_as_json`, without those that failed; `changes` lead from each
    to the next.
    """
    blocks: list[Block] = [_comparison_table(plans)]
    if any(plan["time"] for plan in plans):
        blocks.append(_times(plans))
    blocks.append(_memory(plans))
    if changes:
        facts = [Fact(*change.partition(": ")[::2]) for change in changes]
        blocks.append(FactsBlock(facts, title="What changes", width=Width.FULL))
    return blocks


def _comparison_table(plans: Sequence[dict[str, Any]]) -> TableBlock:
    has_tokens = any(plan["time"] and plan["time"]["tokens_per_second"] for plan in plans)
    names = ("topology", "chips", "fits", "memory", "limit", "lower bound", "estimate")
    rate = "tokens/s" if has_tokens else "examples/s"
    return TableBlock(
        (*names, rate, "MFU", "all steps", "chip-hours", "sent"),
        [_row(plan, has_tokens=has_tokens) for plan in plans],
        numeric=frozenset({1, *range(3, 12)}),
        title="Topologies",
    )


def _row(plan: dict[str, Any], *, has_tokens: bool) -> tuple[str, ...]:
    time, memory = plan["time"], plan["memory"]
    timed = ("",) * 6
    if time:
        on_cpu = uses_measured_rates(plan)
        rate = time["tokens_per_second"] if has_tokens else time["examples_per_second"]
        utilization = time["utilization"]
        timed = (
            step_seconds(time["bound"]),
            step_seconds(time["estimate"]),
            f"{rate:,.0f}" if rate else "",
            "" if utilization is None or on_cpu else f"{utilization:.1%}",
            run_time(time["run"]),
            "" if on_cpu else chip_hours(time),
        )
    return (
        plan["topology"],
        f"{plan['chips']:,}",
        {True: "yes", False: "no", None: "unknown"}[plan["fits"]],
        byte_size(memory["peak"]),
        "unknown" if memory["limit"] is None else byte_size(memory["limit"]),
        *timed,
        byte_size(round(plan["sent"]["bytes"])),
    )


def _times(plans: Sequence[dict[str, Any]]) -> ChartBlock:
    """Returns bars of the estimates, divided into exposed collectives and everything else."""
    alt = altair()
    timed = [plan for plan in plans if plan["time"]]
    unit, scale = time_unit(max(plan["time"]["estimate"] for plan in timed))
    rows = []
    for plan in timed:
        time = plan["time"]
        # The estimate is at least the bound, and then more than its parts.
        busy = max(time["estimate"] - time["waiting"], 0.0)
        for part, color, start, end in (
            ("other work", PART_COLORS[Part.PRODUCTS], 0.0, busy),
            (Part.EXPOSED, PART_COLORS[Part.EXPOSED], busy, time["estimate"]),
        ):
            rows.append(
                {
                    "topology": plan["topology"],
                    "part": part,
                    "color": color,
                    "start": start * scale,
                    "end": end * scale,
                    "time": step_seconds(end - start),
                    "mostly": time["rules"],
                }
            )
    bounds = [
        {
            "topology": plan["topology"],
            "bound": plan["time"]["bound"] * scale,
            "time": step_seconds(plan["time"]["bound"]),
        }
        for plan in timed
    ]
    order = [plan["topology"] for plan in timed]
    y = alt.Y("topology:N", sort=order, title=None)
    bars = (
        alt.Chart(alt.NamedData("times"))
        .mark_bar(height={"band": 0.6})
        .encode(
            x=alt.X("start:Q", axis=time_axis(alt, unit), scale=alt.Scale(zero=True)),
            x2="end:Q",
            y=y,
            color=color_scale(alt),
            tooltip=["topology:N", "part:N", "time:N", "mostly:N"],
        )
    )
    ticks = (
        alt.Chart(alt.NamedData("bounds"))
        .mark_tick(thickness=3, height={"band": 0.95})
        .encode(
            x="bound:Q",
            y=y,
            color=alt.datum(MUTED, type="nominal"),
            tooltip=["topology:N", alt.Tooltip("time:N", title="lower bound")],
        )
    )
    return chart_block(
        "Time of a step",
        alt.layer(bars, ticks),
        {"times": rows, "bounds": bounds},
        height=_ROW_HEIGHT * len(order),
        width=Width.COLUMN,
        legend=[
            LegendEntry("products, memory, overlapped collectives", PART_COLORS[Part.PRODUCTS]),
            LegendEntry("exposed collectives", PART_COLORS[Part.EXPOSED]),
            LegendEntry("lower bound", MUTED),
        ],
    )


def _memory(plans: Sequence[dict[str, Any]]) -> ChartBlock:
    """Returns bars of the memory of a device, as a part of the limit unless the part is tiny."""
    alt = altair()
    limits = [plan["memory"]["limit"] for plan in plans]
    parts = [
        plan["memory"]["peak"] / limit for plan, limit in zip(plans, limits, strict=True) if limit
    ]
    is_part = len(parts) == len(plans) and max(parts) >= _VISIBLE
    rows = []
    legend: dict[str, LegendEntry] = {}
    for plan in plans:
        start = 0.0
        whole = plan["memory"]["limit"] if is_part else 1
        for kind, size in memory_by_kind(plan["memory"]).items():
            end = start + (size or 0) / whole
            rows.append(
                {
                    "topology": plan["topology"],
                    "kind": kind,
                    "color": MEMORY_COLORS[kind],
                    "start": start,
                    "end": end,
                    "size": "unknown" if size is None else byte_size(size),
                }
            )
            start = end
            if size and size >= 0.01 * plan["memory"]["peak"]:
                legend.setdefault(kind, LegendEntry(kind, MEMORY_COLORS[kind]))
    label = {"format": "%"} if is_part else {"labelExpr": BYTES_LABEL}
    order = [plan["topology"] for plan in plans]
    bars = (
        alt.Chart(alt.NamedData("memory"))
        .mark_bar(height={"band": 0.6})
        .encode(
            x=alt.X(
                "start:Q",
                axis=alt.Axis(title=None, labelSeparation=8, **label),
                scale=alt.Scale(zero=True),
            ),
            x2="end:Q",
            y=alt.Y("topology:N", sort=order, title=None),
            color=color_scale(alt),
            tooltip=["topology:N", "kind:N", alt.Tooltip("size:N", title="bytes")],
        )
    )
    limit = alt.Chart(alt.NamedData("limit")).mark_rule(strokeWidth=2, strokeDash=[5, 3])
    return chart_block(
        "Memory of a device, of the limit" if is_part else "Memory of a device",
        alt.layer(bars, limit.encode(x="limit:Q")),
        {"memory": rows, "limit": [{"limit": 1}] if is_part else []},
        height=_ROW_HEIGHT * len(order),
        width=Width.COLUMN,
        legend=list(legend.values()),
    )
