"""Documents that commands and classes read: an unknown key is an error, never ignored."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from etils import epath
from flax import nnx
from safetensors.numpy import save_file

import spmdtrain as s
from spmdtrain.cluster.spec import Role, from_environment
from spmdtrain.record.run import Run
from spmdtrain.sweep.trials import SweepSpecification, store_specification

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
X, Y = np.ones((16, 4), np.float32), np.zeros((16, 1), np.float32)


def train(data: Any = None, **options: Any) -> None:
    s.Trainer(
        model=nnx.Linear(4, 1, rngs=nnx.Rngs(0)),
        objective=lambda model, batch: {"loss": (model(batch["x"]) - batch["y"])[:, 0] ** 2},
        optimizer=optax.sgd(0.1),
        quiet=True,
        **options,
    ).fit({"x": X, "y": Y} if data is None else data, steps=1, global_batch_size=8)


def environment(folder: Path, **variables: str) -> None:
    from_environment(variables)


def untyped_field(folder: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Config(s.RunConfig):
        steps = 7


def weight_map(folder: Path) -> None:
    train(weight_map={"k": "kernel"})


def index(folder: Path) -> None:
    save_file({"kernel": X[:, :1], "bias": Y[0]}, str(folder / "model.safetensors"))
    content = {"metadata": {}, "weight_mp": {"kernel": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    train(init_from=str(folder))


def keras_batch(folder: Path) -> None:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = {"x": X, "y": Y, "sample_weights": Y[:, 0]}
    s.Trainer.from_keras(model, quiet=True).fit(data, steps=1, global_batch_size=8)


def learning_rates(folder: Path) -> None:
    s.RunConfig(learning_rate_table={"32": 0.1})  # type: ignore[dict-item]


def mixture(folder: Path) -> None:
    s.Mixture({"a": ({"x": X}, 1.0), "b": ({"x": X}, 1.0)}, stages={5: {"a": 1.0, "c": 1.0}})


def record(folder: Path) -> None:
    lines = '{"x": [1, 2, 3, 4], "y": [0]}\n{"x": [1, 2, 3, 4], "yy": [0]}\n'
    (folder / "a.jsonl").write_text(8 * lines)
    train(s.JsonLinesSource(str(folder / "a.jsonl"), cache_dir=folder))


def sweep(folder: Path) -> None:
    (folder / "sweep.json").write_text('{"config": "a.py", "serach": 3}')
    here = SweepSpecification(
        config="a.py", arguments=[], set={}, search=None, metric="loss", direction="min"
    )
    store_specification(epath.Path(folder), here)


def run_status(folder: Path) -> None:
    (folder / "status.json").write_text('{"status": "finished", "setp": 3}')
    assert Run(str(folder)).status is None


TOKEN, TRACEBACK = "SPMDTRAIN_JOB_TOKEN", "SPMDTRAIN_TRACEBACK"
DOCUMENTS: list[tuple[Callable[..., None], dict[str, str], str]] = [
    (environment, {f"{TOKEN}S": "secret"}, f"{TOKEN}S is unknown. Did you mean '{TOKEN}'?"),
    (environment, {"SPMDTRAIN_TOKEN_FILE": "f"}, f"Did you mean '{TOKEN}_FILE'?"),
    (environment, {TRACEBACK: "true"}, f"{TRACEBACK} is 'true': set it to 1 or 0"),
    (untyped_field, {}, "write steps: int | None = 7"),
    (weight_map, {}, "weight_map is {'k': 'kernel'}: it must be a list of rules"),
    (index, {}, "weight_map is missing. Did you mean 'weight_mp'?"),
    (keras_batch, {}, "a batch has 'sample_weights', .*Did you mean 'sample_weight'?"),
    (learning_rates, {}, "a key of learning_rate_table is '32': it must be a whole number"),
    (mixture, {}, "stage 5 of a Mixture has weights of a, c: give those of all components: a, b"),
    (record, {}, "has the fields x, yy"),
    (sweep, {}, "serach is unknown. Did you mean 'search'?"),
    (run_status, {}, "setp is unknown. Did you mean 'step'?"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "given", "message"),
    [
        pytest.param(*row, id=row[0].__name__, marks=[pytest.mark.slow] * (row[0] is keras_batch))
        for row in DOCUMENTS
    ],
)
def test_an_unknown_key_is_an_error(
    read: Callable[..., None], given: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(s.UserError, match=re.escape(message).replace(r"\.\*", ".*")):
        read(tmp_path, **given)


def test_variables_of_others_are_none_of_spmdtrain() -> None:
    services = ("PORT", "SERVICE_HOST", "JOB_PORT_2222_TCP", "JOB_SERVICE_HOST", "TASK", "LAUNCH")
    spec = from_environment({f"SPMDTRAIN_{name}": "1" for name in services})
    assert (spec.role, spec.num_processes) == (Role.LOCAL, 1)


@pytest.mark.slow
def test_inputs_of_a_keras_model_have_any_keys() -> None:
    import keras

    x, extra = keras.Input((4,), name="x"), keras.Input((1,), name="extra")
    layer = keras.layers.Dense(1, activity_regularizer="l2")
    model = keras.Model({"x": x, "extra": extra}, layer(x) + extra)
    model.compile("sgd")
    s.Trainer.from_keras(model, quiet=True).fit({"x": X, "extra": Y}, steps=1, global_batch_size=8)
