"""A second fit that starts over: on other data, or with another batch size."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmdtrain import FunctionModel, Trainer, UserError
from spmdtrain.terminal import Terminal

_RANDOM = np.random.default_rng(0)
X = _RANDOM.normal(size=(100, 3)).astype(np.float32)
FIRST, SECOND = {"x": X[:60]}, {"x": X[60:]}
ADAM = optax.adam(0.1)


def fresh(**options: Any) -> Trainer:
    return Trainer(
        model=FunctionModel(lambda key: jnp.ones(3), lambda p, x: x @ p),
        objective=lambda model, batch: {"loss": (model(batch["x"]) - 1) ** 2},
        optimizer=ADAM,
        terminal=Terminal(quiet=True),
        shuffle=False,
        **options,
    )


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
