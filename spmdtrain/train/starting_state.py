"""The state before the first step: resumed, forked, from a file of weights, or initial."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
from spmdtrain.checkpoints.restore import (
    RunWeights,
    base_sums,
    check_unchanged,
    describe_missing,
    load_initial_variables,
    load_state,
)
from spmdtrain.checkpoints.run_identity import (
    Identity,
    LoraRecord,
    changes,
    check_same_run,
    describe_leaves,
    record_rules,
)
from spmdtrain.checkpoints.weights.assignment import (
    assign_weights,
    check_taken,
    place,
    report,
    rules_of_file,
)
from spmdtrain.checkpoints.weights.source import WeightSource, is_weights_file, open_weights
from spmdtrain.checkpoints.weights.weight_map import WeightMap
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.distributed import process_group, progress
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError, option
from spmdtrain.record.storage import absolute, folder_of
from spmdtrain.step import hyperparameters
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.optimizer import merge, with_base
from spmdtrain.step.state import TREES, TrainState, averaged_steps, first_average
from spmdtrain.train.session import RunSession, Trainable
from spmdtrain.tree import in_dtype_of, named_leaves, path_name

# -- The state before the first step of a start: resumed, forked from another run, or initial ------

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
        abstract, shardings = trained.abstract_state, trained.shardings
        if trained.base is not None:
            abstract, shardings = map(trained.base.saved_part, (abstract, shardings))
        check_same_run(
            manifest.identity,
            run.identity,
            str(folder),
            manifest.step,
            instead=instead,
            same_program=same_program,
        )
        state = load_state(folder, manifest, abstract, shardings)
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
    run.callbacks.states.restore(saved.callbacks, log)
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
    before, now = saved.identity.hyperparameters, run.identity.hyperparameters
    return hyperparameters.updated(state, trained.shardings, before, now, log)


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
    lora = replace(lora, leaves=describe_leaves(base._asdict()), sums=base_sums(base))
    run.identity = replace(run.identity, lora=lora)


# -- The first state of a run: initial values, or the values of a checkpoint or file of weights ----

PyTree = Any


@dataclass(frozen=True)
class LoadedValues:
    """The values of a model from a checkpoint or from a file of weights.

    Attributes:
      step: The step of the checkpoint; 0 for a file of weights.
      identity: The run that saved the checkpoint; None for a file of weights.
      lora: The place of a base model's values, without checksums.
    """

    variables: Variables
    step: int = 0
    identity: Identity | None = None
    lora: LoraRecord = field(default_factory=LoraRecord)


@dataclass(frozen=True)
class ValueLoader:
    """Loads the values of a model at the start of a run.

    Attributes:
      config: Has the seed, and `init_from`, whose parameters replace the initial ones.
      weight_map: Rules for the arrays of `init_from`.
      terminal: Shows corrupted checkpoints, and the table of what is taken.
    """

    steps: RunFunctions
    config: RunConfig
    weight_map: WeightMap
    terminal: Terminal

    def initial_state(self) -> InitialState:
        steps, config = self.steps, self.config
        state = steps.init(config.seed)
        if not config.init_from:
            return InitialState(state)
        # Freed before others are loaded: the devices need not hold two models.
        freed: dict[str, PyTree] = {name: {} for name in TREES}
        state = dataclasses.replace(state, **freed, extra={})
        loaded = self.load(config.init_from, config.checkpoint)
        found, places = loaded.variables, steps.shardings
        params, model_state = steps.as_parameters(found)
        params = jax.device_put(params, places.params)
        averaged: PyTree = {}
        like = steps.abstract_state.averaged
        if jax.tree.leaves(like):  # separate arrays, because the state is donated
            averaged = jax.tree.map(
                lambda x, like: jnp.copy(in_dtype_of(x, like)), found.params, like
            )
            averaged = jax.device_put(averaged, places.averaged)
        state = dataclasses.replace(
            state,
            params=params,
            # Some optimizers keep a copy of the parameters that they start from.
            opt_state=steps.opt_state_of(params),
            averaged=averaged,
            model_state=model_state,
        )
        return InitialState(steps.begun(state), loaded.lora)

    def base_weights(self, folder: epath.Path, manifest: Manifest) -> tuple[Variables, LoraRecord]:
        """Loads the base weights that a checkpoint leaves out, and verifies their checksums.

        Returns:
          The weights, None in place of other variables, and the record of where they are.

        Raises:
          UserError: If they are missing, or differ from the weights that the factors were trained
            for.
        """
        lora, given, base = manifest.identity.lora, self.config.init_from, self.steps.base
        assert base is not None
        known = (None, manifest.identity.config["init_from"], *_names_of(folder))
        source = lora.source if given in known else str(given)
        try:
            loaded = self.load(source, LATEST)
        except UserError as error:
            raise UserError(describe_missing(folder, lora, error)) from error
        values = base.values(self.steps.as_parameters(loaded.variables))
        check_unchanged(base_sums(values), lora, folder)
        return values, dataclasses.replace(lora, source=loaded.lora.source, rules=loaded.lora.rules)

    def load(self, path: str, which: str | int) -> LoadedValues:
        """Loads the model's values from a checkpoint of any run, or a file of weights.

        By `init_from_strict`, arrays that are missing or do not fit are an error or keep their
        initial values.

        Args:
          path: A workdir, one of its checkpoints/STEP, or weights of another program.
          which: The checkpoint of a workdir: "latest", "best" or a step.

        Returns:
          The values in the run's shardings, with the step and the run that saved them.

        Raises:
          UserError: If there is no such file or checkpoint, or it is of another model.
        """
        is_file = process_group.run_on_all(lambda: is_weights_file(path), UserError)
        if process_group.broadcast(is_file):
            if which != LATEST:
                raise UserError(f"{path} is a file of weights: leave checkpoint={which} out")
            weights = process_group.run_on_all(lambda: open_weights(path), UserError)
            taken = self._take(weights, self.weight_map, UserError)
            return LoadedValues(
                taken, lora=self._lora(str(absolute(folder_of(path))), self.weight_map)
            )
        source = process_group.run_on_all(lambda: find(path, which), UserError)

        def load(folder: epath.Path, manifest: Manifest) -> Variables:
            return self._of_checkpoint(path, folder, manifest)

        found = load_latest_valid(source, load, self.terminal.line, by_all=True)
        folder, saved = source.path(found.manifest.step), found.manifest.identity
        variables, lora = found.value, self._lora(str(folder), ())
        if saved.lora.source:
            base, lora = self.base_weights(folder, found.manifest)
            variables = with_base(variables, base)
        count = len(jax.tree.leaves(variables))
        self.terminal.line(
            f"parameters of step {found.manifest.step} from {folder}"
            + (f": all {count} arrays" if self._is_exact(path, saved) else "")
        )
        return LoadedValues(variables, found.manifest.step, saved, lora)

    def _lora(self, source: str, weight_map: WeightMap) -> LoraRecord:
        base = self.steps.base
        if base is None:
            return LoraRecord()
        return LoraRecord(base.alpha, source, record_rules(weight_map))

    def _is_exact(self, path: str, saved: Identity) -> bool:
        """Returns whether a run must have the arrays of this model, and no others."""
        if bool(saved.lora.alpha) != (self.steps.base is not None):
            return False  # a run of the base model lacks the factors
        # The options are those of init_from: a run's own checkpoint always has the whole model.
        strict = self.config.init_from_strict == "all"
        return path != self.config.init_from or (strict and not self.weight_map)

    def _of_checkpoint(self, path: str, folder: epath.Path, manifest: Manifest) -> Variables:
        """Returns the values in a checkpoint, None in place of base weights that it leaves out."""
        saved, base, steps = manifest.identity.lora, self.steps.base, self.steps
        if saved.alpha and (base is None or base.alpha != saved.alpha):
            raise UserError(
                f"{folder} is of a run with LoRA of alpha {saved.alpha:g}, and this model has "
                + (
                    f"alpha {base.alpha:g}"
                    if base
                    else "no LoRA: export it, and start from the file"
                )
            )
        if self._is_exact(path, manifest.identity):
            abstract, shardings = steps.abstract_state, steps.shardings
            if base is not None and saved.source:
                abstract, shardings = map(base.without_base, (abstract, shardings))
            config = config_as_json(self.config)
            return load_initial_variables(folder, manifest, abstract, shardings, config)
        own = process_group.run_on_all(
            lambda: RunWeights(folder, manifest), CheckpointCorruptedError
        )
        # Without the weight map, a base model's names are those of a run of that model.
        rules = () if base is not None else self.weight_map
        return self._take(own, rules, CheckpointCorruptedError)

    def _take(
        self, source: WeightSource, weight_map: WeightMap, expected: type[Exception]
    ) -> Variables:
        """Returns the values of a file in their shardings; arrays that it lacks are initialized."""
        headers = {name: str(header) for name, header in source.headers.items()}
        process_group.agree("init_from", headers)
        steps = self.steps
        abstract = Variables(steps.abstract_state.params, steps.abstract_state.model_state)
        shardings = Variables(steps.shardings.params, steps.shardings.model_state)
        placed = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            abstract,
            shardings,
        )
        leaves = _named(placed)
        added = steps.base.added if steps.base else ()
        targets = {
            name: leaf
            for name, leaf in leaves.items()
            if name not in added
            and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)  # random keys
        }
        rules = weight_map or rules_of_file(source, steps.file_names)
        found = assign_weights(source.path, source.headers, targets, rules)
        self.terminal.console.print(report(source.path, found, source.headers, targets))
        check_taken(source.path, found, strict=self.config.init_from_strict == "all")
        if frozen := [n for n in found.kept if steps.base and steps.update.is_frozen(n)]:
            raise UserError(
                f"init_from {source.path}: it lacks {frozen[0]}, which LoRA freezes, or has it in "
                "another shape: train that parameter (LoraModel(..., train=[...]))"
            )
        values: dict[str, jax.Array] = {}
        if others := leaves.keys() - found.pieces.keys():
            state = steps.init(self.config.seed)
            initial = _named(Variables(state.params, state.model_state))
            values = {name: initial[name] for name in others}
            del state, initial  # freed before others are loaded
        values |= place(source, found, targets, expected)
        return jax.tree_util.tree_map_with_path(lambda at, _: values[path_name(at[1:])], placed)


def _names_of(checkpoint: epath.Path) -> list[str]:
    """Returns the paths that name a checkpoint, as a user may have given them."""
    return [str(checkpoint), str(checkpoint.parent), str(checkpoint.parent.parent)]


def at_step_zero(state: TrainState, shardings: TrainState) -> TrainState:
    """Returns the state with step 0 and otherwise unchanged arrays."""

    def number(value: jax.Array | int, sharding: Any) -> jax.Array:
        array = np.asarray(value, np.int32)
        return jax.make_array_from_callback((), sharding, lambda _: array)

    steps = averaged_steps(state.step, state.averaged_before)  # which its decay follows
    return dataclasses.replace(
        state,
        step=number(0, shardings.step),
        averaged_before=jax.tree.map(lambda place: number(steps, place), shardings.averaged_before),
    )


def _named(variables: Variables) -> dict[str, Any]:
    """Returns the leaves of the parameters and of the model state by their paths in the model."""
    params, model_state = map(named_leaves, variables)
    if both := params.keys() & model_state.keys():
        raise UserError(f"{min(both)} is both a parameter and a part of the model state")
    return params | model_state
