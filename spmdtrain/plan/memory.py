"""Memory of one device during a planned step."""

import dataclasses
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import jax

from spmdtrain.plan.summary import CompiledSummary, Use
from spmdtrain.plan.topologies import Topology
from spmdtrain.sharding.layout import Row
from spmdtrain.sharding.placement import Placement

# Needed and available memory in XLA's out-of-memory message.
_OUT_OF_MEMORY = re.compile(
    r"\(?([\d.]+[KMGT]?)\)? ?(?:of|exceeds available HBM) \(?([\d.]+[KMGT]?)\)?"
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; with unequal devices, on the one that holds the most.

    Attributes:
      other: Step, key, and model state.
      temporaries: Temporary arrays of the step. None if the state alone exceeds the limit, in
        which case nothing is compiled.
      results: Results of the step that do not reuse the buffer of an argument.
      code: The program.
      limit: Memory that a program may use; None if unknown.
      uses: Temporaries that are live at their peak, by use. The remainder of `temporaries` are
        gaps between arrays of different lifetimes.
    """

    params: int
    optimizer: int
    average: int
    other: int
    inputs: int
    temporaries: int | None
    results: int
    code: int
    peak: int
    limit: int | None
    uses: dict[Use, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the limit; None if the limit is unknown."""
        return None if self.limit is None else self.peak <= self.limit


def state_memory(
    total: Row, others: Row, batch: Any, placement: Placement, topology: Topology
) -> Memory:
    """Returns the memory that is known without compiling: state and batch.

    `total` and `others` are the sum and the last row of the sharding table. `batch` is the abstract
    global batch.
    """
    other = others.own.device
    inputs = sum(
        math.prod((x.sharding or placement.batch).shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(batch)
    )
    state = total.own.device + total.optimizer.device + total.average.device
    return Memory(
        params=total.own.device - other,
        optimizer=total.optimizer.device,
        average=total.average.device,
        other=other,
        inputs=inputs,
        temporaries=None,
        results=0,
        code=0,
        peak=state + inputs,
        limit=None if topology.chip is None else topology.chip.memory or None,
    )


def with_program(memory: Memory, summary: CompiledSummary, topology: Topology) -> Memory:
    """Adds the memory of the compiled program, or of one that was rejected as too big."""
    uses: dict[Use, int] = defaultdict(int)
    for buffer in summary.buffers:
        uses[buffer.use] += buffer.bytes
    memory = dataclasses.replace(memory, uses=dict(uses))
    if summary.refusal:
        return _rejected(memory, summary)
    sizes = summary.sizes
    results, code = sizes["output"] - sizes["alias"], sizes["generated_code"]
    temporaries = sizes["temp"]
    if topology.platform == "tpu" and "total" in sizes:
        # On TPU the other sizes do not add up to what the allocator assigned.
        temporaries = max(0, sizes["total"] - sizes["argument"] - results)
    return dataclasses.replace(
        memory,
        temporaries=temporaries,
        results=results,
        code=code,
        peak=sizes["argument"] + temporaries + results + code,
    )


def _rejected(memory: Memory, summary: CompiledSummary) -> Memory:
    match = _OUT_OF_MEMORY.search(summary.refusal)
    needed, limit = map(_size, match.groups()) if match else ((memory.limit or 0) + 1, memory.limit)
    needed = summary.sizes.get("total", max(needed, memory.peak))
    return dataclasses.replace(
        memory, temporaries=max(0, needed - memory.peak), peak=needed, limit=limit
    )


def _size(text: str) -> int:
    unit = text[-1] if text[-1] in _UNITS else ""
    return int(float(text.removesuffix(unit)) * _UNITS[unit])
