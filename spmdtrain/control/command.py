"""The command `spmdtrain control`: asks a run in progress to save, profile, evaluate or stop."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from spmdtrain.errors import (
    ExitCode,
    StorageError,
    UserError,
    exit_code_of,
    exit_if_output_is_closed,
    foreign,
)
from spmdtrain.record import no_follow
from spmdtrain.record.requests import (
    STACKS_FILE,
    Action,
    Holder,
    Request,
    State,
    find_run,
    read_answer,
    send_request,
    withdraw,
)
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import Writer
from spmdtrain.record.storage import is_url
from spmdtrain.record.validation import Malformed

_POLL = 0.2  # seconds between two looks for an answer
_LARGEST_STACKS = 2**30  # bytes
_ONE = "give one of --save, --profile STEPS, --evaluate, --stop and --stacks"


@dataclass(frozen=True)
class Options:
    """Asks a run in progress to save, profile, evaluate or stop, and waits until it has done so.

    Only the user whose processes train, and root, can do it. The run continues to the same bits.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The workdir of the run, a local folder or one that its host shares with this one."""
    save: bool = False
    """Save a checkpoint after the current step."""
    profile: Annotated[int | None, tyro.conf.arg(metavar="STEPS")] = None
    """Trace the next STEPS steps, as --profile-steps does."""
    evaluate: bool = False
    """Evaluate the validation split after the current step, without callbacks."""
    stop: bool = False
    """Save after the current step and stop with exit code 0: no launcher starts it again."""
    stacks: bool = False
    """Print the Python stacks of all processes, also of a run that hangs."""
    timeout: float = 600.0
    """Seconds to wait."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, by default with the arguments of the process; returns the exit code."""
    with exit_if_output_is_closed():
        options = tyro.cli(Options, args=arguments, prog="python -m spmdtrain.control")
        return exit_code_of(lambda: execute(options))


def execute(options: Options) -> int:
    """Sends the request of a command and prints the answer; returns the exit code.

    Raises:
      UserError: If the options are wrong, there is no such run in progress, or it refuses.
      StorageError: If it does not answer in time, or ends before it answers.
    """
    action = _action_of(options)
    folder = _folder_of(options.run)
    holder = _find_run(options.run, folder)
    request = Request(action, holder.start, options.profile or 0)
    send_request(folder, request)
    try:
        text = _wait(options, folder, holder, request)
    except KeyboardInterrupt:
        print("interrupted: the run may still do it", file=sys.stderr)
        return ExitCode.INTERRUPTED
    finally:
        withdraw(folder, request)
    print(text)
    if action is Action.STACKS:
        try:
            content = no_follow.read_file(folder, STACKS_FILE, _LARGEST_STACKS)
        except OSError as error:
            raise StorageError(f"{folder / STACKS_FILE} cannot be read: {error}") from error
        for line in content.decode(errors="replace").splitlines():
            print(foreign(line, 1000))
    return ExitCode.DONE


def _action_of(options: Options) -> Action:
    asked = [
        *([Action.SAVE] if options.save else []),
        *([Action.PROFILE] if options.profile is not None else []),
        *([Action.EVALUATE] if options.evaluate else []),
        *([Action.STOP] if options.stop else []),
        *([Action.STACKS] if options.stacks else []),
    ]
    if len(asked) != 1:
        given = " and ".join(f"--{action}" for action in asked) or "nothing"
        raise UserError(f"the run is asked for {given}: {_ONE}")
    if options.profile is not None and options.profile < 1:
        raise UserError(f"--profile is {options.profile}: give a number of steps, from 1")
    if not options.timeout > 0:
        raise UserError(f"--timeout is {options.timeout:g}: give seconds, above 0")
    return asked[0]


def _folder_of(run: str) -> Path:
    """Returns the workdir of a run of this user."""
    if is_url(run):
        raise UserError(
            f"{run} is in a bucket, whose objects have no owner: runs take requests only through a "
            "folder. To save and stop such a run, send SIGTERM to one of its processes"
        )
    Run.open(run)
    folder = Path(run)
    owner = folder.stat().st_uid
    if os.geteuid() not in (owner, 0):
        raise UserError(
            f"{run} belongs to user {owner}: only that user, and root, can control its run"
        )
    return folder


def _find_run(run: str, folder: Path) -> Holder:
    """Returns the run in progress in a workdir."""
    if (holder := find_run(folder)) is None:
        evaluates = find_run(folder, Writer.EVALUATOR) is not None
        more = ", but an evaluator, which takes no requests: send it signals" if evaluates else ""
        raise UserError(f"no run is in progress in {run}{more} ({_status_of(run)})")
    if not holder.start:
        raise UserError(
            f"the run in progress in {run} ({holder.where}) takes no requests: it has just begun, "
            "or its version of spmdtrain is too old"
        )
    return holder


def _wait(options: Options, folder: Path, holder: Holder, request: Request) -> str:
    """Waits for the answer to a request, and returns it; prints that the run has accepted it."""
    until, shown = time.monotonic() + options.timeout, ""
    what = f"the run in {options.run} ({holder.where})"
    print(f"waiting for {what}", file=sys.stderr)
    while True:
        now = find_run(folder)  # first: a run answers before it ends
        try:
            found = read_answer(folder, request)
        except (OSError, Malformed) as error:
            raise StorageError(f"the answer of {what} cannot be read: {error}") from error
        state, text = (None, "") if found is None else (found.state, foreign(found.text))
        if state == State.DONE:
            return text
        if state == State.REFUSED:
            raise UserError(f"the run does not --{request.action}: {text}")
        if now is None or now.start not in ("", holder.start):
            end = "has been started again" if now else f"has ended ({_status_of(options.run)})"
            raise StorageError(f"{what} {end}, and has not answered")
        if state == State.ACCEPTED and text != shown:
            print(f"accepted: {text}", file=sys.stderr)
            shown = text
        if time.monotonic() >= until:
            why = (
                "has accepted the request and not acted on it: --stacks shows where it is, and "
                "--timeout waits longer"
                if shown
                else "has not taken the request: its host does not see this folder, it is stopped, "
                "or it belongs to another user"
            )
            raise StorageError(f"after {options.timeout:g} s {what} {why}")
        time.sleep(_POLL)


def _status_of(run: str) -> str:
    """Returns the status of a run in words."""
    if (status := Run(run).status) is None:
        return "it has not begun"
    reason = f": {foreign(status['reason'], 300)}" if "reason" in status else ""
    if status["status"] == "running":
        return f"its process was killed after step {status['step']:,} was saved"
    return f"it is {status['status']}, step {status['step']:,} is saved{reason}"
