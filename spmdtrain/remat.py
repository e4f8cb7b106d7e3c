"""Rematerialisation: what the backward pass computes again rather than keeps in memory."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import jax

_POLICIES: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
_policy: ContextVar[str] = ContextVar("remat", default="none")
_marked: ContextVar[list[Any] | None] = ContextVar("marked", default=None)

F = TypeVar("F", bound=Callable[..., Any])


def rematerialize(function: F) -> F:
    """Mark a part of a model, a block say, whose inputs are kept and whose inside may not be.

    What is done with it is the run's choice (`--remat full`); with `none` it is called as it is.
    A function of arrays: what it closes over counts as its input. It must neither draw from a
    module's random streams nor change its variables: hand it keys, and return what changes.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if (marked := _marked.get()) is not None:
            marked.append(function)
        policy = _policy.get()
        chosen = function if policy == "none" else _remat(function, policy)
        return chosen(*args, **kwargs)

    return run  # type: ignore[return-value]


def with_policy(objective: Callable[..., Any], policy: str, *args: Any) -> Any:
    """`objective(*args)`, its marked parts rematerialised by the policy; itself, if it has none."""
    if policy == "none":
        return objective(*args)
    found: list[Any] = []
    token = _marked.set(found)
    try:
        jax.eval_shape(objective, *args)
    finally:
        _marked.reset(token)
    if not found:
        return _remat(objective, policy)(*args)
    with _using(policy):
        return objective(*args)


@contextlib.contextmanager
def _using(policy: str) -> Iterator[None]:
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def _remat(function: Callable[..., Any], policy: str) -> Callable[..., Any]:
    return jax.checkpoint(function, policy=_POLICIES[policy])
