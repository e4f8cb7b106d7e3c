"""Keras 3 models as adapters, and their optimizers as optax transformations."""

import contextlib
import copy
import hashlib
import importlib
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from spmdtrain.adapters.base import Function, Mode, NameOutputs, Variables
from spmdtrain.distributed import process_group
from spmdtrain.distributed.first_call import call_together
from spmdtrain.errors import UserError
from spmdtrain.keras.internals import all_layers, saved_variables, with_moments, with_named_calls
from spmdtrain.kernels.reference import moments
from spmdtrain.record.storage import one_line
from spmdtrain.sharding.placement import current_batch_axis, current_batch_shards
from spmdtrain.strategies import ASYNCHRONOUS

# -- The adapter of Keras 3 models on the JAX backend ----------------------------------------------

PyTree = Any
_TRACING = threading.RLock()
"""Held while layers are changed for a trace: a step may be compiled in another thread."""
_BUILD = "call it once before, such as model(x[:1])"
"""The advice for a model without its variables."""


class KerasModel:
    """A Keras model: sequential, functional or subclassed.

    Training starts from the model's own values. Parameters are its trainable weights; the model
    state holds its other weights (batch statistics, frozen layers). Both are nested by their Keras
    paths. `Trainer.model` returns the same model object with the trained values.

    Args:
      model: The model.
      *inputs: Example inputs with which the model is called once, if it is not built yet.
      enforces_constraints: Whether the optimizer enforces constraints of weights, as Keras' own do.
      **kwargs: Keyword arguments of that call of the model.

    Raises:
      UserError: If it is not a Keras model, cannot be built, or needs a feature of Keras' own
        training loop.
    """

    def __init__(
        self, model: Any, *inputs: PyTree, enforces_constraints: bool = False, **kwargs: Any
    ) -> None:
        keras = import_keras()
        if not isinstance(model, keras.Model):
            raise UserError(f"KerasModel takes a keras.Model, not a {type(model).__name__}")
        if not model.built:
            if not inputs:
                raise UserError(
                    f"the Keras model {model.name!r} is not built, so it has no variables yet: "
                    f"{_BUILD}, or give it a keras.Input"
                )
            model(*inputs, **kwargs)
        self.model = model
        self._keras = keras
        unbuilt = [x.name for x in all_layers(model) if not x.built]
        if unbuilt:  # by `model.build`, which Keras cannot do for all subclassed models
            raise UserError(
                f"the Keras model {model.name!r} has layers that are not built, so they have no "
                f"variables yet ({', '.join(unbuilt[:3])}): {_BUILD}"
            )
        self._params, self._state = _split(model)
        self._weights = self._params | self._state
        # `weights` leaves out the states of random streams, which are seeded in each step.
        weights = set(map(id, self._weights.values()))
        self._seeds = [v for v in model.variables if id(v) not in weights]
        _check_trainable(model, {} if enforces_constraints else self._params)
        if not self._params:
            raise UserError(f"the Keras model {model.name!r} has no trainable variables")
        # On the host, because the mesh may use other devices; copied, because the user may
        # change the model's own values later.
        self.given: PyTree = {name: np.array(v.value) for name, v in self._weights.items()}
        _check_same_values(self.given)
        self._frozen_state: frozenset[str] = frozenset()

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        return Variables(_nested(given, self._params), _nested(given, self._state))

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        bound = BoundKeras(self.model, training=mode is Mode.TRAIN)
        values = [*self._values(variables), *self._seeded_streams(key)]
        # Not `stateless_call`: it bypasses the model's `__call__`, which passes `training` on to
        # the inner layers.
        frozen = self._frozen_state if mode is Mode.TRAIN else frozenset()
        with (
            _TRACING,
            self._stored_statistics(frozen),
            self._merged_moments(),
            self._keras.StatelessScope(
                values, collect_losses=True, initialize_variables=False
            ) as scope,
        ):
            result = function(bound, batch)
            bound.check_losses()
        self._check_variables(scope)
        if mode is Mode.EVAL:
            return result, variables.model_state
        after = {name: scope.get_current_value(v) for name, v in self._state.items()}
        return result, _nested(after, self._state)

    def layer_path(self, name: str) -> str:
        """Returns the path in the model's layers of a leaf of the model state.

        Args:
          name: The path of the leaf in the model state.
        """
        return name

    def file_names(self) -> Mapping[str, str | None]:
        """Returns the path of each array of a `.keras` file of this model; None if it is no weight.

        The optimizer is left out.
        """
        paths = {id(variable): name for name, variable in self._weights.items()}
        return {
            name: paths.get(id(value))
            for name, value in saved_variables(self.model).items()
            if not name.startswith("optimizer/")
        }

    def named_layers(
        self, model: Any, name: NameOutputs
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which each call of a layer returns `name(path, outputs)`.

        Args:
          model: The `BoundKeras`.
          name: Names the outputs.
        """
        return with_named_calls(model.keras_model, name)

    def with_frozen_state(self, names: Collection[str]) -> "KerasModel":
        """Returns a copy whose batch normalizations use their stored statistics in training.

        Args:
          names: Paths in the model state of the statistics that are frozen.
        """
        frozen = copy.copy(self)
        frozen._frozen_state = frozenset(names)
        return frozen

    @contextlib.contextmanager
    def _stored_statistics(self, frozen: Collection[str]) -> Iterator[None]:
        """Makes batch normalizations not trainable, so that they use their stored statistics."""
        layers = [
            layer
            for layer in (all_layers(self.model) if frozen else ())
            if isinstance(layer, self._keras.layers.BatchNormalization)
            and layer.trainable
            and layer.moving_mean.path in frozen
        ]
        try:
            for layer in layers:
                layer.trainable = False
            yield
        finally:
            for layer in layers:
                layer.trainable = True

    def _merged_moments(self) -> contextlib.AbstractContextManager[None]:
        """Makes batch normalizations compute mean and variance by one collective."""
        is_split = current_batch_shards() > 1 or current_batch_axis() is not None
        return with_moments(all_layers(self.model) if is_split else (), moments)

    def merge(self, variables: Variables) -> Any:
        """Assigns values to the model.

        Variables stay on their devices. If values are split over several processes, all of these
        processes must call it.

        Args:
          variables: The values of all weights.

        Returns:
          The same Keras model object.
        """
        for variable, value in self._values(variables):
            assign_variable(variable, value)
        return self.model

    def _values(self, variables: Variables) -> Iterable[tuple[Any, jax.Array]]:
        """Yields the model's variables with their values."""
        values = _flat(variables.params) | _flat(variables.model_state)
        for name, variable in self._weights.items():
            value = values[name]
            # Keras would cast it back, and the speed would be lost.
            if value.dtype != variable.dtype:
                raise UserError(
                    f"compute_dtype is {value.dtype}, but a Keras model computes in the dtype of "
                    "its own policy. Call keras.config.set_dtype_policy('mixed_bfloat16') before "
                    "the model is created, and leave compute_dtype out"
                )
            yield variable, value

    def _seeded_streams(self, key: jax.Array) -> Iterable[tuple[Any, jax.Array]]:
        """Yields newly seeded states of the random streams: two words, the second counts draws."""
        for index, seed in enumerate(self._seeds):
            yield seed, jax.random.bits(jax.random.fold_in(key, index), seed.shape, seed.dtype)

    def _check_variables(self, scope: Any) -> None:
        """Checks that the model changed no state that would be lost after the step."""
        known = {id(v) for v in (*self._weights.values(), *self._seeds)}
        if created := [v.path for v in self.model.variables if id(v) not in known]:
            raise UserError(
                f"the Keras model {self.model.name!r} created variables while it ran, for example "
                f"{created[0]}: {_BUILD}"
            )
        known |= {id(v) for v in self.model.metrics_variables}  # Keras' own, which are not kept
        if scope.state_mapping.keys() - known:
            raise UserError(
                f"the Keras model {self.model.name!r} assigns to a variable that it does not own "
                "(a SeedGenerator outside of a layer, for example), whose value would be lost "
                "after the step: make it an attribute of a layer"
            )


class BoundKeras:
    """A Keras model with a step's values, the `model` that an objective gets.

    Attributes:
      keras_model: The Keras model, to call its other methods.
    """

    def __init__(self, keras_model: Any, *, training: bool) -> None:
        self.keras_model, self.training = keras_model, training
        self._losses_read = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model: in training, dropout is active and batch statistics are updated.

        The keyword argument `training` defaults to the step's mode.
        """
        _check_rank(self.keras_model, args)
        try:
            return self.keras_model(*args, **{"training": self.training, **kwargs})
        except Exception as error:
            if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
                _check_compiles(self.keras_model, error)
            raise

    @property
    def losses(self) -> list[jax.Array]:
        """The scalar losses of regularizers and `add_loss` in the latest call."""
        self._losses_read = True
        losses: list[jax.Array] = self.keras_model.losses
        return losses

    def check_losses(self) -> None:
        """Raises `UserError` if the objective has not read losses that Keras itself would add."""
        if self.training and not self._losses_read and (unread := self.keras_model.losses):
            raise UserError(
                f"the Keras model {self.keras_model.name!r} has {len(unread)} losses of its own "
                "(regularizers, add_loss), and the objective does not read them: add "
                "sum(model.losses) to its loss"
            )


# -- checks ----------------------------------------------------------------------------------------


def _check_rank(keras_model: Any, args: Sequence[Any]) -> None:
    """Raises `UserError` if each row of the only input has the shape of a batch of inputs."""
    found: list[Any] = jax.tree.leaves(args)
    inputs: Sequence[Any] = getattr(keras_model, "inputs", None) or ()
    if len(found) != 1 or len(inputs) != 1:
        return
    shape, wanted = list(np.shape(found[0]))[1:], list(inputs[0].shape)[1:]
    is_deeper = len(shape) == len(wanted) + 1 and shape[0] > 1
    if is_deeper and all(w in (None, size) for size, w in zip(shape[1:], wanted, strict=True)):
        takes, given = (["B", *(x or "any" for x in sizes)] for sizes in (wanted, shape))
        raise UserError(
            f"the Keras model {keras_model.name!r} takes inputs of shape "
            f"({', '.join(map(str, takes))}) and gets ({', '.join(map(str, given))}): each example "
            "of the data seems to be a batch. Give the examples as arrays, or the batches as a "
            "keras.utils.PyDataset"
        )


def _check_compiles(keras_model: Any, error: Exception) -> None:
    """Raises `UserError` if an error in a trace comes from a layer that cannot be compiled."""
    for layer in all_layers(keras_model):
        kind = type(layer).__name__
        if not layer.supports_jit and f"calling {kind}.call()" in str(error):  # Keras' own words
            raise UserError(
                f"the layer {layer.name!r} ({kind}) of the Keras model {keras_model.name!r} cannot "
                "be compiled: take it out of the model and apply it to the data (in augment, for "
                "example), or set jit=False, which runs a step operation by operation"
            ) from error


def import_keras() -> Any:
    """Imports Keras.

    Raises:
      UserError: If it is not installed, uses another backend than JAX, or has a
        `keras.distribution`.
    """
    try:
        keras: Any = importlib.import_module("keras")
    except ImportError as error:
        if error.name == "keras":
            raise UserError("Keras is missing: pip install 'spmdtrain[keras]'") from None
        raise UserError(  # most often its backend is not installed
            f"Keras cannot be imported ({one_line(error)}): set KERAS_BACKEND=jax in the "
            "environment"
        ) from error
    if (backend := keras.backend.backend()) != "jax":
        raise UserError(
            f"Keras runs on its {backend} backend: set KERAS_BACKEND=jax in the environment before "
            "keras is first imported"
        )
    if keras.distribution.distribution() is not None:
        raise UserError(
            "keras.distribution is set, but the strategy decides where the variables are placed: "
            "call keras.distribution.set_distribution(None) before the model is created"
        )
    return keras


def _split(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the trainable and the other weights by path; checks that paths do not collide."""
    counts = Counter(v.path for v in model.weights)
    for name in counts:
        if counts[name] > 1:
            raise UserError(
                f"{counts[name]} variables of the Keras model have the path {name}: give them, or "
                "their layers, distinct names"
            )
        for outer in accumulate(name.split("/")[:-1], "{}/{}".format):
            if outer in counts:
                raise UserError(
                    f"the Keras model has a variable {outer}, and {name} below it: rename one "
                    "of them"
                )
    return (
        {v.path: v for v in model.trainable_weights},
        {v.path: v for v in model.non_trainable_weights},
    )


def _check_trainable(model: Any, params: Mapping[str, Any]) -> None:
    """Raises `UserError` if the model needs a feature of Keras' training that optax steps lack.

    `params` are the variables whose constraints nothing would enforce.
    """
    for name, variable in params.items():
        if variable.constraint is not None:
            raise UserError(
                f"{name} has the constraint {type(variable.constraint).__name__}, which Keras' "
                "optimizers enforce and optax's do not: create the model without it and let the "
                "optimizer enforce it (optax.keep_params_nonnegative, for example)"
            )
    kinds = import_keras().layers
    recurrent = (kinds.RNN, kinds.Bidirectional)
    for layer in all_layers(model):
        if layer.compute_dtype == "float16":
            raise UserError(
                f"the layer {layer.name!r} computes in float16, which needs loss scaling, which "
                "is not supported: use the policy mixed_bfloat16"
            )
        if isinstance(layer, recurrent) and layer.stateful:
            raise UserError(
                f"the layer {layer.name!r} ({type(layer).__name__}) has stateful=True, which is "
                "not supported (row i of a batch would continue row i of the batch before): make "
                "each series one example, with stateful=False"
            )


def _check_same_values(given: Mapping[str, np.ndarray]) -> None:
    """Checks that all processes have the same initial values: Keras draws them without a seed."""
    if process_group.count() == 1:
        return
    digests = {name: hashlib.sha256(x.tobytes()).hexdigest()[:12] for name, x in given.items()}
    process_group.agree(
        "",
        {f"initial value of {name}": digest for name, digest in digests.items()},
        f"{process_group.SAME_CODE}; call keras.utils.set_random_seed(seed) before the model is "
        "created",
    )


# -- values by their paths -------------------------------------------------------------------------


def _nested(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return traverse_util.unflatten_dict({name: values[name] for name in names}, sep="/")


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep="/")


def assign_variable(variable: Any, value: jax.Array) -> None:
    """Assigns a global array to a Keras variable, which stays on its device.

    If the array is split over several processes, all of these must call this.
    """
    variable.assign(jax.device_put(_whole(value), variable.value.sharding))


def _whole(value: jax.Array) -> np.ndarray:
    """Returns a global array on this host, gathered from other processes if necessary."""
    if not (value.is_fully_addressable or value.is_fully_replicated):
        sharding = value.sharding
        assert isinstance(sharding, NamedSharding), "several processes have a mesh"
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
        value = call_together(jax.jit(jnp.copy, out_shardings=replicated), value)
    return np.asarray(value)


# -- A Keras optimizer as an optax transformation --------------------------------------------------

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
            _flat_params(params) | _flat_params(opt_state.inner_state[_AVERAGE]), sep="/"
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
        if _flat_params(params).keys() != set(self._params):
            raise UserError(
                "a Keras optimizer updates all trainable variables of its model at once: instead "
                "of freeze, set layer.trainable = False before model.compile; with strategy "
                f"{ASYNCHRONOUS}, pass an optax optimizer"
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
        flat = _flat_params(tree)
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


def _flat_params(tree: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = traverse_util.flatten_dict(tree, sep="/")
    return {path: value for path, value in flat.items() if value is not None}
