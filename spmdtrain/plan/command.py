"""Estimates memory, time and communication of a run for a topology, without its devices.

`python -m spmdtrain.plan --config experiments/X.py --topology v5e:4x4`
"""

import contextlib
import ctypes
import dataclasses
import json
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
from typing import Any

import jax

from spmdtrain.config.command_line import Command, parse_command_line
from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import failures
from spmdtrain.distributed.out_of_memory import keep_freed_memory
from spmdtrain.document.html import render_page
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import ExitCode, UserError, exit_code_of
from spmdtrain.plan import measurement, planner, tables, topologies
from spmdtrain.plan.advice import advise, describe_changes
from spmdtrain.plan.failures import FailureOptions
from spmdtrain.plan.page import open_page_file, plan_page
from spmdtrain.plan.tables import plan_as_json
from spmdtrain.plan.topologies import LOG, Topology, compiler_environment, has_compiler

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
    command = parse_command_line(arguments, Options, _COMMAND, __doc__)
    if command.experiment.has_own_loop:
        raise UserError(
            f"{command.experiment.path} cannot be planned: it defines its own training loop, "
            "train(config, loop); plan experiments that define build(config)"
        )
    command.options.failures()  # an invalid one ends the command before anything is compiled
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
            results.append(_plan_in_child(arguments, topology, command.options, listener))
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
    arguments: Sequence[str], topology: Topology, options: Options, listener: _Listener
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
        if options.measure:
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

    def plan_with(config: RunConfig, topology: Topology, prefix: str) -> planner.Plan:
        return planner.plan(
            command.experiment,
            config,
            topology,
            on_progress=lambda stage: send(_PROGRESS, prefix + stage),
        )

    def replan(options: Sequence[str]) -> planner.Plan:
        words = [*arguments, "--topology", str(topology), *options]
        again = parse_command_line(words, Options, _COMMAND)
        other = topologies.parse(again.options.topology)
        other = topology if other.text == topology.text else other  # which has measured rates
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
