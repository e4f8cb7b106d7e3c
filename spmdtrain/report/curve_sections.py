"""The curves of the page: metrics of all splits, optimizer, speed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spmdtrain.document.blocks import (
    Block,
    ChartBlock,
    NoteBlock,
    Section,
    Series,
    Width,
    line_chart,
)
from spmdtrain.document.terminal import byte_size, number
from spmdtrain.record.readers import Column, reduce_curve
from spmdtrain.record.run_files import Split
from spmdtrain.report.run_data import RunData
from spmdtrain.step.metrics import OF_EPOCH

MOST_POINTS = 2000  # of a curve
_FEWEST_POINTS = 100
_ALL_POINTS = 60_000  # of a page: about 1.3 MB
_MOST_CHARTS = 80
_MEAN_FROM, _MEANS = 600, 150  # a longer curve is faint, and has a line of so many means

_METRICS = "Curves"
_EVALUATOR = "evaluator"
_COLORS = {Split.TRAIN: 0, Split.EPOCH: 4, Split.EVAL: 1, _EVALUATOR: 3, Split.TEST: 2}
_LABELS = {Split.EPOCH: "epoch mean", _EVALUATOR: "evaluator"}
_OF_OPTIMIZER = {
    "learning_rate": "learning rate",
    "gradient_norm": "gradient norm",
    "parameter_norm": "parameter norm",
    "update_norm": "update norm",
}


@dataclass(frozen=True)
class _Quantity:
    """The title and format of a value of `performance.jsonl`."""

    title: str
    is_share: bool = False
    unit: float = 1.0

    @property
    def y_format(self) -> str:
        return "~%" if self.is_share else "~s"

    def text(self, value: float) -> str:
        if self.is_share:
            return f"{value:.1%}"
        return byte_size(round(value)) if self.unit != 1 else number(value)


_QUANTITIES = {
    "examples_per_second": _Quantity("examples per second"),
    "steps_per_second": _Quantity("steps per second"),
    "tokens_per_second": _Quantity("tokens per second"),
    "model_flops_utilization": _Quantity("model FLOPs utilization", is_share=True),
    "input_wait": _Quantity("input wait", is_share=True),
    "device_memory_bytes": _Quantity("device memory, GB", unit=1e9),
    "goodput": _Quantity("goodput", is_share=True),
}


@dataclass(frozen=True)
class _Curve:
    """A line before its reduction."""

    name: str
    column: Column
    color: int


@dataclass(frozen=True)
class _Plot:
    """A chart before the reduction of its lines."""

    title: str
    curves: Sequence[_Curve]
    quantity: _Quantity | None = None


def curve_sections(runs: Sequence[RunData]) -> list[Section]:
    """Returns the sections of curves, without empty ones.

    The curves of several runs are in the same charts, with a color for each run.
    """
    groups = {
        _METRICS: _of_one_run(runs[0]) if len(runs) == 1 else _of_runs(runs),
        "Optimizer": _optimizer(runs),
        "Speed and resources": _performance(runs),
    }
    count = sum(len(plot.curves) for plots in groups.values() for plot in plots)
    most = max(_FEWEST_POINTS, min(MOST_POINTS, _ALL_POINTS // max(1, count)))
    sections: list[Section] = []
    for title, plots in groups.items():
        # The metrics are what a reader looks at first.
        width, height = (Width.COLUMN, 220) if title == _METRICS else (Width.THIRD, 150)
        shown = plots[:_MOST_CHARTS]
        blocks: list[Block] = [_chart(plot, most, width, height) for plot in shown]
        if (left_out := len(plots) - len(shown)) > 0:
            blocks.append(NoteBlock(f"{left_out} more metrics are in metrics.jsonl."))
        if blocks:
            note = "" if sections else _note([p for of in groups.values() for p in of], most)
            sections.append(Section(title, blocks, note))
    return sections


def _note(plots: Sequence[_Plot], most: int) -> str:
    longest = max(curve.column.count for plot in plots for curve in plot.curves)
    if longest <= most:
        return ""
    return (
        f"Curves of up to {longest:,} values are drawn with {most:,} points, which keep each "
        "minimum and maximum, and with their mean."
    )


def _of_one_run(run: RunData) -> list[_Plot]:
    """Returns a plot for each metric, with a curve for each split."""
    found: dict[str, list[_Curve]] = {}
    for (split, name), column in _metrics_of(run):
        curve = _Curve(_LABELS.get(split, split), column, _COLORS[split])
        found.setdefault(name, []).append(curve)
    order = list(_COLORS.values())
    for curves in found.values():
        curves.sort(key=lambda curve: order.index(curve.color))
    return [_Plot(name, curves) for name, curves in found.items()]


def _of_runs(runs: Sequence[RunData]) -> list[_Plot]:
    """Returns a plot for each metric of each split, with a curve for each run."""
    found: dict[tuple[str, str], list[_Curve]] = {}
    for color, run in enumerate(runs):
        for (split, name), column in _metrics_of(run):
            found.setdefault((name, split), []).append(_Curve(run.name, column, color))
    names = list(dict.fromkeys(name for name, _ in found))
    splits = list(_COLORS)
    ordered = sorted(found, key=lambda key: (names.index(key[0]), splits.index(key[1])))
    return [
        _Plot(f"{name} ({_LABELS.get(split, split)})", found[name, split])
        for name, split in ordered
        # The result of the test is a single value, which stands in the table of the runs.
        if split != Split.TEST or any(len(c.column.by_step()[0]) > 1 for c in found[name, split])
    ]


def _metrics_of(run: RunData) -> list[tuple[tuple[str, str], Column]]:
    """Returns the columns of a run's metrics by split and name."""
    own = [
        (key, column)
        for key, column in run.metrics.columns.items()
        if not (key[0] == Split.EPOCH and key[1] in OF_EPOCH)
        and not (key[0] == Split.TRAIN and key[1] in _OF_OPTIMIZER)
    ]
    others = [((_EVALUATOR, name), column) for (_, name), column in run.evaluator.columns.items()]
    return own + others


def _optimizer(runs: Sequence[RunData]) -> list[_Plot]:
    plots = []
    for name, title in _OF_OPTIMIZER.items():
        curves = []
        for color, run in enumerate(runs):
            column = run.metrics.get(Split.TRAIN, name)
            if column is None and name == "learning_rate":
                column = run.metrics.get(Split.EPOCH, name)
            if column is not None:
                curves.append(_Curve(run.name if len(runs) > 1 else "", column, color))
        if curves:
            plots.append(_Plot(title, curves))
    return plots


def _performance(runs: Sequence[RunData]) -> list[_Plot]:
    plots = []
    for name, quantity in _QUANTITIES.items():
        curves = []
        for color, run in enumerate(runs):
            column = run.performance.columns.get(name)
            if column is None and name in OF_EPOCH:  # versions without performance.jsonl
                column = run.metrics.get(Split.EPOCH, name)
            if column is not None:
                curves.append(_Curve(run.name if len(runs) > 1 else "", column, color))
        if curves:
            plots.append(_Plot(quantity.title, curves, quantity))
    return plots


def _chart(plot: _Plot, most: int, width: Width, height: int) -> ChartBlock:
    quantity = plot.quantity
    unit = quantity.unit if quantity else 1.0
    series, texts = [], []
    for curve in plot.curves:
        steps, values = curve.column.by_step()
        x, y = reduce_curve(steps, values, most)
        scaled = [None if v is None else v / unit for v in y] if unit != 1 else y
        mean = curve.column.means(_MEANS) if len(steps) > _MEAN_FROM else None
        if mean is not None and unit != 1:
            mean = mean[0], [v / unit for v in mean[1]]
        series.append(Series(curve.name, x, scaled, curve.color, mean))
        last = curve.column.last
        text = "" if last is None else (quantity.text if quantity else number)(last[1])
        texts.append(text)
    return line_chart(
        plot.title,
        series,
        values=texts,
        y_format=quantity.y_format if quantity else _format([s.y for s in series]),
        zero=quantity is not None,
        width=width,
        height=height,
    )


def _format(values: Sequence[Sequence[float | None]]) -> str:
    """Returns the format of an axis: `0.002` rather than `2m`, and `1.2k` for large values."""
    sizes = [abs(v) for line in values for v in line if v]
    largest = max(sizes, default=0.0)
    if largest >= 10_000 or not math.isfinite(largest):
        return "~s"
    return "~g" if largest >= 1e-4 else "~e"


def last_values(run: RunData, split: str) -> Mapping[str, float]:
    """Returns the last values of the metrics of a split by name."""
    found = {name: run.metrics.get(split, name) for name in run.metrics.names(split)}
    return {
        name: column.last[1]
        for name, column in found.items()
        if column is not None and column.last is not None
    }
