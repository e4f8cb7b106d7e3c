"""A Keras 3 model on the JAX backend as pure functions over plain dictionaries of arrays."""

import hashlib
import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from spmdtrain.adapters.base import Function, Mode, Variables
from spmdtrain.distributed import process_group
from spmdtrain.distributed.first_call import call_together
from spmdtrain.errors import UserError
from spmdtrain.files.storage import one_line

PyTree = Any


class KerasModel:
    """A Keras model: sequential, functional or subclassed.

    It starts from the model's own values. Parameters are its trainable weights, the model state
    its other weights (batch statistics, frozen layers), both nested by their Keras paths.
    `inputs` are example inputs, for a model that is not built yet. `Trainer.model` is that very
    model with the trained values. Raises `UserError`.
    """

    def __init__(self, model: Any, *inputs: PyTree, **kwargs: Any) -> None:
        keras = import_keras()
        if not isinstance(model, keras.Model):
            raise UserError(f"KerasModel takes a keras.Model, and this is a {type(model).__name__}")
        if not model.built:
            if not inputs:
                raise UserError(
                    f"the Keras model {model.name!r} is not built, so it has no variables yet: "
                    "give it a keras.Input, or an example: KerasModel(model, example_input)"
                )
            model(*inputs, **kwargs)
        self.model = model
        self._keras = keras
        self._params, self._state = _split(model)
        self._weights = self._params | self._state
        # What `weights` leaves out: the states of random streams, which begin anew each step.
        own = set(map(id, self._weights.values()))
        self._seeds = [v for v in model.variables if id(v) not in own]
        _check_trains_here(model, self._params)
        # On the host, as the mesh may be somewhere else; a copy, as the model's own may go on.
        self.given: PyTree = {name: np.array(v.value) for name, v in self._weights.items()}
        _check_same_values(self.given)

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        return Variables(_nested(given, self._params), _nested(given, self._state))

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        bound = BoundKeras(self.model, training=mode is Mode.TRAIN)
        values = [*self._values(variables), *self._begun(key)]
        # Not `stateless_call`: that goes round the model's `__call__`, which is what tells the
        # layers inside whether they train.
        with self._keras.StatelessScope(
            values, collect_losses=True, initialize_variables=False
        ) as scope:
            result = function(bound, batch)
            bound.check_losses()
        self._check_own(scope)
        if mode is Mode.EVAL:
            return result, variables.model_state
        after = {name: scope.get_current_value(v) for name, v in self._state.items()}
        return result, _nested(after, self._state)

    def merge(self, variables: Variables) -> Any:
        """The model itself with these values, each variable on the device that it was on.

        Of values that are split over several processes all of these have to ask for it.
        """
        for variable, value in self._values(variables):
            variable.assign(jax.device_put(_whole(value), variable.value.sharding))
        return self.model

    def _values(self, variables: Variables) -> Iterable[tuple[Any, jax.Array]]:
        """The model's variables with their values."""
        found = _flat(variables.params) | _flat(variables.model_state)
        for name, variable in self._weights.items():
            value = found[name]
            if value.dtype != variable.dtype:  # Keras would cast it back, and give up the speed
                raise UserError(
                    f"compute_dtype is {value.dtype}, and a Keras model computes in the dtype of "
                    "its own policy: keras.config.set_dtype_policy('mixed_bfloat16') before it is "
                    "made, and no compute_dtype"
                )
            yield variable, value

    def _begun(self, key: jax.Array) -> Iterable[tuple[Any, jax.Array]]:
        """The random streams, begun anew from `key`: two words each, the second counts draws."""
        for number, seed in enumerate(self._seeds):
            yield seed, jax.random.bits(jax.random.fold_in(key, number), seed.shape, seed.dtype)

    def _check_own(self, scope: Any) -> None:
        """What a model keeps outside of its variables would be the same in each step."""
        known = {id(v) for v in (*self._weights.values(), *self._seeds)}
        if made := [v.path for v in self.model.variables if id(v) not in known]:
            raise UserError(
                f"the Keras model {self.model.name!r} made variables while it ran, {made[0]} for "
                "one: call it once before, or give KerasModel(model, example_input) a new one"
            )
        known |= {id(v) for v in self.model.metrics_variables}  # Keras' own, and not carried
        if scope.state_mapping.keys() - known:
            raise UserError(
                f"the Keras model {self.model.name!r} assigns to a variable that is none of its "
                "own (a SeedGenerator outside of a layer, say), which would not be carried: make "
                "it an attribute of a layer"
            )


class BoundKeras:
    """A Keras model with a step's values: what an objective calls as `model`.

    `keras_model` is the model itself, for methods of its own.
    """

    def __init__(self, keras_model: Any, *, training: bool) -> None:
        self.keras_model, self.training = keras_model, training
        self._losses_read = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output; dropout is active and batch statistics are updated in training."""
        return self.keras_model(*args, **{"training": self.training, **kwargs})

    @property
    def losses(self) -> list[jax.Array]:
        """The scalars that regularizers and `add_loss` gave in the last call."""
        self._losses_read = True
        found: list[jax.Array] = self.keras_model.losses
        return found

    def check_losses(self) -> None:
        """Raise `UserError` where a training would leave out what Keras would have added."""
        if self.training and not self._losses_read and (left_out := self.keras_model.losses):
            raise UserError(
                f"the Keras model {self.keras_model.name!r} has {len(left_out)} losses of its own "
                "(regularizers, add_loss), and the objective does not look at them: add "
                "sum(model.losses) to its loss"
            )


# -- what is refused -------------------------------------------------------------------------------


def import_keras() -> Any:
    """Keras, on its JAX backend. Raises `UserError` where it is missing, or on another one."""
    try:
        keras: Any = importlib.import_module("keras")
    except ImportError as error:
        if error.name == "keras":
            raise UserError("Keras is missing: pip install 'spmdtrain[keras]'") from None
        raise UserError(  # of a backend that is not installed, most often
            f"Keras cannot be imported ({one_line(error)}): set KERAS_BACKEND=jax in the "
            "environment"
        ) from error
    if (backend := keras.backend.backend()) != "jax":
        raise UserError(
            f"Keras runs on its {backend} backend: set KERAS_BACKEND=jax in the environment, "
            "before keras is first imported"
        )
    if keras.distribution.distribution() is not None:
        raise UserError(
            "keras.distribution is set, and the strategy says where the variables live: "
            "keras.distribution.set_distribution(None) before the model is made"
        )
    return keras


def _split(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trainable and other weights by their paths, each of which has to be a place of its own."""
    times = Counter(v.path for v in model.weights)
    for name in times:
        if times[name] > 1:
            raise UserError(
                f"{times[name]} variables of the Keras model have the path {name}: give their "
                "layers, or them, names of their own"
            )
        for outer in accumulate(name.split("/")[:-1], "{}/{}".format):
            if outer in times:
                raise UserError(
                    f"the Keras model has a variable {outer}, and {name} inside of it: give one "
                    "of them another name"
                )
    return (
        {v.path: v for v in model.trainable_weights},
        {v.path: v for v in model.non_trainable_weights},
    )


def _check_trains_here(model: Any, params: Mapping[str, Any]) -> None:
    """Raise `UserError` for what Keras' own training does beside the step, and optax would not."""
    if not params:
        raise UserError(f"the Keras model {model.name!r} has no trainable variables")
    for name, variable in params.items():
        if variable.constraint is not None:
            raise UserError(
                f"{name} has the constraint {type(variable.constraint).__name__}, which Keras' "
                "optimizers keep and optax's do not: make the model without, and have the "
                "optimizer do it (optax.keep_params_nonnegative, say)"
            )
    for layer in model._flatten_layers():  # those inside of layers too
        if layer.compute_dtype == "float16":
            raise UserError(
                f"the layer {layer.name!r} computes in float16, whose gradients need a scaled "
                "loss, which is not done here: use the policy mixed_bfloat16"
            )


def _check_same_values(given: Mapping[str, np.ndarray]) -> None:
    """Keras draws initial values anew in each process, unless it is told a seed."""
    if process_group.count() == 1:
        return
    digests = {name: hashlib.sha256(x.tobytes()).hexdigest()[:12] for name, x in given.items()}
    try:
        process_group.check_same({"initial value of": digests})
    except UserError as error:
        raise UserError(
            f"{error}; keras.utils.set_random_seed(seed) before the model is made"
        ) from None


# -- values by their paths -------------------------------------------------------------------------


def _nested(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return traverse_util.unflatten_dict({name: values[name] for name in names}, sep="/")


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep="/")


def _whole(value: jax.Array) -> np.ndarray:
    """A global array on this host, whatever it is split over."""
    if not (value.is_fully_addressable or value.is_fully_replicated):
        sharding = value.sharding
        assert isinstance(sharding, NamedSharding), "several processes have a mesh"
        everywhere = NamedSharding(sharding.mesh, PartitionSpec())
        value = call_together(jax.jit(jnp.copy, out_shardings=everywhere), value)
    return np.asarray(value)
