"""The verdict of the sentinel: the devices that computed other gradients than others."""

import collections
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


class FaultKind(enum.StrEnum):
    """The frequency with which a device computed other gradients."""

    TRANSIENT = "transient"
    """In one run."""
    LASTING = "lasting"
    """In several runs."""
    UNCLEAR = "unclear"
    """No single device explains the differences: the program is not deterministic, several devices
    are faulty, or one of two is faulty and may be wrong once or always."""


@dataclass(frozen=True)
class Verdict:
    """Devices whose results differ, by three runs of the same shards.

    Attributes:
      devices: Their numbers, ascending. If there are only two devices and both repeat their
        results, either may be faulty, and both are listed. If the kind is unclear, all devices
        whose results differ.
      runs: Number of runs, of three, in which each device differed; empty if that is not known. If
        either of two devices may be faulty, each number is valid if its device is the faulty one.
      parameter: Number of the first parameter whose gradients differ.
    """

    kind: FaultKind
    devices: list[int]
    runs: list[int]
    parameter: int


def differs(first: np.ndarray, second: np.ndarray) -> bool:
    """Returns whether the checksums of a shard differ between the first two runs.

    Checksums have shape (devices, parameters). Device i has computed shard i in the first run, and
    device i + 1 in the second.
    """
    return bool((first != np.roll(second, -1, axis=0)).any())


def third_roll(devices: int) -> int:
    """Returns by how many devices the third run is rolled: a third device for each shard."""
    return 2 % devices


def find_faulty(runs: Sequence[np.ndarray]) -> Verdict:
    """Finds the devices whose results two other devices do not reproduce.

    With three devices or more, three of them have computed each shard, and the one with another
    result than the two others is faulty. Two devices give only two results, so the third run
    repeats the first: a device is accused if it does not repeat its result. If both repeat it,
    either may be wrong.

    Args:
      runs: The checksums (devices, parameters) of three runs, by device, at least one of which
        differs. In run r, device i has computed shard i - r; with two devices, in run 2 shard i.
    """
    count = len(runs[0])
    rolls = (0, 1, third_roll(count))
    by_shard = [np.roll(sums, -roll, axis=0) for sums, roll in zip(runs, rolls, strict=True)]
    unequal = (by_shard[0] != by_shard[1]) | (by_shard[0] != by_shard[2])
    parameter = int(np.flatnonzero(unequal.any(0))[0])
    results = {
        int(shard): [sums[shard].tobytes() for sums in by_shard]
        for shard in np.flatnonzero(unequal.any(1))
    }
    if count == 2:
        return _of_two(results, parameter)
    accused: collections.Counter[int] = collections.Counter()
    suspects: set[int] = set()
    for shard, of_shard in results.items():
        devices = [(shard + roll) % count for roll in rolls]
        suspects |= set(devices)
        odd = [run for run in range(3) if of_shard.count(of_shard[run]) == 1]
        if len(odd) == 1:
            accused[devices[odd[0]]] += 1
    if not accused or 2 * len(accused) > count:
        return Verdict(FaultKind.UNCLEAR, sorted(suspects), [], parameter)
    found = sorted(accused)
    lasting = max(accused.values()) > 1
    kind = FaultKind.LASTING if lasting else FaultKind.TRANSIENT
    return Verdict(kind, found, [accused[device] for device in found], parameter)


def _of_two(results: Mapping[int, Sequence[bytes]], parameter: int) -> Verdict:
    """Returns the verdict on two devices.

    Args:
      results: The three results of each shard with different results: device i has computed shard i
        in the first and in the third run, and the other device in the second.
      parameter: Number of the first parameter that differs.
    """
    unrepeated = [shard for shard, (first, _, again) in results.items() if first != again]
    if len(unrepeated) == 2:
        return Verdict(FaultKind.UNCLEAR, [0, 1], [], parameter)
    if unrepeated:
        (device,) = unrepeated
        # A third result of its own shard is wrong twice; of the other's shard it has computed one.
        times = len(set(results[device])) - 1 + len(results) - 1
        kind = FaultKind.LASTING if times > 1 else FaultKind.TRANSIENT
        return Verdict(kind, [device], [times], parameter)
    if len(results) == 2:  # one of the devices was wrong in all runs
        return Verdict(FaultKind.LASTING, [0, 1], [], parameter)
    # Either the device of the shard was wrong twice, or the other one once.
    return Verdict(FaultKind.UNCLEAR, [0, 1], [2, 1] if 0 in results else [1, 2], parameter)
