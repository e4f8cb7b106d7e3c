"""Output for people: lines, tables and facts on a terminal or in a file, and a progress bar."""

import contextlib
import enum
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.control import strip_control_codes
from rich.live import Live
from rich.measure import Measurement
from rich.progress import (
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spmdtrain.document.blocks import FactsBlock, NoteBlock, TableBlock
from spmdtrain.errors import (
    StorageError,
    UserError,
    discard_output,
    foreign,
    in_notebook,
    printable,
)

LINE_WIDTH = 80
"""Columns that lines about the start of a run use at most."""

_SHORTEST_BAR = 5  # columns; with less space there is no bar
_ECHO = 4  # columns: of `^C` typed twice, which the terminal writes behind the bar
_REFRESH = 0.25  # seconds; a shorter interval is not visible, and each refresh takes time


def number(value: float) -> str:
    """Returns a number with four significant digits: `0.01234`, `12,345`."""
    # From 9999.5 on, four digits would be `1e+04`.
    return f"{value:,.0f}" if abs(value) >= 9999.5 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Returns seconds as `1:05` or `2:03:04`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES |= {f"{name}i": 2 ** (10 * place) for place, name in enumerate("kmgt", 1)}
_BYTE_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", re.IGNORECASE)


def parse_byte_size(text: str, what: str) -> int:
    """Returns the bytes of a size such as 15.7GB, 16GiB or 40 MB.

    Raises:
      UserError: If the text is no size above 0; `what` names it.
    """
    match = _BYTE_SIZE.fullmatch(text.strip())
    count = 0 if match is None else int(float(match[1]) * _BYTES[(match[2] or "").lower()])
    if count <= 0:
        raise UserError(f"{what} is {text!r}: it must be a size such as 15.7GB or 16GiB")
    return count


def byte_size(count: int) -> str:
    """Returns a number of bytes with three significant digits: `1.08 MB`."""
    # `rich.filesize.decimal` has a fixed number of decimals: 1.1 MB and 999.9 kB.
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.5:  # a larger value would be rounded to 1000
            return f"{value:#.3g}".rstrip(".") + f" {unit}"
    return f"{value:.0f} GB"


def metric_texts(metrics: Mapping[str, float]) -> list[str]:
    """Returns the text of each metric: `loss 0.1234`."""
    return [f"{printable(name)} {number(value)}" for name, value in metrics.items()]


def short_lines(parts: Sequence[str], width: int = LINE_WIDTH) -> list[str]:
    """Returns each part as one line, or as several of at most `width` columns; words stay whole."""
    return [
        line
        for part in parts
        for line in textwrap.wrap(
            part, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    ]


class LineColor(enum.StrEnum):
    """Color of a line, as a style of rich."""

    PLAIN = ""
    SUCCESS = "green"  # the run is finished, an evaluation is the best so far
    WARNING = "yellow"


class Point(NamedTuple):
    """Metrics of a step, which a notebook draws as a point of a curve."""

    curve: str
    step: int
    metrics: Mapping[str, float]


class _Since:
    """A text with the seconds since it was created."""

    def __init__(self, text: str) -> None:
        self._text, self._began = text, time.monotonic()

    def __rich__(self) -> Text:
        return Text(f"{self._text}, {time.monotonic() - self._began:.0f} s")


class _BarColumn(ProgressColumn):
    """The whole line of a progress bar: description, bar, steps, metrics and the time left.

    On a narrow terminal, first the bar is shortened, then metrics are left out from the right, then
    the description. The steps and the time left are always shown.
    """

    max_refresh = None  # every change is shown

    def __init__(self) -> None:
        super().__init__()
        self._steps, self._left = MofNCompleteColumn(), TimeRemainingColumn()

    def render(self, task: Task) -> "_BarLine":
        return _BarLine(task, self._steps.render(task), self._left.render(task))


class _BarLine:
    def __init__(self, task: Task, steps: Text, left: Text) -> None:
        self._task, self._steps, self._left = task, steps, left

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        # A `^C` behind a full line would begin another one, and rich would leave the bar behind.
        least = self._steps.cell_len + self._left.cell_len + 1
        width = min(options.max_width, max(least, options.max_width - _ECHO))
        return Measurement(width, width)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        task, width = self._task, options.max_width
        parts: Sequence[str] = task.fields["texts"]
        free = width - self._steps.cell_len - self._left.cell_len - 1
        description = task.description if cell_len(task.description) < free else ""
        free -= cell_len(description) + 1 if description else 0
        shown = 0
        while shown < len(parts) and cell_len("  ".join(parts[: shown + 1])) < free:
            shown += 1
        text = "  ".join(parts[:shown])
        bar = free - (cell_len(text) + 1 if text else 0) - 1
        cells: list[Text | ProgressBar] = [Text(description)] if description else []
        if bar >= _SHORTEST_BAR:
            cells.append(
                ProgressBar(
                    task.total, task.completed, bar, pulse=not task.started, animation_time=0
                )
            )
        cells += [self._steps, *([Text(text)] if text else []), self._left]
        line = Table.grid(padding=(0, 1, 0, 0))
        for cell in cells:
            line.add_column(
                no_wrap=True, width=cell.width if isinstance(cell, ProgressBar) else None
            )
        line.add_row(*cells)
        yield line


class Terminal:
    """Standard output: a terminal with a progress bar, or a file with lines only.

    Colors follow the environment: none in a file, or if NO_COLOR is set.

    Args:
      quiet: Write nothing.
      results_only: Write only what `result` and `results` print (the option `quiet` of a run), and
        warnings to standard error.
      optional: Continue without standard output if it cannot be written, as on a full disk or
        after `head`, and say so once on standard error.
    """

    def __init__(
        self, *, quiet: bool = False, results_only: bool = False, optional: bool = False
    ) -> None:
        self.results_only, self._optional = results_only, optional
        self.console = _console(quiet=quiet or results_only)
        self._results = _console(quiet=quiet)
        self._warnings = _console(quiet=quiet, stderr=True) if results_only else self.console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._shown = 0.0
        self._done = 0

    def line(
        self, text: str, color: LineColor = LineColor.PLAIN, *, point: Point | None = None
    ) -> None:
        """Prints a line, above the progress bar; escapes characters the encoding lacks.

        A notebook draws the `point` instead.
        """
        self._print(self.console, text, color)

    def lines(self, parts: Sequence[str], color: LineColor = LineColor.PLAIN) -> None:
        """Prints each part as a line of at most `LINE_WIDTH` columns, or as several."""
        for line in short_lines(parts):
            self.line(line, color)

    def warning(self, text: str) -> None:
        """Prints a line about what is lost or ignored; a quiet run prints it to standard error."""
        self._print(self._warnings, text, LineColor.WARNING)

    def result(self, text: str, color: LineColor = LineColor.PLAIN) -> None:
        """Prints a line that also a quiet run prints."""
        self._print(self._results if self.results_only else self.console, text, color)

    def piece(self, text: str) -> None:
        """Prints a part of a line, or several lines, at once; a quiet run prints it, too."""
        console = self._results if self.results_only else self.console
        self._print(console, text, LineColor.PLAIN, end="")

    def _print(self, console: Console, text: str, color: LineColor, end: str = "\n") -> None:
        try:
            _print(console, text, color, end)
        except OSError as error:
            if not self._optional:
                if isinstance(error, BrokenPipeError):
                    console.on_broken_pipe()
                raise _unwritable(error) from error
            if not console.stderr:
                discard_output(sys.stdout)
                why = f"standard output cannot be written ({error.strerror})"
                try:
                    print(f"{why}: the run continues without it", file=sys.stderr, flush=True)
                except OSError:  # of the same pipe or disk
                    discard_output(sys.stderr)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[Callable[[str], None]]:
        """Shows a text and the seconds waited, on a terminal; yields a function to change it."""
        if self.console.is_terminal:
            with self.console.status(_Since(text)) as status:
                yield lambda text: status.update(_Since(text))
        else:
            yield lambda text: None

    @contextlib.contextmanager
    def progress(self, description: str, *, done: int, total: int) -> Iterator[None]:
        """Shows a progress bar of `total` steps on a terminal; `advance` moves it, from `done`."""
        if not self.console.is_terminal or self.console.quiet:
            yield
            return
        outer, outer_task, outer_done = self._progress, self._task, self._done
        if outer is None:
            self._progress = Progress(
                _BarColumn(),
                console=self.console,
                refresh_per_second=1 / _REFRESH,  # a refresh takes 1-2 ms
            )
            self._progress.start()
        assert self._progress is not None
        self._task = self._progress.add_task(
            description, total=total, completed=done, texts=(), visible=outer is None
        )
        self._shown, self._done = time.perf_counter(), done
        try:
            yield
        finally:
            if outer is None and self._done > done:
                self._progress.update(self._task, completed=self._done)
            else:
                self._progress.remove_task(self._task)
            if outer is None:
                self._progress.stop()
            self._progress, self._task, self._done = outer, outer_task, outer_done

    def advance(
        self,
        done: int,
        texts: Sequence[str] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Moves the bar to `done` steps.

        `texts` replace the texts after the bar, the most important one first, unless None. A
        notebook draws `metrics`.
        """
        if self._progress is None or self._task is None:
            return
        now, self._done = time.perf_counter(), done
        if texts is not None:
            self._progress.update(self._task, completed=done, texts=texts)
        elif now - self._shown >= _REFRESH:
            # A nested bar becomes visible only here, so that a quick evaluation shows none.
            self._progress.update(self._task, completed=done, visible=True)
            self._shown = now

    @property
    def has_bar(self) -> bool:
        """Whether a progress bar is shown, so that log lines are not needed."""
        return self._progress is not None

    def results(self, rows: Mapping[str, Mapping[str, float]], step: int | None = None) -> None:
        """Prints a table with a row for each split and a column for each metric.

        If the terminal is too narrow for that, it has a row for each metric. With `results_only`,
        prints only the last row, as a line with `step`.
        """
        if self.results_only:
            for split in list(rows)[-1:]:
                where = "" if step is None else f" at step {step}"
                self.result(f"{split}{where}: {'  '.join(metric_texts(rows[split]))}")
            return
        table = splits_table(rows)
        if _column_widths(table, self.console.width) is None:
            # A narrow terminal: a row for each metric, because there are more of them.
            by_metric = {
                name: {split: found[name] for split, found in rows.items() if name in found}
                for name in table.columns[1:]
            }
            table = splits_table(by_metric)
        self.show(table)

    def show(self, *blocks: TableBlock | FactsBlock | NoteBlock) -> None:
        """Prints blocks of a document, no wider than the terminal; in a file, of any width."""
        for block in blocks:
            if isinstance(block, TableBlock):
                self._draw(_table_parts(block, self.console))
            elif isinstance(block, NoteBlock):
                for line in block.text.splitlines():
                    self.line(printable(line))
            else:
                for text in [block.title] if block.title else []:
                    self.line(printable(text))
                for fact in block.facts:
                    detail = f" ({fact.detail})" if fact.detail else ""
                    self.line(printable(f"{fact.name}: {fact.value}{detail}"))

    def _draw(self, parts: Sequence[Text | Table]) -> None:
        if self.console.is_terminal:
            self.console.print(Group(*parts))
            return
        with self.console.capture() as capture:
            self.console.print(Group(*parts))
        self._print(self.console, capture.get(), LineColor.PLAIN, end="")

    @contextlib.contextmanager
    def live(self) -> Iterator[Callable[[TableBlock], None]]:
        """Shows a table below all lines, on a terminal; yields a function that replaces it.

        A table without rows is not shown.
        """
        if not self.console.is_terminal:
            yield lambda block: None
            return
        with Live(console=self.console, transient=True, auto_refresh=False) as live:

            def show(block: TableBlock) -> None:
                parts = _table_parts(block, self.console) if block.rows else []
                live.update(Group(*parts), refresh=True)

            yield show


# -- Tables on a terminal --------------------------------------------------------------------------

_WORD, _NAME = 12, 20  # columns: shorter words of cells and of a column's name stay whole
_TITLE, _NOTE, _MARKED = "italic", "italic dim", "bold"  # styles of rich
_INDENT = " " * 4  # of the lines of a row after the first one


def splits_table(rows: Mapping[str, Mapping[str, float]], title: str = "") -> TableBlock:
    """Returns a table of numbers with a column for each of their names; rows may lack some."""
    columns = list(dict.fromkeys(name for numbers in rows.values() for name in numbers))
    every = range(len(columns) + 1)
    return TableBlock(
        ["", *columns],
        [[name, *(number(x[n]) if n in x else "" for n in columns)] for name, x in rows.items()],
        numeric=frozenset(every[1:]),
        whole=frozenset(every),
        title=title,
    )


def _table_parts(block: TableBlock, console: Console) -> list[Text | Table]:
    """Returns a table for rich: its title, the table or the lines in its place, and its note."""
    block, width = _writable(block, console.encoding), console.width
    widths = _column_widths(block, width)
    if widths is None and block.optional:
        names = ", ".join(block.columns[n] for n in sorted(block.optional))
        note = f"{block.note}; " if block.note else ""
        narrow = replace(block, note=f"{note}a wider terminal also shows: {names}")
        block = narrow.without(block.optional)
        widths = _column_widths(block, width)
    title = _wrapped(block.title, width, _TITLE)
    note_below = _wrapped(block.note, width, _NOTE)
    if widths is None:
        return [*title, *_stacked(block, width), *note_below]
    table = Table()
    for n, (name, size) in enumerate(zip(block.columns, widths, strict=True)):
        table.add_column(name, width=size, overflow="fold")
        table.columns[n].justify = "right" if n in block.numeric else "left"
    for n, row in enumerate(block.rows):
        if n == len(block.rows) - block.totals:
            table.add_section()
        table.add_row(*row, style=_MARKED if n in block.marked else None)
    return [*title, table, *note_below]


def _writable(block: TableBlock, encoding: str) -> TableBlock:
    """Returns a table without control characters and without characters the encoding lacks."""

    def writable(text: str) -> str:
        return foreign(text).encode(encoding, "backslashreplace").decode(encoding)

    return replace(
        block,
        columns=["\n".join(map(writable, name.split("\n"))) for name in block.columns],
        rows=[list(map(writable, row)) for row in block.rows],
        title=writable(block.title),
        note=writable(block.note),
    )


def _column_widths(block: TableBlock, width: int) -> list[int] | None:
    """Returns the widths of the columns of a table; None if a terminal is too narrow for it."""
    widths, least = [], []
    for n, (name, *cells) in enumerate(zip(block.columns, *block.rows, strict=True)):
        widths.append(max(map(cell_len, [*name.split("\n"), *cells])))
        of_name = max(map(cell_len, name.split()), default=0)
        of_cells = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
        needed = max(min(of_name, _NAME), min(of_cells, _WORD))
        least.append(widths[-1] if n in block.whole else needed)
    free = width - 3 * len(widths) - 1  # without rules and padding
    if sum(least) > free:
        return None
    while sum(widths) > free:
        _, widest = max((widths[n], -n) for n in range(len(widths)) if widths[n] > least[n])
        widths[-widest] -= 1
    return widths


def _stacked(block: TableBlock, width: int) -> list[Text]:
    """Returns the rows of a table as several lines each, the cells behind their labels."""
    every = range(len(block.columns))
    labels = {n: " ".join(block.columns[n].split()) for n in every[1:]} | {0: "", **block.labels}
    longest = [max((cell_len(row[n]) for row in block.rows), default=0) for n in every]

    def aligned(row: Sequence[str], n: int) -> str:
        blank = " " * (longest[n] - cell_len(row[n]))
        text = blank + row[n] if n in block.numeric else row[n] + blank
        return f"{labels[n]} {text}" if labels[n] else text

    def labeled(row: Sequence[str], columns: Sequence[int]) -> list[str]:
        return [f"{labels[n]} {row[n]}".strip() for n in columns if row[n]]

    first, *others = block.lines or (every[:1], every[1:])
    shown = [_packed(labeled(row, first), width, "") for row in block.rows]
    for columns in others:
        lines = ["  ".join(aligned(row, n) for n in columns).rstrip() for row in block.rows]
        fits = max(map(cell_len, lines), default=0) + len(_INDENT) <= width
        for found, row, line in zip(shown, block.rows, lines, strict=True):
            found += [_INDENT + line] if fits else _packed(labeled(row, columns), width, _INDENT)
    styles = [_MARKED if n in block.marked else "" for n in range(len(block.rows))]
    return [Text(x, style) for found, style in zip(shown, styles, strict=True) for x in found]


def _packed(cells: Sequence[str], width: int, indent: str) -> list[str]:
    """Returns lines of at most a width with as many cells as fit; a longer cell has its own."""
    lines: list[str] = []
    for cell in cells:
        if lines and cell_len(lines[-1]) + 2 + cell_len(cell) <= width:
            lines[-1] += f"  {cell}"
        else:
            lines += [indent + line for line in short_lines([cell], max(1, width - len(indent)))]
    return lines


def _wrapped(text: str, width: int, style: str) -> list[Text]:
    """Returns a text as lines of at most a width, none if it is empty; words stay whole."""
    if cell_len(text) <= width:
        return [Text(text, style)] if text.strip() else []
    return [Text(line, style) for line in short_lines([text], width)]


class _Console(Console):
    """A console whose stream may be on a full disk."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            raise _unwritable(error) from error


def _unwritable(error: OSError) -> StorageError:
    return StorageError(f"standard output cannot be written: {error.strerror}")


def _console(*, quiet: bool, stderr: bool = False) -> Console:
    # No markup: names of metrics and text of files may have brackets.
    # In a notebook, rich would show each line apart, and the output says that it is a terminal.
    console = _Console(
        quiet=quiet,
        stderr=stderr,
        highlight=False,
        soft_wrap=True,
        emoji=False,
        markup=False,
        force_jupyter=False,
        force_terminal=False if in_notebook() else None,
    )
    if not console.is_terminal:
        console.width = 1000  # rich would otherwise cut a wide table off in a file
    return console


def _print(console: Console, text: str, color: LineColor, end: str = "\n") -> None:
    text = text.encode(console.encoding, "backslashreplace").decode(console.encoding)
    if not console.is_terminal:
        if not console.quiet:  # rich takes ten times as long, also without colors and columns
            console.file.write(strip_control_codes(text) + end)
            console.file.flush()
        return
    if console.is_terminal and len(text) > console.width and end == "\n" and text.isprintable():
        text = "\n".join(short_lines([text], console.width))  # the terminal would cut words
    console.print(text, style=color or None, end=end)
