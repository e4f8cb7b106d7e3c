"""A compiled Keras model as an experiment for the command line."""

import os
from dataclasses import dataclass

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is first imported

import keras
import numpy as np

from spmdtrain import Experiment, RunConfig


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    epochs: int | None = 2
    global_batch_size: int | None = 16
    learning_rate: float | None = 0.03


def build(config: Config) -> Experiment:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1, "sigmoid")]
    )
    model.compile(keras.optimizers.Adam(config.learning_rate), "bce", metrics=["accuracy", "auc"])
    x = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
    y = (x.sum(1, keepdims=True) > 0).astype(np.int32)
    callbacks = [
        keras.callbacks.EarlyStopping("val_auc", patience=3),
        keras.callbacks.TensorBoard(),
    ]
    validation = x[:37], y[:37]
    return Experiment.from_keras(model, train=(x, y), validation=validation, callbacks=callbacks)
