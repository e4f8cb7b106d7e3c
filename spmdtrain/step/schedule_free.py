"""The parameters with which a schedule-free optimizer's model is evaluated.

Such an optimizer (Defazio et al., "The Road Less Scheduled", 2024) computes gradients at one point
and averages others. The model is evaluated with the average.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.tree import named_leaves, path_name, promoted

PyTree = Any


def is_schedule_free(opt_state: PyTree) -> bool:
    """Returns whether the state of an optimizer contains the state of a schedule-free one."""
    return bool(_nodes(opt_state))


def average_in(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the average of the parameters, in at least float32.

    Parameters that the schedule-free optimizer does not update are returned as they are.
    """
    wide = jax.tree.map(lambda x: jnp.asarray(x, promoted(x.dtype, jnp.float32)), params)
    averages: dict[str, jax.Array] = {}
    named = named_leaves(wide)
    for node in _nodes(opt_state):
        z = named_leaves(node.z)
        of_node = {name: named[name] for name in z}
        state = node._replace(z={name: x.astype(named[name].dtype) for name, x in z.items()})
        averages |= optax.contrib.schedule_free_eval_params(state, of_node)
    return jax.tree_util.tree_map_with_path(lambda at, x: averages.get(path_name(at), x), wide)


def _nodes(opt_state: PyTree) -> list[Any]:
    def is_node(x: Any) -> bool:
        return isinstance(x, optax.contrib.ScheduleFreeState)

    return [x for x in jax.tree.leaves(opt_state, is_leaf=is_node) if is_node(x)]
