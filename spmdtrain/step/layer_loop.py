"""Loops over the layers of a model: one compiled body, or every layer compiled separately."""

import re
from collections.abc import Callable
from typing import Any

import jax

from spmdtrain.sharding.placement import as_shards, gather_shards, has_shards
from spmdtrain.step.remat import remat, remat_gathers
from spmdtrain.xla.jaxpr import equations

PyTree = Any

# XLA schedules across unrolled layers, which makes them faster by the cycles of the TPU's compiler.
# But the compile time grows with the layers: for the 12 of GPT-2 small, 85 s instead of 30-50 s.
MAX_UNROLLED = 12
_SCOPE = "layers"


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
    with jax.named_scope(_SCOPE):
        return jax.lax.scan(run, x, weights, unroll=unrolls(count, unroll))


def describe_layers(jaxpr: Any) -> str:
    """Returns how an open jaxpr computes layers for the log, such as "12 layers unrolled".

    It is "" without `scan_layers`.
    """
    found = {
        (x.params["length"], x.params["unroll"] >= x.params["length"])
        for x in equations(jaxpr)
        if x.primitive.name == "scan" and re.search(rf"\b{_SCOPE}\b", str(x.source_info.name_stack))
    }
    texts = (f"{n} layers {'unrolled' if flat else 'in a loop'}" for n, flat in sorted(found))
    return ", ".join(texts)
