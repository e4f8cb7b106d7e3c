"""A cache of the blocks of a source that were read last, which threads share."""

import collections
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

from spmdtrain.data.order import BLOCKS_PER_GROUP

CACHED_BLOCKS = 2 * BLOCKS_PER_GROUP
"""Default number of blocks: threads that read ahead may be in the next group of blocks."""

T = TypeVar("T")

_THREADS = BLOCKS_PER_GROUP  # blocks in a bucket take long to arrive, and those of a group at once


class BlockCache(Generic[T]):
    """A cache of the last used blocks. If several threads need a block, one of them loads it.

    A copy in another process begins empty.
    """

    def __init__(self, size: int = CACHED_BLOCKS) -> None:
        self._size = size
        self._blocks: collections.OrderedDict[int, Future[T]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockCache, (self._size,)

    def reserve(self, size: int) -> None:
        """Keeps at least this number of blocks from now on."""
        with self._lock:
            self._size = max(self._size, size)

    def prefetch(self, numbers: Sequence[int], load: Callable[[int], T]) -> None:
        """Loads several blocks at the same time, if the cache holds so many.

        An error is not raised here, but by the `get` that follows.
        """
        with self._lock:
            missing = [number for number in numbers if number not in self._blocks]
            if len(missing) < 2 or len(numbers) > self._size:
                return
        wait([_pool().submit(self.get, number, load) for number in missing])

    def get(self, number: int, load: Callable[[int], T]) -> T:
        """Returns a block; loads it if it is not in the cache."""
        with self._lock:
            block = self._blocks.get(number)
            is_new = block is None
            if block is None:
                block = self._blocks[number] = Future()
                if len(self._blocks) > self._size:
                    self._blocks.popitem(last=False)
            else:
                self._blocks.move_to_end(number)
        if is_new:
            try:
                block.set_result(load(number))
            except BaseException as error:
                with self._lock:  # so that the next read tries again
                    if self._blocks.get(number) is block:
                        del self._blocks[number]
                block.set_exception(error)
        return block.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Returns the threads that load blocks of all sources."""
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="blocks")
    # At exit Python waits until a pool has done all of its pending work, needed or not.
    threading._register_atexit(  # type: ignore[attr-defined]
        pool.shutdown, wait=False, cancel_futures=True
    )
    return pool
