"""The shape of the code: imports point down, and importing starts no backend."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spmdtrain

PACKAGE = Path(spmdtrain.__file__).parent

# From the bottom to the top: a folder imports from the folders before it. `root` is the files at
# the package's top. `run` and `__main__` are the commands, and nothing imports them.
FOLDERS = (
    *(
        "root",
        "config",
        "files",
        "cluster",
        "xla",
        "distributed",
        "sharding",
        "adapters",
        "launch",
        "data",
    ),
    *("step", "checkpoints", "train", "parameter_server", "plan", "testing", "run"),
)
STANDALONE = {"models"}  # imports from the others, and nothing imports it
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.stem != "__init__"
)


def folder_of(module: str) -> str:
    """The folder of a dotted module name, or of a name imported from the package itself."""
    parts = module.split(".")[1:]
    if parts in (["run"], ["__main__"]):
        return "run"
    return parts[0] if parts and (PACKAGE / parts[0]).is_dir() else "root"


def imports(module: str) -> set[str]:
    """The folders of the package that a module imports from, wherever in it."""
    path = PACKAGE.parent / (module.replace(".", "/") + ".py")
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "spmdtrain":
            found |= {folder_of(f"spmdtrain.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spmdtrain."):
            found.add(folder_of(node.module or ""))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {folder_of(name) for name in names if name.startswith("spmdtrain")}
    return found


def test_the_check_sees_imports() -> None:
    assert {"checkpoints", "root", "data", "step"} <= imports("spmdtrain.train.session")
    assert {folder_of(module) for module in MODULES} == {*FOLDERS, *STANDALONE}


@pytest.mark.parametrize("module", MODULES)
def test_folders_import_in_one_direction(module: str) -> None:
    folder = folder_of(module)
    if folder in STANDALONE:
        return
    above = {*FOLDERS[FOLDERS.index(folder) + 1 :], *STANDALONE}
    assert not imports(module) & above


def test_each_folder_says_its_purpose_in_a_line() -> None:
    for folder in {*FOLDERS, *STANDALONE} - {"root", "run"}:
        purpose = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text()))
        assert purpose and purpose.splitlines()[0].endswith("."), folder
    assert len(list(PACKAGE.glob("*.py"))) <= 10


def test_training_asks_the_backend_and_not_for_parameter_servers() -> None:
    named = re.compile(r"by_servers|spmdtrain\.parameter_server|ServerBackend")
    files = [PACKAGE / "run.py", *(PACKAGE / "train").glob("*.py")]
    naming = {path.name for path in files if named.search(path.read_text())}
    assert naming == {"loop_checks.py"}  # refuses the strategy


def test_modules_stay_short() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path.name for path, count in lines.items() if count > 450} == set()
    assert lines[PACKAGE / "train" / "trainer.py"] < 400


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    ).stdout.strip()


def test_importing_everything_starts_no_backend() -> None:
    code = f"""
import importlib, spmdtrain
for name in spmdtrain.__all__: getattr(spmdtrain, name)
for name in {MODULES}: importlib.import_module(name)
from jax._src import xla_bridge
print(len(xla_bridge._backends))
import jax; jax.devices(); print(len(xla_bridge._backends) > 0)
"""
    assert python(code).split() == ["0", "True"]


def test_the_package_and_its_lowest_layer_do_not_import_jax() -> None:
    modules = "sys, spmdtrain, spmdtrain.config.run_config, spmdtrain.errors"
    code = f"import {modules}; print('jax' in sys.modules)"
    assert python(code) == "False"
    assert python("import sys, spmdtrain; spmdtrain.Trainer; print('jax' in sys.modules)") == "True"


def test_what_takes_long_to_import_waits_until_it_is_needed() -> None:
    code = """
import sys, spmdtrain.train.trainer, spmdtrain.run
print(sorted({"flax", "orbax.checkpoint", "grain", "keras", "PIL"} & set(sys.modules)))
"""
    assert python(code) == "[]"


def test_orbax_logs_nothing_though_it_is_imported_late() -> None:
    code = """
import sys
sys.stderr = sys.stdout
import spmdtrain.checkpoints.save, orbax.checkpoint
for file in ("/lib/orbax/checkpoint/manager.py", "/lib/other.py"):
    exec(compile("from absl import logging; logging.error('from ' + file)", file, "exec"))
"""
    (line,) = python(code).splitlines()
    assert line.endswith("from /lib/other.py")


def test_every_exported_name_is_there() -> None:
    for name in spmdtrain.__all__:
        found = getattr(spmdtrain, name)
        assert getattr(found, "__name__", name) == name
    with pytest.raises(AttributeError, match="no attribute 'Trianer'"):
        spmdtrain.Trianer  # noqa: B018


def test_unit_tests_are_in_the_folders_of_the_package() -> None:
    folders = {path.parent.name for path in Path(__file__).parent.glob("*/test_*.py")}
    assert folders <= {*FOLDERS, *STANDALONE} and len(folders) > 10
