"""The state before the first step of a start: resumed, forked from another run, or initial."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from spmdtrain.adapters.base import Variables
from spmdtrain.checkpoints.listing import (
    LATEST,
    LoadedCheckpoint,
    Source,
    find,
    list_for_all,
    load_latest_valid,
)
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest, read_positions
from spmdtrain.checkpoints.read_arrays import holds
from spmdtrain.checkpoints.restore import base_sums, load_state
from spmdtrain.checkpoints.run_identity import LoraRecord, changes, check_same_run, describe_leaves
from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import process_group, progress
from spmdtrain.errors import UserError, option
from spmdtrain.record.storage import absolute, folder_of
from spmdtrain.step import hyperparameters
from spmdtrain.step.optimizer import average_in, is_schedule_free, merge, with_base
from spmdtrain.step.state import TrainState, first_average
from spmdtrain.train.run_inputs import Trainable
from spmdtrain.train.session import RunSession

StateAndPositions = tuple[TrainState, Mapping[str, str]]
LoadBase = Callable[[epath.Path, Manifest], tuple[Variables, LoraRecord]]
"""(folder of a checkpoint, its manifest) -> the base weights that it leaves out, and the
checkpoint's record with the place where they were."""


@dataclass(frozen=True)
class InitialState:
    """The state before step 1; `lora` has the place of a base model's weights, no checksums."""

    state: TrainState
    lora: LoraRecord = field(default_factory=LoraRecord)


def first_state(
    run: RunSession,
    trained: Trainable,
    initialize: Callable[[], InitialState],
    load_base: LoadBase | None = None,
) -> tuple[TrainState, bool]:
    """Returns the state before the first step, and whether it was loaded from a checkpoint.

    Tries, in this order: the newest valid checkpoint of the workdir, the checkpoint of `fork_from`,
    a new initialization.

    Args:
      run: The session of the run. The records of the checkpoint are restored in it.
      trained: Gives shapes and shardings of the state.
      initialize: Returns the initial state; called if there is no checkpoint.
      load_base: Loads base weights; needed if `trained` has a base model.

    Raises:
      UserError: If no checkpoint is valid (a run never starts from step 0 in a workdir with
        checkpoints), if they are of a different run, if the option `resume` forbids it, if a fork
        has no step to train or is of the workdir itself, or if a leaf of the state does not have
        its sharding.
    """
    _check_other_run(run.config)
    with progress.phase(progress.Phase.RESTORE, 0):
        if (source := _own_checkpoints(run)) is not None:
            state = _resume(run, trained, source, load_base)
        elif run.config.fork_from is not None:
            state = _fork(run, trained, run.config.fork_from, load_base)
        else:
            initial = initialize()
            state = initial.state
            _record_base(run, trained, state, initial.lora)
            run.branch(-1)
            run.check_placed(state, trained, "after the initialization")
            return state, False
    run.check_placed(state, trained, "as restored")
    return state, True


def parse_fork(text: str) -> tuple[str, str]:
    """Returns the path and the checkpoint of `RUN[@STEP]`; the latest one without a step."""
    match = re.fullmatch(r"(.+)@(\d+|best|latest)", text)
    return (match[1], match[2]) if match else (text, LATEST)


def names_step(fork_from: str) -> bool:
    """Returns whether a fork with this `fork_from` always begins with the same checkpoint."""
    path, which = parse_fork(fork_from)
    return which.isdecimal() or re.search(r"/checkpoints/\d+/*$", path) is not None


def _check_other_run(config: RunConfig) -> None:
    """Raises `UserError` if `fork_from` names the workdir, whose own checkpoints would win."""
    if config.fork_from is None or config.workdir is None:
        return
    other = absolute(folder_of(parse_fork(config.fork_from)[0]))
    own = absolute(folder_of(config.workdir))
    if other == own or own / "checkpoints" in (other, other.parent):
        raise UserError(
            f"fork_from {config.fork_from} names this run's own workdir: give another workdir, or "
            "leave fork_from out to resume"
        )


def _own_checkpoints(run: RunSession) -> Source | None:
    """Returns the checkpoints of the workdir; None if there are none."""
    config, where = run.config, f"workdir {run.config.workdir}"
    source = None
    if config.workdir is not None and run.checkpoints is not None:
        source = list_for_all(config.workdir)
    if source is None or not source.steps:
        if config.resume == "must":
            raise UserError(f"resume is 'must', and {where} holds no checkpoint")
        return None
    if config.resume == "never":
        raise UserError(
            f"resume is 'never', and {where} holds checkpoints up to step {source.steps[-1]}: "
            "use another workdir, or remove them"
        )
    return source


def _resume(
    run: RunSession, trained: Trainable, source: Source, load_base: LoadBase | None
) -> TrainState:
    """Returns the state of the workdir's newest valid checkpoint.

    Corrupted checkpoints are quarantined once a valid one is found. Raises `UserError` if none is
    valid, or they are of a different run.
    """
    assert run.checkpoints is not None
    log, warn = run.logger.terminal.line, run.logger.terminal.warning
    for name in run.checkpoints.quarantined:
        warn(f"a checkpoint is quarantined as {name}, which an earlier start had begun")
    try:
        loaded = _load(
            run,
            trained,
            source,
            "another workdir",
            same_program=not run.config.resume_anyway,
        )
    except CheckpointCorruptedError as error:
        raise UserError(
            f"{error}; nothing was changed: use another workdir to start from step 0"
        ) from None
    for step, name in zip(
        loaded.corrupted, run.checkpoints.quarantine(loaded.corrupted), strict=True
    ):
        warn(f"checkpoint {step} is quarantined as {name}")
    saved = loaded.manifest
    before, now = saved.identity.config, run.identity.config
    if saved.stopped and all(before[name] == now[name] for name in ("epochs", "steps")):
        # A callback ended the run here, and the totals have not changed since.
        run.schedule.total = saved.step
    log(f"resumed from step {saved.step} of {run.config.workdir}")
    run.is_new = False
    state = _continued(run, trained, loaded, source, load_base, "changed since")
    if _has_saved_later(run, saved.step):
        run.branch(saved.step)
    return state


def _has_saved_later(run: RunSession, step: int) -> bool:
    """Returns whether an earlier start began to save a later state than `step`."""
    events = run.logger.times.earlier_events  # in process 0
    later = any(e["event"] == "checkpoint" and e.get("step", 0) > step for e in events)
    return process_group.broadcast(later)


def _fork(run: RunSession, trained: Trainable, text: str, load_base: LoadBase | None) -> TrainState:
    """Returns the state of another run's checkpoint, from which this run continues."""
    path, which = parse_fork(text)
    source = process_group.run_on_all(lambda: find(path, which), UserError)
    instead = f"take its parameters alone: {option('init_from', path)}"
    loaded = _load(run, trained, source, instead, same_program=False)
    if (step := loaded.manifest.step) >= run.schedule.total:
        raise UserError(
            f"{source.path(step)} is of step {step}, and this run ends at step "
            f"{run.schedule.total}: give more steps or epochs, or fork an earlier step: "
            + option("fork_from", f"{path}@STEP")
        )
    run.logger.terminal.line(
        f"forked from step {loaded.manifest.step} of {source.path(loaded.manifest.step)}"
    )
    state = _continued(run, trained, loaded, source, load_base, "changed")
    run.branch(step)
    return state


def _load(
    run: RunSession, trained: Trainable, source: Source, instead: str, *, same_program: bool
) -> LoadedCheckpoint[StateAndPositions]:
    """Loads the newest valid checkpoint of a source, if it is of a run like this one."""

    def load(folder: epath.Path, manifest: Manifest) -> StateAndPositions:
        identity, places = run.identity, trained.shardings
        abstract, shardings = trained.abstract_state, places
        if trained.base is not None:
            abstract, shardings = map(trained.base.saved_part, (abstract, shardings))
        # Version 0.1 saved no average with a schedule-free optimizer. Its state determines it.
        lacks_average = is_schedule_free(abstract.opt_state) and not holds(manifest, "averaged")
        # Version 0.1 restarted moving averages with the steps: none had earlier updates.
        lacks_count = not holds(manifest, "averaged_before")
        lacked = ["averaged"] * lacks_average + ["averaged_before"] * lacks_count
        if lacked:
            absent: dict[str, Any] = {name: {} for name in lacked}
            abstract, shardings = (replace(x, **absent) for x in (abstract, shardings))
            leaves = {n: x for n, x in identity.leaves.items() if n.split("/")[0] not in lacked}
            identity = replace(identity, leaves=leaves)
        check_same_run(
            manifest.identity,
            identity,
            str(folder),
            manifest.step,
            instead=instead,
            same_program=same_program,
        )
        state = load_state(folder, manifest, abstract, shardings)
        if lacks_average:
            average = jax.jit(average_in, out_shardings=places.averaged)
            state = replace(state, averaged=average(state.opt_state, state.params))
        if lacks_count and trained.abstract_state.averaged_before != {}:
            zero = jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=places.averaged_before)
            state = replace(state, averaged_before=zero())
        return state, read_positions(folder, manifest.stream)

    return load_latest_valid(source, load, run.logger.terminal.warning, by_all=True)


def _continued(
    run: RunSession,
    trained: Trainable,
    loaded: LoadedCheckpoint[StateAndPositions],
    source: Source,
    load_base: LoadBase | None,
    label: str,
) -> TrainState:
    """Restores the records of a checkpoint, prints what changed, and returns its state."""
    log, saved = run.logger.terminal.line, loaded.manifest
    state, positions = loaded.value
    run.stream_progress.record(saved.step, positions)
    run.epochs.restore(saved.epoch)
    run.callback_states.restore(saved.callbacks, log)
    run.start_is_evaluated = saved.metrics is not None and not saved.metrics_added
    run.continue_from(saved.identity)
    run.earlier = saved.identity
    for change in changes(saved.identity, run.identity):
        log(f"{label}: {change}")
    lora = saved.identity.lora
    if lora.source:
        assert load_base is not None
        base, lora = load_base(source.path(saved.step), saved)
        state = _with_base(state, base)
    run.identity = replace(run.identity, lora=lora)
    before, now = saved.identity.config, run.identity.config
    return hyperparameters.updated(
        state,
        trained.shardings,
        saved.identity.hyperparameters,
        run.identity.hyperparameters,
        log,
        rate_changed=before.get("learning_rate") != now["learning_rate"],
    )


def _with_base(state: TrainState, base: Variables) -> TrainState:
    """Completes the state of a checkpoint that leaves out the base model."""
    params, model_state = with_base(Variables(state.params, state.model_state), base)
    averaged = state.averaged
    if jax.tree.leaves(averaged):
        averaged = merge(averaged, first_average(base.params))
    return replace(state, params=params, averaged=averaged, model_state=model_state)


def _record_base(run: RunSession, trained: Trainable, state: TrainState, lora: LoraRecord) -> None:
    """Records a base model that checkpoints leave out in the identity of the run."""
    if trained.base is None or trained.base.is_saved:
        return
    base = trained.base.values(Variables(state.params, state.model_state))
    shapes = {"params": base.params, "model_state": base.model_state}
    lora = replace(lora, leaves=describe_leaves(shapes), sums=base_sums(base))
    run.identity = replace(run.identity, lora=lora)
