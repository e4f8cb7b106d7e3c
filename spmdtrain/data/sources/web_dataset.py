"""Samples of WebDataset's tar files by index, without extraction."""

import io
import itertools
import json
import operator
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.data.examples import array_or_value, cause_of, decoded
from spmdtrain.data.image_decoding import (
    SUFFIXES,
    Decoding,
    UndecodableError,
    check_file_size,
    decode,
)
from spmdtrain.data.images import checked_size
from spmdtrain.data.sources.files import Files, listed
from spmdtrain.data.sources.indexed_parts import Corrupted, IndexedParts
from spmdtrain.errors import BadRecordError, StorageError, UserError, did_you_mean, printable
from spmdtrain.record.validation import read_npy_header

# -- The samples of a tar: consecutive files whose names differ only in their extension ------------

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__($|/)")  # names of files that belong to no sample
_BLOCK = tarfile.BLOCKSIZE
_LONGEST_HEADER = 2**24  # bytes of the blocks that describe a file: names, attributes

_OTHER_FORMATS = {b"BZh": ("bzip2", "bunzip2"), b"\xfd7zXZ": ("xz", "unxz")}
"""Name of a compression that is not read, and the command that decompresses, by first bytes."""


def _key_and_extension(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """Returns the sample of a file and its extension, in lower case; None if it has no sample."""
    if not (member.isreg() or member.issym() or member.islnk()) or _META.match(member.name):
        return None
    match = _NAME.fullmatch(member.name)
    return (match[1], match[2].lower()) if match else None


def _opened(content: Any) -> tarfile.TarFile:
    return tarfile.TarFile(fileobj=content, encoding="utf-8", errors="surrogateescape")


class _Incomplete(Exception):
    """The next bytes are in a piece that the scanner has not got yet."""


class _Window:
    """The part of a file that a scanner has got, as a file for `tarfile`."""

    def __init__(self) -> None:
        self.content = b""
        self.begin = 0  # of `content` in the file
        self._position = 0

    @property
    def end(self) -> int:
        return self.begin + len(self.content)

    def move(self, begin: int, piece: bytes) -> None:
        """Adds the next bytes, and drops those before a position."""
        dropped = min(max(begin - self.begin, 0), len(self.content))
        self.content, self.begin = self.content[dropped:] + piece, self.begin + dropped

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, size: int) -> bytes:
        if self._position + size > self.end:
            raise _Incomplete
        start = self._position - self.begin
        self._position += size
        return self.content[start : start + size]


class SampleScanner:
    """A scanner for the samples of a tar; `tarfile` reads the headers."""

    def __init__(self) -> None:
        self._window = _Window()
        self._tar: tarfile.TarFile | None = None
        self._name = ""  # of the last file
        self._key: str | None = None
        self._end: int | None = None  # where the tar ends

    def feed(self, piece: bytes) -> np.ndarray:
        if not self._window.end:
            for magic, (name, command) in _OTHER_FORMATS.items():
                if piece.startswith(magic):
                    raise Corrupted(f"it is compressed by {name}: decompress it by {command}")
        self._window.move(max(self._next - 1, 0), piece)  # `tarfile` reads the byte before, too
        starts = []
        while (member := self._member()) is not None:
            found = _key_and_extension(member)
            if found is not None and found[0] != self._key:
                self._key = found[0]
                starts.append(member.offset)
        return np.array(starts, np.int64)

    def finish(self) -> np.ndarray:
        size = self._window.end
        if not size:
            raise Corrupted("it is empty, and a tar ends with 1,024 zero bytes")
        if self._end is None:
            if self._next > size:
                raise Corrupted(f"it ends within {self._name}")
            if self._next < size:
                raise Corrupted(f"it ends within the header at byte {self._next:,}")
            raise Corrupted(
                f"it ends after {self._name}, without the 1,024 zero bytes that end a tar, so "
                "files may be missing (if none is, `truncate -s +1024 FILE` adds them)"
            )
        return np.zeros(0, np.int64)

    @property
    def _next(self) -> int:
        """The position of the next header in the file."""
        return 0 if self._tar is None else self._tar.offset

    def _member(self) -> tarfile.TarInfo | None:
        """Returns the next file; None if the next piece is needed, or the tar has ended."""
        if self._end is not None:
            self._check_rest()
            return None
        try:
            if self._tar is None:
                self._window.seek(0)
                self._tar = _opened(self._window)
            member = self._tar.next()
        except _Incomplete:
            if self._window.end - self._next > _LONGEST_HEADER:
                raise Corrupted(f"the header at byte {self._next:,} has over 16 MiB") from None
            return None
        except (tarfile.TarError, ValueError) as error:  # the latter for numbers in a pax header
            raise self._no_header(error) from error
        self._tar.members = []  # type: ignore[attr-defined]  # which would grow with the file
        if member is not None:
            self._name = printable(member.name)
            return member
        block = self._window.content[self._next - self._window.begin :][:_BLOCK]
        if block.strip(b"\0"):  # `tarfile` takes any bytes that are no header for the end
            raise self._no_header("no valid checksum")
        self._end = self._next
        self._check_rest()
        return None

    def _no_header(self, why: Exception | str) -> Corrupted:
        return Corrupted(f"the header at byte {self._next:,} is not one of a tar: {why}")

    def _check_rest(self) -> None:
        """Raises `Corrupted` unless only zero bytes follow the end of the tar."""
        assert self._end is not None
        if self._window.content[max(self._end - self._window.begin, 0) :].strip(b"\0"):
            raise Corrupted(
                f"other content follows the end of the tar at byte {self._end:,}, as after "
                "`cat a.tar b.tar` (`tar -A -f a.tar b.tar` joins them)"
            )
        self._window.move(self._window.end, b"")


# -- The values of a file, by its extension --------------------------------------------------------


@dataclass(frozen=True)
class SampleField:
    """A file of a WebDataset sample as a field of the example.

    Attributes:
      extension: The extension, from the first dot of the file's name on: `jpg`, `seg.png`. Of
        several, `jpg;png`, the first that the sample has. `__key__` is the sample's name.
      size: The size of an image in pixels: one number for both sides, or (height, width).
      decode: Bytes of the file -> value, in place of the decoding by extension; `bytes` keeps them.
      default: The value of samples without the file. By default these are an error.
    """

    extension: str
    size: int | tuple[int, int] | None = None
    decode: Callable[[bytes], Any] | None = None
    default: Any = None

    @property
    def extensions(self) -> Sequence[str]:
        """The extensions, in lower case."""
        return [each.strip().lower() for each in self.extension.split(";")]


_KEY = "__key__"
_IMAGE = "image"


def _number(content: bytes) -> np.int64:
    return np.int64(int(content))


def _json(content: bytes) -> Any:
    """Returns a value of JSON; lists of numbers are arrays, also in an object."""
    value = json.loads(content)
    if isinstance(value, dict):
        return {name: array_or_value(each) for name, each in value.items()}
    return array_or_value(value)


def _array(content: bytes) -> np.ndarray:
    """Returns the array of a `.npy` file. Objects are not unpickled."""
    shape, fortran, dtype, offset = read_npy_header(io.BytesIO(content))
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which are not unpickled")
    values = np.frombuffer(content, dtype, offset=offset)
    return values.reshape(shape, order="F" if fortran else "C")


_DECODERS: Mapping[str, Any] = {
    **dict.fromkeys((suffix.removeprefix(".") for suffix in SUFFIXES), _IMAGE),
    **dict.fromkeys(("cls", "cls2", "id", "index", "inx"), _number),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), _json),
    "npy": _array,
}
"""Bytes of a file -> value, by the last part of its extension; others stay bytes."""


def _decoder(extension: str) -> Any:
    return _DECODERS.get(extension.rpartition(".")[2], bytes)


class WebDatasetSource(IndexedParts):
    """The samples of WebDataset's tar files as examples, by index and without extraction.

    A sample is consecutive files whose names are the same up to the first dot. One scan finds where
    they begin; the positions are cached as by `TextSource`. Files compressed by gzip or zstd are
    copied to the cache, decompressed.

    Args:
      files: A file, a folder, a pattern, or a list of these; also with braces, such as
        `shard-{000000..000009}.tar`.
      fields: The fields of an example by name: a `SampleField`, or the extension of its file. Files
        are decoded by extension: images, `cls`, `txt`, `json`, `npy`; others are bytes. Without it,
        a sample is a dictionary of the bytes of all its files by extension, and `__key__`.
      decode: The dictionary of the fields -> example. By default the dictionary, whose values must
        be numbers and arrays then.
      cache_dir: The local folder for positions and copies. The default is `data` in the user's
        cache folder.

    Raises:
      UserError: If there are no such files, one is not a tar or is truncated, there is no sample,
        an argument is wrong, or Pillow is missing.
      StorageError: If a file cannot be read, or the folder cannot be written.
    """

    CONTENT = "samples"

    def __init__(
        self,
        files: Files,
        fields: Mapping[str, str | SampleField] | None = None,
        decode: Callable[[Any], Any] | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if decode is not None and not callable(decode):
            raise UserError(f"decode is {decode!r}: it must be a function of a sample")
        self._fields = None if fields is None else _checked(fields)
        self._images = {
            name: Decoding(checked_size(field.size))
            for name, field in (self._fields or {}).items()
            if field.size is not None
        }
        self._function = decode
        given = [path for each in listed(files) for path in _expanded(each)]
        super().__init__(given, (".tar",), "tar files", SampleScanner, "webdataset", cache_dir)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns several examples by their numbers.

        Raises:
          BadRecordError: If a sample lacks a file, has two for one field, or cannot be decoded.
          UserError: If a tar has changed.
          StorageError: If a tar cannot be read.
          IndexError: If an index is out of range.
        """
        parts = zip(self._parts(indices), indices, strict=True)
        return [self._example(content, index) for (content, _), index in parts]

    def _example(self, content: bytes, index: int) -> Any:
        key = ""
        try:
            with _opened(io.BytesIO(content)) as tar:
                key, members = _members(tar)
                example = self._values(tar, key, members)
        except (_Malformed, tarfile.TarError) as error:
            raise BadRecordError(f"{self._named(index, key)}: {error}") from error
        return decoded(self._function, example, lambda: self._named(index, key))

    def _named(self, index: int, key: str) -> str:
        return f"{self.describe(index)}{f', sample {printable(key)!r}' if key else ''}"

    def _values(
        self, tar: tarfile.TarFile, key: str, members: Mapping[str, tarfile.TarInfo]
    ) -> dict[str, Any]:
        """Returns the fields of a sample."""
        if self._fields is None:
            return {_KEY: key} | {name: _read(tar, each) for name, each in members.items()}
        example = {}
        for name, field in self._fields.items():
            chosen = next((x for x in field.extensions if x in members or x == _KEY), None)
            if chosen == _KEY:
                example[name] = key
            elif chosen is not None:
                content = _read(tar, members[chosen])
                example[name] = self._value(name, field, chosen, content)
            elif field.default is not None:
                example[name] = field.default
            else:
                (wanted, *_) = field.extensions
                raise _Malformed(
                    f"there is no file {printable(field.extension)!r} for {name!r}."
                    f"{did_you_mean(wanted, members)}"
                )
        return example

    def _value(self, name: str, field: SampleField, extension: str, content: bytes) -> Any:
        decoder = field.decode or _decoder(extension)
        try:
            if decoder is not _IMAGE:
                return decoder(content)
            check_file_size(len(content))
            return decode(content, self._images[name])
        except (UserError, StorageError, MemoryError):
            raise
        except UndecodableError as error:
            raise _Malformed(f"{extension!r} is a broken image: {printable(error)}") from error
        except Exception as error:
            raise _Malformed(
                f"{extension!r} ({len(content):,} bytes) cannot be decoded: {cause_of(error)}"
            ) from error


class _Malformed(Exception):
    """A sample that is not what the fields say."""


def _members(tar: tarfile.TarFile) -> tuple[str, dict[str, tarfile.TarInfo]]:
    """Returns the key of a sample, and its files by extension."""
    key, members = "", dict[str, tarfile.TarInfo]()
    for member in tar:
        if (found := _key_and_extension(member)) is None:
            continue
        key, extension = found
        if extension in members:
            names = f"{printable(members[extension].name)} and {printable(member.name)}"
            raise _Malformed(f"two files have the extension {printable(extension)!r}: {names}")
        members[extension] = member
    return key, members


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Returns the content of a file."""
    if member.issym() or member.islnk():
        how = "tar's option h" if member.issym() else "tar's option hard-dereference"
        raise _Malformed(
            f"{printable(member.name)} is a link to {printable(member.linkname)}, without content: "
            f"{how} writes the file itself"
        )
    if member.issparse():  # a few bytes could declare any size
        raise _Malformed(
            f"{printable(member.name)} is a sparse file: write the tar without tar's option S"
        )
    content: Any = tar.extractfile(member)
    found: bytes = content.read()
    return found


# -- arguments -------------------------------------------------------------------------------------

_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")


def _expanded(path: Any) -> Iterator[Any]:
    """Yields the paths that braces stand for, as in Bash: `{000..009}`, `{a,b}`."""
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    match = _BRACES.search(text) if isinstance(text, str) and not os.path.lexists(text) else None
    if text is None or match is None:
        yield path
        return
    first, last, words = match.groups()
    values = (words or "").split(",")
    if words is None:
        if int(first) > int(last):
            raise UserError(f"{printable(text)}: {match[0]} counts down: write the lower first")
        padded = any(x.startswith("0") and len(x) > 1 for x in (first, last))
        width = max(len(first), len(last)) if padded else 0
        values = [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
    yield from itertools.chain.from_iterable(
        _expanded(f"{text[: match.start()]}{value}{text[match.end() :]}") for value in values
    )


def _checked(fields: Any) -> Mapping[str, SampleField]:
    """Returns the fields by name; raises `UserError` if the argument is wrong."""
    if not isinstance(fields, Mapping) or not fields:
        raise UserError(
            f"fields is {fields!r:.80}: it must be a dictionary such as "
            '{"image": SampleField("jpg", size=224), "label": "cls"}'
        )
    checked = {}
    for name, given in fields.items():
        field = SampleField(given) if isinstance(given, str) else given
        if not isinstance(field, SampleField) or not isinstance(field.extension, str):
            raise UserError(f"fields: {name!r} is {given!r:.80}: it must be an extension, as 'cls'")
        if wrong := [x for x in field.extensions if not x or x.startswith(".") or "/" in x]:
            raise UserError(
                f"fields: {name!r} has the extension {wrong[0]!r}: write it without the dot, as "
                "'jpg', and several as 'jpg;png'"
            )
        if field.decode is not None and not callable(field.decode):
            raise UserError(f"fields: {name!r} has decode={field.decode!r}: it must be a function")
        images = [x for x in field.extensions if _decoder(x) is _IMAGE and field.decode is None]
        if images and field.size is None:
            raise UserError(
                f"fields: {name!r} is an image, whose size is needed: "
                f"SampleField({field.extension!r}, size=224); decode=bytes keeps its bytes"
            )
        if field.size is not None and not images:
            raise UserError(f"fields: {name!r} has a size, which is only for images that we decode")
        checked[str(name)] = field
    return checked
