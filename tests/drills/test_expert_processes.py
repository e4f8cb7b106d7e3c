"""Experts that are split over several processes."""

from pathlib import Path

import numpy as np
import pytest
from helpers import metrics
from processes import job

EXPERIMENT = '''"""A layer of experts on noise."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from spmdtrain import Experiment, Rule, RunConfig, experts


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 6
    global_batch_size: int | None = 16
    log_every: int = 1


def ffn(rows, weights, dot):
    return dot(jax.nn.silu(dot(rows, weights["up"])), weights["down"])


class Model(nnx.Module):
    def __init__(self, rngs):
        def normal(*shape):
            return nnx.Param(0.3 * jax.random.normal(rngs.params(), shape))

        self.router = normal(8, 8)
        self.experts = nnx.Dict(up=normal(8, 8, 16), down=normal(8, 16, 8))

    def __call__(self, x):
        weights = nnx.to_pure_dict(nnx.state(self.experts))
        found = experts(x, x @ self.router[...], weights, ffn, top_k=2)
        return found.output, found.balance


def objective(model, batch):
    output, balance = model(batch["x"])
    return {"loss": jnp.square(output - batch["y"]).mean((1, 2)) + 0.1 * balance}


def build(config):
    draw = np.random.default_rng(0)
    data = {name: draw.normal(size=(64, 4, 8)).astype("f") for name in "xy"}
    rules = [Rule("experts/", PartitionSpec("expert"))]
    return Experiment(
        model=Model, objective=objective, optimizer=optax.adam(0.01), train=data, rules=rules
    )
'''


@pytest.mark.nightly
def test_two_processes_and_then_one_have_the_losses_of_one_device(tmp_path: Path) -> None:
    config = tmp_path / "mixture.py"
    config.write_text(EXPERIMENT)
    several, one = tmp_path / "several", tmp_path / "one"
    split = ("--workdir", several, "--mesh.expert")
    job(config, *split, 4, "--steps", 3, processes=2, devices=2)
    job(config, *split, 2, processes=1, devices=2)
    job(config, "--workdir", one, processes=1, devices=1)
    found, wanted = ([x["loss"] for x in metrics(of, "train")] for of in (several, one))
    assert len(wanted) == 6
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
