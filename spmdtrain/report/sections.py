"""Sections of the page: curves, media, checkpoints and program of the runs."""

import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spmdtrain.checkpoints.listing import Listing, list_checkpoints
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.document.blocks import (
    COLORS,
    TICK_LABEL,
    Block,
    ChartBlock,
    Fact,
    FactsBlock,
    GalleryBlock,
    ImageBlock,
    LegendEntry,
    NoteBlock,
    Section,
    Series,
    TableBlock,
    TextBlock,
    Tone,
    Width,
    altair,
    chart_block,
    line_chart,
)
from spmdtrain.document.terminal import byte_size, number
from spmdtrain.errors import UserError, foreign
from spmdtrain.record.changing_files import FileState, Log, file_state
from spmdtrain.record.lines import Statistics, WatchLog
from spmdtrain.record.readers import (
    Column,
    EventLog,
    MediaItem,
    MediaKind,
    MediaLog,
    MetricColumns,
    PerformanceColumns,
    read_picture,
    reduce_curve,
)
from spmdtrain.record.run import Run
from spmdtrain.record.run_files import Split
from spmdtrain.record.storage import folder_of
from spmdtrain.record.validation import is_number
from spmdtrain.step.metrics import OF_EPOCH

# -- The content of a workdir, and its incremental reading -----------------------------------------


@dataclass
class RunData:
    """The content of a workdir. Objects that are missing or malformed are empty.

    Attributes:
      workdir: The path as the user gave it.
      name: The name of the run in the page.
      config_file: The content of `config.json`.
      status: The content of `status.json`.
      program: The content of `program.json`.
      evaluator: The lines of `metrics.evaluator.jsonl`.
      checkpoints: The checkpoints; None if they cannot be listed.
      faults: A sentence for each file that could not be read.
    """

    workdir: str
    name: str
    config_file: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    program: Mapping[str, Any] = field(default_factory=dict)
    metrics: MetricColumns = field(default_factory=MetricColumns)
    evaluator: MetricColumns = field(default_factory=MetricColumns)
    performance: PerformanceColumns = field(default_factory=PerformanceColumns)
    events: EventLog = field(default_factory=EventLog)
    media: MediaLog = field(default_factory=MediaLog)
    watch: WatchLog = field(default_factory=WatchLog)
    checkpoints: Listing | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def config(self) -> Mapping[str, Any]:
        return object_in(self.config_file, "config")

    @property
    def status_name(self) -> str:
        """The status, such as `finished`; empty if it is not known."""
        return foreign(self.status.get("status") or "", 40)

    @property
    def step(self) -> int:
        """The last step that is known; 0 without one."""
        saved = self.status.get("step")
        steps = [saved] if type(saved) is int else []
        return max(*steps, self.metrics.last_step(), *(s.last_step for s in self.events.starts), 0)


def object_in(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns an object inside a JSON object; `{}` if there is none."""
    found = content.get(name)
    return found if isinstance(found, dict) else {}


class RunReader:
    """Reads the workdir of a run, a folder or URL, and later only what has grown.

    Raises:
      UserError: If it is not the workdir of a run.
      StorageError: If it cannot be accessed.
    """

    def __init__(self, workdir: str, name: str) -> None:
        self._run = run = Run.open(workdir, bounded=True)
        self.data = RunData(workdir, name)
        # By the attribute of `RunData`.
        self._logs: Mapping[str, Log[Any]] = {
            "metrics": run.metric_log,
            "evaluator": run.evaluator_log,
            "performance": run.performance_log,
            "events": run.event_log,
            "media": run.media_log,
            "watch": run.watch_log,
        }
        self._state: tuple[object, ...] | None = None

    def unread(self) -> int:
        """Returns the bytes of the logs that the next `refresh` reads."""
        return sum(log.file.unread() for log in self._logs.values())

    def refresh(self, on_bytes: Callable[[int], None] = lambda done: None) -> bool:
        """Reads what has changed since the last call; returns whether anything has.

        `on_bytes` receives the number of bytes of the logs since its last call. Raises
        `StorageError` if a file cannot be accessed.
        """
        state = self._states()
        if state == self._state:
            return False
        data, faults = self.data, list[str]()
        objects = []
        for name, file in self._run.objects.items():
            file.refresh()
            objects.append(file.content or {})
            faults += [f"{name}: {file.error}"] if file.error else []
        data.config_file, data.status, data.program = objects
        for attribute, log in self._logs.items():
            setattr(data, attribute, log.read(on_bytes))
            faults += log.faults()
        steps, times = data.performance.times.by_step()
        data.events.extend(zip(times.tolist(), steps.tolist(), strict=True))
        try:
            source = list_checkpoints(str(self._run.folder))
            data.checkpoints = Listing.of(source.folder, source.steps, self._run)
        except UserError as error:
            data.checkpoints = None
            faults.append(str(error))
        data.faults = [foreign(fault, 500) for fault in faults]
        self._state = state  # only now, so that after an error the next call reads all of it
        return True

    def _states(self) -> tuple[FileState | None, ...]:
        paths = [file.path for file in self._run.objects.values()]
        paths += [log.path for log in self._logs.values()]
        return tuple(map(file_state, [*paths, self._run.folder / "checkpoints"]))


# -- The curves of the page: metrics of all splits, optimizer, speed -------------------------------

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
    """The title and form of a value of `performance.jsonl`."""

    title: str
    is_share: bool = False
    unit: float = 1.0

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
    "slowest_share": _Quantity("waiting for the slowest process", is_share=True),
    "device_memory_bytes": _Quantity("device memory, GB", unit=1e9),
    "live_array_bytes": _Quantity("arrays on a device, GB", unit=1e9),
    "host_memory_bytes": _Quantity("memory of process 0, GB", unit=1e9),
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
        percent=quantity is not None and quantity.is_share,
        zero=quantity is not None,
        width=width,
        height=height,
    )


def last_values(run: RunData, split: str) -> Mapping[str, float]:
    """Returns the last values of the metrics of a split by name."""
    found = {name: run.metrics.get(split, name) for name in run.metrics.names(split)}
    return {
        name: column.last[1]
        for name, column in found.items()
        if column is not None and column.last is not None
    }


# -- The watched layers: the norms of their outputs and gradients over the steps -------------------

_MOST_LAYERS, _MOST_CELLS, _FEWEST_STEPS = 150, 6_000, 20  # of a chart
_ROW_HEIGHT = 16  # pixels
_FINITE, _NONFINITE = 0, 3  # colors


def layer_section(runs: Sequence[RunData]) -> Section:
    """Returns the section of the layers that a run has watched."""
    blocks: list[Block] = []
    for run in runs:
        steps = [run.watch.by_step[step] for step in sorted(run.watch.by_step)]
        name = f", {run.name}" if len(runs) > 1 else ""
        kinds = {
            "Norms of outputs": {step["step"]: step["outputs"] for step in steps},
            "Norms of gradients": {step["step"]: step["gradients"] for step in steps},
        }
        blocks += [
            _heat_map(f"{title}{name}", found)
            for title, found in kinds.items()
            if any(found.values())
        ]
    return Section("Layers", blocks)


def _heat_map(title: str, found: Mapping[int, Mapping[str, Statistics]]) -> ChartBlock:
    """Returns a chart with a cell for each step and layer, darker for a larger norm."""
    alt = altair()
    names = list(dict.fromkeys(name for layers in found.values() for name in layers))
    shown, steps = names[:_MOST_LAYERS], list(found)
    most = max(_FEWEST_STEPS, _MOST_CELLS // len(shown))
    places = np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int)
    rows: list[dict[str, Any]] = [
        {
            **{"step": f"{step:,}", "layer": foreign(name, 100)},
            **{key: layers[name][key] for key in ("norm", "mean", "std", "min", "max")},
            **{key: layers[name][key] for key in ("zeros", "nonfinite")},
            "size": math.log10(norm) if (norm := layers[name]["norm"]) else None,
            "color": _NONFINITE if layers[name]["nonfinite"] else _FINITE,
        }
        for step in map(steps.__getitem__, places)
        for name in shown
        if name in (layers := found[step])
    ]
    sizes = [row["size"] for row in rows if row["size"] is not None] or [0.0]
    low, high = min(sizes), max(sizes)
    opacity = alt.Scale(domain=[low, high if high > low else low + 1], range=[0.15, 1.0])
    numbers = [
        alt.Tooltip(f"{key}:Q", format=".4g") for key in ("norm", "mean", "std", "min", "max")
    ]
    shares = [alt.Tooltip(f"{key}:Q", format=".2%") for key in ("zeros", "nonfinite")]
    order = {"sort": None, "axis": alt.Axis(title=None, labelLimit=220)}
    chart = (
        alt.Chart(alt.NamedData("cells"))
        .mark_rect()
        .encode(
            x=alt.X(
                "step:O", sort=None, title="step", axis=alt.Axis(labelOverlap=True, labelAngle=0)
            ),
            y=alt.Y("layer:N", **order),
            opacity=alt.condition(
                "isValid(datum.size)",
                alt.Opacity("size:Q", scale=opacity, legend=None),
                alt.value(0.05),
            ),
            color=alt.Color("color:N", legend=None, scale=alt.Scale(domain=list(range(COLORS)))),
            tooltip=["layer:N", "step:O", *numbers, *shares],
        )
    )
    legend = [LegendEntry("norm", _FINITE, f"{number(10**low)} (light) to {number(10**high)}")]
    if any(row["color"] == _NONFINITE for row in rows):
        legend.append(LegendEntry("with values that are not finite", _NONFINITE))
    left_out = {"layers": len(names) - len(shown), "steps": len(steps) - len(places)}
    texts = [f"{count:,} more {what}" for what, count in left_out.items() if count]
    return chart_block(
        title,
        chart,
        {"cells": rows},
        height=_ROW_HEIGHT * len(shown) + 30,
        note=f"{' and '.join(texts)} are in watch.jsonl." if texts else "",
        legend=legend,
    )


# -- The samples, images, histograms and tables of the runs, the newest first ----------------------

_MOST_ITEMS = 48
_MOST_BYTES = 700_000  # of pictures and texts in a page; base64 adds a third


def media_section(runs: Sequence[RunData]) -> Section:
    """Returns the section of samples, images, histograms and tables."""
    blocks: list[Block] = []
    left_out = 0
    for run in runs:
        name = f", {run.name}" if len(runs) > 1 else ""
        shown, more = _of_run(run, name, _MOST_ITEMS // len(runs), _MOST_BYTES // len(runs))
        blocks += shown
        left_out += more
    note = f"The newest items; {left_out:,} more are in the workdir." if left_out else ""
    return Section("Samples", blocks, note)


def _of_run(run: RunData, of: str, most: int, most_bytes: int) -> tuple[list[Block], int]:
    """Returns the blocks of the newest items of a run, and the number of the others."""
    blocks: list[Block] = []
    galleries: dict[str, list[ImageBlock]] = {}
    items = run.media.newest()
    shown = 0
    for item in items:
        title = f"{item.name} ({item.split}){of}" if item.split else f"{item.name}{of}"
        if shown >= max(1, most) or most_bytes <= 0:
            break
        shown += 1
        at = f"{title} at step {item.step:,}"
        match item.kind:
            case MediaKind.IMAGE | MediaKind.FIGURE:
                try:
                    content, media_type = read_picture(folder_of(run.workdir), item.file)
                except UserError as error:
                    blocks.append(NoteBlock(f"{at}: {error}", Tone.WARNING))
                    continue
                if len(content) > most_bytes:
                    shown -= 1
                    continue
                most_bytes -= len(content)
                if item.kind is MediaKind.FIGURE:
                    blocks.append(ImageBlock(content, media_type, at))
                    continue
                if title not in galleries:
                    galleries[title] = []
                    blocks.append(GalleryBlock(galleries[title], title))
                captions = f": {', '.join(item.captions)}" if item.captions else ""
                caption = f"step {item.step:,}{captions}"
                galleries[title].append(ImageBlock(content, media_type, caption))
            case MediaKind.TEXT:
                most_bytes -= len(item.text.encode(errors="replace"))
                blocks.append(TextBlock(item.text, at))
            case MediaKind.HISTOGRAM:
                blocks.append(_histogram(item, at))
            case MediaKind.TABLE:
                block = _media_table(item, at)
                most_bytes -= sum(len(cell) for row in block.rows for cell in row)
                blocks.append(block)
    return blocks, run.media.dropped + len(items) - shown


def _histogram(item: MediaItem, title: str) -> ChartBlock:
    alt = altair()
    rows: list[dict[str, Any]] = [
        {"from": low, "to": high, "count": count}
        for low, high, count in zip(item.edges, item.edges[1:], item.counts, strict=False)
    ]
    axis = alt.Axis(grid=False, labelExpr=TICK_LABEL)
    chart = (
        alt.Chart(alt.NamedData("bins"))
        .mark_bar()
        .encode(
            x=alt.X("from:Q", title=None, bin="binned", axis=axis),
            x2="to:Q",
            y=alt.Y("count:Q", title=None, axis=alt.Axis(tickCount=4, labelExpr=TICK_LABEL)),
            tooltip=["from:Q", "to:Q", "count:Q"],
        )
    )
    return chart_block(title, chart, {"bins": rows}, height=160, width=Width.THIRD)


def _media_table(item: MediaItem, title: str) -> TableBlock:
    if item.row_count > len(item.rows):
        title += f" (the first {len(item.rows)} of {item.row_count:,} rows)"
    return TableBlock(item.columns, item.rows, title=title)


# -- The checkpoints of the runs, with the best one marked -----------------------------------------

_MOST = 50
_MOST_METRICS = 6


def checkpoint_section(runs: Sequence[RunData]) -> Section:
    """Returns the section of checkpoints, with the newest checkpoint of each run first."""
    blocks = [
        table for run in runs if (table := _checkpoints_table(run, len(runs) > 1)) is not None
    ]
    return Section("Checkpoints", blocks)


def _checkpoints_table(run: RunData, is_named: bool) -> TableBlock | None:
    listing = run.checkpoints
    if listing is None or not (steps := sorted({*listing.manifests, *listing.faults})[::-1]):
        return None
    names = list(dict.fromkeys(name for of in listing.metrics.values() for name in of))
    names = names[:_MOST_METRICS]
    rows, marked = [], set()
    shown = steps[:_MOST]
    if listing.best is not None and listing.best not in shown:
        shown.append(listing.best)
    for step in shown:
        manifest = listing.manifests.get(step)
        if manifest is None:
            fault = foreign(listing.faults[step], 300)
            rows.append([f"{step:,}", "", "", *[""] * len(names), fault])
            continue
        metrics = listing.metrics[step]
        values = [number(metrics[name]) if name in metrics else "" for name in names]
        saved = datetime.datetime.fromisoformat(manifest.saved_at).astimezone(datetime.UTC)
        size = byte_size(manifest.size) if manifest.files else ""
        mark = f"best {foreign(listing.best_metric, 60)}" if step == listing.best else ""
        marked |= {len(rows)} if mark else set()
        rows.append([f"{step:,}", f"{saved:%Y-%m-%d %H:%M:%S} UTC", size, *values, mark])
    columns = ["step", "saved", "size", *(foreign(name, 60) for name in names), ""]
    title = f"{foreign(run.name, 100)}" if is_named else ""
    if len(steps) > len(rows):
        title += f"{', ' if title else ''}the newest {_MOST} of {len(steps):,}"
    numeric = frozenset({0, 2, *range(3, 3 + len(names))})
    return TableBlock(columns, rows, numeric, frozenset(marked), title)


# -- The section about the program: configuration, versions, devices, shardings, collectives -------

_ABSENT = "not set"
_MOST_LEAVES = 400
_FOLDED_ABOVE = 12  # rows of a table
_MOST_DIFFERENCES = 30  # without a click
_HIDDEN = {"workdir"}


def program_section(runs: Sequence[RunData]) -> Section:
    """Returns the section about what was run; of several runs, differing fields are shown first."""
    blocks: list[Block] = []
    fields = [flat_fields(run.config) for run in runs]
    if len(runs) > 1 and (rows := _differences(fields)):
        names = [run.name for run in runs]
        title = f"Differences between the runs ({len(rows)} fields)"
        folded = len(rows) > _MOST_DIFFERENCES
        blocks.append(TableBlock(["field", *names], rows, title=title, folded=folded))
    elif len(runs) > 1 and all(fields):
        blocks.append(FactsBlock([Fact("differences between the runs", "none")], width=Width.FULL))
    if len(runs) == 1 and fields[0]:
        blocks += _configuration(fields[0])
    environments = _environments(runs)
    blocks += environments
    for run in runs:
        blocks += _program(run, f" of {run.name}" if len(runs) > 1 else "")
    for run, of in zip(runs, fields, strict=True):
        if of:
            name = f" of {run.name}" if len(runs) > 1 else ""
            all_rows = [[field, value] for field, value in of.items()]
            title = f"All {len(of)} fields of the configuration{name}"
            blocks.append(TableBlock(["field", "value"], all_rows, title=title, folded=True))
    return Section("What was run", blocks)


def flat_fields(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fields of a configuration with their values as text; nested ones with a dot."""
    flat: dict[str, str] = {}

    def add(prefix: str, content: Mapping[str, Any]) -> None:
        for name, value in content.items():
            if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
                add(f"{prefix}{name}.", value)
            else:
                flat[foreign(prefix + name, 100)] = shown_value(value)

    add("", config)
    return flat


def shown_value(value: Any) -> str:
    """Returns a value of a configuration as text."""
    if value is None:
        return _ABSENT
    if isinstance(value, str):
        return foreign(value, 300)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list) and not any(isinstance(x, (dict, list)) for x in value):
        return foreign(", ".join(map(shown_value, value)) or "none", 300)
    return foreign(json.dumps(value), 300)


def _differences(fields: Sequence[Mapping[str, str]]) -> list[list[str]]:
    names = dict.fromkeys(name for of in fields for name in of if name not in _HIDDEN)
    rows = [[name, *(of.get(name, "") for of in fields)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _configuration(fields: Mapping[str, str]) -> list[Block]:
    """Returns the fields of the experiment, and the fields that differ from framework defaults."""
    defaults = flat_fields(config_as_json(RunConfig()))
    groups = {name.split(".")[0] for name in defaults}
    own = [Fact(n, v) for n, v in fields.items() if n.split(".")[0] not in groups]
    changed = [
        Fact(name, value, f"default: {defaults.get(name, _ABSENT)}")
        for name, value in fields.items()
        if name not in _HIDDEN
        and name.split(".")[0] in groups
        and defaults.get(name, _ABSENT) != value
    ]
    found: list[Block] = []
    if own:
        found.append(FactsBlock(own, "The experiment's own fields"))
    if changed:
        found.append(FactsBlock(changed, "Fields that differ from the framework's defaults"))
    return found


def _environments(runs: Sequence[RunData]) -> list[Block]:
    """Returns versions and devices: two lists for one run, a table for several."""
    facts = [_devices(run) for run in runs]
    versions = [
        {foreign(n, 60): foreign(v, 60) for n, v in object_in(run.config_file, "versions").items()}
        for run in runs
    ]
    if len(runs) == 1:
        lists = {"Devices and program": facts[0], "Versions": versions[0]}
        return [
            FactsBlock([Fact(name, value) for name, value in of.items()], title)
            for title, of in lists.items()
            if of
        ]
    together = [of | found for of, found in zip(facts, versions, strict=True)]
    names = dict.fromkeys(name for of in together for name in of)
    rows = [[name, *(of.get(name, "") for of in together)] for name in names]
    if not rows:
        return []
    columns = ["", *(run.name for run in runs)]
    return [TableBlock(columns, rows, title="Devices, program and versions")]


def _devices(run: RunData) -> dict[str, str]:
    content, program = run.config_file, run.program
    facts: dict[str, str] = {}
    count = content.get("devices", program.get("devices"))
    if type(count) is int:
        facts["devices"] = f"{count:,} x {foreign(content.get('device_kind', 'device'), 60)}"
    processes = run.events.starts[-1].processes if run.events.starts else None
    if processes is not None:
        facts["processes"] = f"{processes:,}"
    if isinstance(mesh := content.get("mesh"), str):
        facts["mesh"] = foreign(mesh, 200)
    elif axes := object_in(program, "mesh"):
        facts["mesh"] = foreign(", ".join(f"{axis}={size}" for axis, size in axes.items()), 200)
    if isinstance(strategy := run.config.get("strategy"), str):
        facts["strategy"] = foreign(strategy, 100)
    if type(parameters := program.get("parameters")) is int:
        facts["parameters"] = f"{parameters:,}"
    if is_number(flops := program.get("flops_per_step")):
        facts["FLOPs per step"] = _scaled(flops)
    if is_number(peak := program.get("peak_flops_per_device")):
        facts["peak of a device"] = f"{_scaled(peak)}/s"
    skipped = object_in(content, "skipped_records")
    bad = {foreign(k, 40): v for k, v in skipped.items() if type(v) is int and v > 0}
    if bad:
        facts["bad records left out"] = ", ".join(f"{k} {v:,}" for k, v in bad.items())
    return facts


def _scaled(flops: float) -> str:
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if flops >= 10**power:
            return f"{flops / 10**power:.3g} {prefix}FLOP"
    return f"{number(flops)} FLOP"


def _program(run: RunData, of: str) -> list[Block]:
    blocks: list[Block] = []
    if rows := _collectives(run.program.get("collectives")):
        columns = ["collective", "axes", "count", "bytes"]
        title = f"Collectives of one step{of}"
        blocks.append(TableBlock(columns, rows, frozenset({2, 3}), title=title))
    rows, count = _shardings(run.program.get("sharding"))
    if rows:
        title = f"Parameters and where they lie{of}"
        title += (
            f" (the first {len(rows):,} of {count:,})" if count > len(rows) else f" ({count:,})"
        )
        columns = ["parameter", "shape", "dtype", "sharding", "bytes per device"]
        folded = len(rows) > _FOLDED_ABOVE or bool(of)
        blocks.append(TableBlock(columns, rows, frozenset({4}), title=title, folded=folded))
    return blocks


def _collectives(found: Any) -> list[list[str]]:
    rows = []
    for item in found if isinstance(found, list) else []:
        if not isinstance(item, dict) or not is_number(item.get("bytes")):
            continue
        axes = item.get("axes")
        names = ", ".join(map(str, axes)) if isinstance(axes, list) else ""
        count = item.get("count")
        rows.append(
            [
                foreign(item.get("kind", ""), 60),
                foreign(names, 100),
                f"{count:,}" if type(count) is int else "",
                byte_size(round(item["bytes"])),
            ]
        )
    return rows


def _shardings(found: Any) -> tuple[list[list[str]], int]:
    items = [x for x in found if isinstance(x, dict)] if isinstance(found, list) else []
    rows = []
    for item in items[:_MOST_LEAVES]:
        shape, size = item.get("shape"), item.get("bytes_per_device")
        dims = [x for x in shape if type(x) is int] if isinstance(shape, list) else []
        rows.append(
            [
                foreign(item.get("path", ""), 200),
                " x ".join(map(str, dims)) or "scalar",
                foreign(item.get("dtype", ""), 40),
                foreign(item.get("spec", ""), 200),
                byte_size(round(size)) if is_number(size) else "",
            ]
        )
    return rows, len(items)
