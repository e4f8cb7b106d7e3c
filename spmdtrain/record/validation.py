"""Safe reading of untrusted files, among them arrays in NumPy's formats."""

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import re
import stat
import zipfile
from collections.abc import Collection, Mapping, Sequence
from typing import IO, Any, TypeGuard, TypeVar, get_type_hints

import numpy as np
from etils import epath

from spmdtrain.errors import LARGEST_INTEGER, UserError, did_you_mean, foreign
from spmdtrain.record.storage import file_system, is_url

# -- Safe reading of untrusted files: only regular files, of bounded size, checked against a
# schema --
#
# All files that this package reads from the folder of a run are read here, because another user may
# have written them. The schema of a JSON file is a dataclass or a TypedDict, checked by typeguard;
# for `jsonschema` each type would have to be described a second time.

T = TypeVar("T")

LARGEST = 2**25  # bytes; a manifest has about 300 for each array
ORBAX_METADATA = "_METADATA"
"""File with the names of the arrays of an Orbax item."""
LARGEST_LOG = 2**31
_MAX_DEPTH = 32
_MOST_CONTAINERS = 10**6  # a list takes 80 bytes of memory for 3 in the file
_PIECE = 2**16  # bytes
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO)  # a cycle of links, a socket
_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class Malformed(UserError):
    """A file with invalid content. The message names the fault."""

    def __init__(self, message: str) -> None:
        super().__init__(foreign(message, 500))  # the message quotes the untrusted file


class OtherFields(Malformed):
    """Content with missing or unknown fields, perhaps written by another version."""

    def of_file(self, path: epath.Path) -> UserError:
        """Returns the error for a user, with the file that has these fields."""
        return UserError(f"{path}: {self} Another version of spmdtrain may have written it")


def read_bytes(
    path: epath.Path, most: int = LARGEST, start: int = 0, count: int | None = None
) -> bytes:
    """Returns the content of a regular file, or of an object at a URL.

    Symbolic links are followed. A FIFO, a device or a socket is refused without blocking.

    Args:
      most: The largest size in bytes.
      start: The first byte to return; the ones before it are not read.
      count: Bytes to return; by default the rest of the file.

    Raises:
      Malformed: If it is not a regular file, is larger, or is a symbolic link to itself.
      OSError: If it cannot be read. For URLs also other errors: see `storage.failures`.
    """
    if is_url(path):
        size = path.stat().length
        _check_size(path, size, most)
        content: bytes = b""
        if start == 0 and count is None:
            content = path.read_bytes()
        elif start < size:
            end = size if count is None else min(size, start + count)
            content = file_system(str(path)).cat_file(str(path), start=start, end=end)
        return content
    try:
        handle = os.open(path, _OPEN)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise Malformed(f"{path} is not a regular file: {error.strerror}") from None
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Malformed(f"{path} is not a regular file")
        _check_size(path, status.st_size, most)
        with os.fdopen(handle, "rb", closefd=False) as file:
            file.seek(start)
            rest = status.st_size - start
            return read_at_most(file, most if count is None else count, expected=rest)
    finally:
        os.close(handle)


def read_at_most(file: IO[bytes], most: int, *, expected: int) -> bytes:
    """Returns the rest of a file, up to `most` bytes.

    `file.read(most)` would allocate all of them at once. `expected` is the number of bytes of the
    rest when the file was opened; it may have changed since.
    """
    pieces, left = [], most
    while left and (piece := file.read(min(left, max(expected + 1, _PIECE)))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def check_regular_file(path: epath.Path) -> None:
    """Checks that a local path, or what its links lead to, is a regular file, without opening it.

    Raises `Malformed` if it is missing, not a regular file, or cannot be accessed.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise Malformed(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise Malformed(f"{path} is not a regular file")


def _check_size(path: epath.Path, size: int, most: int) -> None:
    if size > most:
        raise Malformed(f"{path} has {size:,} bytes: the limit is {most:,}")


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Returns a JSON object with integers of at most 64 bits and bounded nesting; bytes are UTF-8.

    Raises `Malformed` if the text is not such an object.
    """
    found = sum(text.count(b) if isinstance(text, str) else text.count(b.encode()) for b in "[{")
    if found > _MOST_CONTAINERS:
        raise Malformed(f"more than {_MOST_CONTAINERS:,} lists and objects")
    try:
        content = _DECODER.decode(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers too long
        raise Malformed(f"not JSON: {type(error).__name__}") from error
    if not isinstance(content, dict):
        raise Malformed("not a JSON object")
    layer: list[Any] = [content] if found > 1 else []
    for _ in range(_MAX_DEPTH):
        if not layer:
            break
        layer = [
            inner
            for value in layer
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list))
        ]
    if layer:
        raise Malformed(f"nested more than {_MAX_DEPTH} levels deep")
    return content


def parse_objects(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Returns the JSON objects of lines; `{}` for a line that `parse_object` refuses.

    Objects without nested ones are decoded together, which takes a third of the time. `lines` are
    UTF-8, without line feeds.
    """
    text = b",\n".join(lines)
    # Each line begins with its only brace, so a list of as many values has one for each line.
    if b"[" not in text and text[:1] == b"{" and text.count(b"\n{") + 1 == len(lines):
        with contextlib.suppress(ValueError, RecursionError):
            found: list[Any] = _DECODER.decode(f"[{text.decode()}]")
            if text.count(b"{") == len(lines) == len(found):
                return found
    return [_object_or_empty(line) for line in lines]


def _object_or_empty(line: bytes) -> dict[str, Any]:
    try:
        return parse_object(line)
    except Malformed:
        return {}


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a JSON value is a finite number, which excludes true and false."""
    return type(value) in (int, float) and math.isfinite(value)


def _integer(text: str) -> int:
    if abs(value := int(text)) >= LARGEST_INTEGER:
        raise ValueError
    return value


_ELSEWHERE = re.compile(r"[/\\]|[A-Za-z]:[/\\]|[A-Za-z][A-Za-z0-9+.-]*:/")
_DECODER = json.JSONDecoder(parse_int=_integer)  # `json.loads` makes one for each call


def check_array_names(item: epath.Path) -> None:
    """Checks that Orbax' metadata of a folder name arrays inside it, without opening the arrays.

    Orbax joins each name to the folder's path, and an absolute path or `..` would lead elsewhere.

    Raises:
      Malformed: If the metadata are not valid, or a name leads out of the folder.
      OSError: If they cannot be read.
    """
    entries: Any = parse_object(read_bytes(item / ORBAX_METADATA)).get("tree_metadata")
    check(entries, dict[str, dict[str, Any]], "tree_metadata")
    for entry in entries.values():
        keys = entry.get("key_metadata")
        check(keys, list[dict[str, Any]], "key_metadata")
        name = ".".join(str(key.get("key")) for key in keys)
        # Also the forms of other systems and libraries: C:\, file://, kvstore URLs.
        if _ELSEWHERE.match(name) or ".." in re.split(r"[/\\]", name) or "\0" in name:
            raise Malformed(f"it names an array by {name[:200]!r}, a path out of the checkpoint")


def check(value: Any, schema: Any, name: str) -> None:
    """Checks a JSON value against a type, such as a TypedDict, with all elements of collections.

    Raises `Malformed`, with `name` and the element, if the value has another type.
    """
    # Imported here, because a start without earlier files does not need it.
    from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

    try:
        check_type(value, schema, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
    except TypeCheckError as error:
        raise Malformed(f"{name}: {error}") from error


def check_fields(content: Mapping[str, Any], known: Collection[str], prefix: str = "") -> None:
    """Checks that a JSON object has no unknown fields.

    Raises `OtherFields` with `prefix`, the unknown field, and the nearest known one.
    """
    for name in content:
        if name not in known:
            raise OtherFields(f"{prefix}{name[:60]} is unknown.{did_you_mean(name[:60], known)}")


def without_other_fields(content: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """Returns the fields of a JSON object that a TypedDict has: other versions may write more."""
    return {name: value for name, value in content.items() if name in schema.__annotations__}


def build(schema: type[T], content: Mapping[str, Any], name: str = "") -> T:
    """Returns a dataclass of a JSON object, after a check of each field by its annotation.

    The object has all fields, also those with a default. Fields that are dataclasses are built
    recursively. `name` is the name of the object in messages.

    Raises:
      OtherFields: If a field is missing or unknown.
      Malformed: If a field has another type; names the field.
    """
    assert dataclasses.is_dataclass(schema)
    check(content, Mapping[str, Any], name or "content")
    types = get_type_hints(schema)
    prefix = f"{name}." if name else ""
    check_fields(content, types, prefix)
    for field in types:
        if field not in content:
            raise OtherFields(f"{prefix}{field} is missing")
    values: dict[str, Any] = {}
    for field, value in content.items():
        if dataclasses.is_dataclass(types[field]):
            value = build(types[field], value, f"{prefix}{field}")
        else:
            check(value, types[field], f"{prefix}{field}")
        values[field] = value
    return schema(**values)


# -- Files of arrays in NumPy's formats ------------------------------------------------------------

_NPY_START = 8  # bytes of the magic string and the version
_LONGEST_NPY_HEADER = 10_000  # bytes, which is NumPy's limit too


def write_npz(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays like `numpy.savez`, which cannot name an array `file` or `allow_pickle`."""
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array))


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Reads the header of an array in NumPy's format; anyone may have written the file.

    Returns the shape, whether the array is in Fortran order, its dtype, and the position of its
    first value. Raises `ValueError` if the header is not valid.
    """
    start = file.read(_NPY_START)
    version = np.lib.format.read_magic(io.BytesIO(start))
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version[0]}.{version[1]} is not known")
    width = 2 * version[0]  # bytes of the length that follows
    length = int.from_bytes(field := file.read(width), "little")
    if length > _LONGEST_NPY_HEADER:
        raise ValueError(f"a header of {length:,} bytes")
    header = io.BytesIO(field + file.read(length))
    try:
        if version == (1, 0):
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(header)
        else:
            shape, fortran, dtype = np.lib.format.read_array_header_2_0(header)
    except Exception as error:  # NumPy parses it as Python: TokenError, RecursionError, TypeError
        text = " ".join(str(error).split())[:200]
        raise ValueError(f"a header that is not valid: {type(error).__name__}: {text}") from error
    if not all(type(size) is int and 0 <= size < LARGEST_INTEGER for size in shape):
        raise ValueError(f"the shape {str(shape)[:200]}")
    return shape, fortran, dtype, _NPY_START + width + length
