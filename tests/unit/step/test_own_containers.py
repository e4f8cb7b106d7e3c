"""Functions of the user may take entries out of the containers that they are given.

Each call gets containers of its own, in each trace of a step and for each batch of a dataset.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from spmdtrain import (
    CollectiveOptions,
    FunctionModel,
    Histogram,
    LinenModel,
    Loop,
    MappedDataset,
    MeshSpec,
    Mixture,
    ShardingOptions,
    Subset,
    Trainer,
    per_replica,
)
from spmdtrain.data.sampling import TrainBatches
from spmdtrain.document.terminal import Terminal

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(16, n)).astype(np.float32) for n in (4, 3))
W = RNG.random(16).astype(np.float32)
DATA = {"x": X, "more": {"y": Y, "w": W}}
PLAIN = FunctionModel(lambda key: {"k": jnp.ones((4, 3)), "b": jnp.zeros(3)})
SPLIT = {"strategy": "zero", "sharding": ShardingOptions(min_size=1)}


class Normalized(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer, self.norm = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.layer(x))


def reads(model: Any, batch: Any) -> Any:
    """The reference, which changes nothing."""
    call = model if callable(model) else lambda x: x @ model["k"] + model["b"]
    found = jnp.asarray(call(batch["x"]), jnp.float32)
    return {"loss": (((found - batch["more"]["y"]) ** 2).mean(1), batch["more"]["w"])}


def takes(model: Any, batch: Any) -> Any:
    """The same, which empties the batch, and parameters that are a dictionary."""
    more = {name: batch["more"].pop(name) for name in ("y", "w")}
    del batch["more"]
    model = {name: model.pop(name) for name in ("k", "b")} if isinstance(model, dict) else model
    return reads(model, {"x": batch.pop("x"), "more": more})


def fit(objective: Any, data: Any = DATA, **options: Any) -> tuple[Any, Any]:
    defaults: dict[str, Any] = {
        "model": partial(nnx.Linear, 4, 3),
        "optimizer": optax.sgd(0.1),
        "global_batch_size": 8,
        "mesh": MeshSpec(devices=(0, 1, 2, 3)),
        "terminal": Terminal(quiet=True),
    }
    lines: list[dict[str, float]] = []
    trainer = Trainer(
        objective=objective,
        log_every=1,
        callbacks={"log": lambda event: lines.append(dict(event.metrics))},
        **defaults | options,
    )
    trainer.fit(data, validation=DATA, steps=2)
    assert trainer.state is not None
    lines.append(trainer.evaluate(DATA, global_batch_size=8 if "exact" in options else 3))
    timed = ("examples_per_second", "steps_per_second", "input_wait")
    kept = [{n: x for n, x in line.items() if not n.startswith(timed)} for line in lines]
    return kept, jax.device_get(trainer.state.params)


def reduction(name: str, **more: Any) -> dict[str, Any]:
    return {"collectives": CollectiveOptions(reduction=name), **more}  # type: ignore[arg-type]


OBJECTIVES: dict[str, dict[str, Any]] = {
    "default": {},
    "automatic": reduction("automatic"),
    "all_reduce": reduction("all_reduce", microbatches=2),
    "one_device": reduction("one_device"),
    "hierarchical": reduction("hierarchical", mesh=MeshSpec(replica=2)),
    "reduce_scatter": reduction("reduce_scatter", **SPLIT),
    "float16": {"collectives": CollectiveOptions(reduce_dtype="float16")},
    "own reduction": {"reduction": lambda gradients, axes: jax.lax.psum(gradients, axes)},
    "replica": {"batch_statistics": "replica", "model": Normalized},
    "exact, batch statistics": {"exact": 8, "model": Normalized},
    "dots": {"remat": "dots"},
    "microbatches and remat": {"microbatches": 2, "remat": "full"},
    "dispatches on the device": {"data_on_device": True, "steps_per_dispatch": 2},
    "without jit": {"jit": False},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "padded": {"uneven_batch": "pad", "global_batch_size": 6},
    "line search": {"optimizer": optax.lbfgs(), "microbatches": 2},
    "sentinel": {"sentinel_every": 1},
    "linen": {"model": LinenModel(linen.Dense(3), X[:1])},
    "function": {"model": PLAIN},
    "function, exact": {"model": PLAIN, "exact": 8},
    "function, frozen": {"model": PLAIN, "freeze": ("b",), "remat": "full"},
    "function, line search": {"model": PLAIN, "optimizer": optax.lbfgs()},
}
FEW = {"function, microbatches": {"model": PLAIN, "microbatches": 2}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [*FEW, *(pytest.param(name, marks=pytest.mark.nightly) for name in OBJECTIVES)]
)
def test_an_objective_may_empty_its_batch_and_its_parameters(case: str) -> None:
    options = (FEW | OBJECTIVES)[case]
    np.testing.assert_equal(fit(takes, **options), fit(reads, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.nightly)
            for options in ({"exact": 8}, {"microbatches": 2, "ema_decay": 0.9}, SPLIT)
        ),
    ],
    ids=str,
)
def test_an_optimizer_may_change_gradients_in_place(options: Any) -> None:
    def changes(updates: Any, state: Any, params: Any = None) -> Any:
        for name in updates:
            updates[name] = updates[name] * -0.1
        return updates, state

    def returns(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda x: x * -0.1, updates), state

    found = [
        fit(
            reads,
            model=PLAIN,
            optimizer=optax.GradientTransformation(lambda params: optax.EmptyState(), update),
            **options,
        )
        for update in (changes, returns)
    ]
    np.testing.assert_equal(found[0], found[1])


@pytest.mark.nightly
def test_predictions_media_and_metrics_may_empty_theirs() -> None:
    def media(model: Any, batch: Any) -> Any:
        del batch["more"]
        return {"outputs": Histogram(model(batch.pop("x")))}

    trainer = Trainer(
        model=partial(nnx.Linear, 4, 3),
        objective=takes,
        predict=lambda model, batch: (batch.pop("more"), model(batch.pop("x")))[1],
        media=media,
        optimizer=optax.sgd(0.1),
        global_batch_size=8,
        terminal=Terminal(quiet=True),
    )
    trainer.fit(DATA, validation=DATA, steps=1)
    for size in (3, 8):
        assert trainer.predict(DATA, global_batch_size=size).shape == (16, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["mirrored", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("default",))]
)
def test_functions_of_a_loop_may_empty_theirs(strategy: str) -> None:
    def run(take: Callable[[dict[str, Any], str], Any]) -> Any:
        parts = {"params": {"k": jnp.ones((4, 3))}}

        def step(state: Any, batch: Any, key: Any) -> Any:
            x, y = take(batch, "x"), take(take(batch, "more"), "y")

            def loss(params: Any) -> jax.Array:
                return ((x @ take(params, "k") - y) ** 2).mean()

            value, slope = jax.value_and_grad(loss)(state.params)
            params = {"k": take(state.params, "k") - slope["k"]}
            return dataclasses.replace(state, params=params), {"loss": value}

        found = []
        terminal = Terminal(quiet=True)
        with Loop(steps=2, global_batch_size=8, strategy=strategy, terminal=terminal) as loop:
            state = loop.start(lambda key: parts, train=DATA)
            make = loop.compile_step(step)
            total = loop.compile(
                lambda params, rows: (
                    per_replica(lambda own: take(own, "x").sum(), rows).sum()
                    + take(params, "k").sum()
                )
            )
            for batch in loop.batches():
                found.append(total(state.params, batch))
                state, output = make(state, batch)
                assert {*batch} == {*DATA} and {*state.params} == {"k"}
                loop.end_step(state, output)
            for rows, _ in loop.eval_batches(DATA):
                found.append(total(state.params, rows))
            assert {*parts["params"]} == {"k"}
            return jax.device_get((found, state.params))

    np.testing.assert_equal(run(dict.pop), run(dict.__getitem__))


class Kept:
    """A dataset that returns the same containers and arrays whenever it reads the same rows."""

    def __init__(self) -> None:
        self.rows_by_indices: dict[bytes, Any] = {}

    def __len__(self) -> int:
        return 16

    def rows(self, indices: np.ndarray) -> Any:
        found = {"x": X[indices], "more": {"y": Y[indices], "w": W[indices]}}
        return self.rows_by_indices.setdefault(indices.tobytes(), found)


class Buffer(Kept):
    """A dataset that fills the same containers and arrays in each call."""

    def rows(self, indices: np.ndarray) -> Any:
        found = self.rows_by_indices.setdefault(bytes(len(indices)), {})
        found.setdefault("x", np.empty((len(indices), 4), np.float32))[:] = X[indices]
        found["more"] = {"y": Y[indices], "w": W[indices]}
        return found


def changes_rows(rows: Any, generator: Any = None) -> Any:
    rows["x"] *= 2
    more = rows.pop("more")
    return {"x": rows.pop("x"), "y": more.pop("y"), "w": more.pop("w")}


@pytest.mark.parametrize("kind", [Kept, Buffer])
def test_functions_of_a_dataset_may_change_their_rows_in_place(kind: type[Kept]) -> None:
    order, half = np.arange(16), np.arange(8)
    mapped = MappedDataset(kind(), changes_rows)
    batches = TrainBatches(kind(), 16, 0, False, 4, order, changes_rows)
    for _ in range(2):
        for found in (mapped.rows(order), batches[0]):
            np.testing.assert_equal(found, {"x": 2 * X, "y": Y, "w": W})
    shared = kind()
    parts = {"a": (Subset(shared, half), 1.0), "b": (Subset(shared, half + 8), 1.0)}
    np.testing.assert_equal(Mixture(parts).rows(order), DATA)
