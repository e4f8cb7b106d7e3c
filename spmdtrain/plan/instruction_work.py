"""The work of a compiled program's instructions: FLOPs, elements, bytes, kernels."""

import enum
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from spmdtrain.step.flops import CostBasis, KernelFlops
from spmdtrain.xla.collectives import KINDS, Origins
from spmdtrain.xla.hlo import (
    ASYNC,
    Array,
    Computation,
    Instruction,
    Module,
    arrays_of,
    reading_program,
)

# -- The work of a compiled program's instructions: cycles of the compiler's model, and bytes ------

# In the text of a TPU's program; https://github.com/openxla/xla calls it the window configuration.
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_PRODUCTS = ("dot", "convolution")
_NAMING = ("parameter", "constant", "tuple", "get-tuple-element", "after-all")
_CONTROL = ("while", "call", "conditional")
_HOST = ("infeed", "outfeed", "send", "recv")
_CALLBACK = re.compile("callback", re.IGNORECASE)


class WorkKind(enum.StrEnum):
    """The kind of work of an instruction, as the time model distinguishes it."""

    PRODUCTS = "products"
    """Matrix products or convolutions, and what is fused into them."""
    KERNELS = "kernels"
    VECTOR = "vector"
    """Everything else that the device computes, and copies."""
    COLLECTIVES = "collectives"
    HOST = "host"
    """The device waits for the host, as in a callback."""
    CONTROL = "control"
    """Loops, calls and branches, whose instructions count themselves."""


@dataclass(frozen=True)
class Work:
    """The work of an instruction in all its executions in a step.

    Attributes:
      cycles: Cycles that the compiler estimates; 0 if it gives none.
      bytes: Bytes that it reads and writes in the main memory.
      name: Name of the instruction.
      runner: Name of the instruction that runs it in the background, or "".
      end: Name of the instruction that waits for its end, or "".
      in_order: Whether it runs after other instructions, not at the same time. Collectives, kernels
        and copies in the background do not.
      times: Number of executions in a step.
      flops: Floating-point operations of its products; NaN if unknown.
      dtype: XLA's name of the dtype of its products, or "".
      elements: Its operations on elements; see `element_operations`.
      shape: Dtype and shape of its first result, on one device.
      op_name: JAX operation that it comes from, or "".
      line: Source line of the user that it comes from, or "".
      parameter: Model parameter that it reads, or whose gradient it computes, or "".
    """

    cycles: float
    bytes: float
    kind: WorkKind
    name: str = ""
    runner: str = ""
    end: str = ""
    in_order: bool = True
    times: float = 1
    flops: float = 0.0
    dtype: str = ""
    elements: dict[str, float] = field(default_factory=dict, hash=False)
    shape: str = ""
    op_name: str = ""
    line: str = ""
    parameter: str = ""


@reading_program()
def work_of(module: Module, origins: Origins | None = None) -> list[Work]:
    """Returns the work of the instructions, each of a fusion with all that is fused.

    Instructions that only name a value are omitted. `origins` are those of the program's values.
    """
    runners: dict[str, str] = {}  # the instruction that runs a computation in the background
    ends: dict[str, str] = {}  # the instruction that waits for the end of another
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode in ASYNC:
                runners |= {inner: instruction.name for _, inner in instruction.called}
            elif instruction.opcode.endswith("-done") and instruction.operands:
                ends[instruction.operands[0]] = instruction.name
    found = []
    for instruction, within, times in module.instructions():
        opcode, runner = instruction.opcode, runners.get(within.name, "")
        kind = _kind(instruction, within, module)
        if opcode in _NAMING or opcode.endswith("-done"):
            continue
        if runner and kind is not WorkKind.COLLECTIVES:  # of the SparseCore
            continue
        flops, dtype = 0.0, ""
        elements: dict[str, float] = defaultdict(float)
        for inner, body in module.within(instruction, within):
            flops += _operations(inner, body) if times else 0.0
            if not dtype and inner.opcode in _PRODUCTS and inner.operands[0] in body.instructions:
                dtype = body.instructions[inner.operands[0]].arrays[0].dtype
            if counted := _KIND_OF.get(inner.opcode):
                elements[counted] += times * _count(inner, counted, body)
        cycles = _CYCLES.search(instruction.attributes)
        named = kind in (WorkKind.PRODUCTS, WorkKind.COLLECTIVES)
        found.append(
            Work(
                cycles=times * int(cycles[1]) if cycles else 0.0,
                bytes=times * bytes_of(instruction, within, module),
                kind=kind,
                name=instruction.name,
                runner=runner,
                end=ends.get(runner or instruction.name, ""),
                in_order=kind in (WorkKind.PRODUCTS, WorkKind.VECTOR, WorkKind.HOST)
                and not opcode.endswith("-start"),
                times=times,
                flops=times * flops,
                dtype=dtype,
                elements={name: count for name, count in elements.items() if count},
                shape=str(instruction.arrays[0]) if instruction.arrays else "",
                op_name=instruction.op_name,
                line=module.line_of(instruction),
                parameter=_parameter_of(instruction, within, origins) if origins and named else "",
            )
        )
    return found


def _kind(instruction: Instruction, within: Computation, module: Module) -> WorkKind:
    """Returns what an instruction does; a product is one that multiplies, or fuses a product."""
    opcode, target = instruction.opcode, _TARGET.search(instruction.attributes)
    if opcode.removesuffix("-start") in KINDS:
        return WorkKind.COLLECTIVES
    if is_kernel(instruction):
        return WorkKind.KERNELS
    if opcode in _CONTROL:
        return WorkKind.CONTROL
    if opcode in _HOST or (target is not None and _CALLBACK.search(target[1])):
        return WorkKind.HOST
    fused = module.within(instruction, within)
    if any(inner.opcode in _PRODUCTS or _operations(inner, body) for inner, body in fused):
        return WorkKind.PRODUCTS
    return WorkKind.VECTOR


def _parameter_of(instruction: Instruction, within: Computation, origins: Origins) -> str:
    """Returns the parameter that an instruction reads, or whose gradient it computes, or ""."""
    own = origins.parameters_of(instruction, within)
    operands = (within.instructions.get(name) for name in instruction.operands)
    read = (origins.parameters_of(x, within) for x in operands if x is not None)
    return own.parameter or next((x.parameter for x in read if x.is_source), "")


# -- Kernels of a compiled program, of Pallas and of cuDNN's attention: operations and time --------
#
# XLA's text does not show what a Pallas kernel does, and its model gives no cycles for it. The
# operations of a Pallas kernel, and the blocks that it reads, come from the step's jaxpr
# (`spmdtrain.step.flops`); the operations of cuDNN's attention follow from its shapes. The
# time is an assumption.

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
_SLIDING_WINDOW = re.compile(r'"sliding_window_length": ?(\d+)')
_ATTENTION_PRODUCTS = {"forward": 2, "backward": 5}  # matrix products of the attention of a pair
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
      instruction: Name of the instruction.
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
    instruction: str = ""


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
      instruction: Name of the instruction.
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
    instruction: str = ""


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
                instruction=instruction.name,
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
    shape, window = _PAIRS.search(attributes), _SLIDING_WINDOW.search(attributes)
    if shape is None or not operands:
        raise ValueError("an attention of cuDNN without the shape of its scores")
    batch, heads, queries, keys = (int(x.strip(' "')) for x in shape[1].split(","))
    pairs = queries * keys / (2 if _CAUSAL.search(attributes) else 1)
    if window is not None and (tokens := int(window[1])):
        pairs = min(pairs, queries * tokens)
    products = _ATTENTION_PRODUCTS["backward" if "Backward" in target[1] else "forward"]
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
                instruction=call.instruction,
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


# -- Floating-point operations of a compiled program's matrix products and convolutions ------------

_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_GROUPS = re.compile(r"batch_group_count=(\d+)")
_CONFIG = re.compile(r"backend_config=(\{.*\})")
_GEMM = ("__cublas$gemm", "__cublas$lt$matmul")
# Custom calls whose operations are unknown.
_OPAQUE = ("__cud", "__cublas", "__onednn", "__triton", "triton_kernel_call")


@reading_program()
def products(module: Module) -> float:
    """Returns the floating-point operations of all products of a step on one device.

    As in `spmdtrain.step.flops`, each multiply-add counts as two; padding and dilation of a
    convolution do not count. Kernels do not count either: see `kernel_calls`. The result is NaN if
    the program calls a kernel whose operations are unknown.
    """
    return sum(
        times * _operations(instruction, module.computations[name])
        for name, times in module.times.items()
        if times  # an unknown kernel that never runs must not make the sum NaN
        for instruction in module.computations[name].instructions.values()
    )


@reading_program()
def opaque_calls(module: Module) -> list[str]:
    """Returns the custom calls that make `products` NaN, as their targets and source lines."""
    calls = []
    for instruction, within, times in module.instructions():
        if times and math.isnan(_operations(instruction, within)):
            target = _TARGET.search(instruction.attributes)
            line = module.line_of(instruction) or instruction.op_name
            calls.append(f"{target[1] if target else instruction.name} ({line})")
    return list(dict.fromkeys(calls))


def _operations(instruction: Instruction, within: Computation) -> float:
    match instruction.opcode:
        case "dot":
            contracted = _CONTRACTED.search(instruction.attributes)
            dims = [int(n) for n in re.findall(r"\d+", contracted[1])] if contracted else []
            return _matmul(instruction, within, dims)
        case "convolution":
            return _convolution(instruction, within)
        case "custom-call":
            return _custom(instruction, within)
    return 0


def _custom(instruction: Instruction, within: Computation) -> float:
    if is_kernel(instruction):
        return 0
    target = _TARGET.search(instruction.attributes)
    name = target[1] if target else ""
    if name.startswith(_GEMM) and (config := _CONFIG.search(instruction.attributes)):
        numbers = json.loads(config[1]).get("gemm_backend_config", {})
        dims = numbers.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions", [])
        return _matmul(instruction, within, [int(n) for n in dims])
    return math.nan if name.startswith(_OPAQUE) else 0


def _matmul(instruction: Instruction, within: Computation, contracted: Sequence[int]) -> float:
    left = _dims(instruction.operands[0], within)
    return 2.0 * math.prod(instruction.arrays[0].dims) * math.prod(left[n] for n in contracted)


def _convolution(instruction: Instruction, within: Computation) -> float:
    """Returns the FLOPs of a convolution; only taps that meet an element of the input count.

    TPUs write every product as a convolution, with a batch dim as a dilated spatial dim.
    """
    labels = _LABELS.search(instruction.attributes)
    assert labels is not None
    sizes = [
        dict(zip(label, dims, strict=True))
        for label, dims in zip(
            labels.groups(),
            (
                *(_dims(name, within) for name in instruction.operands[:2]),
                instruction.arrays[0].dims,
            ),
            strict=True,
        )
    ]
    image, kernel, result = sizes
    match = _WINDOW.search(instruction.attributes)
    window = dict(part.split("=") for part in match[1].split()) if match else {}
    groups = _GROUPS.search(instruction.attributes)
    total = 2.0 * kernel["i"] * kernel["o"] * image["b"] / (int(groups[1]) if groups else 1)
    for n in range(len(image) - 2):
        low, _, _ = _part(window, "pad", n, "0_0").partition("_")
        total *= _meetings(
            image[str(n)],
            kernel[str(n)],
            result[str(n)],
            stride=int(_part(window, "stride", n, "1")),
            low=int(low),
            image_dilation=int(_part(window, "lhs_dilate", n, "1")),
            kernel_dilation=int(_part(window, "rhs_dilate", n, "1")),
        )
    return total


def _part(window: dict[str, str], key: str, n: int, default: str) -> str:
    return window[key].split("x")[n] if key in window else default


def _meetings(
    image: int,
    taps: int,
    result: int,
    *,
    stride: int,
    low: int,
    image_dilation: int,
    kernel_dilation: int,
) -> int:
    """Returns how often a tap meets an element of the input along one spatial dim."""
    places = np.arange(result)[:, None] * stride + np.arange(taps) * kernel_dilation - low
    within = (places >= 0) & (places < image * image_dilation) & (places % image_dilation == 0)
    return int(within.sum())


def _dims(name: str, within: Computation) -> tuple[int, ...]:
    return arrays_of(within.instructions[name].shape)[0].dims


# -- Elementwise operations, reductions and transposes of a compiled program -----------------------


class ElementKind(enum.StrEnum):
    """A kind of operations on elements, which take about the same time on a CPU."""

    ARITHMETIC = "arithmetic"
    """Arithmetic without divisions, comparisons, bit operations and conversions."""
    DIVISIONS = "divisions"
    """Divisions and roots."""
    FUNCTIONS = "functions"
    """Exponentials and similar functions."""
    REDUCTIONS = "reductions"
    """Elements that are reduced."""
    TRANSPOSES = "transposes"
    """Elements that are written in another order."""


_KINDS = {
    ElementKind.ARITHMETIC: (
        *("abs", "add", "and", "ceil", "clamp", "compare", "convert", "count-leading-zeros"),
        *("floor", "is-finite", "maximum", "minimum", "multiply", "negate", "not", "or"),
        *("popcnt", "reduce-precision", "round-nearest-afz", "round-nearest-even", "select"),
        *("shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "subtract", "xor"),
    ),
    ElementKind.DIVISIONS: ("divide", "remainder", "rsqrt", "sqrt"),
    ElementKind.FUNCTIONS: (
        *("atan2", "cbrt", "cosine", "erf", "exponential", "exponential-minus-one", "log"),
        *("log-plus-one", "logistic", "power", "sine", "tan", "tanh"),
    ),
    ElementKind.REDUCTIONS: ("reduce", "reduce-window"),
    ElementKind.TRANSPOSES: ("copy", "transpose"),
}
_KIND_OF = {opcode: kind for kind, opcodes in _KINDS.items() for opcode in opcodes}
_DIMENSIONS = re.compile(r"dimensions=\{([\d,]*)\}")
_WINDOW_SIZE = re.compile(r"window=\{size=([\dx]+)")


@reading_program()
def element_operations(module: Module) -> dict[str, float]:
    """Returns the number of operations on elements in a step on one device, by `ElementKind`.

    Operations within fusions count. If several results of a fusion need a value, and it computes
    the value several times, the value counts once. Gathers, scatters, sorts and pads have no kind:
    only their memory traffic is known.
    """
    found: dict[str, float] = defaultdict(float)
    for name, times in module.times.items():
        computation = module.computations[name]
        for instruction in computation.instructions.values() if times else ():
            if kind := _KIND_OF.get(instruction.opcode):
                found[kind] += times * _count(instruction, kind, computation)
    return {kind: count for kind, count in found.items() if count}


def _count(instruction: Instruction, kind: ElementKind, within: Computation) -> int:
    """Returns the number of operations of one execution of an instruction."""
    given = within.instructions.get(next(iter(instruction.operands), ""))
    if not instruction.arrays or given is None or not given.arrays:
        return 0
    result, operand = instruction.arrays[0], given.arrays[0]
    if kind is ElementKind.TRANSPOSES:
        return math.prod(result.dims) if _moves(instruction, operand, result) else 0
    if instruction.opcode == "reduce":
        return math.prod(operand.dims)
    window = _WINDOW_SIZE.search(instruction.attributes)
    each = math.prod(map(int, window[1].split("x"))) if window else 1
    return each * math.prod(result.dims)


def _moves(instruction: Instruction, operand: Array, result: Array) -> bool:
    """Returns whether a copy or a transpose writes elements in another order.

    XLA also writes a transpose where only the layout changes, so that the elements stay.
    """
    after: Sequence[int] = result.order  # the dims of the operand, in the order of the result
    if instruction.opcode == "transpose" and (match := _DIMENSIONS.search(instruction.attributes)):
        dims = [int(dim) for dim in match[1].split(",") if dim]
        after = [dims[dim] for dim in result.order]
    wide = {dim for dim, size in enumerate(operand.dims) if size > 1}
    return [dim for dim in after if dim in wide] != [dim for dim in operand.order if dim in wide]


# -- Memory traffic of a compiled program ----------------------------------------------------------

# These refer to existing arrays, or wait for data that another instruction counts.
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
        *("while", "call", "conditional", "partition-id", "replica-id", "opt-barrier", "domain"),
    )
)
# Custom calls of TPUs that refer to memory, or to arrays that are already adjacent.
_FREE_CALLS = re.compile(
    'custom_call_target="(AllocateBuffer|ConcatBitcast|AssumeGatherIndices.*?)"'
)


@reading_program()
def bytes_moved(
    module: Module, omitted: Callable[[Instruction], bool] = lambda instruction: False
) -> float:
    """Returns the bytes that the instructions of a step read and write on one device.

    An operand counts in full for each instruction that reads it, except that a slice counts only
    its part, and an update in place only the updated part. Tiles of a layout count in full. Arrays
    outside of the main memory (a TPU keeps some in its vector memory) do not count. Caches are
    ignored, so the result tends to be an upper bound.
    """
    return sum(
        times * bytes_of(instruction, within, module)
        for instruction, within, times in module.instructions()
        if not omitted(instruction)
    )


def bytes_of(instruction: Instruction, within: Computation, module: Module) -> float:
    """Returns the bytes that one execution of an instruction reads and writes."""
    if (
        instruction.opcode in _FREE
        or instruction.opcode in ASYNC
        or instruction.opcode.endswith("-done")
    ):
        return 0
    if instruction.opcode == "custom-call" and _FREE_CALLS.search(instruction.attributes):
        return 0
    if instruction.opcode in ("fusion", "fusion-start"):  # GPUs slice stacked layers in the latter
        return _moved_by_fusion(instruction, within, module)
    written = _main_bytes(instruction.shape)
    match instruction.opcode:
        case "dynamic-slice" | "slice" | "gather":
            return written + _sliced(instruction.arrays[0], instruction, within)
        case "slice-start" | "dynamic-slice-start":
            part = instruction.arrays[1]  # the first array is its operand
            return _in_main(part) + _sliced(part, instruction, within)
        case "dynamic-update-slice":
            return 2 * _operand_bytes(instruction.operands[1], within)
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
        return written  # its result includes its operands
    return written + _operand_sum(instruction, within)


def array_bytes(
    instruction: Instruction, within: Computation
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the bytes of each operand and of each result of an instruction in main memory."""
    operands = tuple(_operand_bytes(name, within) for name in instruction.operands)
    return operands, tuple(map(_in_main, instruction.arrays))


def _moved_by_fusion(instruction: Instruction, within: Computation, module: Module) -> float:
    """Returns the bytes that a fusion reads of its operands and writes of its results."""
    ((_, name),) = instruction.called
    body = module.computations[name]
    total = 0.0
    for number, operand in enumerate(instruction.operands):
        whole = _operand_bytes(operand, within)
        parameter = _parameter(number, body)
        if whole and parameter is not None:
            whole = min(whole, _read(parameter.name, body, module))
        total += whole
    root = body.root
    results = [body.instructions[x] for x in root.operands] if root.opcode == "tuple" else [root]
    # Only the shape of the fusion itself shows which of its results are in the main memory.
    arrays = instruction.arrays
    if len(arrays) != len(results):  # tuples in a tuple
        return total + sum(_written(x, body, module) for x in results)
    pairs = zip(results, arrays, strict=True)
    return total + sum(_written(x, body, module) for x, array in pairs if array.space == 0)


def _read(name: str, body: Computation, module: Module) -> float:
    """Returns the bytes that the instructions within a fusion read of a value; infinity if all."""
    total = 0.0
    for user in body.instructions.values():
        places = [place for place, operand in enumerate(user.operands) if operand == name]
        if not places:
            continue
        match user.opcode:
            case "dynamic-slice" | "slice" | "gather" if places == [0]:
                total += _main_bytes(user.shape)
            case "dynamic-update-slice" if places == [0]:
                pass  # in place
            case "tuple":
                pass  # returned as it is
            case opcode if opcode in KINDS:
                pass  # a part of a collective that runs at the same time
            case "bitcast":
                total += _read(user.name, body, module)
            case "fusion":
                ((_, inner),) = user.called
                nested = module.computations[inner]
                parameters = [_parameter(place, nested) for place in places]
                total += sum(_read(x.name, nested, module) for x in parameters if x is not None)
            case _:
                return math.inf
    return total


def _written(result: Instruction, body: Computation, module: Module) -> float:
    """Returns the bytes that a fusion writes of a result; of an update in place, only its part."""
    match result.opcode:
        case "tuple":
            return sum(_written(body.instructions[x], body, module) for x in result.operands)
        case "dynamic-update-slice":
            return _main_bytes(body.instructions[result.operands[1]].shape)
        case "bitcast":
            return _written(body.instructions[result.operands[0]], body, module)
        case "fusion":
            ((_, inner),) = result.called
            nested = module.computations[inner]
            return _written(nested.root, nested, module)
    is_own = result.opcode != "parameter" and result.opcode not in KINDS
    return _main_bytes(result.shape) if is_own else 0


def _parameter(number: int, body: Computation) -> Instruction | None:
    own = (x for x in body.instructions.values() if x.opcode == "parameter")
    return next((x for x in own if int(x.inside) == number), None)


def _sliced(part: Array, instruction: Instruction, within: Computation) -> float:
    """Returns the bytes read of an operand that is sliced, whatever memory the slice is in."""
    return min(part.stored_bytes, _operand_bytes(instruction.operands[0], within))


def _operand_sum(instruction: Instruction, within: Computation) -> float:
    return sum(_operand_bytes(name, within) for name in instruction.operands)


def _operand_bytes(name: str, within: Computation) -> float:
    instruction = within.instructions.get(name)
    return 0 if instruction is None else _main_bytes(instruction.shape)


def _main_bytes(shape: str) -> float:
    return sum(map(_in_main, arrays_of(shape)))


def _in_main(array: Array) -> float:
    return array.stored_bytes if array.space == 0 else 0
