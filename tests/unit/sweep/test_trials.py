"""The trials of a sweep: their specification, the search with Optuna, their metrics and results."""

import dataclasses
import itertools
import json
import math
import re
import sys
from pathlib import Path

import pytest
from etils import epath
from helpers import DIGITS, REPOSITORY
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain import RunConfig, UserError
from spmdtrain.config.command_line import parse_command_line
from spmdtrain.document.terminal import Terminal
from spmdtrain.sweep.command import Options
from spmdtrain.sweep.runner import (
    RunningRow,
    best_result,
    means_over_seeds,
    read_results,
    result_tables,
    running_table,
    trial_environments,
    write_results,
)
from spmdtrain.sweep.trials import (
    ListedValues,
    SearchTrials,
    SweepSpecification,
    Trial,
    TrialFactory,
    TrialMetrics,
    TrialState,
    ValueRange,
    check_option_names,
    corners,
    grid_points,
    option_kinds,
    option_words,
    parse_setting,
    parse_settings,
    readable_name,
    store_specification,
    unique_name,
)

WORDS = st.text("abcdefgxyz_0123456789-", min_size=1, max_size=8)
VALUES = st.lists(WORDS, min_size=1, max_size=4, unique=True)


@pytest.mark.slow
@given(st.dictionaries(WORDS.map(lambda word: f"o{word}".replace("-", "_")), VALUES, min_size=1))
def test_a_grid_has_each_combination_of_the_listed_values_once(
    options: dict[str, list[str]],
) -> None:
    options = dict(itertools.islice(options.items(), 4))
    settings = parse_settings([f"{name}={','.join(values)}" for name, values in options.items()])
    points = [tuple(point[name] for name in options) for point in grid_points(settings)]
    assert points == list(itertools.product(*options.values()))
    checked = corners(settings)
    for name, values in options.items():
        assert {point[name] for point in checked} == set(values)


@given(st.integers(-50, 50), st.integers(0, 20))
def test_a_range_of_integers_includes_both_ends(low: int, count: int) -> None:
    (setting,) = parse_settings([f"seed={low}..{low + count}"])
    values = [int(point["seed"]) for point in grid_points([setting])]
    assert values == list(range(low, low + count + 1))


def test_ranges_and_lists_are_distinguished() -> None:
    assert parse_setting("a=log:1e-4..1e-2") == ValueRange("a", 1e-4, 1e-2, False, True)
    assert parse_setting("a-b=0..0.5") == ValueRange("a_b", 0.0, 0.5, False, False)
    assert parse_setting("a=0..2,7") == ListedValues("a", ("0", "1", "2", "7"))
    assert parse_setting("dir=../a,../b") == ListedValues("dir", ("../a", "../b"))
    assert parse_setting("hidden=64,128 128") == ListedValues("hidden", ("64", "128 128"))


@pytest.mark.parametrize(
    "texts",
    [
        *(["seed"], ["=1"], ["seed=1,,2"], ["seed=1,1"], ["seed=3..1"], ["seed=0..1", "seed=2"]),
        *(["x=log:0..1"], ["x=log:a..b"], ["x=0.1..0.2"], ["x=0..99999"], ["workdir=a,b"], []),
        ["a=0..999", "b=0..99"],
    ],
    ids=str,
)
def test_what_has_no_meaning_in_a_grid_is_refused(texts: list[str]) -> None:
    with pytest.raises(UserError, match="--set"):
        grid_points(parse_settings(texts))


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    kinds = option_kinds(RunConfig())
    assert kinds["shuffle"] and not kinds["mesh.data"]
    check_option_names(parse_settings(["mesh.data=1,2"]), list(kinds))
    with pytest.raises(UserError, match=r"mesh\.dat.* Did you mean 'mesh\.data'"):
        check_option_names(parse_settings(["mesh.dat=1,2"]), list(kinds))


def test_options_become_words_of_a_command_line() -> None:
    assert option_words("learning_rate", "1e-3", False) == ["--learning-rate", "1e-3"]
    assert option_words("hidden", "64 64", False) == ["--hidden", "64", "64"]
    assert option_words("mode_.of_it_", "a", False) == ["--mode_.of-it_", "a"]
    assert option_words("group.keep_all", "False", True) == ["--group.no-keep-all"]
    assert option_words("shuffle", "true", True) == ["--shuffle"]
    with pytest.raises(UserError, match="true or false"):
        option_words("shuffle", "maybe", True)


def test_names_are_safe_in_file_systems() -> None:
    assert readable_name({"lr": "1e-3", "dir": "../a b:ü"}) == "lr=1e-3,dir=.._a_b__"


def test_a_folder_holds_one_sweep(tmp_path: Path) -> None:
    folder = epath.Path(tmp_path)
    sweep = SweepSpecification(
        config="a.py",
        arguments=["--epochs", "2"],
        set={"seed": "0..4"},
        search=10,
        metric="loss",
        direction="min",
    )
    store_specification(folder, sweep)
    store_specification(
        folder, dataclasses.replace(sweep, search=20)
    )  # more trials of the same search
    assert json.loads((tmp_path / "sweep.json").read_text())["search"] == 20
    for other, difference in (
        (dataclasses.replace(sweep, set={"seed": "0..5"}), r"set seed is 0\.\.4 there and 0\.\.5"),
        (dataclasses.replace(sweep, arguments=[]), "--epochs 2 there and empty here"),
        (dataclasses.replace(sweep, search=None), "a search there and a grid here"),
    ):
        with pytest.raises(UserError, match=difference):
            store_specification(folder, other)
    (tmp_path / "sweep.json").write_text('{"config": 3}')
    with pytest.raises(UserError, match="not the file of a sweep"):
        store_specification(folder, sweep)
    (tmp_path / "sweep.json").write_text('{"metrics": "loss"}')
    with pytest.raises(UserError, match=r"metrics is unknown\. Did you mean 'metric'\?"):
        store_specification(folder, sweep)


# -- docs/sweeps.md --------------------------------------------------------------------------------

PAGE = (REPOSITORY / "docs" / "sweeps.md").read_text()


def test_the_forms_of_values_in_the_documentation_try_what_it_says() -> None:
    rows = re.findall(r"^\| `([a-z][\w.]*=.+)` \| (.+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for text, tries in rows:
        (setting,) = parse_settings([text])
        if tries.startswith("samples"):
            assert isinstance(setting, ValueRange) and setting.log == ("logarithmic" in tries)
            continue
        assert len(grid_points([setting])) == int(tries.split()[0]), text


@pytest.mark.slow
def test_the_commands_in_the_documentation_are_valid() -> None:
    commands = re.findall(r"^    python -m spmdtrain\.sweep (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for line in commands:
        words = [str(DIGITS) if "digits_mlp.py" in word else word for word in line.split()]
        command = parse_command_line(words, Options)
        kinds = option_kinds(command.config)
        check_option_names(parse_settings(command.options.set), list(kinds))
        assert command.options.search or len(
            grid_points(parse_settings(command.options.set))
        ) == int(re.findall(r"each of the (\d+) combinations", PAGE)[0])


# -- the search with Optuna: samples, pruning, and a study that survives the process ---------------

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


# -- names, metrics, devices and comparison --------------------------------------------------------


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
    Terminal().show(*result_tables(read_results(trials, "loss", "min"), "loss", "min"))
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


# -- the table of the trials that run --------------------------------------------------------------


def test_a_narrow_terminal_wraps_names_and_cuts_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    name = "learning_rate=1e-3,seed=0,dropout=0.1"
    rows = [RunningRow(name, "evaluate", 12_000, 200_000, 0.1234, 3723)]
    terminal, counts = Terminal(), {TrialState.WAITING: 3, TrialState.FAILED: 2}
    with terminal.live() as show:
        terminal.line("above")
        show(running_table(rows, {**counts, TrialState.RUNNING: 1}, "loss"))
    shown = capsys.readouterr().out
    for text in ("above", "evaluate", "12,000/200,000", "0.1234", "1:02:03", "seed=0"):
        assert text in shown
    assert "3 waiting, 2 failed" in shown


def test_a_log_file_has_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    with terminal.live() as show:
        terminal.line("started")
        show(running_table([RunningRow("a", "step", 1, 2, None, None)], {}, "loss"))
    assert capsys.readouterr().out == "started\n"
