"""Cost of `exact`: a step of a transformer with and without it, on 1, 4 and 8 virtual devices.

    python benchmarks/exact.py [--devices 1 4 8] [--steps 6] [--rounds 5]

Prints the time of a step and the temporary memory of its program, and their ratios. Both steps run
in one process, in turns, and ratios are within a round. Times are of the wall and of the CPU; those
of the CPU are less sensitive to other work of the machine.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import argparse
import statistics
import time
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from spmdtrain import MeshSpec, Trainer
from spmdtrain.models import Transformer, TransformerConfig
from spmdtrain.sharding.placement import use_placement
from spmdtrain.terminal import Terminal

SHAPE = TransformerConfig(
    vocabulary=256, rows=256, layers=4, width=192, heads=4, hidden=768, context=64
)
ROWS, SHARDS = 64, 16


def objective(model: Any, batch: jax.Array) -> dict[str, Any]:
    return {"loss": model.token_losses(batch[:, :-1], batch[:, 1:]).loss}


class Steps:
    """The compiled train step of a trainer, with its state.

    Args:
      devices: Number of devices.
      exact: Number of virtual shards; None without.
    """

    def __init__(self, devices: int, exact: int | None) -> None:
        of = Trainer(
            model=partial(Transformer, SHAPE),
            objective=objective,
            optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
            global_batch_size=ROWS,
            mesh=MeshSpec(devices=tuple(range(devices))),
            exact=exact,
            terminal=Terminal(quiet=True),
        )
        tokens = np.random.default_rng(0).integers(0, 256, (ROWS, 65)).astype(np.int32)
        self.compiled = of.compile_step(tokens)
        with use_placement(of.placement):
            self.state = of.functions.init(0)
            self.batch = jax.device_put(tokens, of.placement.batch)
        memory: Any = self.compiled.memory_analysis()
        self.megabytes = memory.temp_size_in_bytes / 1e6

    def run(self, steps: int) -> tuple[float, float]:
        """Returns the seconds of a step, of the wall and of the CPU."""
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.state, output = self.compiled(self.state, self.batch)
            jax.block_until_ready(output)
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def main() -> None:
    """Prints a line for each number of devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wait", action="store_true", help="measure after a line on stdin")
    options = parser.parse_args()
    pairs = {n: (Steps(n, None), Steps(n, SHARDS)) for n in options.devices}
    for pair in pairs.values():
        for steps in pair:
            steps.run(1)
    if options.wait:
        print("ready", flush=True)
        input()
    for devices, (plain, exact) in pairs.items():
        rounds = [
            (plain.run(options.steps), exact.run(options.steps)) for _ in range(options.rounds)
        ]
        wall, cpu = (statistics.median(b[i] / a[i] for a, b in rounds) for i in (0, 1))
        seconds = [statistics.median(each[i][0] for each in rounds) for i in (0, 1)]
        print(
            f"{devices} devices: plain {1000 * seconds[0]:.1f} ms, exact {1000 * seconds[1]:.1f} ms"
            f", ratio {wall:.2f} (CPU {cpu:.2f}); temporary memory of a device "
            f"{plain.megabytes:.1f} MB, exact {exact.megabytes:.1f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
