"""The state before the first step: resumed, forked, from a file of weights, or initial."""

import dataclasses
import functools
import os
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
    Source,
    find,
    list_for_all,
)
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.restore import (
    BaseWeights,
    Loaded,
    ReadBase,
    Wanted,
    base_sums,
    load,
    open_source,
    values_of_model,
    whole_state,
)
from spmdtrain.checkpoints.run_identity import (
    Identity,
    LoraRecord,
    changes,
    check_same_model,
    check_same_run,
    describe_leaves,
    record_rules,
)
from spmdtrain.checkpoints.weights.assignment import (
    WeightAssignment,
    assign_weights,
    check_taken,
    place,
    report,
    rules_of_file,
)
from spmdtrain.checkpoints.weights.source import GivenArrays, WeightSource
from spmdtrain.checkpoints.weights.weight_map import WeightMap
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.distributed import process_group, progress
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import UserError, did_you_mean, option, printable
from spmdtrain.record.storage import absolute, folder_of
from spmdtrain.step import hyperparameters
from spmdtrain.step.functions import RunFunctions
from spmdtrain.step.optimizer import merge, with_base
from spmdtrain.step.state import TREES, TrainState, averaged_steps, first_average, renewed_leaves
from spmdtrain.train.session import RunSession, Trainable
from spmdtrain.tree import in_dtype_of, named_leaves, path_name

# -- The state before the first step of a start: resumed, forked from another run, or initial ------


@dataclass(frozen=True)
class InitialState:
    """The state before step 1; `lora` has the place of a base model's weights, no checksums."""

    state: TrainState
    lora: LoraRecord = field(default_factory=LoraRecord)


def first_state(
    run: RunSession,
    trained: Trainable,
    initialize: Callable[[], InitialState],
    read_base: ReadBase | None = None,
) -> tuple[TrainState, bool]:
    """Returns the state before the first step, and whether it was loaded from a checkpoint.

    Tries, in this order: the newest valid checkpoint of the workdir, the checkpoint of `fork_from`,
    a new initialization.

    Args:
      run: The session of the run. The records of the checkpoint are restored in it.
      trained: Gives shapes and shardings of the state.
      initialize: Returns the initial state; called if there is no checkpoint.
      read_base: Reads base weights; needed if `trained` has a base model.

    Raises:
      UserError: If no checkpoint is valid (a run never starts from step 0 in a workdir with
        checkpoints), if they are of a different run, if the option `resume` forbids it, if a fork
        has no step to train or is of the workdir itself, or if a leaf of the state does not have
        its sharding.
    """
    _check_other_run(run.config)
    with progress.phase(progress.Phase.RESTORE, 0):
        source = _own_checkpoints(run)
        resumed = None if source is None else _resume(run, trained, source, read_base)
        if resumed is not None:
            state = resumed
        elif run.config.fork_from is not None:
            state = _fork(run, trained, run.config.fork_from, read_base)
        else:
            initial = initialize()
            state = initial.state
            run.logger.times.source = "initial"
            _record_base(run, trained, state, initial.lora)
            run.branch(-1)
            if run.snapshots is not None:
                run.snapshots.begin_after(0, None)
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
        if run.snapshots is not None:
            from spmdtrain.checkpoints.snapshots import with_snapshots

            source = with_snapshots(source, run.snapshots, run.schedule.total)
    if source is None or not source.steps:
        if config.resume == "must":
            raise UserError(f"resume is 'must', and {where} holds no checkpoint")
        return None
    newest = source.steps[-1]
    if config.resume == "never" and not source.is_on_disk(newest):
        raise UserError(
            f"resume is 'never', and the run of {where} has a snapshot of step {newest} in memory: "
            f"use another workdir, or remove {source.path(newest).parent.parent} (on several "
            "hosts the folder of that name on each)"
        )
    if config.resume == "never":
        raise UserError(
            f"resume is 'never', and {where} holds checkpoints up to step {newest}: "
            "use another workdir, or remove them"
        )
    return source


def _resume(
    run: RunSession, trained: Trainable, source: Source, read_base: ReadBase | None
) -> TrainState | None:
    """Returns the state of the workdir's newest valid checkpoint or snapshot.

    Corrupted checkpoints are quarantined once a valid one is found. Returns None if there are none,
    and no snapshot is valid. Raises `UserError` if there are checkpoints, and none is valid, or
    they are of a different run.
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
            read_base,
            "another workdir",
            same_program=not run.config.resume_anyway,
        )
    except CheckpointCorruptedError as error:
        if not any(map(source.is_on_disk, source.steps)):
            warn(f"{error}; it is not used")
            return None
        raise UserError(
            f"{error}; nothing was changed: use another workdir to start from step 0"
        ) from None
    corrupted = [step for step in loaded.corrupted if source.is_on_disk(step)]
    for step, name in zip(corrupted, run.checkpoints.quarantine(corrupted), strict=True):
        warn(f"checkpoint {step} is quarantined as {name}")
    saved = loaded.manifest
    before, now = saved.identity.config, run.identity.config
    if saved.stopped and all(before[name] == now[name] for name in ("epochs", "steps")):
        # A callback ended the run here, and the totals have not changed since.
        run.schedule.total = saved.step
    run.from_snapshot = not source.is_on_disk(saved.step)
    run.logger.times.source = source.kind(saved.step)
    log(f"resumed from step {saved.step} of {run.config.workdir}{source.origin(saved.step)}")
    run.is_new = False
    state = _continued(run, trained, loaded, "changed since")
    if run.snapshots is not None:
        run.snapshots.begin_after(saved.step, source)
    if _has_saved_later(run, saved.step):
        run.branch(saved.step)
    return state


def _has_saved_later(run: RunSession, step: int) -> bool:
    """Returns whether an earlier start began to save a later state than `step`."""
    events = run.logger.times.earlier_events  # in process 0
    later = any(e["event"] == "checkpoint" and e.get("step", 0) > step for e in events)
    return process_group.broadcast(later)


def _fork(run: RunSession, trained: Trainable, text: str, read_base: ReadBase | None) -> TrainState:
    """Returns the state of another run's checkpoint, from which this run continues."""
    path, which = parse_fork(text)
    source = process_group.run_on_all(lambda: find(path, which), UserError)
    instead = f"take its parameters alone: {option('init_from', path)}"
    loaded = _load(run, trained, source, read_base, instead, same_program=False)
    if (step := loaded.manifest.step) >= run.schedule.total:
        raise UserError(
            f"{loaded.folder} is of step {step}, and this run ends at step "
            f"{run.schedule.total}: give more steps or epochs, or fork an earlier step: "
            + option("fork_from", f"{path}@STEP")
        )
    run.logger.terminal.line(f"forked from step {step} of {loaded.folder}")
    run.logger.times.source = "fork"
    state = _continued(run, trained, loaded, "changed")
    if run.snapshots is not None:
        run.snapshots.begin_after(step, None)
    run.branch(step)
    return state


def _load(
    run: RunSession,
    trained: Trainable,
    source: Source,
    read_base: ReadBase | None,
    instead: str,
    *,
    same_program: bool,
) -> Loaded:
    """Loads the newest valid checkpoint of a source, if it is of a run like this one."""
    abstract, shardings = trained.abstract_state, trained.shardings
    if trained.base is not None:
        abstract, shardings = map(trained.base.saved_part, (abstract, shardings))

    def want(folder: epath.Path, manifest: Manifest) -> Wanted:
        check_same_run(
            manifest.identity,
            run.identity,
            str(folder),
            manifest.step,
            instead=instead,
            same_program=same_program,
        )
        wanted = whole_state(abstract, shardings)
        if renewed_leaves(manifest.identity.leaves, run.identity.leaves):
            return replace(wanted, fields={**wanted.fields, "extra": {}})
        return wanted

    log = run.logger.terminal.warning
    return load(source, want, log, read_base=read_base, by_all=True)


def _continued(run: RunSession, trained: Trainable, loaded: Loaded, label: str) -> TrainState:
    """Restores the records of a checkpoint, prints what changed, and returns its state."""
    log, saved, state = run.logger.terminal.line, loaded.manifest, loaded.state
    run.stream_progress.record(saved.step, loaded.source.read_positions(saved))
    run.epochs.restore(saved.epoch)
    run.callbacks.states.restore(saved.callbacks, log)
    run.start_is_evaluated = saved.metrics is not None and not saved.metrics_added
    run.continue_from(saved.identity)
    run.earlier = saved.identity
    for change in changes(saved.identity, run.identity):
        log(f"{label}: {change}")
    lora = saved.identity.lora
    if loaded.base is not None:
        state, lora = _with_base(state, loaded.base.values), loaded.base.lora
    run.identity = replace(run.identity, lora=lora)
    if not state.extra:
        state = trained.begun(state)
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
      given: Values of the user that replace the initial ones, without `init_from`.
    """

    steps: RunFunctions
    config: RunConfig
    weight_map: WeightMap
    terminal: Terminal
    given: GivenArrays | None = None

    def initial_state(self) -> InitialState:
        steps, config = self.steps, self.config
        state = steps.init(config.seed)
        if not config.init_from and self.given is None:
            return InitialState(state)
        # Freed before others are loaded: the devices need not hold two models.
        freed: dict[str, PyTree] = {name: {} for name in TREES}
        state = dataclasses.replace(state, **freed, extra={})
        if config.init_from:
            loaded = self.load(config.init_from, config.checkpoint)
        else:
            loaded = LoadedValues(self.take_given())
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

    def base_weights(self, folder: epath.Path, manifest: Manifest) -> BaseWeights:
        """Reads the base weights that a checkpoint leaves out; None in place of other variables."""
        lora, given, base = manifest.identity.lora, self.config.init_from, self.steps.base
        assert base is not None
        known = (None, manifest.identity.config["init_from"], *_names_of(folder))
        loaded = self.load(lora.source if given in known else str(given), LATEST)
        values = base.values(self.steps.as_parameters(loaded.variables))
        found = dataclasses.replace(lora, source=loaded.lora.source, rules=loaded.lora.rules)
        return BaseWeights(values, base_sums(values), found)

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
        source = open_source(path, which, by_all=True)
        if not isinstance(source, Source):
            taken = self._take(source, self.weight_map, UserError)
            lora = self._lora(str(absolute(folder_of(path))), self.weight_map)
            return LoadedValues(taken, lora=lora)
        loaded = load(
            source,
            functools.partial(self._wanted, path),
            self.terminal.line,
            read_base=self.base_weights,
            by_all=True,
        )
        variables, saved = loaded.variables, loaded.manifest
        lora = self._lora(str(loaded.folder), ())
        if loaded.base is not None:
            variables, lora = with_base(variables, loaded.base.values), loaded.base.lora
        count = len(jax.tree.leaves(variables))
        self.terminal.line(
            f"parameters of step {saved.step} from {loaded.folder}"
            + (f": all {count} arrays" if self._is_exact(path, saved.identity) else "")
        )
        return LoadedValues(variables, saved.step, saved.identity, lora)

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

    def _wanted(self, path: str, folder: epath.Path, manifest: Manifest) -> Wanted:
        """Returns what is read from a checkpoint: the model's arrays, or all that fit the model."""
        saved, base, steps = manifest.identity, self.steps.base, self.steps
        if saved.lora.alpha and (base is None or base.alpha != saved.lora.alpha):
            raise UserError(
                f"{folder} is of a run with LoRA of alpha {saved.lora.alpha:g}, and this model has "
                + (
                    f"alpha {base.alpha:g}"
                    if base
                    else "no LoRA: export it, and start from the file"
                )
            )
        if not self._is_exact(path, saved):
            # Without the weight map, a base model's names are those of a run of that model.
            rules = () if base is not None else self.weight_map
            corrupted = CheckpointCorruptedError
            return Wanted(take=lambda arrays: self._take(arrays, rules, corrupted)._asdict())
        abstract, shardings = steps.abstract_state, steps.shardings
        if base is not None and saved.lora.source:
            abstract, shardings = map(base.without_base, (abstract, shardings))
        leaves = describe_leaves(abstract)
        check_same_model(saved, config_as_json(self.config), leaves, str(folder))
        return values_of_model(manifest, abstract, shardings)

    def with_given(self, values: PyTree) -> "ValueLoader":
        """Returns a loader whose initial values are a user's arrays."""
        what = "the values of Trainer.init"
        if isinstance(values, str | os.PathLike):
            raise UserError(f"{what}: {os.fspath(values)!r} is a file: give it to init_from")
        if isinstance(values, TrainState):
            values = Variables(values.params, values.model_state)
        elif isinstance(values, Mapping):  # such as that of np.load
            values = dict(values)
        return dataclasses.replace(self, given=GivenArrays(what, values, self._targets()))

    def take_given(self) -> Variables:
        """Returns the given arrays in the run's shardings.

        They have all parameters. If they have nothing of the model state, it is initialized.
        """
        source, targets = self.given, self._targets()
        assert source is not None
        process_group.agree(source.path, source.digests() if process_group.count() > 1 else {})
        if not source.headers.keys() & named_leaves(self.steps.abstract_state.model_state).keys():
            params = named_leaves(self.steps.abstract_state.params)
            targets = {name: leaf for name, leaf in targets.items() if name in params}
        found = assign_weights(source.path, source.headers, targets, ())
        advice = "Trainer.init().params has the model's own arrays"
        check_taken(source.path, found, strict=True, advice=advice)
        if found.left:
            raise UserError(
                f"{source.path} have {printable(found.left[0])}, and the model has no such array."
                f"{did_you_mean(found.left[0], self._targets())}"
            )
        return self._placed(source, found, targets, UserError)

    def _take(
        self, source: WeightSource, weight_map: WeightMap, expected: type[Exception]
    ) -> Variables:
        """Returns the values of a file in their shardings; arrays that it lacks are initialized."""
        headers = {name: str(header) for name, header in source.headers.items()}
        process_group.agree("init_from", headers)
        steps, what = self.steps, f"init_from {source.path}"
        added = steps.base.added if steps.base else ()
        targets = {name: leaf for name, leaf in self._targets().items() if name not in added}
        rules = weight_map or rules_of_file(source, steps.file_names)
        found = assign_weights(source.path, source.headers, targets, rules)
        self.terminal.show(report(source.path, found, source.headers, targets))
        check_taken(what, found, strict=self.config.init_from_strict == "all")
        if frozen := [n for n in found.kept if steps.base and steps.update.is_frozen(n)]:
            raise UserError(
                f"{what}: it lacks {frozen[0]}, which LoRA freezes, or has it in "
                "another shape: train that parameter (LoraModel(..., train=[...]))"
            )
        return self._placed(source, found, targets, expected)

    def _targets(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape, dtype and sharding of the model's arrays, except random keys."""
        leaves = _named(self._places())
        return {n: x for n, x in leaves.items() if not jnp.issubdtype(x.dtype, jax.dtypes.extended)}

    def _places(self) -> Variables:
        """Returns shape, dtype and sharding of all values of the model."""
        steps = self.steps
        abstract = Variables(steps.abstract_state.params, steps.abstract_state.model_state)
        shardings = Variables(steps.shardings.params, steps.shardings.model_state)
        placed: Variables = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            abstract,
            shardings,
        )
        return placed

    def _placed(
        self,
        source: WeightSource,
        found: WeightAssignment,
        targets: Mapping[str, Any],
        expected: type[Exception],
    ) -> Variables:
        """Returns the arrays that a source has in their shardings; others are initialized."""
        places, steps = self._places(), self.steps
        values: dict[str, jax.Array] = {}
        if others := _named(places).keys() - found.pieces.keys():
            state = steps.init(self.config.seed)
            initial = _named(Variables(state.params, state.model_state))
            values = {name: initial[name] for name in others}
            del state, initial  # freed before others are loaded
        values |= place(source, found, targets, expected)
        return jax.tree_util.tree_map_with_path(lambda at, _: values[path_name(at[1:])], places)


def values_source(config: RunConfig, which: str | int) -> tuple[str, str | int] | None:
    """Returns the path and the checkpoint of the values that a configuration names.

    Tries, in the order of `first_state`: the checkpoints of the workdir, `fork_from`, `init_from`.
    None if there are none of these. `which` is the checkpoint, unless `fork_from` names one.
    """
    if config.workdir is not None and list_for_all(config.workdir).steps:
        return config.workdir, which
    if config.fork_from is not None:
        return parse_fork(config.fork_from)
    return (config.init_from, which) if config.init_from else None


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


# -- Checks of a second `fit` of a trainer, which continues the first one or starts again ----------


def check_no_checkpoints(run: RunSession) -> None:
    """Raises `UserError` if the workdir has checkpoints: a restart would repeat their steps."""
    if run.checkpoints is not None and (run.saved_step or run.checkpoints.holds(0)):
        where = run.config.workdir
        raise UserError(
            f"restart=True counts steps from 0, and workdir {where} holds checkpoints up to "
            f"step {run.saved_step}: use a Trainer without a workdir, or a new Trainer "
            f"with another workdir and init_from={where!r} (its optimizer state is new)"
        )


def check_continues(run: RunSession, earlier: Identity, step: int) -> None:
    """Checks that a run continues an earlier run of the same trainer, and no other trainer has.

    Args:
      run: The run that is about to begin.
      step: Number of steps that the earlier run has made.

    Raises:
      UserError: If this is another run, or the workdir has a checkpoint of a later step.
    """
    try:
        check_same_run(
            earlier,
            run.identity,
            f"this trainer at step {step}",
            step,
            same_program=not run.config.resume_anyway,
        )
    except UserError as error:
        raise UserError(
            f"{error}. To keep the model and the optimizer's state and count steps from 0, "
            "call fit(..., restart=True)"
        ) from None
    if run.saved_step > step:
        raise UserError(
            f"workdir {run.config.workdir} holds step {run.saved_step}, and this trainer has "
            f"run {step}: another trainer has continued the run; use a new Trainer, which "
            "resumes from that checkpoint"
        )
