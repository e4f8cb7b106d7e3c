"""Search with Optuna: samples the options of trials and ends trials that are worse than others."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from spmdtrain.errors import UserError
from spmdtrain.optional import import_extra
from spmdtrain.record.storage import one_line
from spmdtrain.sweep.specification import ListedValues, Setting, number_text, readable_name
from spmdtrain.sweep.trials import Trial, TrialFactory, TrialState, unique_name

JOURNAL = "search.journal"
_STUDY = "sweep"
_SEED = 0  # of the sampler, so that the same sweep samples the same trials


class SearchTrials:
    """The trials of an Optuna study: TPE samples them, the median rule prunes them.

    The study is stored in the sweep's folder. Trials that a killed sweep has not ended are run
    first. Only one process may use the folder.

    Args:
      settings: The options to sample.
      direction: Whether a low (`min`) or a high (`max`) value of the metric is better.

    Raises:
      UserError: If Optuna is missing, or the stored study is not valid.
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[Setting],
        factory: TrialFactory,
        total: int,
        direction: Literal["min", "max"],
        metric: str,
    ) -> None:
        self._optuna = import_extra("optuna", "sweep", "searches (--search)")
        self._settings, self._factory, self._metric = settings, factory, metric
        self.total = total
        self.trials: list[Trial] = []
        self._of_study: dict[int, Any] = {}  # trial number to Optuna's trial
        self._judged: dict[int, int] = {}  # trial number to its last step that was judged
        self._study, self._storage = self._open(folder / JOURNAL, direction)
        self._left = self._restore()

    def _open(self, journal: Path, direction: str) -> tuple[Any, Any]:
        optuna = self._optuna
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        journals = import_extra("optuna.storages.journal", "sweep", "searches (--search)")
        _drop_unfinished_write(journal)
        try:
            storage = journals.JournalStorage(journals.JournalFileBackend(str(journal)))
            study = optuna.create_study(
                storage=storage,
                study_name=_STUDY,
                direction="minimize" if direction == "min" else "maximize",
                pruner=optuna.pruners.MedianPruner(),
                load_if_exists=True,
            )
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{journal} cannot be read: {one_line(error)}") from error
        return study, storage

    def _restore(self) -> list[Trial]:
        """Recreates the trials of the study; returns the ones that a killed sweep has not ended."""
        states = self._optuna.trial.TrialState
        known = {
            states.COMPLETE: TrialState.FINISHED,
            states.PRUNED: TrialState.PRUNED,
            states.FAIL: TrialState.FAILED,
        }
        left = []
        for stored in self._study.get_trials(deepcopy=False):
            trial = self._sample(stored.number)
            trial.state = known.get(stored.state, TrialState.WAITING)
            if trial.state is TrialState.WAITING:
                left.append(trial)
            if trial.state is TrialState.FAILED:
                trial.reason = stored.user_attrs.get("reason")
        return left

    def _sample(self, number: int) -> Trial:
        """Returns the trial with a number; options that are stored keep their values."""
        study_id = self._storage.get_study_id_from_name(_STUDY)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        # The sample of a trial depends on its number and on earlier results. With one sampler for
        # all trials, a resumed search would repeat its first samples.
        self._study.sampler = self._optuna.samplers.TPESampler(seed=_SEED + number)
        sampled = self._optuna.trial.Trial(self._study, trial_id)
        values: dict[str, str] = {}
        shown: dict[str, str] = {}
        for setting in self._settings:
            option = setting.option
            if isinstance(setting, ListedValues):
                values[option] = sampled.suggest_categorical(option, setting.values)
                shown[option] = values[option]
                continue
            suggest = sampled.suggest_int if setting.integer else sampled.suggest_float
            kind = int if setting.integer else float
            value = suggest(option, kind(setting.low), kind(setting.high), log=setting.log)
            values[option] = number_text(value, setting.integer)
            shown[option] = values[option] if setting.integer else f"{value:.3g}"
        name = f"{number:03},{readable_name(shown)}"
        trial = self._factory.create(number, values, unique_name(number, name, [name.lower()]))
        self.trials.append(trial)
        self._of_study[number] = sampled
        return trial

    def next_trial(self) -> Trial | None:
        """Returns a trial that a killed sweep has not ended, or a new one; None after the last."""
        if self._left:
            return self._left.pop(0)
        if len(self.trials) >= self.total:
            return None
        return self._sample(self._study.ask().number)

    def should_prune(self, trial: Trial, evaluations: Mapping[int, float]) -> bool:
        """Reports new evaluations to the study; returns whether other trials were better."""
        last = max(evaluations)
        if self._judged.get(trial.number) == last:
            return False
        self._judged[trial.number] = last
        sampled = self._of_study[trial.number]
        reported = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step, value in evaluations.items():
            if step not in reported:
                sampled.report(value, step)
        return bool(sampled.should_prune())

    def record_end(self, trial: Trial, value: float | None) -> None:
        """Stores the result of a trial. A preempted trial stays open, for the next sweep."""
        states = self._optuna.trial.TrialState
        if trial.state is TrialState.FINISHED and value is None:
            trial.state = TrialState.FAILED
            trial.reason = f"it finished without an evaluation of {self._metric!r}"
        if trial.state is TrialState.FAILED:
            self._of_study[trial.number].set_user_attr("reason", trial.reason)
            self._study.tell(trial.number, state=states.FAIL)
        elif trial.state is TrialState.PRUNED:
            self._study.tell(trial.number, state=states.PRUNED)
        elif trial.state is TrialState.FINISHED:
            self._study.tell(trial.number, value)


def _drop_unfinished_write(journal: Path) -> None:
    """Removes an incomplete last line and the lock of Optuna, both left by a killed process."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{journal}.lock")
    with contextlib.suppress(FileNotFoundError), journal.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
