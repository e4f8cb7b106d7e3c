"""Records of TFRecord files by index, and their `tf.train.Example`, without TensorFlow."""

import functools
import operator
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import crc32c
import numpy as np

from spmdtrain.data.examples import decoded
from spmdtrain.data.sources.files import Files
from spmdtrain.data.sources.indexed_parts import Corrupted, IndexedParts
from spmdtrain.errors import BadRecordError, UserError, did_you_mean, printable

# -- The records of a file: length, its checksum, content, its checksum ----------------------------

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_AROUND = _HEADER.size + _FOOTER.size


def _checksum(content: bytes | memoryview) -> int:
    """Returns the masked CRC-32C of a TFRecord file."""
    crc = crc32c.crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


class RecordScanner:
    """A scanner for the records of a file; it compares the checksums of their lengths."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a header
        self._position = 0  # of the next piece
        self._next = 0  # where the next record begins
        self._count = 0

    def feed(self, piece: bytes) -> np.ndarray:
        content, first = self._rest + piece, self._position - len(self._rest)
        self._position += len(piece)
        starts = []
        while self._next + _HEADER.size <= self._position:
            at = self._next - first
            length, crc = _HEADER.unpack_from(content, at)
            if crc != _checksum(content[at : at + 8]):
                raise Corrupted(
                    f"record {self._count:,}, at byte {self._next:,}, does not begin with a length "
                    "and its checksum"
                )
            starts.append(self._next)
            self._next, self._count = self._next + length + _AROUND, self._count + 1
        self._rest = content[self._next - first :] if self._next < self._position else b""
        return np.array(starts, np.int64)

    def finish(self) -> np.ndarray:
        if self._rest:
            raise Corrupted(f"it ends within the length of record {self._count:,}")
        if self._next != self._position:
            raise Corrupted(f"it ends within record {self._count - 1:,}")
        return np.zeros(0, np.int64)


# -- `tf.train.Example` and `tf.train.SequenceExample`, messages of protocol buffers ---------------


@dataclass(frozen=True)
class RecordFeature:
    """A feature of `tf.train.Example`.

    Attributes:
      dtype: `np.float32`, `np.int64` or `bytes`, as the file stores the values.
      shape: The dims of its values: () for one value, (None,) for as many as a record has. The
        first dim alone may be None.
      default: The value of records without the feature. By default these are an error.
    """

    dtype: Any
    shape: Sequence[int | None] = ()
    default: Any = None


_KINDS: Mapping[str, Any] = {"bytes_list": bytes, "float_list": np.float32, "int64_list": np.int64}
"""The dtypes of a feature's values, by the field of the message."""

# The fields of each message, in the order of their numbers. An `Example` is a `SequenceExample`
# that has a context alone, and a map is a list of entries.
_MESSAGES: Mapping[str, Sequence[tuple[str, str]]] = {
    "BytesList": [("value", "repeated bytes")],
    "FloatList": [("value", "repeated float")],
    "Int64List": [("value", "repeated int64")],
    "Feature": [
        ("bytes_list", "BytesList"),
        ("float_list", "FloatList"),
        ("int64_list", "Int64List"),
    ],
    "Features": [("feature", "repeated FeatureEntry")],
    "FeatureEntry": [("key", "string"), ("value", "Feature")],
    "FeatureList": [("feature", "repeated Feature")],
    "FeatureLists": [("feature_list", "repeated FeatureListEntry")],
    "FeatureListEntry": [("key", "string"), ("value", "FeatureList")],
    "SequenceExample": [("context", "Features"), ("feature_lists", "FeatureLists")],
}


@functools.cache
def example_class() -> Any:
    """Returns the class of `tf.train.SequenceExample`, which also reads `tf.train.Example`.

    It is in a pool of its own, because TensorFlow registers the same messages if it is imported.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds: Any = descriptor_pb2.FieldDescriptorProto
    file: Any = descriptor_pb2.FileDescriptorProto(name="example.proto", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields, 1):
            repeated, _, kind = kind.rpartition(" ")
            made = message.field.add(name=field, number=number)
            made.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if kind in _MESSAGES:
                made.type, made.type_name = kinds.TYPE_MESSAGE, kind
            else:
                made.type = getattr(kinds, f"TYPE_{kind.upper()}")
    pool: Any = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found: Any = pool.FindMessageTypeByName("SequenceExample")
    return message_factory.GetMessageClass(found)


class _Malformed(Exception):
    """A record that is not what the features say."""


def _values(feature: Any) -> tuple[Any, Any]:
    """Returns dtype and values, a list of bytes or an array; (None, []) if there are none."""
    for name, dtype in _KINDS.items():
        if feature.HasField(name):
            values = getattr(feature, name).value
            return dtype, list(values) if dtype is bytes else np.array(values, dtype)
    return None, []


def _shaped(name: str, feature: RecordFeature, dtype: Any, values: Any) -> Any:
    """Returns the values of a feature in its shape: an array, a list of bytes, or one value."""
    if dtype is None:  # a list without values has no kind
        dtype, values = feature.dtype, [] if feature.dtype is bytes else np.zeros(0, feature.dtype)
    if dtype is not feature.dtype:
        raise _Malformed(f"feature {name!r} has {_name(dtype)}, not {_name(feature.dtype)}")
    count, dims = len(values), list(feature.shape)
    inner = prod(dim for dim in dims if dim is not None)
    if dims[:1] == [None]:
        dims[0] = count // inner if inner else 0
    shape = tuple(dim for dim in dims if dim is not None)
    if prod(shape) != count:
        raise _Malformed(f"feature {name!r} has {count} values, and its shape is {feature.shape}")
    if dtype is bytes:
        return values[0] if shape == () else values
    array = np.reshape(values, shape)
    return array if shape else array[()]


def _name(dtype: Any) -> str:
    return "bytes" if dtype is bytes else np.dtype(dtype).name


class TFRecordSource(IndexedParts):
    """The records of TFRecord files as examples, by index.

    One scan finds where they begin; the positions are cached as by `TextSource`. Checksums are
    compared when a record is read. Files compressed by gzip are copied to the cache, decompressed.

    Args:
      files: A file, a folder, a pattern, or a list of these, such as `data/*.tfrecord`.
      features: The features of `tf.train.Example` to keep, by name: a `RecordFeature`, or the dtype
        of a single value. Without it (and without `sequences`), a record is its bytes.
      decode: (a dictionary of the features, or bytes) -> example. By default the dictionary, whose
        values must be numbers and arrays then.
      sequences: The lists of features of `tf.train.SequenceExample`, by name: the first dim of
        their arrays is that of the list. `features` are those of its context then.
      cache_dir: The local folder for positions and copies. The default is `data` in the user's
        cache folder.

    Raises:
      UserError: If there are no such files, one is not a TFRecord file or is truncated, there is no
        record, or an argument is wrong.
      StorageError: If a file cannot be read, or the folder cannot be written.
    """

    CONTENT = "records"

    def __init__(
        self,
        files: Files,
        features: Mapping[str, Any] | None = None,
        decode: Callable[[Any], Any] | None = None,
        *,
        sequences: Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if decode is not None and not callable(decode):
            raise UserError(f"decode is {decode!r}: it must be a function of a record")
        self._features = _checked("features", features)
        self._sequences = _checked("sequences", sequences)
        self._function = decode
        suffixes = (".tfrecord", ".tfrecords", ".tfrec")
        super().__init__(files, suffixes, "TFRecord files", RecordScanner, "tfrecord", cache_dir)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns several examples by their numbers.

        Raises:
          BadRecordError: If a record is corrupted, lacks a feature, or cannot be decoded.
          UserError: If a file has changed.
          StorageError: If a file cannot be read.
          IndexError: If an index is out of range.
        """
        parts = zip(self._parts(indices), indices, strict=True)
        return [self._example(content, index) for (content, _), index in parts]

    def _example(self, content: bytes, index: int) -> Any:
        record = memoryview(content)[_HEADER.size : -_FOOTER.size]
        if _FOOTER.unpack_from(content, len(content) - _FOOTER.size)[0] != _checksum(record):
            raise BadRecordError(f"{self.describe(index)}: corrupted: its checksum is another one")
        try:
            example = self._parsed(record)
        except _Malformed as error:
            raise BadRecordError(f"{self.describe(index)}: {error}") from error
        size = len(record)
        return decoded(self._function, example, lambda: f"{self.describe(index)} ({size} bytes)")

    def _parsed(self, record: memoryview) -> Any:
        """Returns the features of a record, or its bytes."""
        content = bytes(record)
        if self._features is None and self._sequences is None:
            return content
        from google.protobuf.message import DecodeError

        try:
            message = example_class().FromString(content)
        except DecodeError as error:
            raise _Malformed(f"not a tf.train.Example: {error}") from error
        found = {entry.key: entry.value for entry in message.context.feature}
        example = {
            name: self._feature(name, feature, found)
            for name, feature in (self._features or {}).items()
        }
        if self._sequences:
            lists = {entry.key: entry.value for entry in message.feature_lists.feature_list}
            for name, feature in self._sequences.items():
                example[name] = self._sequence(name, feature, lists)
        return example

    def _feature(self, name: str, feature: RecordFeature, found: Mapping[str, Any]) -> Any:
        dtype, values = _values(found[name]) if name in found else (None, [])
        if name not in found or (dtype is None and feature.default is not None):
            if feature.default is None:
                raise _Malformed(_lacking("feature", name, found))
            return feature.default
        return _shaped(name, feature, dtype, values)

    def _sequence(self, name: str, feature: RecordFeature, found: Mapping[str, Any]) -> Any:
        if name not in found:
            raise _Malformed(_lacking("list of features", name, found))
        steps = [_shaped(name, feature, *_values(value)) for value in found[name].feature]
        if feature.dtype is bytes:
            return steps
        shape = [dim for dim in feature.shape if dim is not None]  # of all, as was checked
        return np.array(steps, feature.dtype).reshape(len(steps), *shape)


def _lacking(what: str, name: str, found: Mapping[str, Any]) -> str:
    return f"there is no {what} {printable(name)!r}.{did_you_mean(name, found)}"


def _checked(argument: str, features: Any) -> Mapping[str, RecordFeature] | None:
    """Returns features by name; raises `UserError` if an argument of the source is wrong."""
    if features is None:
        return None
    if not isinstance(features, Mapping) or not features:
        raise UserError(
            f"{argument} is {features!r:.80}: it must be a dictionary such as "
            '{"label": np.int64, "image": bytes}'
        )
    checked = {}
    for name, given in features.items():
        feature = given if isinstance(given, RecordFeature) else RecordFeature(given)
        dtype = next((x for x in _KINDS.values() if _is_dtype(feature.dtype, x)), None)
        if dtype is None:
            raise UserError(
                f"{argument}: {name!r} has the dtype {feature.dtype!r}: a record stores "
                "np.float32, np.int64 and bytes (convert others in decode)"
            )
        shape = feature.shape
        is_shape = isinstance(shape, Sequence) and not isinstance(shape, str)
        dims = list(shape) if is_shape else [""]
        begin = 1 if dims[:1] == [None] and argument == "features" else 0
        if not all(isinstance(dim, int) and dim >= 0 for dim in dims[begin:]):
            raise UserError(
                f"{argument}: {name!r} has the shape {shape!r}: it must be numbers, of which the "
                "first may be None in features"
            )
        checked[str(name)] = RecordFeature(dtype, tuple(shape), feature.default)
    return checked


def _is_dtype(given: Any, dtype: Any) -> bool:
    if dtype is bytes or given is bytes:
        return given is dtype
    try:
        return np.dtype(given) == np.dtype(dtype)
    except TypeError:
        return False
