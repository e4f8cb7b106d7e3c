"""What parameter servers were asked for, as a user sees it: a table, metrics, a histogram."""

import contextlib
import io
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
from helpers import events, metrics
from hypothesis import given
from rich.console import Console

from spmdtrain.config.run_config import RunConfig
from spmdtrain.document.terminal import Terminal
from spmdtrain.parameter_server.executor import StalenessStats
from spmdtrain.record.run_files import RunFiles, Split
from spmdtrain.sharding.mesh import resolve
from spmdtrain.trackers.run_trackers import open_trackers
from spmdtrain.train.run_logger import RunLogger


def shown(tally: StalenessStats, made: dict[str, int]) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(tally.table(made))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_table_has_a_row_for_each_number_and_wider_ones_beyond() -> None:
    tally = StalenessStats()
    for staleness, times in {0: 10, 1: 20, 7: 1, 8: 2, 15: 3, 16: 5, 100: 1}.items():
        for _ in range(times):
            tally.add(staleness, pulled=1000, pushed=500)
    lines = shown(tally, {"worker 1": 12, "worker 0": 30})
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert [(name, count, len(bar)) for name, count, bar in cells] == [
        ("0", "10", 12),
        ("1", "20", 24),
        ("7", "1", 1),
        ("8 to 15", "5", 6),
        ("16 to 31", "5", 6),
        ("64 to 127", "1", 1),
    ]
    assert " ".join(" ".join(lines[-3:]).split()).endswith(
        "a step pulls 1.00 kB and pushes 500 B; batches: worker 0 30, worker 1 12"
    )


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50))
def test_every_update_is_in_the_report_and_in_the_table(found: list[int]) -> None:
    tally = StalenessStats()
    for staleness in found:
        tally.add(staleness, 10, 20)
    report = tally.report({"worker 0": len(found)}, [{"added": len(found)}])
    assert {int(n): count for n, count in report["staleness"].items()} == Counter(found)
    assert report["updates"] == len(found) and report["servers"]["ps 0"]["added"] == len(found)
    rows = [line.split("│")[2] for line in shown(tally, {}) if "│" in line]
    assert sum(map(int, rows)) == len(found)


def test_lines_of_training_count_since_the_last_one(tmp_path: Path) -> None:
    config = resolve(RunConfig(steps=4, workdir=str(tmp_path)), batch_shards=1)
    with (
        contextlib.closing(RunFiles(str(tmp_path))) as files,
        contextlib.closing(open_trackers(config, (), files, print)) as trackers,
    ):
        trackers.start(0, {})
        logger = RunLogger(Terminal(quiet=True), files, config, trackers=trackers)
        for step, staleness in enumerate([[0], [3, 3, 1]], start=1):
            for number in staleness:
                logger.count_value("staleness", number)
            logger.log_train_step(step, 4, {"loss": 1.0}, done=step)
        logger.log_train_step(3, 4, {"loss": 1.0}, done=3)
        assert files.recorded(Split.TRAIN, 2) == {"loss": 1.0}  # numbers alone
    report = [line.get("staleness_counts") for line in metrics(tmp_path, "train")]
    assert report == [{"0": 1}, {"1": 1, "3": 2}, None]
    histograms = [
        value.histo
        for event in events(tmp_path)
        for value in event.summary.value
        if value.tag == "train/staleness_counts"
    ]
    second = histograms[1]
    assert (second.min, second.max, second.num, second.sum) == (1, 3, 3, 7)
    assert list(second.bucket) == [0, 1, 0, 2] and list(second.bucket_limit) == [0.5, 1.5, 2.5, 3.5]
