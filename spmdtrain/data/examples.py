"""Examples as rows: the values of a field in several examples become one array.

Lists, files, tables, pipelines and streams all read their examples here, so that a value is the
same array, or refused by the same rule, whatever its source is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np

from spmdtrain.errors import UserError, foreign
from spmdtrain.tree import is_key, path_name

PyTree = Any

_VALUES = (int, float, complex, str, bytes, np.generic)


def holds_numbers(dtype: np.dtype) -> bool:
    """Returns whether JAX has arrays of a dtype: not of objects, text, structures, long doubles.

    A dtype that JAX adds, such as bfloat16, is of kind V.
    """
    longest = 16 if dtype.kind == "c" else 8  # bytes
    return dtype.kind in "biufcV" and dtype.names is None and dtype.itemsize <= longest


@dataclass(frozen=True)
class ExampleReader:
    """Stacks the examples of a source to rows.

    An example is a pytree of numbers and arrays; a list of numbers is an array.

    Attributes:
      name: The class of the source, for messages.
      in_stream: Whether the source is a stream, which has other remedies.
      unit: What messages call an item of the source.
    """

    name: str
    in_stream: bool = False
    unit: str = "example"

    def stack(
        self,
        examples: Sequence[Any],
        numbers: Sequence[Any],
        dtypes: Sequence[np.dtype] | None = None,
    ) -> PyTree:
        """Stacks examples to rows: a pytree of arrays of leading dim n.

        Args:
          examples: At least one example.
          numbers: Their numbers, or other objects whose text says which ones they are.
          dtypes: The dtypes of the fields of the first example of the source. Without them the
            dtype of a batch would depend on its examples, and the dtype of a process's part of a
            batch on the number of processes: 1 and 2.5 are of one field.

        Raises:
          UserError: If an example is None or has other fields than the first one, a field holds
            anything but numbers, or has different shapes, or `dtypes` would change a value.
        """
        rows = self._stacked(examples, numbers)
        if dtypes is None or leaf_dtypes(rows) == dtypes:
            return rows
        return self._converted(rows, dtypes, examples, numbers)

    def dtypes(self, example: Any, number: Any) -> list[np.dtype]:
        """Returns the dtypes of the fields of an example."""
        return leaf_dtypes(self._stacked([example], [number]))

    def _stacked(self, examples: Sequence[Any], numbers: Sequence[Any]) -> PyTree:
        first = examples[0]
        if (
            type(first) is dict
            and first
            and all(isinstance(x, (np.ndarray, *_VALUES)) for x in first.values())
        ):
            keys = first.keys()  # the common case, without a call of Python for each field
            if all(type(example) is dict and example.keys() == keys for example in examples):
                return {
                    key: self._column([example[key] for example in examples], str(key), numbers)
                    for key in keys
                }
        for number, example in zip(numbers, examples, strict=True):
            if example is None:
                raise UserError(f"{self.unit} {number} of a {self.name} is None{self._left_out}")
        structure: Any
        paths, structure = jax.tree_util.tree_flatten_with_path(first, is_leaf=_is_leaf)
        fields = [path_name(path) for path, _ in paths]
        columns: list[list[Any]] = [[] for _ in fields]
        for number, example in zip(numbers, examples, strict=True):
            leaves, other = jax.tree.flatten(example, is_leaf=_is_leaf)
            if other != structure:
                raise UserError(
                    f"{self.unit} {number} of a {self.name} has {_fields_of(example)}; example "
                    f"{numbers[0]} has {_fields_of(first)}: all examples must have the same fields"
                )
            for column, leaf in zip(columns, leaves, strict=True):
                column.append(leaf)
        if not fields:
            raise UserError(
                f"{self.unit} {numbers[0]} of a {self.name} holds no numbers: {first!r}"
            )
        pairs = zip(columns, fields, strict=True)
        return structure.unflatten(
            [self._column(column, field, numbers) for column, field in pairs]
        )

    def _converted(
        self,
        rows: PyTree,
        dtypes: Sequence[np.dtype],
        examples: Sequence[Any],
        numbers: Sequence[Any],
    ) -> PyTree:
        """Returns rows in other dtypes; raises `UserError` if that would change a value."""
        structure: Any
        named, structure = jax.tree_util.tree_flatten_with_path(rows)
        if len(named) != len(dtypes):
            return rows  # other fields than the first example, which the check of batches refuses
        for place, ((path, leaf), dtype) in enumerate(zip(named, dtypes, strict=True)):
            if np.can_cast(leaf.dtype, dtype):
                continue
            for number, example in zip(numbers, examples, strict=True):
                own = self.dtypes(example, number)[place]
                if not np.can_cast(own, dtype):
                    first = "the first example" if self.in_stream else "example 0"
                    raise UserError(
                        f"field {path_name(path)!r} of {self.unit} {number} of a {self.name} holds "
                        f"{own}, but {dtype} in {first}: a field needs one dtype. Write 1.0 "
                        f"instead of 1, or convert it {self._by_a_map}"
                    )
        leaves = [leaf.astype(dtype) for (_, leaf), dtype in zip(named, dtypes, strict=True)]
        return structure.unflatten(leaves)

    def _column(self, values: list[Any], field: str, numbers: Sequence[Any]) -> np.ndarray:
        """Returns the values of a field as one array (n, ...)."""
        try:
            if any(isinstance(value, np.ma.MaskedArray) for value in values):
                self._reject(values, field, numbers)
            if isinstance(values[0], (list, *_VALUES)):
                column = np.asarray(values)
            else:
                column = np.stack([np.asarray(value) for value in values])
        except (ValueError, OverflowError, TypeError):  # shapes that differ, or no arrays
            self._reject(values, field, numbers)
        if not holds_numbers(column.dtype):
            self._reject(values, field, numbers)
        return column

    def _reject(self, values: list[Any], field: str, numbers: Sequence[Any]) -> NoReturn:
        """Raises the error for values that cannot be stacked to an array of numbers."""
        what = f"field {field!r} of " if field else ""
        shapes = []
        for number, value in zip(numbers, values, strict=True):
            array = self._checked(value, field, f"{what}{self.unit} {number} of a {self.name}")
            shapes.append(array.shape)
        other = next((n for n, shape in enumerate(shapes) if shape != shapes[0]), 0)
        raise UserError(
            f"{what or 'the value of '}a {self.name} has the shape {shapes[0]} in example "
            f"{numbers[0]} and {shapes[other]} in example {numbers[other]}: {self._one_shape}"
        )

    def _checked(self, value: Any, field: str, which: str) -> np.ndarray:
        """Returns a value as an array; raises `UserError` if it does not hold numbers."""
        if value is None:
            raise UserError(f"{which} is None: examples must be numbers")
        if isinstance(value, np.ma.MaskedArray):
            raise UserError(
                f"{which} is a masked array, and JAX has no masks: fill it by a map function, and "
                "give weights of 0 for the values that are missing"
            )
        if isinstance(value, jax.Array) and is_key(value):
            raise UserError(
                f"{which} holds random keys: give jax.random.key_data(keys), and call "
                "jax.random.wrap_key_data in the objective"
            )
        leaf: Any = value
        while isinstance(leaf, list) and leaf:
            leaf = leaf[0]
        if isinstance(leaf, str):
            tokens = f"Packed(Tokenized(source, tokenizer{f', field={field!r}' if field else ''})"
            give = "Tokenize it in the pipeline" if self.in_stream else f"Give {tokens}, length)"
            raise UserError(
                f"{which} is text: a batch holds numbers. {give}, or leave it out {self._by_a_map}"
            )
        if isinstance(leaf, bytes):
            decode = self._by_a_map.replace("function)", "decode)")
            raise UserError(f"{which} is bytes: a batch holds numbers. Decode it {decode}")
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths
            raise UserError(
                f"{which} holds lists of different lengths: {self._one_shape}"
            ) from None
        except TypeError:
            raise UserError(f"{which} is a {type(value).__name__}, not numbers") from None
        if not holds_numbers(array.dtype):
            raise UserError(f"{which} holds {array.dtype}, not numbers: {foreign(value, 100)}")
        return array

    @property
    def _by_a_map(self) -> str:
        """How a field is changed, for messages."""
        if self.in_stream:
            return "by a map function of the pipeline"
        return "by a map function: grain.MapDataset.source(source).map(function)"

    @property
    def _one_shape(self) -> str:
        """What to do about different shapes, for messages."""
        pack = "" if self.in_stream else "Pack documents with Packed(source, length), or pad"
        return (
            f"the examples of a batch need one shape. {pack or 'Pad'} them "
            f"{'by a map function of the pipeline' if self.in_stream else 'by a map function'}"
        )

    @property
    def _left_out(self) -> str:
        """What to do about an example that is None, for messages."""
        if self.in_stream:
            return ": leave it out in the pipeline"
        return (
            ", as .filter() and .flat_map() of Grain mark a removed one: select those that are "
            "left, Subset(data, np.array([i for i in range(len(data)) if data[i] is not None]))"
        )


def leaf_dtypes(rows: PyTree) -> list[np.dtype]:
    """Returns the dtypes of the arrays of a pytree."""
    return [leaf.dtype for leaf in jax.tree.leaves(rows)]


def _is_leaf(x: Any) -> bool:
    """Returns whether a value is one field: None, or a list of numbers, which is an array."""
    while isinstance(x, list) and x:
        x = x[0]
    return x is None or isinstance(x, (list, *_VALUES))


def _fields_of(example: Any) -> str:
    named = jax.tree_util.tree_leaves_with_path(example, is_leaf=_is_leaf)
    names = [path_name(path) for path, _ in named]
    return f"the fields {', '.join(names)}" if any(names) else f"no fields ({type(example)})"
