"""A `sys.exit` before the end of a run: a failure with any code, whatever calls it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import linear_model
import numpy as np
import pytest
from helpers import status

from spmdtrain import Loop, Trainer
from spmdtrain.errors import EarlyExit

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)


class Rows:
    """Data that ends the process once `ends` is set."""

    ends = False

    def __len__(self) -> int:
        return len(X)

    def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.ends:
            sys.exit(0)
        return X[indices], X[indices, :1]


def trainer(workdir: Path, **options: Any) -> Trainer:
    return linear_model.trainer(workdir=str(workdir), steps=6, **options)


def in_callback(workdir: Path, code: Any) -> None:
    def leave(event: Any) -> None:
        if event.step == 3:
            sys.exit(code)

    trainer(workdir, callbacks={"step": leave}).fit(Rows())


def in_evaluation(workdir: Path, code: Any) -> None:
    rows = Rows()
    rows.ends = True
    trainer(workdir, callbacks={"step": lambda event: event.trainer.evaluate(rows)}).fit(Rows())


def in_threads(workdir: Path, code: Any) -> None:
    class Later(Rows):
        def rows(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            self.ends = len(indices) == 8 and 40 in indices
            return super().rows(indices)

    trainer(workdir, data_threads=2).fit(Later())


def in_loop(workdir: Path, code: Any) -> None:
    with Loop(steps=4, global_batch_size=8, workdir=str(workdir), quiet=True) as loop:
        loop.start(lambda key: {"params": {"w": jnp.zeros(())}})
        sys.exit(code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "given", "code", "words"),
    [
        (in_callback, 0, 1, "sys.exit(0) during the training, in leave ("),
        (in_callback, None, 1, "sys.exit() during the training, in leave ("),
        (in_callback, 3, 3, "sys.exit(3) during the training, in leave ("),
        (in_callback, 256, 1, "sys.exit(256) during the training, in leave ("),
        (in_callback, 75, 1, "sys.exit(75) during the training, in leave ("),
        (in_callback, "no license", 1, "sys.exit('no license') during the training, in leave ("),
        (in_evaluation, 0, 1, "sys.exit(0) during the training, in rows ("),
        (in_threads, 0, 1, "sys.exit(0) during the training, in rows ("),
        (in_loop, 0, 1, "sys.exit(0) during the training, in in_loop ("),
    ],
)
def test_an_exit_during_a_training_is_a_failure(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    run: Callable[[Path, Any], None],
    given: Any,
    code: int,
    words: str,
) -> None:
    with pytest.raises(SystemExit) as end:
        run(tmp_path, given)
    assert isinstance(end.value, EarlyExit) and end.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"failed: {words}{__file__}:")
    assert status(tmp_path)["status"] == "failed"
    assert status(tmp_path)["reason"] == line.removeprefix("failed: ")


@pytest.mark.slow
def test_an_exit_during_a_prediction_is_a_failure_and_later_no_more(tmp_path: Path) -> None:
    runner, rows = trainer(tmp_path), Rows()
    runner.fit(rows)
    rows.ends = True
    with pytest.raises(EarlyExit, match="1") as end:
        runner.predict(rows)
    assert end.value.reason.startswith("sys.exit(0) during the prediction, in rows (")
    assert status(tmp_path)["status"] == "finished"


@pytest.mark.slow
def test_an_interrupt_of_the_keyboard_stays_one() -> None:
    def interrupt(event: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        linear_model.trainer(steps=2, callbacks={"step": interrupt}).fit(Rows())
