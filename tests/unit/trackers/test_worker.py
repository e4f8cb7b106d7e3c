"""Trackers that fail, hang or are slow: the run continues, and a line names them."""

import contextlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Mapping
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from helpers import metrics

from spmdtrain import RunConfig, RunInfo, Tracker, Trainer, UserError
from spmdtrain.record.run_files import RunFiles, Split, Status, Writer
from spmdtrain.trackers import run_trackers
from spmdtrain.trackers.base import SHIPPED, Text, make_tracker
from spmdtrain.trackers.run_trackers import (
    MAX_PENDING,
    RunTrackers,
    TrackerCall,
    TrackerWorker,
    choose_trackers,
    evaluator_trackers,
)
from spmdtrain.trackers.services import TrackioTracker

X = np.arange(32, dtype=np.float32).reshape(32, 1) / 32
Y = 3 * X


class Recorder(Tracker):
    """Keeps the calls; `fails` names the method that raises, and `hangs` the one that waits."""

    def __init__(self, fails: str = "", hangs: str = "", name: str = "recorder") -> None:
        self.fails, self.hangs, self.name = fails, hangs, name
        self.calls: list[tuple[Any, ...]] = []
        self.reached, self.released = threading.Event(), threading.Event()

    def note(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, *arguments))
        if method == self.fails:
            raise RuntimeError(f"no {method}\nand a second line")
        if method == self.hangs:
            self.reached.set()
            assert self.released.wait(60)

    def start(self, run: RunInfo) -> str:
        self.note("start", run.step, run.earlier)
        return f"{self.name}-1"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.note("scalars", step, dict(values))

    def text(self, step: int, tag: str, text: Text) -> None:
        self.note("text", step, tag, text.value)

    def close(self, status: Status) -> None:
        self.note("close", status)


def fit(tracker: Tracker, workdir: Path | None = None, steps: int = 3, **options: Any) -> None:
    """Trains a line with a tracker of its own."""
    Trainer(
        model=nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        objective=lambda model, batch: {"loss": ((model(batch[0]) - batch[1]) ** 2)[:, 0]},
        optimizer=optax.sgd(0.1),
        workdir=None if workdir is None else str(workdir),
        trackers=[tracker],
        log_every=1,
        **options,
    ).fit((X, Y), steps=steps, validation=(X, Y))


def test_calls_that_follow_each_other_are_flushed_together_and_none_is_lost_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waking the thread and flushing a file for each line slows small networks down."""
    monkeypatch.setattr(run_trackers, "PAUSE", 60.0)  # the end ends the pause
    flushes: list[int] = []

    class Counting(Recorder):
        def flush(self) -> None:
            flushes.append(len(self.calls))

    tracker = Counting()
    worker = TrackerWorker(tracker, print)
    for step in range(50):
        worker.add(TrackerCall(f"step {step}", methodcaller("scalars", step, {})))
        time.sleep(0.002)  # longer than a call takes
    worker.end(Status.FINISHED)
    worker.wait(30)
    assert [step for _, step, *_ in tracker.calls[:-1]] == list(range(50))
    assert tracker.calls[-1] == ("close", "finished")
    assert len(flushes) < 10


@pytest.mark.slow
def test_a_tracker_gets_what_the_metrics_file_has_and_continues_after_a_resume(
    tmp_path: Path,
) -> None:
    first, second = Recorder(), Recorder()
    fit(first, tmp_path)
    assert first.calls[0] == ("start", 0, None) and first.calls[-1] == ("close", "finished")
    fit(second, tmp_path, steps=4)
    assert second.calls[0] == ("start", 3, "recorder-1")
    found = {
        (tag, step): value
        for tracker in (first, second)
        for method, step, *rest in tracker.calls
        if method == "scalars"
        for tag, value in rest[0].items()
        if not tag.startswith("speed/")
    }
    lines = metrics(tmp_path)
    assert len(lines) >= 6
    for line in lines:
        assert found[f"{line['split']}/loss", line["step"]] == line["loss"]  # to the bit


@pytest.mark.slow
@pytest.mark.parametrize("method", ["start", "scalars", "text", "close"])
def test_a_failing_tracker_is_named_once_and_the_others_continue(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Recorder(fails=method)
    say = {"step": lambda event: event.log({"said": Text("yes")})}
    fit(tracker, tmp_path, callbacks=say)
    lines = [line for line in capsys.readouterr().out.splitlines() if "recorder" in line]
    what = {"start": "its start", "scalars": "metrics of step 0", "text": "said of step 1"}
    assert lines == [
        f"recorder: {what.get(method, 'its end')}: RuntimeError: no {method} and a second line; "
        "the run continues without it"
    ]
    # Nothing after the failure, but its end, so that it can free what it holds.
    names = [call[0] for call in tracker.calls]
    assert names.count(method) == 1 and names[-1] == "close"
    assert names.index(method) >= len(names) - 2
    assert [line["step"] for line in metrics(tmp_path, "train")] == [1, 2, 3]
    assert (tmp_path / "media.jsonl").read_text().count("yes") == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["start", "scalars", "close"])
def test_a_hanging_tracker_ends_no_run_and_its_loss_is_named(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Recorder(hangs=method)
    tracker.close_timeout = 0.2
    reached = {} if method == "close" else {"fit_end": lambda event: tracker.reached.wait(60)}
    fit(tracker, tmp_path, callbacks=reached)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "recorder" in line)
    tracker.released.set()
    lost = {
        "start": "its start and 10 later calls are lost",
        "scalars": "metrics of step 0 and 9 later calls are lost",
        "close": "its end is lost",
    }
    assert line == f"recorder: not done after 0.2 s: {lost[method]}"


def test_calls_of_a_slow_tracker_are_dropped_and_counted() -> None:
    lines: list[str] = []
    tracker = Recorder(hangs="start")
    trackers = RunTrackers([tracker], None, lines.append)
    trackers.start(0, {})
    assert tracker.reached.wait(60)
    for step in range(1, MAX_PENDING + 6):  # the start is one of the pending calls
        trackers.scalars(step, {"train/loss": 1.0})
    trackers.media(1, Split.TRAIN, {"said": Text("no")})
    tracker.released.set()
    trackers.status = Status.FINISHED
    trackers.close()
    assert len(tracker.calls) == MAX_PENDING + 1 and tracker.calls[-1] == ("close", "finished")
    assert lines == [
        "recorder: slower than the run, so calls are dropped, the first of them metrics of step "
        f"{MAX_PENDING}",
        "recorder: 7 calls were dropped",
    ]


def test_a_text_that_cannot_be_decoded_is_not_a_fault_of_the_trackers() -> None:
    lines: list[str] = []
    tracker = Recorder()
    trackers = RunTrackers([tracker, Recorder(name="other")], None, lines.append)
    with contextlib.closing(trackers):
        trackers.start(0, {})
        token = {"said": Text(np.array([7]), lambda row: {1: "one"}[int(row[0])])}
        trackers.media(2, Split.EVAL, token)
        trackers.media(3, Split.EVAL, {"said": Text("yes")})
    assert [call for call in tracker.calls if call[0] == "text"] == [
        ("text", 3, "eval/said", ("yes",))
    ]
    assert lines == ["said of step 2 is not logged: KeyError: 7"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    ['{"recorder": "../../etc"}', '{"recorder": 3}', "[", '{"recorder": ["a"]}', "\x00"],
)
def test_a_forged_file_of_ids_is_named_and_not_used(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trackers.json").write_text(content)
    tracker = Recorder()
    fit(tracker, tmp_path)
    assert tracker.calls[0] == ("start", 0, None)
    assert "trackers.json is not valid, so trackers begin new runs" in capsys.readouterr().out
    assert '"recorder": "recorder-1"' in (tmp_path / "trackers.json").read_text()


def test_ids_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trackers.json").symlink_to(tmp_path / "victim")
    fit(Recorder(), tmp_path / "run")
    assert (tmp_path / "victim").read_text() == "precious\n"
    assert not (tmp_path / "run" / "trackers.json").is_symlink()


def missing_library(monkeypatch: pytest.MonkeyPatch) -> list[Tracker]:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return choose_trackers(["tensorboard", "wandb"], (), has_workdir=True)


def test_libraries_are_imported_before_the_threads_where_two_threads_may_not_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio.py").write_text("")
    (tmp_path / "mlflow.py").write_text("raise SystemError('recursion depth mismatch')")
    monkeypatch.syspath_prepend(tmp_path)
    for must, imported in ((False, False), (True, True)):
        for library in ("trackio", "mlflow"):
            monkeypatch.delitem(sys.modules, library, raising=False)
        monkeypatch.setattr(run_trackers, "MUST_IMPORT_FIRST", must)
        assert len(choose_trackers(["mlflow"], [TrackioTracker()], has_workdir=False)) == 2
        assert ("trackio" in sys.modules) is imported
    monkeypatch.delitem(sys.modules, "trackio")


@pytest.mark.slow
def test_the_modules_that_are_imported_first_exist() -> None:
    names = {name: make_tracker(name).imports for name in SHIPPED}
    assert [name for name, module in names.items() if not module] == ["tensorboard"]
    assert all(importlib.util.find_spec(module) for module in names.values() if module)


def test_a_run_that_cannot_begin_calls_no_tracker(tmp_path: Path) -> None:
    tracker = Recorder()
    with pytest.raises(UserError, match="resume is 'must'"):
        fit(tracker, tmp_path, resume="must")
    assert tracker.calls == []


def test_an_evaluator_names_the_trackers_that_it_does_not_write_to(tmp_path: Path) -> None:
    lines: list[str] = []
    with contextlib.closing(RunFiles(str(tmp_path), Writer.EVALUATOR)) as files:
        config = RunConfig(trackers=("mlflow", "tensorboard", "wandb"))
        with contextlib.closing(evaluator_trackers(config, files, lines.append)) as trackers:
            trackers.start(0, {})
            trackers.scalars(1, {"eval/loss": 1.0})
    assert lines == ["evaluator: writes to TensorBoard alone, not to mlflow, wandb"]
    assert len(list((tmp_path / "tensorboard.evaluator").iterdir())) == 1


def test_wrong_trackers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: missing_library(monkeypatch), r"'wandb'.*pip install 'spmdtrain\[wandb\]'"),
        (lambda: fit(Recorder), r"trackers\[0\] is 'Recorder': it must be an object"),  # type: ignore[arg-type]
        (lambda: fit("wandbb"), "trackers is 'wandbb'.*Did you mean 'wandb'"),  # type: ignore[arg-type]
    ]
    for call, message in cases:
        with pytest.raises(UserError, match=message):
            call()


def test_calls_that_were_pending_at_a_failure_are_dropped() -> None:
    lines: list[str] = []
    tracker = Recorder(hangs="start", fails="scalars")
    trackers = RunTrackers([tracker], None, lines.append)
    trackers.start(0, {})
    for step in (1, 2, 3):
        trackers.scalars(step, {})
    tracker.released.set()
    trackers.close()
    assert [call[0] for call in tracker.calls] == ["start", "scalars", "close"]
    assert len(lines) == 1 and "metrics of step 1: RuntimeError" in lines[0]
