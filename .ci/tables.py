"""Writes the tables of options in docs/running.md: `python .ci/tables.py`."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from spmdtrain.config.command_line import option_help
from spmdtrain.config.conflicts import CONFLICTS, Conflict, Kind, strategies_of
from spmdtrain.config.options import Group
from spmdtrain.config.run_config import OPTIONS, RunConfig

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "running.md"
BEGIN, END = "<!-- tables of options: .ci/tables.py -->", "<!-- end of the tables -->"


def tables() -> str:
    """Returns the tables of all options and of the pairs that are refused, in Markdown."""
    return "\n".join(
        [*_options(), "", "### Options that exclude or need each other", "", *_pairs()]
    )


def _options() -> Iterator[str]:
    yield "| option | default | must be | another value at a resume | in a `Loop` |"
    yield "|---|---|---|---|---|"
    helped = {each.name: each for each in option_help(RunConfig, None)}
    for group in Group:
        members = [name for name, row in OPTIONS.items() if row.option.group is group]
        if members:
            yield f"| **{group}** | | | | |"
        for name in members:
            of, default = OPTIONS[name].option, helped[name].default
            limit = of.range.text if of.range is not None else ""
            used = "refused" if of.in_loops else ""
            shown = f"`{default}`" if default else ""
            spelling = helped[name].spelling.replace("|", " or ")
            yield f"| `{spelling}` | {shown} | {limit} | {of.on_resume.value} | {used} |"


def _pairs() -> Iterator[str]:
    yield "| option | with | |"
    yield "|---|---|---|"
    for (other, why), rows in itertools.groupby(CONFLICTS, lambda row: (_other(row), _why(row))):
        names = ", ".join(f"{_spelled(row.option)} {' '.join(row.values)}".strip() for row in rows)
        yield f"| {names} | {other} | {why} |"


def _other(row: Conflict) -> str:
    if row.kind is Kind.NEEDS:
        return f"without {_spelled(row.other)}"
    if row.kind is Kind.ONLY_FOR:
        return f"another {_spelled(row.other)}"
    names = [*strategies_of(row), *map(str, row.refused)]
    if row.allowed:
        allowed = [str(value) for value in row.allowed if value is not None]
        return f"{_spelled(row.other)} other than {', '.join(allowed)}"
    return f"{_spelled(row.other)} {', '.join(f'`{name}`' for name in names)}".strip()


def _spelled(name: str) -> str:
    without = "no-" if OPTIONS[name].default is True else ""
    return f"`--{without}{name}`".replace("_", "-")


def _why(row: Conflict) -> str:
    if row.kind is Kind.ONLY_FOR:
        return f"it is for {row.because}"
    if row.kind is Kind.SAME:
        return "they say the same"
    instead = "" if row.option in row.instead and not row.because else row.instead
    parts = [row.because, "" if instead.startswith(("leave one", "give one")) else instead]
    return "; ".join(filter(None, parts)) or row.instead


def main() -> None:
    """Rewrites the part of the page between the two marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
