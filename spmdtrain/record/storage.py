"""Local paths and URLs of stored files, and short descriptions of storage errors."""

import contextlib
import functools
import hashlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etils import epath

from spmdtrain.errors import StorageError, UserError, without_credentials

# TensorStore raises ValueErrors that start with a status code and end with bracketed details.
_STATUS = re.compile(r"([A-Z][A-Z_]+): (.*)", re.DOTALL)
_DETAILS = re.compile(r" \[[a-z_]+=")
_SECONDARY_ERRORS = (
    "Event loop is closed",
    "Encountered error while reading array index",
    "coroutine '",
    "Cannot write to closing transport",  # of s3fs' library, whose request fails with another error
)
_NEVER_AWAITED = r"coroutine '\S+' was never awaited"
# Status codes that mean corrupted or missing content. The others mean that access has failed.
_CORRUPTION = {
    *("DATA_LOSS", "NOT_FOUND", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "OUT_OF_RANGE"),
    "UNIMPLEMENTED",  # an unknown codec
}


# -- paths --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ObjectStore:
    """An object store: what its library needs."""

    extra: str  # installs the library
    options: Mapping[str, Any]  # of fsspec's file system, as epath creates it


_STORES = {
    "gs": _ObjectStore("gcs", {"finalize_on_close": True}),
    "s3": _ObjectStore("s3", {}),
}
"""The object stores by the scheme of their URLs."""
BEFORE_USE: dict[str, Callable[[], None]] = {}
"""What other libraries need once, before the first use of a store, by its scheme."""
_SCHEMES = " or ".join(f"{scheme}://" for scheme in _STORES)


def source_digest(path: str) -> str:
    """Returns the SHA-256 of a local file, in hex; "" if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def is_url(path: str | epath.Path) -> bool:
    """Returns whether a path is in an object store, which has no folders, renames and appends."""
    return "://" in str(path)


class FixedFolder(str):
    """A folder or URL as the user has given it, and its absolute path at that time.

    It reads and prints as given. `folder_of` finds it also after the process has changed its
    working directory. `place` is the absolute path, by default in the current working directory.
    """

    place: str

    def __new__(cls, path: str, place: str | None = None) -> "FixedFolder":
        fixed = super().__new__(cls, path)
        if place is None and isinstance(path, FixedFolder):
            place = path.place
        elif place is None:
            place = path if is_url(path) or path.startswith("~") else os.path.abspath(path)
        fixed.place = place
        return fixed

    def __reduce__(self) -> tuple[type["FixedFolder"], tuple[str, str]]:
        return FixedFolder, (str(self), self.place)


def folder_of(path: str) -> epath.Path:
    """Returns the path of a local folder or URL, which need not exist; `~` is expanded.

    Raises:
      UserError: If the home folder is unknown, or the URL is not supported or not readable.
    """
    if not is_url(path):
        local = epath.Path(path.place if isinstance(path, FixedFolder) else path).expanduser()
        if str(local).startswith("~"):  # expanduser keeps `~` if the home folder is unknown
            raise UserError(
                f"{path}: the home folder is not known; set HOME, or write the path without ~"
            )
        return local
    _store(path, "the folder of a run must be a local path or a {} URL")
    file_system(path)
    folder = epath.Path(path)
    try:
        folder.exists()
    except Exception as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from error
    return folder


def file_system(url: str) -> Any:
    """Returns fsspec's file system of a URL, which does not cache listings.

    Raises:
      UserError: If the scheme is unknown, the library is missing, or access fails.
    """
    store = _store(url, "URLs of data must be {} URLs")
    scheme = scheme_of(url)
    # Otherwise epath uses TensorFlow, if it is installed, which does not have every scheme.
    os.environ.setdefault("EPATH_USE_TF", "false")
    if (prepare := BEFORE_USE.pop(scheme, None)) is not None:
        prepare()
    try:
        import fsspec
        from fsspec.config import conf

        # Cached listings would hide files that TensorStore and other processes write.
        conf.setdefault(scheme, {})["use_listings_cache"] = False
        return fsspec.filesystem(scheme, **store.options)
    except ImportError as error:
        raise UserError(f"{url}: {error} (pip install 'spmdtrain[{store.extra}]')") from error
    except Exception as error:
        raise UserError(f"{url} cannot be read: {one_line(error)}") from error


def scheme_of(url: str) -> str:
    """Returns `gs` for a `gs://` URL."""
    return url.partition("://")[0]


def _store(url: str, rule: str) -> _ObjectStore:
    """Returns the object store of a URL.

    Raises:
      UserError: With the rule if there is none; if the URL has credentials, which would be stored
        with the configuration of the run.
    """
    scheme, shown = scheme_of(url), without_credentials(url)
    if (store := _STORES.get(scheme)) is None:
        raise UserError(f"{shown}: {rule.format(_SCHEMES)}, not {scheme}://")
    if shown != url:
        raise UserError(
            f"{shown}: a URL must hold no credentials, because it is stored with the run: the "
            f"library of {scheme}:// reads them from its environment variables and files"
        )
    return store


def size_and_version(status: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the size of an object in bytes, and a number that changes with its content.

    It is the generation of an object of Google, and a digest of the ETag of one of S3.

    Args:
      status: The description of the object by fsspec's file system.
    """
    version = int(status.get("generation") or 0)
    if etag := status.get("ETag"):
        version = int.from_bytes(hashlib.blake2b(etag.encode(), digest_size=7).digest())
    return int(status["size"] or 0), version


def absolute(path: epath.Path) -> epath.Path:
    """Returns an absolute path for Orbax; epath's `resolve` treats a URL as a relative path."""
    return path if is_url(path) else path.resolve()


def rename_folder(folder: epath.Path, target: epath.Path) -> None:
    """Renames a folder. In a bucket its objects are renamed one by one: s3fs can rename no folder.

    Args:
      target: A path in the same file system or bucket, at which there is nothing.
    """
    if not is_url(folder):
        folder.rename(target)
        return
    store, scheme = file_system(str(folder)), scheme_of(str(folder))
    for name in store.find(str(folder)):
        store.mv(name, f"{target}{f'{scheme}://{name}'.removeprefix(str(folder))}")


def size_and_time(path: epath.Path) -> tuple[int, int]:
    """Returns the size of a file in bytes, and its time of modification in seconds.

    For local files it does not use epath's `stat`, which fails if the owner of the file has no
    entry in /etc/passwd.
    """
    if is_url(path):
        status = path.stat()
        return status.length, status.mtime
    local = os.stat(path)
    return local.st_size, int(local.st_mtime)


# -- errors -------------------------------------------------------------------------------------


def failures(path: str | epath.Path) -> type[Exception]:
    """Returns the base class of the errors of accessing a path.

    It is `OSError` for a local path, and `Exception` for a URL, because the libraries of URLs raise
    errors of their own classes.
    """
    return Exception if is_url(path) else OSError


def one_line(error: Exception) -> str:
    """Returns the message of an error in one line."""
    if isinstance(error, FileNotFoundError) and error.errno is None:  # gcsfs gives only an address
        return "there is no such bucket"
    text = without_credentials(" ".join(str(error).split())) or type(error).__name__
    if type(error).__name__ == "NoCredentialsError":  # of botocore
        text += ": set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return text


def storage_reason(error: BaseException) -> str | None:
    """Returns a short reason why storage failed; None if the error has another cause."""
    for cause in _causes(error):
        if isinstance(cause, OSError):
            where = f": {cause.filename}" if cause.filename else ""
            return f"{cause.strerror}{where}" if cause.strerror else in_short(cause)
        if status := _status(cause):
            return _innermost(status[1])
    return None


def why_failed(error: Exception, path: str | epath.Path) -> str | None:
    """Returns a short reason why storage failed at a path; None if the error has another cause.

    It is never None for a URL, because the libraries of URLs raise errors of their own classes.
    """
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


def is_corruption(error: BaseException) -> bool:
    """Returns whether an error of reading means corrupted or missing content, not failed access."""
    for cause in _causes(error):
        if isinstance(cause, OSError):
            return isinstance(cause, (FileNotFoundError, NotADirectoryError, IsADirectoryError))
        if status := _status(cause):
            return status[0] in _CORRUPTION
    return isinstance(error, _DECODING_ERRORS)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            error = error.__cause__ or error.__context__


def _status(error: BaseException) -> tuple[str, str] | None:
    """Returns the status code and the message of a TensorStore error; None for other errors."""
    match = _STATUS.match(str(error)) if isinstance(error, ValueError) else None
    return (match[1], match[2]) if match else None


def in_short(error: BaseException) -> str:
    """Returns an error in one line of at most 200 characters.

    An error of TensorStore is reduced to the name of the file and the problem.
    """
    if not (status := _status(error)):
        kind = "" if isinstance(error, OSError) and str(error) else f"{type(error).__name__}: "
        text = f"{kind}{error}".split("\n")[0].removesuffix(": ")
        return without_credentials(text)[:200]
    text = _DETAILS.split(status[1])[0]
    *_, file = ["", *re.findall(r'local file "[^"]*/([^"/]+)"', text)]
    problem = text.rpartition('": ')[2] or text
    return (f"{file}: {problem}" if file else problem)[:200]


def _innermost(text: str) -> str:
    """Returns `No space left` of `Error writing "a" in "b": Failed: No space left [...='28']`."""
    return _DETAILS.split(text)[0].rpartition(": ")[2].strip()


@contextlib.contextmanager
def storage_errors(folder: epath.Path) -> Iterator[None]:
    """Raises errors of the storage, but not corrupted content, as `StorageError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_corruption(error) or (reason := why_failed(error, folder)) is None:
            raise
        raise StorageError(f"{folder} cannot be read: {reason}") from error


@functools.cache
def silence_tensorstore_shutdown() -> None:
    """Suppresses the messages that follow an error of Orbax on the terminal, from now on.

    Orbax closes its event loop at the first array that cannot be read or written. Later
    TensorStore's threads report the other arrays, and abandoned tasks report errors when they are
    garbage-collected: dozens of tracebacks, at any time, for a single failure.
    """
    show = sys.unraisablehook

    def show_others(unraisable: Any) -> None:
        if not str(unraisable.exc_value).startswith(_SECONDARY_ERRORS):
            show(unraisable)

    def is_other(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error is None or (
            _status(error) is None and not str(error).startswith(_SECONDARY_ERRORS)
        )

    sys.unraisablehook = show_others
    logging.getLogger("asyncio").addFilter(is_other)
    warnings.filterwarnings("ignore", _NEVER_AWAITED, RuntimeWarning)
