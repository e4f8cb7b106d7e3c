"""Models of the workloads as flax modules, for the floor and spmdtrain."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from work import CLASSES, LEARNING_RATE, TRANSFORMERS, Shape, Work

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Net:
    """A model with its objective and optimizer."""

    make: Callable[..., nnx.Module]
    """Maps `rngs=` to the model."""
    objective: Callable[[Any, Any], dict[str, jax.Array]]
    """Maps (model, {"image", "label"}) to per-example values: loss, accuracy."""
    floor_objective: Callable[[Any, Any], dict[str, jax.Array]]
    """The same by optax alone, as a hand-written loop computes it."""
    optimizer: optax.GradientTransformation
    compute_dtype: Dtype = "float32"


class Dense(nnx.Module):
    """Three linear layers with ReLU between them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = [(784, 256), (256, 256), (256, CLASSES)]
        self.layers = nnx.List([nnx.Linear(*size, rngs=rngs) for size in sizes])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], -1)
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class Block(nnx.Module):
    """A residual block of two convolutions."""

    def __init__(self, inside: int, outside: int, stride: int, rngs: nnx.Rngs) -> None:
        def conv(a: int, b: int, size: int, by: int) -> nnx.Conv:
            return nnx.Conv(a, b, (size, size), by, use_bias=False, rngs=rngs)

        self.first = conv(inside, outside, 3, stride)
        self.second = conv(outside, outside, 3, 1)
        self.norms = nnx.List([nnx.BatchNorm(outside, rngs=rngs) for _ in range(2)])
        self.shortcut = None if stride == 1 else conv(inside, outside, 1, stride)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nnx.Module):
    """A small residual network for images of 32 x 32, with 16, 32 and 64 channels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.blocks = nnx.List([Block(*each, rngs=rngs) for each in widths])
        self.head = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class Leaves(nnx.Module):
    """Almost no computation on many parameter arrays."""

    def __init__(self, count: int, rngs: nnx.Rngs) -> None:
        self.arrays = nnx.List([nnx.Param(jnp.ones(4)) for _ in range(count)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.asarray(sum(jnp.sum(array[...]) for array in self.arrays)) * x.mean(-1)


def assign(model: Any, arrays: Sequence[np.ndarray]) -> None:
    """Gives a model the weights of `same_work`."""
    if isinstance(model, Dense | ResNet | Leaves):
        for param, array in zip(_params_in_order(model), arrays, strict=True):
            param[...] = jnp.asarray(array)
        return
    before = [model.embedding] + ([model.positions] if hasattr(model, "positions") else [])
    attention, mlp = model.blocks["attention"], model.blocks["mlp"]
    of_layer = [*(attention[x] for x in ("norm", "qkv", "out"))]
    of_layer += [*(mlp[x] for x in ("norm", "up", "down"))]
    layers = arrays[len(before) : -1]
    stacked = [np.stack(layers[n :: len(of_layer)]) for n in range(len(of_layer))]
    params = [*before, *of_layer, model.norm]
    values = [*arrays[: len(before)], *stacked, arrays[-1]]
    for param, array in zip(params, values, strict=True):
        param[...] = jnp.asarray(array)


def _params_in_order(model: Dense | ResNet | Leaves) -> Iterator[Any]:
    """Yields the parameters in the order in which the model uses them."""
    if isinstance(model, Leaves):
        yield from model.arrays
        return
    if isinstance(model, Dense):
        for layer in model.layers:
            yield from (layer.kernel, layer.bias)
        return
    yield from (model.stem.kernel, model.stem.bias)
    for block in model.blocks:
        for conv, norm in zip((block.first, block.second), block.norms, strict=True):
            yield from (conv.kernel, norm.scale, norm.bias)
        if block.shortcut is not None:
            yield block.shortcut.kernel
    yield from (model.head.kernel, model.head.bias)


def net_of(work: Work) -> Net:
    """Returns the model of a workload."""
    if shape := TRANSFORMERS.get(work.workload):
        dtype: Dtype = "bfloat16" if shape.sixteen_bits else "float32"
        make, optimizer = partial(_transformer, shape), optax.adam(LEARNING_RATE)
        return Net(make, _next_token, _next_token_by_optax, optimizer, dtype)
    if work.workload == "leaves":
        return Net(partial(Leaves, work.leaves), _sum, _sum, optax.sgd(LEARNING_RATE))
    classifier = ResNet if work.workload == "resnet" else Dense
    return Net(classifier, _classified, _classified, optax.adam(LEARNING_RATE))


def _transformer(shape: Shape, rngs: nnx.Rngs) -> nnx.Module:
    from spmdtrain.models import Transformer, TransformerConfig

    config = TransformerConfig(
        vocabulary=shape.tokens,
        rows=shape.rows,
        layers=shape.layers,
        width=shape.width,
        heads=shape.heads,
        hidden=4 * shape.width,
        context=shape.context,
        positions="learned" if shape.learned else "rotary",
        unroll=True,
    )
    return Transformer(config, rngs=rngs)


def _classified(model: Any, batch: Any) -> dict[str, jax.Array]:
    logits = model(batch["image"].astype(jnp.float32) / 255)
    return {
        "loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
        "accuracy": logits.argmax(-1) == batch["label"],
    }


def _sum(model: Any, batch: Any) -> dict[str, jax.Array]:
    return {"loss": model(batch["image"])}


def _next_token(model: Any, batch: Any) -> dict[str, jax.Array]:
    return {"loss": model.token_losses(batch["image"], batch["label"]).loss}


def _next_token_by_optax(model: Any, batch: Any) -> dict[str, jax.Array]:
    logits = model(batch["image"])
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])}
