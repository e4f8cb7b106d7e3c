"""Charts and tables of a plan's page: the time of a step."""

import enum
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from spmdtrain.document.blocks import (
    Block,
    ChartBlock,
    Fact,
    FactsBlock,
    LegendEntry,
    TableBlock,
    Width,
    altair,
    chart_block,
)
from spmdtrain.plan.page_scales import color_scale, time_axis, time_unit
from spmdtrain.plan.phrases import (
    assumptions,
    scaled,
    short_line,
    step_seconds,
    uses_measured_rates,
)
from spmdtrain.plan.time_model import Overlap, overlapped_seconds
from spmdtrain.step.flops import SHORT_CONVENTION

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
    each follows the one before. Then come the exposed collectives. The order within each of them
    is arbitrary.
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
        blocks.append(_chart(plan))
    if plan["flops"]["step"]:
        blocks.append(_facts(plan))
    if plan["flops"]["by_line"]:
        blocks.append(_flops(plan["flops"]))
    return blocks


def _chart(plan: dict[str, Any]) -> ChartBlock:
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
    if chip is not None:
        per = "a chip" if chip["devices"] == 1 else f"a chip of {chip['devices']} devices"
        peak = "products" if uses_measured_rates(plan) else "bfloat16 peak"
        facts += [
            Fact(peak, f"{scaled(chip['flops'])}FLOP/s", per),
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
            else f"{each['times']:g} times, {step_seconds(each['seconds'])}",
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
