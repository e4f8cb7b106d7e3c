"""The experiments llama and vit: Hugging Face's weights in, the same logits, and back.

The tests against `transformers` run if it can be imported: see the docstring of test_gpt2.py.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from helpers import REPOSITORY, metrics, run

from spmdtrain import MeshSpec, Trainer, export_huggingface
from spmdtrain.checkpoints import command as checkpoints_command
from spmdtrain.config.experiment import load_experiment
from spmdtrain.models import (
    LLAMA_AXIS_RULES,
    VIT_AXIS_RULES,
    LinearRopeScaling,
    Llama,
    Llama3RopeScaling,
    LlamaConfig,
    ViT,
    ViTConfig,
)

LLAMA, VIT = (REPOSITORY / "experiments" / f"{name}.py" for name in ("llama", "vit"))
llama, vit = (load_experiment(str(file), frozenset()).module for file in (LLAMA, VIT))
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 64, (8, 24)).astype(np.int32)
IMAGES = RANDOM.normal(size=(8, 12, 12, 3)).astype(np.float32)

TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"?": 0, "a": 1, "b": 2}, "unk_token": "?"},
}

LLAMAS: dict[str, Any] = {
    "llama3": {
        "rope_theta": 500_000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear, tied": {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 4.0},
}


def llama_case(name: str, transformers: Any) -> tuple[Any, Any, dict[str, Any], np.ndarray]:
    rope = LLAMAS[name]
    theirs = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=16384,
        rope_parameters=rope,
        tie_word_embeddings="tied" in name,
    )
    scaling = Llama3RopeScaling() if name == "llama3" else LinearRopeScaling(factor=4.0)
    shape = LlamaConfig(
        vocabulary=64,
        layers=2,
        width=32,
        heads=4,
        kv_heads=2,
        hidden=48,
        context=48,
        rope_base=rope["rope_theta"],
        rope_scaling=scaling,
        tied="tied" in name,
    )
    options = {
        "model": partial(Llama, shape),
        "axis_rules": LLAMA_AXIS_RULES,
        "weight_map": llama.weight_map(tied=shape.tied),
    }
    return transformers.LlamaForCausalLM, theirs, options, TOKENS


def vit_case(transformers: Any) -> tuple[Any, Any, dict[str, Any], np.ndarray]:
    theirs = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=12,
        patch_size=4,
        num_labels=5,
    )
    shape = ViTConfig(
        classes=5, image_size=12, patch_size=4, layers=2, width=32, heads=2, hidden=64
    )
    options = {
        "model": partial(ViT, shape),
        "axis_rules": VIT_AXIS_RULES,
        "weight_map": vit.WEIGHT_MAP,
    }
    return transformers.ViTForImageClassification, theirs, options, IMAGES


@pytest.mark.parametrize("name", [*LLAMAS, "vit"])
def test_logits_and_export_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reason = "see the docstring of test_gpt2.py"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    case = vit_case(transformers) if name == "vit" else llama_case(name, transformers)
    kind, config, options, inputs = case
    torch.manual_seed(0)
    theirs = kind(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # norms and biases too
            parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs")

    def of(model: Any) -> np.ndarray:
        given = torch.tensor(inputs.transpose(0, 3, 1, 2) if name == "vit" else inputs)
        with torch.no_grad():
            found: np.ndarray = model(given.long() if name != "vit" else given).logits.numpy()
        return found

    trainer = Trainer(
        objective=lambda model, x: {"loss": model(x).reshape(len(x), -1).mean(-1)},
        predict=lambda model, x: model(x),
        optimizer=optax.sgd(0.0),
        init_from=str(tmp_path / "theirs"),
        strategy="fully_sharded",
        mesh=MeshSpec(fsdp=4, tensor=2),
        workdir=str(tmp_path / "run"),
        trackers=(),
        **options,
    )
    ours = trainer.predict(inputs, global_batch_size=8)
    print("largest difference:", np.abs(ours - of(theirs)).max(), "of", np.abs(ours).max())
    assert np.abs(of(theirs)).max() > 1
    np.testing.assert_allclose(ours, of(theirs), atol=1e-5 * np.abs(ours).max())

    trainer.fit(inputs, steps=1, global_batch_size=8)  # at a rate of 0
    out, rules = tmp_path / "out", options["weight_map"]
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(TOKENIZER))
    export_huggingface(
        str(tmp_path / "run"),
        str(out),
        files=options["model"].args[0].huggingface(),
        weight_map=rules,
        tokenizer=str(tokenizer),
        license="mit",
    )
    back, loading = kind.from_pretrained(out, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    np.testing.assert_array_equal(of(back.eval()), of(theirs))
    written = transformers.PreTrainedTokenizerFast.from_pretrained(out)
    assert written("a b")["input_ids"] == [1, 2]
    assert 'license: "mit"' in (out / "README.md").read_text()
    if name == "vit":  # values from 0 to 255, (H, W, channels)
        processor = json.loads((out / "preprocessor_config.json").read_text())
        assert processor["size"] == {"height": 12, "width": 12}


@pytest.mark.nightly
@pytest.mark.parametrize("file", [LLAMA, VIT], ids=["llama", "vit"])
def test_the_command_trains_exports_and_starts_from_the_export(file: Path, tmp_path: Path) -> None:
    """On eight devices by the annotations."""
    line: list[Any] = ["--layers", 1, "--unroll", False, "--width", 32, "--steps", 2]
    line += ["--strategy", "fully_sharded", "--mesh.fsdp", 4, "--mesh.tensor", 2]
    line += ["--global-batch-size", 8]
    if file == LLAMA:
        (tmp_path / "input.txt").write_text("All that glisters is not gold.\n" * 100)
        line += ["--data-dir", tmp_path, "--length", 16, "--mlp-width", 64]
    found = run(file, *line, "--workdir", tmp_path / "run", devices=8)
    assert found.returncode == 0, found.stderr
    target = tmp_path / "model.safetensors"
    arguments = ["export", str(tmp_path / "run"), str(target), "--weight-map", str(file)]
    assert checkpoints_command.main(arguments) == 0
    line += ["--workdir", tmp_path / "second", "--init-from", target]
    again = run(file, *line, devices=8)
    assert again.returncode == 0, again.stderr
    first, second = metrics(tmp_path / "run", "train"), metrics(tmp_path / "second", "train")
    assert second[0]["loss"] < first[0]["loss"]


@pytest.mark.nightly
def test_the_command_logs_the_terms_and_the_load_of_experts(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("All that glisters is not gold.\n" * 100)
    line: list[Any] = ["--preset", "moe", "--layers", 1, "--width", 32, "--mlp-width", 16]
    line += ["--data-dir", tmp_path, "--length", 16, "--steps", 2, "--global-batch-size", 8]
    line += ["--balance-weight", 0.5, "--router-z-weight", 0.25, "--workdir", tmp_path / "run"]
    found = run(LLAMA, *line, devices=8)
    assert found.returncode == 0, found.stderr
    for split in ("train", "eval"):
        logged = metrics(tmp_path / "run", split)[-1]
        terms = logged["cross_entropy"] + 0.5 * logged["balance"] + 0.25 * logged["router_z"]
        assert logged["loss"] == pytest.approx(terms, rel=1e-6)
        assert 0 < logged["expert_entropy"] <= np.log(8) + 1e-6
        assert 1 < logged["expert_load"] <= 4 and logged["expert_overflow"] == 0
        assert ("expert_load_total" in logged) == (split == "eval")
    assert 1 <= logged["expert_load_total"] < logged["expert_load"]
