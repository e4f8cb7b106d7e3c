"""The shared secret with which the processes of a job authenticate each other."""

import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from spmdtrain.errors import UserError

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
