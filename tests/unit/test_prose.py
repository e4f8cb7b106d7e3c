"""The words of the package and of its documentation: plain technical English."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import spmdtrain

PACKAGE = Path(spmdtrain.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Words that no documentation of JAX, PyTorch or TensorFlow uses in this sense. Each has a plain
# equivalent: a process "reports", an option "applies", a call is "pending".
PRIVATE = re.compile(
    r"\b(told|nobody|somebody|anybody|whoever|heeds?|heeded|under way|on (?:its|their) way|"
    r"what there is|is no number|are no numbers|at hand|gets? on|takes? part|the very same|"
    r"stands? (?:aside|above|beside)|comes? to (?:lie|it)|hangs? on|hush|in one's stead|anew|"
    r"go(?:es|ing|ne)? on|what it was given|looks? on|made of all that|all the same|"
    r"makes? up for|mend\w*|in vain|born|knows no|ones own|"
    r"is no (?:dataset|stream|path))\b|, say\b".replace(" ", r"\s+"),
    re.IGNORECASE,
)

# American spelling, as in the names of JAX, PyTorch and TensorFlow (`initialize`, `color`).
BRITISH = re.compile(
    r"\b(?!(?:de)?serialise leaves\b)"  # functions of Equinox
    r"(?:de|in|re|un)?(?:categor|central|character|final|general|initial|local|material|maxim|"
    r"minim|normal|optim|organ|parallel|quant|random|real|recogn|serial|special|standard|summar|"
    r"synchron|token|util|vector|visual)is(?:e|es|ed|er|ers|ing|ations?)\b|\banalys(?:e|ed|ing)\b|"
    r"\b\w*(?:behaviour|colour|favour|flavour|honour|neighbour)|\bcentre[ds]?\b|"
    r"\b(?:artefact|catalogue|defence|fulfil|grey|labelled|labelling|learnt|licence|modelling|"
    r"offence|programme|towards|travelled)s?\b",
    re.IGNORECASE,
)
# One word for one thing: checksum, corrupted, quarantined, hangs.
SYNONYMS = re.compile(
    r"\b(?:check[ -]sums?|damaged?|sets? aside|stall(?:s|ed|ing)?|"
    r"stuck(?! timeout))\b",  # an option of XLA
    re.IGNORECASE,
)
ROOT = Path(__file__).parents[2]
# Everything that people write and read: code, documentation, templates, scripts and configuration.
TEXTS = sorted(
    path
    for pattern in (
        *("spmdtrain/**/*.py", "experiments/**/*.py", "benchmarks/**/*.py", "tests/**/*.py"),
        *("docs/**/*.md", "*.md", ".github/**/*.md", ".github/**/*.yml", "launch/*", ".ci/*"),
        *("Makefile", "pyproject.toml", ".pre-commit-config.yaml", ".gitignore"),
    )
    for path in ROOT.glob(pattern)
    if path.is_file() and path != Path(__file__)
)


def matches(pattern: re.Pattern[str]) -> list[tuple[str, int, str]]:
    """Returns file, line and text of each match, also in names such as `a_run_goes_on`."""
    found = []
    for path in TEXTS:
        text = re.sub("[_#]", " ", path.read_text())
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append((str(path.relative_to(ROOT)), line, match[0]))
    return found


def test_the_texts_are_those_of_the_repository() -> None:
    names = {str(path.relative_to(ROOT)) for path in TEXTS}
    assert {"spmdtrain/run.py", "Makefile", "launch/tfjob.yaml", ".ci/run", "README.md"} <= names
    assert {"docs/security.md", "tests/helpers.py", ".github/workflows/test.yml"} <= names


def test_no_word_is_of_a_private_language() -> None:
    assert not matches(PRIVATE)


def test_spelling_is_american() -> None:
    assert not matches(BRITISH)


def test_one_thing_has_one_word() -> None:
    assert not matches(SYNONYMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_docstring_begins_with_a_noun_phrase_or_a_verb(path: Path) -> None:
    """A module and a class name a thing; a function says what it does."""
    questions = ("What ", "Whether ", "How ", "Who ", "Where ", "Which ", "When ")
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            summary = ast.get_docstring(node) or ""
            name = getattr(node, "name", path.name)
            is_property = isinstance(node, ast.FunctionDef) and any(
                "property" in ast.unparse(decorator) for decorator in node.decorator_list
            )
            assert not summary.startswith(questions) or is_property, f"{path}: {name}: {summary}"


# -- sections of docstrings ----------------------------------------------------------------------
#
# The public API describes everything. Any other docstring is a line, and more only for what names
# and types do not say, so its sections may be incomplete, but name no parameter that is not there.

SECTION = re.compile(r"(Args|Returns|Yields|Raises|Attributes|Example|Examples|Note):+")
NO_RESULT = ("None", "Iterator[None]", "Generator[None]", "NoReturn", "Never")


@cache
def tree_of(path: Path) -> ast.Module:
    """Parses a file once, and not while tests are collected, which each worker does."""
    return ast.parse(path.read_text())


def file_of(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def definitions(
    node: ast.AST, of: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Yields classes, functions and methods by qualified name, but nothing inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield f"{of}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield f"{of}{child.name}", child
            yield from definitions(child, f"{of}{child.name}.")
        else:
            yield from definitions(child, of)


def public_api() -> set[tuple[Path, str]]:
    """The files and names of exported functions and classes, and of the classes' bases."""
    left = [(file_of(home), name) for name, home in spmdtrain._HOMES.items()]
    for path in FILES:
        if path.parent.name in ("testing", "models"):
            left += [(path, name) for name, _ in definitions(tree_of(path)) if name[0] != "_"]
    api = set()
    while left:
        path, name = left.pop()
        node = dict(definitions(tree_of(path))).get(name)
        if node is None or (path, name) in api:  # a constant has no docstring
            continue
        api.add((path, name))
        bases = {ast.unparse(b).split("[")[0] for b in getattr(node, "bases", ())}
        left += [(path, base) for base in bases]
        for imported in ast.walk(tree_of(path)):
            if isinstance(imported, ast.ImportFrom) and imported.module is not None:
                package, _, module = imported.module.partition(".")
                if package == "spmdtrain" and module:
                    left += [(file_of(module), x.name) for x in imported.names if x.name in bases]
    return api


API = public_api()
# Methods that the public API and JAX's pytrees leave to others, which need no docstring there.
ABSTRACT = {"tree_flatten", "tree_unflatten"} | {
    method.name
    for path, name in API
    for of, node in definitions(tree_of(path))
    if of == name
    for method in node.body
    if isinstance(method, ast.FunctionDef)
    and ast.get_docstring(method)
    and ast.unparse(method.body[-1]) in ("...", "raise NotImplementedError")
}


def sections_of(docstring: str) -> dict[str, list[str]]:
    """The entries of each section of a docstring: what is before the colon."""
    sections: dict[str, list[str]] = {}
    section, indent = "", 0
    for line in docstring.splitlines():
        depth = len(line) - len(line.lstrip())
        if match := SECTION.fullmatch(line):
            section, indent = match[1], 0
            sections[section] = []
        elif section and line.strip():
            indent = indent or depth
            if not depth:
                section = ""
            elif depth == indent:
                sections[section].append(line.strip().partition(":")[0])
    return sections


def parameters_of(function: ast.FunctionDef) -> list[str]:
    given = function.args
    names = [x.arg for x in (*given.posonlyargs, *given.args) if x.arg not in ("self", "cls")]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [x.arg for x in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def raised_by(statements: Iterable[ast.AST]) -> Iterator[str]:
    """Yields the exceptions that statements raise by name, outside of `try` and inner functions."""
    for node in statements:
        if isinstance(node, ast.Raise) and node.exc is not None:
            name = ast.unparse(node.exc).partition("(")[0].rpartition(".")[2]
            if name[0].isupper() and name != "NotImplementedError":
                yield name
        elif isinstance(node, ast.Try) and node.handlers:  # which may catch it
            yield from raised_by([*node.handlers, *node.orelse, *node.finalbody])
        elif not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield from raised_by(ast.iter_child_nodes(node))


def faults_of(function: ast.FunctionDef, *, of_api: bool) -> Iterator[str]:
    """Yields what the docstring of a function lacks, or names wrongly."""
    docstring = ast.get_docstring(function)
    is_property = any(
        "property" in ast.unparse(x) or ".setter" in ast.unparse(x) for x in function.decorator_list
    )
    if is_property:
        return
    if docstring is None:
        if of_api and not function.name.startswith("_") and function.name not in ABSTRACT:
            yield "no docstring, here or where it is abstract"
        return
    sections, parameters = sections_of(docstring), parameters_of(function)
    described = sections.get("Args", [])
    for name in described:
        if name not in parameters:
            yield f"Args describes {name}, which is no parameter"
    if not of_api or function.name.startswith("_"):
        return
    for name in parameters:
        if name not in described:
            yield f"Args lacks {name}"
    result = "None" if function.returns is None else ast.unparse(function.returns)
    has_result = result not in NO_RESULT and not docstring.startswith(("Return", "Yield"))
    if has_result and not {"Returns", "Yields"} & sections.keys():
        yield f"neither Returns nor Yields describes {result}"
    for name in sorted({*raised_by(function.body)} - {*sections.get("Raises", ())}):
        yield f"Raises lacks {name}"


def test_the_check_sees_what_a_docstring_lacks() -> None:
    code = """
def f(a: int, *b: int, c: int = 0, **d: int) -> int:
    '''Adds numbers.

    Args:
      a: A number,
        or: another.
      b: Numbers.
      **d: More numbers.

    Raises:
      TypeError: Never.
    '''
    try:
        raise KeyError(a)
    except KeyError:
        raise errors.OtherError from None
    raise ValueError
"""
    (function,) = ast.parse(code).body
    assert isinstance(function, ast.FunctionDef)
    unknown = "Args describes b, which is no parameter"
    lacking = ["Args lacks *b", "Args lacks c", "neither Returns nor Yields describes int"]
    lacking += ["Raises lacks OtherError", "Raises lacks ValueError"]
    assert [*faults_of(function, of_api=False)] == [unknown]
    assert [*faults_of(function, of_api=True)] == [unknown, *lacking]
    assert {
        (file_of("train.trainer"), "Trainer"),
        (file_of("config.options"), "OptionGroup"),
    } < API
    assert {"init", "run", "merge", "rows"} <= ABSTRACT


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_describe_the_public_api_and_no_parameter_that_is_not_there(path: Path) -> None:
    found = []
    classes = {
        name: node for name, node in definitions(tree_of(path)) if isinstance(node, ast.ClassDef)
    }
    for name, node in definitions(tree_of(path)):
        owner, _, own_name = name.rpartition(".")
        of_api = (path, owner or name) in API
        where = f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {name}"
        if isinstance(node, ast.FunctionDef) and (of_api or not owner.startswith("_")):
            found += [f"{where}: {fault}" for fault in faults_of(node, of_api=of_api)]
        if own_name == "__init__" and isinstance(node, ast.FunctionDef):
            of_class = ast.get_docstring(classes[owner]) or ""
            described = {*sections_of(of_class).get("Args", parameters_of(node))}
            unknown = described - {*parameters_of(node)}
            if unknown or (of_api and described != {*parameters_of(node)}):
                found.append(f"{where}: the class describes {described}")
    assert not found, "\n".join(found)
