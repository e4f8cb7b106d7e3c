"""What is read off a compiled step, and kept, so that the same one is compiled once."""

import contextlib
import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from spmdtrain.errors import UserError
from spmdtrain.files.user_folders import cache_folder
from spmdtrain.plan.compiler_log import CompilerLog, kept_log, short
from spmdtrain.plan.matmul_flops import products
from spmdtrain.plan.memory_traffic import bytes_moved
from spmdtrain.plan.peak_memory import Live, PeakMemory, read_dump
from spmdtrain.xla.collectives import Carried, Collective, collectives_of
from spmdtrain.xla.compile_cache import keep_file
from spmdtrain.xla.hlo_parser import Computation, Instruction, Module, element_of, reading_program
from spmdtrain.xla.provenance import Origins

CUDA = "jax-cuda12-plugin"
_PACKAGES = ("jax", "jaxlib", "libtpu", CUDA, "jax-cuda12-pjrt")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# The modules that read a program. Their source is part of the key, so a change of one recompiles.
_READERS = (
    *("plan/compiler_log", "plan/matmul_flops", "plan/memory_traffic", "plan/peak_memory"),
    *("plan/summary", "xla/collectives", "xla/hlo_parser", "xla/provenance"),
)
_MOST_KEPT = 500
_MOST_BYTES = 2**28  # of a summary
_SIZES = ("argument", "output", "alias", "temp", "generated_code")


class Use(enum.StrEnum):
    """What a temporary array is for."""

    GRADIENT = "gradients and updates"
    ACTIVATION = "activations"
    PARAMETER = "parameters, gathered or converted"
    OTHER = "other temporaries"


@dataclass(frozen=True)
class Buffer:
    """A temporary array that is there when a device's memory is fullest.

    Attributes:
        bytes: As XLA lays it out, on one device.
        use: What it is for.
        shape: `bf16[8,1024]`, on one device.
        parameter: The model parameter that it is a form of, or that is made of it, or "".
        line: The line of the user's that it comes from, or "".
        op_name: The JAX operation that it comes from, or "".
    """

    bytes: int
    use: Use
    shape: str
    parameter: str
    line: str
    op_name: str


@dataclass(frozen=True)
class Rematerialized:
    """An array that is made whole on each device, since XLA cannot split it anew in another way.

    Attributes:
        given: How it was split: parts of each dim, in XLA's words.
        wanted: How it is needed.
        shape: As the partitioner has it there, of a device if it was split before.
        parameter: The model parameter whose value or gradient it is, or "".
        line: The line of the user's that needs it so, or "".
    """

    given: str
    wanted: str
    shape: str
    parameter: str
    line: str


@dataclass(frozen=True)
class Found:
    """What is read off a compiled step.

    Attributes:
        sizes: Bytes that XLA tells of by these names: argument, output, alias, temp,
            generated_code; total is what its allocator has found room for. Empty where it was
            refused, but for the total.
        collectives: In the order of the program.
        traffic: See `bytes_moved`.
        products: Floating-point operations on one device, nan where that is not known.
        unknown: Lines that were compiled to loops whose turns nobody knows.
        choices: Lines that were compiled to several branches, of which the largest counts.
        buffers: The temporary arrays of the moment when memory is fullest, the largest first.
        rematerialized: What the partitioner has warned of.
        refusal: Why it was not compiled, or "".
    """

    sizes: dict[str, int]
    collectives: list[Collective]
    traffic: float
    products: float
    unknown: list[str]
    choices: list[str] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    rematerialized: list[Rematerialized] = field(default_factory=list)
    refusal: str = ""


def compiled(
    traced: jax.stages.Traced,
    on: jax.sharding.Mesh | None,
    parameters: Mapping[str, str],
    where: Sequence[str],
    *,
    keep: bool,
) -> Found:
    """Compile a step and read it, or find what was read off the same one before.

    `parameters` are the model's by their names as arguments, see `Origins`; `where` is what the
    program hangs on beside its text: devices and options. Kept is the summary: XLA can write
    programs for what is not there, and not read them back.
    """
    lowered = traced.lower()
    path = cache_folder() / "plans" / f"{_key(lowered, parameters, where)}.json"
    if keep and (kept := read_summary(path)) is not None:
        return kept
    found = _compile(lowered, on, parameters)
    if keep:
        _make_room(path.parent)
        keep_file(path, sealed(path.stem, json.dumps(dataclasses.asdict(found)).encode()))
    return found


def sealed(key: str, content: bytes) -> bytes:
    """Returns the content of a summary's file: a digest of its name and text, then the text."""
    digest = hashlib.blake2b(f"{key}\n".encode() + content, digest_size=16).hexdigest()
    return f"{digest}\n".encode() + content


def read_summary(path: Path) -> Found | None:
    """Returns a summary that was kept; None if it is missing, damaged or of another program."""
    with contextlib.suppress(
        OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError
    ):
        if path.is_file() and path.stat().st_size < _MOST_BYTES:  # a pipe is not waited for
            stored = path.read_bytes()
            content = stored.partition(b"\n")[2]
            if stored == sealed(path.stem, content):
                return _from_json(json.loads(content))
    return None


def _make_room(folder: Path) -> None:
    """Removes the oldest summaries where there are too many."""
    with contextlib.suppress(OSError):
        kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in kept[: -_MOST_KEPT + 1]:
            path.unlink()


def _compile(
    lowered: jax.stages.Lowered, on: jax.sharding.Mesh | None, parameters: Mapping[str, str]
) -> Found:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dumped: dict[str, str | bool] = {"xla_dump_to": name, "xla_dump_hlo_as_text": True}
        with kept_log() as log:
            program, refusal = None, ""
            try:
                program = lowered.compile(compiler_options=dumped)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                if "hbm" not in str(error).lower():  # a kernel wants too much of a core's memory
                    raise UserError(f"the compiler: {short(error)}") from error
                refusal = str(error)
        fullest = read_dump(folder)
        text = _dumped_module(folder) if program is None else program.as_text() or ""
    with reading_program():
        return _read_off(program, text, refusal, fullest, log, on, parameters)


def _read_off(
    program: jax.stages.Compiled | None,
    text: str,
    refusal: str,
    fullest: PeakMemory | None,
    log: CompilerLog,
    on: jax.sharding.Mesh | None,
    parameters: Mapping[str, str],
) -> Found:
    module = Module(text)
    origins = Origins(module, parameters, 1 if on is None else on.size)
    sizes = {} if fullest is None else {"total": fullest.total}
    buffers = [] if fullest is None else _buffers(fullest, module, origins)
    rematerialized = _rematerialized(log, module, origins)
    if program is None:
        return Found(
            sizes, [], 0, 0, [], buffers=buffers, rematerialized=rematerialized, refusal=refusal
        )
    told = program.memory_analysis()
    return Found(
        sizes=sizes | {name: getattr(told, f"{name}_size_in_bytes") for name in _SIZES},
        collectives=[] if on is None else collectives_of(module, on, origins),
        traffic=bytes_moved(module),
        products=products(module),
        unknown=[module.line_of(one) or one.name for one in module.unknown_loops],
        choices=[module.line_of(one) or one.name for one in module.choices],
        buffers=buffers,
        rematerialized=rematerialized,
    )


def _dumped_module(folder: Path) -> str:
    """The program of which a compilation got as far as to see that it is too big."""
    path = next(iter(folder.glob("*after_optimizations.txt")), None)
    return "" if path is None else path.read_text()


def _buffers(fullest: PeakMemory, module: Module, origins: Origins) -> list[Buffer]:
    found = []
    places = {
        one.name: (one, computation)
        for computation in module.computations.values()
        for one in computation.instructions.values()
    }
    for live in fullest.live:
        if live.name in places:
            one, within = places[live.name]
            found.append(_buffer(live, one, within, module, origins))
        else:
            found.append(Buffer(live.bytes, Use.OTHER, "", "", "", live.name))
    return found


def _buffer(
    live: Live, one: Instruction, within: Computation, module: Module, origins: Origins
) -> Buffer:
    index = live.path[0] if live.path else 0
    origin = origins.parameters_of(one, within, index)
    maker = origins.producer(one, within, index)
    if origin.parameters:
        use = Use.PARAMETER if origin.is_source else Use.GRADIENT
    else:
        use = Use.ACTIVATION if "jvp(" in maker.op_name else Use.OTHER
    return Buffer(
        bytes=live.bytes,
        use=use,
        shape=element_of(one.shape, live.path),
        parameter=origin.parameter,
        line=module.line_of(maker),
        op_name=maker.op_name,
    )


def _rematerialized(log: CompilerLog, module: Module, origins: Origins) -> list[Rematerialized]:
    """The partitioner's warnings, with what the program itself tells of those instructions."""
    found = []
    for one in log.resharded:
        told = Module(one.operation).computations  # a program of a single line
        if not told:  # not as XLA has written it so far: then it has no more to say
            found.append(Rematerialized(one.given, one.wanted, one.operation[:80], "", ""))
            continue
        (asked,) = told[""].instructions.values()
        parameter = ""
        for computation in module.computations.values():
            for other in computation.instructions.values():
                if not parameter and asked.op_name and other.op_name == asked.op_name:
                    parameter = origins.parameters_of(other, computation).parameter
        shape = str(asked.arrays[0]) if asked.arrays else asked.shape
        line = module.line_of(asked)
        found.append(Rematerialized(one.given, one.wanted, shape, parameter, line))
    return list(dict.fromkeys(found))


def _from_json(found: dict[str, Any]) -> Found:
    collectives = []
    for one in found.pop("collectives"):
        carries = tuple(
            Carried(**{**carried, "parameters": tuple(carried["parameters"])})
            for carried in one.pop("carries")
        )
        axes, group = (tuple(one.pop(name)) for name in ("axes", "group"))
        collectives.append(Collective(**one, axes=axes, group=group, carries=carries))
    buffers = [Buffer(**{**one, "use": Use(one["use"])}) for one in found.pop("buffers")]
    rematerialized = [Rematerialized(**one) for one in found.pop("rematerialized")]
    return Found(**found, collectives=collectives, buffers=buffers, rematerialized=rematerialized)


def version_of(package: str) -> str:
    """The installed version of a package, or `none`."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "none"


def _key(lowered: jax.stages.Lowered, parameters: Mapping[str, str], where: Sequence[str]) -> str:
    """Of all that the summary hangs on: program, lines, options, compilers, and our readers."""
    package = Path(__file__).parents[1]
    parts = [*where, lowered.as_text(debug_info=True), repr(sorted(parameters.items()))]
    parts += [os.environ.get(name, "") for name in _VARIABLES]
    parts += [f"{name} {version_of(name)}" for name in _PACKAGES]
    parts += [(package / f"{name}.py").read_text() for name in _READERS]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
