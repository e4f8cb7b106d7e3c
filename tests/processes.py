"""What the tests of several processes share: an experiment with faults to order, and its jobs."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import BOUND, command, environment, run

from spmdtrain.launch.task_env import free_ports
from spmdtrain.testing import Command, ProcessResult, RunningJob, run_processes, start_processes

STEPS = 24

# Batches have 24 rows, so that no share of one looks like the 16 rows of a fingerprint.
DRILL = '''"""A small network on noise; one of its processes fails on request."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import optax
from flax import nnx

from spmdtrain import Experiment, RunConfig, UserError
from spmdtrain.distributed import process_group
from spmdtrain.models import MLP


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 24
    learning_rate: float | None = 0.02
    global_batch_size: int | None = 24
    checkpoint_every_steps: int | None = 5
    eval_every_steps: int | None = 12
    log_every: int = 1
    examples: int = 200
    pause: float = 0.0
    """Seconds that a batch takes to load."""
    fault: str = ""
    fault_at: int = 13
    """The batch, counted from 1 at each start, with which it comes."""
    fault_rank: int = 1
    fault_after: str = ""
    """A path that must exist before it comes."""
    mark: str = ""
    """A file that says when it came; where it is, it comes no more."""
    record: str = ""
    """A folder for the examples of each batch, a file for each process."""
    stop_at: int = 0
    """The step at which a callback ends the run."""
    stop_rank: int = 0


class Rows:
    def __init__(self, config):
        self.config, self.batches = config, 0
        draw = np.random.default_rng(0)
        self.x = draw.normal(size=(config.examples, 8)).astype(np.float32)
        self.y = self.x.sum(1) ** 2 / 8

    def __len__(self):
        return len(self.x)

    def rows(self, indices):
        if len(indices) in (1, 16):  # an example for the shapes, and those of the fingerprint
            return self.x[indices], self.y[indices]
        self.batches += 1
        config, rank = self.config, process_group.rank()
        if config.record:
            with open(f"{config.record}/{rank}", "a") as file:
                print(*indices, file=file)
        time.sleep(config.pause)
        x = self.x[indices]
        if (
            config.fault
            and rank == config.fault_rank
            and self.batches == config.fault_at
            and not os.path.exists(config.mark)
        ):
            # So that all faults come after a complete checkpoint, also where saving is slow.
            while config.fault_after and not os.path.exists(config.fault_after):
                time.sleep(0.01)
            if config.mark:
                with open(config.mark + ".new", "w") as file:
                    file.write(repr(time.time()))
                os.rename(config.mark + ".new", config.mark)
            x = self.fail(config.fault, x)
        return x, self.y[indices]

    def fail(self, fault, x):
        if fault == "exception":
            raise ValueError("there is no such row")
        if fault == "refusal":
            raise UserError("row 7 holds no number")
        if fault == "exit":
            sys.exit(0)
        if fault == "end":
            os._exit(0)
        if fault == "hang":
            time.sleep(1000)
        if fault == "nan":
            return x * np.nan
        os.kill(os.getpid(), getattr(signal, fault))
        time.sleep(0.2)  # the signal comes in the midst of a load
        return x


def objective(model, batch):
    x, y = batch
    return {"loss": (model(x)[:, 0] - y) ** 2}


def build(config):
    rows = Rows(config)

    def stop(event):
        if event.step == config.stop_at and process_group.rank() == config.stop_rank:
            event.trainer.stop()

    return Experiment(
        model=partial(MLP, 8, (16,), 1, dropout=0.1),
        objective=objective,
        optimizer=optax.adam(config.learning_rate),
        train=rows,
        validation=(rows.x[:50], rows.y[:50]),
        callbacks={"step": stop} if config.stop_at else {},
    )
'''


def drill(folder: Path, *changes: tuple[str, str], name: str = "drill") -> Path:
    """The experiment's file, with parts of its text changed."""
    text = DRILL
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def run_line(config: Path, *options: object) -> list[str]:
    """The command line of a process with options of its own."""
    return [sys.executable, "-m", "spmdtrain.run", "--config", str(config), *map(str, options)]


def job(
    config: Path,
    *options: object,
    processes: int = 2,
    devices: int | Sequence[int] = 1,
    check: bool = True,
    grace: float = 40.0,
) -> list[ProcessResult]:
    """Run an experiment as several processes of one job, by TF_CONFIG alone."""
    return run_processes(
        command(config, *options),
        processes=processes,
        devices_per_process=devices,
        timeout=BOUND,
        check=check,
        grace=grace,
        env=quiet(),
    )


def differing(line: Command, *, processes: int = 2, grace: float = 40.0) -> list[ProcessResult]:
    """Run a job whose processes have command lines of their own, to whatever end."""
    return run_processes(
        line, processes=processes, timeout=BOUND, check=False, grace=grace, env=quiet()
    )


def start_job(
    config: Path, *options: object, processes: int = 2
) -> contextlib.AbstractContextManager[RunningJob]:
    """Start an experiment as a job, to be interfered with."""
    return start_processes(
        command(config, *options), processes=processes, timeout=BOUND, grace=60, env=quiet()
    )


def quiet() -> dict[str, str]:
    """What the processes see besides: nothing of a launcher around the tests."""
    return {"SPMDTRAIN_LAUNCH": "", "SPMDTRAIN_TASK": ""}


def codes(ended: Sequence[ProcessResult]) -> list[int]:
    """The exit codes by rank, of processes that have all ended by themselves."""
    assert not any(one.killed for one in ended), show(ended)
    return [one.code for one in ended]


def spread(ended: Sequence[ProcessResult]) -> float:
    """Seconds between the first end and the last."""
    return max(one.seconds for one in ended) - min(one.seconds for one in ended)


def show(ended: Sequence[ProcessResult]) -> str:
    """All that is known of how processes ended, for the message of an assertion."""
    return "\n".join(
        f"-- {one.task}: {one.code} after {one.seconds:.1f} s\n{one.output}" for one in ended
    )


def sums(workdir: Path, step: int = STEPS) -> dict[str, str]:
    """The checksum of every array of a run's checkpoint."""
    return sums_of(workdir / "checkpoints" / str(step))


def sums_of(checkpoint: Path) -> dict[str, str]:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert len(manifest["sums"]) > 10  # parameters, two moments of each, step and key
    found: dict[str, str] = manifest["sums"]
    return found


def steps_in(output: str) -> list[int]:
    """The steps that log lines tell of, in their order."""
    return [int(step) for step in re.findall(r"\bstep (\d+)/", output)]


def free_port() -> int:
    """A port of this machine that nothing listens on, and that no other test was given."""
    return free_ports(1)[0]


def tf_config(addresses: Sequence[str], rank: int, **jobs: list[str]) -> str:
    """A TF_CONFIG of a chief and workers at these addresses; `jobs` are further ones."""
    cluster = {"chief": list(addresses[:1]), "worker": list(addresses[1:]), **jobs}
    task = {"type": "worker", "index": rank - 1} if rank else {"type": "chief", "index": 0}
    return json.dumps({"cluster": cluster, "task": task})


def as_task(text: str, line: Sequence[str]) -> list[str]:
    """A command line under a TF_CONFIG of its own, whatever the environment says."""
    return ["env", f"TF_CONFIG={text}", *line]


def sums_on_one_device(folder: Path, step: int, *options: object) -> dict[str, str]:
    """The final state of a run of one process and device, to its end without a fault."""
    ended = run(drill(folder), *options, "--workdir", folder / "run", devices=1)
    assert ended.returncode == 0, ended.stderr
    return sums(folder / "run", step)


# -- through the launcher --------------------------------------------------------------------------


@dataclass
class Launched:
    """A job of the launcher that has ended, and when it said what."""

    code: int
    lines: list[tuple[float, str]]
    """Time of day and text, as they came."""
    mark: Path | None = None
    began: float = field(default_factory=time.time)

    @property
    def output(self) -> str:
        return "\n".join(text for _, text in self.lines)

    @property
    def said(self) -> list[str]:
        """The launcher's own lines."""
        own = "[launch] "
        return [text.removeprefix(own) for _, text in self.lines if text.startswith(own)]

    def times(self) -> dict[str, float]:
        """Seconds from the fault to its notice and to the next step, and the steps lost."""
        assert self.mark is not None
        fault = float(self.mark.read_text())
        noticed = next(at for at, text in self.lines if at >= fault and text.startswith("[launch]"))
        # The logs are some steps behind: the step that was being loaded is the one after the last.
        (message,) = [text for text in self.said if "; restart " in text][:1]
        made = [int(step) - 1 for step in re.findall(r"at step (\d+)", message)]
        made += [
            step for at, text in self.lines if at < noticed for step in steps_in(of_chief(text))
        ]
        resumed = next(
            (number, int(found[1]))
            for number, (_, text) in enumerate(self.lines)
            if (found := re.match(r"\[chief\] resumed from step (\d+) of", text))
        )
        next_step = next(at for at, text in self.lines[resumed[0] :] if steps_in(of_chief(text)))
        return {
            "noticed": round(noticed - fault, 2),
            "next_step": round(next_step - fault, 2),
            "lost": max(0, max(made) - resumed[1]),
        }


def of_chief(text: str) -> str:
    """A line's text where it is the chief's, else nothing."""
    return text if text.startswith("[chief]") else ""


@contextlib.contextmanager
def launching(
    line: Sequence[str],
    *options: object,
    processes: int = 2,
    devices: int = 1,
    before: str = ":",
) -> Iterator[tuple[subprocess.Popen[str], list[tuple[float, str]]]]:
    """Start a command through the launcher, with the lines it writes and when they came.

    The launcher's process runs a shell command `before` it becomes the launcher.
    """
    own = ["--processes", processes, "--devices-per-process", devices, *options]
    process = subprocess.Popen(
        [
            *("bash", "-c", f'{before}; exec "$@"', "launcher"),
            *(sys.executable, "-u", "-m", "spmdtrain.launch", *map(str, own), "--", *line),
        ],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[tuple[float, str]] = []
    assert process.stdout is not None

    def read(stream: Any) -> None:
        for text in stream:
            lines.append((time.time(), text.rstrip("\n")))

    reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        # Politely, as it is the launcher that kills its children; its guardian sees to the rest.
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
        process.wait()
        reader.join(timeout=20)
        process.stdout.close()


def launch(
    config: Path,
    *options: object,
    own: Sequence[object] = (),
    processes: int = 2,
    devices: int = 1,
    mark: Path | None = None,
    timeout: float = BOUND,
) -> Launched:
    """Run an experiment through the launcher to its end; `own` are the launcher's options."""
    marked = [] if mark is None else ["--mark", mark]
    with launching(
        command(config, *options, *marked), *own, processes=processes, devices=devices
    ) as (process, lines):
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            text = "\n".join(text for _, text in lines)
            raise AssertionError(f"no end of the launcher in {timeout:g} s:\n{text}") from None
    return Launched(process.returncode, lines, mark)


def report(name: str, launched: Launched, **more: float) -> dict[str, float]:
    """What a drill measured, also into the file that SPMDTRAIN_DRILL_REPORT names."""
    found = launched.times() | more
    print(f"\n{name}: {found}")
    if path := os.environ.get("SPMDTRAIN_DRILL_REPORT"):
        file = Path(path)
        known = json.loads(file.read_text()) if file.exists() else {}
        known[name] = found | {"said": [x for x in launched.said if "restart" in x][:1]}
        file.write_text(json.dumps(known, indent=1) + "\n")
    return found
