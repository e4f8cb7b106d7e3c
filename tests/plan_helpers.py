"""What tests of plans share: the shipped command, and the same within this process."""

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers import BOUND, environment
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from spmdtrain.config import command_line
from spmdtrain.plan import planner, topologies
from spmdtrain.plan.advice import Advice, advise
from spmdtrain.plan.command import Options
from spmdtrain.plan.summary import Buffer, CompiledSummary, Use
from spmdtrain.plan.tables import plan_as_json
from spmdtrain.plan.time_model import PlannedCollective, Times, Traffic, topology_links
from spmdtrain.sharding.layout import MemoryUse, Row
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
        timeout=BOUND,
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
        other = command_line.parse_command_line([*arguments, *more], Options)
        where = topologies.parse(other.options.topology)
        found = planner.plan(command.experiment, other.config, where)
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


# -- A plan that is not computed -------------------------------------------------------------------

MB = 10**6
HOSTILE = '</script><script>document.title = "broken"</script>'
MEMORY = planner.Memory(
    params=101 * MB,
    optimizer=202 * MB,
    average=0,
    other=0,
    inputs=7 * MB,
    temporaries=690 * MB,
    results=0,
    code=0,
    peak=1000 * MB,
    limit=16_900 * MB,
    uses={Use.ACTIVATION: 690 * MB},
)
TIMES = Times(
    compute=5e-4,
    useful=5e-4,
    memory=2e-3,
    waiting=3e-3,
    overlapped=1e-3,
    least_memory=1e-4,
    least_links=2e-4,
)


def collective(kind: str, *, overlapped: bool, seconds: float, **sent: float) -> PlannedCollective:
    return PlannedCollective(
        kind=kind,
        axes=("data",),
        group_size=16,
        bytes=24 * MB,
        times=1,
        overlapped=overlapped,
        link="links",
        seconds=seconds,
        op_name="",
        line="model.py:7 (call)",
        carries=(Carried(("kernel",), False, 24 * MB, 6 * MB),),
        sent=sent,
    )


def report(name: str = "v5e:4x4", **changes: Any) -> dict[str, Any]:
    """`small_plan` as JSON."""
    stored: dict[str, Any] = json.loads(json.dumps(plan_as_json(small_plan(name, **changes))))
    return stored


def small_plan(name: str = "v5e:4x4", **changes: Any) -> planner.Plan:
    """A plan of 1 GB in 16.9 GB, whose steps take 2 ms of memory traffic and then 3 ms alone."""
    topology = topologies.parse(name)
    fields: dict[str, Any] = {
        "topology": name,
        "chips": topology.chips,
        "used": topology.chips,
        "devices": topology.devices,
        "placement": "mirrored, mesh data=16",
        "global_batch_size": 64,
        "batch_shards": 16,
        "unsharded_params": [],
        "tokens": 0,
        "steps": 1000,
        "rows": [
            Row(path, "(4000, 1500)", "float32", "P('data')", *uses, elements=6 * MB)
            for path, uses in (
                (HOSTILE, (MemoryUse(MB), MemoryUse(2 * MB), MemoryUse())),
                ("kernel", (MemoryUse(100 * MB), MemoryUse(200 * MB), MemoryUse())),
            )
        ],
        "memory": MEMORY,
        "buffers": [],
        "collectives": [
            collective("all-reduce", overlapped=False, seconds=3e-3, x=15 * MB, y=30 * MB),
            collective("all-gather", overlapped=True, seconds=1e-3, x=22 * MB),
        ],
        "traffic": Traffic(67 * MB, None, None, []),
        "rematerialized": [],
        "model_flops": 10**12,
        "flops": 10**12,
        "flops_again": 0,
        "flops_by_line": {"model.py:7 (call)": 10**12},
        "products": 10**12 / 16,
        "kernels": [],
        "times": TIMES,
        "chip": topology.chip,
        "links": topology_links(topology),
    }
    return planner.Plan(**(fields | changes))
