"""Checks of the state and the metrics that a user's functions return to a `Loop`."""

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from spmdtrain.config.run_config import OPTIONS, RunConfig
from spmdtrain.errors import UserError, did_you_mean
from spmdtrain.step.gradients import NO_SLOPE
from spmdtrain.step.metrics import NORMS_OF_GRADIENTS, check_names, loss_first
from spmdtrain.step.per_replica import NotReducedError, replicas_in
from spmdtrain.step.state import TREES, TrainState
from spmdtrain.strategies import strategy
from spmdtrain.tree import named_leaves
from spmdtrain.xla.jaxpr import equations

PyTree = Any
Init = Callable[[jax.Array], Mapping[str, PyTree]]
"""key -> the parts of the state by name: `params`, and any of the other `TREES`."""
Step = Callable[[TrainState, PyTree, jax.Array], tuple[TrainState, Mapping[str, Any]]]
"""(state, batch, key) -> the state after it, and metrics: scalars by name."""


def make_initial_state(init: Init) -> Callable[[jax.Array, jax.Array], TrainState]:
    """Returns the function of the init and step keys that makes the first state.

    Raises `UserError` if `init` is no function, or does not return parts of the state.
    """
    if not callable(init):
        raise UserError(
            f"start() is given a {type(init).__name__}: it takes a function of a key that makes "
            "the state's parts"
        )

    def begin(init_key: jax.Array, step_key: jax.Array) -> TrainState:
        parts = init(init_key)
        names = list(parts) if isinstance(parts, Mapping) else _described(parts)
        if not isinstance(parts, Mapping) or "params" not in parts:
            raise UserError(f"init returned {names}: it must return a dictionary with 'params'")
        if unknown := [name for name in parts if name not in TREES]:
            raise UserError(
                f"init returned {unknown[0]!r}, which is no part of the state."
                + did_you_mean(unknown[0], TREES)
            )
        empty: dict[str, PyTree] = {name: {} for name in TREES}
        numbers = jax.random.key_data(step_key)
        return TrainState(step=jnp.zeros((), jnp.int32), key=numbers, **empty | dict(parts))

    return begin


def state_and_metrics(returned: Any) -> tuple[Any, Any]:
    """Returns the state and the metrics of a step; raises `UserError` for anything else."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise UserError(
            f"the step returned {_described(returned)}: it must return two things, the state after "
            "it, dataclasses.replace(state, params=...), and the metrics"
        )
    return returned


def check_state(after: Any, before: TrainState) -> None:
    """Raises `UserError` if a step did not return a state of the same arrays."""
    if not isinstance(after, TrainState):
        raise UserError(
            f"the step returned {_described(after)} first: that must be the state after it, "
            "dataclasses.replace(state, params=...)"
        )
    if apart := replicas_in(after):
        raise NotReducedError(
            f"the step put {apart[0]!r}, a value for each replica, into the state: reduce it first"
        )
    was, now = named_leaves(before), named_leaves(after)
    for name in [*was, *(name for name in now if name not in was)]:
        previous, current = (_described(tree.get(name)) for tree in (was, now))
        if previous != current:
            raise UserError(f"the step changed {name} of the state from {previous} to {current}")


def check_trains(jaxpr: Any, arguments: PyTree, results: PyTree) -> None:
    """Raises `UserError` if a step changes parameters without learning from its data.

    That is so if its new parameters and optimizer state need neither the batch nor the key,
    although the loss does, and come from zeros: JAX replaces a gradient that it knows to be 0 by
    zeros.

    Args:
      jaxpr: The open jaxpr of the step.
      arguments: State and batch, arrays or their shapes.
      results: The state after the step and its output, likewise.
    """
    names, given = list(named_leaves(results)), list(named_leaves(arguments))

    def needed(wanted: Callable[[str], bool]) -> tuple[Any, set[str]]:
        """Returns the part of the program that computes results, and the arguments it reads."""
        part, is_used = partial_eval.dce_jaxpr(jaxpr, list(map(wanted, names)))
        return part, {name for name, used in zip(given, is_used, strict=True) if used}

    def is_data(name: str) -> bool:
        return name == "0/key" or name.startswith("1")  # of the state, or of the batch

    losses = [x for x in names if x.startswith("1/metrics/") and "loss" in x.lower()]
    if not any(map(is_data, needed(losses.__contains__)[1])):
        return
    update, read = needed(lambda name: name.startswith(("0/params", "0/opt_state")))
    is_changed = any(x.primitive.name != "device_put" for x in update.eqns)  # more than placed
    if not is_changed or any(map(is_data, read)) or any(x.aval.size > 1 for x in update.constvars):
        return  # an array of the function itself may be the data that it trains on
    params = {x: y for x, y in named_leaves(results).items() if x.startswith("0/params")}
    arrays = {name: leaf.shape for name, leaf in params.items() if leaf.shape}
    for name, shape in arrays.items():
        part, read = needed(name.__eq__)
        copied = any(x in params and x != name for x in read)
        if copied or not any(_is_zeros(x, shape) for x in equations(part)):
            return  # a copy of other parameters, or an update without a gradient
    if not arrays:  # zeros that are scalars are no equations
        return
    raise UserError(
        f"the step's new parameters do not depend on the batch, although its {losses[0][10:]} "
        "does, so it learns nothing from the data: compute the loss from the parameters, "
        f"{NO_SLOPE}"
    )


def _is_zeros(equation: Any, shape: tuple[int, ...]) -> bool:
    """Returns whether an equation makes an array of zeros, as JAX does for a gradient of 0."""
    is_constant = equation.primitive.name == "broadcast_in_dim"
    value = getattr(equation.invars[0], "val", None) if is_constant else None
    return value is not None and value == 0 and equation.outvars[0].aval.shape == shape


def _described(x: Any) -> str:
    """Returns a short description of a value that a user's function returned."""
    if x is None:
        return "nothing"
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}{list(x.shape)}"
    if isinstance(x, (bool, int, float, complex)):
        return f"a Python {type(x).__name__}"
    return f"a {type(x).__name__}"


def as_scalars(metrics: Any) -> dict[str, jax.Array]:
    """Returns a step's metrics in f32; raises `UserError` if they are not scalars."""
    return {
        name: jnp.asarray(x, jnp.float32)
        for name, x in _checked(metrics, "the step's", allowed=NORMS_OF_GRADIENTS).items()
    }


def as_floats(found: Any, whose: str = "the evaluation's") -> dict[str, float]:
    """Returns metrics as floats, the loss first; raises `UserError` if they are not scalars."""
    checked = _checked(found, whose)
    return loss_first({name: float(x) for name, x in checked.items()})


def _checked(metrics: Any, whose: str, allowed: Collection[str] = ()) -> Mapping[str, Any]:
    if not isinstance(metrics, Mapping) or not metrics:
        what = "empty" if isinstance(metrics, Mapping) else _described(metrics)
        raise UserError(f"{whose} metrics are {what}: they must be scalars by name")
    check_names(metrics, f"{whose} metric", allowed)
    for name, value in metrics.items():
        what = f"{whose} metric {name!r} is"
        if replicas_in(value):
            raise NotReducedError(
                f"{what} {value!r}: reduce it to one number, for example by sum()"
            )
        if not _is_real(value):
            raise UserError(f"{what} {_described(value)}: it must be one real number")
        if jnp.shape(value):
            raise UserError(
                f"{what} {_described(value)}: reduce it to one number, for example by weighted_mean"
            )
    return metrics


def check_batch(batch: PyTree, shards: int) -> None:
    """Raises `UserError` if a global batch cannot be split over `shards` devices."""
    for name, leaf in named_leaves(batch).items():
        what = name or "the array"
        if not (shape := np.shape(leaf)):
            raise UserError(
                f"shard_batch: {what} is a single number: a batch is NumPy arrays of a leading "
                "dim of examples (a list is a tree of its items)"
            )
        if shape[0] % shards:
            raise UserError(
                f"shard_batch: {what} of shape {shape}: its leading dim does not divide over "
                f"{shards} devices"
            )


def check_not_donated(state: TrainState, step: int) -> None:
    """Raises `UserError` if a value is no state, or its arrays were donated to the next state.

    `step` is the last recorded step, for the message.
    """
    if not isinstance(state, TrainState):
        raise UserError(f"the state is a {type(state).__name__}: it is what start() returned")
    if state.step.is_deleted():
        raise UserError(
            f"the state was donated to the compiled step (step {step} is the last recorded one): "
            "use the state that the step returned, and first pass it to end_step(state, output)"
        )


def _is_real(x: Any) -> bool:
    if not isinstance(x, (bool, int, float, jax.Array, np.ndarray, np.generic)):
        return False
    dtype = jnp.result_type(x)
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))


def check_config(config: RunConfig) -> None:
    """Raises `UserError` for options that only the `Trainer` supports."""
    for name, row in OPTIONS.items():
        given = operator.attrgetter(name)(config)
        if row.option.in_loops and row.is_given(given):
            raise UserError(
                f"{name} is {given!r}, an option of the Trainer's own step: in a Loop, "
                f"{row.option.in_loops}"
            )
    if strategy(config.strategy).is_asynchronous:
        raise UserError(
            f"strategy {config.strategy} is for the Trainer's steps: for your own loop, use a "
            "Coordinator (docs/parameter-server.md)"
        )
