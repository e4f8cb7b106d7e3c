"""Modules that are imported before they are needed make each start slower."""

import subprocess
import sys

import pytest

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
late = ("train.command", "train.trainer", "train.evaluator", "train.loop", "step.train_step")
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
