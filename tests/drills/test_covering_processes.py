"""Random crossings of features by real processes against plain JAX (`tests/covering.py`).

`COVERING_SEED` is the first seed, and by default the date for those at night.
"""

import datetime
import importlib.util
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import covering
import jax
import numpy as np
import pytest
from covering import Cell
from helpers import BOUND, command, metrics
from processes import job, launching
from server_jobs import text_of

from spmdtrain import load_params
from spmdtrain.config.run_config import Purpose, derive_seed
from spmdtrain.tree import named_leaves

pytestmark = pytest.mark.drill

DATE = int(os.environ.get("COVERING_SEED", f"{datetime.date.today():%Y%m%d}000"))
EXPERIMENT = """
import sys
sys.path[:0] = [{tests!r}, {integration!r}]

import covering
import test_covering
from covering import Cell

from spmdtrain import Experiment, RunConfig as Config

CELL = {cell!r}


def build(config):
    return Experiment(
        model=test_covering.make_model(CELL),
        objective=test_covering.objective(CELL),
        optimizer=covering.make_optimizer(CELL),
        train=test_covering.source(CELL),
        validation=covering.make_data(CELL, count=21, shift=7),
    )
"""


def drawn(seed: int, **fixed: Any) -> Cell:
    """Draws a cell of a Trainer that has random access to its data, and is not refused."""
    generator = random.Random(seed)
    cell = replace(covering.draw(seed), entry="trainer", devices=4, exact=None, begun_with=())
    cell = replace(cell, compute_dtype="float32", callback="none")
    sources = ("arrays", "records", "grain", "hugging_face")
    strategies = ("mirrored", "zero", "fully_sharded")  # `default` is for one process
    cell = replace(
        cell,
        model=cell.model if cell.model != "keras" else "function",
        source=cell.source if cell.source in sources else "arrays",
        optimizer="adam" if cell.optimizer in covering.OF_KERAS else cell.optimizer,
        strategy=generator.choice(strategies),
        microbatches=cell.microbatches if cell.batch % (4 * cell.microbatches) == 0 else 2,
        continued="resumed" if cell.continued != "no" and cell.steps > 1 else "no",
    )
    cell = replace(cell, **fixed)
    of_function = cell.weights != "params" or cell.model == "function"  # whose objective sees them
    return cell if of_function else replace(cell, weights="data")


def options_of(cell: Cell, workdir: Path, steps: int) -> list[object]:
    options = {
        **{"--workdir": workdir, "--steps": steps, "--seed": cell.seed, "--log-every": 1},
        **{"--global-batch-size": cell.batch, "--eval-batch-size": cell.eval_batch},
        **{"--strategy": cell.strategy, "--microbatches": cell.microbatches},
        **{"--steps-per-dispatch": cell.steps_per_dispatch, "--remat": cell.remat},
        **{"--ema-decay": cell.average, "--freeze": "first" if cell.freeze else None},
        "--eval-every-steps": cell.steps,
    }
    given = [x for pair in options.items() if pair[1] is not None for x in pair]
    return ["--no-shuffle", *given]


def check(cell: Cell, workdir: Path, factors: dict[str, np.ndarray]) -> None:
    key = jax.random.key(derive_seed(cell.seed, Purpose.STEP))
    evaluated = covering.make_data(cell, count=21, shift=7)
    wanted, (rtol, atol) = covering.expected(cell, key, evaluated, factors), (1e-3, 1e-5)
    losses = [line["loss"] for line in metrics(workdir, "train")]
    np.testing.assert_allclose(losses, wanted.losses, rtol=rtol, atol=atol)
    if not cell.draws:
        line = metrics(workdir, "eval")[-1]
        for name, mean in wanted.evaluation.items():
            np.testing.assert_allclose(line[name], mean, rtol=rtol, atol=atol, err_msg=name)
    if cell.average is None and not cell.lora:
        found = named_leaves(load_params(workdir))
        for name, value in wanted.params.items():
            (leaf,) = (x for path, x in found.items() if name in path)
            np.testing.assert_allclose(leaf, value, rtol=rtol, atol=atol, err_msg=name)


def written(cell: Cell, folder: Path) -> Path:
    tests = Path(__file__).parents[1]
    path = folder / "crossing.py"
    integration = str(tests / "integration")
    path.write_text(EXPERIMENT.format(tests=str(tests), integration=integration, cell=cell))
    print(cell)
    return path


def first_factors(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "integration")
    found: dict[str, np.ndarray] = importlib.import_module("test_covering").first_factors(cell)
    return found


def at_night(chosen: int, count: int) -> list[Any]:
    more = [pytest.param(DATE + i, marks=pytest.mark.nightly) for i in range(count)]
    return [chosen, *more]


@pytest.mark.parametrize("seed", at_night(1, 12))
def test_two_processes_compute_what_a_plain_loop_does(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, workdir = drawn(seed), tmp_path / "run"
    config = written(cell, tmp_path)
    if cell.continued == "resumed":
        begun = options_of(cell, workdir, max(1, cell.steps // 2))
        job(config, *begun, processes=2, devices=2)
    job(config, *options_of(cell, workdir, cell.steps), processes=2, devices=2)
    check(cell, workdir, first_factors(cell, monkeypatch))


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize("seed", at_night(5, 8))
def test_one_worker_with_a_server_computes_what_a_plain_loop_does(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"steps_per_dispatch": 1, "microbatches": 1, "model": "nnx", "continued": "no"}
    cell = drawn(seed, strategy="parameter_server", **alone)
    line = command(written(cell, tmp_path), *options_of(cell, tmp_path / "run", cell.steps))
    with launching(line, "--ps", 1, processes=2) as (process, lines):
        assert process.wait(BOUND) == 0, text_of(lines)
    check(cell, tmp_path / "run", first_factors(cell, monkeypatch))
