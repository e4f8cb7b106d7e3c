"""Models with the values of a checkpoint, for use outside a run."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.adapters.base import Variables
from spmdtrain.checkpoints.items import raw_keys
from spmdtrain.checkpoints.read_arrays import restore_key
from spmdtrain.checkpoints.restore import read_variables
from spmdtrain.errors import UserError
from spmdtrain.tree import named_leaves, path_name

PyTree = Any


def load_model(
    model: Any,
    path: str | os.PathLike[str],
    *,
    which: str | int = "latest",
    averaged: bool | None = None,
) -> Any:
    """Returns a model with the parameters and batch statistics of a checkpoint.

    Args:
      model: What a `Trainer` takes: an nnx module or a function of `rngs` that makes one, a
        `LinenModel`, a `KerasModel` or a `FunctionModel`. It is not changed.
      path: A workdir, or one of its `checkpoints/STEP`.
      which: The checkpoint of a workdir: "latest" (the newest valid one), "best" or a step.
      averaged: Whether to load averaged parameters; by default, if the run kept an average.

    Returns:
      The model in evaluation mode, an nnx module for an nnx module, as `Trainer.model`.

    Raises:
      UserError: If the checkpoint is of another model, or there is none that is valid.
      StorageError: If it cannot be read.
    """
    adapter = as_adapter(model)
    expected = jax.eval_shape(adapter.init, adapter.given, jax.random.key(0))
    saved, _ = read_variables(path, which=which, averaged=averaged)
    return adapter.merge(
        Variables(
            _match(expected.params, saved.params, f"{os.fspath(path)}: parameter"),
            _match(expected.model_state, saved.model_state, f"{os.fspath(path)}: model state"),
        )
    )


def _match(expected: PyTree, saved: PyTree, label: str) -> PyTree:
    """Returns the saved arrays in the structure of the expected ones, matched by path."""
    arrays, leaves = named_leaves(saved), named_leaves(raw_keys(expected))
    for name in sorted(arrays.keys() | leaves.keys()):
        saved_shape, own_shape = _shape(arrays.get(name)), _shape(leaves.get(name))
        if saved_shape != own_shape:
            raise UserError(
                f"{label} {name}: {saved_shape} in the checkpoint, {own_shape} in the model. Build "
                "the model that was trained"
            )
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: restore_key(leaf, jnp.asarray(arrays[path_name(path)])), expected
    )


def _shape(leaf: Any) -> str:
    return "absent" if leaf is None else f"shape {tuple(leaf.shape)}"
