"""A job that continues in fewer processes, and takes the lost ones in again."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import events
from processes import drill, job, launch, show, sums, sums_on_one_device

from spmdtrain import open_run

pytestmark = pytest.mark.drill

STEPS = 80
EXACT = ("--exact", 16, "--global-batch-size", 48, "--steps", STEPS)
KILLED = r"(.*) was killed \(SIGKILL\).*; restart 1 of 3 at once with 2 of 4 processes"
STOPPED = r"hung: (.*) is stopped by a signal.*; restart 1 of 3 at once with 2 of 4 processes"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The final state of a run on one device without a loss."""
    return sums_on_one_device(tmp_path_factory.mktemp("alone"), STEPS, *EXACT)


@pytest.mark.parametrize(
    ("rank", "fault", "message"),
    [
        (0, "SIGKILL", KILLED),
        *(pytest.param(rank, "SIGKILL", KILLED, marks=pytest.mark.nightly) for rank in (1, 2, 3)),
        pytest.param(1, "SIGSTOP", STOPPED, marks=pytest.mark.nightly),
    ],
)
def test_a_lost_process_is_left_out_and_taken_in_again_with_the_same_bits(
    tmp_path: Path, alone: dict[str, str], rank: int, fault: str, message: str
) -> None:
    workdir = tmp_path / "run"
    options: tuple[Any, ...] = (*EXACT, "--workdir", workdir, "--pause", 0.2)
    options += ("--fault", fault, "--fault-rank", rank)
    own = ("--min-processes", 2, "--hang-timeout", 15)
    mark = tmp_path / "mark"
    launched = launch(drill(tmp_path), *options, own=own, processes=4, mark=mark)
    assert launched.code == 0, launched.output
    (lost,) = (found for text in launched.said if (found := re.fullmatch(message, text)))
    assert lost[1] == ("chief" if rank == 0 else f"worker {rank - 1}"), launched.output
    after = launched.said[launched.said.index(lost[0]) + 1 :]
    asked = "4 processes are possible again: asked the tasks to save and exit within 120 s"
    assert after[0] == asked, launched.output
    assert re.fullmatch(r".* was preempted and saved .*; continues with 4 processes", after[1])
    assert after[2:] == ["finished"], launched.output
    counts = re.findall(r"\] (\d) x cpu of", launched.output)
    assert counts == ["4", "2", "4"], launched.output  # `exact` needs a power of two
    assert sums(workdir, STEPS) == alone
    starts = [event for event in open_run(workdir).events if event["event"] == "start"]
    assert [(x["processes"], x.get("change")) for x in starts] == [
        (4, None),
        (2, "loss"),
        (4, "rejoin"),
    ]
    assert starts[1]["step"] + starts[1]["lost_steps"] in range(10, 13)  # killed in batch 13
    assert starts[2]["lost_steps"] == 0  # the second was saved


def test_each_start_tells_its_processes_and_what_was_lost(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    config = drill(tmp_path)
    options: tuple[Any, ...] = ("--workdir", workdir, "--fault", "exception")
    options += ("--fault-after", workdir / "checkpoints" / "10")  # and one at 15
    faults = ("--fault-at", 13), ("--fault-at", 4, "--fault-rank", 0), ("--fault", "")
    for processes, fault in zip((2, 1, 2), faults, strict=True):
        ended = job(config, *options, *fault, processes=processes, check=False)
        assert (0 in {one.code for one in ended}) == (fault == ("--fault", "")), show(ended)
    record = open_run(workdir)
    starts = [event for event in record.events if event["event"] == "start"]
    names = ("step", "processes", "devices", "source", "change")
    assert [tuple(start.get(name) for name in names) for start in starts] == [
        (0, 2, 2, "initial", None),
        (10, 1, 1, "checkpoint", "loss"),
        (10, 2, 2, "checkpoint", "rejoin"),
    ]
    assert "lost_steps" not in starts[0] and "lost_seconds" not in starts[0]
    lines = [json.loads(x) for x in (workdir / "performance.jsonl").read_text().splitlines()]
    for before, start in itertools.pairwise(starts):
        own = [x for x in lines if before["time"] <= x["time"] < start["time"]]
        assert start["lost_steps"] == own[-1]["step"] - 10 > 0
        first = next(x["time"] for x in lines if x["time"] > start["time"])
        gap = start["time"] - own[-1]["time"]
        assert gap < start["lost_seconds"] < first - own[-1]["time"]
    assert [line["processes"] for line in lines] == [
        start["processes"]
        for start, end in itertools.pairwise([*starts, {"time": math.inf}])
        for line in lines
        if start["time"] <= line["time"] < end["time"]
    ]
    points = [
        (event.step, value.simple_value)
        for event in events(workdir)
        for value in event.summary.value
        if value.tag == "job/processes"
    ]
    assert points[0] == (0, 2.0) and points[-1] == (24, 2.0)
    assert points.count((10, 1.0)) == 1  # before its first line
    assert points.count((10, 2.0)) == 2  # a line of the first start, and the third start


@pytest.mark.nightly
def test_a_number_of_processes_that_the_run_refuses_gives_it_all_again(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    options = ("--workdir", workdir, "--batch-size-per-device", 12, "--fault", "SIGKILL")
    config = drill(tmp_path, ("global_batch_size: int | None = 24", "none: int = 0"))
    launched = launch(config, *options, own=("--min-processes", 1), mark=tmp_path / "mark")
    assert launched.code == 0, launched.output
    (number,) = (n for n, text in enumerate(launched.said) if "; restart " in text)
    assert launched.said[number].endswith("; restart 1 of 3 at once with 1 of 2 processes")
    refused = r"chief ended \(code 2\): .*global_batch_size.*; continues with 2 processes"
    assert re.fullmatch(refused, launched.said[number + 1]), launched.output
    assert launched.said[number + 2 :] == ["finished"], launched.output
