"""Training batches that do not divide over the devices: the numbers of one device, or an error."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import events, metrics
from step_helpers import SHOWS_GRADIENTS, on, tokens_batch, tokens_model, tokens_objective

from spmdtrain import Loop, Trainer, UserError
from spmdtrain.config.options import CollectiveOptions, ShardingOptions
from spmdtrain.config.run_config import RunConfig
from spmdtrain.document.terminal import Terminal
from spmdtrain.models import MLP
from spmdtrain.tree import named_leaves

BATCH = tokens_batch(np.random.default_rng(5))
BATCH |= {name: BATCH[name] + 0.5 for name in ("tokens", "examples")}  # none is 0
X = np.random.default_rng(6).normal(size=(20, 6)).astype(np.float32)


def trainer(devices: int, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "model": tokens_model(),
        "objective": tokens_objective,
        "optimizer": SHOWS_GRADIENTS,
        "global_batch_size": 6,
        "uneven_batch": "pad",
        "mesh": on(devices),
        "terminal": Terminal(quiet=True),
    }
    return Trainer(**defaults | options)


def numbers(of: Trainer, data: Any, steps: int = 3) -> dict[str, np.ndarray]:
    """Metrics and gradients of the last step."""
    found = of.fit(data, steps=steps)
    assert of.state is not None
    trace = getattr(of.state.opt_state, "trace", of.state.params)
    return {k: np.asarray(v) for k, v in (named_leaves(trace) | found.train).items()}


def check_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert np.abs(x).max() > 0, name
        # float32 gradients of a hundred, summed in another order; a wrong weight is off by 1e-2
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-5 * np.abs(x).max())


def squares(model: Any, batch: Any) -> Any:
    return {"loss": (model(batch) ** 2).mean(-1)}


def draws(model: Any, batch: Any, key: jax.Array) -> Any:
    return {"loss": ((model(batch) - jax.random.normal(key, batch.shape[:1])[:, None]) ** 2)}


WAYS: dict[str, dict[str, Any]] = {
    "flattened": {},
    "by XLA": {"collectives": CollectiveOptions(reduction="automatic")},
    "one example": {"global_batch_size": 1},
    "microbatches": {"microbatches": 2},
    "fully sharded": {"strategy": "fully_sharded", "sharding": ShardingOptions(min_size=1)},
    "several a dispatch": {"steps_per_dispatch": 3},
    "data on device": {"data_on_device": True, "steps_per_dispatch": 3, "microbatches": 2},
    "no jit": {"jit": False},
    "threads": {"data_threads": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[] if way in ("flattened", "fully sharded") else pytest.mark.slow)
        for way in WAYS
        if way != "no jit"
    ]
    + [pytest.param("no jit", marks=pytest.mark.nightly)],
)
def test_a_padded_batch_gives_the_numbers_of_one_device(way: str) -> None:
    options = WAYS[way]
    expected = numbers(trainer(1, global_batch_size=options.get("global_batch_size", 6)), BATCH)
    check_equal(numbers(trainer(4, **options), BATCH), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "objective"),
    [
        (partial(MLP, 6, (8,), 2, dropout=0.5), squares),
        (partial(nnx.Linear, 6, 2), draws),
    ],
    ids=["dropout", "key"],
)
def test_what_is_drawn_for_an_example_does_not_depend_on_padding(
    model: Any, objective: Any
) -> None:
    one, four = (trainer(n, model=model, objective=objective) for n in (1, 4))
    check_equal(numbers(four, X), numbers(one, X))


@pytest.mark.slow
def test_an_objective_may_take_the_mask_of_a_padded_batch() -> None:
    def mixes(model: Any, batch: Any, mask: jax.Array) -> Any:
        values = squares(model, batch)["loss"]
        mean = (values * mask).sum() / mask.sum()
        return {"loss": (values - mean) ** 2, "count": jnp.broadcast_to(mask.sum(), mask.shape)}

    ways = {"model": partial(nnx.Linear, 6, 2), "objective": mixes}
    one, four = (numbers(trainer(n, **ways), X) for n in (1, 4))
    assert one["count"] == 6
    check_equal(four, one)


@jax.custom_vjp
def centered(x: jax.Array) -> jax.Array:
    """The identity, whose gradients are centered over the batch."""
    return x


centered.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(0),))


@jax.custom_jvp
def scaled(x: jax.Array) -> jax.Array:
    """The identity, whose gradients are divided by the size of the batch."""
    return x


scaled.defjvp(lambda x, t: (x[0], t[0] / x[0].shape[0]))


class Normalizes(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(6, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


LINEAR = partial(nnx.Linear, 6, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "objective", "why"),
    [
        (Normalizes, squares, r"carries state \(2 arrays"),
        (LINEAR, lambda m, b: {"loss": m(b - b.mean(0)).sum(-1)}, "reduce_sum at"),
        (LINEAR, lambda m, b: {"loss": centered(m(b)).sum(-1)}, "custom_vjp at"),
        (LINEAR, lambda m, b: {"loss": scaled(m(b)).sum(-1)}, "the batch size"),
    ],
    ids=["batch statistics", "values", "custom_vjp", "custom_jvp"],
)
def test_where_padding_could_change_the_gradients_it_is_refused(
    model: Any, objective: Any, why: str
) -> None:
    with pytest.raises(UserError, match=f"8 rows on 4 devices .*{why}"):
        trainer(4, model=model, objective=objective).fit(X, steps=1)
    unknown = trainer(4, model=model, objective=objective, global_batch_size=None)
    with pytest.raises(
        UserError, match=f"the global batch, padded to 8 rows on 4 devices, .*{why}"
    ):
        unknown.fit(X, steps=1, global_batch_size=6)
    trainer(2, model=model, objective=objective).fit(X, steps=1)  # divides


def test_without_the_option_an_uneven_batch_is_refused_and_the_option_is_named() -> None:
    with pytest.raises(UserError, match=r"over 4 devices .* uneven_batch=pad"):
        trainer(4, uneven_batch="refuse").fit(BATCH, steps=1)
    with pytest.raises(UserError, match="uneven_batch is 'pad'"):
        Loop(**{"uneven_batch": "pad"}, steps=1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="parameter_server"):
        trainer(4, strategy="parameter_server")
    assert RunConfig().uneven_batch == "refuse"


@pytest.mark.slow
def test_a_run_resumes_on_other_devices_and_counts_its_examples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"optimizer": optax.sgd(0.1), "model": LINEAR, "objective": squares, "log_every": 1}
    expected = numbers(trainer(1, **options), X, 6)
    saves = {**options, "workdir": str(tmp_path), "terminal": Terminal()}
    trainer(4, **saves).fit(X, steps=3)
    assert "global batch 6 padded to 8 (2 per device)" in capsys.readouterr().out
    check_equal(numbers(trainer(1, **saves), X, 6), expected)
    said = capsys.readouterr().out
    assert "resumed from step 3" in said and "batch_size:" not in said
    assert [line["step"] for line in metrics(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]
    speeds: dict[str, list[float]] = {"examples_per_second": [], "steps_per_second": []}
    for event in events(tmp_path):
        for value in event.summary.value:
            if value.tag.startswith("speed/") and value.tag.endswith("_per_second"):
                speeds[value.tag.removeprefix("speed/")].append(value.simple_value)
    examples, steps = map(np.array, speeds.values())
    np.testing.assert_allclose(examples, 6 * steps, rtol=1e-5)
    assert len(steps) > 2


@pytest.mark.slow
def test_an_epoch_has_the_steps_of_the_true_batch_size() -> None:
    of = trainer(4, model=LINEAR, objective=squares)
    assert of.fit(X, epochs=1).step == 4  # ceil(20 / 6)


@pytest.mark.nightly
def test_a_convolutional_network_is_proven() -> None:
    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.conv = nnx.Conv(1, 3, (3, 3), rngs=rngs)
            self.head = nnx.Linear(12, 2, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))
            return self.head(x.reshape(len(x), -1))

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch["x"])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return {"loss": each, "accuracy": logits.argmax(-1) == batch["y"]}

    data = {"x": X[:, :4].repeat(4, 1).reshape(20, 4, 4, 1), "y": np.arange(20) % 2}
    one, four = (numbers(trainer(n, model=Network, objective=loss), data) for n in (1, 4))
    check_equal(
        {k: v for k, v in four.items() if k != "accuracy"},
        {k: v for k, v in one.items() if k != "accuracy"},
    )
