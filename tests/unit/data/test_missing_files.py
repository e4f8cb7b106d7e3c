"""Data files that vanish in mid-epoch: the file is named, and the run resumes once it is back."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from flax import nnx
from PIL import Image

from spmdtrain import (
    ArrayRecordSource,
    ImageFolder,
    JsonLinesSource,
    ParquetSource,
    StorageError,
    Trainer,
    UserError,
)
from spmdtrain.terminal import Terminal
from spmdtrain.train.callbacks import CallbackContext
from spmdtrain.tree import named_leaves


class Mean(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(12, 1, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        return self.linear(image.reshape(image.shape[0], -1) / 255)[:, 0]


def objective(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"loss": (model(batch["image"]) - batch["label"]) ** 2}


class Line(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(1, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x[:, None])[:, 0]


def line(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"loss": (model(batch["x"].astype(float) / 160) - 1) ** 2}


def fit(folder: Path, workdir: Path, **callbacks: Any) -> dict[str, np.ndarray]:
    return train(ImageFolder(folder, 2), workdir, Mean, objective, **callbacks)


def train(
    data: Any, workdir: Path, model: Any, objective: Any, **callbacks: Any
) -> dict[str, np.ndarray]:
    trainer = Trainer(
        model=model,
        objective=objective,
        optimizer=optax.adam(0.1),
        workdir=str(workdir),
        global_batch_size=8,
        checkpoint_every_steps=2,
        terminal=Terminal(quiet=True),
        callbacks=callbacks,
    )
    trainer.fit(data, steps=30)
    assert trainer.state is not None
    return {name: np.asarray(leaf) for name, leaf in named_leaves(trainer.state.params).items()}


@pytest.mark.parametrize("what", ["moved", pytest.param("cut short", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_files_that_vanish_in_mid_epoch_are_named_and_the_run_resumes(
    what: str, tmp_path: Path
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (160, 4, 4, 3)).astype(np.uint8)
    for number, picture in enumerate(pixels):
        place = tmp_path / "data" / "ab"[number % 2] / f"{number:03}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place)
    whole = fit(tmp_path / "data", tmp_path / "whole")

    def vanish(event: CallbackContext) -> None:
        if event.step == 6:  # of 20 an epoch
            shutil.copytree(tmp_path / "data", tmp_path / "copy")
            for path in (tmp_path / "data").rglob("*.png"):
                if what == "moved":
                    path.unlink()
                else:
                    path.write_bytes(b"")

    with pytest.raises((StorageError, ValueError), match=r"data/[ab]/\d+\.png: ") as caught:
        fit(tmp_path / "data", tmp_path / "run", step=vanish)
    assert isinstance(caught.value, StorageError) == (what == "moved")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == "failed" and ".png" in status["reason"]
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "copy").rename(tmp_path / "data")
    resumed = fit(tmp_path / "data", tmp_path / "run")
    for name, value in whole.items():
        assert resumed[name].tobytes() == value.tobytes(), name


def parquet(path: Path) -> Any:
    pq.write_table(pa.table({"x": np.arange(160)}), path, row_group_size=4)
    return ParquetSource(path, cached_row_groups=1)


def json_lines(path: Path) -> Any:
    path.write_text("\n".join(f'{{"x": {x}}}' for x in range(160)))
    return JsonLinesSource(path)


def array_record(path: Path) -> Any:
    noise = np.random.default_rng(0)  # so that records do not compress
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for x in range(160):
        writer.write(np.int64(x).tobytes() + noise.bytes(1000))
    writer.close()
    return ArrayRecordSource(path, lambda record: {"x": np.frombuffer(record[:8], np.int64)[0]})


@pytest.mark.parametrize(
    ("read", "spoil", "error", "expected"),
    [
        (parquet, os.unlink, StorageError, "removed since"),
        pytest.param(
            *(parquet, lambda path: os.truncate(path, 500), UserError, "changed since"),
            marks=pytest.mark.nightly,
        ),
        (array_record, lambda path: os.truncate(path, 70_000), UserError, "changed since"),
        (json_lines, lambda path: os.truncate(path, 0), UserError, "truncated since"),
    ],
    ids=["parquet removed", "parquet truncated", "ArrayRecord truncated", "JSON Lines truncated"],
)
@pytest.mark.slow
def test_a_shard_that_fails_in_mid_epoch_is_named_and_the_run_resumes(
    read: Callable[[Path], Any],
    spoil: Callable[[Path], Any],
    error: type[Exception],
    expected: str,
    tmp_path: Path,
) -> None:
    path = tmp_path / "data"
    whole = train(read(path), tmp_path / "whole", Line, line)

    def fail(event: CallbackContext) -> None:
        if event.step == 6:  # of 20 an epoch
            shutil.copy2(path, tmp_path / "copy")
            spoil(path)

    with pytest.raises(error, match=f"{path}: the file has (been )?{expected}"):
        train(read(path), tmp_path / "run", Line, line, step=fail)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == "failed" and str(path) in status["reason"]
    shutil.copy2(tmp_path / "copy", path)
    resumed = train(read(path), tmp_path / "run", Line, line)
    for name, value in whole.items():
        assert resumed[name].tobytes() == value.tobytes(), name
