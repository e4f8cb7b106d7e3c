"""The shape of the code: imports point down, and importing starts no backend."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import spmdtrain

PACKAGE = Path(spmdtrain.__file__).parent

# As in the design. Within a layer imports may go sideways, without cycles.
LAYERS = [
    set(words.split())
    for words in (
        """
        admission chips cluster cluster_checks config dispenser doctor errors job_token ledger lines
        out_of_memory
        partitioners phases rendezvous spec strategies tfconfig topologies tree user_folders
        """,
        """
        adapters adapting asynchronous collectives compilation compiler_log crew cuts declared
        distributed divided elsewhere estimate failing hlo hlo_module idx jaxprs live_ranges mesh
        metrics model_state nnx_model nodes nofollow origins padding padding_rules permutation
        placement processes products profiling ray_auth reductions remat replicas retention settings
        sharding signals storage sums tallies terminal together traffic uneven_batch untrusted
        workdir_lock writers
        """,
        """
        actors callbacks calls checkpoint compilers data division division_table drift epochs
        evaluate experiment export feed flops gradients health hyperparameters identity image_cache
        image_decoding images initial journal keras_model late listing loading loop_checks
        manifest orbax_manager parameter_server programs ray_crew restore roles sent server
        session sharding_table shared state step stepping summaries updates user_frames
        array_headers worker
        """,
        "advice coordinator evaluator loop measuring plan_json planning trainer",
        "checkpoints children deaths hangs launch plan plan_tables run tasks",
    )
]
ASIDE = {"models", "testing", "testing_steps"}
FILES = {path.stem: [path] for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
FILES |= {
    path.parent.name: list(path.parent.glob("*.py")) for path in PACKAGE.glob("*/__init__.py")
}
MODULES = sorted(FILES)  # a folder is one


def imports(module: str) -> set[str]:
    """The modules of the package that a module imports, wherever in it."""
    found = set()
    for node in (n for file in FILES[module] for n in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.ImportFrom) and node.module == "spmdtrain":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spmdtrain."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {name[1] for name in names if name[0] == "spmdtrain" and len(name) > 1}
    return (found & set(MODULES)) - {module}


def layer(module: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if module in names)


def test_the_check_sees_imports() -> None:
    assert {"journal", "programs", "restore", "session", "step"} <= imports("trainer")
    assert {"errors", "placement", "remat", "sharding"} <= imports("models")


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down_or_sideways(module: str) -> None:
    if module in ASIDE:
        return
    for imported in imports(module):
        assert imported not in ASIDE, f"{module} imports {imported}, which stands aside"
        assert layer(imported) <= layer(module), f"{module} imports {imported}, which is above it"


def test_imports_have_no_cycle() -> None:
    done: set[str] = set()
    left = {module: imports(module) for module in MODULES}
    while ready := [module for module, needs in left.items() if needs <= done]:
        done |= set(ready)
        left = {module: needs for module, needs in left.items() if module not in done}
    assert not left, f"these modules import each other: {sorted(left)}"


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    ).stdout.strip()


def test_importing_everything_starts_no_backend() -> None:
    code = f"""
import importlib, spmdtrain
for name in spmdtrain.__all__: getattr(spmdtrain, name)
for name in {MODULES}: importlib.import_module("spmdtrain." + name)
from jax._src import xla_bridge
print(len(xla_bridge._backends))
import jax; jax.devices(); print(len(xla_bridge._backends) > 0)
"""
    assert python(code).split() == ["0", "True"]


def test_the_package_and_its_lowest_layer_do_not_import_jax() -> None:
    code = "import sys, spmdtrain, spmdtrain.config, spmdtrain.errors; print('jax' in sys.modules)"
    assert python(code) == "False"
    assert python("import sys, spmdtrain; spmdtrain.Trainer; print('jax' in sys.modules)") == "True"


def test_what_takes_long_to_import_waits_until_it_is_needed() -> None:
    code = """
import sys, spmdtrain.trainer, spmdtrain.run
print(sorted({"flax", "orbax.checkpoint", "grain", "keras", "PIL"} & set(sys.modules)))
"""
    assert python(code) == "[]"


def test_orbax_logs_nothing_though_it_is_imported_late() -> None:
    code = """
import sys
sys.stderr = sys.stdout
import spmdtrain.checkpoint, orbax.checkpoint
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
