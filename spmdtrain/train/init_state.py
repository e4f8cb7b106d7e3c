"""The first state of a run: initial values, or those of another run's checkpoint."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spmdtrain.adapters.base import Variables
from spmdtrain.checkpoints.manifest import Manifest
from spmdtrain.checkpoints.restore import load_initial_variables
from spmdtrain.checkpoints.source import find, load_latest_valid
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError
from spmdtrain.step.functions import StepFunctions
from spmdtrain.step.state import TrainState

PyTree = Any
Log = Callable[[str], None]


def initial_state(steps: StepFunctions, config: RunConfig, log: Log) -> TrainState:
    """Returns the state before step 1.

    Args:
      steps: The functions of the run.
      config: Has the seed, and `init_from`, whose parameters replace the initial ones.
      log: Receives a line that names the checkpoint.
    """
    state = steps.init(config.seed)
    if not config.init_from:
        return state
    found, _ = load_values(config.init_from, config.checkpoint, steps, config, log)
    places = steps.shardings
    params, model_state = steps.as_parameters(found)
    params = jax.device_put(params, places.params)
    averaged: PyTree = {}
    if config.ema_decay is not None:  # separate arrays, because the state is donated
        averaged = jax.tree.map(
            lambda x, like: jnp.array(x, like.dtype), found.params, state.averaged
        )
        averaged = jax.device_put(averaged, places.averaged)
    return dataclasses.replace(
        state,
        params=params,
        # Some optimizers keep a copy of the parameters that they start from.
        opt_state=steps.opt_state_of(params),
        averaged=averaged,
        model_state=model_state,
    )


def at_step_zero(state: TrainState, shardings: TrainState) -> TrainState:
    """Returns a state whose step is 0, and whose other leaves are those of `state`."""
    sharding: Any = shardings.step
    zero = np.zeros((), np.int32)
    step = jax.make_array_from_callback((), sharding, lambda _: zero)
    return dataclasses.replace(state, step=step)


def load_values(
    path: str, which: str | int, steps: StepFunctions, config: RunConfig, log: Log
) -> tuple[Variables, Manifest]:
    """Loads the model's values from a checkpoint of this or another run.

    Args:
      path: A workdir, or one of its checkpoints/STEP.
      which: The checkpoint of a workdir: "latest", "best" or a step.
      steps: Give the model's shapes and shardings.
      config: The configuration, compared with that of the checkpoint.
      log: Receives lines about corrupted checkpoints, and the chosen one.

    Returns:
      The values, and the manifest of the checkpoint.

    Raises:
      UserError: If there is no such checkpoint, or it is of another model.
    """

    def load(folder: epath.Path, manifest: Manifest) -> Variables:
        return load_initial_variables(
            folder, manifest, steps.abstract_state, steps.shardings, config_as_json(config)
        )

    source = process_group.run_on_all(lambda: find(path, which), UserError)
    found = load_latest_valid(source, load, log, by_all=True)
    step = found.manifest.step
    log(f"parameters of step {step} from {source.path(step)}")
    return found.value, found.manifest
