"""A run that ends at any change of its workdir continues as if nothing had happened."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import TESTS

KILLED = -9
# Jobs and tasks that may make fewer changes than the undisturbed ones: an evaluator may come to
# fewer checkpoints, and a device fault may be found before a save in the background has ended.
VARYING = (("evaluator", 1), ("rollback", 0))
HOW = ("kill", "kill", "SIGTERM", "SIGINT twice", "EIO", "ENOSPC")


def disturbed(folder: Path, cells: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Runs cells of `workdir_changes.py`; yields what became of each."""
    script = subprocess.Popen(
        [sys.executable, str(TESTS / "workdir_changes.py"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with script:
        assert script.stdin is not None and script.stdout is not None
        script.stdin.write("".join(json.dumps(cell) + "\n" for cell in cells))
        script.stdin.close()
        yield from map(json.loads, script.stdout)
    assert script.returncode == 0


def check(folder: Path, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Asserts that each cell ends as the undisturbed run, and that no start was refused."""
    ends = []
    for end in disturbed(folder, cells):
        print(end)
        refused = any(2 in codes for codes in end["codes"])
        ends.append(end | {"wrong": bool(end["differing"] or refused or any(end["codes"][-1]))})
    assert len(ends) == len(cells)
    assert not (wrong := [end for end in ends if end["wrong"]]), wrong
    return ends


def test_changes_drawn_at_random(tmp_path: Path) -> None:
    seed = int(os.environ.get("CHANGES_SEED", random.randrange(2**32)))
    print(f"CHANGES_SEED={seed}")
    draw = random.Random(seed)
    cells: list[dict[str, Any]] = [
        {"job": job, "how": how, "at": draw.randrange(10**6)}
        for job, how in [*(("plain", how) for how in HOW), ("fork", "kill"), ("fork", "SIGTERM")]
    ]
    cells += [{"job": "rollback", "at": draw.randrange(10**6)} for _ in range(3)]
    for job, tasks in (("two processes", (0, 1)), ("evaluator", (0, 1, 1))):
        cells += [{"job": job, "at": draw.randrange(10**6), "task": task} for task in tasks]
    cells += [{"job": "bucket", "how": how, "at": draw.randrange(10**6)} for how in HOW[1:3]]
    cells += [
        {"job": "plain", "at": draw.randrange(10**6), "again": draw.randrange(10**6)},
        {"job": "plain", "how": "SIGINT twice", "at": draw.randrange(10**6), "latency": 0.02},
    ]
    ends = check(tmp_path, cells)
    assert any(75 in end["codes"][0] for end in ends)
    killed = [
        end for end in ends if end["how"] == "kill" and (end["job"], end["task"]) not in VARYING
    ]
    assert all(end["codes"][0][end["task"]] == KILLED for end in killed)


@pytest.mark.nightly
@pytest.mark.timeout(5400)  # up to 600 cells of 3 s, more on a busy machine
@pytest.mark.parametrize(
    "case",
    [
        *({"job": "plain", "how": how} for how in sorted(set(HOW))),
        {"job": "plain", "again": 40},
        {"job": "plain", "how": "SIGINT twice", "latency": 0.02},
        {"job": "fork"},
        {"job": "rollback"},
        {"job": "bucket"},
        {"job": "two processes"},
        *({"job": "evaluator", "task": task} for task in (0, 1)),
    ],
    ids=str,
)
def test_each_change(case: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    (alone,) = disturbed(tmp_path, [case | {"how": "nothing"}])
    check(tmp_path / "all", [case | {"at": at} for at in range(alone["changes"])])
