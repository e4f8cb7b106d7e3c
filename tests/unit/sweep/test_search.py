"""The search with Optuna: samples, pruning, and a study that survives the process."""

import sys
from pathlib import Path

import pytest
from helpers import DIGITS

from spmdtrain.sweep.trials import SearchTrials, TrialFactory, TrialState, parse_settings

SETTINGS = parse_settings(["learning_rate=log:1e-4..1e-2", "seed=0..9", "strategy=mirrored,zero"])


def search(folder: Path, total: int = 8) -> SearchTrials:
    factory = TrialFactory(str(DIGITS), [], ["shuffle"], folder, "sweep")
    return SearchTrials(folder, SETTINGS, factory, total, "min", "loss")


def test_a_search_prunes_and_continues_after_a_kill(tmp_path: Path) -> None:
    first = search(tmp_path)
    for number in range(6):
        trial = first.next_trial()
        assert trial is not None and trial.number == number
        assert 1e-4 <= float(trial.values["learning_rate"]) <= 1e-2
        assert 0 <= int(trial.values["seed"]) <= 9
        assert trial.values["strategy"] in ("mirrored", "zero")
        assert trial.name.startswith(f"{number:03},learning_rate=")
        assert not first.should_prune(trial, {10: 6.0 - number})
        trial.state = TrialState.FINISHED
        first.record_end(trial, 0.5 + number)
    bad, open_trial = first.next_trial(), first.next_trial()
    assert bad is not None and open_trial is not None
    assert first.should_prune(bad, {10: 4.0})  # the median at this step is 3.5
    assert not first.should_prune(open_trial, {10: 3.0})
    bad.state, open_trial.state = TrialState.PRUNED, TrialState.PREEMPTED
    first.record_end(bad, 4.0)
    first.record_end(open_trial, 3.0)
    assert first.next_trial() is None
    # As after a kill within a write: Optuna's lock, and a line that is not complete.
    journal = tmp_path / "search.journal"
    (tmp_path / "search.journal.lock").symlink_to(journal)
    with journal.open("a") as file:
        file.write('{"op_code":5,')
    second = search(tmp_path, total=9)
    assert [trial.values for trial in second.trials] == [trial.values for trial in first.trials]
    states = [trial.state for trial in second.trials]
    assert states == [TrialState.FINISHED] * 6 + [TrialState.PRUNED, TrialState.WAITING]
    resumed = second.next_trial()
    assert resumed is not None and resumed.name == open_trial.name
    # It reports the evaluations before and after the kill, and only the new ones are stored.
    assert second.should_prune(resumed, {10: 3.0, 20: 99.0}) is False  # no other has step 20
    resumed.state = TrialState.FINISHED
    second.record_end(resumed, None)
    assert resumed.state is TrialState.FAILED  # without a value, the search cannot use it
    new = second.next_trial()
    assert new is not None and new.values not in [trial.values for trial in first.trials]
    third = search(tmp_path)
    assert third.trials[7].reason == "it finished without an evaluation of 'loss'"


def test_the_same_search_samples_the_same_trials(tmp_path: Path) -> None:
    samples = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        found = search(tmp_path / name, total=2)
        while found.next_trial() is not None:
            pass
        samples.append([trial.values for trial in found.trials])
    assert samples[0] == samples[1] and samples[0][0] != samples[0][1]


def test_optuna_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"need optuna, which .*pip install 'spmdtrain\[sweep\]'"):
        search(tmp_path)
