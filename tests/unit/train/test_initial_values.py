"""Starts from given values, runs without a step, and modules whose attributes are modes."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import linear_model
import numpy as np
import pytest
from flax import linen, nnx
from helpers import BOUND, TESTS, run, saved_steps, small_experiment

from spmdtrain import FunctionModel, LinenModel, LoraModel, Trainer, UserError, open_run
from spmdtrain.document.terminal import Terminal
from spmdtrain.testing import run_processes

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 4)).astype(np.float32)
Y = RANDOM.normal(size=(48, 1)).astype(np.float32)
FIT: dict[str, Any] = {"train": (X, Y), "steps": 4}


class Linen(linen.Module):
    """With batch statistics and dropout, whose mode is an attribute."""

    deterministic: bool | None = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Dense(8)(x)
        x = linen.BatchNorm(use_running_average=self.deterministic)(x)
        x = linen.Dropout(0.5, deterministic=self.deterministic)(x)
        return linen.Dense(1)(x)


class Nnx(nnx.Module):
    """With batch statistics and dropout."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)])
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](self.dropout(self.norm(self.layers[0](x))))


def losses(trained: Trainer) -> list[float]:
    """The losses of an evaluation before four steps and after them, and of the last step."""
    before = trained.evaluate((X, Y))["loss"]
    result = trained.fit(**FIT, validation=(X, Y))
    return [before, result.train["loss"], result.validation["loss"]]


def mapped(model: Any, batch: Any) -> dict[str, jax.Array]:
    return {"loss": (jax.vmap(model)(batch[0]) - batch[1]) ** 2}


def linen_values(seed: int, module: linen.Module | None = None) -> Any:
    return (module or Linen(deterministic=False)).init(
        {"params": jax.random.key(seed), "dropout": jax.random.key(0)}, X[:1]
    )


# The models of each library: one with the values of seed 1, and what of it `init` is given.
MLP = partial(eqx.nn.MLP, 4, 1, 8, 1)


def nnx_values() -> Any:
    return Nnx(rngs=nnx.Rngs(1))


WAYS: dict[str, tuple[Any, Any, Any]] = {
    "nnx module": (Nnx(rngs=nnx.Rngs(0)), nnx_values, lambda module: module),
    "nnx state": (partial(Nnx), nnx_values, nnx.state),
    "nnx parameters": (Nnx, nnx_values, lambda module: nnx.state(module, nnx.Param)),
    "equinox": (MLP(key=jax.random.key(0)), partial(MLP, key=jax.random.key(1)), lambda m: m),
    "lora": (
        LoraModel(Nnx(rngs=nnx.Rngs(0)), [".*kernel"], rank=2),
        lambda: LoraModel(Nnx(rngs=nnx.Rngs(1)), [".*kernel"], rank=2),
        lambda model: trainer_of(model).init(),
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "split": {"strategy": "fully_sharded"},
    "averaged": {"ema_decay": 0.9},
    "narrow": {"compute_dtype": "bfloat16"},
}


def trainer_of(model: Any, **options: Any) -> Trainer:
    objective = mapped if isinstance(model, eqx.Module) else linear_model.squared_error
    return linear_model.trainer(model=model, objective=objective, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(x, id=name, marks=[pytest.mark.nightly] * (name in ("split", "narrow")))
        for name, x in OPTIONS.items()
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_from_given_values_is_that_of_a_model_which_has_them(
    way: str, options: dict[str, Any]
) -> None:
    model, other, values = WAYS[way]
    started = trainer_of(model, **options)
    assert started.init().params is not None
    different = started.evaluate((X, Y))
    given = values(other())
    state = started.init(given)
    assert losses(started) == losses(trainer_of(other(), **options))
    assert different != started.evaluate((X, Y))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.slow
def test_linen_variables_with_and_without_the_statistics() -> None:
    variables = linen_values(1)
    found = []
    for values in (variables, variables["params"], {"params": variables["params"]}):
        started = trainer_of(LinenModel(Linen(), X[:1]))
        state = started.init(values)
        kernel = state.params["Dense_0"]["kernel"]
        np.testing.assert_array_equal(kernel, variables["params"]["Dense_0"]["kernel"])
        found.append(losses(started))
    assert found[0] == found[1] == found[2]
    # Statistics that are given are taken.
    variables["batch_stats"]["BatchNorm_0"]["mean"] += 1
    assert losses_of_first(variables) != found[0][0]


def losses_of_first(values: Any) -> float:
    started = trainer_of(LinenModel(Linen(), X[:1]))
    started.init(values)
    return started.evaluate((X, Y))["loss"]


def test_given_arrays_may_change_and_be_donated() -> None:
    model = FunctionModel(lambda key: jax.numpy.zeros((4, 1)), lambda w, x: x @ w)
    changed, donated = np.ones((4, 1)), jax.numpy.ones((4, 1))
    ends: list[tuple[Any, Callable[[], None]]] = [
        (changed, lambda: changed.fill(7)),
        (donated, donated.delete),
    ]
    for given, end in ends:
        started = trainer_of(model)
        assert started.init(given).params.dtype == np.float32
        end()
        np.testing.assert_allclose(started.predict(X), X.sum(1, keepdims=True), rtol=1e-5)
        started.fit((X, Y), steps=1)
        assert started.state is not None
        assert abs(started.state.params - 1).max() <= 0.0501  # of Adam's first step
    with pytest.raises(UserError, match="params was donated to a step"):
        trainer_of(model).init(donated)


GOOD = linen_values(1)["params"]
REFUSED: dict[str, tuple[Any, str]] = {
    "a part": (GOOD["Dense_0"], "no array of the model is taken: 6 arrays .* it has bias, kernel"),
    "one less": ({**GOOD, "Dense_1": {}}, r"2 arrays of the model are not in it: Dense_1/bias"),
    "shape": ({**GOOD, "Dense_1": {"kernel": np.ones((8, 2)), "bias": [0]}}, r"\[8, 2\] is not"),
    "kind": ({**GOOD, "Dense_1": {"kernel": np.ones((8, 1), int), "bias": [0]}}, "another kind"),
    "NaN": ({**GOOD, "Dense_1": {"kernel": np.full((8, 1), np.nan), "bias": np.ones(1)}}, "NaN"),
    "twice": (
        {"params": GOOD, **GOOD},
        "have BatchNorm_0/bias twice",
    ),
    "nothing": ([], "no array of the model is taken"),
    "a file": ("weights.npz", "'weights.npz' is a file: give it to init_from"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_are_no_start_are_refused_and_change_nothing(case: str) -> None:
    values, message = REFUSED[case]
    started = trainer_of(LinenModel(Linen(), X[:1]))
    first = started.evaluate((X, Y))
    with pytest.raises(UserError, match=f"^the values of Trainer.init:? .*{message}"):
        started.init(values)
    assert started.evaluate((X, Y)) == first
    started.fit((X, Y), steps=1)
    with pytest.raises(UserError, match="has a state already, of step 1: use a new Trainer"):
        started.init(GOOD)


def test_values_and_a_file_are_refused(tmp_path: Path) -> None:
    started = trainer_of(LinenModel(Linen(), X[:1]), init_from=str(tmp_path / "w.npz"))
    with pytest.raises(UserError, match=r"init: values and init_from='.*' exclude each other"):
        started.init(GOOD)


# -- A run without a step --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_of_no_steps_is_evaluated_saved_and_continued(tmp_path: Path) -> None:
    options = {"workdir": str(tmp_path / "run"), "log_hash_every": 1}
    shown: dict[str, Any] = {"validation": (X, Y), "test": (X, Y)}
    started = trainer_of(Nnx, **options)
    started.init(nnx_values())
    none = started.fit((X, Y), steps=0, **shown)
    assert (started.step, saved_steps(tmp_path / "run")) == (0, [0])
    assert none.validation == none.test == trainer_of(nnx_values()).evaluate((X, Y))
    again = trainer_of(Nnx, **options)  # its own values are those of a seed
    assert again.evaluate((X, Y)) == none.test
    assert again.fit((X, Y), epochs=0, **shown).validation == none.validation
    whole = trainer_of(nnx_values(), workdir=str(tmp_path / "whole"), log_hash_every=1)
    whole.fit(**FIT)
    again.fit(**FIT)
    found = [open_run(tmp_path / name).hashes for name in ("run", "whole")]
    assert found[0][4].hash == found[1][4].hash
    # What `init` returns without values is not what the trainer evaluates.
    asked = trainer_of(Nnx, **options)
    assert asked.evaluate((X, Y)) != none.test
    before = asked.evaluate((X, Y))
    asked.init()
    assert asked.evaluate((X, Y)) == before
    # Without a workdir, too.
    alone = trainer_of(nnx_values())
    assert alone.fit((X, Y), epochs=0, validation=(X, Y)).validation == none.validation


@pytest.mark.slow
def test_the_command_evaluates_and_exports_without_a_step(tmp_path: Path) -> None:
    config = small_experiment(tmp_path)
    done = run(config, "--steps", 0, "--workdir", tmp_path / "run")
    assert "finished at step 0" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "0").is_dir()


# -- Modules of linen whose attributes are modes ---------------------------------------------------


class ByArgument(linen.Module):
    """As `Linen`, with the mode as an argument."""

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = linen.Dense(8)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.Dense(1)(x)


class Train(linen.Module):
    """As `Linen`, with an attribute of another name."""

    train: bool | None = True

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Dense(8)(x)
        x = linen.BatchNorm(use_running_average=not self.train)(x)
        x = linen.Dropout(0.5, deterministic=not self.train)(x)
        return linen.Dense(1)(x)


def by_argument(model: Any, batch: Any) -> dict[str, jax.Array]:
    return {"loss": (model(batch[0], train=model.training) - batch[1]) ** 2}


@pytest.mark.parametrize(
    "model",
    [
        LinenModel(Linen(), X[:1]),
        LinenModel(Linen(deterministic=False), X[:1]),
        LinenModel(Train(), X[:1]),
        LinenModel(Train(None), X[:1]),
        LinenModel(Linen(deterministic=False), X[:1], eval_module=Linen(deterministic=True)),
    ],
)
def test_an_attribute_of_a_module_follows_the_mode(model: LinenModel) -> None:
    reference = linear_model.trainer(model=LinenModel(ByArgument(), X[:1]), objective=by_argument)
    values = linen_values(3)
    found = []
    for started in (reference, trainer_of(model)):
        started.init(values)
        found.append(losses(started))
    assert found[0] == found[1]


def test_a_module_that_is_deterministic_stays_so_in_training() -> None:
    started = trainer_of(LinenModel(Linen(deterministic=True), X[:1]))
    started.init(linen_values(3))
    before = started.evaluate((X[:8], Y[:8]))["loss"]
    assert started.fit((X[:8], Y[:8]), steps=1).train["loss"] == before


def test_a_module_given_in_evaluation_mode_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    started = trainer_of(LinenModel(Train(train=False), X[:1]), terminal=Terminal())
    started.fit((X, Y), steps=1)
    named = "1 of 1 layers with a mode are in evaluation mode"
    assert named in capsys.readouterr().out
    started = trainer_of(LinenModel(Train(), X[:1]), terminal=Terminal())
    started.fit((X, Y), steps=1)
    assert named not in capsys.readouterr().out


class Noisy(linen.Module):
    """With a mode whose name is not known."""

    noisy: bool = True

    @linen.compact
    def __call__(self, x: jax.Array, **others: bool) -> jax.Array:
        return linen.Dense(1)(linen.BatchNorm(use_running_average=not self.noisy)(x))


def test_a_module_that_trains_in_evaluation_is_refused_with_what_to_write() -> None:
    with pytest.raises(UserError, match=r"Noisy updates its state, as in training: .*eval_module"):
        trainer_of(LinenModel(Noisy(), X[:1])).evaluate((X, Y))
    model = LinenModel(Noisy(), X[:1], eval_module=Noisy(noisy=False))
    assert trainer_of(model).evaluate((X, Y))["loss"] > 0


def test_an_argument_of_the_call_is_left_to_the_objective() -> None:
    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        outputs = model(batch[0][:, None], deterministic=not model.training)
        return {"loss": (outputs.mean((1, 2)) - batch[1][:, 0]) ** 2}

    layer = linen.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.5)
    model = LinenModel(layer, X[:1, None], deterministic=True)
    started = linear_model.trainer(model=model, objective=objective)
    assert len(set(losses(started))) == 3


def test_an_eval_module_of_another_class_is_refused() -> None:
    with pytest.raises(UserError, match=r"eval_module is ByArgument.* must be a Linen with other"):
        LinenModel(Linen(), X[:1], eval_module=ByArgument())


# -- Several processes -----------------------------------------------------------------------------

JOB = """
import sys
import jax
from flax import nnx
sys.path[:0] = [TESTS, TESTS + "/unit/train"]
from spmdtrain import UserError, initialize
initialize()
from test_initial_values import Nnx, X, Y, losses, nnx_values, trainer_of
first = trainer_of(Nnx, strategy="fully_sharded")
state = first.init(nnx_values())
assert not all(x.is_fully_addressable for x in jax.tree.leaves(state.params))
second = trainer_of(Nnx, strategy="fully_sharded")
second.init(state)
print("same:", losses(second) == losses(first))
try:
    values = nnx.state(nnx_values(), nnx.Param)
    trainer_of(Nnx).init(jax.tree.map(lambda x: x + jax.process_index(), values))
except UserError as error:
    print("refused:", error)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_split_arrays_are_a_start_and_different_ones_are_refused() -> None:
    job = JOB.replace("TESTS", repr(str(TESTS)))
    found = run_processes(
        [sys.executable, "-c", job], processes=2, devices_per_process=2, timeout=BOUND
    )
    for each in found:
        assert "same: True" in each.output
        assert re.search(r"refused: worker 0 and chief differ: the values of Trainer", each.output)
