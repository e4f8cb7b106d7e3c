"""The notebooks of the documentation, executed on virtual devices, with smaller parameters.

They are stored without outputs: speeds, paths and devices would differ after each run.
"""

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from helpers import BOUND, REPOSITORY
from nbclient import NotebookClient

FOLDER = REPOSITORY / "docs" / "notebooks"
# The first code cell, tagged `parameters`, is replaced.
SMALL = {
    "local": 'EPOCHS, WORKDIR = 3, "runs/digits"',
    "tpu_vm": """
WORKDIR = "runs/bytes"
LAYERS, WIDTH, HEADS, CONTEXT = 2, 32, 2, 32
BATCH_SIZE_PER_DEVICE, STEPS, FILES = 4, 20, 3
""",
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.nightly] * (x != "local")) for x in SMALL]
)
def test_a_notebook_runs_from_its_first_to_its_last_cell(name: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.ipynb"
    notebook: Any = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code[0].metadata.tags == ["parameters"]
    # A variable that is not replaced would have the size of a real run.
    assert {*names(code[0].source)} == {*names(SMALL[name])}
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    code[0].source = SMALL[name]
    NotebookClient(notebook, timeout=BOUND, resources={"metadata": {"path": tmp_path}}).execute()
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "status.json").read_text())["status"] == "finished"
    outputs = [output for cell in code for output in cell.outputs]
    assert any("<svg" in o.get("data", {}).get("text/html", "") for o in outputs)
    assert max(len(json.dumps(cell.outputs)) for cell in code) < 20_000
    assert any("8 x cpu" in o.get("text", "") for o in outputs)


def names(source: str) -> list[str]:
    """Returns the variables that code assigns."""
    values: dict[str, Any] = {}
    exec(source, values)
    return [name for name in values if name != "__builtins__"]
