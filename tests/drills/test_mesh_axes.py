"""Strategies with each mesh axis of a model, in one and two processes, against one device."""

from pathlib import Path

import numpy as np
import pytest
from helpers import REPOSITORY, metrics, run, text_in
from processes import launch

pytestmark = pytest.mark.drill

LLAMA = REPOSITORY / "experiments" / "llama.py"
SMALL = ("--preset", "moe", "--layers", 1, "--width", 32, "--length", 32, "--experts", 4)
RUN = ("--steps", 6, "--log-every", 1, "--eval-every-steps", 6, "--global-batch-size", 16)
AXES = {
    "context": ("--mesh.context", 2),
    "expert": ("--mesh.expert", 2),
    "tensor": ("--mesh.tensor", 2),
    "context and expert": ("--mesh.context", 2, "--mesh.expert", 2),
    "all": ("--mesh.context", 2, "--mesh.expert", 2, "--mesh.tensor", 2),
}
STRATEGIES = ("mirrored", "zero", "fully_sharded", "hybrid")
DAILY = ("fully_sharded", "context and expert", 2)


def values(workdir: Path) -> dict[str, list[float]]:
    """The logged terms of the loss, in training and evaluation."""
    names = ("loss", "cross_entropy", "balance", "gradient_norm")
    return {
        f"{split} {name}": [line[name] for line in metrics(workdir, split) if name in line]
        for split in ("train", "eval")
        for name in names
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_in(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    workdir = tmp_path_factory.mktemp("alone") / "run"
    ended = run(LLAMA, *SMALL, *RUN, "--data-dir", data, "--workdir", workdir, devices=1)
    assert ended.returncode == 0, ended.stderr
    return values(workdir)


@pytest.mark.parametrize(
    ("strategy", "axes", "processes"),
    [
        pytest.param(*cell, marks=[pytest.mark.nightly] * (cell != DAILY))
        for cell in ((s, a, n) for s in STRATEGIES for a in AXES for n in (1, 2))
        if cell[0] == "mirrored" or cell[1] != "all"  # the others need 16 devices for it
    ],
)
def test_losses_are_those_of_one_device(
    strategy: str,
    axes: str,
    processes: int,
    data: Path,
    expected: dict[str, list[float]],
    tmp_path: Path,
) -> None:
    options = (*SMALL, *RUN, *AXES[axes], "--strategy", strategy, "--sharding.min-size", 64)
    line = (*options, "--data-dir", data, "--workdir", tmp_path / "run")
    ended = launch(LLAMA, *line, processes=processes, devices=8 // processes)
    assert ended.code == 0, ended.output
    found = values(tmp_path / "run")
    assert len(found["train loss"]) == 6 and len(found["eval loss"]) == 1
    for name, expected_values in expected.items():
        np.testing.assert_allclose(found[name], expected_values, rtol=1e-4, err_msg=name)
