"""Compilation of train steps, also in a background thread while a run starts."""

import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax._src.config import trace_context

from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import is_in_memory
from spmdtrain.data.loader import abstract_batch
from spmdtrain.data.sampling import Augment, as_marked, batch_at, examples_of
from spmdtrain.data.training_data import TrainingData
from spmdtrain.distributed import process_group
from spmdtrain.kernels.reference import reference_kernels
from spmdtrain.sharding.placement import use_placement
from spmdtrain.step.batch_checks import check_program
from spmdtrain.step.dispatch import (
    Dispatch,
    Repeat,
    batch_shardings,
    choose_dispatch,
    may_group,
    update_program,
)
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.program import StepPlan, plan_step
from spmdtrain.xla.collectives import Collective, describe_found, find_collectives
from spmdtrain.xla.compiler import compile_lowered

# -- The compilation of a train step, of a `Trainer` or a `Loop` -----------------------------------

PyTree = Any


class ProgramMemory(NamedTuple):
    """Bytes of a device while a program runs, as XLA reports them.

    Attributes:
      arguments: The state and the batch.
      temporaries: Arrays that the program makes and frees.
      results: Results that do not reuse the buffer of an argument.
      code: The program itself.
    """

    arguments: int
    temporaries: int
    results: int
    code: int

    @property
    def peak(self) -> int:
        """The most bytes at a time."""
        return sum(self)


@dataclass(frozen=True)
class Program:
    """A compiled train step for one or several steps.

    Without `jit` and with parameter servers, `lowered`, `jaxpr` and `retrace` are None.

    Attributes:
      call: The function (state, batch) -> (state, output).
      summary: The compile time and the collectives of the program, for the log.
      lowered: The program before XLA compiled it.
      jaxpr: The operations of the program, for `model_flops`.
      retrace: Traces the program again and returns its jaxpr.
      steps: The number of steps whose operations `jaxpr` has.
      collectives: The collectives of the compiled program, or the reason why they are not known.
        Only process 0 has them.
      decisions: What was decided about the step, and why (see `StepPlan.decisions`); likewise.
      memory: Bytes of a device while it runs; None if they are not known.
    """

    call: Callable[..., Any]
    summary: str
    lowered: jax.stages.Lowered | None = None
    jaxpr: Any = None
    retrace: Callable[[], Any] | None = None
    steps: int = 1
    collectives: Sequence[Collective] | str = "the step is not compiled"
    decisions: tuple[str, ...] = ()
    memory: ProgramMemory | None = None


def compile_step(
    plan: StepPlan,
    call: Any,
    state: PyTree,
    batch: PyTree,
    check: Callable[[jax.stages.Traced], None],
    *,
    began: float | None = None,
) -> Program:
    """Compiles the program of a plan.

    Args:
      call: `plan.program()`.
      state: Arrays, or shapes with the shardings of the real arguments, so that `call` finds the
        program in its cache. Calls of it are dispatched faster than those of `jax.stages.Compiled`.
      batch: As `state`.
      check: Raises `UserError` if the traced program would not compute what a run promises.
      began: When the planning began, by `time.perf_counter`, for the log; by default now.
    """
    began = time.perf_counter() if began is None else began
    if not plan.jit:
        return Program(call, "steps are not compiled")
    traced = call.trace(state, batch)
    check(traced)
    lowered = traced.lower()
    compiled, summary = compile_lowered(lowered, began)
    found: list[Collective] | str = []
    decisions: tuple[str, ...] = ()
    if process_group.is_chief():  # the only process that logs them
        mesh = plan.placement.mesh
        found = find_collectives(compiled.as_text() or "", mesh)
        summary += f": {describe_found(found, mesh)}"
        decisions = plan.decisions(traced.jaxpr.jaxpr)
    shapes = jax.tree.map(_shape, (state, batch))

    def retrace() -> Any:
        with use_placement(plan.placement):
            return call.trace(*shapes).jaxpr

    # The operations of a loop of unknown length are counted once.
    counted = 1 if plan.dispatch.is_counted else plan.dispatch.steps
    memory = None
    if (analysis := compiled.memory_analysis()) is not None:
        memory = ProgramMemory(
            arguments=analysis.argument_size_in_bytes,
            temporaries=analysis.temp_size_in_bytes,
            results=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            code=analysis.generated_code_size_in_bytes,
        )
    return Program(
        *(call, summary, lowered, traced.jaxpr, retrace, counted, found, decisions), memory=memory
    )


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array or number, with the sharding of an array."""
    aval = x if hasattr(x, "dtype") else jax.typeof(x)
    dtype = jax.dtypes.canonicalize_dtype(aval.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(aval.shape, dtype, sharding=getattr(x, "sharding", None))


# -- The programs of a `Trainer`, by plan ----------------------------------------------------------


def check_traced(traced: jax.stages.Traced, plan: StepPlan, batch: PyTree) -> None:
    """Checks the traced program of a train step (see `check_program`).

    `batch` has shapes and dtypes of the batches of a dispatch; with `by_index`, it has the indices
    of examples on the devices.
    """
    places = batch_shardings(plan.placement, plan.dispatch.repeat, by_index=plan.by_index)
    placed = plan.state, jax.tree.map(_with_sharding, places, batch)
    check_program(traced.jaxpr.jaxpr, placed, plan.placement)


def _with_sharding(sharding: Any, batch: PyTree) -> PyTree:
    """Returns abstract arrays with a sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)


class Programs:
    """The compiled train steps of one trainer, by kind, dispatch and batch."""

    def __init__(self, functions: RunFunctions) -> None:
        self._functions, self._placement = functions, functions.placement
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._programs: dict[Hashable, Future[Program]] = {}
        self._choices: dict[tuple[int | None, str], Dispatch] = {}

    def choose_dispatch(
        self,
        dataset: TrainingData,
        augment: Augment | None,
        config: RunConfig,
        *,
        is_watched: bool,
    ) -> Dispatch:
        """Returns how the steps of a run are dispatched.

        By default small steps are dispatched together, if nothing waits for each of them: no
        callback, and no reading of examples, which are arrays in memory. `is_watched` tells whether
        callbacks are called after steps or for log lines.
        """
        given, functions, placement = config.steps_per_dispatch, self._functions, self._placement
        if given == 1:
            return Dispatch()
        if given is None:
            waits = is_watched or augment is not None or not is_in_memory(dataset)
            state = functions.abstract_state
            if waits or not may_group(config, placement, state, functions.order):
                return Dispatch()
        batch = self._abstract_batch(dataset, Dispatch(), 1, augment, config)
        rows = as_marked(jax.eval_shape(examples_of, batch)).rows
        if (key := (given, str(rows))) not in self._choices:
            try:
                with reference_kernels():  # operations of kernels cannot be read
                    forward = functions.checks.forward_program(rows)
            except Exception:  # of the user's code: the compilation raises it, too
                return Dispatch()
            update = self._update_program() if given is None else None  # tracing takes time
            self._choices[key] = choose_dispatch(
                given, placement, functions.abstract_state, rows, forward, update
            )
        return self._choices[key]

    def _update_program(self) -> Any | None:
        update, state = self._functions.update, self._functions.step_state
        trained, _ = update.partition(state.params)
        return update_program(update.optimizer, trained, state.opt_state)

    def begin(
        self,
        kind: str,
        dispatch: Dispatch,
        steps: int,
        dataset: TrainingData,
        augment: Augment | None,
        config: RunConfig,
    ) -> None:
        """Starts to compile in the background, for the batches of a dataset.

        Nothing is started if the worker thread would compile another program: many JAX options
        (`jax.default_device`, `jax.default_matmul_precision`) belong to a thread.

        Args:
          kind: The kind of step (see `StepTransform`).
          dispatch: How the steps of the run are dispatched.
          steps: Number of steps of a call.
          dataset: See `abstract_batch`; so are `augment` and `config`.
        """
        batch = self._abstract_batch(dataset, dispatch, steps, augment, config)
        if self._worker.submit(self._context).result() == self._context():
            shapes = jax.tree.map(_shape, batch)
            made = self._worker.submit(self._make, kind, dispatch, steps, shapes)
            self._programs[self._key(kind, dispatch, steps, shapes)] = made

    def _abstract_batch(
        self,
        dataset: TrainingData,
        dispatch: Dispatch,
        steps: int,
        augment: Augment | None,
        config: RunConfig,
    ) -> PyTree:
        return abstract_batch(
            dataset,
            config.resolved_batch_size,
            self._placement,
            augment=augment,
            steps=steps,
            by_index=config.data_on_device,
            step_may_place=config.jit,
            counted=dispatch.is_counted,
            padded_to=config.padded_batch_size(self._placement.batch_shards),
        )

    def get(self, kind: str, dispatch: Dispatch, steps: int, batch: PyTree) -> Program:
        """Returns the compiled program of a number of steps of a kind, for batches like this one.

        It raises the errors of the compilation, and the next call compiles again.
        """
        key = self._key(kind, dispatch, steps, shapes := jax.tree.map(_shape, batch))
        if key not in self._programs:
            self.wait()
            compiled: Future[Program] = Future()
            compiled.set_result(self._make(kind, dispatch, steps, shapes))
            self._programs[key] = compiled
        try:
            return self._programs[key].result()
        except Exception:
            del self._programs[key]
            raise

    @staticmethod
    def _key(kind: str, dispatch: Dispatch, steps: int, shapes: PyTree) -> Hashable:
        leaves, structure = jax.tree.flatten(shapes)
        return kind, dispatch, steps, structure, *leaves

    def wait(self) -> None:
        """Waits until no compilation is in progress."""
        for program in self._programs.values():
            program.exception()

    def _context(self) -> object:
        """Returns this thread's JAX options that programs depend on."""
        with use_placement(self._placement):
            return trace_context()

    def _make(self, kind: str, dispatch: Dispatch, steps: int, batch: PyTree) -> Program:
        began, functions, first = time.perf_counter(), self._functions, batch
        with use_placement(self._placement):  # the placement belongs to a thread
            if dispatch.repeat_of(steps) is Repeat.NONE:
                dispatch = Dispatch()
            else:
                first = jax.eval_shape(lambda batches: batch_at(batches, 0), batch)
            by_index = functions.config.data_on_device
            plan = plan_step(functions, first, kind=kind, dispatch=dispatch, by_index=by_index)
            check = partial(check_traced, plan=plan, batch=batch)
            return compile_step(plan, plan.program(), plan.state, batch, check, began=began)
