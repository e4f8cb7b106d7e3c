"""Loops over the layers of a model, and rematerialization of their activations."""

import re
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import jax

from spmdtrain.kernels.attention import keep_attention
from spmdtrain.sharding.placement import (
    as_shards,
    current_scope,
    gather_shards,
    has_shards,
    use_scope,
)
from spmdtrain.xla.jaxpr import equations

# -- Loops over the layers of a model: one compiled body, or every layer compiled separately -------

PyTree = Any

# XLA schedules across unrolled layers, which makes them faster by the cycles of the TPU's compiler.
# But the compile time grows with the layers: for the 12 of GPT-2 small, 85 s instead of 30-50 s.
MAX_UNROLLED = 12
LAYERS = "layers"
"""The scope of the names of the operations of `scan_layers`."""


def unrolls(layers: int, unroll: bool | None) -> bool:
    """Returns whether layers are compiled separately; with `unroll` None their number decides."""
    return layers <= MAX_UNROLLED if unroll is None else unroll


def scan_layers(
    layer: Callable[[jax.Array, PyTree], tuple[jax.Array, PyTree]],
    x: jax.Array,
    weights: PyTree,
    unroll: bool | None,
) -> tuple[jax.Array, PyTree]:
    """Applies stacked layers one after the other, each marked by `remat`.

    Args:
      layer: Maps (x, weights of a layer) to x and other results, or None for no others.
      weights: Arrays whose first dim is the layer.
      unroll: Whether to compile every layer separately; None chooses by their number.

    Returns:
      The x after the last layer, and the other results of all layers, stacked.
    """
    count = len(jax.tree.leaves(weights)[0])
    weights = as_shards(weights)

    def gathered(x: jax.Array, weights: PyTree) -> tuple[jax.Array, PyTree]:
        return layer(x, gather_shards(weights))

    run = remat_gathers(gathered) if has_shards(weights) else remat(layer)
    with jax.named_scope(LAYERS):
        return jax.lax.scan(run, x, weights, unroll=unrolls(count, unroll))


def is_layer_loop(equation: Any) -> bool:
    """Returns whether a `scan` is the loop of `scan_layers`, which carries the layers' outputs."""
    return bool(re.search(rf"\b{LAYERS}\b", str(equation.source_info.name_stack)))


def describe_layers(jaxpr: Any) -> str:
    """Returns how an open jaxpr computes layers for the log, such as "12 layers unrolled".

    It is "" without `scan_layers`.
    """
    found = {
        (x.params["length"], x.params["unroll"] >= x.params["length"])
        for x in equations(jaxpr)
        if x.primitive.name == "scan" and is_layer_loop(x)
    }
    texts = {True: "unrolled", False: "in a loop"}
    return ", ".join(
        f"{n} {'layer' if n == 1 else 'layers'} {texts[flat]}" for n, flat in sorted(found)
    )


# -- Rematerialization: activations that the backward pass recomputes instead of keeping them ------

# Attention consists of products, too, but a policy does not see those in its kernel.
_and_attention = partial(jax.checkpoint_policies.save_from_both_policies, keep_attention)
_POLICIES: dict[str, Any] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": _and_attention(jax.checkpoint_policies.dots_saveable),
    "dots_no_batch": _and_attention(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "attention": keep_attention,
}
F = TypeVar("F", bound=Callable[..., Any])


def remat(function: F) -> F:
    """Marks a part of a model, a block for example, for rematerialization.

    The run's option decides (`--remat full`): the backward pass then keeps the inputs of the part
    and recomputes its activations. With `none` the function is called unchanged.

    Args:
      function: A function of arrays. Arrays that it closes over count as inputs. It must neither
        draw from a module's random streams nor change its variables: pass keys as arguments, and
        return new values.

    Returns:
      A function of the same arguments.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        policy = current_scope().remat
        chosen = function if policy == "none" else _remat(function, policy)
        return chosen(*args, **kwargs)

    return run  # type: ignore[return-value]


def remat_gathers(function: F) -> F:
    """Marks a layer like `remat`, and never keeps the weights that it gathers.

    The backward pass gathers them again, with the option `none` too.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        policy = current_scope().remat
        if policy == "none":
            return jax.checkpoint(function, policy=_keep_all_but_gathers)(*args, **kwargs)
        return _remat(function, policy)(*args, **kwargs)

    return run  # type: ignore[return-value]


def _keep_all_but_gathers(primitive: Any, *args: Any, **params: Any) -> bool:
    return primitive.name != "all_gather"


def with_policy(objective: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Returns an objective with rematerialization.

    `policy` is the option `remat`. It applies to the parts marked by `remat`, or to the whole
    objective if it has none.
    """
    if policy == "none":
        return objective

    def call(*args: Any) -> Any:
        with use_scope(remat=policy):
            traced = jax.make_jaxpr(objective)(*args)
            if any(x.params.get("policy") is _POLICIES[policy] for x in equations(traced.jaxpr)):
                return objective(*args)
        return _remat(objective, policy)(*args)

    return call


def _remat(function: Callable[..., Any], policy: str) -> Callable[..., Any]:
    return jax.checkpoint(function, policy=_POLICIES[policy])
