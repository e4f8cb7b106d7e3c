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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdtrain import measuring, plan_tables, planning, run, topologies
from spmdtrain.advice import Advice, advise
from spmdtrain.config import RunConfig
from spmdtrain.errors import ExitCode, UserError, exit_code_of
from spmdtrain.measuring import Measured
from spmdtrain.plan_tables import changes
from spmdtrain.sent import Traffic
from spmdtrain.sharding_table import Row
from spmdtrain.terminal import Terminal
from spmdtrain.topologies import Topology

# For a process that plans for one topology: which, and the file that its answer goes to.
_TOPOLOGY, _ANSWER = "SPMDTRAIN_PLAN_TOPOLOGY", "SPMDTRAIN_PLAN_ANSWER"
# Whether it is to measure instead, and what one that was to has measured.
_MEASURES, _MEASURED = "SPMDTRAIN_PLAN_MEASURES", "SPMDTRAIN_PLAN_MEASURED"
_DOING, _FOUND = "doing: ", "found: "  # what begins the lines that it prints
_COMMAND = "python -m spmdtrain.plan"
_MOST_BUFFERS = 12


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
    """Print one JSON object and nothing else: the plan, or of several topologies all plans and what
    changes between them."""
    advice: bool = True
    """Try what is known to mend what is found to go wrong: each try compiles once more."""
    measure: bool = False
    """Also train for some seconds, on as many devices that are here: of cpu:8, say."""


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
    command = run.parse(arguments, Options, _COMMAND)
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
        with terminal.waiting(f"planning for {topology}") as say:
            progress = _Progress(terminal, topology, say)
            found.append(_planned(arguments, topology, command.options, progress))
        if "error" in found[-1]:  # the other topologies may do
            print(f"error: {found[-1]['error']}", file=sys.stderr)
        else:
            plan_tables.show_advice(terminal, found[-1])
    plans = [plan for plan in found if "error" not in plan]
    if quiet and plans:
        told = found[0] if len(found) == 1 else {"plans": found, "changes": changes(plans)}
        print(json.dumps(told, indent=1))
    elif len(plans) > 1:
        plan_tables.show_scaling(terminal, plans)
    if len(plans) < len(found):
        return ExitCode.BAD_INPUT
    return ExitCode.FAILED if any(plan["fits"] is False for plan in plans) else ExitCode.DONE


# -- a process for each topology -------------------------------------------------------------------

# JAX is told once in a process which devices there are, and a compiler does not hear Ctrl-C: so
# each topology has a process, which can be ended.


@dataclass(frozen=True)
class _Progress:
    """Shows what such a process tells of itself, a line each."""

    terminal: Terminal
    topology: Topology
    say: Callable[[str], None]

    def hear(self, line: str) -> None:
        """What it does now, or the plan: advice takes longer, and comes after."""
        if line.startswith(_DOING):
            self.say(f"planning for {self.topology}: {line.removeprefix(_DOING).strip()}")
        elif line.startswith(_FOUND):
            plan_tables.show(self.terminal, json.loads(line.removeprefix(_FOUND)))


def _planned(
    arguments: Sequence[str], topology: Topology, options: Options, progress: _Progress
) -> dict[str, Any]:
    """The plan for one topology, with what was measured on it where that is asked for."""
    told = {_TOPOLOGY: str(topology)}
    if options.measure:
        progress.say(f"running on {topology}")
        measured = _elsewhere(arguments, told | {_MEASURES: "1"}, measuring.environment(topology))
        if "error" in measured:
            return measured
        told[_MEASURED] = json.dumps(measured)
    return _elsewhere(arguments, told, planning.environment(topology), progress.hear)


def _elsewhere(
    arguments: Sequence[str],
    told: dict[str, str],
    env: dict[str, str],
    hear: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """What a process of its own answers, or the error that is meant for the user."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "plan.json", Path(folder) / "stderr"
        inherited = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "XLA_FLAGS")}
        with log.open("w") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", "spmdtrain.plan", *arguments],
                env=inherited | env | told | {_ANSWER: str(answer)},
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        with _ended(child):
            assert child.stdout is not None
            for line in child.stdout:
                hear(line)
            child.wait()
        if not answer.exists():
            sys.stderr.write(log.read_text(errors="replace"))
            why = f"planning for {told[_TOPOLOGY]} ended with code {child.returncode}, see above"
            return {"topology": told[_TOPOLOGY], "error": why}
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
    """Plan for the one topology of this process, or measure there; write down what came of it."""
    answer, topology = Path(os.environ[_ANSWER]), topologies.parse(os.environ[_TOPOLOGY])
    found: dict[str, Any]
    try:
        command = run.parse(arguments, Options, _COMMAND)
        if _MEASURES in os.environ:
            measured = measuring.measure(command.experiment, command.config, topology)
            found = dataclasses.asdict(measured)
        else:
            found = _plan(arguments, command, topology)
    except UserError as error:
        answer.write_text(json.dumps({"topology": str(topology), "error": str(error)}))
        return ExitCode.BAD_INPUT
    answer.write_text(json.dumps(found))
    return ExitCode.DONE


def _plan(arguments: Sequence[str], command: run.Command, topology: Topology) -> dict[str, Any]:
    measured = None
    if _MEASURED in os.environ:
        measured = measuring.from_json(json.loads(os.environ[_MEASURED]))
        topology = measured.known(topology)

    def planned(config: RunConfig, doing: str) -> planning.Plan:
        def tell(what: str) -> None:
            print(f"{_DOING}{doing}{what}", flush=True)

        return planning.plan(command.experiment, config, topology, tell=tell)

    def again(options: Sequence[str]) -> planning.Plan:
        config = run.parse([*arguments, *options], Options, _COMMAND).config
        return planned(config, f"with {' '.join(options)}: ")

    plan = planned(command.config, "")
    print(f"{_FOUND}{json.dumps(as_json(plan, (), measured))}", flush=True)
    advised = advise(plan, command.config, topology, again) if command.options.advice else []
    return as_json(plan, advised, measured)


def as_json(
    plan: planning.Plan, advised: Sequence[Advice] = (), measured: Measured | None = None
) -> dict[str, Any]:
    """A plan as `--json` prints it: bytes of one device, seconds of one step."""
    times, memory = plan.times, dataclasses.asdict(plan.memory)
    found = {
        "topology": plan.topology,
        "chips": plan.chips,
        "used": plan.used,
        "devices": plan.devices,
        "placement": plan.placement,
        "global_batch_size": plan.global_batch_size,
        "fits": plan.fits,
        "memory": memory | {"buffers": list(map(dataclasses.asdict, plan.buffers[:_MOST_BUFFERS]))},
        "state": [_parameter(row) for row in plan.rows],
        "collectives": list(map(_collective, plan.collectives)),
        "sent": _sent(plan.traffic),
        "rematerialized": list(map(dataclasses.asdict, plan.rematerialized)),
        "flops": {
            "step": plan.flops,
            "again": plan.flops_again,
            "chip": plan.flops / plan.used,
            "by_line": plan.flops_by_line,
        },
        "time": None,
        "measured": None if measured is None else dataclasses.asdict(measured),
        "advice": list(map(dataclasses.asdict, advised)),
        "notes": plan.notes,
    }
    if times is not None:
        tokens = plan.global_batch_size * plan.tokens / times.estimate
        found["time"] = dataclasses.asdict(times) | {
            "bound": times.bound,
            "estimate": times.estimate,
            "rules": times.rules,
            "utilization": plan.utilization,
            "examples_per_second": plan.global_batch_size / times.estimate,
            "tokens_per_second": tokens or None,
            "steps": plan.steps,
            "run": plan.steps * times.estimate,
            "chip_hours": plan.steps * times.estimate * plan.chips / 3600,
        }
    return found


def _collective(one: planning.Moved) -> dict[str, Any]:
    return dataclasses.asdict(one) | {"seconds": None if math.isnan(one.seconds) else one.seconds}


def _parameter(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "shape": row.shape,
        "dtype": row.dtype,
        "bytes": row.own.device,
        "parts": row.own.parts,
        "optimizer_bytes": row.optimizer.device,
        "optimizer_parts": row.optimizer.parts,
    }


def _sent(traffic: Traffic) -> dict[str, Any]:
    return {
        "bytes": traffic.bytes,
        "least": traffic.least,
        "by_parameter": list(map(dataclasses.asdict, traffic.by_parameter)),
    }


if __name__ == "__main__":
    sys.exit(main())
