"""The option `on_bad_record` through the command: fail, skip and the limit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import metrics

from spmdtrain.run import main

EXPERIMENT = '''"""A line; two records for training and one for validation cannot be decoded."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import optax
from flax import nnx

from spmdtrain import Experiment, RunConfig


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    epochs: int | None = 1
    global_batch_size: int | None = 16


class Records:
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 66

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"no number: {index}")
        return {"x": np.float32([index / 66])}


def objective(model, batch):
    return {"loss": (model(batch["x"]) - 3 * batch["x"]) ** 2, "number": batch["x"]}


def build(config):
    return Experiment(
        model=partial(nnx.Linear, 1, 1),
        objective=objective,
        optimizer=optax.sgd(0.0),
        train=Records({0, 13}),
        validation=Records({65}),
    )
'''


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., int]:
    """The run command on the experiment, with a workdir and options; returns the exit code."""
    file = tmp_path / "line.py"
    file.write_text(EXPERIMENT)

    def call(workdir: str, *options: str) -> int:
        folder = str(tmp_path / workdir)
        return int(main(["--config", str(file), "--workdir", folder, "--log-every=1", *options]))

    return call


SKIP = "--on-bad-record=skip"


def test_bad_records_end_a_run_or_are_left_out(
    tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("fail") == 2
    message = "error: example 0 of a Records cannot be read: ValueError: no number: 0"
    assert message in capsys.readouterr().err
    assert command("limit", SKIP, "--max-bad-records=1") == 2
    message = "over 1 records of a Records cannot be read, the limit max_bad_records"
    assert message in capsys.readouterr().err

    assert command("skip", SKIP) == 0
    assert "bad records left out: train 2, validation 1" in capsys.readouterr().out
    content = json.loads((tmp_path / "skip" / "config.json").read_text())
    assert content["skipped_records"] == {"train": 2, "validation": 1}
    (epoch,), (evaluation,) = (metrics(tmp_path / "skip", split) for split in ("epoch", "eval"))
    assert epoch["step"] == 4  # 64 records of 66
    assert epoch["number"] == pytest.approx((sum(range(66)) - 13) / 64 / 66, rel=1e-6)
    assert evaluation["number"] == pytest.approx(sum(range(65)) / 65 / 66, rel=1e-6)


@pytest.mark.slow
def test_the_same_records_are_left_out_everywhere(
    tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("8", SKIP) == command("1", SKIP, "--mesh.devices", "0") == 0
    many, one = metrics(tmp_path / "8", "train"), metrics(tmp_path / "1", "train")
    assert [line["number"] for line in many] == pytest.approx(
        [line["number"] for line in one], rel=1e-6
    )
    capsys.readouterr()
    assert command("8", SKIP, "--mode=evaluate") == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("{")]
    assert json.loads(line)["number"] == pytest.approx(sum(range(65)) / 65 / 66, rel=1e-6)
    assert command("8", SKIP, "--mode=predict") == 0
    assert "predictions for the 65 examples of validation" in capsys.readouterr().out
    file = tmp_path / "line.py"
    file.write_text(EXPERIMENT.replace("{0, 13}", "{0, 14}"))
    assert command("8", SKIP, "--epochs=2") == 2
    assert "other data: skipped was 2 (crc32 " in capsys.readouterr().err
