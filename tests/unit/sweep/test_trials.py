"""Trials: their names, what they read from a run's metrics, their devices and their comparison."""

import json
import math
from pathlib import Path

import pytest

from spmdtrain import UserError
from spmdtrain.document.terminal import Terminal
from spmdtrain.sweep.runner import (
    best_result,
    means_over_seeds,
    read_results,
    show_results,
    trial_environments,
    write_results,
)
from spmdtrain.sweep.trials import Trial, TrialMetrics, TrialState, unique_name


def write(folder: Path, *lines: dict[str, object], mode: str = "w") -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_a_name_that_is_long_or_not_unique_begins_with_the_number() -> None:
    assert unique_name(7, "a=1", ["a=1", "a=2"]) == "a=1"
    assert unique_name(7, "a=X", ["a=x", "a=x"]) == "007,a=X"
    assert unique_name(7, "a" * 300, ["a" * 300]) == "007," + "a" * 100


def test_metrics_are_read_while_they_are_written_and_after_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    metrics = TrialMetrics(Trial(0, "run", {}, folder), "loss")
    metrics.update()
    assert (metrics.step, dict(metrics.evaluations), metrics.total_steps) == (0, {}, None)
    write(folder, {"step": 5, "split": "train", "loss": 0.1})
    (folder / "config.json").write_text('{"config": {"epochs": 4, "steps": null}}')
    write(folder, {"step": 5, "split": "epoch", "epoch": 1, "loss": 9.0}, mode="a")
    metrics.update()
    assert dict(metrics.evaluations) == {5: 9.0}  # without a validation split, of the epochs
    write(folder, {"step": 5, "split": "eval", "loss": None}, mode="a")
    write(folder, {"step": 10, "split": "eval", "loss": 2.0}, mode="a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "split": "eval", "lo')  # not complete yet
    metrics.update()
    assert math.isnan(metrics.evaluations[5]) and list(metrics.evaluations) == [5, 10]
    assert (metrics.step, metrics.total_steps) == (10, 20)
    assert metrics.best("min") == metrics.best("max") == (10, 2.0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('ss": 1.0}\n')
    metrics.update()
    assert metrics.best("min") == (15, 1.0)
    # A resume replaces the file by one without the lines after its checkpoint, and adds others.
    replaced = [{"step": 5, "split": "train", "loss": n} for n in range(20)]
    write(tmp_path / "new", *replaced, {"step": 6, "split": "eval", "loss": 3.0})
    (tmp_path / "new" / "metrics.jsonl").replace(folder / "metrics.jsonl")
    metrics.update()
    assert (metrics.step, dict(metrics.evaluations)) == (6, {6: 3.0})


def test_the_length_of_a_run_is_exact_at_its_last_epoch(tmp_path: Path) -> None:
    metrics = TrialMetrics(Trial(0, "run", {}, tmp_path), "loss")
    (tmp_path / "config.json").write_text('{"config": {"epochs": 7, "steps": null}}')
    write(tmp_path, {"step": 29, "split": "epoch", "epoch": 7, "loss": 1.0})
    metrics.update()
    assert metrics.total_steps == 29  # 29 / 7 * 7 is larger


def trial(folder: Path, state: TrialState, loss: float | None, **values: str) -> Trial:
    name = ",".join(values.values())
    if loss is not None:
        write(folder / name, {"step": 1, "split": "eval", "loss": loss})
    return Trial(0, name, values, folder / name, state=state)


def test_trials_are_sorted_and_their_means_are_those_of_finished_ones(tmp_path: Path) -> None:
    finished = TrialState.FINISHED
    trials = [
        trial(tmp_path, finished, 3.0, rate="a", seed="0"),
        trial(tmp_path, TrialState.FAILED, None, rate="b", seed="0"),
        trial(tmp_path, finished, 5.0, rate="a", seed="1"),
        trial(tmp_path, finished, 3.5, rate="b", seed="1"),
        trial(tmp_path, TrialState.PRUNED, 9.0, rate="b", seed="2"),
        trial(tmp_path, TrialState.PREEMPTED, 1.0, rate="b", seed="3"),
    ]
    results = read_results(trials, "loss", "min")
    assert [result.value for result in results] == [1.0, 3.0, 3.5, 5.0, 9.0, None]
    best = best_result(results)
    assert best is not None and best.trial is trials[0]
    means = means_over_seeds(results, "min")
    assert [(m.values, m.count, m.mean) for m in means] == [
        ({"rate": "b"}, 1, 3.5),
        ({"rate": "a"}, 2, 4.0),
    ]
    assert means[0].deviation is None and means[1].deviation == pytest.approx(math.sqrt(2))
    results = read_results(trials, "loss", "max")
    assert [result.value for result in results] == [9.0, 5.0, 3.5, 3.0, 1.0, None]
    best = best_result(results)
    assert best is not None and best.trial is trials[2]
    assert [mean.mean for mean in means_over_seeds(results, "max")] == [4.0, 3.5]


def test_a_result_that_is_not_a_number_is_null_in_the_file(tmp_path: Path) -> None:
    finished = trial(tmp_path, TrialState.FINISHED, 1.0, rate="a")
    write(finished.folder, {"step": 2, "split": "test", "loss": None}, mode="a")
    write_results(tmp_path, read_results([finished], "loss", "min"), "loss", "min")
    text = (tmp_path / "results.json").read_text()
    (result,) = json.loads(text, parse_constant=pytest.fail)["trials"]
    assert (result["value"], result["test"]) == (1.0, None)


def test_a_file_that_cannot_be_read_is_a_fault_of_its_trial_alone(tmp_path: Path) -> None:
    finished = trial(tmp_path, TrialState.FINISHED, 1.0, rate="a")
    broken = trial(tmp_path, TrialState.FINISHED, 2.0, rate="b")
    (broken.folder / "metrics.jsonl").unlink()
    (broken.folder / "metrics.jsonl").mkdir()
    metrics = TrialMetrics(broken, "loss")
    metrics.update()
    assert "metrics.jsonl" in metrics.fault
    assert [each.value for each in read_results([broken, finished], "loss", "min")] == [1.0, None]


def test_values_are_shortened_only_if_they_still_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = (("123456789", "0.00123451", "0.0001234"), ("123456790", "0.00123452", "0.0005678"))
    trials = [
        trial(tmp_path, TrialState.FINISHED, 1.0, seed=seed, rate=rate, decay=decay)
        for seed, rate, decay in values
    ]
    show_results(Terminal(), read_results(trials, "loss", "min"), "loss", "min")
    printed = capsys.readouterr().out
    for text in (*values[0][:2], *values[1][:2], "0.000123 ", "0.000568 "):
        assert text in printed


def test_trials_do_not_share_a_gpu() -> None:
    four = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    shares = [env["CUDA_VISIBLE_DEVICES"] for env in trial_environments(2, None, four)]
    assert shares == ["0,1", "2,3"]
    shares = [env["CUDA_VISIBLE_DEVICES"] for env in trial_environments(3, 1, four)]
    assert shares == ["0", "1", "2"]
    for jobs, devices in ((5, None), (2, 3)):
        with pytest.raises(UserError, match=r"cannot share a GPU; .*JAX_PLATFORMS=cpu"):
            trial_environments(jobs, devices, four)
    cpu = {**four, "JAX_PLATFORMS": "cpu"}
    assert [env["JAX_NUM_CPU_DEVICES"] for env in trial_environments(5, 2, cpu)] == ["2"] * 5
