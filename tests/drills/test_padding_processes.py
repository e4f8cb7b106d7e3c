"""Evaluations of objectives that mix examples or draw: two processes have the numbers of one."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import metrics
from processes import drill, launch

pytestmark = pytest.mark.drill

OBJECTIVE = """
def objective(model, batch, key):
    x, y = batch
    size = y.shape
    return {
        "loss": (model(x)[:, 0] - x.sum(1)) ** 2,
        "mixed": jnp.broadcast_to(y.mean(), size),
        "drawn": jax.random.uniform(key, size),
    }
"""


@pytest.mark.nightly
def test_two_processes_evaluate_what_mixes_and_draws_as_one_does(tmp_path: Path) -> None:
    """The training of two processes of two devices, and the evaluator, one process of one."""
    text = (
        ("import numpy as np", "import jax\nimport jax.numpy as jnp\nimport numpy as np"),
        ("\ndef objective(model, batch):", OBJECTIVE + "\n\ndef plain(model, batch):"),
        ("(rows.x[:50], rows.y[:50])", "(rows.x[:100], np.arange(100, dtype=np.float32))"),
    )
    workdir = tmp_path / "run"
    launched = launch(
        drill(tmp_path, *text),
        *("--workdir", workdir, "--steps", 2, "--eval-batch-size", 64),
        own=["--evaluator"],
        devices=2,
    )
    assert launched.code == 0, launched.output
    (ours,) = metrics(workdir, "eval")
    (other,) = map(json.loads, (workdir / "metrics.evaluator.jsonl").read_text().splitlines())
    assert (ours["step"], other["step"]) == (2, 2)
    # Batches of 64 and 36 rows. Padded they would give 52.256.
    assert ours["mixed"] == other["mixed"] == 49.5
    np.testing.assert_allclose(ours["drawn"], other["drawn"], rtol=1e-6)
    np.testing.assert_allclose(ours["loss"], other["loss"], rtol=1e-5)
