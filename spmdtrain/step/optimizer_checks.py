"""Checks that a run can use an optimizer."""

from typing import Any

import jax
import optax

from spmdtrain.errors import UserError
from spmdtrain.step.extra_arguments import extra_names
from spmdtrain.step.schedule_free import is_schedule_free

PyTree = Any


def check_optimizer(
    optimizer: optax.GradientTransformation, opt_state: PyTree, *, averages: bool
) -> None:
    """Raises `UserError` if a step cannot run an optimizer, or its result is not what it promises.

    Shapes of the state suffice. `averages` tells whether the run keeps a moving average of
    parameters.
    """
    extra_names(optimizer)  # raises an error if the step does not have an argument
    if averages and is_schedule_free(opt_state):
        raise UserError(
            "ema_decay is set, and the optimizer is schedule-free: it averages the parameters "
            "itself, and evaluation uses that average. Leave ema_decay out"
        )

    def refused(node: Any) -> bool:
        kinds = optax.contrib.SAMState, optax.contrib.DifferentiallyPrivateAggregateState
        return isinstance(node, kinds)

    for node in jax.tree.leaves(opt_state, is_leaf=refused):
        if isinstance(node, optax.contrib.SAMState) and node.cache is not None:
            raise UserError(
                "optax.contrib.sam has opaque_mode=False: between its updates the parameters are "
                "displaced, and an evaluation or a checkpoint would use them. Set opaque_mode=True"
            )
        if isinstance(node, optax.contrib.DifferentiallyPrivateAggregateState):
            raise UserError(
                "optax.contrib.differentially_private_aggregate (dpsgd) needs the gradient of each "
                "example, and a step has that of the mean loss. Compute them in a step of a Loop"
            )
