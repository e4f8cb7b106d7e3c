"""The base weights of a run that trains low-rank factors, and their merging outside a run."""

import copy
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spmdtrain.adapters.base import Variables
from spmdtrain.adapters.lora import FACTORS, merge_factors
from spmdtrain.checkpoints.checksums import format_sums, read_parts, start_sums, sums
from spmdtrain.checkpoints.lora_record import LoraRecord
from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.checkpoints.run_weights import RunWeights
from spmdtrain.checkpoints.source import find
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError, foreign, option
from spmdtrain.weights.assignment import assign_weights
from spmdtrain.weights.placing import read_whole
from spmdtrain.weights.source import WeightSource, is_weights_file, open_weights

PyTree = Any


def merged_variables(variables: Variables, manifest: Manifest, folder: epath.Path) -> Variables:
    """Returns a checkpoint's variables, with low-rank factors added to the base model's kernels.

    Args:
      variables: NumPy arrays.
      folder: The folder of the checkpoint, for messages.

    Raises:
      UserError: If base weights that the checkpoint leaves out are missing or have changed.
      CheckpointCorruptedError: If these weights are in a checkpoint that is corrupted.
    """
    lora = manifest.identity.lora
    if not lora.alpha:
        return variables
    if lora.source:
        base = _read_base(manifest, folder)
        variables = Variables(
            *(_filled(tree, base, f) for tree, f in zip(variables, _FIELDS, strict=True))
        )
    return variables._replace(params=merge_factors(variables.params, lora.alpha, np.einsum))


_FIELDS = ("params", "model_state")


def _filled(tree: PyTree, values: Mapping[str, np.ndarray], field: str) -> PyTree:
    """Returns a copy of a tree of dictionaries and lists, with a field's arrays added by path."""
    tree = copy.deepcopy(tree)
    for name, value in values.items():
        first, *parts, last = name.split("/")
        if first != field:
            continue
        place: Any = tree
        for part in parts:
            if isinstance(place, list):
                place = place[int(part)]
            else:
                place[part] = place.get(part) or {}
                place = place[part]
        place[int(last) if isinstance(place, list) else last] = value
    return tree


def _read_base(manifest: Manifest, folder: epath.Path) -> dict[str, np.ndarray]:
    """Returns the base weights that a checkpoint leaves out, by path in the state."""
    lora = manifest.identity.lora
    try:
        source = open_source(lora.source)
        described = {**lora.leaves, **manifest.identity.leaves}
        targets = {
            name.partition("/")[2]: _target(text)
            for name, text in described.items()
            if name.split("/")[0] in _FIELDS
            and not name.startswith(f"params/{FACTORS}/")
            and not text.startswith("key<")
        }
        found = assign_weights(source.path, source.headers, targets, lora.weight_map)
        arrays = {}
        for name in lora.leaves:
            own = name.partition("/")[2]
            if own not in found.pieces:
                raise UserError(f"{lora.source} has no array for {own}")
            arrays[name] = read_whole(source, found, own, targets[own])
    except UserError as error:
        raise UserError(describe_missing(folder, lora, error)) from error
    check_unchanged(sums(arrays), lora, folder)
    return arrays


def open_source(path: str) -> WeightSource:
    """Opens a file of weights or a checkpoint's folder; raises `UserError` if there is neither."""
    if is_weights_file(path):
        return open_weights(path)
    source = find(path)
    folder = source.path(source.steps[-1])
    return RunWeights(folder, Manifest.read(folder))


def describe_missing(folder: epath.Path, lora: LoraRecord, error: Exception) -> str:
    """Returns the message that the base weights of the checkpoint in `folder` cannot be read."""
    return (
        f"{folder} holds LoRA factors alone, and its base weights cannot be read from "
        f"{foreign(lora.source)}: {error}. Put them back; a run finds them elsewhere by "
        f"{option('init_from')}"
    )


def base_sums(base: Variables) -> dict[str, str]:
    """Returns the checksums of base weights on devices, by path in the state.

    All processes of a job call it. `base` has None in place of variables that are not base weights.
    """
    started = start_sums(dict(zip(_FIELDS, base, strict=True)))
    return format_sums(process_group.summed(read_parts(started)))


def check_unchanged(actual: Mapping[str, str], lora: LoraRecord, folder: epath.Path) -> None:
    """Checks that base weights are those that the factors of a checkpoint were trained for.

    `actual` has the weights' checksums by path in the state. Raises `UserError` if one differs from
    the record.
    """
    for name, expected in lora.sums.items():
        if actual.get(name) != expected:
            raise UserError(
                f"{folder} holds LoRA factors for other base weights: {foreign(name, 200)} has the "
                f"checksum {actual.get(name, 'of no array')}, and had {expected} when they were "
                f"read from {foreign(lora.source)}. Give "
                f"{option('init_from')} with the weights of that time"
            )


def _target(text: str) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array described as `float32[784,128]`."""
    dtype, _, dims = text.rstrip("]").partition("[")
    return jax.ShapeDtypeStruct(tuple(int(n) for n in dims.split(",") if n), jnp.dtype(dtype))
