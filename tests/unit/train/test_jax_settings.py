"""Settings of JAX under which implicit conversions have other dtypes, or are errors.

The package's own arithmetic is the same under each of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from spmdtrain import MeshSpec, ShardingOptions, SumMetric, Trainer, confusion_counts, roc_auc
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import (
    GenerationOptions,
    Llama,
    LlamaConfig,
    RoutedExperts,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
    generate,
)
from spmdtrain.tree import named_leaves

SETTINGS = {
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
LABELS = RNG.integers(0, 2, 16).astype(np.int32)
TOKENS = RNG.integers(0, 32, (8, 9)).astype(np.int32)
IMAGES = RNG.normal(size=(8, 4, 4, 3)).astype(np.float32)
SIZES: Any = {"vocabulary": 32, "layers": 1, "width": 16, "heads": 2, "hidden": 16, "context": 8}


@contextmanager
def settings(values: dict[str, Any]) -> Iterator[None]:
    """Of all threads, as environment variables set them."""
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


class Classifier(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.norm(self.first(x))))


def classification(model: Any, batch: Any) -> Any:
    logits = model(batch[0])
    return {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])}


def with_metrics(model: Any, batch: Any) -> Any:
    logits, labels = model(batch[0]), batch[1]
    found = logits.argmax(-1).astype(jnp.int32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    auc = roc_auc(labels == 1, nnx.sigmoid(logits[:, 1] - logits[:, 0]))
    counts = SumMetric(confusion_counts(labels, found, 2), lambda x: float(x[0, 1] + x[1, 0]))
    return {"loss": (loss, labels + 1), "hits": found == labels, "auc": auc, "errors": counts}


def language(model: Any, tokens: Any) -> Any:
    return {"loss": model.losses(model.hidden(tokens[:, :-1]), tokens[:, 1:]).loss}


def routed(model: Any, tokens: Any) -> Any:
    hidden, routing = model.hidden_and_routing(tokens[:, :-1])
    loss = model.losses(hidden, tokens[:, 1:]).loss
    return {"loss": loss + routing.balance[:, None]}


def llama(**options: Any) -> Llama:
    return Llama(LlamaConfig(**SIZES, kv_heads=1, **options), rngs=nnx.Rngs(0))


def gpt2() -> Transformer:
    config = TransformerConfig(**SIZES, rows=32, blocks="gpt2", positions="learned")
    return Transformer(config, rngs=nnx.Rngs(0))


def vit() -> ViT:
    sizes: Any = {name: SIZES[name] for name in ("layers", "width", "heads", "hidden")}
    return ViT(ViTConfig(classes=2, image_size=4, patch_size=2, **sizes), rngs=nnx.Rngs(0))


CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "metrics and an average": (Classifier, with_metrics, (X, LABELS), {"ema_decay": 0.9}),
    "exact and split": (
        *(Classifier, classification, (X, LABELS)),
        {
            "global_batch_size": 16,
            "exact": 16,
            "strategy": "zero",
            "sharding": ShardingOptions(min_size=1),
        },
    ),
    "microbatches, padded": (
        *(Classifier, classification, (X[:15], LABELS[:15])),
        {"microbatches": 2, "eval_batch_size": 6},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_under_strict_settings_of_jax(case: str) -> None:
    make, objective, data, options = CASES[case]
    two: dict[str, Any] = {"mesh": MeshSpec(devices=(0, 1)), "global_batch_size": 8}

    def trained() -> tuple[Any, dict[str, Any]]:
        trainer = Trainer(
            model=make(),
            objective=objective,
            # optax.adam and clipping rely on implicit conversions themselves
            optimizer=optax.sgd(0.1, momentum=0.9),
            terminal=Terminal(quiet=True),
            **two | options,
        )
        result = trainer.fit(data, steps=2, validation=data)
        assert trainer.state is not None
        return result.validation, named_leaves(trainer.state.params)

    expected, params = trained()
    with settings(SETTINGS):
        found, under = trained()
    assert {x.dtype for x in under.values()} == {jnp.dtype(jnp.float32)}
    assert found == pytest.approx(expected, rel=1e-5)
    for name, x in under.items():
        np.testing.assert_allclose(x, params[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "objective", "batch"),
    [
        (llama, language, TOKENS),
        (lambda: llama(experts=RoutedExperts(count=2, top_k=1)), routed, TOKENS),
        (gpt2, language, TOKENS),
        (vit, classification, (IMAGES, LABELS[:8])),
    ],
    ids=["Llama", "experts", "GPT-2", "ViT"],
)
def test_shipped_models_have_gradients_of_32_bits_under_strict_settings_of_jax(
    make: Any, objective: Any, batch: Any
) -> None:
    def gradients(batch: Any) -> Any:
        return nnx.grad(lambda model: objective(model, batch)["loss"].mean())(make())

    with settings(SETTINGS):
        found = jax.eval_shape(gradients, batch)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("make", [pytest.param(llama, marks=pytest.mark.nightly), gpt2])
def test_generated_tokens_are_the_same_under_strict_settings_of_jax(make: Any) -> None:
    options = GenerationOptions(max_new_tokens=4, temperature=0.8, top_p=0.9)
    expected = generate(make(), [np.array([1, 2])], options)[0]
    with settings(SETTINGS):
        found = generate(make(), [np.array([1, 2])], options)[0]
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)
