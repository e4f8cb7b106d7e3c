"""A resume compares the program of the run with its own: settings, versions, optimizer, code."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import linear_model
import numpy as np
import pytest

from spmdtrain import Trainer, UserError, read_manifest
from spmdtrain.checkpoints.manifest import digest
from spmdtrain.terminal import Terminal

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def train(workdir: Path, steps: int, **options: Any) -> Trainer:
    """Trains up to a step in a new trainer, which prints its lines."""
    defaults = {"log_every": 100, "trackers": (), "terminal": Terminal()}
    trainer = linear_model.trainer(workdir=str(workdir), **defaults | options)
    trainer.fit((X, Y), steps=steps)
    return trainer


def changes(output: str) -> list[str]:
    """The changes that a resume or a fork has printed, besides those of its length."""
    lines = [line.strip().partition(": ") for line in output.splitlines()]
    found = [text for label, _, text in lines if label in ("changed since", "changed")]
    return [text for text in found if not text.startswith("steps: ")]


def rewrite(workdir: Path, step: int, **fields: Any) -> None:
    """Replaces fields of the identity in a manifest; None removes one."""
    path = workdir / "checkpoints" / str(step) / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    identity = content["identity"] | fields
    content["identity"] = {name: x for name, x in identity.items() if x is not None}
    path.write_text(json.dumps(content | {"sha256": digest(content)}))


# -- settings and versions -------------------------------------------------------------------------

SETTINGS: dict[str, tuple[AbstractContextManager[Any], str]] = {
    "jax_threefry_partitionable": (
        jax.threefry_partitionable(False),
        "=True, and this process has False, which gives other numbers: set "
        "JAX_THREEFRY_PARTITIONABLE=1, continue with other numbers (--resume-anyway), or another",
    ),
    "jax_default_matmul_precision": (
        jax.default_matmul_precision("highest"),
        "=not set, and this process has highest, which gives other numbers: unset "
        "JAX_DEFAULT_MATMUL_PRECISION, continue",
    ),
    "jax_default_prng_impl": (
        jax.default_prng_impl("rbg"),
        "=threefry2x32, and this process has rbg, which gives other numbers: set "
        "JAX_DEFAULT_PRNG_IMPL=threefry2x32, or another workdir",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resume_under_a_setting_of_another_meaning_is_refused_with_the_way_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 2)
    context, message = SETTINGS[name]
    with context:
        with pytest.raises(UserError) as caught:
            train(tmp_path, 4)
        assert f"{tmp_path}/checkpoints/2 was trained with {name}{message}" in str(caught.value)
        capsys.readouterr()
        if name == "jax_default_prng_impl":  # whose key has another shape
            with pytest.raises(UserError, match="another random number generator: key is uint32"):
                train(tmp_path, 4, resume_anyway=True)
        else:
            assert train(tmp_path, 4, resume_anyway=True).step == 4
            assert [line for line in changes(capsys.readouterr().out) if name in line]
    assert train(tmp_path, 6, resume_anyway=True).step == 6


def test_other_settings_and_versions_are_printed_and_those_of_old_manifests_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 1)
    capsys.readouterr()
    with jax.numpy_rank_promotion("raise"):
        train(tmp_path, 2)
    assert changes(capsys.readouterr().out) == ["jax_numpy_rank_promotion: allow -> raise"]
    versions = dict(read_manifest(str(tmp_path)).identity.versions)
    rewrite(tmp_path, 2, versions=versions | {"jax": "0.1"})
    train(tmp_path, 3)
    found = changes(capsys.readouterr().out)
    assert f"version of jax: 0.1 -> {jax.__version__}" in found
    rewrite(tmp_path, 3, versions=None, settings=None)
    with jax.threefry_partitionable(False):
        assert train(tmp_path, 4).step == 4
    assert changes(capsys.readouterr().out) == []
