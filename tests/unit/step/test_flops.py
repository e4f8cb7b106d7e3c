"""FLOPs of what ships, against what one computes by hand."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import DIGITS, GPT
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from spmdtrain import Trainer
from spmdtrain.config.experiment import load_experiment
from spmdtrain.models import MobileNetV2, mobilenet
from spmdtrain.sharding.mesh import resolve
from spmdtrain.step.flops import Flops, count_flops
from spmdtrain.xla.hlo import RARE_BRANCH


def traced(file: Path, **options: Any) -> Flops:
    """What the train step of an experiment computes, on one device."""
    found = load_experiment(str(file), frozenset())
    config = found.config_class(strategy="default", **options)
    experiment = found.build(resolve(config, batch_shards=1))
    trainer = Trainer.from_experiment(experiment, config)
    rows = experiment.train.rows(np.arange(config.global_batch_size or 0))
    return count_flops(trainer.trace_step(rows).jaxpr)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_an_mlp(microbatches: int) -> None:
    sizes = [64, 48, 32, 10]
    found = traced(DIGITS, hidden=(48, 32), microbatches=microbatches)
    forward = sum(2 * 64 * a * b for a, b in itertools.pairwise(sizes))
    # Backward: for each layer one for its weights and, but for the first, one for its input.
    assert found.total == 3 * forward - 2 * 64 * sizes[0] * sizes[1]
    assert sum(found.by_line.values()) == found.total
    assert all("layers.py:" in line for line in found.by_line)


@pytest.mark.parametrize(
    ("remat", "unroll", "microbatches"),
    [("none", True, 1), ("none", False, 1), ("none", False, 2), ("full", False, 1)],
)
def test_a_transformer(text: Path, remat: str, unroll: bool, microbatches: int) -> None:
    layers, width, context, batch, rows = 3, 64, 32, 8, 64
    found = traced(
        GPT,
        data_dir=str(text.parent),
        layers=layers,
        width=width,
        length=context,
        global_batch_size=batch,
        remat=remat,
        unroll=unroll,
        microbatches=microbatches,
    )
    tokens = batch * context
    block = 2 * tokens * 12 * width**2 + 4 * tokens * context * width  # with attention's products
    logits = 2 * tokens * width * rows
    expected = layers * 3 * block + 3 * logits
    if (
        remat == "full"
    ):  # once more, but for the last product, which the backward pass does not need
        expected += layers * (block - 2 * tokens * 4 * width**2)
    assert math.isclose(found.total, expected, rel_tol=0.02)
    assert found.unknown_loops == []
    assert not found.has_reference  # on CPU these products are the model's: no second trace


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "input.txt"
    path.write_text("".join(f"{i} green bottles, hanging on the wall\n" for i in range(200)))
    return path


@pytest.mark.slow
def test_mobilenet_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 million multiply-adds for a picture of 224 x 224 (Sandler et al., table 4)."""

    def forward(x: jax.Array) -> Any:
        return MobileNetV2(1000, rngs=nnx.Rngs(0))(x)

    # On CPU depthwise convolutions are sums of pictures, and no products.
    there = SimpleNamespace(platform="tpu")
    monkeypatch.setattr(mobilenet, "current_device", lambda: there)
    found = count_flops(jax.make_jaxpr(forward)(jnp.zeros((1, 224, 224, 3))))
    assert math.isclose(found.total, 2 * 300e6, rel_tol=0.02)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 8])
def test_the_gradient_of_a_convolution_takes_twice_the_convolution(
    stride: int, groups: int
) -> None:
    x, kernel = jnp.ones((4, 16, 16, 8)), jnp.ones((3, 3, 8 // groups, 16))

    def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
        found = lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return found.sum()

    forward = 2 * 4 * (16 // stride) ** 2 * 16 * 9 * 8 // groups
    assert count_flops(jax.make_jaxpr(convolve)(x, kernel)).total == forward
    both = count_flops(jax.make_jaxpr(jax.value_and_grad(convolve, argnums=(0, 1)))(x, kernel))
    assert both.total == 3 * forward


W = jnp.ones((8, 8))
ONE = 2 * 8**3


def twice(x: jax.Array) -> jax.Array:
    return W @ (W @ x)


def rarely(x: Any) -> Any:
    with jax.named_scope(RARE_BRANCH):
        return W @ x


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (lambda x: lax.scan(lambda c, _: (W @ c, None), x, length=7)[0], 7),
        (lambda x: lax.fori_loop(0, 5, lambda _, c: W @ c, x), 5),
        (lambda x: lax.cond(x.sum() > 0, twice, lambda x: x, x), 2),
        (lambda x: lax.cond(x.sum() > 0, lambda x: W @ x, twice, x), 2),
        (lambda x: lax.cond(x.sum() > 0, rarely, lambda x: x, x), 0),
        (lambda x: lax.cond(x.sum() > 0, rarely, rarely, x), 1),
        (lambda x: jax.checkpoint(twice)(x), 2),
        (lambda x: jax.jit(jax.vmap(lambda row: W @ row))(x), 1),
    ],
)
def test_loops_and_branches(function: Any, products: int) -> None:
    assert count_flops(jax.make_jaxpr(function)(jnp.ones((8, 8)))).total == products * ONE


@pytest.mark.parametrize("argnums", [(0,), (1,), (0, 1)])
def test_the_gradient_of_a_ragged_dot_takes_twice_the_dot(argnums: tuple[int, ...]) -> None:
    rows, matrices, sizes = jnp.ones((8, 16)), jnp.ones((4, 16, 32)), jnp.array([2, 2, 1, 3])

    def dot(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return lax.ragged_dot(rows, matrices, sizes).sum()

    forward = 2 * 8 * 16 * 32
    assert count_flops(jax.make_jaxpr(dot)(rows, matrices)).total == forward
    found = count_flops(jax.make_jaxpr(jax.value_and_grad(dot, argnums))(rows, matrices))
    assert found.total == (1 + len(argnums)) * forward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("microbatches", "remat"),
    [(1, "none"), pytest.param(2, "full", marks=pytest.mark.nightly)],
)
def test_training_mobilenet(
    monkeypatch: pytest.MonkeyPatch, microbatches: int, remat: Literal["none", "full"]
) -> None:
    there = SimpleNamespace(platform="tpu")
    monkeypatch.setattr(mobilenet, "current_device", lambda: there)

    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        return {"loss": model(batch["image"]).sum(-1)}

    trainer = Trainer(
        model=lambda rngs: MobileNetV2(1000, rngs=rngs),
        objective=objective,
        optimizer=optax.sgd(0.1),
        microbatches=microbatches,
        remat=remat,
        global_batch_size=2,
        strategy="default",
    )
    found = count_flops(trainer.trace_step({"image": np.zeros((2, 224, 224, 3), np.float32)}).jaxpr)
    forward, first = 2 * 2 * 300e6, 2 * 2 * 112 * 112 * 32 * 27  # whose input has no gradient
    expected = 3 * forward - first + (forward if remat == "full" else 0)
    assert math.isclose(found.total, expected, rel_tol=0.02)


def test_under_shard_map_each_device_counts() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    spec = PartitionSpec("data")
    mapped = jax.shard_map(lambda x: x @ W, mesh=mesh, in_specs=spec, out_specs=spec)
    assert count_flops(jax.make_jaxpr(mapped)(jnp.ones((32, 8)))).total == 4 * ONE


def test_a_loop_of_unknown_trip_count_is_named() -> None:
    def search(x: jax.Array) -> Any:
        return lax.while_loop(lambda c: c.sum() < 100, lambda c: W @ c, x)

    found = count_flops(jax.make_jaxpr(search)(jnp.ones((8, 8))))
    assert found.total == ONE
    assert [line.partition(" (")[0].split(":")[0] for line in found.unknown_loops] == [__file__]
