"""Evaluation of a step operation by operation: where values stop being finite, and how large."""

import enum
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from spmdtrain.step import optimizer
from spmdtrain.xla.jaxpr import (
    CALLS,
    evaluate,
    inner_programs,
    is_inexact,
    is_of_jax,
    scan_operands,
    source_frames,
    variables,
)

# -- Operations and values of a step --------------------------------------------------------------


Frames = tuple[tuple[str, int, str], ...]
"""Source lines as (file, line, function), innermost first."""


class Stage(enum.StrEnum):
    """The part of a step that an operation belongs to."""

    FORWARD = "forward pass"
    BACKWARD = "backward pass"
    UPDATE = "update of the parameters"


@dataclass(frozen=True)
class Operation:
    """An operation of a step, as a user finds it in the source.

    Attributes:
      number: Its place in the order of the evaluation; 0 of an argument of the step.
      primitive: Its name in JAX; "" of an argument.
      stage: The part of the step.
      frames: The source lines from which it was called.
      modules: The scopes of modules and of `jax.named_scope` around it, joined by "/".
      parameter: The path of the parameter that its operands were computed with last, otherwise
        that was used last before it; of an argument, its own path; "" if none is known.
      within: The loops, branches and devices that were entered to reach it, outermost first.
      operands: A description of each operand.
      result: A description of its result.
    """

    number: int
    primitive: str
    stage: Stage
    frames: Frames = ()
    modules: str = ""
    parameter: str = ""
    within: tuple[str, ...] = ()
    operands: tuple[str, ...] = ()
    result: str = ""


class Mark(NamedTuple):
    """Facts about a value besides its elements.

    Attributes:
      is_finite: Whether all elements are.
      has_nan: Whether an element is NaN.
      origin: The operation whose result was the first that is not finite; None if the value is
        finite, or not finite since it was given, as the -inf of an attention mask is.
      infinite: The same of its elements that are infinite, of a value that has NaN, too: gradients
        and the loss are joined in one array for an all-reduce, and then taken apart.
      entered: The operation that used the given value first, of a value without `origin`; None if
        the value is the given one.
      use: The number of the last operation that has used a parameter for it, and its path.
      parameter: The path of the parameter that it is a form of; "" if it is none.
    """

    is_finite: bool = True
    has_nan: bool = False
    origin: Operation | None = None
    infinite: Operation | None = None
    entered: Operation | None = None
    use: tuple[int, str] = (0, "")
    parameter: str = ""


class Cell(NamedTuple):
    """A value and its mark."""

    value: Any
    mark: Mark


class Peak(NamedTuple):
    """The largest finite magnitude of a layer, and the operation whose result has it."""

    size: float
    primitive: str


# -- The devices of a `shard_map` ------------------------------------------------------------------


@dataclass(frozen=True)
class Shards:
    """The devices of a `shard_map` whose body is evaluated operation by operation.

    A value of the body, which each device has its own of, is one array with a leading dim of
    devices. Each operation is a `shard_map` of its own, so collectives mean what they do in the
    step.

    Attributes:
      mesh: The mesh of the `shard_map`.
      axes: Its manual axes.
    """

    mesh: Any
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of devices along the manual axes."""
        return int(np.prod([self.mesh.shape[axis] for axis in self.axes]))

    def each(self, function: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
        """Returns a function that each device calls with its own values."""

        def local(*values: Any) -> list[Any]:
            return [x[None] for x in function(*(x[0] for x in values))]

        spec = PartitionSpec(self.axes)
        mapped: Callable[..., list[Any]] = self._map(local, spec, spec)
        return mapped

    def enter(self, values: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        """Returns the devices' parts of global arrays."""
        split = self._map(lambda *xs: [x[None] for x in xs], tuple(specs), PartitionSpec(self.axes))
        return split(*values) if values else []

    def leave(self, values: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
        """Returns the global arrays of the devices' parts."""
        join = self._map(lambda *xs: [x[0] for x in xs], PartitionSpec(self.axes), list(specs))
        return join(*values) if values else []

    def _map(self, function: Callable[..., list[Any]], given: Any, returned: Any) -> Any:
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=given,
            out_specs=returned,
            axis_names=set(self.axes),
            check_vma=False,
        )
        return jax.jit(mapped)


# -- The interpreter -------------------------------------------------------------------------------
#
# It evaluates each operation alone, as JAX does without `jit`, and enters calls, loops, branches
# and `shard_map`. An infinite value may be intended (a mask), so it is followed until it becomes
# NaN or arrives in a result of the step: only then the operation that made it is of interest.

_REMAT = frozenset({"remat", "remat2", "checkpoint"})
# Operations whose result is their operand in another form.
_FORMS = frozenset(
    {
        *("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy"),
        *("sharding_constraint", "device_put", "all_gather", "pvary", "reduce_precision", "name"),
        *("slice", "dynamic_slice", "copy_p", "reshard", "optimization_barrier"),
    }
)


# Collectives of a body whose values are typed by the axes along which they vary. A value of the
# interpreter varies along all of them.
_TYPED: dict[str, Callable[..., Any]] = {
    "pvary": lambda x, **_: x,
    "pcast": lambda x, **_: x,
    "psum_invariant": lambda x, *, axes, **_: jax.lax.psum(x, axes),
    "all_gather_invariant": lambda x, *, all_gather_dimension, axis_name, tiled, **_: (
        jax.lax.all_gather(x, axis_name, axis=all_gather_dimension, tiled=tiled)
    ),
}


@dataclass(frozen=True)
class _Where:
    """The place of a jaxpr in the step.

    Attributes:
      within: As of `Operation`.
      scopes: The name stack of the operations that were entered.
      frames: The frames of a call of a function of JAX, whose own frames are those of the first
        call of it that was traced; empty outside of one.
      shards: The devices; None outside of a `shard_map`.
    """

    within: tuple[str, ...] = ()
    scopes: str = ""
    frames: Frames = ()
    shards: Shards | None = None

    @property
    def leading_dim(self) -> int:
        """The number of the dim of a value that is the leading one of each device's."""
        return 0 if self.shards is None else 1

    def lift(self, value: Any) -> Any:
        """Returns a constant as a value of this place."""
        if self.shards is None:
            return value
        value = jnp.asarray(value)
        return jnp.broadcast_to(value, (self.shards.count, *value.shape))


@dataclass
class Interpreter:
    """Evaluates a jaxpr operation by operation.

    Args:
      root: The file whose frames end the user's part of a stack.

    Attributes:
      peaks: The largest finite magnitudes of the results of operations on parameters, by layer and
        stage, in the order of their first use. Other operations have no layer, and their results
        may be large on purpose, as the scores of masked tokens are.
      became_nan: The first operation that made NaN of the infinite result of another one, by the
        number of that one.
      not_entered: Names of the operations with a program of their own that were evaluated as one.
    """

    root: str
    peaks: dict[tuple[str, Stage], Peak] = field(default_factory=dict)
    became_nan: dict[int, Operation] = field(default_factory=dict)
    not_entered: set[str] = field(default_factory=set)
    _count: int = field(default=0, init=False)
    _functions: dict[int, Callable[..., list[Any]]] = field(default_factory=dict, init=False)
    _last_used: str = field(default="", init=False)  # the path of a parameter

    def run(
        self,
        jaxpr: Any,
        constants: Sequence[Any],
        arguments: Mapping[str, Any],
        parameters: str,
    ) -> list[Cell]:
        """Evaluates an open jaxpr.

        Args:
          jaxpr: An open jaxpr.
          constants: Its constants.
          arguments: Its arguments by path. One that holds NaN is an origin itself.
          parameters: What the paths of the parameters begin with.

        Returns:
          Its results.
        """
        cells = []
        for name, value in arguments.items():
            is_parameter = name.startswith(parameters)
            cell = self._given(value, _Where(), name if is_parameter else "")
            if cell.mark.has_nan:
                origin = Operation(0, "", Stage.FORWARD, parameter=name, result=_describe(value))
                cell = cell._replace(mark=cell.mark._replace(origin=origin, infinite=origin))
            cells.append(cell)
        return self._closed(jaxpr, constants, cells, _Where())

    def _given(self, value: Any, where: _Where, parameter: str = "") -> Cell:
        """Returns an argument or a constant, which may be infinite on purpose."""
        is_finite, has_nan, _ = _look(value)
        return Cell(where.lift(value), Mark(is_finite, has_nan, parameter=parameter))

    def _run(
        self, jaxpr: Any, constants: Sequence[Cell], arguments: Sequence[Cell], where: _Where
    ) -> list[Cell]:
        """Evaluates an open jaxpr; values are kept until their last use."""
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Cell:
            return self._given(atom.val, where) if hasattr(atom, "val") else known[atom]

        last_use = {
            x: n for n, equation in enumerate(jaxpr.eqns) for x in variables(equation.invars)
        }
        last_use |= dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns))
        for n, equation in enumerate(jaxpr.eqns):
            results = self._evaluate(jaxpr, equation, read, where)
            for variable, result in zip(equation.outvars, results, strict=True):
                if variable in last_use:
                    known[variable] = result
            for variable in variables(equation.invars):
                if last_use[variable] == n:
                    del known[variable]
        return [read(x) for x in jaxpr.outvars]

    def _evaluate(
        self, jaxpr: Any, equation: Any, read: Callable[[Any], Cell], where: _Where
    ) -> list[Cell]:
        name = equation.primitive.name
        operands = [read(x) for x in equation.invars]
        results: list[Cell] | None = None
        if name in CALLS:
            results = self._call(equation, operands, where)
        elif name == "scan" and equation.params["length"]:
            results = self._scan(equation, operands, where)
        elif name == "while":
            results = self._while(equation, operands, where)
        elif name == "cond":
            results = self._cond(equation, operands, where)
        elif name == "shard_map" and where.shards is None:
            results = self._shard_map(equation, operands, where)
        if results is not None:
            return results
        if any(True for _ in inner_programs(equation)):
            self.not_entered.add(name)
        return self._apply(jaxpr, equation, read, operands, where)

    # -- operations that have programs of their own ------------------------------------------------

    def _call(self, equation: Any, operands: list[Cell], where: _Where) -> list[Cell]:
        ((jaxpr, constants),) = inner_programs(equation)
        name = equation.primitive.name
        inside = self._inside(equation, where, "remat" if name in _REMAT else "")
        if name not in _REMAT and not inside.frames and is_of_jax(jaxpr):
            inside = replace(inside, frames=self._frames(equation, where))
        return self._closed(jaxpr, constants, operands, inside)

    def _closed(
        self, jaxpr: Any, constants: Iterable[Any], operands: Sequence[Cell], where: _Where
    ) -> list[Cell]:
        return self._run(jaxpr, [self._given(x, where) for x in constants], operands, where)

    def _inside(self, equation: Any, where: _Where, step: str = "") -> _Where:
        """Returns the place of the programs of an equation."""
        scopes = _joined(where.scopes, str(equation.source_info.name_stack))
        return replace(where, scopes=scopes, within=(*where.within, *filter(None, [step])))

    def _scan(self, equation: Any, operands: list[Cell], where: _Where) -> list[Cell]:
        ((jaxpr, constants),) = inner_programs(equation)
        length = equation.params["length"]
        fixed, carried = scan_operands(equation)
        constant, carry = operands[:fixed], operands[fixed : fixed + carried]
        rows = operands[fixed + carried :]
        stacked: list[list[Cell]] = [[]] * length
        for n in reversed(range(length)) if equation.params["reverse"] else range(length):
            inside = self._inside(equation, where, f"scan, iteration {n + 1} of {length}")
            given = [*constant, *carry, *(_row(cell, n, where) for cell in rows)]
            results = self._closed(jaxpr, constants, given, inside)
            carry, stacked[n] = results[:carried], results[carried:]
        return [*carry, *(_stack(cells, where) for cells in zip(*stacked, strict=True))]

    def _while(self, equation: Any, operands: list[Cell], where: _Where) -> list[Cell] | None:
        params = equation.params
        first = params["cond_nconsts"]
        of_test, others = operands[:first], operands[first:]
        of_body, carry = others[: params["body_nconsts"]], others[params["body_nconsts"] :]
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        count = 0
        while True:
            count += 1
            inside = self._inside(equation, where, f"while, iteration {count}")
            (continues,) = self._closed(test.jaxpr, test.consts, [*of_test, *carry], inside)
            chosen = _same_on_all(continues.value)
            if chosen is None:
                return None
            if not chosen:
                return carry
            carry = self._closed(body.jaxpr, body.consts, [*of_body, *carry], inside)

    def _cond(self, equation: Any, operands: list[Cell], where: _Where) -> list[Cell] | None:
        branches = equation.params["branches"]
        if (chosen := _same_on_all(operands[0].value)) is None:
            return None
        n = min(max(int(chosen), 0), len(branches) - 1)
        inside = self._inside(equation, where, f"cond, branch {n} of {len(branches)}")
        return self._closed(branches[n].jaxpr, branches[n].consts, operands[1:], inside)

    def _shard_map(self, equation: Any, operands: list[Cell], where: _Where) -> list[Cell] | None:
        params = equation.params
        manual = params.get("newly_manual_axes", params.get("manual_axes", ()))
        axes = tuple(axis for axis in params["mesh"].axis_names if axis in manual)
        if not axes:
            return None
        ((jaxpr, constants),) = inner_programs(equation)
        shards = Shards(params["mesh"], axes)
        split = shards.enter([cell.value for cell in operands], params["in_specs"])
        given = [Cell(x, cell.mark) for x, cell in zip(split, operands, strict=True)]
        inside = replace(self._inside(equation, where, "shard_map"), shards=shards)
        results = self._closed(jaxpr, constants, given, inside)
        joined = shards.leave([cell.value for cell in results], params["out_specs"])
        return [Cell(x, cell.mark) for x, cell in zip(joined, results, strict=True)]

    # -- all other operations ----------------------------------------------------------------------

    def _apply(
        self,
        jaxpr: Any,
        equation: Any,
        read: Callable[[Any], Cell],
        operands: list[Cell],
        where: _Where,
    ) -> list[Cell]:
        given = variables(equation.invars)

        def function(*values: Any) -> list[Any]:
            known = dict(zip(given, values, strict=True))
            if (typed := _TYPED.get(equation.primitive.name)) is None:
                return evaluate(jaxpr, equation, known.__getitem__)
            atoms = equation.invars
            arrays = [jnp.asarray(x.val) if hasattr(x, "val") else known[x] for x in atoms]
            return [typed(x, **equation.params) for x in arrays]

        if where.shards is not None:  # compiled once, also in a loop
            function = self._functions.setdefault(id(equation), where.shards.each(function))
        results = function(*(read(x).value for x in given))
        self._count += 1
        use, parameter = self._use(equation, operands)
        marked = []
        for value in results:
            is_finite, has_nan, size = _look(value)
            mark = Mark(is_finite, has_nan, use=use, parameter=parameter)
            if not is_finite:
                origin, infinite = self._origin(equation, operands, value, mark, where)
                mark = mark._replace(origin=origin, infinite=infinite)
                if origin is None:
                    entered = _first(cell.mark.entered for cell in operands)
                    here = entered or self._operation(equation, operands, value, mark, where)
                    mark = mark._replace(entered=here)
            if use[0] == self._count:
                self._record(equation, use[1], size, where)
            marked.append(Cell(value, mark))
        return marked

    def _use(self, equation: Any, operands: list[Cell]) -> tuple[tuple[int, str], str]:
        """Returns the last use of a parameter, and the parameter that the result is a form of."""
        own = [cell.mark.parameter for cell in operands if cell.mark.parameter]
        if own and equation.primitive.name in _FORMS:
            return (0, ""), own[0]
        if own:
            self._last_used = own[0]
            return (self._count, own[0]), ""
        return max((cell.mark.use for cell in operands), default=(0, "")), ""

    def _origin(
        self, equation: Any, operands: list[Cell], value: Any, mark: Mark, where: _Where
    ) -> tuple[Operation | None, Operation | None]:
        """Returns the operations because of which a result is not finite, and is infinite.

        None stands for what was given.
        """
        wrong = [cell.mark for cell in operands if not cell.mark.is_finite]
        with_nan = [x for x in wrong if x.has_nan]
        infinite = _first(x.infinite for x in wrong)
        if mark.has_nan and with_nan:
            return _first(x.origin for x in with_nan), infinite
        if not wrong or (mark.has_nan and infinite is None):
            here = self._operation(equation, operands, value, mark, where)
            return here, here
        if mark.has_nan and infinite is not None and infinite.number not in self.became_nan:
            here = self._operation(equation, operands, value, mark, where)
            self.became_nan[infinite.number] = here
        return infinite, infinite

    def _operation(
        self, equation: Any, operands: list[Cell], value: Any, mark: Mark, where: _Where
    ) -> Operation:
        scopes = _joined(where.scopes, str(equation.source_info.name_stack))
        frames = self._frames(equation, where)
        stage = _stage(scopes)
        if stage is Stage.FORWARD and any(file == optimizer.__file__ for file, _, _ in frames):
            stage = Stage.UPDATE
        parameter = next((cell.mark.parameter for cell in operands if cell.mark.parameter), "")
        if stage is not Stage.UPDATE:  # whose operands come from all layers
            parameter = parameter or mark.use[1] or self._last_used
        return Operation(
            self._count,
            equation.primitive.name,
            stage,
            frames,
            _modules(scopes),
            parameter,
            where.within,
            tuple(
                _describe(cell.value, None if hasattr(atom, "val") else where.shards)
                + ("" if not cell.mark.parameter else f" ({cell.mark.parameter})")
                for atom, cell in zip(equation.invars, operands, strict=True)
            ),
            _describe(value, where.shards),
        )

    def _frames(self, equation: Any, where: _Where) -> Frames:
        if where.frames:
            return where.frames
        return frames_of(equation, self.root)

    def _record(self, equation: Any, parameter: str, size: float, where: _Where) -> None:
        scopes = _joined(where.scopes, str(equation.source_info.name_stack))
        if "jvp(" not in scopes:
            return  # after the gradients
        key = layer_of(parameter), _stage(scopes)
        if key not in self.peaks or size > self.peaks[key].size:
            self.peaks[key] = Peak(size, equation.primitive.name)


def frames_of(equation: Any, root: str) -> Frames:
    """Returns the frames of an equation up to the first one in the file `root`."""
    frames = source_frames(equation)
    inner = itertools.takewhile(lambda frame: frame.file_name != root, frames)
    return tuple((frame.file_name, frame.start_line, frame.function_name) for frame in inner)


def layer_of(parameter: str) -> str:
    """Returns the path of the layer of a parameter; `[3]` after it is its index in a loop."""
    path, bracket, index = parameter.partition("[")
    return (path.rpartition("/")[0] or path) + bracket + index


def _first(operations: Iterable[Operation | None]) -> Operation | None:
    """Returns the operation that was evaluated first."""
    known = [operation for operation in operations if operation is not None]
    return min(known, key=lambda operation: operation.number, default=None)


def _stage(scopes: str) -> Stage:
    return Stage.BACKWARD if "transpose(" in scopes else Stage.FORWARD


def _joined(outer: str, inner: str) -> str:
    return "/".join(filter(None, (outer, inner)))


def _modules(scopes: str) -> str:
    """Returns the names in a name stack, without the transformations: `transpose(jvp(A))/B`."""
    names = re.sub(r"\w+\(|\)", "", scopes).split("/")
    return "/".join(name for name in names if name not in ("", "rematted_computation", "while"))


# -- Values ----------------------------------------------------------------------------------------


@jax.jit
def _measures(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    size = size if size.dtype.itemsize > 4 else size.astype(jnp.float32)
    finite = jnp.isfinite(size)
    largest = jnp.where(finite, size, 0).max(initial=0)
    return jnp.stack([finite.all(), ~jnp.isnan(size).any(), largest])


def _array(value: Any) -> Any:
    """Returns a value as an array, also a number of a jaxpr."""
    is_array = hasattr(value, "shape")
    return value if is_array else np.asarray(value, getattr(value, "dtype", None))


def _look(value: Any) -> tuple[bool, bool, float]:
    """Returns whether a value is finite, whether it has NaN, and its largest finite magnitude."""
    array = _array(value)
    if not is_inexact(array):
        return True, False, 0.0
    if isinstance(array, jax.Array):
        is_finite, has_no_nan, largest = np.asarray(_measures(array)).tolist()
        return bool(is_finite), not has_no_nan, largest
    size = np.abs(array).astype(np.float64)  # of a constant
    finite = np.isfinite(size)
    largest = float(np.where(finite, size, 0).max(initial=0))
    return bool(finite.all()), bool(np.isnan(size).any()), largest


def _row(cell: Cell, n: int, where: _Where) -> Cell:
    """Returns an element along the leading dim of a value."""
    value = jax.lax.dynamic_index_in_dim(cell.value, n, where.leading_dim, keepdims=False)
    mark = cell.mark
    if mark.parameter:
        mark = mark._replace(parameter=f"{mark.parameter}[{n}]")
    if not mark.is_finite:
        is_finite, has_nan, _ = _look(value)
        mark = mark._replace(is_finite=is_finite, has_nan=has_nan)
        if is_finite:
            mark = mark._replace(origin=None, infinite=None, entered=None)
        elif not has_nan:
            mark = mark._replace(origin=mark.infinite)
    return Cell(value, mark)


def _stack(cells: Sequence[Cell], where: _Where) -> Cell:
    """Returns values along a new leading dim."""
    value = jnp.stack([cell.value for cell in cells], where.leading_dim)
    marks = [cell.mark for cell in cells]
    wrong = [mark for mark in marks if not mark.is_finite]
    has_nan = any(mark.has_nan for mark in wrong)
    of_nan = [mark for mark in wrong if mark.has_nan] or wrong
    origin = _first(mark.origin for mark in of_nan)
    infinite = _first(mark.infinite for mark in wrong)
    entered = _first(mark.entered for mark in wrong)
    mark = Mark(not wrong, has_nan, origin, infinite, entered, max(mark.use for mark in marks))
    return Cell(value, mark)


def _same_on_all(value: Any) -> Any:
    """Returns the scalar that all devices have; None if they have different ones."""
    found = np.unique(np.asarray(value))
    return found[0] if len(found) == 1 else None


def _describe(value: Any, shards: Shards | None = None) -> str:
    """Returns the dtype, the shape and the range of a value."""
    array = _array(value)
    shape = array.shape if shards is None else array.shape[1:]
    text = f"{array.dtype}[{','.join(map(str, shape))}]"
    if shards is not None:
        text += f" on each of {shards.count} devices"
    if not (is_inexact(array) or jnp.issubdtype(array.dtype, jnp.integer)) or not array.size:
        return text
    numbers = np.asarray(jnp.asarray(array).astype(jnp.float32) if is_inexact(array) else array)
    finite = numbers[np.isfinite(numbers)]
    parts = []
    if finite.size:
        low, high = float(finite.min()) + 0.0, float(finite.max()) + 0.0  # no -0
        parts = [f"{low:.4g}"] if low == high else [f"{low:.4g} to {high:.4g}"]
    parts += describe_not_finite(numbers)
    if shards is not None:
        wrong = ~np.isfinite(numbers.reshape(shards.count, -1)).all(1)
        if wrong.any() and not wrong.all():
            parts.append(f"all on device {', '.join(map(str, np.flatnonzero(wrong)))}")
    return f"{text}: {', '.join(parts)}"


def describe_not_finite(numbers: np.ndarray) -> list[str]:
    """Returns how many numbers are NaN, inf and -inf, a text for each kind that there is."""
    kinds = {"NaN": np.isnan(numbers), "inf": np.isposinf(numbers), "-inf": np.isneginf(numbers)}
    return [
        f"{found.sum():,} of {numbers.size:,} {name}" if numbers.size > 1 else name
        for name, found in kinds.items()
        if found.any()
    ]
