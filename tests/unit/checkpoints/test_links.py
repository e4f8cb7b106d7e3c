"""Symbolic links in a run's folder: nothing behind them is written, truncated or removed."""

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import contents, saved_steps

from spmdtrain import StorageError, Trainer, UserError
from spmdtrain.checkpoints.command import main as checkpoints
from spmdtrain.checkpoints.restore import export_params
from spmdtrain.record.run_files import RunFiles, Split, Status, write_predictions


def objective(model: Any, batch: Any) -> dict[str, Any]:
    return {"loss": (model(batch[0])[:, 0] - batch[1]) ** 2}


def fit(workdir: Path, steps: int, **options: Any) -> None:
    from flax import nnx

    data = np.arange(32, dtype=np.float32).reshape(32, 1) / 32, np.ones(32, np.float32)
    Trainer(
        model=lambda rngs: nnx.Linear(1, 1, rngs=rngs),
        objective=objective,
        optimizer=optax.sgd(0.1),
        workdir=str(workdir),
        global_batch_size=8,
        steps=steps,
        **{"checkpoint_every_steps": 1, "keep_latest": 2} | options,
    ).fit(data)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints 1 and 2."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    fit(workdir, 2)
    assert saved_steps(workdir) == [1, 2]
    return workdir


@pytest.fixture
def workdir(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run, with a folder and a file of someone else beside it."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "victim" / "deep").mkdir(parents=True)
    (tmp_path / "victim" / "deep" / "file").write_text("precious\n")
    return tmp_path / "run"


VICTIM = {"deep/file": b"precious\n"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [".removed", "3.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-1", "3", "1"],
)
def test_a_link_among_the_checkpoints_harms_nothing_behind_it(name: str, workdir: Path) -> None:
    link, victim = workdir / "checkpoints" / name, workdir.parent / "victim"
    if link.exists():
        shutil.rmtree(link)
    link.symlink_to(victim)
    fit(workdir, 4)  # removes checkpoint 2, too
    assert contents(victim) == VICTIM
    assert not (link.is_symlink() and name.startswith((".", "3.")))
    assert checkpoints(["verify", str(workdir / "checkpoints" / "4")]) == 0
    assert not (workdir / "checkpoints" / "2").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "plugins"])
def test_a_run_does_not_write_through_a_linked_folder(
    name: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "plugins").mkdir()
    shutil.move(workdir / name, workdir.parent / "elsewhere")
    (workdir / name).symlink_to(workdir.parent / "elsewhere")
    before = contents(workdir.parent / "elsewhere")
    refused = f"{name} is a symbolic link|symbolic link.*run/{name}"
    if name == "tensorboard":  # of a tracker, without which the run continues
        fit(workdir, 3)
        assert re.search(refused, capsys.readouterr().out)
    else:
        with pytest.raises((UserError, StorageError), match=refused):
            fit(workdir, 3, profile_steps="3:3")
    assert contents(workdir.parent / "elsewhere") == before
    assert checkpoints(["verify", str(workdir)]) == 0  # reading is another matter
    assert capsys.readouterr().out.count("valid") == 2


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_linked_file_that_grows_is_refused(name: str, tmp_path: Path) -> None:
    workdir, victim = tmp_path / "run", tmp_path / "victim"
    workdir.mkdir()
    victim.write_text("precious\n")
    (workdir / name).symlink_to(victim)
    with (
        pytest.raises((UserError, StorageError), match=rf"symbolic link.*run/{re.escape(name)}"),
        contextlib.closing(RunFiles(str(workdir))) as files,
    ):
        files.write_metrics(1, Split.TRAIN, {"loss": 1.0})
    assert victim.read_text() == "precious\n"


@pytest.mark.parametrize("name", ["status.json", ".status.json.new", "config.json"])
def test_a_linked_file_that_is_replaced_becomes_a_file(name: str, tmp_path: Path) -> None:
    workdir, victim = tmp_path / "run", tmp_path / "victim"
    workdir.mkdir()
    victim.write_text("precious\n")
    (workdir / name).symlink_to(victim)
    with contextlib.closing(RunFiles(str(workdir))) as files:
        files.write_config({}, mesh="", devices=jax.devices(), skipped_records={})
        files.write_status(Status.RUNNING, 3)
    assert victim.read_text() == "precious\n"
    assert "running" in (workdir / "status.json").read_text()
    assert not any(path.is_symlink() for path in workdir.iterdir())


@pytest.mark.parametrize("name", ["predictions.npz", ".predictions.npz.new"])
def test_predictions_and_exports_replace_a_link(name: str, workdir: Path) -> None:
    victim = workdir.parent / "victim" / "deep" / "file"
    (workdir / name).symlink_to(victim)
    write_predictions(str(workdir), np.ones(3))
    assert np.load(workdir / "predictions.npz")["predictions"].tolist() == [1, 1, 1]
    write_predictions(str(workdir), {"file": np.ones(2), "allow_pickle": np.zeros(1)})
    found = np.load(workdir / "predictions.npz")  # they are arguments of `np.savez`
    assert {name: x.tolist() for name, x in found.items()} == {"file": [1, 1], "allow_pickle": [0]}
    assert victim.read_bytes() == b"precious\n"
    (workdir / ".out.npz.new").symlink_to(victim)
    export_params(str(workdir), str(workdir / "out.npz"))
    assert victim.read_bytes() == b"precious\n" and np.load(workdir / "out.npz")["kernel"].size == 1


@pytest.mark.slow
def test_a_workdir_reached_through_a_link_is_as_any_other(workdir: Path) -> None:
    (workdir.parent / "short").symlink_to(workdir)
    fit(workdir.parent / "short", 4)
    assert saved_steps(workdir) == [3, 4]
