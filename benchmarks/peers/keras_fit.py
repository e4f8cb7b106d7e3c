"""Keras on JAX: `fit` as in its documentation, one epoch per segment.

On several devices it uses `keras.distribution`. With `--trainer`, `Trainer.from_keras` trains the
same compiled model.
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"

from gate import Gate
from work import CLASSES, LEARNING_RATE, TRANSFORMERS, Shape, Work

gate, work = Gate(), Work.from_arguments()
os.environ["JAX_NUM_CPU_DEVICES"] = str(work.devices)

import math
from typing import Any

import keras
import numpy as np
from keras import layers

gate.mark("imported")
by_trainer = "--trainer" in sys.argv
if work.devices > 1 and not by_trainer:
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

    def norm() -> Any:
        return layers.BatchNormalization(epsilon=1e-5)  # as of the other peers

    inputs = keras.Input((32, 32, 3))
    x = layers.Rescaling(1 / 255)(inputs)
    x = layers.ReLU()(layers.Conv2D(16, 3, padding="same")(x))
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        y = layers.ReLU()(norm()(conv(x, width, 3, stride)))
        y = norm()(conv(y, width, 3, 1))
        x = layers.ReLU()(layers.Add()([y, x if stride == 1 else conv(x, width, 1, stride)]))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


class Attention(layers.Layer):
    """Causal attention with rotary positions and without biases, as of the other peers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.size = shape.heads, shape.width // shape.heads
        half = self.size // 2
        speeds = np.exp(-math.log(10_000) / half * np.arange(half))
        angles = (np.arange(shape.context)[:, None] * speeds)[:, None].astype("float32")
        self.cosines, self.sines = np.cos(angles), np.sin(angles)

    def build(self, inputs: Any) -> None:
        width = inputs[-1]
        self.qkv = self.add_weight((width, 3, self.heads, self.size), "glorot_uniform", name="qkv")
        self.out = self.add_weight((self.heads, self.size, width), "glorot_uniform", name="out")

    def call(self, x: Any) -> Any:
        qkv = keras.ops.einsum("btd,dcnh->cbtnh", x, self.qkv)
        query, key = self.turn(qkv[0]), self.turn(qkv[1])
        mixed = keras.ops.dot_product_attention(query, key, qkv[2], is_causal=True)
        return keras.ops.einsum("btnh,nhd->btd", mixed, self.out)

    def turn(self, x: Any) -> Any:
        first, second = keras.ops.split(x, 2, axis=-1)
        parts = (
            first * self.cosines - second * self.sines,
            first * self.sines + second * self.cosines,
        )
        return keras.ops.concatenate(parts, axis=-1)


def transformer() -> Any:
    shape = TRANSFORMERS[work.workload]
    inputs = keras.Input((shape.context,), dtype="int32")
    table = layers.ReversibleEmbedding(shape.rows, shape.width)
    x = table(inputs)
    for _ in range(shape.layers):
        x = layers.Add()([x, Attention(shape)(layers.RMSNormalization()(x))])
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
    steps_per_execution=max(1, work.per_dispatch),
)
if gate.checks:
    import jax_work
    import same_work

    given = iter(same_work.weights(work))
    batch = same_work.first_batch(work)
    for variable in model.trainable_variables:
        variable.assign(next(given))
    if by_trainer:
        from spmdtrain import Trainer
        from spmdtrain.step.program import plan_step

        trainer = Trainer.from_keras(model, global_batch_size=work.batch_size)
        state = trainer.functions.init(0)
        step = plan_step(trainer.functions, batch).program()
        facts = jax_work.facts(step, state, batch, params=state.params)
        gate.report_work(float(step(state, batch)[1].metrics["loss"]), **facts)
    loss = model.train_on_batch(*batch)[0]
    names = ("trainable", "non_trainable", "optimizer", "metrics")
    state = model._get_jax_state(**{f"{name}_variables": True for name in names})
    facts = jax_work.facts(model.train_step, state, batch, params=state[0])
    gate.report_work(float(loss), **facts)

if by_trainer:
    import gated_batches

    from spmdtrain import Trainer

    trainer = Trainer.from_keras(model)
    gated_batches.install(gate, work, lambda: trainer.state)
    trainer.fit((images, labels), global_batch_size=work.batch_size, epochs=10_000)
model.fit(
    images[:rows], labels[:rows], batch_size=work.batch_size, epochs=10**6, callbacks=[AtTheGate()]
)
