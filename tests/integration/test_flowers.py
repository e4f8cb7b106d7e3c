"""The experiment flowers_mobilenet, with few blocks and small pictures: the same on all devices."""

import dataclasses
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import REPOSITORY, metrics, run, status, together
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from processes import job, sums_of
from step_helpers import SHOWS_GRADIENTS, on
from test_same_numbers import trainer_on

from spmdtrain import Experiment, Trainer, UserError
from spmdtrain.checkpoints.restore import read_variables
from spmdtrain.config.command_line import parse_command_line
from spmdtrain.config.experiment import load_experiment
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import Dataset
from spmdtrain.data.loader import train_batches
from spmdtrain.models import mobilenet
from spmdtrain.run import main
from spmdtrain.sharding.mesh import batch_sharding, build_mesh, resolve
from spmdtrain.step.program import plan_step
from spmdtrain.strategies import strategy
from spmdtrain.tree import named_leaves

FLOWERS = REPOSITORY / "experiments" / "flowers_mobilenet.py"
DATA = Path(os.environ.get("SPMDTRAIN_DATA", REPOSITORY.parent / "shared" / "data"))
flowers: ModuleType = load_experiment(str(FLOWERS), frozenset()).module

SHALLOW = ((1, 16, 1, 1), (6, 16, 1, 1))  # two blocks, one of them residual
SMALL = ("--image-size", 16, "--global-batch-size", 16)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 3 classes of 40 small pictures, distinguished by their colors."""
    folder = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for label, name in enumerate(("daisy", "roses", "tulips")):
        (folder / name).mkdir()
        for number in range(40):
            pixels = draw.integers(0, 120, (18, 24, 3))
            pixels[..., label] += 100
            pixels = (pixels * draw.uniform(0.4, 1)).astype(np.uint8)  # some are darker
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")
    return folder


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model with two blocks."""
    monkeypatch.setattr(mobilenet, "STAGES", SHALLOW)


def built(pictures: Path, **options: Any) -> tuple[Experiment, RunConfig]:
    config = flowers.Config(
        data_dir=str(pictures), **{"image_size": 16, "global_batch_size": 16, **options}
    )
    config = resolve(config, batch_shards=8)
    return flowers.build(config), config


def train(pictures: Path, workdir: Path, *options: object) -> int:
    """Run the shipped command in this process."""
    line = ["--config", FLOWERS, "--data-dir", pictures, "--workdir", workdir, *SMALL, *options]
    return main([*map(str, line)])


# -- augmentation ----------------------------------------------------------------------------------


@given(
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    shift=st.floats(0, 0.99),
    seed=st.integers(0, 99),
)
def test_a_picture_is_mirrored_or_not_and_moved_by_at_most_the_shift(
    height: int, width: int, shift: float, seed: int
) -> None:
    image = np.arange(height * width * 3, dtype=np.uint8).reshape(height, width, 3)
    example = {"image": image, "label": np.int32(1)}
    found = flowers.augment(example, np.random.default_rng(seed), shift=shift)
    assert found["image"].shape == image.shape and found["label"] == 1

    def candidates() -> Any:
        up, left = (int(shift * side) for side in (height, width))
        # Without the last row and column doubled: what lies beyond the edge is reflected there.
        padded = np.pad(image, ((up, up), (left, left), (0, 0)), mode="reflect")
        for top in range(2 * up + 1):
            for start in range(2 * left + 1):
                part = padded[top : top + height, start : start + width]
                yield part
                yield part[:, ::-1]

    assert any(np.array_equal(found["image"], one) for one in candidates())


def test_augmented_pictures_are_a_function_of_seed_example_and_epoch(pictures: Path) -> None:
    experiment, _ = built(pictures)
    dataset: Dataset = experiment.train
    steps = 2 * len(dataset) // 16  # the stream runs into the second epoch

    def batches(devices: int, start: int = 0, seed: int = 0, threads: int = 0) -> list[Any]:
        sharding = batch_sharding(build_mesh(on(devices), strategy("mirrored")))
        found = train_batches(
            dataset,
            16,
            sharding,
            seed=seed,
            shuffle=True,
            start=start,
            stop=steps,
            augment=experiment.augment,
            threads=threads,
        )
        return [jax.tree.map(np.asarray, batch) for batch in found]

    first = batches(1)
    assert len(first) == steps
    for devices, start, threads in ((2, 0, 2), (8, 0, 0), (8, 5, 2), (1, 3, 0)):
        others = batches(devices, start, threads=threads)
        assert len(others) == steps - start
        for one, other in zip(first[start:], others, strict=True):
            np.testing.assert_array_equal(one["image"], other["image"])
            np.testing.assert_array_equal(one["label"], other["label"])
    assert (batches(1, seed=1)[0]["image"] != first[0]["image"]).any()
    plain = dataset.rows(np.arange(len(dataset)))["image"]
    seen = np.concatenate([batch["image"] for batch in first])
    # Each picture is seen about twice, and hardly ever twice the same, or as it is in its file.
    assert len(np.unique(seen, axis=0)) > 0.9 * len(seen)
    assert np.mean([(plain == picture).all((1, 2, 3)).any() for picture in seen]) < 0.15


def test_validation_and_test_pictures_are_as_they_are_in_their_files(pictures: Path) -> None:
    experiment, _ = built(pictures, image_size=18)
    file = experiment.test.files[0]
    with Image.open(pictures / file) as picture:
        expected = np.asarray(picture.resize((18, 18), Image.Resampling.BILINEAR))
    row = experiment.test.rows(np.array([0]))
    np.testing.assert_array_equal(row["image"][0], expected)
    assert experiment.test.classes[row["label"][0]] == file.partition("/")[0]
    parts = [set(part.files) for part in (experiment.train, experiment.validation, experiment.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 120


# -- the same numbers ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step made of a state that is the same on any number of devices."""

    loss: float
    gradients: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]


def step_on(devices: int, experiment: Experiment, config: RunConfig) -> Step:
    """The first step."""
    # An "optimizer" whose state is the gradient.
    experiment = dataclasses.replace(experiment, optimizer=SHOWS_GRADIENTS)
    trainer = trainer_on(devices, experiment, config)
    start = trainer.functions.init(0)
    batch = first_batch(trainer, experiment, config)
    assert len(batch["image"].sharding.device_set) == devices
    after, output = plan_step(trainer.functions, batch).program()(start, batch)
    found = (named_leaves(jax.device_get(x)) for x in (after.opt_state.trace, after.model_state))
    return Step(float(output.metrics["loss"]), *found)


def first_batch(trainer: Trainer, experiment: Experiment, config: RunConfig) -> Any:
    options: Any = {"seed": 0, "shuffle": True, "start": 0, "stop": 1}
    batch = config.global_batch_size
    assert batch is not None
    options["augment"] = experiment.augment
    return next(train_batches(experiment.train, batch, trainer.placement.batch, **options))


def assert_same(found: Step, expected: Step, what: str) -> None:
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-4, err_msg=what)
    # What a norm adds before the next one takes the mean away has no gradient but rounding.
    floor = 1e-6 * max(np.abs(gradient).max() for gradient in expected.gradients.values())
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        np.testing.assert_allclose(
            found.gradients[name],
            gradient,
            rtol=1e-4,
            atol=max(floor, 1e-5 * np.abs(gradient).max()),
            err_msg=f"{name} {what}",
        )


def smooth(patch: pytest.MonkeyPatch) -> None:
    """Replaces ReLU6, whose slope jumps at 0 and 6.

    An input within rounding of a jump has another slope on another number of devices. Which
    inputs these are depends on the processor, and one of them changes gradients by 1e-3.
    """
    patch.setattr(nnx, "relu6", nnx.silu)


@pytest.fixture(scope="module")
def steps(pictures: Path) -> dict[int, Step]:
    """The first step of two blocks on 1 and 8 devices."""
    with pytest.MonkeyPatch.context() as patch:
        smooth(patch)
        patch.setattr(mobilenet, "STAGES", SHALLOW)
        experiment, config = built(pictures)
        return {devices: step_on(devices, experiment, config) for devices in (1, 8)}


@pytest.mark.nightly
def test_loss_and_gradients_are_equal_on_1_and_8_devices(steps: dict[int, Step]) -> None:
    moved = [name for name, gradient in steps[1].gradients.items() if np.abs(gradient).max() > 1e-4]
    assert len(moved) > 0.7 * len(steps[1].gradients)
    assert_same(steps[8], steps[1], "on 8 devices")


@pytest.mark.nightly
def test_batch_statistics_are_those_of_the_global_batch(
    steps: dict[int, Step], pictures: Path, shallow: None
) -> None:
    assert steps[8].statistics.keys() == steps[1].statistics.keys()
    for name, value in steps[1].statistics.items():
        np.testing.assert_allclose(
            steps[8].statistics[name], value, rtol=1e-5, atol=1e-6, err_msg=name
        )

    # What the first of them must be, by NumPy, and what it would be of each device's own rows.
    experiment, config = built(pictures)
    trainer = trainer_on(1, experiment, config)
    kernel = np.asarray(
        trainer.functions.init(0).params["stem"]["convolution"]["kernel"], np.float64
    )
    pictured = np.asarray(first_batch(trainer, experiment, config)["image"], np.float64) / 255
    padded = np.pad(pictured, ((0, 0), (0, 1), (0, 1), (0, 0)))
    outputs = sum(
        padded[:, i : i + 16 : 2, j : j + 16 : 2] @ kernel[i, j] for i in range(3) for j in range(3)
    )
    of_all = 0.9 + 0.1 * outputs.var((0, 1, 2))
    of_each = 0.9 + 0.1 * np.mean([x.var((0, 1, 2)) for x in np.split(outputs, 8)], axis=0)
    assert np.abs(of_all / of_each - 1).max() > 1e-3  # a hundred times what is allowed
    for step in steps.values():
        np.testing.assert_allclose(step.statistics["stem/norm/var"], of_all, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)  # 26 convolutions are compiled twice, with their gradients
def test_loss_and_gradients_of_all_stages_are_equal_on_1_and_8_devices(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one block each; the others of a stage are like the second of `SHALLOW`."""
    stages = [(expansion, wide, 1, stride) for expansion, wide, _, stride in mobilenet.STAGES]
    monkeypatch.setattr(mobilenet, "STAGES", stages)
    smooth(monkeypatch)
    experiment, config = built(pictures, image_size=64, global_batch_size=32)
    one, eight = (step_on(count, experiment, config) for count in (1, 8))
    assert_same(eight, one, "on 8 devices")


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.slow
def test_it_learns_evaluates_and_predicts(
    pictures: Path, tmp_path: Path, shallow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = ("--epochs", 6, "--learning-rate", 0.01, "--eval-every-steps", 40, "--log-every", 1)
    assert train(pictures, tmp_path, *longer) == 0
    lines = metrics(tmp_path, "train")
    assert lines[0]["loss"] == pytest.approx(np.log(3), abs=0.6)
    assert np.mean([line["loss"] for line in lines[-5:]]) < 0.4 * lines[0]["loss"]
    # Evaluation goes by the running averages, which 36 steps must have brought to what is there.
    (test,) = metrics(tmp_path, "test")
    assert test["accuracy"] > 0.8 and status(tmp_path)["status"] == "finished"

    capsys.readouterr()
    assert train(pictures, tmp_path, *longer, "--mode", "predict") == 0
    said = capsys.readouterr().out
    files = flowers.load(flowers.Config(data_dir=str(pictures)))["test"].files
    shown = [line for line in said.splitlines() if line.split(": ")[0] in files]
    assert [line.split(": ")[0] for line in shown] == list(files)
    right = [line.split(": ")[1].startswith(line.split("/")[0] + " (") for line in shown]
    assert np.mean(right) == pytest.approx(test["accuracy"])


@pytest.mark.nightly
@pytest.mark.slow
def test_interrupted_and_resumed_it_ends_with_the_same_bits(
    pictures: Path, tmp_path: Path, shallow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    every = ("--checkpoint-every-steps", 5, "--eval-every-steps", 100, "--steps")
    assert train(pictures, whole, *every, 10) == 0
    assert train(pictures, halves, *every, 5) == 0
    assert train(pictures, halves, *every, 10) == 0
    assert "resumed from step 5" in capsys.readouterr().out
    assert sums_of(halves / "checkpoints" / "10") == sums_of(whole / "checkpoints" / "10")


@pytest.mark.slow
@pytest.mark.nightly
def test_fully_sharded_and_from_a_cache_on_disk_the_losses_are_the_same(
    pictures: Path, tmp_path: Path, shallow: None
) -> None:
    every = ("--steps", 3, "--log-every", 1)
    assert train(pictures, tmp_path / "mirrored", *every) == 0
    sharded = ("--strategy", "fully_sharded", "--sharding.min-size", 64)
    cached = ("--cache", "disk", "--cache-dir", tmp_path / "cache", "--data-threads", 0)
    assert train(pictures, tmp_path / "sharded", *every, *sharded, *cached) == 0
    expected, found = (
        [line["loss"] for line in metrics(tmp_path / name, "train")]
        for name in ("mirrored", "sharded")
    )
    assert len(found) == 3 and found[0] != found[1]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert any((tmp_path / "cache").rglob("*"))


def test_broken_pictures_end_the_run_or_are_left_out(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pictures"
    shutil.copytree(pictures, folder)
    whole = flowers.load(flowers.Config(data_dir=str(folder)))["train"]
    (folder / whole.files[0]).write_bytes(b"")
    assert train(folder, tmp_path / "run", "--steps", 1) == 2
    assert f"error: {folder / whole.files[0]}: a broken image" in capsys.readouterr().err
    left = flowers.load(flowers.Config(data_dir=str(folder), broken="skip"))["train"]
    assert left.files == whole.files[1:] and len(left) == len(whole) - 1


def test_the_folder_of_the_cache_is_for_the_cache_on_disk_alone(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flowers, "CACHE", str(tmp_path / "usual"))
    own = str(tmp_path / "own")
    for options, place in (({}, "usual"), ({"cache_dir": own}, "own")):
        config = flowers.Config(data_dir=str(pictures), cache="disk", **options)
        flowers.load(config)["test"].rows(np.array([0]))
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [place]
        shutil.rmtree(tmp_path / place)
    flowers.load(flowers.Config(data_dir=str(pictures)))
    with pytest.raises(UserError, match="cache_dir"):
        flowers.load(flowers.Config(data_dir=str(pictures), cache_dir=own))
    assert not any(tmp_path.iterdir())


def test_a_name_does_not_end_the_line_of_a_prediction() -> None:
    files = ("a\nb/c.png", "d/\x1be.png")
    lines = list(
        flowers.format_predictions(("a\nb", "d"), files, np.array([[9.0, 0.0], [0.0, 9.0]]))
    )
    assert lines == [r"a\nb/c.png: a\nb (100%)", r"d/\x1be.png: d (100%)"]


@pytest.mark.nightly
def test_without_the_flowers_it_says_where_to_get_them(tmp_path: Path) -> None:
    nowhere, gone = together(
        lambda: run(FLOWERS, cwd=tmp_path),
        lambda: run(FLOWERS, "--data-dir", tmp_path / "gone", cwd=tmp_path),
    )
    for result, why in ((nowhere, "needs --data-dir"), (gone, f"{tmp_path}/gone: no such folder")):
        assert result.returncode == 2, result.stderr
        (line,) = result.stderr.strip().splitlines()
        assert why in line and flowers.URL in line


def test_a_shift_that_leaves_nothing_is_refused(pictures: Path) -> None:
    for shift in (-0.1, 1.0):
        with pytest.raises(UserError, match=f"shift is {shift}"):
            built(pictures, shift=shift)


def test_the_defaults_and_the_published_preset() -> None:
    default = parse_command_line(["--config", str(FLOWERS)]).config
    assert (default.global_batch_size, default.learning_rate) == (32, 1e-3)
    line = ["--config", str(FLOWERS), "--preset", "published"]
    published = resolve(parse_command_line(line).config, batch_shards=8)
    found = dataclasses.asdict(published)
    expected = {"image_size": 224, "width_multiplier": 1.0, "epochs": 5, "global_batch_size": 512}
    assert {name: found[name] for name in expected} == expected


# -- real photographs ------------------------------------------------------------------------------


def test_the_real_photographs() -> None:
    folder = DATA / "tf_flowers_small"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is absent (SPMDTRAIN_DATA says where it is)")
    parts = flowers.load(flowers.Config(data_dir=str(folder)))
    assert parts["train"].classes == ("daisy", "dandelion", "roses", "sunflowers", "tulips")
    assert sum(map(len, parts.values())) == 200 and len(parts["train"]) > 140
    rows = parts["validation"].rows(np.arange(8))
    assert rows["image"].shape == (8, 96, 96, 3) and 60 < rows["image"].mean() < 160


# -- several processes -----------------------------------------------------------------------------

# With SGD, what a step takes off the parameters is the gradient.
WRAPPED = """
import dataclasses
import sys

import optax
from flax import nnx

from spmdtrain.models import mobilenet
from spmdtrain.step.program import plan_step

sys.path.append({folder!r})
from flowers_mobilenet import Config, build as whole

mobilenet.STAGES = {stages!r}
nnx.relu6 = nnx.silu


def build(config):
    return dataclasses.replace(whole(config), optimizer=optax.sgd(config.learning_rate))
"""


@pytest.mark.nightly
@pytest.mark.drill
def test_two_processes_have_the_loss_and_gradients_of_one(pictures: Path, tmp_path: Path) -> None:
    path = tmp_path / "wrapped.py"
    path.write_text(WRAPPED.format(folder=str(FLOWERS.parent), stages=SHALLOW))
    rate = 1000  # so large that what is left of the old values' digits does not matter
    options = ("--data-dir", pictures, *SMALL, "--learning-rate", rate, "--steps", 1)
    found = {}
    for processes in (1, 2):
        workdir = tmp_path / str(processes)
        job(path, *options, "--checkpoint-at-start", "--workdir", workdir, processes=processes)
        before, after = (read_variables(workdir, which=which)[0] for which in (0, 1))
        gradients = jax.tree.map(lambda a, b: (b - a) / rate, after.params, before.params)
        (line,) = metrics(workdir, "train")
        statistics = named_leaves(after.model_state)
        found[processes] = Step(line["loss"], named_leaves(gradients), statistics)
    assert_same(found[2], found[1], "in two processes")
    for name, value in found[1].statistics.items():
        np.testing.assert_allclose(
            found[2].statistics[name], value, rtol=1e-4, atol=1e-6, err_msg=name
        )
