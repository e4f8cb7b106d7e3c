"""Callbacks in two processes, which have to decide the same."""

import re
import sys
from pathlib import Path

import pytest
from helpers import BOUND, status
from processes import codes, quiet, show

from spmdtrain import read_manifest
from spmdtrain.testing import run_processes

SCRIPT = """
import sys

import jax
import numpy as np
import optax
from flax import nnx

import spmdtrain
from spmdtrain import EarlyStopping, ReduceOnPlateau, Trainer

spmdtrain.initialize()
x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
y = x.sum(1, keepdims=True)


def score(event):
    # Only in process 0 it stops improving after step 2.
    event.metrics["score"] = 5.0 if event.step == 1 else 4.0 - jax.process_index() * event.step


trainer = Trainer(
    model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
    objective=lambda model, batch: {"loss": (model(batch[0]) - batch[1]) ** 2},
    optimizer=optax.inject_hyperparams(optax.sgd)(0.125),
    workdir=sys.argv[1],
    eval_every_steps=1,
    callbacks=[
        {"evaluation": score},
        ReduceOnPlateau("score", factor=0.5, patience=2, cooldown=1),
        EarlyStopping("score", patience=6),
    ],
)
trainer.fit((x, y), validation=(x, y), steps=int(sys.argv[2]), global_batch_size=8)
rate = float(trainer.state.opt_state.hyperparams["learning_rate"])
print(f"ended at {trainer.step} with rate {rate}")
"""


@pytest.mark.drill
def test_two_processes_reduce_and_stop_at_the_same_steps_also_after_a_restart(
    tmp_path: Path,
) -> None:
    script, workdir = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    for steps, expected in (
        (5, "ended at 5 with rate 0.0625"),
        (20, "ended at 8 with rate 0.03125"),
    ):
        ended = run_processes(
            [sys.executable, str(script), str(workdir), str(steps)],
            processes=2,
            timeout=BOUND,
            check=False,
            grace=40.0,
            env=quiet(),
        )
        assert codes(ended) == [0, 0], show(ended)
        found = [re.findall("ended at .*", process.output) for process in ended]
        assert found == [[expected]] * 2, show(ended)
    assert status(workdir) == {"status": "finished", "step": 8}
    state = read_manifest(workdir).callbacks["EarlyStopping(score)"]
    assert state == {"best": 4.0, "best_step": 2, "step": 8, "waited": 6}
