"""Admission of the processes of a job to process 0.

Any program that reaches the port can connect. Therefore everything that a connection can use before
it has authenticated by the job's token is bounded: bytes, nesting, seconds, and the number of
connections at a time.
"""

import errno
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from spmdtrain.cluster.json_lines import Line, is_nonce, new_nonce
from spmdtrain.errors import UserError

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
