"""Statistics of a run with parameter servers: staleness of the updates, and bytes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from spmdtrain.document.terminal import byte_size

_BAR = 24  # characters of the longest bar
_SINGLE = 8  # smaller numbers have a row each; of the rows above, each covers twice as many


class StalenessStats:
    """The updates since the start of a run, counted by staleness, and their bytes."""

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()
        self._pulled = self._pushed = 0

    @property
    def steps(self) -> int:
        """Number of updates."""
        return self.staleness.total()

    def add(self, staleness: int, pulled: int, pushed: int) -> None:
        """Adds an update; `pulled` and `pushed` are the bytes of its worker."""
        self.staleness[staleness] += 1
        self._pulled += pulled
        self._pushed += pushed

    def report(
        self, batches: Mapping[str, int], servers: Sequence[Mapping[str, int]]
    ) -> dict[str, Any]:
        """Returns the statistics as JSON, with the counts of each server."""
        return {
            "updates": self.steps,
            "staleness": {str(n): self.staleness[n] for n in sorted(self.staleness)},
            "pulled_bytes_per_step": self._pulled // self.steps,
            "pushed_bytes_per_step": self._pushed // self.steps,
            "batches": dict(sorted(batches.items())),
            "servers": {f"ps {number}": dict(counts) for number, counts in enumerate(servers)},
        }

    def table(self, batches: Mapping[str, int]) -> Table:
        """Returns a table of the updates by staleness.

        Its caption has the bytes of a step and the number of batches of each worker.
        """
        table = Table(
            title="staleness of the updates", title_justify="left", caption_justify="left"
        )
        table.add_column("staleness", justify="right")
        table.add_column("updates", justify="right")
        table.add_column("")
        rows = Counter[str]()
        for n in sorted(self.staleness):
            above = 1 << n.bit_length()
            rows[str(n) if n < _SINGLE else f"{above // 2} to {above - 1}"] += self.staleness[n]
        longest = max(rows.values())
        for name, count in rows.items():
            table.add_row(name, f"{count:,}", "#" * round(_BAR * count / longest))
        pulled, pushed = (byte_size(sum_ // self.steps) for sum_ in (self._pulled, self._pushed))
        by_worker = ", ".join(f"{worker} {batches[worker]:,}" for worker in sorted(batches))
        table.caption = f"a step pulls {pulled} and pushes {pushed}; batches: {by_worker}"
        return table
