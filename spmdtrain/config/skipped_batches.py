"""Batches that a run leaves out, and the batch of each step."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from spmdtrain.errors import UserError, foreign

_RANGE = re.compile(r"(\d{1,19})(?::(\d{1,19}))?", re.ASCII)


@dataclass(frozen=True)
class SkippedBatches:
    """The batches that `skip_steps` leaves out.

    Batches are numbered from 0, whether they are left out or not, so a number always names the same
    examples. The steps of a run use the batches that are left, in order.

    Attributes:
      ranges: Ranges of numbers of batches, ascending; between two of them there is a batch that is
        not left out.
    """

    ranges: tuple[range, ...] = ()

    @classmethod
    def parse(cls, given: Sequence[str | int]) -> "SkippedBatches":
        """Parses numbers of batches, and texts `A:B`, which mean the batches A to B - 1.

        `given` is the option `skip_steps`; ranges may overlap. Raises `UserError` for a value that
        is neither a number of a batch nor `A:B` with A < B.
        """
        merged: list[range] = []
        for each in sorted(map(_parse_range, given), key=lambda x: x.start):
            if merged and each.start <= merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(merged[-1].stop, each.stop))
            else:
                merged.append(each)
        return cls(tuple(merged))

    def __contains__(self, batch: int) -> bool:
        return any(batch in each for each in self.ranges)

    @property
    def texts(self) -> tuple[str, ...]:
        """The ranges as in the option `skip_steps`."""
        return tuple(f"{each.start}:{each.stop}" for each in self.ranges)

    def batch_of(self, steps: int) -> int:
        """Returns the number of the batch that is used after `steps` steps."""
        batch = steps
        for each in self.ranges:
            if each.start > batch:
                break
            batch += len(each)
        return batch

    def position(self, steps: int) -> int:
        """Returns the number of the batch after the last one that was used in `steps` steps."""
        return self.batch_of(steps - 1) + 1 if steps else 0

    def first_not_in(self, other: "SkippedBatches") -> int | None:
        """Returns the first batch that is left out here and not by `other`, or None."""
        for each in self.ranges:
            batch = each.start
            for known in other.ranges:
                if batch in known:
                    batch = known.stop
            if batch in each:
                return batch
        return None


_LAST = 2**40  # of batches: positions of their examples fit into 64 bits
NOTHING_SKIPPED = SkippedBatches()


def _parse_range(given: object) -> range:
    is_number = isinstance(given, Integral) and not isinstance(given, bool)
    match = _RANGE.fullmatch(str(given)) if is_number or isinstance(given, str) else None
    start = int(match[1]) if match else 0
    stop = int(match[2] or start + 1) if match else 0
    if not start < stop <= _LAST:
        raise UserError(
            f"skip_steps is {foreign(repr(given), 100)}: write the number of a batch, counted from "
            f"0, or A:B with A < B up to {_LAST}, which leaves out the batches A to B - 1"
        )
    return range(start, stop)
