"""The items of a checkpoint, and what can be stored in them."""

import re
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath, epy

from spmdtrain.errors import UserError
from spmdtrain.step.state import TrainState
from spmdtrain.tree import is_key, path_name

with epy.lazy_imports():  # because importing it takes long
    import orbax.checkpoint as ocp

PyTree = Any

ITEMS: Mapping[str, tuple[str, ...]] = {
    "params": ("params",),
    "averaged": ("averaged",),  # only with an average of the parameters
    "averaging": ("averaged_before",),  # only with a moving average
    "model_state": ("model_state",),  # only if the model has one
    "training": ("step", "opt_state", "key"),  # what else a resumed run needs
}
"""The fields of the state in each item of a checkpoint; items are read independently."""

_NOT_STORED = (
    *("int1", "uint1", "uint2", "uint4"),
    *("float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"),
)
"""Dtypes that TensorStore, which writes the arrays, does not have."""


def steps_in(folder: epath.Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, ascending.

    A folder that does not exist has none, because in a bucket an empty folder does not exist.
    """

    def is_step(path: epath.Path) -> bool:
        is_number = re.fullmatch("0|[1-9][0-9]*", path.name) is not None
        return is_number and path.is_dir() and bool(ocp.utils.is_checkpoint_finalized(path))

    paths = folder.iterdir() if folder.exists() else ()
    return sorted(int(path.name) for path in paths if is_step(path))


def items_of(state: TrainState) -> dict[str, dict[str, PyTree]]:
    """Returns the fields of a state by item, without items that have no arrays."""
    items = {
        item: {field: getattr(state, field) for field in fields} for item, fields in ITEMS.items()
    }
    return {item: fields for item, fields in items.items() if jax.tree.leaves(fields)}


def raw_keys(tree: PyTree) -> PyTree:
    """Replaces keys, or their `jax.ShapeDtypeStruct`, by their data: Orbax cannot store keys."""

    def raw(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        if isinstance(leaf, jax.Array):
            return jax.random.key_data(leaf)
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)

    return jax.tree.map(raw, tree)


def check_can_be_saved(state: PyTree) -> None:
    """Checks that Orbax can store a state of arrays or `jax.ShapeDtypeStruct`.

    Raises:
      UserError: If an array is empty, if its dtype cannot be stored, or if Orbax would write two
        arrays to the same place, such as a/b and a.b.
    """
    seen: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = path_name(path)
        if 0 in leaf.shape:
            raise UserError(f"{name} has shape {leaf.shape}: an empty array cannot be saved")
        if str(leaf.dtype) in _NOT_STORED:
            raise UserError(
                f"{name} is {leaf.dtype}, which checkpoints cannot store: use another dtype, such "
                "as uint8, or leave workdir out"
            )
        if (stored_name := name.replace("/", ".")) in seen:
            raise UserError(
                f"{seen[stored_name]} and {name} would both be saved as {stored_name}: rename one"
            )
        seen[stored_name] = name
