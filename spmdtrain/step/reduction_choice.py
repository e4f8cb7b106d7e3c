"""The choice of the gradient reduction: by XLA, or by a function under `shard_map`.

A function under `shard_map` is used only if the gradients are the same as with XLA's reduction.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed.first_call import call_together
from spmdtrain.errors import UserError
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import (
    ParamGathers,
    Placement,
    record_strategy_queries,
    use_gathers,
    use_placement,
)
from spmdtrain.step.exact_checks import check_exact
from spmdtrain.step.gradients import ON_ONE_DEVICE, Gradients
from spmdtrain.step.reductions import NAMED, Reduction, all_reduce, flattened, in_dtype, pairwise
from spmdtrain.step.scattered_reduction import ScatteredReduction
from spmdtrain.tree import named_leaves
from spmdtrain.xla.jaxpr import constrains_sharding
from spmdtrain.xla.padding import why_parts_differ

PyTree = Any
OF_STATE = "the model carries state"
"""The beginning of the reason if the model has state, which depends on the global batch."""


def requested_reduction(
    function: Reduction | None, config: RunConfig, placement: Placement, layout: Layout
) -> Reduction | ScatteredReduction | None:
    """Returns the reduction that the user or the configuration requests; None if neither does.

    `function` is the user's own reduction.

    Raises:
      UserError: If `function` is not callable, if nothing is split that `reduce_scatter` could
        scatter, or if two of the options contradict each other.
    """
    options = config.collectives
    if config.exact is not None:
        check_exact(config, placement, function)
        return pairwise
    if function is not None and not callable(function):
        raise UserError(
            f"reduction is {function!r}: it must be a function of (gradients, axes); "
            f"collectives.reduction takes names: {', '.join(NAMED)}"
        )
    if options.reduction not in (None, "automatic"):
        if function is not None:
            raise UserError(
                f"collectives.reduction is {options.reduction}, and a reduction function is "
                "given: use only one of them"
            )
        if options.reduction == "reduce_scatter":
            if not layout.splits_gradients:
                raise UserError(
                    "collectives.reduction is reduce_scatter, which is for the strategies that "
                    f"split gradients (zero, fully_sharded), and the strategy is {placement.name}: "
                    "use all_reduce"
                )
            return ScatteredReduction(layout, options.reduce_dtype)
        function = NAMED[options.reduction]
    if function is None and config.batch_statistics == "replica" and placement.batch_shards > 1:
        if options.reduction == "automatic":
            raise UserError(
                "batch_statistics is replica, which reduces gradients under shard_map, and "
                "collectives.reduction is automatic, which leaves them to XLA: leave one out"
            )
        on_cpu = placement.devices[0].platform == "cpu"
        function = flattened if on_cpu and options.reduce_dtype is None else all_reduce
    if options.reduce_dtype is None:
        return function
    if function is None and layout.splits_gradients:
        return ScatteredReduction(layout, options.reduce_dtype)
    return in_dtype(function or all_reduce, options.reduce_dtype)


def describe_request(config: RunConfig) -> str:
    """Returns the setting that requests a reduction under `shard_map`, for an error message."""
    if config.exact is not None:
        return f"exact={config.exact}"
    if config.batch_statistics == "replica":
        return "batch_statistics=replica"
    if config.collectives.reduction is not None:
        return f"collectives.reduction={config.collectives.reduction}"
    if config.collectives.reduce_dtype is not None:
        return f"collectives.reduce_dtype={config.collectives.reduce_dtype}"
    return "a reduction function"


def default_reduction(
    config: RunConfig, placement: Placement, layout: Layout
) -> Reduction | ScatteredReduction | None:
    """Returns the reduction that is faster than XLA's; None if there is none.

    On CPU this is one all-reduce of the flattened gradients, with several processes three times as
    fast. GPU and TPU have dedicated links, and XLA combines its own collectives there. But on TPU
    it all-reduces gradients that it should reduce-scatter. The caller checks that the reduction
    computes the same gradients.
    """
    if config.collectives.reduction is not None or not config.jit or placement.batch_shards == 1:
        return None
    platform = placement.devices[0].platform
    if layout.splits_gradients:
        return ScatteredReduction(layout) if platform == "tpu" else None
    return flattened if platform == "cpu" and layout.replicates_params else None


def shard_map_blocker(
    gradients: Gradients,
    *,
    layout: Layout,
    params: PyTree,
    frozen: PyTree,
    model_state: PyTree,
    batch: PyTree,
    values: Callable[[PyTree, PyTree, PyTree, PyTree], PyTree],
    in_context: bool = False,
    batch_coupled: bool = False,
) -> str | None:
    """Returns why gradients reduced under `shard_map` could differ from XLA's; None if they cannot.

    With `gradients.per_replica`, differences by batch statistics and random numbers are intended
    and not reported. The parameters, the model state and the global batch are abstract.

    Args:
      params: The trained parameters; `frozen` are the others.
      values: Maps (params, frozen, model_state, batch) to the objective's values, computed without
        batch statistics.
      in_context: Whether the model runs in a context that it does not have under `shard_map`; see
        `ModelContext`.
      batch_coupled: Whether the objective is declared to combine the examples of its batch.
    """
    if batch_coupled and gradients.parts > 1:
        return "the objective is declared as batch_coupled"
    name = gradients.placement.name
    scatters = isinstance(gradients.reduction, ScatteredReduction)
    splits = layout.splits_tensors if scatters else not layout.replicates_params
    if gradients.placement.size("expert") > 1:
        return "mesh.expert splits the parameters of the experts, whose gradients XLA reduces"
    if splits and not gradients.gathers_params:
        return (
            f"the strategy {name} splits the parameters; use mirrored, zero, central_storage or "
            "hybrid, without rules"
        )
    if gradients.placement.size("context") > 1:
        return "mesh.context splits the tokens of each example, whose gradients XLA reduces"
    state_leaves = jax.tree.leaves(model_state)
    if state_leaves and not gradients.per_replica and not gradients.batch_axes:
        return (
            f"{OF_STATE} ({len(state_leaves)} arrays, for example batch "
            "statistics), which would differ between devices"
        )
    single = dataclasses.replace(gradients, reduction=None, placement=ON_ONE_DEVICE)
    key = jax.eval_shape(jax.random.key, 0)
    gathers = ParamGathers(None)
    with record_strategy_queries() as queries, use_gathers(gathers):
        trace = jax.make_jaxpr(single.of_sum, axis_env=gradients.batch_axes)
        jaxpr = trace(params, frozen, model_state, batch, key)
    if scatters and (whole := layout.gathered_whole(gathers.in_loop)):
        return (
            f"{min(whole)} would be gathered whole: only parameters that the model passes to "
            "scan_layers, and whose first dim is not split, are gathered one layer at a time"
        )
    if queries:
        return "the objective calls current_strategy(), which is unknown on a single device"
    named = dict(gradients.batch_axes)
    if effects := [x for x in jaxpr.effects if getattr(x, "name", None) not in named]:
        return (
            f"the objective has side effects ({', '.join(map(str, effects))}), "
            "which each device would repeat"
        )
    if constrains_sharding(jaxpr.jaxpr):
        return "the objective constrains the sharding of arrays itself"
    _, is_used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    if is_used[-1] and not gradients.own_draws:  # the key is the last argument
        return (
            "the model or the objective draws random numbers (dropout), which would differ "
            "between devices"
        )
    if (parts := gradients.parts) == 1:
        return None
    # Before the proof below, which traces the model without its context.
    if in_context and _depends_on_context(values, params, frozen, model_state, batch):
        return "the model depends on the mesh of JAX's context, or on Flax's logical axis rules"
    with use_placement(gradients.part_placement):
        why = why_parts_differ(
            lambda given, rows: values(given[0], given[1], given[2], rows),
            (params, frozen, model_state),
            batch,
            parts,
            own_draws=gradients.own_draws,
            gradients=True,
            axes=gradients.batch_axes,
        )
    if why:
        return (
            "the objective's values may depend on other examples of the batch, on its size or on "
            f"an example's position in it, and each device has only a part of the batch ({why})"
        )
    return None


def _depends_on_context(values: Callable[..., PyTree], *given: PyTree) -> bool:
    """Returns whether a model computes something else, or fails, without its `ModelContext`."""

    def program() -> str:
        text = str(jax.make_jaxpr(lambda *args: values(*args))(*given))
        return re.sub(r"0x[0-9a-f]+", "", text)  # addresses of functions

    with record_strategy_queries():
        within = program()
    with use_placement(ON_ONE_DEVICE):
        try:
            return program() != within
        except Exception:  # of any class, as the model's code raises them
            return True


def check_agrees(reduction: Reduction, placement: Placement, params: PyTree) -> None:
    """Raises `UserError` if a user's reduction returns different gradients on the devices.

    The reduction is called once, with random arrays of the parameters' shapes and dtypes. Without
    this check the devices' copies of a parameter would differ from the first step on, without an
    error.
    """
    if placement.mesh is None or placement.batch_shards == 1:
        return

    def local(key: jax.Array) -> PyTree:
        for axis in BATCH_AXES:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        noise = jax.tree.map(lambda x: jax.random.normal(key, x.shape).astype(x.dtype), params)
        reduced = reduction(noise, BATCH_AXES)
        return jax.tree.map(
            lambda x: (jax.lax.pmax(x, BATCH_AXES) == jax.lax.pmin(x, BATCH_AXES)).all(), reduced
        )

    whole = PartitionSpec()
    program = jax.shard_map(
        local, mesh=placement.mesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    agrees = call_together(jax.jit(program), jax.random.key(0))
    by_name = named_leaves(jax.device_get(agrees))
    if differing := [name for name, same in by_name.items() if not same]:
        raise UserError(
            f"the reduction returns different gradients on each device, of {differing[0]} for "
            "example: it must return the sums over all of its axes, as "
            "jax.lax.psum(gradients, axes) does"
        )
