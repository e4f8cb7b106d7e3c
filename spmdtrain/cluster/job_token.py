"""The shared secret by which the processes of a job recognize each other."""

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from spmdtrain.errors import UserError

TOKEN = "SPMDTRAIN_JOB_TOKEN"
"""Environment variable that holds the token."""
TOKEN_FILE = "SPMDTRAIN_JOB_TOKEN_FILE"
"""Environment variable that holds the path of a file with the token."""
_SHORTEST, _LONGEST = 16, 4096  # characters
_MAKE_ONE = "make one with: openssl rand -hex 32"


def create() -> str:
    """Returns a new random token of 256 bits."""
    return secrets.token_hex(32)


def is_set(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the environment names a token."""
    return bool(environ.get(TOKEN) or environ.get(TOKEN_FILE))


def advice(address: str) -> str:
    """Returns what a job without a token risks if other machines reach its coordinator."""
    return (
        f"this job has no token: any program that reaches {address} may join or end it; give all "
        f"processes the same {TOKEN} or {TOKEN_FILE} ({_MAKE_ONE})"
    )


def read(
    environ: Mapping[str, str] = os.environ,
    *,
    exposed: str | None = None,
    tell: Callable[[str], None],
) -> bytes:
    """Reads the job's token from the environment.

    Args:
      environ: The environment.
      exposed: Address at which programs of other machines reach this process; None if they cannot.
      tell: Receives a warning if there is no token and this process is exposed, or if all users of
        this machine can read the token's file.

    Returns:
      The token without surrounding white space; empty if the environment names none.

    Raises:
      UserError: If both variables are set, the file cannot be read, or the token is too short.
    """
    text, path = environ.get(TOKEN, ""), environ.get(TOKEN_FILE, "")
    if text and path:
        raise UserError(f"{TOKEN} and {TOKEN_FILE} are both set: unset one of them")
    source = TOKEN
    if path:
        source = f"{TOKEN_FILE}={path}"
        text = _content(Path(path), source, tell)
    elif not text:
        if exposed is not None:
            tell(f"warning: {advice(exposed)}")
        return b""
    token = text.strip()
    if not _SHORTEST <= len(token) <= _LONGEST:
        raise UserError(
            f"{source}: the token has {len(token)} characters; expected {_SHORTEST} to "
            f"{_LONGEST}; {_MAKE_ONE}"
        )
    return token.encode(errors="surrogateescape")


def _content(path: Path, source: str, tell: Callable[[str], None]) -> str:
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as file:
            if os.fstat(file.fileno()).st_mode & 0o004:
                tell(f"warning: {source} is readable by all users of this machine: chmod 600 it")
            return file.read(_LONGEST + 2)
    except OSError as error:
        raise UserError(
            f"{source}: the token cannot be read: {error.strerror}; {_MAKE_ONE}"
        ) from error
