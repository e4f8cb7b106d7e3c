"""Makes a step of a run again, compares two runs, explains a step, or prints its examples.

`python -m spmdtrain.replay RUN --step 5120 [--devices 4]`
"""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import tyro

from spmdtrain.checkpoints.run_identity import changed_options
from spmdtrain.distributed import initialize
from spmdtrain.document.blocks import Page, Section, TableBlock
from spmdtrain.document.html import render_page
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import (
    ExitCode,
    UserError,
    exit_code_of,
    exit_if_output_is_closed,
    foreign,
    version_of,
)
from spmdtrain.record.page_file import open_page_file
from spmdtrain.record.storage import source_digest
from spmdtrain.replay.explain import explain_step, magnitudes_chart
from spmdtrain.replay.recorded_run import (
    ArrayDifference,
    RecordedRun,
    StepComparison,
    array_differences,
    compare_steps,
    manifest_at,
    read_run,
)
from spmdtrain.replay.rerun import Rerun, prepare_step, print_examples, rerun


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The workdir of the run: a folder or URL. It is only read."""
    step: int | None = None
    """The step to make again, by its number in the log."""
    devices: int | None = None
    """Number of devices. None means the run's own mesh."""
    against: str | None = None
    """The workdir of another run: find the first step at which the two differ."""
    examples: bool = False
    """Print the examples of the step instead of making it."""
    explain: bool = False
    """Find the operation whose result is not finite first, and the examples that reach it."""
    html: str | None = None
    """File to write with --explain: a page with the explanation and a chart of the layers, which
    needs no network (extra `report`)."""
    per_layer: bool = False
    """Show a row for each layer in the table of differences, also for equal ones."""
    parameters: bool = False
    """Show a row for each array of the state, also for equal ones."""
    config: str | None = None
    """The experiment's file. None means the one that the run has recorded."""
    keep: str | None = None
    """Keep the files of the replay in this new folder. None means a temporary one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with the given or the process's arguments and returns the exit code."""
    with exit_if_output_is_closed():
        options = tyro.cli(
            Options, args=arguments, prog="python -m spmdtrain.replay", description=__doc__
        )
        return exit_code_of(lambda: execute(options, Terminal()))


def execute(options: Options, terminal: Terminal) -> int:
    """Executes the parsed command.

    Returns:
      The exit code: 0 if what was compared is equal, 5 (`DIFFERENT`) if it differs.

    Raises:
      UserError: If options contradict each other, or a run lacks what they need.
      StorageError: If a file cannot be read or written.
    """
    if options.step is not None and options.step < 1:
        raise UserError(f"--step is {options.step}: steps are counted from 1")
    if options.against is not None:
        _refuse_others(options, "against", "compares two runs as they are")
        return _compare(options, terminal)
    if options.step is None:
        raise UserError("--step or --against is needed: a step to make again, or another run")
    initialize.set_single_process()
    run = read_run(options.run)
    if options.step > run.last_step:
        raise UserError(
            f"--step is {options.step}, and the last step that {options.run} is known to have made "
            f"is {run.last_step}"
        )
    if options.step <= run.first_step:
        raise UserError(
            f"--step is {options.step}, and {options.run} began after step {run.first_step} as a "
            f"fork of {foreign(str(run.config['fork_from']))}, which made that step"
        )
    if options.examples:
        _refuse_others(options, "examples", "makes no step")
        print_examples(run, options.step, options.config, terminal)
        return ExitCode.DONE
    if options.explain:
        _refuse_others(options, "explain", "compares nothing")
        return _explain(options, options.step, run, terminal)
    if options.html is not None:
        raise UserError("--html is the page of an explanation: give --explain, too")
    return _replay(options, options.step, run, terminal)


def _refuse_others(options: Options, name: str, what: str) -> None:
    """Raises `UserError` if options are given that the option `name` does not use."""
    unused = {
        "against": ("html", "devices", "examples", "explain", "config", "keep"),
        "examples": ("html", "devices", "explain", "keep", "per_layer", "parameters"),
        "explain": ("per_layer", "parameters"),
    }
    for other in unused[name]:
        if getattr(options, other) not in (None, False):
            raise UserError(f"--{name} {what}: leave out --{other.replace('_', '-')}")


def _compare(options: Options, terminal: Terminal) -> int:
    """Finds the first step at which two runs differ and prints it."""
    assert options.against is not None
    first, second = read_run(options.run), read_run(options.against)
    steps = None if options.step is None else [options.step]
    found = compare_steps(first, second, steps)
    if not found:
        where = "no step" if options.step is None else f"nothing of step {options.step}"
        raise UserError(
            f"{where} is recorded by both {options.run} and {options.against}: give "
            "--log-hash-every N to both runs"
        )
    for change in changed_options(first.config, second.config):
        terminal.line(f"other configuration: {change}")
    different = next((each for each in found if not each.is_equal), None)
    hashed = [each.step for each in found if each.hashes is not None]
    terminal.line(
        f"{len(found)} common steps from {found[0].step} to {found[-1].step}, {len(hashed)} of "
        "them with hashes of the state"
    )
    if different is None:
        terminal.line("equal, bit for bit")
        return ExitCode.DONE
    equal = [each.step for each in found if each.step < different.step]
    since = f"the last equal one is {equal[-1]}" if equal else "no earlier one is recorded"
    terminal.line(f"the first step that differs is {different.step}; {since}")
    terminal.show(metrics_table(different, (options.run, options.against)))
    with_arrays = next((x for x in found if x.different_arrays), None)
    if with_arrays is not None:
        _print_arrays(options, with_arrays, first, second, terminal)
    return ExitCode.DIFFERENT


def _explain(options: Options, step: int, run: RecordedRun, terminal: Terminal) -> int:
    """Explains a step, from the state and the batch that it was made with."""
    file = None if options.html is None else open_page_file(options.html)
    with _folder(options.keep) as folder:
        with terminal.waiting(f"replaying up to step {step - 1}"):
            prepared = prepare_step(run, step, options.devices, options.config, folder, terminal)
        found, magnitudes = explain_step(prepared, step, terminal)
    terminal.show(*found, magnitudes)
    if file is not None:
        layers = Section("Layers", [magnitudes_chart(magnitudes), magnitudes])
        title = f"Step {step} of {foreign(Path(options.run).name, 200)}"
        page = Page(title, [Section("Why", found), layers], foreign(options.run, 500))
        file.write(render_page(page))
        terminal.line(f"page: {file.path}")
    return ExitCode.DONE


def _replay(options: Options, step: int, run: RecordedRun, terminal: Terminal) -> int:
    """Makes a step again and compares it with the record of the run."""
    if step in run.failed and step not in run.steps:
        raise UserError(
            f"step {step} of {run.workdir} failed, so nothing of it is recorded "
            f"({foreign(run.failed[step])}): --examples prints its examples"
        )
    if step not in run.steps:
        known = min(run.steps, key=lambda other: abs(other - step), default=None)
        near = "" if known is None else f"; the nearest step that is recorded is {known}"
        raise UserError(
            f"{run.workdir} has recorded nothing of step {step}{near}. --log-every and "
            "--log-hash-every of the run decide what is recorded"
        )
    with _folder(options.keep) as folder:
        with terminal.waiting(f"replaying up to step {step}"):
            made = rerun(run, step, options.devices, options.config, folder, terminal)
        began = f"checkpoint {made.first}" if made.first else "the initial state"
        steps = f"step {step}" if made.first + 1 == step else f"steps {made.first + 1} to {step}"
        terminal.line(f"{steps} again, from {began}: {made.placement}")
        for line in (others := other_conditions(run, made, step, options.config)):
            terminal.line(line)
        again = read_run(made.folder)
        found = compare_steps(run, again, range(made.first + 1, step + 1))
        asked = found[-1]
        terminal.show(metrics_table(asked, ("logged", "replayed")))
        different = [each for each in found if not each.is_equal]
        if not different:
            terminal.line(f"step {step} is equal, bit for bit")
            return ExitCode.DONE
        if different[0].step < step:
            terminal.line(f"the first step that differs is {different[0].step}")
        code = ExitCode.DIFFERENT
        if asked.is_equal:
            terminal.line(f"step {step} is equal, bit for bit, but not all steps before it")
        elif others and not asked.promised:
            raise UserError(
                f"under other conditions only loss and gradient norm have to be equal, and the run "
                f"has recorded neither of step {step}: replay a step that it has logged (by "
                "--log-every), or on its own devices"
            )
        elif others and asked.is_within_tolerance:
            terminal.line(
                f"step {step} is equal to a relative difference of 1e-5, as expected under other "
                "conditions"
            )
            code = ExitCode.DONE
        else:
            terminal.line(f"step {step} differs")
        with_arrays = next((x for x in different if x.different_arrays), None)
        # Within the tolerance, nearly all arrays differ by rounding.
        shows = code is ExitCode.DIFFERENT or options.per_layer or options.parameters
        if with_arrays is not None and shows:
            _print_arrays(options, with_arrays, run, again, terminal)
        return code


def _print_arrays(
    options: Options,
    compared: StepComparison,
    first: RecordedRun,
    second: RecordedRun,
    terminal: Terminal,
) -> None:
    """Prints the arrays of the state that differ after a step."""
    step, names = compared.step, compared.different_arrays
    far = array_differences(first, second, step, names)
    terminal.line(
        f"after step {step}, {len(names)} of {len(compared.arrays)} arrays of the state differ"
    )
    if options.per_layer:
        terminal.show(layers_table(compared, far))
    else:
        terminal.show(arrays_table(compared, far, every=options.parameters))
        if (more := len(names) - SHOWN) > 0 and not options.parameters:
            terminal.line(f"and {more} more (--parameters shows all, --per-layer a row per layer)")


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    """Yields an empty folder, which is removed at the end unless `keep` names it."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="spmdtrain-replay-") as folder:
            yield Path(folder)
        return
    folder_to_keep = Path(keep)
    if folder_to_keep.exists() and (not folder_to_keep.is_dir() or any(folder_to_keep.iterdir())):
        raise UserError(f"--keep {keep} exists and is not an empty folder: give another one")
    yield folder_to_keep


# -- Tables of a comparison of two runs ------------------------------------------------------------

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


def metrics_table(compared: StepComparison, titles: tuple[str, str]) -> TableBlock:
    """Returns the table of the metrics and the hash of a step; `titles` name the two runs."""
    rows = []
    for name, pair in compared.metrics.items():
        difference = "equal" if pair.is_equal else f"{pair.difference:.1e}"
        rows.append((foreign(name, 60), f"{pair.first:.9g}", f"{pair.second:.9g}", difference))
    if compared.hashes is not None:
        first, second = compared.hashes
        rows.append(("state hash", first, second, "equal" if first == second else "differs"))
    columns, title = ("", *titles, "relative difference"), f"step {compared.step}"
    return TableBlock(columns, rows, frozenset({1, 2, 3}), title=title, whole=frozenset({1, 2}))


def arrays_table(
    compared: StepComparison, far: Mapping[str, ArrayDifference], *, every: bool
) -> TableBlock:
    """Returns the table of the arrays that differ after a step, at most `SHOWN`, or of all arrays.

    `far` may lack arrays; their cells stay empty.
    """
    rows = []
    names: Iterable[str] = compared.different_arrays[:SHOWN]
    for name in compared.arrays if every else names:
        verdict = "equal" if compared.arrays[name] else "differs"
        rows.append((foreign(name, 200), verdict, *_cells([name], far)))
    return _table("array", rows, far)


def layers_table(compared: StepComparison, far: Mapping[str, ArrayDifference]) -> TableBlock:
    """Returns the table of the layers after a step, in the order of the state.

    `far` may lack arrays; their cells stay empty.
    """
    layers: dict[str, list[str]] = {}
    for name in compared.arrays:
        layers.setdefault(name.rpartition("/")[0] or name, []).append(name)
    rows = []
    for layer, names in layers.items():
        different = sum(not compared.arrays[name] for name in names)
        verdict = f"{different} of {len(names)} differ" if different else "equal"
        rows.append((foreign(layer, 200), verdict, *_cells(names, far)))
    return _table("layer", rows, far)


def _table(
    kind: str, rows: Sequence[Sequence[str]], far: Mapping[str, ArrayDifference]
) -> TableBlock:
    sizes = ("largest difference", "relative", "elements") if far else ()
    return TableBlock((kind, "verdict", *sizes), rows, numeric=frozenset({2, 3, 4}))


def _cells(names: Iterable[str], far: Mapping[str, ArrayDifference]) -> list[str]:
    """Returns the cells with the largest differences in a group of arrays."""
    known = [far[name] for name in names if name in far]
    if not known:
        return ["", "", ""] if far else []
    absolute = max(each.absolute for each in known)
    relative = max(each.relative for each in known)
    elements, size = sum(x.elements for x in known), sum(x.size for x in known)
    return [f"{absolute:.2e}", f"{relative:.1e}", f"{elements:,} of {size:,}"]
