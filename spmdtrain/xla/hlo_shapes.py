"""Shapes in the text of compiled programs."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\](?:\{(?P<layout>[^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"T\(([\d,]+)\)")


@dataclass(frozen=True)
class Array:
    """One array of a shape.

    Attributes:
      dtype: XLA's name of the dtype.
      space: Memory space; 0 is the main memory.
      order: The dims in the order of the layout, the minor one first; empty if unknown.
      tile: Sizes of the layout's tiles, of the last dims in the layout's order; empty without.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def bytes(self) -> int:
        """Bytes without padding; 0 for a token."""
        # The first number in a dtype is its width in bits: bf16, f8e4m3fn, s4, c64.
        width = re.search(r"\d+", "pred8" if self.dtype == "pred" else self.dtype)
        return math.ceil(math.prod(self.dims) * int(width[0]) / 8) if width else 0

    @property
    def stored_bytes(self) -> int:
        """Bytes in memory, where tiles are whole: a TPU stores a minor dim of 64 as 128."""
        if not self.tile or len(self.order) != len(self.dims):
            return self.bytes
        dims = [self.dims[dim] for dim in self.order]
        for place, size in enumerate(reversed(self.tile)):
            if place < len(dims):
                dims[place] = -(-dims[place] // size) * size
        return replace(self, dims=tuple(dims), tile=()).bytes


def arrays_of(shape: str) -> tuple[Array, ...]:
    """Returns the arrays of `f32[8,128]{1,0:T(8,128)S(1)}`, or of a tuple of such shapes."""
    arrays = []
    for match in _ARRAY.finditer(shape):
        order, _, rest = (match["layout"] or "").partition(":")
        space, tile = _SPACE.search(rest), _TILE.search(rest)
        arrays.append(
            Array(
                match["dtype"],
                _numbers(match["dims"]),
                space=int(space[1]) if space else 0,
                order=_numbers(order),
                tile=_numbers(tile[1]) if tile else (),
            )
        )
    return tuple(arrays)


def element_of(shape: str, path: Sequence[int]) -> str:
    """Returns the first array at a path within a shape, such as `bf16[8,128]`.

    `path` has indices into nested tuples.
    """
    for place in path:
        depth, parts = 0, [""]
        for letter in shape[1:-1]:
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and not depth:
                parts.append("")
            else:
                parts[-1] += letter
        shape = parts[place].strip() if place < len(parts) else ""
    arrays = arrays_of(shape)
    return str(arrays[0]) if arrays else shape


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))
