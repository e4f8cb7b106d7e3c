"""Reading files that someone else may have written: regular, of bounded size, and checked.

Whatever this package reads from a run's folder is read here. The schema of its content is a
dataclass or a TypedDict, which typeguard checks.
"""

import dataclasses
import errno
import json
import os
import stat
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from etils import epath
from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from spmdtrain.errors import UserError, foreign
from spmdtrain.files.storage import is_url

T = TypeVar("T")

LARGEST = 2**28  # bytes; a manifest has some 300 for each array
LARGEST_LOG = 2**31
_DEEPEST = 32
_LARGEST_INT = 2**63
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO)  # a cycle of links, a socket
_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


class Malformed(UserError):
    """A file is not what it should be. Says what is wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__(foreign(message, 500))  # it quotes the file


class OtherFields(Malformed):
    """A content has other fields than its schema: perhaps another version has written it."""


def read_bytes(path: epath.Path, most: int = LARGEST) -> bytes:
    """Returns the content of a regular file, or of an object at a URL.

    Symbolic links are followed. A FIFO, a device or a socket is refused without waiting.

    Args:
      path: The file.
      most: The largest size in bytes.

    Raises:
      Malformed: If it is not a regular file, is larger, or is a symbolic link to itself.
      OSError: If it cannot be read. URLs have other errors, too: see `storage.failures`.
    """
    if is_url(path):
        _check_size(path, path.stat().length, most)
        content: bytes = path.read_bytes()
        return content
    try:
        handle = os.open(path, _OPEN)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise Malformed(f"{path} is not a regular file: {error.strerror}") from None
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Malformed(f"{path} is not a regular file")
        _check_size(path, found.st_size, most)
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(handle)


def _check_size(path: epath.Path, size: int, most: int) -> None:
    if size > most:
        raise Malformed(f"{path} has {size:,} bytes, and {most:,} are the most that is read")


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Returns a JSON object; integers fit into 64 bits, and nesting is bounded.

    Raises:
      Malformed: If the text is anything else.
    """
    try:
        content = json.loads(text, parse_int=_integer)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, numbers too long
        raise Malformed(f"not JSON: {type(error).__name__}") from error
    if not isinstance(content, dict):
        raise Malformed("not a JSON object")
    layer: list[Any] = [content]
    for _ in range(_DEEPEST):
        layer = [
            inner
            for value in layer
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list))
        ]
    if layer:
        raise Malformed(f"nested more than {_DEEPEST} levels deep")
    return content


def _integer(text: str) -> int:
    if abs(value := int(text)) >= _LARGEST_INT:
        raise ValueError
    return value


def check(value: Any, schema: Any, name: str) -> None:
    """Checks a value of JSON against a type, all elements of collections included.

    Raises:
      Malformed: If it is not of that type. Says where.
    """
    try:
        check_type(value, schema, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
    except TypeCheckError as error:
        raise Malformed(f"{name}: {error}") from error


def build(schema: type[T], content: Mapping[str, Any], name: str = "") -> T:
    """Returns a dataclass of JSON, each field checked against its annotation.

    Fields that are dataclasses are built likewise.

    Raises:
      OtherFields: If a field is missing or unknown.
      Malformed: If one is of another type. Says which one.
    """
    assert dataclasses.is_dataclass(schema)
    check(content, Mapping[str, Any], name or "content")
    types, fields = get_type_hints(schema), dataclasses.fields(schema)
    required = {f.name for f in fields if f.default_factory is f.default is dataclasses.MISSING}
    prefix = f"{name}." if name else ""
    for unknown in [*content.keys() - types.keys(), *required - content.keys()]:
        state = "missing" if unknown in required else "unknown"
        raise OtherFields(f"{prefix}{unknown[:60]} is {state}")
    values: dict[str, Any] = {}
    for field, value in content.items():
        if dataclasses.is_dataclass(types[field]):
            value = build(types[field], value, f"{prefix}{field}")
        else:
            check(value, types[field], f"{prefix}{field}")
        values[field] = value
    return schema(**values)
