"""Admission of the processes of a job to process 0.

Whoever reaches the port may connect, so everything that a connection may use before it has proved
that it has the job's token is bounded: bytes, nesting, seconds, and connections at a time.
"""

import errno
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from spmdtrain.cluster.json_lines import Line, is_nonce, new_nonce
from spmdtrain.errors import UserError

MOST_STRANGERS = 128  # connections at a time that have not proved the token
_HANDSHAKE = 10.0  # seconds in which a connection has to prove it
_UNDISTURBED = 1.0  # seconds that one which has greeted has before another may take its place
_SEND = 5.0  # seconds that a message to one process may block

Admitted = tuple[Line, dict[str, Any]]


@dataclass
class _Stranger:
    """A connection that has not proved that it has the token."""

    since: float
    greeted: bool = False


class Admission:
    """Accepts connections and authenticates them.

    Args:
      listener: The listening socket; the caller closes it.
      token: The job's token; if it is empty, every process that has none either is admitted.
    """

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        listener.setblocking(False)
        self.members: list[Line] = []
        """The admitted connections that are open."""
        self.refused = 0
        """Number of connections that were refused."""
        self._last = ""
        self._listener, self._token = listener, token
        self._strangers: dict[Line, _Stranger] = {}  # in the order of their arrival
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def refusals(self) -> str:
        """The number of refusals, with address and reason of the last; empty if there are none."""
        if not self.refused:
            return ""
        many = "1 connection" if self.refused == 1 else f"{self.refused} connections"
        return f"refused {many}, the last {self._last}"

    def poll(self, seconds: float) -> tuple[list[Admitted], list[Line]]:
        """Waits for connections and messages.

        Args:
          seconds: Longest time to wait.

        Returns:
          The connections admitted now with their first message, and earlier ones that have been
          closed by the other side.

        Raises:
          UserError: If this process may not open as many connections as the job needs.
        """
        admitted: list[Admitted] = []
        gone: list[Line] = []
        arrived = False
        for key, _ in self._selector.select(seconds):
            line = key.data
            if line is None:
                arrived = True
            elif line in self._strangers:
                if (first := self._listen_to(line)) is not None:
                    admitted.append((line, first))
            elif not line.discard():
                self._drop(line)
                gone.append(line)
        now = time.monotonic()
        for line in [x for x, one in self._strangers.items() if now - one.since > _HANDSHAKE]:
            self.refuse(line, f"it has not identified itself in {_HANDSHAKE:g} s", at_once=True)
        if arrived and self._has_room(now):
            self._accept(now)
        return admitted, gone

    def refuse(self, line: Line, why: str, *, at_once: bool = False) -> None:
        """Closes a connection and counts it.

        Args:
          line: The connection.
          why: The reason, for `refusals`.
          at_once: As in `Line.close`.
        """
        self.refused += 1
        self._last = f"from {line.address}: {why}"
        self._drop(line, at_once=at_once)

    def close(self) -> None:
        """Closes all connections; waits for the other side to close those admitted first."""
        for line in self.members:
            line.wait_for_end(1.0)
        for line in self.members:
            line.close()
        for line in self._strangers:
            line.close(at_once=True)
        self._selector.close()

    def _has_room(self, now: float) -> bool:
        """Returns whether another connection may come in, and drops one for it if it must.

        A process of the job greets at once, so those that say nothing go first.
        """
        if len(self._strangers) < MOST_STRANGERS:
            return True
        for line, one in self._strangers.items():
            if not one.greeted:
                self.refuse(line, "it said nothing, and others waited", at_once=True)
                return True
        oldest, one = next(iter(self._strangers.items()))
        if now - one.since > _UNDISTURBED:
            self.refuse(oldest, "it did not identify itself, and others waited", at_once=True)
            return True
        time.sleep(0.01)  # the rest waits in the listener's queue
        return False

    def _accept(self, now: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room(error)
            return  # else it has gone again
        connection.settimeout(_SEND)
        line = Line(connection, "chief")
        self._strangers[line] = _Stranger(since=now)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _make_room(self, error: OSError) -> None:
        if not self._strangers:
            raise UserError(
                f"no connection can be accepted: {error.strerror}; {len(self.members)} processes "
                "are connected: raise the limit of open files (ulimit -n)"
            ) from error
        oldest = next(iter(self._strangers))
        self.refuse(oldest, "there are too many open files", at_once=True)

    def _listen_to(self, line: Line) -> dict[str, Any] | None:
        """Reads from an unauthenticated connection; returns its first authentic message."""
        there = line.read()
        for message in line.messages():
            if self._strangers[line].greeted and message is not None:
                del self._strangers[line]
                self.members.append(line)
                return message
            if fault := self._answer(line, message):
                self.refuse(line, fault)
                return None
        if not there:
            self._drop(line)
        return None

    def _answer(self, line: Line, message: dict[str, Any] | None) -> str:
        """Answers a greeting; returns what is wrong with it, or empty."""
        one = self._strangers[line]
        if one.greeted:
            return "it has another job token" if self._token else "it is no process of a job"
        nonce = (message or {}).get("nonce")
        if message is None or message.get("spmdtrain") != "hello" or not is_nonce(nonce):
            return "it is no process of a job"
        own = new_nonce()
        try:
            line.send({"nonce": own, "token": bool(self._token)})
        except OSError:
            return "it closed the connection"
        if message.get("token") is not bool(self._token):
            has = "no job token" if self._token else "a job token, and this process has none"
            return f"it has {has}"
        assert isinstance(nonce, str)
        line.authenticate(self._token, worker_nonce=nonce, chief_nonce=own)
        one.greeted = True
        return ""

    def _drop(self, line: Line, *, at_once: bool = False) -> None:
        if line in self._strangers:
            del self._strangers[line]
        else:
            self.members.remove(line)
        self._selector.unregister(line.socket)
        line.close(at_once=at_once)
