"""Media that a run can log: images, texts, histograms, tables and figures.

Their arrays may be NumPy or JAX arrays, and they are pytrees, so that a jitted function can return
them. `check` reads only shapes and dtypes. `detach` copies what may change later, and `on_host`
fetches the arrays and brings them to the form that trackers receive.
"""

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.errors import UserError
from spmdtrain.trackers.media_arrays import (
    check_numbers,
    detached_array,
    plain_cell,
    shape_and_dtype,
)

MAX_IMAGES = 64
MAX_PIXELS = 2**24
MAX_CHARACTERS = 10**6
MAX_VALUES = 10**7
MAX_BINS = 512
MAX_ROWS = 10_000
MAX_COLUMNS = 100
MAX_FIGURE_BYTES = 2**24
_PNG = b"\x89PNG\r\n\x1a\n"
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, eq=False)
class Image:
    """One or several images.

    Args:
      array: (H, W), (H, W, C), (N, H, W) or (N, H, W, C), with C = 1, 3 or 4. With three dims, the
        last one is C if it is 1, 3 or 4. uint8 from 0 to 255, bool, or floats from 0 to 1; other
        floats are clipped.
      captions: A text for each image, or none.
    """

    array: Any
    captions: Sequence[str] = ()

    kind = "image"

    def check(self) -> None:
        """Checks that it can be logged, by shapes and dtypes alone.

        Raises:
          UserError: If it cannot; names what is wrong.
        """
        shape, dtype = shape_and_dtype(self.array, "an Image takes an array")
        if not (dtype in (np.uint8, np.bool_) or jnp.issubdtype(dtype, jnp.floating)):
            raise UserError(
                f"an Image of dtype {dtype}: it must be uint8 (0 to 255), bool or floats (0 to 1)"
            )
        if not 2 <= len(shape) <= 4 or (len(shape) == 4 and shape[-1] not in _CHANNELS):
            raise UserError(
                f"an Image of shape {shape}: it must be (H, W), (H, W, C), (N, H, W) or "
                "(N, H, W, C), with 1, 3 or 4 channels C"
            )
        number, height, width, _ = _image_shape(shape)
        if 0 in shape:
            raise UserError(f"an Image of shape {shape} is empty")
        if number > MAX_IMAGES:
            raise UserError(
                f"an Image of {number} images: the limit is {MAX_IMAGES}; take some of them, for "
                f"example images[:{MAX_IMAGES}]"
            )
        if number * height * width > MAX_PIXELS:
            raise UserError(
                f"an Image of {number * height * width:,} pixels: the limit is {MAX_PIXELS:,}"
            )
        if isinstance(self.captions, str):
            raise UserError(
                f"captions of an Image is {self.captions!r}: it must be a list with a text for "
                "each image"
            )
        if self.captions and len(self.captions) != number:
            raise UserError(f"an Image of {number} images has {len(self.captions)} captions")

    def detach(self) -> "Image":
        """Returns a copy whose array nothing else changes."""
        return Image(detached_array(self.array), tuple(map(str, self.captions)))

    def on_host(self) -> "Image":
        """Returns it with a uint8 array (N, H, W, C)."""
        array = np.asarray(self.array)
        if array.dtype != np.uint8:
            scaled = np.nan_to_num(array.astype(np.float32)).clip(0, 1) * 255
            array = (scaled + 0.5).astype(np.uint8)
        return Image(array.reshape(_image_shape(array.shape)), self.captions)

    def grid(self) -> np.ndarray:
        """Returns the images of `on_host` side by side in rows: uint8 (H, W, C)."""
        number, height, width, channels = self.array.shape
        columns = int(np.ceil(np.sqrt(number)))
        rows = -(-number // columns)
        cells = np.zeros((rows * columns, height, width, channels), np.uint8)
        cells[:number] = self.array
        by_row = cells.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
        return by_row.reshape(rows * height, columns * width, channels)


@dataclass(frozen=True, eq=False)
class Text:
    """One or several texts.

    Args:
      value: A string or several; or tokens, an integer array (T,) or (N, T), with `decode`.
      decode: One row of tokens, a NumPy array (T,), -> the text. Called in another thread.
    """

    value: Any
    decode: Callable[[np.ndarray], str] | None = None

    kind = "text"

    def check(self) -> None:
        """Checks that it can be logged, by shapes and dtypes alone.

        Raises:
          UserError: If it cannot; names what is wrong.
        """
        if texts := _strings(self.value):
            if (size := sum(map(len, texts))) > MAX_CHARACTERS:
                raise UserError(f"a Text of {size:,} characters: the limit is {MAX_CHARACTERS:,}")
            return
        shape, dtype = shape_and_dtype(self.value, "a Text takes strings or an array of tokens")
        if not jnp.issubdtype(dtype, jnp.integer) or len(shape) not in (1, 2) or 0 in shape:
            raise UserError(
                f"a Text of an array {dtype}{list(shape)}: tokens must be integers of shape (T,) "
                "or (N, T), and not empty"
            )
        if self.decode is None:
            raise UserError("a Text of tokens needs decode: a function of a row that returns text")
        if (size := int(np.prod(shape))) > MAX_CHARACTERS:
            raise UserError(f"a Text of {size:,} tokens: the limit is {MAX_CHARACTERS:,}")

    def detach(self) -> "Text":
        """Returns a copy whose array nothing else changes."""
        return Text(_strings(self.value) or detached_array(self.value), self.decode)

    def on_host(self) -> "Text":
        """Returns it with a tuple of strings that have an encoding."""
        texts = _strings(self.value)
        if not texts:
            assert self.decode is not None
            rows = np.atleast_2d(np.asarray(self.value))
            texts = tuple(str(self.decode(row)) for row in rows)
        # A decoder may return halves of surrogate pairs, with which a tracker would fail.
        return Text(tuple(x.encode(errors="backslashreplace").decode() for x in texts))

    def joined(self) -> str:
        """Returns the texts of `on_host` as one, separated by empty lines."""
        return "\n\n".join(self.value)


@dataclass(frozen=True, eq=False)
class Histogram:
    """A histogram: of values, or already counted.

    Args:
      values: Numbers of any shape; those that are not finite are left out.
      bins: Number of bins.
      edges: (n + 1,), rising, in place of `values`.
      counts: (n,), the number of values between the edges.
    """

    values: Any = None
    bins: int = 64
    edges: Any = None
    counts: Any = None

    kind = "histogram"

    def check(self) -> None:
        """Checks that it can be logged, by shapes and dtypes alone.

        Raises:
          UserError: If it cannot; names what is wrong.
        """
        counted = self.edges is not None and self.counts is not None
        if (self.values is None) != counted or (self.edges is None) != (self.counts is None):
            raise UserError("a Histogram takes values, or edges and counts")
        if self.values is not None:
            shape, dtype = shape_and_dtype(self.values, "a Histogram takes an array of values")
            size = int(np.prod(shape))
            check_numbers(dtype, "a Histogram of values")
            if not 1 <= size <= MAX_VALUES:
                raise UserError(f"a Histogram of {size:,} values: it takes 1 to {MAX_VALUES:,}")
            if not 1 <= self.bins <= MAX_BINS:
                raise UserError(f"a Histogram of {self.bins} bins: it takes 1 to {MAX_BINS}")
            return
        (edges, _), (counts, dtype) = (
            shape_and_dtype(array, "a Histogram takes arrays of edges and counts")
            for array in (self.edges, self.counts)
        )
        check_numbers(dtype, "a Histogram of counts")
        if len(counts) != 1 or edges != (counts[0] + 1,) or not 1 <= counts[0] <= MAX_BINS:
            raise UserError(
                f"a Histogram with edges of shape {edges} and counts of shape {counts}: they must "
                f"be (n + 1,) and (n,), with n from 1 to {MAX_BINS}"
            )

    def detach(self) -> "Histogram":
        """Returns a copy whose arrays nothing else changes."""
        arrays = (detached_array(x) for x in (self.values, self.edges, self.counts))
        values, edges, counts = arrays
        return Histogram(values, self.bins, edges, counts)

    def on_host(self) -> "Histogram":
        """Returns it with float64 edges and integer counts.

        Raises:
          UserError: If the edges are not finite or do not rise, or a count is negative.
        """
        if self.values is None:
            edges, counts = np.asarray(self.edges, np.float64), np.asarray(self.counts)
            if not (np.isfinite(edges).all() and (np.diff(edges) > 0).all()):
                raise UserError(f"the edges of a Histogram must be finite and rise: {edges}")
            if not (counts >= 0).all():
                raise UserError(f"the counts of a Histogram must be 0 or more: {counts}")
        else:
            values = np.asarray(self.values).astype(np.float64).ravel()
            counts, edges = np.histogram(values[np.isfinite(values)], self.bins)
        return Histogram(edges=edges, counts=counts.astype(np.int64))

    @classmethod
    def of_integers(cls, counts: Mapping[int, int]) -> Self:
        """Returns the histogram of integers, with a bin for each from the least to the largest.

        Args:
          counts: The number of occurrences of each integer; at least one integer.
        """
        least, most = min(counts), max(counts)
        if most - least < MAX_BINS:
            return cls(
                edges=np.arange(least, most + 2) - 0.5,
                counts=np.array([counts.get(n, 0) for n in range(least, most + 1)]),
            )
        found, edges = np.histogram(list(counts), MAX_BINS, weights=list(counts.values()))
        return cls(edges=edges, counts=found.astype(np.int64))


@dataclass(frozen=True, eq=False)
class Table:
    """A table.

    Args:
      columns: The name of each column -> its values: an array (N,), or a list of numbers, strings
        and None.
    """

    columns: Mapping[str, Any]

    kind = "table"

    def check(self) -> None:
        """Checks that it can be logged, by shapes and dtypes alone.

        Raises:
          UserError: If it cannot; names what is wrong.
        """
        if not isinstance(self.columns, Mapping) or not self.columns:
            raise UserError('a Table takes columns by name: Table({"label": labels, ...})')
        if len(self.columns) > MAX_COLUMNS:
            raise UserError(f"a Table of {len(self.columns)} columns: the limit is {MAX_COLUMNS}")
        lengths = {}
        for name, column in self.columns.items():
            if isinstance(column, (list, tuple)):
                wrong = [x for x in column if not isinstance(x, _CELLS)]
                if wrong:
                    raise UserError(
                        f"column {name!r} of a Table holds a {type(wrong[0]).__name__}: cells are "
                        "numbers, strings or None"
                    )
                lengths[name] = len(column)
                continue
            what = f"column {name!r} of a Table takes an array or a list"
            shape, dtype = shape_and_dtype(column, what)
            if len(shape) != 1 or np.dtype(dtype).kind == "O":
                raise UserError(
                    f"column {name!r} of a Table is an array {dtype}{list(shape)}: it must be one "
                    "value for each row, of shape (N,)"
                )
            lengths[name] = shape[0]
        if len(set(lengths.values())) > 1:
            raise UserError(f"the columns of a Table have different lengths: {lengths}")
        number = next(iter(lengths.values()))
        if not 1 <= number <= MAX_ROWS:
            raise UserError(f"a Table of {number:,} rows: it takes 1 to {MAX_ROWS:,}")

    def detach(self) -> "Table":
        """Returns a copy whose arrays nothing else changes."""
        return Table(
            {
                name: tuple(x) if isinstance(x, (list, tuple)) else detached_array(x)
                for name, x in self.columns.items()
            }
        )

    def on_host(self) -> "Table":
        """Returns it with lists of Python numbers and strings."""
        columns = {
            name: column if isinstance(column, (list, tuple)) else np.asarray(column)
            for name, column in self.columns.items()
        }
        return Table({str(name): list(map(plain_cell, x)) for name, x in columns.items()})

    def rows(self) -> list[list[Any]]:
        """Returns the rows of `on_host`."""
        return [list(row) for row in zip(*self.columns.values(), strict=True)]


@dataclass(frozen=True, eq=False)
class Figure:
    """A figure.

    Args:
      content: A figure of matplotlib, which is drawn at once as PNG; or the content of a PNG or SVG
        file, as bytes or text.
    """

    content: Any

    kind = "figure"

    def check(self) -> None:
        """Checks that it can be logged, by shapes and dtypes alone.

        Raises:
          UserError: If it cannot; names what is wrong.
        """
        if hasattr(self.content, "savefig"):
            return
        if not isinstance(self.content, (bytes, str)):
            raise UserError(
                f"a Figure of a {type(self.content).__name__}: it takes a figure of matplotlib, or "
                "the content of a PNG or SVG file"
            )
        if len(self.content) > MAX_FIGURE_BYTES:
            raise UserError(
                f"a Figure of {len(self.content):,} bytes: the limit is {MAX_FIGURE_BYTES:,}"
            )
        content = _as_bytes(self.content)
        if not content.startswith(_PNG) and b"<svg" not in content[:4096]:
            raise UserError(f"a Figure begins with {content[:20]!r}: this is neither PNG nor SVG")

    def detach(self) -> "Figure":
        """Returns it drawn, because the user may change or close the figure afterwards."""
        if not hasattr(self.content, "savefig"):
            return Figure(_as_bytes(self.content))
        file = io.BytesIO()
        self.content.savefig(file, format="png", dpi=100, bbox_inches="tight")
        return Figure(file.getvalue())

    def on_host(self) -> "Figure":
        """Returns itself."""
        return self

    @property
    def format(self) -> Literal["png", "svg"]:
        """The format of a drawn figure."""
        return "png" if self.content.startswith(_PNG) else "svg"


Media: TypeAlias = Image | Text | Histogram | Table | Figure
_CELLS = (str, int, float, bool, type(None), np.generic)


def _strings(value: Any) -> tuple[str, ...]:
    """Returns the strings of a `Text`; none if it holds tokens."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (list, tuple)) and value and all(isinstance(x, str) for x in value):
        return tuple(value)
    return ()


def _as_bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _image_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Returns (N, H, W, C) of an array of images."""
    if len(shape) == 2:
        return (1, *shape, 1)
    if len(shape) == 3:
        return (1, *shape) if shape[-1] in _CHANNELS else (*shape, 1)
    number, height, width, channels = shape
    return number, height, width, channels


def _register(cls: type, arrays: Sequence[str]) -> None:
    """Makes a dataclass a pytree; strings among the values of `arrays` are static."""
    names = [field.name for field in dataclasses.fields(cls)]

    def flatten(media: Any) -> tuple[list[Any], tuple[Any, ...]]:
        children: list[Any] = []
        static: list[Any] = []
        for name in names:
            value = getattr(media, name)
            if isinstance(value, list):
                value = tuple(value)
            is_static = name not in arrays or bool(_strings(value)) or isinstance(value, bytes)
            children.append(None if is_static else value)
            static.append(value if is_static else None)
        return children, tuple(static)

    def unflatten(static: tuple[Any, ...], children: Sequence[Any]) -> Any:
        pairs = zip(children, static, strict=True)
        return cls(*(child if fixed is None else fixed for child, fixed in pairs))

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)


def _flatten_table(table: Table) -> tuple[list[Any], tuple[str, ...]]:
    # The order of the columns, which a dictionary would lose under `jit`, is static.
    return list(table.columns.values()), tuple(table.columns)


_register(Image, ["array"])
_register(Text, ["value"])
_register(Histogram, ["values", "edges", "counts"])
jax.tree_util.register_pytree_node(
    Table, _flatten_table, lambda names, values: Table(dict(zip(names, values, strict=True)))
)
