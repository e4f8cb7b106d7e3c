"""The steps of a dispatch: how many run without the host, and in which kind of program."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.dispatch_batches import CountedBatches, IndexedBatch, batch_at, stacked_steps
from spmdtrain.errors import UserError
from spmdtrain.sharding.placement import Placement
from spmdtrain.step.flops import count_flops
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves
from spmdtrain.xla.jaxpr import equations

PyTree = Any
_MANY = 10  # steps of a dispatch if each is small
_STEP_FLOPS = 3  # of a step, relative to those of the objective's values
_SMALL_FLOPS = 10**9  # of a step; a CPU takes some milliseconds
_SMALL_STATE = 2**25  # bytes
_SMALL_BATCH = 2**22  # bytes


class Repeat(enum.Enum):
    """The kind of program of a dispatch."""

    NONE = "one step"
    SCAN = "a loop of a fixed number of steps"
    UNROLLED = "a fixed number of steps as straight-line code"
    COUNTED = "a loop whose number of steps is an argument"


@dataclass(frozen=True)
class Dispatch:
    """The most steps of a dispatch and the kind of its program.

    A counted loop runs any number of steps up to `steps` by the same compiled code, so the numbers
    do not depend on where dispatches end. The others have a second program for one step.
    """

    steps: int = 1
    repeat: Repeat = Repeat.NONE

    @property
    def is_counted(self) -> bool:
        """Whether one program runs any number of steps."""
        return self.repeat is Repeat.COUNTED

    @property
    def note(self) -> str:
        """What the log says about a dispatch, "" for one step."""
        match self.repeat:
            case Repeat.NONE | Repeat.SCAN:
                return ""
            case Repeat.UNROLLED:
                why = "because convolutions in a loop are slow on CPU"
                return f"; {self.steps} steps unrolled, {why}"
            case Repeat.COUNTED:
                return f"; up to {self.steps} steps per dispatch"

    def program_steps(self, count: int) -> int:
        """Returns the number of steps for which the program of `count` steps is compiled."""
        return self.steps if self.is_counted else count

    def repeat_of(self, program_steps: int) -> Repeat:
        """Returns the kind of the program of a number of steps."""
        return self.repeat if program_steps == self.steps else Repeat.NONE


def may_group(config: RunConfig, placement: Placement, state: TrainState) -> bool:
    """Returns whether steps are dispatched together, if each of them is small.

    Without `steps_per_dispatch` they are on CPUs, if each process has one device. On GPUs a loop of unknown length
    makes the host wait for each of its steps, and one of known length needs a second program, so
    the numbers would depend on the cadence of checkpoints. Virtual devices are for tests, and their
    collectives take longer than the host.

    Args:
      config: The run's options.
      placement: The strategy and its mesh.
      state: The abstract state.
    """
    if config.steps_per_dispatch is not None:
        return config.steps_per_dispatch > 1
    if config.exact is not None or not config.jit or placement.strategy.by_servers:
        return False
    processes = {device.process_index for device in placement.devices}
    has_one_each = len(placement.devices) == len(processes)  # the same in all processes
    return has_one_each and _is_on_cpu(placement) and _bytes(state) <= _SMALL_STATE


def choose_dispatch(
    config: RunConfig, placement: Placement, batch: PyTree, forward: Any
) -> Dispatch:
    """Returns how the steps are dispatched if they may be grouped (`may_group`).

    Convolutions are never in a loop on CPU: XLA computes them with a library outside of loops, and
    inside of them by code that it generates, which takes many times as long.

    Args:
      config: The run's options.
      placement: The strategy and its mesh.
      batch: An abstract batch of one step.
      forward: The jaxpr of the objective's values.
    """
    steps = config.steps_per_dispatch
    if not _is_on_cpu(placement):
        return Dispatch(steps or 1, Repeat.SCAN)
    convolves = any(x.primitive.name == "conv_general_dilated" for x in equations(forward))
    if steps is not None:
        return Dispatch(steps, Repeat.UNROLLED if convolves else Repeat.COUNTED)
    flops = _STEP_FLOPS * count_flops(forward).total
    if convolves or flops > _SMALL_FLOPS or _bytes(batch) > _SMALL_BATCH:
        return Dispatch()
    return Dispatch(_MANY, Repeat.COUNTED)


def repeated(step: Callable[..., Any], repeat: Repeat) -> Callable[[Any, PyTree], Any]:
    """Returns the function of the steps of a dispatch.

    Args:
      step: (state, batch, whether it is the last step) -> (state, output).
      repeat: How the step is repeated.

    Returns:
      (state, stacked batches) -> (state, output), whose arrays have a leading dim of steps.
    """
    return _counted(step) if repeat is Repeat.COUNTED else _fixed(step, repeat)


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
        # Traced once, for the shapes of its output and for the body of the loop.
        @partial(jax.jit, inline=True)
        def step_at(state: Any, batches: CountedBatches, number: jax.Array) -> Any:
            return step(state, batch_at(batches, number), number == batches.count - 1)

        number = jax.ShapeDtypeStruct((), jnp.int32)
        after, shapes = jax.eval_shape(step_at, state, batches, number)
        _check_types(state, after)
        size = stacked_steps(batches)
        outputs = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), shapes)

        def body(number: jax.Array, carried: tuple[Any, Any]) -> tuple[Any, Any]:
            state, outputs = carried
            state, output = step_at(state, batches, number)
            put = partial(jax.lax.dynamic_update_index_in_dim, index=number, axis=0)
            return state, jax.tree.map(put, outputs, output)

        return jax.lax.fori_loop(0, batches.count, body, (state, outputs))

    return train_steps


def _check_types(before: Any, after: Any) -> None:
    """Raises `UserError` if a step changes the names, shapes or dtypes of a state's arrays."""
    old, new = (
        {name: f"{x.dtype}{list(x.shape)}" for name, x in named_leaves(state).items()}
        for state in (before, after)
    )
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            raise UserError(
                f"{name} is {old.get(name, 'absent')} before a step and {new.get(name, 'absent')} "
                "after it, so steps cannot be repeated in a loop: keep its shape and dtype, or set "
                "steps_per_dispatch to 1"
            )


def _is_on_cpu(placement: Placement) -> bool:
    return placement.devices[0].platform == "cpu"


def _bytes(tree: PyTree) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(x.size * x.dtype.itemsize for x in leaves)
