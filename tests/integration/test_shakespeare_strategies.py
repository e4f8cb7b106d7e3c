"""The transformer on text under every strategy, in one process and in several: the same losses.

The rows are those of the support matrix that place a transformer in ways of their own;
`test_strategy_matrix.py` tests all rows with digits.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import GPT, metrics, text_in
from matrix import ROWS, Row, accepted
from processes import job
from strategy_runs import (
    CADENCE,
    MIDDLE,
    REPLICATED,
    STEPS,
    Expected,
    Places,
    StrategyRun,
    StrategyRuns,
    assert_in_place,
    assert_one_step_is_the_same,
    assert_same_step,
    cell,
    strategy_runs,
)

pytestmark = pytest.mark.slow

# Every array is large enough to be split.
OPTIONS = ("--preset", "tiny", "--unroll", "False", "--sharding.min-size", "64", *CADENCE)

SHAPES = {
    "embedding": (64, 64),
    "blocks/attention/norm": (2, 64),
    "blocks/attention/qkv": (2, 64, 3, 4, 16),
    "blocks/attention/out": (2, 4, 16, 64),
    "blocks/mlp/norm": (2, 64),
    "blocks/mlp/up": (2, 64, 256),
    "blocks/mlp/down": (2, 256, 64),
    "norm": (64,),
}


def over(axis: str) -> Places:
    """Each in its longest dim, the first of several."""
    return {
        "embedding": (axis,),
        "blocks/attention/norm": (None, axis),
        "blocks/attention/qkv": (None, axis),
        "blocks/attention/out": (None, None, None, axis),
        "blocks/mlp/norm": (None, axis),
        "blocks/mlp/up": (None, None, axis),
        "blocks/mlp/down": (None, axis),
        "norm": (axis,),
    }


OVER_TENSOR: Places = {
    "embedding": ("tensor",),
    "blocks/attention/qkv": (None, None, None, "tensor"),
    "blocks/attention/out": (None, "tensor"),
    "blocks/mlp/up": (None, None, "tensor"),
    "blocks/mlp/down": (None, "tensor"),
}
OVER_BOTH: Places = over("fsdp") | {
    "embedding": ("tensor", "fsdp"),
    "blocks/attention/qkv": (None, "fsdp", None, "tensor"),
    "blocks/attention/out": (None, "tensor", None, "fsdp"),
    "blocks/mlp/up": (None, "fsdp", "tensor"),
    "blocks/mlp/down": (None, "tensor", "fsdp"),
}
PLACES: dict[str, Expected] = {
    "default": ({}, REPLICATED, REPLICATED),
    "mirrored": ({"data": 8}, REPLICATED, REPLICATED),
    "zero": ({"data": 8}, REPLICATED, over("data")),
    "fully_sharded": ({"fsdp": 8}, over("fsdp"), over("fsdp")),
    "tensor_parallel": ({"data": 4, "tensor": 2}, OVER_TENSOR, OVER_TENSOR),
    "fully_sharded --mesh.tensor 2": ({"fsdp": 4, "tensor": 2}, OVER_BOTH, OVER_BOTH),
    "hybrid+fully_sharded": ({"replica": 2, "fsdp": 4}, over("fsdp"), over("fsdp")),
}
PLACED = [row for row in ROWS if row.name in PLACES]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    return [*OPTIONS, "--data-dir", str(text_in(tmp_path_factory.mktemp("text")))]


@pytest.fixture(scope="module")
def runs(
    options: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StrategyRuns]:
    yield from strategy_runs(tmp_path_factory, ["--config", str(GPT), *options])


@pytest.fixture
def default(runs: StrategyRuns) -> StrategyRun:
    return runs(ROWS[0])


@pytest.mark.nightly
def test_the_arrays_have_the_shapes_of_the_tiny_preset(default: StrategyRun) -> None:
    assert {row.name for row in PLACED} == set(PLACES)
    found = {
        name.removeprefix("params/"): x.shape
        for name, x in default.state.items()
        if name.startswith("params/")
    }
    assert found == SHAPES


@pytest.mark.nightly
@cell(PLACED)
def test_twenty_steps(row: Row, runs: StrategyRuns, default: StrategyRun) -> None:
    run = runs(row)
    assert len(run.losses) == STEPS and run.losses[-1] < 0.8 * run.losses[0]
    np.testing.assert_allclose(run.losses, default.losses, rtol=1e-3)
    np.testing.assert_allclose(validation(run.lines), validation(default.lines), rtol=1e-3)
    assert_in_place(run, PLACES[row.name])


# One that splits everything over one axis. test_strategy_matrix.py has the others.
DAILY = ("fully_sharded",)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.nightly] * (row.name not in DAILY))
        for row in PLACED
        if row.name not in ("mirrored", "zero", "hybrid+fully_sharded")
    ],
)
def test_one_step_from_a_common_state(row: Row, runs: StrategyRuns, default: StrategyRun) -> None:
    assert_one_step_is_the_same(runs(row), default)


def validation(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """The loss and the accuracy on the text that validates, at the end."""
    (line,) = [line for line in lines if line["split"] == "eval" and line["step"] == STEPS]
    return [line["loss"], line["accuracy"]]


# -- many processes --------------------------------------------------------------------------------

# By strategy the processes and the devices of each. `test_shakespeare_text.py` has mirrored, and
# `test_strategy_matrix.py` the others, with a smaller model.
TOPOLOGIES = {
    "hybrid+fully_sharded": (4, 2),
    "fully_sharded --mesh.tensor 2": (2, 4),
}
IN_PROCESSES = [row for row in accepted("processes") if row.name in TOPOLOGIES]


@pytest.mark.drill
@pytest.mark.nightly
@pytest.mark.parametrize("row", IN_PROCESSES, ids=lambda row: row.name)
def test_processes_from_a_common_state(
    row: Row,
    options: Sequence[str],
    default: StrategyRun,
    tmp_path: Path,
) -> None:
    """From a checkpoint of one process and another strategy, and its own is read there again."""
    processes, devices = TOPOLOGIES[row.name]
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(default.source / str(MIDDLE), checkpoints / str(MIDDLE))
    line = [*options, *row.arguments, "--workdir", tmp_path / "run"]
    after_one = ["--checkpoint-every-steps", MIDDLE + 1]
    job(GPT, *line, *after_one, processes=processes, devices=devices)
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert len(losses) == STEPS - MIDDLE
    np.testing.assert_allclose(losses, default.losses[MIDDLE:], rtol=1e-3)
    found = default.resume(checkpoints / str(MIDDLE + 1), MIDDLE + 1)
    assert_same_step(losses[0], found, default)
