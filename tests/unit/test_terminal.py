"""The output on a terminal: the progress bar at several widths, colors, and quiet runs."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import jax.numpy as jnp
import linear_model
import numpy as np
import pytest
from helpers import BOUND
from jax import Array

from spmdtrain import EarlyStopping, Loop, StorageError, TrainState
from spmdtrain.document.terminal import (
    LINE_WIDTH,
    LineColor,
    Terminal,
    metric_texts,
    number,
    short_lines,
)
from spmdtrain.errors import discard_output

TEXTS = ["loss 0.1234", "accuracy 0.9", "10,508 examples/s", "164.2 steps/s"]
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def in_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> Terminal:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", str(width))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


@pytest.mark.parametrize(
    ("width", "metrics", "bar"), [(20, 0, 0), (40, 0, 10), (60, 2, 0), (80, 3, 5), (120, 4, 30)]
)
def test_a_narrow_bar_shortens_then_loses_metrics_and_never_steps_and_time(
    width: int,
    metrics: int,
    bar: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = in_terminal(monkeypatch, width)
    with terminal.progress("train", done=0, total=12345):
        terminal.advance(678, TEXTS)
    line = re.sub(r"\x1b\[[\d;?]*\w", "", capsys.readouterr().out).rstrip("\n").splitlines()[-1]
    line = line.rpartition("\r")[2]
    assert len(line) <= (width if width == 20 else width - 4)
    expected = [" 678/12345", "  ".join(TEXTS[:metrics]), "-:--:--"]
    assert line.rstrip().endswith(" ".join(x for x in expected if x))
    assert line.startswith("train ") == (width > 20)
    assert len(re.findall("[━╸╺]", line)) == bar


def on_screen(written: str, width: int) -> list[str]:
    """The lines of a terminal that has received a text."""
    lines, row, column = [""], 0, 0
    for control, kind, character in re.findall(r"\x1b\[([\d;?]*)(\w)|(.)", written, re.DOTALL):
        if kind == "A":
            row -= int(control or 1)
        elif kind == "K":
            lines[row] = lines[row][:column] if control != "2" else ""
        elif character == "\r":
            column = 0
        elif character == "\n" or (character and column == width):
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        if character and character not in "\r\n":
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return lines


@pytest.mark.parametrize("width", [30, 80])
def test_a_bar_stands_once_after_keys_that_the_terminal_shows(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = in_terminal(monkeypatch, width)
    with terminal.progress("train", done=0, total=50):
        for step in (1, 2):
            terminal.advance(step, TEXTS)
            terminal.console.file.write("^C^C")  # Ctrl-C, as the terminal shows it
            terminal.line("a line")
        terminal.console.file.write("^C^C")
    shown = [line.split()[0] for line in on_screen(capsys.readouterr().out, width) if line.strip()]
    assert shown == ["a", "a", "train"]


def test_a_bar_ends_with_its_last_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = in_terminal(monkeypatch, 60)
    with terminal.progress("evaluate", done=0, total=5):  # too quick for a refresh
        terminal.advance(5)
    last = re.sub(r"\x1b\[[\d;?]*\w", "", capsys.readouterr().out).rstrip().rpartition("\r")[2]
    assert last.startswith("evaluate ") and last.endswith(" 5/5 0:00:00")


def test_a_long_line_breaks_between_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "epoch 1 at step 21: loss 1.841  learning_rate 0.002"
    in_terminal(monkeypatch, 40).line(long)
    shown = capsys.readouterr().out
    assert shown == "epoch 1 at step 21: loss 1.841\n  learning_rate 0.002\n"
    monkeypatch.delenv("FORCE_COLOR")
    Terminal().line(long)
    assert capsys.readouterr().out == f"{long}\n"


def test_colors_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_terminal(monkeypatch, 80).line("finished", LineColor.SUCCESS)
    assert capsys.readouterr().out == "\x1b[32mfinished\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    Terminal().line("finished", LineColor.SUCCESS)
    assert capsys.readouterr().out == "finished\n"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.delenv("FORCE_COLOR")
    Terminal().line("finished", LineColor.SUCCESS)  # a file
    assert capsys.readouterr().out == "finished\n"


def test_lines_of_the_start_fit_80_columns() -> None:
    long = "reduced by XLA, because " + "the model draws random numbers " * 4
    lines = short_lines(["8 x cpu", long])
    assert lines[0] == "8 x cpu" and len(lines) == 3
    assert all(len(line) <= LINE_WIDTH for line in lines)
    assert " ".join(line.strip() for line in lines[1:]) == long.strip()


def test_a_narrow_table_has_a_row_for_each_metric(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"train": {"loss": 0.5}, "test": {"loss": 0.25, "accuracy": 0.75, "perplexity": 1.5}}
    in_terminal(monkeypatch, 40).results(rows)
    wide = capsys.readouterr().out
    assert re.search("train .*0.5.*\n.*test .*0.25.* 0.75.* 1.5", wide)
    in_terminal(monkeypatch, 30).results(rows)
    assert re.search(r"loss .*0.5.* 0.25.*\n.*accuracy .* 0.75.*\n", capsys.readouterr().out)


def test_names_with_brackets_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().results({"eval": {"accuracy[en]": 0.5, "accuracy[/en]": 0.25}})
    assert re.search(r" accuracy\[en\] . accuracy\[/en\] ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("value", "text"),
    [(9999.4, "9999"), (9999.7, "10,000"), (-9999.7, "-10,000"), (12345.6, "12,346"), (0.0, "0")],
)
def test_a_large_number_has_all_digits_before_the_point(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.slow
def test_a_quiet_trainer_prints_the_last_metrics_only(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = linear_model.trainer(quiet=True, terminal=None)
    result = trainer.fit((X, Y), epochs=2, validation=(X, Y))
    assert capsys.readouterr().out == f"eval at step 4: loss {result.validation['loss']:.4g}\n"


@pytest.mark.slow
def test_a_quiet_run_prints_warnings_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    early = EarlyStopping("loss")
    linear_model.trainer(quiet=True, terminal=None, callbacks=[early]).fit((X, Y), steps=1)
    printed = capsys.readouterr()
    assert re.fullmatch(r"train at step 1: loss [\d.]+\n", printed.out)
    assert printed.err.startswith("EarlyStopping(loss) had no effect, because")
    Terminal(quiet=True).warning("lost")
    assert capsys.readouterr() == ("", "")


def test_a_quiet_loop_prints_the_last_metrics_only(capsys: pytest.CaptureFixture[str]) -> None:
    def init(key: Array) -> dict[str, Array]:
        return {"params": jnp.zeros(())}

    def step(
        state: TrainState, batch: tuple[Array, Array], key: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        return state, {"loss": batch[0].sum() * 0 + 0.5}

    with Loop(steps=2, global_batch_size=8, quiet=True) as loop:
        state = loop.start(init, train=(X, Y))
        compiled = loop.compile_step(step)
        for batch in loop.batches():
            state, output = compiled(state, batch)
            loop.end_step(state, output)
    assert capsys.readouterr().out == "train at step 2: loss 0.5\n"


@pytest.mark.parametrize("results_only", [False, True])
def test_pieces_of_a_line_are_printed_at_once_and_not_interpreted(
    results_only: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal(results_only=results_only)
    terminal.piece("[bold]a\n:b")
    assert capsys.readouterr().out == "[bold]a\n:b"
    terminal.piece(" c")
    assert capsys.readouterr().out == " c"


def test_control_characters_in_names_of_metrics_are_escaped() -> None:
    assert metric_texts({"a\x1b[31m\r\u202eb": 0.5}) == [r"a\x1b[31m\r\u202eb 0.5"]


@pytest.mark.parametrize("why", ["No space left on device", "Broken pipe"])
def test_a_run_continues_without_output_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    if why != "Broken pipe":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        terminal = Terminal(optional=True)
        terminal.results({"eval": {"loss": 0.5}})
        terminal.line("more")
        monkeypatch.undo()
    words = f"standard output cannot be written ({why}): the run continues without it\n"
    assert capsys.readouterr().err == words


@pytest.mark.slow
def test_a_run_continues_without_a_reader_and_other_commands_end() -> None:
    script = """
import sys
from spmdtrain.errors import open_closed_output
from spmdtrain.document.terminal import Terminal
open_closed_output()
terminal = Terminal(optional=sys.argv[1] == "run")
for _ in range(3):
    terminal.line("x" * 2**17)  # more than a pipe holds
print("printed")
sys.exit(7)
"""

    def ended(mode: str, output: str) -> subprocess.CompletedProcess[str]:
        line = f'"$@" {output}; exit ${{PIPESTATUS[0]}}'
        given = ["bash", "-c", line, "-", sys.executable, "-c", script, mode]
        return subprocess.run(given, capture_output=True, text=True, timeout=BOUND, check=False)

    read = ended("run", "| true")
    assert read.returncode == 7, read.stderr
    assert read.stderr.count("the run continues without it") == 1
    assert ended("run", "2>&1 | true").returncode == 7
    assert ended("run", ">&- 2>&-").returncode == 7
    assert ended("other", "| true").returncode == 1


@pytest.mark.parametrize("show", [lambda x: x.line("a"), lambda x: x.console.print("a")])
def test_another_command_ends_if_its_output_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, show: Callable[[Terminal], None]
) -> None:
    with open("/dev/full", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(StorageError, match="standard output cannot be written: No space left"):
            show(Terminal())
        discard_output(out)
        monkeypatch.undo()
