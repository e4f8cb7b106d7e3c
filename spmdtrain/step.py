"""The state, and the four programs that make, train and use it. All of them are compiled here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from spmdtrain import metrics
from spmdtrain.adapters import Adapter, Function, Mode, Variables
from spmdtrain.config import Purpose, derive_seed
from spmdtrain.errors import UserError
from spmdtrain.mesh import batch_sharding, replicated
from spmdtrain.sharding import Rule, named_leaves, shardings_of

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that must survive an interruption."""

    step: jax.Array  # int32: updates made so far
    params: PyTree
    opt_state: PyTree
    averaged: PyTree  # moving average of params; an empty dictionary where none is kept
    model_state: PyTree  # batch statistics and the like
    key: jax.Array  # step k draws from fold_in(key, k)

    @property
    def variables(self) -> Variables:
        """What the model is evaluated with: the averaged parameters where an average is kept.

        These are wider than the model's own where those are less than f32 (see `average_of`).
        """
        averaged = jax.tree.leaves(self.averaged)
        return Variables(self.averaged if averaged else self.params, self.model_state)


HEALTH = ("loss", "params", "opt_state", "model_state")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a train step tells: small arrays, fetched late."""

    metrics: dict[str, jax.Array]  # f32 scalars: weighted means over the global batch
    finite: jax.Array  # bool (4,): whether each of `HEALTH` is, of this loss and the updated state


class Steps:
    """The programs of one model, objective and optimizer on one mesh.

    `init`, `train`, `evaluate` and `predict` are jitted functions of global arrays (or plain
    ones, with `jit=False`). `shardings` says where each leaf of the state lives.
    """

    def __init__(
        self,
        *,
        adapter: Adapter,
        objective: Function,
        predict: Function,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        rules: Sequence[Rule],
        ema_decay: float | None = None,
        jit: bool = True,
    ) -> None:
        self._adapter, self._objective, self._predict = adapter, objective, predict
        self._ema_decay = ema_decay
        self._optimizer = optax.with_extra_args_support(optimizer)
        self.abstract_state: TrainState = jax.eval_shape(
            self._init, adapter.given, *map(jax.random.key, (0, 0))
        )
        self.shardings: TrainState = shardings_of(self.abstract_state, mesh, rules)
        variables, batch, everywhere = (
            self.shardings.variables,
            batch_sharding(mesh),
            replicated(mesh),
        )

        # The state is born in its place: no device ever holds more than its share.
        self._jit_init = jax.jit(self._init, out_shardings=self.shardings)
        # The old state is donated: its memory becomes the new one's.
        self.train = self._compile(
            jit,
            self._train,
            in_shardings=(self.shardings, batch),
            out_shardings=(self.shardings, everywhere),
            donate_argnums=0,
        )
        self.evaluate = self._compile(
            jit,
            self._evaluate,
            in_shardings=(variables, batch, batch),
            out_shardings=everywhere,
        )
        self.predict = self._compile(
            jit,
            self._predictions,
            in_shardings=(variables, batch),
            out_shardings=everywhere,  # every process gets all predictions, to hand them out
        )

    @staticmethod
    def _compile(jit: bool, function: Callable[..., Any], **options: Any) -> Any:
        return jax.jit(function, **options) if jit else eager(function)

    def init(self, seed: int) -> TrainState:
        """The state before the first step."""
        keys = [jax.random.key(derive_seed(seed, p)) for p in (Purpose.INIT, Purpose.STEP)]
        state: TrainState = self._jit_init(self._adapter.given, *keys)
        return state

    def metric_names(self, rows: PyTree) -> list[str]:
        """What an evaluation of such rows (of leading dim N) gives; nothing is computed."""
        mask = jnp.ones(jax.tree.leaves(rows)[0].shape[0], bool)
        variables = self.abstract_state.variables
        return list(jax.eval_shape(self._evaluate, variables, rows, mask))

    # -- the pure functions --------------------------------------------------------------------

    def _init(self, given: PyTree, init_key: jax.Array, step_key: jax.Array) -> TrainState:
        # Copied, or the user's own arrays would be donated with the first state.
        params, model_state = self._adapter.init(jax.tree.map(jnp.copy, given), init_key)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self._optimizer.init(params),
            averaged={} if self._ema_decay is None else jax.tree.map(_widened, params),
            model_state=model_state,
            key=step_key,
        )

    def _train(self, state: TrainState, batch: PyTree) -> tuple[TrainState, StepOutput]:
        key = jax.random.fold_in(state.key, state.step)

        def loss(params: PyTree) -> tuple[jax.Array, tuple[dict[str, jax.Array], PyTree]]:
            outputs, model_state = self._adapter.run(
                self._objective, Variables(params, state.model_state), batch, key, Mode.TRAIN
            )
            sums = self._sums(outputs, batch)
            means = {name: metrics.mean(value) for name, value in sums.items()}
            return means["loss"], (means, model_state)

        gradients, (means, model_state) = jax.grad(loss, has_aux=True)(state.params)
        updates, opt_state = self._optimizer.update(
            gradients, state.opt_state, state.params, value=means["loss"]
        )
        params = optax.apply_updates(state.params, updates)
        averaged = self._average(state.averaged, params, state.step)
        after = TrainState(state.step + 1, params, opt_state, averaged, model_state, state.key)
        finite = [jnp.isfinite(means["loss"])]
        # To look at the old parameters too would keep them from being overwritten in place: a
        # third of a small step's time. So only what may be infinite on purpose is compared.
        finite += [_stays_finite(state.params, params), _stays_finite(state.opt_state, opt_state)]
        finite += [_stays_finite(state.model_state, model_state, arrays_too=True)]
        return after, StepOutput(means, jnp.stack(finite))

    def _average(self, averaged: PyTree, params: PyTree, step: jax.Array) -> PyTree:
        """The exponential moving average of the parameters.

        It decays faster at first, by (1 + k) / (10 + k) in update k, so that it soon forgets the
        initial values: as TensorFlow's `ExponentialMovingAverage` does with `num_updates`.
        """
        if self._ema_decay is None:
            return averaged
        decay = jnp.minimum(self._ema_decay, (2.0 + step) / (11.0 + step))

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            return (old + (1 - decay) * (new - old)).astype(old.dtype)

        return jax.tree.map(average, averaged, params)

    def as_parameters(self, variables: Variables) -> Variables:
        """Variables with parameters, averaged ones too, in the model's own dtypes."""
        own = jax.tree.map(
            lambda x, like: x.astype(like.dtype), variables.params, self.abstract_state.params
        )
        return Variables(own, variables.model_state)

    def _evaluate(
        self, variables: Variables, batch: PyTree, mask: jax.Array
    ) -> dict[str, metrics.Sums]:
        outputs, _ = self._adapter.run(
            self._objective, self.as_parameters(variables), batch, jax.random.key(0), Mode.EVAL
        )
        return self._sums(outputs, batch, mask)

    @staticmethod
    def _sums(
        outputs: PyTree, batch: PyTree, mask: jax.Array | None = None
    ) -> dict[str, metrics.Sums]:
        sums = metrics.weighted_sums(outputs, jax.tree.leaves(batch)[0].shape[0], mask)
        metrics.check_no_pairs(outputs, batch)
        return sums

    def _predictions(self, variables: Variables, batch: PyTree) -> PyTree:
        own = self.as_parameters(variables)
        return self._adapter.run(self._predict, own, batch, jax.random.key(0), Mode.EVAL)[0]


def average_of(params: PyTree) -> PyTree:
    """The abstract average of abstract parameters.

    In f32 at least: in bfloat16 an average of decay 0.999 would stand still, as each of its steps
    is smaller than half the distance to the next number.
    """
    return jax.eval_shape(lambda params: jax.tree.map(_widened, params), params)


def _widened(x: jax.Array) -> jax.Array:
    return jnp.array(x, jnp.promote_types(x.dtype, jnp.float32))


def model_output(model: Any, batch: PyTree) -> PyTree:
    """What the model gives for the batch's input: the default of `predict`."""
    if isinstance(batch, Mapping):
        inputs = [name for name in ("image", "inputs", "x", "tokens") if name in batch]
        if len(inputs) != 1:
            raise UserError(
                f"which of {sorted(batch)} is the model's input? Give a function "
                "predict(model, batch)"
            )
        return model(batch[inputs[0]])
    return model(batch[0] if isinstance(batch, tuple) else batch)


def _stays_finite(before: PyTree, after: PyTree, *, arrays_too: bool = False) -> jax.Array:
    """Whether no element became NaN or infinite.

    A scalar that was infinite before is meant so (the best loss yet, say), and is none of it;
    with `arrays_too`, so is an element of an array (a mask).
    """
    sound = [
        (jnp.isfinite(y) | (jnp.isinf(x) & ~jnp.isnan(y))).all()
        if arrays_too or y.ndim == 0
        else jnp.isfinite(y).all()
        for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        if jnp.issubdtype(y.dtype, jnp.inexact)
    ]
    return jnp.array(sound).all()


def first_non_finite(tree: PyTree) -> str | None:
    """The path of the first array that holds a NaN or an infinity."""
    for name, leaf in named_leaves(tree).items():
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.isfinite(leaf).all()):
            return name
    return None


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run operation by operation, what it jits inside too."""

    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return function(*args)

    return run
