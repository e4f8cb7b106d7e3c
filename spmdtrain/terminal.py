"""What a person sees: a progress bar on a terminal, lines in a log file, a table at the end."""

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

_REFRESH = 0.25  # seconds; more often nobody sees, and each time costs


def number(value: float) -> str:
    """Four significant digits, thousands separated: `0.01234`, `12,345`."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """`1:05` or `2:03:04`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def byte_size(count: int) -> str:
    """Three significant digits: `1.08 MB`."""
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.5:  # from here on, three digits would make it 1000
            return f"{value:#.3g}".rstrip(".") + f" {unit}"
    return f"{value:.0f} GB"


class Rate:
    """Steps a second since the last reading, leaving out what is not training."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin to measure at `step`, now."""
        self._step, self._time = step, time.perf_counter()
        self._rate: float | None = None

    def read(self, step: int) -> float | None:
        """Steps a second up to `step`, and begin anew; the last reading where no step was made."""
        now, steps = time.perf_counter(), step - self._step
        if steps > 0 and now > self._time:
            self._rate = steps / (now - self._time)
            self._step, self._time = step, now
        return self._rate


class _Since:
    """A text, and the seconds since it was first shown."""

    def __init__(self, text: str) -> None:
        self._text, self._began = text, time.monotonic()

    def __rich__(self) -> Text:
        return Text(f"{self._text}, {time.monotonic() - self._began:.0f} s")


class Terminal:
    """Writes to standard output; `quiet` writes nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True, emoji=False)
        if not self.console.is_terminal:
            self.console.width = 1000  # a file has no edge: a wide table is not to be cut off
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._shown = 0.0

    def line(self, text: str) -> None:
        """One line, above the progress bar where there is one; escaped what cannot be written."""
        encoding = self.console.encoding
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self.console.print(text, markup=False)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[Callable[[str], None]]:
        """Says what is being waited for, and for how long; yields what changes the text."""
        if self.console.is_terminal:
            with self.console.status(_Since(text)) as status:
                yield lambda text: status.update(_Since(text))
        else:
            yield lambda text: None

    @contextlib.contextmanager
    def progress(self, description: str, *, done: int, total: int) -> Iterator[None]:
        """A bar from `done` to `total`, on a terminal; the steps of `advance` move it."""
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
                refresh_per_second=1 / _REFRESH,  # each time takes a millisecond or two
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
        """Move the bar to `done`, and change the text behind it."""
        if self._progress is None or self._task is None:
            return
        now = time.perf_counter()
        if text is not None:
            self._progress.update(self._task, completed=done, text=text)
        elif now - self._shown >= _REFRESH:
            # A bar within a bar comes into sight only here: a quick evaluation shows none.
            self._progress.update(self._task, completed=done, visible=True)
            self._shown = now

    @property
    def has_bar(self) -> bool:
        """Whether a bar shows what a log line would say."""
        return self._progress is not None

    def results(self, rows: Mapping[str, Mapping[str, float]]) -> None:
        """A small table: a row a split, a column a metric."""
        names = list(dict.fromkeys(name for metrics in rows.values() for name in metrics))
        table = Table()
        table.add_column("")
        for name in names:
            table.add_column(name, justify="right")
        for split, metrics in rows.items():
            table.add_row(split, *(number(metrics[n]) if n in metrics else "" for n in names))
        self.console.print(table)
