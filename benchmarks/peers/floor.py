"""The floor: a hand-written training loop with `jax.jit` only.

With `--unplaced` each batch is passed to the step as NumPy arrays, which is faster on CPU. With
`--flax` W1's model is the flax model that spmdtrain trains, instead of a hand-written one. The
state is donated, the next batch is placed while the step runs, and the loss is read every 100
steps. On several devices at most two steps are in flight, because more can abort the process.
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
import same_work
from jax.sharding import NamedSharding, PartitionSpec

gate.mark("imported")
if work.processes > 1:
    jax.distributed.initialize(gate.address, work.processes, gate.rank)
if work.accelerator:
    gate.device_peak = lambda: (jax.devices()[0].memory_stats() or {})["peak_bytes_in_use"]
Params = Any
LossAndAux = tuple[jax.Array, tuple[jax.Array, Any]]


def mlp() -> tuple[Params, Any]:
    """Returns its parameters and an empty state."""
    sizes = [(784, 256), (256, 256), (256, CLASSES)]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = [
        (jax.random.normal(key, size) * size[0] ** -0.5, jnp.zeros(size[1]))
        for key, size in zip(keys, sizes, strict=True)
    ]
    return params, ()


def mlp_loss(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> LossAndAux:
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
else:  # the flax modules that other peers train, split once into plain lists
    import nets
    from flax import nnx

    net = nets.net_of(work)
    optimizer, dtype = net.optimizer, net.compute_dtype
    module = net.make(rngs=nnx.Rngs(0))
    if gate.checks:
        nets.assign(module, same_work.weights(work))
    graph, *parts = nnx.split(module, nnx.Param, ...)
    flat: list[tuple[list[Any], Any]] = [jax.tree.flatten(part) for part in parts]
    (params, params_tree), (model_state, state_tree) = flat

    def loss_of(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> LossAndAux:
        params = [x.astype(dtype) for x in params]
        model = nnx.merge(graph, params_tree.unflatten(params), state_tree.unflatten(state))
        values = net.floor_objective(model, {"image": images, "label": labels})
        _, *parts = nnx.split(model, nnx.Param, ...)
        new_state = jax.tree.leaves(parts[1])
        return values["loss"].mean(), (values.get("accuracy", values["loss"]).mean(), new_state)


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
replicated = NamedSharding(mesh, PartitionSpec())


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


if gate.checks:
    import jax_work

    if "nets" not in sys.modules:
        params = jax.tree.unflatten(jax.tree.structure(params), same_work.weights(work))
    given = ((params, model_state, optimizer.init(params)), *same_work.first_batch(work))
    facts = jax_work.facts(train_step, *given, params=params)
    gate.report_work(float(train_step(*given)[1][0]), **facts)

state = jax.jit(lambda x: x, out_shardings=replicated)(
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
