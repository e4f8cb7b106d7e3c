"""Evaluation of the objective and of the predict function on a batch."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmdtrain.adapters.base import (
    Adapter,
    ComputesParams,
    FreezesState,
    Function,
    Mode,
    ModelContext,
    NameOutputs,
    NamesLayers,
    TakesExamples,
    Variables,
)
from spmdtrain.config.run_config import RunConfig
from spmdtrain.data.sampling import as_marked
from spmdtrain.errors import LocatedErrors, UserError, function_error
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import current_scope
from spmdtrain.step import metrics
from spmdtrain.step.layer_loop import with_policy
from spmdtrain.step.metrics import check_no_pairs, check_precise, is_of_tokens, outputs_of_training
from spmdtrain.step.optimizer import merge
from spmdtrain.tree import (
    in_dtype_of,
    is_key,
    named_leaves,
    path_name,
    promoted,
    with_own_containers,
)

# -- Arguments that an objective or predict function receives because it declares them -------------

PyTree = Any

# Separates the objective's key from the keys that models derive from the same key.
_OF_OBJECTIVES = 0x6F626A65


@dataclass(frozen=True)
class Declared:
    """A function of (model, batch) that may also declare `key` and `mask`.

    Attributes:
      key: Whether the function has a parameter `key` without a default, or with the default None: a
        typed JAX key for random numbers of the function.
      mask: The same for a parameter `mask`: f32 (B,), 0 for padding rows.
      batch_coupled: Whether the function is declared to combine the examples of its batch.
      by_example: Whether the function is declared not to combine them.
    """

    function: Callable[..., PyTree]
    key: bool
    mask: bool
    batch_coupled: bool = False
    by_example: bool = False

    @classmethod
    def of(cls, function: Callable[..., PyTree]) -> "Declared":
        """Returns an objective or predict function with the arguments that it declares."""
        try:
            parameters = list(inspect.signature(function).parameters.values())[2:]
        except (TypeError, ValueError):  # a callable without a signature
            parameters = []
        open_ = {
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            and (p.default is p.empty or p.default is None)
        }
        coupled = getattr(function, "is_batch_coupled", None)
        declared = "key" in open_, "mask" in open_
        return cls(function, *declared, batch_coupled=coupled is True, by_example=coupled is False)

    def given(
        self, key: jax.Array, batch: PyTree, mask: jax.Array | None = None
    ) -> Callable[[Any, PyTree], PyTree]:
        """Returns the function of (model, batch), with the declared arguments bound.

        Args:
          key: The key of the model's random numbers; the function's key derives from it.
          batch: Only its number of rows is read.
          mask: f32 (B,), 0 for padding rows. By default no row is padding.
        """
        declared: dict[str, jax.Array] = {}
        if self.key:
            declared["key"] = jax.random.fold_in(key, _OF_OBJECTIVES)
        if self.mask:
            rows = jax.tree.leaves(batch)[0].shape[0]
            declared["mask"] = jnp.ones(rows, jnp.float32) if mask is None else mask
        return partial(self.function, **declared) if declared else self.function


def eval_key(draw: jax.Array) -> jax.Array:
    """Returns the random key of one batch of an evaluation.

    `draw` is uint32 (2,): the seed of evaluations and the index of the batch.
    """
    return jax.random.fold_in(jax.random.key(draw[0]), draw[1])


# -- Evaluation of the objective and of the predict function on a batch ----------------------------

INPUTS = ("image", "inputs", "x", "tokens")
"""Names under which a batch may hold the model's input.

`model_output` predicts from it, and it is cast to the compute dtype.
"""


def model_output(model: Any, batch: PyTree) -> PyTree:
    """Returns the model's output for the batch's input: the default predict function.

    The input is the batch itself, the first element of a tuple, or the one entry of a dictionary
    that is named in `INPUTS`.

    Raises:
      UserError: If a dictionary has no such entry, or several.
    """
    if isinstance(batch, Mapping):
        inputs = [name for name in INPUTS if name in batch]
        if len(inputs) != 1:
            raise UserError(
                f"which of {sorted(batch)} is the model's input? Give a function "
                "predict(model, batch)"
            )
        return model(batch[inputs[0]])
    return model(batch[0] if isinstance(batch, tuple) else batch)


def default_predict(adapter: Adapter) -> Function:
    """Returns `model_output`, which maps a model of single examples over the batch."""
    base = adapter.base if isinstance(adapter, ComputesParams) else adapter
    if not isinstance(base, TakesExamples):
        return model_output
    on_batch = base.on_batch
    return lambda model, batch: model_output(on_batch(model), batch)


class Forward:
    """The model with its objective and predict function, in the compute dtype and layout of a run.

    All methods are pure and traced under `jit`. Training does not change the leaves of the model
    state whose paths are in `frozen_state`.
    """

    def __init__(
        self,
        adapter: Adapter,
        objective: Function,
        predict: Function,
        layout: Layout,
        context: ModelContext,
        config: RunConfig,
        abstract_params: PyTree,
        frozen_state: Collection[str] = (),
    ) -> None:
        for what, function in (("objective", objective), ("predict", predict)):
            if not callable(function):
                raise function_error(function, what)
        self.objective, self.predict = Declared.of(objective), Declared.of(predict)
        self.compute_dtype = jnp.dtype(config.compute_dtype)
        if frozen_state and isinstance(adapter, FreezesState):
            adapter = adapter.with_frozen_state(frozen_state)
        self._computes = adapter if isinstance(adapter, ComputesParams) else None
        self._adapter = self._computes.base if self._computes else adapter
        self._layout, self._context = layout, context
        self._frozen_state = frozenset(frozen_state)
        self._remat, self._per_replica = config.remat, config.normalizes_per_replica
        self._abstract_params = abstract_params
        self.loss_is_of_tokens = False
        """Whether the loss has a value for each token; known once `training_sums` was traced."""

    def with_named_layers(self, name: NameOutputs) -> "Forward | None":
        """Returns a copy in which calls of layers in the objective return `name(path, outputs)`.

        None if the adapter does not know the model's layers.
        """
        adapter, function = self._adapter, self.objective.function
        if not isinstance(adapter, NamesLayers):
            return None

        def run(model: Any, batch: PyTree, **declared: Any) -> PyTree:
            with adapter.named_layers(model, name):
                return function(model, batch, **declared)

        named = copy.copy(self)
        named.objective = dataclasses.replace(self.objective, function=run)
        return named

    # -- training ------------------------------------------------------------------------------

    def training_sums(
        self, params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[metrics.BatchSums, PyTree]:
        """Returns the objective's weighted sums in training, and the model state after the batch.

        The loss's sum is differentiated. The rows of a mixture also have a sum of the loss for each
        component, "loss/NAME". `params` has the trained parameters and `frozen` the others, each
        with None in place of the rest. The batch may be `MarkedRows`.
        """
        marked = as_marked(batch)
        rows, mask = marked.rows, marked.mask
        run = with_policy(partial(self.outputs, frozen=frozen, batch=rows, mask=mask), self._remat)
        outputs, after = run(params, model_state, key)
        outputs = outputs_of_training(outputs)
        sums = metrics.training_sums(outputs, jax.tree.leaves(rows)[0].shape[0], mask)
        self._check_precise(outputs)
        check_no_pairs(outputs, rows)
        self.loss_is_of_tokens = is_of_tokens(outputs["loss"], rows)
        if marked.component is not None:
            sums |= metrics.component_losses(outputs, marked.component, marked.names, mask)
        return sums, after

    def outputs(
        self,
        params: PyTree,
        model_state: PyTree,
        key: jax.Array,
        *,
        frozen: PyTree,
        batch: PyTree,
        mode: Mode = Mode.TRAIN,
        mask: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Returns what the objective returns, and the model state after the batch."""
        variables = Variables(self._to_compute(merge(params, frozen)), model_state)
        run, args = self._bound(self.objective, variables, batch, key, mask, mode)
        with LocatedErrors(batch):
            outputs, after = run(*args)
        structures: list[Any] = [jax.tree.structure(x) for x in (after, model_state)]
        if structures[0] != structures[1]:
            changed = named_leaves(after).keys() ^ named_leaves(model_state).keys()
            raise UserError(
                f"a call of the model adds or removes {min(changed, default='containers')} in its "
                "state, which must keep its arrays: sow values that are not kept to 'intermediates'"
            )

        def updated(path: tuple[Any, ...], new: jax.Array, old: jax.Array) -> jax.Array:
            if path_name(path) in self._frozen_state:
                return old
            if is_key(old):
                return new
            # A model that computes in 16 bits may have assigned 16-bit arrays to its state.
            is_rounded = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (old, new))
            if not is_rounded and promoted(old.dtype, new.dtype) != old.dtype:
                raise UserError(
                    f"the model assigns {new.dtype} to {path_name(path)} of its state, which is "
                    f"{old.dtype}: initialize it with the dtype that it keeps, such as "
                    "jnp.array(0.0)"
                )
            return new.astype(old.dtype)

        return outputs, jax.tree_util.tree_map_with_path(updated, after, model_state)

    def values(self, params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Returns the objective's values in training, without batch statistics and random draws."""
        mode = Mode.EVAL if self._per_replica else Mode.TRAIN
        key = jax.random.key(0)
        found = self.outputs(params, model_state, key, frozen=frozen, batch=batch, mode=mode)[0]
        return outputs_of_training(found)

    # -- evaluation ----------------------------------------------------------------------------

    def evaluate(
        self, variables: Variables, batch: PyTree, mask: jax.Array, draw: jax.Array
    ) -> metrics.EvaluationSums:
        """Returns the objective's weighted sums over the rows whose mask is 1.

        Args:
          batch: Arrays of leading dim B.
          mask: (B,), 0 for padding rows.
          draw: uint32 (2,), from which the random key derives (see `eval_key`).
        """
        outputs = self.in_eval(self.objective, variables, batch, mask, draw)
        sums = metrics.weighted_sums(outputs, jax.tree.leaves(batch)[0].shape[0], mask)
        self._check_precise(outputs)
        try:
            check_no_pairs(outputs, batch)
        except UserError:
            # The last batch may have as many rows as there are classes, for example. With twice
            # the rows, only a value for each pair of examples still has shape (B, B).
            twice = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype),
                (batch, mask),
            )
            shapes = jax.eval_shape(partial(self.in_eval, self.objective), variables, *twice, draw)
            check_no_pairs(shapes, twice[0])
        return sums

    def predictions(
        self, variables: Variables, batch: PyTree, mask: jax.Array, draw: jax.Array
    ) -> PyTree:
        """Returns the outputs of the predict function; bfloat16 as float32."""
        outputs = self.in_eval(self.predict, variables, batch, mask, draw)
        # NumPy has no bfloat16, so neither have its files.
        return jax.tree.map(
            lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, outputs
        )

    def in_eval(
        self,
        function: Declared,
        variables: Variables,
        batch: PyTree,
        mask: jax.Array | None,
        draw: jax.Array,
    ) -> PyTree:
        """Returns `function(model, batch)` with the model in evaluation mode."""
        placed = self._layout.to_device(variables, lambda shardings: shardings.variables)
        own = self.as_parameters(placed)
        values = Variables(self._to_compute(own.params), own.model_state)
        run, args = self._bound(function, values, batch, eval_key(draw), mask, Mode.EVAL)
        with LocatedErrors(batch):
            return run(*args)[0]

    def _bound(
        self,
        function: Declared,
        variables: Variables,
        batch: PyTree,
        key: jax.Array,
        mask: jax.Array | None,
        mode: Mode,
    ) -> tuple[Callable[..., tuple[PyTree, PyTree]], tuple[Any, ...]]:
        """Returns a function and its arguments.

        It returns the outputs of `function(model, batch)`, and the model state after it.
        """

        def arguments(variables: Variables, batch: PyTree, key: jax.Array, mask: Any) -> Any:
            called, own = function.given(key, batch, mask), with_own_containers(variables)
            return called, own, self._cast_input(batch), key, mode

        if not self._context.applies:
            return self._adapter.run, arguments(variables, batch, key, mask)

        def run(*given: Any) -> tuple[PyTree, PyTree]:
            with LocatedErrors(batch):  # within the context, whose message quotes the error
                return self._adapter.run(*arguments(*given))

        def specs() -> tuple[PyTree, ...]:
            rows = self._context.batch_specs((batch, mask))
            return self._layout.in_model(variables), rows[0], PartitionSpec(), rows[1]

        return partial(self._context.call, run, specs=specs), (variables, batch, key, mask)

    # -- dtypes --------------------------------------------------------------------------------

    def as_parameters(self, variables: Variables) -> Variables:
        """Returns variables with the parameters, or their average, cast to the model's dtypes."""
        params = jax.tree.map(in_dtype_of, variables.params, self._abstract_params)
        return Variables(params, variables.model_state)

    def _to_compute(self, params: PyTree) -> PyTree:
        """Casts and gathers parameters for the model: cast first, so fewer bytes are gathered."""
        # Parameters are computed from others before the cast, which would round their operands.
        computes = self._computes
        if computes is None:
            return self._layout.gather(self._cast(params))
        if current_scope().gathers is None:
            return self._layout.gather(self._cast(computes.base_params(params)))

        def part(*, of_operands: bool) -> PyTree:
            return jax.tree_util.tree_map_with_path(
                lambda path, x: x if computes.is_operand(path_name(path)) == of_operands else None,
                params,
            )

        # A device's parts of the operands do not fit together: these are gathered uncast.
        computed = self._cast(computes.base_params(self._layout.gather(part(of_operands=True))))
        others = computes.base_params(part(of_operands=False))
        return merge(computed, self._layout.gather(self._cast(others)))

    def _cast(self, tree: PyTree) -> PyTree:
        """Casts float32 arrays to the compute dtype."""
        if self.compute_dtype == jnp.float32:
            return tree
        return jax.tree.map(
            lambda x: x.astype(self.compute_dtype) if x.dtype == jnp.float32 else x, tree
        )

    def _cast_input(self, batch: PyTree) -> PyTree:
        """Casts the model's input in a batch; targets and weights keep their precision."""
        # Also without a cast, for new containers: a function may take entries out of its batch, and
        # is called again with the same one, for example in the backward pass of `remat`.

        def cast(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            name = path_name(path[:1])  # "" for a batch that is one array, "0" first in a tuple
            return self._cast(x) if name in ("", "0", *INPUTS) else x

        return jax.tree_util.tree_map_with_path(cast, batch)

    def _check_precise(self, outputs: PyTree) -> None:
        if self.compute_dtype != jnp.float32:
            check_precise(outputs)
