"""Scaling as tf.distribute's guide measures it: one process against two, one core each.

    python benchmarks/scaling.py --workload mlp|flowers [--data FOLDER] [--rounds 7] [--wait]

Every process is held to one core, and the global batch is the same. The processes live as long as
the measurement and train by turns, a segment of steps each; a ratio is that of a round. Beside the
speed-up, three measurements say what it loses: one process at half the batch (fixed costs of a
step), two such processes that know nothing of each other (contention of the cores for memory), and
what is left to the two processes of the job is the exchange. Writes the figures to
benchmarks/results/scaling-WORKLOAD.json; `report.py` makes the table. With `--wait` all programs
are compiled first, and the rounds begin after a line on the standard input.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench
from compare import HERE, Peer, Running, running
from work import Work

WARM_UP = 3  # segments: each picture is decoded once, and kept
ALONE, HALF, APART = "1 process", "1 process, half the batch", "2 apart, half the batch each"

TITLES = {
    "mlp": "Scaling: the MLP at batch 1,024, one process against two, one core each",
    "flowers": "Scaling: MobileNetV2 on flowers, batch 32, one process against two, one core each",
}
EXPLANATION = (
    "The same global batch, every process held to one core (`benchmarks/scaling.py`); ratios of "
    "examples a second within a round. Two processes *apart* train half the batch each and "
    "exchange nothing: they show what the cores take from each other."
)


@dataclass(frozen=True)
class Job:
    """Processes that train one segment together."""

    name: str
    batch_size: int
    processes: int = 1
    statistics: str = "global"
    copies: int = 1
    """Jobs that run at the same time, each on a core of its own."""


WORKLOADS: dict[str, tuple[Work, tuple[Job, ...]]] = {
    "mlp": (
        Work("mlp", 1024, 60),
        (
            Job(ALONE, 1024),
            Job("2 processes", 1024, 2),
            Job(HALF, 512),
            Job(APART, 512, copies=2),
        ),
    ),
    "flowers": (
        Work("flowers", 32, 8),
        (
            Job(ALONE, 32),
            Job("2 processes, replica", 32, 2, "replica"),
            Job("2 processes, global", 32, 2),
            Job(HALF, 16),
            Job(APART, 16, copies=2),
        ),
    ),
}


def turn(job: list[Running]) -> float:
    """Trains a segment with all of a job's processes; returns the seconds of the slowest."""
    for one in job:
        for process in one.processes:
            assert process.stdin is not None
            print("go", file=process.stdin, flush=True)
    return max(float(one.answer().get("seconds", 0)) for one in job)


def measure(workload: str, data: str, rounds: int, file: Path, wait: bool) -> dict[str, Any]:
    """Runs the jobs of a workload by turns; returns what `file` holds."""
    work, jobs = WORKLOADS[workload]
    result: dict[str, Any] = {"origin": bench.origin(), "segment": work.segment}
    result |= {"batch_size": work.batch_size, "rounds": []}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started: dict[str, list[Running]] = {}
        for job in jobs:
            of = Work(workload, job.batch_size, work.segment, processes=job.processes, data=data)
            started[job.name] = [
                stack.enter_context(
                    running(
                        Peer(
                            job.name,
                            "held.py",
                            (f"--statistics={job.statistics}", f"--core={number}"),
                        ),
                        of,
                        logs / f"{job.name} {number}.log",
                    )
                )
                for number in range(job.copies)
            ]
            for _ in range(WARM_UP):
                turn(started[job.name])
            print(f"{job.name} is ready", file=sys.stderr, flush=True)
        if wait:
            input()
        for number in range(rounds):
            order = list(started)[number % len(started) :] + list(started)[: number % len(started)]
            seconds = {name: turn(started[name]) / work.segment for name in order}
            result["rounds"].append({"load": os.getloadavg()[0], **seconds})
            file.write_text(json.dumps(result, indent=1) + "\n")
    return result


def table(result: dict[str, Any]) -> list[list[str]]:
    """Rows of words, the heading first: medians, and ratios within a round."""
    rounds = result["rounds"]
    rows = [["", "ms a step", "examples/s", "times one process", "from", "to"]]
    for name in (name for name in rounds[0] if name != "load"):
        step = statistics.median(each[name] for each in rounds)
        # The examples of a step: of half the batch there are half as many, but for two apart.
        share = 0.5 if name == HALF else 1.0
        speed = [share * each[ALONE] / each[name] for each in rounds]
        figures = (statistics.median(speed), min(speed), max(speed))
        words = f"{share * result['batch_size'] / step:,.0f}"
        rows.append([name, f"{step * 1e3:,.1f}", words, *(f"{x:.2f}" for x in figures)])
    return rows


def losses(result: dict[str, Any]) -> list[str]:
    """Returns a line for each job of two processes that says where its time goes."""
    rounds = result["rounds"]
    lines = []
    for name in (name for name in rounds[0] if name.startswith("2 processes")):
        # In parts of the step of one process at the whole batch, of which the ideal is a half.
        parts = {
            "half a step of one process": [0.5 for _ in rounds],
            "what does not halve with the batch": [r[HALF] / r[ALONE] - 0.5 for r in rounds],
            "contention of two cores": [(r[APART] - r[HALF]) / r[ALONE] for r in rounds],
            "exchange and waiting": [(r[name] - r[APART]) / r[ALONE] for r in rounds],
        }
        told = ", ".join(f"{part} {statistics.median(x):.2f}" for part, x in parts.items())
        lines.append(f"- {name}, in steps of one process: {told}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--data", default="", help="the folder of the flowers")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--wait", action="store_true")
    given = parser.parse_args()
    if given.workload == "flowers" and not given.data:
        parser.error("--data: the folder that holds the folders of the flowers' classes")
    file = given.results / f"scaling-{given.workload}.json"
    for row in table(measure(given.workload, given.data, given.rounds, file, given.wait)):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
