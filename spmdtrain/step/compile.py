"""The train step's programs, compiled beside what else a run begins with."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.config import trace_context

from spmdtrain.config import RunConfig
from spmdtrain.data.datasets import Dataset
from spmdtrain.data.loader import abstract_batch
from spmdtrain.data.sampling import Augment
from spmdtrain.distributed import process_group
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.functions import StepFunctions
from spmdtrain.xla import collectives

PyTree = Any


@dataclass(frozen=True)
class Program:
    """What makes one step or several: (state, batch) -> (state, output)."""

    call: Callable[..., Any]
    told: str
    """How long that took, and the collectives that it has."""
    lowered: jax.stages.Lowered | None
    """The program before XLA compiled it; None if it is not compiled."""


class Programs:
    """Those of one trainer, by the steps that they make at once."""

    def __init__(self, steps: StepFunctions, placement: Placement, config: RunConfig) -> None:
        self._steps, self._placement, self._config = steps, placement, config
        # One at a time: they share what `StepFunctions.choose_reduction` decides.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._under_way: dict[int, tuple[PyTree, Future[Program]]] = {}

    def begin(self, steps: int, batch: PyTree) -> None:
        """Start to compile for batches of these shapes and places, and return.

        Nothing is begun where the worker would compile something else: much of what JAX can be
        told (`jax.default_device`, `jax.default_matmul_precision`) is known by thread.
        """
        if self._worker.submit(self._context).result() == self._context():
            shapes = jax.tree.map(_shape, batch)
            self._under_way[steps] = shapes, self._worker.submit(self._make, steps, shapes)

    def begin_for(
        self, dataset: Dataset, steps: int, augment: Augment | None, config: RunConfig
    ) -> None:
        """Starts to compile for the batches of a dataset; arguments as for `abstract_batch`."""
        assert config.global_batch_size is not None
        shapes = abstract_batch(
            dataset,
            config.global_batch_size,
            self._placement,
            augment=augment,
            steps=steps,
            by_index=config.data_on_device,
            by_step=config.jit,
            padded_to=config.padded_batch_size(self._placement.batch_shards),
        )
        self.begin(steps, shapes)

    def get(self, steps: int, batch: PyTree) -> Program:
        """Returns the compiled program for such batches; raises the errors of its compilation."""
        shapes = jax.tree.map(_shape, batch)
        if steps not in self._under_way or self._under_way[steps][0] != shapes:
            self.wait()
            made: Future[Program] = Future()
            made.set_result(self._make(steps, shapes))
            self._under_way[steps] = shapes, made
        _, program = self._under_way[steps]
        try:
            return program.result()
        except Exception:
            del self._under_way[steps]
            raise

    def wait(self) -> None:
        """Return when nothing is being compiled."""
        for _, program in self._under_way.values():
            program.exception()

    def _context(self) -> object:
        """What JAX has been told in this thread, as far as programs depend on it."""
        with use_placement(self._placement):
            return trace_context()

    def _make(self, steps: int, batch: PyTree) -> Program:
        began = time.perf_counter()
        with use_placement(self._placement):  # which is known by thread
            settled = self._steps.choose_reduction(batch, steps)
            by_index = self._config.data_on_device
            call = self._steps.train_program(steps, by_index=by_index)
            if not self._config.jit:
                return Program(call, "steps are not compiled", None)
            # For arrays in their places: so the jitted function, whose calls are dispatched faster
            # than those of what is compiled here, finds it compiled.
            lowered = call.lower(self._steps.placed_state, batch)
            compiled = lowered.compile()
        told = f"step compiled in {time.perf_counter() - began:.1f} s"
        if process_group.is_chief():  # who alone tells it
            text = collectives.describe_program(compiled.as_text() or "", self._placement.mesh)
            told += f": {text}{settled}"
        return Program(call, told, lowered)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    """Of an array, and its place if it is on devices already."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=getattr(x, "sharding", None))
