"""The words of the package and of its documentation: plain technical English."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
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
    r"makes? up for)\b",
    re.IGNORECASE,
)

# American spelling, as in the names of JAX, PyTorch and TensorFlow (`initialize`, `color`).
BRITISH = re.compile(
    r"\b(?:de|in|re|un)?(?:categor|central|character|final|general|initial|local|material|maxim|"
    r"minim|normal|optim|organ|parallel|quant|random|real|recogn|serial|special|standard|summar|"
    r"synchron|token|util|vector|visual)is(?:e|es|ed|er|ers|ing|ations?)\b|\banalys(?:e|ed|ing)\b|"
    r"\b\w*(?:behaviour|colour|favour|flavour|honour|neighbour)|\bcentre[ds]?\b|"
    r"\b(?:artefact|catalogue|defence|fulfil|grey|labelled|labelling|learnt|licence|modelling|"
    r"offence|programme|towards|travelled)s?\b",
    re.IGNORECASE,
)
# One word for one thing (see the glossary): checksum, corrupted, quarantined, hangs.
SYNONYMS = re.compile(
    r"\b(?:check[ -]sums?|damaged?|sets? aside|stall(?:s|ed|ing)?|stuck)\b", re.IGNORECASE
)
ROOT = Path(__file__).parents[2]
TEXTS = [
    *(
        path
        for folder in ("spmdtrain", "experiments", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if path != Path(__file__)
    ),
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("*.md"),
]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yields each docstring, message and comment of a file with its line."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_word_is_of_a_private_language(path: Path) -> None:
    found = {(line, match[0]) for line, text in texts(path) for match in PRIVATE.finditer(text)}
    assert not found, f"{path}: {sorted(found)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_docstring_begins_with_a_noun_phrase_or_a_verb(path: Path) -> None:
    """A module and a class name a thing; a function says what it does."""
    questions = ("What ", "Whether ", "How ", "Who ", "Where ", "Which ", "When ")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            summary = ast.get_docstring(node) or ""
            name = getattr(node, "name", path.name)
            is_property = isinstance(node, ast.FunctionDef) and any(
                "property" in ast.unparse(decorator) for decorator in node.decorator_list
            )
            assert not summary.startswith(questions) or is_property, f"{path}: {name}: {summary}"


def test_spelling_is_american() -> None:
    found = {
        (str(path.relative_to(ROOT)), number, match[0])
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for match in BRITISH.finditer(line)
    }
    assert not found, sorted(found)


def test_one_thing_has_one_word() -> None:
    found = {
        (str(path.relative_to(ROOT)), number, match[0])
        for path in TEXTS
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for match in SYNONYMS.finditer(line)
    }
    assert not found, sorted(found)
