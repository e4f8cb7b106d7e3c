"""Floating-point operations of Pallas kernels.

A kernel states them in its `cost_estimate`. Otherwise the operations of its body are added up over
the points of its grid. A branch counts at the points at which it is chosen, if that follows from
the point and from constants, as with a causal mask; otherwise the most expensive branch counts.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.step.kernel_scalars import Known, ScalarTable, computed, table_element
from spmdtrain.step.kernel_traffic import block_passes
from spmdtrain.step.product_flops import PRODUCT_FLOPS, padded_dot
from spmdtrain.xla.jaxpr import equations, inner_jaxprs, scan_operands

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
