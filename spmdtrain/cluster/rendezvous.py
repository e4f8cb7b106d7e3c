"""The processes of a job meet before JAX is started: who is missing is named, who differs is told.

JAX ends a process by SIGABRT where a peer does not come, and never says which. So all meet at the
coordinator's address first, over plain TCP, a JSON object a line, and leave it to JAX when all of
them have come.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from spmdtrain.cluster.admission import Admission
from spmdtrain.cluster.job_token import TOKEN
from spmdtrain.cluster.json_lines import Line, is_nonce, new_nonce
from spmdtrain.errors import NOT_SET, ClusterError, UserError, foreign

_TELL_EVERY = 5.0  # seconds between two lines of what is waited for
_RESOLVE_FOR = 8.0  # seconds in which a name may still appear
_PATIENCE = 30.0  # seconds for an earlier job to let go of the coordinator's port
_LATE = 2.0  # seconds after a failure in which those who come late are told of it
_BIND_FOR = 5.0  # seconds in which whoever went before may let go of the port


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
    token: bytes = field(default=b"", repr=False)
    """The job's token, which all processes share; empty if the job has none."""

    @property
    def coordinator(self) -> str:
        """`host:port` of process 0."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def join_rendezvous(party: Party, timeout: float, tell: Callable[[str], None]) -> None:
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
    guests: dict[int, Line] = {}
    next_word = time.monotonic() + _TELL_EVERY
    with closing(_listen(party)) as listener, closing(Admission(listener, party.token)) as door:
        try:
            while len(guests) < len(party.names) - 1:
                now = time.monotonic()
                if now > deadline:
                    raise ClusterError(
                        f"gave up after {timeout:g} s, {_waiting(party, guests, door)}"
                    )
                if now > next_word:
                    tell(f"waiting, {_waiting(party, guests, door)}")
                    _to_all(guests.values(), {"waiting": f"waiting, {_waiting(party, guests)}"})
                    next_word = now + _TELL_EVERY
                admitted, gone = door.poll(0.2)
                for rank in [rank for rank, line in guests.items() if line in gone]:
                    tell(f"{party.names[rank]} has gone again")  # another may come in its place
                    del guests[rank]
                for line, hello in admitted:
                    if _is_hello(hello):
                        _let_in(party, line, hello, guests)
                    else:
                        door.refuse(line, "it has another version of spmdtrain")
            if door.refusals:
                tell(door.refusals)
            _to_all(guests.values(), {"go": True})
        except (UserError, ClusterError) as error:
            verdict = {"wrong" if isinstance(error, UserError) else "failed": str(error)}
            _to_all(door.members, verdict)
            late = time.monotonic() + _LATE
            while (left := late - time.monotonic()) > 0:
                admitted, _ = door.poll(left)
                _to_all([line for line, _ in admitted], verdict)
            raise


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


def _let_in(party: Party, line: Line, hello: Mapping[str, Any], guests: dict[int, Line]) -> None:
    """Seats a process; raises `UserError` if it differs, or if its seat is taken."""
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
    if rank in guests:
        raise UserError(
            f"there are two of {name}: {guests[rank].where} and {line.where}; each task has "
            "an index of its own"
        )
    guests[rank] = line


def _is_hello(message: Mapping[str, Any]) -> bool:
    kinds = {"rank": int, "name": str, "size": int, "names": str, "about": dict, "where": str}
    right = all(type(message.get(name)) is kind for name, kind in kinds.items())
    right = right and all(type(value) is str for value in message["about"].values())
    return right and message.get("spmdtrain") == "hello" and 0 < message["rank"] < message["size"]


def _waiting(party: Party, guests: Mapping[int, Line], door: Admission | None = None) -> str:
    """Says who is missing, and which connections `door` has refused."""
    labels = [
        f"{name} at {party.addresses[rank]}" if party.addresses else name
        for rank, name in enumerate(party.names)
    ]
    missing = [label for rank, label in enumerate(labels) if rank and rank not in guests]
    shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    has = "has" if len(missing) == 1 else "have"
    here = len(labels) - len(missing)
    refused = f"; {door.refusals}" if door is not None and door.refusals else ""
    return f"{here} of {len(labels)} are here: {shown} {has} not come{refused}"


def _to_all(lines: Iterable[Line], message: Mapping[str, Any]) -> None:
    for line in lines:
        with suppress(OSError):
            line.send(message)


# -- the others ------------------------------------------------------------------------------------


def _join(party: Party, deadline: float, timeout: float, tell: Callable[[str], None]) -> None:
    patient_until = min(deadline, time.monotonic() + _PATIENCE)
    while fault := _meet_coordinator(party, deadline, timeout, tell):
        if time.monotonic() > patient_until:
            raise ClusterError(
                f"{party.coordinator} is not {party.names[0]} of a job that is gathering: {fault}"
            )
        time.sleep(1)


def _meet_coordinator(
    party: Party, deadline: float, timeout: float, tell: Callable[[str], None]
) -> str:
    """Joins the job.

    Only messages that prove the job's token are believed, bad news too.

    Returns:
      Empty once all processes have come; otherwise why what answers is no job that is gathering. It
      may be the job before, which has lost a process and has not noticed yet.
    """
    name = party.names[party.rank]
    other = f"another program has the port, or the job has begun with another {name}"
    introduced = answered = False
    with closing(_connect(party, deadline, timeout, tell)) as line:
        nonce = new_nonce()
        with suppress(OSError):  # hung up on: there is nothing to read then, either
            line.send({"spmdtrain": "hello", "nonce": nonce, "token": bool(party.token)})
        # Process 0 counts its own seconds: it knows best who is missing.
        while wait([line.socket], timeout=max(0.0, deadline + 10 - time.monotonic())):
            there = line.read()
            for message in line.messages():
                if not introduced:
                    if message is None or not is_nonce(message.get("nonce")):
                        return other
                    if fault := _introduce(party, line, nonce, message):
                        return fault
                    introduced = True
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
                    tell(foreign(message["waiting"]))
            if not there and answered:
                raise ClusterError(
                    f"{party.names[0]} at {party.coordinator} has gone while the job was gathering"
                )
            if not there and introduced and party.token:
                return f"it does not accept the {TOKEN} of this process"
            if not there:
                return other
    raise ClusterError(f"{party.names[0]} at {party.coordinator} says nothing any more")


def _introduce(party: Party, line: Line, nonce: str, message: Mapping[str, Any]) -> str:
    """Answers process 0's greeting with who this process is; returns what is wrong, or empty."""
    here = f"{party.names[0]} at {party.coordinator}"
    if not party.token and message.get("token") is True:
        raise UserError(
            f"{here} has a job token and this process has none: set {TOKEN} to the same"
        )
    if bool(party.token) is not message.get("token"):
        return f"it has no {TOKEN}, and this process has one"
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


def _connect(party: Party, deadline: float, timeout: float, tell: Callable[[str], None]) -> Line:
    began = time.monotonic()
    next_word = began + _TELL_EVERY
    while True:
        try:
            found = socket.create_connection((party.host, party.port), timeout=5)
            with suppress(OSError):  # reset in the meantime
                # On one machine the port that the system chose may be the very one that is called:
                # TCP then connects the socket with itself.
                if found.getsockname() != found.getpeername():
                    return Line(found, "worker")
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
