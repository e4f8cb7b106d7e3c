"""The items of a checkpoint, and what can be stored in them."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath, epy

from spmdtrain.errors import UserError
from spmdtrain.step.state import TrainState
from spmdtrain.tree import path_name

with epy.lazy_imports():  # because importing it takes long
    import orbax.checkpoint as ocp

PyTree = Any

# The items of a checkpoint, each of which is read by itself, and the fields of the state in them.
ITEMS: Mapping[str, tuple[str, ...]] = {
    "params": ("params",),
    "averaged": ("averaged",),  # only where an average is kept
    "model_state": ("model_state",),  # only where the model has one
    "training": ("step", "opt_state", "key"),  # what else a run needs to go on
}


def steps_in(folder: epath.Path) -> list[int]:
    """The steps whose checkpoints in a folder were written to their end, ascending.

    None where there is no such folder: a bucket has only those that hold something.
    """

    def is_step(path: epath.Path) -> bool:
        named = re.fullmatch("0|[1-9][0-9]*", path.name) is not None
        return named and path.is_dir() and bool(ocp.utils.is_checkpoint_finalized(path))

    paths = folder.iterdir() if folder.exists() else ()
    return sorted(int(path.name) for path in paths if is_step(path))


def items_of(state: TrainState) -> dict[str, dict[str, PyTree]]:
    """The state by item and field; without items that hold nothing."""
    items = {
        item: {field: getattr(state, field) for field in fields} for item, fields in ITEMS.items()
    }
    return {item: content for item, content in items.items() if jax.tree.leaves(content)}


def raw_keys(tree: PyTree) -> PyTree:
    """The tree with the numbers that random keys are made of, or their shapes, in their place."""

    def raw(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        if isinstance(leaf, jax.Array):
            return jax.random.key_data(leaf)
        numbers = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=leaf.sharding)

    return jax.tree.map(raw, tree)


def check_can_be_saved(state: PyTree) -> None:
    """Raise `UserError` for what Orbax cannot hold: it writes a/b and a.b over one another."""
    seen: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = path_name(path)
        if 0 in leaf.shape:
            raise UserError(f"{name} has shape {leaf.shape}: an empty array cannot be saved")
        if (called := name.replace("/", ".")) in seen:
            raise UserError(f"{seen[called]} and {name} would both be saved as {called}")
        seen[called] = name
