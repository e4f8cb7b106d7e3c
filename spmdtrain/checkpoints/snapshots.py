"""Snapshots of a run in the memory of its hosts: taken beside the steps, found by a start."""

import base64
import datetime
import functools
import math
import os
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import crc32c
import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

# JAX has no public name for the address of its coordination service.
from spmdtrain.checkpoints import manifest as manifests
from spmdtrain.checkpoints.checksums import distinct_shards, starts_of
from spmdtrain.checkpoints.host_copy import copy_to_host, is_on_cpu
from spmdtrain.checkpoints.listing import Source
from spmdtrain.checkpoints.manifest import (
    CheckpointCorruptedError,
    Manifest,
    items_of,
    raw_keys,
)
from spmdtrain.checkpoints.read_arrays import restore_key
from spmdtrain.checkpoints.run_identity import Identity
from spmdtrain.checkpoints.snapshot_memory import (
    ALIGNMENT,
    PARTS,
    ArrayRecord,
    HostMemory,
    KeptParts,
    PartRecord,
    PartServer,
    PartTable,
    arrays_by_path,
    fetch_part,
    kept_bytes,
    send_copy,
    step_of,
)
from spmdtrain.cluster import job_token
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError, UserError
from spmdtrain.record.storage import one_line
from spmdtrain.record.validation import Malformed, read_bytes
from spmdtrain.step.state import TrainState
from spmdtrain.tree import path_name

PyTree = Any

# -- Taking of snapshots ---------------------------------------------------------------------------


SHARE = 0.01
"""The largest share of the time that snapshots cost with auto."""
_MEASURED = 3  # snapshots after the first one, which also warms up


@dataclass(frozen=True)
class Cost:
    """The cost of a snapshot.

    Attributes:
      waited: Seconds in which the steps waited: for the one before, and for the copy.
      processor: Seconds of a processor that the rest took, beside the steps.
    """

    waited: float
    processor: float


@dataclass(frozen=True)
class Cadence:
    """The number of steps between two snapshots at which they cost a given share of the time.

    Attributes:
      cost: Seconds of a snapshot.
      step: Seconds of a step.
    """

    cost: float
    step: float

    @property
    def steps(self) -> int:
        return max(1, math.ceil(self.cost / (SHARE * self.step)))

    def __str__(self) -> str:
        return (
            f"snapshots every {self.steps} steps: one costs {1e3 * self.cost:.1f} ms, and a step "
            f"takes {1e3 * self.step:.1f} ms"
        )


@dataclass
class _Pending:
    """A snapshot that is being written and sent."""

    name: str
    done: Future[list[list[str]]]


class Snapshots:
    """The snapshots of a run: takes them, and finds those of earlier starts.

    All processes of the job call the same methods in the same order. A thread writes a snapshot,
    sends it to the partner, and learns whether all processes have written theirs. Until that is
    known, the one before stays, so there is always one that is complete in all processes.

    Args:
      memory: Where they are kept.
      state: Shapes with shardings of what is saved of the state.
      warn: Receives lines for the user.
    """

    def __init__(self, memory: HostMemory, state: TrainState, warn: Callable[[str], None]) -> None:
        leaves = arrays_by_path(state)
        self.memory, self.hosts = memory, memory.hosts
        self._rank, self.warn = process_group.rank(), warn
        self.names: Sequence[str] = process_group.names()
        self._is_leader = self.hosts.leader(self._rank) == self._rank
        self._start, nonce = process_group.broadcast([secrets.token_hex(8), secrets.token_hex(32)])
        self._key = job_token.read(warn=lambda line: None) + str(nonce).encode()
        self._server: PartServer | None = None
        addresses: list[Any] = [None]
        if len(self.hosts.ranks) > 1:
            allowed = {
                sender: kept_bytes(leaves, self.hosts, sender)[1]
                for sender in self.hosts.senders(self._rank)
            }
            self._server = PartServer(self.memory, self._key, allowed, self._start)
            addresses = process_group.gather(list(self._server.address))
        self._addresses = [(str(x[0]), int(x[1])) if x else ("", 0) for x in addresses]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._sequence = process_group.new_sequence()  # of the thread
        self._pending: _Pending | None = None
        self._kept: Mapping[str, KeptParts] | None = None
        self._complete = ""  # the name of the newest snapshot that all processes have
        self._said: set[str] = set()
        self._abandoned = False
        self._costs: list[Cost] = []
        self._waited = self._processor = 0.0  # of the last one
        self._taken: list[tuple[int, float]] = []  # steps, and when they had been taken
        self.keep = True
        """Whether `close` keeps the snapshots, because a later start may continue from them."""

    @property
    def step(self) -> int:
        """The step of the newest snapshot that all processes have; 0 without one."""
        return step_of(self._complete) if self._complete else 0

    # -- taking one --------------------------------------------------------------------------------

    def take(
        self,
        state: TrainState,
        step: int,
        identity: Identity,
        metrics: Mapping[str, float] | None,
        *,
        epoch: Mapping[str, Any],
        callbacks: Mapping[str, Any],
        positions: Mapping[str, str],
        saved: int,
    ) -> None:
        """Takes a snapshot. Returns when the state is copied, and may be donated.

        Args:
          step: Number of updates in the state, whose finite flag is known.
          metrics: As for `Checkpoints.save`; so are `epoch`, `callbacks` and `positions`.
          saved: Step of the newest complete checkpoint.
        """
        began = time.perf_counter()
        self.wait()
        arrays = arrays_by_path(state)
        if (kept := self._kept) is None:  # shardings do not change
            kept = {n: KeptParts.of(x, self.hosts, self._rank) for n, x in arrays.items()}
            self._kept = kept
        copies = copy_to_host({n: x for n, x in arrays.items() if kept[n].sent})
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        finite = metrics and {n: x for n, x in metrics.items() if math.isfinite(x)}
        manifest = Manifest(
            step=step,
            saved_at=now,
            identity=identity,
            metrics=finite,
            stopped=False,
            sums={},
            files={},
            epoch=epoch,
            callbacks=callbacks,
        )
        table = PartTable(
            rank=self._rank,
            processes=process_group.count(),
            step=step,
            saved=saved,
            size=0,
            arrays={
                n: ArrayRecord(dtype=str(x.dtype), shape=list(x.shape), parts=[])
                for n, x in arrays.items()
            },
            positions=dict(positions),
        )
        name = f"{step}-{self._start}"
        counts = is_on_cpu(arrays)  # then the steps use the same processors
        self._waited = time.perf_counter() - began
        done = self._thread.submit(self._keep, name, table, manifest, copies, kept, counts)
        self._pending = _Pending(name, done)

    def choose_cadence(self, step: int, seconds: float) -> Cadence | None:
        """Returns the cadence by the first snapshots, the same in all processes; None before.

        Called after each snapshot, in all processes.

        Args:
          step: The step of the last snapshot.
          seconds: Seconds of training so far, without those of snapshots, saves and evaluations.
        """
        if len(self._taken) > _MEASURED:
            return None
        self._taken.append((step, seconds))
        if len(self._taken) <= _MEASURED:
            return None
        costs = sorted(each.waited + each.processor for each in self._costs[1:])
        (first, began), (last, ended) = self._taken[0], self._taken[-1]
        cost, each = costs[len(costs) // 2], max(ended - began, 1e-9) / (last - first)
        return Cadence(*process_group.broadcast([cost, each]))

    def wait(self) -> None:
        """Waits for the snapshot in progress, and warns of what is wrong with it."""
        if self._pending is None:
            return
        pending = self._pending
        faults = pending.done.result()  # an interrupt only ends the wait
        self._pending = None
        self._costs.append(Cost(self._waited, self._processor))
        del self._costs[: -_MEASURED - 1]
        for what, index in (("could not be taken in", 0), ("was not copied from", 1)):
            for process, found in zip(self.names, faults, strict=True):
                text = f"{what} {process}: {found[index]}"
                if found[index] and text not in self._said:
                    self._said.add(text)
                    step = step_of(pending.name)
                    self.warn(f"the snapshot of step {step} {text}; the next one tries again")

    def _keep(
        self,
        name: str,
        table: PartTable,
        manifest: Manifest,
        copies: Mapping[str, Any],
        kept: Mapping[str, KeptParts],
        counts: bool,
    ) -> list[list[str]]:
        """Writes and sends a snapshot; returns the faults of writing and of sending by process."""
        began, faults, sent = time.thread_time(), ["", ""], 0
        try:
            sent = self._write(name, table, manifest, copies, kept)
        except OSError as error:
            faults[0] = one_line(error)
        del copies
        partner = self.hosts.partner(self._rank)
        if partner is not None and not faults[0] and (sent or table.positions):
            try:
                address, key = self._addresses[partner], self._key
                send_copy(self.memory, address, key, self._rank, name, sent, self._complete)
            except (OSError, Malformed, CheckpointCorruptedError) as error:
                faults[1] = f"to {self.names[partner]}: {one_line(error)}"
        self._processor = time.thread_time() - began if counts else 0.0
        by_process = self._sequence.gather(faults)
        if not any(found[0] for found in by_process):
            if self._is_leader and not self._complete.endswith(self._start):
                # Of processes that this start does not have.
                current = {r for r in range(len(self.names)) if r == self._rank or self._holds(r)}
                self.memory.discard(-1, but=current)
            self._complete = name
        return by_process

    def _holds(self, rank: int) -> bool:
        """Returns whether this host keeps snapshots of a process."""
        here = self.hosts.of(self._rank)
        partner = self.hosts.partner(rank)
        return here in (self.hosts.of(rank), None if partner is None else self.hosts.of(partner))

    def _write(
        self,
        name: str,
        table: PartTable,
        manifest: Manifest,
        copies: Mapping[str, Any],
        kept: Mapping[str, KeptParts],
    ) -> int:
        """Writes a snapshot; returns the number of its first bytes that the partner needs."""
        folder = self.memory.begin(self._rank, [self._complete])
        parts = [
            (not kept[array_name].sent[starts_of(shard.index)], array_name, shard)
            for array_name, copied in copies.items()
            for shard in distinct_shards(copied)
            if starts_of(shard.index) in kept[array_name].sent
        ]
        at = sent = 0
        parts_of: dict[str, list[PartRecord]] = {name: [] for name in table.arrays}
        with os.fdopen(self.memory.data_file(self._rank), "r+b", buffering=0) as file:
            for is_alone, array_name, shard in sorted(parts, key=lambda part: part[0]):
                part = np.ascontiguousarray(np.asarray(shard.data))
                content: Any = memoryview(part.reshape(-1).view(np.uint8).data)
                file.seek(at)
                _write_all(file, content)
                parts_of[array_name].append(
                    PartRecord(
                        starts=list(starts_of(shard.index)),
                        shape=list(np.shape(shard.data)),
                        offset=at,
                        crc=crc32c.crc32c(content),
                    )
                )
                at += -(-len(content) // ALIGNMENT) * ALIGNMENT
                sent = sent if is_alone else at
            file.truncate(at)
        arrays = {
            n: ArrayRecord(dtype=x["dtype"], shape=x["shape"], parts=parts_of[n])
            for n, x in table.arrays.items()
        }
        table = replace(table, size=at, arrays=arrays)
        manifest.write(epath.Path(folder))
        self.memory.complete(self._rank, name, {PARTS: table.to_json()})
        return sent

    # -- finding those of earlier starts -----------------------------------------------------------

    def announced(self) -> dict[str, dict[int, dict[int, int]]]:
        """Returns the snapshots on all hosts, oldest first.

        By name, by the process that has taken it: the bytes that each leader's host has.
        """
        found: list[tuple[str, int, int]] = []
        faults: list[str] = []
        for rank in self.memory.ranks() if self._is_leader else ():
            for name in self.memory.names(rank):
                try:
                    found.append((name, rank, self.memory.table(rank, name).size))
                except CheckpointCorruptedError as error:
                    faults.append(f"{self.memory.path(rank, name)} is skipped: {error}")
        announced: dict[str, dict[int, dict[int, int]]] = {}
        own: Any = [found, faults]
        for leader, (names, bad) in enumerate(process_group.gather(own)):
            for name, rank, size in names:
                announced.setdefault(name, {}).setdefault(rank, {})[leader] = size
            for fault in bad:
                self.warn(f"snapshot {fault}")
        return {name: announced[name] for name in sorted(announced, key=step_of)}

    def collect(self, name: str, holders: Mapping[int, Mapping[int, int]]) -> "SnapshotSet":
        """Exchanges the tables of a snapshot, and one manifest, between the processes."""
        # The process that has taken a snapshot has all of its parts, and a partner perhaps fewer.
        readers = {
            rank: max(sizes, key=lambda x: (sizes[x], -x)) for rank, sizes in holders.items()
        }
        own: dict[str, str] = {}
        text = ""
        for rank in [rank for rank, reader in readers.items() if reader == self._rank]:
            with suppress(CheckpointCorruptedError, OSError, Malformed):  # gone since
                own[str(rank)] = _packed(self.memory.table(rank, name).to_json())
                if rank == min(readers):
                    path = epath.Path(self.memory.path(rank, name)) / manifests.NAME
                    text = _packed(read_bytes(path))
        given: Any = [own, text]
        gathered = process_group.gather(given)
        tables = {
            int(rank): PartTable.parse(_unpacked(packed))
            for one, _ in gathered
            for rank, packed in one.items()
        }
        if not tables:
            raise CheckpointCorruptedError("it is on no host any more")
        (packed_manifest,) = [text for _, text in gathered if text] or [_packed(b"")]
        folder = epath.Path(self.memory.path(min(tables), name))
        manifest = Manifest.parse(_unpacked(packed_manifest), folder)
        return SnapshotSet(name, manifest, tables, holders, folder)

    def begin_after(self, step: int, source: Source | None) -> None:
        """Removes the snapshots of steps that this start will make again.

        Args:
          step: The step from which this start continues.
          source: Where its state came from.
        """
        found = source.sets.get(step) if isinstance(source, SourceWithSnapshots) else None
        self._complete = found.name if found else ""
        if self._is_leader:
            self.memory.discard(step)

    def discard(self, after: int) -> None:
        """Removes the snapshots of steps after a step."""
        self.wait()
        if self._is_leader:
            self.memory.discard(after)

    def read(self, part: "PartCopy", found: "SnapshotSet") -> tuple[np.ndarray | None, bool, str]:
        """Reads one copy of a part from the memory of the host that has it.

        Returns the part, None if it cannot be read or is corrupted; whether it is on this host; and
        the fault.
        """
        own = self.hosts.leader(self._rank)
        leaders = [x for x, size in found.holders[part.rank].items() if part.end <= size]
        fault = "no host has it"
        for leader in sorted(leaders, key=lambda x: x != own):
            try:
                if leader == own:
                    content = self.memory.read(part.rank, found.name, part.offset, part.bytes)
                else:
                    content = fetch_part(
                        self._addresses[leader],
                        self._key,
                        part.rank,
                        found.name,
                        part.offset,
                        part.bytes,
                    )
            except OSError as error:
                fault = one_line(error)
                continue
            if crc32c.crc32c(content) == part.crc:
                values = np.frombuffer(content, np.uint8).view(part.dtype).reshape(part.shape)
                return values, leader == own, ""
            where = self.names[leader]
            fault = f"its checksum is wrong in the memory of the host of {where}"
        return None, False, f"the part of {self.names_of(part.rank)}: {fault}"

    def names_of(self, rank: int) -> str:
        """Returns the name of a process that may not exist in this start."""
        return self.names[rank] if rank < len(self.names) else f"process {rank}"

    # -- end ---------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Ends without waiting, because other processes of the job may be lost."""
        self._abandoned = True
        self._thread.shutdown(wait=False)

    def close(self) -> None:
        """Waits for the snapshot in progress; removes all if the run has ended for good."""
        if not self._abandoned:
            try:
                self.wait()
            finally:
                self._thread.shutdown(wait=False)
        if self._server is not None and not self._abandoned:
            self._server.close()
        held = [rank for rank in range(len(self.names)) if self._keeps(rank)]
        self.memory.close(remove=None if self.keep else held)

    def _keeps(self, rank: int) -> bool:
        return self._rank in (rank, self.hosts.partner(rank))


def _write_all(file: Any, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


def _packed(text: bytes) -> str:
    return base64.b64encode(zlib.compress(text)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


# -- Assembly of a state from the parts of snapshots -----------------------------------------------


@dataclass(frozen=True)
class PartCopy:
    """A copy of a part of an array in the data of a snapshot of the process `rank`."""

    rank: int
    offset: int
    starts: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    crc: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def end(self) -> int:
        return self.offset + self.bytes


@dataclass(frozen=True)
class SnapshotSet:
    """The snapshots of several processes after one step.

    Attributes:
      name: Their name.
      manifest: The manifest, which is the same in all of them but for seconds.
      tables: The table of each process.
      holders: For each process, the bytes of its data that the host of each leader has.
      folder: The folder of the first one on its host, for messages.
    """

    name: str
    manifest: Manifest
    tables: Mapping[int, PartTable]
    holders: Mapping[int, Mapping[int, int]]
    folder: epath.Path

    @functools.cached_property
    def parts(self) -> Mapping[str, Mapping[tuple[int, ...], Sequence[PartCopy]]]:
        """The copies of each part of each array, by the part's starts."""
        found: dict[str, dict[tuple[int, ...], list[PartCopy]]] = {}
        for rank, table in sorted(self.tables.items()):
            for name, array in table.arrays.items():
                copies = found.setdefault(name, {})
                for part in array["parts"]:
                    starts, shape = tuple(part["starts"]), tuple(part["shape"])
                    dtype = jnp.dtype(array["dtype"])
                    copy = PartCopy(rank, part["offset"], starts, shape, dtype, part["crc"])
                    copies.setdefault(starts, []).append(copy)
        return found

    def check(self, newest: int, trajectory: str | None) -> None:
        """Checks that the state is complete, and continues that of the newest checkpoint.

        Args:
          newest: Step of the newest checkpoint on disk; -1 without one.
          trajectory: The one that led to it; None if it cannot be read.

        Raises:
          CheckpointCorruptedError: If it is not.
        """
        table = self.tables[min(self.tables)]
        for name, array in table.arrays.items():
            size = sum(math.prod(copies[0].shape) for copies in self.parts[name].values())
            if size != math.prod(array["shape"]):
                raise CheckpointCorruptedError(f"a part of {name} is on no host any more")
        missing = {*range(table.processes)} - self.tables.keys()
        if missing and any(each.positions for each in self.tables.values()):
            raise CheckpointCorruptedError(
                f"the position in the stream of process {min(missing)} is on no host any more"
            )
        if table.saved > max(newest, 0):
            raise CheckpointCorruptedError(
                f"it follows checkpoint {table.saved}, which the workdir does not have any more"
            )
        if trajectory not in (None, self.manifest.identity.trajectory_at(newest)):
            raise CheckpointCorruptedError(
                f"it is of another trajectory than checkpoint {newest}, which the run has left"
            )


@dataclass(frozen=True, kw_only=True)
class SourceWithSnapshots(Source):
    """Checkpoints on disk and newer snapshots in memory, by step."""

    sets: Mapping[int, SnapshotSet]
    store: Snapshots
    here: list[bool] = field(default_factory=list, compare=False)
    """For each process, whether all its parts were in the memory of its host; of the last load."""

    def is_on_disk(self, step: int) -> bool:
        return step not in self.sets

    def kind(self, step: int) -> str:
        if step not in self.sets:
            return super().kind(step)
        return "snapshot" if all(self.here) else "partner"

    def origin(self, step: int) -> str:
        if step not in self.sets:
            return ""
        places = []
        for place, of in (("in memory", True), ("from the partner", False)):
            names = [
                n for n, is_here in zip(self.store.names, self.here, strict=True) if is_here is of
            ]
            places += [f"{place} ({', '.join(names)})"] if names else []
        return f": snapshot {', '.join(places)}"

    def path(self, step: int) -> epath.Path:
        return self.sets[step].folder if step in self.sets else super().path(step)

    def title(self, step: int) -> str:
        return f"the snapshot of step {step}" if step in self.sets else super().title(step)

    def read_manifest(self, step: int) -> Manifest:
        return self.sets[step].manifest if step in self.sets else super().read_manifest(step)

    def read_positions(self, manifest: Manifest) -> Mapping[str, str]:
        if (found := self.sets.get(manifest.step)) is None:
            return super().read_positions(manifest)
        return {i: x for table in found.tables.values() for i, x in table.positions.items()}

    def read_arrays(self, manifest: Manifest, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        if (found := self.sets.get(manifest.step)) is None:
            return super().read_arrays(manifest, fields)
        wanted = {field: x for item in items_of(fields).values() for field, x in item.items()}
        reader = _PartReader(self.store, found)

        def read() -> PyTree:
            return jax.tree_util.tree_map_with_path(
                lambda path, target: reader.array(path_name(path), target), raw_keys(wanted)
            )

        arrays = process_group.run_on_all(read, CheckpointCorruptedError)
        own: Any = [reader.is_here, reader.faults]
        collected = process_group.gather(own)
        self.here[:] = [is_here for is_here, _ in collected]
        for fault in dict.fromkeys(fault for _, faults in collected for fault in faults):
            self.store.warn(f"the snapshot of step {manifest.step}: {fault}; another copy is used")
        keys: dict[str, PyTree] = jax.tree.map(restore_key, wanted, arrays)
        return keys


def with_snapshots(disk: Source, store: Snapshots, total: int) -> Source:
    """Returns the checkpoints on disk together with newer snapshots in memory.

    A snapshot counts if all parts of its state are found on the hosts of this job, if it is of the
    trajectory of the newest checkpoint, and if steps are left after it. Others are named.

    Args:
      disk: The checkpoints on disk, perhaps none.
      store: The snapshots of the run.
      total: The number of steps of the run.
    """
    newest, left = max(disk.steps, default=-1), None
    if newest >= 0 and process_group.is_chief():
        with suppress(UserError, StorageError):  # a corrupted one is named when it is loaded
            left = disk.read_manifest(newest).identity.trajectory_at(newest)
    trajectory = process_group.broadcast(left)
    sets: dict[int, SnapshotSet] = {}
    for name, holders in store.announced().items():
        step = step_of(name)
        if step <= newest or step >= total:
            continue
        try:
            found = store.collect(name, holders)
            found.check(newest, trajectory)
        except CheckpointCorruptedError as error:
            store.warn(f"the snapshot of step {step} is skipped: {error}")
            continue
        sets[step] = found
    steps = sorted({*disk.steps, *sets})
    return SourceWithSnapshots(disk.folder, steps, whole_workdir=False, sets=sets, store=store)


class _PartReader:
    """Assembles the arrays of this process from parts, whatever parts the new shardings need.

    Attributes:
      is_here: Whether all parts so far were in the memory of this host.
      faults: What was wrong with copies in whose place others were used.
    """

    def __init__(self, store: Snapshots, found: SnapshotSet) -> None:
        self._store, self._found = store, found
        self.is_here, self.faults = True, list[str]()

    def array(self, name: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        """Returns an array in the sharding of the target."""
        copies = self._found.parts.get(name)
        header = self._found.tables[min(self._found.tables)].arrays.get(name)
        if copies is None or header is None:
            raise CheckpointCorruptedError(f"{name} is missing")
        if (tuple(header["shape"]), header["dtype"]) != (target.shape, str(target.dtype)):
            raise CheckpointCorruptedError(f"{name} has another shape or dtype")
        read: dict[tuple[int, ...], np.ndarray] = {}
        regions: dict[tuple[int, ...], np.ndarray] = {}

        def region(index: Any) -> np.ndarray:
            starts = starts_of(index)
            if starts not in regions:
                regions[starts] = self._region(name, index, target, read)
            return regions[starts]

        return jax.make_array_from_callback(target.shape, target.sharding, region)

    def _region(
        self,
        name: str,
        index: tuple[slice, ...],
        target: jax.ShapeDtypeStruct,
        read: dict[tuple[int, ...], np.ndarray],
    ) -> np.ndarray:
        """Returns a region of an array, copied from the parts that overlap it."""
        begins = starts_of(index)
        ends = [
            size if i.stop is None else i.stop for i, size in zip(index, target.shape, strict=True)
        ]
        # A copy in new memory: on CPUs the array would be a view of the snapshot.
        result = np.empty([b - a for a, b in zip(begins, ends, strict=True)], target.dtype)
        for starts, copies in self._found.parts[name].items():
            shape = copies[0].shape
            low = [max(a, s) for a, s in zip(begins, starts, strict=True)]
            high = [min(b, s + n) for b, s, n in zip(ends, starts, shape, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            if starts not in read:
                read[starts] = self._part(name, copies)
            into = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begins, strict=True))
            of = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, starts, strict=True))
            result[into] = read[starts][of]
        return result

    def _part(self, name: str, copies: Sequence[PartCopy]) -> np.ndarray:
        """Returns a part from the nearest copy that is not corrupted."""
        own = self._store.hosts.leader(process_group.rank())
        found, faults = self._found, list[str]()

        def distance(copy: PartCopy) -> int:
            sizes = found.holders[copy.rank]
            if own not in sizes:
                return 2
            return int(sizes[own] < max(sizes.values()))  # what a partner keeps may lack this part

        for copy in sorted(copies, key=distance):
            values, is_here, fault = self._store.read(copy, found)
            if values is not None:
                self.is_here &= is_here
                self.faults += [f"{name}: {each}" for each in faults]
                return values
            faults.append(fault)
        raise CheckpointCorruptedError(f"{name}: {'; '.join(faults)}")
