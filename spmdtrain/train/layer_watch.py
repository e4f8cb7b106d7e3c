"""The watch of layers: statistics of their outputs and gradients at some steps."""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from spmdtrain.data.sampling import IndexedBatch, examples_of
from spmdtrain.distributed.first_call import Together
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.errors import UserError
from spmdtrain.record.lines import (
    WATCH_EDGES,
    WATCH_EXPONENTS,
    WATCH_FILE,
    LinesFile,
    Statistics,
    WatchedStep,
    finite_or_null,
    watch_line,
)
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.batch_checks import check_partitioned
from spmdtrain.step.dispatch import Repeat, batch_shardings
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.gradients import ByXla, Inputs
from spmdtrain.step.layer_loop import LAYERS, is_layer_loop
from spmdtrain.step.optimizer import matches_any
from spmdtrain.step.state import TrainState
from spmdtrain.trackers.base import Histogram
from spmdtrain.train.session import RunSession
from spmdtrain.tree import named_leaves, path_name
from spmdtrain.xla.jaxpr import (
    CALLS,
    equations,
    evaluate,
    inner_jaxprs,
    inner_programs,
    is_inexact,
    scan_operands,
)

PyTree = Any

# -- The statistics of an array --------------------------------------------------------------------
#
# They are computed in the compiled program, of global arrays, and so are the same on any devices
# but for rounding. Those of parts of an array can be joined: also the histogram, because its edges
# do not depend on the values.

_FIELDS = ("size", "finite", "zeros", "scale", "mean", "squares", "low", "high")


def measure_array(x: jax.Array) -> jax.Array:
    """Returns what the statistics of an array are made of; `summarize` reads it.

    Args:
      x: Any shape, of floating-point or complex numbers. Of complex ones, magnitudes are measured.

    Returns:
      f32 (n,): `_FIELDS`, and the number of finite values in each bin. `mean`, and the sum of
      squared differences from it, are those of values divided by `scale`, which is near the
      largest magnitude, so that no square overflows.
    """
    x = jnp.abs(x) if jnp.iscomplexobj(x) else x
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    finite = jnp.isfinite(x)
    safe = jnp.where(finite, x, 0)
    largest = jnp.abs(safe).max(initial=0)
    exponent = jnp.frexp(largest)[1] - 1  # of a power of two, which rounds nothing
    scale = jnp.where(largest > 0, jnp.ldexp(jnp.ones_like(largest), exponent), 1)
    count = _count(finite)
    mean = (safe / scale).sum() / jnp.maximum(count, 1)
    squares = jnp.square(jnp.where(finite, safe / scale - mean, 0)).sum()
    low = jnp.where(finite, x, jnp.inf).min(initial=jnp.inf)
    high = jnp.where(finite, x, -jnp.inf).max(initial=-jnp.inf)
    values = (x.size, count, _count(x == 0), scale, mean, squares, low, high)
    found = jnp.stack([jnp.asarray(v, jnp.float32) for v in values])
    return jnp.concatenate([found, _bins(x, finite)])


def _bins(x: jax.Array, finite: jax.Array) -> jax.Array:
    """Returns the number of finite values in each bin, f32 (bins,)."""
    # The bins of [2**-40, 2**-39) and [-2**-39, -2**-40) are next to the middle one.
    mantissa, exponent = jnp.frexp(jnp.where(finite, x, 0))
    places = exponent - WATCH_EXPONENTS.start - (mantissa == -0.5)
    places = jnp.where(x == 0, 0, jnp.clip(places, 0, len(WATCH_EXPONENTS)))
    places = len(WATCH_EXPONENTS) + jnp.where(x < 0, -places, places)
    places = jnp.where(finite, places, len(WATCH_EDGES))  # beyond the last one, which drops it

    def count(places: jax.Array) -> jax.Array:
        return jnp.zeros(len(WATCH_EDGES) - 1, jnp.int32).at[places].add(1, mode="drop")

    # Row by row, so that rows which are split over devices stay there, and no sum overflows.
    rows = jax.vmap(count)(places) if x.ndim else count(places)[None]
    return rows.astype(jnp.float32).sum(0)


def _count(mask: jax.Array) -> jax.Array:
    """Returns the number of true elements as f32: exact up to 2**24, and without an overflow."""
    rows = mask.sum(-1, dtype=jnp.int32) if mask.ndim else mask
    return rows.astype(jnp.float32).sum()


def summarize(parts: np.ndarray) -> Statistics:
    """Returns the statistics of an array.

    Args:
      parts: (parts, n), the results of `measure_array` for its parts.
    """
    rows = parts.astype(np.float64)
    size, finite, zeros, scale, mean, squares, low, high = rows[:, : len(_FIELDS)].T
    count = finite.sum()
    means = mean * scale
    average = (finite * means).sum() / max(count, 1)
    spread = (squares * scale**2 + finite * (means - average) ** 2).sum()
    values = {
        "norm": math.sqrt(spread + count * average**2) if count else math.nan,
        "mean": average if count else math.nan,
        "std": math.sqrt(spread / count) if count else math.nan,
        "min": low.min(),
        "max": high.max(),
        "zeros": zeros.sum() / max(size.sum(), 1),
        "nonfinite": 1 - count / max(size.sum(), 1),
    }
    counts = rows[:, len(_FIELDS) :].sum(0)
    (full,) = np.nonzero(counts)
    first, end = (full[0], full[-1] + 1) if len(full) else (0, 0)
    known = finite_or_null({name: float(value) for name, value in values.items()})
    found = {
        "size": int(size.sum()),
        **known,
        "edges": list(WATCH_EDGES[first : end + 1]) if end else [],
        "counts": counts[first:end].astype(int).tolist(),
    }
    return cast(Statistics, found)


# -- The named values of a program -----------------------------------------------------------------
#
# The outputs of layers are named in the jaxpr (`jax.ad_checkpoint.checkpoint_name`), as are values
# that the user names. A value in a loop or a branch cannot be taken out of it while it is traced,
# so the program is evaluated again with the values as further results.

_NAME = "name"  # the primitive of `checkpoint_name`


class NamedValue(NamedTuple):
    """A named value; each of its arrays has a leading dim for each loop around it.

    Attributes:
      array: The value.
      exists: Whether the program has computed it, bool; false in a branch that is not taken.
    """

    array: jax.Array
    exists: jax.Array

    @property
    def measured(self) -> "NamedValue":
        """The results of `measure_array` in place of the array, for each iteration of the loops."""
        mesh = jax.typeof(self.array).sharding.mesh
        function = measure_array
        if mesh.explicit_axes:  # only the model's operations say how their results are split
            function = jax.sharding.auto_axes(function, out_sharding=PartitionSpec())
        for _ in range(self.exists.ndim):
            function = jax.vmap(function)
        with jax.sharding.use_abstract_mesh(mesh):
            return NamedValue(function(self.array), self.exists)


Values = dict[str, list[NamedValue]]
"""The values of each name in the order of their computation."""


def name_values(path: str, outputs: PyTree) -> PyTree:
    """Names the arrays among the outputs of a layer: by its path if there is only one."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(outputs)
    structure: Any = treedef
    arrays = [x for _, x in leaves if isinstance(x, jax.Array) and is_inexact(x)]

    def named(keys: tuple[Any, ...], x: Any) -> Any:
        if not isinstance(x, jax.Array) or not is_inexact(x):
            return x
        return checkpoint_name(x, path if len(arrays) == 1 else f"{path}/{path_name(keys)}")

    return structure.unflatten([named(keys, x) for keys, x in leaves])


def value_names(jaxpr: Any) -> Iterator[str]:
    """Yields the names of the values in an open jaxpr."""
    for equation in equations(jaxpr):
        if equation.primitive.name == _NAME:
            yield equation.params["name"]
        elif equation.primitive.name == "scan" and is_layer_loop(equation):
            yield LAYERS


@dataclasses.dataclass
class ValueCollector:
    """Evaluates a program, and returns its named values, too.

    Attributes:
      is_wanted: Returns whether to return the values of a name.
      missed: Names of values that are in a loop of unknown length or on single devices, and are
        not returned.
    """

    is_wanted: Callable[[str], bool]
    missed: set[str] = dataclasses.field(default_factory=set)

    def run(
        self, jaxpr: Any, constants: Sequence[Any], args: Sequence[Any]
    ) -> tuple[list[Any], Values]:
        """Evaluates an open jaxpr; returns its results, and its named values."""
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known |= dict(zip(jaxpr.invars, args, strict=True))
        found: list[Values] = []

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else known[atom]

        for equation in jaxpr.eqns:
            results, values = self._evaluate(jaxpr, equation, read)
            found.append(values)
            known |= dict(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars], _joined(found)

    def _evaluate(
        self, jaxpr: Any, equation: Any, read: Callable[[Any], Any]
    ) -> tuple[list[Any], Values]:
        kind = equation.primitive.name
        inner = {name for each in inner_jaxprs(equation) for name in value_names(each)}
        wanted = set(filter(self.is_wanted, inner))
        is_loop = kind == "scan" and is_layer_loop(equation)
        is_loop = is_loop and LAYERS not in inner and self.is_wanted(LAYERS)
        operands = [read(x) for x in equation.invars]
        if kind == _NAME and self.is_wanted(name := equation.params["name"]):
            return operands, {name: [NamedValue(operands[0], jnp.array(True))]}
        if kind in CALLS and wanted:
            ((called, constants),) = inner_programs(equation)
            return self.run(called, constants, operands)
        if kind == "scan" and (wanted or is_loop):
            return self._scan(equation, operands, is_loop=is_loop)
        if kind == "cond" and wanted:
            return self._cond(equation, operands)
        self.missed |= wanted
        return evaluate(jaxpr, equation, read), {}

    def _scan(
        self, equation: Any, operands: Sequence[Any], *, is_loop: bool
    ) -> tuple[list[Any], Values]:
        params = equation.params
        ((body, constants),) = inner_programs(equation)
        fixed, carried = scan_operands(equation)
        given, rest = operands[:fixed], operands[fixed:]

        def step(carry: Any, row: Any) -> Any:
            results, values = self.run(body, constants, [*given, *carry, *row])
            after = results[:carried]
            if is_loop:  # its carry is the output of a layer
                output = next(x for x in after if is_inexact(x))
                values[LAYERS] = [NamedValue(output, jnp.array(True))]
            return after, (results[carried:], values)

        carry, (stacked, values) = jax.lax.scan(
            step,
            rest[:carried],
            rest[carried:],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked], values

    def _cond(self, equation: Any, operands: Sequence[Any]) -> tuple[list[Any], Values]:
        index, *args = operands

        def run(branch: Any, args: Sequence[Any]) -> tuple[list[Any], Values]:
            return self.run(branch.jaxpr, branch.consts, args)

        branches = equation.params["branches"]
        shapes = [jax.eval_shape(partial(run, each), args)[1] for each in branches]

        def chosen(number: int, args: Sequence[Any]) -> Any:
            # Zeros, also in `exists`, for the values of the other branches.
            found = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of) for of in shapes]
            results, found[number] = run(branches[number], args)
            return results, found

        functions = [partial(chosen, number) for number in range(len(branches))]
        results, found = jax.lax.switch(index, functions, args)
        return results, _joined(found)


def _joined(found: Iterable[Values]) -> Values:
    joined: Values = {}
    for values in found:
        for name, each in values.items():
            joined.setdefault(name, []).extend(each)
    return joined


def _measured(values: Values) -> Values:
    return {name: [value.measured for value in each] for name, each in values.items()}


def natural_order(name: str) -> list[tuple[int, str]]:
    """Returns the key that sorts `blocks/2` before `blocks/10`."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(x), "") if x.isdecimal() else (-1, x) for x in parts]


def summaries(measured: Values, names: Iterable[str], over_parts: int = 0) -> dict[str, Statistics]:
    """Returns the statistics of values by name, and by `NAME[3]` for an iteration of a loop.

    Args:
      measured: The measures of the values.
      names: All names, in order.
      over_parts: The number of outermost loops whose iterations have parts of one value.
    """
    rows: dict[str, list[np.ndarray]] = {}
    for name in names:
        for value in measured.get(name, ()):
            for index in zip(*np.nonzero(np.atleast_1d(value.exists)), strict=True):
                place = index[: value.exists.ndim]
                indexed = name + "".join(f"[{n}]" for n in place[over_parts:])
                rows.setdefault(indexed, []).append(np.asarray(value.array[place]))
    return {name: summarize(np.stack(parts)) for name, parts in rows.items()}


# -- The inspection of a step: its layers' outputs, and its gradients ------------------------------

_NEAREST = 3  # names in an error
_SHOWN = 4  # names in a line


class LayerWatch:
    """Writes statistics of the layers and gradients that `watch` matches, before some steps.

    Programs of their own compute them from the state before the step and the step's batch and
    random key. So the step and its numbers are the same with and without a watch. XLA reduces the
    gradients, whatever reduces those of the step.

    Args:
      first: The step from which this start continues.
    """

    def __init__(
        self, functions: RunFunctions, placement: Placement, run: RunSession, first: int
    ) -> None:
        self._functions, self._placement, self._run = functions, placement, run
        self._config = run.config
        self._named = functions.forward.with_named_layers(name_values)
        self._values = ValueCollector(self._is_watched)
        self._order: list[str] = []  # of the layers: in which their outputs are computed
        self._programs: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._has_run = False
        self._lines: LinesFile | None = None

    def is_due(self, steps: Sequence[int]) -> bool:
        """Returns whether a step is to be watched; before the first one the names are checked."""
        return self._programs is None or any(map(self._config.watches_at, steps))

    def inspect(self, steps: Sequence[int], state: TrainState, batch: PyTree) -> None:
        """Computes and writes the statistics of the first of some steps.

        Raises:
          UserError: If a pattern matches nothing.
        """
        if self._programs is None:
            with use_placement(self._placement):
                self._check(*jax.eval_shape(lambda *given: given, state, batch))
            by_index = isinstance(batch, IndexedBatch)
            functions = (self._outputs, self._gradients)
            first, second = (self._compile(function, by_index=by_index) for function in functions)
            self._programs = first, second
        if not any(map(self._config.watches_at, steps)):
            return
        step, timer = steps[0], self._run.logger.timer
        if not self._has_run:  # they are compiled, which is no part of the time of the steps
            timer.pause()
        with phase(Phase.STEP if self._has_run else Phase.COMPILE):
            jax.block_until_ready(state)  # devices may still run the last step
            # One after the other: XLA's CPU client does not order collectives of two programs.
            outputs, gradients = (
                jax.tree.map(np.asarray, program(state, batch)) for program in self._programs
            )
        if not self._has_run:
            timer.restart(step - 1)
            self._has_run = True
        self._write(step, outputs, gradients)

    def _is_watched(self, name: str) -> bool:
        return matches_any(self._config.watch, name)

    # -- the programs --------------------------------------------------------------------------

    def _compile(
        self, function: Callable[[TrainState, PyTree], PyTree], *, by_index: bool
    ) -> Callable[[TrainState, PyTree], PyTree]:
        """Returns the program of the measures of what `function` returns."""
        placement, options = self._placement, self._functions.compiler_options or None
        places = (
            self._functions.shardings,
            batch_shardings(placement, Repeat.NONE, by_index=by_index),
        )
        is_split = placement.mesh is not None and placement.mesh.size > 1
        check = partial(check_partitioned, placement=placement) if is_split else None
        whole = placement.replicated
        if not is_split or placement.devices[0].platform != "cpu":
            both = jax.jit(
                lambda *given: _measured(function(*given)),
                in_shardings=places,
                out_shardings=whole,
                compiler_options=options,
            )
            return Together(both, constant=1, check=check)
        # Two programs: XLA's CPU client does not order the collectives of the model's loops with
        # those of the statistics of values outside (see `health.may_branch`).
        values = Together(
            jax.jit(function, in_shardings=places, compiler_options=options), 1, check
        )
        measures = Together(jax.jit(_measured, out_shardings=whole, compiler_options=options))

        def run(state: TrainState, batch: PyTree) -> PyTree:
            found = jax.block_until_ready(values(state, batch))
            return measures(found)

        return run

    def _inputs(self, state: TrainState, batch: PyTree) -> Inputs:
        functions = self._functions
        variables = functions.layout.to_device(state.variables, lambda of: of.variables)
        trained, frozen = functions.update.partition(variables.params)
        return Inputs(trained, frozen, variables.model_state, examples_of(batch), state.step_key)

    def _loss(self, inputs: Inputs) -> jax.Array:
        """Returns the loss of a batch; the outputs of layers are named."""
        loss = self._functions.loss
        if self._named is not None:
            loss = dataclasses.replace(loss, objective=self._named.training_sums)
        return loss.mean(inputs)

    def _outputs(self, state: TrainState, batch: PyTree) -> Values:
        """Returns the watched values of the forward pass. Traced under `jit`."""
        inputs = self._inputs(state, batch)
        closed = jax.make_jaxpr(self._loss)(inputs)
        return self._values.run(closed.jaxpr, closed.consts, jax.tree.leaves(inputs))[1]

    def _gradients(self, state: TrainState, batch: PyTree) -> Values:
        """Returns the watched gradients. Traced under `jit`."""
        inputs = self._inputs(state, batch)
        if not any(map(self._is_watched, named_leaves(inputs.params))):
            return {}
        computed = ByXla(self._placement)(self._functions.loss, inputs)
        gradients = named_leaves(self._functions.layout.gradients(computed.gradients))
        return {
            name: [NamedValue(x, jnp.array(True))]
            for name, x in gradients.items()
            if self._is_watched(name) and is_inexact(x)
        }

    def _check(self, state: TrainState, batch: PyTree) -> None:
        """Raises `UserError` if a pattern matches nothing; otherwise prints what is watched.

        Shapes suffice.
        """
        inputs = jax.eval_shape(self._inputs, state, batch)
        self._order = list(dict.fromkeys(value_names(jax.make_jaxpr(self._loss)(inputs).jaxpr)))
        names = [*self._order, *named_leaves(inputs.params)]
        for pattern in self._config.watch:
            if not any(re.search(pattern, name) for name in names):
                plain = re.sub(r"[\\^$*+?.()\[\]{}|]", "", pattern)
                near = difflib.get_close_matches(plain, names, _NEAREST, 0.0)
                raise UserError(
                    f"watch: {pattern!r} matches no layer and no trained parameter of the model. "
                    f"The nearest are {', '.join(near)}"
                )
        watched = {
            "outputs": list(jax.eval_shape(self._outputs, state, batch)),
            "gradients": [*filter(self._is_watched, named_leaves(inputs.params))],
        }
        texts = []
        for what, given in watched.items():
            found = sorted(given, key=natural_order)
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            texts += [f"{what} of {', '.join(found[:_SHOWN])}{more}"] if found else []
        line = self._run.logger.terminal.line
        line(f"watched every {self._config.watch_every} steps: {'; '.join(texts) or 'nothing'}")
        if self._named is None and not self._order:
            line(
                "watch: the model is a function, so it has no layers with names: give values names "
                "by jax.ad_checkpoint.checkpoint_name(value, 'NAME')"
            )
        if self._values.missed:
            line(
                "watch: not measured, because they are in a loop of unknown length or on single "
                f"devices: {', '.join(sorted(self._values.missed))}"
            )

    # -- the record ----------------------------------------------------------------------------

    def _write(self, step: int, outputs: Values, gradients: Values) -> None:
        """Writes a line of statistics, and passes them to the trackers."""
        # With microbatches, the outermost loop is the one over them: parts of one batch.
        over_parts = int(self._config.microbatches > 1)
        found: WatchedStep = {
            "step": step,
            "outputs": summaries(outputs, self._order, over_parts),
            "gradients": summaries(gradients, sorted(gradients, key=natural_order)),
        }
        values: dict[str, float] = {}
        histograms: dict[str, Histogram] = {}
        for kind, by_name in (("outputs", found["outputs"]), ("gradients", found["gradients"])):
            for name, summary in by_name.items():
                tag = f"watch/{kind}/{name}"
                values |= {f"{tag}/{n}": x for n, x in summary.items() if isinstance(x, float)}
                if summary["counts"]:
                    histograms[tag] = Histogram(edges=summary["edges"], counts=summary["counts"])
        logger = self._run.logger
        logger.trackers.scalars(step, values, histograms)
        if logger.files is not None:
            if self._lines is None:
                self._lines = logger.files.lines_file(WATCH_FILE)
            self._lines.append(watch_line(found))
