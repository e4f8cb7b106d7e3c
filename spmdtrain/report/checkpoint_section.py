"""The checkpoints of the runs, with the best one marked."""

import datetime
from collections.abc import Sequence

from spmdtrain.document.blocks import Section, TableBlock
from spmdtrain.document.terminal import byte_size, number
from spmdtrain.errors import foreign
from spmdtrain.report.run_data import RunData

_MOST = 50
_MOST_METRICS = 6


def checkpoint_section(runs: Sequence[RunData]) -> Section:
    """Returns the section of checkpoints, with the newest checkpoint of each run first."""
    blocks = [table for run in runs if (table := _table(run, len(runs) > 1)) is not None]
    return Section("Checkpoints", blocks)


def _table(run: RunData, is_named: bool) -> TableBlock | None:
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
