"""What failures cost: the formulas against a simulation, and the cells of a plan's table."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import small_experiment
from plan_helpers import needs_libtpu, plan, planned, report

from spmdtrain import RunConfig, UserError
from spmdtrain.document.terminal import byte_size
from spmdtrain.plan.failures import FailureOptions, Failures
from spmdtrain.plan.tables import failure_blocks, snapshots_sentence

HOUR = 3600.0
CASES = [
    # Mean seconds between failures, of a restart, of steps between saves, of a save.
    (4 * HOUR, 120.0, 530.0, 10.0),
    (4 * HOUR, 120.0, 4000.0, 10.0),
    (600.0, 60.0, 100.0, 20.0),
    (600.0, 0.0, 900.0, 20.0),  # most attempts fail
    (HOUR, 300.0, 20.0, 0.05),
]


def simulated(
    mttf: float, restart: float, interval: float, cost: float, failures: int = 40_000
) -> tuple[float, float]:
    """The goodput of a job with so many failures, and the mean seconds that one costs.

    Each failure is drawn by itself: it ends the work since the last save, or a restart.
    """
    draw = np.random.default_rng(0)
    done = taken = lost = 0.0
    in_steps = 0  # failures outside of restarts
    whole = interval + cost
    for number, time in enumerate(draw.exponential(mttf, failures)):
        taken += time
        working = time - restart * (number > 0)
        if working < 0:
            continue  # the restart has failed, and begins again
        saves = working // whole
        done += saves * interval
        lost += working - saves * whole
        in_steps += 1
    return done / taken, lost / in_steps + restart


@pytest.mark.parametrize(("mttf", "restart", "interval", "cost"), CASES)
def test_the_formulas_are_the_means_of_a_simulation(
    mttf: float, restart: float, interval: float, cost: float
) -> None:
    job = Failures(mttf, restart)
    goodput, lost = simulated(mttf, restart, interval, cost)
    assert job.goodput(interval, cost) == pytest.approx(goodput, rel=0.02)
    assert job.lost(interval, cost) == pytest.approx(lost, rel=0.02)


@pytest.mark.parametrize(("mttf", "cost"), [(4 * HOUR, 10.0), (600.0, 20.0), (600.0, 500.0)])
def test_no_other_interval_is_better_than_the_best(mttf: float, cost: float) -> None:
    job = Failures(mttf, 120.0)
    best = job.best_interval(cost)
    others = [job.goodput(x, cost) for x in best * np.geomspace(0.1, 10, 401)]
    assert job.goodput(best, cost) > max(others) * 0.995
    assert job.goodput(2 * best, cost) < job.goodput(best, cost) > job.goodput(best / 2, cost)
    if cost == 10.0:  # Young's formula, less the save itself
        assert best == pytest.approx((2 * cost * mttf) ** 0.5 - cost, rel=0.02)


def test_a_job_that_fails_all_the_time_has_no_goodput() -> None:
    job = Failures(1.0, 0.5)
    assert job.goodput(1e6, 0.1) == 0
    assert job.lost(1e6, 0.1) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, 1.0, None, None), "save_seconds=1.0 is for .* add --mttf HOURS"),
        ((0.0, 1.0, None, None), "mttf=0.0: it must be above 0"),
        ((float("nan"), 1.0, None, None), "mttf=nan: it must be above 0"),
        ((4.0, None, None, None), "--mttf needs --save-seconds"),
        ((4.0, 0.0, None, None), "save_seconds=0.0: it must be above 0"),
        ((4.0, 1.0, -1.0, None), "snapshot_seconds=-1.0: it must be above 0"),
        ((4.0, 1.0, None, -1.0), "restart_seconds=-1.0: it must be 0 or more"),
        ((0.5, 1800.0, None, None), "save_seconds=1800.0 is no less than the 1800 s between"),
        ((0.03, 1.0, None, None), "--mttf 0.03 h is no more than the 120 s of a restart"),
    ],
)
def test_what_makes_no_sense_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FailureOptions.parse(*given)
    assert FailureOptions.parse(None, None, None, None) is None


def rows(step: float | None, **config: Any) -> list[tuple[str, int | None, float]]:
    options = FailureOptions.parse(4.0, 10.0, 0.02, 60.0)
    assert options is not None
    found = options.as_json(RunConfig(global_batch_size=8, **config), step)
    job = Failures(4 * HOUR, 60.0)
    for row in found["rows"]:
        cost = 0.02 if "snapshots" in row["what"] else 10.0
        assert row["goodput"] == job.goodput(row["interval"], cost)
        assert row["lost"] == job.lost(row["interval"], cost)
    return [(row["what"], row["steps"], row["interval"]) for row in found["rows"]]


def test_the_rows_are_the_best_interval_and_the_cadences_of_the_run() -> None:
    best = Failures(4 * HOUR, 60.0).best_interval(10.0)  # 529.99 s
    assert rows(None) == [("checkpoints on disk, best", None, best)]
    assert rows(2.0) == [
        ("checkpoints on disk, best", 265, 530.0),
        ("snapshots in memory, auto", 1, 2.0),  # 0.02 s are 1 % of a step
    ]
    assert rows(0.5, checkpoint_every_steps=100, snapshot_every_steps=10) == [
        ("checkpoints on disk, best", 1060, 530.0),
        ("checkpoints on disk, as given", 100, 50.0),
        ("snapshots in memory, as given", 10, 5.0),
    ]
    assert rows(1e6)[0][1] == 1  # a step is the shortest interval


def test_the_table_has_the_rows_in_words() -> None:
    options = FailureOptions.parse(4.0, 10.0, 0.02, 60.0)
    assert options is not None
    config = RunConfig(global_batch_size=8, snapshot_every_steps=20)
    table, note = failure_blocks(report() | {"failures": options.as_json(config, 0.5)})
    cells: Any = table
    assert cells.rows == [
        ("checkpoints on disk, best", "1,060 steps, 8:50", "5:28", "95.92%"),
        ("snapshots in memory, as given", "20 steps, 0:10", "1:05", "99.35%"),
    ]
    text: Any = note
    assert "one in 4:00:00 on average" in text.text and "a snapshot by 0.02 s" in text.text


@pytest.mark.slow
def test_the_command_prints_what_snapshots_cost_and_the_best_interval(tmp_path: Path) -> None:
    config = small_experiment(tmp_path)
    options: tuple[Any, ...] = ("--topology", "cpu:8", "--no-advice", "--snapshot-every-steps", 10)
    options += ("--mttf", 4, "--save-seconds", 10, "--restart-seconds", 60)
    ended = plan(config, *options)
    assert ended.returncode == 0, ended.stderr
    row = re.search(r"checkpoints on disk, best\W+(\S+)\W+(\S+)\W+([\d.]+%)", ended.stdout)
    assert row is not None and row.groups() == ("8:50", "5:28", "95.92%"), ended.stdout
    found = json.loads(plan(config, *options, "--json").stdout)
    cost = found["snapshots"]
    assert cost["hosts"] == 1 and cost["sent"] == cost["copies"] == 0
    assert cost["at_rest"] == 2 * cost["kept"] > 0 and cost["seconds"] is None
    said = f"snapshots need {byte_size(cost['at_rest'])} of host memory per process"
    assert said in " ".join(ended.stdout.split())
    wrong = plan(config, *options, "--mttf", -1)
    assert (wrong.returncode, wrong.stderr) == (2, "error: --mttf -1.0: it must be above 0\n")


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:4x4", "gpu:h100:2x4"])
def test_hosts_keep_and_send_their_parts_of_a_state_that_is_split(
    topology: str, tmp_path: Path
) -> None:
    wider = (
        ("partial(nnx.Linear, 1, 1)", "partial(nnx.Linear, 1, 4096)"),
        ("(model(x) - y) ** 2", "((model(x) - y) ** 2).mean(1)"),
    )
    config = small_experiment(tmp_path, *wider)
    shared = ("--topology", topology, "--global-batch-size", 16, "--snapshot-every-steps", 10)
    own = ("--strategy", "fully_sharded", "--sharding.min-size", 1)
    whole, split = (planned(config, *shared, *more)["snapshots"] for more in ((), own))
    assert whole["sent"] == whole["copies"] == 0  # every host has everything
    assert 0 < split["sent"] == split["copies"] < split["kept"] < whole["kept"]
    assert split["at_rest"] == 2 * (split["kept"] + split["copies"])
    assert split["at_most"] == split["at_rest"] + split["kept"]
    hosts, rate = {"v5e:4x4": (4, 4 * 3.125e9), "gpu:h100:2x4": (2, 4 * 50e9)}[topology]
    assert split["hosts"] == hosts
    assert split["seconds"] == pytest.approx(split["sent"] / rate)
    assert "to the next host, in at least" in snapshots_sentence(split)
