"""TensorFlow: `Model.fit` with a strategy and a cached `tf.data`, one epoch per segment.

With `--custom`, the custom training loop of its tutorials with `strategy.run` instead.
"""

from gate import Gate
from work import CLASSES, LEARNING_RATE, ROWS, Work

gate, work = Gate(), Work.from_arguments()

import json
import os
import sys
from typing import Any

if work.processes > 1:
    host, port = gate.address.split(":")
    tasks = [f"{host}:{int(port) + n}" for n in range(work.processes)]
    task = {"type": "worker", "index": gate.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": tasks}, "task": task})

import tensorflow as tf

gate.mark("imported")
tf.config.threading.set_intra_op_parallelism_threads(int(os.environ["OMP_NUM_THREADS"]))
if work.processes > 1:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
else:
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(work.devices)]
    tf.config.set_logical_device_configuration(cpu, logical)
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    strategy = tf.distribute.MirroredStrategy(names)
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction="none" if "--custom" in sys.argv else "sum_over_batch_size"
)


class AtTheGate(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        gate.wait() or os._exit(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        gate.mark("first step")


with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((28, 28)),
            tf.keras.layers.Rescaling(1 / 255),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(256, activation="relu"),
            tf.keras.layers.Dense(256, activation="relu"),
            tf.keras.layers.Dense(CLASSES),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(LEARNING_RATE)
    model.compile(
        optimizer=optimizer,
        loss=loss_of,
        metrics=["accuracy"],
        steps_per_execution=max(1, work.per_dispatch),
    )
if gate.checks:
    import same_work

    model.set_weights(same_work.weights(work))
    inputs, targets = same_work.first_batch(work)
    loss = float(tf.reduce_mean(loss_of(targets, model(inputs, training=True))))
    kinds = sorted({str(x.dtype) for x in model.trainable_variables})
    gate.report_work(loss, model.count_params(), None, "+".join(kinds))
data = tf.data.Dataset.from_tensor_slices(work.arrays())
data = data.cache().shuffle(ROWS).repeat().batch(work.batch_size, drop_remainder=True).prefetch(2)
if "--custom" not in sys.argv:
    model.fit(data, epochs=10**6, steps_per_epoch=work.segment, callbacks=[AtTheGate()])

with strategy.scope():
    optimizer.build(model.trainable_variables)


@tf.function
def train_step(batch: Any) -> Any:
    def replica(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.nn.compute_average_loss(
                loss_of(labels, logits), global_batch_size=work.batch_size
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return strategy.reduce("sum", strategy.run(replica, args=batch), axis=None)


spread = iter(strategy.experimental_distribute_dataset(data))
while gate.wait():
    for step in range(work.segment):
        loss = train_step(next(spread))
        if step % 100 == 0:
            float(loss)
            gate.mark("first step")
    float(loss)
os._exit(0)
