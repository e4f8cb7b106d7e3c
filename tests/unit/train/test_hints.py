"""Each hint about an unknown option is tried with what it proposes."""

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import small_experiment
from linear_model import squared_error, trainer

import spmdtrain
from spmdtrain import (
    EarlyStopping,
    Loop,
    RunConfig,
    Subset,
    Trainer,
    UserError,
    export_predict,
    initialize,
)
from spmdtrain.checkpoints.command import Export
from spmdtrain.config.command_line import Options, parse_command_line
from spmdtrain.config.overrides import INSTEAD
from spmdtrain.data.datasets import as_dataset
from spmdtrain.distributed.initialize import ClusterOptions
from spmdtrain.errors import OTHER_NAMES
from spmdtrain.keras.model import import_keras
from spmdtrain.launch.launcher import Options as LaunchOptions
from spmdtrain.testing import run_processes

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
PACKAGE = Path(spmdtrain.__file__).parent
X, Y = np.ones((16, 4), np.float32), np.zeros((16, 1), np.float32)
VALUES: dict[str, Any] = {
    "learning_rate": 0.1,
    "steps": 2,
    "epochs": 1,
    "global_batch_size": 8,
    "batch_size_per_device": 1,
    "microbatches": 1,
    "compute_dtype": "bfloat16",
    "steps_per_dispatch": 1,
    "data_workers": 0,
    "seed": 3,
    "checkpoint_every_steps": 1,
    "eval_every_steps": 1,
    "eval_batch_size": 8,
    "log_every": 1,
    "remat": "full",
    "ema_decay": 0.9,
    "profile_steps": "1:1",
    "validation": (X, Y),
    "train": (X, Y),
    "keep_latest": 2,
    "trackers": [],
    "resume": "auto",
    "callbacks": [EarlyStopping()],
    "checkpoint": "latest",
    "jit": True,
    "learning_rate_scaling": "none",
}


def make_loop(**options: Any) -> None:
    Loop(**options)


def make_trainer(**options: Any) -> None:
    made = {"global_batch_size": None} if "batch_size_per_device" in options else {}
    trainer(**made | options)


shared = functools.cache(trainer)


def fit(**options: Any) -> None:
    length = {} if {"steps", "epochs"} & {*options} else {"steps": 1}
    given: dict[str, Any] = {"train": (X, Y), "restart": True} | length | options
    shared().fit(**given)


def start(**options: Any) -> None:
    with Loop(steps=1, global_batch_size=8, quiet=True) as loop:
        loop.start(lambda key: {"params": jnp.zeros(2)}, **options)


RECEIVERS: dict[str, Callable[..., None]] = {
    "Trainer": make_trainer,
    "fit": fit,
    "Loop": make_loop,
    "start": start,
    "the Trainer": make_trainer,
}
# A misspelled option: the nearest name may be one that is refused.
TYPOS = ("learningrate", "microbatch", "data_dirs", "learning_rate_scalings", "checkpoints", "jitt")
NAMES = [name for names in OTHER_NAMES.values() for name in names.split()]


@pytest.mark.slow
@pytest.mark.parametrize("receiver", ["Trainer", "fit", "Loop"])
def test_a_hint_proposes_what_is_accepted(receiver: str, tmp_path: Path) -> None:
    tried = set()
    for name in (*NAMES, *OTHER_NAMES, *TYPOS, "callbacks", "no_such_thing"):
        try:
            with pytest.raises(UserError, match=f"{receiver} has no option '{name}'") as caught:
                RECEIVERS[receiver](**{name: VALUES.get(name, 1)})
        except (pytest.fail.Exception, AssertionError):
            assert name in OTHER_NAMES or name == "callbacks"  # an option that it has
            continue
        message = str(caught.value)
        if found := re.search(r"Did you mean '(\w+)'\?$", message):
            tried.add((receiver, found[1]))
        elif found := re.search(r"Give '(\w+)' to ([\w ]+)\.$", message):
            tried.add((found[2], found[1]))
        elif "Give it to the optimizer" in message:
            assert eval(message.rpartition("optimizer=")[2].rstrip(".")).update
        elif "of the Trainer's own step" in message:
            assert receiver == "Loop"
        elif "Give the data to fit" not in message:
            # A loop evaluates where the user writes it.
            none = OTHER_NAMES["validation"].split() if receiver == "Loop" else []
            assert name in ("no_such_thing", "validation", *TYPOS, *none), message
            assert " There are: " in message
    assert len(tried) > 10
    for where, field in tried:
        default = getattr(RunConfig(), field, None)
        value = VALUES.get(field, default)
        if field == "workdir":
            value = str(tmp_path / f"{where}-{field}")
        RECEIVERS[where](**{field: value})


def fit_keras(*data: Any) -> None:
    keras = import_keras()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    Trainer.from_keras(model, quiet=True).fit(data, steps=1, global_batch_size=8)


def with_weights(model: Any, batch: Any) -> Any:
    x, y, weights = batch
    return {"loss": ((model(x) - y)[:, 0] ** 2, weights)}


def with_hits(model: Any, batch: Any) -> Any:
    return squared_error(model, batch) | {"accuracy": model(batch[0])[:, 0] > 0}


def train(*data: Any, **options: Any) -> None:
    trainer(**options).fit(data or (X, Y), steps=1)


def optimizer_of(advice: str) -> None:
    train(optimizer=eval(advice.partition("optimizer: ")[2], {"optax": optax}))


def quietly(advice: str) -> None:
    make_trainer(quiet=True)
    make_loop(quiet=True)


def weighted(advice: str) -> None:
    labels, weights = np.zeros(16, int), np.ones(2, np.float32)
    train(X, Y, weights[labels], objective=with_weights)
    fit_keras(X, Y, weights[labels])


DONE: dict[str, Callable[[str], Any]] = {
    "class_weight": weighted,
    "sample_weight": weighted,
    "steps_per_epoch": lambda _: fit(steps=2),
    "initial_epoch": lambda _: fit(epochs=1),
    "validation_split": lambda _: fit(validation=(X[:8], Y[:8])),
    "validation_steps": lambda _: fit(validation=Subset(as_dataset((X, Y)), np.arange(8))),
    "verbose": quietly,
    "x": lambda _: (
        trainer().fit((X, Y), steps=1),
        trainer(objective=lambda m, b: squared_error(m, (b["x"], b["y"]))).fit(
            {"x": X, "y": Y}, steps=1
        ),
    ),
    "loss": lambda _: train(),
    "metrics": lambda _: train(objective=with_hits),
    "gradient_clip_val": optimizer_of,
    "weight_decay": optimizer_of,
    "lr_scheduler": optimizer_of,
    "patience": lambda advice: train(
        **eval(f"dict({advice.partition(': ')[2]})", {"EarlyStopping": EarlyStopping})
    ),
    "fp16": lambda _: make_trainer(compute_dtype="bfloat16"),
    "gpus": lambda _: None,  # said of the environment
}


def test_all_advice_is_tried() -> None:
    assert [names.split()[0] for names in INSTEAD] == [*DONE]


@pytest.mark.parametrize("names", INSTEAD)
def test_an_option_of_other_frameworks_is_refused_with_advice(names: str) -> None:
    for receiver in ("Trainer", "fit", "Loop"):
        for name in names.split():
            with pytest.raises(UserError) as caught:
                RECEIVERS[receiver](**{name: 1})
            end = f"has no option '{name}'. {INSTEAD[names][0].upper()}{INSTEAD[names][1:]}."
            assert str(caught.value) == f"{receiver} {end}"


@pytest.mark.parametrize("of", ["fit", "evaluate", "predict"])
def test_inputs_and_targets_are_one_argument(of: str) -> None:
    method = getattr(shared(), of)
    match = rf"{of} takes one dataset, and 2 positional .* {of}\(\(x, y\), \.\.\.\)"
    with pytest.raises(UserError, match=match):
        method(X, Y)
    with pytest.raises(UserError, match=rf"{of} has no option 'batch_size'"):
        method(X, batch_size=8)
    with pytest.raises(UserError, match=f"{of}: the data is None"):
        method(None)


@pytest.mark.slow
@pytest.mark.parametrize("names", INSTEAD)
def test_advice_can_be_followed(names: str) -> None:
    DONE[names.split()[0]](INSTEAD[names])


@pytest.mark.slow
def test_keras_callbacks_are_sent_to_the_trainer_of_a_keras_model() -> None:
    callback = import_keras().callbacks.EarlyStopping("loss")
    with pytest.raises(UserError, match=r"Keras' EarlyStopping: .*Trainer.from_keras\(model, call"):
        trainer(callbacks=[callback])


@pytest.mark.slow
def test_a_hint_of_the_command_proposes_an_option(tmp_path: Path) -> None:
    line = ["--config", str(small_experiment(tmp_path)), "--workdir", str(tmp_path / "run")]
    for name in (names.split()[0] for names in OTHER_NAMES.values()):
        option = f"--{name.replace('_', '-')}"
        try:
            parse_command_line([*line, option, "1"])
        except UserError as error:
            found = re.fullmatch(
                rf"{option} is not an option. Did you mean --([\w-]+)\?", str(error)
            )
            assert found, error
            field = found[1].replace("-", "_")
            value = {"workdir": "other", "trackers": "tensorboard"}.get(field, VALUES.get(field))
            parse_command_line([*line[:2], f"--{found[1]}", str(value)])
        except SystemExit:
            assert name in (*OTHER_NAMES["validation"].split(), *OTHER_NAMES["train"].split())


def test_each_option_that_a_message_names_is_one_in_python_and_in_a_command() -> None:
    groups = {
        f"{group.name}.{field.name}"
        for group in dataclasses.fields(RunConfig)
        if dataclasses.is_dataclass(group.default)
        for field in dataclasses.fields(group.default)
    }
    fields = {field.name for field in dataclasses.fields(RunConfig)} | groups
    calls = (initialize, ClusterOptions, run_processes, export_predict)
    in_python = fields | {name for call in calls for name in inspect.signature(call).parameters}
    options = [field for of in (Options, LaunchOptions, Export) for field in dataclasses.fields(of)]
    in_commands = fields | {field.name for field in options}
    # An experiment file is opened by commands alone; `cluster=auto` has a text of its own.
    in_commands_alone = {"config", "mode", "role", "show_sharding", "cluster"}
    named = re.compile(r"\boption\(\s*[\"']([\w.]+)[\"']")
    found = {name for path in PACKAGE.rglob("*.py") for name in named.findall(path.read_text())}
    assert {"hang_timeout", "sharding.max_shards", "devices_per_process"} <= found
    assert found <= in_commands
    assert found - in_python == in_commands_alone
