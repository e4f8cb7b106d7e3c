"""Roles of tasks with parameter servers, and options refused before anything is started."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from helpers import DIGITS, metrics, run

from spmdtrain import Loop, ParameterServerOptions, RunConfig, Trainer, UserError
from spmdtrain.cluster.command import check_servers
from spmdtrain.cluster.spec import from_tf_config
from spmdtrain.distributed.progress import CONTEXT
from spmdtrain.launch.task_env import tf_configs
from spmdtrain.parameter_server.executor import make_partitioner
from spmdtrain.parameter_server.partition import FixedShards, MaxSize, MinSize
from spmdtrain.parameter_server.ray_nodes import run_task_role

BY_SERVERS: dict[str, Any] = {"strategy": "parameter_server"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"servers": {"max_staleness": 0}},
            "servers.max_staleness is for parameter_server, but the strategy is mirrored",
        ),
        (
            BY_SERVERS | {"servers": {"max_staleness": -1}},
            "servers.max_staleness is -1: it must be 0 or more",
        ),
        (
            BY_SERVERS | {"servers": {"max_shards": 0}},
            "servers.max_shards is 0: it must be above 0",
        ),
        (
            BY_SERVERS | {"servers": {"backup_task_timeout": float("nan")}},
            "servers.backup_task_timeout is nan: it must be above 0",
        ),
        (
            BY_SERVERS | {"servers": {"partitioner": "fixed_shards", "min_shard_bytes": 1}},
            "servers.min_shard_bytes is for min_size, but servers.partitioner is fixed_shards",
        ),
        (
            BY_SERVERS | {"servers": {"max_shard_bytes": 1}},
            "servers.max_shard_bytes is for max_size, but servers.partitioner is min_size",
        ),
        (
            BY_SERVERS | {"steps_per_dispatch": 2},
            "steps_per_dispatch is 2, but under parameter_server a worker computes one step at a "
            "time: leave it out",
        ),
        (
            BY_SERVERS | {"data_on_device": True},
            "data_on_device is True, but under parameter_server each worker reads the examples of "
            "the batches assigned to it: leave it out",
        ),
        (
            BY_SERVERS | {"profile_steps": "1:2"},
            "profile_steps is 1:2, but under parameter_server the steps run in other processes: "
            "leave it out",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        servers = ParameterServerOptions(**options.get("servers", {}))
        RunConfig(**{"steps": 1, **options, "servers": servers})
    assert str(caught.value) == message


def test_the_options_are_tensorflows_partitioners() -> None:
    assert make_partitioner(ParameterServerOptions(), 3) == MinSize(3, 256 * 1024)
    assert make_partitioner(ParameterServerOptions(max_shards=2, min_shard_bytes=7), 3) == MinSize(
        2, 7
    )
    assert make_partitioner(ParameterServerOptions(partitioner="max_size"), 3) == MaxSize(
        4 * 1024 * 1024, None
    )
    assert make_partitioner(ParameterServerOptions(partitioner="fixed_shards"), 3) == FixedShards(3)


def test_a_loop_is_referred_to_the_coordinator() -> None:
    with pytest.raises(UserError, match="use a Coordinator"):
        Loop(strategy="parameter_server", steps=1)


def test_which_tasks_are_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_configs(["chief", "ps 0"])["chief"])
    with pytest.raises(UserError, match="no worker"):
        run_task_role(1.0)


@pytest.mark.slow
def test_without_a_cluster_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    found = run(DIGITS, "--strategy", "parameter_server")
    assert found.returncode == 2
    assert found.stderr == (
        "error: parameter servers need a TF_CONFIG with a chief, workers and ps tasks: start one "
        "with python -m spmdtrain.launch --processes 3 --ps 2 -- ...\n"
    )


# -- in this process -------------------------------------------------------------------------------

X = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]


@pytest.mark.slow
def test_fit_in_an_evaluator_task_evaluates_and_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def objective(model: Any, x: Any) -> dict[str, Any]:
        return {"loss": (model(x) - 3 * x) ** 2}

    def fit(**options: Any) -> None:
        trainer = Trainer(
            model=partial(nnx.Linear, 1, 1),
            objective=objective,
            optimizer=optax.sgd(0.1),
            workdir=str(tmp_path),
            strategy="mirrored",
            checkpoint_every_steps=2,
        )
        trainer.fit(X, validation=X, **options)

    fit(steps=4, global_batch_size=32)
    trained = {line["step"]: line["loss"] for line in metrics(tmp_path, "eval")}
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setenv("TF_CONFIG", tf_configs(["chief", "evaluator"])["evaluator"])
    with pytest.raises(SystemExit) as stop:
        fit(steps=4, global_batch_size=32)
    assert stop.value.code == 0
    lines = (tmp_path / "metrics.evaluator.jsonl").read_text().splitlines()
    found = {line["step"]: line["loss"] for line in map(json.loads, lines)}
    assert list(found) == [2, 4] and found[4] == pytest.approx(trained[4], rel=1e-6)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    with pytest.raises(UserError, match="evaluator 0"):
        Loop(steps=1)


@pytest.mark.parametrize(
    ("jobs", "missing"),
    [
        ({"worker": ["a:1", "b:1"], "ps": ["c:1"]}, None),
        ({"chief": ["a:1"], "ps": ["c:1"]}, "no worker besides the chief"),
        ({"worker": ["a:1"], "ps": ["c:1"]}, "no worker besides the chief"),
    ],
)
def test_the_doctor_refuses_what_a_run_refuses(
    monkeypatch: pytest.MonkeyPatch, jobs: dict[str, list[str]], missing: str | None
) -> None:
    task = {"type": next(iter(jobs)), "index": 0}
    text = json.dumps({"cluster": jobs, "task": task})
    monkeypatch.setenv("TF_CONFIG", text)
    monkeypatch.setattr(CONTEXT, "initialized", False)  # restored after the test
    (finding,) = check_servers(from_tf_config(text))
    if missing is None:
        assert finding.level == "ok"
        run_task_role(1.0)
        return
    assert finding.level == "error" and missing in finding.text
    with pytest.raises(UserError, match=missing):
        run_task_role(1.0)
