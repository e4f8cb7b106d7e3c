"""Tokens per second of generation with a cache, relative to a loop over the whole window.

    python benchmarks/generation.py [TOKENS [CONTEXT]]

The model has the shape of experiments/shakespeare_gpt.py and random parameters; it continues four
prompts of unequal length by 300 tokens at temperature 0. The loop computes the logits of the whole
window for each token, in one compiled program. Compilation is not measured. By default the context
is 320, so that all text fits; both then write the same text, which is checked. In a smaller context
the window moves by half its length if there is a cache, and by one token in the loop.

The times of a run take turns. Each ratio is of two neighboring times; compare the ratios.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spmdtrain.models import GenerationOptions, Transformer, TransformerConfig, generate

REPEATS = 3
PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12])


def make(context: int) -> Transformer:
    """Returns a model whose most probable tokens do not depend on rounding."""
    config = TransformerConfig(
        vocabulary=65,
        rows=128,
        layers=4,
        width=160,
        heads=4,
        hidden=640,
        context=context,
        tied=False,
        unroll=True,
    )
    model = Transformer(config, rngs=nnx.Rngs(0))
    model.embedding[...] = 50 * model.embedding[...]
    model.eval()  # type: ignore[no-untyped-call]
    return model


def whole_window(model: Transformer, prompts: Sequence[Sequence[int]], count: int) -> np.ndarray:
    """Returns the new tokens (B, `count`), by a loop without a cache."""
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    text = np.zeros((len(prompts), length.max() + count), np.int32)
    for row, prompt in enumerate(prompts):
        text[row, : len(prompt)] = prompt
    written = np.asarray(_continue(model, jnp.asarray(text), jnp.asarray(length), count))
    return np.array([written[row, n : n + count] for row, n in enumerate(length)])


@nnx.jit(static_argnums=3)
def _continue(model: Transformer, text: jax.Array, length: jax.Array, count: int) -> jax.Array:
    window = min(model.config.context, text.shape[1])

    def add(index: jax.Array, text: jax.Array) -> jax.Array:
        end = length + index
        start = jnp.maximum(end - window, 0)
        # The zeros after the end have no effect, because attention is causal.
        positions = start[:, None] + jnp.arange(window)
        logits = model(jnp.take_along_axis(text, positions, axis=1))
        last = jnp.take_along_axis(logits, (end - 1 - start)[:, None, None], axis=1)[:, 0]
        drawn = last.argmax(-1).astype(jnp.int32)
        return jnp.where(jnp.arange(text.shape[1]) == end[:, None], drawn[:, None], text)

    return jax.lax.fori_loop(0, count, add, text)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    count, context = (*map(int, sys.argv[1:]), *(300, 320)[len(sys.argv) - 1 :])
    model = make(context)
    options = GenerationOptions(max_new_tokens=count, temperature=0.0)
    cached = np.array(generate(model, PROMPTS, options))
    whole = whole_window(model, PROMPTS, count)
    if max(map(len, PROMPTS)) + count <= context + 1:
        np.testing.assert_array_equal(cached, whole)
        print(f"the same text, {len(np.unique(whole))} different tokens in it")
    ratios = []
    for _ in range(REPEATS):
        with_cache = seconds(lambda: generate(model, PROMPTS, options))
        without = seconds(lambda: whole_window(model, PROMPTS, count))
        ratios.append(without / with_cache)
        speeds = (len(PROMPTS) * count / x for x in (with_cache, without))
        print("{:,.0f} tokens/s with a cache, {:,.0f} without".format(*speeds))
    print(f"ratio {statistics.median(ratios):.1f}, from {min(ratios):.1f} to {max(ratios):.1f}")


if __name__ == "__main__":
    main()
