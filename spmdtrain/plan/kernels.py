"""Kernels of a compiled program, of Pallas and of cuDNN's attention: operations and time.

XLA's text does not show what a Pallas kernel does, and its model gives no cycles for it. The
operations of a Pallas kernel, and the blocks that it reads, come from the step's jaxpr
(`spmdtrain.step.flops`); the operations of cuDNN's attention follow from its shapes. The
time is an assumption.
"""

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from spmdtrain.plan.memory_traffic import array_bytes
from spmdtrain.step.flops import CostBasis, KernelFlops
from spmdtrain.xla.hlo import Instruction, Module, reading_program

KERNEL_EFFICIENCY = 0.65
"""Part of the matrix unit's peak that a kernel is assumed to reach, on products of padded dims.

Attention kernels are reported at 50 to 73 % of a chip's peak ("FlashAttention-2", arXiv
2307.08691). With heads of width 64, half of a unit of 128 x 128 is padding, which leaves 33 %.
"""
CUDNN_EFFICIENCY = 0.24
"""The same for cuDNN's attention, as measured for the causal attention of GPT-2 small in bfloat16
on an H100 (1,024 tokens, heads of width 64): 31 % forward, 22 % backward.
"""
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_STATED = re.compile(r'"cost_estimate":\{[^{}]*"flops":"?(\d+)')
_INDICES = "ragged-dot-metadata"  # XLA's kernel for the groups of `jax.lax.ragged_dot`
_CUDNN = "__cudnn$fmha"
_PAIRS = re.compile(r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\[([^]]*)\]')
_CAUSAL = re.compile(r'"mask_type": ?"[A-Z_]*CAUSAL"')
_WINDOW = re.compile(r'"sliding_window_length": ?(\d+)')
_PRODUCTS = {"forward": 2, "backward": 5}  # matrix products of the attention of a pair
_CALLS = ("pallas_call", "mpmd_map")  # the last part of the operation's name
_TARGETS = ("tpu_custom_call", "mosaic_gpu")


class TrafficBasis(enum.StrEnum):
    """The origin of the bytes that a kernel reads and writes."""

    BLOCKS = "its blocks, read again when their index changes along its grid"
    STATED = "its cost_estimate"
    ONCE = "its operands and results, each counted once"


@dataclass(frozen=True)
class KernelCall:
    """A call of a kernel in a compiled program.

    Attributes:
      name: Name of the instruction, without its number.
      op_name: JAX operation that it comes from, or "".
      line: Source line of the user that it comes from, or "".
      operands: Shapes of its operands.
      results: Shapes of its results.
      times: Number of executions in a step.
      bytes: Bytes in main memory of each operand and of each result.
      stated: Operations that the kernel's cost estimate states.
      by_shapes: Operations that follow from the shapes of cuDNN's attention; None for others.
    """

    name: str
    op_name: str
    line: str
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    times: float
    bytes: tuple[float, ...]
    stated: int | None
    by_shapes: float | None = None


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel of a plan, with its estimated time.

    Attributes:
      line: Source line that it comes from, or "".
      times: Number of executions in a step.
      flops: Operations of one execution; NaN if unknown.
      basis: What `flops` follows from; "" if it is unknown.
      bytes: Bytes that one execution reads and writes.
      traffic: What `bytes` follows from.
      seconds: Assumed time of all executions in a step.
      unknown_grid: Whether a dim of its grid is unknown, and counts as 1.
    """

    name: str
    line: str
    times: float
    flops: float
    basis: str
    bytes: float
    traffic: str
    seconds: float
    unknown_grid: bool = False


def is_kernel(instruction: Instruction) -> bool:
    """Returns whether an instruction calls a Pallas kernel, or cuDNN's attention."""
    if instruction.opcode != "custom-call":
        return False
    target = _TARGET.search(instruction.attributes)
    if target is not None and target[1].startswith((*_TARGETS, _CUDNN)):
        return True
    return instruction.op_name.rpartition("/")[2] in _CALLS


@reading_program()
def kernel_calls(module: Module) -> list[KernelCall]:
    """Returns the calls of kernels of a compiled program."""
    calls = []
    for instruction, within, times in module.instructions():
        if not times or not is_kernel(instruction):
            continue
        stated = _STATED.search(instruction.attributes)
        read, written = array_bytes(instruction, within)
        shapes = (within.instructions.get(name) for name in instruction.operands)
        operands = [array.dims for x in shapes if x is not None for array in x.arrays]
        calls.append(
            KernelCall(
                name=re.sub(r"\.\d+$", "", instruction.name),
                op_name=instruction.op_name,
                line=module.line_of(instruction),
                operands=tuple(operands),
                results=tuple(array.dims for array in instruction.arrays),
                times=times,
                bytes=(*read, *written),
                stated=int(stated[1]) if stated else None,
                by_shapes=_attention_flops(instruction.attributes, operands),
            )
        )
    return calls


def _attention_flops(attributes: str, operands: Sequence[tuple[int, ...]]) -> float | None:
    """Returns the operations of a call of cuDNN's attention; None for another instruction.

    `ValueError` if the text does not have the shapes.
    """
    target = _TARGET.search(attributes)
    if target is None or not target[1].startswith(_CUDNN):
        return None
    shape, window = _PAIRS.search(attributes), _WINDOW.search(attributes)
    if shape is None or not operands:
        raise ValueError("an attention of cuDNN without the shape of its scores")
    batch, heads, queries, keys = (int(x.strip(' "')) for x in shape[1].split(","))
    pairs = queries * keys / (2 if _CAUSAL.search(attributes) else 1)
    if window is not None and (tokens := int(window[1])):
        pairs = min(pairs, queries * tokens)
    products = _PRODUCTS["backward" if "Backward" in target[1] else "forward"]
    return 2.0 * products * batch * heads * pairs * operands[0][-1]


def planned_kernels(
    calls: Sequence[KernelCall],
    known: Sequence[KernelFlops],
    *,
    peak: float,
    bandwidth: float,
    pads: bool,
) -> list[PlannedKernel]:
    """Returns the kernels of a compiled program with their operations and their time.

    Args:
      known: The kernels of the step's jaxpr.
      peak: FLOP/s of a device.
      bandwidth: Bytes per second between a device and its memory.
      pads: Whether the device has a matrix unit that pads dims, as a TPU has.
    """
    kernels = []
    for call in calls:
        match = _matching(call, known)
        flops, padded, basis = math.nan, 0.0, ""
        if match is not None:
            flops, basis = float(match.flops), match.basis.value
            padded = match.padded if pads else flops
        elif call.by_shapes is not None:
            flops = padded = call.by_shapes
            basis = CostBasis.SHAPES.value
        elif call.stated is not None:
            flops = padded = float(call.stated)
            basis = CostBasis.STATED.value
        elif call.name == _INDICES:
            flops, basis = 0.0, CostBasis.INDICES.value
        size, traffic = _traffic(call, match)
        efficiency = KERNEL_EFFICIENCY if call.by_shapes is None else CUDNN_EFFICIENCY
        seconds = max(padded / (efficiency * peak), size / bandwidth)
        kernels.append(
            PlannedKernel(
                name=call.name if match is None else match.name,
                line=call.line or ("" if match is None else match.line),
                times=call.times,
                flops=flops,
                basis=basis,
                bytes=size,
                traffic=traffic.value,
                seconds=call.times * seconds,
                unknown_grid=match is not None and match.unknown_grid,
            )
        )
    return kernels


def _traffic(call: KernelCall, kernel: KernelFlops | None) -> tuple[float, TrafficBasis]:
    """Returns the bytes that an execution reads and writes, and their origin."""
    passes = () if kernel is None else kernel.passes
    known = [x for x in passes if x is not None]
    if len(passes) == len(known) == len(call.bytes):
        pairs = zip(call.bytes, known, strict=True)
        return sum(size * times for size, times in pairs), TrafficBasis.BLOCKS
    if kernel is not None and kernel.stated_bytes:
        return float(kernel.stated_bytes), TrafficBasis.STATED
    return sum(call.bytes), TrafficBasis.ONCE


def _matching(call: KernelCall, known: Sequence[KernelFlops]) -> KernelFlops | None:
    """Returns the kernel of the jaxpr that a call runs.

    It has the call's name and the shapes of its results. XLA names a kernel without a name after
    the function that calls it; such a kernel has the shapes of the call's operands and results. If
    several match, it is the one with the most operations.
    """
    names = {call.name, *call.op_name.split("/")}
    named = [x for x in known if x.name in names]
    found = [x for x in named if x.results == call.results]
    found = found or (named if len({x.flops for x in named}) == 1 else [])
    if not found:
        shapes = call.operands, call.results
        found = [x for x in known if (x.operands, x.results) == shapes]
    return max(found, key=lambda x: x.flops, default=None)
