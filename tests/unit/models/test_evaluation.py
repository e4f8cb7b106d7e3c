"""Evaluation by lm-eval's tasks: the numbers of single texts, on one and many devices."""

import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from spmdtrain import MeshSpec, Trainer, UserError
from spmdtrain.models import (
    TRANSFORMER_RULES,
    GenerationOptions,
    Transformer,
    TransformerConfig,
    generate,
)
from spmdtrain.models.evaluation import continuation_likelihoods, lm_eval_model

STOP = "e"
END = 256  # the token after those of bytes
SHAPE = TransformerConfig(
    vocabulary=257,
    rows=264,
    layers=1,
    width=32,
    heads=2,
    hidden=64,
    context=64,
    tied=False,
    dropout=0.5,
)
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_model(rngs: nnx.Rngs) -> Transformer:
    """A model whose logits are so far apart that rounding does not decide between two tokens."""
    model = Transformer(SHAPE, rngs=rngs)
    model.embedding[...] = 50 * model.embedding[...]
    return model


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model(nnx.Rngs(0))


def placed(model: Transformer, **options: Any) -> Transformer:
    """The model with its parameters where a strategy places them."""
    trainer = Trainer(
        model=model,
        objective=lambda model, batch: {"loss": model(batch).mean((1, 2))},
        optimizer=optax.sgd(0.1),
        rules=TRANSFORMER_RULES,
        **options,
    )
    found: Transformer = trainer.model
    return found


@pytest.fixture(scope="module")
def reference(model: Transformer) -> Callable[[Sequence[int]], np.ndarray]:
    """Returns the log-probabilities (tokens, vocabulary) of the token after each, in f64."""

    @nnx.jit
    def forward(tokens: jax.Array) -> jax.Array:
        evaluated = nnx.clone(model)
        evaluated.eval()  # type: ignore[no-untyped-call]
        return evaluated(tokens)

    def log_probs(tokens: Sequence[int]) -> np.ndarray:
        padded = jnp.array([[*tokens, *[0] * (SHAPE.context - len(tokens))]])
        logits = np.asarray(forward(padded), np.float64)[0, : len(tokens), :257]
        shifted = logits - logits.max(-1, keepdims=True)
        found: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return found

    return log_probs


def one_by_one(
    log_probs: Callable[[Sequence[int]], np.ndarray],
    pairs: Sequence[tuple[list[int], list[int]]],
    length: int,
) -> list[tuple[float, bool]]:
    found = []
    for context, continuation in pairs:
        text = (context + continuation)[-(length + 1) :]
        rows = log_probs(text[:-1])[-len(continuation) :]
        greedy = [int(row.argmax()) for row in rows] == continuation
        found.append((rows[np.arange(len(rows)), continuation].sum(), greedy))
    return found


def make_pairs(log_probs: Callable[[Sequence[int]], np.ndarray]) -> list[Any]:
    """Pairs of all lengths: beyond the context too, and some whose continuation is greedy."""
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (3, 7), (30, 2), (31, 2), (20, 44), (40, 25), (1, 64), (200, 3), (90, 64)]
    pairs: list[Any] = [tuple(rng.integers(0, 257, n).tolist() for n in size) for size in sizes]
    for context in ([5], rng.integers(0, 257, 50).tolist()):
        text = list(context)
        for _ in range(3):
            text.append(int(log_probs(text)[-1].argmax()))
        pairs += [(context, text[len(context) :]), (context, [*text[len(context) : -1], 7])]
    return pairs


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"strategy": "default"}, marks=pytest.mark.nightly),
        {"strategy": "fully_sharded"},
        pytest.param(
            {"strategy": "tensor_parallel", "mesh": MeshSpec(tensor=2)}, marks=pytest.mark.nightly
        ),
    ],
    ids=lambda options: options["strategy"],
)
def test_log_likelihoods_are_those_of_single_texts(
    options: Any,
    model: Transformer,
    reference: Callable[[Sequence[int]], np.ndarray],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pairs = make_pairs(reference)
    expected = one_by_one(reference, pairs, 64)
    jax.config.update("jax_log_compiles", True)
    try:
        found = continuation_likelihoods(placed(model, **options), pairs, batch_size=3)
    finally:
        jax.config.update("jax_log_compiles", False)
    np.testing.assert_allclose(
        [x.log_prob for x in found], [log_prob for log_prob, _ in expected], rtol=1e-5
    )
    assert [x.is_greedy for x in found] == [greedy for _, greedy in expected]
    assert sum(x.is_greedy for x in found) == 2
    # Of 32 and of 64 tokens.
    assert len(re.findall(r"Compiling jit\(_losses\)", caplog.text)) == 2
    assert "2 of 13 texts have more than 65 tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_a_shorter_window_cuts_contexts(
    model: Transformer, reference: Callable[[Sequence[int]], np.ndarray]
) -> None:
    pairs = [([1, 2, 3] * 20, [4, 5, 6])]
    (found,) = continuation_likelihoods(model, pairs, max_length=32)
    (expected,) = one_by_one(reference, pairs, 32)
    (whole,) = one_by_one(reference, pairs, 64)
    assert found.log_prob == pytest.approx(expected[0], rel=1e-5)
    assert found.log_prob != pytest.approx(whole[0], rel=1e-5)


@pytest.mark.slow
def test_what_cannot_be_scored(model: Transformer) -> None:
    for pairs, why in (
        ([([1], [2]), ([], [2])], "request 1: the context has no tokens"),
        ([([1], [])], "request 0: the continuation has no tokens"),
        ([([1], [2] * 65)], "the continuation has 65 tokens, and the model sees 64"),
    ):
        with pytest.raises(UserError, match=why):
            continuation_likelihoods(model, pairs)
    options: Any
    for options, why in (
        ({"max_length": 65}, "max_length is 65: the model's context is 64"),
        ({"batch_size": 0}, "batch_size is 0: it must be 1 or more"),
    ):
        with pytest.raises(UserError, match=why):
            continuation_likelihoods(model, [], **options)
    with pytest.raises(UserError, match=r"a Linear cannot be evaluated.*Give trainer\.model"):
        continuation_likelihoods(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [])  # type: ignore[arg-type]


# -- lm-eval ---------------------------------------------------------------------------------------


@pytest.fixture
def lm_eval() -> Any:
    return pytest.importorskip("lm_eval", reason="pip install 'spmdtrain[lm-eval]'")


def make_tasks(folder: Path) -> list[Any]:
    """Tasks on local files: a multiple choice, generated texts, and the likelihood of texts."""
    rows = [
        {"question": f"{n}+{n}=", "choices": [str(2 * n), "none of these", "?"], "answer": n % 3}
        for n in range(9)
    ]
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(file)},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
    }

    def task(name: str, kind: str, metric: str, **options: Any) -> dict[str, Any]:
        metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True}]
        return {"task": name, "output_type": kind, "metric_list": metrics, **data, **options}

    return [
        task(
            "choice",
            "multiple_choice",
            "acc",
            doc_to_text="{{question}}",
            doc_to_choice="{{choices}}",
            doc_to_target="answer",
            target_delimiter="",
        ),
        task(
            "written",
            "generate_until",
            "exact_match",
            doc_to_text="{{question * 8}}",
            doc_to_target="{{choices[0]}}",
            generation_kwargs={"until": ["\n", STOP], "max_gen_toks": 40, "do_sample": False},
        ),
    ]


@pytest.mark.slow
def test_tasks_with_local_data(
    lm_eval: Any,
    model: Transformer,
    reference: Callable[[Sequence[int]], np.ndarray],
    tmp_path: Path,
) -> None:
    tasks = make_tasks(tmp_path)
    (tmp_path / "choice.yaml").write_text(json.dumps(tasks[0]))  # JSON is YAML
    lm = lm_eval_model(model, "bytes", end_of_text=END, batch_size=16)
    tasks_module = importlib.import_module("lm_eval.tasks")
    manager = tasks_module.TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=lm, tasks=["choice", tasks[1]], task_manager=manager, bootstrap_iters=0
    )
    right = []
    for sample in found["samples"]["choice"]:
        question, choices = sample["doc"]["question"], sample["doc"]["choices"]
        pairs = [([*question.encode()], [*choice.encode()]) for choice in choices]
        expected = one_by_one(reference, pairs, 64)
        said = [log_prob for ((log_prob, _),) in sample["resps"]]
        np.testing.assert_allclose(said, [log_prob for log_prob, _ in expected], rtol=1e-5)
        right.append(int(np.argmax([x[0] for x in expected])) == sample["doc"]["answer"])
    assert found["results"]["choice"]["acc,none"] == pytest.approx(np.mean(right))
    assert 0 < np.mean(right) < 1
    written = found["samples"]["written"]
    prompts = [[*(sample["doc"]["question"] * 8).encode()][-(64 - 40) :] for sample in written]
    options = GenerationOptions(max_new_tokens=40, temperature=0.0, stop_tokens=(END,))
    whole = [decode(tokens) for tokens in generate(model, prompts, options)]
    cut = [re.split(rf"\n|{STOP}", text)[0] for text in whole]
    assert [sample["resps"] for sample in written] == [[[text]] for text in cut]
    assert 0 < sum(text in whole for text in cut) < len(cut)


def decode(tokens: np.ndarray) -> str:
    return bytes(token for token in tokens if token < END).decode("utf-8", "replace")


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.mark.slow
def test_texts_without_a_context_and_long_texts(
    lm_eval: Any, model: Transformer, reference: Callable[[Sequence[int]], np.ndarray]
) -> None:
    lm = lm_eval_model(model, "bytes", end_of_text=END)
    assert isinstance(lm, lm_eval.api.model.LM)
    pairs = [([END], [*b"ab"]), ([*b"a"], [*b" b"]), ([END], [*b" a"])]
    said = lm.loglikelihood(requests(("", "ab"), ("a ", "b"), (" ", "a")))
    expected = [log_prob for log_prob, _ in one_by_one(reference, pairs, 64)]
    np.testing.assert_allclose([log_prob for log_prob, _ in said], expected, rtol=1e-5)

    # The first 64 tokens follow `END`, and the others as many as fit.
    text = "".join(map(chr, range(32, 127)))
    tokens = [END, *text.encode()]
    windows = [(tokens[:1], tokens[1:65]), (tokens[31:65], tokens[65:])]
    whole = sum(log_prob for log_prob, _ in one_by_one(reference, windows, 64))
    (total, nothing) = lm.loglikelihood_rolling(requests((text,), ("",)))
    assert (total, nothing) == (pytest.approx(whole, rel=1e-5), 0.0)

    begins = lm_eval_model(model, "bytes", end_of_text=END, begin_of_text=7)
    pairs = [([7, *b"a"], [*b"b"]), ([7], [*b"a"])]
    said = begins.loglikelihood(requests(("a", "b"), ("", "a")))
    expected = [log_prob for log_prob, _ in one_by_one(reference, pairs, 64)]
    np.testing.assert_allclose([log_prob for log_prob, _ in said], expected, rtol=1e-5)
    with pytest.raises(UserError, match="request 0: the continuation is an empty text"):
        lm.loglikelihood(requests(("a", "")))


@pytest.mark.nightly
def test_texts_that_are_drawn(lm_eval: Any, model: Transformer) -> None:
    lm = lm_eval_model(model, "bytes", end_of_text=END, batch_size=2, seed=3)
    how = {"max_gen_toks": 8, "temperature": 2.0, "top_k": 40, "top_p": 0.9}
    drawn = lm.generate_until(requests(("ab", how), ("ab", how), ("", {"max_tokens": 4})))
    options = GenerationOptions(
        max_new_tokens=8, temperature=2.0, top_k=40, top_p=0.9, stop_tokens=(END,), seed=3
    )
    texts = generate(model, [[*b"ab"], [*b"ab"]], options)
    options = GenerationOptions(max_new_tokens=4, temperature=0.0, stop_tokens=(END,))
    assert drawn == [*map(decode, texts), *map(decode, generate(model, [[END]], options))]
    assert drawn[0] != drawn[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"repetition_penalty": 1.1},
            r"repetition_penalty=1\.1 in generation_kwargs, which is not",
        ),
        ({"num_beams": 4}, "num_beams=4"),
        ({"untill": ["a"]}, "Did you mean 'until'"),
        ({"until": [5]}, r"until=\[5\] in generation_kwargs: give texts"),
        ({}, "max_gen_toks is 256: it must be below .* sees, 64"),
        ({"max_gen_toks": 8, "temperature": -1.0, "do_sample": True}, "temperature is -1.0"),
    ],
)
def test_options_of_generation_that_are_refused(
    given: Any, why: str, lm_eval: Any, model: Transformer
) -> None:
    lm = lm_eval_model(model, "bytes", end_of_text=END)
    with pytest.raises(UserError, match=why):
        lm.generate_until(requests(("a", given)))


@pytest.mark.slow
def test_chat_templates(lm_eval: Any, model: Transformer, tmp_path: Path) -> None:
    lm = lm_eval_model(model, "bytes", end_of_text=END, template=TEMPLATE)
    talk = [{"role": "user", "content": "3+4?"}]
    assert lm.apply_chat_template(talk) == "<user>3+4?\n<assistant>"
    begun = [*talk, {"role": "assistant", "content": "It is "}]
    text = lm.apply_chat_template(begun, add_generation_prompt=False)
    assert text == "<user>3+4?\n<assistant>It is"
    assert lm.chat_template(True) == TEMPLATE and TEMPLATE in lm.tokenizer_name
    without = lm_eval_model(model, "bytes", end_of_text=END)
    with pytest.raises(UserError, match="template is missing, and the tokenizer 'bytes' has none"):
        without.apply_chat_template(talk)


@pytest.mark.slow
def test_arguments_that_do_not_fit(model: Transformer) -> None:
    for options, why in (
        ({"end_of_text": 257}, "end_of_text is '257', which is no token: .* from 0 to 256"),
        ({"end_of_text": "</s>"}, "end_of_text is '</s>', which is no token"),
        ({"end_of_text": True}, "end_of_text is True: give the name or the number of a token"),
        ({"end_of_text": 0, "begin_of_text": -1}, "begin_of_text is '-1'"),
        ({"end_of_text": 0, "max_length": 65}, "max_length is 65"),
        ({"end_of_text": 0, "batch_size": 0}, "batch_size is 0"),
        ({"end_of_text": 0, "seed": 0.5}, "seed is 0.5"),
    ):
        with pytest.raises(UserError, match=why):
            lm_eval_model(model, "bytes", **options)
    small = Transformer(dataclasses.replace(SHAPE, vocabulary=100), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="the tokenizer has 256 tokens, and the model 100"):
        lm_eval_model(small, "bytes", end_of_text=0)
