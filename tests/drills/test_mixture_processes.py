"""A mixture on two processes, one of which is killed and restarted."""

from pathlib import Path

import pytest
from helpers import metrics
from processes import STEPS, drill, launch

from spmdtrain.run import main

MIXED = (
    (
        "        train=rows,",
        "        train=Mixture(\n"
        "            {'a': (rows, 0.7), 'b': ((rows.x[:40], rows.y[:40] + 3), 0.3)},\n"
        "            {9: {'a': 0.2, 'b': 0.8}},\n"
        "        ),",
    ),
    ("from spmdtrain import Experiment,", "from spmdtrain import Experiment, Mixture,"),
)


def test_two_processes_one_of_which_is_killed_have_the_losses_of_components_of_one(
    tmp_path: Path,
) -> None:
    experiment = drill(tmp_path, *MIXED)
    assert main(["--config", str(experiment), "--workdir", str(tmp_path / "alone")]) == 0
    launched = launch(
        experiment,
        *("--workdir", tmp_path / "run", "--pause", 0.05),
        *("--fault", "SIGKILL", "--fault-rank", 1, "--fault-at", 13),
        mark=tmp_path / "mark",
    )
    assert launched.code == 0, launched.output
    assert "worker 0 was killed (SIGKILL)" in launched.output, launched.output
    assert "resumed from step " in launched.output, launched.output
    found, expected = (metrics(tmp_path / name, "train") for name in ("run", "alone"))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line, other in zip(found, expected, strict=True):
        assert {*other} >= {"loss", "loss/a", "loss/b"}
        for name in ("loss", "loss/a", "loss/b"):
            assert line[name] == pytest.approx(other[name], rel=1e-4), line
