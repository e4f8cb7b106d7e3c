"""`exact`: one hash on several processes, and after a resume on other devices."""

from pathlib import Path

import pytest
from etils import epath
from helpers import run
from processes import drill, launch

from spmdtrain.checkpoints.manifest import Manifest

pytestmark = pytest.mark.drill

EXACT = ("--exact", 16, "--global-batch-size", 32, "--eval-every-steps", 1000)


def sums(workdir: Path, step: int) -> dict[str, str]:
    """The checksum of each array of a checkpoint."""
    return dict(Manifest.read(epath.Path(workdir) / "checkpoints" / str(step)).sums)


def test_two_processes_and_then_one_have_the_bits_of_one(tmp_path: Path) -> None:
    config = drill(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ended = run(config, *EXACT, "--workdir", whole, "--steps", 10, devices=1)
    assert ended.returncode == 0, ended.stderr
    launched = launch(
        config, *EXACT, "--workdir", parts, "--steps", 5, "--strategy", "zero", devices=2
    )
    assert launched.code == 0, launched.output
    assert sums(parts, 5) == sums(whole, 5)
    again = (*EXACT, "--workdir", parts, "--steps", 10, "--strategy", "fully_sharded")
    ended = run(config, *again, devices=8)
    assert ended.returncode == 0, ended.stderr
    assert "resumed from step 5" in ended.stdout and sums(parts, 10) == sums(whole, 10)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["mirrored", "zero", "fully_sharded", "hybrid"])
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_have_the_bits_of_one(
    tmp_path: Path, processes: int, strategy: str
) -> None:
    config, workdir, alone = drill(tmp_path), tmp_path / "run", tmp_path / "alone"
    line = (*EXACT, "--steps", 200, "--checkpoint-every-steps", 200)
    ended = run(config, *line, "--workdir", alone, devices=1)
    assert ended.returncode == 0, ended.stderr
    own = (*line, "--strategy", strategy, "--workdir", workdir)
    launched = launch(config, *own, processes=processes, devices=8 // processes)
    assert launched.code == 0, launched.output
    assert sums(workdir, 200) == sums(alone, 200)
