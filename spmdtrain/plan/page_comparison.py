"""Charts and tables of a plan's page: the comparison of several topologies."""

from collections.abc import Sequence
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
from spmdtrain.document.terminal import byte_size
from spmdtrain.plan.page_memory import MEMORY_COLORS
from spmdtrain.plan.page_scales import BYTES_LABEL, MUTED, color_scale, time_axis, time_unit
from spmdtrain.plan.page_time import PART_COLORS, Part
from spmdtrain.plan.phrases import (
    chip_hours,
    memory_by_kind,
    run_time,
    step_seconds,
    uses_measured_rates,
)

_VISIBLE = 0.05  # fraction of the limit from which on memory is shown as a part of it
_ROW_HEIGHT = 34  # pixels


def comparison_blocks(plans: Sequence[dict[str, Any]], changes: Sequence[str]) -> list[Block]:
    """Returns the blocks that compare topologies.

    The plans are as returned by `plan_as_json`, without those that failed; `changes` lead from each
    to the next.
    """
    blocks: list[Block] = [_table(plans)]
    if any(plan["time"] for plan in plans):
        blocks.append(_times(plans))
    blocks.append(_memory(plans))
    if changes:
        facts = [Fact(*change.partition(": ")[::2]) for change in changes]
        blocks.append(FactsBlock(facts, title="What changes", width=Width.FULL))
    return blocks


def _table(plans: Sequence[dict[str, Any]]) -> TableBlock:
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
