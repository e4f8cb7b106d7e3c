"""The verdict of the sentinel: which devices computed other gradients than others."""

import collections
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class FaultKind(enum.StrEnum):
    """Frequency with which a device computed other gradients."""

    TRANSIENT = "transient"
    """In one run."""
    LASTING = "lasting"
    """In several runs."""
    UNCLEAR = "unclear"
    """No device is the only one that explains the differences: the program is not deterministic,
    or several devices are faulty."""


@dataclass(frozen=True)
class Verdict:
    """Devices whose results differ, by three runs of the same shards.

    Attributes:
      kind: How often the devices differed.
      devices: Their numbers, ascending. If there are only two devices, a lasting fault may be in
        either. All whose results differ if the kind is unclear.
      runs: Number of runs, of three, in which each differed; empty if the kind is unclear.
      parameter: Number of the first parameter whose gradients differ.
    """

    kind: FaultKind
    devices: list[int]
    runs: list[int]
    parameter: int


def differs(first: np.ndarray, second: np.ndarray) -> bool:
    """Returns whether the checksums of a shard differ between the first two runs.

    Args:
      first: Checksums (devices, parameters); device i has computed shard i.
      second: The same, of the run in which device i + 1 has computed shard i.
    """
    return bool((first != np.roll(second, -1, axis=0)).any())


def third_roll(devices: int) -> int:
    """Returns by how many devices the third run is rolled: a third device for each shard."""
    return 2 % devices


def find_faulty(runs: Sequence[np.ndarray]) -> Verdict:
    """Finds the devices whose results two others do not reproduce.

    With three devices or more, each shard was computed by three of them, of which the odd one is
    faulty. Two devices give only two results: the third run repeats the first.

    Args:
      runs: The checksums (devices, parameters) of three runs, by device, at least one of which
        differs. In run r, device i has computed shard i - r; with two devices, in run 2 shard i.

    Returns:
      The devices, and how often they differed.
    """
    count = len(runs[0])
    rolls = (0, 1, third_roll(count))
    by_shard = [np.roll(sums, -roll, axis=0) for sums, roll in zip(runs, rolls, strict=True)]
    unequal = (by_shard[0] != by_shard[1]) | (by_shard[0] != by_shard[2])
    parameter = int(np.flatnonzero(unequal.any(0))[0])
    shards = [int(shard) for shard in np.flatnonzero(unequal.any(1))]
    accused: collections.Counter[int] = collections.Counter()
    suspects: set[int] = set()
    for shard in shards:
        results = [sums[shard].tobytes() for sums in by_shard]
        devices = [(shard + roll) % count for roll in rolls]
        suspects |= set(devices)
        odd = [run for run in range(3) if results.count(results[run]) == 1]
        if len(odd) == 1:
            accused[devices[odd[0]]] += 1
        elif devices[0] == devices[2] and results[0] != results[2]:
            accused[devices[0]] += 2  # it does not repeat its own results
    if count == 2 and len(shards) == 2 and len(accused) == 2:
        # Each device differs from the other one, and each has repeated its own results.
        return Verdict(FaultKind.LASTING, [0, 1], [], parameter)
    if not accused or 2 * len(accused) > max(count, 2):
        return Verdict(FaultKind.UNCLEAR, sorted(suspects), [], parameter)
    found = sorted(accused)
    lasting = max(accused.values()) > 1
    kind = FaultKind.LASTING if lasting else FaultKind.TRANSIENT
    return Verdict(kind, found, [accused[device] for device in found], parameter)
