"""Streams in jobs that are killed and continue on another number of processes."""

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import BOUND, assert_gone, metrics, saved_steps

from spmdtrain.testing import ProcessResult, run_processes

STEPS, KILLED, SHARDS = 24, 13, 4

# Each example has a number, and two integer hashes of the numbers are the metrics of a step: sums
# below 2**24, so that they are exact in float32 in any order.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

import grain
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain import FunctionModel, Stream, Trainer, initialize
from spmdtrain.distributed.process_group import rank

workdir, folder, kill_at, steps_per_dispatch = json.loads(sys.argv[1])
initialize(timeout=400)


def make_shard(index, count):
    with (Path(folder) / f"shards.{rank()}").open("a") as file:
        print(index, file=file)
    numbers = grain.MapDataset.range(90).shuffle(seed=3).map(lambda x: {"x": np.int32(x)})
    shard = numbers.slice(slice(index, None, count)).to_iter_dataset()
    shard = shard.filter(lambda example: example["x"] % 7 != 0)
    return grain.experimental.WindowShuffleIterDataset(shard, window_size=6, seed=index)


def objective(model, batch):
    x = batch["x"]
    loss = (x * x % 4093).astype(jnp.float32) + 0 * model["w"]
    return {"loss": loss, "other": (x * 31 % 2039).astype(jnp.float32)}


def kill(event):
    if event.step == kill_at and rank() == 1:
        while not os.path.exists(os.path.join(workdir, "checkpoints", "10")):
            time.sleep(0.01)  # until the last save is complete
        os.kill(os.getpid(), signal.SIGKILL)


result = Trainer(
    model=FunctionModel(lambda key: {"w": jnp.zeros(())}),
    objective=objective,
    optimizer=optax.sgd(0.1),
    callbacks={"step": kill},
    workdir=workdir,
    global_batch_size=16,
    microbatches=2,
    stream_shards=4,
    steps_per_dispatch=steps_per_dispatch,
    log_every=1,
    checkpoint_every_steps=5,
    keep_latest=99,
).fit(Stream(make_shard), steps=24)
print("step", result.step, flush=True)
"""


def train(
    folder: Path, workdir: Path, processes: int, *, kill_at: int = 0, steps_per_dispatch: int = 1
) -> list[ProcessResult]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    for old in folder.glob("shards.*"):
        old.unlink()
    message = json.dumps([str(workdir), str(folder), kill_at, steps_per_dispatch])
    return run_processes(
        [sys.executable, str(script), message],
        processes=processes,
        devices_per_process=4 // processes,
        timeout=BOUND,
        check=not kill_at,
    )


def checksums(workdir: Path) -> dict[int, tuple[float, float]]:
    return {x["step"]: (x["loss"], x["other"]) for x in metrics(workdir, "train")}


def shards_of(folder: Path, rank: int) -> set[int]:
    """The shards that a process has read."""
    return set(map(int, (folder / f"shards.{rank}").read_text().split()))


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_a_killed_job_continues_on_other_processes_with_the_same_examples(
    tmp_path: Path, processes: int
) -> None:
    train(tmp_path, tmp_path / "whole", 1)
    whole = checksums(tmp_path / "whole")
    assert sorted(whole) == list(range(1, STEPS + 1))
    assert max(Counter(whole.values()).values()) == 1  # each step has other examples

    killed = train(tmp_path, tmp_path / "run", 2, kill_at=KILLED)
    assert killed[1].code == -signal.SIGKILL
    assert saved_steps(tmp_path / "run")[-1] == KILLED // 5 * 5
    assert [shards_of(tmp_path, rank) for rank in range(2)] == [{0, 1}, {2, 3}]

    train(tmp_path, tmp_path / "run", processes, steps_per_dispatch=2)
    assert saved_steps(tmp_path / "run")[-1] == STEPS
    assert checksums(tmp_path / "run") == whole
    read = [shards_of(tmp_path, rank) for rank in range(processes)]
    assert read == [{*range(SHARDS)}] if processes == 1 else [{0}, {1}, {2}, {3}]


WORKERS = """
import grain
import jax.numpy as jnp
import multiprocessing
import numpy as np
import optax
import os
import signal

from spmdtrain import FunctionModel, Trainer


def kill(event):
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    numbers = grain.MapDataset.range(90).map(lambda x: {"x": np.int32(x)}).to_iter_dataset()
    Trainer(
        model=FunctionModel(lambda key: {"w": jnp.zeros(())}),
        objective=lambda model, batch: {"loss": batch["x"] * model["w"]},
        optimizer=optax.sgd(0.1),
        callbacks={"step": kill},
        global_batch_size=8,
        stream_shards=2,
    ).fit(numbers.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)), steps=4)
"""


def test_the_workers_of_a_pipeline_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    with (tmp_path / "output").open("w") as output:  # a pipe would end with the workers only
        # By itself, because the launcher would end the workers.
        run = subprocess.run([sys.executable, script], stdout=output, timeout=BOUND)
    assert run.returncode == -signal.SIGKILL
    workers = (tmp_path / "output").read_text().splitlines()[-1].split()
    assert len(workers) == 2
    assert_gone(map(int, workers))


@pytest.mark.nightly
def test_processes_that_would_divide_a_shard_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("stream_shards=4", "stream_shards=2"))
    message = json.dumps([str(tmp_path / "run"), str(tmp_path), 0, 1])
    ended = run_processes(
        [sys.executable, str(script), message], processes=4, timeout=BOUND, check=False
    )
    assert all(result.code for result in ended)
    assert "the number of processes must divide stream_shards" in ended[0].output
