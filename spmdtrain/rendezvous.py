"""The processes of a job meet before JAX is started: who is missing is named, who differs is told.

JAX ends a process by SIGABRT where a peer does not come, and never says which. So all meet at the
coordinator's address first, over plain TCP, a JSON object a line, and leave it to JAX when all of
them have come.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from spmdtrain.errors import NOT_SET, ClusterError, UserError

_TELL_EVERY = 5.0  # seconds between two lines of what is waited for
_RESOLVE_FOR = 8.0  # seconds in which a name may still appear
_PATIENCE = 30.0  # seconds for an earlier job to let go of the coordinator's port
_LATE = 2.0  # seconds after a failure in which those who come late are told of it
_BIND_FOR = 5.0  # seconds in which whoever went before may let go of the port
_LONGEST_LINE = 2**20


@dataclass(frozen=True)
class Party:
    """One process, and the job it wants to be part of."""

    host: str
    port: int
    """Where process 0 is, and waits for the others."""
    names: Sequence[str]
    """What every process is called, by rank: `worker 2`."""
    rank: int
    about: Mapping[str, str] = field(default_factory=dict)
    """What must be the same in all: versions and the like."""
    addresses: Sequence[str] = ()
    """Where every process is, by rank, where that is known."""

    @property
    def coordinator(self) -> str:
        """`host:port` of process 0."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def meet(party: Party, timeout: float, tell: Callable[[str], None]) -> None:
    """Return when every process has come; `tell` hears who is waited for.

    Raises `UserError` for what is wrong with the cluster's description (a taken port, a name that
    does not resolve, two processes of one rank, other versions) and `ClusterError`, which names
    the missing, after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    if party.rank == 0:
        _receive(party, deadline, timeout, tell)
    else:
        _join(party, deadline, timeout, tell)


# -- process 0 -------------------------------------------------------------------------------------


def _receive(party: Party, deadline: float, timeout: float, tell: Callable[[str], None]) -> None:
    guests: dict[int, _Line] = {}
    strangers: list[_Line] = []  # who has not said yet who they are
    next_word = time.monotonic() + _TELL_EVERY
    with closing(_listen(party)) as listener:
        try:
            while len(guests) < len(party.names) - 1:
                now = time.monotonic()
                if now > deadline:
                    raise ClusterError(f"gave up after {timeout:g} s, {_waiting(party, guests)}")
                if now > next_word:
                    tell(f"waiting, {_waiting(party, guests)}")
                    _to_all(guests.values(), {"waiting": f"waiting, {_waiting(party, guests)}"})
                    next_word = now + _TELL_EVERY
                lines = [*strangers, *guests.values()]
                ready = wait([listener, *(line.socket for line in lines)], timeout=0.2)
                if listener in ready:
                    strangers.append(_Line(listener.accept()[0]))
                for line in [x for x in lines if x.socket in ready]:
                    if line in strangers:
                        _let_in(party, line, strangers, guests)
                    elif not line.read():  # it has gone: another may come in its place
                        rank = next(rank for rank, x in guests.items() if x is line)
                        tell(f"{party.names[rank]} has gone again")
                        guests.pop(rank).close()
            _to_all(guests.values(), {"go": True})
        except (UserError, ClusterError) as error:
            what = "wrong" if isinstance(error, UserError) else "failed"
            _to_all([*guests.values(), *strangers], {what: str(error)})
            late = time.monotonic() + _LATE
            while wait([listener], timeout=max(0.0, late - time.monotonic())):
                strangers.append(_Line(listener.accept()[0]))
                _to_all(strangers[-1:], {what: str(error)})
            raise
        finally:
            # They hang up first: the port is then free for JAX at once.
            for line in guests.values():
                line.socket.settimeout(1.0)
                with suppress(OSError):
                    line.socket.recv(1)
            for line in [*guests.values(), *strangers]:
                line.close()


def _listen(party: Party) -> socket.socket:
    """The coordinator's port, which nobody else may have."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    until = time.monotonic() + _BIND_FOR
    while True:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if loopback := _loopback(party.host):
                listener.close()
                listener = socket.socket(loopback[0], socket.SOCK_STREAM)
            elif family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # Not SO_REUSEPORT, with which a second process 0 would go unnoticed.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((loopback[1] if loopback else "", party.port))
            listener.listen(1024)
            return listener
        except OSError as error:
            listener.close()
            if time.monotonic() > until:
                raise UserError(
                    f"port {party.port} of this machine cannot be used by {party.names[0]}: "
                    f"{error.strerror}; another program has it, or a second process of that name, "
                    "or an earlier run that has not ended"
                ) from error
            time.sleep(0.2)


def _loopback(host: str) -> tuple[socket.AddressFamily, str] | None:
    """Where to listen for a job that is all on one machine: nowhere but there."""
    if host == "::1":
        return socket.AF_INET6, host
    return (socket.AF_INET, "127.0.0.1") if is_loopback(host) else None


def is_loopback(host: str) -> bool:
    """Whether a name or address means this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _let_in(
    party: Party, line: "_Line", strangers: list["_Line"], guests: dict[int, "_Line"]
) -> None:
    """Take in who has said who they are; raises `UserError` where that cannot be."""
    there = line.read()
    hello = next(line.messages(), None)
    if there and hello is None:
        return  # it is still speaking
    if hello is not None and _is_hello(hello):
        rank, name, line.where = hello["rank"], hello["name"], hello["where"]
        mine = {"processes": str(len(party.names)), "names": ", ".join(party.names), **party.about}
        theirs = {"processes": str(hello["size"]), "names": hello["names"], **hello["about"]}
        for key in [*mine, *theirs]:
            if mine.get(key) != theirs.get(key):
                raise UserError(
                    f"{name} ({line.where}) and {party.names[0]} differ: {key} is "
                    f"{theirs.get(key, NOT_SET)} there and {mine.get(key, NOT_SET)} here"
                )
        if rank in guests:
            raise UserError(
                f"there are two of {name}: {guests[rank].where} and {line.where}; each task has "
                "an index of its own"
            )
        guests[rank] = line
    else:  # somebody who knocks at ports
        line.close()
    strangers.remove(line)


def _is_hello(message: Mapping[str, Any]) -> bool:
    kinds = {"rank": int, "name": str, "size": int, "names": str, "about": dict, "where": str}
    right = all(isinstance(message.get(name), kind) for name, kind in kinds.items())
    return right and message.get("spmdtrain") == "hello" and 0 < message["rank"] < message["size"]


def _waiting(party: Party, guests: Mapping[int, "_Line"]) -> str:
    labels = [
        f"{name} at {party.addresses[rank]}" if party.addresses else name
        for rank, name in enumerate(party.names)
    ]
    missing = [label for rank, label in enumerate(labels) if rank and rank not in guests]
    shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    has = "has" if len(missing) == 1 else "have"
    here = len(labels) - len(missing)
    return f"{here} of {len(labels)} are here: {shown} {has} not come"


def _to_all(lines: Sequence["_Line"] | Any, message: Mapping[str, Any]) -> None:
    for line in lines:
        with suppress(OSError):
            line.send(message)


# -- the others ------------------------------------------------------------------------------------


def _join(party: Party, deadline: float, timeout: float, tell: Callable[[str], None]) -> None:
    patient_until = min(deadline, time.monotonic() + _PATIENCE)
    while not _meet_coordinator(party, deadline, timeout, tell):
        if time.monotonic() > patient_until:
            raise ClusterError(
                f"{party.coordinator} is not {party.names[0]} of a job that is gathering: another "
                f"program has the port, or the job has begun with another {party.names[party.rank]}"
            )
        time.sleep(1)


def _meet_coordinator(
    party: Party, deadline: float, timeout: float, tell: Callable[[str], None]
) -> bool:
    """Join the job; False where what answers is no job, or one that has already begun.

    That may be the one before, which has lost a process and has not noticed yet.
    """
    hello = {
        "spmdtrain": "hello",
        "rank": party.rank,
        "name": party.names[party.rank],
        "size": len(party.names),
        "names": ", ".join(party.names),
        "about": dict(party.about),
        "where": f"{socket.gethostname()}, process {os.getpid()}",
    }
    answered = False
    with closing(_connect(party, deadline, timeout, tell)) as line:
        with suppress(OSError):  # hung up on: there is nothing to read then, either
            line.send(hello)
        # Process 0 counts its own seconds: it knows best who is missing.
        while wait([line.socket], timeout=max(0.0, deadline + 10 - time.monotonic())):
            there = line.read()
            for message in line.messages():
                if "go" in message:
                    return True
                if "wrong" in message:
                    raise UserError(message["wrong"])
                if "failed" in message:
                    raise ClusterError(message["failed"])
                if "waiting" not in message:
                    return False
                answered = True
                tell(message["waiting"])
            if not there and answered:
                raise ClusterError(
                    f"{party.names[0]} at {party.coordinator} has gone while the job was gathering"
                )
            if not there:
                return False
    raise ClusterError(f"{party.names[0]} at {party.coordinator} says nothing any more")


def _connect(party: Party, deadline: float, timeout: float, tell: Callable[[str], None]) -> "_Line":
    began = time.monotonic()
    next_word = began + _TELL_EVERY
    while True:
        try:
            found = socket.create_connection((party.host, party.port), timeout=5)
            if found.getsockname() != found.getpeername():
                return _Line(found)
            # On one machine the port that the system chose may be the very one that is called: TCP
            # then connects the socket with itself.
            found.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except OSError as error:
            now = time.monotonic()
            why = error.strerror or str(error)
            named_later = "KUBERNETES_SERVICE_HOST" in os.environ  # a pod, when it runs
            unknown = isinstance(error, socket.gaierror) and not named_later
            if unknown and now > began + min(_RESOLVE_FOR, timeout):
                raise UserError(
                    f"{party.host}, the host of {party.names[0]}, cannot be resolved from "
                    f"{socket.gethostname()}: {why}"
                ) from error
            if now > deadline:
                raise ClusterError(
                    f"{party.names[party.rank]} could not reach {party.names[0]} at "
                    f"{party.coordinator} for {timeout:g} s: {why}; it has not come, or its port "
                    "is closed to this machine"
                ) from error
            if now > next_word:
                tell(f"waiting for {party.names[0]} at {party.coordinator}: {why}")
                next_word = now + _TELL_EVERY
            time.sleep(0.2)


# -- lines -----------------------------------------------------------------------------------------


class _Line:
    """A connection that carries one JSON object a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.where, self._buffer = connection, "", b""

    def send(self, message: Mapping[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> bool:
        """Take in what has come; False where the other side has hung up."""
        try:
            found = self.socket.recv(65536)
        except OSError:
            return False
        self._buffer += found
        return bool(found)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Whole lines, one after the other; what is none of ours as an empty object."""
        if b"\n" not in self._buffer and self._strange():
            self._buffer = b""
            yield {}
        while b"\n" in self._buffer:
            text, self._buffer = self._buffer.split(b"\n", 1)
            try:
                found = json.loads(text)
            except ValueError:
                found = None
            yield found if isinstance(found, dict) else {}

    def _strange(self) -> bool:
        return len(self._buffer) > _LONGEST_LINE or self._buffer[:1] not in (b"", b"{")

    def close(self) -> None:
        self.socket.close()
