"""Every cell of the support matrix: train, evaluate, resume, restore, under every strategy.

All of them train the digits, with dropout, and have the numbers of the `default` strategy, which
is a plain `jax.jit` on one device.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matrix
import numpy as np
import pytest
from helpers import DIGITS, metrics, saved_steps, small_experiment
from matrix import ROWS, Row, accepted
from processes import codes, job, show, sums, sums_of
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
    cell,
    expected_places,
    strategy_runs,
)

from spmdtrain.run import main
from spmdtrain.strategies import STRATEGIES

# One kernel of four arrays is large enough to be split.
OPTIONS = (
    *("--config", str(DIGITS), "--hidden", "32", "--sharding.min-size", "512"),
    *CADENCE,
)

# -- where the state has to be ---------------------------------------------------------------------

WIDE, BIAS, NARROW = "layers/0/kernel", "layers/0/bias", "layers/1/kernel"  # 64x32, 32, 32x10
OVER_FSDP: Places = {WIDE: ("fsdp",)}
OVER_DATA: Places = {WIDE: ("data",)}
OVER_TENSOR: Places = {WIDE: (None, "tensor"), BIAS: ("tensor",), NARROW: ("tensor",)}
PLACES: dict[str, Expected] = {
    "default": ({}, REPLICATED, REPLICATED),
    "one_device --mesh.devices 3": ({}, REPLICATED, REPLICATED),
    "mirrored": ({"data": 8}, REPLICATED, REPLICATED),
    "zero": ({"data": 8}, REPLICATED, OVER_DATA),
    "fully_sharded": ({"fsdp": 8}, OVER_FSDP, OVER_FSDP),
    "tensor_parallel": ({"data": 4, "tensor": 2}, OVER_TENSOR, OVER_TENSOR),
    "central_storage": ({"data": 8}, REPLICATED, REPLICATED),
    "hybrid": ({"replica": 2, "data": 4}, REPLICATED, REPLICATED),
    "fully_sharded --mesh.tensor 2": (
        {"fsdp": 4, "tensor": 2},
        OVER_TENSOR | {WIDE: ("fsdp", "tensor")},
        OVER_TENSOR | {WIDE: ("fsdp", "tensor")},
    ),
    "hybrid+fully_sharded": ({"replica": 2, "fsdp": 4}, OVER_FSDP, OVER_FSDP),
    "hybrid+zero": ({"replica": 2, "data": 4}, REPLICATED, OVER_DATA),
    "central_storage+fully_sharded": ({"fsdp": 8}, OVER_FSDP, OVER_FSDP),
}

# -- one trainer a row, which all its cells use ----------------------------------------------------


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys() and len(expected) == 15
    for name, x in expected.items():
        y = found[name]
        assert (y.dtype, y.shape, y.tobytes()) == (x.dtype, x.shape, x.tobytes()), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StrategyRuns]:
    yield from strategy_runs(tmp_path_factory, OPTIONS)


@pytest.fixture
def default(runs: StrategyRuns) -> StrategyRun:
    return runs(ROWS[0])


# -- the matrix ------------------------------------------------------------------------------------


def test_every_strategy_is_in_the_matrix_and_the_page_shows_it() -> None:
    # Those of parameter servers are in test_parameter_server.py, as they take several processes.
    placed = [name for name, one in STRATEGIES.items() if not one.is_asynchronous]
    assert [row.strategy for row in ROWS[: len(placed)]] == placed
    assert {row.name for row in ROWS} == set(PLACES)
    expected = {("default", "processes"), ("one_device", "processes")}
    assert {(row.strategy, column) for row, column in matrix.refused()} == expected
    assert matrix.shown() == matrix.render(), "run python tests/matrix.py --write"


@cell(accepted("train"))
def test_train(row: Row, runs: StrategyRuns, default: StrategyRun) -> None:
    run = runs(row)
    assert len(run.losses) == STEPS and run.losses[-1] < 0.9 * run.losses[0]
    np.testing.assert_allclose(run.losses, default.losses, rtol=1e-3)
    assert_in_place(run, PLACES[row.name])


@cell(accepted("train"))
def test_train_one_step_from_a_common_state(
    row: Row, runs: StrategyRuns, default: StrategyRun
) -> None:
    assert_one_step_is_the_same(runs(row), default)


@cell(accepted("evaluate"))
def test_evaluate(row: Row, runs: StrategyRuns) -> None:
    run = runs(row)
    rows = run.experiment.test.rows(np.arange(300))  # 4 batches of 64, and 44
    x, w = rows["image"].reshape(300, 64).astype(np.float64), run.state
    x = np.maximum(x @ w[f"params/{WIDE}"] + w[f"params/{BIAS}"], 0)
    logits = x @ w[f"params/{NARROW}"] + w["params/layers/1/bias"]
    right = int((logits.argmax(-1) == rows["label"]).sum())
    assert run.counted["accuracy"] == right / 300
    terms = np.log(np.exp(logits).sum(-1)) - logits[np.arange(300), rows["label"]]
    np.testing.assert_allclose(run.counted["loss"], terms.mean(), rtol=1e-6)


@cell(accepted("resume"))
def test_resume(row: Row, runs: StrategyRuns) -> None:
    run = runs(row)
    assert_same_bits(run.resume(run.source / "10", STEPS), run.state)
    assert metrics(run.workdir) == [line for line in run.lines if line["step"] > MIDDLE]
    assert len(run.seen) == 1 + STEPS - MIDDLE
    assert all(found == run.places[0] for found in run.seen)


@cell(accepted("restore"))
def test_restore_from_another(row: Row, runs: StrategyRuns) -> None:
    """Each is the source of the next, and the last of the first."""
    run, source = runs(row), runs(ROWS[ROWS.index(row) - 1])
    assert_same_bits(run.resume(source.source / "20", STEPS), source.state)
    assert run.trainer.state is not None
    places = expected_places(row, run.trainer.state, PLACES[row.name])
    assert run.seen == [places]  # no step was run


# -- by the command --------------------------------------------------------------------------------

# Of each kind of placement one: runs() begins most of these with the default's initial state.
BY_COMMAND = ("mirrored", "zero", "fully_sharded", "tensor_parallel", "central_storage")


@pytest.mark.slow
@cell([row for row in accepted("train") if row.name in BY_COMMAND])
def test_the_command_trains_resumes_and_evaluates(
    row: Row,
    runs: StrategyRuns,
    default: StrategyRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each from its own initial state, in trainers of its own."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*OPTIONS, *row.arguments]
    assert main([*options, "--workdir", str(whole)]) == 0
    losses = [line["loss"] for line in metrics(whole, "train")]
    np.testing.assert_allclose(losses, default.losses, rtol=1e-3)
    assert sums_of(whole / "checkpoints" / "0") == sums_of(default.source / "0")  # the same bits
    assert main([*options, "--workdir", str(parts), "--steps", str(MIDDLE)]) == 0
    assert "resumed" not in capsys.readouterr().out
    assert main([*options, "--workdir", str(parts)]) == 0
    assert f"resumed from step {MIDDLE} of {parts}" in capsys.readouterr().out
    assert sums(parts, STEPS) == sums(whole, STEPS)
    assert [line["loss"] for line in metrics(parts, "train")] == losses
    assert main([*options, "--workdir", str(parts), "--mode", "evaluate"]) == 0
    reported = evaluation_in(capsys.readouterr().out)
    assert reported == {"step": STEPS, "split": "test"} | metrics_of(whole, "test")


def evaluation_in(output: str) -> dict[str, Any]:
    """What `--mode evaluate` tells."""
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(line)
    return found


def metrics_of(workdir: Path, split: str) -> dict[str, float]:
    """The last line of a split, without its place."""
    *_, line = metrics(workdir, split)
    return {name: line[name] for name in ("loss", "accuracy")}


# -- many processes --------------------------------------------------------------------------------


# Of each kind of placement one. The drills of test_drills.py resume with mirrored.
RESUMED_BY_PROCESSES = ("zero", "tensor_parallel", "central_storage")
# Further combinations of what these and the others in this list place.
NIGHTLY = (
    *("tensor_parallel", "fully_sharded", "hybrid", "hybrid+zero", "hybrid+fully_sharded"),
    *("central_storage", "central_storage+fully_sharded"),
)


@pytest.mark.drill
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.nightly] * (row.name in NIGHTLY))
        for row in accepted("processes")
    ],
)
def test_two_processes_train_and_resume(row: Row, default: StrategyRun, tmp_path: Path) -> None:
    """From a checkpoint of one process and another strategy, and from one of their own."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = [*OPTIONS[2:], *row.arguments]
    shutil.copytree(default.source / "0", whole / "checkpoints" / "0")
    chief, _ = job(DIGITS, *options, "--workdir", whole, processes=2, devices=4)
    assert f", {row.strategy}, mesh " in chief.output and "2 processes" in chief.output
    losses = [line["loss"] for line in metrics(whole, "train")]
    assert len(losses) == STEPS
    np.testing.assert_allclose(losses[0], default.losses[0], rtol=1e-5)
    np.testing.assert_allclose(losses, default.losses, rtol=1e-3)
    found = metrics_of(whole, "test")["loss"]
    np.testing.assert_allclose(found, default.counted["loss"], rtol=1e-3)

    if row.name not in RESUMED_BY_PROCESSES:
        return
    shutil.copytree(whole / "checkpoints" / "10", parts / "checkpoints" / "10")
    chief, _ = job(DIGITS, *options, "--workdir", parts, processes=2, devices=4)
    assert f"resumed from step {MIDDLE} of {parts}" in chief.output
    assert sums(parts, STEPS) == sums(whole, STEPS)
    assert metrics(parts) == [line for line in metrics(whole) if line["step"] > MIDDLE]


@pytest.mark.drill
@pytest.mark.parametrize(
    ("row", "column"), matrix.refused(), ids=lambda x: x.name if isinstance(x, Row) else x
)
def test_a_cell_that_says_no_is_refused_in_words(row: Row, column: str, tmp_path: Path) -> None:
    assert column == "processes"  # all that is refused today
    options = [*OPTIONS[2:], "--strategy", row.strategy, "--workdir", tmp_path / "run"]
    ended = job(DIGITS, *options, processes=2, devices=4, check=False)
    assert codes(ended) == [2, 2], show(ended)
    said = [one.output.splitlines() for one in ended]
    # Each by itself, or because another has said it first.
    own = r"error|(chief|worker 0) exits because (worker 0|chief) failed"
    for lines in said:
        assert len(lines) == 1 and re.fullmatch(f"({own}): {row.refused[column]}", lines[0]), said
    assert any(lines[0].startswith("error: ") for lines in said)
    assert not (tmp_path / "run").exists()


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--strategy mirored", "there is no strategy 'mirored'. Did you mean 'mirrored'?"),
        ("--strategy hybrid+zeros", "there is no strategy 'zeros'. Did you mean 'zero'?"),
        (
            "--strategy one_device+zero",
            "strategy one_device+zero: one_device is for one device, and cannot be combined",
        ),
        (
            "--strategy default --mesh.data 8",
            "mesh.data is 8 and strategy is default: that strategy has no mesh",
        ),
        (
            "--strategy one_device --mesh.devices 0 1",
            "strategy one_device takes one device, but mesh.devices names 2",
        ),
        (
            "--strategy fully_sharded --mesh.fsdp 1",
            "strategy fully_sharded uses the axis fsdp, and the mesh has fsdp=1: replica=1, "
            "data=8, fsdp=1, expert=1, context=1, tensor=1 on 8 devices",
        ),
        (
            "--strategy hybrid --mesh.replica 3",
            "mesh: replica=3 * fsdp=1 * expert=1 * context=1 * tensor=1 = 3 does not divide 8 "
            "devices, so data=-1 has no whole size",
        ),
        (
            "--strategy tensor_parallel --hidden 33",
            "params/layers/0/bias: dim 0 of shape (33,) does not divide over tensor=2 "
            "(33 = 16 * 2 + 1)",
        ),
        (
            "--strategy fully_sharded --hidden 1001 1001",
            "params/layers/1/kernel, shape (1001, 1001), would be replicated, 4.01 MB: "
            "strategy fully_sharded splits over fsdp=8, no rule splits it, and no dim divides "
            "(1001 = 125 * 8 + 1, 1001 = 125 * 8 + 1). Make a dim divide, or give a rule for it: "
            "PartitionSpec() replicates it (or raise --sharding.replicated-limit)",
        ),
        (
            "--strategy zero --hidden 1001 1001",
            "opt_state/0/mu/layers/1/kernel, shape (1001, 1001), would be replicated",
        ),
        (
            "--sharding.offload state",
            "sharding.offload is for central_storage, but the strategy is mirrored",
        ),
        (
            "--strategy zero --sharding.max-shards 4",
            "sharding.max_shards is for fully_sharded, but the strategy is zero",
        ),
        (
            "--collectives.reduce-dtype bfloat16",
            "collectives.reduce_dtype=bfloat16 has no effect on CPU",
        ),
        (
            "--collectives.combine-threshold-bytes 1000000",
            "collectives.combine_threshold_bytes is not supported on CPU",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = ["--workdir", str(tmp_path / "run"), "--steps", "1"]
    assert main(["--config", str(DIGITS), *options.split(), *workdir]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x]
    assert line.startswith(f"error: {message}")
    assert saved_steps(tmp_path / "run") == []


def test_tensor_parallel_wants_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_experiment(tmp_path)
    options = ["--workdir", str(tmp_path / "run"), "--strategy", "tensor_parallel"]
    assert main(["--config", str(config), *options]) == 2
    assert capsys.readouterr().err == (
        "error: mesh axis tensor=2 is not used: under strategy tensor_parallel only sharding rules "
        "split over tensor, and none of the 0 rules names it, so its devices would repeat each "
        "other's work. Give rules that name tensor or choose another strategy\n"
    )
