"""`input_wait`: the share of the training time in which the devices waited for batches."""

import json
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import events

from spmdtrain import FunctionModel, Loop, MeshSpec, Trainer
from spmdtrain.document.terminal import Terminal
from spmdtrain.train.run_logger import InputWait

X = np.ones((80, 4), np.float32)
READ = 0.01  # seconds


class Slow:
    """A dataset whose batches take `READ` seconds each."""

    def __len__(self) -> int:
        return len(X)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        time.sleep(READ)
        return {"x": X[indices]}


def objective(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"loss": model(batch["x"])}


def slow_step(model: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Takes longer than the reading of a batch."""
    product = jax.lax.fori_loop(0, 60, lambda _, x: x @ x / 400, jnp.ones((400, 400)))
    return {"loss": model(batch["x"]) * product[0, 0]}


def share_of_epoch(workdir: Path, data: Any, of: Any, steps: int = 80) -> float:
    model = FunctionModel(lambda key: jnp.ones(4), lambda params, x: x @ params)
    fitted = Trainer(
        model=model,
        objective=of,
        optimizer=optax.sgd(0.0),
        global_batch_size=8,
        terminal=Terminal(),
        mesh=MeshSpec(devices=(0,)),
        workdir=str(workdir),
    )
    fitted.fit(data, steps=steps)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    epochs = [line["input_wait"] for line in lines if line["split"] == "epoch"]
    return float(np.mean(epochs))


def test_steps_wait_for_a_slow_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert share_of_epoch(tmp_path, Slow(), objective) > 0.7
    out = capsys.readouterr().out
    shown = [float(x) for x in re.findall(r"^step .* steps/s  input_wait (\S+)%  ", out, re.M)]
    written = [
        value.simple_value
        for event in events(tmp_path)
        for value in event.summary.value
        if value.tag == "speed/input_wait"
    ]
    np.testing.assert_allclose(shown, 100 * np.array(written), atol=0.051)
    assert np.median(written) > 0.7
    assert re.search(r"^epoch 1 .* examples/s  input_wait \d\d\.\d%$", out, re.M)


@pytest.mark.slow
def test_a_read_that_ends_before_the_steps_do_is_no_wait(tmp_path: Path) -> None:
    assert share_of_epoch(tmp_path / "memory", {"x": X}, slow_step, steps=20) < 0.05
    assert share_of_epoch(tmp_path / "reads", Slow(), slow_step, steps=20) < 0.1


def test_a_loop_measures_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    with Loop(steps=30, global_batch_size=8, terminal=Terminal()) as loop:
        state = loop.start(lambda key: {"params": jnp.ones(4)}, train=Slow())
        step = loop.compile_step(lambda state, batch, key: (state, {"loss": jnp.mean(batch["x"])}))
        for batch in loop.batches():
            state, output = step(state, batch)
            loop.end_step(state, output)
    shown = re.findall(r"input_wait (\S+)%", capsys.readouterr().out)
    assert float(shown[-1]) > 40  # a busy machine is slow at the rest, too


def test_the_share_is_of_the_time_since_the_last_reading() -> None:
    wait = InputWait()
    wait.restart(0, 10.0)
    assert wait.read(3, 11.0) is None  # not counted, as with parameter servers
    wait.count(1.0)
    wait.count(0.5)
    assert wait.read(4, 15.0) == 0.3
    wait.count(0.5)
    assert wait.read(4, 16.0) == 0.3  # no step since: the last reading
    assert wait.read(5, 17.0) == 0.25
    wait.count(9.0)
    assert wait.read(6, 18.0) == 1.0
    wait.restart(6, 20.0)
    assert wait.read(6, 21.0) is None and wait.waited == 11.0
