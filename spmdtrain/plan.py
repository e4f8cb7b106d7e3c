"""`python -m spmdtrain.plan --config experiments/X.py --topology v5e:4x4`: before you rent it."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from spmdtrain import planning, run, topologies
from spmdtrain.errors import ExitCode, UserError, exit_code_of
from spmdtrain.terminal import Terminal, byte_size, duration
from spmdtrain.topologies import Topology

# For a process that plans for one topology: which, and the file that its answer goes to.
_TOPOLOGY, _ANSWER = "SPMDTRAIN_PLAN_TOPOLOGY", "SPMDTRAIN_PLAN_ANSWER"
_MOST_ROWS = 12


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's own options; the others are the experiment's."""

    config: str
    """The experiment: a Python file with a Config and a build(config)."""
    preset: str | None = None
    """One of the experiment's PRESETS, whose values the other options then change."""
    topology: str
    """Where it is to run: v5e:4x4, v5p:8x8x8, v5e:16x16@2 (two slices) or cpu:8; several with
    commas between them."""
    json: bool = False
    """Print a list of one JSON object for each topology, and nothing else."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, 1 where the run would not fit."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if _ANSWER in os.environ:
            return _answer(given)
        return exit_code_of(lambda: execute(given))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def execute(arguments: Sequence[str]) -> int:
    """Plan for each topology in a process of its own, and show what came of it."""
    command = run.parse(arguments, Options, "python -m spmdtrain.plan")
    if command.experiment.has_own_loop:
        raise UserError(
            f"{command.experiment.path} has a loop of its own, train(config, loop): a plan is for "
            "files with build(config)"
        )
    asked = [topologies.parse(text.strip()) for text in command.options.topology.split(",")]
    quiet = command.options.json
    terminal = Terminal(quiet=quiet)
    found = []
    for topology in asked:
        with terminal.waiting(f"planning for {topology}"):
            found.append(_elsewhere(arguments, topology))
        if "error" in found[-1]:  # the other topologies may do
            print(f"error: {found[-1]['error']}", file=sys.stderr)
        elif not quiet:
            show(terminal, found[-1])
    plans = [plan for plan in found if "error" not in plan]
    if quiet and plans:
        print(json.dumps(found, indent=1))
    elif len(plans) > 1:
        terminal.console.print(side_by_side(plans))
    if len(plans) < len(found):
        return ExitCode.BAD_INPUT
    return ExitCode.FAILED if any(plan["fits"] is False for plan in plans) else ExitCode.DONE


# -- a process for each topology -------------------------------------------------------------------

# JAX is told once in a process which devices there are, and a compiler does not hear Ctrl-C: so
# each topology has a process, which can be ended.


def _elsewhere(arguments: Sequence[str], topology: Topology) -> dict[str, Any]:
    """The plan that a process of its own makes, or the error that is meant for the user."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "plan.json"
        told = {_TOPOLOGY: str(topology), _ANSWER: str(answer)}
        env = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "XLA_FLAGS")}
        env |= planning.environment(topology) | told
        child = subprocess.Popen(
            [sys.executable, "-m", "spmdtrain.plan", *arguments],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with _ended(child):
            _, errors = child.communicate()
        if not answer.exists():
            sys.stderr.write(errors)
            why = f"planning for {topology} ended with code {child.returncode}, see above"
            return {"topology": str(topology), "error": why}
        found: dict[str, Any] = json.loads(answer.read_text())
    return found


@contextlib.contextmanager
def _ended(child: subprocess.Popen[str]) -> Iterator[None]:
    """Ends a process that is still there at the end, with all that it has begun."""
    try:
        yield
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _answer(arguments: Sequence[str]) -> int:
    """Plan for the one topology of this process, and write down what came of it."""
    answer = Path(os.environ[_ANSWER])
    try:
        command = run.parse(arguments, Options, "python -m spmdtrain.plan")
        topology = topologies.parse(os.environ[_TOPOLOGY])
        found = planning.plan(command.experiment, command.config, topology)
    except UserError as error:
        told = {"topology": os.environ[_TOPOLOGY], "error": str(error)}
        answer.write_text(json.dumps(told))
        return ExitCode.BAD_INPUT
    answer.write_text(json.dumps(as_json(found)))
    return ExitCode.DONE


def as_json(plan: planning.Plan) -> dict[str, Any]:
    """A plan as `--json` prints it: bytes of one device, seconds of one step."""
    times = plan.times
    found = dataclasses.asdict(plan)
    found["fits"] = plan.fits
    found["time"] = None
    del found["times"], found["steps"], found["flops_by_line"]
    found["flops"] = {
        "step": plan.flops,
        "chip": plan.flops / plan.used,
        "by_line": plan.flops_by_line,
    }
    for one in found["collectives"]:
        one["seconds"] = None if math.isnan(one["seconds"]) else one["seconds"]
    if times is not None:
        found["time"] = dataclasses.asdict(times) | {
            "bound": times.bound,
            "estimate": times.estimate,
            "rules": times.rules,
            "of_peak": plan.of_peak,
            "examples_per_second": plan.global_batch_size / times.estimate,
            "steps": plan.steps,
            "run": plan.steps * times.estimate,
            "chip_hours": plan.steps * times.estimate * plan.chips / 3600,
        }
    return found


# -- what a person sees ----------------------------------------------------------------------------


def show(terminal: Terminal, plan: dict[str, Any]) -> None:
    """Tables of one plan."""
    terminal.line(
        f"{plan['topology']}: {plan['chips']} chips, {plan['placement']}; "
        f"global batch {plan['global_batch_size']}"
    )
    terminal.console.print(_memory(plan["memory"]))
    terminal.line(verdict(plan))
    if plan["collectives"]:
        terminal.console.print(_collectives(plan["collectives"]))
    if plan["time"]:
        terminal.console.print(_time(plan))
    for note in plan["notes"]:
        terminal.line(f"note: {note}")
    if plan["time"]:
        terminal.line(ASSUMED)


ASSUMED = (
    "All of this is an estimate: products at the chip's peak in bfloat16, memory and links at "
    "theirs, and the input never late. No step of this program takes less than the bound; the "
    "estimate reads and writes what each of its instructions does, caches unknown."
)


def verdict(plan: dict[str, Any]) -> str:
    """Whether it fits, in words."""
    memory = plan["memory"]
    if memory["limit"] is None:
        return f"needs {byte_size(memory['peak'])} of each device; what there is nobody knows here"
    part = f"{byte_size(memory['peak'])} of {byte_size(memory['limit'])}"
    if plan["fits"]:
        return f"fits: {part}, {1 - memory['peak'] / memory['limit']:.0%} left"
    if memory["temporaries"] is None:
        part += " for the state and the batch alone"
    return f"does not fit: {part}"


def _memory(memory: dict[str, Any]) -> Table:
    table = Table("bytes on a device", "")
    table.columns[1].justify = "right"
    rows = {
        "parameters": memory["params"],
        "optimizer state": memory["optimizer"],
        "moving average": memory["average"],
        "model state, step, key": memory["other"],
        "batch": memory["inputs"],
        "gradients, activations, temporaries": memory["temporaries"],
        "results": memory["results"],
        "program": memory["code"],
    }
    for name, size in rows.items():
        if size or size is None:
            table.add_row(name, "unknown" if size is None else byte_size(size))
    table.add_section()
    table.add_row("in all", byte_size(memory["peak"]))
    return table


def _collectives(found: Sequence[dict[str, Any]]) -> Table:
    """Those of one kind that one line makes, together; the longest first."""
    together: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        where = one["line"] or one["op_name"]
        together[one["kind"], tuple(one["axes"]), one["overlapped"], where].append(one)
    rows = sorted(
        together.items(),
        key=lambda item: -sum((x["seconds"] or 0) or x["bytes"] * 1e-12 for x in item[1]),
    )
    table = Table("collective", "over", "times", "bytes", "takes", "beside", "from")
    for column in table.columns[2:5]:
        column.justify = "right"
    for (kind, axes, overlapped, where), ones in rows[:_MOST_ROWS]:
        seconds = [x["seconds"] for x in ones]
        table.add_row(
            kind,
            " ".join(axes) or "?",
            f"{sum(x['times'] for x in ones):g}",
            byte_size(int(sum(x["bytes"] * x["times"] for x in ones))),
            "" if None in seconds else _brief(sum(seconds)),
            "other work" if overlapped else "nothing",
            _short(where),
        )
    if len(rows) > _MOST_ROWS:
        table.caption = f"and {len(rows) - _MOST_ROWS} shorter ones"
    return table


def _short(where: str) -> str:
    """A line of the user's without the folders above its file."""
    path, _, rest = where.rpartition("/")
    return rest if path else where


def _brief(seconds: float) -> str:
    """Three digits: `26.2 ms`, `3.40 us`."""
    unit, scale = ("us", 1e6) if seconds < 1e-3 else ("ms", 1e3) if seconds < 1 else ("s", 1)
    return f"{seconds * scale:#.3g}".rstrip(".") + f" {unit}"


def _time(plan: dict[str, Any]) -> Table:
    time = plan["time"]
    table = Table("a step, at best", "")
    table.columns[1].justify = "right"
    for name, seconds in (
        ("products", time["compute"]),
        ("memory", time["memory"]),
        ("collectives beside other work", time["overlapped"]),
        ("collectives beside nothing", time["waiting"]),
    ):
        table.add_row(name, _brief(seconds))
    table.add_section()
    table.add_row("no less than", _brief(time["bound"]))
    table.add_row(f"estimate, mostly {time['rules']}", _brief(time["estimate"]))
    table.add_row("FLOPs", f"{plan['flops']['step']:.4g}")
    table.add_row("of the peak, at best", f"{time['of_peak']:.1%}")
    table.add_row("examples/s", f"{time['examples_per_second']:,.0f}")
    table.add_row(f"all {time['steps']:,} steps", duration(time["run"]))
    table.add_row("chip-hours", f"{time['chip_hours']:,.3g}")
    return table


def side_by_side(plans: Sequence[dict[str, Any]]) -> Table:
    """Several topologies, a row each."""
    table = Table(
        "topology", "chips", "fits", "a device", "estimate", "examples/s", "of peak", "moves"
    )
    for plan in plans:
        time, memory = plan["time"], plan["memory"]
        kinds: dict[str, float] = defaultdict(float)
        for one in plan["collectives"]:
            kinds[one["kind"]] += one["bytes"] * one["times"]
        table.add_row(
            plan["topology"],
            str(plan["chips"]),
            {True: "yes", False: "no", None: "?"}[plan["fits"]],
            byte_size(memory["peak"]),
            _brief(time["estimate"]) if time else "",
            f"{time['examples_per_second']:,.0f}" if time else "",
            f"{time['of_peak']:.1%}" if time else "",
            ", ".join(f"{kind} {byte_size(int(size))}" for kind, size in kinds.items()),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
