"""Verification, listing and export of the checkpoints of a run."""

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import jax
import jax.numpy as jnp
import tyro
from etils import epath

from spmdtrain.checkpoints.export_folder import check_new_folder
from spmdtrain.checkpoints.listing import LATEST, Listing, Source, find
from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.checkpoints.read_arrays import examine
from spmdtrain.checkpoints.restore import (
    export_huggingface,
    export_params,
    has_tokenizer,
    read_manifest,
)
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

Format = Literal["stablehlo", "saved_model", "onnx", "huggingface"]
Platform = Literal["cpu", "cuda", "rocm", "tpu"]
Weights = Literal["inside", "beside"]


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
    """Write a checkpoint for other programs: its parameters, or the predict function as a program.

    Without --format, OUT is a file of the parameters. With it, OUT is a new folder with a model
    card, and the experiment's file is executed.
    """

    path: tyro.conf.Positional[str]
    """A workdir, or one of its checkpoints/STEP."""
    to: tyro.conf.Positional[str]
    """The file to write, NAME.npz or NAME.safetensors; with --format a new or empty folder."""
    checkpoint: str = "latest"
    """Which checkpoint of the workdir: latest (the newest valid one), best or a step."""
    trained: bool = False
    """Export the trained parameters instead of their average, if the run kept one."""
    weight_map: str | None = None
    """An experiment's .py file with a WEIGHT_MAP, which gives the arrays the names and shapes of
    another program's file. The file is executed."""
    format: Format | None = None
    """stablehlo, saved_model and onnx: the predict function, for load_exported, TensorFlow and
    ONNX. huggingface: the layout that transformers loads."""
    config: str | None = None
    """The experiment's file, for --format. None means the file that the run has recorded."""
    weights: Weights | None = None
    """The place of the weights of a stablehlo program: inside it as constants, the default, or
    beside it in a file."""
    platforms: tuple[Platform, ...] | None = None
    """The platforms of a stablehlo or saved_model program. None means cpu, cuda and tpu."""
    batch_size: int | None = None
    """The only batch size of the program. None means any."""
    tokenizer: str | None = None
    """A folder with the files of a tokenizer, or a tokenizer.json, for huggingface. None means
    those beside the weights of --init-from, if there are any."""
    license: str | None = None
    """The license that the model card names, such as apache-2.0."""


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
        export(command, terminal)
    return ExitCode.DONE


# -- Export ----------------------------------------------------------------------------------------

_TAKEN_BY: Mapping[str, Sequence[Format | None]] = {
    "trained": (None, "huggingface"),
    "weight_map": (None,),
    "config": get_args(Format),
    "weights": ("stablehlo",),
    "platforms": ("stablehlo", "saved_model"),
    "batch_size": ("stablehlo", "saved_model", "onnx"),
    "tokenizer": ("huggingface",),
    "license": get_args(Format),
}
"""The formats for which each option is; None is a file of parameters."""


def export(command: Export, terminal: Terminal) -> None:
    """Writes the parameters of a checkpoint, or its model, and prints what it has written."""
    for name, formats in _TAKEN_BY.items():
        if getattr(command, name) not in (None, False) and command.format not in formats:
            kinds = [f"--format {each}" if each else "a file of parameters" for each in formats]
            what = f"--format is {command.format}" if command.format else "--format is not given"
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is for {' and '.join(kinds)}, and {what}")
    if command.format is not None:
        _export_model(command, command.format, terminal)
        return
    arrays = export_params(
        command.path,
        command.to,
        which=command.checkpoint,
        averaged=False if command.trained else None,
        weight_map=read_weight_map(command.weight_map) if command.weight_map else (),
        log=terminal.line,
    )
    size = byte_size(sum(x.nbytes for x in arrays.values()))
    terminal.line(f"{len(arrays)} arrays, {size}, in {command.to}")


def _export_model(command: Export, format: Format, terminal: Terminal) -> None:
    """Builds the experiment of a run, and writes its model with the values of a checkpoint."""
    # Imported here, because a replay is needed by few commands, and Flax is slow to import.
    from spmdtrain.replay.recorded_run import read_run
    from spmdtrain.replay.rerun import restore_config
    from spmdtrain.train.serving import PLATFORMS, config_for_export, export_predict
    from spmdtrain.train.trainer import Trainer

    check_new_folder(command.to)
    manifest = read_manifest(command.path, which=command.checkpoint, log=terminal.line)
    source = find(command.path, manifest.step)
    run = read_run(str(source.folder.parent))
    file, config = restore_config(run, command.config, terminal)
    config = config_for_export(config)
    experiment, at = file.build(config), str(source.path(manifest.step))
    if format == "huggingface":
        beside = config.init_from
        tokenizer = beside if beside is not None and has_tokenizer(beside) else None
        written = export_huggingface(
            at,
            command.to,
            files=experiment.huggingface,
            weight_map=experiment.weight_map,
            averaged=False if command.trained else None,
            tokenizer=command.tokenizer or tokenizer,
            license=command.license,
            log=terminal.line,
        )
        terminal.line(f"step {manifest.step} in {command.to}: {', '.join(written)}")
        return
    trainer = Trainer.from_experiment(
        experiment, config, terminal=Terminal(quiet=True), trackers=[]
    )
    trainer.restore(at)
    splits = ("prompts", "test", "validation", "train")
    data = next(x for name in splits if (x := getattr(experiment, name)) is not None)
    export_predict(
        trainer,
        command.to,
        data,
        format=format,
        weights=command.weights or "inside",
        platforms=command.platforms or PLATFORMS,
        batch_size=command.batch_size,
        license=command.license,
        manifest=manifest,
    )
    terminal.line(f"predict of step {manifest.step} in {command.to}")


# -- Verification and lists ------------------------------------------------------------------------


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
