"""Batches that processes read ahead."""

import multiprocessing
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spmdtrain import Mixture, Trainer
from spmdtrain.data.read_ahead import read_ahead
from spmdtrain.data.sampling import TrainBatches
from spmdtrain.errors import StorageError, UserError


@dataclass
class Rows:
    """The indices of examples, and the process that read them."""

    fails_at: int = -1

    def __len__(self) -> int:
        return 100

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if self.fails_at in indices:
            raise UserError(f"example {self.fails_at} is not readable")
        return {"x": indices.astype(np.float32), "process": np.full(len(indices), os.getpid())}


def noisy(example: Any, generator: np.random.Generator) -> Any:
    return {**example, "x": example["x"] + generator.normal()}


def batches(dataset: Any, steps: int = 9) -> TrainBatches:
    return TrainBatches(dataset, 16, 3, True, steps, np.arange(16), noisy)


@pytest.mark.slow
def test_processes_read_the_same_batches_and_end_with_the_iterator() -> None:
    items = batches(Rows())
    found = list(read_ahead(items, 2, threads=2, workers=2))
    assert len(found) == 7
    for step, batch in enumerate(found, 2):
        np.testing.assert_array_equal(batch["x"], items[step]["x"])
    readers = [int(batch["process"][0]) for batch in found]
    assert len({*readers, os.getpid()}) == 3 and readers[0] == readers[2] != readers[1]

    reading: Any = read_ahead(items, 8, workers=3)  # one batch is left, so one process is enough
    next(reading)
    assert len(multiprocessing.active_children()) == 1
    reading.close()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_an_error_in_a_process_is_raised_with_its_class_and_place() -> None:
    with pytest.raises(UserError, match=r"^example 40 is not readable\n") as caught:
        list(read_ahead(batches(Rows(fails_at=40)), 0, workers=2))
    assert str(caught.value) == "example 40 is not readable"  # without the note of its traceback
    assert "in rows" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_mixture_keeps_its_components() -> None:
    rows = {"x": np.arange(50, dtype=np.float32)}
    mixture = Mixture({"a": (rows, 0.75), "b": (rows, 0.25)})
    items = TrainBatches(mixture, 16, 3, True, 4, np.arange(16))
    for step, batch in enumerate(read_ahead(items, 0, workers=1)):
        assert batch.names == ("a", "b")
        np.testing.assert_array_equal(batch.component, items[step].component)


class Slow:
    """Batches that take long and use no core, with the most that were read at a time."""

    def __init__(self, thread_safe: bool | None = True) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()
        if thread_safe is not None:
            self.thread_safe = thread_safe

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> np.ndarray:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.01)
        with self._lock:
            self.now -= 1
        return np.full(3, index)


def test_auto_adds_threads_while_batches_are_waited_for() -> None:
    slow, lines, found = Slow(), list[str](), list[int]()
    reading = read_ahead(slow, 5, threads="auto", announce=lines.append)
    for batch in reading:
        found.append(int(batch[0]))
        if lines or len(found) == 900:
            break
        time.sleep(0.004)  # the step
    reading.close()  # type: ignore[attr-defined]
    assert found == list(range(5, 5 + len(found)))
    assert slow.most >= 4  # 2 threads read a batch in 5 ms, and a step takes 4 ms
    (line,) = lines
    assert re.fullmatch(r"data_threads auto: \d+ threads read batches ahead, .* of the time", line)


def test_auto_goes_back_if_more_threads_do_not_help() -> None:
    lock = threading.Lock()

    class Serial(Slow):
        def __getitem__(self, index: int) -> np.ndarray:
            with lock:  # as Python's lock does
                time.sleep(0.01)
            return np.full(3, threading.get_ident())

    readers: list[int] = []
    for number, batch in enumerate(read_ahead(Serial(), 0, threads="auto")):
        readers.append(int(batch[0]))
        if number == 150:
            break
    assert len(set(readers)) > 2 and len(set(readers[-20:])) <= 2


def test_auto_keeps_the_batches_within_an_eighth_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spmdtrain.data.read_ahead.available_memory", lambda: 8 * 4 * 24)
    slow = Slow()
    for number, _ in enumerate(read_ahead(slow, 0, threads="auto")):
        if number == 150:
            break
    assert slow.most in (2, 3)  # 2 threads, and the one before them at its last batch


@pytest.mark.parametrize("declared", [None, False])
def test_auto_reads_between_steps_unless_threads_are_declared(declared: bool | None) -> None:
    slow = Slow(declared)
    reading = read_ahead(slow, 0, threads="auto")
    next(reading)
    assert (slow.most, slow.now) == (1, 0)
    time.sleep(0.005)
    assert slow.now == 0  # no thread reads ahead


def test_data_that_cannot_be_sent_to_a_process_are_refused() -> None:
    rows = Rows()
    rows.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"cannot be sent to other processes: .*pickle"):
        next(read_ahead(batches(rows), 0, workers=1))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"data_on_device": True}, "data_workers is 1 and data_on_device is True"),
        ({"strategy": "parameter_server"}, "data_workers is 1, but under parameter_server"),
    ],
)
def test_options_that_leave_nothing_to_read_are_refused(
    options: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        Trainer(model=None, objective=None, optimizer=None, data_workers=1, **options)  # type: ignore[arg-type]


@dataclass
class Ends(Rows):
    """Rows whose reader becomes another program, or never returns, from an example on."""

    hangs: bool = False

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if self.fails_at not in indices:
            return super().rows(indices)
        while self.hangs:
            time.sleep(100)
        os.execv("/bin/true", ["true"])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("example", [0, pytest.param(40, marks=pytest.mark.nightly)])
def test_a_process_that_ends_with_code_0_is_named(example: int) -> None:
    with pytest.raises(StorageError, match="ended with exit code 0 before its last batch"):
        list(read_ahead(batches(Ends(fails_at=example)), 0, workers=2))
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize("example", [0, pytest.param(40, marks=pytest.mark.nightly)])
def test_a_signal_ends_the_wait_for_a_process_that_hangs(example: int) -> None:
    class Stop(Exception):
        pass

    def stop(number: int, frame: Any) -> None:
        raise Stop

    reading = read_ahead(batches(Ends(fails_at=example, hangs=True)), 0, workers=2)
    before = signal.signal(signal.SIGINT, stop)
    timer = threading.Timer(8, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(Stop):
            list(reading)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not multiprocessing.active_children()
