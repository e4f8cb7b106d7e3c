"""The progress of a process: what it publishes, whom it lets the launcher blame, and its phases."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import BOUND
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.distributed import progress
from spmdtrain.distributed.progress import (
    CONTEXT,
    WAITING,
    HangTimer,
    Phase,
    PhaseClock,
    ProgressRecord,
    find_hung_task,
    phase,
)


def published(
    tmp_path: Path, code: str, task: str = "worker 1"
) -> subprocess.CompletedProcess[str]:
    """Run a few lines as a launched process."""
    env = os.environ | {progress.LAUNCH: str(tmp_path), progress.TASK: task}
    begin = (
        "import os, signal, sys\nfrom spmdtrain.distributed import progress\n"
        "from spmdtrain.distributed.progress import *\n"
    )
    return subprocess.run(
        [sys.executable, "-c", begin + code],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def test_without_a_launcher_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(progress.LAUNCH, raising=False)
    monkeypatch.chdir(tmp_path)
    progress.begin()
    with progress.phase(Phase.STEP, 3):
        progress.saved(3)
    progress.write_exit_reason(1, "why")
    assert progress.job_ended() is None
    assert not list(tmp_path.iterdir())


def test_phases_nest_and_steps_stay(tmp_path: Path) -> None:
    code = """
def show():
    r = progress.read(".", "worker 1"); print(r.phase, r.step, r.saved, r.pid == os.getpid())
print(progress.read(".", "worker 1"))
begin(); show()
with phase(Phase.EVALUATE, 7):
    show()
    with phase(Phase.LOAD): show()
    show()
saved(6); show()
with phase(Phase.STEP, 8): show()
begin(); show()
"""
    shown = published(tmp_path, code).stdout.splitlines()
    assert shown == [
        "None",
        "start 0 -1 True",
        "evaluate 7 -1 True",
        "load 7 -1 True",
        "evaluate 7 -1 True",
        "host 7 6 True",
        "step 8 6 True",
        "host 8 6 True",
    ]


def test_a_record_outlives_a_killed_process(tmp_path: Path) -> None:
    code = "begin(); saved(4)\nwith phase(Phase.SAVE, 5): os.kill(os.getpid(), 9)"
    assert published(tmp_path, code).returncode == -9
    record = progress.read(tmp_path, "worker 1")
    assert record is not None
    assert (record.phase, record.step, record.saved, record.changes) == (Phase.SAVE, 5, 4, 2)
    assert record.where == "save at step 5"


def test_every_change_counts(tmp_path: Path) -> None:
    code = "begin()\nfor k in range(10):\n    with phase(Phase.STEP, k): pass"
    published(tmp_path, code)
    record = progress.read(tmp_path, "worker 1")
    assert record is not None
    assert record.changes == 21


def test_what_a_process_starts_does_not_publish_for_it(tmp_path: Path) -> None:
    code = """
import subprocess
begin()
nested = '''from spmdtrain.distributed.progress import *
begin(); phase(Phase.LOAD, 99).__enter__(); saved(99)'''
with phase(Phase.STEP, 3): subprocess.run([sys.executable, "-c", nested], check=True)
if os.fork() == 0:
    phase(Phase.LOAD, 98).__enter__()
    os._exit(0)
os.wait()
"""
    assert published(tmp_path, code).returncode == 0
    record = progress.read(tmp_path, "worker 1")
    assert record is not None
    assert (record.phase, record.step, record.saved) == (Phase.HOST, 3, -1)


def test_stacks_of_all_threads_on_sigusr2(tmp_path: Path) -> None:
    code = """
import threading, time
def in_a_thread(): time.sleep(5)
begin()
threading.Thread(target=in_a_thread, daemon=True).start()
time.sleep(0.1)
def in_main(): os.kill(os.getpid(), signal.SIGUSR2)
in_main()
"""
    assert published(tmp_path, code).returncode == 0
    stacks = (tmp_path / "worker-1.stacks").read_text()
    assert "in_main" in stacks
    assert "in_a_thread" in stacks


def test_the_first_reason_stays(tmp_path: Path) -> None:
    code = "write_exit_reason(3, 'the loss is nan'); write_exit_reason(1, 'later', own=False)"
    assert published(tmp_path, code, "chief").returncode == 0
    content = json.loads((tmp_path / "chief.reason").read_text())
    assert content == {"code": 3, "reason": "the loss is nan", "own": True}
    assert progress.read_reason(tmp_path, "chief") == progress.Reason(3, "the loss is nan", True)
    assert progress.read_reason(tmp_path, "worker 0") is None
    (tmp_path / "chief.reason").write_text('{"code": 3, "rea')
    assert progress.read_reason(tmp_path, "chief") is None


def test_the_end_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.LAUNCH, str(tmp_path))
    assert progress.job_ended() is None
    progress.write_ended(tmp_path, "failed: worker 2 was killed")
    assert progress.job_ended() == "failed: worker 2 was killed"


def test_a_file_in_the_making_is_no_record(tmp_path: Path) -> None:
    for size in (0, 10, 48):
        (tmp_path / "chief.phase").write_bytes(bytes(size))
        assert progress.read(tmp_path, "chief") is None


# Who blocks the others. A record: phase, step, and when it last moved.
Places = dict[str, tuple[str, int, float]]


def records(places: Places) -> list[ProgressRecord]:
    return [
        ProgressRecord(task, step, Phase(phase), -1, changes=5, at=at)
        for task, (phase, step, at) in places.items()
    ]


@pytest.mark.parametrize(
    ("places", "stopped", "task", "sentence"),
    [
        pytest.param(
            {"chief": ("step", 37, 5), "worker 0": ("load", 38, 9), "worker 1": ("step", 37, 4)},
            [],
            "worker 0",
            "worker 0 is in load at step 38 and blocks the others",
            id="a higher step does not clear it",
        ),
        pytest.param(
            {"chief": ("step", 37, 5), "worker 0": ("host", 35, 2)},
            [],
            "worker 0",
            "worker 0 is in host at step 35 and blocks the others",
            id="nor does a lower one",
        ),
        pytest.param(
            {"chief": ("load", 37, 5), "worker 0": ("host", 37, 2), "worker 1": ("step", 37, 1)},
            [],
            "worker 0",
            "worker 0 is in host at step 37 and blocks the others",
            id="of two, the one that has not moved for longest",
        ),
        pytest.param(
            {"chief": ("compiled", 0, 5), "worker 0": ("compile", 0, 9)},
            [],
            "worker 0",
            "worker 0 is in compile at step 0 and blocks the others",
            id="the one that still compiles, though it moved later",
        ),
        pytest.param(
            {"chief": ("load", 37, 1), "worker 0": ("step", 37, 2)},
            ["worker 0"],
            "worker 0",
            "worker 0 is stopped by a signal in step 37 and blocks the others",
            id="a stopped one before all",
        ),
        pytest.param(
            {"chief": ("step", 37, 1), "worker 0": ("step", 37, 2)},
            [],
            None,
            "all wait in step 37: a collective does not end",
            id="no process",
        ),
        pytest.param(
            {"chief": ("save", 40, 1), "worker 0": ("save", 40, 2)},
            [],
            None,
            "all wait in save at step 40: a collective does not end",
            id="no process, in a save",
        ),
        pytest.param(
            {"chief": ("compile", 0, 1), "worker 0": ("compile", 0, 2)},
            [],
            None,
            "all are in compile at step 0, and none waits for another: "
            "a larger hang_timeout allows more time",
            id="no process, in a compilation",
        ),
        pytest.param(
            {"chief": ("step", 37, 1), "worker 0": ("step", 36, 2), "worker 1": ("step", 37, 2)},
            [],
            "worker 0",
            "worker 0 is in step 36 while the others wait in step 37",
            id="the one behind",
        ),
        pytest.param(
            {"chief": ("save", 37, 1), "worker 0": ("step", 37, 2), "worker 1": ("step", 37, 2)},
            [],
            "chief",
            "chief is in save at step 37 while the others wait in step 37",
            id="the one elsewhere",
        ),
        pytest.param(
            {"chief": ("save", 37, 1), "worker 0": ("step", 37, 2)},
            [],
            None,
            "each waits for the others (chief in save at step 37, worker 0 in step 37)",
            id="one against one",
        ),
        pytest.param({"chief": ("step", 37, 1)}, [], "chief", "chief is in step 37", id="alone"),
        pytest.param(
            {"chief": ("host", 3, 4), "worker 0": ("load", 3, 2)},
            [],
            "worker 0",
            "worker 0 is in load at step 3, the longest without progress",
            id="none waits",
        ),
        pytest.param(
            {"chief": ("end", 40, 1), "worker 0": ("host", 40, 2)},
            [],
            "worker 0",
            "worker 0 is in host at step 40 and blocks the others",
            id="at the end",
        ),
    ],
)
def test_who_holds_the_others(
    places: Places, stopped: list[str], task: str | None, sentence: str
) -> None:
    found = find_hung_task(records(places), stopped)
    assert (found.task, found.sentence) == (task, sentence)


def test_one_that_has_not_begun_holds_the_others() -> None:
    here = records({"chief": ("start", 0, 2.0)})
    found = find_hung_task(
        [*here, ProgressRecord("worker 0", 0, Phase.START, -1, changes=0, at=0.0)]
    )
    assert (found.task, found.sentence) == (
        "worker 0",
        "worker 0 has not started and blocks the others",
    )


def test_one_whose_output_is_not_read_holds_the_others() -> None:
    chief, worker = records({"chief": ("step", 3, 2.0), "worker 0": ("host", 3, 9.0)})
    full = dataclasses.replace(chief, unread="standard output")
    found = find_hung_task([full, worker])
    assert found.sentence == (
        "chief is in step 3 and blocks the others: its standard output is not read"
    )
    alone = "chief is in step 3: its standard output is not read"
    assert find_hung_task([full]).sentence == alone


anywhere = st.builds(
    lambda phase, step, at: (phase, step, at),
    st.sampled_from(Phase),
    st.integers(0, 50),
    st.floats(0, 100),
)


@given(st.lists(anywhere, min_size=1, max_size=6))
def test_one_that_waits_is_never_blamed_where_one_does_not(
    places: list[tuple[Phase, int, float]],
) -> None:
    all_ = [
        ProgressRecord(f"worker {i}", step, phase, -1, 5, at)
        for i, (phase, step, at) in enumerate(places)
    ]
    found = find_hung_task(all_)
    blamed = next((record for record in all_ if record.task == found.task), None)
    if any(record.phase not in WAITING for record in all_) and blamed is not None:
        assert blamed.phase not in WAITING
    if any(r.phase in WAITING for r in all_) and any(r.phase not in WAITING for r in all_):
        assert blamed is not None
    if blamed is not None:
        assert (found.phase, found.step) == (blamed.phase, blamed.step)
    assert find_hung_task(all_[::-1]).phase == found.phase or len({r.at for r in all_}) < len(all_)
    for record in all_:
        assert find_hung_task(all_, [record.task]).task == record.task


# -- when a job without progress counts as hung ----------------------------------------------------

LOAD, STEP = Phase.LOAD, Phase.STEP


class Job:
    """A job of two tasks, observed each half second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout: float | None) -> None:
        self.now, self.changes = 1000.0, 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.timer = HangTimer(timeout, 900, max_interval=1.0)

    def wait(self, seconds: float, *phases: Phase) -> float | None:
        """Makes a change, and then none; returns after which seconds the job counts as hung."""
        self.changes += 1
        until, began = self.now + seconds, self.now
        while True:
            if self.timer.hung_for(self.changes, phases):
                return self.now - began
            if self.now >= until:
                return None
            self.now += 0.5

    def train(self, seconds: float) -> None:
        for _ in range(60):
            assert self.wait(seconds, LOAD, STEP) is None


@pytest.mark.parametrize(("slowest", "limit"), [(1, 60), (10, 60), (30, 150), (59, 295)])
def test_the_limit_follows_from_the_slowest_step(
    monkeypatch: pytest.MonkeyPatch, slowest: float, limit: float
) -> None:
    job = Job(monkeypatch, None)
    job.train(1)
    assert job.wait(slowest, STEP, STEP) is None
    found = job.wait(2000, LOAD, STEP)
    assert found is not None and limit <= found <= limit + 1


@pytest.mark.parametrize(
    "phases",
    [
        *((Phase.COMPILE, STEP), (Phase.SAVE, Phase.SAVE), (Phase.HOST, STEP)),
        *((Phase.EVALUATE, STEP), (Phase.RESTORE, STEP), (Phase.COMPILED, Phase.COMPILED)),
    ],
)
def test_phases_that_say_nothing_of_the_next_keep_their_limit(
    monkeypatch: pytest.MonkeyPatch, phases: tuple[Phase, ...]
) -> None:
    job = Job(monkeypatch, None)
    job.train(1)
    assert job.wait(890, *phases) is None
    job.train(1)
    found = job.wait(2000, LOAD, STEP)
    assert found is not None and found < 61  # the long pause was not one of steps
    job = Job(monkeypatch, None)
    job.train(1)
    assert job.wait(2000, *phases) == 900


def test_the_first_steps_keep_the_default_since_they_are_only_dispatched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, None)
    for _ in range(39):
        job.wait(0.5, LOAD, STEP)
    assert job.wait(2000, STEP, STEP) == 900


@pytest.mark.parametrize(("timeout", "limit"), [(0, None), (2, 2), (1200, 1200)])
def test_a_given_timeout_is_kept(
    monkeypatch: pytest.MonkeyPatch, timeout: float, limit: float | None
) -> None:
    job = Job(monkeypatch, timeout)
    job.train(1)
    assert job.wait(3000, LOAD, STEP) == limit


# -- the seconds of a process in each phase --------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PhaseClock:
    """A new clock of this process, which counts a second at each look."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    monkeypatch.setattr(CONTEXT, "clock", None)
    monkeypatch.setattr(CONTEXT, "channel", None)
    return progress.take_clock()


def test_the_time_of_an_inner_phase_does_not_count_as_that_of_the_outer(clock: PhaseClock) -> None:
    with phase(Phase.RESTORE), phase(Phase.COMPILE):
        pass
    with phase(Phase.EVALUATE), phase(Phase.LOAD):  # an evaluation reads its batches
        pass
    assert clock.read() == {"start": 1, "restore": 2, "compile": 1, "host": 2, "evaluate": 3}


def test_time_during_which_devices_run_steps_counts_as_that_of_steps(clock: PhaseClock) -> None:
    with phase(Phase.STEP):
        pass  # 1 s
    progress.end_interval(overlapped=False)
    with phase(Phase.LOAD):
        pass
    with phase(Phase.EVALUATE):
        pass
    before = clock.read()  # the looks at the clock count as HOST
    assert before == {"start": 1, "step": 1, "load": 1, "evaluate": 1, "host": 4}
    progress.end_interval(overlapped=True)  # the load, and HOST since the last call
    assert clock.read() == {"start": 1, "step": 6, "load": 0, "evaluate": 1, "host": 2}


def test_a_second_run_of_a_process_has_a_clock_of_its_own(clock: PhaseClock) -> None:
    assert progress.take_clock() is clock  # nothing but the start was counted
    with phase(Phase.STEP):
        pass
    assert progress.take_clock() is not clock
