"""The cost of a check of the sentinel, in steps.

    python benchmarks/sentinel.py [--steps 200]

Each row is one run on 8 virtual devices with `sentinel_every=5`. The host waits for each step, so
the time of steps with a check and of those without is measured in the same run, in turns. A check
costs the difference of the medians, divided by the median of a step: with `--sentinel-every K`, a
run takes longer by that number divided by K. Prints the table of docs/reliability.md.
"""

import argparse
import os
import statistics
import time
from functools import partial
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import numpy as np
import optax

from spmdtrain import CallbackContext, Trainer
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MLP, Transformer
from spmdtrain.models.transformer import TransformerConfig

EVERY = 5
WARM_UP = 20  # steps


def classification(model: Any, batch: Any) -> dict[str, Any]:
    image, label = batch
    logits = model(image)
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, label)}


def next_token(model: Any, batch: Any) -> dict[str, Any]:
    logits = model(batch[:, :-1])
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])}


def models() -> dict[str, dict[str, Any]]:
    """Returns the options of a trainer, and its data, by name."""
    draw = np.random.default_rng(0)
    image = draw.normal(size=(2048, 784)).astype(np.float32)
    shape = TransformerConfig(
        vocabulary=65, rows=72, layers=4, width=128, heads=4, hidden=512, context=64
    )
    tokens = draw.integers(0, 65, size=(512, 65)).astype(np.int32)
    return {
        "MLP, 784-512-512-10": {
            "model": partial(MLP, 784, (512, 512), 10, dropout=0.1),
            "objective": classification,
            "data": (image, draw.integers(0, 10, size=2048)),
            "global_batch_size": 512,
        },
        "Transformer, 4 layers of 128": {
            "model": partial(Transformer, shape),
            "objective": next_token,
            "data": tokens,
            "global_batch_size": 64,
        },
    }


def measure(options: dict[str, Any], strategy: str, steps: int) -> tuple[float, float]:
    """Returns the seconds of a step, and of a check.

    Args:
      options: Options of the trainer, and its data.
      strategy: The strategy.
      steps: Number of steps.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    last = time.perf_counter()

    def after(event: CallbackContext) -> None:
        nonlocal last
        state = event.trainer.state
        assert state is not None
        np.asarray(state.step)
        now = time.perf_counter()
        if event.step > WARM_UP:
            seconds[event.step % EVERY == 0].append(now - last)
        last = time.perf_counter()

    options = dict(options)
    data = options.pop("data")
    trainer = Trainer(
        optimizer=optax.adamw(1e-3),
        strategy=strategy,
        sentinel_every=EVERY,
        callbacks={"step": after},
        terminal=Terminal(quiet=True),
        **options,
    )
    trainer.fit(data, steps=WARM_UP + steps)
    step, checked = statistics.median(seconds[False]), statistics.median(seconds[True])
    return step, checked - step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    print("| model | strategy | a step, ms | a check, ms | a check, in steps |")
    print("|---|---|---|---|---|")
    for name, options in models().items():
        for strategy in ("mirrored", "fully_sharded"):
            step, check = measure(options, strategy, steps)
            row = [name, f"`{strategy}`", f"{step * 1e3:.1f}", f"{check * 1e3:.1f}"]
            print(f"| {' | '.join([*row, f'{check / step:.2f}'])} |", flush=True)


if __name__ == "__main__":
    main()
