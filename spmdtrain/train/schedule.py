"""The schedule of a run, and the means of its epochs."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError
from spmdtrain.record.run_files import Split
from spmdtrain.step import hyperparameters
from spmdtrain.step.dispatch import Dispatch
from spmdtrain.step.divergence import DivergenceWatch
from spmdtrain.step.hyperparameters import scales_updates
from spmdtrain.step.metrics import Combination, Means
from spmdtrain.train.run_logger import Metrics, RunLogger

# -- The schedule of a run: the steps that are dispatched together, and what is due after a step

_LOOK_AHEAD = 20_000  # steps whose cadences are compared
FIRST_SNAPSHOTS = 10
"""Steps between the first snapshots, whose cost decides about the others (auto)."""
_CLOCK_INTERVAL = 1.0  # seconds between two reads of process 0's clock by several processes


@dataclass(frozen=True)
class Due:
    """The actions due after a step, the same in all processes.

    There may be none: at the last step, or if a signal asks the run to stop.
    """

    save: bool = False
    evaluate: bool = False
    epoch_end: bool = False
    snapshot: bool = False


class Schedule:
    """The cadence of a run: after which steps to evaluate and save, and which to dispatch together.

    Args:
      total: Number of steps of the whole run.
      num_examples: Number of training examples; 0 if the run has no dataset, and so no epochs.
      evaluates: Whether there is a validation split.
      saves: Whether there is a workdir.
      stops_at_epochs: Whether a callback reads the state after each epoch.
      kind: Returns the kind of a step, which has a program of its own (see `StepTransform`).
    """

    def __init__(
        self,
        config: RunConfig,
        total: int,
        num_examples: int,
        *,
        evaluates: bool,
        saves: bool,
        clock: Callable[[], float],
        stops_at_epochs: bool = False,
        kind: Callable[[int], str] = lambda step: "",
    ) -> None:
        self.total = total
        """Number of steps of the run; fewer once a callback has asked to stop."""
        self.dispatch, self.kind = Dispatch(), kind
        self._stops_at_epochs = stops_at_epochs
        self._config, self._num_examples = config, num_examples
        self._evaluates, self._saves, self._clock = evaluates, saves, clock
        self._saved_at = clock()
        every = config.snapshot_every_steps
        self.measures_snapshots = every == "auto"
        self.snapshot_every = every if isinstance(every, int) else None
        """Steps between two snapshots; None without them. `auto` changes it."""
        if self.measures_snapshots:
            self.snapshot_every = FIRST_SNAPSHOTS
        self.kept_at = 0
        """The last step whose state was saved or kept in a snapshot."""
        self._next_clock_step = 0  # the step at which to read process 0's clock again
        self._last_clock = 0.0, 0  # when it was read last, and at which step

    # -- dispatches ----------------------------------------------------------------------------

    def dispatches(self, first: int) -> Iterator[range]:
        """Yields the steps after `first`, the step of the state, grouped as they are dispatched.

        A group ends where something is due. Without a counted loop (see `Dispatch`) it has either
        all steps of a dispatch or one, because each other number would need a separate program.
        """
        size, step, end = self.dispatch.steps, first, first
        while step < self.total:
            if size == 1:
                step += 1
                yield range(step, step + 1)
                continue
            # `end` is the last step that one dispatch from here could make.
            while end < min(step + size, self.total) and (end == step or not self._splits(end)):
                end += 1
            count = end - step if self.dispatch.is_counted or end == step + size else 1
            yield range(step + 1, step + count + 1)
            step += count

    def set_dispatch(self, dispatch: Dispatch) -> None:
        """Sets how steps are dispatched.

        Raises `UserError` if no dispatch would have `steps_per_dispatch` steps. Dispatches of a
        counted loop may always have fewer.
        """
        self.dispatch, size = dispatch, dispatch.steps
        if size == 1 or self.total < size or dispatch.is_counted:
            return
        if all(len(steps) == 1 for steps in itertools.islice(self.dispatches(0), 4 * size)):
            raise UserError(
                f"steps_per_dispatch is {size}, and there are never so many steps without an "
                "evaluation, a checkpoint, a snapshot, a profile, a hash of the state "
                "(log_hash_every), a check of the devices (sentinel_every) or an end of an epoch "
                "that a callback reads: make one of these rarer, or steps_per_dispatch smaller"
            )

    def _splits(self, step: int) -> bool:
        """Returns whether a dispatch must end with `step`."""
        profiled = self._config.profile_range()
        around = profiled is not None and step in (profiled[0] - 1, profiled[1])
        saved = self._saves and self.saves_by_count(step)
        hashed = self._config.hashes_at(step, self.total)
        checked = any(map(self._config.checks_devices_at, (step, step + 1)))
        # Where other ends of dispatches would be another program, the first step of a dispatch is
        # watched, whichever of its steps is due.
        watched = self.dispatch.is_counted and self._config.watches_at(step + 1)
        # An epoch is timed when its last dispatch is read: by default that ends with it.
        is_default = self._config.steps_per_dispatch is None
        timed = is_default and self._config.ends_epoch(step, self._num_examples)
        changes = self.kind(step) != self.kind(step + 1)
        # A measured number changes, and the readers of batches know the dispatches beforehand: then
        # a snapshot is taken at the end of one.
        every = None if self.measures_snapshots else self.snapshot_every
        kept = every is not None and step % every == 0
        due = saved or around or hashed or checked or watched or timed or changes
        return due or kept or self.ends_epoch(step) or self.should_evaluate(step, saved=saved)

    # -- what is due ---------------------------------------------------------------------------

    def due(self, step: int, *, preempted: bool, asked: bool = False) -> Due | None:
        """Returns what is due after a step; None if the next step follows at once.

        All processes call it after the same steps.

        Args:
          step: The step that was dispatched last.
          preempted: Whether a signal asks the run to stop; the same in all processes.
          asked: Whether there are requests of the run's owner; the same in all processes.
        """
        save = self.should_save(step)
        evaluate, epoch_end = self.should_evaluate(step, saved=save), self.ends_epoch(step)
        every, snapshot = self.snapshot_every, False
        if every is not None:
            waits = step - self.kept_at < every if self.measures_snapshots else step % every
            snapshot = not waits
        asked = asked or preempted or step == self.total
        if not (save or evaluate or epoch_end or snapshot or asked):
            return None
        return Due(save=save, evaluate=evaluate, epoch_end=epoch_end, snapshot=snapshot)

    def is_due(self, step: int) -> bool:
        """Returns whether something is due after a step, apart from saves by the clock."""
        saved = self._saves and self.saves_by_count(step)
        last = step == self.total
        return last or self.ends_epoch(step) or saved or self.should_evaluate(step, saved=saved)

    def should_evaluate(self, step: int, *, saved: bool) -> bool:
        """Returns whether to evaluate the validation split after `step`.

        `saved` says whether a checkpoint is saved after it.
        """
        if not self._evaluates:
            return False
        return self.is_eval_step(step) or (saved and self._config.eval_at_checkpoints)

    def is_eval_step(self, step: int) -> bool:
        """Returns whether `step` is an evaluation step, if there is anything to evaluate."""
        return step == self.total or self._config.evaluates_at(step, self._num_examples)

    def ends_epoch(self, step: int) -> bool:
        """Returns whether callbacks of `epoch_end` are called after `step`."""
        return self._stops_at_epochs and self._config.ends_epoch(step, self._num_examples)

    def should_save(self, step: int) -> bool:
        """Returns whether to save after `step`, by count or by time.

        All processes call it after the same steps, because process 0's clock decides.
        """
        if not self._saves:
            return False
        by_time = self._time_to_save(step)  # first: all processes have to ask
        return by_time or self.saves_by_count(step)

    def saves_by_count(self, step: int) -> bool:
        """Returns whether to save after `step`, whatever the time."""
        return step == self.total or self._config.saves_at(step, self._num_examples)

    def unsaved_evaluation(self) -> int | None:
        """Returns the first step that is evaluated and not saved by count; None if none is found.

        The state of such a step is never among the best checkpoints.
        """
        if not (self._saves and self._config.keep_best):
            return None
        for step in range(1, min(self.total, _LOOK_AHEAD) + 1):
            if self.is_eval_step(step) and not self.saves_by_count(step):
                return step
        return None

    def saved(self) -> None:
        """Restarts the clock of `checkpoint_every_seconds`."""
        self._saved_at = self._clock()

    def _time_to_save(self, step: int) -> bool:
        """Returns whether `checkpoint_every_seconds` have passed by process 0's clock.

        Several processes do not broadcast at every step: each time they also agree on the next step
        at which to ask.
        """
        seconds = self._config.checkpoint_every_seconds
        if seconds is None or step < self._next_clock_step:
            return False
        now = self._clock()
        if process_group.count() == 1:
            return now - self._saved_at >= seconds
        last_time, last_step = self._last_clock
        rate = (step - last_step) / max(now - last_time, 1e-3) if last_step else 0.0
        self._last_clock = now, step
        wait = min(_CLOCK_INTERVAL, max(0.0, seconds - (now - self._saved_at)))
        due = process_group.broadcast(now - self._saved_at >= seconds)
        self._next_clock_step = step + process_group.broadcast(max(1, int(rate * wait)))
        return due


# -- Weighted means of the training metrics over an epoch, and the history of a run ----------------

PyTree = Any


@dataclass(frozen=True)
class History(Mapping[str, list[float]]):
    """Metrics of a run, oldest first, including the part before a resume.

    As a mapping it is the history of Keras: `history["loss"]`, `history["val_loss"]`.

    Attributes:
      epochs: One dictionary per epoch: "step" and "epoch", the weighted means of the training
        metrics, "learning_rate" if it is known, "seconds", "examples_per_second" and "input_wait".
      evaluations: One dictionary per evaluation of the validation split: "step", "epoch" (the
        number of epochs completed by then) and the metrics.
    """

    epochs: list[dict[str, float]]
    evaluations: list[dict[str, float]]

    def __repr__(self) -> str:
        """Returns what it has, and not every value: notebooks store it with each result."""
        names, lines = ", ".join(self) or "no metrics", (len(self.epochs), len(self.evaluations))
        return f"History({lines[0]} epochs, {lines[1]} evaluations: {names})"

    def __getitem__(self, name: str) -> list[float]:
        """Returns the values of a metric as Keras names it.

        Args:
          name: A metric of `epochs`, such as "loss", for the value of each epoch; after `val_`, one
            of `evaluations` for the value of each evaluation.

        Raises:
          KeyError: If no line has the metric.
        """
        if name not in {*self}:
            raise KeyError(f"{name!r} is none of {', '.join(self)}")
        metric = name.removeprefix("val_")
        evaluated = [line[metric] for line in self.evaluations if metric in line]
        return [line[name] for line in self.epochs if name in line] or evaluated

    def __iter__(self) -> Iterator[str]:
        places = {"step", "epoch"}
        of_epochs = [name for line in self.epochs for name in line if name not in places]
        others = [name for line in self.evaluations for name in line if name not in places]
        return iter(dict.fromkeys([*of_epochs, *(f"val_{name}" for name in others)]))

    def __len__(self) -> int:
        return len([*iter(self)])


@dataclass(frozen=True)
class FitResult:
    """Result of a fit: the last step, the last metrics of each split, and the history."""

    step: int
    train: Metrics
    validation: Metrics
    test: Metrics
    history: History

    def _repr_html_(self) -> str:
        """Returns the last metrics and the curve of the loss, for a notebook."""
        from spmdtrain.document.notebook import run_html

        last = {"train": self.train, "eval": self.validation, "test": self.test}
        lines = {"epoch": self.history.epochs, "eval": self.history.evaluations}
        curves = {name: [(int(x["step"]), x) for x in of] for name, of in lines.items()}
        return run_html(f"step {self.step:,}", last, curves)


@dataclass
class EpochSums:
    """The steps of the current epoch whose outputs were read.

    Attributes:
      steps: Number of steps.
      seconds: Time spent on them.
      names: Names of their metrics.
      sums: Weighted sums of the metrics and their weights in float64, (names, 2).
    """

    steps: int = 0
    seconds: float = 0.0
    names: Sequence[str] = ()
    sums: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 2)))


class Epochs:
    """Sums the training metrics of each epoch, and writes their means at its end.

    Args:
      num_examples: Number of training examples; 0 if the run has no dataset, and so no epochs.
      fixed_rate: The learning rate of all steps, if it is known.
    """

    def __init__(
        self, config: RunConfig, num_examples: int, logger: RunLogger, fixed_rate: float | None
    ) -> None:
        self._config, self._size, self._logger = config, num_examples, logger
        self.fixed_rate = fixed_rate
        self._counted = 0.0  # seconds of training that were added to the sums of an epoch
        self._before = 0.0, 0.0  # seconds of training and of input waits before the epoch
        self._epoch = range(0)  # its steps
        self.sums = EpochSums()
        self.watch: DivergenceWatch | None = None
        """Finds steps that diverge; None if only NaN and infinity count, or the step finds them."""
        if config.divergence_sigma is not None and config.on_divergence != "skip":
            self.watch = DivergenceWatch(config.divergence_sigma, config.divergence_window)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continues from the sums that `to_json` returned; from none if `saved` is empty."""
        if saved:
            sums = saved["sums"]
            values = np.array(list(sums.values()), np.float64).reshape(-1, 2)
            self.sums = EpochSums(saved["steps"], saved["seconds"], list(sums), values)
            if self.watch is not None:
                self.watch.restore(saved.get("watched", {}))

    def to_json(self) -> dict[str, Any]:
        """Returns the sums of the epoch as JSON, in which floats keep all their bits."""
        self._count_seconds()
        epoch = self.sums
        sums = {name: pair.tolist() for name, pair in zip(epoch.names, epoch.sums, strict=True)}
        watched = {} if self.watch is None else {"watched": self.watch.to_json()}
        return {"steps": epoch.steps, "seconds": epoch.seconds, "sums": sums, **watched}

    def completed(self, step: int) -> int:
        """Returns the number of epochs completed after a step."""
        return self._config.epochs_at(step, self._size)

    def ends_with(self, step: int) -> bool:
        """Returns whether an epoch ends with a step; steps must be passed in order."""
        if step >= self._epoch.stop:
            self._epoch = self._config.epoch_of(step, self._size)
        return step == self._epoch.stop - 1

    def count(
        self,
        steps: Sequence[int],
        names: Sequence[str],
        sums: np.ndarray,
        rate: jax.Array | None,
        combined: Mapping[str, Combination] | None = None,
    ) -> None:
        """Adds the metrics of steps of one epoch, and writes the means if it ends with the last.

        Steps are counted in order. The means of an epoch are written only if all its steps were
        counted.

        Args:
          sums: Weighted sums of the metrics and their weights, (steps, names, 2).
          rate: The learning rate of the last step, if the step returned it.
          combined: The metrics that are combined from the means of others.
        """
        epoch, config = self.sums, self._config
        if epoch.names != names:  # none yet, or the objective has changed since the save
            epoch = self.sums = EpochSums(0, epoch.seconds, names, np.zeros((len(names), 2)))
        epoch.steps += len(steps)
        if len(steps) == 1:
            epoch.sums += sums[0]
        else:  # in the same order, so that the dispatch does not change last bits
            epoch.sums = np.add.reduce(np.concatenate([epoch.sums[None], sums]), axis=0)
        step = steps[-1]
        if not self.ends_with(step):
            return
        self._count_seconds()
        wait = self._input_wait()
        self.sums = EpochSums()
        if epoch.steps != len(self._epoch):
            return
        used = self.fixed_rate if rate is None else float(rate)
        measured = {} if used is None else {"learning_rate": used}
        measured["seconds"] = epoch.seconds
        if epoch.seconds > 0:
            examples = epoch.steps * (config.global_batch_size or 0)
            measured["examples_per_second"] = examples / epoch.seconds
        if wait is not None:
            measured["input_wait"] = wait
        pairs = dict(zip(epoch.names, epoch.sums, strict=True))
        means = Means(pairs, combined).result(empty=0.0)
        found = {"epoch": self.completed(step)} | means | measured
        self._logger.log_epoch(step, found)

    def _count_seconds(self) -> None:
        now = self._logger.timer.seconds
        self.sums.seconds += now - self._counted
        self._counted = now

    def _input_wait(self) -> float | None:
        """Returns the share of the epoch's time in which the devices waited for batches.

        None if it is not measured. After a resume within the epoch, only the time since then
        counts.
        """
        waits = self._logger.timer.waited
        (seconds, waited), now = self._before, (self._counted, waits or 0.0)
        self._before = now
        if waits is None or now[0] <= seconds:
            return None
        return min((now[1] - waited) / (now[0] - seconds), 1.0)

    def result(self, step: int) -> FitResult:
        """Returns the result of a fit that ends after `step`."""
        latest, written = self._logger.latest, self._logger.written
        history = History(
            [{"step": step} | metrics for step, metrics in sorted(written[Split.EPOCH].items())],
            [
                {"step": step, "epoch": self.completed(step)} | metrics
                for step, metrics in sorted(written[Split.EVAL].items())
            ],
        )
        train, seen, tested = latest[Split.TRAIN], latest[Split.EVAL], latest[Split.TEST]
        return FitResult(step, train, seen, tested, history)


def known_rate(config: RunConfig, opt_state: PyTree) -> float | None:
    """Returns the configured learning rate if the optimizer uses no other one.

    None if the optimizer's state (or its shapes) holds a schedule's count, or a rate or a scale of
    the updates (`optax.contrib.reduce_on_plateau`).
    """
    scaled = scales_updates(opt_state)
    return None if scaled or hyperparameters.injected(opt_state) else config.learning_rate
