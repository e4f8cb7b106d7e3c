"""Costs of failures in a run: snapshots against them, the best intervals, and the goodput."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spmdtrain.checkpoints.snapshot_memory import HostNeeds, Hosts, arrays_by_path, kept_bytes
from spmdtrain.checkpoints.snapshots import Cadence
from spmdtrain.config.options import ABOVE_ZERO, NOT_NEGATIVE, Range
from spmdtrain.config.run_config import RunConfig
from spmdtrain.document.terminal import duration
from spmdtrain.errors import UserError, option
from spmdtrain.plan.topologies import Topology
from spmdtrain.step.state import TrainState

# -- The memory and the traffic of snapshots -------------------------------------------------------


@dataclass(frozen=True)
class SnapshotCost:
    """Costs of the snapshots of a run for a process, of which there is one on each host.

    Attributes:
      hosts: Number of hosts.
      kept: Bytes of one generation of its own parts.
      copies: Bytes of one generation of the copies that it keeps of another host.
      at_rest: Bytes of host memory for the two generations of both.
      at_most: Bytes of host memory while a snapshot is taken.
      sent: Bytes of a snapshot that it sends to the next host.
      seconds: Seconds of the sending at the network's peak rate; None if the rate is unknown.
    """

    hosts: int
    kept: int
    copies: int
    at_rest: int
    at_most: int
    sent: int
    seconds: float | None


def snapshot_cost(state: TrainState, devices: list[Any], topology: Topology) -> SnapshotCost:
    """Returns what snapshots cost the first process; a mesh splits the state evenly.

    Args:
      state: Shapes with shardings of what is saved of the state.
      devices: The devices of the mesh.
    """
    process_of = _process_of(topology)
    hosts = Hosts([[process] for process in sorted(set(map(process_of, devices)))])
    leaves, first = arrays_by_path(state), hosts.ranks[0][0]
    needs = HostNeeds.of(leaves, hosts, first, process_of)
    _, sent = kept_bytes(leaves, hosts, first, process_of)
    seconds = None
    if topology.chip is not None and topology.platform != "cpu":
        own = sum(process_of(device) == first for device in devices) / topology.chip.devices
        seconds = sent / (own * topology.chip.network)
    return SnapshotCost(
        hosts=len(hosts.ranks),
        kept=needs.kept,
        copies=needs.copies,
        at_rest=needs.at_rest,
        at_most=needs.at_most,
        sent=sent,
        seconds=seconds,
    )


def _process_of(topology: Topology) -> Callable[[Any], int]:
    """Returns a function from a device to its host: compilers give all GPUs the same process."""
    if topology.platform == "gpu":
        return lambda device: int(device.id) // topology.shape[1]
    return lambda device: int(device.process_index)


# -- The goodput of a job that fails at random -----------------------------------------------------

_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Failures:
    """Failures of a job, after each of which it continues from its last save.

    They come at random (the times between them are exponentially distributed), also during saves
    and restarts: the complete model of J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", 2006.

    Attributes:
      mttf: Mean seconds between two failures of the job.
      restart: Seconds from a failure until steps are made again.
    """

    mttf: float
    restart: float

    def goodput(self, interval: float, cost: float) -> float:
        """Returns the share of the time that goes into new steps, from 0 to 1.

        Args:
          interval: Seconds of steps between two saves.
          cost: Seconds that a save delays the steps.
        """
        exponent = (interval + cost) / self.mttf
        if exponent > _LARGEST_EXPONENT:
            return 0.0
        # Mean seconds until the steps and the save have succeeded, with all failed attempts.
        taken = self.mttf * math.exp(self.restart / self.mttf) * math.expm1(exponent)
        return interval / taken

    def lost(self, interval: float, cost: float) -> float:
        """Returns the mean seconds that a failure costs: since the last save, and the restart."""
        whole = interval + cost
        exponent = whole / self.mttf
        left = 0.0 if exponent > _LARGEST_EXPONENT else whole / math.expm1(exponent)
        return self.mttf - left + self.restart

    def best_interval(self, cost: float) -> float:
        """Returns the seconds of steps between two saves at which the goodput is largest.

        They are Daly's estimate of higher order; its first term is Young's sqrt(2 cost mttf).
        `cost` must be below `mttf`.
        """
        ratio = math.sqrt(cost / (2 * self.mttf))
        young = math.sqrt(2 * cost * self.mttf)
        return young * (1 + ratio / 3 + ratio**2 / 9) - cost


# -- The options about failures, and the table of a plan -------------------------------------------

RESTART_SECONDS = 120.0
"""Seconds of a restart, unless they are given."""


@dataclass(frozen=True)
class FailureOptions:
    """Options about the failures of a job.

    Attributes:
      save: Seconds that a save on disk delays the steps.
      snapshot: The same of a snapshot in memory.
    """

    failures: Failures
    save: float
    snapshot: float

    @classmethod
    def parse(
        cls,
        mttf: float | None,
        save_seconds: float | None,
        snapshot_seconds: float | None,
        restart_seconds: float | None,
    ) -> "FailureOptions | None":
        """Returns the options if there are any.

        Args:
          mttf: Hours.

        Raises:
          UserError: If one is not valid, or is missing.
        """
        seconds = {
            "save_seconds": save_seconds,
            "snapshot_seconds": snapshot_seconds,
            "restart_seconds": restart_seconds,
        }
        if mttf is None:
            for name, value in seconds.items():
                if value is not None:
                    raise UserError(
                        f"{option(name, value)} is for the goodput of a job that fails: add "
                        "--mttf HOURS, or leave it out"
                    )
            return None
        _check("mttf", mttf, ABOVE_ZERO)
        for name, value in seconds.items():
            if value is None:
                continue
            _check(name, value, NOT_NEGATIVE if name == "restart_seconds" else ABOVE_ZERO)
            if value >= 3600 * mttf:
                raise UserError(
                    f"{option(name, value)} is no less than the {3600 * mttf:g} s between two "
                    "failures (--mttf, in hours): such a job makes no progress"
                )
        if save_seconds is None:
            raise UserError(
                "--mttf needs --save-seconds: the seconds for which a save delays the steps, such "
                "as `save` of events.jsonl divided by the number of saves"
            )
        restart = RESTART_SECONDS if restart_seconds is None else restart_seconds
        if restart >= 3600 * mttf:
            raise UserError(
                f"--mttf {mttf:g} h is no more than the {restart:g} s of a restart: give "
                "--restart-seconds"
            )
        snapshot = save_seconds if snapshot_seconds is None else snapshot_seconds
        return cls(Failures(3600 * mttf, restart), save_seconds, snapshot)

    def as_json(self, config: RunConfig, step: float | None) -> dict[str, Any]:
        """Returns the entry `failures` of a plan.

        Args:
          step: Seconds of a step; None if they are unknown. The steps of an interval are then
            unknown, too, and so are the rows of a cadence in steps.
        """
        best = self.failures.best_interval(self.save)
        rows = []
        if step is None:
            rows.append(self._row("checkpoints on disk, best", best, None, self.save))
        else:
            cadences = {"checkpoints on disk, best": (max(1, round(best / step)), self.save)}
            if config.checkpoint_every_steps is not None:
                cadences["checkpoints on disk, as given"] = (
                    config.checkpoint_every_steps,
                    self.save,
                )
            every = config.snapshot_every_steps
            name = "snapshots in memory, as given"
            if not isinstance(every, int):
                every, name = Cadence(self.snapshot, step).steps, "snapshots in memory, auto"
            cadences[name] = (every, self.snapshot)
            rows += [self._row(n, k * step, k, cost) for n, (k, cost) in cadences.items()]
        given = dataclasses.asdict(self.failures)
        return given | {"save": self.save, "snapshot": self.snapshot, "rows": rows}

    def _row(self, what: str, interval: float, steps: int | None, cost: float) -> dict[str, Any]:
        return {
            "what": what,
            "steps": steps,
            "interval": interval,
            "lost": self.failures.lost(interval, cost),
            "goodput": self.failures.goodput(interval, cost),
        }


def _check(name: str, value: float, range_: Range) -> None:
    if value not in range_:
        raise UserError(f"{option(name, value)}: it must be {range_.text}")


def failure_assumptions(failures: Mapping[str, Any]) -> str:
    """Returns what the table of a plan's `failures` assumes."""
    return (
        f"failures of the whole job come at random, one in {duration(failures['mttf'])} on "
        f"average, also during saves and restarts; a save delays the steps by "
        f"{failures['save']:g} s, a snapshot by {failures['snapshot']:g} s, and a restart takes "
        f"{failures['restart']:g} s; every failure finds a checkpoint or a complete snapshot, and "
        "checkpoints beside the snapshots are not counted"
    )
