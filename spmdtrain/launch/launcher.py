"""The processes of a job: starting, watching and restarting them."""

import math
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.distributed import progress
from spmdtrain.distributed.progress import (
    TASK,
    HangTimer,
    IdleTimer,
    Phase,
    ProgressRecord,
    find_hung_task,
)
from spmdtrain.errors import ClusterError, ExitCode
from spmdtrain.launch.child import (
    CauseRank,
    Restarts,
    Signals,
    TaskExit,
    cause_rank,
    describe_exit,
    hint,
    is_killed,
    root_cause,
)
from spmdtrain.launch.machine import Machine
from spmdtrain.launch.machines import LONGEST_WAIT, REPORT_INTERVAL, Machines, Task
from spmdtrain.launch.task_env import EVALUATOR, tf_configs, training_tasks

# -- Options of the command `python -m spmdtrain.launch` -------------------------------------------

HANG_TIMEOUT = 900.0
"""Seconds without progress in phases whose duration is not measured."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Start the processes of a training on this machine, watch them, and restart them together."""

    processes: int | None = None
    """Number of training processes: a chief and workers. Leave it out where TF_CONFIG describes
    several machines: each starts its own process, and their launchers act together."""
    ps: int = 0
    """Number of parameter servers to start, for --strategy parameter_server. Workers are
    then restarted one by one, without the others."""
    devices_per_process: int | None = None
    """Devices of each process: GPUs if there are any, else virtual CPU devices. None means
    all GPUs, for a single process, or the cpu_devices of the experiment."""
    evaluator: bool = False
    """Also start an evaluator, which is not one of the training processes. With --evaluated-by
    evaluator in the command, the training leaves the validation split to it."""
    max_restarts: int = 3
    """Largest number of restarts without a new checkpoint between them."""
    warm_spares: int = 0
    """Number of spare processes, which have imported what a task imports: a restart continues in
    them. One for each process makes the restart of a whole job warm."""
    min_processes: int | None = None
    """Smallest number of processes with which the job continues when others are killed, with the
    same global batch size. Lost ones are taken in again some seconds later, at a saved step. By
    default the job is restarted with all."""
    hang_timeout: float | None = None
    """Seconds without progress after which the job counts as hung; 0 disables this. The default
    is five times the longest pause between steps so far, at least 60, and 900 for the first steps,
    compilations, saves and callbacks, for an evaluator, and with --ps."""
    grace: float = 120
    """Seconds that the tasks have to save and exit after a signal."""


# -- The processes of a job: starting, watching and restarting them --------------------------------

_POLL_INTERVAL = 0.1  # seconds; signals and the exit of a child interrupt the sleep
_AFTER_CHIEF = 10.0  # seconds for workers and servers to exit after their chief
_CHIEF_TIMEOUT = 30.0  # seconds for a chief to stop the others and report why, after one failed
_REPORT_TIMEOUT = 3.0  # seconds that other tasks get to exit after a failure
_KILLED_TIMEOUT = 0.2  # the same after a task was killed, with warm spares or fewer processes


@dataclass(frozen=True)
class Outcome:
    """The result of one attempt to run the training."""

    code: int
    message: str
    saved: int = -1
    """Step of the newest complete checkpoint; -1 if there is none."""
    without: str | None = None
    """The task to leave out of the next attempt, because one of its devices is faulty."""
    lost: Sequence[str] = ()
    """Tasks that were killed or stopped from outside: the others may continue without them."""

    @property
    def may_restart(self) -> bool:
        """Whether another attempt could end differently."""
        if self.code == ExitCode.DEVICE_FAULT:  # the same devices would compute the same
            return self.without is not None
        return not self.is_final

    @property
    def is_final(self) -> bool:
        """Whether another attempt on the same devices would end in the same way."""
        final = (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NON_FINITE, ExitCode.DEVICE_FAULT)
        return self.code in final


class Launcher:
    """A job: its training tasks, which are restarted together, and its evaluator.

    `environments` has the environment of each task, without TF_CONFIG, if the job has all.
    """

    def __init__(
        self,
        options: Options,
        environments: Mapping[str, Mapping[str, str]],
        machine: Machine,
        signals: Signals,
        machines: Machines | None = None,
    ) -> None:
        self.options = options
        self.places = Places(
            environments,
            options.ps,
            options.min_processes,
            time.monotonic,
            (lambda: environments) if machines is None else (lambda: machines.names),
        )
        self.machine, self.machines = machine, machines
        self.signals = signals
        self.folder = machine.folder
        self.deadline = math.inf
        """Time at which tasks are killed after a signal has requested their exit."""
        self.over = False
        """Whether the training has ended for good."""
        self.evaluator = EvaluatorTask(self) if options.evaluator else None
        self._takes_back = False  # whether the tasks are asked to end, to continue in all places
        self._worked: set[int] = set()  # numbers of processes with which the job has made steps
        if machines is not None:
            self.places.restore(machines.known)

    def log(self, text: str) -> None:
        """Prints a line of the launcher itself, on all machines."""
        self.machine.log(text)
        if self.machines is not None:
            self.machines.tell(log=text)

    def restarts(self) -> Restarts:
        """Returns a new budget of restarts."""
        return Restarts(self.options.max_restarts, first_at_once=self.machine.spares is not None)

    def run(self) -> int | None:
        """Runs the training with restarts, then waits for the evaluator; returns the exit code.

        None if too few machines are left to decide what happens.
        """
        restarts = self.restarts()
        if not self._gather():
            return None
        configs = self._configs()
        if self.evaluator is not None:
            self.evaluator.start(configs[EVALUATOR])
        while True:
            outcome = self._attempt(configs)
            wait, note = self._next(outcome, restarts)
            self.log(f"{outcome.message}{note and '; '}{note}")
            if wait is None:
                break
            self._pause(wait)
            if self.signals.received:
                self.log(f"{self.signals.received.name}: not restarted")
                break
            if not self._gather():
                return None
            configs = self._configs()
        return self._finish(outcome)

    def _gather(self) -> bool:
        """Waits for the machines that the next attempt needs; False if too few are left to decide.

        Raises:
          ClusterError: If they do not come.
        """
        began = next_report = time.monotonic()
        while True:
            if self.machines is not None and not self.machines.is_enough:
                self.log(f"too few machines are left: no launcher of {self.machines.missing}")
                return False
            if self.places.use_present():
                return True
            assert self.machines is not None  # the places of one machine are all there
            if self.signals.received:
                return False
            if (now := time.monotonic()) - began > LONGEST_WAIT:
                raise ClusterError(
                    f"gave up after {LONGEST_WAIT:g} s: no launcher of {self.machines.missing}"
                )
            if now >= next_report:
                next_report = now + REPORT_INTERVAL
                self.log(f"waiting for the launchers of {self.machines.missing}")
            self.tick()

    def _configs(self) -> dict[str, str]:
        """Returns the TF_CONFIG of each task, with free ports."""
        if self.machines is None:
            return tf_configs(list(self.places.environments))
        return self.machines.tf_configs(self.places.used)

    def _next(self, outcome: Outcome, restarts: Restarts) -> tuple[float | None, str]:
        """Decides how the job continues after an attempt.

        Returns the seconds to wait before the next attempt, None if there is none, and what to say.
        """
        places = self.places
        if self.signals.received:
            return None, ""
        is_new = self.options.min_processes is not None and places.processes not in self._worked
        if outcome.code == ExitCode.BAD_INPUT and is_new:
            was_reduced = places.is_reduced
            # With all processes, the input is wrong, unless the job has worked with fewer.
            if (was_reduced or self._worked) and (places.refuse() or was_reduced):
                return 0.0, f"continues with {self._numbers()}"
        if not outcome.may_restart:
            return None, ""
        if self._takes_back and outcome.code == ExitCode.PREEMPTED:
            places.take_back()
            return 0.0, f"continues with {self._numbers()}"
        wait = restarts.next(outcome.saved, after_rollback=outcome.without is not None)
        if wait is None:
            return None, f"no restarts left of {restarts.limit}"
        if outcome.without is not None:
            places.leave_out(outcome.without)
            return wait, f"{restarts.note(wait)} without {outcome.without}"
        if self.options.min_processes is None or not outcome.lost or self._has_spares(outcome.lost):
            return wait, restarts.note(wait)
        if places.lose(outcome.lost, progress.refused_processes(self.folder)):
            return 0.0, f"{restarts.note(0.0)} with {self._numbers()}"
        refused = progress.refused_processes(self.folder)
        fewer = places.processes - len(outcome.lost)
        why = refused.get(fewer, f"--min-processes is {self.options.min_processes}")
        places.take_back()
        return wait, f"{restarts.note(wait)} with all, because {fewer} cannot continue: {why}"

    def _has_spares(self, tasks: Sequence[str]) -> bool:
        """Returns whether a spare is ready in the place of each task."""
        if self.machines is None:
            return self.machine.ready_spares >= len(tasks)
        ready = self.machines.ready_spares(self.machine)
        return all(ready.get(self.places.place_of(task)) for task in tasks)

    def _numbers(self) -> str:
        """Returns how many processes the job has, such as `2 of 4 processes`."""
        of_all = f" of {self.places.total}" if self.places.is_reduced else ""
        return f"{self.places.processes}{of_all} processes"

    def start(self, name: str, tf_config: str) -> Task:
        """Starts a task."""
        if self.machines is not None:
            place = self.places.place_of(name)
            if place != self.machines.own_name:
                return self.machines.start(place, name, tf_config)
        environment = {**self.places.environments[name], "TF_CONFIG": tf_config}
        return self.machine.start(name, environment)

    def tick(self) -> None:
        """Sleeps until a signal, the exit of a child, or a timeout; then polls the evaluator."""
        self.signals.wait(_POLL_INTERVAL)
        if self.evaluator is not None:
            self.evaluator.poll()
        if self.machines is not None:
            self.machines.poll()
        self.machine.poll("chief", stops=self.signals.received is not None)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.signals.received:
            self.tick()

    def _attempt(self, configs: Mapping[str, str]) -> Outcome:
        """Starts all training tasks and watches them until the last one has exited."""
        self.machine.begin()
        if self.machines is not None:
            self.machines.tell(known=self.places.known)
        tasks = [self.start(name, configs[name]) for name in self.places.tasks]
        self._takes_back = False
        restarter = WorkerRestarter(self, configs) if self.options.ps else None
        exits: list[TaskExit] = []
        until = math.inf  # time at which the remaining tasks are killed
        timeout = self.options.hang_timeout
        if timeout is None and self.options.ps:
            timeout = HANG_TIMEOUT  # functions of users may take any time
        watch = HangTimer(timeout, HANG_TIMEOUT, max_interval=1.0)
        hung, stopped = None, list[str]()
        while running := [child for child in tasks if child.status is None]:
            self.tick()
            if self.machine.makes_steps:
                self._worked.add(self.places.processes)
            for child in [child for child in running if child.poll()]:
                ended = child.exit()
                if restarter is not None and until == math.inf and restarter.take(ended):
                    continue
                exits.append(ended)
                seconds = self._time_left(ended)
                # A chief may still report why the others fail. Without it, they cannot continue.
                if restarter is not None:
                    is_chief = ended.task == "chief"
                    seconds = max(seconds, _AFTER_CHIEF if is_chief else _CHIEF_TIMEOUT)
                    if is_chief and cause_rank(ended) is CauseRank.NONE:
                        seconds = _AFTER_CHIEF
                until = min(until, time.monotonic() + seconds)
            if restarter is not None and until == math.inf:
                tasks += restarter.start_due()
            running = [child for child in tasks if child.status is None]
            if (received := self.signals.received) and running and self.deadline == math.inf:
                self._request_stop(running, received)
            if until == math.inf and self._may_take_back() and running:
                self._takes_back, until = True, time.monotonic() + self.options.grace
                self.log(
                    f"{self.places.possible} processes are possible again: asked the tasks to save "
                    f"and exit within {self.options.grace:g} s"
                )
                for child in running:
                    child.send(signal.SIGTERM)
            if self.deadline < math.inf:  # tasks may be saving: only the grace period limits them
                until = 0.0 if self.signals.repeated else self.deadline
            elif until == math.inf and (idle := self._hung_for(watch, running)):
                hung, until = self._report_hang(running, idle), 0.0
            if time.monotonic() >= until:
                stopped += [child.name for child in running if child.is_stopped]
                for child in running:
                    child.kill()
        return self._outcome(exits, hung, stopped)

    def _time_left(self, ended: TaskExit) -> float:
        """Returns the seconds that the others may continue after a task has exited."""
        seconds = {CauseRank.NONE: math.inf, CauseRank.PREEMPTED: self.options.grace}
        rank = cause_rank(ended)
        # Others cannot know more about a task that a signal has ended. They may complete a save.
        is_fast = self.machine.spares is not None or self.options.min_processes is not None
        if is_fast and rank is CauseRank.OWN and ended.status < 0:
            records = [progress.read(self.folder, name) for name in self.places.tasks]
            if not any(record and record.sealing >= 0 for record in records):
                return _KILLED_TIMEOUT
        return seconds.get(rank, _REPORT_TIMEOUT)

    def _request_stop(self, running: Sequence[Task], received: signal.Signals) -> None:
        self.deadline = time.monotonic() + self.options.grace
        self.log(  # first, because the tasks may print that they were asked
            f"{received.name}: asked the tasks to save and exit within "
            f"{self.options.grace:g} s; a second signal kills them"
        )
        for child in running:
            child.send(signal.SIGTERM)

    def _may_take_back(self) -> bool:
        """Returns whether the job, which makes steps in some of its places, may use all again."""
        if self.signals.received or not (self.machine.makes_steps and self.places.may_take_back):
            return False
        elsewhere = self.machines is None or self.machines.has_all_spares
        return self.machine.has_all_spares and elsewhere

    def _outcome(
        self, exits: Sequence[TaskExit], hung: str | None, stopped: Sequence[str]
    ) -> Outcome:
        """Returns the result of an attempt; prints all failures except the root cause."""
        requested = progress.take_without(self.folder)  # also if this attempt ends otherwise
        saved = max((ended.record.saved for ended in exits if ended.record), default=-1)
        if self.options.ps and any(x.task == "chief" and x.code == 0 for x in exits):
            # The chief has finished: tasks that were still starting then fail to connect to it.
            exits = [ended for ended in exits if cause_rank(ended) is not CauseRank.CONSEQUENCE]
        cause = root_cause(exits)
        failures = [
            ended
            for ended in exits
            if cause_rank(ended) not in (CauseRank.NONE, CauseRank.PREEMPTED)
        ]
        for ended in failures:
            if ended is not cause:
                self.log(describe_exit(ended))
        ours = [ended for ended in exits if ended.ours]
        by_us = {ended.task for ended in ours if ended.signal is signal.SIGKILL}
        killed = ", ".join(name for name in self.places.environments if name in by_us)
        if killed:
            self.log(f"killed {killed}")
        lost = [ended.task for ended in exits if is_killed(ended) or ended.task in stopped]
        if hung is not None:
            return Outcome(ExitCode.FAILED, f"hung: {hung}", saved, lost=lost)
        own = [ended for ended in failures if cause_rank(ended) is not CauseRank.CONSEQUENCE]
        if self.signals.received and ours and not own:
            received = self.signals.received
            words = f"killed before saving: {killed}" if killed else "exited without saving"
            return Outcome(128 + received, f"{received.name}: {words}", saved)
        if cause is None and self._takes_back and ours:
            return Outcome(ExitCode.FAILED, f"killed before saving: {killed}", saved)
        if cause is None:
            return Outcome(ExitCode.DONE, "finished", saved)
        advice = hint(cause)
        if advice is not None:
            self.log(advice)
        words = describe_exit(cause)
        if stopped and cause_rank(cause) is CauseRank.CONSEQUENCE:
            words += f" ({', '.join(stopped)}: stopped by a signal)"
        is_fault = cause.code == ExitCode.DEVICE_FAULT and self.places.processes > 1
        without = requested if is_fault and requested in self.places.environments else None
        return Outcome(cause.code, words, saved, without, lost)

    def _hung_for(self, watch: HangTimer, running: Sequence[Task]) -> str | None:
        records = [progress.read(self.folder, child.name) for child in running]
        idle = watch.hung_for(records, [r.phase if r else Phase.START for r in records])
        return idle if any(records) else None

    def _report_hang(self, running: Sequence[Task], idle: str) -> str:
        """Prints and returns which task blocks the others; prints the stacks of all tasks."""
        published = {child.name: progress.read(self.folder, child.name) for child in running}
        stopped = [child.name for child in running if child.is_stopped]
        # changes=0 marks a task that has not published anything yet.
        absent = {
            name: ProgressRecord(name, 0, Phase.START, -1, changes=0, at=0.0) for name in published
        }
        records = [record or absent[name] for name, record in published.items()]
        if self.options.ps:  # only the chief publishes after the start
            records = [
                record
                for record in records
                if record.task == "chief" or record.task in stopped or not record.changes
            ]
        sentence = find_hung_task(records, stopped).sentence
        self.log(f"no progress for {idle}: {sentence}")
        asked = []
        for child in running:
            record = published[child.name]
            # SIGUSR2 kills a task without a record, because it has not registered a handler.
            if record and child.name not in stopped:
                child.send(signal.SIGUSR2)
                asked.append(child.name)
        dumps = gather_stacks(self.folder, asked, self.tick)
        for name in published:
            for line in main_stacks(dumps.get(name, "")):
                self.machine.output.report(name, line)
            if not dumps.get(name):
                why = "did not answer" if name in asked else "has not started to publish"
                why = "is stopped by a signal" if name in stopped else why
                self.log(f"no stacks of {name}: it {why}")
        return sentence

    def _finish(self, outcome: Outcome) -> int:
        """Waits for the evaluator after the training; returns the exit code of the job."""
        how = {0: "finished", 75: "preempted"}.get(outcome.code, f"failed: {outcome.message}")
        progress.write_ended(self.folder, how)
        self.over = True
        if self.machines is not None and (outcome.is_final or not self.signals.received):
            self.machines.tell(end=outcome.code)
        if self.evaluator is None:
            return outcome.code
        if self.evaluator.code is None:
            self.log("waiting for the evaluator to evaluate the remaining checkpoints")
        code = self.evaluator.finish()
        if outcome.code == ExitCode.DONE != code:
            self.log(f"the training has finished, but the evaluator failed: exit code {code}")
            return code
        return outcome.code


# -- The places of the processes of a job, some of which may be lost for a while -------------------

_AWAY = 10.0  # seconds until a lost place is used again; doubled each time that it is lost
_LONGEST_AWAY = 300.0


class Places:
    """The places in which the processes of a job run, each with devices of its own.

    A place is lost if its process is killed. The job then continues in the others: in as many as
    its batch size and its mesh allow, and at least `minimum`. Lost places are used again after some
    seconds.

    Args:
      environments: The environment of each task, without TF_CONFIG. The places have these names.
      servers: Number of parameter servers.
      minimum: Smallest number of training processes; None if the job needs all places.
      clock: Returns the time in seconds.
      present: Returns the places whose machines are there.
    """

    def __init__(
        self,
        environments: Mapping[str, Mapping[str, str]],
        servers: int,
        minimum: int | None,
        clock: Callable[[], float],
        present: Callable[[], Collection[str]],
    ) -> None:
        self._servers, self._minimum, self._clock = servers, minimum, clock
        self._present = present
        self._own = {n: env for n, env in environments.items() if n != EVALUATOR}
        self._evaluator = {n: env for n, env in environments.items() if n == EVALUATOR}
        self._back: dict[str, float] = {}  # lost places, and when each may be used again
        self._times: dict[str, int] = {}  # how often each place was lost
        self._left_out: list[str] = []  # for good
        self._refused: set[int] = set()  # numbers of processes that the run cannot have
        self.used = list(self._own)
        """The places of the job as it is now, in the order of its tasks."""

    @property
    def total(self) -> int:
        """Number of training processes in all places."""
        return len(self._own) - self._servers

    @property
    def processes(self) -> int:
        """Number of training processes of the job as it is now."""
        return len(self.used) - self._servers

    @property
    def tasks(self) -> list[str]:
        """The names of the training tasks and servers of the job as it is now."""
        return training_tasks(self.processes, self._servers)

    @property
    def environments(self) -> dict[str, dict[str, str]]:
        """The environment of each task of the job as it is now."""
        own = zip(self.tasks, self.used, strict=True)
        found = {task: {**self._own[place], TASK: task} for task, place in own}
        return found | {name: dict(env) for name, env in self._evaluator.items()}

    def leave_out(self, task: str) -> None:
        """Uses the place of a task no more, because one of its devices is faulty.

        Each later process takes the name of the one before it.
        """
        self._leave_out(self.place_of(task))

    def _leave_out(self, place: str) -> None:
        self._left_out.append(place)
        self._back.pop(place, None)
        del self._own[place]
        self.used.remove(place)

    def lose(self, tasks: Iterable[str], cannot: Iterable[int]) -> bool:
        """Leaves out the places of lost tasks for a while; returns whether the job can continue.

        If not, nothing changes. `cannot` has numbers of processes that the run refuses.
        """
        self._refused |= set(cannot)
        lost = [self.place_of(task) for task in tasks]
        left = [place for place in self._there if place not in {*lost, *self._back}]
        if (used := self._largest(left)) is None:
            return False
        for place in lost:
            self._times[place] = self._times.get(place, 0) + 1
            away = min(_LONGEST_AWAY, _AWAY * 2.0 ** (self._times[place] - 1))
            self._back[place] = self._clock() + away
        self.used = used
        return True

    def refuse(self) -> bool:
        """Notes that the run cannot have as many processes as it has now.

        Returns whether it can continue with fewer; otherwise it gets all places again.
        """
        self._refused.add(self.processes)
        used = self._largest([place for place in self._there if place not in self._back])
        if used is None:
            self.take_back()
            return False
        self.used = used
        return True

    @property
    def is_reduced(self) -> bool:
        """Whether the job has fewer processes than places."""
        return len(self.used) < len(self._own)

    @property
    def possible(self) -> int:
        """Number of training processes that the job could have now."""
        return len(self._largest(self._there) or self.used) - self._servers

    @property
    def may_take_back(self) -> bool:
        """Whether the job could have more processes, in places that may be used again."""
        waits = any(self._back.get(place, 0.0) > self._clock() for place in self._there)
        return self.is_reduced and not waits and self.possible > self.processes

    def take_back(self) -> None:
        """Uses all places again that are there."""
        self._back.clear()
        self.used = self._largest(self._there) or list(self._own)

    def use_present(self) -> bool:
        """Uses the places that are there, apart from those that were lost a short time ago.

        Returns whether the job can continue in them.
        """
        used = self._largest([place for place in self._there if place not in self._back])
        self.used = used or self.used
        return used is not None

    @property
    def known(self) -> dict[str, list[Any]]:
        """What has been found out about the places, for `restore` of another launcher."""
        return {"refused": sorted(self._refused), "left_out": self._left_out}

    def restore(self, known: Mapping[str, Sequence[Any]]) -> None:
        """Continues with what another launcher has found out."""
        self._refused |= {*known.get("refused", ())}
        for place in known.get("left_out", ()):
            self._leave_out(place)

    @property
    def _there(self) -> list[str]:
        present = self._present()
        return [place for place in self._own if place in present]

    def _largest(self, places: Sequence[str]) -> list[str] | None:
        """Returns the places that the job uses of those given; None if it cannot continue."""
        if len(places) == len(self._own) and len(places) not in self._refused:
            return list(places)
        least = math.inf if self._minimum is None else self._minimum
        for count in range(len(places), 0, -1):
            if count >= least and count not in self._refused:
                return self._chosen(places, count)
        return None

    def _chosen(self, places: Sequence[str], count: int) -> list[str]:
        """Returns those of the places that keep most of a state that is only in memory.

        Of the places in use, each keeps a copy of the one before it: of two that follow each other,
        one is chosen if possible.
        """
        chosen = list(places)

        def loss(place: str) -> int:
            if place not in self.used:
                return 0
            at = self.used.index(place)
            around = self.used[at - 1], self.used[(at + 1) % len(self.used)]
            return 1 if all(other in chosen for other in around) else 2

        while len(chosen) > count:
            chosen.remove(min(reversed(chosen), key=loss))
        return chosen

    def place_of(self, task: str) -> str:
        """Returns the place in which a task of the job as it is now runs."""
        return self.used[self.tasks.index(task)]


# -- The evaluator task of a job -------------------------------------------------------------------


class EvaluatorTask:
    """The evaluator task, which exits and restarts independently of the training tasks."""

    def __init__(self, launcher: "Launcher") -> None:
        self._launcher = launcher
        self._restarts = launcher.restarts()
        self._child: Task | None = None
        self._due = math.inf  # time of the next restart
        self._config = ""
        self.code: int | None = None
        """The final exit code; None before that."""

    def start(self, tf_config: str) -> None:
        """Starts the evaluator for the first time."""
        self._config = tf_config
        self._child = self._launcher.start(EVALUATOR, tf_config)

    def poll(self) -> None:
        """Handles the exit of the evaluator, and restarts it when that is due."""
        if self._child is None:
            if time.monotonic() >= self._due:
                self._due = math.inf
                self._child = self._launcher.start(EVALUATOR, self._config)
        elif self._child.poll():
            ended, self._child = self._child.exit(), None
            self._handle_exit(ended)

    def _handle_exit(self, ended: TaskExit) -> None:
        """Schedules a restart, or takes the exit code as final."""
        final = ended.ours or ended.code in (ExitCode.DONE, ExitCode.BAD_INPUT)
        if self._launcher.over and ended.status == ExitCode.PREEMPTED:
            final = True  # the training was preempted too, and all checkpoints are evaluated
        final = final or bool(self._launcher.signals.received)
        wait = None if final else self._restarts.next(ended.record.step if ended.record else -1)
        if wait is None:
            self.code = ended.code
            next_ = "" if final else f"; no restarts left of {self._restarts.limit}"
        else:
            self._due = time.monotonic() + wait
            next_ = f"; {self._restarts.note(wait)}"
        self._launcher.log(f"{describe_exit(ended)}{next_}")

    def finish(self) -> int:
        """Waits for the evaluator after the end of the training; returns its exit code."""
        launcher, grace = self._launcher, self._launcher.options.grace
        given = launcher.options.hang_timeout
        hang_timeout = HANG_TIMEOUT if given is None else given or math.inf
        signals, watch, asked = launcher.signals, IdleTimer(max_interval=1.0), False
        while self.code is None:
            record = progress.read(launcher.folder, EVALUATOR)
            # A restart counts as progress, because the number of restarts is bounded.
            idle = watch.idle((record, self._child))
            if self._child is None and signals.received:
                return 128 + signals.received  # instead of the restart that is due later
            if self._child is not None and signals.received and not asked:
                asked = True
                launcher.deadline = min(launcher.deadline, time.monotonic() + grace)
                self._child.send(signal.SIGTERM)
            if self._child is not None:
                if signals.repeated or time.monotonic() >= launcher.deadline:
                    self._child.kill()
                elif idle >= hang_timeout and not self._child.is_killed:
                    launcher.log(
                        f"the evaluator has made no progress for {hang_timeout:g} s: killed"
                    )
                    self._child.kill()
            launcher.tick()
        return self.code


# -- Restarts of single workers under parameter servers --------------------------------------------


class WorkerRestarter:
    """Restarts of single workers under parameter servers, while the others continue.

    A restarted task keeps its TF_CONFIG of `configs`.
    """

    def __init__(self, launcher: "Launcher", configs: Mapping[str, str]) -> None:
        self._launcher, self._configs = launcher, configs
        self._restarts: dict[str, Restarts] = {}
        self._due: dict[str, float] = {}
        self._workers = {name for name in configs if name.startswith("worker")}
        self._given_up: set[str] = set()

    def take(self, ended: TaskExit) -> bool:
        """Schedules a restart if the task is a worker that has failed.

        Returns whether the other tasks continue: the worker will be restarted, or other workers
        remain.
        """
        final_codes = (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.PREEMPTED)
        final = (
            ended.ours or ended.code in final_codes or cause_rank(ended) is CauseRank.CONSEQUENCE
        )
        if final or not ended.task.startswith("worker") or self._launcher.signals.received:
            return False
        limit = self._launcher.options.max_restarts
        restarts = self._restarts.setdefault(ended.task, self._launcher.restarts())
        chief = progress.read(self._launcher.folder, "chief")
        if (wait := restarts.next(chief.saved if chief else -1)) is None:
            self._given_up.add(ended.task)
            if self._workers <= self._given_up:
                return False
            self._launcher.log(
                f"{describe_exit(ended)}; the others continue; no restarts left of {limit}"
            )
            return True
        self._due[ended.task] = time.monotonic() + wait
        self._launcher.log(
            f"{describe_exit(ended)}; the others continue; {restarts.note(wait, ended.task)}"
        )
        return True

    def start_due(self) -> list[Task]:
        """Starts the workers whose restart is due, and returns them."""
        due = [name for name, at in self._due.items() if time.monotonic() >= at]
        for name in due:
            del self._due[name]
        return [self._launcher.start(name, self._configs[name]) for name in due]


# -- The stacks of processes that hang -------------------------------------------------------------

_STACKS_TIMEOUT = 3.0  # seconds for all tasks to write their stacks


def gather_stacks(folder: str, names: Sequence[str], sleep: Callable[[], None]) -> dict[str, str]:
    """Waits until the tasks have completely written their stacks, at most `_STACKS_TIMEOUT`.

    Returns task name to text; empty if it has written nothing. `sleep` waits for a moment.
    """
    until, before = time.monotonic() + _STACKS_TIMEOUT, dict[str, str]()
    while True:
        sleep()
        files = {name: progress.path(folder, name, "stacks") for name in names}
        stacks = {name: file.read_text(errors="replace") for name, file in files.items()}
        if (all(stacks.values()) and stacks == before) or time.monotonic() > until:
            return stacks
        before = stacks


def main_stacks(dump: str) -> Iterator[str]:
    """Yields the relevant lines of a faulthandler dump, and the number of omitted threads.

    These are the lines of the thread that received the signal, and of the main thread, which is the
    last one.
    """
    blocks = [block.strip("\n") for block in dump.split("\n\n") if block.strip()]
    threads = [block for block in blocks if block.startswith(("Thread", "Current thread 0x"))]
    chosen = [b for b in blocks if b.startswith("Current") or b in threads[-1:]]
    for block in chosen:
        yield from block.splitlines()
    if len(chosen) < len(blocks):
        yield f"(and {len(blocks) - len(chosen)} other threads)"
