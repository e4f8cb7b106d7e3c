"""Starts from weights of other programs and of other models: values, reports and refusals."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import linear_model
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from helpers import BOUND, TESTS, environment

from spmdtrain import (
    FunctionModel,
    KerasModel,
    MeshSpec,
    Trainer,
    UserError,
    WeightRule,
    export_params,
)
from spmdtrain.checkpoints.weights.assignment import assign_weights
from spmdtrain.checkpoints.weights.source import ArrayHeader
from spmdtrain.document.terminal import Terminal
from spmdtrain.tree import named_leaves

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 4)).astype(np.float32)
Y = RANDOM.normal(size=(16, 1)).astype(np.float32)


class Net(nnx.Module):
    """A body with batch statistics, and a head of some size."""

    def __init__(self, head: int = 1, *, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, head, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.norm(self.body(x)))


def trainer(source: Path | None = None, head: int = 1, **options: Any) -> Trainer:
    given = {"model": partial(Net, head), "init_from": None if source is None else str(source)}
    return linear_model.trainer(**given | {"strategy": "fully_sharded"} | options)


def values(trained: Trainer) -> dict[str, np.ndarray]:
    """The parameters and the model state."""
    state = nnx.state(trained.model, (nnx.Param, nnx.BatchStat))
    return {n: np.asarray(x) for n, x in named_leaves(nnx.to_pure_dict(state)).items()}


def weights(**changes: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays for each of the model's, by the names that `export` writes."""
    shapes = {"body.kernel": (4, 8), "body.bias": (8,), "head.kernel": (8, 1), "head.bias": (1,)}
    shapes |= {f"norm.{name}": (8,) for name in ("scale", "bias", "mean", "var")}
    found = {n: RANDOM.uniform(0.5, 1, shape).astype(np.float32) for n, shape in shapes.items()}
    return found | {name.replace("_", "."): x for name, x in changes.items()}


def saved(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    safetensors.numpy.save_file(arrays, folder / "w.safetensors")
    return folder / "w.safetensors"


def refused(source: Path, **options: Any) -> str:
    """The message; no state is left."""
    started = trainer(source, **options)
    with pytest.raises(UserError) as error:
        started.fit((X, Y), steps=1)
    assert started.state is None
    return str(error.value)


@pytest.mark.slow
def test_an_export_is_a_start_with_the_same_numbers_and_statistics(tmp_path: Path) -> None:
    parent = trainer(workdir=str(tmp_path / "run"))
    parent.fit((X, Y), steps=3)
    for name in ("w.npz", "w.safetensors"):
        export_params(str(tmp_path / "run"), str(tmp_path / name))
        child = trainer(tmp_path / name)
        assert child.evaluate((X, Y)) == parent.evaluate((X, Y))
        child.fit((X, Y), steps=1)  # and the first step begins there
        other = trainer(tmp_path / "run")
        other.fit((X, Y), steps=1)
        assert child.state is not None and other.state is not None
        for one, another in zip(*map(jax.tree.leaves, (child.state, other.state)), strict=True):
            np.testing.assert_array_equal(one, another)
            assert one.sharding == another.sharding


@pytest.mark.slow
def test_a_new_head_keeps_its_initial_values_and_the_table_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = weights() | {"optimizer.0.step": np.ones(2, np.float32)}
    del arrays["body.bias"]
    path = saved(tmp_path, arrays)
    message = refused(path, head=3)
    assert "1 arrays of the model are not in it: body/bias" in message
    assert "head/kernel (head.kernel: float32[8,1] there, float32[8,3] here" in message
    assert "init_from_strict='matching'" in message
    capsys.readouterr()
    started = trainer(path, head=3, init_from_strict="matching", terminal=Terminal())
    found, initial = values(started), values(trainer(head=3))
    table = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    assert ["taken", "body/kernel float32[4,8]", "body.kernel float32[4,8]", "1"] in table
    assert ["initial", "body/bias float32[8]", "", "1"] in table
    assert ["left", "", "optimizer.*.step float32[2]", "1"] in table
    assert [row[1] for row in table if row[0] == "differs"] == [
        "head/bias float32[3]",
        "head/kernel float32[8,3]",
    ]
    for name in ("body/kernel", "norm/scale", "norm/mean"):
        np.testing.assert_array_equal(found[name], arrays[name.replace("/", ".")])
    for name in ("body/bias", "head/kernel", "head/bias"):
        np.testing.assert_array_equal(found[name], initial[name])


@pytest.mark.slow
def test_a_run_of_another_head_is_a_start_if_that_is_asked_for(tmp_path: Path) -> None:
    parent = trainer(workdir=str(tmp_path))
    parent.fit((X, Y), steps=3)
    assert "is of another model" in refused(tmp_path, head=3)
    started = trainer(tmp_path, head=3, init_from_strict="matching")
    found = values(started)
    np.testing.assert_array_equal(found["body/kernel"], values(parent)["body/kernel"])
    np.testing.assert_array_equal(found["head/kernel"], values(trainer(head=3))["head/kernel"])
    body_alone = (WeightRule("{a:body|norm}/{b:.+}", "{a:body|norm}/{b:.+}"),)
    assert "head/bias, head/kernel" in refused(tmp_path, weight_map=body_alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "rules", "message"),
    [
        ({"body_bias": np.full(8, np.nan, np.float32)}, (), "body.bias has a value that is NaN"),
        ({"norm_var": np.full(8, 1e300)}, (), "norm.var has a value that is NaN or infinite"),
        (
            {"body_bias": np.ones(8, np.int32)},
            (),
            "body.bias is int32[8], and body/bias is float32",
        ),
        ({}, [("head.kernel", "tail/kernel")], "'tail/kernel' -> "),
        ({}, [("{n:.+}", "{n:.+}"), ("body.bias", "body.bias")], "does not have"),
        (
            {"head_bias": np.ones(2, np.float32)},
            [("nothing.here", "body/bias")],
            "no array of the model is taken",
        ),
        ({}, [("body.bias", "body/bias"), ("norm.bias", "body/bias")], "would both fill body/bias"),
        ({}, [("body.bias", "body/bias"), ("body.bias", "norm/bias")], "two weight rules match"),
        ({}, [("body.bias[0:4]", "body/bias[0:4]")], "no array of the model is taken"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_weights_and_maps_are_named_and_nothing_is_loaded(
    changes: dict[str, np.ndarray], rules: Any, message: str, tmp_path: Path
) -> None:
    found = refused(
        saved(tmp_path, weights(**changes)), weight_map=[WeightRule(*rule) for rule in rules]
    )
    if message.startswith("'tail"):
        assert "tail/kernel, which the model does not have" in found
    else:
        assert message in found


def test_narrow_weights_become_the_models_dtype_and_a_map_merges_them(tmp_path: Path) -> None:
    arrays = weights()
    kernel = RANDOM.normal(size=(8, 4)).astype(ml_dtypes.bfloat16)
    del arrays["body.kernel"]
    arrays |= {"body.0": kernel[:3], "body.1": kernel[3:]}  # as PyTorch: (out, in)
    rules = [
        WeightRule("body.0", "body/kernel[:,0:3]", "o i -> i o"),
        WeightRule("body.1", "body/kernel[:,3:8]", "o i -> i o"),
        *(WeightRule(f"{a}.{{b:[a-z]+}}", f"{a}/{{b:[a-z]+}}") for a in ("norm", "head")),
        WeightRule("body.bias", "body/bias"),
    ]
    mesh: dict[str, Any] = {"strategy": "fully_sharded", "mesh": MeshSpec(fsdp=8)}
    found = values(trainer(saved(tmp_path, arrays), weight_map=rules, **mesh))
    np.testing.assert_array_equal(found["body/kernel"], kernel.T.astype(np.float32))


def test_an_orbax_checkpoint_of_another_program(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    arrays = {name.replace(".", "/"): x for name, x in weights().items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", {"params": arrays, "step": 3})
    rules = [WeightRule("params/{n:.+}", "{n:.+}")]
    found = values(trainer(tmp_path / "saved", weight_map=rules))
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_keras_file(tmp_path: Path) -> None:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    def model() -> Any:
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(3, name="body")(inputs)
        return keras.Model(inputs, keras.layers.Dense(1, name="top")(hidden))

    theirs = model()
    theirs.save(tmp_path / "w.keras")
    rules = [
        WeightRule(f"layers/{saved_as}/vars/{index}", f"{name}/{part}")
        for saved_as, name in (("dense", "body"), ("dense_1", "top"))
        for index, part in enumerate(("kernel", "bias"))
    ]
    started = linear_model.trainer(
        model=KerasModel(model()), weight_map=rules, init_from=str(tmp_path / "w.keras")
    )
    np.testing.assert_allclose(started.predict(X), theirs(X), rtol=1e-5, atol=1e-6)


def test_the_checkpoint_of_a_file_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, weights())
    assert "leave checkpoint=best out" in refused(path, checkpoint="best")
    with pytest.raises(UserError, match="init_from_strict is matching"):
        trainer(init_from_strict="matching")


def test_integers_that_would_wrap_are_refused(tmp_path: Path) -> None:
    class Counts(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.head = nnx.Linear(4, 1, rngs=rngs)
            self.seen = nnx.BatchStat(np.zeros(2, np.int32))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(x)

    arrays = {"head.kernel": np.ones((4, 1), np.float32), "head.bias": np.zeros(1, np.float32)}
    wide = saved(tmp_path, arrays | {"seen": np.array([7, 2**32 + 5])})
    message = refused(wide, model=Counts)
    assert "seen is int64 and has a value that int32 cannot hold" in message
    fits = trainer(saved(tmp_path, arrays | {"seen": np.array([7, -5])}), model=Counts)
    assert fits.model.seen.get_value().tolist() == [7, -5]


@pytest.mark.parametrize(
    ("dtype", "fill"), [("int32", 0.5), ("uint8", -1), ("int32", np.inf), ("float32", 1e300)]
)
def test_a_fill_that_the_array_cannot_hold_is_refused(dtype: str, fill: float) -> None:
    headers = {"a": ArrayHeader((2,), np.dtype(dtype))}
    targets = {"a": jax.ShapeDtypeStruct((4,), dtype)}
    with pytest.raises(
        UserError, match=rf"fill is {re.escape(str(fill))}, which {dtype} cannot hold"
    ):
        assign_weights("w.npz", headers, targets, [WeightRule("a", "a[0:2]", fill=fill)])
    found = assign_weights("w.npz", headers, targets, [WeightRule("a", "a[0:2]", fill=1)])
    assert found.fill == {"a": 1} and not found.kept


@pytest.mark.nightly
def test_the_host_holds_less_than_the_largest_array(tmp_path: Path) -> None:
    script = TESTS / "unit" / "checkpoints" / "weights" / "peak_memory.py"
    file = str(tmp_path / "w.safetensors")

    def python(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, str(script), file, *arguments],
            env=environment(8) | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
            check=True,
            capture_output=True,
            text=True,
            timeout=BOUND,
        ).stdout

    python("4", "6400")  # arrays of 26 MB
    found = json.loads(python())
    assert found["total"] == 4 * found["largest"] == 4 * 6400 * 4096
    assert found["grown"] < found["total"] + found["largest"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["w.npz", "w.safetensors"])
def test_an_array_without_dims_is_exported_and_read(name: str, tmp_path: Path) -> None:
    def model(scale: float) -> FunctionModel:
        first = {"scale": np.float32(scale), "w": np.ones((4, 1), np.float32)}
        return FunctionModel(lambda key: first, lambda params, x: params["scale"] * x @ params["w"])

    parent = linear_model.trainer(model=model(1.5), workdir=str(tmp_path / "run"))
    parent.fit((X, Y), steps=1)
    arrays = export_params(str(tmp_path / "run"), str(tmp_path / name))
    assert arrays["scale"].shape == () and arrays["scale"] != 1.5
    child = linear_model.trainer(model=model(7), init_from=str(tmp_path / name))
    assert child.evaluate((X, Y)) == parent.evaluate((X, Y))


def test_a_function_models_arrays_have_names_too(tmp_path: Path) -> None:
    arrays = {"a": np.ones((4, 1), np.float32)}
    np.savez(tmp_path / "w.npz", **arrays)  # type: ignore[arg-type]
    model = FunctionModel(
        init=lambda key: {"a": jax.random.normal(key, (4, 1))},
        apply=lambda params, x: x @ params["a"],
    )
    started = linear_model.trainer(model=model, init_from=str(tmp_path / "w.npz"))
    np.testing.assert_allclose(started.predict(X), X.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [{"h[0]": {"w[0]": 0}, "h[1]": {"w[:]": 0}}, 0])
def test_names_with_brackets_and_a_single_array_are_exported_and_read(
    tree: Any, tmp_path: Path
) -> None:
    def model(value: float) -> FunctionModel:
        first = jax.tree.map(lambda _: np.full((4, 1), value, np.float32), tree)
        return FunctionModel(lambda key: first, lambda params, x: x @ sum(jax.tree.leaves(params)))

    linear_model.trainer(model=model(1.5), workdir=str(tmp_path / "run")).fit((X, Y), steps=1)
    arrays = export_params(str(tmp_path / "run"), str(tmp_path / "w.npz"))
    other = WeightRule("h.{layer}.weight", "h[{layer}]/w[:]")  # of a file with other names
    for rules in ((), (other,)):
        options: dict[str, Any] = {"init_from": str(tmp_path / "w.npz"), "weight_map": rules}
        child = linear_model.trainer(model=model(7), **options)
        np.testing.assert_allclose(child.predict(X), X @ sum(arrays.values()), rtol=1e-6)
