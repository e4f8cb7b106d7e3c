"""The step's program is compiled beside what else a run begins with, and for what is to come."""

import gc
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from linear_model import squared_error, trainer

from spmdtrain import MappedDataset, Trainer, UserError
from spmdtrain.checkpoints.restore import whole_state
from spmdtrain.step.program import StepPlan, plan_step

X = np.random.default_rng(1).normal(size=(40, 4))  # of f64, which the devices make f32
Y = X.sum(-1, keepdims=True).astype(np.float32)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads in which steps have been planned, and so compiled."""
    threads: list[threading.Thread] = []

    def noted(*given: Any, **options: Any) -> StepPlan:
        threads.append(threading.current_thread())
        return plan_step(*given, **options)

    monkeypatch.setattr("spmdtrain.step.compile.plan_step", noted)
    return threads


@pytest.mark.slow
def test_it_is_compiled_while_the_state_is_restored(
    tmp_path: Path, planned: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(workdir=str(tmp_path)).fit((X, Y), steps=3)
    planned.clear()
    seen = threading.Event()

    def waits(*args: Any) -> Any:
        for _ in range(3000):
            if planned:
                seen.set()
                break
            seen.wait(0.01)
        return whole_state(*args)

    monkeypatch.setattr("spmdtrain.train.starting_state.whole_state", waits)
    assert trainer(workdir=str(tmp_path)).fit((X, Y), steps=6).step == 6
    assert seen.is_set() and len(planned) == 1
    assert planned[0] is not threading.main_thread()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_per_dispatch": 3},
        {"data_on_device": True},
        {"steps_per_dispatch": 3, "data_on_device": True, "strategy": "zero"},
        {"augment": lambda example, generator: (example[0][:4] * 2, example[1])},
        {"data_threads": 2},
    ],
)
def test_what_is_compiled_ahead_is_what_is_called(
    options: dict[str, Any], planned: list[threading.Thread]
) -> None:
    """Or it would be compiled again for the batches that come."""
    fitted = trainer(**options)
    fitted.fit((X, Y), steps=6)
    assert len(planned) == 1
    fitted.fit((X, Y), steps=9)
    assert len(planned) == 1


def compilations(fitted: Trainer, data: Any, caplog: pytest.LogCaptureFixture) -> int:
    """How often the step is compiled in six steps of a trainer."""
    caplog.clear()
    jax.config.update("jax_log_compiles", True)  # of all threads
    try:
        fitted.fit(data, steps=6)
    finally:
        jax.config.update("jax_log_compiles", False)
    messages = [record.getMessage() for record in caplog.records]
    return sum(text.startswith("Finished XLA compilation of jit(train_step") for text in messages)


@pytest.mark.slow
def test_thread_local_settings_of_jax_apply(
    planned: list[threading.Thread], caplog: pytest.LogCaptureFixture
) -> None:
    """A device or a precision that is asked for by `with`."""
    device = jax.devices()[3]
    with jax.default_device(device):
        fitted = trainer(strategy="default")
        assert compilations(fitted, (X, Y), caplog) == 1
    assert {leaf.device for leaf in jax.tree.leaves(fitted.state)} == {device}
    with jax.default_matmul_precision("highest"):
        assert compilations(trainer(), (X, Y), caplog) == 1
    assert planned == 2 * [threading.main_thread()]
    assert compilations(trainer(), (X, Y), caplog) == 1
    assert planned[2] is not threading.main_thread()


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, 0, 5])
@pytest.mark.parametrize("strategy", ["default", "mirrored"])
def test_a_dataset_may_give_arrays_that_are_on_a_device(
    strategy: str, number: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    def placed(rows: Any) -> Any:
        place = None if number is None else jax.devices()[number]
        return jax.tree.map(lambda x: jax.device_put(x.astype(np.float32), place), rows)

    found, expected = trainer(strategy=strategy), trainer(strategy=strategy)
    assert compilations(found, MappedDataset((X, Y), placed), caplog) == 1
    expected.fit((X, Y), steps=6)
    for one, other in zip(*map(jax.tree.leaves, (found.state, expected.state)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_the_program_of_an_earlier_batch_size_is_found_again(
    planned: list[threading.Thread],
) -> None:
    fitted = trainer()
    for size in (8, 16, 8):
        fitted.fit((X, Y), steps=3, global_batch_size=size, restart=bool(planned))
    assert len(planned) == 2


@pytest.mark.slow
def test_a_run_that_has_nothing_left_to_do_compiles_nothing(
    tmp_path: Path, planned: list[threading.Thread]
) -> None:
    trainer(workdir=str(tmp_path)).fit((X, Y), steps=3)
    assert len(planned) == 1
    assert trainer(workdir=str(tmp_path)).fit((X, Y), steps=3).step == 3
    assert len(planned) == 1


@pytest.mark.slow
def test_an_error_in_a_step_is_raised_by_fit_and_leaves_no_thread() -> None:
    def objective(model: Any, batch: Any) -> dict[str, jax.Array]:
        if wrong:
            raise UserError("the objective is not ready")
        return squared_error(model, batch)

    wrong = True
    before = threading.active_count()
    fitted = trainer(objective=objective)
    with pytest.raises(UserError, match="not ready"):
        fitted.fit((X, Y), steps=3)
    wrong = False
    assert fitted.fit((X, Y), steps=3).step == 3
    assert all(program.done() for program in fitted._programs._programs.values())
    del fitted
    gc.collect()
    for _ in range(1000):  # a worker ends by itself once its executor is unreachable
        if threading.active_count() <= before:  # those of earlier tests may end as well
            break
        time.sleep(0.01)
    assert threading.active_count() <= before
