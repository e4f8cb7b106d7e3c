"""The page of Keras on several machines: its script in two processes, and the numbers of one."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import REPOSITORY, metrics
from shown_output import UPDATE, commands_of, files_of, missing, printed, printed_here, update

import spmdtrain
from spmdtrain.tree import named_leaves

PAGE = REPOSITORY / "docs" / "keras-several-machines.md"


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_five_lines_train_a_compiled_model_in_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name, script), (command, shown) = *files_of(PAGE).items(), *commands_of(PAGE).items()
    assert [number for number in range(1, 9) if f"  # {number}" in script] == [1, 2, 3, 4, 5]
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(script)
    output = printed(command, tmp_path / "two")
    if UPDATE:
        update(PAGE, {command: output})
        return
    assert missing(shown, output) == [], output
    printed_here(f"python {name}", tmp_path / "one", monkeypatch)
    one, two = (tmp_path / folder / "runs" / "digits" for folder in ("one", "two"))
    devices = [json.loads((run / "config.json").read_text())["devices"] for run in (one, two)]
    assert devices == [8, 2]
    for split in ("train", "eval"):
        alone, together = (
            [(line["step"], line["loss"]) for line in metrics(run, split)] for run in (one, two)
        )
        assert len(alone) > 2
        np.testing.assert_allclose(together, alone, rtol=1e-4)
    expected = named_leaves(spmdtrain.load_params(one))
    for path, array in named_leaves(spmdtrain.load_params(two)).items():
        np.testing.assert_allclose(array, expected[path], rtol=1e-3, atol=1e-5, err_msg=path)
