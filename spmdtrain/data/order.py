"""The order in which training reads examples."""

import functools
from typing import Protocol

import numpy as np

from spmdtrain.data.permutation import permuted

BLOCKS_PER_GROUP = 8  # consecutive permuted blocks whose examples are shuffled together
_CACHED_EPOCHS = 4  # epochs whose block permutations are cached


class Order(Protocol):
    """A function from positions of the training stream to examples."""

    def examples(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the indices in the dataset, and the epochs, of the examples at positions.

        All arrays are int64 (n,); positions are at least 0.
        """
        ...


class EpochOrder:
    """An order of consecutive epochs; each epoch contains every example once.

    With blocks, an epoch permutes the blocks, and then the examples within each group of
    `BLOCKS_PER_GROUP` consecutive permuted blocks, so that neighboring positions read few blocks.

    Args:
      blocks: int64 (m+1,), the examples at which blocks begin, from 0 to `size`. By default all
        examples are permuted together.
      whole_blocks: Whether the examples of a block keep their order, and stay together.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        shuffle: bool,
        blocks: np.ndarray | None = None,
        whole_blocks: bool = False,
    ) -> None:
        self._whole_blocks = whole_blocks
        self._size, self._seed, self._shuffle, self._blocks = size, seed, shuffle, blocks
        self._epoch = functools.lru_cache(maxsize=_CACHED_EPOCHS)(self._permute_blocks)

    def examples(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epochs = positions // self._size
        positions = positions - epochs * self._size
        if not self._shuffle:
            return positions, epochs
        if self._blocks is None:
            return permuted(positions, size=self._size, seed=self._seed, epochs=epochs), epochs
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = self._of_epoch(self._blocks, int(epoch), positions[chosen])
        return indices, epochs

    def _of_epoch(self, blocks: np.ndarray, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Returns the examples at positions of one epoch."""
        order, begins = self._epoch(epoch)
        if self._whole_blocks:
            block = np.searchsorted(begins, positions, side="right") - 1
            return blocks[order[block]] + positions - begins[block]
        # Shuffle within the group.
        ends = np.append(begins[:-1:BLOCKS_PER_GROUP], self._size)
        group = np.searchsorted(ends, positions, side="right") - 1
        first = ends[group]
        within = permuted(
            positions - first,
            size=ends[group + 1] - first,
            seed=self._seed,
            epochs=np.asarray(epoch),
            part=group + 1,
        )
        # Find the block that contains the shuffled position.
        within += first
        block = np.searchsorted(begins, within, side="right") - 1
        return blocks[order[block]] + within - begins[block]

    def _permute_blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the blocks in the order of an epoch, and the positions at which they begin."""
        assert self._blocks is not None
        count = len(self._blocks) - 1
        order = permuted(
            np.arange(count), size=count, seed=self._seed, epochs=np.asarray(epoch), part=0
        )
        return order, np.concatenate([[0], np.cumsum(np.diff(self._blocks)[order])])
