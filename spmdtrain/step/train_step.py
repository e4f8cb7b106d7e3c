"""The state, and the four programs that make, train and use it. All of them are compiled here."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Sharding

from spmdtrain.adapters.base import Adapter, Function, Mode, Variables
from spmdtrain.config import Purpose, RunConfig, derive_seed
from spmdtrain.data.loader import IndexedBatch, examples_of, of_first, stacked_sharding
from spmdtrain.data.uneven_batch import rows_and_mask, why_not_in_training
from spmdtrain.distributed.first_call import Together, call_together
from spmdtrain.errors import UserError
from spmdtrain.sharding import mesh
from spmdtrain.sharding.layout import Layout, Rule
from spmdtrain.sharding.placement import Placement, use_placement
from spmdtrain.step import hyperparameters, metrics
from spmdtrain.step.declared_arguments import Declared, eval_key
from spmdtrain.step.finite import health
from spmdtrain.step.gradients import Gradients, check_agrees, shard_map_blocker
from spmdtrain.step.model_state import difference
from spmdtrain.step.optimizer import Update, clipped, merge
from spmdtrain.step.reductions import NAMED, Reduction, all_reduce, flattened, in_dtype
from spmdtrain.step.remat import with_policy
from spmdtrain.step.state import TrainState
from spmdtrain.step.user_frames import locate_errors
from spmdtrain.tree import named_leaves, path_name
from spmdtrain.xla import collective_options
from spmdtrain.xla.compile_cache import compiler_options
from spmdtrain.xla.jaxpr import equations
from spmdtrain.xla.padding import why_padding_matters

PyTree = Any
_NO_DRAW: Any = np.zeros(2, np.uint32)  # of a batch that is only traced


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a train step tells: small arrays, fetched late."""

    metrics: dict[str, jax.Array]  # f32 scalars: weighted means over the global batch
    finite: jax.Array  # bool (4,): whether each of `HEALTH` is, of this loss and the updated state
    number: jax.Array | None = None  # int32: which step it is, where that is to be checked
    sums: jax.Array | None = None  # f32 (metrics by sorted name, 2): weighted sums and weights
    rate: jax.Array | None = None  # the learning rate used, if it is injected


class StepFunctions:
    """The programs of one model, objective and optimizer under one strategy.

    `init`, `train_program`, `evaluate` and `predict` are jitted functions of global arrays (or
    plain ones, without `jit`). `layout` says where each leaf of the state lives. What `config` says
    of the step is done here: precision, microbatches, averaging, what is frozen. Raises
    `UserError`.
    """

    def __init__(
        self,
        *,
        adapter: Adapter,
        objective: Function,
        predict: Function,
        optimizer: optax.GradientTransformation,
        placement: Placement,
        rules: Sequence[Rule] = (),
        reduction: Reduction | None = None,
        config: RunConfig,
    ) -> None:
        self._adapter = adapter
        self._objective = Declared.of(locate_errors(objective))
        self._predict = Declared.of(locate_errors(predict))
        self._config, self._placement = config, placement
        self._compute_dtype = jnp.dtype(config.compute_dtype)
        self.update = Update(optimizer, config.freeze, config.ema_decay)
        with use_placement(placement):  # models may ask what they run under
            self.abstract_state: TrainState = jax.eval_shape(
                self._init, adapter.given, *map(jax.random.key, (0, 0))
            )
        self.update.check(self.abstract_state.params)
        self.layout = Layout(self.abstract_state, placement, rules, config.sharding)
        self.shardings: TrainState = self.layout.shardings
        self._own_reduction = reduction
        self._per_replica = config.batch_statistics == "replica"
        if self._per_replica and not jax.tree.leaves(self.abstract_state.model_state):
            raise UserError(
                "batch_statistics is replica, and the model carries no state, so it has no batch "
                "statistics: leave the option out"
            )
        self._asked_reduction = self._reduction(reduction)
        self._gradients = Gradients(
            self._objective_sums,
            config.microbatches,
            placement,
            self._asked_reduction,
            per_replica=self._per_replica,
        )
        variables = self.shardings.variables
        everywhere = placement.replicated
        ours = collective_options.compiler_options(
            config.collectives,
            placement.devices[0].platform,
            gathers=placement.strategy.shards_params or placement.strategy.shards_optimizer,
        )
        self.compiler_options = compiler_options(config.compiler_options, ours, everywhere)

        # The state is born in its place: no device ever holds more than its share, of what a
        # module brings along neither.
        self._places = self._given_places(everywhere)
        self._jit_init = jax.jit(
            self._init,
            in_shardings=(self._places, everywhere, everywhere),
            out_shardings=self.shardings,
        )
        self._train_programs: dict[tuple[bool, bool], Any] = {}
        self._padding: dict[tuple[bool, str], str | None] = {}
        self.evaluate = self._compile_together(
            self._evaluate,
            in_shardings=(variables, None, None, everywhere),  # batches are split, or whole
            out_shardings=everywhere,
        )
        self.predict = self._compile_together(
            self._predictions,
            in_shardings=(variables, None, None, everywhere),
            out_shardings=everywhere,  # every process gets all predictions, to hand them out
        )

    @property
    def placed_state(self) -> TrainState:
        """The abstract state with the sharding of each leaf: what stands for a real one."""
        placed: TrainState = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            self.abstract_state,
            self.shardings,
        )
        return placed

    def _given_places(self, otherwise: Sharding) -> PyTree:
        """Where the arrays that a module is given with go: where they will be in the state."""
        places, shapes = named_leaves(self.layout.on_device), named_leaves(self.abstract_state)

        def place(path: tuple[Any, ...], leaf: Any) -> Sharding:
            name = path_name(path).removesuffix("/value")
            for known in (f"params/{name}", f"model_state/{name}"):
                if known in places and shapes[known].shape == leaf.shape:
                    found: Sharding = places[known]
                    return found
            return otherwise

        return jax.tree_util.tree_map_with_path(place, self._adapter.given)

    def _reduction(self, own: Reduction | None) -> Reduction | None:
        """What reduces the gradients under shard_map; None where XLA does it."""
        options = self._config.collectives
        if own is not None and not callable(own):
            raise UserError(
                f"reduction is {own!r}: it must be a function of (gradients, axes); "
                f"collectives.reduction takes names: {', '.join(NAMED)}"
            )
        if options.reduction not in (None, "automatic"):
            if own is not None:
                raise UserError(
                    f"collectives.reduction is {options.reduction}, and a reduction function is "
                    "given: one of the two"
                )
            own = NAMED[options.reduction]
        if own is None and self._per_replica and self._placement.batch_shards > 1:
            if options.reduction == "automatic":
                raise UserError(
                    "batch_statistics is replica, which reduces gradients under shard_map, and "
                    "collectives.reduction is automatic, which leaves them to XLA: leave one out"
                )
            on_cpu = self._placement.devices[0].platform == "cpu"
            own = flattened if on_cpu and options.reduce_dtype is None else all_reduce
        if options.reduce_dtype is None:
            return own
        return in_dtype(own or all_reduce, options.reduce_dtype)

    def _compile(self, function: Callable[..., Any], **options: Any) -> Any:
        if not self._config.jit:
            return eager(function)
        return jax.jit(function, compiler_options=self.compiler_options or None, **options)

    def _compile_together(self, function: Callable[..., Any], **options: Any) -> Any:
        """As `_compile`, for a function of variables and batches that is called without steps."""
        compiled = self._compile(function, **options)
        return Together(compiled, constant=1) if self._config.jit else compiled

    @property
    def has_custom_reduction(self) -> bool:
        """Whether `settle` runs something on the devices, all processes together."""
        return self._own_reduction is not None

    def choose_reduction(self, batch: PyTree, steps: int = 1) -> str:
        """Decide, for such a batch of so many steps, what reduces the gradients; its choice told.

        Raises `UserError` where a train step of it would not compute what it should.
        """
        found = jax.eval_shape(lambda batch: examples_of(of_first(batch, steps)), batch)
        batch, mask = rows_and_mask(found)
        if mask is not None:
            self._check_padded(batch, mask.shape[0])
        if self._compute_dtype != jnp.float32:
            self._check_computes(batch)
        if self._config.steps_per_dispatch > 1:
            self._check_loops(batch)
        options, by_hand = self._config.collectives, self._asked_reduction is not None
        if not by_hand and not self._may_pack():
            return ""
        trained, frozen = self.update.partition(self.abstract_state.params)
        if self._own_reduction is not None and not mesh.is_abstract():
            check_agrees(self._own_reduction, self._placement, trained)
        why_not = shard_map_blocker(
            self._gradients,
            replicates_params=self.layout.replicates_params,
            params=trained,
            frozen=frozen,
            model_state=self.abstract_state.model_state,
            batch=batch,
            values=self._values,
        )
        if by_hand and why_not:
            asked = "a reduction of your own"
            if self._per_replica:
                asked = "batch_statistics=replica"
            elif options.reduction is not None:
                asked = f"collectives.reduction={options.reduction}"
            elif options.reduce_dtype is not None:
                asked = f"collectives.reduce_dtype={options.reduce_dtype}"
            raise UserError(
                f"{asked} reduces the gradients under shard_map, where each device computes on its "
                f"own: {why_not}"
            )
        if not by_hand and self._gradients.reduction is not (
            found := None if why_not else flattened
        ):
            self._train_programs.clear()
            self._gradients = dataclasses.replace(self._gradients, reduction=found)
        if by_hand and self._per_replica:
            return "; batch statistics of each replica"
        return f"; reduced by XLA, as {why_not}" if why_not else ""

    def _check_padded(self, batch: PyTree, size: int) -> None:
        """Raises `UserError` if padding rows could change what a step computes."""
        state = self.abstract_state
        params, frozen = self.update.partition(state.params)

        def outputs(params: PyTree, frozen: PyTree, batch: PyTree) -> PyTree:
            return self._outputs(params, frozen, batch, state.model_state, jax.random.key(0))[0]

        why = None
        if carried := jax.tree.leaves(state.model_state):
            why = f"the model carries state ({len(carried)} arrays: batch statistics, say)"
        elif not self._objective.mask:
            at_once = size // self._config.microbatches
            why = why_not_in_training(outputs, params, frozen, batch, at_once)
        if why:
            shards = self._placement.batch_shards
            raise UserError(
                f"uneven_batch is pad, and a batch padded to {size} rows on {shards} devices could "
                f"give other gradients: {why}. Choose a global_batch_size that divides over them"
            )

    def _may_pack(self) -> bool:
        """Whether gradients are packed if that computes the same, as nobody has said otherwise.

        On CPU that is faster, with several processes three times. GPU and TPU have links of their
        own, and XLA joins what it sends over them.
        """
        strategy = self._placement.strategy
        replicates = self.layout.replicates_params and not (
            strategy.shards_params or strategy.shards_optimizer
        )
        on_cpu = self._placement.devices[0].platform == "cpu"
        several = self._placement.batch_shards > 1
        unsaid = self._config.collectives.reduction is None and self._config.jit
        return unsaid and on_cpu and several and replicates

    def _check_loops(self, batch: PyTree) -> None:
        """XLA on CPU has fast convolutions, which it does not use within a loop."""
        if self._placement.devices[0].platform != "cpu":
            return
        state, key = self.abstract_state, jax.random.key(0)
        program = jax.make_jaxpr(self._outputs)(
            *self.update.partition(state.params), batch, state.model_state, key
        )
        if any(of.primitive.name == "conv_general_dilated" for of in equations(program.jaxpr)):
            raise UserError(
                f"steps_per_dispatch is {self._config.steps_per_dispatch}, and the model has "
                "convolutions: within the loop that several steps are, XLA on CPU computes them "
                "many times slower; use 1 there"
            )

    def _check_computes(self, batch: PyTree) -> None:
        """Precision that is asked for, and given up at the model's door, would only cost digits."""
        state, key = self.abstract_state, jax.random.key(0)
        program = jax.make_jaxpr(self._outputs)(
            *self.update.partition(state.params), batch, state.model_state, key
        )
        products = [
            {x.aval.dtype for x in one.invars}
            for one in equations(program.jaxpr)
            if one.primitive.name in ("dot_general", "conv_general_dilated")
        ]
        if products and not any(self._compute_dtype in dtypes for dtypes in products):
            raise UserError(
                f"compute_dtype is {self._compute_dtype}, and none of the model's "
                f"{len(products)} products is computed in it: its input is wider. What a batch "
                f"calls {', '.join(INPUTS)} is cast (of a tuple, the first); cast others in the "
                "objective"
            )

    def init(self, seed: int) -> TrainState:
        """The state before the first step."""
        keys = [jax.random.key(derive_seed(seed, p)) for p in (Purpose.INIT, Purpose.STEP)]
        given = jax.tree.map(_placed, self._adapter.given, self._places)
        with use_placement(self._placement):  # whoever asks for it, and whenever
            state: TrainState = call_together(self._jit_init, given, *keys)
        return state

    def opt_state_of(self, params: PyTree) -> PyTree:
        """The optimizer's state before its first step from these parameters, in its place."""

        def begin(params: PyTree) -> PyTree:
            there = jax.device_put(params, self.layout.on_device.params)
            return self.update.init(there)

        program = jax.jit(begin, out_shardings=self.shardings.opt_state)
        return call_together(program, params)

    @property
    def initial_hyperparameters(self) -> dict[str, Any]:
        """Injected hyperparameters that the optimizer starts with, by path in its state."""
        return hyperparameters.initial_values(self.update.init, self.abstract_state.params)

    def metric_names(self, rows: PyTree) -> list[str]:
        """What an evaluation of such rows (of leading dim N) gives; nothing is computed."""
        mask = jnp.ones(jax.tree.leaves(rows)[0].shape[0], bool)
        variables = self.abstract_state.variables
        return list(jax.eval_shape(self._evaluate, variables, rows, mask, _NO_DRAW))

    def why_not_padded(self, rows: PyTree, size: int, *, predict: bool = False) -> str | None:
        """Why a batch must not be filled up with more rows in an evaluation; None if it may.

        Args:
            rows: One example, of leading dim 1.
            size: Rows of the batch.
            predict: Whether it is for `predict` instead of the objective.
        """
        function = self._predict if predict else self._objective
        if function.mask:  # it takes care of them by itself
            return None
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (max(size, 2), *np.shape(x)[1:]), jax.dtypes.canonicalize_dtype(x.dtype)
            ),
            rows,
        )
        asked = (predict, str(batch))
        if asked not in self._padding:

            def run(variables: Variables, batch: PyTree) -> PyTree:
                return self._in_eval(function, variables, batch, None, _NO_DRAW)

            self._padding[asked] = why_padding_matters(run, self.abstract_state.variables, batch)
        return self._padding[asked]

    # -- the pure functions --------------------------------------------------------------------

    def _init(self, given: PyTree, init_key: jax.Array, step_key: jax.Array) -> TrainState:
        # Copied, or the user's own arrays would be donated with the first state.
        params, model_state = self._adapter.init(jax.tree.map(jnp.copy, given), init_key)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.update.init(params),
            averaged=self.update.first_average(params),
            model_state=model_state,
            # Its numbers, as JAX dispatches a program on typed keys by way of Python.
            key=jax.random.key_data(step_key),
        )

    def train_program(self, steps: int = 1, *, by_number: bool = False) -> Any:
        """What makes so many steps: (state, batch) -> (state, output), compiled when first called.

        The batch of several has one more dim in front, and so has the output. `by_number` says
        that it is `Rows`.
        """
        key = (steps > 1, by_number)
        if key not in self._train_programs:
            batch: Any = (
                self._placement.batch if steps == 1 else stacked_sharding(self._placement.batch)
            )
            if by_number:
                batch = IndexedBatch(batch, self._placement.replicated)
            # The old state is donated: its memory becomes the new one's.
            self._train_programs[key] = self._compile(
                self._train if steps == 1 else self._train_several,
                in_shardings=(self.shardings, batch),
                out_shardings=(self.shardings, self._placement.replicated),
                donate_argnums=0,
            )
        return self._train_programs[key]

    def gradient_program(self, on_worker: optax.GradientTransformation) -> Any:
        """What a worker of parameter servers does with a batch, compiled when first called.

        (variables, batch, key, number) -> (gradients of what is trained, what it adds to the model
        state, weighted means, stacked sums); `on_worker` is done to the gradients.
        """

        def compute(
            variables: Variables, batch: PyTree, key: jax.Array, number: jax.Array
        ) -> tuple[PyTree, PyTree, dict[str, jax.Array], jax.Array]:
            own = jax.random.fold_in(jax.random.wrap_key_data(key), number)
            trained, frozen = self.update.partition(variables.params)
            found = self._gradients(trained, frozen, variables.model_state, batch, own)
            means = {name: metrics.mean(value) for name, value in found.metrics.items()}
            gradients = clipped(on_worker, found.gradients, trained, means["loss"])
            more = difference(found.model_state, variables.model_state)
            return gradients, more, means, metrics.stacked(found.metrics)

        everywhere = self._placement.replicated
        places = (everywhere, self._placement.batch, everywhere, everywhere)
        return self._compile(compute, in_shardings=places, out_shardings=everywhere)

    def _train_several(self, state: TrainState, batches: PyTree) -> tuple[TrainState, StepOutput]:
        if isinstance(batches, IndexedBatch):
            numbers, arrays = batches.indices, batches.arrays
            return jax.lax.scan(
                lambda s, of: self._train(s, IndexedBatch(of, arrays)), state, numbers
            )
        return jax.lax.scan(self._train, state, batches)

    def _train(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepOutput]:
        batch = examples_of(batch)
        state = self.layout.to_device(state, lambda of: of)
        key = state.step_key
        trained, frozen = self.update.partition(state.params)
        found = self._gradients(trained, frozen, state.model_state, batch, key)
        means = {name: metrics.mean(value) for name, value in found.metrics.items()}
        model_state = found.model_state
        gradients = self.layout.gradients(found.gradients)
        params, opt_state = self.update(state.params, state.opt_state, gradients, means["loss"])
        params = self.layout.at_rest(params)
        averaged = self.update.average(state.averaged, params, state.step)
        after = TrainState(state.step + 1, params, opt_state, averaged, model_state, state.key)
        return after, StepOutput(
            means,
            health(means["loss"], state, after, self.shardings),
            sums=metrics.stacked(found.metrics),
            rate=hyperparameters.learning_rate(opt_state),
        )

    def _objective_sums(
        self, params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[dict[str, metrics.Sums], PyTree]:
        """The objective in training: what is differentiated, before any mean is taken."""
        rows, mask = rows_and_mask(batch)

        def run(params: PyTree, model_state: PyTree, key: jax.Array) -> tuple[PyTree, PyTree]:
            return self._outputs(params, frozen, rows, model_state, key, mask=mask)

        outputs, after = with_policy(run, self._config.remat, params, model_state, key)
        sums = self._sums(outputs, rows, mask)
        metrics.check_no_pairs(outputs, rows)
        return sums, after

    def _outputs(
        self,
        params: PyTree,
        frozen: PyTree,
        batch: PyTree,
        model_state: PyTree,
        key: jax.Array,
        mode: Mode = Mode.TRAIN,
        mask: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree]:
        """What the objective returns in training, and the model state after it."""
        variables = Variables(self._to_compute(merge(params, frozen)), model_state)
        inputs, objective = self._input(batch), self._objective.given(key, batch, mask)
        outputs, after = self._adapter.run(objective, variables, inputs, key, mode)
        # A model that computes in 16 bits may have assigned such to its state.
        return outputs, jax.tree.map(lambda new, old: new.astype(old.dtype), after, model_state)

    def _values(self, params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree) -> PyTree:
        """Returns the objective's values, computed without batch statistics and random numbers."""
        mode = Mode.EVAL if self._per_replica else Mode.TRAIN
        return self._outputs(params, frozen, batch, model_state, jax.random.key(0), mode)[0]

    def _to_compute(self, params: PyTree) -> PyTree:
        """Parameters as the model computes with them: cast first, so that less is gathered."""
        return self.layout.whole(self._cast(params))

    def _cast(self, tree: PyTree) -> PyTree:
        """Its f32 arrays in the dtype to compute in."""
        if self._compute_dtype == jnp.float32:
            return tree
        return jax.tree.map(
            lambda x: x.astype(self._compute_dtype) if x.dtype == jnp.float32 else x, tree
        )

    def _input(self, batch: PyTree) -> PyTree:
        """The batch with the model's input cast; targets and weights keep their digits."""
        if self._compute_dtype == jnp.float32:
            return batch

        def cast(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
            name = path_name(path[:1])  # "" of a batch that is one array, "0" first in a tuple
            return self._cast(x) if name in ("", "0", *INPUTS) else x

        return jax.tree_util.tree_map_with_path(cast, batch)

    def as_parameters(self, variables: Variables) -> Variables:
        """Variables with parameters, averaged ones too, in the model's own dtypes."""
        own = jax.tree.map(
            lambda x, like: x.astype(like.dtype), variables.params, self.abstract_state.params
        )
        return Variables(own, variables.model_state)

    def in_device_memory(self, variables: Variables) -> Variables:
        """Variables to call the model with outside of the steps, copied."""
        there = jax.device_put(variables, self.layout.on_device.variables)
        # The state's own arrays are donated to the next step.
        return jax.tree.map(jnp.copy, self.as_parameters(there))

    def _in_eval(
        self,
        function: Declared,
        variables: Variables,
        batch: PyTree,
        mask: jax.Array | None,
        draw: jax.Array,
    ) -> PyTree:
        """What a function of (model, batch) gives, the model in eval mode."""
        own = self.as_parameters(self.layout.to_device(variables, lambda of: of.variables))
        values = Variables(self._to_compute(own.params), own.model_state)
        key, inputs = eval_key(draw), self._input(batch)
        given = function.given(key, batch, mask)
        return self._adapter.run(given, values, inputs, key, Mode.EVAL)[0]

    def _evaluate(
        self, variables: Variables, batch: PyTree, mask: jax.Array, draw: jax.Array
    ) -> dict[str, metrics.Sums]:
        outputs = self._in_eval(self._objective, variables, batch, mask, draw)
        sums = self._sums(outputs, batch, mask)
        try:
            metrics.check_no_pairs(outputs, batch)
        except UserError:
            # The rows of a last batch can be as many as the classes, say. Twice as many are not.
            twice = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype),
                (batch, mask),
            )
            found = jax.eval_shape(partial(self._in_eval, self._objective), variables, *twice, draw)
            metrics.check_no_pairs(found, twice[0])
        return sums

    def _sums(
        self, outputs: PyTree, batch: PyTree, mask: jax.Array | None = None
    ) -> dict[str, metrics.Sums]:
        sums = metrics.weighted_sums(outputs, jax.tree.leaves(batch)[0].shape[0], mask)
        if self._compute_dtype != jnp.float32:
            metrics.check_precise(outputs)
        return sums

    def _predictions(
        self, variables: Variables, batch: PyTree, mask: jax.Array, draw: jax.Array
    ) -> PyTree:
        found = self._in_eval(self._predict, variables, batch, mask, draw)
        # NumPy, and so its files, know no bfloat16.
        return jax.tree.map(
            lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, found
        )


def _placed(leaf: Any, place: Sharding) -> Any:
    """A host array as a global one; each process has all of it, and gives its devices' parts."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    return jax.make_array_from_callback(leaf.shape, place, lambda index: leaf[index])


# What a batch may call the model's input: what is predicted from, and cast to compute in.
INPUTS = ("image", "inputs", "x", "tokens")


def model_output(model: Any, batch: PyTree) -> PyTree:
    """What the model gives for the batch's input: the default of `predict`."""
    if isinstance(batch, Mapping):
        inputs = [name for name in INPUTS if name in batch]
        if len(inputs) != 1:
            raise UserError(
                f"which of {sorted(batch)} is the model's input? Give a function "
                "predict(model, batch)"
            )
        return model(batch[inputs[0]])
    return model(batch[0] if isinstance(batch, tuple) else batch)


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run operation by operation, what it jits inside too."""

    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return function(*args)

    return run
