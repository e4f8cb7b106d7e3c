"""The session of a run: its inputs, logs and checkpoints, and the boundary between steps."""

import contextlib
import dataclasses
import gc
import math
import pkgutil
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
import numpy as np

from spmdtrain.checkpoints.listing import Retention
from spmdtrain.checkpoints.manifest import check_can_be_saved
from spmdtrain.checkpoints.restore import with_sharding
from spmdtrain.checkpoints.run_identity import (
    Identity,
    LoraRecord,
    all_skipped,
    changed_functions,
    describe_leaves,
    describe_optimizer,
)
from spmdtrain.checkpoints.save import Checkpoints
from spmdtrain.config.conflicts import Moment, conflict, refuse_conflicts
from spmdtrain.config.run_config import OPTIONS, RunConfig, config_as_json, own_code
from spmdtrain.data.datasets import Dataset, skipped_of
from spmdtrain.data.mixture import components_of, mixture_of
from spmdtrain.data.streams import ShardedStream, StreamProgress
from spmdtrain.data.training_data import (
    SAME_DATA,
    TrainingData,
    data_fingerprint,
    examples_per_epoch,
    run_dataset,
    training_data,
)
from spmdtrain.distributed import failures, numeric_settings, process_group, progress
from spmdtrain.distributed.code_digest import CodeRecord, code_record, source_digests
from spmdtrain.distributed.failures import StopSignals
from spmdtrain.distributed.requests import Requests
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import (
    CONTROL,
    Interrupted,
    NonFiniteError,
    PreemptedExit,
    ReplicaError,
    StateError,
    StorageError,
    UserError,
    did_you_mean,
    in_notebook,
    is_interactive,
    option,
)
from spmdtrain.record.requests import Action, Request, State
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import RunFiles, Split, Status
from spmdtrain.record.storage import absolute, folder_of, is_url
from spmdtrain.sharding.mesh import abstract_devices, resolve
from spmdtrain.sharding.placement import current_batch_shards, make_placement
from spmdtrain.sharding.rules import check_placed
from spmdtrain.step.divergence import Rewound, rewind
from spmdtrain.step.exact import check_exact_shards
from spmdtrain.step.metrics import component_metric
from spmdtrain.step.optimizer import BaseModel
from spmdtrain.step.optimizer_record import OptimizerRecord
from spmdtrain.step.state import TrainState
from spmdtrain.strategies import strategy
from spmdtrain.trackers.base import Tracker
from spmdtrain.trackers.run_trackers import open_trackers
from spmdtrain.train.callbacks import CallbackEvent, CallbackRunner, FrozenMetrics
from spmdtrain.train.run_logger import Metrics, RunLogger
from spmdtrain.train.schedule import Due, Epochs, Schedule, known_rate

if TYPE_CHECKING:
    from spmdtrain.checkpoints.snapshots import Snapshots
    from spmdtrain.train.metrics_reader import MetricsReader

# -- The checkpoints of a run, by its configuration ------------------------------------------------


def open_checkpoints(
    config: RunConfig, workdir: str, check_lock: Callable[[], None]
) -> Checkpoints:
    """Opens the checkpoints of a run's workdir."""
    retention = Retention(
        latest=config.keep_latest,
        best=config.keep_best,
        metric=config.best_metric,
        direction=config.best_direction,
        every_steps=config.keep_every_steps,
        every_hours=config.keep_every_hours,
    )
    folder = folder_of(workdir) / "checkpoints"
    if config.evaluated_by != "evaluator":
        return Checkpoints(folder, retention, None, check_lock)
    run = Run(workdir)
    return Checkpoints(folder, retention, lambda: run.evaluations, check_lock)


MEMORY_EXHAUSTED = "RESOURCE_EXHAUSTED"
"""XLA's word in the errors of a device with too little memory."""


def explain_memory(
    error: BaseException | None,
    config: RunConfig,
    trained: "Trainable",
    train: TrainingData | None = None,
    logger: RunLogger | None = None,
    *,
    advice: str = "",
) -> None:
    """Adds to such an error what the memory of the devices is used for.

    Args:
      logger: Has the memory of the train step.
      advice: What needs less, if this is no training.
    """
    if isinstance(error, Exception) and MEMORY_EXHAUSTED in str(error):
        explain = pkgutil.resolve_name("spmdtrain.plan.shortage:explain")
        explain(error, config, trained, train, logger and logger.program_memory, advice)


def open_snapshots(workdir: str, trained: "Trainable", warn: Callable[[str], None]) -> "Snapshots":
    """Opens the snapshots of the run of a workdir; all processes call it together."""
    from spmdtrain.checkpoints.snapshot_memory import open_memory
    from spmdtrain.checkpoints.snapshots import Snapshots

    saved = saved_shapes(trained)
    return Snapshots(open_memory(absolute(folder_of(workdir)), saved), saved, warn)


def saved_shapes(trained: "Trainable") -> TrainState:
    """Returns shapes with shardings of what checkpoints and snapshots have of the state."""
    state = jax.tree.map(with_sharding, trained.abstract_state, trained.shardings)
    return state if trained.base is None else trained.base.saved_part(state)


# -- The terminal of a run -------------------------------------------------------------------------


def terminal_of(config: RunConfig) -> Terminal:
    """Returns the terminal of process 0, by the option `quiet`; one without output elsewhere."""
    if in_notebook() and process_group.is_chief():
        from spmdtrain.document.notebook import NotebookTerminal

        return NotebookTerminal(results_only=config.quiet)
    return Terminal(quiet=not process_group.is_chief(), results_only=config.quiet, optional=True)


# -- The inputs of a run: checks, and the identity by which a later start recognizes the run -------


class Trainable(Protocol):
    """The state that a run trains: its shapes, shardings and hyperparameters."""

    @property
    def abstract_state(self) -> TrainState: ...

    @property
    def shardings(self) -> TrainState: ...

    @property
    def kind(self) -> Callable[[int], str]:
        """The number of a step -> its kind, which has a program of its own."""
        ...

    def begun(self, state: TrainState) -> TrainState:
        """Returns a state with the fields of the step's transform, of one without."""
        ...

    @property
    def initial_hyperparameters(self) -> Mapping[str, Any]:
        """Injected hyperparameters that the optimizer starts with, by path."""
        ...

    @property
    def optimizer_record(self) -> OptimizerRecord:
        """The record of the optimizer's update; empty if the user's code calls it."""
        ...

    @property
    def base(self) -> BaseModel | None:
        """The frozen base model of low-rank factors; None without."""
        ...

    @property
    def metric_names(self) -> Callable[[Any], Iterable[str]] | None:
        """Rows -> the names of an evaluation's metrics; None if they are not known beforehand."""
        ...


def check_inputs(
    config: RunConfig,
    train: TrainingData | None,
    data: Mapping[str, Dataset],
    trained: Trainable,
    callbacks: CallbackRunner,
) -> int:
    """Checks that the data of a run fit its configuration; returns the number of steps.

    Args:
      data: Datasets of the other splits: "validation" and "test".
      callbacks: May add metrics that only the first evaluation shows.

    Raises:
      UserError: If an option needs a workdir, a split or a metric that is missing, or a batch is
        larger than the training data.
    """
    profiled = config.profile_range()
    refuse_conflicts(config, OPTIONS, Moment.FIT)
    if config.fork_from and config.init_from and trained.base is None:
        raise UserError(conflict("fork_from", "init_from").text(config))
    if train is None and config.skip_steps:
        raise UserError(
            f"skip_steps is {' '.join(config.skipped_batches.texts)}, and the loop's own data have "
            "no batches that could be left out: give the loop a dataset, or leave skip_steps out"
        )
    if train is None and config.steps is None:
        raise UserError("without a dataset there are no epochs: give steps")
    if mixture_of(train) is not None and config.epochs is not None:
        raise UserError(
            f"epochs is {config.epochs}, and a Mixture has no epochs, because each of its "
            "components repeats for itself: give steps"
        )
    size, batch = examples_per_epoch(train), config.resolved_batch_size
    if 0 < size < batch:  # an epoch would have less than one step, and a step several epochs
        raise UserError(
            f"global_batch_size is {batch}, and the training data have {size} examples, of which a "
            f"batch would hold some several times: {_largest_batch(config, size)}repeat them: "
            f"Subset(data, np.arange({batch}) % {size})"
        )
    total = config.total_steps(size)
    if profiled and profiled[1] > total:
        raise UserError(
            f"profile_steps is {config.profile_steps}: give no more than the run's {total} steps"
        )
    if config.eval_at_checkpoints and "validation" not in data:
        raise UserError("eval_at_checkpoints needs a validation split")
    if profiled and is_url(str(config.workdir)):
        raise UserError(f"profile_steps: the profiler writes no trace to {config.workdir}")
    is_evaluated_here = config.evaluated_by == "training"
    if is_evaluated_here and config.best_metric != "loss" and trained.metric_names is not None:
        if "validation" not in data:
            raise UserError(f"best_metric is {config.best_metric!r}: it needs a validation split")
        names = list(trained.metric_names(data["validation"].rows(np.arange(1))))
        components = components_of(data["validation"])
        names += [component_metric(name, part) for name in names for part in components]
        if config.best_metric not in names and not callbacks.may_add_metrics:
            raise UserError(
                f"best_metric is {config.best_metric!r}, which no evaluation gives."
                + did_you_mean(config.best_metric, names)
            )
    return total


def _largest_batch(config: RunConfig, size: int) -> str:
    """Returns the advice to give the largest valid batch of at most `size` examples.

    It ends in ", or ", and is empty if no such batch is valid.
    """
    # The virtual shards of `exact` are a multiple of the devices.
    parts = (config.exact or current_batch_shards()) * config.microbatches
    largest = size if config.uneven_batch == "pad" else size // parts * parts
    return f"give {option('global_batch_size', largest)}, or " if largest else ""


def _publish_refused_processes(config: RunConfig) -> None:
    """Tells a launcher that asks for it with which fewer processes the job could not continue.

    All processes call it.
    """
    if not progress.wants_refused_processes():
        return
    numbers = range(1, process_group.count())
    reasons = {n: why for n in numbers if (why := _fewer_processes_problem(config, n)) is not None}
    if process_group.is_chief():
        progress.write_refused_processes(reasons)


def _fewer_processes_problem(config: RunConfig, processes: int) -> str | None:
    """Returns why a run cannot continue in its first processes; None if nothing is known."""
    left = [device for device in jax.devices() if device.process_index < processes]
    try:
        with abstract_devices(left):
            shards = make_placement(config).batch_shards
        resolve(config, batch_shards=shards)
        if config.exact is not None:
            check_exact_shards(config.exact, shards)
    except UserError as error:
        return str(error)
    return None


def identity_of(
    config: RunConfig,
    train: TrainingData | None,
    trained: Trainable,
    functions: Mapping[str, CodeRecord],
) -> Identity:
    """Returns the record of what a run computes: configuration, data, shapes, program."""
    base, state = trained.base, trained.abstract_state
    is_compared = config.workdir is not None or config.fork_from is not None
    options = own_code(config) if is_compared else {}
    functions = {**functions, **{f"option {name}": code_record(x) for name, x in options.items()}}
    return Identity(
        config=config_as_json(config),
        dataset={} if train is None else data_fingerprint(train),
        leaves=describe_leaves(state if base is None else base.saved_part(state)),
        optimizer=describe_optimizer(trained.abstract_state.opt_state),
        hyperparameters=trained.initial_hyperparameters,
        lora=LoraRecord() if base is None else LoraRecord(alpha=base.alpha),
        update=trained.optimizer_record if is_compared else OptimizerRecord(),
        functions={use: record.digest for use, record in functions.items()},
        parts={use: record.parts for use, record in functions.items()},
        settings=numeric_settings.of_run(),
        versions=numeric_settings.versions_of_run(),
    )


def check_same_inputs(
    identity: Identity, train: TrainingData | None, data: Mapping[str, Dataset]
) -> None:
    """Raises `UserError` if the processes of a job have different inputs."""
    if process_group.count() == 1:
        return
    inputs = source_digests() | dataclasses.asdict(identity)
    inputs["config"].pop("data_dir")  # the path of the data may differ, their content may not
    # Compared as source files, and at the rendezvous; Keras may be imported in one process alone.
    del inputs["functions"], inputs["parts"], inputs["versions"]
    inputs |= numeric_settings.settings()  # a script may have changed them since the rendezvous
    by_split = {split: data_fingerprint(dataset) for split, dataset in data.items()}
    by_split |= {} if train is None else {"train": data_fingerprint(train)}
    dataset = inputs.pop("dataset")
    process_group.agree("", inputs)  # first, because data may depend on options
    process_group.agree("", {"dataset": dataset, "data": by_split}, SAME_DATA)


# -- Garbage collections that do not visit the long-lived objects of a run again -------------------

_OF_PYTHON = 1_000  # CPython 3.12 itself excludes 375 objects


class LongLivedObjects:
    """Excludes from later garbage collections what survives the first full one among the steps.

    A step creates a Python object for each array of the state. With thousands of arrays, that
    starts a full collection every few dozen steps. Each visits all modules, programs and
    experiments of the process, which takes a tenth of the time of a step of 2,000 arrays.

    This is a context manager. Once all open ones have ended, collections visit all objects again.
    """

    _open: ClassVar[set["LongLivedObjects"]] = set()  # after their first steps
    _excludes: ClassVar[bool] = False  # one of them has excluded objects
    _excluded_before: ClassVar[bool] = False  # by the run command or the user: these stay excluded

    def __init__(self) -> None:
        self._waits = False

    def begin(self) -> None:
        """Waits for a full collection; call it when the first step has been dispatched.

        Objects that `gc.freeze` excludes are not freed if they are in a reference cycle. Therefore
        it is called after the step has been traced, which leaves cycles, and directly after a
        collection.
        """
        self._open.add(self)
        self._waits = True
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, info: Mapping[str, Any]) -> None:
        """Receives the beginning and the end of each collection."""
        if self._waits and phase == "stop" and info["generation"] == 2:
            self._waits = False
            if not self._excludes:  # here, because the count visits all excluded objects
                LongLivedObjects._excluded_before = gc.get_freeze_count() > _OF_PYTHON
                LongLivedObjects._excludes = True
            gc.freeze()
            if self not in self._open:  # it has ended while another thread collected
                self._include_again()

    def _include_again(self) -> None:
        if self._excludes and not self._open:
            LongLivedObjects._excludes = False
            if not self._excluded_before:
                gc.unfreeze()

    def __enter__(self) -> "LongLivedObjects":
        return self

    def __exit__(self, *_: object) -> None:
        if self in self._open:
            gc.callbacks.remove(self._collected)
            self._open.remove(self)
            self._include_again()


# -- The session of a run: its inputs, logs and checkpoints ----------------------------------------


@dataclass
class RunSession:
    """Inputs, logs and checkpoints of one `fit` or one `Loop`.

    The exit stack that `open` receives closes its files.
    """

    config: RunConfig
    train: TrainingData | None
    validation: Dataset | None
    test: Dataset | None
    schedule: Schedule
    identity: Identity
    logger: RunLogger
    checkpoints: Checkpoints | None
    snapshots: "Snapshots | None"
    signals: StopSignals
    epochs: Epochs
    callbacks: CallbackRunner
    base: BaseModel | None = None
    stream_progress: StreamProgress = field(default_factory=StreamProgress)
    long_lived: LongLivedObjects = field(default_factory=LongLivedObjects)
    is_new: bool = True
    """Whether this start continues no run. Lines in the workdir then belong to other runs."""
    earlier: Identity | None = None
    """The identity of the run that saved the checkpoint of this start; None without one."""
    start_is_evaluated: bool = True
    """Whether the checkpoint of this start was saved after the evaluation of its step."""
    from_snapshot: bool = False
    """Whether the state of this start comes from a snapshot, and is not on disk."""
    in_memory: int = 0
    """The step of the newest snapshot of this start that all processes have."""

    @classmethod
    def open(
        cls,
        stack: contextlib.ExitStack,
        config: RunConfig,
        splits: Mapping[str, Any],
        trained: Trainable,
        terminal: Terminal,
        clock: Callable[[], float],
        callbacks: CallbackRunner,
        trackers: Sequence[Tracker] = (),
        functions: Mapping[str, CodeRecord] | None = None,
    ) -> "RunSession":
        """Checks the inputs of a run and opens its files.

        Args:
          stack: Closes the files.
          splits: Datasets or arrays by name: "train", "validation" and "test".
          trained: Gives the abstract state (shapes and dtypes) and its shardings.
          clock: Returns seconds, for `checkpoint_every_seconds`.
          callbacks: The callbacks of the trainer or loop.
          trackers: The user's own trackers.
          functions: Records of the user's functions by their use.

        Raises:
          UserError: If an input is wrong, or the processes have different ones.
        """
        stack.enter_context(failures.work_in_progress(failures.TRAINING))
        given = {n: x for n, x in splits.items() if x is not None}
        train = training_data(given.pop("train"), config) if "train" in given else None
        if isinstance(train, ShardedStream):
            stack.callback(train.close)
        data = {name: run_dataset(x, config, f"{name} data") for name, x in given.items()}
        total = check_inputs(config, train, data, trained, callbacks)
        if process_group.count() > 1:
            _publish_refused_processes(config)
        if config.evaluated_by == "evaluator":
            data.pop("validation", None)
        identity = identity_of(config, train, trained, functions or {})
        # Checked before anything is written: processes with different inputs would compute wrong
        # numbers, or hang.
        check_same_inputs(identity, train, data)
        files = checkpoints = snapshots = None
        signals = StopSignals()
        if config.workdir is not None or process_group.count() > 1 or is_interactive():
            # A script in a single process without a workdir can neither save nor continue, so
            # Ctrl-C keeps its usual meaning.
            stack.enter_context(signals)
        if (workdir := config.workdir) is not None:
            check_can_be_saved(trained.abstract_state)
            if process_group.is_chief():
                files = RunFiles(workdir, report=terminal.line)
                stack.enter_context(contextlib.closing(files))
            process_group.barrier()  # the folder exists, and this run has locked it
            if not is_url(workdir):  # objects of a bucket have no owner who could be checked
                requests = signals.requests = Requests(
                    folder=files.local if files else None,
                    start=files.start if files else "",
                    warn=terminal.warning,
                    job=(job := process_group.current()),
                    name=process_group.new_sequence().name if job else "",
                )
                listening = Thread(target=requests.listen, name="requests", daemon=True)
                listening.start()
                stack.callback(listening.join)
                stack.callback(requests.ended.set)
            check_lock = files.check_lock if files else lambda: None
            checkpoints = open_checkpoints(config, workdir, check_lock)
            stack.callback(checkpoints.close)
            if config.snapshot_every_steps is not None:
                snapshots = open_snapshots(workdir, trained, terminal.warning)
                stack.callback(snapshots.close)
        kept = open_trackers(config, trackers, files, terminal.warning)
        stack.callback(kept.close)
        datasets = {"train": train, **data}
        skipped = {n: len(skipped_of(x)) for n, x in datasets.items() if isinstance(x, Dataset)}
        job = None if strategy(config.strategy).is_asynchronous else process_group.current()
        logger = RunLogger(terminal, files, config, skipped, kept, job)
        if logger.slowness is not None:
            stack.callback(logger.slowness.close)
        # Of what follows: the initialization or a restore, compilations, steps and evaluations.
        stack.push(
            lambda _, error, __: (
                explain_memory(error, config, trained, train, logger) if error else None
            )
        )
        rate = known_rate(config, trained.abstract_state.opt_state)
        size = examples_per_epoch(train)
        run = cls(
            config=config,
            train=train,
            validation=data.get("validation"),
            test=data.get("test"),
            schedule=Schedule(
                config,
                total,
                size,
                evaluates="validation" in data,
                saves=checkpoints is not None,
                clock=clock,
                stops_at_epochs=callbacks.has(CallbackEvent.EPOCH_END),
                kind=trained.kind,
            ),
            identity=identity,
            logger=logger,
            checkpoints=checkpoints,
            snapshots=snapshots,
            signals=signals,
            epochs=Epochs(config, size, logger, rate),
            callbacks=callbacks,
            base=trained.base,
        )
        stack.enter_context(run.long_lived)
        stack.enter_context(failures.watch_failures(run.log_failure_elsewhere))
        return run

    def check_placed(self, state: TrainState, trained: Trainable, when: str) -> None:
        """Raises `UserError` if a leaf of the state does not have the sharding of its rule."""
        if self.config.jit:  # without jit, arrays stay where they were computed
            check_placed(state, trained.shardings, when)

    def after_first_step(self) -> None:
        """Prepares what later steps need, while the first one runs."""
        self.long_lived.begin()
        if self.checkpoints is not None:
            self.checkpoints.get_ready()

    def add_function(self, use: str, function: Callable[..., Any]) -> None:
        """Adds a function of the user to the identity of the run, and prints whether it changed.

        Args:
          use: The use of the function, for the message.
          function: A function that is known only after the state was restored.
        """
        record, here = code_record(function), self.identity
        added = dataclasses.replace(here, functions={use: record.digest}, parts={use: record.parts})
        for change in changed_functions(self.earlier, added) if self.earlier else ():
            self.logger.terminal.line(f"changed since: {change}")
        functions, parts = {**here.functions, **added.functions}, {**here.parts, **added.parts}
        self.identity = dataclasses.replace(here, functions=functions, parts=parts)

    def name_unsaved_evaluation(self, first: int, *, evaluates: bool) -> None:
        """Prints the first step that is evaluated and not saved, so that it is never the best.

        `first` is the step from which this start continues.
        """
        step = self.schedule.unsaved_evaluation() if evaluates else None
        if step is not None and first < self.schedule.total:
            self.logger.terminal.line(
                "the best checkpoint is the best of the steps that are evaluated and saved; step "
                f"{step} is evaluated and not saved: to save all, give both the same cadence"
            )

    def continue_from(self, earlier: Identity) -> None:
        """Continues the trajectory of an earlier start, and keeps the batches that it left out."""
        kept = all_skipped(earlier, self.identity)
        self.config = self.logger.config = dataclasses.replace(self.config, skip_steps=kept)
        config = {**self.identity.config, "skip_steps": list(kept)}
        trajectories = earlier.trajectories
        self.identity = dataclasses.replace(self.identity, config=config, trajectories=trajectories)
        if self.checkpoints is not None:
            self.checkpoints.complete_retention()

    def branch(self, after: int) -> None:
        """Begins a trajectory with the states after a step; -1 if this start continues nothing."""
        new = process_group.broadcast(self.identity.branched(after))
        self.identity = dataclasses.replace(self.identity, trajectories=new)

    @property
    def train_data(self) -> TrainingData:
        """The training data; raises `UserError` if the `Loop` has none."""
        if self.train is None:
            raise UserError("batches() needs a training dataset: call start(init, train=...)")
        return self.train

    @property
    def train_dataset(self) -> Dataset:
        """The training data of a run whose options do not allow streams (see `training_data`)."""
        data = self.train_data
        assert not isinstance(data, ShardedStream)
        return data

    @property
    def eval_batch_size(self) -> int:
        """The batch size of evaluations; by default the batch size of the training."""
        return self.config.eval_batch_size or self.config.resolved_batch_size

    def missed_evaluation(self, step: int) -> bool:
        """Returns whether the evaluation of the step from which the run resumes is missing."""
        if not step or self.config.workdir is None:
            return False
        # `checkpoint_every_seconds` may have triggered a save at that step. No step that is saved
        # has a snapshot.
        by_clock = self.config.checkpoint_every_seconds is not None and not self.from_snapshot
        saved = self.schedule.saves_by_count(step) or by_clock
        written = self.logger.earlier_metrics(Split.EVAL, step)  # in all processes
        # Also if it is written: an earlier start may have failed before the next save, and the
        # callbacks of the checkpoint have not seen the evaluation.
        missed = not written or not self.start_is_evaluated
        return missed and self.schedule.should_evaluate(step, saved=saved)

    def check_finite_loss(self, split: Split, step: int, metrics: Metrics) -> None:
        """Raises `NonFiniteError` if the loss of an evaluation is NaN or infinite."""
        if not math.isfinite(metrics["loss"]):
            raise NonFiniteError(
                f"step {step}: the {split} loss is {metrics['loss']} (an example or the model's "
                "answer to it is not finite, or no example has a weight above 0)"
            )

    # -- saving --------------------------------------------------------------------------------

    @property
    def has_saved(self) -> bool:
        """Whether a later start finds a checkpoint or a snapshot of this run."""
        at_start = self.checkpoints is not None and self.checkpoints.holds(0)
        return at_start or max(self.saved_step, self.in_memory) > 0

    def rewind(self, error: NonFiniteError) -> None:
        """Raises `Rewound` if the option asks for it after a step that has diverged."""
        times, log = self.logger.times, self.logger.terminal.warning
        earlier = process_group.broadcast(times.rewinds)
        if (rewound := rewind(error, self.config, earlier, log)) is not None:
            times.end("rewound", str(error), error.step, rewound.skip_steps)
            raise rewound from error

    def save(self, state: TrainState, step: int, metrics: Metrics | None) -> None:
        """Starts to save the state after `step`, and calls the callbacks of the checkpoint.

        `metrics` are the metrics of its evaluation; None if there was none. Without a workdir it
        does nothing.
        """
        if self.checkpoints is None:
            return
        with progress.phase(progress.Phase.SAVE, step):
            if self.logger.files:
                self.logger.files.check_lock()
            self.checkpoints.save(
                state if self.base is None else self.base.saved_part(state),
                step,
                self.identity,
                metrics,
                stopped=self.callbacks.stop_requested,
                epoch=self.epochs.to_json(),
                callbacks=self.callbacks.states.to_json(),
                positions=self.stream_progress.at(step),
                wait_for_files=self.logger.trackers.flush(),
            )
        progress.saved(max(self.saved_step, self.in_memory))
        self.schedule.saved()
        self.schedule.kept_at = step
        self.logger.log_save(step, self.saved_step)
        self.callbacks(CallbackEvent.CHECKPOINT, step, FrozenMetrics(metrics or {}))

    def take_snapshot(self, state: TrainState, step: int, metrics: Metrics | None) -> None:
        """Takes a snapshot of the state after `step`; `metrics` are as for `save`."""
        assert self.snapshots is not None
        with progress.phase(progress.Phase.SAVE, step):
            self.snapshots.take(
                state if self.base is None else self.base.saved_part(state),
                step,
                self.identity,
                metrics,
                epoch=self.epochs.to_json(),
                callbacks=self.callbacks.states.to_json(),
                positions=self.stream_progress.at(step),
                saved=self.saved_step,
            )
            self.in_memory = self.snapshots.step
        progress.saved(max(self.saved_step, self.in_memory))
        self.logger.times.log_snapshot(step)
        self.schedule.kept_at = step
        if self.schedule.measures_snapshots:
            seconds = self.logger.timer.seconds
            if (cadence := self.snapshots.choose_cadence(step, seconds)) is not None:
                self.schedule.snapshot_every = cadence.steps
                self.logger.terminal.line(str(cadence))

    def wait_for_save(self) -> None:
        """Waits until the save in progress is complete; raises its error."""
        if self.checkpoints is not None:
            with progress.phase(progress.Phase.SAVE):
                self.checkpoints.wait()
            progress.saved(max(self.saved_step, self.in_memory))

    def finish(self, step: int, evaluate: Callable[[Dataset], Metrics]) -> Metrics:
        """Evaluates the test split, unless an earlier start has done so, and logs the end.

        Returns the metrics of the test split, which `evaluate` computes; none without one.
        """
        self.wait_for_save()  # if it has failed, the run must not be logged as finished
        logger = self.logger
        if self.test is not None and not logger.earlier_metrics(Split.TEST, step):
            logger.log_evaluation(Split.TEST, step, evaluate(self.test))
        for split in (Split.TRAIN, Split.EVAL):
            if not logger.latest[split]:  # no step was left: use what an earlier start has written
                logger.earlier_metrics(split, step)
        logger.log_end(Status.FINISHED, step)
        return logger.latest[Split.TEST]

    @contextlib.contextmanager
    def record_outcome(self) -> Iterator[None]:
        """Logs the reason if the run ends before its last step."""
        try:
            # Also entered by `open`, which covers the start. Here a `sys.exit` becomes a failure
            # before its reason is logged.
            with failures.work_in_progress(failures.TRAINING):
                yield
            if self.snapshots is not None:
                self.snapshots.keep = False  # no later start continues from them
        except PreemptedExit as stop:
            # With parameter servers a signal may arrive before anything could be saved.
            saved = self.saved_step > 0 or bool(self.checkpoints and self.checkpoints.holds(0))
            if self.snapshots is not None:
                self.snapshots.keep = False
            self.logger.log_end(Status.PREEMPTED, self.saved_step, stop.signal, saved=saved)
            if stop.signal == signal.SIGINT.name and is_interactive():
                raise Interrupted from None
            raise
        except Rewound:
            self.wait_for_save()
            raise
        except BaseException as error:
            if self.snapshots is not None and isinstance(error, NonFiniteError | UserError):
                self.snapshots.keep = False
            self._log_failure(error)
            raise

    def _log_failure(self, error: BaseException) -> None:
        """Logs the error that ends the run, and waits for the save in progress.

        If the save fails as well, its `StorageError` or `ReplicaError` is raised instead. Only a
        `StateError` is not replaced: by its exit code the launcher decides whether to restart the
        job.
        """
        # The save completes only if all processes wait for it. All of them raise a `StateError`;
        # any other error may have occurred in this process alone.
        all_wait = process_group.count() == 1 or isinstance(error, StateError)
        why = error
        try:
            if not all_wait and self.snapshots is not None:
                self.snapshots.abandon()
            if not all_wait and self.checkpoints is not None:
                self.checkpoints.abandon()
            elif isinstance(error, (Exception, KeyboardInterrupt)):
                self.wait_for_save()
        except (StorageError, ReplicaError) as failed_save:
            if not isinstance(error, StateError):
                why = failed_save
                raise
            self.logger.terminal.warning(f"the pending save has failed: {failed_save}")
        finally:
            at = error.step if isinstance(error, StateError) else None
            self.logger.log_end(Status.FAILED, self.saved_step, failures.reason(why), at=at)

    def log_failure_elsewhere(self, reason: str) -> None:
        """Logs that another process has failed, before this process exits because of it."""
        self.logger.log_end(Status.FAILED, self.saved_step, reason)
        self.logger.trackers.close(timeout=5.0)

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that is known to be complete; 0 without one."""
        return self.checkpoints.saved_step if self.checkpoints else 0

    def should_save_at_start(self, step: int) -> bool:
        """Returns whether to save the state before the first step."""
        if self.checkpoints is None or step != 0:
            return False
        is_due = self.config.checkpoint_at_start or self.schedule.total == 0
        return is_due and not self.checkpoints.holds(0)


# -- The boundary between two steps ----------------------------------------------------------------


def check_best(
    config: RunConfig, metrics: Mapping[str, float], *, first: bool, log: Callable[[str], None]
) -> None:
    """Checks that an evaluation has the metric that selects the best checkpoint.

    Args:
      first: Whether it is the first evaluation since the start.
      log: Receives a line if the default metric, "loss", is missing: no checkpoint is then best.

    Raises:
      UserError: If a metric other than the default is missing.
    """
    best = config.best_metric
    if best in metrics:
        return
    if best != "loss":
        raise UserError(
            f"best_metric is {best!r}, which this evaluation does not give."
            + did_you_mean(best, metrics)
        )
    if config.workdir and config.keep_best and first:
        log(
            "no checkpoint will be kept as the best: best_metric is 'loss', which this "
            f"evaluation does not give ({', '.join(metrics)})"
        )


@dataclass
class Boundary:
    """The boundary between two steps of a run, at which it evaluates, saves and stops.

    `pass_step` has the order; the other methods are its parts. The defaults are those of a `Loop`,
    whose steps are all dispatched by this process.
    """

    run: RunSession
    reader: "MetricsReader"

    def pass_step(self, step: int, due: Due) -> None:
        """Does what is due after a step. The order matters.

        Args:
          step: The last step that was dispatched; the state is the one after it.
          due: What was due when the step had been dispatched.

        Raises:
          PreemptedExit: If a signal asks the run to stop; the state is saved.
        """
        run, schedule, callbacks = self.run, self.run.schedule, self.run.callbacks
        # First: no state is evaluated or saved before its own finite flag is known.
        self.reader.flush()
        evaluates = due.evaluate
        if due.epoch_end:
            written = run.logger.written[Split.EPOCH].get(step, {})
            means = FrozenMetrics({"epoch": run.epochs.completed(step)} | written)
            last, event = step == schedule.total, CallbackEvent.EPOCH_END
            callbacks(event, step, means, evaluates=evaluates, is_last=last)
        if callbacks.stop_requested:  # by a callback, after `due` was computed
            schedule.total = step
            evaluates = schedule.should_evaluate(step, saved=due.save)
        # Evaluation comes before the save, which records the metrics of the state.
        metrics = self.evaluate(step, is_due=evaluates)
        # During the evaluation, a callback or a signal may have asked to stop.
        if callbacks.stop_requested:
            schedule.total = step
        preempted = run.signals.stop_requested()
        asked = [*run.signals.requests.pending]  # one that comes later waits for the next step
        is_asked = any(request.action == Action.SAVE for request in asked)
        if preempted or due.save or is_asked or schedule.should_save(step):
            self.save(step, metrics)
        elif due.snapshot and step != schedule.total:
            self.take_snapshot(step, metrics)
        if preempted:
            run.wait_for_save()  # a checkpoint is reported only once it is complete
        if asked:
            self.answer(step, asked, "the run stops" if preempted else "")
        last = step == schedule.total
        if last:
            self.reader.hash_last(step)
        if preempted or last:
            self.report()
        if preempted:
            run.signals.stop_if_received()
        if not last:
            run.logger.timer.restart(step)

    def answer(self, step: int, asked: Sequence[Request], stops: str) -> None:
        """Does what the owner of the run asks for after a step, which is saved if that is asked.

        Nothing of it changes what the run computes. All processes call it. `stops` says that the
        run stops, if it does.
        """
        run, requests = self.run, self.run.signals.requests
        if not stops and step == run.schedule.total:
            stops = "it was the last step"
        for request in asked:
            requests.pending.remove(request)
            run.logger.terminal.line(f"step {step}: {CONTROL} asks for: {request.action}")
            state, text = State.DONE, f"step {step:,}: {stops}"
            if request.action in (Action.SAVE, Action.STOP):
                run.wait_for_save()  # all processes have to, before a checkpoint is complete
                saved = f"step {step:,}: saved {run.config.workdir}/checkpoints/{step}"
                text = f"{saved}; {stops}" if stops else saved
            elif stops:
                state = State.REFUSED
            elif request.action == Action.EVALUATE:
                state, text = self.evaluate_asked(step)
            else:
                state, text = self.profile_asked(step, request)
            requests.answer(request, state, text)

    def evaluate_asked(self, step: int) -> tuple[State, str]:
        """Evaluates the state after a step, because the owner of the run asks for it."""
        return State.REFUSED, "the evaluation of a Loop is code of its user"

    def profile_asked(self, step: int, request: Request) -> tuple[State, str]:
        """Starts to profile the steps after a step, because the owner of the run asks for it."""
        return State.REFUSED, "a Loop has no profiler: use jax.profiler in its code"

    def evaluate(self, step: int, *, is_due: bool) -> Metrics | None:
        """Returns the metrics of the evaluation of a step; None if there is none."""
        raise NotImplementedError

    def save(self, step: int, metrics: Metrics | None) -> None:
        """Saves the state after a step, with the metrics of its evaluation."""
        raise NotImplementedError

    def take_snapshot(self, step: int, metrics: Metrics | None) -> None:
        """Takes a snapshot of the state after a step, with the metrics of its evaluation."""
        raise NotImplementedError

    def report(self) -> None:
        """Prints a summary after the last step."""
