"""Trainers of a process with several threads."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BOUND

from spmdtrain import Dataset, MeshSpec, Trainer, UserError
from spmdtrain.document.terminal import Terminal

X = np.ones((16, 1), np.float32)
MANY = 100_000  # steps; each fit is stopped long before


class Counter(nnx.Module):
    """A model whose two parameters are the number of steps, if the learning rate is 1."""

    def __init__(self) -> None:
        self.first, self.second = nnx.Param(jnp.zeros(())), nnx.Param(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        return jnp.stack([self.first[...] + 0 * x[:, 0], self.second[...] + 0 * x[:, 0]], axis=1)


def counting(**options: Any) -> Trainer:
    return Trainer(
        model=Counter(),
        objective=lambda model, x: {"loss": -model(x).sum(-1)},
        optimizer=optax.sgd(1.0, momentum=0.0),
        global_batch_size=8,
        mesh=MeshSpec(devices=(0, 1)),
        terminal=Terminal(quiet=True),
        **options,
    )


@pytest.mark.slow
def test_another_thread_gets_a_published_copy_and_no_state_that_steps_donate() -> None:
    has_begun, published = threading.Event(), []

    def publish(event: Any) -> None:
        published.append((event.step, event.trainer.model))
        has_begun.set()

    trainer = counting(callbacks={"fit_start": publish, "evaluation": publish}, eval_every_steps=1)
    reads: list[Callable[[], Any]] = [
        lambda: trainer.predict(X),
        lambda: trainer.evaluate(X),
        lambda: trainer.model,
        lambda: trainer.state,
    ]
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(trainer.fit, X, validation=X, steps=MANY)
        try:
            assert has_begun.wait(BOUND)
            for read in reads:
                with pytest.raises(UserError, match=r"in another thread.*trainer.model is a copy"):
                    read()
            until = time.monotonic() + BOUND
            while len(published) < 5 and time.monotonic() < until:
                time.sleep(0.01)
            first = trainer.step
        finally:
            trainer.stop()
        last = fit.result(BOUND).step
    assert 4 <= first <= last == trainer.step == trainer.predict(X)[0, 0]
    for step, model in published:  # later steps have not deleted them
        assert float(model.first[...]) == float(model.second[...]) == step


@pytest.mark.slow
def test_a_fit_waits_for_a_prediction_that_reads_the_state_before_it_donates_it() -> None:
    reads, begins = threading.Event(), threading.Event()

    class Slow(Dataset):
        """Examples whose first ones are read late."""

        def __len__(self) -> int:
            return 16

        def rows(self, indices: np.ndarray) -> Any:
            reads.set()
            assert begins.wait(BOUND)
            return X[indices]

    trainer = counting()
    trainer.fit(X, steps=3)
    with ThreadPoolExecutor(1) as pool:
        predicted = pool.submit(trainer.predict, Slow())
        assert reads.wait(BOUND)
        threading.Timer(1.0, begins.set).start()
        trainer.fit(X, steps=6)
        assert (predicted.result(BOUND) == 3).all()
    assert (trainer.predict(X) == 6).all()


@pytest.mark.slow
def test_a_trainer_is_in_one_fit_at_a_time() -> None:
    second: list[str] = []

    def fit_again(event: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(trainer.fit, X, steps=9).exception(BOUND)
        assert isinstance(error, UserError)
        second.append(str(error))

    trainer = counting(callbacks={"fit_start": fit_again})
    assert trainer.fit(X, steps=2).step == 2
    assert second == ["this Trainer is in a fit: wait until it ends, or use another one"]
    trainer = counting()
    with pytest.raises(UserError, match="global_batch_size is 64"):
        trainer.fit(X, steps=1, global_batch_size=64)
    assert trainer.fit(X, steps=1).step == 1  # a fit that has failed is over


@pytest.mark.slow
def test_fits_of_two_trainers_at_once_have_the_bits_of_fits_alone() -> None:
    inputs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    def trained(seed: int) -> np.ndarray:
        trainer = Trainer(
            model=nnx.Linear(4, 2, rngs=nnx.Rngs(seed)),
            objective=lambda model, x: {"loss": ((model(x) - x[:, :2]) ** 2).mean(-1)},
            optimizer=optax.adam(0.01),
            global_batch_size=8,
            seed=seed,
            mesh=MeshSpec(devices=(0, 1)),
            terminal=Terminal(quiet=True),
        )
        trainer.fit(inputs, steps=60, validation=inputs)
        return np.asarray(trainer.model.kernel[...])

    with ThreadPoolExecutor(2) as pool:
        together = [*pool.map(trained, (0, 1))]
    for seed, kernel in enumerate(together):
        np.testing.assert_array_equal(kernel, trained(seed))


@pytest.mark.slow
def test_data_may_ask_the_trainer_that_evaluates_it() -> None:
    trainer = counting(data_threads=2)
    trainer.fit(X, steps=3)

    class Labeled(Dataset):
        """Examples that a thread reads, with what the trainer predicts for them."""

        def __len__(self) -> int:
            return 16

        def rows(self, indices: np.ndarray) -> Any:
            return trainer.predict(X)[indices, :1]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(trainer.evaluate, Labeled()).result(BOUND)["loss"] == -6

    class Fitting(Labeled):
        def rows(self, indices: np.ndarray) -> Any:
            trainer.fit(X, steps=4)
            return X[indices]

    alone = counting()
    trainer = alone
    with pytest.raises(UserError, match="in an evaluation or prediction"):
        alone.evaluate(Fitting())
