"""Outputs of commands: no wider than the terminal, not cut, without codes in files."""

import contextlib
import dataclasses
import os
import pty
import re
import sys
import threading
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import chromium
from helpers import small_experiment
from plan_helpers import report as planned
from report_files import png, write_run
from rich.cells import cell_len

import spmdtrain
from spmdtrain.checkpoints.command import main as checkpoints
from spmdtrain.document.blocks import (
    Block,
    Fact,
    FactsBlock,
    GalleryBlock,
    ImageBlock,
    NoteBlock,
    Page,
    Section,
    TableBlock,
)
from spmdtrain.document.html import render_page
from spmdtrain.document.terminal import Terminal
from spmdtrain.parameter_server.executor import StalenessStats
from spmdtrain.plan.page import plan_page
from spmdtrain.plan.tables import advice_blocks, plan_blocks, scaling_blocks
from spmdtrain.replay.command import main as replay
from spmdtrain.report.command import RunReport
from spmdtrain.run import main as run
from spmdtrain.sweep.runner import RunningRow, TrialResult, result_tables, running_table
from spmdtrain.sweep.trials import Trial, TrialState

WIDTHS = (60, 80, 120, 200)
COLOR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[\d;]*)?m")
Shown = Sequence[TableBlock | FactsBlock | NoteBlock]


# -- Everything that the commands show -------------------------------------------------------------


def shown_by(command: Callable[[list[str]], int], *arguments: object) -> Shown:
    """The blocks that a command shows, and the exit code 0."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Terminal, "show", lambda self, *blocks: found.extend(blocks))
        assert command(list(map(str, arguments))) == 0
    return found


def of_runs(folder: Path) -> Iterator[tuple[str, Shown]]:
    """Outputs of commands for a run that starts from a file of weights, by name of the output."""
    arrays: dict[str, Any] = {"kernel": np.ones((1, 1), np.float32), "a" * 70: np.ones(3)}
    np.savez(folder / "weights.npz", **arrays)
    rules = 'weight_map=[WeightRule("kernel", "kernel")], train=data,'
    config = small_experiment(
        folder,
        ("UserError\n", "UserError, WeightRule\n"),
        ("        train=data,", f"        {rules}"),
    )
    given = ("--config", config, "--workdir", folder / "a run", "--log-hash-every", 1)
    start = ("--init-from", folder / "weights.npz", "--init-from-strict", "matching")
    options = (*given, *start, "--strategy", "fully_sharded")
    yield "run --show-sharding", shown_by(run, *options, "--show-sharding")
    assert not (folder / "a run").exists()
    yield "run", shown_by(run, *options)
    yield "checkpoints verify", shown_by(checkpoints, "verify", folder / "a run")
    yield "checkpoints show", shown_by(checkpoints, "show", folder / "a run")
    yield "checkpoints show --step", shown_by(checkpoints, "show", folder / "a run", "--step", 4)
    yield "replay", shown_by(replay, folder / "a run", "--step", 3, "--parameters")
    yield "replay --examples", shown_by(replay, folder / "a run", "--step", 3, "--examples")


def of_sweeps() -> Iterator[tuple[str, Shown]]:
    values = [("1e-3", "adam"), ("0.0012345678", "sgd with a long name")]
    trials = [
        Trial(seed, f"learning_rate={rate},seed={seed},optimizer={name}", options, Path("sweep"))
        for rate, name in values
        for seed in range(2)
        for options in [{"learning_rate": rate, "seed": f"{seed}", "optimizer": name}]
    ]
    for trial in trials:
        trial.state = TrialState.FINISHED
    results = [TrialResult(trial, 12_000, 0.5 + n, 0.25) for n, trial in enumerate(trials)]
    yield "sweep", result_tables(results, "validation_loss", "min")
    rows = [RunningRow(x.name, "evaluate", 12_000, 200_000, 0.1234, 3723) for x in trials]
    yield "sweep, running", [running_table(rows, {TrialState.WAITING: 3}, "validation_loss")]


def of_servers() -> Iterator[tuple[str, Shown]]:
    stats = StalenessStats()
    for staleness in (0, 0, 1, 9):
        stats.add(staleness, pulled=1000, pushed=500)
    yield "parameter servers", [stats.table({f"worker {n}": 1000 for n in range(12)})]


def of_plans() -> Iterator[tuple[str, Shown]]:
    plan = planned()
    long = {"op_name": "jit(train_step)/" + "transpose(jvp(model))/" * 4, "line": ""}
    plan["collectives"] += [
        each | long | {"kind": "reduce-scatter"} for each in plan["collectives"]
    ]
    figures = {"peak": 10**9, "sent": 10**7, "estimate": 0.01}
    plan["advice"] = [
        {
            **{"finding": "the step waits for all-reduces", "options": "--mesh.fsdp 4"},
            **{"tried": [], "without": figures, "with_options": figures},
        }
    ]
    plan["notes"] = ["the time to start a step is not part of the estimate " * 3]
    yield "plan", [*plan_blocks(plan), *advice_blocks(plan)]
    yield "plan, several", scaling_blocks([plan, planned("v5p:4x4x4")], ["fewer bytes are sent"])


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Shown]:
    folder = tmp_path_factory.mktemp("shown")
    return {n: x for of in (of_runs(folder), of_sweeps(), of_servers(), of_plans()) for n, x in of}


COMMANDS = (
    *("run --show-sharding", "run", "checkpoints verify", "checkpoints show"),
    *("checkpoints show --step", "replay"),
    *("replay --examples", "sweep", "sweep, running", "parameter servers", "plan", "plan, several"),
)


# -- A terminal, and a file ------------------------------------------------------------------------


def in_terminal(show: Callable[[Terminal], None], width: int, **environment: str) -> str:
    """The text that a function writes to a pseudo-terminal of some columns."""
    reads, writes = pty.openpty()
    tty.setraw(writes)  # which would otherwise write \r before each \n
    written = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(reads, 65536):
                written.extend(part)

    thread = threading.Thread(target=read)
    thread.start()
    with pytest.MonkeyPatch.context() as patch, open(writes, "w") as out:
        for name in ("NO_COLOR", "FORCE_COLOR"):
            patch.delenv(name, raising=False)
        for name, value in {"COLUMNS": f"{width}", "TERM": "xterm-256color", **environment}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdout", out)
        terminal = Terminal()
        assert terminal.console.is_terminal and terminal.console.width == width
        show(terminal)
    thread.join()
    os.close(reads)
    return written.decode()


def plain(written: str) -> list[str]:
    """The lines without codes."""
    return re.sub(r"\x1b\[[\d;?]*\w", "", written).splitlines()


def words(block: TableBlock | FactsBlock | NoteBlock) -> Iterator[str]:
    """The words of a block that no column breaks."""
    if isinstance(block, TableBlock):
        columns = [n for n in range(len(block.columns)) if n not in block.optional]
        texts = [row[n] for row in block.rows for n in columns]
        texts += [block.title, block.note]
    elif isinstance(block, FactsBlock):
        texts = [f"{fact.name}: {fact.value}" for fact in block.facts]
    else:
        texts = [block.text]
    yield from (word for text in texts for word in text.split() if cell_len(word) <= 12)


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(
    command: str, width: int, shown: Mapping[str, Shown]
) -> None:
    blocks = shown[command]
    assert set(shown) == set(COMMANDS) and any(isinstance(x, TableBlock) for x in blocks)
    lines = plain(in_terminal(lambda terminal: terminal.show(*blocks), width))
    for line in lines:
        # A longer word, such as a path, stays whole: the terminal breaks it.
        assert cell_len(line) <= width or len(line.split()) == 1, line
        assert "…" not in line
    found = set(re.split(r"[\s┃│]+", " ".join(lines)))
    assert {word for block in blocks for word in words(block)} - found == set()
    optional = {b.columns[n] for b in blocks if isinstance(b, TableBlock) for n in b.optional}
    text = " ".join(" ".join(lines).split())
    assert all(name in text for name in optional)  # as columns, or in the note without them


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_has_no_codes_and_a_terminal_with_no_color_has_no_color(
    command: str, shown: Mapping[str, Shown], capfd: pytest.CaptureFixture[str]
) -> None:
    Terminal().show(*shown[command])
    written = capfd.readouterr().out
    assert "\x1b" not in written and "\r" not in written
    rows = [row for block in shown[command] if isinstance(block, TableBlock) for row in block.rows]
    assert len([line for line in written.splitlines() if line[:1] == "│"]) == len(rows)

    def colored(terminal: Terminal) -> None:
        terminal.show(*shown[command])

    assert not COLOR.search(in_terminal(colored, 100, NO_COLOR="1"))


def test_a_single_module_draws_tables() -> None:
    imports = re.compile(r"^\s*(?:from|import) (rich[\w.]*)", re.M)
    package = Path(spmdtrain.__file__).parent
    found = {
        path.relative_to(package).as_posix(): {*imports.findall(path.read_text())}
        for path in package.rglob("*.py")
    }
    # Text has colors, and no columns.
    drawing = {path for path, modules in found.items() if modules - {"rich.text"}}
    assert drawing == {"document/terminal.py"}


def test_the_check_of_colors_sees_them() -> None:
    assert COLOR.search("\x1b[1;31mred") and COLOR.search("\x1b[92mgreen")
    assert COLOR.search("\x1b[38;5;3m") and not COLOR.search("\x1b[1;3mbold and italic\x1b[0m")


# -- Tables by themselves --------------------------------------------------------------------------

TABLE = TableBlock(
    ("array", "size", "where it is"),
    [("layers/0/kernel", "12.5 kB", "on all devices of the mesh"), ("b", "1 B", "on one")],
    numeric=frozenset({1}),
    title="arrays of a state",
    note="and 3 more",
    totals=1,
    whole=frozenset({0, 1}),
)


def drawn(block: TableBlock, width: int) -> list[str]:
    return plain(in_terminal(lambda terminal: terminal.show(block), width))


def test_cells_are_broken_between_words_and_whole_columns_never() -> None:
    assert drawn(TABLE, 46) == [
        "arrays of a state",
        "┏━━━━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━━━━━━━┓",
        "┃ array           ┃    size ┃ where it is    ┃",
        "┡━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━━━━━━━┩",
        "│ layers/0/kernel │ 12.5 kB │ on all devices │",
        "│                 │         │ of the mesh    │",
        "├─────────────────┼─────────┼────────────────┤",
        "│ b               │     1 B │ on one         │",
        "└─────────────────┴─────────┴────────────────┘",
        "and 3 more",
    ]


def test_a_row_is_several_lines_where_no_table_fits() -> None:
    assert drawn(TABLE, 38) == [
        "arrays of a state",
        "layers/0/kernel",
        "    size 12.5 kB",
        "    where it is on all devices of the",
        "      mesh",
        "b",
        "    size 1 B  where it is on one",
        "and 3 more",
    ]
    labels = dataclasses.replace(TABLE, lines=((0, 2), (1,)), labels={1: "", 2: ""}, title="")
    assert drawn(dataclasses.replace(labels, whole=frozenset({0, 1, 2})), 46)[:2] == [
        "layers/0/kernel  on all devices of the mesh",
        "    12.5 kB",
    ]


def test_columns_that_a_narrow_terminal_leaves_out_are_named() -> None:
    some = dataclasses.replace(TABLE, optional=frozenset({2}))
    assert "where it is" in drawn(some, 48)[2]
    narrow = drawn(some, 38)
    assert narrow[2] == "┃ array           ┃    size ┃"
    assert " ".join(narrow[-2:]) == "and 3 more; a wider terminal also   shows: where it is"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_text_of_files_is_only_text(encoding: str, tmp_path: Path) -> None:
    evil = TableBlock(["a[red]"], [["\x1b[31mé\n"], ["[/]:smile:"]], title="\x1b]0;title\x07")
    with (
        pytest.MonkeyPatch.context() as patch,
        open(tmp_path / "out", "w", encoding=encoding) as out,
    ):
        patch.setattr(sys, "stdout", out)
        Terminal().show(evil, FactsBlock([Fact("\x1bname", "[b]")]))
    written = (tmp_path / "out").read_text(encoding)
    accent = "é" if encoding == "utf-8" else r"\xe9"
    assert "\x1b" not in written and "\x07" not in written
    for text in (
        "a[red]",
        rf"\x1b[31m{accent}\n",
        "[/]:smile:",
        r"\x1b]0;title\x07",
        r"\x1bname: [b]",
    ):
        assert text in written


def test_a_table_without_some_columns_has_the_properties_of_the_others() -> None:
    less = dataclasses.replace(TABLE, lines=((0,), (1, 2)), labels={2: "in"}).without({1})
    assert less.columns == ["array", "where it is"] and less.rows[1] == ["b", "on one"]
    assert less.numeric == set() and less.whole == {0}
    assert (less.lines, less.labels, less.title) == ([[0], [1]], {1: "in"}, TABLE.title)


# -- Pages, as a screen reader reads them ----------------------------------------------------------


class Outline(HTMLParser):
    """Headings, tables and pictures of a page in their order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.language: str | None = None
        self.headings: list[int] = []
        self.captions: list[str] = []
        self.pictures: list[str] = []
        self.unscoped: list[str] = []
        self.tables = 0
        self._in_caption = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        if tag == "html":
            self.language = of.get("lang")
        elif re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        elif tag == "table":
            self.tables += 1
        elif tag == "caption":
            assert len(self.captions) == self.tables - 1  # the first child of its table
            self.captions.append("")
            self._in_caption = True
        elif tag == "th" and of.get("scope") not in ("col", "row"):
            self.unscoped.append(self.get_starttag_text() or "")
        elif tag == "img":
            self.pictures.append(of.get("alt") or "")
        elif of.get("role") == "img":
            self.pictures.append(of.get("aria-label") or "")

    def handle_endtag(self, tag: str) -> None:
        self._in_caption = self._in_caption and tag != "caption"

    def handle_data(self, data: str) -> None:
        if self._in_caption:
            self.captions[-1] += data.strip()


def of_runs_in(folder: Path, *names: str) -> Page:
    report = RunReport([str(write_run(folder / name, seed=n)) for n, name in enumerate(names)])
    report.refresh()
    return report.page()


def of_run(folder: Path) -> Page:
    return of_runs_in(folder, "run")


def of_two_runs(folder: Path) -> Page:
    return of_runs_in(folder, "first", "second")


def of_plan(folder: Path) -> Page:
    return plan_page([planned()], [], "Plan", "command")


def of_two_plans(folder: Path) -> Page:
    plans = [planned(), planned("v5p:4x4x4"), {"topology": "v5e:8x8", "error": "no"}]
    return plan_page(plans, ["a: b"], "Plan", "command")


def without_titles(folder: Path) -> Page:
    image = ImageBlock(png())
    facts = FactsBlock([Fact("a", "b")], "facts")
    untitled: list[Block] = [TABLE, facts, image, GalleryBlock([image])]
    named = [dataclasses.replace(TABLE, title="", folded=folded) for folded in (False, True)]
    return Page("page", [Section("", untitled), Section("section", [*named, image])])


@pytest.mark.slow
@pytest.mark.parametrize("page", [of_run, of_two_runs, of_plan, of_two_plans, without_titles])
def test_headings_have_no_gaps_and_tables_and_pictures_have_names(
    page: Callable[[Path], Page], tmp_path: Path
) -> None:
    outline = Outline(render_page(page(tmp_path)))
    assert outline.language == "en"
    assert outline.headings[0] == 1 and outline.headings.count(1) == 1
    steps = zip(outline.headings, outline.headings[1:], strict=False)
    assert all(after <= before + 1 for before, after in steps), outline.headings
    assert outline.tables == len(outline.captions) > 0 and all(outline.captions)
    assert outline.unscoped == []
    assert outline.pictures and all(outline.pictures)


@pytest.mark.slow
def test_a_drawn_chart_has_its_title_as_its_name_and_a_scrolled_table_shows_its_own(
    tmp_path: Path,
) -> None:
    (tmp_path / "page.html").write_text(render_page(of_two_plans(tmp_path)))
    with chromium() as browser:
        browser.open(tmp_path / "page.html", width=390)
        browser.drawn()
        names = browser.evaluate("[...document.querySelectorAll('.plot')].map(x => x.ariaLabel)")
        assert names and names == browser.texts(".chart figcaption .title")
        browser.evaluate("document.querySelector('.scroll').scrollLeft = 200")
        title = "document.querySelector('.scroll caption .title').getBoundingClientRect().left"
        assert browser.evaluate("document.querySelector('.scroll').scrollLeft") == 200
        assert 0 < browser.evaluate(title) < 60
