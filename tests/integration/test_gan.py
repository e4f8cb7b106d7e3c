"""The adversarial example, shrunk, through the real command."""

from pathlib import Path

import numpy as np
import pytest
from helpers import GAN, metrics, saved_steps
from processes import job, sums

from spmdtrain import load_params
from spmdtrain.run import main

SHRUNK = ("--config", str(GAN), "--hidden", "32", "--log-every", "5", "--keep-latest", "9")


def trained(workdir: Path, *options: object) -> list[float]:
    """The losses of the steps that are logged."""
    line = [*SHRUNK, "--workdir", workdir, "--eval-every-steps", 10, *options]
    assert main([str(part) for part in line]) == 0
    lines = metrics(workdir, "train")
    return [line[name] for line in lines for name in ("critic_loss", "generator_loss")]


@pytest.mark.nightly
@pytest.mark.slow
def test_both_models_learn_and_resume_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    every = ("--checkpoint-every-steps", 20)
    losses = trained(whole, "--steps", 150, *every)
    # From the sum of two coins' cross-entropies, as labels of 0.9 and 0 cost it.
    assert 1.3 < losses[0] < 1.5 and losses[-2] < 1.25
    scores = [(line["step"], line["distance"]) for line in metrics(whole, "eval")]
    assert [step for step, _ in scores] == list(range(10, 151, 10))
    assert scores[-1][1] < scores[0][1]
    picture = (whole / "samples.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    trained(parts, "--steps", 100, *every)
    assert trained(parts, "--steps", 150, *every) == losses
    assert "resumed from step 100" in capsys.readouterr().out
    assert sums(parts, 150) == sums(whole, 150)
    assert (parts / "samples.png").read_bytes() == picture
    assert set(load_params(str(whole))) == {"critic", "generator"}


@pytest.mark.slow
@pytest.mark.nightly
def test_one_device_and_split_parameters_give_the_same_losses(tmp_path: Path) -> None:
    options = ("--steps", 6, "--log-every", 1)
    expected = trained(tmp_path / "mirrored", *options)
    split = ("--strategy", "fully_sharded", "--sharding.min-size", 64)
    for name, other in (("one", ("--mesh.devices", 0)), ("split", split)):
        found = trained(tmp_path / name, *options, *other)
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)


@pytest.mark.drill
@pytest.mark.nightly
def test_two_processes_give_the_same_losses(tmp_path: Path) -> None:
    expected = trained(tmp_path / "one", "--steps", 20)
    options = (*SHRUNK[2:], "--eval-every-steps", 10, "--steps", 20)
    job(GAN, *options, "--workdir", tmp_path / "two", processes=2, devices=4)
    lines = metrics(tmp_path / "two", "train")
    losses = [line[name] for line in lines for name in ("critic_loss", "generator_loss")]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert saved_steps(tmp_path / "two") == [20]
    assert (tmp_path / "two" / "samples.png").is_file()
