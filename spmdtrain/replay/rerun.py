"""Repetition of steps of a run, from a checkpoint into a new folder."""

import dataclasses
from pathlib import Path

from spmdtrain.checkpoints.manifest import CheckpointCorruptedError
from spmdtrain.checkpoints.weights.source import is_weights_file
from spmdtrain.config.experiment import ExperimentFile
from spmdtrain.config.run_config import RunConfig
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError
from spmdtrain.replay.recorded_run import RecordedRun, manifest_at
from spmdtrain.replay.restored_config import config_on_devices, restore_config
from spmdtrain.strategies import strategy
from spmdtrain.train.loop import Loop
from spmdtrain.train.starting_state import names_step, parse_fork
from spmdtrain.train.trainer import Trainer


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
    experiment, config = restore_config(run, file, terminal)
    if strategy(config.strategy).by_servers:
        raise UserError(
            f"strategy is {config.strategy}: its steps depend on the order in which workers send "
            "gradients, so they cannot be made again"
        )
    config = config_on_devices(config, devices, terminal)
    before = [saved for saved in run.checkpoints.steps if saved < step]
    for first in reversed(before or [0]):
        workdir = str(folder / f"from-{first}")
        replayed = _forked(run, config, first if before else None, workdir, step, terminal)
        try:
            return _run(experiment, config, replayed, first, step)
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
        sentinel_every=None,
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
        experiment = file.build(whole)
        trainer = Trainer.from_experiment(experiment, config, terminal=quiet, trackers=[])
        # An evaluation may change the state, by a callback, and ends a dispatch of several steps.
        evaluates = bool(experiment.callbacks) or (config.steps_per_dispatch or 1) > 1
        validation = experiment.validation if evaluates else None
        trainer.fit(experiment.train, validation=validation, steps=step)
        placement = trainer.placement
    devices = placement.devices
    words = f"{len(devices)} x {devices[0].device_kind}, {placement.name}, mesh {placement.axes}"
    assert config.workdir is not None
    return Rerun(config.workdir, first, words, len(devices))
