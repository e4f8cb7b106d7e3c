"""Comparison of the copies of a state that several processes hold."""

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from spmdtrain.checkpoints.checksums import PartSum
from spmdtrain.distributed import process_group
from spmdtrain.errors import ReplicaError

_MAX_NAMES = 8  # of processes in a message


def check_equal(
    started: Mapping[str, Sequence[PartSum]],
    step: int,
    sequence: process_group.CallSequence | None = None,
) -> None:
    """Compares the checksums of copies in several processes. All processes call it together.

    Parts of arrays that only one process holds are not compared. Only checksums are exchanged;
    `multihost_utils.assert_equal` would gather all arrays in every process.

    Args:
      started: The result of `start_sums`.
      sequence: The sequence of the calling thread; None for the main thread.

    Raises:
      ReplicaError: If copies differ. Names the processes that differ from most others, and the
        first array.
    """
    if process_group.count() == 1:
        return
    shared: dict[str, dict[str, int]] = {}  # by the processes with a copy, then by name
    for name, parts in started.items():
        for part in parts:
            if len(part.holders) > 1:
                group = json.dumps(part.holders)
                shared.setdefault(group, {})[_part_name(name, part)] = part.read()
    digests = {_digest(group): _digest(sums) for group, sums in shared.items()}
    sequence = sequence or process_group.joined().main
    odd = sequence.broadcast(find_odd(sequence.collect(digests)))
    if odd is None:
        return
    group, usual, different, certain = odd
    own = next((sums for holders, sums in shared.items() if _digest(holders) == group), {})
    sums = sequence.gather(own if process_group.rank() in (usual, different[0]) else {})
    usual_sums, other_sums = sums[usual], sums[different[0]]
    names = [name for name in usual_sums if usual_sums[name] != other_sums.get(name)]
    copies = f"step {step}: the copies of {_first(names)} differ between processes"
    which = _names(different) if certain else _names([usual, *different])
    raise ReplicaError(
        f"{copies}: {which} {'differs' if len(different) == 1 and certain else 'differ'} from "
        f"{'the other processes' if certain else 'each other'}; the state was not saved. Compare "
        "what these processes run with (environment, libraries, hardware), and start again from "
        "the last checkpoint"
    )


def _names(ranks: Sequence[int]) -> str:
    names = [process_group.names()[rank] for rank in ranks[:_MAX_NAMES]]
    if len(ranks) > _MAX_NAMES:
        return f"{', '.join(names)} and {len(ranks) - _MAX_NAMES} more"
    return " and ".join(names)


def _part_name(name: str, part: PartSum) -> str:
    return f"{name} from {list(part.starts)}" if any(part.starts) else name


def _first(names: Sequence[str]) -> str:
    """Returns the first parameter; without one, the first array of any other kind."""
    return min(names, key=lambda name: not name.startswith("params/"))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def find_odd(digests: Sequence[Mapping[str, str]]) -> tuple[str, int, list[int], bool] | None:
    """Finds the first group of processes whose digests differ.

    `digests` has the digests of each process by group. Returns the group, a process of the
    majority, the processes that differ from it, and True. Without a majority: the group, its first
    process, the others, and False. None if all are equal.
    """
    for group in sorted({group for own in digests for group in own}):
        by_rank = {rank: own[group] for rank, own in enumerate(digests) if group in own}
        (most, count), *others = collections.Counter(by_rank.values()).most_common()
        if others:
            usual = next(rank for rank, digest in by_rank.items() if digest == most)
            certain = 2 * count > len(by_rank)
            odd = [r for r in by_rank if r != usual and not (certain and by_rank[r] == most)]
            return group, usual, odd, certain
    return None
