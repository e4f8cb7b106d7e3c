"""A quick test of each invariant, for `make test`; the full ones are in the other files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from helpers import metrics
from linear_model import trainer
from processes import STEPS, drill, launch, sums
from step_helpers import on

from spmdtrain.run import main
from spmdtrain.tree import named_leaves

# Declared media of a batch that is split over all devices, and media of a callback.
MEDIA = (
    ("import Experiment", "import Experiment, Table, Text"),
    (
        '        callbacks={"step": stop} if config.stop_at else {},\n',
        """        callbacks={"evaluation": lambda e: e.log({"said": Text(str(e.step))})},
        media=lambda model, batch: {"rows": Table({"y": batch[1], "f": model(batch[0])[:, 0]})},
""",
    ),
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with dropout, in this process on its eight devices."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert main(["--config", str(drill(folder, *MEDIA)), "--workdir", str(folder / "run")]) == 0
    return folder / "run"


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, uninterrupted: Path
) -> None:
    for steps in (7, STEPS):  # 7: between two evaluations, and within an epoch
        line = ["--config", drill(tmp_path), "--workdir", tmp_path / "run", "--steps", steps]
        assert main([str(x) for x in line]) == 0
    assert sums(tmp_path / "run") == sums(uninterrupted)
    found, expected = (metrics(x, "train") for x in (tmp_path / "run", uninterrupted))
    assert len(expected) == STEPS and found == expected


def test_eight_devices_have_the_loss_and_the_gradients_of_one() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(8, 4)).astype(np.float32)
    found = {}
    for devices in (1, 8):
        one = trainer(mesh=on(devices), optimizer=optax.sgd(1.0), global_batch_size=8)
        loss = one.fit((x, x.sum(1, keepdims=True)), steps=1).train["loss"]
        assert one.state is not None
        leaves = named_leaves(one.state.params)
        assert {len(leaf.sharding.device_set) for leaf in leaves.values()} == {devices}
        found[devices] = {"loss": loss} | {name: np.asarray(leaf) for name, leaf in leaves.items()}
    for name, expected in found[1].items():
        np.testing.assert_allclose(found[8][name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_two_processes_one_of_which_is_killed_and_restarted_have_the_losses_of_one(
    tmp_path: Path, uninterrupted: Path
) -> None:
    launched = launch(
        drill(tmp_path, *MEDIA),
        *("--workdir", tmp_path / "run", "--pause", 0.05),
        *("--fault", "SIGKILL", "--fault-rank", 1, "--fault-at", 13),
        mark=tmp_path / "mark",
    )
    assert launched.code == 0, launched.output
    assert "worker 0 was killed (SIGKILL)" in launched.output, launched.output
    assert "resumed from step " in launched.output, launched.output
    found, expected = (metrics(x, "train") for x in (tmp_path / "run", uninterrupted))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line, other in zip(found, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4), line
    of_one, of_two = (media(x) for x in (uninterrupted, tmp_path / "run"))
    assert of_one.keys() == of_two.keys() and len(of_one) >= 4
    for key, line in of_one.items():
        if line["kind"] == "text":
            assert line == of_two[key]
        else:
            np.testing.assert_allclose(line["rows"], of_two[key]["rows"], rtol=1e-3, atol=1e-4)


def media(workdir: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """The lines of media by step and name."""
    lines = [json.loads(line) for line in (workdir / "media.jsonl").read_text().splitlines()]
    found = {(line["step"], line["name"]): line for line in lines}
    assert len(found) == len(lines)
    return found
