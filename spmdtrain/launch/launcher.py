"""`python -m spmdtrain.launch --processes N -- COMMAND`: start, watch and restart the processes."""

import dataclasses
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import tyro

from spmdtrain.distributed import out_of_memory, progress
from spmdtrain.distributed.progress import Phase, Record
from spmdtrain.errors import ExitCode, UserError, exit_code_of
from spmdtrain.launch import stalls
from spmdtrain.launch.child import Child, Output, Reaper, Signals
from spmdtrain.launch.exit_report import (
    CauseRank,
    Restarts,
    TaskExit,
    describe,
    hint,
    rank,
    root_cause,
)
from spmdtrain.launch.task_env import (
    EVALUATOR,
    environments_of,
    gpus_of,
    tf_configs,
    training_tasks,
)

_USAGE = "python -m spmdtrain.launch --processes N [options] -- COMMAND"
_POLL = 0.1  # seconds; the end of a child and signals are noticed at once all the same
_FAREWELL = 10.0  # seconds in which workers and servers end after their chief
_CHIEF = 30.0  # seconds in which a chief ends after one of them: it tells all, and then why
_PATIENCE = 3.0  # seconds after a death in which the others may tell what they die of, or of it


@dataclass(frozen=True, kw_only=True)
class Options:
    """Start the processes of a training on this machine, watch them, and restart them together."""

    processes: int
    """How many processes train: a chief and workers."""
    ps: int = 0
    """Also start so many parameter servers, for --strategy parameter_server, whose workers may be
    lost and come again by themselves."""
    devices_per_process: int | None = None
    """The devices of each: so many GPUs where there are any, else virtual CPU devices."""
    evaluator: bool = False
    """Also start an evaluator, which does not take part in the training."""
    max_restarts: int = 3
    """Restarts without a new checkpoint in between; each new one refills the budget."""
    hang_timeout: float = 900
    """Seconds without any progress after which the job counts as hung; 0 is never."""
    grace: float = 120
    """Seconds to save and end in, when asked to."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return exit_code_of(lambda: execute(sys.argv[1:] if arguments is None else arguments))


def execute(arguments: Sequence[str]) -> int:
    """Do what the command line says; returns the exit code of the job."""
    own, separator, command = _split(arguments)
    options = tyro.cli(Options, args=own, prog="python -m spmdtrain.launch", description=__doc__)
    if not command:
        missing = "nothing follows the --" if separator else "there is no --"
        raise UserError(f"no command to start, {missing}: {_USAGE}")
    _check(options)
    # Those of this environment, whatever PATH says.
    if command[0] in ("python", "python3"):
        command = [sys.executable, *command[1:]]
    elif command[0] == "spmdtrain":
        command = [sys.executable, "-m", *command]
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]!r} cannot be run: no such command, or not executable")
    names = training_tasks(options.processes, options.ps) + [EVALUATOR] * options.evaluator
    gpus = gpus_of(os.environ)
    environments = environments_of(names, options.devices_per_process, os.environ, gpus)
    with Signals() as signals, Launcher(options, command, environments, signals) as launcher:
        if gpus and options.evaluator and not environments[EVALUATOR]["CUDA_VISIBLE_DEVICES"]:
            launcher.say("the evaluator computes on the CPU: the training takes all GPUs")
        return launcher.run()


def _split(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """The launcher's own arguments, whether a `--` follows, and the command behind it."""
    own = list(arguments)
    at = own.index("--") if "--" in own else len(own)
    return own[:at], at < len(own), own[at + 1 :]


def _check(options: Options) -> None:
    least = {"processes": 1, "devices_per_process": 1}
    for name, value in vars(options).items():
        if value is not None and not value >= least.get(name, 0):
            option = name.replace("_", "-")
            raise UserError(f"--{option} {value}: at least {least.get(name, 0)} is wanted")


@dataclass(frozen=True)
class Outcome:
    """How an attempt, or the evaluator, has ended."""

    code: int
    words: str
    saved: int = -1
    """The newest checkpoint that was known to be whole; -1 where none was."""

    @property
    def may_restart(self) -> bool:
        """Whether another attempt could end otherwise."""
        return self.code not in (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NON_FINITE)


class Launcher:
    """One job: its training tasks, which live and die together, and its evaluator."""

    def __init__(
        self,
        options: Options,
        command: Sequence[str],
        environments: Mapping[str, Mapping[str, str]],
        signals: Signals,
    ) -> None:
        self.options = options
        self.command = command
        self.environments = environments
        self.signals = signals
        self.deadline = math.inf
        """Until when the tasks may run that a signal to the launcher has asked to end."""
        self.over = False
        """Whether the training has ended for good."""
        self.folder = tempfile.mkdtemp(prefix="spmdtrain-")
        self.guardian = Reaper(self.folder)
        self.oom_kills = out_of_memory.OomKills()
        self.output = Output([*environments, "launch"])
        self.evaluator = Evaluator(self) if options.evaluator else None

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.guardian.close()

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self.output.line("launch", "stderr", text.encode(errors="replace"))

    def run(self) -> int:
        """Train, with restarts, to the end, the evaluator's included; returns the exit code."""
        restarts = Restarts(self.options.max_restarts)
        configs = tf_configs(list(self.environments))
        if self.evaluator is not None:
            self.evaluator.begin(configs[EVALUATOR])
        while True:
            outcome = self._attempt(configs)
            wait = None
            if outcome.may_restart and not self.signals.received:
                wait = restarts.next(outcome.saved)
            self.say(f"{outcome.words}{self._what_next(outcome, restarts, wait)}")
            if wait is None:
                break
            self._pause(wait)
            if self.signals.received:
                self.say(f"{self.signals.received[0].name}: not restarted")
                break
            configs = tf_configs(list(self.environments))
        return self._finish(outcome)

    def _what_next(self, outcome: Outcome, restarts: Restarts, wait: float | None) -> str:
        if wait is not None:
            return f"; restart {restarts.used} of {restarts.limit} in {wait:g} s"
        if outcome.may_restart and not self.signals.received:
            return f"; no restart is left of {restarts.limit}"
        return ""

    def start(self, name: str, tf_config: str) -> Child:
        """Start a task, without what an earlier one of its name has left."""
        for kind in ("phase", "reason", "stacks"):
            progress.path(self.folder, name, kind).unlink(missing_ok=True)
        told = {"TF_CONFIG": tf_config, progress.LAUNCH: self.folder}
        environment = {**self.environments[name], **told}
        return Child(name, self.command, environment, self.output, self.guardian)

    def tick(self) -> None:
        """Sleep a little, but not past a signal or the end of a child; see to the evaluator."""
        self.signals.wait(_POLL)
        self.oom_kills.look()
        if self.evaluator is not None:
            self.evaluator.tend()

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.signals.received:
            self.tick()

    def _attempt(self, configs: Mapping[str, str]) -> Outcome:
        """Start all training tasks and watch them until the last has ended."""
        names = training_tasks(self.options.processes, self.options.ps)
        tasks = [self.start(name, configs[name]) for name in names]
        spares = WorkerRestarter(self, configs) if self.options.ps else None
        deaths: list[TaskExit] = []
        until = math.inf  # when the rest is killed
        watch, hung, stopped = stalls.Watch(), None, list[str]()
        while running := [child for child in tasks if child.status is None]:
            self.tick()
            for child in [child for child in running if child.poll()]:
                death = self.death_of(child)
                if spares is not None and until == math.inf and spares.take(death):
                    continue
                deaths.append(death)
                patience = self._patience(death)
                if spares is not None:  # the chief may be telling why; without it all are to end
                    is_chief = death.task == "chief"
                    patience = max(patience, _FAREWELL if is_chief else _CHIEF)
                    if is_chief and rank(death) is CauseRank.NONE:
                        patience = _FAREWELL
                until = min(until, time.monotonic() + patience)
            if spares is not None and until == math.inf:
                tasks += spares.begun()
            running = [child for child in tasks if child.status is None]
            if self.signals.received and running and self.deadline == math.inf:
                self._ask_to_end(running)
            if self.deadline < math.inf:  # now only the grace counts: some may be saving
                until = 0.0 if len(self.signals.received) > 1 else self.deadline
            elif until == math.inf and self._is_stuck(watch, running):
                hung, until = self._tell_stuck(running), 0.0
            if time.monotonic() >= until:
                stopped += [child.name for child in running if self._is_stopped(child)]
                for child in running:
                    child.kill()
        return self._outcome(deaths, hung, stopped)

    def _patience(self, death: TaskExit) -> float:
        """How long the others may go on after a death."""
        patience = {CauseRank.NONE: math.inf, CauseRank.PREEMPTED: self.options.grace}
        return patience.get(rank(death), _PATIENCE)

    def _ask_to_end(self, running: Sequence[Child]) -> None:
        self.deadline = time.monotonic() + self.options.grace
        for child in running:
            record = progress.read(self.folder, child.name)
            child.send(signal.SIGTERM, record.pid if record else None)
        self.say(
            f"{self.signals.received[0].name}: the tasks are asked to save and end, in at most "
            f"{self.options.grace:g} s; a second signal kills them"
        )

    def death_of(self, child: Child) -> TaskExit:
        """What is known of a child that has ended."""
        assert child.status is not None
        record = progress.read(self.folder, child.name)
        reason = progress.read_reason(self.folder, child.name)
        ended = TaskExit(
            child.name,
            child.status,
            record=record,
            reason=reason,
            errors=child.errors,
            peak=child.peak,
        )
        if ended.signal not in child.sent:
            return dataclasses.replace(ended, memory=self._memory(ended, child.address_limit))
        if reason is not None:  # it was about to end by itself
            return dataclasses.replace(ended, status=reason.code)
        return dataclasses.replace(ended, ours=True)

    def _memory(self, ended: TaskExit, address_limit: int | None) -> str | None:
        """Returns the evidence that a signal ended a task because memory was exhausted."""
        if ended.reason is not None:
            return None
        if ended.signal is signal.SIGKILL:
            return self.oom_kills.reason()
        crashed = ended.signal in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
        return out_of_memory.why_aborted(ended.errors, address_limit) if crashed else None

    def _outcome(
        self, deaths: Sequence[TaskExit], hung: str | None, stopped: Sequence[str]
    ) -> Outcome:
        """What the deaths of an attempt come to; says all of them but the one that explains it."""
        saved = max((death.record.saved for death in deaths if death.record), default=-1)
        if self.options.ps and any(one.task == "chief" and one.status == 0 for one in deaths):
            # It has finished, and whoever was just coming (again) has found it gone.
            deaths = [death for death in deaths if rank(death) is not CauseRank.CONSEQUENCE]
        first = root_cause(deaths)
        failures = [
            death for death in deaths if rank(death) not in (CauseRank.NONE, CauseRank.PREEMPTED)
        ]
        for death in failures:
            if death is not first:
                self.say(describe(death))
        ours = [death for death in deaths if death.ours]
        by_us = {death.task for death in ours if death.signal is signal.SIGKILL}
        killed = ", ".join(name for name in self.environments if name in by_us)
        if killed:
            self.say(f"killed {killed}")
        if hung is not None:
            return Outcome(ExitCode.FAILED, f"hung: {hung}", saved)
        own = [death for death in failures if rank(death) is not CauseRank.CONSEQUENCE]
        if self.signals.received and ours and not own:
            received = self.signals.received[0]
            words = f"killed before they had saved: {killed}" if killed else "ended without saving"
            return Outcome(128 + received, f"{received.name}: {words}", saved)
        if first is None:
            return Outcome(ExitCode.DONE, "finished", saved)
        meaning = hint(first)
        if meaning is not None:
            self.say(meaning)
        words = describe(first)
        if stopped and rank(first) is CauseRank.CONSEQUENCE:
            words += f" ({', '.join(stopped)}: stopped by a signal)"
        return Outcome(first.code, words, saved)

    def _is_stuck(self, watch: stalls.Watch, running: Sequence[Child]) -> bool:
        records = [progress.read(self.folder, child.name) for child in running]
        idle = watch.idle(records)
        return any(records) and 0 < self.options.hang_timeout <= idle

    def _tell_stuck(self, running: Sequence[Child]) -> str:
        """Prints which task blocks the others, and where each is; returns the first sentence."""
        found = {child.name: progress.read(self.folder, child.name) for child in running}
        stopped = [child.name for child in running if self._is_stopped(child)]
        # One that has not begun to publish is known by that.
        absent = {name: Record(name, 0, Phase.START, -1, changes=0, at=0.0) for name in found}
        records = [record or absent[name] for name, record in found.items()]
        if self.options.ps:  # the others publish nothing once they have begun
            records = [
                record
                for record in records
                if record.task == "chief" or record.task in stopped or not record.changes
            ]
        sentence = progress.find_stalled_task(records, stopped).sentence
        self.say(f"no progress for {self.options.hang_timeout:g} s: {sentence}")
        asked = []
        for child in running:
            record = found[child.name]
            if record and child.name not in stopped:  # without a record, it would die of it
                child.send(signal.SIGUSR2, record.pid)
                asked.append(child.name)
        stacks = stalls.gather_stacks(self.folder, asked)
        for name in found:
            for line in stalls.main_stacks(stacks.get(name, "")):
                self.output.line(name, "stderr", line.encode())
            if not stacks.get(name):
                why = "did not answer" if name in asked else "has not begun to publish"
                why = "is stopped by a signal" if name in stopped else why
                self.say(f"no stacks of {name}: it {why}")
        return sentence

    def _is_stopped(self, child: Child) -> bool:
        record = progress.read(self.folder, child.name)
        return stalls.is_stopped(record.pid if record else child.pid)

    def _finish(self, outcome: Outcome) -> int:
        """Let the evaluator end by itself after the training; returns the exit code of the job."""
        how = {0: "finished", 75: "preempted"}.get(outcome.code, f"failed: {outcome.words}")
        progress.write_ended(self.folder, how)
        self.over = True
        if self.evaluator is None:
            return outcome.code
        if self.evaluator.code is None:
            self.say("waiting for the evaluator to look at what is left")
        code = self.evaluator.finish()
        if outcome.code == ExitCode.DONE != code:
            self.say(f"the training has finished, but the evaluator has not: exit code {code}")
            return code
        return outcome.code


class WorkerRestarter:
    """The workers of parameter servers: what one is lost for, the others go on without."""

    def __init__(self, launcher: Launcher, configs: Mapping[str, str]) -> None:
        self._launcher, self._configs = launcher, configs
        self._restarts: dict[str, Restarts] = {}
        self._due: dict[str, float] = {}
        self._workers = {name for name in configs if name.startswith("worker")}
        self._given_up: set[str] = set()

    def take(self, death: TaskExit) -> bool:
        """Whether a death is a worker's that is started again, which is said."""
        ended = (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.PREEMPTED)
        final = death.ours or death.status in ended or rank(death) is CauseRank.CONSEQUENCE
        if final or not death.task.startswith("worker") or self._launcher.signals.received:
            return False
        limit = self._launcher.options.max_restarts
        restarts = self._restarts.setdefault(death.task, Restarts(limit))
        chief = progress.read(self._launcher.folder, "chief")
        if (wait := restarts.next(chief.saved if chief else -1)) is None:
            self._given_up.add(death.task)
            if self._workers <= self._given_up:
                return False
            self._launcher.say(
                f"{describe(death)}; the others go on; no restart is left of {limit}"
            )
            return True
        self._due[death.task] = time.monotonic() + wait
        self._launcher.say(
            f"{describe(death)}; the others go on; restart {restarts.used} of {limit} of "
            f"{death.task} in {wait:g} s"
        )
        return True

    def begun(self) -> list[Child]:
        """Those whose time has come, started again."""
        due = [name for name, at in self._due.items() if time.monotonic() >= at]
        for name in due:
            del self._due[name]
        return [self._launcher.start(name, self._configs[name]) for name in due]


class Evaluator:
    """The evaluator: its end does not end the training, nor the end of an attempt its own life."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._restarts = Restarts(launcher.options.max_restarts)
        self._child: Child | None = None
        self._due = math.inf  # when it is to be started again
        self._config = ""
        self.code: int | None = None
        """How it has ended for good; None before it has."""

    def begin(self, tf_config: str) -> None:
        """Start it for the first time."""
        self._config = tf_config
        self._child = self._launcher.start(EVALUATOR, tf_config)

    def tend(self) -> None:
        """See whether it has ended, and start it again when its time has come."""
        if self._child is None:
            if time.monotonic() >= self._due:
                self._due = math.inf
                self._child = self._launcher.start(EVALUATOR, self._config)
        elif self._child.poll():
            death, self._child = self._launcher.death_of(self._child), None
            self._settle(death)

    def _settle(self, death: TaskExit) -> None:
        """Have it started again, or take its exit code as final."""
        final = death.ours or death.status in (ExitCode.DONE, ExitCode.BAD_INPUT)
        if self._launcher.over and death.status == ExitCode.PREEMPTED:
            final = True  # it has seen that the training was, and has done its own part
        final = final or bool(self._launcher.signals.received)
        wait = None if final else self._restarts.next(death.record.step if death.record else -1)
        if wait is None:
            self.code = death.code
            next_ = "" if final else f"; no restart is left of {self._restarts.limit}"
        else:
            self._due = time.monotonic() + wait
            next_ = f"; restart {self._restarts.used} of {self._restarts.limit} in {wait:g} s"
        self._launcher.say(f"{describe(death)}{next_}")

    def finish(self) -> int:
        """Wait for its end after that of the training; returns its exit code."""
        launcher, grace = self._launcher, self._launcher.options.grace
        hang_timeout = launcher.options.hang_timeout or math.inf
        received, watch = launcher.signals.received, stalls.Watch()
        asked = False
        while self.code is None:
            record = progress.read(launcher.folder, EVALUATOR)
            idle = watch.idle((record, self._child))  # a restart is progress, too: they are few
            if self._child is None and received:
                return 128 + received[0]  # there is no time for the restart that it waits for
            if self._child is not None and received and not asked:
                asked = True
                launcher.deadline = min(launcher.deadline, time.monotonic() + grace)
                self._child.send(signal.SIGTERM, record.pid if record else None)
            if self._child is not None:
                if len(received) > 1 or time.monotonic() >= launcher.deadline:
                    self._child.kill()
                elif idle >= hang_timeout and signal.SIGKILL not in self._child.sent:
                    launcher.say(
                        f"the evaluator has made no progress for {hang_timeout:g} s: killed"
                    )
                    self._child.kill()
            launcher.tick()
        return self.code
