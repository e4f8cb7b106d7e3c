"""The cells of the tables in docs/coming-from-*.md: the right-hand code is run.

Keywords become a `RunConfig`, `Trainer` or `fit`; options go through the parser of the command; any
other code is evaluated with a small trained trainer, a started loop and values of replicas.
"""

import dataclasses
import functools
import importlib.util
import inspect
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import DIGITS, REPOSITORY
from PIL import Image
from stream_helpers import tf_record

import spmdtrain
from spmdtrain import (
    ArrayDataset,
    CallbackContext,
    CallbackEvent,
    Coordinator,
    Experiment,
    Loop,
    RunConfig,
    Trainer,
    per_replica,
)
from spmdtrain.config.command_line import Options, parse_command_line
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError, field_meant
from spmdtrain.parameter_server.coordinator import Shared
from spmdtrain.strategies import AXES, strategy

PAGES = sorted((REPOSITORY / "docs").glob("coming-from-*.md"))
FIELDS = {field.name for field in dataclasses.fields(RunConfig)}
GROUPS = (
    spmdtrain.MeshSpec,
    spmdtrain.ShardingOptions,
    spmdtrain.ParameterServerOptions,
    spmdtrain.CollectiveOptions,
)
GROUP_FIELDS = {field.name for group in GROUPS for field in dataclasses.fields(group)}
KEYWORDS = {*inspect.signature(Trainer).parameters, *inspect.signature(Trainer.fit).parameters}

# Code of right-hand cells that is not run, and why.
OTHERS = {
    "CommunicationOptions": "a row above",
    "TF_CONFIG": "a variable of the environment",
    "trainer.model.save": "needs a Keras model: tests/integration/test_keras.py",
    "f(gradients, axes)": "a signature",
    "train=model.training": "of a linen module: tests/unit/adapters/test_adapters.py",
    "accumulation_size": "a parameter of optax.contrib.reduce_on_plateau",
}
VALUES = {
    "--coordinator": "127.0.0.1:1",
    "--processes": "2",
    "--process-id": "0",
    "--init-timeout": "300",
    "--strategy": "mirrored",
}


def rows() -> list[tuple[str, str, str]]:
    """Returns the first and the last cell of each row of the tables, with its page and line."""
    found = []
    for page in PAGES:
        lines = page.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            if line.startswith("| ") and not lines[number].startswith("|---"):
                cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
                found.append((f"{page.name}:{number}", cells[0], cells[-1]))
    return found


def objective(model: Any, batch: Any) -> Any:
    return {"loss": (model(batch[0])[:, 0] - batch[1]) ** 2}


def model(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(2, 1, rngs=rngs)


PARTS: dict[str, Any] = {"model": model, "objective": objective, "optimizer": optax.sgd(0.1)}


def make_trainer(**options: Any) -> Trainer:
    return Trainer(
        **{**PARTS, "strategy": "one_device", "terminal": Terminal(quiet=True), **options}
    )


def scope_of(folder: Path, loop: Loop) -> dict[str, Any]:
    """Returns what the cells speak of, by name."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(64, 2)).astype(np.float32), np.ones(64, np.float32)
    workdir = str(folder / "run")
    trainer = make_trainer(workdir=workdir)
    trainer.fit((x, y), validation=(x, y), epochs=1, global_batch_size=64)
    for name in ("a", "b"):
        (folder / "images" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / "images" / name / "0.png")

    def fit(data: Any = (x, y), **options: Any) -> Any:
        total = {} if "epochs" in options else {"steps": 1}
        return make_trainer().fit(data, **{"global_batch_size": 16, **total, **options})

    def image_folder(root: str = str(folder / "images"), size: Any = (4, 4), **options: Any) -> Any:
        return spmdtrain.ImageFolder(root, size, **options)

    (folder / "a.tfrecord").write_bytes(tf_record(b""))

    def records(_: str, features: dict[str, Any]) -> Any:
        return spmdtrain.TFRecordSource(folder / "a.tfrecord", features)

    (folder / "numpy").mkdir()
    np.save(folder / "numpy" / "x.npy", x)
    with tarfile.open(folder / "a.tar", "w") as tar:
        tar.add(folder / "images" / "a" / "0.png", "0.png")

    def shards(_: str, fields: dict[str, Any]) -> Any:
        return spmdtrain.WebDatasetSource(folder / "a.tar", fields)

    def numpy_files(_: str) -> Any:
        return spmdtrain.NumpyFiles(folder / "numpy")

    def experiment(**parts: Any) -> Experiment:
        return Experiment(**{**PARTS, "train": (x, y), **parts})

    dataset, ones = ArrayDataset((x, y)), np.ones(16, np.float32)
    shared = create_autospec(Shared, instance=True)
    scope = {name: getattr(spmdtrain, name) for name in spmdtrain.__all__}
    scope |= {name: getattr(jax.lax, name) for name in ("all_gather", "axis_index", "psum")}
    return scope | {
        **{"jax": jax, "np": np, "optax": optax, "spmdtrain": spmdtrain},
        **{
            "trainer": trainer,
            "fit": fit,
            "evaluate": trainer.evaluate,
            "predict": trainer.predict,
        },
        **{"path": workdir, "model": model(nnx.Rngs(0)), "loop": loop, "shard_map": jax.shard_map},
        "event": CallbackContext(trainer, CallbackEvent.STEP, 1, {}),
        "v": per_replica(lambda rows: rows * 2, np.arange(16.0)),
        **{"batch": np.arange(16.0), "whole": (), "f": lambda *arguments: arguments[0]},
        **{"x": x, "y": y, "other": (x, y), "dataset": dataset, "validation": dataset},
        **{"weights": ones, "values": ones, "per_example": ones, "indices": np.arange(4)},
        **{"n": 2, "b": 16, "e": 1, "batch_size": 16, "weight": 1.0, "name": "a"},
        **{"rows": dataset.rows, "__len__": dataset.__len__, "example": x[0], "generator": draw},
        **{"folder": str(folder / "images"), "size": (4, 4)},
        **{"ImageFolder": image_folder, "TFRecordSource": records, "Experiment": experiment},
        **{"WebDatasetSource": shards, "NumpyFiles": numpy_files},
        # A coordinator needs a cluster: only the arguments of its methods are checked.
        "Coordinator": create_autospec(Coordinator),
        "coordinator": create_autospec(Coordinator, instance=True),
        **{"pull": shared.pull, "push": shared.push, "params": {}, "optimizer": optax.sgd(0.1)},
        **{"gradients": {}, "loss": 1.0, "value": 1.0, "losses": ones},
        **{"nnx": nnx, "module": linen.Dense(1), "example_input": x[:1], "Config": RunConfig},
        **{"rngs": nnx.Rngs(0), "key": jax.random.key(0)},
        # Values that a cell leaves out.
        "left_out": {"validation": (x, y), "optimizer": optax.sgd(0.1), "workdir": workdir}
        | {"combine_threshold_bytes": 1, "timeout": 1.0},
    }


@pytest.fixture(scope="module")
def fault_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Returns a function of a right-hand code that returns why it is wrong; "" if it is right."""
    folder = tmp_path_factory.mktemp("cells")
    with Loop(steps=100, global_batch_size=16) as loop:
        scope = scope_of(folder, loop)
        loop.start(lambda key: {"params": {"a": np.ones(2)}}, train=(scope["x"], scope["y"]))

        @functools.cache
        def fault(span: str) -> str:
            try:
                run(span, scope, folder)
            except SystemExit as error:  # the parser's
                return f"{span} exits {error.code}"
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return ""

        yield fault
        loop.stop()


def run(span: str, scope: dict[str, Any], folder: Path) -> None:
    """Runs an inline code of a right-hand cell; raises if it is wrong."""
    if span in OTHERS:
        return
    if span.startswith("python -m "):
        assert importlib.util.find_spec(span.split()[2]), span
    elif span.startswith("--"):
        option, *value = span.split()
        parse_command_line(["--config", str(DIGITS), option, *(value or [VALUES[option]])])
    elif span in (".npz", ".safetensors"):
        spmdtrain.export_params(scope["path"], str(folder / f"exported{span}"))
    elif re.fullmatch(r"[\w.]+/\w*|\w+\.jsonl", span):
        assert (Path(scope["path"]) / span.replace("STEP", "1")).exists(), span
    elif span == "mixed_float16":
        with pytest.raises(UserError, match="without dynamic loss scaling"):
            RunConfig(compute_dtype="mixed_float16")  # type: ignore[arg-type]
    elif re.fullmatch(r"[\w+]+", span):
        if span not in {*scope, *FIELDS, *KEYWORDS, *AXES, *GROUP_FIELDS}:
            strategy(span)
    elif span.startswith("export_predict("):
        out = tempfile.mkdtemp(dir=folder)
        missing = "saved_model" in span and not importlib.util.find_spec("tensorflow")
        with pytest.raises(UserError, match="tensorflow") if missing else nullcontext():
            eval(span, scope | {"out": out, "batch": (scope["x"], scope["y"])})
            assert os.listdir(out), span
    else:
        code = re.sub(r"(\w+)=(?:\.\.\.)?(?=[,)]|$)", r"\1=left_out['\1']", span)
        code = code.replace("(...)", "()")
        if code.startswith("jax.lax."):
            per_replica(lambda x: eval(code, scope | {"x": x}) + x, np.arange(16.0))
        elif re.match(r"\w+=", code):
            with_keywords(**eval(f"dict({code})", scope))
        else:
            eval(code, scope)


def with_keywords(**given: Any) -> None:
    """Checks keywords of `RunConfig`, and those of `Trainer`."""
    needed: dict[str, Any] = {"strategy": "parameter_server"} if "servers" in given else {}
    RunConfig(**needed, **{name: x for name, x in given.items() if name in FIELDS})
    if others := {name: x for name, x in given.items() if name not in FIELDS}:
        make_trainer(**others)


def spans_of(cell: str) -> list[str]:
    """Returns the inline codes of a cell; `"b"` after `x="a"` is returned as `x="b"`."""
    found: list[str] = []
    for span in re.findall(r"`([^`]+)`", cell):
        if span.startswith('"'):
            span = re.sub(r'"[^"]*"', span, next(x for x in reversed(found) if '="' in x), count=1)
        found.append(span)
    return found


@pytest.mark.slow
def test_the_code_of_all_right_hand_cells_runs(fault_of: Callable[[str], str]) -> None:
    faults = [
        (number, span, fault)
        for number, _, cell in rows()
        for span in spans_of(cell)
        if (fault := fault_of(span))
    ]
    assert not faults, "\n".join(map(str, faults))
    assert len(rows()) > 180


@pytest.mark.parametrize(
    "span",
    [
        'strategy="mirored"',
        'uneven_batch="fill"',
        'resume="atuo"',
        'steps_per_dispatch="n"',
        "steps_per_execution=n",
        'collectives=CollectiveOptions(reduction="one_devise")',
        'collectives=CollectiveOptions(pack="all")',
        'callbacks={"epoch_ended": f}',
        "fit(x, epoch=2)",
        "fit(validaton=)",
        "evaluate((x, y), z)",
        'reduce("max", v)',
        "v.total()",
        "loop.scatter(batch)",
        "jax.lax.axis_size(BATCH_AXIS)",
        "coordinator.share(params, optimizers=optimizer)",
        "push(gradients, loss, step)",
        "Subset(validation)",
        "event.trainer.stopp()",
        "load_weights(path)",
        'load_params(path, which="bets")',
        "keep_newest",
        "hybrid+fully_shared",
        "checkpoint/STEP",
        "--checkpoint-secs",
        "--cluster nonsense",
        "python -m spmdtrain.clusters",
    ],
)
def test_wrong_code_is_found(fault_of: Callable[[str], str], span: str) -> None:
    assert fault_of(span)


def test_the_defaults_that_the_cells_state() -> None:
    cells = [cell for _, _, cell in rows()]
    numbers = [x for cell in cells for x in re.findall(r"`([\w-]+)`: (\d+)", cell)]
    words = [x for cell in cells for x in re.findall(r'`(\w+)="(\w+)"`, the default', cell)]
    stated = {name.removeprefix("--").replace("-", "_"): x for name, x in numbers + words}
    expected = {"seed", "log_every", "keep_latest", "keep_best", "init_timeout"}
    assert stated.keys() == expected | {"strategy", "resume", "data_threads"}
    defaults = {**vars(Options(config="")), **vars(RunConfig())}
    shown = {name: f"{x:g}" if isinstance(x, float) else str(x) for name, x in defaults.items()}
    assert stated == {name: shown[name] for name in stated}
    (steps,) = (x for cell in cells for x in re.findall(r"by default each epoch, or (\d+)", cell))
    assert RunConfig(steps=10_000).saves_at(int(steps), 64)
    assert not any(RunConfig(steps=10_000).saves_at(step, 64) for step in range(1, int(steps)))


def test_a_name_that_a_field_answers_has_it_in_its_right_hand_cell() -> None:
    """The table and the suggestion for `--lr` name the same field."""
    pairs = [
        (number, name, field_meant(name, FIELDS), cell)
        for number, before, cell in rows()
        for name in re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", before)))
    ]
    meant = [(number, name, field, cell) for number, name, field, cell in pairs if field]
    assert len(meant) >= 8
    assert [(n, name, field) for n, name, field, cell in meant if field not in cell] == []
