"""Results of a sweep: the table of its trials, means over seeds, and `results.json`."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

from spmdtrain.document.terminal import Terminal, number
from spmdtrain.record import no_follow
from spmdtrain.sweep.trials import Trial, TrialMetrics, TrialState

FILE = "results.json"
_SEED = "seed"


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial."""

    trial: Trial
    step: int | None
    """The step of the best evaluation; None without an evaluation that is a number."""
    value: float | None
    """The metric at that step."""
    test: float | None
    """The metric of the test split."""


@dataclass(frozen=True)
class SeedMean:
    """The mean over trials that differ only in their seed."""

    values: Mapping[str, str]
    """The other options."""
    count: int
    mean: float
    deviation: float | None
    """Sample standard deviation; None for a single trial."""


def read_results(
    trials: Iterable[Trial], metric: str, direction: Literal["min", "max"]
) -> list[TrialResult]:
    """Reads the results of trials from their files, the best first, results without a value last.

    `direction` is `min` if a low value of the metric is better.
    """
    results = []
    for trial in trials:
        metrics = TrialMetrics(trial, metric)
        metrics.update()
        step, value = metrics.best(direction) or (None, None)
        results.append(TrialResult(trial, step, value, metrics.test))
    sign = 1 if direction == "min" else -1

    def rank(result: TrialResult) -> tuple[bool, float]:
        return result.value is None, sign * (result.value or 0.0)

    return sorted(results, key=rank)


def best_result(results: Sequence[TrialResult]) -> TrialResult | None:
    """Returns the best finished trial with a value, of sorted results; None if there is none."""
    finished = (result for result in results if result.trial.state is TrialState.FINISHED)
    return next((result for result in finished if result.value is not None), None)


def means_over_seeds(
    results: Sequence[TrialResult], direction: Literal["min", "max"]
) -> list[SeedMean]:
    """Returns mean and standard deviation over the seeds, the best mean first.

    There is one for each combination of the other options, over finished trials only; none if the
    seed does not vary.
    """
    groups: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for result in results:
        values = result.trial.values
        if _SEED not in values:
            return []
        if result.trial.state is TrialState.FINISHED and result.value is not None:
            others = tuple((option, values[option]) for option in values if option != _SEED)
            groups.setdefault(others, []).append(result.value)
    means = [
        SeedMean(
            dict(others),
            len(found),
            statistics.fmean(found),
            statistics.stdev(found) if len(found) > 1 else None,
        )
        for others, found in groups.items()
    ]
    return sorted(means, key=lambda mean: mean.mean, reverse=direction == "max")


def show_results(
    terminal: Terminal,
    results: Sequence[TrialResult],
    metric: str,
    direction: Literal["min", "max"],
) -> None:
    """Prints the table of the trials, and the means over the seeds if they vary.

    Args:
      results: Sorted, the best first.
      direction: Whether a low (`min`) or a high (`max`) value is better.
    """
    best = best_result(results)
    options = list(dict.fromkeys(option for r in results for option in r.trial.values))
    shown = {
        option: _shortened([r.trial.values.get(option, "") for r in results]) for option in options
    }
    with_test = any(result.test is not None for result in results)
    table = Table()
    table.add_column("")
    for option in options:
        table.add_column(option, justify="right")
    table.add_column("state")
    for heading in (metric, "at step", *([f"test {metric}"] if with_test else [])):
        table.add_column(heading, justify="right")
    for row, result in enumerate(results):
        test = [_shown(result.test)] if with_test else []
        table.add_row(
            "best" if result is best else "",
            *(shown[option][row] for option in options),
            result.trial.state,
            _shown(result.value),
            "" if result.step is None else f"{result.step:,}",
            *test,
            style="bold" if result is best else None,
        )
    terminal.console.print(table)
    means = means_over_seeds(results, direction)
    if any(mean.count > 1 for mean in means):
        _show_means(terminal, means, metric)


def _show_means(terminal: Terminal, means: Sequence[SeedMean], metric: str) -> None:
    table = Table()
    table.add_column("")
    options = list(means[0].values)
    for option in options:
        table.add_column(option, justify="right")
    shown = {option: _shortened([mean.values[option] for mean in means]) for option in options}
    for heading in ("seeds", f"mean {metric}", "standard deviation"):
        table.add_column(heading, justify="right")
    for row, mean in enumerate(means):
        is_best = mean is means[0] and len(means) > 1
        table.add_row(
            "best" if is_best else "",
            *(shown[option][row] for option in options),
            str(mean.count),
            number(mean.mean),
            _shown(mean.deviation),
            style="bold" if is_best else None,
        )
    terminal.console.print(table)


def _shortened(values: Sequence[str]) -> Sequence[str]:
    """Rounds the values of an option to three significant digits, if they still differ then."""

    def short(value: str) -> str:
        try:
            return value if len(value) <= 8 or value.isdecimal() else f"{float(value):.3g}"
        except ValueError:
            return value

    found = [short(value) for value in values]
    return found if len(set(found)) == len(set(values)) else values


def _shown(value: float | None) -> str:
    return "" if value is None else number(value)


def write_results(
    folder: Path,
    results: Sequence[TrialResult],
    metric: str,
    direction: Literal["min", "max"],
) -> None:
    """Writes `results.json`: the trials, the best first, and the means over seeds.

    Args:
      folder: The folder of the sweep.
      results: Sorted, the best first.
      direction: Whether a low (`min`) or a high (`max`) value is better.
    """
    best = best_result(results)
    content = {
        "metric": metric,
        "direction": direction,
        "best": best and best.trial.name,
        "trials": [
            {
                "name": result.trial.name,
                "values": dict(result.trial.values),
                "state": result.trial.state,
                "value": result.value,
                "step": result.step,
                "test": None if result.test is None or math.isnan(result.test) else result.test,
                "reason": result.trial.reason,
            }
            for result in results
        ],
        "means": [
            {
                "values": dict(mean.values),
                "trials": mean.count,
                "mean": mean.mean,
                "standard_deviation": mean.deviation,
            }
            for mean in means_over_seeds(results, direction)
        ],
    }
    text = json.dumps(content, indent=2) + "\n"
    no_follow.write(folder, FILE, lambda file: file.write(text.encode()))
