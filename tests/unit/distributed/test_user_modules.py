"""Digests of the user's modules, which the processes of a job compare."""

import importlib
import sys
from pathlib import Path

import pytest

from spmdtrain.distributed import process_group
from spmdtrain.distributed.code_digest import source_digests
from spmdtrain.errors import is_library


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Imports a package of a user, in a process of two; returns its folder."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("from mine import scale")
    (folder / "scale.py").write_text("SCALE = 3.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process_group, "count", lambda: 2)
    monkeypatch.setattr(process_group, "broadcast", lambda value: value)
    for name in ("mine", "mine.scale"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("mine")
    return folder


NAMES = {"module mine", "module mine.scale"}


def test_modules_that_a_script_imports_are_compared_by_their_source(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = source_digests()
    assert before.keys() >= NAMES
    other = package.parent / "there" / "mine" / "scale.py"
    other.parent.mkdir(parents=True)
    other.write_text("SCALE = 300.0")
    monkeypatch.setattr(sys.modules["mine.scale"], "__file__", str(other))
    after = source_digests()
    assert {name for name in before if before[name] != after[name]} == {"module mine.scale"}
    assert before["module mine.scale"].startswith("mine/scale.py ")


def test_a_module_that_only_some_processes_import_is_no_difference(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"module plots": "plots.py a1", "module mine.scale": "mine/scale/__init__.py b2"}
    monkeypatch.setattr(process_group, "broadcast", lambda own: first)
    found = source_digests()
    assert found.keys() == first.keys()
    assert found["module plots"] == first["module plots"]
    assert found["module mine.scale"] != first["module mine.scale"]


def test_libraries_and_python_itself_are_not_among_them(package: Path) -> None:
    assert is_library(pytest.__file__) and is_library(importlib.__file__)
    assert not is_library(str(package / "scale.py"))
    names = source_digests()
    assert not any(name in ("module json", "module numpy") for name in names)
