"""What storage answers, in a few words: Python's own errors, and TensorStore's long ones."""

import re
from collections.abc import Iterator

# TensorStore raises ValueErrors that begin with a status code and end with bracketed details.
_STATUS = re.compile(r"([A-Z][A-Z_]+): (.*)", re.DOTALL)
# Codes that say nothing about what is stored, only that it cannot be got at now.
_OUT_OF_REACH = {"PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}


def storage_reason(error: BaseException) -> str | None:
    """Why something could not be written, in a few words; None where storage is not to blame."""
    for cause in _causes(error):
        if isinstance(cause, OSError):
            where = f": {cause.filename}" if cause.filename else ""
            return f"{cause.strerror}{where}" if cause.strerror else str(cause)
        if found := _status(cause):
            return _last_words(found[1])
    return None


def out_of_reach(error: BaseException) -> str | None:
    """Why something cannot be read now, though it may well be whole; None where it is damaged."""
    for cause in _causes(error):
        missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
        if isinstance(cause, OSError) and not isinstance(cause, missing):
            return storage_reason(cause)
        if (found := _status(cause)) and found[0] in _OUT_OF_REACH:
            return _last_words(found[1])
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            error = error.__cause__ or error.__context__


def _status(error: BaseException) -> tuple[str, str] | None:
    found = _STATUS.match(str(error)) if isinstance(error, ValueError) else None
    return (found[1], found[2]) if found else None


def _last_words(text: str) -> str:
    """`Error writing "a" in "b": Failed: No space left [os_error_code='28']` -> `No space left`."""
    return text.split(" [")[0].rpartition('": ')[2].rpartition(": ")[2].strip()
