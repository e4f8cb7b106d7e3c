"""Steps of a run, made again from a checkpoint, and the examples of a step."""

import collections
import contextlib
import dataclasses
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, read_positions
from spmdtrain.checkpoints.weights.source import is_weights_file
from spmdtrain.config.command_line import Command, arguments_of, parse_command_line
from spmdtrain.config.experiment import Experiment, ExperimentFile, load_experiment
from spmdtrain.config.options import MeshSpec
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.datasets import MappedDataset, Subset, sources_within
from spmdtrain.data.examples import IndexableDataset
from spmdtrain.data.images import ImageFolder
from spmdtrain.data.loader import train_batches
from spmdtrain.data.mixture import Mixture
from spmdtrain.data.sampling import Augment, TrainBatches, all_rows, rows_of
from spmdtrain.data.streams import ShardedStream, StreamProgress
from spmdtrain.data.training_data import training_data
from spmdtrain.document.blocks import TableBlock
from spmdtrain.document.terminal import Terminal, number
from spmdtrain.errors import NonFiniteError, UserError, foreign
from spmdtrain.record.storage import is_url
from spmdtrain.replay.interpreter import describe_not_finite
from spmdtrain.replay.recorded_run import RecordedRun, manifest_at
from spmdtrain.sharding.placement import (
    Placement,
    configure_backend,
    make_placement,
    mirrored_config,
    use_placement,
)
from spmdtrain.step.program import StepPlan, plan_step
from spmdtrain.strategies import strategy
from spmdtrain.train.loop import Loop
from spmdtrain.train.starting_state import names_step, parse_fork
from spmdtrain.train.trainer import Trainer
from spmdtrain.tree import named_leaves

# -- Repetition of steps of a run, from a checkpoint into a new folder -----------------------------

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Rerun:
    """A part of a run that was made again.

    Attributes:
      folder: The workdir with the log, the hashes and the state after the last step.
      first: The step of the checkpoint from which it began; 0 without one.
      placement: Its devices and mesh, in words.
      devices: Number of its devices.
    """

    folder: str
    first: int
    placement: str
    devices: int


T = TypeVar("T")


def rerun(
    run: RecordedRun,
    step: int,
    devices: int | None,
    file: str | None,
    folder: Path,
    terminal: Terminal,
) -> Rerun:
    """Makes a step again, and the steps between the newest valid checkpoint before it and the step.

    The new run is a fork of the old one with the same configuration; the old one is only read.

    Args:
      devices: Number of devices; None for all that the run's configuration asks for.
      file: The experiment's file; None for the file that the run has recorded.
      folder: An empty or absent folder, in which each attempt gets a workdir.
      terminal: Receives a line for each checkpoint that is corrupted.

    Raises:
      UserError: If the run cannot be continued here, or no checkpoint is valid.
    """
    experiment, config = _config_to_rerun(run, devices, file, terminal)

    def make(replayed: RunConfig, first: int) -> Rerun:
        return _run(experiment, config, replayed, first, step)

    return _from_checkpoint(run, config, step, folder, terminal, make)


def _config_to_rerun(
    run: RecordedRun, devices: int | None, file: str | None, terminal: Terminal
) -> tuple[ExperimentFile, RunConfig]:
    """Returns the experiment of a run, and its configuration on the devices of the replay."""
    experiment, config = restore_config(run, file, terminal)
    if strategy(config.strategy).is_asynchronous:
        raise UserError(
            f"strategy is {config.strategy}: its steps depend on the order in which workers send "
            "gradients, so they cannot be made again"
        )
    return experiment, config_on_devices(config, devices, terminal)


def _from_checkpoint(
    run: RecordedRun,
    config: RunConfig,
    step: int,
    folder: Path,
    terminal: Terminal,
    make: Callable[[RunConfig, int], T],
) -> T:
    """Returns `make(configuration, step of the checkpoint)` of the newest valid checkpoint."""
    before = [saved for saved in run.checkpoints.steps if saved < step]
    for first in reversed(before or [0]):
        workdir = str(folder / f"from-{first}")
        replayed = _forked(run, config, first if before else None, workdir, step, terminal)
        try:
            return make(replayed, first)
        except CheckpointCorruptedError as error:
            terminal.warning(f"{error}; trying the one before")
    raise UserError(f"no checkpoint of {run.workdir} before step {step} is valid")


def _forked(
    run: RecordedRun,
    config: RunConfig,
    first: int | None,
    workdir: str,
    step: int,
    terminal: Terminal,
) -> RunConfig:
    """Returns the configuration of a fork that logs and saves what will be compared."""
    fork_from, init_from = config.fork_from, config.init_from
    if first is not None:
        manifest = manifest_at(run.checkpoints, first)
        keeps_base = manifest is not None and bool(manifest.identity.lora.source)
        fork_from, init_from = f"{run.workdir}@{first}", init_from if keeps_base else None
    elif fork_from and run.first_step:  # also of `latest` and `best`, which may be others now
        fork_from = f"{parse_fork(fork_from)[0]}@{run.first_step}"
    elif fork_from and not names_step(fork_from):
        raise UserError(
            f"{run.workdir} began as a fork of {fork_from}, which does not name the step: replay a "
            "step after the first checkpoint of the run"
        )
    elif init_from and not _names_values(init_from, config.checkpoint):
        terminal.warning(
            f"{run.workdir} began with the {config.checkpoint} checkpoint of {init_from}: the "
            "replay begins with other parameters if that run has saved since"
        )
    return dataclasses.replace(
        config,
        workdir=workdir,
        fork_from=fork_from,
        init_from=init_from,
        init_from_strict=config.init_from_strict if init_from else "all",
        checkpoint=config.checkpoint if init_from else "latest",
        resume="never",
        trackers=(),
        log_hash_every=config.log_hash_every or step,
        profile_steps=None,
        watch=(),
        watch_every=100,
        sentinel_every=None,
        snapshot_every_steps=None,
        sentinel_action="stop",
        eval_at_checkpoints=False,
        evaluated_by="training",
        best_metric="loss",
        checkpoint_at_start=False,
        keep_latest=1,
        keep_best=0,
        keep_every_steps=None,
        keep_every_hours=None,
    )


def _names_values(init_from: str, checkpoint: str) -> bool:
    """Returns whether `init_from` always gives the same parameters."""
    return is_weights_file(init_from) or names_step(f"{init_from}@{checkpoint}")


def _run(
    file: ExperimentFile, built_for: RunConfig, config: RunConfig, first: int, step: int
) -> Rerun:
    """Trains up to a step, with objects built for the length of the whole run."""
    quiet = Terminal(quiet=True)
    # Schedules depend on the total, which the fork must not change.
    whole = dataclasses.replace(built_for, workdir=config.workdir)
    if file.has_own_loop:
        short = dataclasses.replace(config, epochs=None, steps=step)
        with Loop(short, terminal=quiet) as loop:
            file.module.train(whole, loop)
            placement = loop.placement
    else:
        trainer, _ = _trained(file, whole, config, step)
        placement = trainer.placement
    devices = placement.devices
    words = f"{len(devices)} x {devices[0].device_kind}, {placement.name}, mesh {placement.axes}"
    assert config.workdir is not None
    return Rerun(config.workdir, first, words, len(devices))


def _trained(
    file: ExperimentFile, whole: RunConfig, config: RunConfig, steps: int
) -> tuple[Trainer, Experiment]:
    """Returns the trainer of a run after a number of steps, and its experiment.

    `whole` has the length of the whole run.
    """
    experiment = file.build(whole)
    quiet = Terminal(quiet=True)
    trainer = Trainer.from_experiment(experiment, config, terminal=quiet, trackers=[])
    # An evaluation may change the state, by a callback, and ends a dispatch of several steps.
    evaluates = bool(experiment.callbacks) or (config.steps_per_dispatch or 1) > 1
    validation = experiment.validation if evaluates else None
    trainer.fit(experiment.train, validation=validation, steps=steps)
    return trainer, experiment


# -- A step that is only prepared: its program, the state before it, and its batch -----------------


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """A step of a run that is ready to be made.

    Attributes:
      trainer: The trainer, with the state before the step.
      plan: The plan of the step, alone in its dispatch.
      batch: The batch of the step, on the devices.
      begins_new: Whether the run began with initial values of its own, by its seed.
      examples: Yields the examples of the batch, in the order of its rows.
    """

    trainer: Trainer
    plan: StepPlan
    batch: PyTree
    begins_new: bool
    examples: Callable[[], Iterator["ExampleRow"]]


def prepare_step(
    run: RecordedRun,
    step: int,
    devices: int | None,
    file: str | None,
    folder: Path,
    terminal: Terminal,
) -> PreparedStep:
    """Makes the steps before a step again, from the newest valid checkpoint before it.

    Arguments are as of `rerun`.

    Raises:
      UserError: As `rerun`; also if the experiment has a loop of its own, or a step before this one
        is not finite.
    """
    experiment_file, config = _config_to_rerun(run, devices, file, terminal)
    if experiment_file.has_own_loop:
        raise UserError(
            f"{experiment_file.path} has a loop of its own, whose step is not known here: only the "
            "step of a Trainer can be explained"
        )

    def make(replayed: RunConfig, _: int) -> PreparedStep:
        whole = dataclasses.replace(config, workdir=replayed.workdir)
        try:
            trainer, experiment = _trained(experiment_file, whole, replayed, step - 1)
        except NonFiniteError as error:
            earlier = "" if error.step is None else f": explain that one, by --step {error.step}"
            raise UserError(
                f"before step {step}, a step of the replay is not finite already{earlier}"
            ) from error
        data, augment = training_data(experiment.train, replayed), experiment.augment
        batch = _placed_batch(run, data, replayed, trainer.placement, step, augment)
        functions = trainer.functions
        with use_placement(trainer.placement):
            shapes = jax.eval_shape(lambda batch: batch, batch)
            kind = functions.transform.explained_kind(step)
            plan = plan_step(functions, shapes, kind=kind)
        begins_new = not (config.init_from or config.fork_from)
        return PreparedStep(
            trainer,
            plan,
            batch,
            begins_new,
            lambda: _examples(run, data, replayed, step, augment),
        )

    return _from_checkpoint(run, config, step, folder, terminal, make)


def _placed_batch(
    run: RecordedRun,
    data: Any,
    config: RunConfig,
    placement: Placement,
    step: int,
    augment: Augment | None,
) -> PyTree:
    """Returns the batch of a step, on the devices."""
    first, positions = step - 1, dict[str, str]()
    if isinstance(data, ShardedStream):
        first, positions = _saved_positions(run, step)
    batches = train_batches(
        data,
        config.resolved_batch_size,
        placement.batch,
        seed=config.seed,
        shuffle=config.shuffle,
        start=first,
        stop=step,
        augment=augment,
        padded_to=config.padded_batch_size(placement.batch_shards),
        progress=StreamProgress({first: positions}),
        skipped=config.skipped_batches,
    )
    with contextlib.closing(batches):
        return collections.deque(batches, maxlen=1).pop()


# -- The experiment and the configuration of a run, from its `config.json` -------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of the run command that are needed to parse a configuration."""

    config: str
    preset: str | None = None


def restore_config(
    run: RecordedRun, file: str | None, terminal: Terminal
) -> tuple[ExperimentFile, RunConfig]:
    """Executes the experiment of a run and returns it with the run's resolved configuration.

    Args:
      file: The experiment's file; None for the file that the run has recorded, which the terminal
        then names.

    Raises:
      UserError: If the file or the configuration is not known, or they do not belong together, or
        the file that the run names may be another user's.
    """
    path = file or run.experiment
    if path is None or not run.config:
        raise UserError(
            f"{run.workdir} does not record its experiment, because its config.json is missing, is "
            "of an older version, or its run was not started by the run command: give the "
            "experiment's file: --config FILE"
            if path is None
            else f"{run.workdir} has no config.json, so its configuration is not known"
        )
    if not Path(path).is_file():
        raise UserError(
            f"{foreign(path)}, the experiment of {run.workdir}, does not exist: give the place of "
            "the file: --config FILE"
        )
    if file is None:
        if why := _distrust(path, run.workdir):
            raise UserError(
                f"config.json of {run.workdir} names {foreign(path)} as its experiment, and {why}. "
                "The command executes that file: read it, and give --config FILE if you trust it"
            )
        terminal.line(f"executing {foreign(path)}, as config.json of the run says")
    experiment = load_experiment(path, frozenset())
    default = experiment.preset(None)
    arguments = list(arguments_of(run.config, default, path))
    command: Command = parse_command_line(["--config", path, *arguments], _Options, "replay")
    config = dataclasses.replace(
        command.config,
        workdir=run.workdir,
        cpu_devices=run.config.get("cpu_devices"),
        learning_rate_scaling="none",
        learning_rate_base_batch_size=None,
        learning_rate_table={},
    )
    return command.experiment, config


def _distrust(path: str, workdir: str) -> str | None:
    """Returns why a file that a run names is not executed without `--config`; None if it is."""
    status = os.stat(path)
    if not os.path.isabs(path):
        return "that is no absolute path"
    if not is_url(workdir) and Path(path).resolve().is_relative_to(Path(workdir).resolve()):
        return "the file lies inside the run, which may come from someone else"
    if status.st_uid not in (os.geteuid(), 0):
        return f"the file belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "every user can write to the file"
    return None


def config_on_devices(config: RunConfig, devices: int | None, terminal: Terminal) -> RunConfig:
    """Returns a run's configuration on other devices; strategy and mesh are kept if they fit.

    Args:
      devices: Number of devices; None for the devices that the configuration asks for.
      terminal: Receives a warning if strategy and mesh are replaced.

    Raises:
      UserError: If there are not as many devices.
    """
    if devices is None:
        configure_backend(config)
        return config
    if devices < 1:
        raise UserError(f"--devices is {devices}: it must be 1 or more")
    config = dataclasses.replace(config, cpu_devices=devices)
    configure_backend(config)
    first = tuple(range(devices))
    if strategy(config.strategy).has_mesh:
        mesh = dataclasses.replace(config.mesh, devices=first)
        chosen = dataclasses.replace(config, mesh=mesh)
        try:
            make_placement(chosen)
            return chosen
        except UserError as error:
            terminal.warning(f"mirrored, because the run's own placement does not fit: {error}")
    elif devices == 1:
        return config
    return mirrored_config(config, MeshSpec(devices=first))


# -- The examples of a step ------------------------------------------------------------------------


def print_examples(run: RecordedRun, step: int, file: str | None, terminal: Terminal) -> None:
    """Prints the examples of a step: where each comes from, and its values in short.

    Args:
      file: The experiment's file; None for the file that the run has recorded.

    Raises:
      UserError: If the examples cannot be found.
    """
    experiment_file, config = restore_config(run, file, terminal)
    configure_backend(config)
    experiment = experiment_file.build(config)
    data = training_data(experiment.train, config)
    batch = config.skipped_batches.batch_of(step - 1)
    terminal.show(examples_table(enumerate(_examples(run, data, config, step, experiment.augment))))
    terminal.line(
        f"step {step} used batch {batch}; --skip-steps {batch}:{batch + 1} leaves it out of a run "
        f"that continues from step {step - 1} or an earlier one"
    )


ExampleRow = tuple[str, str, list[str]]
"""An example of a batch: its index in the data ("" in a stream), its place, and its values."""


def examples_table(examples: Iterable[tuple[int, ExampleRow]], title: str = "") -> TableBlock:
    """Returns the table of examples of a batch, given with their rows."""
    rows = []
    for row, (example, place, values) in examples:
        shown = "  ".join(foreign(value, 200) for value in values)
        rows.append((str(row), example, foreign(place, 300), shown))
    return TableBlock(("row", "example", "from", "values"), rows, title=title)


def _examples(
    run: RecordedRun, data: Any, config: RunConfig, step: int, augment: Augment | None
) -> Iterator[ExampleRow]:
    """Yields the examples of a step, in the order of the rows."""
    if isinstance(data, ShardedStream):
        return _of_stream(run, data, config, step, augment)
    return _of_dataset(data, config, step, augment)


def _of_dataset(
    data: Any, config: RunConfig, step: int, augment: Augment | None
) -> Iterator[ExampleRow]:
    """Yields the examples of a step of a dataset, after `augment`."""
    size = config.resolved_batch_size
    batches = TrainBatches(
        *(data, size, config.seed, config.shuffle, step, all_rows(size), augment),
        config.skipped_batches,
    )
    indices, _ = batches.examples(step - 1)
    rows = rows_of(batches[step - 1])
    for row, index in enumerate(indices.tolist()):
        yield f"{index:,}", place_of_example(data, index), describe_values(data, rows, row)


def _of_stream(
    run: RecordedRun, data: ShardedStream, config: RunConfig, step: int, augment: Augment | None
) -> Iterator[ExampleRow]:
    """Yields the examples of a step of a stream, read from the last checkpoint before the step."""
    first, positions = _saved_positions(run, step)
    skipped, size = config.skipped_batches, config.resolved_batch_size
    last = skipped.batch_of(step - 1)
    batches = data.batches(
        size,
        all_rows(size),
        start=skipped.position(first),
        stop=last + 1,
        positions=positions,
        seed=config.seed,
        augment=augment,
    )
    ((batch, _),) = collections.deque(batches, maxlen=1)
    rows = jax.tree.map(np.asarray, batch)
    for row in range(size):
        shard = row * data.shards // size
        yield "", f"shard {shard} of the stream", describe_values(data.stream, rows, row)


def _saved_positions(run: RecordedRun, step: int) -> tuple[int, dict[str, str]]:
    """Returns the last checkpoint before a step and the positions of the stream in it."""
    first = max((saved for saved in run.checkpoints.steps if saved < step), default=0)
    if not first:
        return 0, {}
    if (manifest := manifest_at(run.checkpoints, first)) is None:
        raise UserError(f"checkpoint {run.checkpoints.path(first)} is corrupted")
    return first, dict(read_positions(run.checkpoints.path(first), manifest.stream))


# -- The place of an example in its data, and a short readable form of its values ------------------

TEXT = 100  # characters of a text that are shown


def place_of_example(data: Any, index: int) -> str:
    """Returns where an example comes from: its file and record, as far as they are known.

    A dataset or source that has `describe(int)` names its records itself.
    """
    if isinstance(data, Subset):
        return place_of_example(data.dataset, int(np.asarray(data.indices)[index]))
    if isinstance(data, MappedDataset):
        return place_of_example(data.dataset, index)
    if isinstance(data, IndexableDataset):
        return place_of_example(data.source, index)
    if isinstance(data, Mixture):
        name, within = data.place_of(index)
        return f"{name}: {place_of_example(data.components[name], within)}"
    if isinstance(data, ImageFolder):
        return str(data.folder / data.files[index])
    if callable(describe := getattr(data, "describe", None)):
        return str(describe(index))
    return f"example {index} of {type(data).__name__}"


def describe_values(data: Any, rows: PyTree, row: int) -> list[str]:
    """Returns the values of an example, a text for each field: a number, a text, or a summary.

    The summary of an array has its dtype, shape and checksum, and its least and greatest number. If
    `data`, or one that it reads from, has `decode(tokens)`, the field `tokens` is shown as text,
    with "|" between documents.
    """
    leaves = {name: np.asarray(leaf)[row] for name, leaf in named_leaves(rows).items()}
    inside = (getattr(each, "decode", None) for each in (data, *sources_within(data)))
    decode = next((each for each in inside if callable(each)), None)
    tokens = leaves.get("tokens")
    found = []
    if decode is not None and tokens is not None and tokens.ndim == 1:
        segments = leaves.get("segments", np.ones_like(tokens))  # 0 is padding
        texts = [decode(tokens[segments == number]) for number in range(1, segments.max() + 1)]
        found.append(f"tokens {foreign(repr(' | '.join(texts)), TEXT)}")
        leaves.pop("tokens")
    return found + [f"{name} {_summary(value)}".strip() for name, value in leaves.items()]


def _summary(value: np.ndarray) -> str:
    if not value.ndim:
        return number(value.item()) if value.dtype.kind in "biuf" else str(value)
    text = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if value.size and value.dtype.kind in "biuf":
        finite = value[np.isfinite(value)]
        if finite.size:
            text += f" from {number(float(finite.min()))} to {number(float(finite.max()))}"
        text = ", ".join([text, *describe_not_finite(value)])
    return f"{text} (crc32 {zlib.crc32(value.tobytes()):08x})"
