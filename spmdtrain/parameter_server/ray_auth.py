"""Authentication between the Ray processes of a job.

Ray executes pickled code for every client of its ports, as the user of the job, on loopback
interfaces too. With token authentication its servers refuse clients without the token of the job.
"""

import hashlib
import hmac
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from spmdtrain.cluster import job_token
from spmdtrain.cluster.spec import Address
from spmdtrain.errors import UserError
from spmdtrain.record.user_folders import private_folder

JOB_TOKEN = job_token.TOKEN
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Environment variables of Ray."""


def enable() -> None:
    """Enables token authentication in this process and its children. Call before importing Ray.

    Raises:
      UserError: If the environment disables it.
    """
    mode = os.environ.setdefault(MODE, "token")
    if mode != "token":
        raise UserError(
            f"{MODE}={mode}: strategy parameter_server requires Ray's token authentication: "
            f"otherwise every local user can execute code in the job; unset {MODE}"
        )


def check_enabled() -> None:
    """Raises `UserError` if the imported Ray does not authenticate its clients."""
    from ray._raylet import (  # type: ignore[attr-defined]
        AuthenticationMode,
        Config,
        get_authentication_mode,
    )

    if get_authentication_mode() != AuthenticationMode.TOKEN:
        Config.initialize("")  # the script had imported Ray, which read the environment then
    if get_authentication_mode() != AuthenticationMode.TOKEN:
        raise UserError(
            "strategy parameter_server requires Ray's token authentication, which this Ray has not "
            f"enabled; set {MODE}=token before the script imports Ray"
        )


def create_token(chief: Address, is_local: bool) -> None:
    """Sets Ray's token in the chief and its children, before they start Ray.

    The token is derived from the token of the job (see `job_token`). Without one it is the token in
    Ray's own environment variables. Without either, if `is_local` (all addresses of the job are
    loopback addresses), the chief creates a token, which the other tasks of this user read from a
    file.

    Raises:
      UserError: If the tasks of the job share no secret.
    """
    if _set_by_environment(chief, is_local):
        return
    file = _file(chief)
    fresh = file.with_suffix(f".{os.getpid()}")
    fresh.unlink(missing_ok=True)
    token = secrets.token_hex(32)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as text:
        text.write(token)
    fresh.replace(file)
    os.environ[TOKEN] = token


def read_token(chief: Address, is_local: bool) -> None:
    """Sets Ray's token in another task, once the chief listens; see `create_token`.

    Raises:
      UserError: If this task shares no secret with the chief.
    """
    if _set_by_environment(chief, is_local):
        return
    try:
        os.environ[TOKEN] = _file(chief).read_text()
    except OSError as error:
        raise UserError(
            f"{error.filename}, the token of the job whose chief is at {chief}, cannot be read: "
            f"{error.strerror}. Another program listens there, or another user has started it; "
            f"set {JOB_TOKEN} to the same secret in all tasks of the job"
        ) from error


def remove_token(chief: Address) -> None:
    """Removes the file of `create_token`, if it wrote one."""
    with suppress(FileNotFoundError):
        _file(chief).unlink()


def refused(chief: Address) -> UserError:
    """Returns the error of a task whose token the chief does not accept."""
    return UserError(
        f"the chief at {chief} refuses the token of this task: {JOB_TOKEN} must be the same in all "
        "tasks of a job"
    )


def _set_by_environment(chief: Address, is_local: bool) -> bool:
    """Sets the token if the environment has one; if not (False), it is in a file of this user.

    Raises:
      UserError: If the environment has none, and the job is not on loopback addresses alone.
    """
    if secret := job_token.read(warn=lambda text: print(text, file=sys.stderr)):
        # Each chief has its own token, so a program that takes the port of one learns no other.
        os.environ[TOKEN] = hmac.new(secret, f"ray {chief}".encode(), hashlib.sha256).hexdigest()
    if os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH):
        return True
    if is_local:
        return False
    raise UserError(
        f"the tasks of the job at {chief} share no secret, and Ray executes the code of every "
        f"program that reaches its ports: set {JOB_TOKEN} to the same secret in all tasks "
        "(openssl rand -hex 32 prints one)"
    )


def _file(chief: Address) -> Path:
    return private_folder() / f"ray-{quote(chief.host, safe='')}-{chief.port}.token"
