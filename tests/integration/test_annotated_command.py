"""An experiment with an annotated model, through the real command."""

from pathlib import Path

import pytest
from helpers import run

EXPERIMENT = '''"""A linen layer with logical names."""
from dataclasses import dataclass
import flax.linen as nn
import numpy as np
import optax
from spmdtrain import AxisRules, Experiment, LinenModel, RunConfig

@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 2
    global_batch_size: int | None = 16
    is_mapped: bool = True

class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        hidden = nn.Dense(32, kernel_init=init, use_bias=False)(x)
        hidden = nn.with_logical_constraint(hidden, ("batch", "mlp"))
        return nn.Dense(16)(nn.relu(hidden))

def objective(model, batch):
    return {"loss": ((model(batch["x"]) - batch["x"]) ** 2).mean(-1)}

def build(config):
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    table = {"batch": ("data", "fsdp"), "mlp": "tensor"}
    if config.is_mapped:
        table["embed"] = "fsdp"
    return Experiment(
        model=LinenModel(Layer(), x[:1]), objective=objective, optimizer=optax.adam(1e-2),
        train={"x": x}, axis_rules=AxisRules(table),
    )
'''


@pytest.mark.nightly
def test_the_table_says_which_specs_came_from_annotations(tmp_path: Path) -> None:
    config = tmp_path / "layer.py"
    config.write_text(EXPERIMENT)
    options = ("--strategy", "fully_sharded", "--mesh.tensor", 2)
    shown = run(config, *options, "--show-sharding", cwd=tmp_path, devices=8)
    assert shown.returncode == 0, shown.stderr
    (row,) = [
        line for line in shown.stdout.splitlines() if "Dense_0/kernel" in line and "P(" in line
    ]
    assert "P('fsdp', 'tensor')" in row
    assert "annotation" in row
    trained = run(config, *options, cwd=tmp_path, devices=8)
    assert trained.returncode == 0, trained.stderr
    refused = run(config, *options, "--no-is-mapped", "--workdir", "b", cwd=tmp_path, devices=8)
    assert refused.returncode == 2
    (line,) = refused.stderr.strip().splitlines()
    assert line.startswith("error: params/Dense_0/kernel is annotated ('embed', 'mlp'): ")
