"""The JSON form of a plan: bytes on one device, seconds of one step."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from spmdtrain.plan import planner
from spmdtrain.plan.advice import Advice
from spmdtrain.plan.kernels import PlannedKernel
from spmdtrain.plan.measurement import Measured
from spmdtrain.plan.planned_collective import PlannedCollective
from spmdtrain.plan.summary import Buffer
from spmdtrain.plan.traffic import Traffic
from spmdtrain.sharding.layout import Row
from spmdtrain.step.flops import CONVENTION

_MOST_BUFFERS = 12


def plan_as_json(
    plan: planner.Plan, advised: Sequence[Advice] = (), measured: Measured | None = None
) -> dict[str, Any]:
    """Returns a plan as `--json` prints it."""
    times, memory = plan.times, dataclasses.asdict(plan.memory)
    report: dict[str, Any] = {
        "topology": plan.topology,
        "chips": plan.chips,
        "used": plan.used,
        "devices": plan.devices,
        "placement": plan.placement,
        "global_batch_size": plan.global_batch_size,
        "fits": plan.fits,
        "memory": memory | {"buffers": _buffers(plan.buffers)},
        "state": [_parameter(row) for row in plan.rows],
        "collectives": list(map(_collective, plan.collectives)),
        "sent": _sent(plan.traffic),
        "rematerialized": list(map(dataclasses.asdict, plan.rematerialized)),
        "flops": {
            "model": plan.model_flops,
            "convention": CONVENTION,
            "step": plan.flops,
            "again": plan.flops_again,
            "chip": plan.flops / plan.used,
            "device": None if math.isnan(plan.products) else plan.products,
            "by_line": plan.flops_by_line,
        },
        "kernels": list(map(_kernel, plan.kernels)),
        "time": None,
        "chip": None if plan.chip is None else dataclasses.asdict(plan.chip),
        "links": list(map(dataclasses.asdict, plan.links)),
        "measured": None if measured is None else dataclasses.asdict(measured),
        "advice": list(map(dataclasses.asdict, advised)),
        "notes": plan.notes,
    }
    if times is not None:
        tokens = plan.global_batch_size * plan.tokens / times.estimate
        report["time"] = dataclasses.asdict(times) | {
            "bound": times.bound,
            "estimate": times.estimate,
            "busy": times.busy,
            "rules": times.bottleneck,
            "sources": times.sources,
            "utilization": plan.utilization,
            "examples_per_second": plan.global_batch_size / times.estimate,
            "tokens_per_second": tokens or None,
            "steps": plan.steps,
            "run": plan.steps * times.estimate,
            "chip_hours": plan.steps * times.estimate * plan.chips / 3600,
        }
    return report


def _collective(collective: PlannedCollective) -> dict[str, Any]:
    seconds = None if math.isnan(collective.seconds) else collective.seconds
    return dataclasses.asdict(collective) | {"seconds": seconds}


def _kernel(kernel: PlannedKernel) -> dict[str, Any]:
    flops = None if math.isnan(kernel.flops) else kernel.flops
    return dataclasses.asdict(kernel) | {"flops": flops}


def _parameter(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "shape": row.shape,
        "dtype": row.dtype,
        "spec": row.spec,
        "bytes": row.own.device,
        "parts": row.own.parts,
        "optimizer_bytes": row.optimizer.device,
        "optimizer_parts": row.optimizer.parts,
        "average_bytes": row.average.device,
    }


def _sent(traffic: Traffic) -> dict[str, Any]:
    return {
        "bytes": traffic.bytes,
        "least": traffic.least,
        "excess": traffic.excess,
        "by_parameter": list(map(dataclasses.asdict, traffic.by_parameter)),
    }


def _buffers(buffers: Sequence[Buffer]) -> list[dict[str, Any]]:
    """Returns the largest buffers. Equal ones are one entry with a `count`; `bytes` is of one."""
    counts = Counter(buffers)
    largest = sorted(counts, key=lambda buffer: -buffer.bytes * counts[buffer])[:_MOST_BUFFERS]
    return [dataclasses.asdict(buffer) | {"count": counts[buffer]} for buffer in largest]
