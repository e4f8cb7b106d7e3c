"""The experiment shakespeare_text: shards of text, tokenized, packed and mixed, by the command."""

import dataclasses
import itertools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import BOUND, REPOSITORY, environment, metrics, run, text_in, together
from processes import launch

from spmdtrain import UserError
from spmdtrain.config.experiment import load_experiment

LANGUAGE_MODEL = REPOSITORY / "experiments" / "shakespeare_text.py"
TEXT = "\n\n".join(
    f"{number} green bottles, hanging on the wall.\nAnd if {ending} should accidentally fall ..."
    for number in range(99, 0, -1)
    for ending in ("one green bottle", "two", "all of them")
)
STEPS = 8
OPTIONS = ("--preset", "tiny", "--steps", STEPS, "--checkpoint-every-steps", 4, "--log-every", 1)

experiment: Any = load_experiment(str(LANGUAGE_MODEL), frozenset()).module


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of shards that the documented command writes."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "input.txt").write_text(TEXT)
    line = [sys.executable, str(LANGUAGE_MODEL), str(folder / "input.txt"), str(folder / "shards")]
    subprocess.run(line, check=True, env=environment(), timeout=BOUND)
    return folder / "shards"


@pytest.fixture(scope="module")
def on_eight(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on eight devices."""
    workdir = tmp_path_factory.mktemp("eight")
    return trained(shards, workdir, devices=8)


def trained(shards: Path, workdir: Path, *options: object, devices: int) -> Path:
    line = (*OPTIONS, "--data-dir", shards, "--workdir", workdir, *options)
    ended = run(LANGUAGE_MODEL, *line, devices=devices)
    assert ended.returncode == 0, ended.stderr
    return workdir


def test_the_shards_hold_every_speech_once(shards: Path) -> None:
    config = experiment.Config(data_dir=str(shards))
    speeches = TEXT.split("\n\n")
    parts = {
        pattern: [
            documents.decode(tokens)
            for documents in [experiment.documents(config, pattern)]
            for tokens in documents.__getitems__(list(range(len(documents))))
        ]
        for pattern in ("train-*.parquet", "train-*.arrayrecord", "validation-*.parquet")
    }
    assert [len(texts) for texts in parts.values()] == [134, 133, 30]
    assert sorted(itertools.chain(*parts.values())) == sorted(speeches)
    assert parts["validation-*.parquet"] == speeches[-30:]


def test_rows_are_full_of_whole_speeches(shards: Path) -> None:
    packed = experiment.packed(experiment.Config(data_dir=str(shards)), "train-*.arrayrecord")
    rows = packed.rows(np.arange(len(packed)))
    assert packed.documents.vocabulary_size == 257
    assert packed.tokens / rows["tokens"].size > 0.75
    ends = (rows["tokens"] == 256).sum()
    assert ends == rows["segments"].max(1).sum() == 133


def test_tokens_may_be_those_of_a_file(shards: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<end>", "?"], show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(tmp_path / "words.json"))
    of = experiment.Config(data_dir=str(shards), tokenizer=str(tmp_path / "words.json"))
    for end in ("<end>", "0"):
        config = dataclasses.replace(of, end_of_document=end)
        packed = experiment.packed(config, "train-*.parquet")
        assert (packed.rows(np.arange(len(packed)))["tokens"] == 0).sum() >= 134
        assert packed.documents[3][-1] == 0
        assert packed.documents.vocabulary_size == tokenizer.get_vocab_size() < 130
    assert experiment.documents(of, "train-*.parquet")[3][-1] != 0


def test_it_learns_on_eight_devices_from_both_kinds_of_shards(on_eight: Path) -> None:
    losses = metrics(on_eight, "train")
    assert [line["step"] for line in losses] == list(range(1, STEPS + 1))
    assert losses[0]["loss"] == pytest.approx(np.log(257), abs=0.2)
    assert losses[-1]["loss"] < 0.8 * losses[0]["loss"]
    assert {"loss/arrayrecord", "loss/parquet"} <= set().union(*losses)
    assert metrics(on_eight, "eval")[-1]["loss"] < 0.8 * losses[0]["loss"]


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, ()),
        (8, ("--strategy", "fully_sharded+tensor_parallel", "--mesh.tensor", 2)),
    ],
    ids=["one device", "tensor_parallel"],
)
@pytest.mark.nightly
def test_one_device_and_other_strategies_have_the_losses_of_eight_devices(
    shards: Path, on_eight: Path, tmp_path: Path, devices: int, options: tuple[object, ...]
) -> None:
    found = metrics(trained(shards, tmp_path, *options, devices=devices), "train")
    for line, expected in zip(found, metrics(on_eight, "train"), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-4), line["step"]


@pytest.mark.nightly
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    shards: Path, on_eight: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(on_eight, workdir)
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    resumed = metrics(trained(shards, workdir, devices=8), "train")
    expected = metrics(on_eight, "train")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in expected]


@pytest.mark.nightly
@pytest.mark.drill
@pytest.mark.timeout(600)
def test_two_processes_and_four_from_their_checkpoint_have_the_losses_of_one(
    shards: Path, on_eight: Path, tmp_path: Path
) -> None:
    line = ("--preset", "tiny", "--log-every", 1, "--checkpoint-every-steps", 4)
    for processes, devices in ((2, 4), (4, 2)):
        if processes == 4:
            shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
        of_run = ("--steps", STEPS, "--data-dir", shards, "--workdir", tmp_path)
        ended = launch(LANGUAGE_MODEL, *line, *of_run, processes=processes, devices=devices)
        assert ended.code == 0, ended.output
        for found, expected in zip(
            metrics(tmp_path, "train"), metrics(on_eight, "train"), strict=True
        ):
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4), found["step"]


def test_without_shards_it_says_how_to_make_them(tmp_path: Path) -> None:
    text_in(tmp_path)
    none, empty = together(
        lambda: run(LANGUAGE_MODEL),
        lambda: run(LANGUAGE_MODEL, "--data-dir", tmp_path),
    )
    for ended, why in ((none, "needs --data-dir"), (empty, "holds no train-*.parquet")):
        assert ended.returncode == 2 and "Traceback" not in ended.stderr
        assert why in ended.stderr and "input.txt FOLDER writes the shards" in ended.stderr


def test_weights_that_leave_nothing(shards: Path) -> None:
    for changes, message in (
        ({"parquet_weight": -1.0}, "parquet_weight is -1.0"),
        ({"parquet_weight": 0.0, "arrayrecord_weight": 0.0}, "nothing is left to train on"),
    ):
        with pytest.raises(UserError, match=message):
            experiment.training(experiment.Config(data_dir=str(shards), **changes))
    alone = experiment.Config(data_dir=str(shards), parquet_weight=0.0)
    assert experiment.training(alone).names == ("arrayrecord",)
