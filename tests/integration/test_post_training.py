"""Post-training through the real commands, shrunk: conversations, preferences, rewards."""

import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import REPOSITORY, metrics
from processes import sums

from spmdtrain import load_model
from spmdtrain.models import Transformer, TransformerConfig
from spmdtrain.run import main

EXPERIMENTS = REPOSITORY / "experiments"
SMALL = ("--layers", 1, "--width", 32, "--heads", 2)
SHAPE = TransformerConfig(
    vocabulary=256, rows=256, layers=1, width=32, heads=2, hidden=128, context=64
)


def trained(name: str, workdir: Path, *options: object) -> None:
    line = ["--config", EXPERIMENTS / f"{name}.py", "--workdir", workdir, *SMALL, *options]
    assert main([str(part) for part in line]) == 0


def values(workdir: Path, split: str, name: str) -> list[float]:
    return [line[name] for line in metrics(workdir, split)]


@pytest.mark.slow
def test_rewards_rise_with_equal_log_probabilities_and_a_resume_has_the_same_bits(
    tmp_path: Path,
) -> None:
    options: tuple[object, ...] = ("--digits", 2, "--symbols", 3)
    options = (*options, "--global-batch-size", 64, "--answers", 8)
    options = (*options, "--steps", 24, "--eval-every-steps", 12, "--checkpoint-every-steps", 12)
    options = (*options, "--log-every", 1, "--learning-rate", 1e-2)
    trained("grpo", tmp_path, *options)  # on 8 devices
    assert values(tmp_path, "train", "ratio_error") == [0.0] * 24
    rewards = values(tmp_path, "train", "reward")
    assert np.mean(rewards[:3]) < 0.45 and np.mean(rewards[-3:]) > 0.6
    assert values(tmp_path, "eval", "reward")[-1] > 0.6
    expected = sums(tmp_path, 24)
    shutil.rmtree(tmp_path / "checkpoints" / "24")
    trained("grpo", tmp_path, *options)  # from step 12
    assert sums(tmp_path, 24) == expected
    assert values(tmp_path, "train", "reward") == rewards


@pytest.mark.slow
@pytest.mark.nightly
def test_rewards_on_one_device_are_those_on_eight(tmp_path: Path) -> None:
    options: tuple[object, ...] = ("--digits", 2, "--symbols", 3, "--global-batch-size", 64)
    options = (*options, "--answers", 8, "--steps", 3, "--log-every", 1)
    split = ("--strategy", "fully_sharded", "--sharding.min-size", 64)
    places = {"eight": (), "one": ("--mesh.devices", 0), "split": split}
    for name, place in places.items():
        trained("grpo", tmp_path / name, *options, *place)
        assert values(tmp_path / name, "train", "ratio_error") == [0.0] * 3, name
        rewards = [values(tmp_path / each, "train", "reward")[0] for each in ("eight", name)]
        assert rewards[0] == rewards[1], name


@pytest.mark.slow
@pytest.mark.nightly
def test_a_chat_is_learned_and_preferences_change_its_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chats, pairs, preferred = (tmp_path / name for name in ("sft", "pairs", "dpo"))
    options: tuple[object, ...] = ("--steps", 30, "--eval-every-steps", 30, "--learning-rate", 1e-2)
    trained("sft", chats, "--length", 64, *options)
    assert values(chats, "train", "loss")[0] > 5 and values(chats, "eval", "loss")[-1] < 3
    # The second command of the docstring.
    monkeypatch.setattr(sys, "argv", ["dpo.py", str(chats), str(pairs)])
    runpy.run_path(str(EXPERIMENTS / "dpo.py"), run_name="__main__")
    with np.load(pairs / "pairs.npz") as arrays:
        written = dict(arrays)
    options = ("--data-dir", pairs, "--init-from", chats, "--length", 64, "--log-every", 1)
    options = (
        *options,
        "--steps",
        8,
        "--eval-every-steps",
        8,
        "--checkpoint-every-steps",
        4,
        "--learning-rate",
        1e-2,
    )
    trained("dpo", preferred, *options)
    # The reference is the first policy: the margin of the first batch is 0.
    np.testing.assert_allclose(values(preferred, "train", "loss")[0], np.log(2), atol=1e-4)
    assert values(preferred, "eval", "accuracy")[-1] == 1
    expected = sums(preferred, 8)
    shutil.rmtree(preferred / "checkpoints" / "8")
    trained("dpo", preferred, *options)  # from step 4
    assert sums(preferred, 8) == expected
    model = load_model(partial(Transformer, SHAPE), chats)
    for row in (0, 5):
        for answer in (0, 1):
            tokens = written["tokens"][row, answer]
            is_answer = written["weights"][row, answer] > 0
            logits = np.asarray(model(tokens[None]), np.float64)[0, :-1]
            of_next = np.log(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))
            alone = of_next[np.arange(31), tokens[1:]][is_answer[1:]].sum()
            np.testing.assert_allclose(written["reference"][row, answer], alone, rtol=1e-4)
    capsys.readouterr()
    trained(
        "sft", tmp_path / "asked", "--init-from", preferred, "--mode", "predict", "--length", 64
    )
    assert "<u>3+4?\n<a>" in capsys.readouterr().out
