"""The compiled train step of a `Loop`."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from spmdtrain.distributed import process_group
from spmdtrain.distributed.first_call import await_compiled
from spmdtrain.distributed.progress import Phase, end_interval, phase
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError, locate_errors
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import Placement
from spmdtrain.sharding.rules import check_placed
from spmdtrain.step.batch_checks import check_program
from spmdtrain.step.compile import describe_choices
from spmdtrain.step.health import finite_flags, step_norms
from spmdtrain.step.hyperparameters import learning_rate
from spmdtrain.step.state import TrainState
from spmdtrain.step.train_step import StepOutput
from spmdtrain.train.input_wait import is_pending
from spmdtrain.train.loop_checks import (
    Step,
    as_scalars,
    check_not_donated,
    check_state,
    check_trains,
    state_and_metrics,
)
from spmdtrain.train.program_report import StepProgram
from spmdtrain.train.run_logger import RunLogger
from spmdtrain.tree import with_own_containers
from spmdtrain.xla.collectives import describe_found, find_collectives
from spmdtrain.xla.compiler import compile_step

PyTree = Any


def make_program(
    function: Step,
    abstract: TrainState,
    layout: Layout,
    placement: Placement,
    compiler_options: Mapping[str, Any],
    log_every: int,
) -> Any:
    """Returns the jitted program of a user's step: (state, batch) -> (state, output).

    Args:
      abstract: Shapes and dtypes of the state.
      layout: The shardings of the state, before and after the step.
      placement: The shardings of the batch and of the output.
      log_every: The cadence of the log, for `step_norms`.
    """
    function = locate_errors(function, "the step function", takes="(state, batch, key)")

    def program(state: TrainState, batch: PyTree) -> tuple[TrainState, StepOutput]:
        state = layout.to_device(state, lambda shardings: shardings)  # from host memory
        own = with_own_containers(state)
        after, metrics = state_and_metrics(function(own, batch, state.step_key))
        check_state(after, abstract)
        if after.step is not state.step or after.key is not state.key:
            raise UserError(
                "the step function changed state.step or state.key, which only the loop updates"
            )
        after = dataclasses.replace(after, step=state.step + 1, key=state.key)
        means = as_scalars(metrics)
        finite = finite_flags(jnp.stack(list(means.values())), state, after, layout.shardings)
        norms = step_norms(after.params, layout, after.step, log_every)
        rate = learning_rate(after.opt_state)
        return after, StepOutput(means, finite, after.step, rate=rate, norms=norms)

    return jax.jit(
        program,
        in_shardings=(layout.shardings, placement.batch),
        out_shardings=(layout.shardings, placement.replicated),
        donate_argnums=0,
        compiler_options=dict(compiler_options) or None,
    )


class LoopOfStep(Protocol):
    """The part of a `Loop` that its step uses."""

    step: int
    first_step: int
    terminal: Terminal
    placement: Placement

    @property
    def logger(self) -> RunLogger: ...


class LoopStep:
    """A step of a loop, compiled once for each shape of batch.

    The shardings of the state are checked after the first step.
    """

    def __init__(self, loop: LoopOfStep, program: Any, shardings: TrainState) -> None:
        self._loop, self._program, self._shardings = loop, program, shardings
        self._compiled: set[Any] = set()

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepOutput]:
        """Makes a step; the state is donated."""
        loop = self._loop
        check_not_donated(state, loop.step)
        leaves, treedef = jax.tree.flatten(jax.tree.map(jax.typeof, batch))
        sizes = [leaf.shape[0] for leaf in leaves if leaf.shape]
        loop.logger.batch_size = sizes[0] if sizes else None
        key = (treedef, *leaves)
        if key not in self._compiled:
            self._compile(state, batch)
            self._compiled.add(key)
        end_interval(overlapped=is_pending(state))  # of the user's loop
        with phase(Phase.STEP):
            after, output = self._program(state, batch)  # compiled by `_compile`
        if loop.step == loop.first_step:
            check_placed(after, self._shardings, "after the first step")
        return after, output

    def _compile(self, state: TrainState, batch: PyTree) -> None:
        began, loop = time.perf_counter(), self._loop
        with loop.terminal.waiting("compiling the step"), phase(Phase.COMPILE):
            traced = self._program.trace(state, batch)
            check_program(traced.jaxpr.jaxpr, (state, batch), loop.placement)
            check_trains(traced.jaxpr.jaxpr, (state, batch), traced.out_info)
            lowered = traced.lower()
            compiled, text = compile_step(lowered, began)
            await_compiled(lowered)
        if process_group.is_chief():
            mesh = loop.placement.mesh
            found = find_collectives(compiled.as_text(), mesh)
            text += f": {describe_found(found, mesh)}"
            text += describe_choices(traced.jaxpr.jaxpr, loop.placement)
            loop.logger.log_header(loop.placement, state.params, text)
            shapes = jax.tree.map(_abstract, (state, batch))
            program = StepProgram(
                traced.jaxpr, 1, found, lambda: self._program.trace(*shapes).jaxpr
            )
            params = jax.tree.map(jax.typeof, state.params)
            loop.logger.performance.describe(
                program, params, self._shardings.params, loop.placement
            )
        loop.logger.restart_timer(loop.step)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of an array or a number."""
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=getattr(x, "sharding", None))
