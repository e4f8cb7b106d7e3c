"""Stored arrays whose headers declare other sizes than the checkpoint's manifest."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import tensorstore
from etils import epath
from flax import nnx

from spmdtrain import Trainer, UserError, load_params
from spmdtrain.checkpoints import read_arrays
from spmdtrain.checkpoints.command import main
from spmdtrain.checkpoints.manifest import Manifest, sizes
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MLP

NAME, KERNEL = "params/layers/0/kernel", b"params.layers.0.kernel/.zarray"
HUGE = [2**40, 128]  # 562,950 GB, more than an address space


def squared_error(model: Any, batch: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    return {"loss": (model(batch[0]) - batch[1]) ** 2}


def trainer(workdir: Path) -> Trainer:
    return Trainer(
        model=MLP(4, (8,), 1, rngs=nnx.Rngs(0)),
        objective=squared_error,
        optimizer=optax.adam(0.1),
        workdir=str(workdir),
        global_batch_size=8,
        terminal=Terminal(quiet=True),
    )


def forge(workdir: Path, *, in_manifest: bool, **header: list[int]) -> None:
    """Changes the header of an array and seals the checkpoint again."""
    folder = epath.Path(workdir / "checkpoints" / "2")
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/params/"})
    found = json.loads(store.result().read(KERNEL).result().value)
    store.result().write(KERNEL, json.dumps(found | header).encode()).result()
    manifest = Manifest.read(folder)
    leaves = dict(manifest.identity.leaves)
    if in_manifest:
        leaves[NAME] = f"float32[{','.join(map(str, header['shape']))}]"
    identity = dataclasses.replace(manifest.identity, leaves=leaves)
    (folder / "manifest.json").unlink()  # a manifest is never overwritten
    dataclasses.replace(manifest, files=sizes(folder), identity=identity).write(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("header", "in_manifest", "says"),
    [
        ({"shape": HUGE}, False, f"is float32[{2**40},128] by its header, and was saved as fl"),
        ({"shape": HUGE}, True, "562950 GB, more than the "),
        ({"chunks": [2**31, 8]}, False, "is float32[4,8] by its header, and a chunk of it is [2"),
    ],
)
def test_an_array_of_a_forged_size_is_refused_before_it_is_read(
    header: dict[str, list[int]],
    in_manifest: bool,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = (np.zeros((16, 4), np.float32), np.zeros((16, 1), np.float32))
    trainer(tmp_path / "run").fit(data, steps=2)
    forge(tmp_path / "run", in_manifest=in_manifest, **header)
    with pytest.raises(UserError) as caught:
        load_params(tmp_path / "run")
    assert f"is corrupted: {NAME} " in str(caught.value) and says in str(caught.value)
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert NAME in capsys.readouterr().out
    with pytest.raises(UserError, match=NAME):  # resumed
        trainer(tmp_path / "run").fit(data, steps=3)


@pytest.mark.slow
def test_arrays_that_are_read_together_must_fit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters have 128, 32, 32 and 4 bytes."""
    data = (np.zeros((16, 4), np.float32), np.zeros((16, 1), np.float32))
    trainer(tmp_path / "run").fit(data, steps=2)
    monkeypatch.setattr(read_arrays, "available_memory", lambda: 196)
    load_params(tmp_path / "run")
    monkeypatch.setattr(read_arrays, "available_memory", lambda: 195)
    with pytest.raises(UserError, match=r"196 B .*195 B"):
        load_params(tmp_path / "run")
