"""W11: the time from `kill -9` of a process to the next useful step, cold and warm.

    python benchmarks/restart.py [--works transformer mobilenet] [--processes 2 4] [--rounds 2]
        [--kills 3] [--options "..."]

A job of several processes of one virtual device runs under the launcher. At a random step a random
one of its processes is killed. A useful step is one that was never computed before: its loss is the
first line of metrics.jsonl with a higher step than all before. In each round, a cold job and one
with a warm spare for each process take turns, so that both see the same load; the ratio is that of
the medians. All processes share the processors of one machine. `--options` are further options of
the run, in both.
The figures are written to benchmarks/results/w11-restart.json, in place of those of the run before;
docs/reliability.md has a table of them. Data: SPMDTRAIN_DATA, with tinyshakespeare and
tf_flowers_small.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spmdtrain.distributed import progress
from spmdtrain.distributed.progress import Phase, ProgressRecord

HERE = Path(__file__).parent
RESULT = "w11-restart"
TITLE = "W11: from the loss of a process to the next useful step"
EXPLANATION = (
    "Seconds from `kill -9` of a random process at a random step until the loss of a step that was "
    "never computed before is written: cold, and with a warm spare for each process. *ends* is the "
    "time until all processes have ended and new ones are started, *joined* until they have joined "
    "and begin to restore, *restored* until the state is restored. Medians; both kinds took turns."
)
_EXPERIMENTS = HERE.parent / "experiments"
WORKS = {
    "transformer": (
        *("--config", str(_EXPERIMENTS / "shakespeare_gpt.py"), "--preset", "tiny"),
        *("--data-dir", "{data}/tinyshakespeare"),
    ),
    "mobilenet": (
        *("--config", str(_EXPERIMENTS / "flowers_mobilenet.py"), "--image-size", "48"),
        *("--data-dir", "{data}/tf_flowers_small", "--cache", "disk"),
    ),
}
_ALL = (
    *("--steps", "1000000", "--eval-every-steps", "1000000", "--log-every", "1"),
    *("--checkpoint-every-steps", "10", "--quiet"),
)
_TIMEOUT = 600.0  # seconds for a step or a spare on a busy machine


class Job:
    """A running job, with the files that it writes."""

    def __init__(self, folder: Path, arguments: Sequence[str], processes: int, spares: int) -> None:
        self.names = ["chief", *(f"worker {n}" for n in range(processes - 1))]
        self.workdir, self._out = folder / "run", folder / "out"
        own = ["--processes", processes, "--devices-per-process", 1, "--max-restarts", 1000]
        own += ["--warm-spares", spares] if spares else []
        line = [sys.executable, "-m", "spmdtrain.launch", *map(str, own), "--", sys.executable]
        line += ["-m", "spmdtrain.run", *arguments, *_ALL, "--workdir", str(self.workdir)]
        environment = {**os.environ, "TMPDIR": str(folder), "JAX_PLATFORMS": "cpu"}
        with self._out.open("w") as out:
            self.process = subprocess.Popen(line, env=environment, stdout=out, stderr=out)
        self._folder = folder

    def record(self, name: str) -> ProgressRecord | None:
        """Returns the last published progress of a task."""
        for folder in self._folder.glob("spmdtrain-*/"):
            if (record := progress.read(folder, name)) is not None:
                return record
        return None

    def step(self) -> int:
        """Returns the last step with a line in metrics.jsonl; 0 without one."""
        with (
            contextlib.suppress(FileNotFoundError),
            (self.workdir / "metrics.jsonl").open() as file,
        ):
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            for line in reversed(file.read().split("\n")[:-1]):
                with contextlib.suppress(ValueError):
                    if (found := json.loads(line))["split"] == "train":
                        return int(found["step"])
        return 0

    def count(self, words: str) -> int:
        """Returns how many lines of the launcher end with some words."""
        return sum(line.endswith(words) for line in self._out.read_text().splitlines())

    def wait(self, reached: Any, seconds: float = _TIMEOUT) -> None:
        """Waits until `reached` returns a true value."""
        until = time.monotonic() + seconds
        while not reached():
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the job has ended or hangs:\n{self._out.read_text()[-3000:]}")
            time.sleep(0.01)

    def kill_one(self, draw: random.Random) -> dict[str, float]:
        """Kills a process; returns the seconds until each part of the restart."""
        before = {name: self.record(name) for name in self.names}
        victim = before[draw.choice(self.names)]
        assert victim is not None
        began, newest = time.monotonic(), 0
        os.kill(victim.pid, signal.SIGKILL)
        times: dict[str, float] = {}

        def reached() -> bool:
            nonlocal newest
            now = time.monotonic() - began
            records = [self.record(name) for name in self.names]
            new = [r for r in records if r and r.pid not in {b.pid for b in before.values() if b}]
            if len(new) == len(records):
                times.setdefault("ends", now)
                if new[0].phase is not Phase.START:
                    times.setdefault("joined", now)
                if new[0].phase not in (Phase.START, Phase.RESTORE, Phase.HOST):
                    times.setdefault("restored", now)
                if "joined" in times and self.step() > newest:
                    times["useful"] = now
            else:  # what still runs may complete steps
                newest = max(newest, self.step())
            return "useful" in times

        self.wait(reached)
        return times

    def stop(self) -> None:
        """Ends the job at once."""
        for _ in range(2):
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        self.process.wait(_TIMEOUT)


@contextlib.contextmanager
def started(arguments: Sequence[str], processes: int, spares: int) -> Iterator[Job]:
    """Yields a job that makes steps, and whose spares are ready."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), arguments, processes, spares)
        try:
            job.wait(lambda: job.step() > 10)
            yield job
        finally:
            job.stop()


def measure(
    work: str, processes: int, rounds: int, kills: int, more: Sequence[str], data: str
) -> dict[str, Any]:
    """Returns the seconds of the restarts of a work: cold and warm, in turns."""
    arguments = [*(word.format(data=data) for word in WORKS[work]), *more]
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    loads, draw = [os.getloadavg()[0]], random.Random(0)
    for _, kind in itertools.product(range(rounds), found):
        spares = processes if kind == "warm" else 0
        with started(arguments, processes, spares) as job:
            for number in range(kills):
                if spares:
                    job.wait(lambda: job.count("spare processes are ready") > number)  # noqa: B023
                next_ = job.step() + draw.randint(1, 30)
                job.wait(lambda: job.step() >= next_)  # noqa: B023
                found[kind].append(job.kill_one(draw))
                loads.append(os.getloadavg()[0])
                print(work, processes, kind, found[kind][-1], f"load {loads[-1]:.1f}", flush=True)
    return {"work": work, "processes": processes, "seconds": found, "loads": loads}


def table(result: dict[str, Any]) -> list[list[str]]:
    """Returns rows of the medians, and of the ratio of warm to cold."""
    parts = ("ends", "joined", "restored", "useful")
    rows = [["", "processes", "", *parts, "lowest", "highest", "warm / cold", "load"]]
    for each in result["jobs"]:
        useful = {k: [turn["useful"] for turn in v] for k, v in each["seconds"].items()}
        ratio = statistics.median(useful["warm"]) / statistics.median(useful["cold"])
        for kind, turns in each["seconds"].items():
            medians = [statistics.median(turn.get(part, 0.0) for turn in turns) for part in parts]
            row = [each["work"], str(each["processes"]), kind, *(f"{x:.2f}" for x in medians)]
            row += [f"{min(useful[kind]):.2f}", f"{max(useful[kind]):.2f}"]
            loads = f"{min(each['loads']):.1f} to {max(each['loads']):.1f}"
            rows.append([*row, f"{ratio:.2f}" if kind == "warm" else "", loads])
    return rows


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--options", default="")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if "SPMDTRAIN_DATA" not in os.environ:
        parser.error("SPMDTRAIN_DATA is not set: it names the folder with the data")
    import bench

    origin, data = bench.origin(), os.environ["SPMDTRAIN_DATA"]
    jobs = [
        measure(work, count, options.rounds, options.kills, shlex.split(options.options), data)
        for work, count in itertools.product(options.works, options.processes)
    ]
    result = {
        "origin": origin,
        "rounds": options.rounds,
        "kills": options.kills,
        "options": options.options,
        "jobs": jobs,
    }
    (options.results / f"{RESULT}.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in table(result):
        print("  ".join(f"{cell:>11}" for cell in row))


if __name__ == "__main__":
    main()
