"""Hyperparameters in the optimizer's state (`optax.inject_hyperparams`) across a resume.

A constant that is injected lives in the optimizer's state, so a restore brings the old value back.
Each checkpoint therefore records the values that the optimizer starts with. If those differ on a
resume, the new value replaces the restored one. A value that the run itself has changed (in a
callback, say) is kept as long as the value to start with is the same. Schedules need none of this:
they are computed from the step count at each update.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.interpreters import partial_eval

from spmdtrain.sharding import path_name
from spmdtrain.state import TrainState

PyTree = Any
_FIELD = jax.tree_util.GetAttrKey("hyperparams")


def injected(opt_state: PyTree) -> dict[str, Any]:
    """Return the injected hyperparameters of an optimizer's state by path."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return {path_name(path): leaf for path, leaf in leaves if _FIELD in path}


def learning_rate(opt_state: PyTree) -> jax.Array | None:
    """Return the injected learning rate; None if there is none, or more than one."""
    found = [x for name, x in injected(opt_state).items() if name.endswith("/learning_rate")]
    found += [x for name, x in injected(opt_state).items() if name == "learning_rate"]
    return found[0] if len(found) == 1 and found[0].ndim == 0 else None


def initial_values(init: Callable[..., PyTree], *arguments: PyTree) -> dict[str, Any]:
    """Return the injected hyperparameters that an optimizer starts with, as numbers.

    Args:
        init: Makes the optimizer's state. It is traced; only what the hyperparameters need is
            computed.
        *arguments: What `init` takes; shapes suffice.
    """
    program, shapes = jax.make_jaxpr(init, return_shape=True)(*arguments)
    wanted = [_FIELD in path for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    if not any(wanted):
        return {}
    needed, used = partial_eval.dce_jaxpr(program.jaxpr, wanted)
    if any(used):  # values computed from the parameters are no setting
        return {}
    values = jax.core.eval_jaxpr(needed, program.consts)
    return {
        name: np.asarray(value).tolist()
        for name, value in zip(injected(shapes), values, strict=True)
    }


def updated(
    state: TrainState,
    shardings: TrainState,
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    tell: Callable[[str], None],
) -> TrainState:
    """Return a restored state with the hyperparameters whose initial values have changed.

    Args:
        state: The restored state.
        shardings: Its shardings.
        saved: The initial values when it was saved.
        now: The initial values of this run.
        tell: Called with a line for each change.
    """
    changed = {name: value for name, value in now.items() if saved.get(name, value) != value}
    if not changed:
        return state

    def replace(path: tuple[Any, ...], leaf: jax.Array, sharding: jax.sharding.Sharding) -> Any:
        if _FIELD not in path or (name := path_name(path)) not in changed:
            return leaf
        value = np.asarray(changed[name], leaf.dtype)
        if leaf.is_fully_replicated:
            tell(f"optimizer: {name} {np.asarray(leaf.addressable_data(0))!s} -> {value!s}")
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: value[index])

    opt_state = jax.tree_util.tree_map_with_path(replace, state.opt_state, shardings.opt_state)
    return dataclasses.replace(state, opt_state=opt_state)
