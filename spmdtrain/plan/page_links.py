"""Charts of a plan's page: collectives, the links that they use, the topology."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdtrain.document.blocks import (
    COLORS,
    TICK_LABEL,
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
from spmdtrain.plan.tables import group_collectives, sent_sentence, sentence, step_seconds

# -- A drawing of a topology: chips as points, links as lines --------------------------------------
#
# If a dim has many chips, only the first and the last are drawn. If a torus has three dims, only
# the faces in front, above and on the right are drawn.

_MOST_DRAWN = 5  # chips along a dim, hosts or slices; of more, the first three and the last
_STUB = 0.45  # length of the line that stands for the link around a ring
# The directions in which the dims of a torus are drawn.
_DIRECTIONS = {"x": (1.0, 0.0), "y": (0.0, 1.0), "z": (0.42, 0.36)}
NETWORKS = ("the network between hosts", "the network between slices")


@dataclass(frozen=True)
class DrawnLink:
    """A line between two points, on a link of the topology."""

    link: str
    start: tuple[float, float]
    end: tuple[float, float]
    skips: bool = False
    """Whether chips between the points are not drawn, or the line leads around a ring."""


@dataclass
class Drawing:
    """Points and lines; y points up."""

    chips: list[tuple[float, float]] = field(default_factory=list)
    links: list[DrawnLink] = field(default_factory=list)

    @property
    def corners(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The lowest and the highest x and y."""
        points = [*self.chips, *(p for link in self.links for p in (link.start, link.end))]
        xs, ys = zip(*points, strict=True)
        return (min(xs), min(ys)), (max(xs), max(ys))


def draw_topology(links: Sequence[dict[str, Any]]) -> Drawing | None:
    """Returns the drawing of a topology with these links, as they are in `plan_as_json`.

    None if the topology has no links between chips, as on CPU.
    """
    sizes = {link["name"]: link["size"] for link in links}
    rings = {link["name"] for link in links if link["ring"]}
    dims = [name for name in _DIRECTIONS if name in sizes]
    network = next((name for name in NETWORKS if name in sizes), None)
    if dims:
        group = _torus(dims, sizes, rings)
    elif "NVLink" in sizes or network:
        group = _host(sizes.get("NVLink", 1))
    else:
        return None
    if network is None:
        return group
    return _side_by_side(group, network, sizes[network])


def _drawn(size: int) -> list[tuple[int, bool]]:
    """Returns the drawn positions of a dim, and whether positions before each are left out."""
    if size <= _MOST_DRAWN:
        return [(n, False) for n in range(size)]
    return [(0, False), (1, False), (2, False), (4, True)]


def _torus(dims: Sequence[str], sizes: dict[str, int], rings: set[str]) -> Drawing:
    drawing = Drawing()
    drawn = [_drawn(sizes[dim]) for dim in dims]
    directions = [_DIRECTIONS[dim] for dim in dims]

    def place(position: Sequence[float]) -> tuple[float, float]:
        steps = list(zip(position, directions, strict=True))
        return sum(n * d[0] for n, d in steps), sum(n * d[1] for n, d in steps)

    def is_visible(*cells: Sequence[tuple[int, bool]]) -> bool:
        """Returns whether chips are on one of the visible faces."""
        front, above, right = drawn[2][0], drawn[1][-1], drawn[0][-1]
        ends = ((2, front), (1, above), (0, right))
        return any(all(cell[dim] == end for cell in cells) for dim, end in ends)

    is_cube = len(dims) == len(_DIRECTIONS)
    for cell in itertools.product(*drawn):
        if is_cube and not is_visible(cell):
            continue
        at = [float(n) for n, _ in cell]
        drawing.chips.append(place(at))
        for dim, name in enumerate(dims):
            axis = drawn[dim]
            index = axis.index(cell[dim])
            previous = (*cell[:dim], axis[index - 1], *cell[dim + 1 :])
            if index and not (is_cube and not is_visible(cell, previous)):
                before = [float(n) for n, _ in previous]
                line = DrawnLink(name, place(before), place(at), skips=cell[dim][1])
                drawing.links.append(line)
            if name in rings and not is_cube and index in (0, len(axis) - 1):
                beyond = [*at]
                beyond[dim] += -_STUB if index == 0 else _STUB
                drawing.links.append(DrawnLink(name, place(at), place(beyond), skips=True))
    return drawing


def _host(gpus: int) -> Drawing:
    """Returns a host: its GPUs in a row, each connected to the switch below them."""
    drawing = Drawing()
    drawn = _drawn(gpus) if gpus > 2 * _MOST_DRAWN else [(n, False) for n in range(gpus)]
    positions = [float(n) for n, _ in drawn]
    for x in positions:
        drawing.chips.append((x, 1.0))
        if gpus > 1:
            drawing.links.append(DrawnLink("NVLink", (x, 1.0), (x, 0.0)))
    if gpus > 1:
        for (left, right), (_, skips) in zip(itertools.pairwise(positions), drawn[1:], strict=True):
            drawing.links.append(DrawnLink("NVLink", (left, 0.0), (right, 0.0), skips=skips))
    return drawing


def _side_by_side(group: Drawing, network: str, count: int) -> Drawing:
    """Returns hosts or slices beside each other, connected by a network below them."""
    (left, bottom), (right, top) = group.corners
    width, height = right - left, top - bottom
    step = width + max(1.0, 0.35 * width)
    low = min([*(y for _, y in group.chips), *(link.end[1] for link in group.links)])
    floor = low - 0.35 * max(1.0, height)
    drawing = Drawing()
    columns: list[tuple[float, bool]] = []
    for n, skips in _drawn(count):
        shift = n * step
        drawing.chips += [(x + shift, y) for x, y in group.chips]
        drawing.links += [
            DrawnLink(
                link.link,
                (link.start[0] + shift, link.start[1]),
                (link.end[0] + shift, link.end[1]),
                link.skips,
            )
            for link in group.links
        ]
        middle = shift + sum(x for x, _ in group.chips) / len(group.chips)
        columns.append((middle, skips))
        drawing.links.append(DrawnLink(network, (middle, low), (middle, floor)))
    for (one, _), (next_one, skips) in itertools.pairwise(columns):
        drawing.links.append(DrawnLink(network, (one, floor), (next_one, floor), skips=skips))
    return drawing


# -- Charts and tables of a plan's page: collectives and the links that they use -------------------

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


# -- Scales and axes that the charts of a plan's page share ----------------------------------------

BYTES_LABEL = "datum.value === 0 ? '0' : format(datum.value, '~s') + 'B'"
"""Vega expression for the label of an axis in bytes."""
MUTED = COLORS - 1
"""The number of a color that does not stand out."""


def color_scale(alt: Any) -> Any:
    """Returns the encoding of a column `color`, the number of a color of the page."""
    scale = alt.Scale(domain=list(range(COLORS)))
    return alt.Color("color:N", legend=None, scale=scale)


def time_axis(alt: Any, unit: str) -> Any:
    """Returns an axis of times in a unit."""
    label = f"datum.value === 0 ? '0' : ({TICK_LABEL}) + ' {unit}'"
    return alt.Axis(title=None, labelSeparation=8, labelExpr=label)


def time_unit(seconds: float) -> tuple[str, float]:
    """Returns the unit of an axis up to a time, and the units in a second."""
    if seconds >= 1:
        return "s", 1.0
    return ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
