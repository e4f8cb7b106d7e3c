"""Classification of series with convolutions and callbacks, as in Keras' example from scratch."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from keras import callbacks, layers

from spmdtrain import Trainer

draw = np.random.default_rng(0)
labels = draw.integers(0, 2, 512)
time = np.arange(32) + draw.uniform(0, 32, (512, 1))
series = np.sin(time * np.where(labels, 0.8, 0.5)[:, None]) + draw.normal(0, 0.7, (512, 32))
series = series[..., None].astype("float32")
x, y, val = series[:384], labels[:384], (series[384:], labels[384:])

keras.utils.set_random_seed(0)
inputs = keras.Input((32, 1))
hidden = layers.Conv1D(16, 3, padding="same")(inputs)
hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
hidden = layers.GlobalAveragePooling1D()(hidden)
model = keras.Model(inputs, layers.Dense(2, activation="softmax")(hidden))
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
watchers = [
    callbacks.ModelCheckpoint("best.keras", save_best_only=True, monitor="val_loss"),
    callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_lr=1e-4, min_delta=0.3),
    callbacks.EarlyStopping(monitor="val_loss", patience=4),
    callbacks.CSVLogger("log.csv"),
]
# Keras: model.fit(x, y, 32, 5, 0, watchers, validation_data=val, shuffle=False)
Trainer.from_keras(model, callbacks=watchers, shuffle=False).fit(
    (x, y), global_batch_size=32, epochs=5, validation=val
)
score = model.evaluate(*val, verbose=0)
