"""Timing of the compiled train step of a `Trainer`, for benchmarks that compare two of them."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from spmdtrain import Trainer
from spmdtrain.sharding.placement import use_placement


@dataclass(frozen=True)
class Comparison:
    """Two programs that ran in turns: the first one, and the other relative to it.

    Attributes:
      first: Seconds of a step of the first one, the median of the rounds.
      other: The same of the other one.
      ratio: The median of the ratios of the rounds, other to first.
      cpu_ratio: The same for the time of all processors, which other work of the machine changes
        less.
    """

    first: float
    other: float
    ratio: float
    cpu_ratio: float


class CompiledSteps:
    """A compiled train step, with its state.

    Args:
      trainer: The trainer.
      batch: A global batch, which every step uses.
    """

    def __init__(self, trainer: Trainer, batch: Any) -> None:
        began = time.perf_counter()
        self.compiled = trainer.compile_step(batch)
        self.compile_seconds = time.perf_counter() - began
        with use_placement(trainer.placement):
            self.state = trainer.functions.init(0)
            self.batch = jax.device_put(batch, trainer.placement.batch)
        self.parameters = sum(x.size for x in jax.tree.leaves(trainer.abstract_state.params))
        memory: Any = self.compiled.memory_analysis()
        self.megabytes = memory.temp_size_in_bytes / 1e6

    def run(self, steps: int) -> tuple[float, float]:
        """Returns the seconds of a step, of the wall and of the CPU."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.state, output = self.compiled(self.state, self.batch)
            jax.block_until_ready(output)
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def compare(first: CompiledSteps, other: CompiledSteps, steps: int, rounds: int) -> Comparison:
    """Runs two steps in turns, after one step of each to warm up."""
    for each in (first, other):
        each.run(1)
    times: Sequence[tuple[tuple[float, float], ...]] = [
        (first.run(steps), other.run(steps)) for _ in range(rounds)
    ]
    wall, cpu = (statistics.median(b[i] / a[i] for a, b in times) for i in (0, 1))
    seconds = [statistics.median(pair[i][0] for pair in times) for i in (0, 1)]
    return Comparison(seconds[0], seconds[1], wall, cpu)
