"""The steps of a dispatch: how many run without the host, and in which kind of program."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.sampling import (
    CountedBatches,
    IndexedBatch,
    batch_at,
    stacked_sharding,
    stacked_steps,
)
from spmdtrain.errors import UserError
from spmdtrain.sharding.placement import Placement
from spmdtrain.step.flops import count_flops
from spmdtrain.step.gradients import ANY_ORDER, SumOrder
from spmdtrain.step.state import TrainState, check_same_arrays
from spmdtrain.xla.jaxpr import equations, inner_jaxprs

PyTree = Any
# The steps of a dispatch by default, of the largest small steps and of the smallest ones: the
# smaller the steps, the larger is the host's part of their time.
_OF_LARGEST, _OF_SMALLEST = 10, 50
_GRADIENT_FLOPS = 3  # of values with gradients, relative to those of the values
# Limits of a small step, which a CPU computes in some milliseconds. Signals wait for the end of a
# dispatch, and stacking batches of a few MiB takes longer than the dispatches that it saves.
_SMALL_FLOPS = 10**9
_SMALL_ELEMENTS = 2**23  # of the results of all operations of the objective
_SMALL_STATE = 2**26  # bytes
_SMALL_BATCH = 2**19  # bytes
# Decompositions of matrices, and solutions by them, which `count_flops` does not count.
_DECOMPOSITIONS = frozenset(
    {
        *("cholesky", "lu", "qr", "geqrf", "geqp3", "householder_product", "ormqr"),
        *("eig", "eigh", "svd", "schur", "hessenberg", "tridiagonal"),
        *("triangular_solve", "tridiagonal_solve"),
    }
)


class Repeat(enum.Enum):
    """The kind of program of a dispatch."""

    NONE = "one step"
    SCAN = "a loop of a fixed number of steps"
    UNROLLED = "a fixed number of steps as straight-line code"
    COUNTED = "a loop whose number of steps is an argument"


@dataclass(frozen=True)
class Dispatch:
    """The largest number of steps of a dispatch, and the kind of its program.

    A counted loop runs any number of steps up to `steps` by the same compiled code, so the numbers
    do not depend on where dispatches end. The other kinds have a second program for one step.
    """

    steps: int = 1
    repeat: Repeat = Repeat.NONE

    @property
    def is_counted(self) -> bool:
        """Whether the program takes the number of steps as an argument."""
        return self.repeat is Repeat.COUNTED

    @property
    def note(self) -> str:
        """A note for the log; "" if it needs none."""
        match self.repeat:
            case Repeat.NONE | Repeat.SCAN:
                return ""
            case Repeat.UNROLLED:
                why = "because convolutions in a loop are slow on CPU"
                return f"{self.steps} steps unrolled, {why}"
            case Repeat.COUNTED:
                return f"up to {self.steps} steps per dispatch"

    def program_steps(self, count: int) -> int:
        """Returns the number of steps for which the program of `count` steps is compiled."""
        return self.steps if self.is_counted else count

    def repeat_of(self, program_steps: int) -> Repeat:
        """Returns the kind of the program of a number of steps."""
        return self.repeat if program_steps == self.steps else Repeat.NONE


def may_group(
    config: RunConfig, placement: Placement, state: TrainState, order: SumOrder = ANY_ORDER
) -> bool:
    """Returns whether small steps are grouped if `steps_per_dispatch` is not set.

    They are grouped on CPUs, if each process has one device. On GPUs a loop of unknown length makes
    the host wait for each of its steps, and a loop of known length needs a second program, so the
    numbers would depend on the cadence of checkpoints. Virtual devices are for tests, and their
    collectives take longer than the host. The model must have no state, because a step could change
    its types. Shapes of the state suffice.
    """
    if order.is_fixed or not config.jit or placement.strategy.is_asynchronous:
        return False
    processes = {device.process_index for device in placement.devices}
    has_one_each = len(placement.devices) == len(processes)  # the same in all processes
    is_small = not jax.tree.leaves(state.model_state) and _bytes(state) <= _SMALL_STATE
    return has_one_each and _is_on_cpu(placement) and is_small


def choose_dispatch(
    steps: int | None,
    placement: Placement,
    state: TrainState,
    batch: PyTree,
    forward: Any,
    update: Any | None,
) -> Dispatch:
    """Returns how steps are dispatched.

    Convolutions are never in a loop on CPU: outside of loops XLA calls a library for them, and
    inside it generates code that takes many times as long.

    Args:
      steps: The option `steps_per_dispatch`. If it is None, `may_group` is true.
      state: Shapes suffice.
      batch: The batch of one step; shapes suffice.
      forward: The open jaxpr of the objective's values.
      update: The optimizer's `update_program`; not read if `steps` is given.
    """
    if steps is not None and not _is_on_cpu(placement):
        return Dispatch(steps, Repeat.SCAN)
    convolves = any(x.primitive.name == "conv_general_dilated" for x in equations(forward))
    if steps is not None:
        return Dispatch(steps, Repeat.UNROLLED if convolves else Repeat.COUNTED)
    if convolves or update is None or _has_unknown_time(forward) or _has_unknown_time(update):
        return Dispatch()
    flops = _GRADIENT_FLOPS * count_flops(forward).total + count_flops(update).total
    size = max(  # relative to the largest small step
        _bytes(state) / _SMALL_STATE,
        _bytes(batch) / _SMALL_BATCH,
        _elements(forward) / _SMALL_ELEMENTS,
        flops / _SMALL_FLOPS,
    )
    if size > 1:
        return Dispatch()
    return Dispatch(int(min(_OF_LARGEST / size, _OF_SMALLEST)), Repeat.COUNTED)


def update_program(
    optimizer: optax.GradientTransformation, params: PyTree, state: PyTree
) -> Any | None:
    """Returns the open jaxpr of an optimizer's update; shapes of the arguments suffice.

    The result is None if steps cannot be in a loop, because the update changes the types of the
    state, or if the update needs more than gradients: the other values are not known here.
    """
    trace = jax.make_jaxpr(optimizer.update, return_shape=True)
    try:
        traced, (_, after) = trace(params, state, params)
        _check_types(state, after)
    except Exception:
        return None
    return traced.jaxpr


def repeated(step: Callable[..., Any], repeat: Repeat) -> Callable[[Any, PyTree], Any]:
    """Returns the function of a dispatch: (state, stacked batches) -> (state, output).

    The arrays of its output have a leading dim of steps. `step` is a function (state, batch,
    whether it is the last step) -> (state, output).
    """

    def in_place(state: TrainState, batch: PyTree, is_last: jax.Array) -> tuple[TrainState, Any]:
        after, output = step(state, batch, is_last)
        return _in_memory_of(state, after), output

    return _counted(in_place) if repeat is Repeat.COUNTED else _fixed(in_place, repeat)


def _fixed(step: Callable[..., Any], repeat: Repeat) -> Callable[[Any, PyTree], Any]:
    def train_steps(state: Any, batches: PyTree) -> Any:
        # Of an `IndexedBatch` only the indices have a leading dim of steps.
        is_indexed = isinstance(batches, IndexedBatch)
        each = batches.indices if is_indexed else batches

        def body(state: Any, given: tuple[PyTree, jax.Array]) -> Any:
            batch, is_last = given
            batch = IndexedBatch(batch, batches.arrays) if is_indexed else batch
            return step(state, batch, is_last)

        count = stacked_steps(batches)
        is_last = jnp.arange(count) == count - 1
        return jax.lax.scan(body, state, (each, is_last), unroll=repeat is Repeat.UNROLLED)

    return train_steps


def _counted(step: Callable[..., Any]) -> Callable[[Any, CountedBatches], Any]:
    def train_steps(state: Any, batches: CountedBatches) -> Any:
        def step_at(state: Any, batches: CountedBatches, number: jax.Array) -> Any:
            return step(state, batch_at(batches, number), number == batches.count - 1)

        # Traced once, for the shapes of its output and for the body of the loop. Under `jax.jit`
        # its operations would lose their lines in the source.
        number = jax.ShapeDtypeStruct((), jnp.int32)
        traced, shapes = jax.make_jaxpr(step_at, return_shape=True)(state, batches, number)
        after, each = shapes
        _check_types(state, after)
        size = stacked_steps(batches)
        outputs = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), each)

        def body(number: jax.Array, carried: tuple[Any, Any]) -> tuple[Any, Any]:
            state, outputs = carried
            given = jax.tree.leaves((state, batches, number))
            results = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *given)
            state, output = jax.tree.unflatten(jax.tree.structure(shapes), results)
            put = partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
            return state, jax.tree.map(put, outputs, output)

        return jax.lax.fori_loop(0, batches.count, body, (state, outputs))

    return train_steps


def _check_types(before: Any, after: Any) -> None:
    """Raises `UserError` if a step changes the arrays of a state, or its containers."""
    check_same_arrays(before, after)
    structures: list[Any] = [jax.tree.structure(state) for state in (before, after)]
    if structures[0] != structures[1]:
        raise UserError(
            "the state has other containers after a step than before it, so steps cannot be "
            "repeated in a loop: keep its structure, or set steps_per_dispatch to 1"
        )


def _is_on_cpu(placement: Placement) -> bool:
    return placement.devices[0].platform == "cpu"


def _has_unknown_time(jaxpr: Any) -> bool:
    """Returns whether the time of an open jaxpr does not follow from its counts of operations.

    It does not with loops of unknown length, calls of Python and decompositions of matrices.
    """
    unknown = _DECOMPOSITIONS | {"while"}
    return any(
        x.primitive.name in unknown or "callback" in x.params or x.effects for x in equations(jaxpr)
    )


def _elements(jaxpr: Any) -> int:
    """Returns the number of elements of the results of all operations of an open jaxpr."""
    total = 0
    for equation in jaxpr.eqns:
        inner = sum(_elements(x) for x in inner_jaxprs(equation))
        total += equation.params["length"] * inner if equation.primitive.name == "scan" else inner
        total += sum(x.aval.size for x in equation.outvars)
    return total


def _bytes(tree: PyTree) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(x.size * x.dtype.itemsize for x in leaves)


def batch_shardings(placement: Placement, repeat: Repeat, *, by_index: bool) -> Any:
    """Returns the shardings of a train step's batch, a prefix of its tree."""
    is_single = repeat is Repeat.NONE
    batch: Any = placement.batch if is_single else stacked_sharding(placement.batch)
    if by_index:
        batch = IndexedBatch(batch, placement.replicated)
    return CountedBatches(batch, placement.replicated) if repeat is Repeat.COUNTED else batch


def _in_memory_of(before: TrainState, after: TrainState) -> TrainState:
    """Returns the new state with each array in the memory space of the old one, as in a loop.

    Without a loop, the shardings of the program's results suffice.
    """
    structures: list[Any] = [jax.tree.structure(state) for state in (before, after)]
    if structures[0] != structures[1]:
        return after  # the loop refuses it

    def copied(old: jax.Array, new: jax.Array) -> jax.Array:
        memory = jax.typeof(old).memory_space
        return new if memory == jax.typeof(new).memory_space else jax.device_put(new, memory)

    return jax.tree.map(copied, before, after)
