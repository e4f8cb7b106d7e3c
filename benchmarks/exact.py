"""Cost of `exact`: a train step with and without it, on 1, 4 and 8 virtual devices.

    python benchmarks/exact.py [--model transformer|mobilenet] [--devices 1 4 8] [--steps 6]
        [--rounds 5]

Prints the time of a step and the temporary memory of its program, and their ratios. Both steps run
in one process, in turns, and ratios are within a round. Times are of the wall and of the CPU; those
of the CPU are less sensitive to other work of the machine. The transformer has 1.8 million
parameters, and 64 rows of 64 tokens; MobileNetV2 has a width of 0.35, batch statistics over 64
images of 32 x 32.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import argparse
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from compiled_steps import CompiledSteps, compare

from spmdtrain import MeshSpec, Trainer
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MobileNetV2, Transformer, TransformerConfig

SHAPE = TransformerConfig(
    vocabulary=256, rows=256, layers=4, width=192, heads=4, hidden=768, context=64
)
ROWS, SHARDS = 64, 16


def next_token(model: Any, batch: jax.Array) -> dict[str, Any]:
    return {"loss": model.token_losses(batch[:, :-1], batch[:, 1:]).loss}


def classification(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, Any]:
    image, label = batch
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(model(image), label)}


def program(name: str, devices: int, exact: int | None) -> CompiledSteps:
    """Returns the compiled step of a model.

    Args:
      name: transformer or mobilenet.
      devices: Number of devices.
      exact: Number of virtual shards; None without.
    """
    draw = np.random.default_rng(0)
    if name == "transformer":
        model: Any = partial(Transformer, SHAPE)
        objective: Any = next_token
        batch: Any = draw.integers(0, 256, (ROWS, 65)).astype(np.int32)
    else:
        model, objective = partial(MobileNetV2, 10, width_multiplier=0.35), classification
        image = draw.normal(size=(ROWS, 32, 32, 3)).astype(np.float32)
        batch = image, draw.integers(0, 10, ROWS)
    trainer = Trainer(
        model=model,
        objective=objective,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        global_batch_size=ROWS,
        mesh=MeshSpec(devices=tuple(range(devices))),
        exact=exact,
        terminal=Terminal(quiet=True),
    )
    return CompiledSteps(trainer, batch)


def main() -> None:
    """Prints a line for each number of devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("transformer", "mobilenet"), default="transformer")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for devices in options.devices:
        plain = program(options.model, devices, None)
        exact = program(options.model, devices, SHARDS)
        found = compare(plain, exact, options.steps, options.rounds)
        print(
            f"{devices} devices: plain {1000 * found.first:.1f} ms, exact "
            f"{1000 * found.other:.1f} ms, ratio {found.ratio:.2f} (CPU {found.cpu_ratio:.2f}); "
            f"temporary memory of a device {plain.megabytes:.1f} MB, exact {exact.megabytes:.1f} "
            f"MB; compiled in {plain.compile_seconds:.1f} s, exact {exact.compile_seconds:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
