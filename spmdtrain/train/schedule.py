"""The schedule of a run: the steps that are dispatched together, and what is due after a step."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError
from spmdtrain.step.train_step import Dispatch

_LOOK_AHEAD = 20_000  # steps whose cadences are compared
_CLOCK_INTERVAL = 1.0  # seconds between two reads of process 0's clock by several processes


@dataclass(frozen=True)
class Due:
    """The actions due after a step, the same in all processes; false if there are none."""

    save: bool
    evaluate: bool
    epoch_end: bool
    preempted: bool
    last: bool

    def __bool__(self) -> bool:
        return any((self.save, self.evaluate, self.epoch_end, self.preempted, self.last))


_NOTHING = Due(save=False, evaluate=False, epoch_end=False, preempted=False, last=False)


class Schedule:
    """The cadence of a run: after which steps to evaluate and save, and which to dispatch together.

    Args:
      total: Number of steps of the whole run.
      num_examples: Number of training examples; 0 if the run has no dataset, and so no epochs.
      evaluates: Whether there is a validation split.
      saves: Whether there is a workdir.
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
    ) -> None:
        self.total = total
        """Number of steps of the run; fewer once a callback has asked to stop."""
        self.stops_at_epochs = False
        """Whether a callback reads the state after each epoch."""
        self._dispatch = Dispatch()
        self._config, self._num_examples = config, num_examples
        self._evaluates, self._saves, self._clock = evaluates, saves, clock
        self._saved_at = clock()
        self._next_clock_step = 0  # the step at which to read process 0's clock again
        self._last_clock = 0.0, 0  # when it was read last, and at which step

    # -- dispatches ----------------------------------------------------------------------------

    def dispatches(self, first: int) -> Iterator[range]:
        """Yields the steps after `first`, the step of the state, grouped as they are dispatched.

        A group ends where something is due. Without a counted loop (see `Dispatch`) it has either
        all steps of a dispatch or one, because each other number would need a separate program.
        """
        size, step, end = self._dispatch.steps, first, first
        while step < self.total:
            if size == 1:
                step += 1
                yield range(step, step + 1)
                continue
            # `end` is the last step that one dispatch from here could make.
            while end < min(step + size, self.total) and (end == step or not self._splits(end)):
                end += 1
            count = end - step if self._dispatch.is_counted or end == step + size else 1
            yield range(step + 1, step + count + 1)
            step += count

    def set_dispatch(self, dispatch: Dispatch) -> None:
        """Sets how steps are dispatched.

        Raises `UserError` if no dispatch would have `steps_per_dispatch` steps. Dispatches of a
        counted loop may always have fewer.
        """
        self._dispatch, size = dispatch, dispatch.steps
        if size == 1 or self.total < size or dispatch.is_counted:
            return
        if all(len(steps) == 1 for steps in itertools.islice(self.dispatches(0), 4 * size)):
            raise UserError(
                f"steps_per_dispatch is {size}, and there are never so many steps without an "
                "evaluation, a checkpoint, a profile, a hash of the state (log_hash_every), a "
                "check of the devices (sentinel_every) or an end of an epoch that a callback "
                "reads: make one of these rarer, or steps_per_dispatch smaller"
            )

    def _splits(self, step: int) -> bool:
        """Returns whether a dispatch must end with `step`."""
        profiled = self._config.profile_range()
        around = profiled is not None and step in (profiled[0] - 1, profiled[1])
        saved = self._saves and self.saves_by_count(step)
        hashed = self._config.hashes_at(step, self.total)
        checked = any(map(self._config.checks_devices_at, (step, step + 1)))
        # An epoch is timed when its last dispatch is read: by default that ends with it.
        is_default = self._config.steps_per_dispatch is None
        timed = is_default and self._config.ends_epoch(step, self._num_examples)
        due = saved or around or hashed or checked or timed or self.ends_epoch(step)
        return due or self.should_evaluate(step, saved=saved)

    # -- what is due ---------------------------------------------------------------------------

    def due(self, step: int, *, preempted: bool) -> Due:
        """Returns what is due after a step. All processes call it after the same steps.

        Args:
          step: The step that was dispatched last.
          preempted: Whether a signal asks the run to stop; the same in all processes.
        """
        save = self.should_save(step)
        evaluate, epoch_end = self.should_evaluate(step, saved=save), self.ends_epoch(step)
        last = step == self.total
        if not (save or evaluate or epoch_end or preempted or last):
            return _NOTHING
        return Due(
            save=save, evaluate=evaluate, epoch_end=epoch_end, preempted=preempted, last=last
        )

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
        return self.stops_at_epochs and self._config.ends_epoch(step, self._num_examples)

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
