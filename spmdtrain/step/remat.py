"""Rematerialisation: what the backward pass computes again rather than keeps in memory."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from spmdtrain.xla.jaxpr import equations

_POLICIES: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
# Known to JAX: what it has traced under one policy is not taken for what another would give.
_policy = jax.make_user_context(default_value="none")

F = TypeVar("F", bound=Callable[..., Any])


def remat(function: F) -> F:
    """Mark a part of a model, a block say, whose inputs are kept and whose inside may not be.

    What is done with it is the run's choice (`--remat full`); with `none` it is called as it is.
    A function of arrays: what it closes over counts as its input. It must neither draw from a
    module's random streams nor change its variables: hand it keys, and return what changes.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        policy = _policy.value
        chosen = function if policy == "none" else _remat(function, policy)
        return chosen(*args, **kwargs)

    return run  # type: ignore[return-value]


def with_policy(objective: Callable[..., Any], policy: str, *args: Any) -> Any:
    """`objective(*args)`, its marked parts rematerialised by the policy; itself, if it has none."""
    if policy == "none":
        return objective(*args)
    with _policy(policy):
        traced = jax.make_jaxpr(objective)(*args)
        if any(one.params.get("policy") is _POLICIES[policy] for one in equations(traced.jaxpr)):
            return objective(*args)
    return _remat(objective, policy)(*args)


def _remat(function: Callable[..., Any], policy: str) -> Callable[..., Any]:
    return jax.checkpoint(function, policy=_POLICIES[policy])
