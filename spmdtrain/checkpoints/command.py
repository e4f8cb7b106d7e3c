"""Verification, listing and export of the checkpoints of a run."""

import datetime
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from etils import epath

from spmdtrain.checkpoints.listing import LATEST, Listing, Source, find
from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.checkpoints.read_arrays import examine
from spmdtrain.checkpoints.restore import export_params, read_manifest
from spmdtrain.checkpoints.save import is_unfinished
from spmdtrain.checkpoints.weights.weight_map import read_weight_map
from spmdtrain.document.blocks import Fact, FactsBlock, TableBlock
from spmdtrain.document.terminal import Terminal, byte_size, number
from spmdtrain.errors import (
    ExitCode,
    UserError,
    exit_code_of,
    exit_if_output_is_closed,
    foreign,
)


@dataclass(frozen=True)
class Verify:
    """Read every array of every checkpoint and print which checkpoints are valid."""

    path: tyro.conf.Positional[str]
    """A workdir, or one of its checkpoints/STEP."""


@dataclass(frozen=True)
class Show:
    """List the checkpoints of a workdir with their metrics, or show one in detail."""

    path: tyro.conf.Positional[str]
    """A workdir, whose checkpoints are listed, or one of its checkpoints/STEP, which is shown."""
    step: int | None = None
    """The checkpoint to show: arrays, shapes, dtypes, sizes and metadata, without loading it."""


@dataclass(frozen=True)
class Export:
    """Write the parameters of a checkpoint to one file for other programs."""

    path: tyro.conf.Positional[str]
    """A workdir, or one of its checkpoints/STEP."""
    to: tyro.conf.Positional[str]
    """The file to write: NAME.npz or NAME.safetensors."""
    checkpoint: str = "latest"
    """Which checkpoint of the workdir: latest (the newest valid one), best or a step."""
    trained: bool = False
    """Export the trained parameters instead of their average, if the run kept one."""
    weight_map: str | None = None
    """An experiment's .py file with a WEIGHT_MAP, which gives the arrays the names and shapes of
    another program's file. The file is executed."""


SUBCOMMANDS: Any = Annotated[Verify | Show | Export, tyro.conf.arg(name="")]
"""The command line, for tyro."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default the arguments of the process; returns the exit code."""
    with exit_if_output_is_closed():
        command: Any = tyro.cli(
            SUBCOMMANDS,
            args=arguments,
            prog="python -m spmdtrain.checkpoints",
            description=__doc__,
        )
        return exit_code_of(lambda: execute(command, Terminal()))


def execute(command: Verify | Show | Export, terminal: Terminal) -> int:
    """Executes a parsed command. Returns the exit code."""
    if isinstance(command, Verify):
        return verify(command.path, terminal)
    if isinstance(command, Show):
        show_checkpoints(command.path, command.step, terminal)
    else:
        averaged = False if command.trained else None
        arrays = export_params(
            command.path,
            command.to,
            which=command.checkpoint,
            averaged=averaged,
            weight_map=read_weight_map(command.weight_map) if command.weight_map else (),
            log=terminal.line,
        )
        size = byte_size(sum(x.nbytes for x in arrays.values()))
        terminal.line(f"{len(arrays)} arrays, {size}, in {command.to}")
    return ExitCode.DONE


def verify(path: str, terminal: Terminal) -> int:
    """Reads all arrays of checkpoints, and prints a table of them, the newest first.

    `path` is a workdir, or one of its `checkpoints/STEP`. Returns exit code 0 if all checkpoints
    are valid, 1 otherwise.
    """
    source = find(path)
    rows: list[Sequence[str]] = []
    faults = 0
    with terminal.progress("verify", done=0, total=len(source.steps)):
        for done, step in enumerate(reversed(source.steps), start=1):
            cells, fault = _verified(source.path(step), terminal)
            if fault and not source.path(step).exists():
                continue  # a run in progress has removed it meanwhile
            faults += fault is not None
            rows.append((str(step), *cells, fault or "valid"))
            terminal.advance(done)
    if source.whole_workdir:
        for name in sorted(path.name for path in source.folder.iterdir()):
            if re.fullmatch(r"\d+\.(corrupted|suspect)\d*", name):
                rows.append((name, "", "", "", "quarantined"))
            elif is_unfinished(name):
                verdict = "unfinished: being saved now, or to be removed by the next start"
                rows.append((name, "", "", "", verdict))
    columns, title = ("step", "saved", "size", "metric", "verdict"), str(source.folder)
    terminal.show(TableBlock(columns, rows, frozenset(range(4)), title=title))
    return ExitCode.FAILED if faults else ExitCode.DONE


def _verified(folder: epath.Path, terminal: Terminal) -> tuple[Sequence[str], str | None]:
    """Returns age, size and metric of a checkpoint, and what is wrong with it, if anything."""
    try:
        manifest = Manifest.read(folder)
    except (UserError, OSError) as error:
        return ("", "", ""), str(error)
    name = manifest.identity.config["best_metric"]
    value = (manifest.metrics or {}).get(name)
    metric = "" if value is None else f"{foreign(name)} {number(value)}"
    fault = None
    with terminal.progress(f"step {manifest.step}", done=0, total=len(manifest.sums)):
        for done, (_, array_fault) in enumerate(examine(folder, manifest), start=1):
            fault = fault or array_fault
            terminal.advance(done)
    size = byte_size(manifest.size) if manifest.files else ""
    return (_age(manifest), size, metric), fault


def show_checkpoints(path: str, step: int | None, terminal: Terminal) -> None:
    """Prints a table of the checkpoints of a workdir, or the manifest of one checkpoint.

    `path` is a workdir, or one of its `checkpoints/STEP`; a workdir without `step` gets the table.
    """
    source = find(path)
    if step is None and source.whole_workdir:
        _show_all(source, terminal)
    else:
        _show_one(path, LATEST if step is None else step, terminal)


def _show_all(source: Source, terminal: Terminal) -> None:
    listing = Listing.of(source.folder, source.steps)
    names = dict.fromkeys(name for metrics in listing.metrics.values() for name in metrics)
    rows = []
    for step in sorted(source.steps, reverse=True):
        if (manifest := listing.manifests.get(step)) is None:
            rows.append([str(step), *[""] * (2 + len(names)), listing.faults[step]])
            continue
        metrics = listing.metrics[step]
        values = [number(metrics[name]) if name in metrics else "" for name in names]
        size = byte_size(manifest.size) if manifest.files else ""
        mark = f"best {listing.best_metric}" if step == listing.best else ""
        rows.append([str(step), _age(manifest), size, *values, mark])
    columns = ["step", "saved", "size", *names, ""]
    numeric = frozenset(range(len(columns) - 1))
    terminal.show(TableBlock(columns, rows, numeric, title=str(source.folder)))


def _show_one(path: str, which: str | int, terminal: Terminal) -> None:
    manifest = read_manifest(path, which=which, log=terminal.line)
    rows = [(name, text, _bytes(text)) for name, text in manifest.identity.leaves.items()]
    columns, title = ("array", "shape and dtype", "bytes"), f"step {manifest.step} of {path}"
    terminal.show(TableBlock(columns, rows, numeric=frozenset({2}), title=title))
    parameters = sum(
        _elements(text)
        for name, text in manifest.identity.leaves.items()
        if name.split("/")[0] == "params"
    )
    facts: dict[str, Any] = {
        "step": manifest.step,
        "saved": f"{manifest.saved_at}, {_age(manifest)}",
        "size": byte_size(manifest.size) if manifest.files else "not known in a bucket",
        "parameters": f"{parameters:,}",
        "metrics": dict(manifest.metrics or {}),
        "optimizer": manifest.identity.optimizer,
        "dataset": dict(manifest.identity.dataset),
    }
    facts |= {f"config.{name}": value for name, value in manifest.identity.config.items()}
    terminal.show(FactsBlock([Fact(name, str(fact)) for name, fact in facts.items()]))


def _elements(text: str) -> int:
    """Returns the number of elements of an array described as `float32[784,128]`."""
    dims = text[text.index("[") + 1 : -1]
    return math.prod(int(dim) for dim in dims.split(",") if dim)


def _bytes(text: str) -> str:
    """Returns the size of an array described as `float32[784,128]`; empty for random keys."""
    dtype = text[: text.index("[")]
    if dtype.startswith("key"):  # its size depends on the implementation
        return ""
    return byte_size(_elements(text) * jax.dtypes.itemsize_bits(jnp.dtype(dtype)) // 8)


def _age(manifest: Manifest) -> str:
    saved = datetime.datetime.fromisoformat(manifest.saved_at)
    minutes = (datetime.datetime.now(datetime.UTC) - saved) // datetime.timedelta(minutes=1)
    for unit, length in (("days", 2 * 1440), ("hours", 2 * 60)):
        if minutes >= length:
            return f"{minutes // (length // 2)} {unit} ago"
    return f"{minutes} min ago"
