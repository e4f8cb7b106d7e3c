"""A drawing of a topology: chips as points, links as lines.

If a dim has many chips, only the first and the last are drawn. If a torus has three dims, only
the faces in front, above and on the right are drawn.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
