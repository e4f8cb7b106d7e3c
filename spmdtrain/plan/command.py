"""Estimates memory, time and communication of a run for a topology, without its devices.

`python -m spmdtrain.plan --config experiments/X.py --topology v5e:4x4`
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax

from spmdtrain.config.command_line import HELP, HELP_ALL, Command, parse_command_line
from spmdtrain.config.experiment import ExperimentFile
from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import failures
from spmdtrain.distributed.out_of_memory import keep_freed_memory
from spmdtrain.document.blocks import NoteBlock
from spmdtrain.document.html import render_page
from spmdtrain.document.terminal import Terminal, parse_byte_size
from spmdtrain.errors import ExitCode, UserError, exit_code_of, foreign
from spmdtrain.plan import measurement, planner, tables, topologies
from spmdtrain.plan.advice import advise, describe_changes
from spmdtrain.plan.failures import FailureOptions
from spmdtrain.plan.page import plan_page
from spmdtrain.plan.profile import (
    calibrate,
    compare,
    newest_trace,
    rates_file,
    with_rates,
    write_rates,
)
from spmdtrain.plan.tables import plan_as_json
from spmdtrain.plan.topologies import LOG, Topology, compiler_environment, has_compiler
from spmdtrain.record.page_file import open_page_file

# Environment variables of a child process: its topology, whether it measures instead of planning,
# and the measurement of an earlier child as JSON.
_TOPOLOGY = "SPMDTRAIN_PLAN_TOPOLOGY"
_MEASURES, _MEASURED = "SPMDTRAIN_PLAN_MEASURES", "SPMDTRAIN_PLAN_MEASURED"
# Kinds of its messages: progress, the plan before advice, the plan with advice, an error.
_PROGRESS, _PLANNED, _RESULT, _ERROR = "doing", "planned", "found", "error"
_REMOVED: dict[str, str | None] = {"TF_CONFIG": None, "XLA_FLAGS": None}
_COMMAND = "python -m spmdtrain.plan"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command; all others are the experiment's."""

    config: str
    """Experiment: a Python file with a Config and build(config)."""
    preset: str | None = None
    """Name in the experiment's PRESETS; other options override its values."""
    topology: str
    """Target devices: v5e:4x4, v5p:8x8x8, v5e:16x16@2 (two slices), gpu:h100:2x8 (2 hosts of 8
    GPUs) or cpu:8. Separate several topologies with commas to compare them."""
    json: bool = False
    """Print only one JSON object: the plan, or for several topologies the list of plans and the
    changes between them."""
    advice: bool = True
    """Look for known problems and try options that fix them; each try compiles again."""
    html: str | None = None
    """File to write: a page with the plans, which needs no network (extra `report`)."""
    measure: bool = False
    """Also train for a few seconds on this machine, which must have the devices of the topology
    (cpu:N always works)."""
    mttf: float | None = None
    """Mean hours between two failures of the whole job: also print the interval of saves that is
    best, and the goodput to expect. Needs --save-seconds."""
    save_seconds: float | None = None
    """Seconds for which a save on disk delays the steps, with --mttf."""
    snapshot_seconds: float | None = None
    """The same for a snapshot in memory; by default as many as for a save."""
    restart_seconds: float | None = None
    """Seconds from a failure until the job makes steps again, with --mttf; by default 120."""
    against: str | None = None
    """Workdir of a run with --profile-steps: compare its trace with the plan of its step, instead
    of planning for other options. The run's options are those of its workdir."""
    calibrate: str | None = None
    """The same, and let later plans for this chip use the rates that the trace has measured."""
    rates: str | None = None
    """File with measured rates of the chip, which --calibrate writes; none for published rates. By
    default the file that --calibrate has written for this chip, if it has."""

    device_memory: str | None = None
    """Memory of a device that a program may use, such as 15.7GB: for a part of a GPU, or for CPUs,
    whose memory is not limited. None means the memory of the chip."""

    @property
    def memory_limit(self) -> int | None:
        """The bytes of `device_memory`; None without it. Raises `UserError` for no size."""
        text = self.device_memory
        return None if text is None else parse_byte_size(text, "--device-memory")

    def failures(self) -> FailureOptions | None:
        """Returns the options about failures; None without `mttf`. Raises `UserError`."""
        return FailureOptions.parse(
            self.mttf, self.save_seconds, self.snapshot_seconds, self.restart_seconds
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; by default with the command-line arguments of this process.

    Returns the exit code: 0 if the run fits, 1 if it does not or if planning failed, 2 for invalid
    input.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if is_child():
            return exit_code_of(lambda: _run_child(words))
        before = {n: signal.signal(n, _end) for n in (signal.SIGTERM, signal.SIGHUP)}
        try:
            return exit_code_of(lambda: execute(words))
        finally:  # the caller may be a script, which then trains
            for number, handler in before.items():
                signal.signal(number, handler)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _end(number: int, _: FrameType | None) -> None:
    """Exits normally on a signal, so that child processes and temporary files are removed."""
    sys.exit(128 + number)


def execute(arguments: Sequence[str]) -> int:
    """Plans for each topology in a separate process and prints the results.

    Returns the exit code; see `main`.

    Raises:
      UserError: If the arguments or the experiment are invalid.
    """
    if (request := _RunRequest.parse(arguments)) is not None:
        return _compare(request, arguments)
    command = parse_command_line(arguments, Options, _COMMAND, __doc__)
    _refuse_own_loop(command.experiment)
    # Invalid ones end the command before anything is compiled.
    command.options.failures(), command.options.memory_limit
    requested = [topologies.parse(text.strip()) for text in command.options.topology.split(",")]
    file = None if command.options.html is None else open_page_file(command.options.html)
    quiet = command.options.json
    if os.environ.get("XLA_FLAGS"):
        print("XLA_FLAGS is ignored in plans: use --compiler-options instead", file=sys.stderr)
    terminal = Terminal(quiet=quiet)
    results = []
    for topology in requested:
        with terminal.waiting(f"planning for {topology}") as status:
            listener = _Listener(terminal, topology, status)
            results.append(
                _plan_in_child(
                    arguments, topology, measures=command.options.measure, listener=listener
                )
            )
        if "error" in results[-1]:  # continue with the other topologies
            print(f"error: {results[-1]['error']}", file=sys.stderr)
        else:
            terminal.show(*tables.advice_blocks(results[-1]))
    plans = [plan for plan in results if "error" not in plan]
    changes = describe_changes(plans)
    if quiet:
        several = {"plans": results, "changes": changes}
        print(json.dumps(results[0] if len(results) == 1 else several, indent=1))
    elif len(plans) > 1:
        terminal.show(*tables.scaling_blocks(plans, changes))
    if file is not None:
        title = f"Plan of {command.experiment.name}"
        page = plan_page(results, changes, title, f"{_COMMAND} {shlex.join(arguments)}")
        file.write(render_page(page))
        terminal.line(f"page: {file.path}")
    if any("failed" in plan for plan in results):
        return ExitCode.FAILED
    if len(plans) < len(results):
        return ExitCode.BAD_INPUT
    return ExitCode.FAILED if any(plan["fits"] is False for plan in plans) else ExitCode.DONE


def _refuse_own_loop(experiment: ExperimentFile) -> None:
    if experiment.has_own_loop:
        raise UserError(
            f"{experiment.path} cannot be planned: it defines its own training loop, "
            "train(config, loop); plan experiments that define build(config)"
        )


# -- the plan of a run, and its trace --------------------------------------------------------------

_UNUSED = {
    "measure": "the trace has the measured times",
    "html": "a comparison has no page",
    "device_memory": "it is about times",
    "advice": "it tries no options",
    "no_advice": "it tries no options",
    **dict.fromkeys(
        ("mttf", "save_seconds", "snapshot_seconds", "restart_seconds"), "it is about steps alone"
    ),
}
"""Options of plans that --against and --calibrate refuse, and why."""


@dataclass(frozen=True, kw_only=True)
class _RunRequest:
    """The options of a comparison of a run with its plan; see `Options`."""

    run: str
    option: str
    config: str | None
    topology: str | None
    rates: str | None
    json: bool

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "_RunRequest | None":
        """Returns the request; None if the arguments ask for a plan, or for help.

        Raises:
          UserError: If there are options that a comparison does not use.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        for name in ("against", "calibrate", "config", "topology", "rates"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--json", action="store_true")
        try:
            known, others = parser.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            if not {"--against", "--calibrate"} & {*arguments}:
                return None  # the parser of all options says it
            raise UserError(f"{error}: give the workdir of a run") from error
        asked = {n: x for n in ("against", "calibrate") if (x := getattr(known, n)) is not None}
        if not asked or {*HELP, *HELP_ALL} & {*others}:
            return None
        if len(asked) > 1:
            raise UserError("--against and --calibrate: give one; --calibrate also compares")
        ((option, run),) = asked.items()
        for word in others:
            name = word.partition("=")[0].lstrip("-")
            why = _UNUSED.get(name.replace("-", "_"), "the run has recorded its options")
            raise UserError(f"{foreign(word, 80)} has no use with --{option}: {why}; leave it out")
        return cls(
            run=run,
            option=option,
            config=known.config,
            topology=known.topology,
            rates=known.rates,
            json=known.json,
        )

    def restored(self, terminal: Terminal) -> "_RunToPlan":
        """Returns what a plan of the run needs.

        Raises:
          UserError: If they are not recorded, or the run's step is not that of a plan.
        """
        # Few commands need it.
        from spmdtrain.replay.recorded_run import read_run
        from spmdtrain.replay.rerun import restore_config

        record = read_run(self.run)
        newest_trace(self.run)
        devices, processes = (
            of(record.last_step) for of in (record.devices_of, record.processes_of)
        )
        kind = record.device_kind
        if not (devices and kind):
            raise UserError(f"{self.run} has not recorded its devices: start it again")
        topology = topologies.topology_of_run(kind, devices, processes or 1, self.topology)
        experiment, config = restore_config(record, self.config, terminal)
        _refuse_own_loop(experiment)
        if (together := config.steps_per_dispatch or 1) > 1:
            raise UserError(
                f"{self.run} makes {together} steps in a dispatch, and a plan compiles one step: "
                "profile a run with --steps-per-dispatch 1"
            )
        return _RunToPlan(experiment, config, topology, processes or 1)


class _RunToPlan(NamedTuple):
    """The experiment of a run, its configuration, its devices and the number of its processes."""

    experiment: ExperimentFile
    config: RunConfig
    topology: Topology
    processes: int


def _compare(request: _RunRequest, arguments: Sequence[str]) -> int:
    """Compares the trace of a run with its plan, in a process that plans, and prints the result."""
    terminal = Terminal(quiet=request.json)
    topology = request.restored(terminal).topology
    with terminal.waiting(f"planning for {topology}") as status:
        listener = _Listener(terminal, topology, status)
        found = _plan_in_child(arguments, topology, measures=False, listener=listener)
    if request.json:
        print(json.dumps(found, indent=1))
    if "error" in found:
        print(f"error: {found['error']}", file=sys.stderr)
        return ExitCode.FAILED if "failed" in found else ExitCode.BAD_INPUT
    if request.json:
        return ExitCode.DONE
    plan = found["plan"]
    terminal.show(
        NoteBlock(f"{plan['topology']}: {plan['placement']}; {tables.compiled_by(plan)}"),
        *tables.trace_blocks(found["comparison"]),
        *(NoteBlock(f"note: {note}") for note in tables.all_notes(plan)),
        *(tables.calibration_blocks(found["calibration"]) if found["calibration"] else ()),
    )
    return ExitCode.DONE


def _compared(request: _RunRequest) -> dict[str, Any]:
    """Returns the comparison of a run with its plan as JSON; called in the process that plans."""
    run = request.restored(Terminal(quiet=True))
    files, topology = newest_trace(request.run), run.topology
    calibrates = request.option == "calibrate"

    def plan_for(topology: Topology) -> planner.Plan:
        return planner.plan(
            run.experiment, run.config, topology, on_progress=lambda stage: send(_PROGRESS, stage)
        )

    file = rates_file(topology, request.rates)
    if calibrates and file is None:
        raise UserError("--calibrate writes rates: give --rates a file, or leave it out")
    if not calibrates:
        topology = with_rates(topology, request.rates)
    if topology.chip is None:
        send(_PROGRESS, "measuring the rates of virtual devices")
        topology = dataclasses.replace(topology, chip=measurement.virtual_device())
    plan = plan_for(topology)
    comparison = compare(plan, files, run.processes)
    result: dict[str, Any] = {
        "run": request.run,
        "plan": plan_as_json(plan),
        "comparison": tables.comparison_as_json(comparison, str(files[0].parent)),
        "calibration": None,
    }
    if calibrates and file is not None:
        found = calibrate(plan, comparison, request.run)
        after = plan_for(dataclasses.replace(topology, chip=found.chip))
        write_rates(file, topology, found)
        result["calibration"] = {
            "chip": found.chip.name,
            "file": str(file),
            "evidence": dict(found.evidence),
            "before": result["plan"]["chip"],
            "after": dataclasses.asdict(found.chip),
            "predicted": {
                "before": comparison.predicted,
                "after": after.times.estimate if after.times else math.nan,
                "measured": comparison.measured,
            },
        }
    return result


# -- a process for each topology -------------------------------------------------------------------

# Each topology has its own process, because JAX initializes its devices once in a process and a
# compiler does not react to Ctrl-C; a process can be killed.


@dataclass(frozen=True)
class _Listener:
    """Prints the messages of a child process."""

    terminal: Terminal
    topology: Topology
    status: Callable[[str], None]

    def on_message(self, kind: str, message: Any) -> None:
        """Prints progress, and the plan as soon as it is complete; advice follows later."""
        if kind == _PROGRESS:
            self.status(f"planning for {self.topology}: {message}")
        elif kind == _PLANNED:
            self.terminal.show(*tables.plan_blocks(message))


def _plan_in_child(
    arguments: Sequence[str], topology: Topology, *, measures: bool, listener: _Listener
) -> dict[str, Any]:
    """Returns the plan for one topology, with the measurement if requested, or the error.

    If the plan succeeded and its advice failed, returns the plan with the error.
    """
    command = ("-m", "spmdtrain.plan", *arguments)
    variables = {_TOPOLOGY: str(topology)}
    plan: dict[str, Any] = {}

    def on_message(kind: str, message: Any) -> None:
        if kind == _PLANNED:
            plan.update(message)
        listener.on_message(kind, message)

    try:
        if measures:
            listener.status(f"running on {topology}")
            env = {**_REMOVED, **measurement.environment(topology), **variables, _MEASURES: "1"}
            kind, measured = run_child(command, env, on_message)
            if kind != _MEASURED:
                if kind == _ERROR:
                    return {"topology": str(topology), "error": measured}
                why = "the measurement ended without a result"
                return {"topology": str(topology), "error": why, "failed": True}
            variables[_MEASURED] = json.dumps(measured)
        env = {**_REMOVED, **compiler_environment(topology), **variables}
        kind, result = run_child(command, env, on_message)
    except EndedError as error:
        why = f"planning for {topology} {error}"
        return plan | {"topology": str(topology), "error": why, "failed": True}
    if kind == _ERROR:
        return {"topology": str(topology), "error": result}
    if kind != _RESULT:  # os._exit in the experiment
        why = f"planning for {topology} ended without a plan"
        return plan | {"topology": str(topology), "error": why, "failed": True}
    return dict(result)


def _run_child(arguments: Sequence[str]) -> int:
    """Plans for, or measures on, the topology of this child process and sends the result."""
    end_with_parent()
    if _MEASURES in os.environ:
        keep_freed_memory()  # like the run command, before JAX starts its threads
    topology = topologies.parse(os.environ[_TOPOLOGY])
    # A deserialized program has no dump, so its peak memory would be unknown.
    jax.config.update("jax_enable_compilation_cache", False)
    if topology.chip is None or not has_compiler(topology):
        jax.config.update("jax_num_cpu_devices", topology.devices)
    try:
        with failures.work_in_progress("planning"):
            if (request := _RunRequest.parse(arguments)) is not None:
                send(_RESULT, _compared(request))
                end_messages()
                return ExitCode.DONE
            command = parse_command_line(arguments, Options, _COMMAND)
            if _MEASURES in os.environ:
                measured = measurement.measure(command.experiment, command.config, topology)
                send(_MEASURED, dataclasses.asdict(measured))
            else:
                send(_RESULT, _plan(arguments, command, topology))
    except UserError as error:
        send(_ERROR, str(error))
    end_messages()
    return ExitCode.DONE


def _plan(arguments: Sequence[str], command: Command, topology: Topology) -> dict[str, Any]:
    measured = None
    if _MEASURED in os.environ:
        measured = measurement.from_json(json.loads(os.environ[_MEASURED]))
        topology = measured.known(topology)
    if measured is None or measured.chip is None:
        topology = with_rates(topology, command.options.rates)

    def plan_with(config: RunConfig, topology: Topology, prefix: str) -> planner.Plan:
        return planner.plan(
            command.experiment,
            config,
            topology,
            memory_limit=command.options.memory_limit,
            on_progress=lambda stage: send(_PROGRESS, prefix + stage),
        )

    def replan(options: Sequence[str]) -> planner.Plan:
        words = [*arguments, "--topology", str(topology), *options]
        again = parse_command_line(words, Options, _COMMAND)
        other = topologies.parse(again.options.topology)
        same = other.text == topology.text  # which has measured rates
        other = topology if same else with_rates(other, again.options.rates)
        return plan_with(again.config, other, f"with {' '.join(options)}: ")

    plan = plan_with(command.config, topology, "")
    failures = None
    if (given := command.options.failures()) is not None:
        step = plan.times.estimate if plan.times else None
        step = step if measured is None else measured.step
        failures = given.as_json(command.config, step)
    send(_PLANNED, plan_as_json(plan, (), measured, failures))
    advised = advise(plan, command.config, topology, replan) if command.options.advice else []
    return plan_as_json(plan, advised, measured, failures)


# -- Subprocesses that send JSON messages: progress, then a result ---------------------------------

_CHANNEL = "SPMDTRAIN_SAYS"  # file descriptor for the messages
_PARENT = "SPMDTRAIN_SAYS_TO"  # process id of the receiver
_LONGEST_LOG = 20_000


class EndedError(Exception):
    """Raised if a subprocess ended without a result. Its output was copied to stderr."""


def is_child() -> bool:
    """Returns whether `run_child` started this process."""
    return _CHANNEL in os.environ


def end_with_parent() -> None:
    """Makes a process that `run_child` started die with its parent; only Linux supports this."""
    parent = int(os.environ[_PARENT])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os._exit(1)


def send(kind: str, message: Any) -> None:
    """Sends a message from a process that `run_child` started; the last message is its result."""
    line = json.dumps([kind, message]) + "\n"
    data = line.encode()
    while data:
        data = data[os.write(int(os.environ[_CHANNEL]), data) :]


def end_messages() -> None:
    """Signals the receiver that no messages follow, whatever this process still does."""
    os.close(int(os.environ[_CHANNEL]))


def run_child(
    command: Sequence[str],
    env: Mapping[str, str | None],
    on_message: Callable[[str, Any], None],
    *,
    seconds_to_end: float = 30.0,
) -> tuple[str, Any]:
    """Runs a Python command and returns the kind and the content of its last message.

    If this call is interrupted, it kills the command and all processes that it started.

    Args:
      command: Arguments of the Python interpreter.
      env: Changes to this process's environment; None removes a variable.
      on_message: Receives the kind and the content of each message.
      seconds_to_end: How long it may live after its last message; then it is killed.

    Raises:
      EndedError: If the command failed or sent no message; its output is copied to stderr.
    """
    variables = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
    with tempfile.TemporaryDirectory(prefix="spmdtrain-") as folder:
        output = Path(folder) / "output"
        reads, writes = os.pipe()
        with os.fdopen(reads) as messages, output.open("w") as file:
            try:
                child = subprocess.Popen(
                    [sys.executable, *command],
                    # The child's temporary files are removed with the folder, however it ends.
                    env=variables
                    | {_CHANNEL: str(writes), _PARENT: str(os.getpid()), "TMPDIR": folder},
                    pass_fds=(writes,),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            finally:
                os.close(writes)
            last: tuple[str, Any] | None = None
            with _killed_on_exit(child):
                for line in messages:
                    kind, message = last = json.loads(line)
                    on_message(kind, message)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(seconds_to_end)
                code = child.returncode
        if last is None or code:
            for path in (output, *Path(folder).glob(f"{LOG}*")):
                sys.stderr.write(path.read_text(errors="replace")[-_LONGEST_LOG:])
            raise EndedError(f"ended with code {child.returncode}, see above")
    return last


@contextlib.contextmanager
def _killed_on_exit(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kills the process group of a child that still runs when the context exits."""
    try:
        yield
    finally:
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
