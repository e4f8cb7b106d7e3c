"""The vision transformer: the numbers of an independent implementation, and its sharding."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import vit_reference
from flax import nnx
from helpers import REPOSITORY

from spmdtrain import MeshSpec, Trainer, UserError
from spmdtrain.checkpoints.weights.weight_map import unmapped
from spmdtrain.config.experiment import load_experiment
from spmdtrain.models import VIT_AXIS_RULES, ViT, ViTConfig
from spmdtrain.tree import named_leaves

experiment: Any = load_experiment(str(REPOSITORY / "experiments" / "vit.py"), frozenset()).module
SMALL = ViTConfig(classes=10, image_size=12, patch_size=4, layers=2, width=32, heads=2, hidden=64)
IMAGES = np.random.default_rng(0).normal(size=(8, 12, 12, 3)).astype(np.float32)


@pytest.mark.slow
def test_logits_are_those_of_an_independent_vision_transformer() -> None:
    model = ViT(SMALL, rngs=nnx.Rngs(0))
    random = np.random.default_rng(1)
    state = jax.tree.map(
        lambda x: jnp.asarray(x + 0.2 * random.normal(size=x.shape), x.dtype), nnx.state(model)
    )
    nnx.update(model, state)
    named = named_leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    arrays = {name: np.asarray(x) for name, x in named.items()}
    expected = vit_reference.logits(unmapped(experiment.WEIGHT_MAP, arrays), IMAGES, heads=2)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, IMAGES), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("layers", "width", "heads", "count"),
    [(12, 768, 12, 86_567_656), (24, 1024, 16, 304_326_632)],
    ids=["ViT-B/16", "ViT-L/16"],
)
def test_published_shapes_have_the_published_numbers_of_parameters(
    layers: int, width: int, heads: int, count: int
) -> None:
    shape = dataclasses.replace(
        experiment.shape(experiment.PRESETS["vit-base"], 1000, 3),
        **{"layers": layers, "width": width, "heads": heads, "hidden": 4 * width},
    )
    model = nnx.eval_shape(lambda: ViT(shape, rngs=nnx.Rngs(0)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) == count


def objective(model: ViT, images: jax.Array) -> dict[str, jax.Array]:
    labels = jnp.arange(len(images))
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(model(images), labels)}


def record(losses: list[float], event: Any) -> None:
    losses.append(event.metrics["loss"])


@pytest.mark.slow
@pytest.mark.nightly
def test_annotations_split_over_fsdp_and_tensor_with_the_losses_of_one_device() -> None:
    found: dict[str, list[float]] = {"fully_sharded": [], "one_device": []}
    for strategy, losses in found.items():
        trainer = Trainer(
            # Without the token before the patches, which the published shapes have.
            model=partial(ViT, dataclasses.replace(SMALL, pooling="mean")),
            objective=objective,
            optimizer=optax.sgd(0.5),
            axis_rules=VIT_AXIS_RULES,
            strategy=strategy,
            mesh=MeshSpec(fsdp=4, tensor=2) if strategy == "fully_sharded" else MeshSpec(),
            log_every=1,
            shuffle=False,
            quiet=True,
            callbacks={"log": partial(record, losses)},
        )
        trainer.fit(IMAGES, steps=3, global_batch_size=8)
        if strategy == "fully_sharded":
            assert trainer.state is not None
            params = named_leaves(trainer.state.params)
            shards = {name: x.addressable_shards[0].data.shape for name, x in params.items()}
            assert shards["blocks/attention/qkv"] == (2, 8, 3, 1, 16)
            assert shards["blocks/mlp/up_bias"] == (2, 32)
            assert shards["positions"] == (9, 8) and shards["head/kernel"] == (8, 10)
    np.testing.assert_allclose(found["fully_sharded"], found["one_device"], rtol=1e-5)
    assert found["one_device"][0] == pytest.approx(np.log(10))  # of equally probable classes
    assert found["one_device"][2] < 2.2


def test_images_and_shapes_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="image_size 12 does not divide into patches of 5"):
        dataclasses.replace(SMALL, patch_size=5)
    with pytest.raises(UserError, match="pooling is 'cls'"):
        dataclasses.replace(SMALL, pooling="cls")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"\(12, 12, 1\), but the model takes \(12, 12, 3\)"):
        nnx.eval_shape(lambda: ViT(SMALL, rngs=nnx.Rngs(0))(jnp.zeros((2, 12, 12, 1))))
