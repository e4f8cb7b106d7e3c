"""The part of a job on one machine: tasks, the folder of their files, their output, spares."""

import dataclasses
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from spmdtrain.distributed import out_of_memory, progress
from spmdtrain.distributed.progress import Phase, ProgressRecord
from spmdtrain.launch.child import Child, Output, Reaper, TaskExit
from spmdtrain.launch.spare import Imports, Spares

_STEPS_OF_START = 2  # steps after which a start has ended, and its compilations with it
_LOADER_FAILURE = 127  # exit code of glibc if it cannot allocate the thread-local data of a library


class Machine:
    """Starts the tasks of a job that run on this machine, and describes how they exit.

    Args:
      command: The command of each task.
      names: The names of all tasks that may print lines here.
      environment: The environment of a training task here, without TF_CONFIG.
      warm_spares: Number of spare processes.
      with_servers: Whether the job has parameter servers.
      asks_for_refused: Whether the tasks write with how many processes the job cannot continue.
    """

    def __init__(
        self,
        command: Sequence[str],
        names: Sequence[str],
        environment: Mapping[str, str],
        *,
        warm_spares: int,
        with_servers: bool = False,
        asks_for_refused: bool = False,
    ) -> None:
        imports = None
        if warm_spares:
            imports = Imports.of_command(command, environment, with_servers=with_servers)
        self.folder = tempfile.mkdtemp(prefix="spmdtrain-")
        self._command = command
        if asks_for_refused:
            progress.ask_for_refused_processes(self.folder)
        self._reaper = Reaper(self.folder)
        self._oom_kills = out_of_memory.OomKills()
        self.output = Output([*names, "launch"])
        self._first_step: int | None = None  # since `begin`
        self.makes_steps = False
        """Whether the tasks have completed their start since `begin`."""
        self.spares: Spares | None = None
        """The spare processes; None if the job has none."""
        if imports is not None:
            self.spares = Spares(
                warm_spares,
                command,
                {**environment, progress.LAUNCH: self.folder},
                imports,
                Path(self.folder) / "spare",
                self.output,
                self._reaper,
                self.log,
            )

    def __enter__(self) -> "Machine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.spares is not None:
            self.spares.close()
        self._reaper.close()
        self.output.close()

    def log(self, text: str) -> None:
        """Prints a line of the launcher itself."""
        self.output.report("launch", text)

    @property
    def ready_spares(self) -> int:
        """Number of spares that can become a task at once."""
        return 0 if self.spares is None else self.spares.ready

    @property
    def has_all_spares(self) -> bool:
        """Whether all spares are ready, or none are started any more."""
        return self.spares is None or self.spares.is_full

    def begin(self) -> None:
        """Notes that the tasks are about to start."""
        self._first_step, self.makes_steps = None, False

    def start(self, name: str, environment: Mapping[str, str]) -> "LocalTask":
        """Starts a task, after deleting the files of an earlier task with its name.

        `environment` has its TF_CONFIG.
        """
        for kind in progress.KINDS:
            progress.path(self.folder, name, kind).unlink(missing_ok=True)
        environment = {**environment, progress.LAUNCH: self.folder}
        child = None if self.spares is None else self.spares.take(name, environment)
        child = child or Child(name, self._command, environment, self.output, self._reaper)
        return LocalTask(self, child)

    def poll(self, task: str, *, stops: bool) -> None:
        """Counts OOM kills, and replaces spares once a task makes steps. Call it often.

        `stops` ends the spares instead.
        """
        self._oom_kills.poll()
        record = progress.read(self.folder, task)
        if record is not None and record.phase in (Phase.LOAD, Phase.STEP):
            if self._first_step is None:
                self._first_step = record.step
            self.makes_steps |= record.step >= self._first_step + _STEPS_OF_START
        if self.spares is not None:
            if stops:
                self.spares.close()
            elif self.makes_steps:  # a start needs the processors itself
                self.spares.fill()

    def memory_evidence(self, ended: TaskExit, child: Child) -> str | None:
        """Returns the evidence that a task crashed because memory was exhausted."""
        if ended.reason is not None:
            return None
        if ended.signal is signal.SIGKILL:
            return self._oom_kills.reason()
        aborted = ended.signal in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
        if not aborted and ended.status != _LOADER_FAILURE:
            return None
        used = max(child.address_space, child.peak)
        return out_of_memory.why_aborted(ended.errors, child.address_limit, used)


class LocalTask:
    """A task that runs on this machine."""

    def __init__(self, machine: Machine, child: Child) -> None:
        self.name = child.name
        self._machine, self._child = machine, child

    @property
    def status(self) -> int | None:
        """None while it runs; then its exit code, or -N if signal N killed it."""
        return self._child.status

    @property
    def record(self) -> ProgressRecord | None:
        """Its last published progress."""
        return progress.read(self._machine.folder, self.name)

    @property
    def is_killed(self) -> bool:
        """Whether the launcher has killed it."""
        return signal.SIGKILL in self._child.sent

    def poll(self) -> bool:
        """Returns whether it has exited and its output is read."""
        return self._child.poll()

    def send(self, number: int) -> None:
        """Sends a signal to the process that publishes; the one that was started may wrap it."""
        record = self.record
        self._child.send(number, record.pid if record else None)

    def kill(self) -> None:
        """Kills it with its process group."""
        self._child.kill()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it; False where /proc is absent."""
        record = self.record
        try:
            file = Path(f"/proc/{record.pid if record else self._child.pid}/stat")
            content = file.read_text(errors="replace")
        except OSError:
            return False
        return content.rpartition(")")[2].split()[0] in "Tt"

    def exit(self) -> TaskExit:
        """Returns how it has exited, with its record, its reason and evidence of its cause."""
        child, folder = self._child, self._machine.folder
        assert child.status is not None
        reason = progress.read_reason(folder, self.name)
        ended = TaskExit(
            self.name,
            child.status,
            record=self.record,
            reason=reason,
            errors=child.errors,
            peak=child.peak,
            work=progress.unfinished_work(folder, self.name),
        )
        if ended.signal not in child.sent:
            memory = self._machine.memory_evidence(ended, child)
            return dataclasses.replace(ended, memory=memory)
        if reason is not None:  # it was already exiting when the launcher sent the signal
            return dataclasses.replace(ended, status=reason.code)
        return dataclasses.replace(ended, ours=True)
