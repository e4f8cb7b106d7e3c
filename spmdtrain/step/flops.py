"""Floating-point operations and memory traffic of a jaxpr and of its Pallas kernels."""

import enum
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from spmdtrain.errors import is_library
from spmdtrain.kernels.reference import OPTIMIZED, reference_kernels
from spmdtrain.step import health, optimizer
from spmdtrain.xla.hlo import RARE_BRANCH
from spmdtrain.xla.jaxpr import equations, inner_jaxprs, scan_operands, source_frames

# -- Floating-point operations of one product: a matrix multiplication or a convolution ------------


def _dot(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * _size(equation.outvars[0]) * math.prod(shape[dim] for dim in contracted)


def _convolution(equation: Any) -> int:
    """Returns the FLOPs of a convolution: 2 for each pair of output and kernel element of a group.

    An input dilated by n, as in the gradient of a strided convolution, is filled with zeros: only
    one of n taps meets an element.
    """
    params, kernel = equation.params, equation.invars[1].aval.shape
    features = kernel[params["dimension_numbers"].rhs_spec[0]]  # of the output
    dilated = math.prod(params["lhs_dilation"])
    return 2 * _size(equation.outvars[0]) * math.prod(kernel) // features // dilated


def _ragged_dot(equation: Any) -> int:
    """Counts each row, or each contracted column, times the matrix of its own group only."""
    rows, matrices = equation.invars[0].aval.shape, equation.invars[1].aval.shape
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2 * math.prod(rows) * math.prod(n for dim, n in enumerate(matrices) if dim not in shared)


PRODUCT_FLOPS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged_dot,
    "ragged_dot_general": _ragged_dot,
}
"""For each primitive that is a product, the function from its equation to its operations."""


def padded_dot(equation: Any, lanes: int) -> float:
    """Returns the operations of a `dot_general` on a matrix unit of `lanes` x `lanes`.

    The unit holds a block of one operand and streams the other one through it. The two dims of the
    block are rounded up to a multiple of `lanes`; of the two operands, the one that wastes less is
    taken.
    """
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    depth = math.prod(left[dim] for dim in contracted)
    batches = math.prod(left[dim] for dim in batch)
    rows = math.prod(left) // max(1, depth * batches)
    columns = _size(equation.outvars[0]) // max(1, rows * batches)

    def whole(size: int) -> int:
        return -(-size // lanes) * lanes

    return 2.0 * batches * whole(depth) * min(rows * whole(columns), whole(rows) * columns)


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


# -- Values of a kernel's scalars at the points of its grid ----------------------------------------


@dataclass(frozen=True)
class ScalarTable:
    """A known array in memory, which a kernel reads by index."""

    values: np.ndarray


Known = np.ndarray | ScalarTable
"""A known scalar, with one value for each point of the grid, or a table."""


def table_element(
    equation: Any, operands: Sequence[Known | None], points: int
) -> np.ndarray | None:
    """Returns the element that a `get` reads of a table at each point; None if it is not known.

    Operands that are not known are None. `points` is the number of points.
    """
    table = operands[0]
    if not isinstance(table, ScalarTable) or equation.outvars[0].aval.shape:
        return None
    transforms = equation.params["tree"].unflatten(operands[1:])
    if len(transforms) != 1 or not hasattr(transforms[0], "indices"):
        return None
    indices = transforms[0].indices  # each known or not, or a constant
    if any(isinstance(index, ScalarTable) or np.ndim(index) > 1 for index in indices):
        return None
    if not all(isinstance(index, (int, np.integer, np.ndarray)) for index in indices):
        return None
    limits = zip(indices, table.values.shape, strict=True)
    inside = tuple(np.clip(index, 0, size - 1) for index, size in limits)
    return np.broadcast_to(table.values[inside], (points,))


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Divides as `lax.div`, which rounds integers toward zero."""
    y = np.where(y == 0, 1, y)
    return np.fix(x / y).astype(x.dtype) if x.dtype.kind in "iu" else x / y


_COMPUTED: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _quotient,
    "rem": lambda x, y: np.fmod(x, np.where(y == 0, 1, y)),
    "max": np.maximum,
    "min": np.minimum,
    "sign": np.sign,
    "neg": np.negative,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "clamp": lambda low, x, high: np.clip(x, low, high),
}
_SAME_SCALARS = ("squeeze", "reshape", "broadcast_in_dim", "copy", "stop_gradient")


def computed(equation: Any, operands: Sequence[Known | None]) -> np.ndarray | None:
    """Returns the scalar result of an equation at each point; None if it is not known.

    Operands that are not known are None.
    """
    name, aval = equation.primitive.name, equation.outvars[0].aval if equation.outvars else None
    values = [x for x in operands if isinstance(x, np.ndarray)]
    if getattr(aval, "shape", None) != () or len(values) < len(operands) or not values:
        return None
    if name == "convert_element_type":
        return values[0].astype(equation.params["new_dtype"])
    if name in _SAME_SCALARS:
        return values[0]
    return _COMPUTED[name](*values) if name in _COMPUTED else None


# -- Floating-point operations of Pallas kernels ---------------------------------------------------
#
# A kernel states them in its `cost_estimate`. Otherwise the operations of its body are added up
# over the points of its grid. A branch counts at the points at which it is chosen, if that follows
# from the point and from constants, as with a causal mask; otherwise the most expensive branch
# counts.

_MOST_POINTS = 2**16  # of a grid whose points are distinguished
MATRIX_UNIT = 128
"""Rows and columns of a TPU's matrix unit; 256 from v6e on, which only pads more.

https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
"""

KERNEL_CALLS = ("pallas_call", "mpmd_map")
"""Primitives that run a kernel: on a grid of blocks, or on the units of a device that it names."""
# Matrix instructions of GPUs, on references whose shapes their operands do not show.
_MATRIX_INSTRUCTIONS = ("wgmma", "tcgen05_mma", "inline_mgpu")


class CostBasis(enum.StrEnum):
    """The origin of a kernel's operations."""

    STATED = "its cost_estimate"
    BODY = "its body at each point of its grid"
    INDICES = "indices, without products"
    SHAPES = "the shapes of attention; of causal attention half of the pairs"


@dataclass(frozen=True)
class KernelFlops:
    """One call of a kernel on one device.

    Attributes:
      line: Source line of the user that calls it, or "".
      padded: The operations of a matrix unit that computes its products, with the dims padded to
        the unit's size.
      passes: How often it reads each whole operand and writes each whole result; None for those
        that are not known. See `block_passes`.
      stated_bytes: Bytes that its `cost_estimate` states; 0 without.
      unknown_grid: Whether a dim of its grid is not known before it runs; it counts as 1.
      unknown_loop: Whether it has a loop with an unknown trip count, whose body counts once.
    """

    name: str
    line: str
    results: tuple[tuple[int, ...], ...]
    flops: int
    padded: float
    basis: CostBasis
    operands: tuple[tuple[int, ...], ...] = ()
    passes: tuple[float | None, ...] = ()
    stated_bytes: int = 0
    unknown_grid: bool = False
    unknown_loop: bool = False


def kernel_flops(
    equation: Any, line: str, operands: Sequence[np.ndarray | None]
) -> KernelFlops | None:
    """Returns the operations of a call of a kernel; None if they are unknown.

    They are unknown, for example, of the matrix instructions of a GPU without a `cost_estimate`.
    The equation is of one of `KERNEL_CALLS`, and operands that are not known are None.
    """
    if equation.primitive.name == "mpmd_map":
        return _flops_of_programs(equation, line)
    params, mapping = equation.params, equation.params["grid_mapping"]
    bounds = iter(operands[: mapping.num_dynamic_grid_bounds])
    operands = operands[mapping.num_dynamic_grid_bounds :]
    tables_of_index = operands[: mapping.num_index_operands]
    grid: list[int | None] = []
    for size in mapping.grid:
        if isinstance(size, int):
            grid.append(size)
        else:
            bound = next(bounds)
            grid.append(None if bound is None else int(bound.reshape(-1)[0]))
    own = [n for n in range(len(grid)) if n not in mapping.vmapped_dims]
    jaxpr = params["jaxpr"]
    sizes = [1 if size is None else size for size in grid]
    body = _Body(sizes, own, jaxpr)
    tables = {
        variable: ScalarTable(value)
        for variable, value in zip(jaxpr.invars, operands, strict=False)
        if value is not None and getattr(variable.aval, "shape", None) == value.shape
    }
    body.add(jaxpr, tables, np.ones(body.points, bool), 1)
    flops, padded, basis = body.flops, body.padded, CostBasis.BODY
    if (stated := params.get("cost_estimate")) is not None:
        padded = stated.flops * (padded / flops if flops else 1.0)
        flops, basis = stated.flops, CostBasis.STATED
    whole = (1.0,) * (mapping.num_dynamic_grid_bounds + mapping.num_index_operands)
    return KernelFlops(
        name=str(params.get("name") or getattr(jaxpr.debug_info, "func_name", "")),
        line=line,
        results=tuple(tuple(x.aval.shape) for x in equation.outvars),
        flops=round(flops),
        padded=padded,
        basis=basis,
        operands=tuple(tuple(getattr(x.aval, "shape", ())) for x in equation.invars),
        passes=(*whole, *block_passes(mapping, sizes, tables_of_index)),
        stated_bytes=0 if stated is None else int(stated.bytes_accessed),
        unknown_grid=None in grid and basis is CostBasis.BODY,
        unknown_loop=body.unknown_loop and basis is CostBasis.BODY,
    )


def _flops_of_programs(equation: Any, line: str) -> KernelFlops | None:
    """Returns the operations of a kernel that copies its arrays by itself."""
    params = equation.params
    flops, basis, stated = 0, CostBasis.BODY, params["cost_estimate"]
    if stated is not None:
        flops, basis = stated.flops, CostBasis.STATED
    else:
        names = {each.primitive.name for jaxpr in params["jaxprs"] for each in equations(jaxpr)}
        if any(name in PRODUCT_FLOPS or name.startswith(_MATRIX_INSTRUCTIONS) for name in names):
            return None
    return KernelFlops(
        name=str(params["name"]),
        line=line,
        results=tuple(tuple(x.aval.shape) for x in equation.outvars),
        flops=flops,
        padded=float(flops),
        basis=basis,
        operands=tuple(tuple(getattr(x.aval, "shape", ())) for x in equation.invars),
        passes=(None,) * (len(equation.invars) + len(equation.outvars)),
        stated_bytes=0 if stated is None else int(stated.bytes_accessed),
    )


class _Body:
    """The sums of the products of a kernel's body over the points of its grid.

    Args:
      grid: Sizes of the grid.
      own: The dims of the grid that the body knows: all but those that `vmap` added.
      jaxpr: The body. Points are distinguished along the dims whose `program_id` it reads.
    """

    def __init__(self, grid: Sequence[int], own: Sequence[int], jaxpr: Any) -> None:
        self.flops, self.padded, self.unknown_loop = 0.0, 0.0, False
        ids = [x for x in equations(jaxpr) if x.primitive.name == "program_id"]
        read = {own[x.params["axis"]] for x in ids}
        sizes = [size if dim in read else 1 for dim, size in enumerate(grid)]
        if math.prod(sizes) > _MOST_POINTS:
            read, sizes = set(), [1] * len(grid)
        self.points = math.prod(sizes)
        self._weight = math.prod(grid) / self.points if self.points else 0.0
        places = np.indices(sizes).reshape(len(sizes), -1)
        self._ids = {n: places[dim] for n, dim in enumerate(own) if dim in read}
        self._sizes = {n: grid[dim] for n, dim in enumerate(own)}

    def add(
        self, jaxpr: Any, given: Mapping[Any, Known], active: np.ndarray, times: float
    ) -> list[Known | None]:
        """Adds the products of a jaxpr; returns its results, None for unknown ones.

        Args:
          given: Its known variables.
          active: The points at which it runs.
          times: How often it runs at each of them.
        """
        known = dict(given)

        def value(atom: Any) -> Known | None:
            if hasattr(atom, "val"):
                return np.full(self.points, atom.val) if np.ndim(atom.val) == 0 else None
            return known.get(atom)

        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            operands = [value(x) for x in equation.invars]
            results: list[Known | None] = []
            if name in PRODUCT_FLOPS:
                runs = times * self._weight * float(active.sum())
                flops = PRODUCT_FLOPS[name](equation)
                self.flops += runs * flops
                is_dot = name == "dot_general"
                self.padded += runs * (padded_dot(equation, MATRIX_UNIT) if is_dot else flops)
            elif name == "cond":
                self._add_branches(params["branches"], operands, active, times)
            elif name == "scan":
                count, _ = scan_operands(equation)
                constants = [*operands[:count], *[None] * (len(operands) - count)]
                self._add_inner(params["jaxpr"], constants, active, times * params["length"])
            elif name == "while":
                before = self.flops
                self._add_inner(params["body_jaxpr"], (), active, times)
                self.unknown_loop |= self.flops > before
            elif inner := list(inner_jaxprs(equation)):
                for each in inner:
                    results = self._add_inner(each, operands, active, times)
            elif name == "program_id":
                results = [self._ids.get(params["axis"])]
            elif name == "num_programs":
                results = [np.full(self.points, self._sizes[params["axis"]])]
            elif name == "get":
                results = [table_element(equation, operands, self.points)]
            else:
                results = [computed(equation, operands)]
            for variable, result in zip(equation.outvars, results, strict=False):
                if result is not None:
                    known[variable] = result
        return [value(x) for x in jaxpr.outvars]

    def _add_inner(
        self, jaxpr: Any, operands: Sequence[Known | None], active: np.ndarray, times: float
    ) -> list[Known | None]:
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        given = {}
        if len(operands) == len(jaxpr.invars):
            pairs = zip(jaxpr.invars, operands, strict=True)
            given = {variable: x for variable, x in pairs if x is not None}
        return self.add(jaxpr, given, active, times)

    def _add_branches(
        self,
        branches: Sequence[Any],
        operands: Sequence[Known | None],
        active: np.ndarray,
        times: float,
    ) -> None:
        chosen, operands = operands[0], operands[1:]
        if isinstance(chosen, np.ndarray):
            chosen = np.clip(chosen.astype(int), 0, len(branches) - 1)
            for number, branch in enumerate(branches):
                runs = active & (chosen == number)
                if runs.any():
                    self._add_inner(branch, operands, runs, times)
            return
        before, most = (self.flops, self.padded), (self.flops, self.padded)
        for branch in branches:
            self.flops, self.padded = before
            self._add_inner(branch, operands, active, times)
            most = max(most, (self.flops, self.padded))
        self.flops, self.padded = most


# -- Floating-point operations of a jaxpr ----------------------------------------------------------
#
# Only products (matrix multiplications and convolutions) are counted, two operations for each
# multiply-add, as is usual for model FLOPs ("PaLM", arXiv 2204.02311, appendix B). XLA's own
# `cost_analysis` is not used because it counts the body of a loop only once.

_CHECKS = frozenset({health.__file__})
_NOT_USERS = (", in a library", " without a line")  # ends of the names of other lines
_RECOMPUTED = "rematted_computation"  # name stack entry of `jax.checkpoint`


CONVENTION = (
    "two operations for each multiply-add of the model's products; of causal attention all pairs "
    "of tokens count, also masked ones; recomputation and the optimizer do not count (PaLM, "
    "arXiv 2204.02311, appendix B)"
)
"""The rules by which `model_flops` counts."""
SHORT_CONVENTION = "causal attention in full"
"""`CONVENTION` in a few words."""
# Primitives whose products are not in the jaxpr.
_OPAQUE = re.compile(r"ffi_call|custom_partitioning|dot_product_attention|cudnn|scaled_matmul")
_MOST_ELEMENTS = 2**16  # of a constant from which the branches of kernels may follow
# Operations that return their operands, or the parts of them on each device.
_SAME = frozenset(
    ("reshard", "pvary", "pcast", "optimization_barrier", "sharding_constraint", "copy", "name")
)


@dataclass
class Flops:
    """Operations of a program on all devices together.

    Attributes:
      again: Part of `total` that rematerialization recomputes.
      by_line: `total` by source line of the user, as `file.py:12 (name)`. Operations without one
        have the line of the library that computes them, followed by ", in a library".
      float32: Part of `total` that multiplies float32 values; without kernels.
      unknown_loops: Lines with a `while` of unknown trip count, whose body counts once.
      kernels: The Pallas kernels that it calls, whose operations `total` includes.
      has_reference: Whether it contains kernels or optimized implementations, so that its products
        may differ from the products of the model's mathematics.
    """

    total: int = 0
    again: int = 0
    by_line: Counter[str] = field(default_factory=Counter)
    float32: int = 0
    unknown_loops: list[str] = field(default_factory=list)
    kernels: list[KernelFlops] = field(default_factory=list)
    has_reference: bool = False

    @property
    def once(self) -> int:
        """The operations without recomputed ones."""
        return self.total - self.again


def count_flops(jaxpr: Any, without: Collection[str] = ()) -> Flops:
    """Returns the operations of an open or closed jaxpr: `count_flops(jax.make_jaxpr(f)(x))`.

    The body of a `scan` counts for each iteration, a `cond` by its most expensive branch, the body
    of a `shard_map` once for each device along its axes, and a Pallas kernel as `kernel_flops`
    says. The check that the state is finite and the norms do not count, because they are not part
    of the model; nor do operations of the source files in `without`.
    """
    flops = Flops()
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    constants = zip(opened.constvars, getattr(jaxpr, "consts", ()), strict=False)
    known = {variable: value for variable, x in constants if (value := _known(x)) is not None}
    _Count(flops, _CHECKS.union(without)).add(opened, 1, known, again=False)
    return flops


def model_flops(jaxpr: Any, retrace: Callable[[], Any]) -> Flops:
    """Returns the operations of the model's mathematics in a step: see `CONVENTION`.

    The model's own operations are `once`. They include kernels without a reference implementation.
    If `jaxpr` contains kernels or optimized implementations, which may compute the model's products
    more than once, or skip some, `retrace` is called in another context and returns the jaxpr to
    count.
    """
    flops = count_flops(jaxpr, (optimizer.__file__,))
    if flops.has_reference:
        with reference_kernels():
            flops = count_flops(retrace(), (optimizer.__file__,))
    return flops


class _Count:
    """A count that adds the operations of jaxprs to `flops`.

    Operations of the source files in `left_out` do not count.
    """

    def __init__(self, flops: Flops, left_out: Collection[str]) -> None:
        self._flops, self._left_out = flops, left_out

    def add(
        self, jaxpr: Any, times: int, given: Mapping[Any, np.ndarray], *, again: bool
    ) -> list[np.ndarray | None]:
        """Adds the operations of an open jaxpr; returns its results, None for unknown ones.

        Args:
          times: How often it runs, on all devices together.
          given: Its known variables. For an array that is divided into equal parts, along an axis
            or over iterations, the value of a part.
          again: Whether rematerialization recomputes it.
        """
        known = dict(given)

        def value(atom: Any) -> np.ndarray | None:
            return _known(atom.val) if hasattr(atom, "val") else known.get(atom)

        for equation in jaxpr.eqns:
            operands = [value(x) for x in equation.invars]
            name = equation.primitive.name
            stack = str(equation.source_info.name_stack)
            self._flops.has_reference |= OPTIMIZED in stack
            repeated = again or _RECOMPUTED in stack
            results: Sequence[np.ndarray | None] = ()
            if (count := PRODUCT_FLOPS.get(name)) is not None:
                line = _line(equation)
                operations = times * count(equation)
                if self._add_operations(equation, line, operations, again=repeated):
                    is_float32 = equation.invars[0].aval.dtype == np.float32
                    self._flops.float32 += operations * is_float32
            elif name in KERNEL_CALLS:
                self._add_kernel(equation, operands, times, again=repeated)
            elif name == "cond":
                self._add_branch(equation, operands[1:], times, again=repeated)
            elif name in _SAME:
                results = operands
            else:
                if name == "while" and _computes(equation):
                    self._flops.unknown_loops.append(_line(equation))
                self._flops.has_reference |= bool(_OPAQUE.search(name))
                inside = times * _repeats(equation)
                for inner in inner_jaxprs(equation):
                    operands_of = _operands_of(equation, operands, inner)
                    found = self.add(inner, inside, operands_of, again=repeated)
                    results = _results_of(equation, found)
            for variable, result in zip(equation.outvars, results, strict=False):
                if result is not None:
                    known[variable] = result
        return [value(x) for x in jaxpr.outvars]

    def _add_operations(self, equation: Any, line: str, operations: int, *, again: bool) -> bool:
        """Adds operations; returns whether they count."""
        files = {frame.file_name for frame in source_frames(equation)}
        if not files.isdisjoint(self._left_out):
            return False
        flops = self._flops
        flops.total += operations
        flops.again += operations * again
        flops.by_line[line] += operations
        return True

    def _add_kernel(
        self, equation: Any, operands: Sequence[np.ndarray | None], times: int, *, again: bool
    ) -> None:
        line = _line(equation)
        kernel = kernel_flops(equation, "" if line.endswith(_NOT_USERS) else line, operands)
        if kernel is None:
            self._flops.has_reference = True
            return
        line = kernel.line or f"kernel {kernel.name}"
        if self._add_operations(equation, line, times * kernel.flops, again=again):
            self._flops.has_reference = True
            self._flops.kernels.append(kernel)
            self._flops.unknown_loops += [line] if kernel.unknown_loop else []

    def _add_branch(
        self, equation: Any, operands: Sequence[np.ndarray | None], times: int, *, again: bool
    ) -> None:
        """Adds the most expensive branch of a `cond`; rare ones count only if all are rare."""
        every = equation.params["branches"]
        usual = [x for x in every if not _is_rare(x.jaxpr)] or every
        branches = [Flops() for _ in usual]
        for found, branch in zip(branches, usual, strict=True):
            given = _pairs(branch.jaxpr.invars, operands)
            _Count(found, self._left_out).add(branch.jaxpr, times, given, again=again)
        largest, flops = max(branches, key=lambda branch: branch.total), self._flops
        flops.total += largest.total
        flops.again += largest.again
        flops.float32 += largest.float32
        flops.by_line.update(largest.by_line)
        flops.unknown_loops += largest.unknown_loops
        flops.kernels += largest.kernels
        flops.has_reference |= any(branch.has_reference for branch in branches)


def _is_rare(branch: Any) -> bool:
    """Returns whether a branch of a `cond` has the scope `RARE_BRANCH`."""
    return any(RARE_BRANCH in str(x.source_info.name_stack) for x in branch.eqns)


def _known(x: Any) -> np.ndarray | None:
    """Returns the value of a small constant of integers."""
    kind, size = getattr(getattr(x, "dtype", None), "kind", "?"), getattr(x, "size", math.inf)
    if size > _MOST_ELEMENTS or kind not in "iub":
        return None
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return None
    return np.asarray(x)


def _operands_of(
    equation: Any, operands: Sequence[np.ndarray | None], inner: Any
) -> dict[Any, np.ndarray]:
    """Returns the known variables of an inner jaxpr that are the same in all of its iterations."""
    operands = list(operands)
    match equation.primitive.name:
        case "while":
            return {}
        case "scan":
            first, carried = scan_operands(equation)
            operands[first : first + carried] = [None] * carried
    return _pairs(inner.invars, operands)


def _pairs(variables: Sequence[Any], values: Sequence[np.ndarray | None]) -> dict[Any, np.ndarray]:
    if len(variables) != len(values):
        return {}
    pairs = zip(variables, values, strict=True)
    return {
        variable: value
        for variable, value in pairs
        if value is not None and value.shape == getattr(variable.aval, "shape", None)
    }


def _results_of(equation: Any, found: Sequence[np.ndarray | None]) -> Sequence[np.ndarray | None]:
    match equation.primitive.name:
        case "while":
            return ()
        case "scan":
            _, carried = scan_operands(equation)
            return [*[None] * carried, *found[carried:]]
    return found


def _computes(equation: Any) -> bool:
    return any(count_flops(inner).total for inner in inner_jaxprs(equation))


def _repeats(equation: Any) -> int:
    """Returns how often the body of an equation runs, on all devices together."""
    params = equation.params
    match equation.primitive.name:
        case "scan":
            return int(params["length"])
        case "shard_map":
            return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return 1


def _line(equation: Any) -> str:
    """Returns the innermost source line outside of libraries, else the innermost one in a library.

    JAX keeps no lines of some operations that it derives: these have the operation's name.
    """
    inner = equation.primitive.name + _NOT_USERS[1]
    for number, frame in enumerate(source_frames(equation)):
        line = f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
        if not is_library(frame.file_name):
            return line
        inner = inner if number else line + _NOT_USERS[0]
    return inner


# -- Reads and writes of a Pallas kernel's blocks --------------------------------------------------
#
# A kernel copies a block of an operand if its index differs from the index at the previous point of
# the grid, whose last dim runs fastest. It writes a block of a result after the last point with its
# index (https://docs.jax.dev/en/latest/pallas/grid_blockspec.html). So an operand whose index does
# not depend on an inner dim is read once, and an operand whose index does is read again for each
# point of the outer dims.

_MOST_BLOCK_POINTS = 2**20  # of a grid whose points are distinguished
_UNBLOCKED = ("any", "hbm", "gmem", "host")  # memory from which the body copies by itself


def block_passes(
    mapping: Any, grid: Sequence[int], tables: Sequence[np.ndarray | None]
) -> tuple[float | None, ...]:
    """Returns how often a kernel reads each whole operand and writes each whole result.

    The number is 1 if each block is copied once, and None if it is not known.

    Args:
      mapping: The `grid_mapping` of the `pallas_call`.
      grid: Sizes of its grid.
      tables: The operands that the index maps read, which have no number in the result; None for
        those that are not known.
    """
    points = math.prod(grid)
    if points > _MOST_BLOCK_POINTS:
        return (None,) * len(mapping.block_mappings)
    places = np.indices(grid).reshape(len(grid), points)
    return tuple(_passes(block, places, tables) for block in mapping.block_mappings)


def _passes(block: Any, places: np.ndarray, tables: Sequence[np.ndarray | None]) -> float | None:
    if str(block.transformed_block_aval.memory_space).lower() in _UNBLOCKED:
        return None
    points = places.shape[1]
    if not points:
        return 0.0
    jaxpr = block.index_map_jaxpr.jaxpr
    values: list[Known | None] = [*places, *(None if x is None else ScalarTable(x) for x in tables)]
    given = {
        variable: value
        for variable, value in zip(jaxpr.invars, values, strict=True)
        if value is not None
    }
    index = _results(jaxpr, given, points)
    moves = np.zeros(points - 1, bool)
    for part in index:
        if not isinstance(part, np.ndarray):
            return None
        moves |= part[1:] != part[:-1]
    sizes = (getattr(size, "block_size", 1) for size in block.block_shape)
    pairs = zip(block.array_aval.shape, sizes, strict=True)
    blocks = math.prod(-(-whole // size) for whole, size in pairs)
    return float(1 + moves.sum()) / max(1, blocks)


def _results(jaxpr: Any, given: Mapping[Any, Known], points: int) -> list[Known | None]:
    """Returns the results of an index map at all points; None for those that are not known."""
    known = dict(given)

    def value(atom: Any) -> Known | None:
        return np.full(points, atom.val) if hasattr(atom, "val") else known.get(atom)

    for equation in jaxpr.eqns:
        operands = [value(x) for x in equation.invars]
        inner = list(inner_jaxprs(equation))
        results: Sequence[Known | None]
        if equation.primitive.name == "get":
            results = [table_element(equation, operands, points)]
        elif len(inner) == 1 and len(inner[0].invars) == len(operands):
            pairs = zip(inner[0].invars, operands, strict=True)
            results = _results(inner[0], {x: y for x, y in pairs if y is not None}, points)
        else:
            results = [computed(equation, operands)]
        for variable, result in zip(equation.outvars, results, strict=False):
            if result is not None:
                known[variable] = result
    return [value(x) for x in jaxpr.outvars]
