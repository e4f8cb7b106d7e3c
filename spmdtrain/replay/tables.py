"""Tables of a comparison of two runs."""

from collections.abc import Iterable, Mapping

import jax
from rich.table import Table

from spmdtrain.checkpoints.run_identity import changed_options
from spmdtrain.errors import foreign
from spmdtrain.optional import version_of
from spmdtrain.record.storage import source_digest
from spmdtrain.replay.comparison import ArrayDifference, StepComparison
from spmdtrain.replay.recorded_run import RecordedRun, manifest_at
from spmdtrain.replay.rerun import Rerun

SHOWN = 10
"""Number of arrays in a table that does not show all."""


def other_conditions(
    run: RecordedRun, made: Rerun, step: int, file: str | None = None
) -> list[str]:
    """Returns a line for each condition under which a replay differs from the run.

    Without any difference, the same bits are expected. If `file` is None, the experiment's file is
    the one that the run has recorded.
    """
    found = []
    path = file or run.experiment
    if path and run.experiment_sha256 and source_digest(path) != run.experiment_sha256:
        found.append(
            f"another experiment: {foreign(path)} is not the file with which the run began"
        )
    devices, kind = run.devices_of(step), jax.devices()[0].device_kind
    # The same bits on any number of devices and processes.
    is_exact = run.config.get("exact") is not None
    if devices is not None and devices != made.devices and not is_exact:
        found.append(f"other devices: the run made step {step} on {devices}")
    processes = run.processes_of(step)
    if processes not in (None, 1) and not is_exact:  # a replay is one process
        found.append(f"other processes: the run made step {step} in {processes}")
    if run.device_kind and run.device_kind != kind:
        found.append(f"other devices: the run had {foreign(run.device_kind, 100)}")
    of_later = next((saved for saved in run.checkpoints.steps if saved >= step), None)
    manifest = None if of_later is None else manifest_at(run.checkpoints, of_later)
    if manifest is not None:  # the options of the start that made the step
        changes = changed_options(manifest.identity.config, run.config)
        found += [f"other options of a later start, which the replay uses: {x}" for x in changes]
    for name, version in run.versions.items():
        here = version_of(name)
        if here != version:
            found.append(
                f"other versions: {foreign(name, 60)} was {foreign(version, 60)}, is {here}"
            )
    return found


def metrics_table(compared: StepComparison, titles: tuple[str, str]) -> Table:
    """Returns the table of the metrics and the hash of a step; `titles` name the two runs."""
    table = Table("", *map(foreign, titles), "relative difference", title=f"step {compared.step}")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, pair in compared.metrics.items():
        difference = "equal" if pair.is_equal else f"{pair.difference:.1e}"
        table.add_row(foreign(name, 60), f"{pair.first:.9g}", f"{pair.second:.9g}", difference)
    if compared.hashes is not None:
        first, second = compared.hashes
        table.add_row("state hash", first, second, "equal" if first == second else "differs")
    return table


def arrays_table(
    compared: StepComparison, far: Mapping[str, ArrayDifference], *, every: bool
) -> Table:
    """Returns the table of the arrays that differ after a step, at most `SHOWN`, or of all arrays.

    `far` may lack arrays; their cells stay empty.
    """
    table = _table("array", far)
    names: Iterable[str] = compared.different_arrays[:SHOWN]
    for name in compared.arrays if every else names:
        cells = "equal" if compared.arrays[name] else "differs"
        table.add_row(foreign(name, 200), cells, *_cells([name], far))
    return table


def layers_table(compared: StepComparison, far: Mapping[str, ArrayDifference]) -> Table:
    """Returns the table of the layers after a step, in the order of the state.

    `far` may lack arrays; their cells stay empty.
    """
    layers: dict[str, list[str]] = {}
    for name in compared.arrays:
        layers.setdefault(name.rpartition("/")[0] or name, []).append(name)
    table = _table("layer", far)
    for layer, names in layers.items():
        different = sum(not compared.arrays[name] for name in names)
        verdict = f"{different} of {len(names)} differ" if different else "equal"
        table.add_row(foreign(layer, 200), verdict, *_cells(names, far))
    return table


def _table(kind: str, far: Mapping[str, ArrayDifference]) -> Table:
    columns = ("largest difference", "relative", "elements") if far else ()
    table = Table(kind, "verdict", *columns)
    for column in table.columns[2:]:
        column.justify = "right"
    return table


def _cells(names: Iterable[str], far: Mapping[str, ArrayDifference]) -> list[str]:
    """Returns the cells with the largest differences in a group of arrays."""
    known = [far[name] for name in names if name in far]
    if not known:
        return ["", "", ""] if far else []
    absolute = max(each.absolute for each in known)
    relative = max(each.relative for each in known)
    elements, size = sum(x.elements for x in known), sum(x.size for x in known)
    return [f"{absolute:.2e}", f"{relative:.1e}", f"{elements:,} of {size:,}"]
