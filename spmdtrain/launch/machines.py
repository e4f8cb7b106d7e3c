"""A job of several machines: the launchers of all find each other, and one of them leads.

Each machine of TF_CONFIG has a launcher, which starts the one process of that machine. The leader
decides what all do, as the launcher of a job on one machine does; the others follow: they start and
end their process at its request, and report how it exits. Every launcher accepts the others at
its address of TF_CONFIG. The lowest one that finds no leader leads, as soon as more than half of
all are with it (or half, machine 0 among them), so that two parts of a divided network never both
continue. When the leader is lost, the others find another in the same way.
"""

import dataclasses
import json
import math
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from spmdtrain import __version__
from spmdtrain.cluster.job_token import Line
from spmdtrain.cluster.rendezvous import Admission, dial, listen
from spmdtrain.cluster.spec import Address
from spmdtrain.distributed import progress
from spmdtrain.distributed.progress import Phase, ProgressRecord, Reason
from spmdtrain.errors import ClusterError, ExitCode, UserError
from spmdtrain.launch.child import Signals, TaskExit
from spmdtrain.launch.machine import LocalTask, Machine
from spmdtrain.launch.task_env import free_ports, training_tasks

_POLL_INTERVAL = 0.1
_PULSE = 2.0  # seconds between two messages of a launcher that has nothing to say
_SILENCE = 10.0  # seconds without a message after which another launcher counts as lost
_SEND_TIMEOUT = 5.0
_DIAL_TIMEOUT = 2.0
_REDIAL = 0.5  # seconds between two rounds of calls to all others
_MOST_CALLS = 16  # at a time
_FIRST_WAIT = 60.0  # seconds for all machines to come before enough of them begin
_NEXT_WAIT = 5.0  # the same after a leader was lost
LONGEST_WAIT = 900.0
"""Seconds to wait for enough machines."""
MOST_REFUSALS = 3 * _SILENCE / _REDIAL
"""Calls that a leader refuses, because it has another launcher of that name, before an error."""
REPORT_INTERVAL = 10.0
"""Seconds between two lines about machines that are missing."""
_MOST_ERRORS = 20_000  # characters of standard error that an exit is reported with
_MOST_CONTENT = 200_000  # bytes of a file of the job
_FILES = (*progress.KINDS, progress.WITHOUT, progress.REFUSED)
_UNSAID = {progress.REFUSED: b"{}"}  # files that are no answer yet


@dataclass(frozen=True)
class Cluster:
    """The machines of a job, and which of them this one is."""

    names: Sequence[str]
    """The name of each machine by rank, which is that of its task in TF_CONFIG: `worker 1`."""
    addresses: Sequence[Address]
    """Where each launcher accepts the others, by rank."""
    rank: int
    token: bytes = field(repr=False)
    """The job's token, which all share."""
    minimum: int | None
    """Smallest number of machines with which the job begins and continues; None for all."""

    def is_enough(self, ranks: Collection[int]) -> bool:
        """Returns whether a job may begin or continue on these machines."""
        twice, total = 2 * len(ranks), len(self.addresses)
        decides = twice > total or (twice == total and 0 in ranks)
        return decides and len(ranks) >= (total if self.minimum is None else self.minimum)

    def described(self, ranks: Iterable[int]) -> str:
        """Returns names with addresses, such as `worker 1 (10.0.0.2:2222)`."""
        return ", ".join(f"{self.names[rank]} ({self.addresses[rank]})" for rank in ranks)

    @property
    def agreement(self) -> dict[str, Any]:
        """What must be equal in all launchers."""
        return {
            "the list of machines": ", ".join(map(str, self.addresses)),
            "--min-processes": self.minimum,
            "the version of spmdtrain": __version__,
        }

    def difference(self, rank: int, theirs: Mapping[str, Any]) -> str | None:
        """Returns what is different in another launcher; None if nothing is."""
        for what, mine in self.agreement.items():
            if (other := theirs.get(what)) != mine:
                own = self.names[self.rank]
                return f"{what} is {mine} in {own} and {other} in {self.names[rank]}"
        return None


class Peer:
    """The launcher of another machine, at the other end of a line."""

    def __init__(self, line: Line, rank: int) -> None:
        line.socket.settimeout(_SEND_TIMEOUT)
        self.rank = rank
        self.is_open = True
        self._line = line
        self._heard = self._spoke = time.monotonic()

    def send(self, **message: Any) -> None:
        """Sends a message; the connection is closed if that fails."""
        if self.is_open:
            self._spoke = time.monotonic()
            try:
                self._line.send(message)
            except OSError:
                self.close()

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have come; sends one if the other would else count us lost."""
        found: list[dict[str, Any]] = []
        ended = False
        while self.is_open and not ended:
            for message in self._line.messages():  # some may have come with an earlier answer
                ended |= message is None  # not of this connection
                found += [] if message is None else [message]
            if not select.select([self._line.socket], [], [], 0)[0]:
                break
            ended |= not self._line.read()
            self._heard = time.monotonic()
        if ended and self.is_open:
            found += [message for message in self._line.messages() if message is not None]
            self.close()
        if time.monotonic() - self._heard > _SILENCE:
            self.close()
        if time.monotonic() - self._spoke > _PULSE:
            self.send()
        return found

    def close(self) -> None:
        """Closes the connection."""
        self.is_open = False
        self._line.close()


# -- How the launchers find each other -------------------------------------------------------------


class Machines:
    """The launchers of a job, as the one of this machine sees them.

    Args:
      cluster: The machines.
      folder: The folder of the job's files on this machine. A leader keeps the files of others in
        it, too.
      log: Prints a line of the launcher.
      signals: The stop signals of this launcher.

    Raises:
      UserError: If the own address is in use.
    """

    def __init__(
        self, cluster: Cluster, folder: str, log: Callable[[str], None], signals: Signals
    ) -> None:
        self.cluster = cluster
        self._folder, self._log, self._signals = folder, log, signals
        own = cluster.addresses[cluster.rank]
        self._listener = listen(own.host, own.port, f"the launcher of {self.own_name}")
        self._admission = Admission(self._listener, cluster.token)
        self._followers: dict[int, Peer] = {}
        self._ports: dict[int, int] = {}  # a free port of each follower
        # Of each follower, how many spares are ready, and whether these are all.
        self._spares: dict[int, tuple[int, bool]] = {}
        self._tasks: dict[int, RemoteTask] = {}
        self._leader: int | None = None  # None while it is sought
        self._said: set[str] = set()
        self.known: dict[str, Any] = {}
        """What a leader has found out about the job, which the next one has to know."""

    def __enter__(self) -> "Machines":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.dismiss()
        self._admission.close()
        self._listener.close()

    @property
    def ranks(self) -> list[int]:
        """The machines whose launchers are with this one, which leads, and its own."""
        return sorted([self.cluster.rank, *self._followers])

    @property
    def own_name(self) -> str:
        """The name of this machine."""
        return self.cluster.names[self.cluster.rank]

    @property
    def names(self) -> list[str]:
        """The names of these machines."""
        return [self.cluster.names[rank] for rank in self.ranks]

    @property
    def is_enough(self) -> bool:
        """Whether the job may continue on these machines."""
        return self.cluster.is_enough(self.ranks)

    @property
    def missing(self) -> str:
        """The other machines, with their addresses."""
        return self.cluster.described(
            rank for rank in range(len(self.cluster.addresses)) if rank not in self.ranks
        )

    def seek(self, *, again: bool) -> Peer | None:
        """Finds the leader; None if this launcher leads, or if a signal has come.

        `again` means that the job had a leader before: the others are there, or lost.

        Raises:
          UserError: If another launcher has other options.
          ClusterError: If too few machines have come.
        """
        self._leader = None
        began = time.monotonic()
        next_report = began + REPORT_INTERVAL
        wait = _NEXT_WAIT if again else _FIRST_WAIT
        with _Calls(self.cluster) as calls:
            while self._signals.received is None:
                if (leader := calls.leader()) is not None:
                    self.dismiss()
                    self._leader = leader.rank
                    self._log(f"follows the launcher of {self.cluster.described([leader.rank])}")
                    return leader
                if calls.refusals > MOST_REFUSALS:
                    raise UserError(
                        f"another launcher is {self.own_name} of this job: give each machine a "
                        "task of its own in TF_CONFIG"
                    )
                self._signals.wait(_POLL_INTERVAL)
                self.poll()
                now = time.monotonic()
                has_all = len(self.ranks) == len(self.cluster.addresses)
                if has_all or (self.is_enough and now - began > wait):
                    break
                if now - began > LONGEST_WAIT:
                    raise ClusterError(
                        f"gave up after {LONGEST_WAIT:g} s: no launcher of {self.missing}"
                    )
                if now > next_report:
                    next_report = now + REPORT_INTERVAL
                    self._log(f"waiting for the launchers of {self.missing}")
                    for reason in (*calls.faults.values(), self._admission.refusals):
                        self._say_once(reason)
        self._leader = self.cluster.rank
        if self._signals.received is None:
            count = f"{len(self.ranks)} of {len(self.cluster.addresses)}"
            self._log(f"leads the launchers of {count} machines")
        return None

    def poll(self) -> None:
        """Admits other launchers, and takes the messages of the followers. Call it often."""
        admitted, _ = self._admission.poll(0)
        for line, message in admitted:
            self._admission.release(line)
            self._answer(line, message)
        for rank, peer in list(self._followers.items()):
            for message in peer.receive():
                self._take(peer, message)
            if not peer.is_open and self._followers.get(rank) is peer:
                self._forget(rank)

    def _answer(self, line: Line, message: Mapping[str, Any]) -> None:
        """Answers another launcher, which has called."""
        rank, own = message.get("rank"), self.cluster.rank
        theirs, total = message.get("agreement"), len(self.cluster.addresses)
        if not isinstance(rank, int) or not 0 <= rank < total or rank == own:
            return line.close()
        peer = Peer(line, rank)
        if theirs is None:  # a process of the job, which takes this address for that of its chief
            peer.send(wrong="a launcher is here: start the command by it on all machines")
        elif (difference := self.cluster.difference(rank, theirs)) is not None:
            peer.send(wrong=difference)
            self._say_once(
                f"refused the launcher of {self.cluster.described([rank])}: {difference}"
            )
        elif self._leader not in (None, own) or (self._leader is None and rank < own):
            pass  # this one follows another, or will follow that one
        elif rank in self._followers:  # or its earlier life, whose end is not known here yet
            peer.send(taken=True)
        else:
            self._followers[rank] = peer
            self._ports[rank] = int(message["port"])
            return peer.send(welcome=True)
        return peer.close()

    def _say_once(self, text: str) -> None:
        if text and text not in self._said:
            self._said.add(text)
            self._log(text)

    def _take(self, peer: Peer, message: Mapping[str, Any]) -> None:
        if "file" in message:
            self._write(message["file"], bytes.fromhex(message["content"]), message["clock"])
        if "port" in message:
            self._ports[peer.rank] = int(message["port"])
        if "spares" in message:
            self._spares[peer.rank] = message["spares"], message["all_spares"]
        if task := self._tasks.get(peer.rank):
            task.is_stopped = message.get("stopped", task.is_stopped)
            if "exit" in message:
                task.take(_exit_of(message["exit"]))
        if message.get("leaves"):
            self._forget(peer.rank)

    def _write(self, name: str, content: bytes, clock: float) -> None:
        """Writes a file of another machine, whose clock is another one."""
        if not name.endswith(_FILES) or "/" in name:
            return
        if name.endswith(".phase"):
            content = progress.shifted(content, time.monotonic() - clock)
        written = Path(self._folder, f"{name}.new")
        with suppress(OSError):  # on a full disk the job continues, with an older record
            written.write_bytes(content)
            written.replace(Path(self._folder, name))

    def _forget(self, rank: int) -> None:
        self._followers.pop(rank).close()
        self._spares.pop(rank, None)
        if task := self._tasks.pop(rank, None):
            task.lose(f"the launcher at {self.cluster.addresses[rank]} does not answer")

    def tell(self, **message: Any) -> None:
        """Sends a message to all followers."""
        for peer in self._followers.values():
            peer.send(**message)

    def dismiss(self) -> None:
        """Leaves the followers to find another leader."""
        for rank in list(self._followers):
            self._forget(rank)

    def ready_spares(self, machine: Machine) -> dict[str, int]:
        """Returns the number of spares that are ready on each machine; `machine` is this one."""
        own = {self.own_name: machine.ready_spares}
        return own | {
            self.cluster.names[rank]: number for rank, (number, _) in self._spares.items()
        }

    @property
    def has_all_spares(self) -> bool:
        """Whether no follower waits for its spares."""
        return all(has_all for _, has_all in self._spares.values())

    def tf_configs(self, places: Sequence[str]) -> dict[str, str]:
        """Returns the TF_CONFIG of each task of a job on these machines, given by name."""
        ranks = [self.cluster.names.index(place) for place in places]
        (own,) = free_ports(1)
        ports = {self.cluster.rank: own, **self._ports}
        chosen = [str(Address(self.cluster.addresses[rank].host, ports[rank])) for rank in ranks]
        jobs = {"chief": chosen[:1], "worker": chosen[1:]}
        cluster = {job: addresses for job, addresses in jobs.items() if addresses}
        configs = {}
        for name in training_tasks(len(places)):
            kind, _, index = name.partition(" ")
            task = {"type": kind, "index": int(index or 0)}
            configs[name] = json.dumps({"cluster": cluster, "task": task})
        return configs

    def start(self, place: str, name: str, tf_config: str) -> "RemoteTask":
        """Starts a task on another machine."""
        rank = self.cluster.names.index(place)
        for kind in progress.KINDS:
            progress.path(self._folder, name, kind).unlink(missing_ok=True)
        task = RemoteTask(name, self._folder, self._followers.get(rank))
        self._tasks[rank] = task
        task.tell(start=name, tf_config=tf_config)
        return task


class _Calls:
    """Calls the other launchers in a thread, until one of them takes this one as a follower."""

    def __init__(self, cluster: Cluster) -> None:
        self.refusals = 0
        """How often a leader has said that it has another launcher of this name."""
        self.faults: dict[int, str] = {}
        """By rank, why a launcher could not be called, unless it is not there yet."""
        self._cluster = cluster
        self._lock = threading.Lock()
        self._ended = False
        self._found: queue.SimpleQueue[Peer | UserError] = queue.SimpleQueue()

    def __enter__(self) -> "_Calls":
        threading.Thread(target=self._call, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._ended = True
        with suppress(queue.Empty):
            if isinstance(unused := self._found.get_nowait(), Peer):
                unused.close()

    def leader(self) -> Peer | None:
        """Returns the launcher that leads this one; None if none has been found yet."""
        with suppress(queue.Empty):
            found = self._found.get_nowait()
            if isinstance(found, UserError):
                raise found
            return found
        return None

    def _call(self) -> None:
        (port,) = free_ports(1)
        others = [n for n, _ in enumerate(self._cluster.addresses) if n != self._cluster.rank]
        is_found = False
        with ThreadPoolExecutor(min(len(others), _MOST_CALLS)) as pool:  # some may not answer
            while not (self._ended or is_found):
                for found in pool.map(lambda rank: self._ask(rank, port), others):
                    with self._lock:
                        if found and not (self._ended or is_found):
                            is_found = True
                            self._found.put(found)
                        elif isinstance(found, Peer):
                            found.close()
                time.sleep(_REDIAL)

    def _ask(self, rank: int, port: int) -> Peer | UserError | None:
        """Asks another launcher to lead this one; None if it does not."""
        address, until = self._cluster.addresses[rank], time.monotonic() + _DIAL_TIMEOUT
        try:
            line = dial((address.host, address.port), self._cluster.token, until)
        except socket.gaierror as error:
            where = self._cluster.described([rank])
            self.faults[rank] = f"{address.host} cannot be resolved, the host of {where}: {error}"
            return None
        except OSError:
            return None
        with suppress(OSError):
            agreement = self._cluster.agreement
            line.send({"rank": self._cluster.rank, "agreement": agreement, "port": port})
            answer = line.answer(until) or {}
            if "welcome" in answer:
                return Peer(line, rank)
            self.refusals += "taken" in answer
            if "wrong" in answer:
                line.close()
                return UserError(f"the launchers differ: {answer['wrong']}")
        line.close()
        return None


# -- The tasks of other machines, as their leader sees them ----------------------------------------


class RemoteTask:
    """A task that runs on another machine; `LocalTask` has the same methods."""

    def __init__(self, name: str, folder: str, peer: Peer | None) -> None:
        self.name = name
        self.status: int | None = None
        self.is_stopped = False
        self.is_killed = False
        self._folder, self._peer = folder, peer
        self._exit: TaskExit | None = None
        if peer is None:
            self.lose("its launcher is not there")

    def tell(self, **message: Any) -> None:
        """Sends a message to the launcher of its machine."""
        if self._peer is not None:
            self._peer.send(**message)

    def take(self, ended: TaskExit) -> None:
        """Takes the report of its exit."""
        self._exit = self._exit or ended

    def lose(self, why: str) -> None:
        """Counts it as killed, unless it is known how it has exited."""
        reason = progress.read_reason(self._folder, self.name)
        status = -signal.SIGKILL if reason is None else reason.code
        record = progress.read(self._folder, self.name)
        self.take(TaskExit(self.name, status, record=record, reason=reason, gone=why))

    def poll(self) -> bool:
        """Returns whether it has exited."""
        if self._exit is not None:
            self.status = self._exit.status
        return self._exit is not None

    def exit(self) -> TaskExit:
        """Returns how it has exited."""
        assert self._exit is not None
        return self._exit

    def send(self, number: int) -> None:
        """Sends a signal to it."""
        self.tell(signal=number)

    def kill(self) -> None:
        """Kills it with its process group."""
        self.is_killed = True
        self.tell(kill=True)


Task = LocalTask | RemoteTask
"""A task of a job."""


def _exit_of(content: dict[str, Any]) -> TaskExit:
    """Returns the exit that another launcher describes."""
    if record := content["record"]:
        content["record"] = ProgressRecord(**{**record, "phase": Phase(record["phase"])})
    if reason := content["reason"]:
        content["reason"] = Reason(**reason)
    return TaskExit(**content)


# -- What a follower does --------------------------------------------------------------------------


class Follower:
    """Starts, watches and ends the process of this machine, as the leader says.

    Args:
      leader: The launcher of the leader.
      machines: The others, whose calls are answered.
      machine: This machine.
      environment: The environment of its process, without TF_CONFIG.
      signals: The stop signals of this launcher.
      grace: Seconds that the process has to save and exit after a signal.
    """

    def __init__(
        self,
        leader: Peer,
        machines: Machines,
        machine: Machine,
        environment: Mapping[str, str],
        signals: Signals,
        grace: float,
    ) -> None:
        self._leader, self._machines, self._machine = leader, machines, machine
        self._environment, self._signals, self._grace = environment, signals, grace
        self._task: LocalTask | None = None
        self._sent: dict[str, bytes] = {}  # the content of each file that the leader has
        self._status: dict[str, Any] = {}  # what the leader knows beside
        self._code: int | None = None
        self._until = math.inf  # when the process is killed after a signal

    def run(self) -> int | None:
        """Follows until the job ends; returns its exit code, or None if the leader is lost."""
        while self._code is None and self._leader.is_open:
            self._signals.wait(_POLL_INTERVAL)
            self._machines.poll()
            name = "chief" if self._task is None else self._task.name
            self._machine.poll(name, stops=self._signals.received is not None)
            for message in self._leader.receive():
                self._obey(message)
            self._send_files()
            self._handle_signals()
            if self._task is not None and self._task.poll():
                self._report_exit(self._task)
        if self._task is not None:
            self._task.kill()
            while not self._task.poll():
                time.sleep(_POLL_INTERVAL)
        self._leader.close()
        return self._code

    def _obey(self, message: Mapping[str, Any]) -> None:
        if "log" in message:
            self._machine.log(message["log"])
        if "start" in message and self._signals.received is None:
            self._sent = dict(_UNSAID)
            progress.take_without(self._machine.folder)
            self._machine.begin()
            name = message["start"]
            own = {progress.TASK: name, "TF_CONFIG": message["tf_config"]}
            self._task = self._machine.start(name, {**self._environment, **own})
        if self._task is not None and "signal" in message:
            self._task.send(message["signal"])
        if self._task is not None and "kill" in message:
            self._task.kill()
        if "known" in message:
            self._machines.known = message["known"]
        if "end" in message:
            self._code = message["end"]

    def _handle_signals(self) -> None:
        received = self._signals.received
        if received is None:
            return
        if self._task is None:
            self._leader.send(leaves=True)
            self._code = ExitCode.PREEMPTED
        elif self._until == math.inf:
            self._until = time.monotonic() + self._grace
            self._machine.log(
                f"{received.name}: asked the task to save and exit within {self._grace:g} s; "
                "a second signal kills it"
            )
            self._task.send(signal.SIGTERM)
        elif self._signals.repeated or time.monotonic() > self._until:
            self._task.kill()

    def _report_exit(self, task: LocalTask) -> None:
        self._send_files()
        ended = task.exit()
        content = dataclasses.asdict(ended) | {"errors": ended.errors[-_MOST_ERRORS:]}
        leaves = self._signals.received is not None
        self._task = None
        (port,) = free_ports(1)
        self._leader.send(exit=content, port=port, leaves=leaves)
        if self._signals.received is not None:
            by_itself = ended.status >= 0 and not ended.ours  # such as 75, or 0 at its end
            self._code = ended.status if by_itself else 128 + self._signals.received

    def _send_files(self) -> None:
        """Sends the files of the process that have changed."""
        if self._task is None:
            return
        folder = self._machine.folder  # it may have files of others: of a time when this one led
        own = [progress.path(folder, self._task.name, kind) for kind in progress.KINDS]
        for file in (*own, Path(folder, progress.WITHOUT), Path(folder, progress.REFUSED)):
            with suppress(OSError):
                content = file.read_bytes()[:_MOST_CONTENT]
                if content != self._sent.get(file.name):
                    self._sent[file.name] = content
                    now = time.monotonic()
                    self._leader.send(file=file.name, content=content.hex(), clock=now)
        machine = self._machine
        spares = {"spares": machine.ready_spares, "all_spares": machine.has_all_spares}
        status = {"stopped": self._task.is_stopped, **spares}
        if status != self._status:
            self._status = status
            self._leader.send(**status)
