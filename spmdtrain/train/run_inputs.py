"""The inputs of a run: checks, and the identity by which a later start recognizes the run."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from spmdtrain.checkpoints.run_identity import (
    Identity,
    LoraRecord,
    describe_leaves,
    describe_optimizer,
)
from spmdtrain.config.run_config import RunConfig, config_as_json, own_code
from spmdtrain.data.datasets import Dataset, skipped_of
from spmdtrain.data.mixture import components_of, mixture_of
from spmdtrain.data.training_data import (
    SAME_DATA,
    TrainingData,
    data_fingerprint,
    examples_per_epoch,
)
from spmdtrain.distributed import numeric_settings, process_group
from spmdtrain.distributed.code_digest import CodeRecord, code_record, source_digests
from spmdtrain.errors import UserError, did_you_mean, option
from spmdtrain.record.storage import is_url
from spmdtrain.sharding.placement import current_batch_shards
from spmdtrain.step.metrics import component_metric
from spmdtrain.step.optimizer import BaseModel
from spmdtrain.step.optimizer_record import OptimizerRecord
from spmdtrain.step.state import TrainState


class Trainable(Protocol):
    """The state that a run trains: its shapes, shardings and hyperparameters."""

    @property
    def abstract_state(self) -> TrainState: ...

    @property
    def shardings(self) -> TrainState: ...

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
    *,
    may_add_metrics: bool = False,
) -> int:
    """Checks that the data of a run fit its configuration; returns the number of steps.

    Args:
      data: Datasets of the other splits: "validation" and "test".
      may_add_metrics: Whether callbacks may add metrics that only the first evaluation shows.

    Raises:
      UserError: If an option needs a workdir, a split or a metric that is missing, or a batch is
        larger than the training data.
    """
    profiled = config.profile_range()
    if config.fork_from and config.init_from and trained.base is None:
        raise UserError(
            f"fork_from is {config.fork_from} and init_from is {config.init_from}: a fork takes "
            "all of a run's state, init_from parameters alone; leave one of the two out"
        )
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
    if profiled and (config.workdir is None or profiled[1] > total):
        raise UserError(
            f"profile_steps is {config.profile_steps}: it needs a workdir ({config.workdir}), and "
            f"no more than the run's {total} steps"
        )
    if config.eval_at_checkpoints and (config.workdir is None or "validation" not in data):
        raise UserError(
            "eval_at_checkpoints needs a workdir for the checkpoints, and a validation split"
        )
    if profiled and is_url(str(config.workdir)):
        raise UserError(f"profile_steps: the profiler writes no trace to {config.workdir}")
    if config.evaluated_by == "evaluator":
        if config.workdir is None:
            raise UserError("evaluated_by is 'evaluator': the evaluator needs a workdir to read")
    elif config.best_metric != "loss" and trained.metric_names is not None:
        if "validation" not in data:
            raise UserError(f"best_metric is {config.best_metric!r}: it needs a validation split")
        names = list(trained.metric_names(data["validation"].rows(np.arange(1))))
        components = components_of(data["validation"])
        names += [component_metric(name, part) for name in names for part in components]
        if config.best_metric not in names and not may_add_metrics:
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


def count_skipped(data: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of bad records that are left out of each dataset, by split."""
    return {split: len(skipped_of(x)) for split, x in data.items() if isinstance(x, Dataset)}


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
    process_group.check_same(inputs)  # first, because data may depend on options
    process_group.check_same({"dataset": dataset, "data": by_split}, SAME_DATA)
