"""Multi-process jobs for tests: started on this machine and cleaned up when the test ends."""

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
"""A command line for all processes, or a function that returns one for a rank."""

_POLL = 0.02  # seconds


@dataclass(frozen=True)
class ProcessResult:
    """Exit code, output and duration of one process of a job."""

    task: str
    """Task name: `chief`, `worker 0` and so on."""
    code: int
    """Exit code; -N if signal N ended the process."""
    output: str
    """Standard output and standard error."""
    seconds: float
    """Duration."""
    killed: bool
    """Whether it was killed, because it did not end within `grace` seconds of another failure."""


class Process:
    """One process of a running job.

    Args:
      task: Task name, such as `worker 0`.
      command: Command line.
      env: Environment variables.
      cwd: Working directory; by default that of this process.
      log: File that receives the output.
    """

    def __init__(
        self, task: str, command: Sequence[str], env: Mapping[str, str], cwd: Path | None, log: Path
    ) -> None:
        self.task, self._log, self._killed = task, log, False
        self._start, self._seconds = time.monotonic(), 0.0
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that the whole group can be killed
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def output(self) -> str:
        """Standard output and standard error so far."""
        return self._log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Exit code; -N if signal N ended the process, None while it runs."""
        code = self._process.poll()
        if code is not None and not self._seconds:
            self._seconds = time.monotonic() - self._start
        return code

    def send(self, number: int) -> None:
        """Sends a signal to the process if it still runs.

        Args:
          number: Signal number.
        """
        if self.code is None:
            self._process.send_signal(number)

    def wait_for(self, text: str, timeout: float) -> None:
        """Waits until the output contains a text.

        Args:
          text: Text to wait for.
          timeout: Seconds.

        Raises:
          AssertionError: If the process ends, or the timeout expires, without the text.
        """
        until = time.monotonic() + timeout
        while text not in self.output:
            code = self.code
            if (code is not None and text not in self.output) or time.monotonic() > until:
                how = f"exited with code {code}" if code is not None else f"ran for {timeout:g} s"
                raise AssertionError(f"{self.task} {how} without {text!r}:\n{self.output}")
            time.sleep(_POLL)

    def kill(self) -> None:
        """Kills the process and all processes that it started."""
        self._killed = self._killed or self.code is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def finished(self) -> ProcessResult:
        """Returns the result of a process that has ended."""
        code = self.code
        assert code is not None, f"{self.task} is still running"
        return ProcessResult(self.task, code, self.output, self._seconds, self._killed)


class RunningJob:
    """The processes of a running job, indexed by rank.

    Args:
      processes: The processes in order of rank.
      deadline: Time (`time.monotonic()`) when the job must have ended.
      grace: Seconds that the other processes have to end after one failed.
    """

    def __init__(self, processes: Sequence[Process], deadline: float, grace: float) -> None:
        self.processes, self._deadline, self._grace = processes, deadline, grace

    def __getitem__(self, rank: int) -> Process:
        return self.processes[rank]

    def wait(self, *, check: bool = True) -> list[ProcessResult]:
        """Waits until all processes have ended.

        Args:
          check: Whether a non-zero exit code raises.

        Returns:
          The results in order of rank.

        Raises:
          AssertionError: If the timeout of the job expires, or if `check` and a process failed;
            contains the output of all processes.
        """
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
                    raise AssertionError(f"timeout: {names} still running\n{self.logs()}")
            time.sleep(_POLL)
        results = [process.finished() for process in self.processes]
        if check and any(result.code for result in results):
            codes = ", ".join(f"{result.task}: {result.code}" for result in results)
            raise AssertionError(f"processes failed, exit codes {codes}\n{self.logs()}")
        return results

    def logs(self) -> str:
        """Returns the output of all processes so far, each line with its task name."""
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
) -> Iterator[RunningJob]:
    """Starts a job for a test that interacts with it; all processes are killed on exit.

    Example::

        with start_processes(command, processes=2, timeout=60) as job:
            job[1].wait_for("step 10/", timeout=30)
            job[1].send(signal.SIGTERM)
            assert [result.code for result in job.wait(check=False)] == [75, 75]

    Args:
      command: See `run_processes`.
      processes: See `run_processes`.
      devices_per_process: See `run_processes`.
      timeout: See `run_processes`.
      grace: See `run_processes`.
      env: See `run_processes`.
      cwd: See `run_processes`.

    Yields:
      The running job.

    Raises:
      ValueError: If `devices_per_process` has another number of entries than `processes`.
    """
    deadline = time.monotonic() + timeout
    names = training_tasks(processes)
    configs = tf_configs(names)
    devices = devices_per_process
    counts = [devices] * processes if isinstance(devices, int) else list(devices)
    if len(counts) != processes:
        raise ValueError(f"devices_per_process has {len(counts)} entries, expected {processes}")
    base = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    base |= {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    if not job_token.is_set(base):
        base[job_token.TOKEN] = job_token.create()
    started: list[Process] = []
    with tempfile.TemporaryDirectory(prefix="spmdtrain-test-") as folder:
        try:
            for rank, name in enumerate(names):
                own = {"TF_CONFIG": configs[name], "JAX_NUM_CPU_DEVICES": str(counts[rank])}
                line = command(rank) if callable(command) else command
                log = Path(folder) / f"{rank}.log"
                directory = None if cwd is None else Path(cwd)
                started.append(Process(name, line, {**base, **own, **(env or {})}, directory, log))
            yield RunningJob(started, deadline, grace)
        finally:
            for process in started:
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
    """Runs a command as the processes of one job on this machine.

    Each process gets its TF_CONFIG, with free ports, and virtual CPU devices.

    Example::

        def test_my_training_on_two_processes(tmp_path):
            chief, worker = run_processes(
                [sys.executable, "train.py", "--workdir", str(tmp_path)],
                processes=2, devices_per_process=2, timeout=120,
            )
            assert "finished" in chief.output

    Args:
      command: Command line, or a function that returns one for a rank.
      processes: Number of processes.
      devices_per_process: Number of virtual CPU devices of each process, or one number per rank.
      timeout: Seconds until the job must have ended.
      check: Whether a non-zero exit code raises.
      grace: Seconds that the other processes have to end after one failed; then they are killed.
      env: Variables to add to this process's environment.
      cwd: Working directory; by default that of this process.

    Returns:
      The results in order of rank.

    Raises:
      AssertionError: If the timeout expires, or if `check` and a process failed; contains the
        output of all processes.
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
