"""Peers side by side: long-lived processes that train by turns, a segment each, in rotated order.

What is compared is each round's ratio to the floor of the same round, so that a machine that gets
slower slows all of them. The floor runs twice, against itself: where these two differ by more than
5 % in the median, nothing can be read off the run.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))

from gate import ADDRESS, ANSWERS, RANK, STARTED
from work import Work

THREADS = len(os.sched_getaffinity(0))
"""Of each peer, among its processes, by the variables of OpenMP; XLA takes all processors."""
VOID = 0.05
"""How far the floor may be from itself in the median."""
INHERITED = ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "TF_CONFIG")
"""Variables of the caller's that no peer is to see."""
HIDDEN = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
"""Variables that keep peers to the processor."""
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""So that each takes of an accelerator's memory what it needs, and the others have room."""


@dataclass(frozen=True)
class Peer:
    """A program that trains, by the Python of its environment."""

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    python: str = sys.executable
    share: int = 1
    """It makes one step where others make so many: slow ones would take most of the time."""

    @property
    def is_there(self) -> bool:
        """Whether its environment has been made."""
        return Path(self.python).exists()


@dataclass
class Running:
    """A peer's processes, at their gates or in a segment."""

    peer: Peer
    steps: int
    """Of a segment."""
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    answers: list[TextIO] = field(default_factory=list)

    def turn(self) -> dict[str, Any]:
        """Let it train one segment."""
        for process in self.processes:
            assert process.stdin is not None
            print("go", file=process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """What its processes tell at their gates: of all of them together."""
        found: list[dict[str, Any]] = []
        for process, answers in zip(self.processes, self.answers, strict=True):
            if not (line := answers.readline()):
                raise RuntimeError(f"{self.peer.name} ended with code {process.wait()}")
            found.append(json.loads(line))
        told = dict(found[0])
        if "seconds" in told:
            told.setdefault("steps", self.steps)
            told["seconds"] = max(each["seconds"] for each in found)
            told["cpu seconds"] = sum(each["cpu seconds"] for each in found)
        told["peak MB"] = sum(each["peak MB"] for each in found)
        return told


@contextlib.contextmanager
def running(peer: Peer, work: Work, log: Path, **variables: str) -> Iterator[Running]:
    """A peer at its first gate; killed at the end. It writes to a terminal, kept in `log`."""
    work = replace(work, segment=max(1, work.segment // peer.share))
    found = Running(peer, work.segment)
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
            kept = log.with_suffix(f".{rank}{log.suffix}")
            threading.Thread(target=_keep, args=(terminal, kept), daemon=True).start()
            found.processes.append(process)
            found.answers.append(stack.enter_context(os.fdopen(inside)))
        found.answer()
        yield found


def _free_port(count: int) -> int:
    """The first of so many ports in a row that nobody listens at."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for port in range(first + 1, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return int(first)


def _keep(terminal: int, log: Path) -> None:
    with (
        os.fdopen(terminal, "rb", closefd=True),
        log.open("wb") as file,
        contextlib.suppress(OSError),  # which ends the terminal
    ):
        while content := os.read(terminal, 1 << 16):
            file.write(content)


def compare(
    peers: Sequence[Peer], work: Work, rounds: int, file: Path, origin: dict[str, Any]
) -> dict[str, Any]:
    """Run the peers, the first of which is the floor; the result, written after each round.

    `origin` is what else the file is to say: the machine, the commit, the time.
    """
    floor, *others = peers
    again = replace(floor, name=f"{floor.name}, again")
    told = vars(work) | {"data": Path(work.data).name}  # wherever that lies on this machine
    result: dict[str, Any] = {"origin": origin, "work": told, "threads": THREADS}
    result |= {"floor": floor.name, "start": {}, "rounds": []}
    result["missing"] = [peer.name for peer in others if not peer.is_there]
    with contextlib.ExitStack() as stack:
        each = []
        for peer in (floor, again, *(peer for peer in others if peer.is_there)):
            log = file.with_name(f"{file.stem} {peer.name}.log".replace(" ", "-"))
            one = stack.enter_context(running(peer, work, log))
            each.append(one)
            # One starts after the other has made its first steps, and saved a first time if it
            # does: none of that counts.
            result["start"][peer.name] = one.turn()["since start"]
            one.turn()
        for number in range(rounds):
            turn: dict[str, Any] = {"load": os.getloadavg()[0]}
            turned = each[number % len(each) :] + each[: number % len(each)]
            for one in reversed(turned) if number % 2 else turned:  # none follows always the same
                told = one.turn()
                del told["since start"]
                turn[one.peer.name] = told
            result["rounds"].append(turn)
            file.write_text(json.dumps(result, indent=1) + "\n")
            print(f"  round {number + 1} of {rounds}", file=sys.stderr)
    return result


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as the floor, over the rounds."""

    median: float
    least: float
    most: float


def ratio(result: dict[str, Any], peer: str) -> Ratio:
    """Of a peer, from what `compare` wrote."""
    floor = result["floor"]
    of = [_per_step(turn[floor]) / _per_step(turn[peer]) for turn in result["rounds"]]
    return Ratio(statistics.median(of), min(of), max(of))


def _per_step(told: dict[str, Any]) -> float:
    return float(told["seconds"] / told["steps"])


def seconds_a_step(result: dict[str, Any], peer: str) -> float:
    """The median over the rounds."""
    return statistics.median(_per_step(turn[peer]) for turn in result["rounds"])


def is_void(result: dict[str, Any]) -> bool:
    """Whether the floor is too far from itself."""
    return abs(ratio(result, f"{result['floor']}, again").median - 1) > VOID


def table(result: dict[str, Any]) -> list[list[str]]:
    """Rows of words, the heading first."""
    heading = "ratio,from,to,us a step,examples/s,CPUs,peak MB,import s,first step s"
    rows = [["", *heading.split(",")]]
    work = result["work"]
    if work["accelerator"]:
        rows[0].append("device MB")
    for name in result["start"]:
        turns = [turn[name] for turn in result["rounds"]]
        found, step = ratio(result, name), seconds_a_step(result, name)
        cpus = sum(x["cpu seconds"] for x in turns) / sum(x["seconds"] for x in turns)
        start = result["start"][name]
        rows.append(
            [
                name,
                *(f"{x:.3f}" for x in (found.median, found.least, found.most)),
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
    return rows
