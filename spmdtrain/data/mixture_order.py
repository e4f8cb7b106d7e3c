"""The order of a mixture: which component is at which position, and which of its examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spmdtrain.data.order import Order
from spmdtrain.data.permutation import permuted
from spmdtrain.errors import UserError

BLOCK = 2048  # positions in which the number of examples of each component is fixed
PERIOD = 2**20  # positions after which the numbers of the blocks repeat


def examples_per_period(weights: Mapping[str, float]) -> np.ndarray:
    """Returns how many of `PERIOD` examples each component has, int64 (components,).

    They are the weights' shares, rounded by the method of largest remainders.

    Raises:
      UserError: If a weight is below a millionth of their sum, and not 0.
    """
    values = np.array(list(weights.values()), np.float64)
    if values.max() > np.finfo(np.float64).max / len(values):
        values = values / len(values)  # so that the sum is finite
    quotas = values / values.sum() * PERIOD
    for (name, weight), quota in zip(weights.items(), quotas, strict=True):
        if weight and quota < 1:
            raise UserError(
                f"the weight of {name!r} is {weight:g} of a total of {values.sum():g}: it must be "
                "0 or at least a millionth of the total"
            )
    counts = np.floor(quotas).astype(np.int64)
    return _with_total(counts, quotas - counts, PERIOD)


def _with_total(counts: np.ndarray, remainders: np.ndarray, total: int) -> np.ndarray:
    """Adds 1 to the counts with the largest remainders, so that the counts add up to a total.

    If they are above the total, subtracts 1 from the counts with the smallest remainders.
    """
    missing = total - int(counts.sum())
    if missing >= 0:
        chosen = np.argsort(-remainders, kind="stable")[:missing]
        counts[chosen] += 1
    else:
        possible = np.flatnonzero(counts)
        chosen = possible[np.argsort(remainders[possible], kind="stable")[:-missing]]
        counts[chosen] -= 1
    return counts


def _counts_of_blocks(per_period: np.ndarray) -> np.ndarray:
    """Returns how many examples of each component are before each block of a period.

    A block has the share of each component, rounded by the method of largest remainders. The
    rounding error is added to the share of the next block, so that errors do not accumulate. The
    result is int64 (blocks + 1, components).
    """
    blocks = PERIOD // BLOCK
    before = np.zeros((blocks + 1, len(per_period)), np.int64)
    for block in range(blocks):
        # In units of 1 / blocks, because integers have no rounding errors.
        due = per_period * (block + 1) - before[block] * blocks
        counts = np.maximum(due, 0) // blocks
        before[block + 1] = before[block] + _with_total(counts, due - counts * blocks, BLOCK)
    return before


@dataclass(frozen=True)
class _Stage:
    """Positions with constant weights.

    Attributes:
      first: Its first position.
      per_period: int64 (components,), examples of each component in a period.
      before: Examples of each component before each block of a period.
      starts: int64 (components,), examples of each component before the stage.
    """

    number: int
    first: int
    per_period: np.ndarray
    before: np.ndarray
    starts: np.ndarray
    seed: int

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the component of each position, and the position in the component's stream."""
        blocks, within = np.divmod(positions - self.first, BLOCK)
        components, of_component = np.empty_like(blocks), np.empty_like(blocks)
        for block in np.unique(blocks):
            chosen = blocks == block
            which, numbers = self._block(int(block))
            components[chosen] = which[within[chosen]]
            of_component[chosen] = numbers[within[chosen]]
        return components, of_component

    def end(self, position: int) -> np.ndarray:
        """Returns the number of examples of each component before a position, int64."""
        block, within = divmod(position - self.first, BLOCK)
        begin, _ = self._counts(block)
        which, _ = self._block(block)
        return begin + np.bincount(which[:within], minlength=len(begin))

    def _counts(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the number of examples of each component before a block, and within it."""
        period, block = divmod(block, PERIOD // BLOCK)
        before, after = self.before[block : block + 2]
        return self.starts + period * self.per_period + before, after - before

    def _block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns `at` of all positions of a block."""
        begin, counts = self._counts(block)
        by_component = np.repeat(np.arange(len(counts)), counts)
        shuffled = permuted(
            np.arange(BLOCK),
            size=BLOCK,
            seed=self.seed,
            epochs=np.asarray(block),
            part=self.number,
        )
        components = by_component[shuffled]
        # The examples of each component are numbered in the order of their positions.
        numbers = np.empty_like(components)
        first = np.cumsum(counts) - counts
        in_order = np.argsort(components, kind="stable")
        numbers[in_order] = np.arange(BLOCK) + np.repeat(begin - first, counts)
        return components, numbers


class MixtureOrder:
    """The order of several components, each of which repeats independently.

    Every block of `BLOCK` positions has a fixed number of examples of each component, which the
    weights determine, in random order. The component of a position is computed from its block
    alone, at any position in constant time.

    Args:
      offsets: int64 (components,), the index of the first example of each component.
      stages: The examples of each component in a period (see `examples_per_period`), by the
        position from which on they hold. The first position is 0.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        offsets: np.ndarray,
        stages: Mapping[int, np.ndarray],
        seed: int,
    ) -> None:
        self._orders, self._offsets = orders, offsets
        self._stages: list[_Stage] = []
        starts = np.zeros(len(orders), np.int64)
        for number, (first, per_period) in enumerate(sorted(stages.items())):
            if self._stages:
                starts = self._stages[-1].end(first)
            before = _counts_of_blocks(per_period)
            self._stages.append(_Stage(number, first, per_period, before, starts, seed))

    def components(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the component of each position, and the position in the component's stream.

        All arrays are int64 (n,).
        """
        firsts = [stage.first for stage in self._stages]
        stages = np.searchsorted(firsts, positions, side="right") - 1
        components, of_component = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(stages):
            chosen = stages == number
            found = self._stages[number].at(positions[chosen])
            components[chosen], of_component[chosen] = found
        return components, of_component

    def examples(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the index in the mixture and the epoch of its component for each position."""
        components, of_component = self.components(positions)
        indices, epochs = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(components):
            chosen = components == number
            found, epochs[chosen] = self._orders[number].examples(of_component[chosen])
            indices[chosen] = found + self._offsets[number]
        return indices, epochs
