"""What tests of plans share: the shipped command, and the same within this process."""

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import environment
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from spmdtrain.config import command_line
from spmdtrain.plan import planner, topologies
from spmdtrain.plan.advice import Advice, advise
from spmdtrain.plan.command import Options
from spmdtrain.plan.summary import Buffer, CompiledSummary, Use
from spmdtrain.plan.tables import plan_as_json
from spmdtrain.xla.collectives import Carried, Collective

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


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """As in the command's process: the compiler writes no warnings about a cached program."""
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # JAX decides once per process whether it uses the cache
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        reset_cache()


def planned(config: Path, *options: object) -> dict[str, Any]:
    """The one plan that `--json` prints, made here, where there are 8 devices."""
    arguments = ["--config", str(config), *map(str, options)]
    if "--topology" not in arguments:
        arguments += ["--topology", "cpu:8"]
    command = command_line.parse_command_line(arguments, Options)
    topology = topologies.parse(command.options.topology)
    with no_compilation_cache():
        return plan_as_json(planner.plan(command.experiment, command.config, topology))


def advised(
    config: Path, *options: object, change: Callable[[planner.Plan], planner.Plan] | None = None
) -> list[Advice]:
    """Returns the advice for a plan; `change` alters the plans with the advised options."""
    arguments = ["--config", str(config), *map(str, options)]
    command = command_line.parse_command_line(arguments, Options)
    topology = topologies.parse(command.options.topology)

    def again(more: Sequence[str]) -> planner.Plan:
        other = command_line.parse_command_line([*arguments, *more], Options).config
        found = planner.plan(command.experiment, other, topology)
        return found if change is None else change(found)

    with no_compilation_cache():
        plan = planner.plan(command.experiment, command.config, topology)
        return advise(plan, command.config, topology, again)


FOUND = CompiledSummary(
    sizes={"temp": 123456, "total": 400000},
    collectives=[
        Collective(
            *("all-reduce", ("data",), 8, 4096, 1, "jit(step)/dot"),
            carries=(Carried(("w",), False, 4096, 1024),),
        )
    ],
    traffic=1e6,
    products=2e6,
    unknown=[],
    buffers=[Buffer(4096, Use.GRADIENT, "f32[8,128]", "w", "f.py:1", "jit(step)/dot")],
)
