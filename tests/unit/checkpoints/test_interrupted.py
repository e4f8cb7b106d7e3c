"""Lost locks, SIGUSR1, kills while a checkpoint is sealed, folders that become read-only."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from etils import epath
from helpers import saved_steps, status
from test_links import fit

from spmdtrain import StorageError, Text, load_params
from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.distributed.failures import StopSignals
from spmdtrain.errors import PreemptedExit
from spmdtrain.launch.child import Signals
from spmdtrain.record import no_follow
from spmdtrain.record.run_files import RunFiles, Split
from spmdtrain.trackers.run_trackers import MediaFiles
from spmdtrain.train.session import RunSession


def at_step(number: int, do: Any) -> dict[str, Any]:
    """Callbacks that do something once, after that step."""

    def step(event: Any) -> None:
        if event.step == number:
            do()

    return {"step": step}


@pytest.mark.slow
@pytest.mark.parametrize("another", [False, True])
def test_a_run_whose_lock_was_removed_ends_at_the_next_save(another: bool, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:

        def take() -> None:
            (tmp_path / ".lock").unlink()
            if another:
                stack.enter_context(contextlib.closing(RunFiles(str(tmp_path))))

        what = "replaced" if another else "removed"
        with pytest.raises(StorageError, match=f"\\.lock, .*{what}"):
            fit(tmp_path, 9, callbacks=at_step(3, take), log_every=1)
    assert saved_steps(tmp_path)[-1] in (1, 2, 3)  # the save in progress is not published
    assert status(tmp_path)["status"] == "running"  # that file may be another run's by now


def test_a_run_whose_lock_was_removed_changes_no_line_of_the_run_that_has_it(
    tmp_path: Path,
) -> None:
    first = RunFiles(str(tmp_path))
    first.write_metrics(1, Split.TRAIN, {"loss": 1.0})
    (tmp_path / ".lock").unlink()
    second = RunFiles(str(tmp_path))
    second.rewind(0)
    for step in range(1, 4):
        second.write_metrics(step, Split.TRAIN, {"loss": 2.0})
    events = first.lines_file("events.jsonl")
    with pytest.raises(StorageError, match="this run's lock, was replaced"):
        first.write_metrics(2, Split.TRAIN, {"loss": 1.0})
    with pytest.raises(StorageError, match="this run's lock, was replaced"):
        events.append({"event": "end"})
    assert second.history(Split.TRAIN) == {step: {"loss": 2.0} for step in range(1, 4)}
    assert not (tmp_path / "events.jsonl").exists()
    for files in (first, second):
        files.close()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("numbers", [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGINT,) * 2])
def test_signals_at_the_same_time_are_one_request(numbers: tuple[signal.Signals, ...]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopSignals() as signals:
            signal.pthread_sigmask(signal.SIG_BLOCK, set(numbers))
            for number in numbers:
                signal.raise_signal(number)  # os.kill may use another thread, which blocks nothing
            signal.pthread_sigmask(signal.SIG_UNBLOCK, set(numbers))
            signal.raise_signal(numbers[-1])
            with pytest.raises(PreemptedExit) as stop:
                signals.stop_if_received()
            assert stop.value.signal == numbers[0].name
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_too_late_for_a_fit_stops_the_sweep_after_it_and_nothing_else() -> None:
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
    with Signals() as children:
        assert children.received is signal.SIGTERM and not children.repeated
    with StopSignals() as signals, Signals() as children:
        assert not signals.stop_requested() and children.received is None


@pytest.mark.slow
def test_sigusr1_saves_and_exits_75(tmp_path: Path) -> None:
    ask = at_step(3, lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(PreemptedExit) as stop:
        fit(tmp_path, 9, callbacks=ask)
    assert stop.value.code == 75
    saved = saved_steps(tmp_path)[-1]
    assert saved in (3, 4)
    assert status(tmp_path) == {"status": "preempted", "step": saved, "reason": "SIGUSR1"}
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


@pytest.mark.slow
@pytest.mark.parametrize("signals", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_further_signals_while_a_checkpoint_is_published_leave_it_whole(
    signals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit ends after the save, or the next one would write to the same folder beside it."""
    write, wait, waits = Manifest.write, RunSession.wait_for_save, threading.Event()

    def waited(self: RunSession) -> None:
        waits.set()
        wait(self)

    def interrupted(self: Manifest, folder: epath.Path) -> None:
        write(self, folder)
        assert waits.wait(60)
        for _ in range(signals):  # the second one ends the wait for this save
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # far above the time within which two are one request

    monkeypatch.setattr(RunSession, "wait_for_save", waited)
    monkeypatch.setattr(Manifest, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, 1)
    monkeypatch.undo()
    assert saved_steps(tmp_path) == [1]
    assert load_params(str(tmp_path))["kernel"].shape == (1, 1)
    assert status(tmp_path)["status"] == "failed"
    fit(tmp_path, 2)
    assert saved_steps(tmp_path) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "valid", "left"), [(3, True, [3]), (4, True, [1, 2, 3]), (3, False, [1, 2, 3])]
)
def test_a_start_removes_what_a_published_and_valid_checkpoint_replaces(
    by: int, valid: bool, left: list[int], tmp_path: Path
) -> None:
    """As after a kill between the publication of a last checkpoint and the removal of others."""
    fit(tmp_path, 3, keep_latest=9)
    folder = tmp_path / "checkpoints"
    (folder / "retention.json").write_text(json.dumps({"by": by, "steps": [1, 2]}))
    if not valid:
        for path in (folder / "3" / "params").rglob("d/*"):
            path.write_bytes(b"")
    fit(tmp_path, 3, keep_latest=9)
    assert saved_steps(tmp_path) == left
    assert not (folder / "retention.json").exists() and not (folder / ".removed").exists()
    assert (folder / "3.corrupted").exists() != valid


@pytest.mark.slow
def test_a_save_does_not_wait_for_the_deletion_of_older_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, remove = Manifest.write, no_follow.remove
    last_is_written, in_time = threading.Event(), list[bool]()

    def written(self: Manifest, folder: epath.Path) -> None:
        write(self, folder)
        if self.step == 5:
            last_is_written.set()

    def slow(root: Any, name: str) -> None:
        if name.startswith(".removed/"):
            in_time.append(last_is_written.wait(60))
        remove(root, name)

    monkeypatch.setattr(Manifest, "write", written)
    monkeypatch.setattr(no_follow, "remove", slow)
    fit(tmp_path, 5, keep_latest=1)
    assert in_time == [True] * 4 and saved_steps(tmp_path) == [5]


@pytest.mark.slow
def test_what_was_logged_before_a_checkpoint_is_on_disk_when_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a kill loses none of it: a resume does not log these steps again."""
    write, text, found = Manifest.write, MediaFiles.text, dict[int, list[int]]()

    def slow(self: MediaFiles, *arguments: Any) -> None:
        time.sleep(0.5)
        text(self, *arguments)

    def published(self: Manifest, folder: epath.Path) -> None:
        lines = (tmp_path / "media.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        found[self.step] = [step for step in steps if step <= self.step]
        write(self, folder)

    def log(event: Any) -> None:
        event.trainer.log({"note": Text("a note")})

    monkeypatch.setattr(Manifest, "write", published)
    monkeypatch.setattr(MediaFiles, "text", slow)
    (tmp_path / "media.jsonl").touch()
    fit(tmp_path, 2, callbacks={"step": log})
    assert found == {1: [1], 2: [1, 2]}


@pytest.mark.slow
def test_a_signal_after_the_last_step_of_a_fit_stops_the_next_one(tmp_path: Path) -> None:
    def ask(event: Any) -> None:
        signal.raise_signal(signal.SIGTERM)

    fit(tmp_path / "first", 2, callbacks={"fit_end": ask})
    assert status(tmp_path / "first") == {"status": "finished", "step": 2}
    with pytest.raises(PreemptedExit):
        fit(tmp_path / "second", 9)
    assert status(tmp_path / "second")["reason"] == "SIGTERM"
    fit(tmp_path / "second", 9)  # the request is done with
    assert saved_steps(tmp_path / "second")[-1] == 9


@pytest.mark.drill
@pytest.mark.usefixtures("root")
def test_a_folder_that_becomes_read_only_ends_the_run(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no mounts are allowed here")
    try:

        def remount() -> None:
            command = ["mount", "-o", "remount,ro", str(tmp_path)]
            # Refused while files are open for writing, as the event file is: a second mount is not.
            if subprocess.run(command, capture_output=True).returncode:
                over = ["mount", "--bind", str(tmp_path), str(tmp_path)]
                subprocess.run(over, check=True)
                command = ["mount", "-o", "remount,bind,ro", str(tmp_path)]
                subprocess.run(command, check=True, capture_output=True)

        with pytest.raises(StorageError, match="Read-only file system"):
            fit(tmp_path / "run", 9, callbacks=at_step(3, remount), log_every=1)
        assert saved_steps(tmp_path / "run")[-1] in (1, 2, 3)
        assert load_params(str(tmp_path / "run"))["kernel"].shape == (1, 1)
    finally:
        while subprocess.run(["umount", "-l", str(tmp_path)], capture_output=True).returncode == 0:
            pass
    fit(tmp_path / "run", 2)


@pytest.mark.slow
def test_lines_of_a_start_that_saved_nothing_do_not_mix_with_the_next_start(
    tmp_path: Path,
) -> None:
    def end() -> None:
        raise RuntimeError("ends before the first save")

    other, run = tmp_path / "other", tmp_path / "run"
    fit(other, 6, keep_latest=9)
    fork: dict[str, Any] = {"log_every": 1, "checkpoint_every_steps": 9}
    with pytest.raises(RuntimeError):
        fit(run, 8, fork_from=f"{other}@2", callbacks=at_step(5, end), **fork)
    fit(run, 8, fork_from=f"{other}@6", **fork)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["split"] == "train"] == [7, 8]
