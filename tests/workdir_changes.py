"""Small trainings in forked processes, each of them disturbed at one change of its workdir.

    python tests/workdir_changes.py FOLDER < cells.jsonl

Prints a line of JSON for each cell: the exit codes of all starts, and what differs in the end from
a run that nothing has disturbed.

Python's audit events tell of each file that is created, renamed, removed or cut, and of each
folder, before it happens. A line is seen before it is written and after its first half. What
TensorStore writes is not seen: it is in the folder of an unfinished checkpoint, which is removed as
a whole.
"""

import contextlib
import errno
import faulthandler
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}

import numpy as np
import optax
from fake_gcs import BUCKET, FakeGcs, fake_gcs
from flax import nnx
from gradient_faults import examples, fault, with_fault
from gradient_faults import model as model_with_faults
from gradient_faults import objective as objective_of_faults
from helpers import BOUND, events, saved_steps, status

from spmdtrain import DeviceFaultError, Text, Trainer, UserError, read_manifest
from spmdtrain.document.terminal import Terminal
from spmdtrain.record.run import Run

importlib.import_module("spmdtrain.checkpoints.orbax")  # takes long, so here once
assert threading.active_count() == 1  # a fork would lose others

FORK = multiprocessing.get_context("fork")
SECOND_SIGNAL = (0.01, 0.1, 0.5)  # seconds between two signals
_ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A job, what happens to it, and when."""

    job: str
    how: str = "kill"
    """kill, SIGTERM, SIGINT twice, EIO, ENOSPC, or nothing."""
    at: int = 0
    """The number of the change before which it happens, modulo the number of changes.

    An error is raised at every change from there on."""
    again: int | None = None
    """The same for the second start; None leaves that undisturbed."""
    task: int = 0
    """The task of the job that is disturbed."""
    latency: float = 0.0
    """Seconds by which each change takes longer."""


class Disturbance:
    """What happens in a process at one change of a folder."""

    def __init__(self, folder: Path, cell: Cell, at: int, log: Path) -> None:
        self._folder, self._cell, self._at = str(folder), cell, at
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._count, self._lock = 0, threading.Lock()
        self._write = os.write
        vars(os)["write"] = self._write_line
        sys.addaudithook(self._audit)

    def _audit(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            if not isinstance(given[2], int) or not given[2] & _WRITES:
                return
        elif event not in _CHANGES:
            return
        if self._is_inside(given[0]):
            self._change(event, given[0])

    def _is_inside(self, path: Any) -> bool:
        """Whether a path is in the folder.

        The process runs in /, so a relative path belongs to an open descriptor of a folder.
        """
        if isinstance(path, int):
            with contextlib.suppress(OSError):
                return os.readlink(f"/proc/self/fd/{path}").startswith(self._folder)
            return False
        name = os.fsdecode(path)
        return name.startswith(self._folder) or not name.startswith("/")

    def _write_line(self, file: int, content: Any) -> int:
        if file == self._log or not self._is_inside(file):
            return self._write(file, content)
        half = len(content) // 2
        self._change("write", file)
        written = self._write(file, content[:half])
        self._change("write the rest", file)
        return written + self._write(file, content[half:])

    def _change(self, event: str, path: Any) -> None:
        with self._lock:
            self._count += 1
            number = self._count
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(path)
        self._write(self._log, f"{number} {event} {name}\n".encode())
        time.sleep(self._cell.latency)
        how, pid = self._cell.how, os.getpid()
        if how in _ERRORS and number >= self._at > 0:
            if how == "EIO" or event in ("open", "os.mkdir") or event.startswith("write"):
                raise OSError(_ERRORS[how], os.strerror(_ERRORS[how]))
        elif number == self._at and how == "kill":
            os.kill(pid, signal.SIGKILL)
            time.sleep(60)
        elif number == self._at and how == "SIGTERM":
            os.kill(pid, signal.SIGTERM)
        elif number == self._at and how == "SIGINT twice":
            os.kill(pid, signal.SIGINT)
            pause = SECOND_SIGNAL[number % len(SECOND_SIGNAL)]
            threading.Timer(pause, os.kill, (pid, signal.SIGINT)).start()


@dataclass
class Bucket:
    """The bucket of a job, and what happens to the process that writes to it.

    The bucket still receives the write at which it happens.
    """

    storage: FakeGcs
    process: int = 0

    def disturb(self, log: Path, cell: Cell, at: int) -> None:
        """Starts to count the writes of the next process."""
        self._log, self._count, self.process = log, 0, 0
        self._how, self._at = cell.how, at
        self.storage.before_write = self._before_write

    def _before_write(self, request: str) -> None:
        self._count += 1
        with self._log.open("a") as log:
            print(self._count, request, file=log)
        if self._count == self._at:
            os.kill(self.process, signal.SIGKILL if self._how == "kill" else signal.SIGTERM)

    def copy(self, folder: Path) -> None:
        """Writes all objects of a job to its folder."""
        for name, content in self.storage.under(f"{folder.name}/").items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


# -- the jobs --------------------------------------------------------------------------------------


def _objective(model: Any, batch: Any) -> dict[str, Any]:
    return {"loss": (model(batch[0])[:, 0] - batch[1]) ** 2}


def _log_text(event: Any) -> None:
    if event.step % 3 == 0:
        event.log({"text": Text(f"after step {event.step}")})


def _fit(folder: Path, **options: Any) -> None:
    rows = np.arange(32, dtype=np.float32).reshape(32, 1) / 32, np.ones(32, np.float32)
    defaults: dict[str, Any] = {
        "model": lambda rngs: nnx.Linear(1, 1, rngs=rngs),
        "objective": _objective,
        "optimizer": optax.adam(0.3),
        "workdir": str(folder / "run"),
        "global_batch_size": 8,
        "steps": 8,
        "checkpoint_every_steps": 2,
        "eval_every_steps": 2,
        "keep_latest": 2,
        "log_every": 1,
        "log_hash_every": 1,
        "callbacks": {"step": _log_text},
        "terminal": Terminal(quiet=True),
    }
    Trainer(**defaults | options).fit(rows, validation=(rows[0][:16] * 2, rows[1][:16]))


def _plain(folder: Path) -> None:
    _fit(folder)


def _fork(folder: Path) -> None:
    source = folder.parent / "source"
    _fit(folder, fork_from=f"{source}@4", steps=10)


def _rollback(folder: Path) -> None:
    """A device fails from step 5 on, until the file `repaired` is there."""

    def fail(event: Any) -> None:
        if event.step == 5 and not (folder / "repaired").exists():
            of = fault(1, leaf=1, element=2, bit=4)
            event.trainer.state = with_fault(event.trainer.state, of)

    x, y = examples()
    Trainer(
        model=model_with_faults(),
        objective=objective_of_faults,
        optimizer=optax.adam(1e-3),
        freeze=("^fault",),
        global_batch_size=16,
        workdir=str(folder / "run"),
        steps=12,
        log_every=1,
        checkpoint_every_steps=2,
        keep_latest=5,
        sentinel_every=4,
        sentinel_action="rollback",
        callbacks={"step": fail},
        terminal=Terminal(quiet=True),
    ).fit((x, y))


def _two(folder: Path) -> None:
    _fit(folder, global_batch_size=16)


def _with_evaluator(folder: Path) -> None:
    # What is removed depends on when the evaluator comes to a checkpoint.
    _fit(folder, evaluated_by="evaluator", eval_every_steps=None, keep_latest=99)


def _in_bucket(folder: Path) -> None:
    _fit(folder, workdir=f"gs://{BUCKET}/{folder.name}/run")


@dataclass(frozen=True)
class Job:
    """The tasks of a training."""

    fit: Callable[[Path], None]
    tasks: Sequence[str] = ("",)
    """The type of each task for TF_CONFIG; empty for a process that is alone."""
    apart: bool = False
    """Whether the others continue when one fails."""
    in_bucket: bool = False
    """Whether the workdir is in a bucket."""


JOBS: Mapping[str, Job] = {
    "plain": Job(_plain),
    "fork": Job(_fork),
    "rollback": Job(_rollback),
    "two processes": Job(_two, ("chief", "worker")),
    "bucket": Job(_in_bucket, in_bucket=True),
    "evaluator": Job(_with_evaluator, ("chief", "evaluator"), apart=True),
}


def _start(job: Job, folder: Path, cell: Cell, at: int, start: int, bucket: Bucket) -> list[int]:
    """Runs all tasks of a job; returns their exit codes, -N after signal N.

    Tasks that work apart continue when another one has failed, which is started again meanwhile.
    """
    cluster = {name: [f"localhost:{_free_port()}"] for name in job.tasks if name}

    def fork(number: int, at: int, log: str) -> Any:
        variables = {}
        if name := job.tasks[number]:
            task = {"type": name, "index": 0}
            variables = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
        process = FORK.Process(target=_child, args=(job, folder, cell, at, folder / log, variables))
        process.start()
        assert process.pid is not None
        bucket.process = process.pid
        return process

    if job.in_bucket:
        bucket.disturb(folder / f"{start}.0", cell, at)
    children = {
        number: fork(number, at if number == cell.task else 0, f"{start}.{number}")
        for number in range(len(job.tasks))
    }
    codes, end = [0] * len(children), time.monotonic() + BOUND
    while children:
        for number, child in list(children.items()):
            if child.exitcode is None:
                continue
            codes[number] = codes[number] or child.exitcode
            del children[number]
            if child.exitcode and job.apart:
                children[number] = fork(number, 0, f"{start}.{number} again")
        if time.monotonic() > end:
            for child in children.values():
                child.kill()
            raise TimeoutError(f"{cell}: a start did not end within {BOUND} s; see {folder}")
        time.sleep(0.02)
    return codes


def _child(
    job: Job, folder: Path, cell: Cell, at: int, log: Path, variables: Mapping[str, str]
) -> None:
    """Fits in this process, and ends it with the exit code that a script has."""
    os.environ |= variables
    output = os.open(log.with_suffix(log.suffix + ".out"), os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir("/")
    faulthandler.dump_traceback_later(0.9 * BOUND)  # of a start that does not end
    if not job.in_bucket:
        Disturbance(folder / "run", cell, at, log)
    try:
        job.fit(folder)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        is_fault = isinstance(error, DeviceFaultError)
        sys.exit(2 if isinstance(error, UserError) else 4 if is_fault else 1)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# -- the end ---------------------------------------------------------------------------------------

_TIMES = {"goodput", "seconds", "examples_per_second", "steps_per_second", "input_wait", "mfu"}


def outcome(workdir: Path, *, newest: bool) -> dict[str, Any]:
    """What two runs have in common if nothing was lost: no times, and no names that are drawn.

    Args:
      workdir: The run, which has finished.
      newest: Whether to leave out all checkpoints but the newest: a run that was asked to stop has
        saved a further one, which counts as one of those to keep.
    """
    lines = {}
    for file in sorted(workdir.glob("m*.jsonl")):
        content = [json.loads(line) for line in file.read_text().splitlines()]
        lines[file.name] = [
            {k: v for k, v in line.items() if k not in _TIMES | {"trajectory", "time"}}
            for line in content
        ]
    steps = saved_steps(workdir)[-1 if newest else 0 :]
    saved = {step: workdir / "checkpoints" / str(step) for step in steps}
    manifests = {step: read_manifest(folder) for step, folder in saved.items()}
    names = {str(path.relative_to(workdir)) for path in workdir.rglob("*")}
    if newest:
        names = {
            name for name in names if not re.match(rf"checkpoints/(?!{steps[0]}\b)\d+\b", name)
        }
    return {
        **lines,
        "hashes": {step: each.hash for step, each in Run(str(workdir)).hashes.items()},
        "status": {k: v for k, v in status(workdir).items() if k in ("status", "step")},
        "sums": {step: dict(of.sums) for step, of in manifests.items()},
        "metrics of checkpoints": {step: of.metrics for step, of in manifests.items()},
        "names": sorted(name for name in names if not _is_drawn(name)),
        **{each.name: _points(workdir, each.name) for each in workdir.glob("tensorboard*")},
    }


def _points(workdir: Path, folder: str) -> dict[str, str]:
    """Returns what TensorBoard shows; a start makes it discard the later points of those before."""
    found: dict[tuple[int, str], str] = {}
    for event in events(workdir, folder, may_be_cut=True):
        if event.HasField("session_log"):
            found = {key: value for key, value in found.items() if key[0] < event.step}
        for value in event.summary.value:
            if value.tag.rpartition("/")[2] not in _TIMES:
                found[event.step, value.tag] = str(value)
    return {f"{tag} at {step}": value for (step, tag), value in sorted(found.items())}


def _is_drawn(name: str) -> bool:
    """Whether a name differs between two undisturbed runs, or is of a suspect checkpoint."""
    return "/d/" in name or ".suspect" in name or "tfevents" in name or "/array_metadatas" in name


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Returns a description of each difference by its name."""
    return {
        name: f"{_first_difference(expected.get(name), found.get(name))}"
        for name in sorted({*expected, *found})
        if expected.get(name) != found.get(name)
    }


def _first_difference(expected: Any, found: Any) -> str:
    if isinstance(expected, dict) and isinstance(found, dict):
        names = [n for n in {**expected, **found} if expected.get(n) != found.get(n)]
        pairs = [f"{name}: {expected.get(name)} -> {found.get(name)}" for name in names]
        return f"{len(pairs)} differ, first {'; '.join(pairs[:3])}"[:500]
    if isinstance(expected, list) and isinstance(found, list):
        lost = [x for x in expected if x not in found]
        more = [x for x in found if x not in expected]
        return f"lost {lost[:3]}, more {more[:3]}, {len(expected)} -> {len(found)}"
    return f"{expected} -> {found}"[:500]


def run(cell: Cell, folder: Path, bucket: Bucket, changes: int = 1) -> tuple[list[list[int]], int]:
    """Runs a job until it has finished.

    Args:
      cell: The job, and what happens to it.
      folder: A new folder for it.
      bucket: Where jobs in a bucket write.
      changes: Number of changes that its disturbed task makes otherwise.

    Returns:
      The exit codes of all starts, and the number of changes that the first one made.
    """
    folder.mkdir()
    job = JOBS[cell.job]
    codes: list[list[int]] = []
    for start in range(8):
        chosen = (cell.at, cell.again)[start] if start < 2 else None
        at = 0 if chosen is None else 1 + chosen % changes
        codes.append(_start(job, folder, cell, at, start, bucket))
        # The error may have ended no start: a later one does what it prevented.
        if not any(codes[-1]) and (start or cell.how not in _ERRORS):
            break
        if 4 in codes[-1]:
            (folder / "repaired").touch()
    if job.in_bucket:
        bucket.copy(folder)
    changes = len((folder / f"0.{cell.task}").read_text().splitlines())
    return codes, changes


def main() -> None:
    """Runs the cells of standard input."""
    with fake_gcs() as storage:
        os.environ |= storage.environment()
        _run_cells(Path(sys.argv[1]).resolve(), Bucket(storage))


def _run_cells(root: Path, bucket: Bucket) -> None:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(root / "cache")
    run(Cell(job="plain", how="nothing"), root / "of source", bucket)
    shutil.copytree(root / "of source" / "run", root / "source")
    undisturbed: dict[tuple[str, int], tuple[Path, int]] = {}
    for number, line in enumerate(sys.stdin):
        cell = Cell(**json.loads(line))
        key = cell.job, cell.task
        if key not in undisturbed:
            alone = root / f"alone-{len(undisturbed)}"
            nothing = Cell(job=cell.job, how="nothing", task=cell.task)
            changes = run(nothing, alone, bucket)[1]
            undisturbed[key] = alone / "run", changes
        other, changes = undisturbed[key]
        folder = root / f"{number}"
        codes, _ = run(cell, folder, bucket, changes)
        newest = cell.how.startswith("SIG")
        expected = outcome(other, newest=newest)
        differing = differences(expected, outcome(folder / "run", newest=newest))
        print(
            json.dumps(asdict(cell) | {"codes": codes, "changes": changes, "differing": differing}),
            flush=True,
        )
        if not differing:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
