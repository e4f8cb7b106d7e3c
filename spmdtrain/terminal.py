"""Output for people: a progress bar on a terminal, lines in a log file, a table of results."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

_REFRESH = 0.25  # seconds; a shorter interval is not visible, and each refresh takes time


def number(value: float) -> str:
    """Returns a number with four significant digits: `0.01234`, `12,345`."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Returns seconds as `1:05` or `2:03:04`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


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


class Rate:
    """Steps per second since the last reading.

    Call `restart` after evaluations and saves, so that only training is measured. The speed of
    rich's `Progress` includes them, and exists on a terminal only.
    """

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        """Starts a new measurement at `step`."""
        self._step, self._time = step, time.perf_counter()
        self._rate: float | None = None

    def read(self, step: int) -> float | None:
        """Returns the steps per second since the last reading, and starts a new measurement.

        Args:
          step: Number of steps so far; if it has not changed since the last reading, the result is
            that reading (None at first).
        """
        now, steps = time.perf_counter(), step - self._step
        if steps > 0 and now > self._time:
            self._rate = steps / (now - self._time)
            self._step, self._time = step, now
        return self._rate


class _Since:
    """A text with the seconds since it was created."""

    def __init__(self, text: str) -> None:
        self._text, self._began = text, time.monotonic()

    def __rich__(self) -> Text:
        return Text(f"{self._text}, {time.monotonic() - self._began:.0f} s")


class Terminal:
    """Standard output: a terminal with a progress bar, or a file with lines only.

    Args:
      quiet: Write nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True, emoji=False)
        if not self.console.is_terminal:
            self.console.width = 1000  # rich would otherwise cut a wide table off in a file
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._shown = 0.0

    def line(self, text: str) -> None:
        """Prints a line, above the progress bar; escapes characters the encoding lacks."""
        encoding = self.console.encoding
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self.console.print(text, markup=False)

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
        """Shows a progress bar on a terminal, which `advance` moves.

        Args:
          description: The text before the bar.
          done: Initial number of steps.
          total: Number of steps of the full bar.
        """
        if not self.console.is_terminal or self.console.quiet:
            yield
            return
        outer, outer_task = self._progress, self._task
        if outer is None:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=self.console,
                expand=True,
                refresh_per_second=1 / _REFRESH,  # a refresh takes 1-2 ms
            )
            self._progress.start()
        assert self._progress is not None
        self._task = self._progress.add_task(
            description, total=total, completed=done, text="", visible=outer is None
        )
        self._shown = time.perf_counter()
        try:
            yield
        finally:
            if outer is None:
                self._progress.stop()
            else:
                self._progress.remove_task(self._task)
            self._progress, self._task = outer, outer_task

    def advance(self, done: int, text: str | None = None) -> None:
        """Moves the bar to `done`, and replaces the text after it unless `text` is None."""
        if self._progress is None or self._task is None:
            return
        now = time.perf_counter()
        if text is not None:
            self._progress.update(self._task, completed=done, text=text)
        elif now - self._shown >= _REFRESH:
            # A nested bar becomes visible only here, so that a quick evaluation shows none.
            self._progress.update(self._task, completed=done, visible=True)
            self._shown = now

    @property
    def has_bar(self) -> bool:
        """Whether a progress bar is shown, so that log lines are not needed."""
        return self._progress is not None

    def results(self, rows: Mapping[str, Mapping[str, float]]) -> None:
        """Prints a table with a row for each split and a column for each metric.

        Args:
          rows: Split name to metric name to value.
        """
        names = list(dict.fromkeys(name for metrics in rows.values() for name in metrics))
        table = Table()
        table.add_column("")
        for name in names:
            table.add_column(name, justify="right")
        for split, metrics in rows.items():
            table.add_row(split, *(number(metrics[n]) if n in metrics else "" for n in names))
        self.console.print(table)
