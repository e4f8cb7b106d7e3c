"""Parameter servers: steps per second by workers and servers, and the cost of a slow worker.

    python benchmarks/servers.py [--steps 400]

Each row is a job of real processes on this machine, started by the launcher. Loading a batch
includes a pause that simulates computation on a device, so that more workers than cores make sense.
In the second table, one worker of three has a pause ten times as long. Both tables include the
pause: compare the figures of a table only with each other. Prints the tables of
docs/parameter-server.md.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

EXPERIMENT = '''"""A network on noise, with a pause in each batch."""

import os
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import optax

from spmdtrain import Experiment, RunConfig
from spmdtrain.models import MLP


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 400
    global_batch_size: int | None = 96
    learning_rate: float | None = 1e-3
    width: int = 128
    pause: float = 0.0
    """Seconds to load a batch."""
    slow: str = ""
    """Task whose batches take ten times as long."""


class Rows:
    def __init__(self, config):
        self.config = config
        draw = np.random.default_rng(0)
        self.x = draw.normal(size=(960, 64)).astype(np.float32)
        self.y = self.x[:, :8].sum(1)

    def __len__(self):
        return len(self.x)

    def rows(self, indices):
        slow = os.environ.get("SPMDTRAIN_TASK") == self.config.slow
        if len(indices) > 16:  # fewer rows are read only for shapes or the fingerprint
            time.sleep(self.config.pause * (10 if slow else 1))
        return self.x[indices], self.y[indices]


def objective(model, batch):
    x, y = batch
    return {"loss": (model(x)[:, 0] - y) ** 2}


def build(config):
    return Experiment(
        model=partial(MLP, 64, (config.width, config.width), 1),
        objective=objective,
        optimizer=optax.adam(config.learning_rate),
        train=Rows(config),
    )
'''


@dataclass(frozen=True)
class Job:
    """A job; its strategy is parameter_server, or mirrored without servers."""

    workers: int
    servers: int
    width: int = 128
    pause: float = 0.02
    slow: str = ""

    def run(self, steps: int, folder: Path) -> "Result":
        """Runs the job and measures its speed from step 100 on."""
        path, workdir = folder / "noise.py", folder / "run"
        path.write_text(EXPERIMENT)
        own = ["--processes", self.workers + bool(self.servers), "--devices-per-process", 1]
        options = ["--steps", steps, "--width", self.width, "--pause", self.pause]
        options += ["--slow", self.slow, "--workdir", workdir, "--checkpoint-every-steps", 10**6]
        if self.servers:
            own += ["--ps", self.servers]
            options += ["--strategy", "parameter_server", "--servers.min-shard-bytes", 1]
        module = [sys.executable, "-u", "-m"]
        line = [*module, "spmdtrain.launch", *own, "--", *module, "spmdtrain.run"]
        line += ["--config", path, *options]
        process = subprocess.Popen(
            list(map(str, line)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        times, output = dict[int, float](), ""
        for text in process.stdout:
            output += text
            if match := re.match(r"\[chief\] step (\d+)/", text):
                times[int(match[1])] = time.perf_counter()
        if process.wait():
            raise SystemExit(output)
        file = workdir / "servers.json"
        report = json.loads(file.read_text()) if file.exists() else {}
        return Result((steps - 100) / (times[steps] - times[100]), report)


@dataclass(frozen=True)
class Result:
    """Steps per second, and the report of the servers."""

    rate: float
    report: dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps: int = parser.parse_args().steps

    def run(job: Job) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            result = job.run(steps, Path(folder))
        print(f"{job}: {result.rate:.1f} steps/s", file=sys.stderr)
        return result

    print("| workers | parameters | 1 server | 2 servers | pulled and pushed per step |")
    print("|---|---|---|---|---|")
    for width in (128, 704):
        parameters = 64 * width + width + width * width + width + width + 1
        for workers in (1, 2, 3):
            results = [run(Job(workers, servers, width)) for servers in (1, 2)]
            rates = " | ".join(f"{result.rate:.0f}" for result in results)
            sent = int(str(results[0].report["pulled_bytes_per_step"])) / 1e6
            print(f"| {workers} | {parameters:,} | {rates} | {sent:.2f} MB |", flush=True)
    print("\n| three workers | equally fast | one ten times slower | ratio |")
    print("|---|---|---|---|")
    for name, servers in (("mirrored", 0), ("parameter_server", 1)):
        even = run(Job(3, servers)).rate
        slow = run(Job(3, servers, slow="worker 1")).rate
        print(f"| `{name}` | {even:.1f} | {slow:.1f} | {slow / even:.0%} |", flush=True)


if __name__ == "__main__":
    main()
