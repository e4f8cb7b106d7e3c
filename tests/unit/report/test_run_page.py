"""The page of runs, from files that are complete, old, malformed or forged."""

import base64
import errno
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_files import (
    BEGAN,
    CONFIG,
    metric_lines,
    png,
    restarted_events,
    watch_lines,
    write_lines,
    write_run,
)

from spmdtrain import UserError
from spmdtrain.document.blocks import ChartBlock, GalleryBlock, Page, StatsBlock, TableBlock
from spmdtrain.document.html import page_content
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import StorageError
from spmdtrain.record.readers import MediaLog
from spmdtrain.record.validation import read_bytes
from spmdtrain.report.command import Options, RunReport, execute
from spmdtrain.report.run_page import run_names


def page_of(*workdirs: Path) -> Page:
    report = RunReport([str(path) for path in workdirs])
    report.refresh()
    return report.page()


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections if section.blocks]


def blocks(page: Page, kind: type[Any], section: str | None = None) -> list[Any]:
    return [
        block
        for of in page.sections
        if section in (None, of.title)
        for block in of.blocks
        if isinstance(block, kind)
    ]


def text_of(page: Page) -> str:
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", page_content(page)["main"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "status.json", "program.json"])
def test_an_unknown_field_of_a_file_is_named(tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path / "run") / name
    assert "is unknown" not in text_of(page_of(tmp_path / "run"))
    content = json.loads(path.read_text())
    first = next(iter(content))
    path.write_text(json.dumps(content | {f"{first}_": 1}))
    expected = f"{name}: {first}_ is unknown. Did you mean &#39;{first}&#39;?"
    assert expected in text_of(page_of(tmp_path / "run"))


def test_a_run_with_all_files_has_all_sections(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "run"))
    assert titles(page) == [
        "",
        "Curves",
        "Optimizer",
        "Speed and resources",
        "Where the time went",
        "Samples",
        "What was run",
    ]
    (stats,) = blocks(page, StatsBlock)
    facts = {fact.name: (fact.value, fact.detail) for fact in stats.facts}
    assert facts["step"] == ("600", "of 600")
    assert facts["duration"] == ("2 min 30 s", "1 restart, 1 min down")
    evaluations = [x["loss"] for x in metric_lines(600, 10) if x["split"] == "eval"]
    assert facts["best loss"][0] == f"{min(evaluations):.4g}"
    assert facts["test accuracy"][0] == "0.987"
    charts = {chart.title: chart for chart in blocks(page, ChartBlock)}
    legend = {entry.name: entry.value for entry in charts["loss"].legend}
    assert list(legend) == ["train", "epoch mean", "eval", "test"] and legend["test"] == "0.123"
    assert charts["device memory, GB"].legend[0].value == "1.50 GB"
    (gallery,) = blocks(page, GalleryBlock)
    steps = ["step 600: a, <b>", "step 600", "step 600", *["step 300"] * 3]
    assert [image.title for image in gallery.images] == steps
    assert gallery.images[0].content == png(0)
    text = text_of(page)
    assert "all-reduce data 1 473 kB" in text and "layers/0/kernel 64 x 128 float32" in text
    assert "learning_rate 0.001 default: not set" in text and "hidden 128, 128" in text


def test_the_card_of_speed_shows_the_median_without_the_first_interval_of_each_start(
    tmp_path: Path,
) -> None:
    workdir = write_run(tmp_path / "run")  # its second start began at step 300
    speeds = {10: 1.0, 20: 30_000.0, 300: 40_000.0, 310: 2.0, 320: 50_000.0, 600: 90_000.0}

    def card() -> tuple[str, str]:
        (stats,) = blocks(page_of(workdir), StatsBlock)
        (fact,) = (fact for fact in stats.facts if fact.name == "examples/s")
        return fact.value, fact.detail

    def write(*steps: int) -> None:
        lines = ({"step": n, "time": BEGAN, "examples_per_second": speeds[n]} for n in steps)
        write_lines(workdir / "performance.jsonl", lines)

    write(*speeds)
    assert card() == ("45,000", "median after the first steps")
    write(10)
    assert card() == ("1", "at first")


def test_each_start_has_its_processes_and_what_was_lost(tmp_path: Path) -> None:
    first, *rest = restarted_events()
    number = next(n for n, event in enumerate(rest) if event["event"] == "start")
    lost = {"lost_steps": 100, "lost_seconds": 75.0, "change": "loss", "source": "partner"}
    rest[number] |= lost | {"processes": 1}
    workdir = write_run(tmp_path / "run")
    write_lines(workdir / "events.jsonl", [first | {"source": "initial"}, *rest])
    (table,) = (t for t in blocks(page_of(workdir), TableBlock) if t.title == "Starts")
    wanted = ("processes", "state from", "steps lost", "lost since the last step")
    at = [list(table.columns).index(name) for name in wanted]
    assert [[row[n] for n in at] for row in table.rows] == [
        ["2", "nothing", "", ""],
        ["1, loss", "a partner's memory", "100", "1 min 15 s"],
    ]


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first")
    second = write_run(tmp_path / "second", seed=1, learning_rate=3e-3, hidden=[8])
    page = page_of(first, second)
    tables = {table.title: table for table in blocks(page, TableBlock)}
    assert tables["Differences between the runs (3 fields)"].rows == [
        ["seed", "0", "1"],
        ["hidden", "128, 128", "8"],
        ["learning_rate", "0.001", "0.003"],
    ]
    charts = {chart.title: chart for chart in blocks(page, ChartBlock, "Curves")}
    assert {"loss (train)", "loss (eval)", "accuracy (epoch mean)"} <= charts.keys()
    names = [(entry.name, entry.color) for entry in charts["loss (train)"].legend]
    assert names == [("first", 0), ("second", 1)]
    best = [
        min(x["loss"] for x in metric_lines(600, 10, n) if x["split"] == "eval") for n in (0, 1)
    ]
    assert tables[""].marked == {best.index(min(best))}


def test_an_older_run_and_one_that_has_just_begun_have_no_holes(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text(json.dumps(CONFIG))
    lines = [{k: v for k, v in x.items() if "norm" not in k} for x in metric_lines(50, 10)]
    write_lines(old / "metrics.jsonl", [x for x in lines if x["split"] in ("train", "epoch")])
    assert titles(page_of(old)) == ["", "Curves", "Optimizer", "What was run"]
    new = tmp_path / "new"
    new.mkdir()
    (new / "status.json").write_text('{"status": "running", "step": 0}')
    page = page_of(new)
    assert titles(page) == [""] and page.badges == {"running": "active"}


def forge_program(run: Path) -> None:
    forged = {"collectives": [1, {"bytes": "x"}], "sharding": [{"shape": "x"}, [], {"path": 5}]}
    (run / "program.json").write_text(json.dumps(forged | {"flops_per_step": "1"}))
    (run / "status.json").write_text('{"status": "failed", "step": 1e400, "reason": ["<b>"]}')
    (run / "config.json").write_text("{")


def forge_lines(run: Path) -> None:
    huge = {"step": 2**62, "split": "train", "loss": 1e308}
    write_lines(run / "metrics.jsonl", [huge, {**huge, "step": 1, "loss": -1e308}, {"step": -1}])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"step": 5, "split": "train", "loss": NaN}\n[' + b"[" * 5000 + b"\n")
    write_lines(run / "performance.jsonl", [{"step": 1, "time": 1e300, "goodput": 1e308}, 7])
    begin = {"event": "start", "step": 0, "devices": 8}
    phases = {"event": "phases", "step": 2**62, "seconds": {"step": 1e308, "load": 1e308}}
    events = [{**begin, "time": -1e300}, {**phases, "time": 1e300}, {**begin, "time": 1e308}]
    write_lines(run / "events.jsonl", events)


@pytest.mark.slow
def test_a_run_that_may_have_been_killed_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    note = "a run that was killed could not record its end"
    assert note not in text_of(page_of(run))
    (run / "status.json").write_text(json.dumps({"status": "running", "step": 600}))
    assert note in text_of(page_of(run))  # its last event is old
    events = [{"time": time.time(), "event": "start", "step": 0, "processes": 1, "devices": 1}]
    write_lines(run / "events.jsonl", events)
    assert note not in text_of(page_of(run))


def test_processes_that_the_others_waited_for_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    reason = "worker 1 is the one that the others wait for: 82 % in load, 4.1 ms of each 11.2 ms"
    begin = {"time": 5.0, "event": "slow", "process": "worker 1", "share": 0.37, "reason": reason}
    events = [
        {"time": 1.0, "event": "start", "step": 0, "processes": 2, "devices": 2},
        {**begin, "step": 100},
        {"time": 9.0, "event": "slow", "step": 250, "process": "worker 1", "share": 0.0},
        {**begin, "step": 1300, "process": "chief", "reason": "the chief"},
        {"time": 9.0, "event": "slow", "step": 1400, "process": "worker 0", "share": 0.0},
    ]
    write_lines(run / "events.jsonl", events)
    text = text_of(page_of(run))
    assert f"since step 100: {reason}; until step 250" in text
    assert "since step 1,300: the chief" in text and "the chief; until" not in text


def forge_media(run: Path) -> None:
    (run.parent / "secret.png").write_bytes(png(99))
    os.symlink(run.parent / "secret.png", run / "media" / "link.png")
    (run / "media" / "text.png").write_text("no picture")
    base = {"step": 1, "split": "eval", "name": "x", "kind": "image"}
    names: list[object] = [
        "media/link.png",
        "media/text.png",
        "media/gone.png",
        "media/../config.json",
    ]
    names += ["/etc/passwd", "config.json", "media", 5]
    bins = {"edges": [0, 1e308, -1e308], "counts": [1e308, -1]}
    others = [{**base, "kind": "histogram", **bins}, {**base, "kind": "video"}]
    write_lines(run / "media.jsonl", [*({**base, "file": name} for name in names), *others])


def replace_by_folders(run: Path) -> None:
    for name in ("metrics.jsonl", "config.json", "media.jsonl", "events.jsonl"):
        (run / name).unlink()
        (run / name).mkdir()
    os.mkfifo(run / "metrics.evaluator.jsonl")


def log_many_metrics(run: Path) -> None:
    names = {f"metric_{number}": 1.0 for number in range(10_001)}
    with (run / "performance.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "time": 1.0, **names}) + "\n")


def break_checkpoints(run: Path) -> None:
    (run / "checkpoints" / "5").mkdir(parents=True)
    (run / "checkpoints" / "5" / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (forge_program, "config.json: not JSON"),
        (forge_lines, "metrics.jsonl: 3 lines are not valid and left out"),
        (log_many_metrics, "performance.jsonl: metrics after the first 10,000 are left out"),
        (forge_media, "neither a PNG nor an SVG file"),
        (replace_by_folders, "is not a regular file"),
        (break_checkpoints, "manifest.json is malformed"),
    ],
)
def test_malformed_and_forged_files_give_a_page_with_a_note(
    change: Callable[[Path], None], note: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run")
    change(run)
    page = page_of(run)
    content = page_content(page)
    json.dumps(content["charts"], allow_nan=False)
    assert note in text_of(page)
    assert base64.b64encode(png(99)).decode() not in content["main"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("wrong", [7, "x", [[1]], {"a": {"b": [1]}}, True, None, 1e308])
def test_fields_of_any_type_give_a_page(wrong: object, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=10)
    for name in ("config.json", "program.json", "status.json"):
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(dict.fromkeys(content, wrong)))
        assert "Samples" in text_of(page_of(run, write_run(tmp_path / f"other {name}", steps=10)))
        assert "Samples" in text_of(page_of(run))
    config = CONFIG["config"]
    assert isinstance(config, dict)
    (run / "config.json").write_text(json.dumps({"config": dict.fromkeys(config, wrong)}))
    assert "Samples" in text_of(page_of(run))


def losses(report: RunReport) -> list[float]:
    page, _ = report.read()
    charts = {chart.title: chart for chart in blocks(page, ChartBlock)}
    found: list[float] = charts["loss"].data["series"]["series"][0]["y"]
    return found


@pytest.mark.slow
def test_only_what_has_grown_is_read_and_a_resumed_run_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", steps=100)
    report = RunReport([str(run)])
    _, version = report.read()
    assert report.read()[1] == version

    before = losses(report)
    with (run / "metrics.jsonl").open("r+b") as file:
        file.seek(file.read().index(b'"loss": ') + len(b'"loss": '))
        file.write(b"9")  # what was read before is not read again
        file.seek(0, os.SEEK_END)
        file.write(b'{"step": 110, "split": "train", "loss": 9.5}\n{"step": 120, "sp')
    assert losses(report) == [*before[:-1], pytest.approx(before[-1], rel=1e-5), 9.5]
    assert report.read()[1] != version
    lines = list(metric_lines(300, 10, seed=3))
    write_lines(run / "new", lines)
    os.replace(run / "new", run / "metrics.jsonl")  # as a run that resumes does
    trained = [line["loss"] for line in lines if line["split"] == "train"]
    assert losses(report) == pytest.approx(trained, rel=1e-5) and len(trained) == 30


@pytest.mark.slow
def test_what_a_failed_reading_has_missed_is_read_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", steps=100)
    report = RunReport([str(run)])
    report.read()
    lines = list(metric_lines(50, 10, seed=3))
    write_lines(run / "new", lines)
    os.replace(run / "new", run / "metrics.jsonl")
    with monkeypatch.context() as broken:

        def fail(path: Any, *rest: int) -> bytes:
            if path.name == "metrics.jsonl":
                raise OSError(errno.EIO, "Input/output error")
            return read_bytes(path, *rest)

        broken.setattr("spmdtrain.record.changing_files.read_bytes", fail)
        with pytest.raises(StorageError, match=r"metrics.jsonl cannot be read: .*Input/output"):
            report.read()
    trained = [line["loss"] for line in lines if line["split"] == "train"]
    assert losses(report) == pytest.approx(trained, rel=1e-5)


def test_the_best_values_of_different_metrics_have_their_names(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", steps=100)
    second = write_run(tmp_path / "second", steps=100, best_metric="accuracy", best_direction="max")
    table = blocks(page_of(first, second), TableBlock)[0]
    assert table.columns[4] == "best"
    assert [row[4].split()[0] for row in table.rows] == ["loss", "accuracy"]


def test_names_of_runs_are_as_short_as_they_can_be() -> None:
    assert run_names(["runs/a", "/x/b/"]) == ["a", "b"]
    assert run_names(["one/mnist/0", "two/mnist/0"]) == ["one/mnist/0", "two/mnist/0"]
    assert run_names(["gs://b/r"]) == ["r"]
    with pytest.raises(UserError, match="runs/a is given twice"):
        run_names(["runs/a", "runs/a/"])


def test_wrong_usage_is_a_short_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message(*runs: Path, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            execute(Options(runs=tuple(map(str, runs)), **options), Terminal(quiet=True))
        return str(caught.value)

    run = write_run(tmp_path / "run", steps=10)
    assert "no run is given" in message()
    assert "is not the workdir of a run" in message(tmp_path)
    assert "is not the workdir of a run" in message(tmp_path / "absent")
    assert "leave out --output" in message(run, output="x.html", follow=True)
    for folder in ("..", ".", "/", str(tmp_path)):
        assert f"--output {folder} is not a file" in message(run, output=folder)
    assert "--port is for --follow" in message(run, port=8000)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert "pip install 'spmdtrain[report]'" in message(run)


def test_of_a_long_log_of_media_the_items_of_the_last_steps_are_kept() -> None:
    log = MediaLog()
    for step in range(1000):
        log.add({"step": step, "name": "a", "kind": "text", "text": "x" * 10_000})
    assert len(log.items) < 500 and log.dropped + len(log.items) == 1000
    assert [item.step for item in log.newest()[:3]] == [999, 998, 997]
    assert max(len(item.text) for item in log.items) < 5000
    table = {"step": 1000, "name": "b", "kind": "table", "columns": ["a", "b"]}
    log.add(table | {"rows": [[1, 2]] * 10_000})
    newest = log.newest()[0]
    assert len(newest.rows) < 100 and newest.row_count == 10_000
    bins = {"edges": [0.0] * 20_001, "counts": [1] * 20_000}
    histogram = table | bins | {"kind": "histogram"}
    for wrong in (table | {"rows": [], "columns": ["a"] * 101}, histogram):
        log.add(wrong)
    assert log.invalid == 2 and log.newest()[0] is newest


def test_watched_layers_are_cells_by_step_and_layer(tmp_path: Path) -> None:
    workdir = write_run(tmp_path / "run")
    assert "Layers" not in titles(page_of(workdir))
    # The steps after 20 are repeated after a resume; a line is cut off, and one is forged.
    lines = [*watch_lines(3, (1, 10, 20, 30)), *watch_lines(3, (30, 40), broken_from=40)]
    write_lines(workdir / "watch.jsonl", [*lines, {"step": 50, "outputs": {"<b>": {"norm": "x"}}}])
    (chart,) = blocks(page_of(workdir), ChartBlock, "Layers")
    rows = chart.data["cells"]["rows"]
    assert chart.title == "Norms of outputs"
    cells = {(row["step"], row["layer"]): row for row in rows}
    steps = ["1", "10", "20", "30", "40"]
    assert list(dict.fromkeys(row["step"] for row in rows)) == steps
    assert len(cells) == len(rows) == 15 and cells["20", "blocks/2"]["norm"] == 80
    assert cells["20", "blocks/2"]["size"] == pytest.approx(math.log10(80))
    broken = [key for key, row in cells.items() if row["color"] != 0]
    assert broken == [("40", "blocks/2")]
    texts = [(entry.name, entry.value) for entry in chart.legend]
    assert texts[0] == ("norm", "1 (light) to 160") and "not finite" in texts[1][0]
    assert "1 line is not valid and left out" in text_of(page_of(workdir))


def test_of_many_watched_steps_and_layers_some_are_shown(tmp_path: Path) -> None:
    workdir = write_run(tmp_path / "run")
    write_lines(workdir / "watch.jsonl", watch_lines(160, range(1, 1001)))
    (chart,) = blocks(page_of(workdir), ChartBlock, "Layers")
    rows = chart.data["cells"]["rows"]
    steps = {int(row["step"].replace(",", "")) for row in rows}
    assert len(steps) == 40 and max(steps) > 990 and min(steps) < 10
    assert len({row["layer"] for row in rows}) == 150
    assert re.fullmatch(r"10 more layers and \d+ more steps are in watch.jsonl\.", chart.note)
