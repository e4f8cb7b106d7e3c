"""What tests of plans share: the shipped command, and the same within this process."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import environment

from spmdtrain import planning, run, topologies
from spmdtrain.advice import Advice, advise
from spmdtrain.plan import Options
from spmdtrain.plan_json import as_json

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def plan(config: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spmdtrain.plan", "--config", str(config), *map(str, options)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )


def planned(config: Path, *options: object) -> dict[str, Any]:
    """The one plan that `--json` prints, made here, where there are 8 devices."""
    arguments = ["--config", str(config), *map(str, options)]
    if "--topology" not in arguments:
        arguments += ["--topology", "cpu:8"]
    command = run.parse(arguments, Options)
    topology = topologies.parse(command.options.topology)
    return as_json(planning.plan(command.experiment, command.config, topology))


def advised(config: Path, *options: object) -> list[Advice]:
    """What would mend that plan."""
    arguments = ["--config", str(config), *map(str, options)]
    command = run.parse(arguments, Options)
    topology = topologies.parse(command.options.topology)

    def again(more: Sequence[str]) -> planning.Plan:
        other = run.parse([*arguments, *more], Options).config
        return planning.plan(command.experiment, other, topology)

    plan = planning.plan(command.experiment, command.config, topology)
    return advise(plan, command.config, topology, again)
