"""The first state of a run: initial values, or those of a checkpoint or of a file of weights."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from spmdtrain.adapters.base import Variables
from spmdtrain.checkpoints.listing import LATEST
from spmdtrain.checkpoints.manifest import CheckpointCorruptedError, Manifest
from spmdtrain.checkpoints.restore import load_initial_variables
from spmdtrain.checkpoints.run_identity import Identity
from spmdtrain.checkpoints.run_weights import RunWeights
from spmdtrain.checkpoints.source import find, load_latest_valid
from spmdtrain.config.run_config import RunConfig, config_as_json
from spmdtrain.distributed import process_group
from spmdtrain.errors import UserError
from spmdtrain.step.functions import StepFunctions
from spmdtrain.step.state import TrainState
from spmdtrain.terminal import Terminal
from spmdtrain.tree import named_leaves, path_name
from spmdtrain.weights.assignment import assign_weights, check_taken
from spmdtrain.weights.placing import place
from spmdtrain.weights.report import report
from spmdtrain.weights.source import WeightSource, is_weights_file, open_weights
from spmdtrain.weights.weight_map import WeightMap

PyTree = Any


@dataclass(frozen=True)
class LoadedValues:
    """The values of a model from a checkpoint or from a file of weights.

    Attributes:
      variables: The values.
      step: The step of the checkpoint; 0 for a file of weights.
      identity: The run that saved the checkpoint; None for a file of weights.
    """

    variables: Variables
    step: int = 0
    identity: Identity | None = None


def initial_state(
    steps: StepFunctions, config: RunConfig, weight_map: WeightMap, terminal: Terminal
) -> TrainState:
    """Returns the state before step 1.

    Args:
      steps: The functions of the run.
      config: Has the seed, and `init_from`, whose parameters replace the initial ones.
      weight_map: Rules for the arrays of `init_from`.
      terminal: Shows the table of what is taken.
    """
    state = steps.init(config.seed)
    if not config.init_from:
        return state
    # Freed before others are loaded: the devices need not hold two models.
    state = dataclasses.replace(state, params={}, opt_state={}, averaged={}, model_state={})
    found = load_values(
        config.init_from, config.checkpoint, steps, config, weight_map, terminal
    ).variables
    places = steps.shardings
    params, model_state = steps.as_parameters(found)
    params = jax.device_put(params, places.params)
    averaged: PyTree = {}
    if jax.tree.leaves(
        steps.abstract_state.averaged
    ):  # separate arrays, because the state is donated
        like = steps.abstract_state.averaged
        averaged = jax.tree.map(lambda x, like: jnp.array(x, like.dtype), found.params, like)
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
    path: str,
    which: str | int,
    steps: StepFunctions,
    config: RunConfig,
    weight_map: WeightMap,
    terminal: Terminal,
) -> LoadedValues:
    """Loads the model's values from a checkpoint of this or another run, or a file of weights.

    Args:
      path: A workdir, one of its checkpoints/STEP, or weights of another program.
      which: The checkpoint of a workdir: "latest", "best" or a step.
      steps: Give the model's shapes and shardings.
      config: The configuration, compared with that of the checkpoint. By `init_from_strict`, arrays
        that are missing or do not fit are an error or keep their initial values.
      weight_map: Rules for the arrays of the file.
      terminal: Shows corrupted checkpoints, and the table of what is taken.

    Returns:
      The values in the run's shardings, with the step and the run that saved them.

    Raises:
      UserError: If there is no such file or checkpoint, or it is of another model.
    """
    is_file = process_group.run_on_all(lambda: is_weights_file(path), UserError)
    if process_group.broadcast(is_file):
        if which != LATEST:
            raise UserError(f"{path} is a file of weights: leave checkpoint={which} out")
        weights = process_group.run_on_all(lambda: open_weights(path), UserError)
        return LoadedValues(_take(weights, steps, config, weight_map, terminal, UserError))
    # The options are those of init_from: a run's own checkpoint always has the whole model.
    strict = config.init_from_strict == "all"
    exact = path != config.init_from or (strict and not weight_map)

    def load(folder: epath.Path, manifest: Manifest) -> Variables:
        if exact:
            return load_initial_variables(
                folder, manifest, steps.abstract_state, steps.shardings, config_as_json(config)
            )
        own = process_group.run_on_all(
            lambda: RunWeights(folder, manifest), CheckpointCorruptedError
        )
        return _take(own, steps, config, weight_map, terminal, CheckpointCorruptedError)

    source = process_group.run_on_all(lambda: find(path, which), UserError)
    found = load_latest_valid(source, load, terminal.line, by_all=True)
    step, count = found.manifest.step, len(jax.tree.leaves(found.value))
    terminal.line(
        f"parameters of step {step} from {source.path(step)}"
        + (f": all {count} arrays" if exact else "")
    )
    return LoadedValues(found.value, step, found.manifest.identity)


def _take(
    source: WeightSource,
    steps: StepFunctions,
    config: RunConfig,
    weight_map: WeightMap,
    terminal: Terminal,
    expected: type[Exception],
) -> Variables:
    """Returns the values of a file in their shardings, and initial ones for what it lacks."""
    process_group.check_same(
        {"init_from": {name: str(header) for name, header in source.headers.items()}}
    )
    abstract = Variables(steps.abstract_state.params, steps.abstract_state.model_state)
    shardings = Variables(steps.shardings.params, steps.shardings.model_state)
    placed = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        abstract,
        shardings,
    )
    leaves = _named(placed)
    targets = {
        name: leaf
        for name, leaf in leaves.items()
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)  # random keys
    }
    found = assign_weights(source.path, source.headers, targets, weight_map)
    terminal.console.print(report(source.path, found, source.headers, targets))
    check_taken(source.path, found, strict=config.init_from_strict == "all")
    values: dict[str, jax.Array] = {}
    if others := leaves.keys() - found.pieces.keys():
        state = steps.init(config.seed)
        initial = _named(Variables(state.params, state.model_state))
        values = {name: initial[name] for name in others}
        del state, initial  # freed before others are loaded
    values |= place(source, found, targets, expected)
    return jax.tree_util.tree_map_with_path(lambda at, _: values[path_name(at[1:])], placed)


def _named(variables: Variables) -> dict[str, Any]:
    """Returns the leaves of the parameters and of the model state by their paths in the model."""
    params, model_state = map(named_leaves, variables)
    if both := params.keys() & model_state.keys():
        raise UserError(f"{min(both)} is both a parameter and a part of the model state")
    return params | model_state
