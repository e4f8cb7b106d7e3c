"""Proofs that padding or splitting a batch does not change the values of its rows.

A function of a batch is traced at two batch sizes, and each of its values is classified:

- `FIXED`: the array does not depend on the batch.
- `Rows`: one dim holds the rows of the batch in order. The values of a row depend neither on later
  rows nor on the number of rows. If they depend on the row's index or on earlier rows, they are
  `positional`: padding does not change them, but splitting the batch does.
- `Mixed`: anything else, including every primitive without a rule, and sums over the rows.

A single trace does not show whether a constant or a dim that equals the batch size depends on it
(`values / len(values)`) or equals it by coincidence. The comparison of the two traces shows it.
"""

import cmath
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.xla.jaxpr import (
    is_inexact,
    may_combine_more,
    scan_operands,
    trace_derivatives,
    trace_gradients,
)
from spmdtrain.xla.padding_rules import (
    CALLS,
    DRAWS,
    FIXED,
    NEVER,
    RULES,
    Mixed,
    Op,
    Rows,
    Value,
    classified_const,
    creates_zeros,
    is_zero,
    same_array,
    same_params,
    shape_of,
    size_of,
    sum_or_mean,
    sum_over_parts,
    traces_of,
    without_names,
)

PyTree = Any


def why_padding_matters(
    function: Callable[[PyTree, PyTree], PyTree], fixed: PyTree, batch: PyTree
) -> str | None:
    """Returns why padding could change the results of a function for the rows of a batch.

    The reason names the source line. It is None if the results are proven unchanged.

    Args:
      function: A traceable function of (fixed, batch); its results have leading dim B, or do not
        depend on the batch.
      fixed: Arguments that are the same for all batches; abstract arrays suffice.
      batch: Arrays of leading dim B > 1; abstract ones suffice.
    """
    results = _results(function, fixed, batch, 2 * size_of(batch))
    if isinstance(results, str):
        return results
    return next((value.why for value in results if isinstance(value, Mixed)), None)


def why_parts_differ(
    function: Callable[[PyTree, PyTree], PyTree],
    fixed: PyTree,
    batch: PyTree,
    parts: int,
    *,
    own_draws: bool = False,
    gradients: bool = False,
    vjps: bool = False,
    axes: Sequence[tuple[str, int]] = (),
    averages: bool = False,
) -> str | None:
    """Returns why a function of a part of a batch could return other values for its rows.

    The result is None if a row's values are proven to depend on this row alone, and on sums over
    all rows of all parts: not on other rows, their number, or its index.

    Args:
      function: See `why_padding_matters`, also for `fixed` and `batch`.
      parts: Number of equal parts.
      own_draws: Whether each part may draw its own random numbers.
      gradients: Whether the function is differentiated. The rules that users have defined are
        examined, too.
      vjps: Whether the function may contain a `jax.custom_vjp` of rows, if its backward pass is
        proven to compute the gradients of each row alone, or sums of such gradients over the rows.
      axes: Named axes, with their sizes, over which the function may add up sums of its rows.
      averages: Whether only the mean of the results over equal parts counts, so that they may
        contain means over the rows.
    """
    other = _other_size(batch, parts)
    results = _results(function, fixed, batch, other, not own_draws, gradients, vjps, axes)
    if isinstance(results, str):
        return results
    for value in results:
        if isinstance(value, Mixed) and not (averages and value.is_mean):
            return value.why
    if any(isinstance(value, Rows) and value.positional for value in results):
        return "the values of an example depend on its position in the batch"
    return None


def why_not_means(
    function: Callable[[PyTree, PyTree], PyTree], fixed: PyTree, batch: PyTree, parts: int
) -> list[tuple[str | None, bool]]:
    """Returns for each number of a batch why its mean over equal parts may be another number.

    `function` is differentiated and returns numbers; see `why_padding_matters` for it, `fixed` and
    `batch`. Each of the equal parts has random numbers of its own.

    Returns:
      The reason, None if the number is proven to be a mean over the rows or independent of them;
      and whether it is proven to be a sum over the rows.
    """
    found = _results(function, fixed, batch, _other_size(batch, parts), False, True, True)
    if isinstance(found, str):
        return [(found, False)] * len(jax.tree.leaves(jax.eval_shape(function, fixed, batch)))
    return [
        (value.why, value.is_sum)
        if isinstance(value, Mixed) and not value.is_mean
        else (None, False)
        for value in found
    ]


def _other_size(batch: PyTree, parts: int) -> int:
    """Returns the number of rows of a part. It is never one: that dim would be broadcast."""
    size = size_of(batch)
    return size // parts if size // parts > 1 else 2 * size


def why_not_sums(function: Callable[[PyTree], PyTree], batch: PyTree) -> str | None:
    """Returns why the results of a function of a batch may not be sums over its rows.

    Such a sum adds up a value of each row, which depends on this row alone. So the sums over any
    parts of a batch, single rows included, add up to the sum over the batch. The result is None if
    all results are proven to be such sums. For `batch` see `why_padding_matters`.
    """
    traced = traces_of(lambda _, rows: function(rows), (), batch, 2 * size_of(batch))
    if isinstance(traced, str):
        return traced
    sizes = size_of(batch), 2 * size_of(batch)
    classifier = Classifier(sizes, positional_draws=True, gradients=False, counts_rows=True)
    rows = [Rows(0) for _ in traced[0].in_avals]
    for value in classifier.results(*traced, rows):
        if not isinstance(value, Mixed):
            return "a result is the same for each batch" if value is FIXED else "a result has rows"
        if not value.is_sum:
            return value.why
    return None


def _results(
    function: Callable[[PyTree, PyTree], PyTree],
    fixed: PyTree,
    batch: PyTree,
    other: int,
    positional_draws: bool = True,
    gradients: bool = False,
    vjps: bool = False,
    axes: Sequence[tuple[str, int]] = (),
) -> list[Value] | str:
    """Classifies the results by comparing a trace of the batch with one of `other` rows.

    It returns the reason instead if they are not known or hold the rows in another dim.
    """
    traced = traces_of(function, fixed, batch, other, axes)
    if isinstance(traced, str):
        return traced
    first, second = traced
    leaves = len(jax.tree.leaves(fixed))
    arguments: list[Value] = [FIXED] * leaves
    arguments += [Rows(0)] * (len(first.in_avals) - leaves)
    sizes = size_of(batch), other
    classifier = Classifier(sizes, positional_draws, gradients, vjps)
    results = classifier.results(first, second, arguments)
    for value in results:
        if isinstance(value, Rows) and (value.dim, value.inner) != (0, 1):
            return f"dim {value.dim} of its result holds the rows instead of the leading dim"
    return results


# -- Classes of the values in two traces of a function of a batch ----------------------------------


class Classifier:
    """A classification of the values in two traces of the same function.

    Args:
      sizes: The number of rows of each.
      positional_draws: Whether random numbers depend on the position of their row.
      gradients: Whether the function is differentiated.
      vjps: Whether a `jax.custom_vjp` of rows may be proven then.
      counts_rows: Whether the number of rows is a sum over the rows. If not, it is a constant.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        positional_draws: bool,
        gradients: bool,
        vjps: bool = False,
        *,
        counts_rows: bool = False,
    ) -> None:
        self._sizes, self._positional_draws = sizes, positional_draws
        self._gradients, self._vjps = gradients, vjps
        self._counts_rows = counts_rows

    def results(
        self, first: Any, second: Any, arguments: Sequence[Value], are_zeros: Sequence[bool] = ()
    ) -> list[Value]:
        """Classifies the results of a closed jaxpr, or of an open one without constants.

        `are_zeros` tells of the first arguments whether they are created as zeros.
        """
        pairs = zip(getattr(first, "consts", ()), getattr(second, "consts", ()), strict=False)
        consts = [self._const(a, b) for a, b in pairs]
        first, second = (getattr(each, "jaxpr", each) for each in (first, second))
        operations = [
            [(e.primitive.name, [len(shape_of(v)) for v in e.outvars]) for e in each.eqns]
            for each in (first, second)
        ]
        if operations[0] != operations[1] or len(first.constvars) != len(second.constvars):
            return [Mixed("it performs different operations for another batch size")] * len(
                first.outvars
            )
        known: dict[Any, Value] = dict(zip(first.constvars, consts, strict=True))
        known |= dict(zip(first.invars, arguments, strict=True))
        # Variables that are created as zeros.
        zeros = {id(x) for x, zero in zip(first.invars, are_zeros, strict=False) if zero}

        def read(a: Any, b: Any) -> Value:
            if not hasattr(a, "val"):
                return known[a]
            if hasattr(b, "val") and same_array(a.val, b.val):
                return FIXED
            why = "it uses the batch size as a number"
            return Mixed(why) if shape_of(a) else self._number(why, a.val, getattr(b, "val", 0))

        for a, b in zip(first.eqns, second.eqns, strict=True):
            ins = [read(x, y) for x, y in zip(a.invars, b.invars, strict=True)]
            are_zeros = [is_zero(x) or id(x) in zeros for x in a.invars]
            outs = self._outputs(Op(a, b, ins, self._sizes, are_zeros))
            if a.primitive.name in ("broadcast_in_dim", "convert_element_type") and are_zeros[0]:
                zeros.add(id(a.outvars[0]))
            known |= dict(zip(a.outvars, outs, strict=True))
        return [read(x, y) for x, y in zip(first.outvars, second.outvars, strict=True)]

    def _const(self, first: Any, second: Any) -> Value:
        """Classifies a constant, which may be a number that depends on the batch size."""
        value = classified_const(first, second)
        is_number = jnp.ndim(first) == jnp.ndim(second) == 0
        if isinstance(value, Mixed) and is_number and is_inexact(first) and is_inexact(second):
            return self._number(value.why, first, second)
        return value

    def _number(self, why: str, first: Any, second: Any) -> Mixed:
        """Classifies a number that differs between the two traces."""
        a, b = complex(first), complex(second)
        size, other = self._sizes
        grows, shrinks = a * other == b * size, cmath.isclose(a * size, b * other, rel_tol=1e-6)
        if self._counts_rows:
            return Mixed(why, is_sum=grows)
        return Mixed(why, power=1 if grows else -1 if shrinks else 0)

    def _outputs(self, op: Op) -> list[Value]:
        name, count = op.first.primitive.name, len(op.first.outvars)
        structured = self._structured(name, op)
        outputs = self._simple(name, op) if structured is None else structured
        values = outputs if isinstance(outputs, list) else [outputs] * count
        if self._counts_rows and name in ("cond", "while", "scan"):
            # What is a sum in one branch or iteration may be a constant in another.
            values = [x._replace(is_sum=False) if isinstance(x, Mixed) else x for x in values]
        return [self._checked(op, number, value) for number, value in enumerate(values)]

    def _checked(self, op: Op, number: int, value: Value) -> Value:
        """Returns the class if the output's shape is consistent with it, else `Mixed`."""
        if isinstance(value, Mixed) or value == NEVER:
            return value
        sized = op.sized(number)
        if value is FIXED:
            return FIXED if not sized else op.mixed()
        length = op.first.outvars[number].aval.shape[value.dim] if sized == [value.dim] else 0
        return value if length == self._sizes[0] * value.inner else op.mixed()

    def _simple(self, name: str, op: Op) -> "Value | list[Value]":
        """Applies the rule of a single operation."""
        if name == "select_n" and isinstance(op.ins[0], Rows) and op.ins[0].all_false:
            return op.ins[1]
        if name == "psum":
            op = without_names(op)
            if (name := op.first.primitive.name) == "psum":
                return sum_over_parts(op)
        if (known := sum_or_mean(op)) is not None:
            return known
        for value in op.ins:
            if isinstance(value, Mixed):
                return Mixed(value.why)  # neither a sum nor a number any more
        if not same_params(op.first.params, op.second.params):
            return op.mixed()
        creates = name in ("iota", "broadcast_in_dim", "tile", "random_bits", "random_split")
        if not op.rows and not creates:
            return FIXED
        rule = RULES.get(name)
        outputs = op.mixed() if rule is None else rule(op)
        if name in DRAWS and op.ins[0] is FIXED and isinstance(outputs, Rows):
            outputs = outputs._replace(positional=self._positional_draws)
        if isinstance(outputs, list):
            return [op.with_position(value) for value in outputs]
        return op.with_position(outputs)

    # -- functions, loops and branches -------------------------------------------------------------

    def _structured(self, name: str, op: Op) -> list[Value] | None:
        """Classifies an operation by the jaxprs that it runs; None if it runs none."""
        if name in CALLS:
            if self._gradients and name.startswith("custom_vjp"):
                if op.rows and not self._vjps:
                    return [op.mixed()] * len(op.first.outvars)
                if may_combine_more(op.first):
                    return self._with_gradients(op)
            if self._gradients and name == "custom_jvp_call" and may_combine_more(op.first):
                return self._with_derivatives(op)
            key = next(k for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in op.params)
            return self.results(op.first.params[key], op.second.params[key], op.ins, op.zeros)
        if name == "cond":
            return self._cond(op)
        if name == "while":
            return self._while(op)
        if name == "scan":
            return self._scan(op)
        if name == "custom_linear_solve":
            return self._solve(op)
        return None

    def _with_derivatives(self, op: Op) -> list[Value]:
        """Classifies a function by its values and by derivatives that the user has defined."""
        try:
            first, second = trace_derivatives(op.first), trace_derivatives(op.second)
        except Exception:  # of any class, as the user's rule raises them
            return [op.mixed()] * len(op.first.outvars)
        operands = zip(op.first.invars, op.ins, strict=True)
        given = {x: value for x, value in operands if not hasattr(x, "val")}
        tangents = [value for x, value in given.items() if is_inexact(x.aval)]
        # The derivatives themselves are not differentiated: a rule may call its own function.
        plain = Classifier(self._sizes, self._positional_draws, False)
        found = plain.results(first, second, [*given.values(), *tangents])
        results = op.first.outvars
        values, derivatives = found[: len(results)], iter(found[len(results) :])
        return [
            _join(op, [value, next(derivatives)]) if is_inexact(x.aval) else value
            for x, value in zip(results, values, strict=True)
        ]

    def _with_gradients(self, op: Op) -> list[Value]:
        """Classifies a function whose backward pass its user has defined, by both passes.

        The gradient of an array that does not depend on the batch is a sum over the rows. So is the
        cotangent of such a result, and the backward pass must be linear in it. The results are
        `Mixed` with the reason if this is not proven.
        """
        count, what = len(op.first.outvars), "the backward pass of a custom_vjp"
        try:
            first, second = trace_gradients(op.first), trace_gradients(op.second)
        except Exception:  # of any class, as the user's rule raises them
            return [op.mixed()] * count
        alone = Classifier(self._sizes, self._positional_draws, False, counts_rows=True)
        values = alone.results(
            op.first.params["call_jaxpr"], op.second.params["call_jaxpr"], op.ins
        )
        if any(isinstance(value, Mixed) for value in (*op.ins, *values)):
            return [value if isinstance(value, Mixed) else op.mixed() for value in values]
        operands = zip(op.first.invars, op.ins, strict=True)
        given = {x: value for x, value in operands if not hasattr(x, "val")}
        not_linear = Mixed(f"{op.mixed().why}, which is not linear", is_sum=True)
        pairs = zip(op.first.outvars, values, strict=True)
        cotangents = [
            Rows(*value[:2]) if isinstance(value, Rows) else not_linear
            for x, value in pairs
            if is_inexact(x.aval)
        ]
        found = alone.results(first, second, [*given.values(), *cotangents])
        changing = [value for x, value in given.items() if is_inexact(x.aval)]
        gradients = zip(changing, found[count:], first.jaxpr.outvars[count:], strict=True)
        for value, gradient, variable in gradients:
            if creates_zeros(first.jaxpr, variable):
                continue
            if isinstance(gradient, Mixed):
                if value is not FIXED or not gradient.is_sum:
                    return [Mixed(f"{what}: {gradient.why}")] * count
            elif not (value is not FIXED and gradient is not FIXED and gradient[:2] == value[:2]):
                return [Mixed(f"{what}: {op.mixed().why}")] * count
        is_positional = any(map(_is_positional, found))
        return [
            x._replace(positional=True) if isinstance(x, Rows) and is_positional else x
            for x in (_join(op, pair) for pair in zip(values, found[:count], strict=True))
        ]

    def _solve(self, op: Op) -> list[Value]:
        lengths = op.params["const_lengths"]
        before = lengths.matvec + lengths.vecmat
        arguments = [*op.ins[before : before + lengths.solve], *op.ins[sum(lengths) :]]
        a, b = (each.params["jaxprs"].solve for each in (op.first, op.second))
        return self.results(a, b, arguments)

    def _cond(self, op: Op) -> list[Value]:
        if op.ins[0] is not FIXED:
            return [op.mixed()] * len(op.first.outvars)
        branches = zip(op.first.params["branches"], op.second.params["branches"], strict=True)
        outputs = [self.results(a, b, op.ins[1:]) for a, b in branches]
        return [_join(op, values) for values in zip(*outputs, strict=True)]

    def _while(self, op: Op) -> list[Value]:
        tests, bodies = op.params["cond_nconsts"], op.params["body_nconsts"]
        for_test, for_body = op.ins[:tests], op.ins[tests : tests + bodies]
        carry = list(op.ins[tests + bodies :])

        def body(carry: Sequence[Value]) -> list[Value]:
            a, b = (each.params["body_jaxpr"] for each in (op.first, op.second))
            return self.results(a, b, [*for_body, *carry])

        carry = _fixed_point(op, carry, lambda carry: (body(carry), []))[0]
        a, b = (each.params["cond_jaxpr"] for each in (op.first, op.second))
        if self.results(a, b, [*for_test, *carry]) != [FIXED]:
            return [op.mixed()] * len(carry)
        return carry

    def _scan(self, op: Op) -> list[Value]:
        count, carried = scan_operands(op.first)
        consts, carry = list(op.ins[:count]), list(op.ins[count : count + carried])
        over_rows = op.params["length"] != op.second.params["length"]
        items = [_scan_slice(op, value, over_rows) for value in op.ins[count + carried :]]
        if over_rows and (
            [*consts, *carry] != [FIXED] * (count + carried)
            or (op.params["reverse"] and carried)
            or op.params["length"] != self._sizes[0]
        ):
            return [op.mixed()] * len(op.first.outvars)

        def body(carry: Sequence[Value]) -> tuple[list[Value], list[Value]]:
            a, b = (each.params["jaxpr"] for each in (op.first, op.second))
            outputs = self.results(a, b, [*consts, *carry, *items])
            return outputs[:carried], outputs[carried:]

        carry, each = _fixed_point(op, carry, body)
        if not over_rows:
            return carry + [_shifted(value, 1) for value in each]
        # The carry after the last row depends on all rows.
        positional = carried > 0 or any(map(_is_positional, op.ins))
        rows: list[Value] = [
            Rows(0, positional=positional) if value is FIXED else op.mixed() for value in each
        ]
        return [op.mixed()] * carried + rows


def _scan_slice(op: Op, value: Value, over_rows: bool) -> Value:
    """Returns the class of the slices of a scanned operand in the body of the scan."""
    if isinstance(value, Mixed):
        return value
    if over_rows:
        return FIXED if value is not FIXED and value[:2] == (0, 1) else op.mixed()
    return _shifted(value, -1)


def _shifted(value: Value, by: int) -> Value:
    if not isinstance(value, Rows):
        return value
    return Rows(value.dim + by, value.inner, positional=_is_positional(value))


def _is_positional(value: Value) -> bool:
    """Returns whether a row's values depend on its position (row indices included)."""
    return isinstance(value, Rows) and (value.positional or any(value.is_row_index))


def _fixed_point(
    op: Op,
    carry: list[Value],
    body: Callable[[Sequence[Value]], tuple[list[Value], list[Value]]],
) -> tuple[list[Value], list[Value]]:
    """Classifies a loop's carry, for all iterations, and the other results of its body."""
    while True:
        after, others = body(carry)
        joined = [_join(op, pair) for pair in zip(carry, after, strict=True)]
        if joined == carry:
            return carry, others
        carry = joined


def _join(op: Op, values: Sequence[Value]) -> Value:
    """Returns the class of an array that may have any of these classes."""
    for value in values:
        if isinstance(value, Mixed):
            return value
    plain = {Rows(v.dim, v.inner) if isinstance(v, Rows) else FIXED for v in values}
    if len(plain) > 1:
        return op.mixed()
    (value,) = plain
    positional = any(map(_is_positional, values))
    return value._replace(positional=positional) if isinstance(value, Rows) else value
