"""Floating-point operations of a jaxpr.

Only products (matrix multiplications and convolutions) are counted, two operations for each
multiply-add, as is usual for model FLOPs ("PaLM", arXiv 2204.02311, appendix B). XLA's own
`cost_analysis` is not used because it counts the body of a loop only once.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax._src import source_info_util

from spmdtrain.errors import is_library
from spmdtrain.kernels.reference import OPTIMIZED, reference_kernels
from spmdtrain.step import finite, norms, optimizer
from spmdtrain.step.kernel_flops import KERNEL_CALLS, KernelFlops, kernel_flops
from spmdtrain.step.product_flops import PRODUCT_FLOPS
from spmdtrain.xla.hlo import RARE_BRANCH
from spmdtrain.xla.jaxpr import inner_jaxprs, scan_operands

_CHECKS = frozenset({finite.__file__, norms.__file__})
_UNKNOWN = "unknown"  # source line
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
      by_line: `total` by source line of the user, as `file.py:12 (name)`.
      unknown_loops: Lines with a `while` of unknown trip count, whose body counts once.
      kernels: The Pallas kernels that it calls, whose operations `total` includes.
      has_reference: Whether it contains kernels or optimized implementations, so that its products
        may differ from the products of the model's mathematics.
    """

    total: int = 0
    again: int = 0
    by_line: Counter[str] = field(default_factory=Counter)
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
                self._add_operations(equation, line, times * count(equation), again=repeated)
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
        files = {frame.file_name for frame in _frames(equation)}
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
        kernel = kernel_flops(equation, "" if line == _UNKNOWN else line, operands)
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
    """Returns the innermost source line outside of libraries."""
    for frame in _frames(equation):
        if not is_library(frame.file_name):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return _UNKNOWN


def _frames(equation: Any) -> Iterator[Any]:
    yield from source_info_util.user_frames(equation.source_info.traceback)
