"""Summaries of compiled steps, and the live arrays at peak memory."""

import contextlib
import dataclasses
import enum
import hashlib
import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from spmdtrain.errors import UserError, version_of
from spmdtrain.plan.instruction_work import (
    KernelCall,
    Work,
    WorkKind,
    bytes_moved,
    element_operations,
    is_kernel,
    kernel_calls,
    opaque_calls,
    products,
    work_of,
)
from spmdtrain.plan.topologies import CompilerLog, kept_log, short
from spmdtrain.record.user_folders import cache_folder, keep_file
from spmdtrain.xla.collectives import KINDS, Carried, Collective, Origins, collectives_of
from spmdtrain.xla.hlo import Computation, Instruction, Module, element_of, reading_program

# -- Live arrays at peak memory, from the files that XLA dumps during compilation ------------------

_TOTAL = re.compile(r"Memory Space: default \(color=0\)\s+Total bytes: (\d+)")
_ALLOCATION = re.compile(r"allocation \d+: (?P<rest>.*)")
_COLOR = re.compile(r"\bcolor (\d+)")
_VALUE = re.compile(
    r"\s*value: <\d+ (?P<name>[^\s{]+)(?:\{(?P<index>[\d,]*)\})?(?: \(phi\))? @\d+> "
    r"\(size=(?P<size>\d+),offset=(?P<offset>\d+)\)"
)
_RANGE = re.compile(r"\s*(?P<name>[^\s{]+)\{(?P<index>[\d,]*)\}:(?P<start>\d+)-(?P<end>\d+)$")


@dataclass(frozen=True)
class Live:
    """A temporary array that is live at peak memory."""

    name: str
    """Name of the instruction that produces it."""
    path: tuple[int, ...]
    """Index into the instruction's result if that is a tuple, else ()."""
    bytes: int


@dataclass(frozen=True)
class PeakMemory:
    """Memory that XLA's allocator assigned to a program.

    Attributes:
      total: Bytes of the main memory for the program, arguments included.
      live: Temporary arrays at the time of their largest sum, the largest first. Gaps between
        arrays of different sizes and lifetimes are not included.
    """

    total: int
    live: list[Live]


def read_dump(folder: Path) -> PeakMemory | None:
    """Reads the memory use of a program from the files that `xla_dump_to` writes.

    XLA's own list of the buffers at the peak is incomplete, so they are computed from the live
    range and the allocation of each value. None if files are missing or in an unknown format.
    """
    files = {
        kind: next(iter(folder.glob(f"*after_optimizations-{kind}.txt")), None)
        for kind in ("memory-usage-report", "buffer-assignment", "live-range")
    }
    report, assignment, ranges = (path and path.read_text() for path in files.values())
    total = _TOTAL.search(report or "")
    if total is None or not assignment or not ranges:
        return None
    return PeakMemory(int(total[1]), _live_at_peak(_values(assignment), _ranges(ranges)))


_Name = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Slot:
    allocation: int
    offset: int
    bytes: int


def _values(text: str) -> dict[_Name, _Slot]:
    """Returns the slots of the temporary values in the main memory."""
    slots = {}
    allocation, counts = 0, False
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            color = _COLOR.search(match["rest"])
            counts = "preallocated-temp" in match["rest"] and (color is None or color[1] == "0")
            allocation += 1
        elif counts and (match := _VALUE.match(line)):
            slot = _Slot(allocation, int(match["offset"]), int(match["size"]))
            slots[match["name"], _path(match["index"])] = slot
    return slots


def _ranges(text: str) -> dict[_Name, tuple[int, int]]:
    matches = map(_RANGE.match, text.splitlines())
    return {
        (match["name"], _path(match["index"])): (int(match["start"]), int(match["end"]))
        for match in matches
        if match
    }


def _path(index: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in (index or "").split(",") if number)


def _live_at_peak(values: dict[_Name, _Slot], ranges: dict[_Name, tuple[int, int]]) -> list[Live]:
    """Returns the values that are live at the time of their largest sum."""
    changes: dict[int, list[tuple[bool, _Name]]] = defaultdict(list)
    for name in values:
        if name in ranges:
            start, end = ranges[name]
            changes[start].append((True, name))
            changes[end + 1].append((False, name))
    # A slot may hold several values, each computed from another in place; the largest counts.
    groups: dict[tuple[int, int], dict[_Name, int]] = defaultdict(dict)
    live = most = 0
    largest: list[_Name] = []
    for time in sorted(changes):
        for begins, name in changes[time]:
            slot = values[name]
            group = groups[slot.allocation, slot.offset]
            before = max(group.values(), default=0)
            if begins:
                group[name] = slot.bytes
            else:
                group.pop(name, None)
            live += max(group.values(), default=0) - before
        if live > most:
            most = live
            largest = [max(group, key=group.__getitem__) for group in groups.values() if group]
    arrays = [Live(name, path, values[name, path].bytes) for name, path in largest]
    return sorted(arrays, key=lambda array: -array.bytes)


# -- Summaries of compiled steps, cached on disk so that the same step is compiled once ------------

_CUDA = tuple(f"jax-cuda{version}-{part}" for version in (12, 13) for part in ("plugin", "pjrt"))
_PACKAGES = ("jax", "jaxlib", "libtpu", *_CUDA)
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# The modules that read a program. Their source is part of the cache key, so that a change of one
# invalidates the cached summaries.
_READERS = (
    *("plan/instruction_work", "plan/summary", "plan/topologies"),
    *("xla/collectives", "xla/hlo"),
    "errors",
)
_MOST_KEPT = 500  # summaries
_MOST_BYTES = 2**28  # of one summary
# Without a GPU, XLA cannot try cuBLAS for a product of which no tiles fit.
_TRITON_FAILED = ("No supported config found for HLO", "Couldn't find output tile sizes")
_SIZES = ("argument", "output", "alias", "temp", "generated_code")


class Use(enum.StrEnum):
    """The use of a temporary array."""

    GRADIENT = "gradients and updates"
    ACTIVATION = "activations"
    PARAMETER = "parameters, gathered or converted"
    OTHER = "other temporaries"


@dataclass(frozen=True)
class Buffer:
    """A temporary array that is live at peak memory.

    Attributes:
      bytes: Size on one device, in XLA's layout.
      shape: Dtype and shape on one device, such as `bf16[8,1024]`.
      parameter: Model parameter that it is computed from, or whose gradient or new value it is;
        "" if there is none.
      line: Source line of the user that it comes from, or "".
      op_name: JAX operation that it comes from, or "".
    """

    bytes: int
    use: Use
    shape: str
    parameter: str
    line: str
    op_name: str


@dataclass(frozen=True)
class Rematerialized:
    """An array that XLA replicates on each device because it has no other way to reshard it.

    Attributes:
      given: Sharding before, in XLA's notation.
      wanted: Sharding that an instruction needs, in XLA's notation.
      shape: Dtype and shape at that instruction; of one device if the array was already split.
      parameter: Model parameter whose value or gradient it is, or "".
      line: Source line of the user that needs it, or "".
    """

    given: str
    wanted: str
    shape: str
    parameter: str
    line: str


@dataclass(frozen=True)
class CompiledSummary:
    """Memory, collectives and operations of a compiled step.

    Attributes:
      sizes: Bytes by XLA's names: argument, output, alias, temp and generated_code from its
        memory analysis, total from its allocator. If the compiler rejected the step, only
        total.
      collectives: Collectives in the order of the program.
      traffic: Bytes read and written; see `bytes_moved`.
      products: Floating-point operations on one device, without kernels; NaN if unknown.
      opaque: Custom calls that make `products` NaN, each with its source line.
      unknown: Source lines that were compiled to loops with an unknown trip count.
      choices: Source lines that were compiled to a conditional; its largest branch counts.
      rare: Source lines of conditionals whose rarely taken branch does not count.
      work: Work of the instructions, without those that only name values; see `work_of`.
      elements: Operations on elements; see `element_operations`.
      buffers: Temporary arrays that are live at peak memory, the largest first.
      rematerialized: Arrays for which the partitioner warned of a full rematerialization.
      refusal: XLA's out-of-memory message if it rejected the step, else "".
      own_traffic: `traffic` without the bytes of kernels and collectives, whose times already
        include them.
      has_triton: Whether XLA could use Triton for the products of a GPU.
      program: Name of the program.
    """

    sizes: dict[str, int]
    collectives: list[Collective]
    traffic: float
    products: float
    unknown: list[str]
    opaque: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    rare: list[str] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    kernels: list[KernelCall] = field(default_factory=list)
    elements: dict[str, float] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    rematerialized: list[Rematerialized] = field(default_factory=list)
    refusal: str = ""
    own_traffic: float = 0.0
    has_triton: bool = True
    program: str = ""


def summarize_compiled(
    traced: jax.stages.Traced,
    on: jax.sharding.Mesh | None,
    parameters: Mapping[str, str],
    target: Sequence[str],
    *,
    keep: bool,
) -> CompiledSummary:
    """Returns the summary of a compiled step; compiles it if no summary of it is cached.

    The cache holds summaries instead of programs because XLA can serialize programs for absent
    devices but cannot deserialize them.

    Args:
      on: The step's mesh; None for a single device.
      parameters: Names of the model parameters by argument name; see `Origins`.
      target: Everything besides the program's text that compilation depends on: devices and
        options.
      keep: Whether to use the cache.

    Raises:
      UserError: If a kernel needs more memory than a core has.
    """
    lowered = traced.lower()
    path = cache_folder() / "plans" / f"{_key(lowered, parameters, target)}.json"
    if keep and (cached := read_summary(path)) is not None:
        return cached
    summary = _compile(lowered, on, parameters)
    if keep:
        _make_room(path.parent)
        keep_file(path, sealed(path.stem, json.dumps(dataclasses.asdict(summary)).encode()))
    return summary


def sealed(key: str, content: bytes) -> bytes:
    """Returns the content of a summary file: a digest of key and content, then the content.

    `key` is the file's name without its extension, `content` the summary as JSON.
    """
    digest = hashlib.blake2b(f"{key}\n".encode() + content, digest_size=16).hexdigest()
    return f"{digest}\n".encode() + content


def read_summary(path: Path) -> CompiledSummary | None:
    """Returns a cached summary; None if the file is missing, corrupted or renamed."""
    with contextlib.suppress(
        OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError
    ):
        if path.is_file() and path.stat().st_size < _MOST_BYTES:  # do not block on a pipe
            stored = path.read_bytes()
            content = stored.partition(b"\n")[2]
            if stored == sealed(path.stem, content):
                return _from_json(json.loads(content))
    return None


def _make_room(folder: Path) -> None:
    """Removes the oldest summaries if there are too many."""
    with contextlib.suppress(OSError):
        files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[: -_MOST_KEPT + 1]:
            path.unlink()


def _compile(
    lowered: jax.stages.Lowered, on: jax.sharding.Mesh | None, parameters: Mapping[str, str]
) -> CompiledSummary:
    try:
        return _compile_with({}, lowered, on, parameters)
    except jax.errors.JaxRuntimeError as error:
        if not any(text in str(error) for text in _TRITON_FAILED):
            raise
    summary = _compile_with({"xla_gpu_enable_triton_gemm": False}, lowered, on, parameters)
    return dataclasses.replace(summary, has_triton=False)


def _compile_with(
    options: dict[str, str | bool],
    lowered: jax.stages.Lowered,
    on: jax.sharding.Mesh | None,
    parameters: Mapping[str, str],
) -> CompiledSummary:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = options | {"xla_dump_to": name, "xla_dump_hlo_as_text": True}
        with kept_log() as log:
            program, refusal = None, ""
            try:
                program = lowered.compile(compiler_options=options)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                if "hbm" not in str(error).lower():  # a kernel needs more than a core's memory
                    raise UserError(f"the compiler: {short(error)}") from error
                refusal = str(error)
        peak = read_dump(folder)
        text = _dumped_module(folder) if program is None else program.as_text() or ""
    with reading_program():
        return _summarize(program, text, refusal, peak, log, on, parameters)


def _summarize(
    program: jax.stages.Compiled | None,
    text: str,
    refusal: str,
    peak: PeakMemory | None,
    log: CompilerLog,
    on: jax.sharding.Mesh | None,
    parameters: Mapping[str, str],
) -> CompiledSummary:
    module = Module(text)
    origins = Origins(module, parameters, 1 if on is None else on.size)
    sizes = {} if peak is None else {"total": peak.total}
    buffers = [] if peak is None else _buffers(peak, module, origins)
    rematerialized = _rematerialized(log, module, origins)
    if program is None:
        return CompiledSummary(
            sizes, [], 0, 0, [], buffers=buffers, rematerialized=rematerialized, refusal=refusal
        )
    analysis = program.memory_analysis()
    return CompiledSummary(
        sizes=sizes | {name: getattr(analysis, f"{name}_size_in_bytes") for name in _SIZES},
        collectives=[] if on is None else collectives_of(module, on, origins),
        traffic=bytes_moved(module),
        products=products(module),
        opaque=opaque_calls(module),
        unknown=[module.line_of(loop) or loop.name for loop in module.unknown_loops],
        choices=[module.line_of(choice) or choice.name for choice in module.choices],
        rare=[module.line_of(choice) or choice.name for choice in module.with_rare_branch],
        work=work_of(module, origins),
        kernels=kernel_calls(module),
        elements=element_operations(module),
        buffers=buffers,
        rematerialized=rematerialized,
        own_traffic=bytes_moved(module, omitted=is_timed_apart),
        program=module.name,
    )


def is_timed_apart(instruction: Instruction) -> bool:
    """Returns whether the time model has a separate time for an instruction."""
    return is_kernel(instruction) or instruction.opcode.removesuffix("-start") in KINDS


def _dumped_module(folder: Path) -> str:
    """Returns the optimized program of a compilation that ran out of memory, or ""."""
    path = next(iter(folder.glob("*after_optimizations.txt")), None)
    return "" if path is None else path.read_text()


def _buffers(peak: PeakMemory, module: Module, origins: Origins) -> list[Buffer]:
    buffers = []
    instructions = {
        instruction.name: (instruction, computation)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    }
    for live in peak.live:
        if live.name in instructions:
            instruction, within = instructions[live.name]
            buffers.append(_buffer(live, instruction, within, module, origins))
        else:
            buffers.append(Buffer(live.bytes, Use.OTHER, "", "", "", live.name))
    return buffers


def _buffer(
    live: Live, instruction: Instruction, within: Computation, module: Module, origins: Origins
) -> Buffer:
    index = live.path[0] if live.path else 0
    origin = origins.parameters_of(instruction, within, index)
    producer = origins.producer(instruction, within, index)
    if origin.parameters:
        use = Use.PARAMETER if origin.is_source else Use.GRADIENT
    else:
        use = Use.ACTIVATION if "jvp(" in producer.op_name else Use.OTHER
    return Buffer(
        bytes=live.bytes,
        use=use,
        shape=element_of(instruction.shape, live.path),
        parameter=origin.parameter,
        line=module.line_of(producer),
        op_name=producer.op_name,
    )


def _rematerialized(log: CompilerLog, module: Module, origins: Origins) -> list[Rematerialized]:
    """Returns the partitioner's warnings, completed from the program's instructions."""
    warnings = []
    for each in log.resharded:
        parsed = Module(each.operation).computations  # a program of a single line
        if not parsed:  # not in XLA's known format: there is no more information
            warnings.append(Rematerialized(each.given, each.wanted, each.operation[:80], "", ""))
            continue
        (consumer,) = parsed[""].instructions.values()
        parameter = ""
        for computation in module.computations.values():
            for other in computation.instructions.values():
                if not parameter and consumer.op_name and other.op_name == consumer.op_name:
                    parameter = origins.parameters_of(other, computation).parameter
        shape = str(consumer.arrays[0]) if consumer.arrays else consumer.shape
        line = module.line_of(consumer)
        warnings.append(Rematerialized(each.given, each.wanted, shape, parameter, line))
    return list(dict.fromkeys(warnings))


def _from_json(fields: dict[str, Any]) -> CompiledSummary:
    collectives = []
    for each in fields.pop("collectives"):
        carries = tuple(
            Carried(**{**carried, "parameters": tuple(carried["parameters"])})
            for carried in each.pop("carries")
        )
        axes, group = (tuple(each.pop(name)) for name in ("axes", "group"))
        collectives.append(Collective(**each, axes=axes, group=group, carries=carries))
    buffers = [Buffer(**{**each, "use": Use(each["use"])}) for each in fields.pop("buffers")]
    rematerialized = [Rematerialized(**each) for each in fields.pop("rematerialized")]
    kernels = []
    for each in fields.pop("kernels"):
        shapes = {name: tuple(map(tuple, each.pop(name))) for name in ("operands", "results")}
        kernels.append(KernelCall(**each | shapes | {"bytes": tuple(each["bytes"])}))
    work = [Work(**{**each, "kind": WorkKind(each["kind"])}) for each in fields.pop("work")]
    return CompiledSummary(
        **fields,
        collectives=collectives,
        work=work,
        kernels=kernels,
        buffers=buffers,
        rematerialized=rematerialized,
    )


def _key(lowered: jax.stages.Lowered, parameters: Mapping[str, str], target: Sequence[str]) -> str:
    """Hashes what a summary depends on: program, lines, options, compilers, and our readers."""
    package = Path(__file__).parents[1]
    parts = [*target, lowered.as_text(debug_info=True), repr(sorted(parameters.items()))]
    parts += [os.environ.get(name, "") for name in _VARIABLES]
    parts += [f"{name} {version_of(name)}" for name in _PACKAGES]
    parts += [(package / f"{name}.py").read_text() for name in _READERS]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
