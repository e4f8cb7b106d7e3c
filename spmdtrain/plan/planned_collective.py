"""Collectives of a planned step, with their links and times."""

import math
from dataclasses import dataclass, field

from spmdtrain.plan import time_model
from spmdtrain.plan.topologies import Topology
from spmdtrain.sharding.placement import Placement
from spmdtrain.xla.collectives import Carried, Collective


@dataclass(frozen=True)
class PlannedCollective:
    """One collective of the compiled step, with its estimated time. See also `Collective`.

    Attributes:
      group_size: Number of devices in a group; 0 if unknown.
      bytes: Payload of one execution.
      times: Number of executions in a step.
      link: Name of the link that it uses, or "unknown".
      sent: Bytes that each device sends in all its executions in a step, by the name of the
        topology's link (`TopologyLink`); empty if the group is unknown.
      seconds: Minimum time of all its executions in a step; NaN if unknown.
      direction: Direction of a permute along its axes; see `permute_direction`.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    times: float
    overlapped: bool
    link: str
    seconds: float
    op_name: str
    line: str
    carries: tuple[Carried, ...] = ()
    sent: dict[str, float] = field(default_factory=dict)
    direction: int = 0


def planned_collective(
    collective: Collective, placement: Placement, topology: Topology
) -> PlannedCollective:
    """Returns a collective of a compiled step with its link and its time."""
    seconds, name, shares = math.nan, "unknown", {}
    if topology.chip is None:
        name = "memory"
        shares = {name: 1.0}
    elif collective.group:
        group = [placement.devices[number] for number in collective.group]
        link = time_model.link_between(collective.kind, group, topology, topology.chip)
        name, shares = link.name, dict(link.shares)
        seconds = collective.times * time_model.seconds(
            collective.kind, collective.bytes, collective.group_size, link
        )
    sent = collective.times * time_model.wire_bytes(
        collective.kind, collective.bytes, collective.group_size
    )
    return PlannedCollective(
        kind=collective.kind,
        axes=collective.axes,
        group_size=collective.group_size,
        bytes=collective.bytes,
        times=collective.times,
        overlapped=collective.overlapped,
        link=name,
        seconds=seconds,
        op_name=collective.op_name,
        line=collective.line,
        carries=collective.carries,
        sent={each: share * sent for each, share in shares.items()},
        direction=time_model.permute_direction(collective.kind, collective.group),
    )
