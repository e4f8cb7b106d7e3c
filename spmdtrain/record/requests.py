"""Requests to a run in progress, as files of its workdir, and the answers of the run.

A run takes requests from its own user and from root alone, and only if they name its present start,
so that a request that is left over from a killed run has no effect.
"""

import contextlib
import enum
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, NamedTuple

from spmdtrain.errors import StorageError, foreign
from spmdtrain.record import no_follow
from spmdtrain.record.lines import errors_of_writing
from spmdtrain.record.run_files import Writer
from spmdtrain.record.validation import Malformed, check, parse_object

PREFIX = ".control-"
"""Begins the names of requests and answers in a workdir."""
STACKS_FILE = "stacks.txt"
"""File with the stacks of all processes, from the newest request for them."""
_ANSWER = ".answer"
_LARGEST = 2**14  # bytes of a request or an answer
_KEPT = 86_400.0  # seconds that the answer to a command that has been killed stays


class Action(enum.StrEnum):
    """An action that the owner of a run asks for."""

    SAVE = "save"
    PROFILE = "profile"
    STOP = "stop"
    EVALUATE = "evaluate"
    STACKS = "stacks"


class State(enum.StrEnum):
    """The progress of a run with a request."""

    ACCEPTED = "accepted"
    DONE = "done"
    REFUSED = "refused"


@dataclass(frozen=True)
class Request:
    """A request to a run.

    Attributes:
      action: What to do.
      start: The start of the run, from its lock file.
      steps: Number of steps to profile.
      id: Names the request.
    """

    action: str
    start: str
    steps: int = 0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @classmethod
    def parse(cls, text: str | bytes) -> "Request":
        """Returns the request in a text; raises `Malformed` if it is none."""
        content = parse_object(text)
        if content.keys() != {each.name for each in fields(cls)}:
            raise Malformed("not a request to a run")
        for each in fields(cls):
            check(content[each.name], each.type, each.name)
        if content["action"] not in list(Action) or not content["id"].isalnum():
            raise Malformed("not a request to a run")
        return cls(**content)

    def to_json(self) -> str:
        """Returns the text that `parse` reads."""
        return json.dumps(asdict(self))


class Answer(NamedTuple):
    """The answer of a run to a request: its state, and a sentence."""

    state: str
    text: str


# -- in the run ------------------------------------------------------------------------------------


def take_requests(folder: Path, start: str, refused: set[str]) -> Iterator[Request]:
    """Yields the new requests to a start of a run, oldest first, and removes their files.

    Args:
      refused: Names of files that are not valid, and were reported.

    Raises:
      StorageError: For the first file that is not a valid request and was not reported yet.
    """
    found: list[tuple[int, str, Request]] = []
    for name in os.listdir(folder):
        if not name.startswith(PREFIX) or name in refused:
            continue
        try:
            if name.endswith(_ANSWER):
                if time.time() - os.lstat(folder / name).st_mtime > _KEPT:
                    no_follow.remove(folder, name)
                continue
            modified, content = _read_own(folder, name)
            request = Request.parse(content)
            if request.start != start or name != PREFIX + request.id:
                raise Malformed("it is for another start of the run")
            found.append((modified, name, request))
        except FileNotFoundError:  # its command has been interrupted
            continue
        except (OSError, Malformed) as error:
            refused.add(name)
            why = getattr(error, "strerror", None) or str(error)
            raise StorageError(f"request {foreign(name, 60)} is ignored: {why}") from error
    for _, name, request in sorted(found, key=lambda each: each[:2]):
        with contextlib.suppress(FileNotFoundError):
            no_follow.remove(folder, name)
            yield request


def write_answer(folder: Path, request: Request, state: State, text: str) -> None:
    """Writes the answer to a request, in place of an earlier one."""
    content = json.dumps({"state": state, "text": text[: _LARGEST // 8]}).encode()
    no_follow.write(folder, f"{PREFIX}{request.id}{_ANSWER}", _private(content))


# -- in the command --------------------------------------------------------------------------------


class Holder(NamedTuple):
    """The run that writes into a workdir.

    Attributes:
      where: Its process and host.
      start: Names this start of it; "" if it takes no requests.
    """

    where: str
    start: str


def find_run(folder: Path, writer: Writer = Writer.TRAINING) -> Holder | None:
    """Returns the run, or the evaluator, that holds the lock of a workdir; None without one."""
    import fcntl  # not on Windows

    try:
        file = no_follow.open_file(folder, writer.file(".lock"), os.O_RDONLY)
    except OSError:
        return None
    with os.fdopen(file, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            where, _, start = lock.read(1000).decode(errors="replace").partition("\n")
            return Holder(foreign(where, 300), start.strip())
    return None


def send_request(folder: Path, request: Request) -> None:
    """Writes a request into a workdir; raises `StorageError` if that fails."""
    name = f"{PREFIX}{request.id}"
    with errors_of_writing(folder / name):
        no_follow.write(folder, name, _private(request.to_json().encode()))


def read_answer(folder: Path, request: Request) -> Answer | None:
    """Returns the newest answer to a request; None before the first one.

    Raises:
      Malformed: If the file has other content.
      OSError: If it cannot be read, or others could have written it.
    """
    try:
        _, text = _read_own(folder, f"{PREFIX}{request.id}{_ANSWER}")
    except FileNotFoundError:
        return None
    content: Mapping[str, Any] = parse_object(text)
    check(content, dict[str, str], "answer")
    if content.keys() != {*Answer._fields} or content["state"] not in list(State):
        raise Malformed("not an answer of a run")
    return Answer(**content)


def withdraw(folder: Path, request: Request) -> None:
    """Removes a request and its answer."""
    for name in (f"{PREFIX}{request.id}", f"{PREFIX}{request.id}{_ANSWER}"):
        with contextlib.suppress(OSError):
            no_follow.remove(folder, name)


def _private(content: bytes) -> Any:
    """Returns a function that writes content to a file that only its owner may change."""

    def save(file: IO[bytes]) -> None:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)

    return save


def _read_own(folder: Path, name: str) -> tuple[int, bytes]:
    """Returns when a file was modified, in nanoseconds, and its content.

    Raises `OSError` unless it belongs to this user or root, and no one else can write to it.
    """
    with os.fdopen(no_follow.open_file(folder, name, os.O_RDONLY), "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (os.geteuid(), 0):
            raise PermissionError(f"it belongs to user {found.st_uid}, and the run to another one")
        if found.st_mode & 0o022:
            raise PermissionError("others can write to it")
        if found.st_nlink != 1:
            raise PermissionError("it has a second name")
        content = file.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise OSError(f"it has more than {_LARGEST:,} bytes")
    return found.st_mtime_ns, content
