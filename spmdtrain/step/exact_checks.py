"""Checks of what cannot have the same bits on any number of devices."""

from collections.abc import Mapping
from typing import Any

import optax

from spmdtrain.config.run_config import RunConfig
from spmdtrain.errors import UserError
from spmdtrain.sharding.placement import Placement
from spmdtrain.step.extra_arguments import extra_names
from spmdtrain.step.metrics import Sums


def check_exact(config: RunConfig, placement: Placement, reduction: Any) -> None:
    """Raises `UserError` if a run with `exact` cannot have the same bits on any number of devices.

    `reduction` is the user's reduction of gradients; None without.
    """
    shards = config.exact
    assert shards is not None
    if placement.mesh is None:
        raise UserError(
            _message(f"strategy {placement.name} has no mesh", "use one_device for a single device")
        )
    if (tensor := placement.size("tensor")) > 1 or placement.strategy.needs_rules:
        raise UserError(
            _message(
                f"strategy {placement.name} splits matrix products over tensor={tensor}, which "
                "adds up their parts in another order",
                "use mirrored, zero, fully_sharded or hybrid",
            )
        )
    if (context := placement.size("context")) > 1:
        raise UserError(
            _message(
                f"mesh.context is {context}, over which attention adds up its parts in another "
                "order",
                "leave it out",
            )
        )
    if (expert := placement.size("expert")) > 1:
        raise UserError(
            _message(
                f"mesh.expert is {expert}, over which the gradients of an expert are added up in "
                "another order",
                "leave it out",
            )
        )
    if placement.strategy.on_host:
        raise UserError(
            f"exact is {shards} and strategy is {placement.name}, which keeps state in host "
            "memory: that combination is not supported; use mirrored, zero, fully_sharded or hybrid"
        )
    if reduction is not None:
        raise UserError(
            _message("a reduction function is given, with an order of its own", "leave it out")
        )
    check_exact_shards(shards, placement.batch_shards)


def check_exact_shards(shards: int, devices: int) -> None:
    """Raises `UserError` if the virtual shards do not divide over the devices of a batch."""
    if shards < 2 * devices or shards % devices:
        raise UserError(
            f"exact is {shards} on {devices} devices: each needs at least two virtual "
            f"shards, and equally many. Give a power of two from {2 * devices} on, and the "
            "same one wherever the bits should be the same; the number of devices must be a power "
            "of two"
        )


def check_exact_batch(
    shards: int, microbatches: int, size: int, name: str = "global_batch_size"
) -> None:
    """Raises `UserError` if a global batch does not divide over the virtual shards.

    Each shard has `microbatches` parts, and `name` is the option that sets the batch's `size`.
    """
    parts = shards * microbatches
    if size % parts:
        of_microbatches = f" times {microbatches} microbatches" * (microbatches > 1)
        raise UserError(
            f"exact is {shards} and {name} is {size}, which does not divide over "
            f"{shards} virtual shards{of_microbatches}: give a multiple of {parts}"
        )


def check_one_weight(needed: Mapping[str, Any]) -> None:
    """Raises `UserError` if gradients need a sum of the whole batch before they are computed.

    `needed` has the sums that they need, by the term of the loss.
    """
    if any(isinstance(x, Sums) for x in needed.values()):
        raise UserError(
            _message(
                "the weights of the loss depend on trained parameters",
                "take them from the batch, or put jax.lax.stop_gradient around them",
            )
        )
    if needed:
        raise UserError(
            _message("the loss is a Combination of means with several weights", "return one loss")
        )


def check_exact_optimizer(optimizer: optax.GradientTransformation) -> None:
    """Raises `UserError` if an optimizer evaluates the loss itself."""
    if evaluates := sorted({"value_fn", "obj_fn", "grad_fn"} & set(extra_names(optimizer))):
        raise UserError(
            _message(
                f"the optimizer evaluates the loss ({', '.join(evaluates)})", "choose another one"
            )
        )


def _message(why: str, fix: str) -> str:
    return f"exact: {why}, so the bits would depend on the number of devices: {fix}"
