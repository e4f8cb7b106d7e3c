"""The report `program.json` of a run: its parameters, the operations and collectives of a step."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from spmdtrain.sharding.placement import Placement
from spmdtrain.sharding.rules import describe_sharding
from spmdtrain.step.flops import CONVENTION, model_flops
from spmdtrain.tree import named_leaves
from spmdtrain.xla.chips import peak_flops
from spmdtrain.xla.collectives import Collective

PyTree = Any


@dataclass(frozen=True)
class StepProgram:
    """The program of one dispatch.

    Attributes:
      jaxpr: Its operations; None if they are not known.
      steps: Number of steps of a dispatch.
      collectives: Its collectives, or the reason why they are not known.
      retrace: Traces it again and returns its jaxpr; None if that is not known.
    """

    jaxpr: Any
    steps: int
    collectives: Sequence[Collective] | str
    retrace: Callable[[], Any] | None = None


class ProgramReport:
    """The content of `program.json`, computed in a thread, so that the steps do not wait.

    Args:
      params: The parameters, or their shapes.
      places: Their shardings; None if they are on parameter servers.
    """

    def __init__(
        self, program: StepProgram, params: PyTree, places: PyTree | None, placement: Placement
    ) -> None:
        self.peak = peak_flops(placement.devices[0].device_kind)
        """Peak FLOP/s of a device; None if its chip is not known."""
        self.devices = len(placement.devices)
        self._program, self._params, self._places = program, params, places
        self._placement = placement
        executor = ThreadPoolExecutor(1, thread_name_prefix="program-report")
        self._content: Future[dict[str, Any]] = executor.submit(self._compute)
        executor.shutdown(wait=False)

    def content(self, *, wait: bool = False) -> dict[str, Any] | None:
        """Returns the content of the report; without `wait`, None while it is computed."""
        return self._content.result() if wait or self._content.done() else None

    def _compute(self) -> dict[str, Any]:
        leaves, found = named_leaves(self._params), self._program.collectives
        content: dict[str, Any] = {
            "parameters": sum(math.prod(leaf.shape) for leaf in leaves.values()),
            "flops_per_step": None,
            "flops_convention": CONVENTION,
            "peak_flops_per_device": self.peak,
            "devices": self.devices,
            "mesh": _axes(self._placement),
            "collectives": [] if isinstance(found, str) else _totals(found),
            "sharding": [] if self._places is None else _table(leaves, self._places),
        }
        if isinstance(found, str):
            content["collectives_unknown"] = found
        try:
            content["flops_per_step"] = _flops(self._program)
        except Exception as error:  # of an unusual program; a report must not end a run
            content["flops_unknown"] = f"{type(error).__name__}: {error}"
        return content


def _flops(program: StepProgram) -> float | None:
    """Returns the model's FLOPs of one step, as `CONVENTION` defines them."""
    if program.jaxpr is None or program.retrace is None:
        return None
    return model_flops(program.jaxpr, program.retrace).once / program.steps


def _axes(placement: Placement) -> dict[str, int]:
    """Returns the mesh axes with more than one device and their sizes."""
    if placement.mesh is None:
        return {}
    return {str(name): size for name, size in placement.mesh.shape.items() if size > 1}


def _totals(found: Sequence[Collective]) -> list[dict[str, Any]]:
    """Returns the number and the bytes of the collectives by kind and axes."""
    totals: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for each in found:
        total = totals.setdefault((each.kind, each.axes), [0, 0])
        total[0] += 1
        total[1] += each.bytes
    return [
        {"kind": kind, "axes": list(axes), "count": count, "bytes": size}
        for (kind, axes), (count, size) in sorted(totals.items(), key=lambda x: -x[1][1])
    ]


def _table(leaves: dict[str, Any], places: PyTree) -> list[dict[str, Any]]:
    """Returns the sharding of each parameter, and its bytes on a device."""
    where = named_leaves(places)
    return [
        {
            "path": name,
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "spec": describe_sharding(where[name]),
            "bytes_per_device": math.prod(where[name].shard_shape(tuple(leaf.shape)))
            * leaf.dtype.itemsize,
        }
        for name, leaf in leaves.items()
    ]
