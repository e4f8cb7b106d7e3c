"""Snapshots in memory of a job on two hosts: it is killed, and one host is lost."""

import shutil
from pathlib import Path

from helpers import saved_steps
from processes import codes, drill, job, show, sums

from spmdtrain import open_run

# Each process has a folder of its own in memory, as on a host of its own.
HOSTS = """import json
import os

rank = json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker"
os.environ["SPMDTRAIN_SNAPSHOT_DIR"] = f"{os.path.dirname(__file__)}/host{int(rank)}"
os.makedirs(os.environ["SPMDTRAIN_SNAPSHOT_DIR"], exist_ok=True)
"""


def test_a_killed_job_continues_from_the_copy_of_the_host_that_is_left(tmp_path: Path) -> None:
    changes = ("import os\n", HOSTS), ("and rank == config.fault_rank\n", "\n")  # in any of them
    config, mark = drill(tmp_path, *changes), tmp_path / "mark"
    options: tuple[object, ...] = ("--strategy", "fully_sharded", "--sharding.min-size", 1)
    options += ("--checkpoint-every-steps", 100, "--log-hash-every", 100)
    job(config, *options, "--workdir", tmp_path / "whole")
    options += ("--workdir", tmp_path / "run", "--snapshot-every-steps", 4, "--mark", mark)
    killed = job(config, *options, "--fault", "SIGKILL", check=False)
    assert all(one.code for one in killed), show(killed)  # the second may notice the first
    assert saved_steps(tmp_path / "run") == []
    shutil.rmtree(tmp_path / "host1")
    ended = job(config, *options)
    assert codes(ended) == [0, 0]
    resumed = f"of {tmp_path}/run: snapshot in memory (chief), from the partner (worker 0)"
    assert any(f"resumed from step {step} {resumed}" in ended[0].output for step in (4, 8, 12))
    start = [event for event in open_run(tmp_path / "run").events if event["event"] == "start"][-1]
    assert start["source"] == "partner"
    assert sums(tmp_path / "run") == sums(tmp_path / "whole")
    for host in ("host0", "host1"):
        assert not [*tmp_path.glob(f"{host}/*/snapshots/*")]  # the run has finished
