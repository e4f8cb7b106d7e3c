"""Scaling from one process to two, one core each, as in tf.distribute's guide.

    python benchmarks/scaling.py --workload mlp|flowers [--data FOLDER] [--rounds 7] [--wait]

Every process is pinned to one core, and the global batch is the same. The processes live as long as
the measurement and train in turns, one segment of steps each; ratios are within a round. Besides
the speed-up, further measurements show what limits it: one process at half the batch (fixed costs
of a step), and two such processes that do not communicate (contention of the cores for memory). The
remainder of the job with two processes is communication. Writes the figures to
benchmarks/results/scaling-WORKLOAD.json; `report.py` makes the table. With `--wait` all programs
are compiled first, and the rounds begin after a line on standard input.
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

WARM_UP = 3  # segments, in which each image is decoded once and cached
ALONE, HALF, APART = "1 process", "1 process, half the batch", "2 apart, half the batch each"

TITLES = {
    "mlp": "Scaling: the MLP at batch 1,024, one process against two, one core each",
    "flowers": "Scaling: MobileNetV2 on flowers, batch 32, one process against two, one core each",
}
EXPLANATION = (
    "The same global batch, every process pinned to one core (`benchmarks/scaling.py`); ratios of "
    "examples per second within a round. Two processes *apart* train half the batch each and do "
    "not communicate: they show how the cores slow each other down."
)


@dataclass(frozen=True)
class Job:
    """Processes that train one segment together."""

    name: str
    batch_size: int
    processes: int = 1
    statistics: str = "global"
    copies: int = 1
    """Number of such jobs that run at the same time, each on its own core."""


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
    for peer in job:
        for process in peer.processes:
            assert process.stdin is not None
            print("go", file=process.stdin, flush=True)
    return max(float(peer.answer().get("seconds", 0)) for peer in job)


def measure(workload: str, data: str, rounds: int, file: Path, wait: bool) -> dict[str, Any]:
    """Runs the jobs of a workload in turns.

    Args:
        workload: Name in `WORKLOADS`.
        data: Folder of the flowers; unused by other workloads.
        rounds: Number of rounds.
        file: Result file, written after each round.
        wait: Whether to wait for a line on standard input before the first round.

    Returns:
        The content of `file`.
    """
    work, jobs = WORKLOADS[workload]
    result: dict[str, Any] = {"origin": bench.origin(), "segment": work.segment}
    result |= {"batch_size": work.batch_size, "rounds": []}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started: dict[str, list[Running]] = {}
        for job in jobs:
            job_work = Work(
                workload, job.batch_size, work.segment, processes=job.processes, data=data
            )
            started[job.name] = [
                stack.enter_context(
                    running(
                        Peer(
                            job.name,
                            "held.py",
                            (f"--statistics={job.statistics}", f"--core={number}"),
                        ),
                        job_work,
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
    """Returns the rows of a table, the heading first: medians, and ratios within a round."""
    rounds = result["rounds"]
    rows = [["", "ms per step", "examples/s", "speed-up", "from", "to"]]
    for name in (name for name in rounds[0] if name != "load"):
        step = statistics.median(each[name] for each in rounds)
        # Half the batch has half the examples per step, except with two processes apart.
        share = 0.5 if name == HALF else 1.0
        speed = [share * each[ALONE] / each[name] for each in rounds]
        figures = (statistics.median(speed), min(speed), max(speed))
        rate = f"{share * result['batch_size'] / step:,.0f}"
        rows.append([name, f"{step * 1e3:,.1f}", rate, *(f"{x:.2f}" for x in figures)])
    return rows


def losses(result: dict[str, Any]) -> list[str]:
    """Returns a line about the components of the step time for each job of two processes."""
    rounds = result["rounds"]
    lines = []
    for name in (name for name in rounds[0] if name.startswith("2 processes")):
        # Fractions of the step of one process at the whole batch; the ideal sum is one half.
        parts = {
            "half a step of one process": [0.5 for _ in rounds],
            "fixed costs that do not halve with the batch": [
                r[HALF] / r[ALONE] - 0.5 for r in rounds
            ],
            "contention of two cores": [(r[APART] - r[HALF]) / r[ALONE] for r in rounds],
            "communication and waiting": [(r[name] - r[APART]) / r[ALONE] for r in rounds],
        }
        listed = ", ".join(f"{part} {statistics.median(x):.2f}" for part, x in parts.items())
        lines.append(f"- {name}, in steps of one process: {listed}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--data", default="", help="folder of the flowers data set")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--wait", action="store_true")
    options = parser.parse_args()
    if options.workload == "flowers" and not options.data:
        parser.error("--data is required: a folder with one folder per class of flowers")
    file = options.results / f"scaling-{options.workload}.json"
    for row in table(measure(options.workload, options.data, options.rounds, file, options.wait)):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
