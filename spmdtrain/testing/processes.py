"""Several real processes in a test: started as one job, watched, and gone when the test ends."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdtrain.cluster import job_token
from spmdtrain.launch.task_env import tf_configs, training_tasks

Command = Sequence[str] | Callable[[int], Sequence[str]]
"""A command line, the same for all processes or one for each rank."""

_POLL = 0.02  # seconds


@dataclass(frozen=True)
class ProcessResult:
    """How one process of a job has ended."""

    task: str
    """`chief`, `worker 0` and so on: by rank."""
    code: int
    """Its exit code, or -N where signal N ended it."""
    output: str
    """All that it wrote, standard error included."""
    seconds: float
    """From its start to its end."""
    killed: bool
    """Whether it did not end by itself, within `grace` seconds of another one's failure."""


class Process:
    """One process of a job that is under way."""

    def __init__(
        self, task: str, command: Sequence[str], env: Mapping[str, str], cwd: Path | None, log: Path
    ) -> None:
        self.task, self._log, self._killed = task, log, False
        self._began, self._seconds = time.monotonic(), 0.0
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, which is killed as a whole
            )

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self._log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Its exit code, or -N where signal N ended it; None while it runs."""
        code = self._process.poll()
        if code is not None and not self._seconds:
            self._seconds = time.monotonic() - self._began
        return code

    def send(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.code is None:
            self._process.send_signal(number)

    def wait_for(self, text: str, timeout: float) -> None:
        """Return when its output holds `text`; raises `AssertionError` if that does not come."""
        until = time.monotonic() + timeout
        while text not in self.output:
            ended = self.code
            if (ended is not None and text not in self.output) or time.monotonic() > until:
                how = f"ended with {ended}" if ended is not None else f"ran for {timeout:g} s"
                raise AssertionError(f"{self.task} {how} without {text!r}:\n{self.output}")
            time.sleep(_POLL)

    def kill(self) -> None:
        """Kill it with all that it has started."""
        self._killed = self._killed or self.code is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def finished(self) -> ProcessResult:
        """How it has ended."""
        code = self.code
        assert code is not None, f"{self.task} still runs"
        return ProcessResult(self.task, code, self.output, self._seconds, self._killed)


class Job:
    """The processes of a job that is under way, by rank."""

    def __init__(self, processes: Sequence[Process], deadline: float, grace: float) -> None:
        self.processes, self._deadline, self._grace = processes, deadline, grace

    def __getitem__(self, rank: int) -> Process:
        return self.processes[rank]

    def wait(self, *, check: bool = True) -> list[ProcessResult]:
        """Return when all have ended; `check` and what is raised are as for `run_processes`."""
        until, failed = self._deadline, None
        while running := [process for process in self.processes if process.code is None]:
            if failed is None:
                failed = next((process for process in self.processes if process.code), None)
                if failed is not None:
                    until = min(until, time.monotonic() + self._grace)
            if time.monotonic() > until:
                names = ", ".join(process.task for process in running)
                for process in running:
                    process.kill()
                if failed is None or until == self._deadline:
                    raise AssertionError(f"no end in time of {names}\n{self.logs()}")
            time.sleep(_POLL)
        found = [process.finished() for process in self.processes]
        if check and any(one.code for one in found):
            codes = ", ".join(f"{one.task} with {one.code}" for one in found)
            raise AssertionError(f"not all have succeeded: {codes}\n{self.logs()}")
        return found

    def logs(self) -> str:
        """What all of them have written so far, each line with its task."""
        return "\n".join(
            f"[{process.task}] {line}"
            for process in self.processes
            for line in process.output.splitlines()
        )


@contextlib.contextmanager
def start_processes(
    command: Command,
    *,
    processes: int,
    devices_per_process: int | Sequence[int] = 1,
    timeout: float,
    grace: float = 10.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Iterator[Job]:
    """Start a job, for a test that interferes with it; whatever is left at the end is killed.

        with started(command, processes=2, timeout=60) as job:
            job[1].wait_for("step 10/", timeout=30)
            job[1].send(signal.SIGTERM)
            assert [one.code for one in job.wait(check=False)] == [75, 75]

    The keywords are those of `run_processes`.
    """
    deadline = time.monotonic() + timeout
    names = training_tasks(processes)
    configs = tf_configs(names)
    devices = devices_per_process
    counts = [devices] * processes if isinstance(devices, int) else list(devices)
    if len(counts) != processes:
        raise ValueError(f"devices_per_process has {len(counts)} numbers for {processes} processes")
    base = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    base |= {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    if not job_token.is_set(base):
        base[job_token.TOKEN] = job_token.create()
    begun: list[Process] = []
    with tempfile.TemporaryDirectory(prefix="spmdtrain-test-") as folder:
        try:
            for rank, name in enumerate(names):
                own = {"TF_CONFIG": configs[name], "JAX_NUM_CPU_DEVICES": str(counts[rank])}
                line = command(rank) if callable(command) else command
                log = Path(folder) / f"{rank}.log"
                where = None if cwd is None else Path(cwd)
                begun.append(Process(name, line, {**base, **own, **(env or {})}, where, log))
            yield Job(begun, deadline, grace)
        finally:
            for process in begun:
                process.kill()


def run_processes(
    command: Command,
    *,
    processes: int,
    devices_per_process: int | Sequence[int] = 1,
    timeout: float,
    check: bool = True,
    grace: float = 10.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> list[ProcessResult]:
    """Run a command as so many processes of one job on this machine; how each ended, by rank.

        def test_my_training_on_two_processes(tmp_path):
            chief, worker = run_processes(
                [sys.executable, "train.py", "--workdir", str(tmp_path)],
                processes=2, devices_per_process=2, timeout=120,
            )
            assert "finished" in chief.output

    Each finds its place in TF_CONFIG, with ports that are free, and so many virtual CPU devices;
    `env` comes on top of this process's environment. Where one fails, the others have `grace`
    seconds to end too, and are killed then. Raises `AssertionError` with what all of them wrote
    when `timeout` seconds are over, and unless `check` is False also when one failed.
    """
    with start_processes(
        command,
        processes=processes,
        devices_per_process=devices_per_process,
        timeout=timeout,
        grace=grace,
        env=env,
        cwd=cwd,
    ) as job:
        return job.wait(check=check)
