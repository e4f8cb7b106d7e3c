"""Rendezvous of the processes of a job before JAX starts, and their admission."""

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from spmdtrain.cluster.job_token import TOKEN, Line, is_nonce, new_nonce
from spmdtrain.errors import NOT_SET, ClusterError, UserError, foreign

# -- Admission of the processes of a job to process 0 ----------------------------------------------
#
# Any program that reaches the port can connect. Therefore everything that a connection can use
# before it has authenticated by the job's token is bounded: bytes, nesting, seconds, and the number
# of connections at a time.

MAX_UNAUTHENTICATED = 128  # connections at a time that have not authenticated
HANDSHAKE_TIMEOUT = 10.0  # seconds within which a connection must authenticate
GRACE_PERIOD = 1.0  # seconds after its greeting in which a connection is not dropped for another
_SEND_TIMEOUT = 5.0  # seconds that a message to one process may block

Admitted = tuple[Line, dict[str, Any]]


@dataclass
class _Pending:
    """A connection that has not authenticated."""

    since: float
    greeted: bool = False


class Admission:
    """Accepts connections and authenticates them.

    The caller closes the listening socket. With an empty token, every process without a token is
    admitted. `members` are the open admitted connections; `refused` counts the refused ones.
    """

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        listener.setblocking(False)
        self.members: list[Line] = []
        self.refused = 0
        self._last = ""
        self._listener, self._token = listener, token
        self._pending: dict[Line, _Pending] = {}  # in order of arrival
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def refusals(self) -> str:
        """The number of refusals, with address and reason of the last; empty if there are none."""
        if not self.refused:
            return ""
        number = "1 connection" if self.refused == 1 else f"{self.refused} connections"
        return f"refused {number}, the last {self._last}"

    def poll(self, seconds: float) -> tuple[list[Admitted], list[Line]]:
        """Waits at most `seconds` for connections and messages.

        Returns:
          The newly admitted connections with their first message, and the admitted connections that
          the other side has closed.

        Raises:
          UserError: If the limit of open files is too low for the processes of the job.
        """
        admitted: list[Admitted] = []
        gone: list[Line] = []
        arrived = False
        for key, _ in self._selector.select(seconds):
            line = key.data
            if line is None:
                arrived = True
            elif line in self._pending:
                if (first := self._read_first(line)) is not None:
                    admitted.append((line, first))
            elif not line.discard():
                self._drop(line)
                gone.append(line)
        now = time.monotonic()
        expired = [
            x for x, pending in self._pending.items() if now - pending.since > HANDSHAKE_TIMEOUT
        ]
        for line in expired:
            self.refuse(
                line, f"it has not identified itself in {HANDSHAKE_TIMEOUT:g} s", at_once=True
            )
        if arrived and self._has_room(now):
            self._accept(now)
        return admitted, gone

    def refuse(self, line: Line, why: str, *, at_once: bool = False) -> None:
        """Closes a connection as `Line.close` does, and counts it; `why` is for `refusals`."""
        self.refused += 1
        self._last = f"from {line.address}: {why}"
        self._drop(line, at_once=at_once)

    def release(self, line: Line) -> None:
        """Leaves an admitted connection to the caller, who closes it."""
        self.members.remove(line)
        self._selector.unregister(line.socket)

    def close(self) -> None:
        """Closes all connections; first waits for the other side to close the admitted ones."""
        for line in self.members:
            line.wait_for_end(1.0)
        for line in self.members:
            line.close()
        for line in self._pending:
            line.close(at_once=True)
        self._selector.close()

    def _has_room(self, now: float) -> bool:
        """Returns whether another connection can be accepted; drops a pending one if necessary.

        A process of the job sends its greeting at once, so silent connections are dropped first.
        """
        if len(self._pending) < MAX_UNAUTHENTICATED:
            return True
        for line, pending in self._pending.items():
            if not pending.greeted:
                self.refuse(line, "it sent nothing while others waited", at_once=True)
                return True
        oldest, pending = next(iter(self._pending.items()))
        if now - pending.since > GRACE_PERIOD:
            self.refuse(oldest, "it did not identify itself while others waited", at_once=True)
            return True
        time.sleep(0.01)  # the others wait in the listener's queue
        return False

    def _accept(self, now: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room(error)
            return  # any other error: the connection is already closed
        connection.settimeout(_SEND_TIMEOUT)
        line = Line(connection, "chief")
        self._pending[line] = _Pending(since=now)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _make_room(self, error: OSError) -> None:
        if not self._pending:
            raise UserError(
                f"no connection can be accepted: {error.strerror}; {len(self.members)} processes "
                "are connected: raise the limit of open files (ulimit -n)"
            ) from error
        oldest = next(iter(self._pending))
        self.refuse(oldest, "there are too many open files", at_once=True)

    def _read_first(self, line: Line) -> dict[str, Any] | None:
        """Reads from an unauthenticated connection; returns its first authentic message."""
        is_open = line.read()
        for message in line.messages():
            if self._pending[line].greeted and message is not None:
                del self._pending[line]
                self.members.append(line)
                return message
            if fault := self._answer(line, message):
                self.refuse(line, fault)
                return None
        if not is_open:
            self._drop(line)
        return None

    def _answer(self, line: Line, message: dict[str, Any] | None) -> str:
        """Answers a greeting; returns why it is refused, or an empty string."""
        pending = self._pending[line]
        not_a_process = "it is not a process of a job"
        if pending.greeted:
            return "it has another job token" if self._token else not_a_process
        nonce = (message or {}).get("nonce")
        if message is None or message.get("spmdtrain") != "hello" or not is_nonce(nonce):
            return not_a_process
        own = new_nonce()
        try:
            line.send({"nonce": own, "token": bool(self._token)})
        except OSError:
            return "it closed the connection"
        if message.get("token") is not bool(self._token):
            has = "no job token" if self._token else "a job token, but this process has none"
            return f"it has {has}"
        assert isinstance(nonce, str)
        line.authenticate(self._token, worker_nonce=nonce, chief_nonce=own)
        pending.greeted = True
        return ""

    def _drop(self, line: Line, *, at_once: bool = False) -> None:
        if line in self._pending:
            del self._pending[line]
        else:
            self.members.remove(line)
        self._selector.unregister(line.socket)
        line.close(at_once=at_once)


def dial(address: tuple[str, int], token: bytes, deadline: float) -> Line:
    """Connects to an `Admission` with the same token; the next message is the first that it gets.

    Args:
      deadline: The time by `time.monotonic` at which the attempt ends.

    Raises:
      OSError: If there is no answer, or it is not that of a process of the job.
    """
    left = max(0.1, deadline - time.monotonic())
    line = Line(socket.create_connection(address, timeout=left), "worker")
    try:
        nonce = new_nonce()
        line.send({"spmdtrain": "hello", "nonce": nonce, "token": bool(token)})
        answer = line.answer(deadline)
        other = (answer or {}).get("nonce")
        if not isinstance(other, str) or not is_nonce(other):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "another program answers")
        line.authenticate(token, worker_nonce=nonce, chief_nonce=other)
    except BaseException:
        line.close()
        raise
    return line


# -- Rendezvous of the processes of a job before JAX starts, which names missing processes ---------
#
# If a peer is missing, JAX ends a process by SIGABRT without naming the peer. Therefore all
# processes first connect to the coordinator's address over plain TCP, with one JSON object per
# line. When all of them have joined and agree on versions and settings, they release the port to
# JAX.

REPORT_INTERVAL = 5.0  # seconds between two lines about missing processes
RESOLVE_TIMEOUT = 8.0  # seconds to wait for a host name that does not resolve yet
EARLIER_JOB_TIMEOUT = 30.0  # seconds for an earlier job to release the coordinator's port
LATE_TIMEOUT = 2.0  # seconds after a failure in which processes that join late still receive it
BIND_TIMEOUT = 5.0  # seconds for an earlier process to release the port


@dataclass(frozen=True)
class Party:
    """One process, and the job that it joins."""

    host: str
    port: int
    """The host and port at which process 0 waits for the others."""
    names: Sequence[str]
    """Name of each process, by rank, such as `worker 2`."""
    rank: int
    about: Mapping[str, str] = field(default_factory=dict)
    """Versions, settings and digests, which must be equal in all processes."""
    addresses: Sequence[str] = ()
    """Address of each process, by rank; empty if unknown."""
    token: bytes = field(default=b"", repr=False)
    """The job's token, which all processes share; empty if the job has none."""

    @property
    def coordinator(self) -> str:
        """`host:port` of process 0."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def join_rendezvous(party: Party, timeout: float, report: Callable[[str], None]) -> None:
    """Waits until every process of the job has joined, at most `timeout` seconds.

    `report` is called with lines for the user, such as the missing processes.

    Raises:
      UserError: If the description of the cluster is wrong: the port is in use, the host name does
        not resolve, two processes have the same rank, or versions or settings differ.
      ClusterError: If processes are missing after `timeout` seconds; names them.
    """
    deadline = time.monotonic() + timeout
    if party.rank == 0:
        _serve(party, deadline, timeout, report)
    else:
        _join(party, deadline, timeout, report)


# -- process 0 -------------------------------------------------------------------------------------


def _serve(party: Party, deadline: float, timeout: float, report: Callable[[str], None]) -> None:
    joined: dict[int, Line] = {}
    next_report = time.monotonic() + REPORT_INTERVAL
    with (
        closing(listen(party.host, party.port, party.names[0])) as listener,
        closing(Admission(listener, party.token)) as admission,
    ):
        try:
            while len(joined) < len(party.names) - 1:
                now = time.monotonic()
                if now > deadline:
                    raise ClusterError(
                        f"gave up after {timeout:g} s: {_waiting(party, joined, admission)}"
                    )
                if now > next_report:
                    report(f"waiting: {_waiting(party, joined, admission)}")
                    _send_all(joined.values(), {"waiting": f"waiting: {_waiting(party, joined)}"})
                    next_report = now + REPORT_INTERVAL
                admitted, gone = admission.poll(0.2)
                for rank in [rank for rank, line in joined.items() if line in gone]:
                    report(f"{party.names[rank]} has disconnected")
                    del joined[rank]  # a restarted process may take its place
                for line, hello in admitted:
                    if is_hello(hello):
                        add_member(party, line, hello, joined)
                    else:
                        admission.refuse(line, "it has another version of spmdtrain")
            if admission.refusals:
                report(admission.refusals)
            _send_all(joined.values(), {"go": True})
        except (UserError, ClusterError) as error:
            verdict = {"wrong" if isinstance(error, UserError) else "failed": str(error)}
            _send_all(admission.members, verdict)
            late = time.monotonic() + LATE_TIMEOUT
            while (left := late - time.monotonic()) > 0:
                admitted, _ = admission.poll(left)
                _send_all([line for line, _ in admitted], verdict)
            raise


def listen(host: str, port: int, who: str) -> socket.socket:
    """Returns a socket that listens at a port of this machine, exclusively.

    Args:
      host: The name or address of this machine for others; of a loopback one, only that is used.
      port: The port.
      who: Who listens, for messages.

    Raises:
      UserError: If the port cannot be used.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    until = time.monotonic() + BIND_TIMEOUT
    while True:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if loopback := _loopback(host):
                listener.close()
                listener = socket.socket(loopback[0], socket.SOCK_STREAM)
            elif family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # Not SO_REUSEPORT, because it would hide a second process 0.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((loopback[1] if loopback else "", port))
            listener.listen(1024)
            return listener
        except OSError as error:
            listener.close()
            if time.monotonic() > until:
                raise UserError(
                    f"port {port} of this machine cannot be used by {who}: "
                    f"{error.strerror}; it is in use by another program, a second process of that "
                    "name, or an earlier run that has not ended"
                ) from error
            time.sleep(0.2)


def _loopback(host: str) -> tuple[socket.AddressFamily, str] | None:
    """Returns the loopback address to listen at if `host` is this machine; None otherwise."""
    if host == "::1":
        return socket.AF_INET6, host
    return (socket.AF_INET, "127.0.0.1") if is_loopback(host) else None


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address is a loopback address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def add_member(party: Party, line: Line, hello: Mapping[str, Any], joined: dict[int, Line]) -> None:
    """Adds a process; raises `UserError` if it differs, or if its rank is taken."""
    rank, name = hello["rank"], foreign(hello["name"], 100)
    line.where = foreign(hello["where"], 200)
    mine = {"processes": str(len(party.names)), "names": ", ".join(party.names), **party.about}
    theirs = {"processes": str(hello["size"]), "names": hello["names"], **hello["about"]}
    for key in [*mine, *theirs]:
        if mine.get(key) != theirs.get(key):
            raise UserError(
                f"{name} ({line.where}) and {party.names[0]} differ: {foreign(key, 200)} is "
                f"{foreign(theirs.get(key, NOT_SET))} there and {mine.get(key, NOT_SET)} here"
            )
    if rank in joined:
        raise UserError(
            f"two processes are {name}: {joined[rank].where} and {line.where}; give each task its "
            "own index"
        )
    joined[rank] = line


def is_hello(message: Mapping[str, Any]) -> bool:
    """Returns whether a message is a valid first message of a process."""
    kinds = {"rank": int, "name": str, "size": int, "names": str, "about": dict, "where": str}
    valid = all(type(message.get(name)) is kind for name, kind in kinds.items())
    valid = valid and all(type(value) is str for value in message["about"].values())
    return valid and message.get("spmdtrain") == "hello" and 0 < message["rank"] < message["size"]


def _waiting(party: Party, joined: Mapping[int, Line], admission: Admission | None = None) -> str:
    """Returns a sentence with the missing processes, and the connections that were refused."""
    labels = [
        f"{name} at {party.addresses[rank]}" if party.addresses else name
        for rank, name in enumerate(party.names)
    ]
    missing = [label for rank, label in enumerate(labels) if rank and rank not in joined]
    shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    present = len(labels) - len(missing)
    refused = f"; {admission.refusals}" if admission is not None and admission.refusals else ""
    return f"{present} of {len(labels)} processes have joined; missing: {shown}{refused}"


def _send_all(lines: Iterable[Line], message: Mapping[str, Any]) -> None:
    for line in lines:
        with suppress(OSError):
            line.send(message)


# -- the others ------------------------------------------------------------------------------------


def _join(party: Party, deadline: float, timeout: float, report: Callable[[str], None]) -> None:
    give_up_at = min(deadline, time.monotonic() + EARLIER_JOB_TIMEOUT)
    while fault := _try_join(party, deadline, timeout, report):
        if time.monotonic() > give_up_at:
            raise ClusterError(
                f"{party.coordinator} is not {party.names[0]} of a job that is starting: {fault}"
            )
        time.sleep(1)


def _try_join(party: Party, deadline: float, timeout: float, report: Callable[[str], None]) -> str:
    """Connects to process 0 and waits until all processes have joined.

    Only messages that are authenticated by the job's token are trusted, also those that report an
    error.

    Returns:
      An empty string after all processes have joined; otherwise why the program that answers is not
      a job that is starting. It may be an earlier job that has not yet noticed the loss of a
      process.

    Raises:
      UserError: If the description of the cluster or the job token is wrong.
      ClusterError: If process 0 reports missing processes, disconnects or does not answer.
    """
    name = party.names[party.rank]
    other = f"another program uses the port, or the job has started with another {name}"
    greeted = answered = False
    with closing(_connect(party, deadline, timeout, report)) as line:
        nonce = new_nonce()
        with suppress(OSError):  # the connection is closed, which the read below notices
            line.send({"spmdtrain": "hello", "nonce": nonce, "token": bool(party.token)})
        # 10 s more than process 0 waits, because only process 0 knows which processes are missing.
        while wait([line.socket], timeout=max(0.0, deadline + 10 - time.monotonic())):
            is_open = line.read()
            for message in line.messages():
                if not greeted:
                    if message is None or not is_nonce(message.get("nonce")):
                        return other
                    if fault := _send_hello(party, line, nonce, message):
                        return fault
                    greeted = True
                elif message is None:
                    return f"it does not have the {TOKEN} of this process"
                elif "go" in message:
                    return ""
                elif "wrong" in message:
                    raise UserError(foreign(message["wrong"], 10_000))
                elif "failed" in message:
                    raise ClusterError(foreign(message["failed"], 10_000))
                elif "waiting" in message:
                    answered = True
                    report(foreign(message["waiting"]))
            if not is_open and answered:
                raise ClusterError(
                    f"{party.names[0]} at {party.coordinator} disconnected while the job was "
                    "starting"
                )
            if not is_open and greeted and party.token:
                return f"it does not accept the {TOKEN} of this process"
            if not is_open:
                return other
    raise ClusterError(f"{party.names[0]} at {party.coordinator} no longer answers")


def _send_hello(party: Party, line: Line, nonce: str, message: Mapping[str, Any]) -> str:
    """Answers process 0's greeting with this process' description; returns an error, or ''."""
    if not party.token and message.get("token") is True:
        raise UserError(
            f"{party.names[0]} at {party.coordinator} has a job token, but this process has none: "
            f"set the same {TOKEN} here"
        )
    if bool(party.token) is not message.get("token"):
        return f"it has no {TOKEN}, but this process has one"
    line.authenticate(party.token, worker_nonce=nonce, chief_nonce=message["nonce"])
    hello = {
        "spmdtrain": "hello",
        "rank": party.rank,
        "name": party.names[party.rank],
        "size": len(party.names),
        "names": ", ".join(party.names),
        "about": dict(party.about),
        "where": f"{socket.gethostname()}, process {os.getpid()}",
    }
    with suppress(OSError):
        line.send(hello)
    return ""


def _connect(party: Party, deadline: float, timeout: float, report: Callable[[str], None]) -> Line:
    began = time.monotonic()
    next_report = began + REPORT_INTERVAL
    while True:
        try:
            connection = socket.create_connection((party.host, party.port), timeout=5)
            with suppress(OSError):  # reset in the meantime
                # On one machine the kernel may choose the port to which this process connects as
                # the local port: TCP then connects the socket to itself.
                if connection.getsockname() != connection.getpeername():
                    return Line(connection, "worker")
            connection.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except OSError as error:
            now = time.monotonic()
            why = error.strerror or str(error)
            # In Kubernetes the name of a pod resolves only after the pod has started.
            named_later = "KUBERNETES_SERVICE_HOST" in os.environ
            unknown = isinstance(error, socket.gaierror) and not named_later
            if unknown and now > began + min(RESOLVE_TIMEOUT, timeout):
                raise UserError(
                    f"{party.host}, the host of {party.names[0]}, cannot be resolved from "
                    f"{socket.gethostname()}: {why}"
                ) from error
            if now > deadline:
                raise ClusterError(
                    f"{party.names[party.rank]} could not reach {party.names[0]} at "
                    f"{party.coordinator} for {timeout:g} s: {why}; it has not started, or its "
                    "port is closed to this machine"
                ) from error
            if now > next_report:
                report(f"waiting for {party.names[0]} at {party.coordinator}: {why}")
                next_report = now + REPORT_INTERVAL
            time.sleep(0.2)
