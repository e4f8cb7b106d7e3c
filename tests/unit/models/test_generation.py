"""Generation with a cache: the text of the whole-window loop, for each prompt on its own."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import assume, given
from hypothesis import strategies as st

from spmdtrain import MeshSpec, Trainer, UserError
from spmdtrain.models import (
    TRANSFORMER_RULES,
    GenerationOptions,
    Llama,
    LlamaConfig,
    NewTokens,
    Transformer,
    TransformerConfig,
    completion_log_probs,
    generate,
    in_order,
    stream,
)
from spmdtrain.models.generation import filter_logits
from spmdtrain.sharding.placement import use_placement

SMALL = TransformerConfig(
    vocabulary=50, rows=64, layers=2, width=32, heads=2, hidden=64, context=16, unroll=True
)
PROMPTS = ([3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9], [7, 9, 3, 2, 3, 8, 4, 6, 2])


def sharp(*, rngs: nnx.Rngs, **changes: Any) -> Transformer:
    """A model whose texts do not repeat, and whose logits are so far apart that rounding does not
    decide which token is the most probable."""
    model = Transformer(dataclasses.replace(SMALL, tied=False, **changes), rngs=rngs)
    model.embedding[...] = 50 * model.embedding[...]
    model.eval()  # type: ignore[no-untyped-call]
    return model


@functools.cache
def small(**changes: Any) -> Transformer:
    return sharp(rngs=nnx.Rngs(0), **changes)


@nnx.jit
def forward(model: Transformer, tokens: jax.Array) -> jax.Array:
    return model(tokens)


def whole_window(
    model: Transformer, prompts: Sequence[Sequence[int]], count: int, slide: int = 1
) -> list[list[int]]:
    """The reference: it computes all of the window for each token."""
    context, texts = model.config.context, [list(prompt) for prompt in prompts]
    for _ in range(count):
        seen = [text[-(-max(0, len(text) - context) // slide) * slide :] for text in texts]
        tokens = jnp.array([row + [0] * (context - len(row)) for row in seen])
        logits = np.asarray(forward(model, tokens))
        for row, text in enumerate(texts):
            text.append(int(logits[row, len(seen[row]) - 1].argmax()))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def lists(texts: list[np.ndarray]) -> list[list[int]]:
    return [text.tolist() for text in texts]


filtered = jax.jit(filter_logits, static_argnums=1)


def greedy(count: int, **options: Any) -> GenerationOptions:
    return GenerationOptions(max_new_tokens=count, temperature=0.0, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.nightly, id="rotary"),
        pytest.param({"unroll": False, "positions": "learned"}, id="learned, a loop"),
    ],
)
def test_prompts_of_unequal_length_get_the_text_of_the_whole_window(changes: Any) -> None:
    model, prompts = small(**changes), [*PROMPTS, list(range(40))]
    texts = lists(generate(model, prompts, greedy(24, slide=5)))
    assert texts == whole_window(model, prompts, 24, slide=5)  # beyond the context, too
    assert min(len(set(text)) for text in texts) > 4


@pytest.mark.nightly
def test_a_prompt_alone_has_the_same_text_and_a_slide_of_one_the_last_tokens() -> None:
    model = small()
    alone = lists(generate(model, PROMPTS[:1], greedy(40, slide=1)))
    assert alone == whole_window(model, PROMPTS[:1], 40)
    together = lists(generate(model, PROMPTS, greedy(40)))
    assert alone[0][:13] == together[0][:13] and alone[0] != together[0]
    assert lists(generate(model, PROMPTS[:1], greedy(40))) == together[:1]


@pytest.mark.nightly
def test_draws_do_not_depend_on_the_other_prompts_or_on_where_a_text_was_interrupted() -> None:
    model = small()
    options = GenerationOptions(max_new_tokens=30, temperature=3.0, top_k=20, top_p=0.9, seed=4)
    texts = generate(model, PROMPTS, options)
    in_batches = generate(model, PROMPTS, dataclasses.replace(options, batch_size=2))
    assert lists(in_batches) == lists(texts)
    alone = generate(model, PROMPTS[:1], options)[0]
    assert alone.tolist() == texts[0].tolist()
    rest = generate(
        model, [[*PROMPTS[0], *alone[:11]]], dataclasses.replace(options, max_new_tokens=19)
    )
    assert rest[0].tolist() == alone[11:].tolist()
    same_prompt = generate(model, [[1]] * 3, options)
    assert len({tuple(x) for x in same_prompt}) == 3
    other_seed = generate(model, PROMPTS[:1], dataclasses.replace(options, seed=5))
    assert other_seed[0].tolist() != alone.tolist()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_stop_token_ends_its_row_alone() -> None:
    model = small()
    whole = lists(generate(model, PROMPTS, greedy(40)))
    stop = next(token for token in whole[0] if any(token not in text for text in whole))
    texts = lists(generate(model, PROMPTS, greedy(40, stop_tokens=[stop])))
    ends = [text.index(stop) + 1 if stop in text else 40 for text in whole]
    assert texts == [text[:end] for text, end in zip(whole, ends, strict=True)]
    assert ends[0] < 40 and 40 in ends


@pytest.mark.nightly
def test_a_function_of_the_new_tokens_ends_its_row_alone() -> None:
    whole, other = lists(generate(small(), PROMPTS[:2], greedy(100)))
    seen: list[list[int]] = []

    def stops(added: np.ndarray) -> bool:
        seen.append(added.tolist())
        return added.tolist() == whole[: len(added)] and len(added) > 32

    short, full = lists(generate(small(), PROMPTS[:2], greedy(100, stop_when=stops)))
    assert full == other and short == whole[: len(short)] and 32 < len(short) <= 64
    assert short in seen and not any(text == whole for text in seen)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_text_arrives_in_pieces_and_row_by_row() -> None:
    pieces = list(stream(small(), PROMPTS[:2], greedy(70)))
    assert all(len(piece.tokens) <= 32 for piece in pieces)
    rows = [piece.row for piece in pieces]
    assert rows != sorted(rows)  # they grow together
    ordered = list(in_order(pieces))
    assert [piece.row for piece in ordered] == sorted(rows)
    assert [piece.finished for piece in ordered].count(True) == 2 and ordered[-1].finished
    assert sum(len(piece.tokens) for piece in ordered) == 140


def test_a_row_is_not_held_back_longer_than_the_row_before_it() -> None:
    taken: list[int] = []

    def pieces() -> Any:
        for number, (row, finished) in enumerate([(0, False), (1, True), (0, True), (2, True)]):
            taken.append(number)
            yield NewTokens(row, np.array([number]), finished, np.zeros(1, np.float32))

    found = [(piece.row, int(piece.tokens[0]), len(taken)) for piece in in_order(pieces())]
    assert found == [(0, 0, 1), (0, 2, 3), (1, 1, 3), (2, 3, 4)]


# Loads the model on the devices that a strategy names; 5 rows do not divide over 8 devices.
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"strategy": "one_device"}, marks=pytest.mark.nightly),
        pytest.param({"strategy": "mirrored"}, marks=pytest.mark.nightly),
        {"strategy": "fully_sharded"},
        pytest.param(
            {"strategy": "tensor_parallel", "mesh": {"tensor": 2}}, marks=pytest.mark.nightly
        ),
    ],
    ids=lambda options: options["strategy"],
)
def test_every_strategy_writes_the_same(options: Any) -> None:
    if mesh := options.get("mesh"):
        options = options | {"mesh": MeshSpec(**mesh)}
    trainer = Trainer(
        model=sharp,
        objective=lambda model, batch: {"loss": model(batch).mean((1, 2))},
        optimizer=optax.sgd(0.1),
        rules=TRANSFORMER_RULES,
        seed=1,
        **options,
    )
    model = trainer.model
    texts = generate(model, PROMPTS, greedy(30, slide=5))
    on_one = sharp(rngs=nnx.Rngs(0))
    nnx.update(on_one, jax.tree.map(np.asarray, nnx.state(model, nnx.Param)))
    assert lists(texts) == whole_window(on_one, PROMPTS, 30, slide=5)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_cache_is_split_and_never_gathered() -> None:
    trainer = Trainer(
        model=sharp,
        objective=lambda model, batch: {"loss": model(batch).mean((1, 2))},
        optimizer=optax.sgd(0.1),
        rules=TRANSFORMER_RULES,
        strategy="tensor_parallel",
        mesh=MeshSpec(tensor=2),
    )
    graph, values = nnx.split(trainer.model)

    def extend(values: Any, tokens: jax.Array) -> Any:
        model = nnx.merge(graph, values)
        cache = model.empty_cache(len(tokens), 16)
        return model.extend(model.layers(), tokens, cache, jnp.full(len(tokens), 3))[1]

    with use_placement(trainer.placement):
        compiled = jax.jit(extend).lower(values, jnp.zeros((8, 1), jnp.int32)).compile()
    assert "all-gather" not in (compiled.as_text() or "all-gather")
    cache = compiled(values, jnp.zeros((8, 1), jnp.int32))
    # 8 rows over 4 devices, 2 heads over 2.
    assert {x.addressable_shards[0].data.shape for x in jax.tree.leaves(cache)} == {(2, 1, 16, 16)}


@pytest.mark.slow
@given(
    logits=st.lists(
        st.integers(-2, 2).map(float) | st.floats(-9, 9, width=32, allow_subnormal=False),
        min_size=8,
        max_size=8,
    ),
    top_k=st.sampled_from([None, 1, 3, 7, 9]),
    top_p=st.none() | st.floats(0.01, 1, exclude_max=True),
)
def test_top_k_and_top_p_keep_the_tokens_of_their_definition(
    logits: list[float], top_k: int | None, top_p: float | None
) -> None:
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    if top_p is not None:
        weights = np.exp(np.array([logits[token] for token in order], np.float64))
        sums = np.cumsum(weights / weights.sum())
        assume((np.abs(sums - top_p) > 1e-5).all())  # rounding decides
        order = order[: int(np.argmax(sums >= top_p)) + 1]
    expected = np.full(len(logits), -np.inf, np.float32)
    expected[order] = np.array(logits, np.float32)[order]
    np.testing.assert_array_equal(filtered(jnp.array(logits), top_k, top_p), expected)


@pytest.mark.nightly
def test_draws_have_the_filtered_probabilities() -> None:
    model = small(layers=1)
    options = GenerationOptions(max_new_tokens=1, temperature=4.0, top_k=5)
    drawn = np.concatenate(generate(model, [[3]] * 4000, options))
    logits = np.asarray(model(jnp.array([[3]]))[0, 0], np.float64) / 4
    top = np.argsort(-logits)[:5]
    expected = np.exp(logits[top]) / np.exp(logits[top]).sum()
    assert set(drawn) == set(top)
    np.testing.assert_allclose([(drawn == x).mean() for x in top], expected, atol=0.03)


@pytest.mark.nightly
@pytest.mark.slow
def test_lower_precision_is_a_choice() -> None:
    texts = generate(small(), PROMPTS[:1], greedy(5, dtype="bfloat16"))
    graph, values = nnx.split(small())
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, values)
    assert lists(texts) == whole_window(nnx.merge(graph, cast), PROMPTS[:1], 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"temperature": -0.5}, "temperature is -0.5: it must be 0, or 1e-30 or more"),
        ({"temperature": 1e-40}, "temperature is 1e-40"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0: it must be above 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": 0}, "top_k is 0: it must be 1 or more"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"slide": 17}, "slide is 17: it must be at most the context, 16"),
        ({"stop_tokens": (50,)}, "stop token 50: tokens are integers from 0 to 49"),
        ({"stop_tokens": [0.5]}, "stop token 0.5: tokens are integers"),
        ({"stop_tokens": 0}, "stop_tokens is 0: give a tuple"),
        ({"max_new_tokens": 3.0}, "max_new_tokens is 3.0: it must be 1 or more, an integer"),
        ({"stop_when": "end"}, "stop_when is 'end': give a function"),
        ({"seed": 0.5}, "seed is 0.5: it must be an integer"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"temperature": "hot"}, "temperature is 'hot': it must be a number"),
    ],
)
def test_options_that_make_no_sense(changes: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        stream(small(), [[1]], GenerationOptions(**{"max_new_tokens": 3, **changes}))
    with pytest.raises(UserError, match="options is 20: give GenerationOptions"):
        stream(small(), [[1]], 20)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([], "prompt 1 is empty"),
        ([3, 50], "prompt 1 has the token 50: tokens are from 0 to 49"),
        ([-1], "prompt 1 has the token -1"),
        ([[1, 2]], r"prompt 1 is int64 of shape \(1, 2\)"),
        ([0.5], "prompt 1 is float64"),
    ],
)
def test_prompts_that_cannot_be_continued(prompt: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        generate(small(), [[1], prompt], greedy(3))
    with pytest.raises(UserError, match="a Linear cannot generate"):
        generate(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [[1]], greedy(3))  # type: ignore[arg-type]


# -- log-probabilities -----------------------------------------------------------------------------


LLAMA = LlamaConfig(
    vocabulary=11, layers=1, width=16, heads=4, kv_heads=2, hidden=24, context=32, unroll=False
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformer", pytest.param("llama", marks=pytest.mark.nightly)])
def test_log_probabilities_of_training_are_those_of_generation_to_the_bit(kind: str) -> None:
    model: Any = small(layers=1) if kind == "transformer" else Llama(LLAMA, rngs=nnx.Rngs(0))
    count, longest = 6, max(map(len, PROMPTS))
    options = GenerationOptions(max_new_tokens=count, stop_tokens=(2,), temperature=1.5)
    tokens = np.zeros((len(PROMPTS), count), np.int32)
    said = np.full((len(PROMPTS), count), np.nan, np.float32)
    for piece in stream(model, PROMPTS, options):
        assert piece.log_probs.dtype == np.float32
        tokens[piece.row, : len(piece.tokens)] = piece.tokens
        said[piece.row, : len(piece.tokens)] = piece.log_probs
    is_token = ~np.isnan(said)
    prompts = jnp.array(
        [[*prompt, *[0] * (longest - len(prompt))] for prompt in PROMPTS], jnp.int32
    )
    lengths = jnp.array([*map(len, PROMPTS)], jnp.int32)
    graph, *states = nnx.split(model, nnx.Param, ...)
    params, others = states

    @jax.jit
    def trained(params: Any) -> Any:
        def loss(params: Any) -> Any:
            found = completion_log_probs(
                nnx.merge(graph, params, others), prompts, lengths, jnp.asarray(tokens)
            )
            return jnp.where(is_token, found, 0).sum(), found

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, found), gradients = trained(params)
    np.testing.assert_array_equal(np.asarray(found)[is_token], said[is_token])
    texts = np.zeros((len(PROMPTS), longest + count), np.int32)
    for row, prompt in enumerate(PROMPTS):
        texts[row, : len(prompt) + count] = [*prompt, *tokens[row]]

    @jax.jit
    def by_whole_texts(params: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = nnx.merge(graph, params, others)(texts)[..., : model.config.vocabulary]
            at = lengths[:, None] - 1 + np.arange(count)
            logits = jnp.take_along_axis(logits, at[..., None], axis=1)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=2)
            return jnp.where(is_token, chosen[..., 0], 0).sum(), chosen[..., 0]

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, expected), expected_gradients = by_whole_texts(params)
    np.testing.assert_allclose(said[is_token], np.asarray(expected)[is_token], rtol=1e-4, atol=1e-5)
    for one, other in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * float(jnp.abs(other).max()))


@pytest.mark.slow
def test_completions_beyond_the_context_are_refused() -> None:
    model = small()
    prompts, completions = jnp.zeros((2, 10), jnp.int32), jnp.zeros((2, 8), jnp.int32)
    with pytest.raises(UserError, match="need a context of 17, but the model's is 16"):
        completion_log_probs(model, prompts, jnp.full(2, 10), completions)
