"""LoRA: low-rank factors of the kernels of any model, and runs that train them alone."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P
from step_helpers import one_step

from spmdtrain import (
    CollectiveOptions,
    FunctionModel,
    KerasModel,
    LinenModel,
    LoraModel,
    LoraRule,
    MeshSpec,
    Rule,
    ShardingOptions,
    Trainer,
    UserError,
    load_model,
    load_params,
)
from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.adapters.base import Mode, Variables
from spmdtrain.checkpoints import command
from spmdtrain.document.terminal import Terminal
from spmdtrain.run import main
from spmdtrain.sharding.rules import axes_of_spec
from spmdtrain.tree import named_leaves

REDUCE_SCATTER = CollectiveOptions(reduction="reduce_scatter")
INPUTS, HIDDEN = 16, 1024
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(64, INPUTS)).astype(np.float32)
Y = RANDOM.integers(0, 4, 64).astype(np.int32)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(INPUTS, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, 64, rngs=rngs)
        self.head = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.norm(self.first(x)))
        return self.head(jax.nn.relu(self.second(x)))


def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
    x, y = batch
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(model(x), y)}


def trainer(model: Any, **options: Any) -> Trainer:
    defaults = {
        "optimizer": optax.adam(1e-2),
        "global_batch_size": 16,
        "terminal": Terminal(quiet=True),
        "trackers": (),
    }
    return Trainer(model=model, objective=objective, **defaults | options)


def lora(**options: Any) -> LoraModel:
    return LoraModel(lambda rngs: Net(rngs), "first/kernel|second/kernel", rank=2, **options)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Weights of `Net` in a file."""
    variables = as_adapter(lambda rngs: Net(rngs)).init({}, jax.random.key(7))
    arrays: dict[str, Any] = {
        n: np.asarray(x) for tree in variables for n, x in named_leaves(tree).items()
    }
    np.savez(path := tmp_path / "base.npz", **arrays)
    return str(path)


# -- the model -------------------------------------------------------------------------------------


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(4)(x)


def keras_model() -> KerasModel:
    import keras

    layers = [keras.Input((INPUTS,)), keras.layers.Dense(4, name="dense")]
    return KerasModel(keras.Sequential(layers, name="net"))


def functional() -> FunctionModel:
    """Two stacked layers with an input of two dims, in a list within a dictionary."""

    def init(key: jax.Array) -> Any:
        return {"blocks": [{"kernel": jax.random.normal(key, (2, 4, 4, 16))}]}

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for kernel in params["blocks"][0]["kernel"]:
            x = jnp.einsum("bij,ijo->bo", x.reshape(-1, 4, 4), kernel)
        return x

    return FunctionModel(init, apply)


@pytest.mark.parametrize(
    ("model", "rule", "formula"),
    [
        (lambda: lambda rngs: nnx.Linear(INPUTS, 4, rngs=rngs), "kernel", "ir,ro->io"),
        (lambda: LinenModel(Dense(), X), "kernel", "ir,ro->io"),
        pytest.param(keras_model, "kernel", "ir,ro->io", marks=pytest.mark.slow),
        pytest.param(
            *(functional, LoraRule("kernel", inputs=2, stacked=1), "lijr,lro->lijo"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["nnx", "linen", "keras", "function"],
)
def test_any_model_computes_with_the_kernel_plus_the_scaled_product(
    model: Callable[[], Any], rule: Any, formula: str
) -> None:
    adapted, plain = LoraModel(model(), rule, rank=3, alpha=6.0), as_adapter(model())
    key = jax.random.key(0)
    params, state = adapted.init(adapted.given, key)
    expected = plain.init(plain.given, key).params
    leaves = named_leaves(params)
    (name,) = [n.removeprefix("lora/").removesuffix("/a") for n in leaves if n.endswith("/a")]
    assert not leaves[f"lora/{name}/b"].any()

    def output(adapter: Any, params: Any) -> np.ndarray:
        call = lambda model, batch: model(batch)  # noqa: E731
        found = adapter.run(call, Variables(params, state), jnp.asarray(X), key, Mode.EVAL)[0]
        return np.asarray(found)

    if not isinstance(plain, KerasModel):  # whose two models have different initial values
        np.testing.assert_array_equal(output(adapted, params), output(plain, expected))
    b = RANDOM.normal(size=leaves[f"lora/{name}/b"].shape).astype(np.float32)
    trained = jax.tree_util.tree_map_with_path(lambda p, x: b if p[-1].key == "b" else x, params)
    product = np.einsum(formula, np.asarray(leaves[f"lora/{name}/a"]), b)
    merged = {k: x for k, x in params.items() if k != "lora"}
    merged = jax.tree_util.tree_map_with_path(
        lambda p, x: x + 6.0 / 3 * product if x.ndim > 1 else x, merged
    )
    np.testing.assert_allclose(
        output(adapted, trained), output(plain, merged), rtol=1e-5, atol=1e-4
    )


Model: Any = LoraModel  # arguments of wrong types
Pattern: Any = LoraRule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Model(functional(), "kernel"), "blocks/0/kernel has shape (2, 4, 4, 16), 4 d"),
        (lambda: Model(functional(), Pattern("kernel", inputs=3, stacked=1)), "leave none"),
        (lambda: Model(functional(), "weight"), "'weight' matches no kernel of 2 or more dims"),
        (lambda: Model(functional(), "kernel", rank=0), "rank is 0"),
        (lambda: lora(train=["haed"]), "train='haed' matches no parameter's path"),
        (lambda: Model(lora(), "kernel"), "without the name 'lora'"),
        (lambda: Model(functional(), "("), "'(' is not a regular expression"),
        (lambda: lora(train=["("]), "'(' is not a regular expression"),
        (lambda: lora(train=["(?i)head"]), "'(?i)head' is not a regular expression: global flags"),
        (lambda: lora(train=[5]), "train is [5]: it must be a str, or a list of them"),
        (lambda: Model(functional(), 5), "kernels is 5: it must be a str or LoraRule, or a li"),
        (lambda: Model(functional(), []), "kernels is empty"),
        (lambda: Model(functional(), "kernel", rank=2.5), "rank is 2.5: it must be an integer"),
        (lambda: Model(functional(), "kernel", rank="4"), "rank is '4': it must be an integer"),
        (lambda: Model(functional(), "kernel", alpha="1"), "alpha is '1': it must be a finite"),
        (lambda: Model(functional(), "kernel", alpha=True), "alpha is True: it must be a finite"),
        (lambda: Pattern("kernel", inputs=1.5), "inputs=1.5 and stacked=0: a kernel has"),
        (lambda: Pattern(5), "5 is a int: give a str"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(
    make: Callable[[], LoraModel], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        model = make()
        jax.eval_shape(model.init, model.given, jax.random.key(0))


def test_stacked_biases_have_no_factors() -> None:
    params = {"up": np.ones((2, 4, 6), np.float32), "up_bias": np.ones((2, 6), np.float32)}
    rule = LoraRule("up", inputs=1, stacked=1)
    model = Model(FunctionModel(lambda key: params), rule, rank=2, alpha=np.float32(4))
    found = named_leaves(model.init(model.given, jax.random.key(0)).params)
    shapes = {name: x.shape for name, x in found.items() if name.startswith("lora/")}
    assert shapes == {"lora/up/a": (2, 4, 2), "lora/up/b": (2, 2, 6)} and model.alpha == 4


def test_a_single_pattern_of_train_is_not_a_list_of_letters() -> None:
    assert lora(train="head").frozen == lora(train=["head"]).frozen


def test_factors_of_equal_kernels_are_drawn_independently() -> None:
    kernels = FunctionModel(lambda key: dict.fromkeys("xy", jnp.ones((4, 4))), lambda p, x: x)
    adapted = LoraModel(kernels, "x|y", rank=2)
    params, _ = adapted.init(adapted.given, jax.random.key(0))
    x, y = (params["lora"][name]["a"] for name in "xy")
    assert not np.isclose(x, y).any()


# -- placement -------------------------------------------------------------------------------------

RULES = (
    Rule("first/kernel", P(None, "tensor")),  # would match the factors' paths as well
    Rule("second/kernel", P("tensor")),
)


def test_factors_are_sharded_as_the_dims_that_they_share_with_the_kernel() -> None:
    made = trainer(lora(), rules=RULES, strategy="tensor_parallel", mesh=MeshSpec(data=2, tensor=4))
    found = {
        name: x.spec if axes_of_spec(x.spec) else None
        for name, x in named_leaves(made.functions.shardings).items()
        if "lora" in name
    }
    for field in ("params", "opt_state/0/mu", "opt_state/0/nu"):
        assert found[f"{field}/lora/first/kernel/a"] is None
        assert found[f"{field}/lora/first/kernel/b"] == P(None, "tensor")
        assert found[f"{field}/lora/second/kernel/a"] == P("tensor", None)
        assert found[f"{field}/lora/second/kernel/b"] is None
    assert made.functions.layout.sources["params/lora/second/kernel/a"] == "rule 2"


@pytest.mark.nightly
def test_losses_are_equal_on_1_and_8_devices(base: str) -> None:
    def losses(**options: Any) -> list[float]:
        found: list[float] = []
        made = trainer(
            lora(),
            init_from=base,
            log_every=1,
            callbacks={"log": lambda event: found.append(event.metrics["loss"])},
            **options,
        )
        made.fit((X, Y), steps=3)
        return found

    expected = losses(mesh=MeshSpec(devices=(0,)))
    assert expected[1] < expected[0]
    small = ShardingOptions(min_size=1)
    split = {"strategy": "tensor_parallel", "mesh": MeshSpec(data=2, tensor=4), "rules": RULES}
    for options in ({"strategy": "fully_sharded", "sharding": small}, split, {"microbatches": 2}):
        np.testing.assert_allclose(losses(**options), expected, rtol=1e-5)


def wide(kernel: np.ndarray) -> FunctionModel:
    def apply(params: Any, x: jax.Array) -> jax.Array:
        assert params["kernel"].dtype == params["bias"].dtype == x.dtype == jnp.bfloat16
        output = jnp.matmul(x, params["kernel"], preferred_element_type=jnp.float32)
        return output + params["bias"]

    params = {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(kernel.shape[1])}
    return FunctionModel(lambda key: params, apply)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"strategy": "fully_sharded"},
                {"strategy": "fully_sharded", "collectives": REDUCE_SCATTER},
                {"strategy": "zero", "collectives": REDUCE_SCATTER},
                {"microbatches": 2},
            )
        ),
    ],
)
def test_in_bfloat16_the_sum_is_rounded_and_not_its_terms(options: dict[str, Any]) -> None:
    random = np.random.default_rng(1)
    kernel = random.uniform(1, 2, (256, 512)).astype(np.float32)
    x = random.normal(size=(64, 256)).astype(np.float32)

    def output(kernel: Any) -> np.ndarray:
        x16, kernel16 = (jnp.asarray(a, jnp.bfloat16) for a in (x, kernel))
        return np.asarray(jnp.matmul(x16, kernel16, preferred_element_type=jnp.float32))

    def distance(model: Any, batch: Any) -> dict[str, jax.Array]:
        return {"loss": ((model(batch[0]) - batch[1]) ** 2).mean(-1)}

    made = Trainer(
        model=LoraModel(wide(kernel), "kernel", rank=2, alpha=4.0),
        objective=distance,
        optimizer=optax.sgd(0.0),
        compute_dtype="bfloat16",
        global_batch_size=64,
        terminal=Terminal(quiet=True),
        trackers=(),
        **{"sharding": ShardingOptions(min_size=1)} | options,
    )
    batch = x, output(kernel)
    state = made.functions.init(0)
    a, b = (named_leaves(state.params)[f"lora/kernel/{factor}"] for factor in ("a", "b"))
    # The change is about a fourth of the spacing of bfloat16 numbers between 1 and 2: added to a
    # rounded kernel it would be lost.
    small = jax.device_put(random.normal(size=b.shape).astype(np.float32) / 100, b.sharding)
    state.params["lora"]["kernel"]["b"] = small
    merged = kernel + 2 * np.asarray(a) @ np.asarray(small)
    expected = ((output(merged) - batch[1]) ** 2).mean()
    assert expected > 0
    made.state = state
    np.testing.assert_allclose(made.evaluate(batch)["loss"], expected, rtol=1e-3)
    np.testing.assert_allclose(made.fit(batch, steps=1).train["loss"], expected, rtol=1e-3)


# -- runs ------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.slow
def test_only_the_factors_are_trained_from_the_loss_of_the_base_model() -> None:
    made, plain = trainer(lora()), trainer(lambda rngs: Net(rngs))
    before = {name: np.asarray(x) for name, x in named_leaves(made.functions.init(0)).items()}
    state, output = one_step(made, (X, Y))
    expected = plain.evaluate((X, Y))["loss"]  # with the stored averages, which are frozen
    np.testing.assert_allclose(output.metrics["loss"], expected, rtol=1e-6)
    changed = {n for n, x in named_leaves(state).items() if (np.asarray(x) != before[n]).any()}
    kernels = ("first/kernel/b", "second/kernel/b")  # the gradient of A is 0 while B is
    assert {n for n in changed if n.startswith("params/")} == {f"params/lora/{n}" for n in kernels}
    assert not any(n.startswith("model_state/") for n in changed)
    assert len(named_leaves(state.opt_state[0].mu)) == 4


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_trains_saves_and_resumes_the_factors_alone(base: str, tmp_path: Path) -> None:
    def made(name: str, **options: Any) -> Trainer:
        where = {"workdir": str(tmp_path / name), "init_from": base, "ema_decay": 0.5}
        return trainer(lora(), log_every=1, **where | options)

    plain = trainer(lambda rngs: Net(rngs), init_from=base, log_every=1, optimizer=optax.sgd(0.0))
    whole = made("whole")
    before = whole.evaluate((X, Y))
    assert before == plain.evaluate((X, Y))  # the product is 0
    whole.fit((X, Y), steps=4)
    assert whole.evaluate((X, Y))["loss"] < before["loss"]
    state = whole.state
    assert state is not None
    weights = dict(np.load(base))
    values = named_leaves(state.params) | named_leaves(state.model_state)
    for name, array in weights.items():
        np.testing.assert_array_equal(values[name], array, err_msg=name)
    moments = set(named_leaves(state.opt_state[0].mu))
    assert moments == values.keys() - weights.keys() and len(moments) == 4

    made("parts").fit((X, Y), steps=2)
    parts = made("parts")
    parts.fit((X, Y), steps=4)
    assert parts.state is not None
    for name, array in named_leaves(state).items():
        np.testing.assert_array_equal(named_leaves(parts.state)[name], array, err_msg=name)

    folder = tmp_path / "whole" / "checkpoints" / "4"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size < 0.75 * os.path.getsize(base)  # with two moments and an average of the factors
    prediction = whole.predict((X, Y))
    merged = load_model(lambda rngs: Net(rngs), str(tmp_path / "whole"))
    np.testing.assert_allclose(merged(X), prediction, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(made("whole").predict((X, Y)), prediction, rtol=1e-5, atol=1e-5)
    to = str(tmp_path / "merged.npz")
    assert command.main(["export", str(tmp_path / "whole"), to]) == 0
    exported = trainer(lambda rngs: Net(rngs), init_from=to).predict((X, Y))
    np.testing.assert_allclose(exported, prediction, rtol=1e-5, atol=1e-5)

    with pytest.raises(UserError, match="alpha 16, this run has 4: give alpha 16"):
        trainer(lora(alpha=4), workdir=str(tmp_path / "whole"), init_from=base, ema_decay=0.5).fit(
            (X, Y), steps=5
        )
    with pytest.raises(UserError, match=r"holds LoRA factors alone.*give init_from="):
        made("whole", init_from=None).fit((X, Y), steps=5)
    os.rename(base, moved := str(tmp_path / "moved.npz"))
    with pytest.raises(UserError, match=r"base weights cannot be read from .*base\.npz: "):
        made("whole").fit((X, Y), steps=5)
    with pytest.raises(UserError, match=r"base weights cannot be read from .*base\.npz: "):
        load_params(str(tmp_path / "whole"))
    made("whole", init_from=moved).fit((X, Y), steps=5)  # whose checkpoint records the new place
    weights["second/kernel"][0, 0] += 1
    np.savez(moved, **weights)
    with pytest.raises(UserError, match="for other base weights: params/second/kernel has the"):
        made("whole", init_from=moved).fit((X, Y), steps=6)


@pytest.mark.slow
def test_without_its_base_a_run_renames_no_corrupted_checkpoint(base: str, tmp_path: Path) -> None:
    own = shutil.copy(base, tmp_path / "own.npz")
    options = {"workdir": str(tmp_path / "run"), "init_from": str(own)}
    trainer(lora(), checkpoint_every_steps=1, **options).fit((X, Y), steps=2)
    (tmp_path / "run" / "checkpoints" / "2" / "manifest.json").write_text("{")
    os.remove(own)
    with pytest.raises(UserError, match=r"checkpoints/1 holds .* cannot be read from .*own\.npz: "):
        trainer(lora(), **options).fit((X, Y), steps=3)
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"1", "2"}


@pytest.mark.nightly
def test_the_base_may_be_a_run_and_a_head_may_be_trained(tmp_path: Path) -> None:
    first = trainer(lambda rngs: Net(rngs), workdir=str(tmp_path / "base"))
    first.fit((X, Y), steps=2)
    adapted = trainer(
        lora(train=["head"]), workdir=str(tmp_path / "lora"), init_from=str(tmp_path / "base")
    )
    adapted.fit((X, Y), steps=3)
    first.fit((X, Y), steps=4)  # another checkpoint: the base remains that of step 2
    found, before = (
        load_params(str(tmp_path / "lora")),
        load_params(str(tmp_path / "base"), which=2),
    )
    changed = {n for n, x in named_leaves(found).items() if (x != named_leaves(before)[n]).any()}
    assert changed == {"first/kernel", "second/kernel", "head/kernel", "head/bias"}
    again = trainer(lora(train=["head"]), init_from=str(tmp_path / "lora"))
    assert again.evaluate((X, Y)) == adapted.evaluate((X, Y))
    with pytest.raises(UserError, match="LoRA of alpha 16, and this model has no LoRA: export it"):
        trainer(lambda rngs: Net(rngs), init_from=str(tmp_path / "lora")).evaluate((X, Y))


@pytest.mark.slow
def test_without_init_from_checkpoints_hold_the_base(tmp_path: Path) -> None:
    net = Net(nnx.Rngs(5))  # with values of its own
    run = str(tmp_path / "run")
    made = trainer(LoraModel(net, "kernel"), workdir=run)
    made.fit((X, Y), steps=2)
    np.testing.assert_allclose(load_model(net, run)(X), made.predict((X, Y)), rtol=1e-5, atol=1e-5)


EXPERIMENT = """
import optax
from flax import nnx
from spmdtrain import Experiment, LoraModel, RunConfig as Config
import numpy as np

X = np.ones((32, 4), np.float32)


def build(config):
    base = lambda rngs: nnx.Linear(4, 4, rngs=rngs)
    return Experiment(
        model=LoraModel(base, "kernel", rank=2),
        objective=lambda model, batch: {"loss": (model(batch) - 5) ** 2},
        optimizer=optax.adam(0.1),
        train=X,
        validation=X,
    )
"""


@pytest.mark.slow
def test_the_command_evaluates_the_factors_also_if_it_names_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapted.py").write_text(EXPERIMENT)
    kernel, bias = np.eye(4, dtype=np.float32), np.zeros(4, np.float32)
    np.savez(base := tmp_path / "base.npz", kernel=kernel, bias=bias)

    def evaluated(workdir: str, source: Path) -> tuple[int, float]:
        assert main([*options, workdir, "--init-from", str(source), "--mode", "evaluate"]) == 0
        printed = capsys.readouterr().out
        (line,) = (json.loads(x) for x in printed.splitlines() if x.startswith("{"))
        return line["step"], line["loss"]

    options = ["--config", str(tmp_path / "adapted.py"), "--trackers", "--workdir"]
    workdir, other = str(tmp_path / "run"), str(tmp_path / "other")
    assert main([*options, workdir, "--init-from", str(base), "--steps", "4"]) == 0
    assert "36 parameters, 16 trained;" in capsys.readouterr().out
    assert evaluated(other, base) == (0, 16.0)  # the base model, if there are no factors
    step, loss = evaluated(workdir, base)
    assert step == 4 and loss < 16
    assert evaluated(other, tmp_path / "run") == (4, loss)


def test_factors_are_known_while_the_initialization_is_traced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that compiles the step asks for them at any time."""
    model = LoraModel(FunctionModel(lambda key: {"w": jnp.ones((4, 4))}), "w", rank=1)
    model.init({}, jax.random.key(0))
    known: list[bool] = []
    normal = jax.random.normal

    def spied(*args: Any) -> jax.Array:
        known.append(model.is_operand("w"))
        return normal(*args)

    monkeypatch.setattr(jax.random, "normal", spied)
    model.init({}, jax.random.key(0))
    assert known == [True]
