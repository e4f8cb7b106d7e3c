"""Processes that meet, for tests of the rendezvous."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from helpers import BOUND
from processes import free_port

from spmdtrain.cluster.job_token import Line
from spmdtrain.cluster.rendezvous import Party, join_rendezvous
from spmdtrain.errors import ClusterError, UserError

NONCE = "0" * 32
NAMES = ("chief", "worker 0", "worker 1", "worker 2")
Ending = Exception | None


def parties(
    size: int = 2, host: str = "127.0.0.1", token: bytes = b"", **about: str
) -> list[Party]:
    """The processes of one job, by rank."""
    port = free_port()
    return [
        Party(
            host=host,
            port=port,
            names=NAMES[:size],
            rank=rank,
            about=about,
            addresses=[f"host-{n}:{port + n}" for n in range(size)],
            token=token,
        )
        for rank in range(size)
    ]


class Messages:
    """What the processes hear while they wait, by rank."""

    def __init__(self) -> None:
        self.lines: dict[int, list[str]] = {rank: [] for rank in range(len(NAMES))}

    def to(self, rank: int) -> Callable[[str], None]:
        return self.lines[rank].append


def ending(party: Party, timeout: float, messages: Messages) -> Ending:
    """How a process's part in the meeting ends: with an error of ours, or all well."""
    try:
        join_rendezvous(party, timeout, messages.to(party.rank))
    except (UserError, ClusterError) as error:
        return error
    return None


def all_meet(
    who: Sequence[Party], timeout: float = 20, messages: Messages | None = None
) -> list[Ending]:
    """How the meeting ends for each of these, who come at the same time."""
    heard = messages or Messages()
    with ThreadPoolExecutor(len(who)) as pool:
        return list(pool.map(lambda party: ending(party, timeout, heard), who))


@contextlib.contextmanager
def gathering(*who: Party, timeout: float = 20) -> Iterator[tuple[list[Ending], Messages]]:
    """While entered, these wait for the rest; their endings are there at the exit."""
    endings: list[Ending] = []
    messages = Messages()
    with ThreadPoolExecutor(len(who)) as pool:
        found = [pool.submit(ending, party, timeout, messages) for party in who]
        yield endings, messages
        endings += [one.result() for one in found]


def knock(party: Party) -> socket.socket:
    """A connection to where process 0 listens, as soon as it does."""
    until = time.monotonic() + BOUND
    while True:
        try:
            return socket.create_connection((party.host, party.port), timeout=10)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.02)


def hello(party: Party) -> dict[str, Any]:
    """What a process says of itself."""
    return {
        "spmdtrain": "hello",
        "rank": party.rank,
        "name": party.names[party.rank],
        "size": len(party.names),
        "names": ", ".join(party.names),
        "about": dict(party.about),
        "where": "elsewhere, process 1",
    }


def greeting(*, token: bool = False) -> bytes:
    """What a process says first."""
    return json.dumps({"spmdtrain": "hello", "nonce": NONCE, "token": token}).encode() + b"\n"


def greeted(connection: socket.socket, token: bytes = b"") -> Line:
    """A connection to process 0 after the exchange of nonces, as a process with `token` has it."""
    for byte in greeting(token=bool(token)):
        connection.send(bytes([byte]))  # in pieces, as a network may deliver it
    answer = json.loads(received(connection))
    line = Line(connection, "worker")
    line.authenticate(token, worker_nonce=NONCE, chief_nonce=answer["nonce"])
    return line


def received(connection: socket.socket) -> bytes:
    """The next line; what has come of it where the other side has hung up."""
    text = b""
    while not text.endswith(b"\n") and (byte := connection.recv(1)):
        text += byte
    return text


def message(line: Line) -> dict[str, Any] | None:
    """The next message; None for a forged one. Fails where the other side has hung up."""
    while True:
        assert line.read()
        for found in line.messages():
            return found


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def refusal(found: Ending, kind: type[Exception]) -> str:
    assert type(found) is kind, found
    return str(found)
