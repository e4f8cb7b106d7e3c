"""The record of a run: columns, what is new since the last access, and folders of other people."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from report_files import PROGRAM, write_lines, write_run

import spmdtrain.record.run
from spmdtrain import Run, UserError, open_run
from spmdtrain.record import changing_files
from spmdtrain.record.run_files import RunFiles, Split, Status, Writer
from spmdtrain.report.sections import RunReader

NAN = math.nan


def lines_in(folder: Path, *lines: Any, name: str = "metrics.jsonl") -> Run:
    write_lines(folder / name, lines)
    return open_run(folder)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[RunFiles]:
    """The files of a run in progress."""
    with contextlib.closing(RunFiles(str(tmp_path))) as opened:
        opened.write_status(Status.RUNNING, 0)
        yield opened


# -- columns ---------------------------------------------------------------------------------------


def test_metrics_are_columns_with_nan_where_a_line_has_no_number(tmp_path: Path) -> None:
    run = lines_in(
        tmp_path,
        {"step": 1, "split": "train", "loss": 4.0, "gradient_norm": 2.0},
        {"step": 10, "split": "train", "loss": None, "staleness_counts": {"0": 3}},
        {"step": 10, "split": "eval", "loss": 9.0},
        {"step": 20, "split": "train", "loss": 1, "late": 0.5},
    )
    train = run.metrics("train")
    assert list(train) == ["step", "loss", "gradient_norm", "late"]
    assert train["step"].dtype == np.int64 and train["step"].tolist() == [1, 10, 20]
    assert {train[name].dtype for name in ("loss", "gradient_norm", "late")} == {np.dtype("f8")}
    np.testing.assert_array_equal(train["loss"], [4.0, NAN, 1.0])
    np.testing.assert_array_equal(train["gradient_norm"], [2.0, NAN, NAN])
    np.testing.assert_array_equal(train["late"], [NAN, NAN, 0.5])
    assert {name: column.tolist() for name, column in run.metrics("eval").items()} == {
        "step": [10],
        "loss": [9.0],
    }
    (steps,) = run.metrics("test").values()
    assert steps.shape == (0,) and steps.dtype == np.int64


def test_of_several_lines_of_a_step_the_newest_counts_as_in_the_page(tmp_path: Path) -> None:
    run = lines_in(
        tmp_path,
        {"step": 5, "split": "eval", "loss": 1.0},
        {"step": 9, "split": "eval", "loss": 2.0, "accuracy": 0.25},
        {"step": 7, "split": "eval", "loss": 3.0},
        {"step": 9, "split": "eval", "loss": 4.0},
        {"step": 2**63 - 1, "split": "eval", "loss": 0.5},
    )
    found = run.metrics("eval")
    assert found["step"].tolist() == [5, 7, 9, 2**63 - 1]
    assert found["loss"].tolist() == [1.0, 3.0, 4.0, 0.5]
    np.testing.assert_array_equal(found["accuracy"], [NAN, NAN, 0.25, NAN])
    page = RunReader(str(tmp_path), "run")
    page.refresh()
    column = page.data.metrics.get(Split.EVAL, "loss")
    assert column is not None
    np.testing.assert_array_equal(np.stack(column.by_step()), [found["step"], found["loss"]])


@pytest.mark.slow
def test_all_values_of_a_long_run_are_returned(tmp_path: Path) -> None:
    count = 40_000
    write_lines(
        tmp_path / "metrics.jsonl",
        ({"step": n, "split": "train", "loss": float(n % 7)} for n in range(count)),
    )
    found = open_run(tmp_path).metrics("train")
    np.testing.assert_array_equal(found["step"], np.arange(count))
    np.testing.assert_array_equal(found["loss"], np.arange(count) % 7)
    # What follows a run for days keeps fewer.
    assert len(Run.open(str(tmp_path), bounded=True).metrics("train")["step"]) < count


def test_a_table_of_pandas_has_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(write_run(tmp_path / "run", steps=100))
    table = run.table("eval")
    expected = pd.DataFrame(run.metrics("eval"))
    assert len(expected) == 10
    pd.testing.assert_frame_equal(table, expected)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError) as caught:
        run.table("eval")
    assert str(caught.value) == "tables need pandas, which is not installed: pip install pandas"
    assert len(run.metrics("eval")["step"]) == 10


def test_an_unknown_split_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", steps=100))
    with pytest.raises(UserError, match=r"'evel', which is no split of a run\. Did you mean 'eval"):
        run.metrics("evel")


def test_the_other_files_of_a_run_have_their_types(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", steps=100, learning_rate=0.5))
    assert run.config["learning_rate"] == 0.5 and run.config_file["versions"]["jax"] == "0.10.2"
    assert run.status == {"status": "finished", "step": 100}
    assert run.program == PROGRAM
    assert [event["event"] for event in run.events if event["event"] != "phases"] == [
        *("start", "checkpoint", "start", "end")
    ]
    performance = run.performance()
    assert performance["step"].tolist() == list(range(10, 101, 10))
    assert performance["time"][0] == pytest.approx(1_790_000_000.1)
    assert (performance["device_memory_bytes"] == 1_500_000_000 + performance["step"]).all()
    one, two = {"a": "01"}, {"a": "02"}
    hashes = [{"step": 2, "hash": "x", "arrays": one}, {"step": 4, "hash": "x", "arrays": one}]
    write_lines(
        tmp_path / "run" / "hashes.jsonl",
        [*hashes, {"resumed": 2}, {"step": 6, "hash": "x", "loss": 0.5, "arrays": two}],
    )
    assert {step: (each.sums, each.loss) for step, each in run.hashes.items()} == {
        2: (one, None),
        6: (two, 0.5),
    }


def test_the_evaluations_of_an_evaluator_have_a_file_of_their_own(tmp_path: Path) -> None:
    run = lines_in(tmp_path, {"step": 5, "split": "eval", "loss": 1.0})
    files = RunFiles(str(tmp_path), Writer.EVALUATOR)
    files.write_metrics(10, Split.EVAL, {"loss": 2.0}, trajectory="one")
    files.write_metrics(20, Split.EVAL, {"loss": math.inf}, trajectory="one")
    files.close()
    assert run.metrics("eval")["step"].tolist() == [5]
    found = run.metrics("evaluator")
    assert list(found) == ["step", "loss"] and found["step"].tolist() == [10, 20]
    np.testing.assert_array_equal(found["loss"], [2.0, NAN])


# -- runs in progress ------------------------------------------------------------------------------


def test_a_second_access_reads_only_what_was_appended(tmp_path: Path) -> None:
    line = '{"step": %d, "split": "train", "loss": %d.5}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line % (step, 1) for step in range(100, 400)))
    run = open_run(tmp_path)
    first = run.metrics("train")
    with path.open("r+") as file:  # which no run does: it shows what is read
        file.write(line % (100, 7))
    append(path, line % (400, 2))
    second = run.metrics("train")
    assert second["step"].tolist() == list(range(100, 401))
    assert second["loss"].tolist() == [1.5] * 300 + [2.5]
    assert first["step"].tolist() == list(range(100, 400))  # what was returned stays as it was
    assert open_run(tmp_path).metrics("train")["loss"][0] == 7.5


def test_an_incomplete_last_line_is_left_for_the_next_access(tmp_path: Path) -> None:
    run = lines_in(tmp_path, {"step": 1, "split": "train", "loss": 3.0})
    append(tmp_path / "metrics.jsonl", '{"step": 2, "split": "train", "lo')
    assert run.metrics("train")["step"].tolist() == [1]
    append(tmp_path / "metrics.jsonl", 'ss": 2.0}\n')
    assert run.metrics("train")["loss"].tolist() == [3.0, 2.0]


def test_lines_that_a_resume_or_a_rollback_removes_no_longer_count(files: RunFiles) -> None:
    run = open_run(str(files.folder))
    assert run.metrics("train")["step"].size == 0  # nothing yet
    for step in range(1, 7):
        files.write_metrics(step, Split.TRAIN, {"loss": 1.0})
    assert run.metrics("train")["step"].tolist() == [1, 2, 3, 4, 5, 6]
    files.rewind(3)
    assert run.metrics("train")["step"].tolist() == [1, 2, 3]
    for _ in range(2):  # two rollbacks between two accesses
        files.rewind(2)
        for step in range(3, 10):
            files.write_metrics(step, Split.TRAIN, {"loss": 2.0})
    assert run.metrics("train")["loss"].tolist() == [1.0] * 2 + [2.0] * 7


def test_a_file_with_other_lines_in_the_same_place_is_read_again(tmp_path: Path) -> None:
    """A file system may give a new file the inode of one that was removed."""
    run = lines_in(tmp_path, *({"step": n, "split": "eval", "loss": 1.0} for n in range(5)))
    assert run.metrics("eval")["step"].tolist() == [0, 1, 2, 3, 4]
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    run_lines = [{"step": 2 * n, "split": "eval", "loss": 8.0} for n in range(9)]
    write_lines(tmp_path / "metrics.jsonl", run_lines)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before
    assert run.metrics("eval")["step"].tolist() == list(range(0, 18, 2))
    assert set(run.metrics("eval")["loss"]) == {8.0}


def test_a_status_is_that_of_the_file_now(files: RunFiles) -> None:
    run = open_run(str(files.folder))
    assert run.status == {"status": "running", "step": 0}
    files.write_status(Status.PREEMPTED, 7)
    assert run.status == {"status": "preempted", "step": 7}
    (Path(files.folder) / "status.json").unlink()
    assert run.status is None


# -- folders that are no runs, or that someone else has written ------------------------------------


def test_what_is_not_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "notes.txt").touch()
    for path in (tmp_path, tmp_path / "absent", tmp_path / "file", str(tmp_path)):
        with pytest.raises(UserError) as caught:
            open_run(path)
        assert str(caught.value) == (
            f"{path} is not the workdir of a run: it has no config.json, no status.json and no "
            "metrics.jsonl"
        )
    with pytest.raises(UserError, match="must be a local path or a gs:// or s3:// URL"):
        open_run("az://bucket/run")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def cycle(path: Path) -> None:
    path.symlink_to(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def text(content: str, encoding: str = "utf-8") -> Callable[[Path], object]:
    return lambda path: path.write_text(content, encoding)


def metrics_of(run: Run) -> object:
    return run.metrics("train")


GOOD = '{"step": 1, "split": "train", "loss": 1.0}\n'
HOSTILE: dict[str, tuple[str, Callable[[Path], object], Callable[[Run], object]]] = {
    "a FIFO": ("metrics.jsonl", fifo, metrics_of),
    "a link to itself": ("metrics.jsonl", cycle, metrics_of),
    "a link to a device": ("metrics.jsonl", device, metrics_of),
    "a folder": ("metrics.jsonl", Path.mkdir, metrics_of),
    "a terabyte": ("metrics.jsonl", huge, metrics_of),
    "a huge line": ("metrics.jsonl", text(GOOD + "x" * 5000), metrics_of),
    "a step that is NaN": (
        "metrics.jsonl",
        text(GOOD + '{"step": NaN, "split": "train"}\n'),
        metrics_of,
    ),
    "a huge step": ("metrics.jsonl", text(f'{{"step": {10**30}}}\n'), metrics_of),
    "a text as value": (
        "metrics.jsonl",
        text(GOOD + '{"step": 2, "split": "train", "loss": "\x1b[2J"}\n'),
        metrics_of,
    ),
    "a list": ("metrics.jsonl", text("[1]\n" * 3), metrics_of),
    "no UTF-8": ("metrics.jsonl", text("\xff\n", "latin-1"), metrics_of),
    "deep lists": ("metrics.jsonl", text("[" * 4000 + "\n"), metrics_of),
    "a time that is NaN": (
        "performance.jsonl",
        text('{"step": 1, "time": NaN}\n'),
        Run.performance,
    ),
    "events that are no file": ("events.jsonl", fifo, lambda run: run.events),
    "hashes that are no file": ("hashes.jsonl", cycle, lambda run: run.hashes),
    "a configuration that is a list": ("config.json", text("[]"), lambda run: run.config),
    "a configuration of numbers": ("config.json", text('{"config": 3}'), lambda run: run.config),
    "a version that is no text": (
        "config.json",
        text('{"versions": {"jax": 1}}'),
        lambda run: run.config_file,
    ),
    "an unknown field": ("config.json", text('{"konfig": {}}'), lambda run: run.config),
    "a status without a step": (
        "status.json",
        text('{"status": "failed"}'),
        lambda run: run.status,
    ),
    "a large status": ("status.json", text(" " * 2**21), lambda run: run.status),
    "a program of texts": (
        "program.json",
        text('{"parameters": "many"}'),
        lambda run: run.program,
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_no_run_has_written_is_named_in_a_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write, read = HOSTILE[case]
    monkeypatch.setattr(changing_files, "PIECE", 3000)
    (tmp_path / "checkpoints").mkdir()
    run = open_run(tmp_path)
    read(run)  # nothing is there yet
    write(tmp_path / name)
    for opened in (run, open_run(tmp_path)):
        with pytest.raises(UserError) as caught:
            read(opened)
        message = str(caught.value)
        assert message.startswith(str(tmp_path / name)) and message.isprintable()
        assert len(message.replace(str(tmp_path), "")) < 200
    (tmp_path / name).rmdir() if case == "a folder" else (tmp_path / name).unlink()
    read(run)  # and again nothing


def test_a_table_that_is_nearly_empty_and_huge_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lines_in(tmp_path, *({"step": n, "split": "eval", f"{n}": 1.0} for n in range(20)))
    assert len(run.metrics("eval")) == 21
    monkeypatch.setattr(spmdtrain.record.run, "LARGEST_TABLE", 399)
    with pytest.raises(UserError, match=r"jsonl: 20 metrics of 20 steps are more than 399 values"):
        run.metrics("eval")


def test_an_invalid_line_is_counted_and_events_and_hashes_leave_it_out(tmp_path: Path) -> None:
    bad = {"step": "x", "split": "train"}
    good = {"step": 1, "split": "train", "loss": 1.0}
    run = lines_in(tmp_path, good, bad, good, bad)
    with pytest.raises(UserError, match=r"metrics\.jsonl: 2 lines are not valid and left out"):
        run.metrics("train")
    write_run(tmp_path / "run", steps=100)
    run = open_run(tmp_path / "run")
    before = run.events
    append(tmp_path / "run" / "events.jsonl", '{"time": "now", "event": "start"}\n')
    assert run.events == before and len(before) == 7
    append(tmp_path / "run" / "events.jsonl", '{"time": 1800000000, "event": "start"}\n')
    assert len(run.events) == 8 and len(before) == 7


def test_links_to_files_are_read(tmp_path: Path) -> None:
    """Caches keep the files of a run elsewhere, and its folder has links to them."""
    write_run(tmp_path / "kept", steps=100)
    (tmp_path / "run").mkdir()
    for path in (tmp_path / "kept").iterdir():
        (tmp_path / "run" / path.name).symlink_to(path)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    run = open_run(tmp_path / "link")
    assert run.metrics("test")["loss"].tolist() == [0.123]
    with (tmp_path / "kept" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 200, "split": "test", "loss": 0.5}) + "\n")
    assert run.metrics("test")["loss"].tolist() == [0.123, 0.5]
