"""What is lost by which failure with snapshots in memory: the rows of the table in the docs."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import codes, drill, job, show, sums
from test_snapshot_copies import HOSTS

# `test_snapshot_copies.py` is the row that runs in every `make drill`.
pytestmark = pytest.mark.nightly

# The job is killed while it loads the batch of step 14.
CHECKPOINT, OLDER, NEWEST = 7, 9, 12
OPTIONS: tuple[object, ...] = (
    *("--strategy", "fully_sharded", "--sharding.min-size", 1, "--microbatches", 2),
    *("--checkpoint-every-steps", CHECKPOINT),
)
MEMORY, COPY, DISK = "snapshot in memory (chief, worker 0)", "from the partner", "checkpoint"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The final state of a job without a failure."""
    folder = tmp_path_factory.mktemp("whole")
    job(drill(folder), *OPTIONS, "--workdir", folder / "run")
    return sums(folder / "run")


def nothing(folder: Path) -> None:
    """All processes are killed, and that is all."""


def last_host(folder: Path) -> None:
    shutil.rmtree(max(folder.glob("host*")))


def all_hosts(folder: Path) -> None:
    for host in folder.glob("host*"):
        shutil.rmtree(host)


def a_bit(folder: Path) -> None:
    """A bit flips in the parts of the newest snapshot that process 0 keeps itself."""
    (file,) = folder.glob(f"host0/*/snapshots/*/0/{NEWEST}-*/arrays")
    flip(file)


def a_checkpoint(folder: Path) -> None:
    files = [
        x for x in (folder / "run" / "checkpoints" / f"{CHECKPOINT}").rglob("*") if x.is_file()
    ]
    flip(max(files, key=lambda file: file.stat().st_size))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("hosts", "failure", "step", "source"),
    [
        (1, nothing, NEWEST, MEMORY),
        (1, all_hosts, CHECKPOINT, DISK),
        (1, a_bit, OLDER, MEMORY),
        (1, a_checkpoint, NEWEST, MEMORY),
        (2, nothing, NEWEST, MEMORY),
        (2, last_host, NEWEST, COPY),
        (2, all_hosts, CHECKPOINT, DISK),
        (2, a_bit, NEWEST, COPY),
        (2, a_checkpoint, NEWEST, MEMORY),
    ],
)
def test_a_restart_takes_the_newest_state_that_is_left(
    tmp_path: Path,
    whole: dict[str, str],
    hosts: int,
    failure: Callable[[Path], None],
    step: int,
    source: str,
) -> None:
    text = HOSTS if hosts == 2 else HOSTS.replace("{int(rank)}", "0")
    changes = ("import os\n", text), ("and rank == config.fault_rank\n", "\n")
    config = drill(tmp_path, *changes)
    options = (*OPTIONS, "--workdir", tmp_path / "run", "--snapshot-every-steps", 3)
    options += ("--mark", tmp_path / "mark")
    fault = ("--fault", "SIGKILL", "--fault-at", 14, "--pause", 0.3)
    killed = job(config, *options, *fault, check=False)
    assert all(one.code for one in killed), show(killed)
    assert len([*tmp_path.glob("host*")]) == hosts
    failure(tmp_path)
    ended = job(config, *options)
    assert codes(ended) == [0, 0]
    (resumed,) = [x for x in ended[0].output.splitlines() if x.startswith("resumed from step")]
    assert resumed.startswith(f"resumed from step {step} of"), ended[0].output
    assert (source == DISK and "snapshot" not in resumed) or source in resumed, resumed
    assert sums(tmp_path / "run") == whole
