"""The help of a command whose options include the options of an experiment.

tyro parses the options, but has no groups of options, and cannot hide an option from the help only.
"""

import ast
import dataclasses
import enum
import functools
import inspect
import io
import operator
import re
import textwrap
import tokenize
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from rich.text import Text

from spmdtrain.config.run_config import RunConfig
from spmdtrain.document.terminal import LINE_WIDTH, Terminal
from spmdtrain.errors import exit_if_output_is_closed
from spmdtrain.train.help_groups import HELP_GROUPS

HELP, HELP_ALL = ("-h", "--help"), ("--help-all", "--help_all")
_INDENT, _DOC_COLUMN = 2, 30
_OPTION, _HEADING, _DEFAULT = "cyan", "bold", "dim"  # styles of rich
_NONE = type(None)
_OF_NONE = re.compile(r"None means (.+?)\.(?:\s|$)")  # in a docstring


@dataclass(frozen=True)
class OptionHelp:
    """The help of one option.

    Attributes:
      name: The name of the field; a nested one has a dot.
      spelling: The option with the placeholder of its value: `--mesh.data INT`.
      doc: The docstring of the field.
      default: As written on a command line; empty for None and empty values.
    """

    name: str
    spelling: str
    doc: str
    default: str
    is_required: bool


def show_help(
    default: RunConfig, of: type, prog: str, description: str, *, experiment: str, all_options: bool
) -> None:
    """Prints the help of a command.

    Args:
      default: The experiment's configuration with the default values.
      of: The dataclass of the command's own options.
      prog: The program's name.
      description: The first paragraphs.
      experiment: The name of the experiment; empty if none is given.
      all_options: Whether to show also rare options, and complete descriptions.
    """
    terminal = Terminal()
    width = min(terminal.console.width, 100 if terminal.console.is_terminal else LINE_WIDTH)
    own = list(option_help(of, None))
    required = [f"--{x.name} {x.name.upper()}" for x in own if x.is_required]
    usage = textwrap.wrap(" ".join(["usage:", prog, *required, "[OPTIONS]"]), width)
    lines = [*map(Text, usage), Text(), *map(Text, _paragraphs(description, width)), Text()]
    inherited = {field.name for field in dataclasses.fields(RunConfig)}
    options = [*own, *option_help(type(default), default)]
    of_experiment = [x for x in options[len(own) :] if x.name.split(".")[0] not in inherited]
    hidden = 0
    sections = {experiment or "Experiment": of_experiment} | grouped(
        own, [x for x in options[len(own) :] if x not in of_experiment]
    )
    rare = {name for group in HELP_GROUPS for name in group.rare}
    usual = {name for group in HELP_GROUPS for name in group.usual}
    for title, members in sections.items():
        shown = [
            option
            for option in members
            if all_options or option.name in usual or not _is_in(option.name, rare)
        ]
        hidden += len(members) - len(shown)
        if shown:
            lines.append(Text(title, _HEADING))
            complete = all_options or title in (experiment, "Command")
            for option in shown:
                lines += _entry(option, width, complete=complete)
            lines.append(Text())
    rest = (
        f"--help-all shows {hidden} more options, and complete descriptions."
        if hidden
        else "--help shows the usual options only."
    )
    lines += map(Text, textwrap.wrap(rest, width))
    with exit_if_output_is_closed():
        for line in lines:
            terminal.console.print(line)


def grouped(own: Sequence[OptionHelp], config: Sequence[OptionHelp]) -> dict[str, list[OptionHelp]]:
    """Returns options by the title of their group, in the order of `HELP_GROUPS`.

    Args:
      own: Options of the command.
      config: Options of every experiment.
    """
    named = {name for group in HELP_GROUPS for name in (*group.usual, *group.rare)}
    sections = {"Command": [x for x in own if not _is_in(x.name, named)]}
    for group in HELP_GROUPS:
        names = (*group.usual, *group.rare)
        members = [x for x in (*own, *config) if _is_in(x.name, names)]
        order = {name: number for number, name in enumerate(names)}
        members.sort(key=lambda x: order.get(x.name, order.get(x.name.split(".")[0], 0)))
        sections[group.title] = members
    sections["Other"] = [x for x in config if not _is_in(x.name, named)]
    return sections


def _is_in(name: str, names: Sequence[str] | set[str]) -> bool:
    return name in names or name.split(".")[0] in names


# -- the options of a dataclass --------------------------------------------------------------------


def option_help(of: type, default: Any, prefix: str = "") -> Iterator[OptionHelp]:
    """Yields the help of the options that tyro makes of a dataclass.

    Args:
      default: An instance with the default values; None takes the defaults of the class.
      prefix: The beginning of the names of its options.
    """
    docs, kinds = field_docs(of), get_type_hints(of, include_extras=True)
    for field in dataclasses.fields(of):
        value = _default_of(field) if default is None else getattr(default, field.name)
        kind = kinds[field.name]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from option_help(type(value), value, f"{prefix}{field.name}.")
            continue
        name = prefix + field.name
        option = f"--{name}".replace("_", "-")
        if bool in (kind, _without_none(kind)):
            option = option.replace("--", "--[no-]", 1) if value is True else option
        else:
            option += f" {_values(kind)}"
        required = value is dataclasses.MISSING
        text = "" if required else _as_written(value)
        yield OptionHelp(name, option, docs.get(field.name, ""), text, required)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _as_written(value: Any) -> str:
    """Returns a default value as it is written on a command line."""
    if value is None or value is False:
        return ""
    if value is True:
        return "on"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {_as_written(x)}" for name, x in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return " ".join(map(_as_written, value))
    if isinstance(value, enum.Enum):
        return str(value.value) if isinstance(value, enum.StrEnum) else value.name
    return str(value)


def _without_none(kind: Any) -> Any:
    """Removes Annotated from a type, and None from a union."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        rest = [x for x in get_args(kind) if x is not _NONE]
        return functools.reduce(operator.or_, rest)
    return kind


def _values(kind: Any) -> str:
    """Returns the placeholder of the values of a type: INT, {auto,never}, STR ..."""
    kind = _without_none(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "{" + ",".join(str(x) for x in arguments if x is not None) + "}"
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        return "{" + ",".join(kind) + "}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "{" + ",".join(x.name for x in kind) + "}"
    if origin in (Union, types.UnionType):
        return "|".join(map(_values, arguments))
    if origin is tuple and arguments[-1:] != (...,):
        return " ".join(map(_values, arguments))
    if isinstance(origin, type) and arguments:  # several values of one type, or pairs
        return " ".join(_values(x) for x in arguments if x is not ...) + " ..."
    return getattr(kind, "__name__", str(kind)).upper()


# -- docstrings of fields --------------------------------------------------------------------------


def field_docs(of: type) -> dict[str, str]:
    """Returns the docstrings of the fields of a dataclass and its bases by name.

    A docstring is a string after the field, or a comment in the same line or in the lines above it.
    """
    docs: dict[str, str] = {}
    for each in reversed(of.__mro__):
        if dataclasses.is_dataclass(each):
            # A field that only changes the default keeps the inherited docstring.
            docs |= {name: text for name, text in _own_docs(each).items() if text}
    return docs


def _own_docs(of: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(of))
        (tree,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError):  # it was made without a file
        return {}
    assert isinstance(tree, ast.ClassDef)
    comments: dict[int, tuple[str, bool]] = {}  # by line: the text, and whether it is all of it
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            comments[token.start[0]] = text, token.line.lstrip().startswith("#")
    docs: dict[str, str] = {}
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = str(after.value.value)
        elif node.end_lineno in comments:
            text = comments[node.end_lineno][0]
        else:
            line = node.lineno - 1
            while line in comments and comments[line][1]:
                text, line = f"{comments[line][0]} {text}", line - 1
        docs[node.target.id] = " ".join(text.split())
    return docs


# -- layout ----------------------------------------------------------------------------------------


def _entry(option: OptionHelp, width: int, *, complete: bool) -> list[Text]:
    doc = option.doc if complete else _first_sentence(option.doc)
    note = "(required)" if option.is_required else ""
    if option.default:
        note = f"[default: {option.default}]"
    elif not complete and (meaning := _OF_NONE.search(option.doc)):
        note = f"[default: {meaning[1]}]"
    column = _DOC_COLUMN if width >= 60 else _INDENT + 4
    room = max(width - column, 20)
    note_at = len(doc) + 1 if doc else 0
    words = textwrap.wrap(f"{doc} {note}".strip(), room, break_on_hyphens=False)
    left = Text(" " * _INDENT + option.spelling)
    left.stylize(_OPTION, _INDENT, _INDENT + len(option.spelling.split(" ")[0]))
    texts, seen = [], 0
    for line in words:  # the note is dim, on whichever lines it is
        text = Text(line)
        if seen + len(line) > note_at:
            text.stylize(_DEFAULT, max(0, note_at - seen))
        seen += len(line) + 1
        texts.append(text)
    if texts and left.cell_len + 2 <= column:
        left.append(" " * (column - left.cell_len)).append_text(texts.pop(0))
    wrapped = textwrap.wrap(left.plain, width, subsequent_indent=" " * (_INDENT + 4))
    lines = [left] if left.cell_len <= width else [Text(line, _OPTION) for line in wrapped]
    return lines + [Text(" " * column).append_text(text) for text in texts]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.:])\s+(?=[A-Z`])", text, maxsplit=1)[0].rstrip(":")


def _paragraphs(text: str, width: int) -> list[str]:
    """Returns a text as lines of a width; indented paragraphs keep their lines."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        given = paragraph.strip("\n").splitlines()
        if lines:
            lines.append("")
        indented = any(line.startswith((" ", "\t")) for line in given)
        wrapped = textwrap.wrap(" ".join(given), width, break_on_hyphens=False)
        lines += given if indented else wrapped
    return lines
