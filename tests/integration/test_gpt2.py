"""The experiment gpt2: Hugging Face's weights in, the same logits, and back.

The tests against `transformers` run if it can be imported: torch is too large for the extra `dev`.

    pip install --target FOLDER 'torch==2.13.0+cpu' transformers     # any CPU build
    PYTHONPATH=FOLDER pytest tests/integration/test_gpt2.py
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
from gpt2_reference import CONTEXT, VOCABULARY, logits, random_weights
from helpers import REPOSITORY, metrics, run
from processes import launch

from spmdtrain import LoraModel, MeshSpec, Trainer, export_huggingface, export_params
from spmdtrain.checkpoints import command as checkpoints_command
from spmdtrain.config.experiment import load_experiment
from spmdtrain.models import GPT2_RULES, Transformer

GPT2 = REPOSITORY / "experiments" / "gpt2.py"
experiment: Any = load_experiment(str(GPT2), frozenset()).module
MAP = experiment.weight_map(VOCABULARY)
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (8, CONTEXT)).astype(np.int32)
TENSOR: dict[str, Any] = {"strategy": "tensor_parallel", "mesh": MeshSpec(data=2, tensor=4)}


def trainer(source: Path, **options: Any) -> Trainer:
    return Trainer(
        model=partial(Transformer, experiment.shape(experiment.PRESETS["tiny"])),
        objective=experiment.objective,
        optimizer=optax.sgd(0.0),
        rules=GPT2_RULES,
        weight_map=MAP,
        init_from=str(source),
        **options,
    )


def predicted(source: Path, **options: Any) -> np.ndarray:
    found: np.ndarray = trainer(source, **options).predict(TOKENS, global_batch_size=8)
    return found[..., :VOCABULARY]


@pytest.mark.parametrize("options", [{"strategy": "fully_sharded"}, TENSOR], ids=["fsdp", "tensor"])
def test_the_logits_are_those_of_an_independent_gpt2(
    options: dict[str, Any], tmp_path: Path
) -> None:
    assert jax.device_count() == 8
    weights = random_weights()
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    expected = logits(weights, TOKENS)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(predicted(tmp_path, **options), expected, atol=1e-4)


@pytest.mark.nightly
def test_a_trained_model_is_written_back_with_the_names_of_the_file(tmp_path: Path) -> None:
    weights = {f"transformer.{name}": x for name, x in random_weights().items()}
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    batch = {"tokens": np.pad(TOKENS, ((0, 0), (0, 1))), "weights": np.ones((8, CONTEXT), "f4")}
    options = {**TENSOR, "workdir": str(tmp_path / "run"), "trackers": ()}
    trainer(tmp_path / "model.safetensors", **options).fit(batch, steps=1, global_batch_size=8)
    to = tmp_path / "out.safetensors"
    export_params(str(tmp_path / "run"), str(to), weight_map=MAP)  # the rate was 0
    written = safetensors.numpy.load_file(to)
    assert written.keys() == random_weights().keys()
    for name, array in random_weights().items():
        np.testing.assert_array_equal(written[name], array)


@pytest.mark.nightly
def test_the_command_trains_and_exports(tmp_path: Path) -> None:
    """With the vocabulary of the published files, for which the file's own map is."""
    for name in ("train", "val"):
        TOKENS.astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    shape = ["--preset", "tiny", "--width", 32, "--layers", 1, "--vocabulary", 50257]
    workdir = tmp_path / "run"
    line: list[Any] = [*shape, "--steps", 2, "--workdir", workdir, "--data-dir", tmp_path]
    found = run(GPT2, *line, "--cpu-devices", 2)
    assert found.returncode == 0, found.stderr
    assert run(GPT2, *line, "--mode", "predict", "--cpu-devices", 2).returncode == 0
    losses = np.load(workdir / "predictions.npz")["loss"].ravel()[: TOKENS.size - 1]
    assert losses.mean() == pytest.approx(metrics(workdir, "eval")[-1]["loss"], rel=1e-5)
    target = tmp_path / "out" / "model.safetensors"
    arguments = ["export", str(workdir), str(target), "--weight-map", str(GPT2)]
    assert checkpoints_command.main(arguments) == 0
    assert safetensors.numpy.load_file(target)["wte.weight"].shape == (50257, 32)
    line[line.index(workdir)] = tmp_path / "second"
    again = run(GPT2, *line, "--init-from", target, "--cpu-devices", 2)
    assert again.returncode == 0, again.stderr
    assert "h.*.attn.c_attn.weight float32[32,96]" in again.stdout
    first, second = metrics(workdir, "train"), metrics(tmp_path / "second", "train")
    assert second[0]["loss"] < first[0]["loss"]


@pytest.mark.nightly
@pytest.mark.slow
def test_two_processes_start_from_the_same_values_as_one(tmp_path: Path) -> None:
    for name in ("train", "val"):
        TOKENS.astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    safetensors.numpy.save_file(random_weights(), tmp_path / "model.safetensors")
    line = ["--preset", "tiny", "--steps", 1, "--dropout", 0, "--data-dir", tmp_path]
    line += ["--strategy", "fully_sharded", "--init-from", tmp_path / "model.safetensors"]
    one = run(GPT2, *line, "--workdir", tmp_path / "one", devices=4)
    assert one.returncode == 0, one.stderr
    two = launch(GPT2, *line, "--workdir", tmp_path / "two", processes=2, devices=2)
    assert two.code == 0, two.output
    (expected,), (found,) = metrics(tmp_path / "one", "train"), metrics(tmp_path / "two", "train")
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    weights = random_weights()
    weights["h.1.ln_2.bias"][3] = np.nan
    safetensors.numpy.save_file(weights, tmp_path / "model.safetensors")
    bad = launch(GPT2, *line, "--workdir", tmp_path / "bad", processes=2, devices=2)
    assert bad.code == 2 and "h.1.ln_2.bias has a value that is NaN" in bad.output


@pytest.mark.slow
def test_logits_and_export_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch", reason="see the docstring of this file")
    transformers = pytest.importorskip("transformers", reason="see the docstring of this file")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4
    )
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # norms and biases too
            parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs")

    def of(model: Any) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
        return found

    assert np.abs(of(theirs)).max() > 1
    ours = predicted(tmp_path / "theirs", **TENSOR)
    print("largest difference:", np.abs(ours - of(theirs)).max())
    np.testing.assert_allclose(ours, of(theirs), atol=1e-4)

    batch = {"tokens": np.pad(TOKENS, ((0, 0), (0, 1))), "weights": np.ones((8, CONTEXT), "f4")}
    options = {**TENSOR, "workdir": str(tmp_path / "run"), "trackers": ()}
    trainer(tmp_path / "theirs", **options).fit(batch, steps=1, global_batch_size=8)
    out = tmp_path / "out"
    files = experiment.shape(experiment.PRESETS["tiny"]).huggingface()
    export_huggingface(str(tmp_path / "run"), str(out), files=files, weight_map=MAP)
    back, loading = transformers.GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    np.testing.assert_array_equal(of(back.eval()), of(theirs))


@pytest.mark.nightly
def test_lora_of_the_published_weights_is_merged_into_a_file_of_their_layout(
    tmp_path: Path,
) -> None:
    source = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(random_weights(), source)
    for name in ("train", "val"):
        TOKENS.astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    tiny = ("--preset", "tiny", "--data-dir", tmp_path, "--dropout", 0)
    lora = ("--lora-rank", 2, "--init-from", source, "--workdir", tmp_path / "run", "--steps", 4)
    split = ("--strategy", "fully_sharded+tensor_parallel", "--mesh.tensor", 2, "--mesh.fsdp", 4)
    sharded = ("--sharding.min-size", 1, "--log-every", 1)
    result = run(GPT2, *tiny, *lora, *split, *sharded, devices=8)
    assert result.returncode == 0, result.stderr
    plain = run(
        *(GPT2, *tiny, "--init-from", source, "--workdir", tmp_path / "plain", "--steps", 1),
        devices=1,
    )
    assert plain.returncode == 0, plain.stderr
    first, base = (metrics(tmp_path / name, "train")[0]["loss"] for name in ("run", "plain"))
    np.testing.assert_allclose(first, base, rtol=1e-5)
    to = tmp_path / "out.safetensors"
    export_params(str(tmp_path / "run"), str(to), weight_map=MAP)
    written = safetensors.numpy.load_file(to)
    changed = {name for name, x in random_weights().items() if (written[name] != x).any()}
    kernels = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    assert changed == {name for name in random_weights() if name.endswith(kernels)}
    adapted = LoraModel(
        partial(Transformer, experiment.shape(experiment.PRESETS["tiny"])),
        experiment.KERNELS,
        rank=2,
    )
    options: dict[str, Any] = {
        "model": adapted,
        "init_from": str(source),
        "workdir": str(tmp_path / "run"),
    }
    found = Trainer(
        objective=experiment.objective,
        optimizer=optax.sgd(0.0),
        weight_map=MAP,
        **options,
    ).predict(TOKENS, global_batch_size=8)[..., :VOCABULARY]
    np.testing.assert_allclose(logits(written, TOKENS), found, atol=1e-4)
