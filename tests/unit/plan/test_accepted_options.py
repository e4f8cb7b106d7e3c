"""A plan accepts the options that a run on its topology accepts, and refuses what that refuses."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from spmdtrain import Trainer, UserError
from spmdtrain.config.command_line import parse_command_line
from spmdtrain.document.terminal import Terminal
from spmdtrain.plan import planner, topologies
from spmdtrain.plan.command import Options
from spmdtrain.sharding.placement import resolve_config

GPU, CPU = "gpu:h100:1x8", "cpu:8"
EXPERIMENT = '''
"""A small model with batch statistics."""

from dataclasses import dataclass

import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from spmdtrain import Experiment, Rule, RunConfig

X, Y = (np.random.default_rng(n).random((64, 8), np.float32) for n in (0, 1))


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 2
    norm: bool = False
    drops: bool = False


class Model(nnx.Module):
    def __init__(self, config, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs) if config.norm else lambda x: x
        self.drop = nnx.Dropout(0.5, rngs=rngs) if config.drops else lambda x: x

    def __call__(self, x):
        return self.drop(self.norm(self.layer(x)))


def build(config):
    in_tensor = "tensor" in config.strategy
    return Experiment(
        model=lambda rngs: Model(config, rngs),
        objective=lambda model, batch: {"loss": ((model(batch[0]) - batch[1]) ** 2).mean(1)},
        optimizer=optax.adam(1e-3),
        train=(X, Y),
        rules=[Rule("kernel", PartitionSpec(None, "tensor"))] if in_tensor else [],
    )
'''


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("options") / "small.py"
    path.write_text(EXPERIMENT)
    return path


class _ReachedError(Exception):
    pass


def plan_problem(
    experiment: Path, topology: str, options: Sequence[str], *, until: str
) -> str | None:
    """Returns why options cannot be planned; None if the plan reaches a stage."""
    words = ["--config", str(experiment), "--topology", topology, *options]

    def reach(stage: str) -> None:
        if stage == until:
            raise _ReachedError

    try:
        command = parse_command_line(words, Options)
        planner.plan(
            command.experiment, command.config, topologies.parse(topology), on_progress=reach
        )
    except _ReachedError:
        return None
    except UserError as error:
        return str(error)
    raise AssertionError(f"the plan has no stage {until}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "options", "problem"),
    [
        (CPU, "--collectives.cpu-implementation gloo", None),
        (CPU, "--collectives.timeout 60", None),
        (CPU, "--collectives.reduce-dtype bfloat16", "has no effect on CPU"),
        (CPU, "--no-jit", "jit=False cannot be planned: "),
        (CPU, "--mesh.context 2", "mesh axis context=2 is not used: the model does not call"),
        (GPU, "--batch-statistics replica --norm", None),
        (GPU, "--collectives.reduce-dtype bfloat16", None),
        (GPU, "--collectives.combine-threshold-bytes 1024", None),
        (GPU, "--mesh.devices gpu:0 CUDA:1", None),
        (GPU, "--mesh.devices gpu:8", "no device 'gpu:8'; visible of platform gpu: gpu:0, gpu:1,"),
        (GPU, "--mesh.devices cpu:0", "visible of platform cpu: none"),
        (GPU, "--collectives.timeout 60", "collectives.timeout is not supported on GPU"),
        (GPU, "--collectives.cpu-implementation gloo", "platform gpu has its own collectives"),
        (GPU, "--expert.exchange ragged_all_to_all --mesh.expert 2", "for gpu:h100:1x8 do not hav"),
    ],
)
def test_options_of_a_platform_are_accepted_and_refused_as_its_runs_do(
    topology: str,
    options: str,
    problem: str | None,
    experiment: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "has_compiler", lambda topology: topology.platform != "gpu")
    until = "compiling" if topology == CPU else "tracing"
    found = plan_problem(experiment, topology, options.split(), until=until)
    assert found is None if problem is None else problem in str(found), found


STRATEGIES = (
    *("default", "one_device", "mirrored", "zero", "fully_sharded", "tensor_parallel"),
    *("central_storage", "hybrid"),
)
OPTIONS = (
    "",
    *(f"--collectives.reduction {name}" for name in ("automatic", "all_reduce", "flattened")),
    *(f"--collectives.reduction {name}" for name in ("hierarchical", "one_device")),
    "--collectives.reduction reduce_scatter --sharding.min-size 8",
    *("--collectives.reduce-dtype float16", "--collectives.combine-threshold-bytes 1024"),
    *("--norm", "--drops", "--batch-statistics replica"),
    "--norm --batch-statistics replica",
    "--norm --batch-statistics replica --microbatches 2",
    "--norm --batch-statistics replica --collectives.reduction automatic",
    "--norm --batch-statistics replica --data-on-device",
    "--drops --collectives.reduction all_reduce",
    *("--exact 16", "--exact 16 --norm", "--exact 16 --microbatches 2", "--exact 16 --drops"),
    *("--microbatches 2", "--microbatches 3", "--remat full", "--compute-dtype bfloat16"),
    *("--steps-per-dispatch 2", "--data-on-device", "--data-on-device --steps-per-dispatch 2"),
    *("--ema-decay 0.9", "--freeze kernel", "--freeze none", "--no-jit", "--data-workers 1"),
    "--uneven-batch pad --global-batch-size 30",
    *("--global-batch-size 30", "--batch-size-per-device 4", "--stream-shards 2"),
    *("--mesh.data 2", "--mesh.replica 2", "--mesh.replica -1", "--mesh.fsdp 2"),
    *("--mesh.tensor 2", "--mesh.context 2", "--mesh.expert 2", "--mesh.devices 1 2"),
    *("--mesh.devices cpu:1", "--mesh.devices gpu:1", "--sharding.min-size 8"),
    *("--sharding.max-shards 2", "--sharding.offload optimizer", "--sharding.replicated-limit 1"),
    *("--sentinel-every 1", "--log-hash-every 1", "--servers.max-staleness 0"),
    *("--learning-rate-scaling linear", "--xla-preset none", "--context.method ring"),
    "--compiler-options xla_no_such_option=1",
)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_accepts_the_options_that_a_run_accepts(strategy: str, experiment: Path) -> None:
    differing = []
    for options in OPTIONS:
        words = ["--strategy", strategy, *options.split()]
        planned, run = plan_problem(experiment, CPU, words, until="compiling"), None
        try:
            command = parse_command_line(["--config", str(experiment), *words])
            config = dataclasses.replace(resolve_config(command.config), workdir=None)
            built = command.experiment.build(config)
            trainer = Trainer.from_experiment(built, config, terminal=Terminal(quiet=True))
            trainer.fit(built.train)
        except UserError as error:
            run = str(error)
        if (planned is None) != (run is None) and options != "--no-jit":
            differing.append((options, planned, run))
    assert not differing
