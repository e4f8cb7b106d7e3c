"""The text of compiled programs: instructions, shapes, and how often each one runs."""

import contextlib
import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from spmdtrain.errors import UserError, is_library

# -- Shapes in the text of compiled programs -------------------------------------------------------

_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\](?:\{(?P<layout>[^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"T\(([\d,]+)\)")


@dataclass(frozen=True)
class Array:
    """One array of a shape.

    Attributes:
      dtype: XLA's name of the dtype.
      space: Memory space; 0 is the main memory.
      order: The dims in the order of the layout, the minor one first; empty if unknown.
      tile: Sizes of the layout's tiles, of the last dims in the layout's order; empty without.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def bytes(self) -> int:
        """Bytes without padding; 0 for a token."""
        # The first number in a dtype is its width in bits: bf16, f8e4m3fn, s4, c64.
        width = re.search(r"\d+", "pred8" if self.dtype == "pred" else self.dtype)
        return math.ceil(math.prod(self.dims) * int(width[0]) / 8) if width else 0

    @property
    def stored_bytes(self) -> int:
        """Bytes in memory, where tiles are whole: a TPU stores a minor dim of 64 as 128."""
        if not self.tile or len(self.order) != len(self.dims):
            return self.bytes
        dims = [self.dims[dim] for dim in self.order]
        for place, size in enumerate(reversed(self.tile)):
            if place < len(dims):
                dims[place] = -(-dims[place] // size) * size
        return replace(self, dims=tuple(dims), tile=()).bytes


def arrays_of(shape: str) -> tuple[Array, ...]:
    """Returns the arrays of `f32[8,128]{1,0:T(8,128)S(1)}`, or of a tuple of such shapes."""
    arrays = []
    for match in _ARRAY.finditer(shape):
        order, _, rest = (match["layout"] or "").partition(":")
        space, tile = _SPACE.search(rest), _TILE.search(rest)
        arrays.append(
            Array(
                match["dtype"],
                _integers(match["dims"]),
                space=int(space[1]) if space else 0,
                order=_integers(order),
                tile=_integers(tile[1]) if tile else (),
            )
        )
    return tuple(arrays)


def element_of(shape: str, path: Sequence[int]) -> str:
    """Returns the first array at a path within a shape, such as `bf16[8,128]`.

    `path` has indices into nested tuples.
    """
    for place in path:
        depth, parts = 0, [""]
        for letter in shape[1:-1]:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and not depth:
                parts.append("")
            else:
                parts[-1] += letter
        shape = parts[place].strip() if place < len(parts) else ""
    arrays = arrays_of(shape)
    return str(arrays[0]) if arrays else shape


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


# -- Parser of compiled HLO text: instructions, and how often each of them runs --------------------
#
# The text is what JAX's public `Compiled.as_text` returns. The instructions of jaxlib's private
# `HloModule` have neither shapes nor attributes.

# One instruction per line: `%name = SHAPE opcode(operands), attributes`. The shape may contain no
# `=` except in a bounded dim (`<=`), so that no name within the attributes matches as the opcode.
_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>(?:[^=]|<=)*?) "
    r"(?P<opcode>[a-z][\w\-]*)\((?P<rest>.*)"
)
_HEADING = re.compile(r"HloModule ([\w.\-]+)")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{$")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_COMMENT = re.compile(r"/\*.*?\*/")
_NAMES = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|\b(branch_computations|called_computations)=\{([^{}]*)\}"
)
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
INDEX = re.compile(r"\bindex=(\d+)")
_ESCAPES = re.compile(r"\\([0-7]{3}|.)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SOURCE = re.compile(r'source_file="((?:[^"\\]|\\.)*)" source_line=(\d+)')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
RARE_BRANCH = "rare_branch"
"""`jax.named_scope` of a branch of a `cond` that seldom runs. It counts as not executed."""
# Errors that parsing a text in an unknown format may raise.
_PARSE_ERRORS = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
)
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


class UnreadableProgramError(UserError):
    """Raised if the text of a compiled program is in an unknown format."""


@contextlib.contextmanager
def reading_program() -> Iterator[None]:
    """Converts errors of parsing into `UnreadableProgramError`; also usable as a decorator.

    The text comes from XLA, whose next version may change the format. A `UserError` is raised as it
    is.
    """
    try:
        yield
    except UserError:
        raise
    except _PARSE_ERRORS as error:
        raise UnreadableProgramError(
            f"this version of XLA writes programs in a format that spmdtrain cannot parse "
            f"({type(error).__name__}: {str(error)[:100]}): install the version of jax that "
            "spmdtrain requires, or report this error"
        ) from error


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    inside: str
    """Text between the parentheses: the value of a constant, the number of a parameter."""
    attributes: str
    is_root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result."""
        return arrays_of(self.shape)

    @property
    def called(self) -> list[tuple[str, str]]:
        """Computations that it calls, as (role, name), such as ("body", NAME)."""
        called = []
        for role, name, list_role, names in _CALLED.findall(self.attributes):
            called += [(role, name)] if role else [(list_role, x) for x in _NAMES.findall(names)]
        return called

    @property
    def op_name(self) -> str:
        """JAX operation that it comes from (one of them if XLA combined several), or ""."""
        match = _OP_NAME.search(self.attributes)
        return _unescaped(match[1]) if match else ""


@dataclass
class Computation:
    """A function of the program: its instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        """The instruction whose result it returns."""
        for instruction in self.instructions.values():
            if instruction.is_root:
                return instruction
        raise LookupError(f"computation {self.name} has no root instruction")


class Module:
    """A compiled program.

    Args:
      text: `compiled.as_text()`, or one instruction of it.

    Raises:
      UnreadableProgramError: If the text is in an unknown format.
    """

    @reading_program()
    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self.heading = text.partition("\n")[0]
        self._tables: dict[str, dict[int, str]] = defaultdict(dict)
        current: Computation | None = None
        table = ""
        for line in _whole_lines(text):
            if match := _INSTRUCTION.match(_COMMENT.sub("", line)):
                # A part of a program without a header is one computation.
                computation = current or self.computations.setdefault("", Computation(""))
                instruction = _instruction(match)
                computation.instructions[instruction.name] = instruction
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
        """Loops with an unknown trip count, which count as one iteration."""
        self.choices: list[Instruction] = []
        """Conditionals that run only one of their branches."""
        self.with_rare_branch: list[Instruction] = []
        """Conditionals with a branch that seldom runs (`RARE_BRANCH`)."""
        self._sizes: dict[str, int] = {}
        self.times, self._fused = self._times()

    @property
    def name(self) -> str:
        """The program's name, such as `jit_train_step`, or "" for a part of a program."""
        return match[1] if (match := _HEADING.match(self.heading)) else ""

    def within(
        self, instruction: Instruction, computation: Computation
    ) -> Iterator[tuple[Instruction, Computation]]:
        """Yields an instruction with its computation; of a fusion also all that is fused."""
        yield instruction, computation
        for _, name in instruction.called if instruction.opcode == "fusion" else ():
            inner = self.computations.get(name, Computation(name))
            for each in inner.instructions.values():
                yield from self.within(each, inner)

    def instructions(self) -> Iterator[tuple[Instruction, Computation, float]]:
        """Yields each instruction with its computation and its number of executions in a step.

        Instructions inside fusions and reductions are omitted.
        """
        for name, times in self.times.items():
            computation = self.computations[name]
            if name not in self._fused:
                for instruction in computation.instructions.values():
                    yield instruction, computation, times

    def _times(self) -> tuple[dict[str, float], set[str]]:
        """Returns how often each computation runs in a step, and which are within fusions."""
        times: dict[str, float] = defaultdict(float)
        fused: set[str] = set()
        if self.entry in self.computations:
            times[self.entry] = 1
        # The text defines a computation before its callers.
        for name in reversed(self.computations):
            if name not in times:
                continue
            for instruction in self.computations[name].instructions.values():
                called = instruction.called if instruction.opcode in _CALLING else []
                counted, trips = {inner for _, inner in called}, 1
                if instruction.opcode == "while":
                    known = self.trips(instruction, self.computations[name])
                    self.unknown_loops += [instruction] if known is None else []
                    trips = 1 if known is None else known
                elif instruction.opcode == "conditional":
                    # Only the most expensive branch counts, of those that are not rare.
                    usual = [inner for _, inner in called if not self._is_rare(inner)]
                    counted = {max(usual, key=self._written, default="")}
                    if len(usual) > 1:
                        self.choices.append(instruction)
                    if len(usual) < len(called):
                        self.with_rare_branch.append(instruction)
                for role, inner in called:
                    runs = trips + (role == "condition") if inner in counted else 0
                    if inner in self.computations:
                        times[inner] += times[name] * runs
                    if instruction.opcode == "fusion" or name in fused:
                        fused.add(inner)
        return times, fused

    def _is_rare(self, name: str) -> bool:
        """Returns whether a computation is a branch with the scope `RARE_BRANCH`."""
        within = self.computations.get(name, Computation(name)).instructions.values()
        return any(f"/{RARE_BRANCH}/" in instruction.op_name for instruction in within)

    def _written(self, name: str) -> int:
        """Returns the bytes of all results of a computation, as a measure of its cost."""
        if name not in self.computations:
            return 0
        if name not in self._sizes:  # a computation may have several callers
            self._sizes[name] = sum(
                sum(array.bytes for array in instruction.arrays)
                + sum(
                    self._written(inner)
                    for _, inner in instruction.called
                    if instruction.opcode in _CALLING
                )
                for instruction in self.computations[name].instructions.values()
            )
        return self._sizes[name]

    def trips(self, loop: Instruction, within: Computation) -> int | None:
        """Returns the trip count of a `while`, or None if it is unknown.

        On GPU and CPU the text contains it. On TPU it follows from the loop if the condition is
        `i < N`, the body computes `i + K`, and `i` starts with a constant. It is None for other
        instructions.
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
        self, instruction: Instruction | None, within: Computation
    ) -> tuple[Instruction, list[Instruction | None]] | None:
        """Returns an instruction with its two operands; for a fusion, its root with their sources.

        Copies are skipped.
        """
        instruction = _source(instruction, within)
        if instruction is None:
            return None
        given = [_source(within.instructions.get(name), within) for name in instruction.operands]
        if instruction.opcode == "fusion":
            ((_, name),) = instruction.called
            body, outer = self.computations[name], given
            root = _source(body.root, body)
            if root is None:
                return None
            instruction, given = root, []
            for operand in root.operands:
                inner = _source(body.instructions.get(operand), body)
                is_given = inner is not None and inner.opcode == "parameter"
                given.append(outer[int(inner.inside)] if inner and is_given else inner)
        return (instruction, given) if len(given) == 2 else None

    def _initial(self, loop: Instruction, within: Computation, index: int) -> int | None:
        state = within.instructions.get(loop.operands[0])
        if state is None or state.opcode != "tuple":
            return None
        return _constant(_source(within.instructions.get(state.operands[index]), within))

    def _step(self, body: Computation, index: int) -> int | None:
        """Returns the constant that each iteration adds to an element of the state."""
        if body.root.opcode != "tuple":
            return None
        addition = self._inner(body.instructions.get(body.root.operands[index]), body)
        if addition is None or addition[0].opcode != "add":
            return None
        counters = [x for x in addition[1] if x is not None and x.opcode == "get-tuple-element"]
        steps = [step for x in addition[1] if (step := _constant(x)) is not None]
        own = [x for x in counters if INDEX.findall(x.attributes) == [str(index)]]
        return steps[0] if own and steps else None

    def line_of(self, instruction: Instruction) -> str:
        """Returns the source line of the user that an instruction comes from, or "".

        This is the innermost frame outside of libraries and of this package's core, as
        `file.py:12 (name)`. Operations of the optimizer, for example, have none.
        """
        if match := _SOURCE.search(instruction.attributes):
            return f"{match[1]}:{match[2]}"
        match = _FRAME.search(instruction.attributes)
        frame = int(match[1]) if match else 0
        lines: list[tuple[str, str]] = []
        frames = self._tables["StackFrames"]
        while frame and len(lines) < len(frames) and (row := frames.get(frame)):
            location = _numbers(row, "file_location_id")
            frame = _numbers(row, "parent_frame_id") - 1  # the text stores it plus one
            where = self._tables["FileLocations"].get(location, "")
            file = self._tables["FileNames"].get(_numbers(where, "file_name_id"), "").strip('"')
            name = self._tables["FunctionNames"].get(_numbers(where, "function_name_id"), "")
            lines.append((file, f"{file}:{_numbers(where, 'line')} ({name.strip(chr(34))})"))
        return next((line for file, line in lines if not is_library(file)), "")


def _whole_lines(text: str) -> Iterator[str]:
    """Yields the lines of a program; an instruction whose attributes span lines is one line.

    XLA writes the metadata of a Pallas kernel as an object with a line for each field.

    Raises:
      ValueError: If the text ends within an instruction.
    """
    begun, depth = "", 0
    for line in text.splitlines():
        if begun or (line.endswith("{") and _INSTRUCTION.match(line)):
            begun += line
            braces = _STRING.sub("", line)
            depth += braces.count("{") - braces.count("}")
            if depth > 0:
                continue
            line, begun, depth = begun, "", 0
        yield line
    if begun:
        raise ValueError("an instruction does not end")


def _source(instruction: Instruction | None, within: Computation) -> Instruction | None:
    """Returns the instruction that another one copies, or that instruction itself."""
    for _ in within.instructions:  # bounded, in case of cyclic copies
        if instruction is None or instruction.opcode not in ("copy", "bitcast"):
            break
        instruction = within.instructions.get(instruction.operands[0])
    return instruction


def _constant(instruction: Instruction | None) -> int | None:
    number = (
        instruction is not None
        and instruction.opcode == "constant"
        and re.fullmatch(r"-?\d+", instruction.inside)
    )
    return int(instruction.inside) if instruction is not None and number else None


# `call-start` is a TPU's asynchronous call to its SparseCore.
ASYNC = ("async-start", "call-start")
_CALLING = ("while", "call", "conditional", "fusion", *ASYNC)


def _numbers(row: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", row)
    return int(match[1]) if match else 0


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
    if "(" in rest[:end]:  # a tuple or a complex number
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
    """Decodes XLA's escapes: non-ASCII bytes are written in octal."""

    def byte(match: re.Match[str]) -> str:
        return chr(int(match[1], 8)) if len(match[1]) == 3 else match[1]

    return _ESCAPES.sub(byte, text).encode("latin-1", "replace").decode("utf-8", "replace")
