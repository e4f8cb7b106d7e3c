"""What is refused of parameter servers before anything is started, and what is shown of them."""

from typing import Any

import pytest
from helpers import DIGITS, run

from spmdtrain import Loop, ParameterServerOptions, RunConfig, UserError
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
