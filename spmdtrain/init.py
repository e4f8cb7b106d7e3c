"""`python -m spmdtrain.init`: writes a small project, with an experiment and its tests."""

import importlib.util
import keyword
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from spmdtrain.errors import (
    ExitCode,
    StorageError,
    UserError,
    exit_code_of,
    exit_if_output_is_closed,
)

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "NAME"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["spmdtrain"]

# The names that --config takes, from any folder.
[project.entry-points."spmdtrain.experiments"]
NAME = "NAME.experiment"

[tool.hatch.build.targets.wheel]
packages = ["NAME"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

_MODEL = '''\
"""The model."""

import jax
from flax import nnx


class Model(nnx.Module):
    """A multi-layer perceptron of (B, 2) -> (B, classes)."""

    def __init__(self, width: int, classes: int, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(2, width, rngs=rngs)
        self.output = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.output(nnx.relu(self.hidden(x)))
'''

_EXPERIMENT = '''\
"""Points of three spirals: replace data, model and objective by your own.

Expected: accuracy above 0.9 on new points after 30 epochs, in a few seconds.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import optax
from spmdtrain import Experiment, RunConfig

from .model import Model

CLASSES = 3


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    epochs: int | None = 30
    global_batch_size: int | None = 64
    learning_rate: float | None = 1e-2
    width: int = 64
    """Number of hidden values."""


def spirals(examples: int, seed: int) -> dict[str, np.ndarray]:
    """Returns points, (N, 2), and the numbers of their spirals, (N,)."""
    random = np.random.default_rng(seed)
    label = random.integers(0, CLASSES, examples)
    radius = random.uniform(0.2, 1, examples)
    angle = 2 * np.pi * label / CLASSES + 3 * radius + random.normal(0, 0.1, examples)
    point = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    return {"point": point.astype(np.float32), "label": label.astype(np.int32)}


def objective(model: Model, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns one value per example; the run computes their means over the whole batch."""
    logits = model(batch["point"])
    return {
        "loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
        "accuracy": logits.argmax(-1) == batch["label"],
    }


def build(config: Config) -> Experiment:
    return Experiment(
        model=partial(Model, config.width, CLASSES),
        objective=objective,
        optimizer=optax.adam(config.learning_rate),
        train=spirals(1024, seed=1),
        validation=spirals(256, seed=2),
    )
'''

_CONFTEST = '''\
"""Eight virtual CPU devices for the tests, set before JAX is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
'''

_TEST = '''\
"""The experiment learns, with the same numbers on one device and on eight, also after a resume."""

from pathlib import Path
from typing import Any

import numpy as np
from spmdtrain import FitResult, MeshSpec, Trainer, load_params, resolve_config

from NAME.experiment import Config, build


def fit(**options: Any) -> FitResult:
    """Trains with options of the experiment."""
    config = resolve_config(Config(quiet=True, **options))
    experiment = build(config)
    trainer = Trainer.from_experiment(experiment, config)
    return trainer.fit(experiment.train, validation=experiment.validation)


def test_it_learns() -> None:
    assert fit().validation["accuracy"] > 0.9


def test_eight_devices_have_the_losses_of_one() -> None:
    one, eight = (
        fit(epochs=2, mesh=MeshSpec(devices=devices)).history["loss"]
        for devices in [(0,), tuple(range(8))]
    )
    np.testing.assert_allclose(one, eight, rtol=1e-5)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    fit(workdir=str(whole), epochs=4)
    for epochs in (2, 4):
        fit(workdir=str(resumed), epochs=epochs)
    expected, found = load_params(str(whole)), load_params(str(resumed))
    for name, array in expected["hidden"].items():
        np.testing.assert_array_equal(found["hidden"][name], array)
'''

_README = """\
# NAME

    pip install -e . pytest
    spmdtrain run --config NAME --workdir runs/first
    spmdtrain report runs/first
    pytest

`spmdtrain run --config NAME --help` shows the options, also those of your `Config`.
"""

FILES = {
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    ".gitignore": "__pycache__/\n*.egg-info/\nruns/\n",
    "NAME/__init__.py": '"""The experiments of NAME."""\n',
    "NAME/model.py": _MODEL,
    "NAME/experiment.py": _EXPERIMENT,
    "tests/conftest.py": _CONFTEST,
    "tests/test_experiment.py": _TEST,
}
"""The files of a project by path, with NAME in place of its name."""


@dataclass(frozen=True)
class Options:
    """Writes a small project: an experiment in a package of its own, its tests, pyproject.toml."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """The name of the project, of its folder and of its package."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, by default with the arguments of the process; returns the exit code."""
    with exit_if_output_is_closed():
        options = tyro.cli(Options, args=arguments, prog="python -m spmdtrain.init")
        return exit_code_of(lambda: execute(options))


def execute(options: Options) -> int:
    """Writes the project into a new folder; returns the exit code."""
    name = options.name
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or keyword.iskeyword(name):
        raise UserError(f"{name!r} cannot name a package: give a word of letters, digits and _")
    folder = Path(name)
    if not folder.exists() and importlib.util.find_spec(name) is not None:
        raise UserError(f"{name!r} is the name of another module: give a name of your own")
    try:
        folder.mkdir()
        for path, content in FILES.items():
            file = folder / path.replace("NAME", name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(content.replace("NAME", name))
    except FileExistsError:
        raise UserError(f"{folder} exists: give the name of a new folder") from None
    except OSError as error:
        raise StorageError(f"{error.filename} cannot be written: {error.strerror}") from error
    print(f"{folder}/ has {len(FILES)} files. Next: cd {name}, pip install -e . pytest, pytest,")
    print(f"and spmdtrain run --config {name} --workdir runs/first")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
