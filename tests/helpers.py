"""What tests share: the shipped command as a subprocess, and what it left behind."""

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

BOUND = 500  # seconds for what takes ten where the machine has nothing else to do

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
DIGITS = REPOSITORY / "experiments" / "digits_mlp.py"
LINEAR = REPOSITORY / "experiments" / "linear_regression.py"
MNIST = REPOSITORY / "experiments" / "mnist_mlp.py"
GPT = REPOSITORY / "experiments" / "shakespeare_gpt.py"
GAN = REPOSITORY / "experiments" / "digits_gan.py"

TEXT = "".join(f"{i} green bottles, hanging on the wall\n" for i in range(99, 0, -1)) * 3


def environment(devices: int | None = None) -> dict[str, str]:
    """The environment for a subprocess, with so many CPU devices or as the experiment says."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    env["JAX_PLATFORMS"] = "cpu"
    if devices is not None:
        env["JAX_NUM_CPU_DEVICES"] = str(devices)
    return env


def command(config: Path, *options: object) -> list[str]:
    """The command line that runs an experiment."""
    return [
        *(sys.executable, "-u", "-m", "spmdtrain.run", "--config", str(config)),
        *map(str, options),
    ]


def run(
    config: Path, *options: object, cwd: Path | None = None, devices: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run an experiment through the real command to its end, whatever that is."""
    return subprocess.run(
        command(config, *options),
        cwd=cwd,
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def together(*calls: Callable[[], T]) -> list[T]:
    """What several calls return that are made at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


def start(config: Path, *options: object, devices: int | None = None) -> subprocess.Popen[str]:
    """Start an experiment through the real command, to be interrupted.

    What it prints goes through a pipe that is soon full: a run of hundreds of lines cannot be at
    its end before the reader is near it.
    """
    return subprocess.Popen(
        command(config, *options),
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pipesize=4096,
    )


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What a started experiment prints up to the line that begins with `text`."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith(text):
            return seen
    raise AssertionError(f"it ended without {text!r}: {seen}")


def metrics(workdir: Path, split: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, of one split or of all, without measured times."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["split"] == "epoch":
            del line["seconds"], line["examples_per_second"]
            line.pop("input_wait", None)  # not measured with parameter servers
    return [line for line in lines if split is None or line["split"] == split]


def status(workdir: Path) -> dict[str, Any]:
    """A run's status.json."""
    content: dict[str, Any] = json.loads((workdir / "status.json").read_text())
    return content


def events(
    workdir: Path, folder: str = "tensorboard", *, may_be_cut: bool = False
) -> Iterator[Any]:
    """What TensorBoard's event files hold, oldest first. A kill may have cut a last event."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted((workdir / folder).iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):  # a record: length (8), its checksum (4), data, its checksum (4)
            (length,) = struct.unpack_from("<Q", content.ljust(at + 8), at)
            if may_be_cut and at + length + 16 > len(content):
                break
            yield Event.FromString(content[at + 12 : at + 12 + length])
            at += length + 16
        assert may_be_cut or at == len(content)


def saved_steps(workdir: Path) -> list[int]:
    """The steps whose checkpoints are complete, in order."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def assert_gone(processes: Iterable[int], within: float = BOUND) -> None:
    """Waits until processes have ended. A zombie has: only its parent can remove it from /proc."""
    numbers, end = tuple(processes), time.monotonic() + within
    while running := [number for number in numbers if _is_running(number)]:
        assert time.monotonic() < end, running
        time.sleep(0.05)


def _is_running(number: int) -> bool:
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def contents(workdir: Path) -> dict[str, bytes]:
    """Every file of a run by its path, byte for byte; of the lock, without the name of a start."""
    files = (path for path in workdir.rglob("*") if path.is_file())
    found = {str(path.relative_to(workdir)): path.read_bytes() for path in files}
    if ".lock" in found:  # also a start that is refused has held it
        found[".lock"] = found[".lock"].partition(b"\n")[0]
    return found


def text_in(folder: Path) -> Path:
    """A new folder in it with a text for GPT, of few characters over and over."""
    data = folder / "data"
    data.mkdir()
    (data / "input.txt").write_text(TEXT)
    return data


SMALL = '''"""A line with slope 3 and offset 2."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import optax
from flax import nnx

from spmdtrain import Experiment, RunConfig, UserError


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 4
    learning_rate: float | None = 0.1
    examples: int = 64
    """How many examples there are."""


def objective(model, batch):
    x, y = batch
    return {"loss": (model(x) - y) ** 2}


def build(config):
    x = np.linspace(-1, 1, config.examples, dtype=np.float32)[:, None]
    data = (x, 3 * x + 2)
    return Experiment(
        model=partial(nnx.Linear, 1, 1),
        objective=objective,
        optimizer=optax.sgd(config.learning_rate),
        train=data,
        validation=data,
    )
'''


def small_experiment(folder: Path, *changes: tuple[str, str], name: str = "small") -> Path:
    """The file of an experiment that runs in no time, with parts of its text changed."""
    text = SMALL
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path
