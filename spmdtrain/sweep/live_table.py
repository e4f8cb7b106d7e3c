"""Live progress of a sweep: a table on a terminal, lines in a log file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.live import Live
from rich.table import Table

from spmdtrain.document.terminal import Terminal, duration, number
from spmdtrain.sweep.trials import TrialState


@dataclass(frozen=True)
class RunningRow:
    """The progress of a trial that runs."""

    name: str
    state: str
    step: int
    total: int | None
    metric: float | None
    """The last value of the metric that compares the trials."""
    seconds_left: float | None


class LiveTable:
    """Shows the trials that run, while entered, on the terminal of standard output."""

    def __init__(self, terminal: Terminal, metric: str) -> None:
        self._terminal, self._metric = terminal, metric
        self._live: Live | None = None
        if terminal.console.is_terminal:
            self._live = Live(console=terminal.console, transient=True, auto_refresh=False)

    def __enter__(self) -> "LiveTable":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        """Prints a line, above the table."""
        self._terminal.line(text)

    def show(self, rows: Sequence[RunningRow], counts: Mapping[TrialState, int]) -> None:
        """Replaces the table; does nothing if standard output is not a terminal."""
        if self._live is None:
            return
        table = Table(caption_justify="left")
        table.add_column("trial", overflow="fold")  # the only column that a narrow terminal wraps
        table.add_column("state", no_wrap=True)
        for heading in ("step", self._metric, "left"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(
                row.name.replace(",", " "),
                row.state,
                f"{row.step:,}/{row.total:,}" if row.total else f"{row.step:,}",
                "" if row.metric is None else number(row.metric),
                "" if row.seconds_left is None else duration(row.seconds_left),
            )
        states = [state for state in TrialState if counts.get(state) and state != "running"]
        table.caption = ", ".join(f"{counts[state]} {state}" for state in states)
        self._live.update(table if rows else "", refresh=True)
