"""Comparison of peers: long-lived processes that train in turns, one segment each, rotating order.

The figure is a peer's ratio to the floor in the same round, so that a change of the machine's speed
affects all peers. The floor runs twice: if the two medians differ by more than 5 %, the comparison
is void.
"""

import contextlib
import json
import os
import pty
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))

from gate import ADDRESS, ANSWERS, CHECK, RANK, STARTED
from work import Work

THREADS = len(os.sched_getaffinity(0))
"""OpenMP threads of a peer, divided among its processes; XLA uses all processors anyway."""
VOID = 0.05
"""Largest allowed difference between the medians of the two floors."""
INHERITED = ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "TF_CONFIG")
"""Environment variables that peers do not inherit."""
HIDDEN = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""Environment variables that restrict peers to the CPU."""
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Environment variables that let several peers share an accelerator's memory."""


@dataclass(frozen=True)
class Peer:
    """A training program and the Python of its environment."""

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    python: str = sys.executable
    share: int = 1
    """Divisor of the steps of a segment, because slow peers would take most of the time."""
    trains: bool = True
    """Whether it trains a model. Others only read data."""

    @property
    def is_there(self) -> bool:
        """Whether its environment exists."""
        return Path(self.python).exists()


class UnequalWorkError(Exception):
    """The peers of a comparison do not compute the same."""


@dataclass
class Running:
    """The processes of a peer, waiting at their gates or training a segment."""

    peer: Peer
    steps: int
    """Steps of a segment."""
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    answers: list[TextIO] = field(default_factory=list)
    first: dict[str, Any] = field(default_factory=dict)
    """The report at the first gate."""

    def turn(self) -> dict[str, Any]:
        """Trains one segment; returns `answer()`."""
        for process in self.processes:
            assert process.stdin is not None
            print("go", file=process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Waits for the reports of all processes and returns them combined."""
        reports: list[dict[str, Any]] = []
        for process, answers in zip(self.processes, self.answers, strict=True):
            if not (line := answers.readline()):
                raise RuntimeError(f"{self.peer.name} ended with code {process.wait()}")
            reports.append(json.loads(line))
        combined = dict(reports[0])
        if "seconds" in combined:
            combined.setdefault("steps", self.steps)
            combined["seconds"] = max(each["seconds"] for each in reports)
            combined["cpu seconds"] = sum(each["cpu seconds"] for each in reports)
        combined["peak MB"] = sum(each.get("peak MB", 0.0) for each in reports)
        return combined


@contextlib.contextmanager
def running(peer: Peer, work: Work, log: Path, **variables: str) -> Iterator[Running]:
    """Starts a peer, waits for its first gate, and kills it on exit.

    Its output is a pseudo-terminal that is written to `log`.
    """
    work = replace(work, segment=max(1, work.segment // peer.share))
    started = Running(peer, work.segment)
    with contextlib.ExitStack() as stack:
        own_files = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        address = f"127.0.0.1:{_free_port(work.processes)}"
        for rank in range(work.processes):
            inside, outside = os.pipe()
            terminal, own = pty.openpty()
            threads = str(max(1, THREADS // work.processes))
            limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)
            program = str(HERE / "peers" / peer.program)
            process = subprocess.Popen(
                [peer.python, "-u", program, *work.arguments, *peer.arguments],
                stdin=subprocess.PIPE,
                stdout=own,
                stderr=own,
                pass_fds=[outside],
                text=True,
                env={name: x for name, x in os.environ.items() if name not in INHERITED}
                | limits
                | (SHARED if work.accelerator else HIDDEN)
                | {ANSWERS: str(outside), STARTED: str(time.time())}
                | {RANK: str(rank), ADDRESS: address}
                | {"TERM": "xterm", "TMPDIR": own_files, "XDG_CACHE_HOME": own_files}
                | variables,
            )
            assert process.stdin is not None
            stack.callback(process.stdin.close)
            stack.callback(process.wait)
            stack.callback(process.kill)
            os.close(outside)
            os.close(own)
            path = log.with_suffix(f".{rank}{log.suffix}")
            threading.Thread(target=_copy_output, args=(terminal, path), daemon=True).start()
            started.processes.append(process)
            started.answers.append(stack.enter_context(os.fdopen(inside)))
        started.first = started.answer()
        yield started


SAME_LOSS = {"float32": 1e-4, "bfloat16": 1e-2}
"""The largest relative difference of two losses of the same weights and batch, by dtype."""


def work_of(peers: Sequence[Peer], work: Work, file: Path) -> dict[str, dict[str, Any]]:
    """Returns the loss, parameters, FLOPs and dtypes of each peer, for the same weights and batch.

    Args:
        peers: The peers; the first one is the floor.
        work: The workload; the step is that of one device.
        file: Result file of the comparison, next to which the peers' output is written.

    Raises:
        UnequalWorkError: If the loss or the number of parameters of a peer is not the floor's.
    """
    single = replace(work, devices=1, processes=1, segment=1)

    def facts(peer: Peer) -> dict[str, Any]:
        log = file.with_name(f"{file.stem} {peer.name} work.log".replace(" ", "-"))
        with running(peer, single, log, **{CHECK: "1"}) as one:
            return {x: one.first[x] for x in ("loss", "parameters", "flops", "dtypes")}

    # Nothing is timed here. A peer compiles with about four processors.
    with ThreadPoolExecutor(max(1, THREADS // 4)) as threads:
        found = dict(zip([x.name for x in peers], threads.map(facts, peers), strict=True))
    floor, *others = found
    expected = found[floor]
    for name in others:
        own = found[name]
        bound = max(x for dtype, x in SAME_LOSS.items() if dtype in expected["dtypes"])
        same = abs(own["loss"] - expected["loss"]) <= bound * abs(expected["loss"])
        if not same or own["parameters"] != expected["parameters"]:
            raise UnequalWorkError(
                f"{name} has loss {own['loss']:.6f} and {own['parameters']:,} parameters, and "
                f"{floor} has {expected['loss']:.6f} and {expected['parameters']:,} for the same "
                "weights and batch: they do not compute the same"
            )
    return found


def _free_port(count: int) -> int:
    """Returns the first of `count` consecutive free ports."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for port in range(first + 1, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return int(first)


def _copy_output(terminal: int, log: Path) -> None:
    with (
        os.fdopen(terminal, "rb", closefd=True),
        log.open("wb") as file,
        contextlib.suppress(OSError),  # raised when the terminal closes
    ):
        while content := os.read(terminal, 1 << 16):
            file.write(content)


def compare(
    peers: Sequence[Peer], work: Work, rounds: int, file: Path, origin: dict[str, Any]
) -> dict[str, Any]:
    """Runs the peers in turns and returns the result.

    Args:
        peers: The peers; the first one is the floor.
        work: The workload.
        rounds: Number of rounds.
        file: Result file, written after each round.
        origin: Machine, commit and time, for the file.

    Raises:
        UnequalWorkError: If the peers do not compute the same.
    """
    floor, *others = peers
    again = replace(floor, name=f"{floor.name}, again")
    described = vars(work) | {"data": Path(work.data).name}  # without this machine's folders
    result: dict[str, Any] = {"origin": origin, "work": described, "threads": THREADS}
    result |= {"floor": floor.name, "start": {}, "rounds": []}
    result["missing"] = [peer.name for peer in others if not peer.is_there]
    if floor.trains:
        result["work of"] = work_of([floor, *(x for x in others if x.is_there)], work, file)
    with contextlib.ExitStack() as stack:
        each = []
        for peer in (floor, again, *(peer for peer in others if peer.is_there)):
            log = file.with_name(f"{file.stem} {peer.name}.log".replace(" ", "-"))
            started = stack.enter_context(running(peer, work, log))
            each.append(started)
            # A peer starts after the previous one has completed its first steps and its first save
            # (if it saves): these do not count.
            result["start"][peer.name] = started.turn()["since start"]
            started.turn()
        for number in range(rounds):
            turn: dict[str, Any] = {"load": os.getloadavg()[0]}
            turned = each[number % len(each) :] + each[: number % len(each)]
            # Alternating directions, so that no peer always follows the same one.
            for current in reversed(turned) if number % 2 else turned:
                report = current.turn()
                del report["since start"]
                turn[current.peer.name] = report
            result["rounds"].append(turn)
            file.write_text(json.dumps(result, indent=1) + "\n")
            print(f"  round {number + 1} of {rounds}", file=sys.stderr)
    return result


@dataclass(frozen=True)
class Ratio:
    """Speed relative to the floor: median, lowest and highest over the rounds."""

    median: float
    least: float
    most: float


def ratio(result: dict[str, Any], peer: str) -> Ratio:
    """Returns a peer's speed relative to the floor, from a result of `compare`."""
    floor = result["floor"]
    ratios = [_per_step(turn[floor]) / _per_step(turn[peer]) for turn in result["rounds"]]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def _per_step(report: dict[str, Any]) -> float:
    return float(report["seconds"] / report["steps"])


def seconds_a_step(result: dict[str, Any], peer: str) -> float:
    """Returns a peer's median seconds per step over the rounds."""
    return statistics.median(_per_step(turn[peer]) for turn in result["rounds"])


def is_void(result: dict[str, Any]) -> bool:
    """Returns whether the two runs of the floor differ too much."""
    return abs(ratio(result, f"{result['floor']}, again").median - 1) > VOID


def table(result: dict[str, Any]) -> list[list[str]]:
    """Returns the rows of a table, the heading first."""
    heading = "ratio,from,to,us per step,examples/s,CPUs,peak MB,import s,first step s"
    rows = [["", *heading.split(",")]]
    work = result["work"]
    if work["accelerator"]:
        rows[0].append("device MB")
    works = result.get("work of", {})
    if works:
        rows[0] += ["loss", "parameters", "MFLOP", "dtypes"]
    for name in result["start"]:
        turns = [turn[name] for turn in result["rounds"]]
        speed, step = ratio(result, name), seconds_a_step(result, name)
        cpus = sum(x["cpu seconds"] for x in turns) / sum(x["seconds"] for x in turns)
        start = result["start"][name]
        rows.append(
            [
                name,
                *(f"{x:.3f}" for x in (speed.median, speed.least, speed.most)),
                f"{step * 1e6:,.0f}",
                f"{work['batch_size'] / step:,.0f}",
                f"{cpus:.2f}",
                f"{max(x['peak MB'] for x in turns):,.0f}",
                f"{start.get('imported', float('nan')):.2f}",
                f"{start.get('first step', float('nan')):.2f}",
            ]
        )
        if work["accelerator"]:
            rows[-1].append(f"{max(x['device peak MB'] for x in turns):,.0f}")
        if works:
            own = works.get(name) or works[result["floor"]]  # which runs twice
            flops = "" if own["flops"] is None else f"{own['flops'] / 1e6:,.1f}"
            rows[-1] += [f"{own['loss']:.5f}", f"{own['parameters']:,}", flops, own["dtypes"]]
    return rows
