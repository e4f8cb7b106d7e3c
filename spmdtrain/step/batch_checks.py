"""Checks of a batch before its program is compiled: padding, precision."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.adapters.base import Mode, Variables
from spmdtrain.config.run_config import RunConfig
from spmdtrain.errors import UserError, option
from spmdtrain.kernels.attention import check_context_used
from spmdtrain.kernels.reference import reference_kernels
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step.gradients import ON_ONE_DEVICE, SumOrder
from spmdtrain.step.metrics import Combination, Scalar, loss_terms, outputs_of_training
from spmdtrain.step.objective import INPUTS, Forward
from spmdtrain.step.optimizer import Update
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves
from spmdtrain.xla.jaxpr import equations
from spmdtrain.xla.padding import why_not_means, why_padding_matters, why_parts_differ
from spmdtrain.xla.partitioner_faults import check_partitioning

PyTree = Any
COUPLED = "the objective is declared as batch_coupled: its values depend on the whole batch"
_SHOWN = 8  # entries of a batch in a message
_WEIGHTED = (
    "Scalar(value, weight) declares that the mean over microbatches, with these weights, is meant"
)
ABSTRACT_DRAW: Any = np.zeros(2, np.uint32)
"""The `draw` argument of an evaluation that is only traced."""


class BatchChecks:
    """Checks of the batches of one model and objective. Nothing is computed, only traced."""

    def __init__(
        self,
        forward: Forward,
        update: Update,
        state: TrainState,
        placement: Placement,
        config: RunConfig,
        order: SumOrder,
    ) -> None:
        self._forward, self._update, self._state = forward, update, state
        self._placement, self._config, self._order = placement, config, order
        self._why_not_padded: dict[tuple[bool, str], str | None] = {}
        self._why_not_apart: dict[str, str | None] = {}

    def check_training(self, batch: PyTree, mask: Any | None) -> None:
        """Checks that a train step of such a batch computes what the options promise.

        `batch` and `mask` are abstract; `mask` is None if the batch is not padded.

        Raises:
          UserError: If the order of sums does not fit the batch, if padding rows could change the
            gradients, if microbatches could change the values of the objective, or if the model
            computes nothing in the compute dtype.
        """
        microbatches = self._config.microbatches
        self._order.check_rows(jax.tree.leaves(batch)[0].shape[0], microbatches)
        if microbatches > 1:
            self._check_microbatches(batch, microbatches)
        if mask is not None:
            self._check_padded(batch, mask.shape[0])
        if self._forward.compute_dtype != jnp.float32:
            self._check_compute_dtype(batch)

    def check_evaluation(self, rows: PyTree, size: int) -> None:
        """Checks that the order of sums does not change an evaluation.

        `rows` is one example, arrays of leading dim 1, and `size` the number of rows of the batch.

        Raises:
          UserError: If the batch does not divide over the parts that the order evaluates apart, or
            if the objective combines examples.
        """
        objective = self._forward.objective
        given = self._config.eval_batch_size is not None
        name = "eval_batch_size" if given else "the batch size of evaluations, global_batch_size,"
        self._order.check_rows(size, name=name)

        def run(variables: Variables, marked: tuple[PyTree, Any]) -> PyTree:
            return self._forward.in_eval(objective, variables, *marked, ABSTRACT_DRAW)

        def why(parts: int) -> str | None:
            if objective.batch_coupled:
                return COUPLED
            batch = _abstract_batch(rows, size)
            if (key := str(batch)) not in self._why_not_apart:
                marked = batch, jax.ShapeDtypeStruct((size,), jnp.float32)
                with reference_kernels(), use_placement(ON_ONE_DEVICE):
                    self._why_not_apart[key] = why_parts_differ(
                        run, self._state.variables, marked, parts, own_draws=True
                    )
            return self._why_not_apart[key]

        self._order.check_apart(why)

    def why_not_padded(self, rows: PyTree, size: int, *, predict: bool = False) -> str | None:
        """Returns why padding rows could change an evaluation; None if they cannot.

        `rows` is one example, arrays of leading dim 1, and `size` the number of rows of the batch.
        With `predict`, that function is called instead of the objective.
        """
        function = self._forward.predict if predict else self._forward.objective
        if function.mask:  # the function handles padding rows itself
            return None
        if self._order.is_fixed and not predict:
            return None  # no row depends on others, see `check_evaluation`
        if function.batch_coupled:
            return COUPLED
        batch = _abstract_batch(rows, max(size, 2))
        key = (predict, str(batch))
        if key not in self._why_not_padded:

            def run(variables: Variables, batch: PyTree) -> PyTree:
                return self._forward.in_eval(function, variables, batch, None, ABSTRACT_DRAW)

            with reference_kernels():  # kernels cannot be analyzed
                self._why_not_padded[key] = why_padding_matters(run, self._state.variables, batch)
        return self._why_not_padded[key]

    def _check_microbatches(self, batch: PyTree, microbatches: int) -> None:
        """Raises `UserError` if microbatches may change the objective's values.

        It needs a proof that they do not, or the objective's declaration. Each microbatch has batch
        statistics of its own, so a model with state is analyzed in evaluation mode.
        """
        objective, state = self._forward.objective, self._state
        if objective.by_example:
            return
        params, frozen = self._update.partition(state.params)
        mode = Mode.EVAL if jax.tree.leaves(state.model_state) else Mode.TRAIN

        scalars: dict[str, bool] = {}  # and whether their mean is the loss

        def outputs(given: PyTree, rows: PyTree) -> Mapping[str, Any]:
            key = jax.random.key(0)
            params, frozen, model_state = given
            found, _ = self._forward.outputs(
                params, model_state, key, frozen=frozen, batch=rows, mode=mode
            )
            found = outputs_of_training(found)
            if not isinstance(found, Mapping):
                return {}
            for name, x in found.items():
                if isinstance(x, Scalar):
                    scalars[name] = x.weight is None and name in loss_terms(found)
            return found

        def values(given: PyTree, rows: PyTree, is_weighted: bool) -> PyTree:
            return [
                x
                for x in outputs(given, rows).values()
                if isinstance(x, tuple) == is_weighted and not isinstance(x, (Scalar, Combination))
            ]

        def numbers(given: PyTree, rows: PyTree) -> list[Any]:
            found = outputs(given, rows)
            return [jnp.asarray(found[name].value) for name in scalars]

        given = params, frozen, state.model_state

        why = COUPLED if objective.batch_coupled else None
        for is_weighted in () if why else (True, False):
            why = why or why_parts_differ(
                partial(values, is_weighted=is_weighted),
                given,
                batch,
                microbatches,
                own_draws=True,
                gradients=True,
                vjps=True,
                averages=not is_weighted,
            )
        size = jax.tree.leaves(batch)[0].shape[0]
        if why and (describe := getattr(_owner(objective.function), "describe_losses", None)):
            raise UserError(
                f"microbatches is {microbatches}, and the loss or a metric of the compiled Keras "
                f"model may combine examples of the batch: its losses are {describe()} ({why}). It "
                f"would combine only the {size // microbatches} examples of a microbatch, which is "
                "another loss. Leave out microbatches; to save memory, use more devices or remat. "
                "If no example depends on others, use KerasModel with an objective that declares "
                "it: batch_coupled(objective, coupled=False)"
            )
        if why:
            raise UserError(
                f"microbatches is {microbatches}, and the objective's values may depend on other "
                f"examples of the batch ({why}): it would combine only the {size // microbatches} "
                "examples of a microbatch, which is another loss. Set microbatches to 1; to save "
                "memory, use more devices or remat. A mean whose denominator depends on the batch "
                "is (values, weights) or a Scalar; batch_coupled(objective, coupled=False) "
                "declares that the values of an example do not depend on others"
            )
        reasons = why_not_means(numbers, given, batch, microbatches) if scalars else []
        for (name, is_loss), (why, is_sum) in zip(scalars.items(), reasons, strict=True):
            if is_sum or (why and is_loss):
                what = "is a sum over the examples" if is_sum else "may not be a mean over examples"
                declared = "" if is_sum else f". {_WEIGHTED}"
                raise UserError(
                    f"microbatches is {microbatches}, and the Scalar {name!r} {what} of the batch "
                    f"({why}): the mean over microbatches would be another number. Return a value "
                    "for each example, or Scalar(x.mean()). Set microbatches to 1 otherwise"
                    f"{declared}"
                )

    def _check_padded(self, batch: PyTree, size: int) -> None:
        """Checks that padding rows cannot change what a step computes."""
        state = self._state
        params, frozen = self._update.partition(state.params)

        def outputs(params: PyTree, frozen: PyTree, batch: PyTree) -> PyTree:
            key = jax.random.key(0)
            given = params, state.model_state, key
            return self._forward.outputs(*given, frozen=frozen, batch=batch)[0]

        why = None
        if carried := jax.tree.leaves(state.model_state):
            why = f"the model carries state ({len(carried)} arrays, for example batch statistics)"
        elif self._forward.objective.batch_coupled and not self._forward.objective.mask:
            why = COUPLED
        elif not self._forward.objective.mask:
            at_once = size // self._config.microbatches
            why = why_not_in_training(outputs, params, frozen, batch, at_once)
        if why:
            shards, batch = self._placement.batch_shards, self._config.global_batch_size
            parts = shards * self._config.microbatches
            padded, divides = f"padded to {size} rows on {shards} devices", size
            what = f"the global batch, {padded},"  # `fit` may have set another batch size
            if batch is not None and self._config.padded_batch_size(shards) == size != batch:
                what = f"global_batch_size is {batch}, and {padded} it"
                divides = max(1, batch // parts) * parts
            raise UserError(
                f"{what} could give other gradients: {why}. Choose one that divides over them: "
                f"{option('global_batch_size', divides)}"
            )

    def _check_compute_dtype(self, batch: PyTree) -> None:
        """Raises `UserError` if no product of the model is computed in the compute dtype.

        An input of a wider dtype would make every product wider again, and the cast parameters
        would only cost precision.
        """
        products = [
            {x.aval.dtype for x in equation.invars}
            for equation in equations(self.forward_program(batch))
            if equation.primitive.name in ("dot_general", "conv_general_dilated")
        ]
        dtype = self._forward.compute_dtype
        if products and not any(dtype in dtypes for dtypes in products):
            entries = [
                f"{name or 'an array'} of {x.dtype}" for name, x in named_leaves(batch).items()
            ]
            shown = ", ".join(entries[:_SHOWN]) + ", ..." * (len(entries) > _SHOWN)
            raise UserError(
                f"compute_dtype is {dtype}, and none of the model's {len(products)} products is "
                "computed in it, because its input is wider. Float32 entries of a batch named "
                f"{', '.join(INPUTS)} are cast (of a tuple, the first element), and this batch has "
                f"{shown}: cast the model's input in the objective"
            )

    def forward_program(self, batch: PyTree) -> Any:
        """Returns the open jaxpr of the objective's values for abstract rows of a global batch."""
        state = self._state
        params, frozen = self._update.partition(state.params)

        def outputs(params: PyTree, frozen: PyTree, batch: PyTree, *given: PyTree) -> PyTree:
            return self._forward.outputs(params, *given, frozen=frozen, batch=batch)

        given = state.model_state, jax.eval_shape(jax.random.key, 0)
        return jax.make_jaxpr(outputs)(params, frozen, batch, *given).jaxpr


def check_program(jaxpr: Any, args: PyTree, placement: Placement) -> None:
    """Checks that a program computes the same on several devices as on one, and uses the mesh.

    The jaxpr is open, and its arguments are arrays or abstract arrays with shardings.

    Raises:
      UserError: If the axis "context" is not used, or if XLA's partitioner computes an operation
        wrongly.
    """
    check_context_used(jaxpr, placement)
    check_partitioned(jaxpr, args, placement)


def check_partitioned(jaxpr: Any, args: PyTree, placement: Placement) -> None:
    """Checks that XLA's partitioner computes a program correctly; see `check_program`."""
    if placement.mesh is not None:
        check_partitioning(jaxpr, args, placement.mesh.shape, BATCH_AXES)


def _owner(function: Any) -> Any:
    """Returns the object whose method a function is; None if there is none."""
    return getattr(inspect.unwrap(function), "__self__", None)


def _abstract_batch(rows: PyTree, size: int) -> PyTree:
    """Returns the shapes of a batch of `size` such rows."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (size, *np.shape(x)[1:]), jax.dtypes.canonicalize_dtype(x.dtype)
        ),
        rows,
    )


# -- Training batches that do not divide over the devices, padded with rows of weight 0 ------------


def why_not_in_training(
    outputs: Callable[[PyTree, PyTree, PyTree], PyTree],
    params: PyTree,
    frozen: PyTree,
    batch: PyTree,
    rows: int,
) -> str | None:
    """Returns why padding rows could change what a training step computes; None if they cannot.

    The proof covers the values and their derivatives with respect to the parameters. Forward mode
    computes these for each row, so it also covers custom derivatives (`custom_jvp`). A `custom_vjp`
    has no forward mode, so it is returned as a reason.

    Args:
      outputs: Maps (params, frozen, batch) to the objective's values.
      params: Trained parameters; here and below, abstract arrays suffice.
      frozen: Parameters that are not trained.
      rows: Number of rows that the objective gets at once.
    """

    def run(given: tuple[PyTree, PyTree, PyTree], batch: PyTree) -> PyTree:
        params, tangents, frozen = given
        values, derivatives = jax.jvp(lambda p: outputs(p, frozen, batch), (params,), (tangents,))
        inexact = [x for x in jax.tree.leaves(derivatives) if x.dtype != jax.dtypes.float0]
        return values, inexact

    part = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((max(rows, 2), *x.shape[1:]), x.dtype), batch
    )
    why = why_padding_matters(run, (params, params, frozen), part)
    return why and why.replace("custom_lin", "custom_vjp")  # the primitive's name in forward mode
