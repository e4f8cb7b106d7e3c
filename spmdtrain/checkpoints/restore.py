"""Loading of states, models and parameters from checkpoints."""

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath
from jax.sharding import Sharding

from spmdtrain.adapters.base import Variables
from spmdtrain.checkpoints.base_weights import merged_variables
from spmdtrain.checkpoints.items import items_of
from spmdtrain.checkpoints.listing import LATEST
from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.checkpoints.read_arrays import holds, read_arrays, read_host_arrays
from spmdtrain.checkpoints.run_identity import check_same_model, describe_leaves
from spmdtrain.checkpoints.source import find, load_latest_valid
from spmdtrain.errors import UserError
from spmdtrain.step.state import TrainState, average_of

PyTree = Any


# -- in a run ----------------------------------------------------------------------------------


def load_state(
    folder: epath.Path, manifest: Manifest, abstract: TrainState, shardings: TrainState
) -> TrainState:
    """Returns the state of a checkpoint, on the current devices, whatever devices saved it.

    The checkpoint must be of the same run (see `run_identity.check_same_run`). Raises
    `CheckpointCorruptedError` or `StorageError`.
    """
    target: TrainState = jax.tree.map(_with_sharding, abstract, shardings)
    fields: dict[str, PyTree] = {"params": {}, "averaged": {}, "model_state": {}} | read_arrays(
        folder, manifest, items_of(target)
    )
    return TrainState(**fields)


def _with_sharding(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def load_initial_variables(
    folder: epath.Path,
    manifest: Manifest,
    abstract: TrainState,
    shardings: TrainState,
    config: Mapping[str, Any],
) -> Variables:
    """Returns the parameters and the model state of a checkpoint of any run of the same model.

    The parameters are the averaged ones if that run kept an average. `abstract`, `shardings` and
    `config` are of this run. Raises `UserError` if the model differs, `CheckpointCorruptedError` or
    `StorageError`.
    """
    check_same_model(manifest.identity, config, describe_leaves(abstract), str(folder))
    averaged = holds(manifest, "averaged")
    like = average_of(abstract.params) if averaged else abstract.params
    # A run without an average has no shardings for one: that of the parameters applies.
    places = shardings.averaged if averaged and shardings.averaged else shardings.params
    params = jax.tree.map(_with_sharding, like, places)
    state = jax.tree.map(_with_sharding, abstract.model_state, shardings.model_state)
    targets = {"averaged": {"averaged": params}} if averaged else {"params": {"params": params}}
    if jax.tree.leaves(state):
        targets["model_state"] = {"model_state": state}
    fields = read_arrays(folder, manifest, targets)
    return Variables(fields["averaged" if averaged else "params"], fields.get("model_state", {}))


# -- outside a run -----------------------------------------------------------------------------


def warn(text: str) -> None:
    """Warns of a corrupted checkpoint: the default of `log`, outside a run."""
    warnings.warn(text, stacklevel=4)


def read_variables(
    path: str | os.PathLike[str],
    *,
    which: str | int = LATEST,
    sharding: Any = None,
    averaged: bool | None = None,
    log: Callable[[str], None] = warn,
) -> tuple[Variables, Manifest]:
    """Returns the variables and the manifest of a checkpoint.

    Arguments and errors are as for `load_params`. Low-rank factors are merged: the variables are
    those of the base model. `log` receives a line for each corrupted checkpoint that is skipped; by
    default it warns.
    """

    def load(folder: epath.Path, manifest: Manifest) -> Variables:
        average = holds(manifest, "averaged") if averaged is None else averaged
        if average and not holds(manifest, "averaged"):
            raise UserError(
                f"{folder} holds no averaged parameters: its run had neither ema_decay nor a "
                "schedule-free optimizer"
            )
        params = read_host_arrays(folder, manifest, "averaged" if average else "params")
        has_state = holds(manifest, "model_state")
        state = read_host_arrays(folder, manifest, "model_state") if has_state else {}
        params, state = merged_variables(Variables(params, state), manifest, folder)
        if sharding is not None:
            params = jax.device_put(params, sharding)
        return Variables(params, state)

    loaded = load_latest_valid(find(path, which), load, log)
    return loaded.value, loaded.manifest


def load_variables(
    path: str | os.PathLike[str], *, which: str | int = LATEST, averaged: bool | None = None
) -> Variables:
    """Returns the parameters and the model state (batch statistics) of a run.

    Args:
      path: A workdir, or one of its `checkpoints/STEP`.
      which: The checkpoint of a workdir: "latest" (the newest valid one), "best" or a step.
      averaged: As for `load_params`.

    Returns:
      `Variables(params, model_state)`, NumPy arrays; `model_state` is `{}` if the model has none.

    Raises:
      UserError: If there is no such checkpoint, or none that is valid.
      StorageError: If it cannot be read.
    """
    return read_variables(path, which=which, averaged=averaged)[0]


def load_params(
    path: str | os.PathLike[str],
    *,
    which: str | int = LATEST,
    sharding: Any = None,
    averaged: bool | None = None,
) -> PyTree:
    """Returns the parameters of a run for inference, without its code, optimizer or devices.

    `load_variables` returns batch statistics too, and `load_model` a whole model.

    Args:
      path: A workdir, or one of its `checkpoints/STEP`.
      which: The checkpoint of a workdir: "latest" (the newest valid one), "best" (by the run's
        `best_metric`) or a step.
      sharding: Sharding of all parameters, or a tree of shardings; by default NumPy arrays are
        returned.
      averaged: True for averaged parameters, False for the trained ones; by default averaged ones
        if the run kept an average. Averages of parameters narrower than float32 are float32.

    Returns:
      Nested dictionaries (lists if the model has sequences) of arrays in their saved dtypes: NumPy
      arrays, or JAX arrays if `sharding` is given.

    Raises:
      UserError: If there is no such checkpoint, none that is valid, or no average.
      StorageError: If it cannot be read.
    """
    return read_variables(path, which=which, sharding=sharding, averaged=averaged)[0].params


def read_manifest(
    path: str | os.PathLike[str],
    *,
    which: str | int = LATEST,
    log: Callable[[str], None] = warn,
) -> Manifest:
    """Returns the manifest of a checkpoint: arrays, sizes, metrics and its run.

    Args:
      path: A workdir, or one of its `checkpoints/STEP`.
      which: The checkpoint of a workdir: "latest" (the newest one with a manifest), "best" or a
        step.
      log: Receives a line for each corrupted checkpoint that is skipped; by default warns.

    Raises:
      UserError: If there is no such checkpoint, or none with a manifest.
      StorageError: If it cannot be read.
    """
    return load_latest_valid(find(path, which), lambda _, manifest: manifest, log).value
