"""Where things are stored, local paths and URLs, and what storage answers, in a few words."""

import functools
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from etils import epath

from spmdtrain.errors import UserError

# TensorStore raises ValueErrors that begin with a status code and end with bracketed details.
_STATUS = re.compile(r"([A-Z][A-Z_]+): (.*)", re.DOTALL)
_DETAILS = re.compile(r" \[[a-z_]+=")
_LATE = ("Event loop is closed", "Encountered error while reading array index", "coroutine '")
_NEVER_AWAITED = r"coroutine '\S+' was never awaited"
# Codes that speak of what is stored. All others say only that it cannot be got at now.
_DAMAGE = {
    *("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE"),
    "UNIMPLEMENTED",  # a codec of another name
}


# -- where --------------------------------------------------------------------------------------


def is_url(path: str | epath.Path) -> bool:
    """Whether a path is in an object store, which knows no folders, renames and appends."""
    return "://" in str(path)


def folder_of(path: str) -> epath.Path:
    """A local path or `gs://` URL. Raises `UserError` for a URL that nothing can be read from."""
    if not is_url(path):
        local = epath.Path(path).expanduser()
        if str(local).startswith("~"):  # a home that is not known stays as it is
            raise UserError(
                f"{path}: the home folder is not known; set HOME, or write the path without ~"
            )
        return local
    scheme = path.partition("://")[0]
    if scheme != "gs":  # where Orbax can save
        raise UserError(f"{path}: a run's folder is a local path or a gs:// URL, not {scheme}://")
    folder = epath.Path(path)
    try:
        from fsspec.config import conf

        # A listing that is kept would hide what TensorStore and other processes write.
        conf.setdefault("gcs", {})["use_listings_cache"] = False
        folder.exists()
    except ImportError as error:
        raise UserError(f"{path}: {error} (pip install 'spmdtrain[gcs]')") from error
    except Exception as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    return folder


def absolute(path: epath.Path) -> epath.Path:
    """A path as Orbax takes it; epath's `resolve` would look for a URL below the current folder."""
    return path if is_url(path) else path.resolve()


def size_and_time(path: epath.Path) -> tuple[int, int]:
    """Returns the bytes of a file, and when it changed, in seconds.

    epath's own `stat` fails if the file's owner has no entry in /etc/passwd.
    """
    if is_url(path):
        found = path.stat()
        return found.length, found.mtime
    local = os.stat(path)
    return local.st_size, int(local.st_mtime)


# -- what it answers ----------------------------------------------------------------------------


def failures(path: str | epath.Path) -> type[Exception]:
    """What reading and writing a path may raise: the libraries of URLs have errors of their own."""
    return Exception if is_url(path) else OSError


def one_line(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, FileNotFoundError) and error.errno is None:  # gcsfs gives an address alone
        return "there is no such bucket"
    return " ".join(str(error).split()) or type(error).__name__


def storage_reason(error: BaseException) -> str | None:
    """Why something could not be written, in a few words; None where storage is not to blame."""
    for cause in _causes(error):
        if isinstance(cause, OSError):
            where = f": {cause.filename}" if cause.filename else ""
            return f"{cause.strerror}{where}" if cause.strerror else in_short(cause)
        if found := _status(cause):
            return _last_words(found[1])
    return None


def why_failed(error: Exception, path: str | epath.Path) -> str | None:
    """As `storage_reason`, at a path: the libraries of URLs have errors of their own."""
    return storage_reason(error) or (in_short(error) if is_url(path) else None)


# Errors of decoders. Orbax raises NotImplementedError and AssertionError for unknown metadata.
_DECODING_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    NotImplementedError,
    AssertionError,
    RecursionError,  # nested JSON
)


def is_damage(error: BaseException) -> bool:
    """Whether an error of reading speaks of what is stored, and not of how it is got at."""
    for cause in _causes(error):
        if isinstance(cause, OSError):
            return isinstance(cause, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        if found := _status(cause):
            return found[0] in _DAMAGE
    return isinstance(error, _DECODING_ERRORS)


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


def in_short(error: BaseException) -> str:
    """An error in one line: of TensorStore's, the file it is about and what is wrong with it."""
    if not (found := _status(error)):
        kind = "" if isinstance(error, OSError) and str(error) else f"{type(error).__name__}: "
        return f"{kind}{error}".split("\n")[0].removesuffix(": ")[:200]
    text = _DETAILS.split(found[1])[0]
    *_, file = ["", *re.findall(r'local file "[^"]*/([^"/]+)"', text)]
    what = text.rpartition('": ')[2] or text
    return (f"{file}: {what}" if file else what)[:200]


def _last_words(text: str) -> str:
    """`Error writing "a" in "b": Failed: No space left [os_error_code='28']` -> `No space left`."""
    return _DETAILS.split(text)[0].rpartition(": ")[2].strip()


@functools.cache
def silence_tensorstore_shutdown() -> None:
    """From now on, keep from the terminal what comes after the error that Orbax raises.

    It closes its event loop at the first array that cannot be read or written. TensorStore's
    threads still answer for the others, and the tasks that nobody waits for any more complain when
    they are collected: dozens of tracebacks, at any later time, of what is one failure.
    """
    show = sys.unraisablehook

    def show_others(late: Any) -> None:
        if not str(late.exc_value).startswith(_LATE):
            show(late)

    def is_other(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error is None or (_status(error) is None and not str(error).startswith(_LATE))

    sys.unraisablehook = show_others
    logging.getLogger("asyncio").addFilter(is_other)
    warnings.filterwarnings("ignore", _NEVER_AWAITED, RuntimeWarning)
