"""The floor: the loop that one would write by hand with `jax.jit`, and nothing around it.

With `--unplaced` each batch goes to the step as NumPy made it, which on CPU costs less.
With `--flax` W1's model is the one that spmdtrain trains, and not written by hand as well.
The state is donated, the next batch is placed while the step runs, and the loss is read every 100
steps. On several devices no more than two steps are under way, as more can abort the process.
"""

from gate import Gate
from work import CLASSES, LEARNING_RATE, Work

gate, work = Gate(), Work.from_arguments()

import os
import sys

os.environ["JAX_NUM_CPU_DEVICES"] = str(work.devices)

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

gate.mark("imported")
if work.processes > 1:
    jax.distributed.initialize(gate.address, work.processes, gate.rank)
if work.accelerator:
    gate.device_peak = lambda: (jax.devices()[0].memory_stats() or {})["peak_bytes_in_use"]
Params = Any
Found = tuple[jax.Array, tuple[jax.Array, Any]]


def mlp() -> tuple[Params, Any]:
    """Its parameters, and no state."""
    sizes = [(784, 256), (256, 256), (256, CLASSES)]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    made = [
        (jax.random.normal(key, size) * size[0] ** -0.5, jnp.zeros(size[1]))
        for key, size in zip(keys, sizes, strict=True)
    ]
    return made, ()


def mlp_loss(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> Found:
    x = images.reshape(images.shape[0], -1).astype(jnp.float32) / 255
    for kernel, bias in params[:-1]:
        x = jax.nn.relu(x @ kernel + bias)
    kernel, bias = params[-1]
    logits = x @ kernel + bias
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, ((logits.argmax(-1) == labels).mean(), state)


optimizer = optax.adam(LEARNING_RATE)
if work.workload == "mlp" and "--flax" not in sys.argv:
    params, model_state = mlp()
    loss_of = mlp_loss
else:  # the same flax modules that others train, split once into plain lists
    from flax import nnx
    from nets import net_of

    net = net_of(work)
    optimizer, dtype = net.optimizer, net.compute_dtype
    graph, *parts = nnx.split(net.make(rngs=nnx.Rngs(0)), nnx.Param, ...)
    made: list[tuple[list[Any], Any]] = [jax.tree.flatten(part) for part in parts]
    (params, of_params), (model_state, of_state) = made

    def loss_of(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> Found:
        params = [x.astype(dtype) for x in params]
        model = nnx.merge(graph, of_params.unflatten(params), of_state.unflatten(state))
        found = net.objective(model, {"image": images, "label": labels})
        _, *now = nnx.split(model, nnx.Param, ...)
        after = jax.tree.leaves(now[1])
        return found["loss"].mean(), (found.get("accuracy", found["loss"]).mean(), after)


@jax.jit(donate_argnums=0)
def train_step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
    params, model_state, opt_state = state
    grad = jax.value_and_grad(loss_of, has_aux=True)
    (loss, (accuracy, model_state)), gradients = grad(params, model_state, images, labels)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), model_state, opt_state), (loss, accuracy)


devices = work.devices * work.processes
mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
split = NamedSharding(mesh, PartitionSpec("data"))
everywhere = NamedSharding(mesh, PartitionSpec())


def batches() -> Iterator[Any]:
    images, labels = work.arrays()
    draws, size = np.random.default_rng(0), work.batch_size
    own = slice(gate.rank * size // work.processes, (gate.rank + 1) * size // work.processes)
    while True:
        order = draws.permutation(len(images))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size][own]
            batch = (images[rows], labels[rows])
            if "--unplaced" in sys.argv:
                yield batch
            elif work.processes == 1:
                yield jax.device_put(batch, split)
            else:
                yield tuple(jax.make_array_from_process_local_data(split, x) for x in batch)


state = jax.jit(lambda x: x, out_shardings=everywhere)(
    (params, model_state, optimizer.init(params))
)
stream = batches()
upcoming = next(stream)
while gate.wait():
    before: Any = None
    for step in range(work.segment):
        state, metrics = train_step(state, *upcoming)
        upcoming = next(stream)
        if step % 100 == 0:
            float(metrics[0])
            gate.mark("first step")
        if devices > 1:
            jax.block_until_ready(before)
            before = metrics
    jax.block_until_ready(state)
os._exit(0)
