"""The experiment shakespeare_gpt: its text as examples, its shapes, and what it writes."""

import dataclasses
import functools
import math
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    BOUND,
    GPT,
    REPOSITORY,
    TEXT,
    command,
    environment,
    metrics,
    run,
    text_in,
    together,
)
from hypothesis import given
from hypothesis import strategies as st
from matrix import ROWS, Row

from spmdtrain import Trainer, UserError
from spmdtrain.config.command_line import parse_command_line
from spmdtrain.config.experiment import load_experiment
from spmdtrain.config.options import ShardingOptions
from spmdtrain.models import Transformer
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import Placement, make_placement
from spmdtrain.tree import named_leaves

DATA = Path(os.environ.get("SPMDTRAIN_DATA", REPOSITORY.parent / "shared" / "data"))

gpt: ModuleType = load_experiment(str(GPT), frozenset()).module


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return text_in(tmp_path)


@pytest.fixture
def shakespeare() -> Path:
    """The folder of the real text; skips where it is absent."""
    folder = DATA / "tinyshakespeare"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is absent (SPMDTRAIN_DATA says where it is)")
    return folder


def config(preset: str | None = None, **changes: Any) -> Any:
    return dataclasses.replace(gpt.PRESETS[preset] if preset else gpt.Config(), **changes)


# -- examples --------------------------------------------------------------------------------------


@given(length=st.integers(2, 200), context=st.integers(1, 40))
def test_side_by_side_windows_predict_each_token_but_the_first_once(
    length: int, context: int
) -> None:
    text = np.arange(1000, 1000 + length)
    windows = gpt.Windows(text, context, stride=context)
    rows = windows.rows(np.arange(len(windows)))
    assert rows["tokens"].shape == (len(windows), context + 1)
    counted = rows["weights"] == 1
    assert (counted | (rows["weights"] == 0)).all()
    np.testing.assert_array_equal(rows["tokens"][:, 1:][counted], text[1:])
    np.testing.assert_array_equal(rows["tokens"][:, :-1][counted], text[:-1])
    assert counted.any(axis=1).all()  # no window is for nothing


@given(length=st.integers(2, 60), context=st.integers(1, 40))
def test_training_windows_begin_at_every_place_and_are_full(length: int, context: int) -> None:
    if length <= context:
        return
    text = np.arange(length)
    windows = gpt.Windows(text, context, stride=1)
    rows = windows.rows(np.arange(len(windows)))
    np.testing.assert_array_equal(rows["tokens"][:, 0], np.arange(length - context))
    assert (np.diff(rows["tokens"], axis=1) == 1).all() and rows["weights"].all()
    assert rows["tokens"][-1, -1] == length - 1


def test_the_last_tenth_validates() -> None:
    train, validation = gpt.split(np.arange(1005), 10)
    assert train.rows(np.array([len(train) - 1]))["tokens"][0, -1] == 903
    assert validation.rows(np.array([0]))["tokens"][0, 0] == 904
    with pytest.raises(UserError, match="30 tokens"):
        gpt.split(np.arange(30), 27)


def test_characters_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes("Grüße, 🐦\r\n".encode())
    folder = str(tmp_path)
    characters, tokens = gpt.load_text(config(data_dir=folder))
    assert len(characters) == 10 and characters.decoder()(tokens) == "Grüße, 🐦\r\n"
    assert sorted(tokens) == list(range(10))
    np.testing.assert_array_equal(characters.encode("ü🐦", "prompt"), tokens[[2, 7]])
    octets, bytes_ = gpt.load_text(config(data_dir=folder, vocabulary="bytes"))
    assert len(octets) == 256 and bytes(bytes_.tolist()).decode() == "Grüße, 🐦\r\n"
    encoded, decode = octets.encode("ü🐦", "prompt"), octets.decoder()
    assert [decode(encoded[:3]), decode(encoded[3:])] == ["ü", "🐦"]
    assert [decode(encoded[:1]), decode(encoded[:0], final=True)] == ["", "\ufffd"]

    with pytest.raises(UserError, match="'x', 'é'"):
        characters.encode("Gréxßx", "prompt")
    (tmp_path / "input.txt").write_bytes(b"\xff\xfe" * 9)
    with pytest.raises(UserError, match=r"UTF-8.*--vocabulary bytes"):
        gpt.load_text(config(data_dir=folder))
    gpt.load_text(config(data_dir=folder, vocabulary="bytes"))


@pytest.mark.nightly
def test_without_the_text_it_says_where_to_get_it(tmp_path: Path) -> None:
    no_folder, no_file = together(
        lambda: run(GPT, cwd=tmp_path),
        lambda: run(GPT, "--data-dir", tmp_path, cwd=tmp_path),
    )
    for result, why in ((no_folder, "needs --data-dir"), (no_file, f"{tmp_path}: holds no input")):
        assert result.returncode == 2, result.stderr
        assert why in result.stderr and "Traceback" not in result.stderr
        assert "karpathy/char-rnn/master/data/tinyshakespeare/input.txt" in result.stderr


def test_the_real_text(shakespeare: Path) -> None:
    vocabulary, tokens = gpt.load_text(config(data_dir=str(shakespeare)))
    assert len(vocabulary) == 65 and len(tokens) == 1_115_394
    train, validation = gpt.split(tokens, 96)
    assert len(train) == 1_003_854 - 96
    assert validation.rows(np.arange(len(validation)))["weights"].sum() == 111_540 - 1


# -- shapes ----------------------------------------------------------------------------------------


def count(preset: str | None) -> int:
    shape = gpt.shape(config(preset), 65)
    model = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0)))
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [
        ("gpt2-small", 124.3e6, 124.5e6),
        ("gpt2-medium", 354.5e6, 355.5e6),
        ("1.3b", 1.30e9, 1.32e9),
        (None, 1.0e6, 1.6e6),
    ],
)
def test_presets_have_the_parameters_they_are_known_for(
    preset: str | None, low: float, high: float
) -> None:
    assert low < count(preset) < high


@pytest.mark.parametrize("preset", [None, *gpt.PRESETS])
def test_dims_divide_over_the_default_meshes(preset: str | None) -> None:
    shape = gpt.shape(config(preset), 65)
    for name in ("rows", "width", "hidden"):
        assert getattr(shape, name) % 16 == 0, name  # 8 along fsdp and 2 along tensor
    assert shape.heads % 2 == 0
    size = config(preset).global_batch_size
    assert size is None or size % 8 == 0  # without it, each device has its own examples


@functools.cache
def placed(row: Row) -> tuple[Placement, ShardingOptions]:
    """What a row of the matrix of strategies asks for."""
    given = parse_command_line(["--config", str(GPT), *row.arguments]).config
    return make_placement(given), given.sharding


@pytest.mark.parametrize("preset", [None, *gpt.PRESETS])
def test_every_preset_has_a_place_under_every_strategy(preset: str | None, text: Path) -> None:
    of = config(preset, data_dir=str(text))
    experiment = gpt.build(of)
    state = Trainer.from_experiment(
        experiment, of
    ).functions.abstract_state  # shapes, and no arrays
    large = {name: x.shape for name, x in named_leaves(state).items() if x.size >= 2**20}
    count = {None: 0, "tiny": 0, "gpt2-small": 5, "gpt2-medium": 6, "1.3b": 5}[preset]
    assert len(large) == 3 * count  # parameters and two moments of each
    for row in ROWS:
        placement, options = placed(row)
        layout = Layout(state, placement, experiment.rules, options)
        places = named_leaves(layout.shardings)
        strategy = placement.strategy
        for name, whole in large.items():
            # A device holds no more of it than its share.
            of_optimizer = name.startswith("opt_state/")
            asked = {
                "tensor": True,
                "fsdp": strategy.shards_params,
                "data": strategy.shards_optimizer and of_optimizer,
            }
            parts = math.prod(placement.size(axis) for axis, split in asked.items() if split)
            held = math.prod(places[name].shard_shape(whole))
            assert held * parts == math.prod(whole), f"{row.name}: {name} {places[name]}"


@pytest.mark.drill
def test_the_norms_scales_do_not_decay_and_the_rate_rises_and_falls() -> None:
    model = Transformer(gpt.shape(config("tiny"), 26), rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer = gpt.make_optimizer(config(learning_rate=0.1, weight_decay=1.0, warmup_steps=4), 40)
    state, still = optimizer.init(params), jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def update(state: Any) -> Any:  # without gradients, the decay alone is left
        updates, state = optimizer.update(still, state, params)
        return jax.tree.map(
            lambda u, p: jnp.abs(u).max() / jnp.abs(p).max(), updates, params
        ), state

    rates = []
    for _ in range(41):
        moved, state = update(state)
        assert moved["norm"] == moved["blocks"]["mlp"]["norm"] == 0
        assert moved["blocks"]["mlp"]["up"] == pytest.approx(float(moved["embedding"]))
        rates.append(float(moved["embedding"]))
    assert rates[:5] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    assert rates[22] == pytest.approx(0.1 * (1 + 0.05) / 2)
    assert rates[40] == pytest.approx(0.1 * 0.05)
    assert rates[4:] == sorted(rates[4:], reverse=True)


# -- writing on ------------------------------------------------------------------------------------


def write(of: Any, vocabulary: Any) -> tuple[dict[str, np.ndarray], list[str]]:
    """The predictions of an untrained model, and the pieces that were printed."""
    model = Transformer(gpt.shape(of, len(vocabulary)), rngs=nnx.Rngs(0))
    model.eval()  # type: ignore[no-untyped-call]
    pieces: list[str] = []
    return gpt.writer(of, vocabulary)(model, pieces.append), pieces


@pytest.mark.nightly
def test_samples_are_printed_one_after_another_while_they_grow() -> None:
    of = config("tiny", temperature=50.0, samples=2, prompt=("ab", "c"))
    written, pieces = write(of, gpt.Vocabulary(np.arange(97, 123)))
    assert written["length"].tolist() == [42, 42, 41, 41]
    texts = ["".join(map(chr, 97 + row[:n])) for row, n in zip(*written.values(), strict=True)]
    assert "".join(pieces) == "".join(f"--- {row}\n{text}\n" for row, text in enumerate(texts))
    assert pieces[0] == "--- 0\nab" and len(pieces) > 8  # not all at the end
    assert texts[0][:2] == "ab" and texts[2][0] == "c" and len(set(texts)) == 4
    shorter, _ = write(dataclasses.replace(of, stop="aeiou"), gpt.Vocabulary(np.arange(97, 123)))
    ends = [
        min((t.find(c, n) for c in "aeiou" if c in t[n:]), default=len(t) - 1)
        for t, n in zip(texts, (2, 2, 1, 1), strict=True)
    ]
    assert (shorter["length"] - 1).tolist() == ends


def test_what_cannot_be_written() -> None:
    vocabulary = gpt.Vocabulary(np.arange(97, 123))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ("Ah!",)}, "prompt: .*'!', 'A'"),
        ({"stop": "."}, "stop: .*'.'"),
        ({"prompt": ("a", "")}, "prompt is empty"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"samples": 0}, "samples is 0"),
        ({"sample_length": 0}, "sample_length is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ]
    for changes, why in cases:
        with pytest.raises(UserError, match=why):
            gpt.writer(config(**{"prompt": ("a",), **changes}), vocabulary)


@pytest.mark.nightly
def test_the_loss_is_of_the_tokens_that_count() -> None:
    model = Transformer(gpt.shape(gpt.PRESETS["tiny"], vocabulary=5), rngs=nnx.Rngs(0))
    tokens = jnp.array([[0, 1, 2, 3], [4, 3, 2, 1]])
    weights = jnp.array([[1.0, 1, 1], [1, 0, 0]])
    found = gpt.objective(model, {"tokens": tokens, "weights": weights})
    logits = model(tokens[:, :-1])
    assert logits.shape == (2, 3, 64)  # of which 59 have no token
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    np.testing.assert_allclose(found["loss"][0], expected, rtol=1e-5)
    np.testing.assert_array_equal(found["accuracy"][0], logits.argmax(-1) == tokens[:, 1:])
    for _, counted in found.values():
        np.testing.assert_array_equal(counted, weights)


def test_a_prompt_of_other_characters_is_refused_and_says_which() -> None:
    vocabulary = gpt.Vocabulary(np.unique(np.frombuffer("abc".encode("utf-32-le"), np.uint32)))
    with pytest.raises(UserError, match="has no 'Z', 'ë'"):
        gpt.prompts(gpt.Config(prompt=("Zaë",)), vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [None, pytest.param(8, marks=pytest.mark.nightly)], ids=["on one", "on eight"]
)
def test_it_learns_on_eight_devices_and_writes_the_same_on_one(
    text: Path, tmp_path: Path, other: int | None
) -> None:
    options = ("--preset", "tiny", "--data-dir", text, "--workdir", tmp_path / "run")
    trained = run(GPT, *options, "--steps", 40, "--cpu-devices", 8)
    assert trained.returncode == 0, trained.stderr
    first, *_, last = metrics(tmp_path / "run", "train")
    assert first["loss"] == pytest.approx(np.log(len(set(TEXT))), abs=0.15)
    assert last["loss"] < 0.7 * first["loss"]
    assert metrics(tmp_path / "run", "eval")[-1]["loss"] < 0.8 * first["loss"]

    wanted = (*options, "--mode", "predict", "--prompt", "9 green", "--samples", 3)
    written = {}
    for devices in filter(None, (other, 1)):
        result = run(GPT, *wanted, devices=devices)
        assert result.returncode == 0, result.stderr
        predictions = np.load(tmp_path / "run" / "predictions.npz")
        written[devices] = {name: predictions[name] for name in predictions.files}
        for number in range(3):
            assert f"--- {number}\n9 green" in result.stdout
        assert "--- 3" not in result.stdout
    for name, values in written[1].items():
        np.testing.assert_array_equal(values, written[other or 1][name])


@pytest.mark.nightly
@pytest.mark.drill
@pytest.mark.timeout(600)
def test_the_default_options_approach_their_documented_result(
    shakespeare: Path, tmp_path: Path
) -> None:
    """All of the 1,500 steps take eight minutes, and end at 1.61; after 50 it is 2.50."""
    line = command(GPT, "--data-dir", shakespeare, "--workdir", tmp_path, "--steps", 50)
    subprocess.run(line, env=environment(1), check=True, timeout=BOUND)
    assert metrics(tmp_path, "eval")[-1]["loss"] < 2.6
