"""Keras on JAX: `fit` as in its documentation, one epoch per segment."""

import os

os.environ["KERAS_BACKEND"] = "jax"

from gate import Gate
from work import CLASSES, LEARNING_RATE, TRANSFORMERS, Work

gate, work = Gate(), Work.from_arguments()
os.environ["JAX_NUM_CPU_DEVICES"] = str(work.devices)

from typing import Any

import keras
from keras import layers

gate.mark("imported")
if work.devices > 1:
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))


class AtTheGate(keras.callbacks.Callback):
    """Waits at the gate between epochs, after `fit` has read the metrics of the last step."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        gate.wait() or os._exit(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        gate.mark("first step")


def mlp() -> Any:
    return keras.Sequential(
        [
            keras.Input((28, 28)),
            layers.Rescaling(1 / 255),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )


def resnet() -> Any:
    def conv(x: Any, width: int, size: int, stride: int) -> Any:
        return layers.Conv2D(width, size, stride, padding="same", use_bias=False)(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.Rescaling(1 / 255)(inputs)
    x = layers.ReLU()(layers.Conv2D(16, 3, padding="same")(x))
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        y = layers.ReLU()(layers.BatchNormalization()(conv(x, width, 3, stride)))
        y = layers.BatchNormalization()(conv(y, width, 3, 1))
        x = layers.ReLU()(layers.Add()([y, x if stride == 1 else conv(x, width, 1, stride)]))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def transformer() -> Any:
    """The other peers' transformer, but without positions, which makes it cheaper."""
    shape = TRANSFORMERS[work.workload]
    inputs = keras.Input((shape.context,), dtype="int32")
    table = layers.ReversibleEmbedding(shape.rows, shape.width)
    x = table(inputs)
    for _ in range(shape.layers):
        y = layers.RMSNormalization()(x)
        attention = layers.MultiHeadAttention(
            shape.heads, shape.width // shape.heads, use_bias=False
        )
        x = layers.Add()([x, attention(y, y, use_causal_mask=True)])
        y = layers.RMSNormalization()(x)
        y = layers.Dense(4 * shape.width, activation=squared_relu, use_bias=False)(y)
        x = layers.Add()([x, layers.Dense(shape.width, use_bias=False)(y)])
    return keras.Model(inputs, table(layers.RMSNormalization()(x), reverse=True))


def squared_relu(x: Any) -> Any:
    return keras.ops.square(keras.ops.relu(x))


images, labels = work.arrays()
rows = work.segment * work.batch_size
model = {"mlp": mlp, "resnet": resnet, "transformer": transformer}[work.workload]()
model.compile(
    optimizer=keras.optimizers.Adam(LEARNING_RATE),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
    steps_per_execution=work.per_dispatch,
)
model.fit(
    images[:rows], labels[:rows], batch_size=work.batch_size, epochs=10**6, callbacks=[AtTheGate()]
)
