"""Calls that only one of two processes makes: both are named, in both, within seconds."""

import sys
from pathlib import Path

import pytest
from helpers import BOUND
from processes import codes, quiet, show

from spmdtrain.testing import run_processes

pytestmark = pytest.mark.drill

SCRIPT = """
import sys

import jax
import numpy as np
import optax
from flax import nnx

import spmdtrain
from spmdtrain import Loop, Trainer

spmdtrain.initialize()
kind, alone = sys.argv[1], jax.process_index() == int(sys.argv[2])
x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
y = x.sum(1, keepdims=True)


def callback(event):
    if kind == "callback" and event.step == 3 and alone:
        event.trainer.evaluate((x, y))


if kind == "loop":
    with Loop(steps=200, global_batch_size=8) as loop:
        start = lambda key: {"params": jax.random.normal(key, (4, 1))}
        state = loop.start(start, train=(x, y))
        step = loop.compile_step(
            lambda state, batch, key: (state, {"loss": ((batch[0] @ state.params) ** 2).mean()})
        )
        for batch in loop.batches():
            state, output = step(state, batch)
            loop.end_step(state, output)
            if loop.step == 3 and alone:
                loop.log_evaluation({"score": 1.0})
else:
    trainer = Trainer(
        model=lambda rngs: nnx.Linear(4, 1, rngs=rngs),
        objective=lambda model, batch: {"loss": (model(batch[0]) - batch[1]) ** 2},
        optimizer=optax.sgd(0.125),
        steps=200 if kind == "callback" else 4,
        global_batch_size=8,
        callbacks={"step": callback},
    )
    trainer.fit((x, y))
    if alone:
        trainer.evaluate((x, y))
"""


@pytest.mark.parametrize(
    ("kind", "alone", "call", "other"),
    [
        ("callback", 1, "evaluate, called in callback (", "fit, called in <module> ("),
        ("loop", 1, "log_evaluation, called in <module> (", "left out ("),
        ("after", 0, "evaluate, called in <module> (", "left out (its script has ended)"),
    ],
)
def test_a_call_of_one_process(
    tmp_path: Path, kind: str, alone: int, call: str, other: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = run_processes(
        [sys.executable, str(script), kind, str(alone)],
        processes=2,
        timeout=BOUND,
        check=False,
        grace=40.0,
        env=quiet(),
    )
    names = ["chief", "worker 0"]
    assert all(code not in (0, -6) for code in codes(ended)), show(ended)
    waiting, there = names[alone], names[1 - alone]
    for process in ended:
        assert f"{waiting} and {there} make different calls: exchange " in process.output, show(
            ended
        )
        assert f" is made in {waiting} by {call}" in process.output, show(ended)
        assert f", and in {there} " in process.output and other in process.output, show(ended)
