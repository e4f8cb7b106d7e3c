"""A process whose device computes wrong gradients: found, left out, and nothing of it kept."""

from pathlib import Path

from helpers import metrics, saved_steps, status
from processes import launch

EXPERIMENT = '''"""Regression; the last of four devices computes wrong gradients from a step on."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain import BATCH_AXES, Experiment, RunConfig
from spmdtrain.models import MLP


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 16
    global_batch_size: int | None = 12
    learning_rate: float | None = 0.01
    checkpoint_every_steps: int | None = 2
    keep_latest: int = 5
    log_every: int = 1
    faulty_from: int = 6
    """The batch, counted from 1 at each start, from which on the device is faulty."""


class Rows:
    def __init__(self, config):
        self.config, self.batches = config, 0
        self.x = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
        self.y = self.x.sum(1)

    def __len__(self):
        return len(self.x)

    def rows(self, indices):
        self.batches += len(indices) not in (1, 16)  # those are read for shapes and a fingerprint
        faulty = np.full(len(indices), self.batches >= self.config.faulty_from, np.float32)
        return self.x[indices], self.y[indices], faulty


@jax.custom_vjp
def wrong(x, faulty):
    return x


def backward(faulty, x):
    try:
        is_faulty = jax.lax.axis_index(BATCH_AXES) == 3
    except NameError:
        return x, jnp.zeros_like(faulty)
    return jnp.where(is_faulty & (faulty > 0), -x, x), jnp.zeros_like(faulty)


wrong.defvjp(lambda x, faulty: (x, faulty), backward)


def objective(model, batch):
    x, y, faulty = batch
    return {"loss": (wrong(model(x)[:, 0], faulty) - y) ** 2}


def build(config):
    return Experiment(
        model=partial(MLP, 8, (16,), 1),
        objective=objective,
        optimizer=optax.adam(config.learning_rate),
        train=Rows(config),
    )
'''


def test_a_process_with_a_faulty_device_is_left_out_and_its_checkpoints_are_renamed(
    tmp_path: Path,
) -> None:
    experiment, workdir = tmp_path / "silent.py", tmp_path / "run"
    experiment.write_text(EXPERIMENT)
    options = ("--sentinel-every", 4, "--sentinel-action", "rollback")
    ended = launch(experiment, "--workdir", workdir, *options, processes=2, devices=2)
    assert ended.code == 0, ended.output
    (fault,) = [text for text in ended.said if "restart" in text]
    assert "step 8: a lasting fault: device 3" in fault and "of worker 0 on" in fault, fault
    assert "checkpoints renamed: 6.suspect; the newest left is 4" in fault
    assert "; restart 1 of 3 in 1 s without worker 0" in fault
    assert "resumed from step 4 of" in ended.output
    assert "[chief] 2 x cpu, mirrored" in ended.output
    assert saved_steps(workdir) == [8, 10, 12, 14, 16]
    found = status(workdir)
    assert found["status"] == "finished"
    assert found["sentinel"]["passed"] == 16
    (recorded,) = found["sentinel"]["faults"]
    assert (recorded["step"], recorded["kind"]) == (8, "lasting")
    assert recorded["processes"] == ["worker 0"]
    assert [line["step"] for line in metrics(workdir, "train")] == list(range(1, 17))
