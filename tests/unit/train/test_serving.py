"""Exported predict functions: equal outputs at every batch size, and refusals.

Exports to StableHLO need flatbuffers (extra `serving`). The formats of other programs are tested if
their libraries can be imported: pip install 'spmdtrain[onnx,tensorflow]'.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from spmdtrain import (
    FunctionModel,
    LinenModel,
    Stream,
    Trainer,
    UserError,
    export_predict,
    load_exported,
)
from spmdtrain.checkpoints import command
from spmdtrain.models import (
    GPT2_RULES,
    VIT_AXIS_RULES,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)

pytest.importorskip("flatbuffers", reason="pip install 'spmdtrain[serving]'")

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(64, 4, 4)).astype(np.float32)
LABELS = np.arange(64, dtype=np.int32) % 3
BATCH = {"image": IMAGES, "label": LABELS}
TOKENS = RANDOM.integers(0, 11, (64, 9)).astype(np.int32)
SIZES = (1, 7, 64)


class Net(nnx.Module):
    """Has dropout and batch statistics."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(self.norm(self.first(x.reshape(x.shape[0], -1)))))


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(3)(x.reshape(x.shape[0], -1))


def objective(model: Any, batch: Any) -> Any:
    outputs = model(batch["image"])
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"])}


def token_losses(model: Any, batch: Any) -> Any:
    tokens = batch["tokens"]
    return {"loss": model.token_losses(tokens[:, :-1], tokens[:, 1:]).loss}


def several(model: Any, batch: Any) -> Any:
    outputs = model(batch["image"])
    return {"class": outputs.argmax(-1), "pair": (outputs, outputs.astype(jnp.bfloat16))}


def trained(batch: Any = BATCH, **options: Any) -> Trainer:
    options = {"model": Net, "objective": objective, "optimizer": optax.sgd(0.1)} | options
    trainer = Trainer(quiet=True, **options)
    trainer.fit(batch, steps=2, global_batch_size=16)
    return trainer


def functions() -> FunctionModel:
    return FunctionModel(
        init=lambda key: {"kernel": jax.random.normal(key, (16, 3))},
        apply=lambda params, x: x.reshape(x.shape[0], -1) @ params["kernel"],
    )


GPT2 = TransformerConfig(
    vocabulary=11,
    rows=16,
    layers=2,
    width=16,
    heads=2,
    hidden=32,
    context=8,
    positions="learned",
    blocks="gpt2",
    dropout=0.1,
)
VIT = ViTConfig(
    classes=3, image_size=4, patch_size=2, channels=1, layers=1, width=16, heads=2, hidden=16
)
CASES: dict[str, Callable[[], tuple[Trainer, Any]]] = {
    "nnx, bfloat16, sharded": lambda: (
        trained(strategy="fully_sharded", compute_dtype="bfloat16", predict=several),
        BATCH,
    ),
    "linen, averaged": lambda: (
        trained(model=LinenModel(Dense(), IMAGES[:1]), ema_decay=0.5),
        BATCH,
    ),
    "functions": lambda: (trained(model=functions()), BATCH),
    "gpt2": lambda: (
        trained(
            {"tokens": TOKENS},
            model=partial(Transformer, GPT2),
            objective=token_losses,
            predict=token_losses,
            rules=GPT2_RULES,
        ),
        {"tokens": TOKENS},
    ),
    "vit": lambda: (
        trained(
            BATCH | {"image": IMAGES[..., None]},
            model=partial(ViT, VIT),
            axis_rules=VIT_AXIS_RULES,
        ),
        BATCH | {"image": IMAGES[..., None]},
    ),
}


NIGHTLY = ("linen, averaged", "gpt2", "vit")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in CASES],
)
def test_outputs_are_those_of_predict_at_every_batch_size(name: str, tmp_path: Path) -> None:
    trainer, batch = CASES[name]()
    weights: Any = "beside" if name in ("gpt2", "nnx, bfloat16, sharded") else "inside"
    platforms: Any = ("cpu", "cuda", "tpu") if name != "functions" else ("cpu",)
    export_predict(trainer, str(tmp_path / "out"), batch, weights=weights, platforms=platforms)
    model = load_exported(tmp_path / "out")
    assert model.description.platforms == [*platforms]
    assert "label" not in model.description.inputs
    for size in SIZES:
        part = {name: x[:size] for name, x in batch.items()}
        expected = trainer.predict(part, global_batch_size=size)
        found = model({name: part[name] for name in model.description.inputs})
        assert str(jax.tree.structure(found)) == str(jax.tree.structure(expected))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert a.shape[0] == size and a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert max(np.abs(x).max() for x in jax.tree.leaves(expected)) > 0.01 or size == 1


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    """A linear model, its weights beside the program."""
    trainer, folder = trained(model=functions()), tmp_path_factory.mktemp("export") / "first"
    export_predict(trainer, str(folder), BATCH, weights="beside", platforms=("cpu",), license="mit")
    return trainer, folder


def test_two_exports_have_the_same_bytes_and_no_path_of_this_machine(
    exported: tuple[Trainer, Path], tmp_path: Path
) -> None:
    trainer, first = exported
    second = tmp_path / "second"
    # The shapes are those of a batch, of a dataset or of a stream.
    row = {"image": IMAGES[0], "label": LABELS[0]}
    stream = Stream(lambda index, count: grain.MapDataset.source([row]).to_iter_dataset())
    export_predict(
        trainer, str(second), stream, weights="beside", platforms=("cpu",), license="mit"
    )
    names = {path.name for path in first.iterdir()}
    assert names == {"predict.jax_export", "weights.npz", "export.json", "README.md"}
    for name in names:
        content = (first / name).read_bytes()
        assert content == (second / name).read_bytes()
        assert str(Path(__file__).parent).encode() not in content
    card = (first / "README.md").read_text()
    for part in ('license: "mit"', "| steps | 2 |", "| parameters | 48 |", "image: float32[batch"):
        assert part in card


def test_an_input_that_does_not_fit_is_named(exported: tuple[Trainer, Path]) -> None:
    model = load_exported(exported[1])
    expected = exported[0].predict(BATCH)
    right: list[Any] = [BATCH, IMAGES, {"image": IMAGES.astype(np.float64)}]
    for given in right:
        np.testing.assert_allclose(model(given), expected, rtol=1e-6, atol=1e-6)
    wrong: list[tuple[Any, str]] = [
        ({"img": IMAGES}, "the batch has no 'image'.*takes image: float32.batch,4,4"),
        ({"image": IMAGES[:, :3]}, r"image is float32\[64,3,4\].*takes float32\[batch,4,4\]"),
        ({"image": np.full((2, 4, 4), "a")}, "image is str32"),
    ]
    for given, why in wrong:
        with pytest.raises(UserError, match=why):
            model(given)


@pytest.mark.parametrize("file", ["predict.jax_export", "weights.npz", "export.json"])
def test_a_corrupted_or_missing_file_is_named(
    file: str, exported: tuple[Trainer, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported[1], tmp_path / "copy"))
    content = bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=f"{file} is corrupted"):
        load_exported(folder)
    (folder / file).unlink()
    with pytest.raises(UserError, match=f"no complete export: {file} is missing"):
        load_exported(folder)


class Pickled:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


def test_a_forged_file_with_its_checksum_is_refused_and_nothing_is_unpickled(
    exported: tuple[Trainer, Path], tmp_path: Path
) -> None:
    import hashlib

    folder = Path(shutil.copytree(exported[1], tmp_path / "copy"))
    about = json.loads((folder / "export.json").read_text())

    def forge(file: str) -> None:
        about["files"][file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        (folder / "export.json").write_text(json.dumps(about))

    name = next(iter(about["dtypes"]))
    forged: Any = {name: np.array([Pickled()], object)}
    np.savez(folder / "weights.npz", **forged)
    forge("weights.npz")
    with pytest.raises(UserError, match=r"weights.npz is corrupted: Object arrays"):
        load_exported(folder)
    (folder / "predict.jax_export").write_bytes(b"\x00" * 100)
    forge("predict.jax_export")
    with pytest.raises(UserError, match=r"predict.jax_export is no program that JAX"):
        load_exported(folder)


def test_a_model_that_depends_on_its_batch_size_takes_one_size(tmp_path: Path) -> None:
    def halves(model: Any, batch: Any) -> Any:
        x = model(batch["image"])
        return x + jnp.concatenate([x[: len(x) // 2]] * 2)

    trainer, out = trained(model=functions(), predict=halves), str(tmp_path / "out")
    with pytest.raises(UserError, match=r"depends on the size of its batch.*batch_size=64"):
        export_predict(trainer, out, BATCH)
    assert not os.path.exists(out)
    export_predict(trainer, out, BATCH, batch_size=6, platforms=("cpu",))
    model = load_exported(out)
    part = {name: x[:6] for name, x in BATCH.items()}
    np.testing.assert_allclose(model(part), trainer.predict(part, global_batch_size=6), rtol=1e-5)
    with pytest.raises(UserError, match=r"takes float32\[6,4,4\]"):
        model(BATCH)


@pytest.mark.slow
def test_a_predict_function_with_a_key_and_one_that_calls_python(tmp_path: Path) -> None:
    def noisy(model: Any, batch: Any, key: jax.Array) -> jax.Array:
        return model(batch["image"]) + jax.random.normal(key, (3,))

    def calling(model: Any, batch: Any) -> jax.Array:
        shape = jax.ShapeDtypeStruct((batch["image"].shape[0], 3), jnp.float32)
        return jax.pure_callback(lambda x: x, shape, model(batch["image"]))

    trainer = trained(model=functions(), predict=noisy)
    export_predict(trainer, str(tmp_path / "out"), BATCH, platforms=("cpu",))
    expected = trainer.predict(BATCH, global_batch_size=64)
    np.testing.assert_allclose(load_exported(tmp_path / "out")(BATCH), expected, rtol=1e-5)
    with pytest.raises(UserError, match="predict calls Python"):
        trainer = trained(model=functions(), predict=calling)
        export_predict(trainer, str(tmp_path / "other"), BATCH, platforms=("cpu",))


def test_wrong_arguments_are_refused(exported: tuple[Trainer, Path], tmp_path: Path) -> None:
    trainer, folder = exported
    for options, why in (
        ({"format": "pickle"}, "format is 'pickle'"),
        ({"platforms": ("cpu", "npu")}, "platforms is .*npu"),
        ({"platforms": ()}, "platforms is"),
        ({"platforms": "cpu"}, "platforms is 'cpu': it must be a list"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"weights": "beside", "format": "onnx"}, "onnx files hold their own"),
        ({"license": "my own"}, "license is 'my own'"),
    ):
        with pytest.raises(UserError, match=why):
            export_predict(trainer, str(tmp_path / "out"), BATCH, **options)
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        export_predict(trainer, str(folder), BATCH)
    other = tmp_path / "other"
    export_predict(trainer, str(other), BATCH, platforms=("tpu",))
    with pytest.raises(UserError, match="was exported for tpu, and the device is a cpu"):
        load_exported(other)(BATCH)


EXPERIMENT = """
from dataclasses import dataclass
import jax, numpy as np, optax
from spmdtrain import Experiment, FunctionModel, RunConfig

@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 2
    global_batch_size: int | None = 8
    strategy: str = "fully_sharded"

def build(config):
    x = np.arange(64, dtype=np.float32).reshape(16, 4) / 64
    model = FunctionModel(
        init=lambda key: {"kernel": jax.random.normal(key, (4, 8))},
        apply=lambda params, x: x @ params["kernel"],
    )
    return Experiment(
        model=model,
        objective=lambda model, batch: {"loss": ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)},
        optimizer=optax.sgd(0.1),
        train={"x": x, "y": x.sum(1, keepdims=True)},
        validation={"x": x, "y": x.sum(1, keepdims=True)},
    )
"""


@pytest.mark.slow
def test_the_command_exports_a_run_of_eight_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from spmdtrain import load_params, run

    file, workdir, out = tmp_path / "experiment.py", tmp_path / "run", tmp_path / "out"
    file.write_text(EXPERIMENT)
    line = ["--config", str(file), "--workdir", str(workdir), "--trackers"]
    assert run.main([*line, "--quiet"]) == 0
    export = ["export", str(workdir), str(out), "--format", "stablehlo"]
    assert command.main([*export, "--platforms", "cpu", "--license", "mit"]) == 0
    assert f"predict of step 2 in {out}" in capsys.readouterr().out.replace("\n", "")
    x = np.ones((3, 4), np.float32)
    found = load_exported(out)(x)
    np.testing.assert_allclose(found, x @ load_params(workdir)["kernel"], rtol=1e-5)
    card = (out / "README.md").read_text()
    assert "| loss | " in card and '"x": "float32[4]"' in card
    # The file is gone: the export needs no code of its run.
    file.unlink()
    code = "import sys, numpy as np, spmdtrain\nmodel = spmdtrain.load_exported(sys.argv[1])\n"
    code += "print(np.asarray(model(np.ones((3, 4), np.float32))).sum(), 'optax' in sys.modules)"
    end = subprocess.run([sys.executable, "-c", code, out], capture_output=True, text=True)
    assert end.returncode == 0, end.stderr
    assert float(end.stdout.split()[0]) == pytest.approx(float(np.sum(found)), rel=1e-5)
    for extra, why in (
        (["--trained"], "--trained is for a file of parameters"),
        (["--tokenizer", "x"], "--tokenizer is for --format huggingface"),
        (["--format", "huggingface"], "exists and is not an empty folder"),
    ):
        assert command.main([*export, *extra]) == 2
        assert why in capsys.readouterr().err
    assert command.main(["export", str(workdir), "x.npz", "--license", "mit"]) == 2
    assert "--license is for" in capsys.readouterr().err


@pytest.mark.slow
def test_onnxruntime_computes_the_same(tmp_path: Path) -> None:
    reason = "pip install 'spmdtrain[onnx]'"
    pytest.importorskip("jax2onnx", reason=reason)
    runtime = pytest.importorskip("onnxruntime", reason=reason)
    trainer = trained(predict=several)
    export_predict(trainer, str(tmp_path / "out"), BATCH, format="onnx")
    session = runtime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    names = [output.name for output in session.get_outputs()]
    assert names == ["class", "pair_0", "pair_1"]
    for size in SIZES:
        part = {name: x[:size] for name, x in BATCH.items()}
        expected = jax.tree.leaves(trainer.predict(part, global_batch_size=size))
        for a, b in zip(session.run(None, {"image": part["image"]}), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-2 if a is expected[2] else 1e-6)


@pytest.mark.slow
def test_tensorflow_computes_the_same(tmp_path: Path) -> None:
    tensorflow = pytest.importorskip("tensorflow", reason="pip install 'spmdtrain[tensorflow]'")
    trainer, out = trained(), str(tmp_path / "out")
    export_predict(trainer, out, BATCH, format="saved_model")
    serve = tensorflow.saved_model.load(out).signatures["serving_default"]
    for size in SIZES:
        part = {name: x[:size] for name, x in BATCH.items()}
        found = serve(image=tensorflow.constant(part["image"]))["output"].numpy()
        expected = trainer.predict(part, global_batch_size=size)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_missing_library_is_named(
    exported: tuple[Trainer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for format, library in (("onnx", "jax2onnx"), ("saved_model", "tensorflow")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(UserError, match=rf"need {library}.*pip install 'spmdtrain"):
            export_predict(exported[0], str(tmp_path / "out"), BATCH, format=format)  # type: ignore[arg-type]
