"""Operations that XLA's partitioner computes wrongly without a message, and a check for them.

`tests/integration/test_partitioned_programs.py` compares small programs on several devices with one
device, for the version of JAX that is installed: it fails if a fault is new or is repaired.

- The gradient of a maximum or minimum over windows (`lax.reduce_window`, max pooling) that overlap
  along a split dim: rows at the borders of the devices' parts get a wrong gradient.
- A convolution whose input and kernel are both split along the same spatial dim, if the mesh has
  another axis with several devices: it adds up the copies on that axis. The gradient of a kernel is
  such a convolution if a spatial dim of the input is split.
- A product of two matrices that are both split along the contracted dim over one axis, if the
  result, or a value computed from it element by element, is constrained to have one dim split over
  this axis and the other over two more axes. It is wrong if the last of the two splits the free dim
  of the second matrix, or if they are not in the order of the mesh (not in all of these cases).

The shardings of a program's arguments say which of their dims are split. A rule for each kind of
operation tells which dims of its results may be split. An unknown operation may split every dim.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src import source_info_util
from jax.sharding import NamedSharding, PartitionSpec

from spmdtrain.errors import UserError
from spmdtrain.xla.jaxpr import equations, inner_jaxprs, scan_operands

Split = tuple[frozenset[str], ...]
"""For each dim of an array the mesh axes that may split it."""
NONE: frozenset[str] = frozenset()


def check_partitioning(jaxpr: Any, args: Any, axes: Mapping[str, int], rows: Sequence[str]) -> None:
    """Raises `UserError` if XLA's partitioner computes an operation of a program wrongly.

    The error names the source line, the dim and the axes.

    Args:
      jaxpr: The open jaxpr of the program.
      args: Its arguments, arrays or abstract arrays, with shardings. The leading dim of one without
        a sharding is taken for the rows of a batch.
      axes: The sizes of the mesh's axes.
      rows: The axes that split the rows of a batch.
    """
    used = {axis: size for axis, size in axes.items() if size > 1}
    if not used or not any(map(_is_suspect, equations(jaxpr))):
        return
    leaves = jax.tree.leaves(args)
    assert len(leaves) == len(jaxpr.invars), "the arguments are those of the program"
    given = [_split_of(leaf, used, rows) for leaf in leaves]
    _Splits(used).of_results(jaxpr, given)


def _is_suspect(equation: Any) -> bool:
    if equation.primitive.name == "conv_general_dilated":
        return len(equation.invars[0].aval.shape) > 2
    if equation.primitive.name == "sharding_constraint":
        return _with_pair(equation) is not None
    return equation.primitive.name == "select_and_scatter_add" and any(_overlapping(equation))


def _with_pair(constraint: Any) -> tuple[str, tuple[str, str]] | None:
    """Returns the axis of one dim of a matrix and the two axes of the other, if it is split so."""
    sharding = constraint.params["sharding"]
    if not isinstance(sharding, NamedSharding) or len(_shape(constraint.invars[0])) != 2:
        return None
    sizes = sharding.mesh.shape
    named = [(x,) if isinstance(x, str) else x for x in sharding.spec if x]
    used = [tuple(axis for axis in x if sizes[axis] > 1) for x in named if isinstance(x, tuple)]
    match sorted(used, key=len):
        case [(one,), (first, second)]:
            return one, (first, second)
    return None


def _overlapping(equation: Any) -> list[bool]:
    """Returns for each dim whether consecutive windows share elements."""
    params = equation.params
    pairs = zip(params["window_dimensions"], params["window_strides"], strict=True)
    return [size > stride for size, stride in pairs]


def _split_of(leaf: Any, axes: Mapping[str, int], rows: Sequence[str]) -> Split:
    shape, sharding = jax.typeof(leaf).shape, getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return _from_spec(sharding.spec, len(shape), axes)
    if sharding is not None and not isinstance(leaf, jax.ShapeDtypeStruct):
        return (NONE,) * len(shape)  # on one device
    return (frozenset(axes) & frozenset(rows), *(NONE,) * (len(shape) - 1)) if shape else ()


def _from_spec(spec: PartitionSpec, rank: int, axes: Mapping[str, int]) -> Split:
    entries = [*spec, *(None,) * (rank - len(spec))][:rank]
    named = [
        (entry,) if isinstance(entry, str) else entry if isinstance(entry, tuple) else ()
        for entry in entries
    ]
    return tuple(frozenset(axes) & frozenset(each) for each in named)


class _Splits:
    """The splits of dims, followed through the operations of a program."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self._axes = axes
        # Results computed from a product: the axes that split its contracted dim, and the axes that
        # split the free dim of the second matrix.
        self._products: dict[Any, tuple[frozenset[str], frozenset[str]]] = {}

    def of_results(self, jaxpr: Any, given: Sequence[Split]) -> list[Split]:
        """Returns the splits of the results of an open jaxpr."""
        known: dict[Any, Split] = dict(zip(jaxpr.invars, given, strict=True))

        def read(x: Any) -> Split:
            default = (NONE,) * len(getattr(x.aval, "shape", ()))  # of constants
            return default if hasattr(x, "val") else known.get(x, default)

        for equation in jaxpr.eqns:
            ins = [read(x) for x in equation.invars]
            self._check(equation, ins)
            self._follow_products(equation, ins)
            known |= dict(zip(equation.outvars, self._outputs(equation, ins), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _outputs(self, equation: Any, ins: list[Split]) -> list[Split]:
        name = equation.primitive.name
        if name == "scan":
            return self._scan(equation, ins)
        if name == "while":
            return self._while(equation, ins)
        if name == "cond":
            found = [self.of_results(x, ins[1:]) for x in inner_jaxprs(equation)]
            return [_union(*each) for each in zip(*found, strict=True)]
        if name == "shard_map":  # each device computes its own part: nothing is partitioned within
            specs = equation.params["out_specs"]
            pairs = zip(equation.outvars, specs, strict=True)
            return [_from_spec(spec, len(_shape(x)), self._axes) for x, spec in pairs]
        inner = next(inner_jaxprs(equation), None)
        if inner is not None and len(inner.invars) == len(ins) and _calls(equation):
            self._rename_products(equation.invars, inner.invars)
            results = self.of_results(inner, ins)
            self._rename_products(inner.outvars, equation.outvars)
            return results
        if not any(map(any, ins)) and name != "sharding_constraint":
            return [(NONE,) * len(_shape(x)) for x in equation.outvars]
        if name == "sharding_constraint":
            return [self._constrained(equation, ins[0])]
        if name == "reshape":
            return [self._reshaped(equation, ins[0])]
        if (rule := _RULES.get(name)) is not None:
            return [rule(equation, ins)]
        dropped = equation.params.get("axes", equation.params.get("dimensions", ()))
        if dropped and len(_shape(equation.outvars[0])) == len(ins[0]) - len(dropped):
            kept = [x for dim, x in enumerate(ins[0]) if dim not in dropped]  # by a reduction
            return [tuple(kept)] * len(equation.outvars)
        return [_by_position(x, ins) for x in equation.outvars]

    def _constrained(self, equation: Any, given: Split) -> Split:
        sharding = equation.params["sharding"]
        if not isinstance(sharding, NamedSharding):
            return given
        found = _from_spec(sharding.spec, len(given), self._axes)
        free = equation.params.get("unconstrained_dims") or ()
        return tuple(given[dim] if dim in free else x for dim, x in enumerate(found))

    def _reshaped(self, equation: Any, given: Split) -> Split:
        before, after = _shape(equation.invars[0]), _shape(equation.outvars[0])
        found: list[frozenset[str]] = [NONE] * len(after)
        for old, new in _groups(before, after):
            axes = frozenset[str]().union(*(given[dim] for dim in old))
            parts = math.prod(self._axes[axis] for axis in axes)
            for dim in new:  # XLA splits the first dim, and others if it does not divide
                if not axes or after[dim] == 1:
                    continue
                found[dim] = axes
                if after[dim] % parts == 0:
                    break
        return tuple(found)

    def _scan(self, equation: Any, ins: list[Split]) -> list[Split]:
        constants, carried = scan_operands(equation)
        body = next(inner_jaxprs(equation))
        before, carry, rows = ins[:constants], ins[constants:][:carried], ins[constants + carried :]
        each = [x[1:] for x in rows]
        while True:
            found = self.of_results(body, [*before, *carry, *each])
            joined = [_union(*pair) for pair in zip(carry, found[:carried], strict=True)]
            if joined == carry:
                leading = frozenset[str]().union(*(x[0] for x in rows))
                return [*carry, *((leading, *x) for x in found[carried:])]
            carry = joined

    def _while(self, equation: Any, ins: list[Split]) -> list[Split]:
        tests, bodies = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        before, carry = ins[tests : tests + bodies], ins[tests + bodies :]
        body = equation.params["body_jaxpr"].jaxpr
        while True:
            found = self.of_results(body, [*before, *carry])
            joined = [_union(*pair) for pair in zip(carry, found, strict=True)]
            if joined == carry:
                return carry
            carry = joined

    def _follow_products(self, equation: Any, ins: list[Split]) -> None:
        name, shapes = equation.primitive.name, [_shape(x) for x in equation.invars]
        if name == "dot_general" and all(len(shape) == 2 for shape in shapes):
            (left, right), batched = equation.params["dimension_numbers"]
            if len(left) == 1 and not batched[0]:
                axes = ins[0][left[0]]
                if len(axes) == 1 and axes == ins[1][right[0]]:
                    self._products[equation.outvars[0]] = axes, ins[1][1 - right[0]]
        elif name == "transpose":
            self._rename_products(equation.invars, equation.outvars)
        elif name not in ("sharding_constraint", "reshape", *_RULES):
            for x, shape in zip(equation.invars, shapes, strict=True):
                self._rename_products([x] * len(equation.outvars), equation.outvars, shape)

    def _rename_products(
        self, before: Sequence[Any], after: Sequence[Any], shape: tuple[int, ...] | None = None
    ) -> None:
        for old, new in zip(before, after, strict=True):
            product = None if hasattr(old, "val") else self._products.get(old)
            if product is not None and shape in (None, _shape(new)):
                self._products[new] = product

    # -- the faults ------------------------------------------------------------------------------

    def _check(self, equation: Any, ins: list[Split]) -> None:
        """Raises `UserError` if XLA's partitioner computes an operation wrongly."""
        if equation.primitive.name == "select_and_scatter_add":
            for dim, overlaps in enumerate(_overlapping(equation)):
                if overlaps and (axes := _union(*ins)[dim]):
                    self._refuse(
                        equation,
                        "the gradient of the maximum or minimum over windows that overlap along "
                        f"dim {dim} of {_shape(equation.invars[1])}, which {_named(axes)},",
                    )
        elif equation.primitive.name == "conv_general_dilated":
            numbers = equation.params["dimension_numbers"]
            pairs = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)
            for left, right in pairs:
                axes = ins[0][left] | ins[1][right]
                if ins[0][left] and ins[1][right] and (others := {*self._axes} - axes):
                    self._refuse(
                        equation,
                        f"a convolution of two arrays along dim {left} of "
                        f"{_shape(equation.invars[0])} (or the gradient of its kernel), which "
                        f"{_named(axes)}, on a mesh with the axis {', '.join(sorted(others))},",
                    )

        elif equation.primitive.name == "sharding_constraint":
            x, split = equation.invars[0], _with_pair(equation)
            product = None if hasattr(x, "val") else self._products.get(x)
            if split is None or product is None or product[0] != {split[0]}:
                return
            in_order = split[1] == tuple(axis for axis in self._axes if axis in split[1])
            if not in_order or split[1][1] in product[1]:
                pair = " and ".join(split[1])
                self._refuse(
                    equation,
                    f"a product {_shape(x)} whose contracted dim is split over {split[0]}, and "
                    f"which is constrained to be split over {split[0]} and over {pair},",
                )

    def _refuse(self, equation: Any, what: str) -> None:
        where = source_info_util.summarize(equation.source_info)
        whole = ", ".join(["None"] * len(_shape(equation.invars[0])))
        raise UserError(
            f"{where}: {what} is computed wrongly by XLA's partitioner. Gather its operand and its "
            f"result: x = spmdtrain.constrain_sharding(x, {whole}); or use one device"
        )


def _named(axes: frozenset[str]) -> str:
    return f"is split over {', '.join(sorted(axes))}"


def _shape(x: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = getattr(x.aval, "shape", ())
    return shape


def _calls(equation: Any) -> bool:
    """Returns whether an equation calls a function: one jaxpr that has all of its results."""
    found = [len(x.outvars) for x in inner_jaxprs(equation)]
    return found[0] == len(equation.outvars) and len(found) == 1


def _union(*splits: Split) -> Split:
    return tuple(frozenset[str]().union(*dims) for dims in zip(*splits, strict=True))


def _by_position(output: Any, ins: Sequence[Split]) -> Split:
    """Returns the split of a result that has the dims of the operands of the same rank.

    An operand of another rank may split every dim.
    """
    rank = len(_shape(output))
    found = _union((NONE,) * rank, *(x for x in ins if len(x) == rank))
    others = frozenset[str]().union(*(axes for x in ins if len(x) != rank for axes in x))
    return tuple(axes | others for axes in found)


def _groups(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yields the smallest groups of consecutive dims of equal size before and after a reshape."""
    if 0 in before:
        yield range(len(before)), range(len(after))
        return
    i = j = 0
    while i < len(before) or j < len(after):
        a, b = [i], [j]
        i, j = i + 1, j + 1
        while (x := math.prod(before[k] for k in a if k < len(before))) != (
            y := math.prod(after[k] for k in b if k < len(after))
        ):
            if x < y:
                a.append(i)
                i += 1
            else:
                b.append(j)
                j += 1
        yield [k for k in a if k < len(before)], [k for k in b if k < len(after)]


def _transposed(equation: Any, ins: list[Split]) -> Split:
    return tuple(ins[0][dim] for dim in equation.params["permutation"])


def _broadcast(equation: Any, ins: list[Split]) -> Split:
    found = [NONE] * len(_shape(equation.outvars[0]))
    for dim, axes in zip(equation.params["broadcast_dimensions"], ins[0], strict=True):
        found[dim] = axes
    return tuple(found)


def _squeezed(equation: Any, ins: list[Split]) -> Split:
    dropped = equation.params["dimensions"]
    return tuple(axes for dim, axes in enumerate(ins[0]) if dim not in dropped)


def _product(equation: Any, ins: list[Split]) -> Split:
    contracted, batched = equation.params["dimension_numbers"]
    common = [ins[0][a] | ins[1][b] for a, b in zip(*batched, strict=True)]
    free = [
        axes
        for operand in (0, 1)
        for dim, axes in enumerate(ins[operand])
        if dim not in (*contracted[operand], *batched[operand])
    ]
    return (*common, *free)


def _convolution(equation: Any, ins: list[Split]) -> Split:
    numbers = equation.params["dimension_numbers"]
    found = [NONE] * len(ins[0])
    found[numbers.out_spec[0]] = ins[0][numbers.lhs_spec[0]]
    found[numbers.out_spec[1]] = ins[1][numbers.rhs_spec[0]] | ins[0][numbers.lhs_spec[1]]
    spatial = zip(numbers.out_spec[2:], numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)
    for out, left, right in spatial:
        found[out] = ins[0][left] | ins[1][right]
    return tuple(found)


def _gathered(equation: Any, ins: list[Split]) -> Split:
    numbers = equation.params["dimension_numbers"]
    operand, indices = ins[0], ins[1]
    dropped = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    kept = [axes for dim, axes in enumerate(operand) if dim not in dropped]
    found = [NONE] * len(_shape(equation.outvars[0]))
    for dim, axes in zip(numbers.offset_dims, kept, strict=True):
        found[dim] = axes
    picked = frozenset[str]().union(*(operand[dim] for dim in dropped))
    others = [dim for dim in range(len(found)) if dim not in numbers.offset_dims]
    for dim, axes in zip(others, indices[:-1], strict=True):
        found[dim] = axes | picked
    return tuple(found)


_RULES: dict[str, Callable[[Any, list[Split]], Split]] = {
    "transpose": _transposed,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeezed,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _gathered,
}
