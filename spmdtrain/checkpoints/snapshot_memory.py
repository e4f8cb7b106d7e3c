"""The memory of the hosts of a job: its files of snapshots, and the connections between hosts."""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import math
import mmap
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypedDict

import jax.numpy as jnp
from etils import epath

# JAX has no public name for the address of its coordination service.
from jax._src import distributed as jax_distributed
from jax.sharding import Sharding

from spmdtrain.checkpoints import manifest as manifests
from spmdtrain.checkpoints.checksums import holders_of_parts, process_of_device
from spmdtrain.checkpoints.manifest import (
    CheckpointCorruptedError,
    digest,
    items_of,
    raw_keys,
)
from spmdtrain.cluster.job_token import Line
from spmdtrain.cluster.rendezvous import Admission, dial, is_loopback
from spmdtrain.distributed import process_group
from spmdtrain.distributed.out_of_memory import free_memory
from spmdtrain.document.terminal import byte_size
from spmdtrain.errors import UserError
from spmdtrain.record import no_follow
from spmdtrain.record.storage import is_url, one_line
from spmdtrain.record.user_folders import private_folder
from spmdtrain.record.validation import LARGEST, Malformed, build, parse_object, read_bytes
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves

# -- The snapshots in the memory of one host -------------------------------------------------------
#
#     FOLDER/spmdtrain-UID/snapshots/     mode 0700
#       RUN/                              the random name of a run, which its workdir records
#         run.json, lock                  its workdir; locked by the processes of the run
#         RANK/STEP-START/                a snapshot of the process RANK, complete
#           arrays, parts.json, manifest.json
#         RANK/.new/                      a snapshot that is being written
#
# START is the random name of a start of the run: snapshots of several processes belong together if
# step and start are equal. A partner keeps its copy in the folder of the process that it is of.

FOLDER_VARIABLE = "SPMDTRAIN_SNAPSHOT_DIR"
"""Environment variable with a folder in memory; by default /dev/shm."""
_DATA, PARTS, _NEW, _LOCK, _RUN = "arrays", "parts.json", ".new", "lock", "run.json"
_HOSTS = ".hosts-"
_OF_WORKDIR = "snapshots.json"  # the file of a workdir with the name of its run
_NAME = re.compile(r"(0|[1-9]\d{0,18})-[0-9a-f]{16}", re.ASCII)
_RUN_NAME = re.compile("[0-9a-f]{32}")
ALIGNMENT = 64  # bytes, between two parts
_DAY = 86_400.0  # seconds after which a snapshot of a run that does not run is removed


class PartRecord(TypedDict):
    """A part of an array in the file of a snapshot."""

    starts: list[int]
    shape: list[int]
    offset: int
    crc: int


class ArrayRecord(TypedDict):
    """An array of the state, and the parts of it in the file of a snapshot."""

    dtype: str
    shape: list[int]
    parts: list[PartRecord]


@dataclass(frozen=True)
class PartTable:
    """The content of the data of a snapshot of one process, in `parts.json`.

    Checksums are CRC-32C, which the host computes six times faster than the checksums of
    checkpoints. They cover what is kept and sent, part by part.
    """

    rank: int
    processes: int
    step: int
    saved: int
    """Step of the newest complete checkpoint when the snapshot was taken."""
    size: int
    """Bytes of the data."""
    arrays: Mapping[str, ArrayRecord]
    """All arrays of the state, also those of which the process keeps no part."""
    positions: Mapping[str, str]
    """Positions of the shards of a stream that the process reads."""

    def to_json(self) -> bytes:
        """Returns the content of the file, with its digest."""
        content = dataclasses.asdict(self)
        return json.dumps(content | {"sha256": digest(content)}).encode()

    @classmethod
    def parse(cls, text: bytes) -> "PartTable":
        """Returns the table that a file contains; raises `CheckpointCorruptedError`."""
        try:
            content = parse_object(text)
            if content.pop("sha256", None) != digest(content):
                raise CheckpointCorruptedError(f"{PARTS} does not match its digest")
            table = build(cls, content)
            for name, array in table.arrays.items():
                for part in array["parts"]:
                    table._check(name, array, part)
        except (Malformed, TypeError, ValueError) as error:
            if isinstance(error, CheckpointCorruptedError):
                raise
            raise CheckpointCorruptedError(f"{PARTS} is malformed: {error}") from error
        return table

    def _check(self, name: str, array: ArrayRecord, part: PartRecord) -> None:
        boxes = zip(part["starts"], part["shape"], array["shape"], strict=True)
        is_inside = all(start >= 0 and 0 < size <= all_ - start for start, size, all_ in boxes)
        if not is_inside or not 0 <= part["offset"] <= self.size - _bytes_of(array, part):
            raise Malformed(f"a part of {name[:60]!r} is not inside it")

    def prefix(self, size: int) -> "PartTable":
        """Returns the table of the first `size` bytes of the data."""
        arrays = {
            name: array
            | {
                "parts": [x for x in array["parts"] if x["offset"] + _bytes_of(array, x) <= size],
            }
            for name, array in self.arrays.items()
        }
        return replace(self, size=size, arrays=arrays)


def _bytes_of(array: ArrayRecord, part: PartRecord) -> int:
    return math.prod(part["shape"]) * int(jnp.dtype(array["dtype"]).itemsize)


def step_of(name: str) -> int:
    """Returns the step of a snapshot by its name."""
    return int(name.partition("-")[0])


class HostMemory:
    """The snapshots of one run in a folder in the memory of this host.

    Args:
      root: The folder of the snapshots of all runs (see `snapshot_folder`).
      run: The random name of the run.
      hosts: The processes of the job by their hosts.
    """

    def __init__(self, root: Path, run: str, hosts: "Hosts") -> None:
        self.root, self.run, self.hosts = root, run, hosts
        self._lock: int | None = None

    def path(self, rank: int, name: str) -> Path:
        """Returns the folder of a snapshot."""
        return self.root / self.run / str(rank) / name

    def open(self, workdir: str | None) -> None:
        """Creates the folder of the run, and locks it against its removal by other runs.

        The first process of the host gives the workdir, which is recorded.
        """
        for _ in range(100):
            no_follow.make_subfolder(self.root, self.run)
            flags = os.O_RDWR | os.O_CREAT
            try:
                lock = no_follow.open_file(self.root, f"{self.run}/{_LOCK}", flags)
            except FileNotFoundError:  # removed by another run since
                continue
            fcntl.flock(lock, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(self.root / self.run / _LOCK)):
                    break
            os.close(lock)
        self._lock = lock
        if workdir is not None:
            content = json.dumps({"workdir": workdir}).encode()
            no_follow.write(self.root, f"{self.run}/{_RUN}", lambda file: file.write(content))

    def close(self, *, remove: Sequence[int] | None) -> None:
        """Unlocks the folder; the last process removes it if nothing is left.

        `remove` are the ranks whose snapshots are removed before; None keeps all.
        """
        if self._lock is None:
            return
        for rank in remove or ():
            self._remove(f"{self.run}/{rank}")
        if remove is not None:
            with suppress(OSError):  # other processes of the run still use it
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._remove(self.run)
        os.close(self._lock)
        self._lock = None

    def ranks(self) -> list[int]:
        """Returns the processes of which there are snapshots."""
        names = no_follow.names_in(self.root, self.run)
        return sorted(int(name) for name in names if name.isdecimal())

    def names(self, rank: int) -> list[str]:
        """Returns the names of the complete snapshots of a process."""
        with suppress(FileNotFoundError):
            found = no_follow.names_in(self.root, f"{self.run}/{rank}")
            return [name for name in found if _NAME.fullmatch(name)]
        return []

    def table(self, rank: int, name: str) -> PartTable:
        """Reads and checks the table of a snapshot; raises `CheckpointCorruptedError`."""
        folder = self.path(rank, name)
        try:
            table = PartTable.parse(read_bytes(epath.Path(folder / PARTS)))
            size = os.stat(folder / _DATA).st_size
        except FileNotFoundError as error:
            missing = Path(str(error.filename)).name
            raise CheckpointCorruptedError(f"{missing} is missing") from None
        except (Malformed, OSError) as error:
            raise CheckpointCorruptedError(one_line(error)) from error
        if (table.rank, table.step) != (rank, step_of(name)):
            raise CheckpointCorruptedError("it is another snapshot under this name")
        if size != table.size:
            raise CheckpointCorruptedError(f"{_DATA} has {size:,} bytes, and had {table.size:,}")
        return table

    def read(self, rank: int, name: str, at: int, size: int) -> memoryview:
        """Returns bytes of the data of a snapshot, which are not read yet."""
        if not size:
            return memoryview(b"")
        place = f"{self.run}/{rank}/{name}/{_DATA}"
        file = no_follow.open_file(self.root, place, os.O_RDONLY)
        try:
            if os.fstat(file).st_size < at + size:
                raise OSError(errno.EINVAL, "the data are shorter")
            return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_READ))[at : at + size]
        finally:
            os.close(file)

    def begin(self, rank: int, keep: Iterable[str]) -> Path:
        """Returns the folder of a new snapshot of a process, and removes all others but `keep`.

        It takes over the data of one of them: to overwrite memory takes half the time of new one.
        """
        no_follow.make_subfolder(self.root, f"{self.run}/{rank}")
        new = self.path(rank, _NEW)
        for name in set(self.names(rank)) - {*keep}:
            if not new.exists():
                os.rename(self.path(rank, name), new)
            else:
                no_follow.remove(self.root, f"{self.run}/{rank}/{name}")
        no_follow.make_subfolder(self.root, f"{self.run}/{rank}/{_NEW}")
        for name in no_follow.names_in(self.root, f"{self.run}/{rank}/{_NEW}"):
            if name != _DATA:
                no_follow.remove(self.root, f"{self.run}/{rank}/{_NEW}/{name}")
        return new

    def data_file(self, rank: int) -> int:
        """Opens the data of the snapshot that is being written."""
        place = f"{self.run}/{rank}/{_NEW}/{_DATA}"
        return no_follow.open_file(self.root, place, os.O_RDWR | os.O_CREAT)

    def complete(self, rank: int, name: str, texts: Mapping[str, bytes]) -> None:
        """Writes the other files of the snapshot that is being written, and gives it its name."""
        for file_name, text in texts.items():
            place = f"{self.run}/{rank}/{_NEW}/{file_name}"
            no_follow.write(self.root, place, functools.partial(_write_text, text=text))
        os.rename(self.path(rank, _NEW), self.path(rank, name))

    def discard(self, after: int, *, but: Iterable[int] = ()) -> None:
        """Removes the snapshots of later steps than `after` of all processes but some."""
        for rank in set(self.ranks()) - {*but}:
            for name in self.names(rank):
                if step_of(name) > after:
                    self._remove(f"{self.run}/{rank}/{name}")

    def used(self) -> int:
        """Returns the bytes of the snapshots of the run, which new ones replace."""
        total = 0
        for folder, _, names in os.walk(self.root / self.run):
            with suppress(OSError):  # another process of the run replaces one
                total += sum(os.stat(os.path.join(folder, name)).st_size for name in names)
        return total

    def remove_leftovers(self) -> None:
        """Removes the snapshots of runs that have ended and will not continue from them."""
        for name in sorted(os.listdir(self.root)):
            if name.startswith(_HOSTS):  # of a start that was killed
                with suppress(OSError):
                    if time.time() - os.stat(self.root / name).st_mtime > _DAY:
                        self._remove(name)
            elif name != self.run and _RUN_NAME.fullmatch(name):
                with suppress(OSError), _only_user(self.root, name):
                    if _is_leftover(self.root, name):
                        self._remove(name)

    def _remove(self, name: str) -> None:
        with suppress(OSError):  # the next start tries again
            no_follow.remove(self.root, name)


def _write_text(file: IO[bytes], text: bytes) -> None:
    file.write(text)


def snapshot_folder() -> Path:
    """Returns the folder of the snapshots of this user on this host, and creates it.

    Raises `UserError` if there is no folder in memory, or others can access it.
    """
    parent = Path(os.environ.get(FOLDER_VARIABLE) or "/dev/shm")
    if not parent.is_dir():
        raise UserError(
            f"snapshot_every_steps: there is no folder {parent}: set {FOLDER_VARIABLE} to a folder "
            "in memory (tmpfs), or leave snapshot_every_steps out"
        )
    try:
        folder = private_folder(parent, FOLDER_VARIABLE)
        no_follow.make_subfolder(folder, "snapshots")
    except OSError as error:
        raise UserError(
            f"snapshot_every_steps: no snapshots can be kept in {parent}: {one_line(error)}; set "
            f"{FOLDER_VARIABLE} to a folder in memory (tmpfs)"
        ) from error
    return folder / "snapshots"


def run_of_workdir(workdir: epath.Path) -> str:
    """Returns the random name under which the run of a workdir has its snapshots.

    A workdir that was copied, or made again, gets another one.
    """
    path, place = workdir / _OF_WORKDIR, str(workdir)
    with suppress(Malformed, FileNotFoundError):
        found = parse_object(read_bytes(path))
        if found.get("workdir") == place and _RUN_NAME.fullmatch(str(found.get("run"))):
            return str(found["run"])
    run = secrets.token_hex(16)
    content = json.dumps({"run": run, "workdir": place}).encode()
    no_follow.write(workdir, _OF_WORKDIR, lambda file: file.write(content))
    return run


@contextlib.contextmanager
def _only_user(root: Path, run: str) -> Iterator[None]:
    """Locks the folder of a run alone; raises `OSError` if a process of the run uses it."""
    lock = no_follow.open_file(root, f"{run}/{_LOCK}", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def _is_leftover(root: Path, run: str) -> bool:
    """Returns whether a run has ended for good, has no workdir any more, or is a day old."""
    newest = max(os.stat(path).st_mtime for path in (root / run, *(root / run).iterdir()))
    if time.time() - newest > _DAY:
        return True
    with suppress(Malformed, FileNotFoundError, NotADirectoryError):
        workdir = str(parse_object(read_bytes(epath.Path(root / run / _RUN))).get("workdir"))
        if is_url(workdir):  # nothing is known of a bucket that may be slow, or closed
            return False
        record = parse_object(read_bytes(epath.Path(workdir) / _OF_WORKDIR))
        if record.get("run") == run:
            with suppress(Malformed, FileNotFoundError):
                status = parse_object(read_bytes(epath.Path(workdir) / "status.json"))
                return bool(status.get("status") == "finished")
            return False
    return True


# -- The hosts of a job, and the parts of the state that each process keeps ------------------------


@dataclass(frozen=True)
class Hosts:
    """The processes of a job by the memory that they share: ranks of each host, ascending."""

    ranks: Sequence[Sequence[int]]

    def of(self, rank: int) -> int:
        """Returns the number of the host of a process."""
        return next(host for host, ranks in enumerate(self.ranks) if rank in ranks)

    def leader(self, rank: int) -> int:
        """Returns the first process on the host of a process."""
        return self.ranks[self.of(rank)][0]

    def partner(self, rank: int) -> int | None:
        """Returns the process on the next host that keeps the copies; None on a single host."""
        if len(self.ranks) == 1:
            return None
        here = self.of(rank)
        there = self.ranks[(here + 1) % len(self.ranks)]
        return there[self.ranks[here].index(rank) % len(there)]

    def senders(self, rank: int) -> list[int]:
        """Returns the processes whose copies a process keeps."""
        return [each for ranks in self.ranks for each in ranks if self.partner(each) == rank]


def find_hosts(root: Path) -> Hosts:
    """Returns which processes have the same folder: these are on one host. All call it together."""
    if process_group.count() == 1:
        return Hosts([[0]])
    name = process_group.broadcast(f"{_HOSTS}{secrets.token_hex(8)}")
    no_follow.make_subfolder(root, name)
    no_follow.create(root, f"{name}/{process_group.rank()}").close()
    process_group.barrier()
    found = sorted(int(rank) for rank in no_follow.names_in(root, name))
    hosts = process_group.gather(found)
    if found[0] == process_group.rank():
        no_follow.remove(root, name)
    return Hosts([ranks for rank, ranks in enumerate(hosts) if ranks[0] == rank])


def arrays_by_path(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a state, or their shapes, by path."""
    fields = {n: x for item in items_of(vars(state)).values() for n, x in item.items()}
    return named_leaves(raw_keys(fields))


@dataclass(frozen=True)
class KeptParts:
    """The parts of an array that one process keeps.

    Attributes:
      sent: Whether it sends each part to its partner, by the part's starts: no other host has it.
      bytes: Bytes of a part.
    """

    sent: Mapping[tuple[int, ...], bool]
    bytes: int

    @classmethod
    def of(
        cls,
        leaf: Any,
        hosts: Hosts,
        rank: int,
        process_of: Callable[[Any], int] = process_of_device,
    ) -> "KeptParts":
        """Returns the parts of an array, or its `jax.ShapeDtypeStruct`, that a process keeps.

        Of the processes of a host that hold a part, the first one keeps it.
        """
        sharding: Sharding = leaf.sharding
        here = hosts.ranks[hosts.of(rank)]
        sent = {}
        for starts, holders in holders_of_parts(sharding, leaf.shape, process_of).items():
            if rank == min(({*holders} & {*here}), default=None):
                sent[starts] = len(hosts.ranks) > 1 and {*holders} <= {*here}
        shape = sharding.shard_shape(leaf.shape)
        return cls(sent, math.prod(shape) * int(jnp.dtype(leaf.dtype).itemsize))


def kept_bytes(
    leaves: Mapping[str, Any],
    hosts: Hosts,
    rank: int,
    process_of: Callable[[Any], int] = process_of_device,
) -> tuple[int, int]:
    """Returns the bytes of a state that a process keeps, and those that it sends."""
    kept = sent = 0
    for leaf in leaves.values():
        parts = KeptParts.of(leaf, hosts, rank, process_of)
        size = -(-parts.bytes // ALIGNMENT) * ALIGNMENT
        kept += size * len(parts.sent)
        sent += size * sum(parts.sent.values())
    return kept, sent


@dataclass(frozen=True)
class HostNeeds:
    """Bytes that the snapshots of a run need on a host.

    Attributes:
      kept: Those of its own processes, of one generation.
      copies: Those of the processes whose copies it keeps, of one generation.
    """

    kept: int
    copies: int

    @classmethod
    def of(
        cls,
        leaves: Mapping[str, Any],
        hosts: Hosts,
        rank: int,
        process_of: Callable[[Any], int] = process_of_device,
    ) -> "HostNeeds":
        """Returns what a state needs on the host of a process."""
        here = hosts.ranks[hosts.of(rank)]
        senders = [sender for each in here for sender in hosts.senders(each)]
        return cls(
            kept=sum(kept_bytes(leaves, hosts, each, process_of)[0] for each in here),
            copies=sum(kept_bytes(leaves, hosts, each, process_of)[1] for each in senders),
        )

    @property
    def at_rest(self) -> int:
        """Bytes of the two generations that stay."""
        return 2 * (self.kept + self.copies)

    @property
    def at_most(self) -> int:
        """Bytes while a snapshot is taken, whose parts are copied first."""
        return self.at_rest + self.kept


def open_memory(workdir: epath.Path, state: TrainState) -> HostMemory:
    """Opens the memory for the snapshots of the run of a workdir; all processes call it together.

    Args:
      state: Shapes with shardings of what is saved of the state.

    Raises:
      UserError: If there is too little memory, or its folder cannot be used.
    """
    root = process_group.run_on_all(snapshot_folder, UserError)
    run = process_group.broadcast(run_of_workdir(workdir) if process_group.is_chief() else "")
    hosts = find_hosts(root)
    memory = HostMemory(root, run, hosts)
    is_leader = hosts.leader(process_group.rank()) == process_group.rank()
    memory.open(str(workdir) if is_leader else None)
    if is_leader:
        memory.remove_leftovers()
    leaves = arrays_by_path(state)
    try:
        process_group.run_on_all(lambda: check_memory(memory, leaves), UserError)
    except UserError:
        memory.close(remove=None)
        raise
    return memory


def check_memory(memory: HostMemory, leaves: Mapping[str, Any]) -> None:
    """Raises `UserError` if the memory of this host is too small for the snapshots."""
    hosts = memory.hosts
    here = hosts.ranks[hosts.of(process_group.rank())]
    needs = HostNeeds.of(leaves, hosts, here[0])
    used = memory.used()
    in_folder = shutil.disk_usage(memory.root).free + used
    in_memory = free_memory() + used
    if needs.at_rest <= in_folder and needs.at_most <= in_memory:
        return
    of_partners = f" and 2 x {byte_size(needs.copies)} for copies of another host's"
    of_partners *= needs.copies > 0
    raise UserError(
        f"snapshot_every_steps: too little memory for snapshots on the host of "
        f"{process_group.names()[here[0]]}: 2 x {byte_size(needs.kept)} for {len(here)} "
        f"{'process' if len(here) == 1 else 'processes'}{of_partners} = "
        f"{byte_size(needs.at_rest)} in {memory.root}, and {byte_size(needs.kept)} while one is "
        f"taken; free there: {byte_size(in_folder)}, free memory: {byte_size(in_memory)}. Give the "
        f"job more memory (containers: a larger /dev/shm), set {FOLDER_VARIABLE} to a larger "
        "folder in memory, or leave snapshot_every_steps out"
    )


# -- Connections to the processes of other hosts ---------------------------------------------------

PATIENCE = 30.0
"""Seconds within which a process sends a snapshot to its partner, or gets a part from one; more for
large ones (`_deadline`)."""
_SLOWEST = 1e8  # bytes a second, for which the time suffices beside `PATIENCE`


def _deadline(size: int) -> float:
    return time.monotonic() + PATIENCE + size / _SLOWEST


class PartServer:
    """Keeps copies of the snapshots of other hosts, and gives parts of what this host has.

    It answers processes of the job alone, which have its key.

    Args:
      key: Authenticates the processes of the job.
      allowed: The processes whose copies are kept, with the most bytes of one.
      start: The random name of this start of the run.
    """

    def __init__(
        self, memory: HostMemory, key: bytes, allowed: Mapping[int, int], start: str
    ) -> None:
        self._memory, self._key, self._allowed, self._start = memory, key, allowed, start
        host, _, _ = (jax_distributed.global_state.coordinator_address or "").rpartition(":")
        self._host = host.strip("[]")
        self._listener = self._listen()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="snapshot-parts", daemon=True)
        self._thread.start()

    def _listen(self) -> socket.socket:
        if is_loopback(self._host):
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            address = "::1" if ":" in self._host else "127.0.0.1"
            return socket.create_server((address, 0), family=family, backlog=128)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True
            )
        return socket.create_server(("", 0), backlog=128)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port at which other processes of the job reach this one."""
        port = int(self._listener.getsockname()[1])
        if is_loopback(self._host):
            return self._host, port
        *_, place = socket.getaddrinfo(self._host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(
            socket.AF_INET6 if len(place) == 4 else socket.AF_INET, socket.SOCK_DGRAM
        ) as probe:
            probe.connect(place)  # sends nothing
            own = str(probe.getsockname()[0])
        # On the machine of process 0 others know it by the same name.
        return (self._host if is_loopback(own) else own), port

    def _serve(self) -> None:
        admission = Admission(self._listener, self._key)
        answers = ThreadPoolExecutor(8, thread_name_prefix="snapshot-part")
        with contextlib.closing(self._listener), contextlib.closing(admission):
            while not self._ends.is_set():
                for line, message in admission.poll(0.5)[0]:
                    admission.release(line)
                    answers.submit(self._answer, line, message)
        answers.shutdown(wait=False)

    def _answer(self, line: Line, message: Mapping[str, Any]) -> None:
        with contextlib.closing(line), suppress(OSError, ValueError):
            self._answer_valid(line, message)

    def _answer_valid(self, line: Line, message: Mapping[str, Any]) -> None:
        name, rank, size = (message.get(key) for key in ("name", "rank", "size"))
        is_valid = isinstance(name, str) and _NAME.fullmatch(name)
        if not is_valid or type(rank) is not int or type(size) is not int or size < 0:
            return
        assert isinstance(name, str)
        deadline = _deadline(size)
        if message.get("what") == "put":
            fault = self._refusal(message, name, rank, size)
            line.send({"fault": fault})
            if not fault:
                line.send({"fault": self._keep(line, message, name, rank, size, deadline)})
        elif message.get("what") == "get":
            at = message.get("at")
            if type(at) is int and at >= 0 and rank >= 0:
                content = self._memory.read(rank, name, at, size)
                line.send({"size": len(content)})
                line.send_bytes(content, deadline)

    def _refusal(self, message: Mapping[str, Any], name: str, rank: int, size: int) -> str:
        """Returns why a snapshot of a process is not kept, "" if it is."""
        if rank not in self._allowed or not name.endswith(f"-{self._start}"):
            return f"{process_group.name()} keeps no copies of it"
        if size > self._allowed[rank]:
            return f"it has {size:,} bytes, more than the state"
        for file_name in (PARTS, manifests.NAME):
            length = message.get(file_name)
            if type(length) is not int or not 0 < length <= LARGEST:
                return f"its {file_name} is too large"
        return ""

    def _keep(
        self,
        line: Line,
        message: Mapping[str, Any],
        name: str,
        rank: int,
        size: int,
        deadline: float,
    ) -> str:
        """Receives a snapshot of a process; returns what is wrong, "" if it is kept."""
        texts = {file_name: bytearray(message[file_name]) for file_name in (PARTS, manifests.NAME)}
        try:
            self._memory.begin(rank, [str(message.get("keep"))])
            with os.fdopen(self._memory.data_file(rank), "r+b") as file:
                file.truncate(size)
                data = mmap.mmap(file.fileno(), size) if size else b""
            for part in (*texts.values(), *([data] if size else [])):
                if not line.receive_bytes(memoryview(part), deadline):
                    return "what has arrived is not what was sent"
            self._memory.complete(rank, name, {n: bytes(text) for n, text in texts.items()})
        except TimeoutError:
            raise
        except OSError as error:
            return one_line(error)
        return ""

    def close(self) -> None:
        """Ends the connections."""
        self._ends.set()
        self._thread.join(PATIENCE)


def send_copy(
    memory: HostMemory,
    address: tuple[str, int],
    key: bytes,
    rank: int,
    name: str,
    size: int,
    keep: str,
) -> None:
    """Sends the first bytes of a snapshot to the partner.

    Args:
      size: Bytes of the data to send.
      keep: The name of the snapshot that the partner keeps beside this one.

    Raises:
      OSError: If the partner has not kept it in time.
    """
    deadline = _deadline(size)
    table = memory.table(rank, name).prefix(size).to_json()
    text = read_bytes(epath.Path(memory.path(rank, name) / manifests.NAME))
    with contextlib.closing(dial(address, key, deadline)) as line:
        message = {"what": "put", "name": name, "rank": rank, "size": size, "keep": keep}
        line.send(message | {PARTS: len(table), manifests.NAME: len(text)})
        _check_answer(line, deadline)
        line.send_bytes(memoryview(table), deadline)
        line.send_bytes(memoryview(text), deadline)
        if size:
            line.send_bytes(memory.read(rank, name, 0, size), deadline)
        _check_answer(line, deadline)


def _check_answer(line: Line, deadline: float) -> None:
    answer = line.answer(deadline)
    if answer is None or answer.get("fault"):
        raise OSError(errno.EIO, str((answer or {}).get("fault") or "it does not answer"))


def fetch_part(
    address: tuple[str, int], key: bytes, rank: int, name: str, at: int, size: int
) -> memoryview:
    """Returns bytes of the data of a snapshot on another host; raises `OSError`."""
    deadline = _deadline(size)
    with contextlib.closing(dial(address, key, deadline)) as line:
        line.send({"what": "get", "name": name, "rank": rank, "size": size, "at": at})
        answer = line.answer(deadline)
        if answer is None or answer.get("size") != size:
            raise OSError(errno.EIO, "the other host does not give it")
        content = memoryview(bytearray(size))
        if not line.receive_bytes(content, deadline):
            raise OSError(errno.EIO, "what has arrived is not what was sent")
    return content
