"""A Keras optimizer as an optax transformation."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from spmdtrain.adapters.keras import assign_variable, import_keras
from spmdtrain.errors import UserError

PyTree = Any
_COUNT, _RATE, _AVERAGE = "iteration", "learning_rate", "average"


class KerasOptimizer:
    """The optimizer of a compiled Keras model, with its updates as pure functions.

    The state has the form of `optax.inject_hyperparams`: its hyperparameter `learning_rate` can be
    changed by a callback, unless a schedule computes it. `inner_state` holds Keras' variables by
    name; variables of a parameter are nested by its path, so that they are sharded like it.

    The optimizer is built for the model's trainable variables if it is not built yet.

    Raises:
      UserError: If it scales the loss, is not one optimizer, or was built for other variables.
    """

    def __init__(self, optimizer: Any, model: Any) -> None:
        self._keras = import_keras()
        self._optimizer = optimizer
        _check_supported(self._keras, optimizer)
        trained = model.trainable_variables
        if not optimizer.built:
            optimizer.build(trained)
        self._params = [v.path for v in trained]
        self._keys = _keys(optimizer.variables, {v.path: tuple(v.shape) for v in trained})
        self._initial = [np.array(v.value) for v in optimizer.variables]  # copied: they may change
        self._check_built_for(trained)

    @property
    def transformation(self) -> optax.GradientTransformation:
        """The optimizer as an optax transformation."""
        return optax.GradientTransformation(self._init, self._update)

    @property
    def averages_params(self) -> bool:
        """True if Keras replaces the parameters by their moving average at the end of a fit."""
        return bool(self._optimizer.use_ema)

    def average(self, params: PyTree, opt_state: PyTree) -> PyTree:
        """Returns the moving averages of the parameters; one without an average stays as it is."""
        return traverse_util.unflatten_dict(
            _flat(params) | _flat(opt_state.inner_state[_AVERAGE]), sep="/"
        )

    def assign_state(self, opt_state: PyTree) -> None:
        """Assigns a state to the variables of the Keras optimizer. All processes call it."""
        for variable, value in zip(self._optimizer.variables, self._values(opt_state), strict=True):
            assign_variable(variable, value)

    def read_state(self) -> PyTree:
        """Returns the state that the Keras optimizer's variables have now, as NumPy arrays."""
        values: Any = [np.array(v.value) for v in self._optimizer.variables]
        return jax.tree.map(np.asarray, self._state(values))

    def known_arguments(self) -> tuple[str, dict[str, Any]] | None:
        """Returns the class of the Keras optimizer and its arguments, with those of a schedule.

        None if the class of the optimizer or of the schedule is the user's.
        """
        found = self._optimizer
        rate = found._learning_rate  # the property computes the rate of a schedule
        if not all(type(x).__module__.startswith("keras.") for x in (found, rate)):
            return None
        arguments = _plain_attributes(found)
        if isinstance(rate, self._keras.optimizers.schedules.LearningRateSchedule):
            schedule = {"class": type(rate).__name__, **_plain_attributes(rate)}
            arguments |= {f"learning_rate.{name}": value for name, value in schedule.items()}
        return f"keras.optimizers.{type(found).__name__}", arguments

    # -- the transformation --------------------------------------------------------------------

    def _init(self, params: PyTree) -> PyTree:
        if _flat(params).keys() != set(self._params):
            raise UserError(
                "a Keras optimizer updates all trainable variables of its model at once: instead "
                "of freeze, set layer.trainable = False before model.compile; with strategy "
                "parameter_server, pass an optax optimizer"
            )
        return self._state([_constant(value) for value in self._initial])

    def _update(
        self, gradients: PyTree, opt_state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, PyTree]:
        assert params is not None, "a step passes the parameters"
        old, values = self._in_order(params), self._values(opt_state)
        new, after = self._optimizer.stateless_apply(values, self._in_order(gradients), old)
        changes = [x - y for x, y in zip(new, old, strict=True)]
        updates = traverse_util.unflatten_dict(
            dict(zip(self._params, changes, strict=True)), sep="/"
        )
        return updates, self._state(after, before=values)

    def _in_order(self, tree: PyTree) -> list[jax.Array]:
        flat = _flat(tree)
        return [flat[path] for path in self._params]

    def _state(
        self, values: Sequence[jax.Array], before: Sequence[jax.Array] | None = None
    ) -> PyTree:
        """Returns the state for the values of Keras' variables, with the rate of the last update.

        A schedule computed that rate from the values `before` the update.
        """
        state: dict[tuple[str, ...], jax.Array] = dict(zip(self._keys, values, strict=True))
        count = state.pop((_COUNT,))
        schedules: dict[str, jax.Array] = {}
        if (_RATE,) in self._keys:
            rate = state.pop((_RATE,))
        else:
            rate, schedules = self._scheduled(values if before is None else before), {_RATE: count}
        inner = traverse_util.unflatten_dict(state)
        return optax.InjectStatefulHyperparamsState(count, {_RATE: rate}, schedules, inner)

    def _scheduled(self, values: Sequence[jax.Array]) -> jax.Array:
        mapping = zip(self._optimizer.variables, values, strict=True)
        with self._keras.StatelessScope(mapping):
            return jnp.asarray(self._optimizer.learning_rate, jnp.float32)

    def _values(self, opt_state: PyTree) -> list[jax.Array]:
        inner = traverse_util.flatten_dict(opt_state.inner_state)
        known = inner | {(_COUNT,): opt_state.count, (_RATE,): opt_state.hyperparams[_RATE]}
        return [known[key] for key in self._keys]

    def _check_built_for(self, trained: Sequence[Any]) -> None:
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in trained]
        try:
            jax.eval_shape(self._optimizer.stateless_apply, self._initial, shapes, shapes)
        except ValueError as error:
            raise UserError(
                f"the optimizer {self._optimizer.name!r} was built for other variables than the "
                f"{len(trained)} trainable ones of the model: call model.compile again, with a new "
                "optimizer, after layers were frozen or added"
            ) from error


def _plain_attributes(x: Any) -> dict[str, Any]:
    """Returns the public attributes of an object that are numbers, texts, flags or lists of them.

    `name` is left out, because Keras numbers the names.
    """
    plain = (bool, int, float, str, type(None))
    found = {n: v for n, v in vars(x).items() if n not in ("name", "built") and n[:1] != "_"}
    return {
        name: value
        for name, value in found.items()
        if all(isinstance(y, plain) for y in (value if isinstance(value, list) else [value]))
    }


def _check_supported(keras: Any, optimizer: Any) -> None:
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaled or optimizer.loss_scale_factor is not None:
        raise UserError(
            f"the optimizer {optimizer.name!r} scales the loss, which float16 needs and which is "
            "not supported: use the policy mixed_bfloat16 and an optimizer without loss scaling"
        )
    if hasattr(optimizer, "optimizers"):
        raise UserError(
            f"the optimizer {optimizer.name!r} ({type(optimizer).__name__}) consists of several: "
            "pass optimizer=optax.multi_transform(...) instead"
        )


def _keys(variables: Sequence[Any], params: Mapping[str, tuple[int, ...]]) -> list[tuple[str, ...]]:
    """Returns the path in the state of each of an optimizer's variables.

    Keras names the variable of a parameter `a/b` as `a_b_momentum`. Two parameters with the same
    such name raise `UserError`. `params` has the shapes of the parameters by path.
    """
    flat_names: dict[str, str] = {}
    for path in params:
        name = path.replace("/", "_")
        if name in flat_names:
            raise UserError(
                f"the parameters {flat_names[name]} and {path} have the same name for a Keras "
                f"optimizer, {name}: give their layers other names"
            )
        flat_names[name] = path
    keys: list[tuple[str, ...]] = []
    for number, variable in enumerate(variables):
        owners = [
            name
            for name, path in flat_names.items()
            if variable.name.startswith(f"{name}_") and params[path] == tuple(variable.shape)
        ]
        if owners:
            owner = max(owners, key=len)
            slot = variable.name.removeprefix(f"{owner}_")
            keys.append((slot, *flat_names[owner].split("/")))
        elif (variable.name,) in keys:  # Adafactor gives several variables one name
            keys.append((f"{variable.name}_{number}",))
        else:
            keys.append((variable.name,))
    return keys


def _constant(value: np.ndarray) -> jax.Array:
    """Returns an initial value in a program; a large array of equal numbers is not stored in it."""
    if value.size and (value == value.flat[0]).all():
        return jnp.full(value.shape, value.flat[0], value.dtype)
    return jnp.asarray(value)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = traverse_util.flatten_dict(tree, sep="/")
    return {path: value for path, value in flat.items() if value is not None}
