"""The interface of trackers, how they are found by name, and the media that a run can log."""

import dataclasses
import importlib.util
import io
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.errors import UserError, did_you_mean, foreign, import_extra
from spmdtrain.record.run_files import Status

# -- Media that a run can log: images, texts, histograms, tables and figures -----------------------
#
# Their arrays may be NumPy or JAX arrays, and they are pytrees, so that a jitted function can
# return them. `check` reads only shapes and dtypes. `detach` copies what may change later, and
# `on_host` fetches the arrays and brings them to the form that trackers receive.

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


# -- The interface of trackers ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that a tracker is about to record."""

    name: str
    """The name of the workdir; "run" without one."""
    workdir: str | None
    """The folder or URL of the run."""
    folder: Path | None
    """A local folder whose content is copied to the workdir: the workdir itself unless that is a
    URL. None without a workdir."""
    step: int
    """The step from which the run starts: 0, or the step of the checkpoint that it resumes."""
    earlier: str | None
    """What `Tracker.start` returned at an earlier start of this run; None at the first one."""
    config: Mapping[str, Any]
    """The resolved configuration, as JSON values."""


class Tracker:
    """Receives the metrics and media of a run. The base class of trackers.

    A tracker overrides the methods it needs; the others do nothing. All of them are called in one
    thread, which belongs to the tracker, in process 0. An exception ends the tracking, not the run.
    Tags are `SPLIT/NAME`, such as `train/loss`. The arrays of media are NumPy arrays.

    Attributes:
      name: Names the tracker in messages and in `trackers.json`. By default the name of the class.
      close_timeout: Seconds that the run waits at its end for pending calls and `close`.
      in_workdir: Whether it writes to the workdir. A run without one then leaves it out, and before
        each save waits until it has written what it got.
      imports: The module that `start` imports. A run that names the tracker ends at once if its
        library is not installed.
    """

    name: str = ""
    close_timeout: float = 60.0
    in_workdir: bool = False
    imports: str = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def before_start(self) -> None:
        """Prepares for `start`. Called before it in the thread of the run, which an error ends."""

    def start(self, run: RunInfo) -> str | None:
        """Begins to record a run, or continues to.

        Args:
          run: The run.

        Returns:
          An identifier by which a later start of this run finds what was recorded: letters, digits
          and `._-`. None if there is none.
        """
        return None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records the metrics of a step.

        Args:
          step: The step.
          values: Tag to value.
        """

    def image(self, step: int, tag: str, image: Image) -> None:
        """Records images.

        Args:
          step: The step.
          tag: The tag.
          image: Its array is uint8 (N, H, W, C), where C is 1, 3 or 4.
        """

    def text(self, step: int, tag: str, text: Text) -> None:
        """Records texts.

        Args:
          step: The step.
          tag: The tag.
          text: Its value is a tuple of strings.
        """

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        """Records a histogram.

        Args:
          step: The step.
          tag: The tag.
          histogram: It has `edges` (n + 1,) and `counts` (n,).
        """

    def table(self, step: int, tag: str, table: Table) -> None:
        """Records a table.

        Args:
          step: The step.
          tag: The tag.
          table: Its columns are lists of numbers and strings.
        """

    def figure(self, step: int, tag: str, figure: Figure) -> None:
        """Records a figure.

        Args:
          step: The step.
          tag: The tag.
          figure: Its content is PNG or SVG, as bytes.
        """

    def artifact(self, path: str, name: str) -> None:
        """Records a file.

        Args:
          path: The path of the file.
          name: The name under which to record it.
        """

    def rewind(self, step: int) -> None:
        """Prepares for steps after `step` that were recorded already and are recorded again.

        Args:
          step: The last step whose records are valid.
        """

    def flush(self) -> None:
        """Writes what is buffered; called when no call is pending."""

    def close(self, status: Status) -> None:
        """Ends the recording.

        Args:
          status: How the run ended.
        """


# -- Trackers by name: entry points of installed packages ------------------------------------------

GROUP = "spmdtrain.trackers"
"""The group of entry points that are trackers."""
SHIPPED: Mapping[str, str] = {
    "tensorboard": "spmdtrain.trackers.tensorboard:TensorBoardTracker",
    "wandb": "spmdtrain.trackers.services:WandbTracker",
    "mlflow": "spmdtrain.trackers.services:MlflowTracker",
    "trackio": "spmdtrain.trackers.services:TrackioTracker",
}
"""The entry points of this package. They are listed here because a checkout that is not installed
has none, and because to read those of all installed packages takes 10 to 100 ms."""


def find_tracker(name: str) -> EntryPoint:
    """Returns the entry point of a tracker; raises `UserError` if no installed package has it."""
    if name in SHIPPED:
        return EntryPoint(name, SHIPPED[name], GROUP)
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name in installed:
        return installed[name]
    names = [*SHIPPED, *sorted(installed.keys() - SHIPPED)]
    hint, listed = did_you_mean(str(name), names), f" There are: {', '.join(names)}."
    raise UserError(f"trackers is {name!r}.{hint if hint == listed else hint + listed}")


def make_tracker(name: str, *arguments: Any) -> Tracker:
    """Returns the tracker of an entry point, made with the arguments.

    Raises `UserError` if there is none, or if it or the library that it needs cannot be imported.
    """
    point = find_tracker(name)
    try:
        made = point.load()
    except (ImportError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise UserError(
            f"trackers has {name!r}, and {point.value} cannot be imported: {why}"
        ) from error
    if not (isinstance(made, type) and issubclass(made, Tracker)):
        raise UserError(
            f"trackers has {name!r}, and {point.value} is not a subclass of spmdtrain.Tracker"
        )
    library = made.imports.partition(".")[0]
    if library and importlib.util.find_spec(library) is None:
        extra = f": pip install 'spmdtrain[{name}]'" if name in SHIPPED else ""
        raise UserError(f"trackers has {name!r}, and {library} is not installed{extra}")
    tracker: Tracker = made(*arguments)
    tracker.name = name
    return tracker


# -- Arrays of media: their checks, and copies that can be fetched later ---------------------------


def shape_and_dtype(array: Any, expected: str) -> tuple[tuple[int, ...], Any]:
    """Returns shape and dtype of an array, which may be a list, or abstract.

    Raises `UserError` if it is not an array (the message begins with `expected`), or if this
    process does not have all of it.
    """
    if isinstance(array, (list, tuple)):
        array = np.asarray(array)
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise UserError(f"{expected}, and not a {type(array).__name__}")
    if (
        isinstance(array, jax.Array)
        and not isinstance(array, jax.core.Tracer)
        and not (array.is_fully_addressable or array.is_fully_replicated)
    ):
        raise UserError(
            f"an array of shape {array.shape} is split over processes: gather it first, for "
            "example by a jitted function whose result is replicated"
        )
    return tuple(array.shape), array.dtype


def check_numbers(dtype: Any, what: str) -> None:
    """Raises `UserError` unless a dtype holds real numbers; `what` begins the message."""
    kinds = (jnp.integer, jnp.floating, jnp.bool_)
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise UserError(f"{what} of dtype {dtype}: it takes real numbers")


def detached_array(array: Any) -> Any:
    """Returns a copy of an array; the copy of a JAX array begins to be copied to the host."""
    if array is None:
        return None
    if not isinstance(array, jax.Array):
        return np.array(array)
    if array.is_fully_replicated:
        array = array.addressable_data(0)  # so that this process alone can copy it
    copy = jnp.copy(array)  # the array itself may be donated to the next step
    copy.copy_to_host_async()
    return copy


def plain_cell(value: Any) -> str | float | None:
    """Returns a cell of a table as a JSON value; dates and very large integers become text."""
    # Readers of JSON refuse or round integers of more than 64 bits.
    plain = value.item() if isinstance(value, np.generic) else value
    is_time = isinstance(value, np.datetime64 | np.timedelta64)  # with ns, an integer
    is_large = isinstance(plain, int) and abs(plain) >= 2**63
    is_plain = isinstance(plain, str | int | float | None) and not (is_time or is_large)
    return plain if is_plain else str(value)


# -- Media that are being copied to the host, shared by the threads of several trackers ------------


class PendingMedia:
    """Media whose arrays are fetched once, in the thread that needs them first.

    The media have been checked; `what` names them in messages.
    """

    def __init__(self, media: Media, what: str, log: Callable[[str], None]) -> None:
        self._media: Media | None = media.detach()
        self._what, self._log = what, log
        self._lock, self._is_done = threading.Lock(), False

    def on_host(self) -> Media | None:
        """Returns the media as trackers receive them; None if they could not be made.

        A failure, for example of the user's `decode`, is printed once; it is not a failure of the
        tracker.
        """
        with self._lock:
            if not self._is_done and self._media is not None:
                self._is_done = True
                try:
                    self._media = self._media.on_host()
                except Exception as error:
                    self._media = None
                    text = foreign(" ".join(str(error).split()), 300)
                    self._log(f"{self._what} is not logged: {type(error).__name__}: {text}")
            return self._media


# -- PNG files -------------------------------------------------------------------------------------


def check_pillow() -> None:
    """Raises `UserError` if Pillow, which writes images, is missing."""
    import_extra("PIL.Image", "images", "logged images")


def encode_png(array: np.ndarray) -> bytes:
    """Returns an image, uint8 (H, W, C) with C = 1, 3 or 4, as the content of a PNG file."""
    pillow = import_extra("PIL.Image", "images", "logged images")
    file = io.BytesIO()
    pillow.fromarray(array[..., 0] if array.shape[-1] == 1 else array).save(file, "PNG")
    return file.getvalue()


def png_size(content: bytes) -> tuple[int, int]:
    """Returns the width and the height of an image from the content of a PNG file."""
    width, height = struct.unpack(">II", content[16:24])
    return width, height
