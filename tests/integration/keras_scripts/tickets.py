"""Priority and department of tickets: several inputs and outputs, as in Keras' functional guide."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from keras import layers

from spmdtrain import Trainer

draw = np.random.default_rng(0)
text = draw.integers(1, 50, (256, 12)) * (np.arange(12) < draw.integers(3, 13, (256, 1)))
tags = draw.integers(0, 2, (256, 5)).astype("float32")
inputs = {"text": text, "tags": tags}
targets = {"priority": tags[:, :1], "department": (text.sum(1) % 4)}

keras.utils.set_random_seed(0)
text_input = keras.Input((12,), name="text")
tags_input = keras.Input((5,), name="tags")
x = layers.Embedding(50, 8)(text_input)
x = layers.concatenate([layers.GRU(8)(x), tags_input])
priority = layers.Dense(1, name="priority")(x)
department = layers.Dense(4, name="department")(x)
model = keras.Model([text_input, tags_input], [priority, department])
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-3),
    loss={
        "priority": keras.losses.BinaryCrossentropy(from_logits=True),
        "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    },
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"department": "accuracy"},
)
# Keras: model.fit(inputs, targets, epochs=2, batch_size=32, shuffle=False, verbose=0)
Trainer.from_keras(model, shuffle=False).fit((inputs, targets), epochs=2, global_batch_size=32)
score = model.evaluate(inputs, targets, verbose=0)
