"""A job of several machines, whose launchers act together, and which loses some of them."""

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import BOUND, environment
from processes import (
    drill,
    free_port,
    run_line,
    steps_in,
    sums,
    sums_on_one_device,
    tf_config,
)

from spmdtrain.testing.processes import Process

pytestmark = pytest.mark.drill

STEPS = 80
EXACT = ("--exact", 16, "--global-batch-size", 48, "--steps", STEPS)
TOKEN = "a token of the job"


class Machines:
    """Launchers on this machine, each with an address of its own, as on several machines."""

    def __init__(
        self, folder: Path, count: int, *options: object, least: int | None, late: int
    ) -> None:
        self.folder = folder
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        own = [] if least is None else ["--min-processes", str(least)]
        line = run_line(drill(folder), "--workdir", folder / "run", *options)
        self.line = [sys.executable, "-m", "spmdtrain.launch", "--devices-per-process", "1"]
        self.line += [*own, "--", *line]
        self.running = [self.start(rank) for rank in range(count - late)]
        self.ended: list[Process] = []

    def start(self, rank: int, **env: str) -> Process:
        env = {"TF_CONFIG": tf_config(self.addresses, rank), "SPMDTRAIN_JOB_TOKEN": TOKEN, **env}
        name = f"{rank}-{time.monotonic_ns()}.log"
        return Process(f"{rank}", self.line, {**environment(), **env}, None, self.folder / name)

    def restart(self, rank: int) -> None:
        """Starts a launcher again, as a scheduler does."""
        self.ended.append(self.running[rank])
        self.running[rank] = self.start(rank)

    def wait_for(self, what: Callable[[str], object], timeout: float = BOUND) -> None:
        """Waits until the output of all launchers so far satisfies a condition."""
        until = time.monotonic() + timeout
        while not what(self.output):
            assert time.monotonic() < until, self.output
            time.sleep(0.1)

    def codes(self) -> list[int | None]:
        until = time.monotonic() + BOUND
        while any(one.code is None for one in self.running) and time.monotonic() < until:
            time.sleep(0.1)
        return [one.code for one in self.running]

    @property
    def output(self) -> str:
        return "\n".join(f"{one.task}: {one.output}" for one in [*self.running, *self.ended])


@contextmanager
def machines(
    folder: Path, count: int, *options: object, least: int | None = None, late: int = 0
) -> Iterator[Machines]:
    """Starts all launchers but the last, which are `late`."""
    started = Machines(folder, count, *options, least=least, late=late)
    try:
        yield started
    finally:
        for process in [*started.running, *started.ended]:
            process.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The final state of a run on one device without a loss."""
    return sums_on_one_device(tmp_path_factory.mktemp("alone"), STEPS, *EXACT)


@pytest.mark.parametrize(
    ("rank", "fault"),
    [
        (0, signal.SIGKILL),  # the machine that leads, and process 0
        *(
            pytest.param(rank, fault, marks=pytest.mark.nightly)
            for rank, fault in [
                *((2, signal.SIGKILL), (0, signal.SIGTERM), (3, signal.SIGTERM)),
                *((0, signal.SIGSTOP), (1, signal.SIGSTOP)),
            ]
        ),
    ],
)
def test_the_others_continue_without_a_machine_and_with_it_again(
    tmp_path: Path, alone: dict[str, str], rank: int, fault: signal.Signals
) -> None:
    with machines(tmp_path, 4, *EXACT, "--pause", 0.4, least=2) as job:
        job.wait_for(lambda text: max(steps_in(text), default=0) >= 12)
        job.running[rank].send(fault)
        job.wait_for(lambda text: " x cpu of 2 processes" in text)
        if fault is signal.SIGSTOP:
            job.running[rank].send(signal.SIGCONT)
        else:
            assert job.running[rank].code == {signal.SIGKILL: -9, signal.SIGTERM: 75}[fault]
            job.restart(rank)
        assert job.codes() == [0, 0, 0, 0], job.output
        counts = re.findall(r"\[chief\] (\d) x cpu of", job.output)
        assert sorted(counts) == ["2", "4", "4"], job.output
        assert "4 processes are possible again" in job.output
        assert sums(tmp_path / "run", STEPS) == alone


@pytest.mark.nightly
def test_two_are_lost_at_once_and_a_third_during_their_return(
    tmp_path: Path, alone: dict[str, str]
) -> None:
    with machines(tmp_path, 4, *EXACT, "--pause", 0.4, least=2) as job:
        job.wait_for(lambda text: max(steps_in(text), default=0) >= 12)
        for rank in (0, 3):
            job.running[rank].send(signal.SIGKILL)
        # The two that are left might be the smaller part of a divided network.
        job.wait_for(lambda text: "waiting for the launchers of chief" in text)
        assert "x cpu of 2 processes" not in job.output
        job.restart(3)
        job.wait_for(lambda text: " x cpu of 2 processes" in text)
        job.restart(0)
        job.wait_for(lambda text: "4 processes are possible again" in text)
        job.running[1].send(signal.SIGKILL)
        job.restart(1)
        assert job.codes() == [0, 0, 0, 0], job.output
        assert sums(tmp_path / "run", STEPS) == alone


@pytest.mark.nightly
def test_without_a_minimum_all_wait_for_a_lost_machine(
    tmp_path: Path, alone: dict[str, str]
) -> None:
    with machines(tmp_path, 2, *EXACT, "--pause", 0.1) as job:
        job.wait_for(lambda text: max(steps_in(text), default=0) >= 12)
        job.running[1].send(signal.SIGKILL)
        job.wait_for(lambda text: "too few machines are left: no launcher of worker 0" in text)
        job.restart(1)
        assert job.codes() == [0, 0], job.output
        assert "x cpu of 1" not in job.output
        assert sums(tmp_path / "run", STEPS) == alone


@pytest.mark.nightly
def test_a_machine_is_waited_for_if_the_others_cannot_be_used_without_it(
    tmp_path: Path, alone: dict[str, str]
) -> None:
    with machines(tmp_path, 4, *EXACT, "--pause", 0.1, least=3) as job:  # 3 is no power of two
        job.wait_for(lambda text: max(steps_in(text), default=0) >= 12)
        job.running[3].send(signal.SIGKILL)
        job.wait_for(lambda text: "] waiting for the launchers of worker 2" in text)
        time.sleep(5)
        job.restart(3)
        assert job.codes() == [0, 0, 0, 0], job.output
        assert sums(tmp_path / "run", STEPS) == alone


@pytest.mark.nightly
def test_a_job_continues_without_a_machine_that_comes_late_and_does_not_fit(
    tmp_path: Path, alone: dict[str, str]
) -> None:
    with machines(tmp_path, 3, *EXACT, "--pause", 0.5, least=2, late=1) as job:
        job.wait_for(lambda text: max(steps_in(text), default=0) >= 12)
        job.running.append(job.start(2))
        assert job.codes() == [0, 0, 0], job.output
        assert re.search(r"ended \(code 2\).*; continues with 2 of 3 processes", job.output)
        assert sums(tmp_path / "run", STEPS) == alone


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_while_the_job_ends_changes_no_exit_code(tmp_path: Path, rank: int) -> None:
    with machines(tmp_path, 2, "--steps", 20) as job:
        job.wait_for(lambda text: "finished at step 20" in text)
        job.running[rank].send(signal.SIGTERM)
        codes = job.codes()
        assert codes in ([0, 0], [75, 75]), job.output
