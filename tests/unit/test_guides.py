"""The guides for those who come from other libraries: their code, side by side with ours."""

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import REPOSITORY, saved_steps, status


def blocks(page: str) -> list[str]:
    text = (REPOSITORY / "docs" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def side_by_side(page: str, *labels: str) -> tuple[list[str], list[str]]:
    """Returns a guide's blocks of another library, and those of spmdtrain, each just behind one."""
    shown = [block for block in blocks(page) if not block.startswith("# both\n")]
    before, after = shown[::2], shown[1::2]
    for theirs, ours in zip(before, after, strict=True):
        assert theirs.startswith(tuple(f"# {label}\n" for label in labels))
        assert ours.startswith("# spmdtrain\n")
        ast.parse(theirs)
    return before, after


@pytest.mark.slow
def test_the_way_over_from_flax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides run; each pair trains the same parameters if it makes the same steps."""
    before, after = side_by_side("coming-from-flax-loops.md", "Flax")
    both, *_ = blocks("coming-from-flax-loops.md")
    assert both.startswith("# both\n") and len(after) == 4
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"__name__": "shown", "folder": tmp_path}
    exec(both, found)
    exec(before[0] + after[0], found)
    model, trained = found["model"], found["trainer"].model
    for layer in ("hidden", "output"):
        theirs, ours = (getattr(x, layer).kernel[...] for x in (model, trained))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["measured"]["accuracy"], found["accuracy"], atol=1e-6)
    for block in (before[1], after[1], before[2], after[2]):
        exec(block, found)
    assert saved_steps(tmp_path / "run") == [8, 16, 24]
    assert sorted(path.name for path in (tmp_path / "orbax").iterdir()) == ["16", "24", "8"]
    exec(before[3] + after[3], found)
    for layer in ("hidden", "output"):
        kernel = found["state"].params[layer]["kernel"]
        np.testing.assert_allclose(kernel, found["params"][layer]["kernel"][...], atol=1e-5)


@pytest.mark.slow
def test_the_way_over_from_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, after = side_by_side("coming-from-pytorch.md", "PyTorch", "Lightning")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"__name__": "shown"}
    for block in after:
        exec(block, found)
    assert len(after) == 3
    assert found["measured"]["accuracy"] > 0.8 and found["predictions"].shape == (100, 3)
    assert 2 < len(found["accuracies"]) <= 20
    assert status(tmp_path / "runs" / "best")["status"] == "finished"
