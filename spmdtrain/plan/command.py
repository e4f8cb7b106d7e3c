"""`python -m spmdtrain.plan --config experiments/X.py --topology v5e:4x4`: before you rent it."""

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax

from spmdtrain.config import RunConfig
from spmdtrain.errors import ExitCode, UserError, exit_code_of
from spmdtrain.plan import aot, json_subprocess, measurement, planner, tables, topologies
from spmdtrain.plan.advice import advise
from spmdtrain.plan.json_report import as_json
from spmdtrain.plan.tables import changes
from spmdtrain.plan.topologies import Topology
from spmdtrain.terminal import Terminal
from spmdtrain.train.command_line import Command, parse

# For a process that plans for one topology: which.
_TOPOLOGY = "SPMDTRAIN_PLAN_TOPOLOGY"
# Whether it is to measure instead, and what one that was to has measured.
_MEASURES, _MEASURED = "SPMDTRAIN_PLAN_MEASURES", "SPMDTRAIN_PLAN_MEASURED"
_DOING, _PLANNED, _FOUND, _ERROR = "doing", "planned", "found", "error"  # what it says
_LEFT_OUT: dict[str, str | None] = {"TF_CONFIG": None, "XLA_FLAGS": None}
_COMMAND = "python -m spmdtrain.plan"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command's own options; the others are the experiment's."""

    config: str
    """The experiment: a Python file with a Config and a build(config)."""
    preset: str | None = None
    """One of the experiment's PRESETS, whose values the other options then change."""
    topology: str
    """Where it is to run: v5e:4x4, v5p:8x8x8, v5e:16x16@2 (two slices), gpu:h100:2x8 (hosts and
    GPUs on each) or cpu:8; several with commas between them."""
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
        if json_subprocess.is_elsewhere():
            return _answer(given)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        return exit_code_of(lambda: execute(given))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _end(number: int, _: FrameType | None) -> None:
    """Ends this process in order, so that nothing of it is left."""
    sys.exit(128 + number)


def execute(arguments: Sequence[str]) -> int:
    """Plan for each topology in a process of its own, and show what came of it."""
    command = parse(arguments, Options, _COMMAND, __doc__)
    if command.experiment.has_own_loop:
        raise UserError(
            f"{command.experiment.path} has a loop of its own, train(config, loop): a plan is for "
            "files with build(config)"
        )
    asked = [topologies.parse(text.strip()) for text in command.options.topology.split(",")]
    quiet = command.options.json
    if os.environ.get("XLA_FLAGS"):
        print("XLA_FLAGS is left out of plans: --compiler-options is for that", file=sys.stderr)
    terminal = Terminal(quiet=quiet)
    found = []
    for topology in asked:
        with terminal.waiting(f"planning for {topology}") as status:
            listener = _Listener(terminal, topology, status)
            found.append(_planned(arguments, topology, command.options, listener))
        if "error" in found[-1]:  # the other topologies may do
            print(f"error: {found[-1]['error']}", file=sys.stderr)
        else:
            tables.show_advice(terminal, found[-1])
    plans = [plan for plan in found if "error" not in plan]
    if quiet:
        told = found[0] if len(found) == 1 else {"plans": found, "changes": changes(plans)}
        print(json.dumps(told, indent=1))
    elif len(plans) > 1:
        tables.show_scaling(terminal, plans)
    if any("failed" in plan for plan in found):
        return ExitCode.FAILED
    if len(plans) < len(found):
        return ExitCode.BAD_INPUT
    return ExitCode.FAILED if any(plan["fits"] is False for plan in plans) else ExitCode.DONE


# -- a process for each topology -------------------------------------------------------------------

# JAX is told once in a process which devices there are, and a compiler does not hear Ctrl-C: so
# each topology has a process, which can be ended.


@dataclass(frozen=True)
class _Listener:
    """Shows what such a process says."""

    terminal: Terminal
    topology: Topology
    status: Callable[[str], None]

    def hear(self, what: str, message: Any) -> None:
        """What it does now, or the plan: advice takes longer, and comes after."""
        if what == _DOING:
            self.status(f"planning for {self.topology}: {message}")
        elif what == _PLANNED:
            tables.show(self.terminal, message)


def _planned(
    arguments: Sequence[str], topology: Topology, options: Options, listener: _Listener
) -> dict[str, Any]:
    """The plan for one topology, with what was measured on it where that is asked for; or why not.

    Of a plan whose advice cannot be had, the plan.
    """
    command = ("-m", "spmdtrain.plan", *arguments)
    told = {_TOPOLOGY: str(topology)}
    plan: dict[str, Any] = {}

    def hear(what: str, message: Any) -> None:
        if what == _PLANNED:
            plan.update(message)
        listener.hear(what, message)

    try:
        if options.measure:
            listener.status(f"running on {topology}")
            env = {**_LEFT_OUT, **measurement.environment(topology), **told, _MEASURES: "1"}
            what, measured = json_subprocess.run(command, env, hear)
            if what != _MEASURED:
                why = measured if what == _ERROR else "running ended without a figure"
                return {"topology": str(topology), "error": why}
            told[_MEASURED] = json.dumps(measured)
        env = {**_LEFT_OUT, **aot.environment(topology), **told}
        what, found = json_subprocess.run(command, env, hear)
    except json_subprocess.EndedError as error:
        why = f"planning for {topology} {error}"
        return plan | {"topology": str(topology), "error": why, "failed": True}
    if what == _ERROR:
        return {"topology": str(topology), "error": found}
    if what != _FOUND:  # the experiment ended the process, in order
        why = f"planning for {topology} ended without a plan"
        return plan | {"topology": str(topology), "error": why, "failed": True}
    return dict(found)


def _answer(arguments: Sequence[str]) -> int:
    """Plan for the one topology of this process, or measure there, and say what came of it."""
    json_subprocess.end_with_parent()
    topology = topologies.parse(os.environ[_TOPOLOGY])
    # A program that is read back has no dump, and so tells less.
    jax.config.update("jax_enable_compilation_cache", False)
    if topology.chip is None or not aot.has_compiler(topology):
        jax.config.update("jax_num_cpu_devices", topology.devices)
    try:
        command = parse(arguments, Options, _COMMAND)
        if _MEASURES in os.environ:
            measured = measurement.measure(command.experiment, command.config, topology)
            json_subprocess.send(_MEASURED, dataclasses.asdict(measured))
        else:
            json_subprocess.send(_FOUND, _plan(arguments, command, topology))
    except UserError as error:
        json_subprocess.send(_ERROR, str(error))
    return ExitCode.DONE


def _plan(arguments: Sequence[str], command: Command, topology: Topology) -> dict[str, Any]:
    measured = None
    if _MEASURED in os.environ:
        measured = measurement.from_json(json.loads(os.environ[_MEASURED]))
        topology = measured.known(topology)

    def planned(config: RunConfig, doing: str) -> planner.Plan:
        return planner.plan(
            command.experiment,
            config,
            topology,
            tell=lambda what: json_subprocess.send(_DOING, doing + what),
        )

    def again(options: Sequence[str]) -> planner.Plan:
        config = parse([*arguments, *options], Options, _COMMAND).config
        return planned(config, f"with {' '.join(options)}: ")

    plan = planned(command.config, "")
    json_subprocess.send(_PLANNED, as_json(plan, (), measured))
    advised = advise(plan, command.config, topology, again) if command.options.advice else []
    return as_json(plan, advised, measured)
