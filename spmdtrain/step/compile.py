"""Compilation of the train step in a background thread, while a run starts."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.config import trace_context

from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import is_in_memory
from spmdtrain.data.loader import abstract_batch
from spmdtrain.data.sampling import Augment, as_marked, batch_at, examples_of
from spmdtrain.data.training_data import TrainingData
from spmdtrain.distributed import process_group
from spmdtrain.kernels.attention import describe_attention
from spmdtrain.kernels.reference import reference_kernels
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.batch_checks import check_program
from spmdtrain.step.dispatch import (
    Dispatch,
    Repeat,
    batch_shardings,
    choose_dispatch,
    may_group,
    update_program,
)
from spmdtrain.step.functions import StepFunctions, describe_preset
from spmdtrain.step.layer_loop import describe_layers
from spmdtrain.xla.collectives import Collective, describe_found, find_collectives
from spmdtrain.xla.compiler import compile_step

PyTree = Any


@dataclass(frozen=True)
class Program:
    """A compiled train step for one or several steps.

    Without `jit`, `lowered`, `jaxpr` and `retrace` are None.

    Attributes:
      call: The function (state, batch) -> (state, output).
      summary: The compile time and the collectives of the program, for the log.
      lowered: The program before XLA compiled it.
      jaxpr: The operations of the program, for `model_flops`.
      retrace: Traces the program again and returns its jaxpr.
      steps: The number of steps whose operations `jaxpr` has.
      collectives: The collectives of the compiled program, or the reason why they are not known.
        Only process 0 has them.
    """

    call: Callable[..., Any]
    summary: str
    lowered: jax.stages.Lowered | None
    jaxpr: Any = None
    retrace: Callable[[], Any] | None = None
    steps: int = 1
    collectives: list[Collective] | str = "the step is not compiled"


class Programs:
    """The compiled train steps of one trainer, by their number of steps."""

    def __init__(self, steps: StepFunctions, placement: Placement, config: RunConfig) -> None:
        self._steps, self._placement, self._config = steps, placement, config
        # One thread, because the programs share the result of `StepFunctions.choose_reduction`.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._programs: dict[int, tuple[PyTree, Future[Program]]] = {}
        self.dispatch = Dispatch()
        """The choice of `choose_dispatch`."""
        self._choices: dict[tuple[int | None, str], Dispatch] = {}

    def choose_dispatch(
        self,
        dataset: TrainingData,
        augment: Augment | None,
        config: RunConfig,
        *,
        is_watched: bool,
    ) -> Dispatch:
        """Chooses how the steps of a run are dispatched, and sets `dispatch`.

        By default small steps are dispatched together, if nothing waits for each of them: no
        callback, and no reading of examples, which are arrays in memory. `is_watched` tells whether
        callbacks are called after steps or for log lines.
        """
        self.wait()  # a compilation reads the last choice
        self.dispatch = Dispatch()
        given, steps, placement = config.steps_per_dispatch, self._steps, self._placement
        if given == 1:
            return self.dispatch
        if given is None:
            waits = is_watched or augment is not None or not is_in_memory(dataset)
            if waits or not may_group(config, placement, steps.abstract_state):
                return self.dispatch
        batch = self._abstract_batch(dataset, 1, augment, config)
        rows = as_marked(jax.eval_shape(examples_of, batch)).rows
        if (key := (given, str(rows))) not in self._choices:
            try:
                with reference_kernels():  # operations of kernels cannot be read
                    forward = steps.checks.forward_program(rows)
            except Exception:  # of the user's code: the compilation raises it, too
                return self.dispatch
            update = self._update_program() if given is None else None  # tracing takes time
            self._choices[key] = choose_dispatch(
                given, placement, steps.abstract_state, rows, forward, update
            )
        self.dispatch = self._choices[key]
        return self.dispatch

    def _update_program(self) -> Any | None:
        steps = self._steps
        trained, _ = steps.update.partition(steps.abstract_state.params)
        return update_program(steps.update.optimizer, trained, steps.abstract_state.opt_state)

    def begin(self, steps: int, batch: PyTree) -> None:
        """Starts to compile in the background.

        Nothing is started if the worker thread would compile another program: many JAX options
        (`jax.default_device`, `jax.default_matmul_precision`) belong to a thread.

        Args:
          steps: Number of steps of a call.
          batch: Arrays or abstract arrays of the shapes and shardings of the batches of a call.
        """
        if self._worker.submit(self._context).result() == self._context():
            shapes = jax.tree.map(_shape, batch)
            self._programs[steps] = shapes, self._worker.submit(self._make, steps, shapes)

    def begin_for(
        self, dataset: TrainingData, steps: int, augment: Augment | None, config: RunConfig
    ) -> None:
        """Starts to compile for the batches of a dataset; arguments as for `abstract_batch`."""
        self.begin(steps, self._abstract_batch(dataset, steps, augment, config))

    def _abstract_batch(
        self, dataset: TrainingData, steps: int, augment: Augment | None, config: RunConfig
    ) -> PyTree:
        return abstract_batch(
            dataset,
            config.resolved_batch_size,
            self._placement,
            augment=augment,
            steps=steps,
            by_index=config.data_on_device,
            step_may_place=config.jit,
            counted=self.dispatch.is_counted,
            padded_to=config.padded_batch_size(self._placement.batch_shards),
        )

    def get(self, steps: int, batch: PyTree) -> Program:
        """Returns the compiled program; arguments as of `begin`.

        It raises the errors of the compilation, and the next call compiles again.
        """
        shapes = jax.tree.map(_shape, batch)
        if steps not in self._programs or self._programs[steps][0] != shapes:
            self.wait()
            compiled: Future[Program] = Future()
            compiled.set_result(self._make(steps, shapes))
            self._programs[steps] = shapes, compiled
        _, program = self._programs[steps]
        try:
            return program.result()
        except Exception:
            del self._programs[steps]
            raise

    def wait(self) -> None:
        """Waits until no compilation is in progress."""
        for _, program in self._programs.values():
            program.exception()

    def _context(self) -> object:
        """Returns this thread's JAX options that programs depend on."""
        with use_placement(self._placement):
            return trace_context()

    def _make(self, steps: int, batch: PyTree) -> Program:
        started = time.perf_counter()
        with use_placement(self._placement):  # the placement belongs to a thread
            repeat, first = self.dispatch.repeat_of(steps), batch
            if repeat is not Repeat.NONE:
                first = jax.eval_shape(lambda batches: batch_at(batches, 0), batch)
            choice = self._steps.choose_reduction(first)
            if repeat is not Repeat.NONE:
                choice += self.dispatch.note
            by_index = self._config.data_on_device
            call = self._steps.train_program(repeat, by_index=by_index)
            if not self._config.jit:
                return Program(call, "steps are not compiled", None)
            # With the shardings of the real arguments, so that the jitted function finds the
            # program in its cache. Its calls are dispatched faster than those of `compiled`.
            traced = call.trace(self._steps.placed_state, batch)
            check_traced(traced, self._steps, self._placement, batch, repeat, by_index=by_index)
            lowered = traced.lower()
            compiled, summary = compile_step(lowered, started)
        found: list[Collective] | str = []
        if process_group.is_chief():  # the only process that logs it
            mesh = self._placement.mesh
            found = find_collectives(compiled.as_text() or "", mesh)
            summary += f": {describe_found(found, mesh)}{choice}"
            summary += describe_choices(traced.jaxpr.jaxpr, self._placement)
            preset = describe_preset(self._config, self._placement, self._steps.compiler_options)
            summary += f"; {preset}" if preset else ""

        def retrace() -> Any:
            with use_placement(self._placement):
                return call.trace(self._steps.placed_state, batch).jaxpr

        # The operations of a loop of unknown length are counted once.
        counted = 1 if repeat is Repeat.COUNTED else steps
        return Program(call, summary, lowered, traced.jaxpr, retrace, counted, found)


def check_traced(
    traced: jax.stages.Traced,
    steps: StepFunctions,
    placement: Placement,
    batch: PyTree,
    repeat: Repeat = Repeat.NONE,
    *,
    by_index: bool,
) -> None:
    """Checks the traced program of a train step (see `check_program`).

    `batch` has shapes and dtypes of the batches of a dispatch. With `by_index`, it has the indices
    of examples on the devices.
    """
    places = batch_shardings(placement, repeat, by_index=by_index)
    placed = steps.placed_state, jax.tree.map(_with_sharding, places, batch)
    check_program(traced.jaxpr.jaxpr, placed, placement)


def _with_sharding(sharding: Any, batch: PyTree) -> PyTree:
    """Returns abstract arrays with a sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array, with its sharding if it is on devices."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=getattr(x, "sharding", None))


def describe_choices(jaxpr: Any, placement: Placement) -> str:
    """Returns the choices in an open jaxpr that depend on devices or on sizes, each after "; "."""
    attention = describe_attention(jaxpr, placement.devices[0].platform)
    found = (attention, describe_layers(jaxpr))
    return "".join(f"; {each}" for each in found if each)
