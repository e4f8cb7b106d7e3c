"""Charts and tables of a plan's page: collectives and the links that they use."""

from dataclasses import dataclass
from typing import Any

from spmdtrain.document.blocks import (
    Block,
    ChartBlock,
    LegendEntry,
    NoteBlock,
    TableBlock,
    Width,
    altair,
    chart_block,
)
from spmdtrain.document.terminal import byte_size
from spmdtrain.plan.page_drawing import NETWORKS, Drawing, draw_topology
from spmdtrain.plan.page_scales import MUTED, color_scale
from spmdtrain.plan.phrases import group_collectives, sent_sentence, sentence, step_seconds

LINK_COLORS = {
    "x": 0,
    "y": 1,
    "z": 2,
    "NVLink": 2,
    "the network between hosts": 3,
    "the network between slices": 3,
    "the chip": 8,
    "memory": 8,
}
"""The number of a color for each link of a topology."""
_MOST_ROWS = 12  # of collectives
_MOST_PARAMETERS = 8  # with excess traffic
_WIDTH, _LOWEST, _HIGHEST = 520, 120, 300  # pixels of a drawing on a wide screen
_MARGIN = 22  # pixels
_LONGEST_LINK = 64  # pixels between two chips


@dataclass(frozen=True)
class LinkLoad:
    """Bytes and seconds of the collectives of a step on one link of the topology.

    Attributes:
      name: Name of the link, as `TopologyLink.name`.
      sent: Bytes that each device sends.
      seconds: Time of the collectives that use it; None if unknown.
    """

    name: str
    sent: float
    seconds: float | None
    kinds: tuple[str, ...]


def link_loads(plan: dict[str, Any]) -> dict[str, LinkLoad]:
    """Returns the loads of a topology's links in a step, by name, from `plan_as_json`."""
    loads = {}
    for link in plan["links"]:
        using = [each for each in plan["collectives"] if each["sent"].get(link["name"])]
        seconds = [each["seconds"] for each in using]
        loads[link["name"]] = LinkLoad(
            name=link["name"],
            sent=sum(each["sent"][link["name"]] for each in using),
            seconds=None if None in seconds else sum(seconds),
            kinds=tuple(dict.fromkeys(each["kind"] for each in using)),
        )
    return loads


def link_blocks(plan: dict[str, Any]) -> list[Block]:
    """Returns the blocks that show collectives and links, from `plan_as_json`."""
    if not plan["collectives"]:
        if plan["flops"]["device"] is None:
            return [NoteBlock("Unknown, because the step was not compiled.")]
        return [NoteBlock("A step has no collectives: the devices send each other nothing.")]
    loads = link_loads(plan)
    blocks: list[Block] = [NoteBlock(sentence(sent_sentence(plan["sent"])))]
    drawing = draw_topology(plan["links"])
    if drawing is not None:
        blocks.append(_chart(plan, drawing, loads))
    if plan["links"]:
        blocks.append(_links(plan, loads, Width.COLUMN if drawing is not None else Width.FULL))
    blocks.append(_collectives(plan))
    excess = _excess(plan)
    return blocks if excess is None else [*blocks, excess]


def _dim(name: str) -> str:
    return f"dim {name}" if len(name) == 1 else name


def _short(name: str) -> str:
    """Returns the name of a link in a narrow column."""
    return "network" if name in NETWORKS else name


def _chart(plan: dict[str, Any], drawing: Drawing, loads: dict[str, LinkLoad]) -> ChartBlock:
    alt = altair()
    use = {
        name: load.sent if load.seconds is None else load.seconds for name, load in loads.items()
    }
    most = max(use.values(), default=0)
    texts = {name: _load_text(load) for name, load in loads.items()}
    lines = [
        {
            "link": _dim(line.link),
            "load": texts[line.link],
            "collectives": ", ".join(loads[line.link].kinds),
            "color": LINK_COLORS[line.link],
            "x": line.start[0],
            "y": line.start[1],
            "x2": line.end[0],
            "y2": line.end[1],
            "skips": line.skips,
            "used": use[line.link] / most if most else 0.0,
        }
        for line in drawing.links
    ]
    chips = [{"x": x, "y": y, "topology": plan["topology"]} for x, y in drawing.chips]
    columns, rows, pixels = _domains(drawing)
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=columns, nice=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=rows, nice=False))
    rules = (
        alt.Chart(alt.NamedData("links"))
        .mark_rule(strokeCap="round")
        .encode(
            x=x,
            y=y,
            x2="x2:Q",
            y2="y2:Q",
            color=color_scale(alt),
            strokeWidth=alt.StrokeWidth(
                "used:Q", legend=None, scale=alt.Scale(domain=[0, 1], range=[1.2, 4])
            ),
            strokeDash=alt.condition("datum.skips", alt.value([3, 4]), alt.value([1, 0])),
            opacity=alt.condition("datum.used > 0", alt.value(0.9), alt.value(0.35)),
            tooltip=[alt.Tooltip("link:N"), alt.Tooltip("load:N"), alt.Tooltip("collectives:N")],
        )
    )
    points = (
        alt.Chart(alt.NamedData("chips"))
        .mark_point(filled=True, size=70, opacity=1)
        .encode(x=x, y=y, color=alt.datum(MUTED, type="nominal"))
    )
    legend = [
        LegendEntry(_connects(link), LINK_COLORS[link["name"]], texts[link["name"]])
        for link in plan["links"]
        if any(line.link == link["name"] for line in drawing.links)
    ]
    note = "Lines are wider, the longer collectives use them in a step."
    if any(loads[name].sent for name in NETWORKS if name in loads):
        note += " A collective over the network is counted there alone."
    if any(line.skips for line in drawing.links):
        note += " Dashed lines lead to chips that are not drawn, or around a ring."
    if {"x", "y", "z"} <= loads.keys():
        note += " Chips inside and behind the cube are not drawn."
    return chart_block(
        f"Links of {plan['topology']}",
        alt.layer(rules, points),
        {"links": lines, "chips": chips},
        height=pixels,
        note=note,
        width=Width.COLUMN,
        legend=legend,
    )


def _domains(drawing: Drawing) -> tuple[list[float], list[float], int]:
    """Returns the domains of x and y, with equal units on a wide screen, and the height."""
    (left, bottom), (right, top) = drawing.corners
    width, height = right - left, top - bottom
    wide = (_WIDTH - 2 * _MARGIN) / max(width, 1e-9)
    high = (_HIGHEST - 2 * _MARGIN) / max(height, 1e-9)
    unit = min(_LONGEST_LINK, wide, high)
    pixels = max(_LOWEST, round(unit * height) + 2 * _MARGIN)
    columns = [(left + right + sign * _WIDTH / unit) / 2 for sign in (-1, 1)]
    rows = [(bottom + top + sign * pixels / unit) / 2 for sign in (-1, 1)]
    return columns, rows, pixels


def _connects(link: dict[str, Any]) -> str:
    """Returns the name of a link with what it connects."""
    name, size, ring = link["name"], link["size"], ", a ring" if link["ring"] else ""
    if name == "NVLink":
        return f"NVLink, {size:,} GPUs"
    if name in NETWORKS:
        return f"network, {size:,} {name.rpartition(' ')[2]}"
    return f"{_dim(name)}, {size:,} chips{ring}" if len(name) == 1 else f"{name}, {size:,} devices"


def _load_text(load: LinkLoad) -> str:
    if not load.sent:
        return "0 B"
    time = "" if load.seconds is None else f" in {step_seconds(load.seconds)}"
    return f"{byte_size(round(load.sent))}{time}"


def _links(plan: dict[str, Any], loads: dict[str, LinkLoad], width: Width) -> TableBlock:
    rows = []
    for link in plan["links"]:
        load = loads[link["name"]]
        bandwidth = link["bandwidth"]
        rows.append(
            (
                _connects(link),
                "unknown" if bandwidth is None else f"{byte_size(round(bandwidth))}/s",
                byte_size(round(load.sent)) if load.sent else "",
                step_seconds(load.seconds) if load.seconds else "",
            )
        )
    return TableBlock(
        ("link", "bandwidth", "sent", "time"),
        rows,
        numeric=frozenset({1, 2, 3}),
        title="Bytes of a device and time of a step, by link",
        width=width,
    )


def _collectives(plan: dict[str, Any]) -> TableBlock:
    groups = group_collectives(plan["collectives"])
    rows = [
        (
            group.kind,
            ", ".join(group.axes) or "?",
            ", ".join(map(_short, group.sent)) or "unknown",
            f"{group.times:g}",
            byte_size(round(group.bytes)),
            byte_size(round(sum(group.sent.values()))),
            "" if group.seconds is None else step_seconds(group.seconds),
            "yes" if group.overlapped else "no",
            group.carries,
            group.source.partition(" (")[0],  # without the function
        )
        for group in groups[:_MOST_ROWS]
    ]
    if len(groups) > _MOST_ROWS:
        rest = groups[_MOST_ROWS:]
        seconds = [group.seconds for group in rest]
        rows.append(
            (
                f"{len(rest)} more",
                "",
                "",
                f"{sum(group.times for group in rest):g}",
                byte_size(round(sum(group.bytes for group in rest))),
                byte_size(round(sum(sum(group.sent.values()) for group in rest))),
                "" if None in seconds else step_seconds(sum(x for x in seconds if x)),
                "",
                "",
                "",
            )
        )
    names = ("collective", "axes", "links", "times", "payload", "sent", "time", "overlap")
    return TableBlock(
        (*names, "carries", "source"),
        rows,
        numeric=frozenset({3, 4, 5, 6}),
        title="Collectives of a step, the longest first",
    )


def _excess(plan: dict[str, Any]) -> TableBlock | None:
    """Returns the parameters for which a step sends more than the strategy needs."""
    sent = plan["sent"]
    if not sent["excess"] or sent["excess"] < 0.01 * sent["bytes"]:
        return None
    rows = [
        (
            each["parameter"],
            byte_size(round(each["bytes"])),
            byte_size(round(each["least"])),
            byte_size(round(each["excess"])),
            each["how"],
        )
        for each in sent["by_parameter"][:_MOST_PARAMETERS]
        if each["excess"]
    ]
    return TableBlock(
        ("parameter", "sent", "needed", "excess", "how"),
        rows,
        numeric=frozenset({1, 2, 3}),
        title="Parameters of which more is sent than the strategy needs",
        folded=True,
    )
