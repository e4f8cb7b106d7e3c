"""Garbage collections during a run: what survives a full one is not visited again."""

import gc
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from spmdtrain import Loop, Trainer
from spmdtrain.document.terminal import Terminal
from spmdtrain.train.session import LongLivedObjects

X = np.ones((32, 4), np.float32)
OF_PYTHON = 1_000  # CPython 3.12 excludes 375 objects, also after `gc.unfreeze`


@pytest.fixture
def nothing_excluded() -> Iterator[None]:
    """The tests' own objects are collected, as those of a user's process."""
    gc.unfreeze()
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_excluded")
def test_what_survives_a_full_collection_after_the_first_step_is_excluded_until_the_end() -> None:
    with LongLivedObjects() as objects:
        gc.collect()
        assert gc.get_freeze_count() < OF_PYTHON
        objects.begin()
        gc.collect(1)
        assert gc.get_freeze_count() < OF_PYTHON
        gc.collect()
        excluded = gc.get_freeze_count()
        assert excluded > 100_000
        gc.collect()
        assert gc.get_freeze_count() <= excluded
    assert gc.get_freeze_count() < OF_PYTHON
    gc.collect()
    assert gc.get_freeze_count() < OF_PYTHON


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_excluded")
def test_what_others_have_excluded_stays_so() -> None:
    gc.freeze()
    with LongLivedObjects() as objects:
        objects.begin()
        gc.collect()
    assert gc.get_freeze_count() > 100_000


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_excluded")
def test_of_two_runs_the_last_one_includes_the_objects_again() -> None:
    first, second = LongLivedObjects(), LongLivedObjects()
    first.begin()
    gc.collect()
    second.begin()
    first.__exit__()
    gc.collect()
    assert gc.get_freeze_count() > 100_000
    second.__exit__()
    assert gc.get_freeze_count() < OF_PYTHON


def test_objects_that_python_excludes_itself_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)  # as in CPython 3.12
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with LongLivedObjects() as objects:
        objects.begin()
        gc.collect()
    assert calls == ["freeze", "unfreeze"]


def test_excluded_objects_are_not_counted_between_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The count visits each of them: 10 to 50 ms for a million."""
    calls: list[str] = []
    for name in ("get_freeze_count", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    with LongLivedObjects() as objects:
        objects.begin()
    assert not calls


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_excluded")
@pytest.mark.parametrize("run", ["trainer", "loop"])
def test_a_run_excludes_objects_after_its_first_step(run: str) -> None:
    counts: list[int] = []

    def collect(*_: Any) -> None:
        gc.collect()
        counts.append(gc.get_freeze_count())

    options: dict[str, Any] = {"global_batch_size": 16, "terminal": Terminal(quiet=True)}
    if run == "trainer":
        trainer = Trainer(
            model=nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
            objective=lambda model, x: {"loss": (model(x) ** 2).mean(-1)},
            optimizer=optax.sgd(0.1),
            callbacks={"step": collect},
            **options,
        )
        trainer.fit(X, steps=2)
    else:
        with Loop(steps=2, **options) as loop:
            state = loop.start(lambda key: {"params": jnp.ones(4)}, train=X)
            step = loop.compile_step(lambda state, x, key: (state, {"loss": jnp.mean(x)}))
            for batch in loop.batches():
                state, output = step(state, batch)
                loop.end_step(state, output)
                collect()
    assert len(counts) == 2 and counts[0] > 100_000
    assert gc.get_freeze_count() < OF_PYTHON
