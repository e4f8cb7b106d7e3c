"""The program `.ci/compare`: definitions of two commits, exit codes, and what it may not hide."""

import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers import REPOSITORY

PROGRAM = REPOSITORY / ".ci" / "compare"
OLD = {
    "a.py": '''"""Things."""

import os

LIMIT = 3


def f(x):
    import sys
    return x + 1
''',
    "b.py": '''"""More."""

from spmdtrain.a import f


class C:
    def m(self):
        return f(1)


print(C)
if TYPE_CHECKING:
    from spmdtrain.a import g
    Alias = int
''',
}
# What was in a.py is in c.py, and f imports nothing.
MOVED = {
    "b.py": OLD["b.py"].replace("More", "Other").replace("spmdtrain.a", "spmdtrain.c"),
    "c.py": '"""Things."""\n\n\ndef f(x):\n    return x + 1\n\n\nLIMIT = 3\n',
}


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    """The program as a module."""
    loader = importlib.machinery.SourceFileLoader("compare", str(PROGRAM))
    spec = importlib.util.spec_from_loader("compare", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module  # for its dataclasses
    loader.exec_module(module)
    return module


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the program and a commit of a small package."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / ".ci").mkdir()
    shutil.copy(PROGRAM, folder / ".ci")
    write(folder, OLD)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "old")
    return folder


def write(folder: Path, files: dict[str, str]) -> None:
    shutil.rmtree(folder / "spmdtrain", ignore_errors=True)
    (folder / "spmdtrain").mkdir()
    for name, text in files.items():
        (folder / "spmdtrain" / name).write_text(text)


def run(folder: Path, *options: str) -> tuple[int, list[str], str]:
    """Runs the program; returns its exit code, the lines that it prints, and its error."""
    line = [sys.executable, ".ci/compare", *options]
    ended = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    return ended.returncode, ended.stdout.splitlines(), ended.stderr


def test_a_pure_move_has_equal_definitions(repository: Path) -> None:
    write(repository, MOVED)  # the working tree is the default of NEW
    assert run(repository, "--definitions", "HEAD") == (0, ["5 definitions are equal"], "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("c.py", "x + 1", "x + 2", ["f, spmdtrain/a.py -> spmdtrain/c.py"]),
        ("c.py", "LIMIT = 3", "LIMIT = 4", ["LIMIT, spmdtrain/a.py -> spmdtrain/c.py"]),
        ("b.py", "f(1)", "f(2)", ["C (m), spmdtrain/b.py -> spmdtrain/b.py"]),
        (
            "b.py",
            "Alias = int",
            "Alias = str",
            ["if TYPE_CHECKING:, spmdtrain/b.py -> spmdtrain/b.py"],
        ),
        ("b.py", "print(C)", "", ["print(C), only in OLD, spmdtrain/b.py"]),
        ("b.py", "print(C)", "print(C)\nprint(C)", ["print(C), only in NEW, spmdtrain/b.py"]),
        (
            "c.py",
            "def f",
            "def g",
            ["f, only in OLD, spmdtrain/a.py", "g, only in NEW, spmdtrain/c.py"],
        ),
    ],
)
def test_a_changed_lost_or_doubled_definition_is_named(
    file: str, old: str, new: str, expected: list[str], repository: Path
) -> None:
    write(repository, MOVED | {file: MOVED[file].replace(old, new)})
    code, lines, _ = run(repository, "--definitions", "HEAD")
    assert (code, lines[:-1]) == (1, [f"differs: {line}" for line in expected])
    names = [line.partition(",")[0].partition(" (m)")[0] for line in expected]
    ignored = [word for name in names for word in ("--ignore", name)]
    code, lines, _ = run(repository, "--definitions", "HEAD", *ignored)
    assert (code, lines[:-1]) == (0, [f"ignored: {line}" for line in expected])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "error: the following arguments are required: OLD; see .ci/compare --help"),
        (["nosuch"], "error: Needed a single revision"),
        (["HEAD", "HEAD", "--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_use_is_one_short_message(options: list[str], message: str, repository: Path) -> None:
    code, lines, error = run(repository, *options)
    assert (code, lines, error.count("\n")) == (2, [], 1) and message in error


LINE = "step 4/4  loss 2.314  accuracy 0.1562  7575 examples/s  118.4 steps/s  input_wait 0.0%  "


@pytest.mark.parametrize(
    ("file", "old", "equal", "other"),
    [
        (
            "command 0.txt",
            LINE + "0:01 left",
            LINE.replace("7575", "10,477").replace("118.4", "9").replace("0.0%", "1.2%")
            + "1:00 left",
            LINE.replace("2.314", "2.315") + "0:01 left",
        ),
        (
            "command 0.txt",
            "10 parameters; step compiled in 3.7 s: 1 all-reduce, 9 kB,\n  over data=8",
            "10 parameters; step traced in 0.3 s, read from the cache in 0.1 s: 1\n  all-reduce, "
            "9 kB, over data=8",
            "10 parameters; step compiled in 3.7 s: 2 all-reduces, 9 kB,\n  over data=8",
        ),
        (
            "command 0.txt",
            "error: /tmp/x/old/checkout/e.py: the moon is too far",
            "error: /tmp/x/new/checkout/e.py: the moon is too far",
            "error: /tmp/x/new/checkout/e.py: the moon is very far",
        ),
        (
            "report.html",
            "<td>1.7 s</td><td>2.222</td>",
            "<td>31 s</td><td>2.222</td>",
            "<td>1.7 s</td><td>2.223</td>",
        ),
        (
            "run/events.jsonl",
            '{"time": 1.5, "event": "start", "step": 0}',
            '{"time": 2.25, "event": "start", "step": 0}',
            '{"time": 1.5, "event": "start", "step": 1}',
        ),
        (
            "run/checkpoints/4/manifest.json",
            ' "seed": 0,\n "seconds": 0.5,\n "params/d/0f20": 17,\n "sum": "0f20"',
            ' "seed": 0,\n "seconds": 0.25,\n "params/d/ab12": 18,\n "sum": "0f20"',
            ' "seed": 0,\n "seconds": 0.5,\n "params/d/0f20": 17,\n "sum": "0f21"',
        ),
        (
            "run/config.json",
            '{"config": {"seed": 1, "steps": 2}}',
            '{"config": {"steps": 2, "seed": 1}}',
            '{"config": {"steps": 1, "seed": 2}}',
        ),
    ],
)
def test_times_and_places_may_differ_and_nothing_else(
    file: str, old: str, equal: str, other: str, compare: ModuleType
) -> None:
    def shown(text: str) -> str:
        result: str = compare.without_varying(text, file, Path("/tmp/x"))
        return result

    assert old != equal and shown(old) == shown(equal) != shown(other)


def test_the_table_counts_and_a_difference_is_an_error(
    compare: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [
        compare.Item("help", "help/80 columns: command 0.txt", "a\nb\n", "a\nc\n"),
        compare.Item("plan", "plan/digits: command 0.txt", "a", "a"),
        compare.Item("plan", "plan/digits: page.html", None, "a"),
    ]
    assert not compare.print_table(items, ["*/page.html", "*page.html"])
    *shown, _, _, helps, plans = capsys.readouterr().out.splitlines()
    assert shown == ["help: 80 columns: command 0.txt", "    @@ -2 +2 @@", "    -b", "    +c"]
    assert helps.split() == ["help", "0", "1", "0", "DIFFERS"]
    assert plans.split() == ["plan", "1", "0", "1"]
    assert compare.print_table(items, ["help", "*page.html"])
    assert not compare.print_table(items, ["help"])
    assert "plan: digits: page.html\n    only in NEW" in capsys.readouterr().out


def test_a_step_is_what_donates_and_names_of_functions_do_not_matter(
    compare: ModuleType, tmp_path: Path
) -> None:
    def steps(folder: Path, *programs: str) -> str | None:
        folder.mkdir()
        for number, text in enumerate(programs):
            (folder / f"{number}.mlir").write_text(text)
        compare.keep_steps(folder)
        return (folder / "steps.mlir").read_text() if folder.exists() else None

    step = "module @jit_step { func @main(%a {tf.aliasing_output = 0 : i32}) { call @f } func @f }"
    first = steps(tmp_path / "a", step, "module @copies { func @main(%a) }")
    assert first is not None and "copies" not in first
    assert steps(tmp_path / "b", step.replace("@f", "@g").replace("@jit_step", "@x")) == first
    assert steps(tmp_path / "c", step.replace("call @f", "all_reduce")) != first
    assert steps(tmp_path / "d", "module @copies { func @main(%a) }") is None
