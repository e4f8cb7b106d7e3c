"""A job that continues in fewer processes, and takes the lost ones in again."""

import re
from pathlib import Path
from typing import Any

import pytest
from helpers import run
from processes import drill, launch, sums

pytestmark = pytest.mark.drill

STEPS = 80
EXACT = ("--exact", 16, "--global-batch-size", 48, "--steps", STEPS)
KILLED = r"(.*) was killed \(SIGKILL\).*; restart 1 of 3 at once with 2 of 4 processes"
STOPPED = r"hung: (.*) is stopped by a signal.*; restart 1 of 3 at once with 2 of 4 processes"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The final state of a run on one device without a loss."""
    folder = tmp_path_factory.mktemp("alone")
    ended = run(drill(folder), *EXACT, "--workdir", folder / "run", devices=1)
    assert ended.returncode == 0, ended.stderr
    return sums(folder / "run", STEPS)


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
