"""Writes what follows from the options: `python .ci/options.py`.

These are the tables in docs/running.md, and the keywords of `Trainer` and `Loop`.
"""

import dataclasses
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdtrain.config import options
from spmdtrain.config.command_line import option_help
from spmdtrain.config.conflicts import CONFLICTS, Conflict, Kind, strategies_of
from spmdtrain.config.options import Group, OptionGroup
from spmdtrain.config.overrides import OF_BUILD, USED_IN_BUILD
from spmdtrain.config.run_config import OPTIONS, RunConfig

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "running.md"
KEYWORDS = ROOT / "spmdtrain" / "config" / "keywords.py"
BEGIN, END = "<!-- tables of options: .ci/options.py -->", "<!-- end of the tables -->"


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


def reference() -> str:
    """Returns the table of all options in Python, in Markdown."""
    rows = ["| keyword | type | default | |", "|---|---|---|---|"]
    groups = {type(each): each.PREFIX for each in _defaults() if isinstance(each, OptionGroup)}
    for of, prefix in {RunConfig: "", **groups}.items():
        docs = options.field_docs(of)
        if prefix:
            keyword = prefix.removesuffix(".")
            rows.append(f"| **`{keyword}={of.__name__}(...)`** | | | {of.__doc__.split('.')[0]} |")
        for field in dataclasses.fields(of):
            default, kind = options.default_of(field), inspect.formatannotation(field.type)
            if not isinstance(default, OptionGroup):
                cells = [f"`{field.name}`", f"`{kind}`", f"`{default!r}`", docs[field.name]]
                rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


def _defaults() -> list[Any]:
    return [options.default_of(field) for field in dataclasses.fields(RunConfig)]


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


# -- Keywords of `Trainer` and `Loop`, with their types, for editors and type checkers -------------


def keywords() -> str:
    """Returns the module of the keywords."""
    types = {
        field.name: _as_keyword(inspect.formatannotation(field.type))
        for field in dataclasses.fields(RunConfig)
        if field.name != "trackers"  # a parameter, which takes objects, too
    }
    in_trainers = types.keys() - OF_BUILD - USED_IN_BUILD
    in_loops = {name for name in types if name not in OPTIONS or not OPTIONS[name].option.in_loops}
    shared = in_trainers & in_loops
    groups = [text for text in types.values() if hasattr(options, text)]
    text = f"""
        '''Keywords of `Trainer` and `Loop` by type, written by .ci/options.py.'''

        from typing import Literal, TypedDict

        from spmdtrain.config.options import {", ".join(sorted(groups))}

        class _SharedOptions(TypedDict, total=False):
            {_lines(types, shared)}

        class TrainerOptions(_SharedOptions, total=False):
            '''The fields of `RunConfig` that a `Trainer` takes as keywords.'''
            {_lines(types, in_trainers - shared)}

        class LoopOptions(_SharedOptions, total=False):
            '''The fields of `RunConfig` that a `Loop` takes as keywords.'''
            {_lines(types, in_loops - shared)}
        """.replace("'''", '"""')
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(KEYWORDS), "-"]
    made = subprocess.run(
        command, input=textwrap.dedent(text), capture_output=True, text=True, check=True
    )
    return made.stdout


def _as_keyword(kind: str) -> str:
    kind = kind.replace("spmdtrain.config.options.", "")
    kind = re.sub(r"^Union\[(.+), NoneType\]$", r"Union[\1] | None", kind)
    kind = re.sub(r"^Union\[(\w+), (.+\])\]", r"\1 | \2", kind)
    return re.sub(r"tuple\[(.+), \.\.\.\]", r"tuple[\1, ...] | list[\1]", kind)


def _lines(types: Mapping[str, str], names: Collection[str]) -> str:
    members = [f"{name}: {kind}" for name, kind in types.items() if name in names]
    return ("\n" + " " * 12).join(members)


def main() -> None:
    """Rewrites the part of the page between the two marks, and the module of the keywords."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}")
    KEYWORDS.write_text(keywords())


if __name__ == "__main__":
    main()
