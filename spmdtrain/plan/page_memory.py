"""Charts and tables of a plan's page: the memory of a device."""

from typing import Any

from spmdtrain.document.blocks import (
    Block,
    ChartBlock,
    LegendEntry,
    TableBlock,
    altair,
    chart_block,
)
from spmdtrain.document.terminal import byte_size
from spmdtrain.plan.page_scales import BYTES_LABEL, color_scale
from spmdtrain.plan.phrases import buffer_source, memory_by_kind

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
_FULL = 0.8  # fraction of the limit from which on the largest temporaries are unfolded
_LIMIT_SHOWN = 0.1  # fraction of the limit from which on the axis reaches to the limit


def memory_blocks(plan: dict[str, Any]) -> list[Block]:
    """Returns the blocks that show the memory of one device, from `plan_as_json`."""
    memory = plan["memory"]
    blocks: list[Block] = [_chart(memory)]
    if memory["buffers"]:
        is_full = memory["limit"] is not None and memory["peak"] > _FULL * memory["limit"]
        blocks.append(_buffers(memory["buffers"], folded=not is_full))
    return blocks


def _percent(size: int | None, whole: int) -> str:
    return f"{size / whole:.1%}" if size and whole else ""


def _chart(memory: dict[str, Any]) -> ChartBlock:
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
    rows = []
    for buffer in buffers:
        times = f"{buffer['count']} x " if buffer["count"] > 1 else ""
        size = times + byte_size(buffer["bytes"])
        rows.append((buffer["use"], size, buffer["shape"], buffer_source(buffer)))
    return TableBlock(
        ("use", "bytes", "on a device", "parameter, source"),
        rows,
        numeric=frozenset({1}),
        title="Largest temporary arrays",
        folded=folded,
    )
