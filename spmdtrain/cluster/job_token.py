"""The shared secret of a job, and the messages that it authenticates."""

import contextlib
import errno
import hmac
import json
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from spmdtrain.errors import UserError

# -- The shared secret with which the processes of a job authenticate each other -------------------

TOKEN = "SPMDTRAIN_JOB_TOKEN"
"""Environment variable with the token."""
TOKEN_FILE = "SPMDTRAIN_JOB_TOKEN_FILE"
"""Environment variable with the path of a file that contains the token."""
_MIN_LENGTH, _MAX_LENGTH = 16, 4096  # characters
_HINT = "create a token with: openssl rand -hex 32"


def create() -> str:
    """Returns a new random token of 256 bits."""
    return secrets.token_hex(32)


def is_set(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the environment names a token."""
    return bool(environ.get(TOKEN) or environ.get(TOKEN_FILE))


def advice(address: str) -> str:
    """Returns a warning for a job without a token whose coordinator other machines can reach."""
    return (
        f"this job has no token: any program that can connect to {address} can join or end it; set "
        f"the same {TOKEN} or {TOKEN_FILE} in all processes ({_HINT})"
    )


def read(
    environ: Mapping[str, str] = os.environ,
    *,
    exposed: str | None = None,
    warn: Callable[[str], None],
) -> bytes:
    """Reads the job's token from the environment.

    Args:
      exposed: Address at which other machines can reach this process; None if they cannot.
      warn: Called with a warning if there is no token and this process is exposed, or if all users
        of this machine can read the token's file.

    Returns:
      The token without surrounding white space; empty if neither variable is set.

    Raises:
      UserError: If both variables are set, the file cannot be read, or the token is too short or
        too long.
    """
    text, path = environ.get(TOKEN, ""), environ.get(TOKEN_FILE, "")
    if text and path:
        raise UserError(f"{TOKEN} and {TOKEN_FILE} are both set: unset one of them")
    source = TOKEN
    if path:
        source = f"{TOKEN_FILE}={path}"
        text = _content(Path(path), source, warn)
    elif not text:
        if exposed is not None:
            warn(f"warning: {advice(exposed)}")
        return b""
    token = text.strip()
    if not _MIN_LENGTH <= len(token) <= _MAX_LENGTH:
        raise UserError(
            f"{source}: the token has {len(token)} characters; expected {_MIN_LENGTH} to "
            f"{_MAX_LENGTH}; {_HINT}"
        )
    return token.encode(errors="surrogateescape")


def _content(path: Path, source: str, warn: Callable[[str], None]) -> str:
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # opening a FIFO would wait for its writer
    try:
        descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
        with open(descriptor, encoding="utf-8", errors="surrogateescape") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise UserError(
                    f"{source}: not a regular file: give a file with the token; {_HINT}"
                )
            if mode & 0o004:
                warn(f"warning: {source} is readable by all users of this machine: chmod 600 it")
            return file.read(_MAX_LENGTH + 2)
    except OSError as error:
        raise UserError(f"{source}: the token cannot be read: {error.strerror}; {_HINT}") from error


# -- Bounded JSON lines and bytes over a socket, authenticated by a shared token -------------------
#
# The token is never sent. Each side sends a fresh nonce; a key for each direction is derived from
# the token and both nonces, and every later line ends with the HMAC-SHA256 of its number and its
# text. Therefore a line is valid only from a process that has the token, only in this connection,
# only in this direction, and only at its position. `multiprocessing.connection` also authenticates
# by HMAC, but only when it connects, and its `recv` unpickles, which can run code of the sender.

Side = Literal["chief", "worker"]

MAX_GREETING = 1024  # bytes of the line with the nonce
MAX_LINE = 2**19  # bytes of any other line
_MAX_DEPTH = 4  # levels of nested objects and lists; the messages of a job have two
_MAC = 64  # hexadecimal digits
_PIECE = 2**20  # bytes that are sent or received at a time
_BRACKETS = re.compile(rb'\\.|["{}\[\]]', re.DOTALL)
_NONCE = re.compile("[0-9a-f]{32}")


def new_nonce() -> str:
    """Returns 128 random bits as hexadecimal digits."""
    return secrets.token_hex(16)


def is_nonce(value: object) -> bool:
    """Returns whether a value from the network has the form of a nonce."""
    return isinstance(value, str) and _NONCE.fullmatch(value) is not None


def parse_line(text: bytes) -> dict[str, Any] | None:
    """Parses a line; returns None if it is not a JSON object, or is nested too deeply."""
    depth, in_string = 0, False
    for match in _BRACKETS.finditer(text):
        mark = match[0]
        if mark == b'"':
            in_string = not in_string
        elif not in_string and mark in b"{[":
            depth += 1
            if depth > _MAX_DEPTH:
                return None
        elif not in_string and mark in b"}]":
            depth -= 1
    try:
        # The scan above assumes UTF-8; given bytes, json.loads would guess the encoding.
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Line:
    """A connection for messages of one JSON object per line.

    `side` is this end of the connection; `where` is the host and process of the other end, by its
    own description. `close` closes the socket.
    """

    def __init__(self, connection: socket.socket, side: Side) -> None:
        self.socket = connection
        self.where = ""
        self._side: Side = side
        self._buffer = b""
        self._keys: dict[Side, bytes] = {}
        self._counts: dict[Side, int] = {"chief": 0, "worker": 0}
        self._max_line = MAX_GREETING

    @property
    def address(self) -> str:
        """The IP address of the other end."""
        try:
            host = str(self.socket.getpeername()[0])
        except OSError:
            return "an address that is no longer known"
        return host.removeprefix("::ffff:")

    def authenticate(self, token: bytes, worker_nonce: str, chief_nonce: str) -> None:
        """Adds an HMAC to every later line, and requires a valid one of the other end.

        With an empty token the HMAC only detects corruption. The worker is the connecting process,
        the chief is process 0.
        """
        sides: tuple[Side, Side] = ("chief", "worker")
        for side in sides:
            context = f"spmdtrain rendezvous 1 {side} {worker_nonce} {chief_nonce}"
            self._keys[side] = hmac.digest(token, context.encode(), "sha256")
        self._max_line = MAX_LINE

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message; raises `OSError` if the other end is closed or does not read."""
        text = json.dumps(message).encode()
        if self._keys:
            text += b" " + self.mac(self._side, text)
        self.socket.sendall(text + b"\n")

    def send_bytes(self, content: memoryview, deadline: float) -> None:
        """Sends bytes, whose number the other end knows, and then their HMAC.

        Args:
          content: The bytes, contiguous.
          deadline: The time by `time.monotonic` at which the call ends by `TimeoutError`.

        Raises:
          OSError: If the other end is closed or does not read.
        """
        code = self._code_of_bytes(self._side)
        for start in range(0, len(content), _PIECE):
            piece = content[start : start + _PIECE]
            code.update(piece)
            self._limit_wait(deadline)
            self.socket.sendall(piece)
        self._limit_wait(deadline)
        self.socket.sendall(code.hexdigest().encode())

    def receive_bytes(self, into: memoryview, deadline: float) -> bool:
        """Receives as many bytes as `into` holds, and returns whether their HMAC is valid.

        If it is not, they come from a stranger, from another connection or position, or were
        altered: nothing of them may be used.

        Args:
          into: Receives the bytes.
          deadline: As for `send_bytes`.

        Raises:
          OSError: If the connection is closed before the last byte.
        """
        code = self._code_of_bytes(self._other)
        for start in range(0, len(into), _PIECE):
            piece = into[start : start + _PIECE]
            self._fill(piece, deadline)
            code.update(piece)
        found = bytearray(_MAC)
        self._fill(memoryview(found), deadline)
        return hmac.compare_digest(bytes(found), code.hexdigest().encode())

    def answer(self, deadline: float) -> dict[str, Any] | None:
        """Waits for the next message; None if it is not valid, or if the connection has ended."""
        while True:
            for message in self.messages():
                return message
            self._limit_wait(deadline)
            if not self.read():
                return None

    def _code_of_bytes(self, side: Side) -> "hmac.HMAC":
        """Returns the HMAC of the next bytes of a side, to be updated, and counts them as a line.

        It begins with NUL, with which no line begins.
        """
        code = hmac.new(self._keys[side], b"\0" + self._next(side), "sha256")
        return code

    def _fill(self, into: memoryview, deadline: float) -> None:
        """Receives exactly as many bytes as `into` holds."""
        count = min(len(into), len(self._buffer))
        into[:count] = self._buffer[:count]
        self._buffer = self._buffer[count:]
        while count < len(into):
            self._limit_wait(deadline)
            received = self.socket.recv_into(into[count:])
            if not received:
                raise ConnectionResetError(errno.ECONNRESET, "the other end has closed")
            count += received

    def _limit_wait(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "it takes too long")
        self.socket.settimeout(left)

    def read(self) -> bool:
        """Receives available bytes; returns False if the other end has closed the connection."""
        try:
            received = self.socket.recv(65536)
        except OSError:
            return False
        self._buffer += received
        return bool(received)

    def messages(self) -> Iterator[dict[str, Any] | None]:
        """Yields the received messages; None for a line that is too long, invalid or forged."""
        while b"\n" in self._buffer:
            text, self._buffer = self._buffer.split(b"\n", 1)
            yield self._verify(text) if len(text) <= self._max_line else None
        if len(self._buffer) > self._max_line or self._buffer[:1] not in (b"", b"{"):
            self._buffer = b""
            yield None

    def discard(self) -> bool:
        """Discards available bytes; returns False if the other end has closed the connection."""
        is_open, self._buffer = self.read(), b""
        return is_open

    def wait_for_end(self, seconds: float) -> None:
        """Waits until the other end closes the connection, at most `seconds`."""
        with contextlib.suppress(OSError):
            self.socket.settimeout(seconds)
            self.socket.recv(1)

    def close(self, *, at_once: bool = False) -> None:
        """Closes the connection; `at_once` resets it, so that no port stays in TIME_WAIT."""
        if at_once:
            with contextlib.suppress(OSError):  # it is already closed
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def _verify(self, text: bytes) -> dict[str, Any] | None:
        if not self._keys:
            return parse_line(text)
        text, mac = text[: -_MAC - 1], text[-_MAC:]
        if not hmac.compare_digest(mac, self.mac(self._other, text)):
            return None
        return parse_line(text)

    def mac(self, side: Side, text: bytes) -> bytes:
        """Returns the authentication code of the next line of a side, and counts the line."""
        return hmac.digest(self._keys[side], self._next(side) + text, "sha256").hex().encode()

    def _next(self, side: Side) -> bytes:
        """Returns the position of the next line or bytes of a side, and counts it."""
        number = self._counts[side]
        self._counts[side] += 1
        return number.to_bytes(8, "big")

    @property
    def _other(self) -> Side:
        return "worker" if self._side == "chief" else "chief"
