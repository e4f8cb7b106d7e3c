"""The place of an example in its data, and a short readable form of its values."""

import zlib
from typing import Any

import numpy as np

from spmdtrain.data.datasets import MappedDataset, Subset, sources_within
from spmdtrain.data.examples import IndexableDataset
from spmdtrain.data.images import ImageFolder
from spmdtrain.data.mixture import Mixture
from spmdtrain.document.terminal import number
from spmdtrain.errors import foreign
from spmdtrain.tree import named_leaves

PyTree = Any
TEXT = 100  # characters of a text that are shown


def place_of_example(data: Any, index: int) -> str:
    """Returns where an example comes from: its file and record, as far as they are known.

    A dataset or source that has `describe(int)` names its records itself.
    """
    if isinstance(data, Subset):
        return place_of_example(data.dataset, int(np.asarray(data.indices)[index]))
    if isinstance(data, MappedDataset):
        return place_of_example(data.dataset, index)
    if isinstance(data, IndexableDataset):
        return place_of_example(data.source, index)
    if isinstance(data, Mixture):
        name, within = data.place_of(index)
        return f"{name}: {place_of_example(data.components[name], within)}"
    if isinstance(data, ImageFolder):
        return str(data.folder / data.files[index])
    if callable(describe := getattr(data, "describe", None)):
        return str(describe(index))
    return f"example {index} of {type(data).__name__}"


def describe_values(data: Any, rows: PyTree, row: int) -> list[str]:
    """Returns the values of an example, a text for each field: a number, a text, or a summary.

    The summary of an array has its dtype, shape and checksum, and its least and greatest number. If
    `data`, or one that it reads from, has `decode(tokens)`, the field `tokens` is shown as text,
    with "|" between documents.
    """
    leaves = {name: np.asarray(leaf)[row] for name, leaf in named_leaves(rows).items()}
    inside = (getattr(each, "decode", None) for each in (data, *sources_within(data)))
    decode = next((each for each in inside if callable(each)), None)
    tokens = leaves.get("tokens")
    found = []
    if decode is not None and tokens is not None and tokens.ndim == 1:
        segments = leaves.get("segments", np.ones_like(tokens))  # 0 is padding
        texts = [decode(tokens[segments == number]) for number in range(1, segments.max() + 1)]
        found.append(f"tokens {foreign(repr(' | '.join(texts)), TEXT)}")
        leaves.pop("tokens")
    return found + [f"{name} {_summary(value)}".strip() for name, value in leaves.items()]


def _summary(value: np.ndarray) -> str:
    if not value.ndim:
        return number(value.item()) if value.dtype.kind in "biuf" else str(value)
    text = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if value.size and value.dtype.kind in "biuf":
        text += f" from {number(float(value.min()))} to {number(float(value.max()))}"
    return f"{text} (crc32 {zlib.crc32(value.tobytes()):08x})"
