"""The shape of the code: imports point down, and importing starts no backend."""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers import BOUND

import spmdtrain
from spmdtrain.strategies import AXES

PACKAGE = Path(spmdtrain.__file__).parent
TESTS = Path(__file__).parents[1]

# From the bottom to the top: a folder imports from the folders before it, and so does a file that
# is listed itself. `root` is the files at the package's top. `run` and `__main__` are the commands,
# and nothing imports them.
FOLDERS = (
    *(
        "root",
        "document",
        "config",
        "record",
        "control",
        "cluster",
        "xla",
        "distributed",
        "sharding",
        "kernels",
        "adapters",
        "launch",
        "data",
    ),
    *("step", "checkpoints", "trackers", "train.loop_checks", "train.callbacks"),
    *("config.experiment", "config.overrides", "config.command_line", "train"),
    *("keras", "parameter_server"),
    *("replay", "plan", "report", "sweep", "testing"),
    *("checkpoints.command", "checkpoints.__main__", "run"),
)
STANDALONE = {"models"}  # imports from the others, and nothing imports it
# Functions of these modules import `keras` when they are given a Keras object.
OPENING_KERAS = {"spmdtrain.train.trainer", "spmdtrain.config.experiment"}
EXPORTING = {"models", "testing"}  # for users' experiments and tests; others' `__init__` is empty
INITS = [path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
# All but the package's own `__init__`, which exports names lazily.
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}
MODULES = list(FILES)


def folder_of(module: str) -> str:
    """The entry of FOLDERS for a dotted module name, or for a name imported from the package."""
    parts = module.split(".")[1:]
    if parts in (["run"], ["__main__"]):
        return "run"
    if ".".join(parts[:2]) in FOLDERS:
        return ".".join(parts[:2])
    return parts[0] if parts and (PACKAGE / parts[0]).is_dir() else "root"


@functools.cache
def imported_modules(code: str, package: str) -> Sequence[str]:
    """The modules that code imports, wherever in it, also relatively and by `importlib`."""
    return list(found_imports(code, package))


def found_imports(code: str, package: str) -> Iterator[str]:
    by_name = re.compile(r"import_module\b|__import__")
    has_names = by_name.search(code) is not None  # to unparse each call takes long
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif has_names and isinstance(node, ast.Call) and by_name.search(ast.unparse(node)):
            strings = (x.value for x in ast.walk(node) if isinstance(x, ast.Constant))
            yield from (text for text in strings if isinstance(text, str))


def imports(module: str) -> set[str]:
    """The folders of the package that a module imports from."""
    package = module if FILES[module].stem == "__init__" else module.rpartition(".")[0]
    found = imported_modules(FILES[module].read_text(), package)
    return {folder_of(name) for name in found if name.split(".")[0] == "spmdtrain"}


def test_the_check_sees_imports() -> None:
    assert {"checkpoints", "root", "data", "step"} <= imports("spmdtrain.train.session")
    assert {folder_of(module) for module in MODULES} == {*FOLDERS, *STANDALONE}
    code = """
import spmdtrain.run
from spmdtrain import train
from ..step import flops
from .images import read_idx
def later():
    importlib.import_module("spmdtrain.step.state")
    pool.submit(importlib.import_module, "spmdtrain.models.layers")
"""
    found = set(imported_modules(code, "spmdtrain.data"))
    assert {"spmdtrain.run", "spmdtrain.train", "spmdtrain.step.flops"} <= found
    assert {
        "spmdtrain.data.images.read_idx",
        "spmdtrain.step.state",
        "spmdtrain.models.layers",
    } <= found


@pytest.mark.parametrize("module", MODULES)
def test_folders_import_in_one_direction(module: str) -> None:
    folder = folder_of(module)
    if folder in STANDALONE:
        return
    above = {*FOLDERS[FOLDERS.index(folder) + 1 :], *STANDALONE}
    if module in OPENING_KERAS:
        above -= {"keras"}
    assert not imports(module) & above


def test_no_modules_import_each_other_in_a_circle() -> None:
    clients: dict[str, set[str]] = {}
    for module, path in FILES.items():
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        code = re.sub(r"(?m)^if TYPE_CHECKING:\n( .*\n)*", "", path.read_text())
        named = {*imported_modules(code, package)}
        named |= {name.rpartition(".")[0] for name in named}
        clients[module] = (named & FILES.keys()) - {module}
    assert "spmdtrain.step.state" in clients["spmdtrain.train.trainer"]
    TopologicalSorter(clients).prepare()  # raises CycleError with the modules of a circle


# Commands, and what the run of a strategy or an option finds by its name: nothing imports them.
RARE = (
    *("parameter_server", "replay", "report", "sweep"),
    *("trackers.services", "trackers.tensorboard"),
)
OPENING: dict[str, set[str]] = {
    "spmdtrain.__main__": {"replay", "report", "sweep"},  # completes the options of all commands
    "spmdtrain.checkpoints.command": {"replay"},  # an export builds the experiment of a run
    "spmdtrain.plan.command": {"replay"},  # the trace of a run is compared with its experiment
    "spmdtrain.keras.callbacks": {"trackers.tensorboard"},  # does what the one of Keras would
}
"""Modules that import rare ones nevertheless, in the function that needs them."""


def rare_part(module: str) -> str | None:
    """The entry of RARE that a module, or a name imported from it, belongs to."""
    name = f"{module}.".removeprefix("spmdtrain.")
    return next((part for part in RARE if name.startswith(f"{part}.")), None)


@pytest.mark.parametrize("module", [name for name in MODULES if rare_part(name) is None])
def test_nothing_imports_what_few_runs_need(module: str) -> None:
    package = module if FILES[module].stem == "__init__" else module.rpartition(".")[0]
    named = imported_modules(FILES[module].read_text(), package)
    assert {part for name in named if (part := rare_part(name))} == OPENING.get(module, set())


def test_importing_all_other_modules_imports_nothing_that_few_runs_need() -> None:
    others = [name for name in MODULES if rare_part(name) is None]
    code = f"import importlib, sys\nfor name in {others}: importlib.import_module(name)\n"
    loaded = python(f"{code}print(*(x for x in sys.modules if x.startswith('spmdtrain')))").split()
    assert "spmdtrain.train.trainer" in loaded and "spmdtrain.trackers.run_trackers" in loaded
    assert not {part for name in loaded if (part := rare_part(name))}


def reached_from_python() -> set[str]:
    """The modules to which the public names lead, by imports anywhere, also lazy ones."""
    reached: set[str] = set()
    found = {f"spmdtrain.{module}" for module in spmdtrain._HOMES.values()}
    found |= {module for module in MODULES if folder_of(module) in EXPORTING}
    while found:
        module = found.pop()
        reached.add(module)
        code = re.sub(r"(?m)^if TYPE_CHECKING:\n( .*\n)*", "", FILES[module].read_text())
        named = set(re.findall(r"import (spmdtrain[\w.]*)|\"(spmdtrain[\w.]+):\w+\"", code))
        for source, names in re.findall(r"from (spmdtrain[\w.]*) import (\([^)]*|.*)", code):
            named |= {(source, f"{source}.{name}") for name in re.findall(r"\w+", names)}
        found |= {name for names in named for name in names if name in FILES} - reached
    # Commands parse arguments, and the modules of a plan name those of theirs.
    return {x for x in reached if "command" not in x and folder_of(x) != "plan"}


def test_what_python_reaches_names_options_as_the_user_gives_them() -> None:
    modules = reached_from_python()
    assert {folder_of(module) for module in modules} >= {"xla", "distributed", "launch"}
    assert "spmdtrain.parameter_server.executor" in modules and "spmdtrain.run" not in modules
    # Not those of XLA, lines for a shell, and arguments, which are alone in their strings.
    option = re.compile(r"(?<![\w-])--(?!xla)[a-z]")
    written = []
    for module in sorted(modules):
        code = FILES[module].read_text()
        nodes = list(ast.walk(ast.parse(code))) if option.search(code) else []
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in docs:
                text = ast.unparse(node)
                if " " in text and option.search(text) and "python -m" not in text:
                    written.append(f"{module}:{node.lineno}: {text}")
    assert not written


def test_each_folder_states_its_purpose_in_one_line() -> None:
    for path in INITS:
        tree = ast.parse(path.read_text())
        purpose = ast.get_docstring(tree) or ""
        assert purpose.endswith(".") and "\n" not in purpose, path
        assert len(tree.body) == 1 or path.parent.name in EXPORTING, path
    assert {path.parent.name for path in INITS} >= {
        folder for folder in (*FOLDERS, *STANDALONE) if "." not in folder
    } - {"root", "run"}
    assert len(list(PACKAGE.glob("*.py"))) <= 10


# Public names that several modules define, and why. In all other cases a name says what it is of.
SHARED_BY_COMMANDS = {"Options", "execute", "main"}  # the parts of each command, by one contract
# The module's name says what it is of, so they are never imported without it.
QUALIFIED = {
    "create": {"job_token", "no_follow"},
    "read": {"job_token", "progress"},
}


def test_two_modules_share_a_public_name_only_if_its_use_tells_which_is_meant() -> None:
    homes: dict[str, set[str]] = {}
    for module, path in FILES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(module.rpartition(".")[2])
    shared = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert {name: shared[name] for name in shared.keys() - SHARED_BY_COMMANDS} == QUALIFIED
    for path in [*FILES.values(), *TESTS.rglob("*.py")]:
        imported = imported_modules(path.read_text(), "spmdtrain.folder")
        found = {tuple(name.split(".")[-2:]) for name in imported if name.startswith("spmdtrain.")}
        unqualified = [x for x in found if x[0] in QUALIFIED.get(x[1], ())]
        assert not unqualified, path


NAME_PARAMETER_SERVER = 5
"""Files outside of the strategy's folder that name it. Others ask `Strategy.is_asynchronous` or the
backend. Like the limits below, it only goes down."""


def test_few_files_name_the_strategy_of_parameter_servers() -> None:
    named = re.compile(r"parameter_server|ServerBackend|ServerExecutor")
    files = {path for path in FILES.values() if path.parent.name != "parameter_server"}
    naming = {path for path in {*files, PACKAGE / "__init__.py"} if named.search(path.read_text())}
    assert len(naming) == NAME_PARAMETER_SERVER, sorted(naming)
    assert not naming & {PACKAGE / "run.py", *(PACKAGE / "train").glob("*.py")}


def test_no_file_has_more_than_a_thousand_lines() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path.name for path, count in lines.items() if count > 1_000} == set()


# Two limits of the design, which only go down: a change that makes one smaller lowers it here.
SINGLE_IMPORTERS = 29
"""Modules that a single other module of the package imports, such as the adapter of Equinox."""
NAME_AN_AXIS = 9
"""Modules, but those of kernels, models and strategies, with the name of a mesh axis."""


def test_modules_with_one_client_and_modules_that_name_an_axis_become_fewer() -> None:
    clients: dict[str, set[str]] = {module: set() for module in MODULES}
    naming = set()
    for module, path in FILES.items():
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        code = re.sub(r"(?m)^if TYPE_CHECKING:\n( .*\n)*", "", path.read_text())
        for name in imported_modules(code, package):
            source = name if name in clients else name.rpartition(".")[0]
            clients.get(source, set()).add(module)
        constants = (n.value for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Constant))
        if folder_of(module) not in ("kernels", "models") and {*constants} & {*AXES}:
            naming.add(module)
    single = [module for module, found in clients.items() if len(found - {module}) == 1]
    # In the generated keywords, "replica" is a value of `batch_statistics`.
    naming -= {"spmdtrain.strategies", "spmdtrain.config.keywords"}
    assert (len(single), len(naming)) == (SINGLE_IMPORTERS, NAME_AN_AXIS)


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=BOUND
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


LOADED = """
import sys
import spmdtrain

names = sorted(name for name in sys.modules if name.split(".")[0] == "spmdtrain")
assert names == ["spmdtrain"], names
assert not {"jax", "flax", "optax", "numpy", "dataclasses"} & sys.modules.keys()
from spmdtrain import run

try:
    run.main(["--help"])
except SystemExit as end:
    assert end.code == 0
late = ("train.command", "train.trainer", "train.evaluator", "train.loop", "step.program")
late += ("step.compile", "checkpoints.manifest", "parameter_server", "plan", "models")
loaded = [name for name in late if f"spmdtrain.{name}" in sys.modules]
assert not loaded, loaded
assert not {"flax", "orbax.checkpoint", "grain", "keras"} & sys.modules.keys()
"""


@pytest.mark.slow
def test_the_package_and_the_help_import_no_module_that_only_a_run_needs() -> None:
    end = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert end.returncode == 0, end.stderr
    assert "--config" in end.stdout


@pytest.mark.slow
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
    tested = {path.parent.relative_to(TESTS / "unit") for path in TESTS.glob("unit/*/**/test_*.py")}
    folders = {path.parent.relative_to(PACKAGE) for path in INITS}
    # Sources are tested together with the datasets that read them, and Keras' parts with what they
    # implement: mypy would take a folder `keras` of tests for the library.
    assert tested == folders - {Path("data/sources"), Path("keras")}


def test_the_readme_is_short() -> None:
    assert len((TESTS.parent / "README.md").read_text().splitlines()) < 150
