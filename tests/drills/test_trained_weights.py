"""Weights that depend on trained parameters, by real processes against plain JAX."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BOUND, command, metrics
from processes import job, launching
from server_jobs import text_of

pytestmark = pytest.mark.drill

EXPERIMENT = '''"""A line whose confidence is trained with it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from spmdtrain import Experiment, RunConfig


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 6
    global_batch_size: int | None = 16
    checkpoint_every_steps: int | None = 6
    log_every: int = 1


class Line(nnx.Module):
    def __init__(self, *, rngs):
        self.w, self.s = nnx.Param(jnp.full(3, 0.5)), nnx.Param(jnp.zeros(()))


def objective(model, batch):
    x, y = batch
    w, s = model.w[...], model.s[...]
    weight = jax.nn.sigmoid(x @ w + s)
    return {"loss": ((x @ w - y) ** 2, weight)}


def build(config):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(16, 3)).astype(np.float32)
    return Experiment(
        model=Line, objective=objective, optimizer=optax.sgd(0.2), train=(x, x.sum(1) ** 2)
    )
'''


def losses_of_plain_jax(*, constant: bool = False) -> list[float]:
    """Losses of full batches; with `constant`, the weights are not differentiated."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(16, 3)).astype(np.float32)
    y = x.sum(1) ** 2

    def loss(params: tuple[jax.Array, jax.Array]) -> jax.Array:
        w, s = params
        weight = jax.nn.sigmoid(x @ w + s)
        weight = jax.lax.stop_gradient(weight) if constant else weight
        return jnp.sum(weight * (x @ w - y) ** 2) / jnp.sum(weight)

    params, found = (jnp.full(3, 0.5), jnp.zeros(())), []
    for _ in range(6):
        value, gradient = jax.value_and_grad(loss)(params)
        params = jax.tree.map(lambda p, g: p - 0.2 * g, params, gradient)
        found.append(float(value))
    return found


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "confidence.py"
    path.write_text(EXPERIMENT)
    return path


def check(workdir: Path) -> None:
    found = [line["loss"] for line in metrics(workdir, "train")]
    np.testing.assert_allclose(found, losses_of_plain_jax(), rtol=1e-5)
    assert abs(found[-1] - losses_of_plain_jax(constant=True)[-1]) > 0.05


@pytest.mark.parametrize("microbatches", [1, 2])
def test_two_processes(experiment: Path, tmp_path: Path, microbatches: int) -> None:
    options = ("--workdir", tmp_path / "run", "--microbatches", microbatches)
    job(experiment, *options, processes=2, devices=2)
    check(tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_one_worker_with_one_server(experiment: Path, tmp_path: Path) -> None:
    options = ("--strategy", "parameter_server", "--workdir", tmp_path / "run")
    line = command(experiment, *options)
    with launching(line, "--ps", 1, processes=2) as (process, lines):
        assert process.wait(BOUND) == 0, text_of(lines)
    check(tmp_path / "run")
