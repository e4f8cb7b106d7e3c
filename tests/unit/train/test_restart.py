"""A second fit that starts over: on other data, or with another batch size."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdtrain import FunctionModel, Trainer, UserError
from spmdtrain.document.terminal import Terminal

_RANDOM = np.random.default_rng(0)
X = _RANDOM.normal(size=(100, 3)).astype(np.float32)
FIRST, SECOND = {"x": X[:60]}, {"x": X[60:]}
ADAM = optax.adam(0.1)


def fresh(**options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "optimizer": ADAM,
        "terminal": Terminal(quiet=True),
        "shuffle": False,
        "trackers": (),
    }
    return Trainer(
        model=FunctionModel(lambda key: jnp.ones(3), lambda p, x: x @ p),
        objective=lambda model, batch: {"loss": (model(batch["x"]) - 1) ** 2},
        **defaults | options,
    )


class ByHand:
    """The steps of an optimizer, that keeps its state and its average, in a loop of its own."""

    def __init__(self, optimizer: optax.GradientTransformation, ema_decay: float | None) -> None:
        self.optimizer = optax.with_extra_args_support(optimizer)
        self.params = self.average = jnp.ones(3)
        self.opt_state = self.optimizer.init(self.params)
        self.updates, self.ema_decay = 0, ema_decay

    def steps(self, data: dict[str, np.ndarray], size: int, count: int) -> None:
        for step in range(count):
            rows = data["x"][size * step : size * (step + 1)]
            loss, gradients = jax.value_and_grad(lambda p, x: ((x @ p - 1) ** 2).mean())(
                self.params, rows
            )
            changes, self.opt_state = self.optimizer.update(
                gradients, self.opt_state, self.params, value=loss
            )
            self.params = optax.apply_updates(self.params, changes)
            self.updates += 1
            decay = min(self.ema_decay or 0.0, (1 + self.updates) / (10 + self.updates))
            self.average = decay * self.average + (1 - decay) * self.params
        if isinstance(self.opt_state, optax.contrib.ScheduleFreeState):
            self.average = optax.contrib.schedule_free_eval_params(self.opt_state, self.params)

    def loss(self) -> float:
        return float(((X @ self.average - 1) ** 2).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (ADAM, {"ema_decay": 0.99}),
        (ADAM, {"ema_decay": 0.2}),  # below that of a young average
        *(
            pytest.param(optimizer, options, marks=pytest.mark.slow)
            for optimizer, options in (
                (ADAM, {"ema_decay": 0.99, "steps_per_dispatch": 2}),
                (optax.adam(optax.linear_schedule(0.1, 0.01, 7)), {}),
                (optax.MultiSteps(ADAM, 2), {}),
                (optax.contrib.schedule_free_sgd(0.1), {}),
                (optax.chain(ADAM, optax.contrib.reduce_on_plateau(patience=1)), {}),
            )
        ),
    ],
)
def test_restarts_keep_what_the_state_counts(optimizer: Any, options: Any) -> None:
    trainer, hand = (
        fresh(optimizer=optimizer, **options),
        ByHand(optimizer, options.get("ema_decay")),
    )
    for data, size, steps in ((FIRST, 16, 3), (SECOND, 8, 5), (FIRST, 16, 3)):
        trainer.fit(data, steps=steps, global_batch_size=size, restart=trainer.state is not None)
        hand.steps(data, size, steps)
        np.testing.assert_allclose(trainer.evaluate({"x": X})["loss"], hand.loss(), rtol=1e-5)


@pytest.mark.slow
def test_a_run_that_is_resumed_after_a_restart_keeps_its_average(tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if event.step == 3:
            raise RuntimeError

    options: dict[str, Any] = {"ema_decay": 0.99, "workdir": str(tmp_path)}
    trainer, hand = fresh(**options, callbacks={"step": [stop]}), ByHand(ADAM, 0.99)
    with pytest.raises(RuntimeError):  # before the first save
        trainer.fit(FIRST, steps=5, global_batch_size=8)
    trainer.fit(SECOND, steps=2, global_batch_size=8, restart=True)
    resumed = fresh(**options)
    resumed.fit(SECOND, steps=5, global_batch_size=8)
    hand.steps(FIRST, 8, 3)
    hand.steps(SECOND, 8, 5)
    np.testing.assert_allclose(resumed.evaluate({"x": X})["loss"], hand.loss(), rtol=1e-5)


@pytest.mark.slow
def test_a_fit_restarts_with_its_model_and_optimizer_on_other_data_and_batches() -> None:
    trainer = fresh()
    trainer.fit(FIRST, epochs=2, global_batch_size=40)
    assert trainer.state is not None and trainer.step == 3
    params, opt_state = jax.tree.map(np.array, (trainer.state.params, trainer.state.opt_state))
    for data, size in ((SECOND, 40), (FIRST, 8)):
        with pytest.raises(UserError, match="restart=True"):
            trainer.fit(data, epochs=9, global_batch_size=size)

    result = trainer.fit(SECOND, epochs=1, global_batch_size=8, restart=True)
    # The same by hand, from what the first fit left: examples in their order.
    for start in range(0, 40, 8):
        rows = SECOND["x"][start : start + 8]
        gradients = jax.grad(lambda p, x: ((x @ p - 1) ** 2).mean())(params, rows)
        updates, opt_state = ADAM.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert trainer.state is not None
    np.testing.assert_allclose(trainer.state.params, params, rtol=1e-5)
    assert result.step == trainer.step == 5
    assert [line["step"] for line in result.history.epochs] == [5]
    assert trainer.fit(SECOND, epochs=2, global_batch_size=8).step == 10  # and continues


@pytest.mark.slow
def test_a_restart_over_checkpoints_is_refused(tmp_path: Path) -> None:
    trainer = fresh(workdir=str(tmp_path), global_batch_size=40)
    trainer.fit(FIRST, steps=2)
    with pytest.raises(UserError, match="init_from"):
        trainer.fit(FIRST, steps=2, restart=True)
    assert trainer.fit(FIRST, steps=3).step == 3


def test_a_fit_that_made_no_step_leaves_the_trainer_as_it_was() -> None:
    trainer = fresh()
    other = {"z": X}
    with pytest.raises(KeyError):
        trainer.fit(other, steps=1, global_batch_size=8)
    assert trainer.fit(FIRST, steps=3, global_batch_size=8).step == 3
    with pytest.raises(KeyError):
        trainer.fit(other, steps=1, global_batch_size=8, restart=True)
    assert trainer.step == 3
    assert trainer.fit(FIRST, steps=5, global_batch_size=8).step == 5
