"""A `keras.utils.PyDataset` in fit, evaluate and predict, beside Keras' own methods."""

import os
from typing import Any

import numpy as np
import pytest

from spmdtrain import MeshSpec, Trainer, UserError
from spmdtrain.document.terminal import Terminal

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
keras = pytest.importorskip("keras", reason="Keras is an extra")

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

BATCH = 16
_draw = np.random.default_rng(0)
X = _draw.normal(1.0, 2.0, (96, 8)).astype(np.float32)
Y = _draw.integers(0, 3, 96)
W = _draw.uniform(0.5, 2.0, 96).astype(np.float32)


class Batches(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
    def __init__(self, *arrays: np.ndarray) -> None:
        super().__init__()
        self.arrays = arrays

    def __len__(self) -> int:
        return -(-len(self.arrays[0]) // BATCH)

    def __getitem__(self, index: int) -> Any:
        return tuple(x[index * BATCH : (index + 1) * BATCH] for x in self.arrays)


class Net(keras.Model):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = layers()

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))


def layers() -> list[Any]:
    return [keras.layers.Dense(8, "relu"), keras.layers.Dense(3, "softmax")]


def made(kind: str) -> Any:
    keras.utils.clear_session()  # so that layers have the same names again
    keras.utils.set_random_seed(0)
    if kind == "subclassed":
        model = Net()
        model(X[:1])
    elif kind == "sequential":
        model = keras.Sequential([keras.Input((8,)), *layers()])
    else:
        hidden, out = layers()
        model = keras.Model(given := keras.Input((8,)), out(hidden(given)))
    model.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return model


def trainer(model: Any, devices: int, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "shuffle": False,
        "terminal": Terminal(quiet=True),
        "global_batch_size": BATCH,
    }
    mesh = MeshSpec(devices=tuple(range(devices)))
    return Trainer.from_keras(model, mesh=mesh, **defaults | options)


@pytest.mark.parametrize(
    ("kind", "devices"), [("functional", 1), ("sequential", 4), ("subclassed", 1)]
)
def test_fit_evaluate_and_predict_take_batches_as_keras_does(kind: str, devices: int) -> None:
    train, test = Batches(X, Y, W), Batches(X[:37], Y[:37])
    theirs = made(kind)
    history = theirs.fit(train, epochs=3, shuffle=False, verbose=0, validation_data=test).history
    evaluated = theirs.evaluate(test, verbose=0, return_dict=True)
    ours = made(kind)
    fitted = trainer(ours, devices)
    result = fitted.fit(train, epochs=3, validation=test)
    assert result.step == 18
    for name in ("loss", "accuracy"):
        epochs = [epoch[name] for epoch in result.history.epochs]
        np.testing.assert_allclose(epochs, history[name], rtol=1e-4)
        found = [evaluation[name] for evaluation in result.history.evaluations]
        np.testing.assert_allclose(found, history[f"val_{name}"], rtol=1e-4)
        np.testing.assert_allclose(fitted.evaluate(test)[name], evaluated[name], rtol=1e-4)
    expected = theirs.predict(train, verbose=0)
    found = fitted.predict(train)
    assert found.shape == expected.shape == (96, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


def test_the_batches_of_a_run_are_the_same_when_it_resumes(tmp_path: Any) -> None:
    def fit(folder: str, *totals: int, **options: Any) -> Any:
        for epochs in totals:
            workdir = str(tmp_path / folder)
            fitted = trainer(made("sequential"), 2, workdir=workdir, shuffle=True, **options)
            fitted.fit(Batches(X, Y), epochs=epochs)
        return [np.asarray(x) for x in fitted.model.get_weights()]

    whole = fit("whole", 3)
    for one, other in zip(whole, fit("resumed", 1, 3, data_threads=2), strict=True):
        assert (one == other).all()


def test_examples_that_are_batches_by_the_shape_of_the_model_are_refused() -> None:
    data = [{"x": X[i : i + BATCH], "y": Y[i : i + BATCH]} for i in range(0, 96, BATCH)]
    with pytest.raises(UserError, match=r"\(B, 8\) and gets \(B, 16, 8\): each example .* a batch"):
        trainer(made("functional"), 1, global_batch_size=2).fit(data, epochs=1)
