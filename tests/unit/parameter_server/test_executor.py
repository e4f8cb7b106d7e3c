"""The executor of a chief: what it shows of the servers, and servers that do not answer."""

import contextlib
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import hypothesis.strategies as st
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import events, metrics
from hypothesis import given

from spmdtrain import Trainer
from spmdtrain.config.run_config import RunConfig
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import PreemptedExit
from spmdtrain.parameter_server import executor as executor_module
from spmdtrain.parameter_server import ray_pool
from spmdtrain.parameter_server.executor import ServerExecutor, StalenessStats
from spmdtrain.record.run_files import RunFiles, Split
from spmdtrain.sharding.mesh import resolve
from spmdtrain.trackers.run_trackers import open_trackers
from spmdtrain.train.run_logger import RunLogger


def shown(tally: StalenessStats, made: dict[str, int]) -> list[str]:
    terminal, file = Terminal(), io.StringIO()
    terminal.console.file = file
    terminal.show(tally.table(made))
    return file.getvalue().splitlines()


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
        assert files.recorded(2)[Split.TRAIN] == {"loss": 1.0}  # numbers alone
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


# -- a server that hangs while the chief waits for its answer, without Ray -------------------------

SIGNAL_AFTER = 30.0


class HangingRay:
    """The calls of `ps 1` get no answer. Its clock stands still except in `wait`."""

    exceptions = SimpleNamespace(RayActorError=ConnectionError)
    now = 0.0

    def wait(
        self, calls: Sequence[str], num_returns: int, timeout: float
    ) -> tuple[list[str], list[str]]:
        self.now += timeout
        assert self.now < 100, "the wait does not end"
        missing = [call for call in calls if "ps 1" in call]
        return [call for call in calls if call not in missing], missing

    def get(self, calls: Sequence[str]) -> list[str]:
        raise AssertionError(f"this would wait forever: {calls}")


def server(name: str) -> Any:
    def method(what: str) -> Any:
        return SimpleNamespace(remote=lambda: f"{what} of {name}")

    return SimpleNamespace(held=method("held"), counts=method("counts"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "lost"),
    [
        (lambda executor, state: executor.sync(state), "the state cannot be saved"),
        (lambda executor, state: executor.report(), "the counts of the servers are not known"),
    ],
    ids=["state", "report"],
)
def test_a_silent_server_is_named_and_a_signal_ends_the_wait(
    call: Any, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(
        model=lambda rngs: nnx.Linear(2, 1, rngs=rngs),
        objective=lambda model, batch: {"loss": model(batch)[:, 0] ** 2},
        optimizer=optax.sgd(0.1),
    )
    trainer.fit(np.ones((8, 2), np.float32), steps=1, global_batch_size=8)
    state = trainer.state
    assert state is not None

    ray, lines = HangingRay(), list[str]()
    for module in (ray_pool, executor_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: ray.now))

    def stop_if_received() -> None:
        if ray.now > SIGNAL_AFTER:
            raise PreemptedExit("SIGTERM")

    run = MagicMock()
    run.config = RunConfig(strategy="parameter_server", steps=1, global_batch_size=8)
    run.signals.stop_requested = lambda: ray.now > SIGNAL_AFTER
    run.signals.stop_if_received = stop_if_received
    run.logger.terminal.line = lines.append
    run.logger.terminal.waiting = contextlib.nullcontext
    job: Any = SimpleNamespace(
        ray=ray,
        servers=2,
        workers=1,
        serve=lambda *arguments, **keywords: [server("ps 0"), server("ps 1")],
        worker_pool=lambda make: MagicMock(),
    )
    executor = ServerExecutor(job, run, state, trainer.functions, MagicMock(), None)
    with pytest.raises(PreemptedExit):
        call(executor, state)
    assert lines == [
        "waiting for the servers for 20 s: no answer from ps 1",
        f"{lost}, because the parameter servers do not answer",
    ]
    assert SIGNAL_AFTER + 15 < ray.now < SIGNAL_AFTER + 17
