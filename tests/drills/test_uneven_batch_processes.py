"""Batches that do not divide, in several processes."""

from pathlib import Path

import numpy as np
from helpers import metrics
from processes import drill, job


def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    options = ("--steps", 3, "--global-batch-size", 5, "--uneven-batch", "pad")
    config = drill(tmp_path)
    job(config, "--workdir", tmp_path / "two", *options, processes=2, devices=2)
    job(config, "--workdir", tmp_path / "one", *options, processes=1, devices=1)
    two, one = ([x["loss"] for x in metrics(tmp_path / n, "train")] for n in ("two", "one"))
    assert len(one) == 3
    np.testing.assert_allclose(two, one, rtol=2e-6)
