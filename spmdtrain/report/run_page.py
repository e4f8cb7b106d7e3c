"""The page of one or several runs."""

from collections.abc import Sequence
from pathlib import PurePosixPath

from spmdtrain.document.blocks import Page, Tone
from spmdtrain.errors import UserError, foreign
from spmdtrain.report.checkpoint_section import checkpoint_section
from spmdtrain.report.curve_sections import curve_sections
from spmdtrain.report.history_section import history_section
from spmdtrain.report.media_section import media_section
from spmdtrain.report.overview import TONES, overview
from spmdtrain.report.program_section import program_section
from spmdtrain.report.run_data import RunData


def run_page(runs: Sequence[RunData]) -> Page:
    """Returns the page of at least one run; sections without content are left out."""
    names = [run.name for run in runs]
    tones = {status.value: tone for status, tone in TONES.items()}
    badges = {}
    if len(runs) == 1 and (status := runs[0].status_name):
        badges[status] = tones.get(status, Tone.PLAIN)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    return Page(
        title=foreign(title, 200),
        subtitle=foreign(runs[0].workdir, 500) if len(runs) == 1 else "",
        badges=badges,
        sections=[
            overview(runs),
            *curve_sections(runs),
            history_section(runs),
            checkpoint_section(runs),
            media_section(runs),
            program_section(runs),
        ],
    )


def run_names(workdirs: Sequence[str]) -> list[str]:
    """Returns a short name for each workdir: as many last parts of the path as make it unique.

    Raises `UserError` if a workdir is given twice.
    """
    parts = [PurePosixPath(path.rstrip("/") or "/").parts for path in workdirs]
    if len(set(parts)) < len(parts):
        twice = next(path for path, of in zip(workdirs, parts, strict=True) if parts.count(of) > 1)
        raise UserError(f"{twice} is given twice: give each run once")
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(of[-count:]) for of in parts]
        if len(set(names)) == len(names):
            break
    return [foreign(name, 100) for name in names]
