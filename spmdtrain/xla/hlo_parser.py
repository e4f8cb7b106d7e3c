"""The text of a compiled program, read: its instructions, and how often each of them runs."""

import contextlib
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spmdtrain.errors import UserError

# One instruction a line: `%name = SHAPE opcode(operands), attributes`. Before the opcode, no `=`
# but that of a bounded dim (`<=`) is let through, so that no name within the attributes is taken
# for it.
_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>(?:[^=]|<=)*?) "
    r"(?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)"
)
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
_COMMENT = re.compile(r"/\*.*?\*/")
_NAMES = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|\b(branch_computations|called_computations)=\{([^{}]*)\}"
)
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\](?:\{(?P<layout>[^{}]*)\})?")
INDEX = re.compile(r"\bindex=(\d+)")
_ESCAPES = re.compile(r"\\([0-7]{3}|.)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SOURCE = re.compile(r'source_file="((?:[^"\\]|\\.)*)" source_line=(\d+)')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
# What a reader stumbles over in a text of another form.
_CONFUSIONS = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class UnreadableProgramError(UserError):
    """The text of a compiled program is not as XLA has written it so far."""


@contextlib.contextmanager
def reading_program() -> Iterator[None]:
    """Raises `UnreadableProgramError` for what a text of another form leads to; also a decorator.

    The text comes from XLA, whose next version may write it otherwise.
    """
    try:
        yield
    except UserError:
        raise
    except _CONFUSIONS as error:
        raise UnreadableProgramError(
            f"this version of XLA writes programs in a form that spmdtrain cannot read "
            f"({type(error).__name__}: {str(error)[:100]}): use the version of jax in its "
            "requirements, or report this"
        ) from error


@dataclass(frozen=True)
class Array:
    """One array of a shape: its XLA dtype, its dims, and its memory space (0 is the main one)."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def bytes(self) -> int:
        """Without padding; a token has none."""
        # A type's first number is its width in bits: bf16, f8e4m3fn, s4, c64.
        width = re.search(r"\d+", "pred8" if self.dtype == "pred" else self.dtype)
        return math.ceil(math.prod(self.dims) * int(width[0]) / 8) if width else 0


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    inside: str
    """What is between the parentheses: of a constant its value, of a parameter its number."""
    attributes: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result."""
        return arrays_of(self.shape)

    @property
    def called(self) -> list[tuple[str, str]]:
        """The computations it calls, with what they are to it: (body, NAME), say."""
        found = []
        for one, name, several, names in _CALLED.findall(self.attributes):
            found += [(one, name)] if one else [(several, of) for of in _NAMES.findall(names)]
        return found

    @property
    def op_name(self) -> str:
        """The JAX operation it comes from (one of them, if XLA joined several), or ""."""
        match = _OP_NAME.search(self.attributes)
        return _unescaped(match[1]) if match else ""


def arrays_of(shape: str) -> tuple[Array, ...]:
    """The arrays of `f32[8,128]{1,0:T(8,128)S(1)}`, or of a tuple of such."""
    found = []
    for match in _ARRAY.finditer(shape):
        space = re.search(r"S\((\d+)\)", match["layout"] or "")
        dims = tuple(int(n) for n in re.findall(r"\d+", match["dims"]))
        found.append(Array(match["dtype"], dims, int(space[1]) if space else 0))
    return tuple(found)


def element_of(shape: str, path: Sequence[int]) -> str:
    """The first array at a path within a shape, as people write it: `bf16[8,128]`."""
    for place in path:
        depth, parts = 0, [""]
        for letter in shape[1:-1]:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and not depth:
                parts.append("")
            else:
                parts[-1] += letter
        shape = parts[place].strip() if place < len(parts) else ""
    found = arrays_of(shape)
    return str(found[0]) if found else shape


@dataclass
class Computation:
    """A function of the program: its instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """What it returns."""
        for one in self.instructions.values():
            if one.is_root:
                return one
        raise LookupError(f"{self.name} returns nothing")


class Module:
    """A compiled program, from `compiled.as_text()`."""

    @reading_program()
    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self.heading = text.partition("\n")[0]
        self._tables: dict[str, dict[int, str]] = defaultdict(dict)
        current: Computation | None = None
        table = ""
        for line in text.splitlines():
            if match := _INSTRUCTION.match(_COMMENT.sub("", line)):
                # A part of a program, without a heading, is one computation.
                found = current or self.computations.setdefault("", Computation(""))
                one = _instruction(match)
                found.instructions[one.name] = one
            elif match := _COMPUTATION.match(line):
                current = Computation(match["name"])
                self.computations[current.name] = current
                self.entry = current.name if match["entry"] else self.entry
            elif line.startswith("}"):
                current = None
            elif line in _TABLES:
                table = line
            elif table and (row := re.match(r"(\d+) (.*)", line)):
                self._tables[table][int(row[1])] = row[2]
        self.unknown_loops: list[Instruction] = []
        """Those whose turns cannot be told: they count as one."""
        self.choices: list[Instruction] = []
        """Those of several branches, of which one runs."""
        self._sizes: dict[str, int] = {}
        self.times, self._fused = self._times()

    def instructions(self) -> Iterator[tuple[Instruction, Computation, float]]:
        """Each instruction that runs by itself, its computation, and how often it runs in a step.

        What is inside fusions and reductions is none of these.
        """
        for name, times in self.times.items():
            computation = self.computations[name]
            if name not in self._fused:
                for one in computation.instructions.values():
                    yield one, computation, times

    def _times(self) -> tuple[dict[str, float], set[str]]:
        """How often each computation runs in a step, and those that are within a fusion."""
        times: dict[str, float] = defaultdict(float)
        fused: set[str] = set()
        if self.entry in self.computations:
            times[self.entry] = 1
        # The text has a computation before those that call it.
        for name in reversed(self.computations):
            if name not in times:
                continue
            for one in self.computations[name].instructions.values():
                called = one.called if one.opcode in _CALLING else []
                trips = self.trips(one, self.computations[name])
                if trips is None:
                    trips = 1
                    self.unknown_loops += [one] if one.opcode == "while" else []
                # Of the branches of a `cond` the one that does most counts.
                most = max((inner for _, inner in called), key=self._written, default="")
                self.choices += [one] if one.opcode == "conditional" else []
                for role, inner in called:
                    runs = trips + (role == "condition")
                    if one.opcode == "conditional" and inner != most:
                        runs = 0
                    if inner in self.computations:
                        times[inner] += times[name] * runs
                    if one.opcode == "fusion" or name in fused:
                        fused.add(inner)
        return times, fused

    def _written(self, name: str) -> int:
        """Bytes of all that a computation makes, once: a measure of what it does."""
        if name not in self.computations:
            return 0
        if name not in self._sizes:  # else one that several call is read once for each
            self._sizes[name] = sum(
                sum(array.bytes for array in one.arrays)
                + sum(self._written(inner) for _, inner in one.called if one.opcode in _CALLING)
                for one in self.computations[name].instructions.values()
            )
        return self._sizes[name]

    def trips(self, loop: Instruction, within: Computation) -> int | None:
        """How often a `while` turns, None where that cannot be told.

        GPU and CPU write it. On TPU it is told by the loop itself, where its condition is `i < N`
        and its body makes `i + K` of `i`, which begins with a constant.
        """
        if loop.opcode != "while":
            return None
        if known := _KNOWN_TRIPS.search(loop.attributes):
            return int(known[1])
        roles = dict(loop.called)
        condition, body = (self.computations[roles[role]] for role in ("condition", "body"))
        compared = self._inner(condition.root, condition)
        if compared is None or compared[0].opcode != "compare":
            return None
        test, (counter, limit) = compared
        index = INDEX.search(counter.attributes) if counter else None
        end = _constant(limit)
        if "direction=LT" not in test.attributes or index is None or end is None:
            return None
        place = int(index[1])
        start, step = self._initial(loop, within, place), self._step(body, place)
        return None if start is None or not step else max(0, -((start - end) // step))

    def _inner(
        self, one: Instruction | None, within: Computation
    ) -> tuple[Instruction, list[Instruction | None]] | None:
        """An instruction with its two operands; of a fusion, those of what is its result.

        What only copies is looked through.
        """
        one = _source(one, within)
        if one is None:
            return None
        given = [_source(within.instructions.get(name), within) for name in one.operands]
        if one.opcode == "fusion":
            ((_, name),) = one.called
            body, outer = self.computations[name], given
            found = _source(body.root, body)
            if found is None:
                return None
            one, given = found, []
            for operand in found.operands:
                inner = _source(body.instructions.get(operand), body)
                is_given = inner is not None and inner.opcode == "parameter"
                given.append(outer[int(inner.inside)] if inner and is_given else inner)
        return (one, given) if len(given) == 2 else None

    def _initial(self, loop: Instruction, within: Computation, index: int) -> int | None:
        state = within.instructions.get(loop.operands[0])
        if state is None or state.opcode != "tuple":
            return None
        return _constant(_source(within.instructions.get(state.operands[index]), within))

    def _step(self, body: Computation, index: int) -> int | None:
        """What is added to an element of the state at each turn."""
        if body.root.opcode != "tuple":
            return None
        found = self._inner(body.instructions.get(body.root.operands[index]), body)
        if found is None or found[0].opcode != "add":
            return None
        counters = [x for x in found[1] if x is not None and x.opcode == "get-tuple-element"]
        steps = [step for x in found[1] if (step := _constant(x)) is not None]
        own = [x for x in counters if INDEX.findall(x.attributes) == [str(index)]]
        return steps[0] if own and steps else None

    def line_of(self, one: Instruction) -> str:
        """The line of the user's that an instruction comes from, `file.py:12 (name)`, or "".

        The innermost frame that is neither of a library nor of this package's core; "" where there
        is none, as for what the optimizer does.
        """
        if match := _SOURCE.search(one.attributes):
            return f"{match[1]}:{match[2]}"
        match = _FRAME.search(one.attributes)
        frame = int(match[1]) if match else 0
        lines: list[tuple[str, str]] = []
        frames = self._tables["StackFrames"]
        while frame and len(lines) < len(frames) and (row := frames.get(frame)):
            location = _numbers(row, "file_location_id")
            frame = _numbers(row, "parent_frame_id") - 1  # so it is written
            where = self._tables["FileLocations"].get(location, "")
            file = self._tables["FileNames"].get(_numbers(where, "file_name_id"), "").strip('"')
            name = self._tables["FunctionNames"].get(_numbers(where, "function_name_id"), "")
            lines.append((file, f"{file}:{_numbers(where, 'line')} ({name.strip(chr(34))})"))
        return next((line for file, line in lines if not is_library(file)), "")


def _source(one: Instruction | None, within: Computation) -> Instruction | None:
    """Of what an instruction is a copy."""
    for _ in within.instructions:  # no more often, if copies are copies of each other
        if one is None or one.opcode not in ("copy", "bitcast"):
            break
        one = within.instructions.get(one.operands[0])
    return one


def _constant(one: Instruction | None) -> int | None:
    number = one is not None and one.opcode == "constant" and re.fullmatch(r"-?\d+", one.inside)
    return int(one.inside) if one is not None and number else None


# A TPU's SparseCore has calls of its own, `call-start`, beside the program.
ASYNC = ("async-start", "call-start")
_CALLING = ("while", "call", "conditional", "fusion", *ASYNC)


def _numbers(row: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", row)
    return int(match[1]) if match else 0


_PACKAGE = Path(__file__).parents[1]
_MODELS = _PACKAGE / "models"


def is_library(file: str) -> bool:
    """Whether code is neither the user's nor one of the models that come along."""
    if "-packages" in file or file.startswith("<frozen"):
        return True
    path = Path(file)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_MODELS)


def _closing(rest: str) -> int:
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return place
    return len(rest)


def _instruction(match: re.Match[str]) -> Instruction:
    rest = match["rest"]
    end = rest.find(")")
    if "(" in rest[:end]:  # a tuple, or a number that is complex
        end = _closing(rest)
    inside = rest[:end]
    return Instruction(
        name=match["name"],
        shape=match["shape"],
        opcode=match["opcode"],
        operands=tuple(_NAMES.findall(inside)),
        inside=inside,
        attributes=rest[end + 1 :],
        is_root=match["root"] is not None,
    )


def _unescaped(text: str) -> str:
    """A string as it was before XLA wrote it: bytes beyond ASCII are told in octal."""

    def byte(match: re.Match[str]) -> str:
        return chr(int(match[1], 8)) if len(match[1]) == 3 else match[1]

    return _ESCAPES.sub(byte, text).encode("latin-1", "replace").decode("utf-8", "replace")
