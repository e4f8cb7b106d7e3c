"""The adapter of flax.linen modules."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from spmdtrain.adapters.base import Function, Mode, Variables
from spmdtrain.sharding.annotations import Annotation
from spmdtrain.tree import path_name

PyTree = Any


class LinenModel:
    """A flax.linen module.

    The objective gets a `BoundLinen` and calls it: `model(x, train=model.training)`.

    Args:
      module: The module.
      *inputs: Example inputs for `module.init`.
      streams: Names of the random streams that the module draws from.
      **kwargs: Keyword arguments for `module.init`.

    Attributes:
      annotations: The names in the boxes of the variables (`nn.Partitioned`) by path; known after
        `init`. The variables themselves are unboxed.
    """

    def __init__(
        self, module: Any, *inputs: PyTree, streams: Sequence[str] = ("dropout",), **kwargs: Any
    ) -> None:
        self.given: PyTree = {}
        self.annotations: dict[str, Annotation] = {}
        self.module = module
        self.streams = tuple(streams)
        self._inputs, self._kwargs = inputs, kwargs

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        rngs = _stream_keys(key, ("params", *self.streams))
        boxed = _init_variables(lambda: self.module.init(rngs, *self._inputs, **self._kwargs))
        self.annotations, variables = _unboxed(boxed)
        return Variables(variables.pop("params", {}), variables)

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        bound = BoundLinen(self.module, variables, key, self.streams, training=mode is Mode.TRAIN)
        result = function(bound, batch)
        return result, bound.model_state

    def merge(self, variables: Variables) -> "BoundLinen":
        key = jax.random.key(0)
        return BoundLinen(self.module, variables, key, self.streams, training=False)


_NO_MESH = AbstractMesh((), ())


def _init_variables(init: Callable[[], Any]) -> Any:
    """Returns the variables of a module.

    Within a mesh Flax constrains each new variable to its annotation, and names that are not axes
    are errors. Therefore the module is initialized without a mesh, unless its own code needs one.

    Args:
      init: Initializes the module.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return init()
    try:
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            return init()
    except (RuntimeError, ValueError):
        return init()


def _unboxed(variables: Any) -> tuple[dict[str, Annotation], dict[str, Any]]:
    """Returns the annotations of boxed variables by path in the state, and the plain arrays."""
    from flax.core import meta  # slow to import

    found = {}
    boxes = jax.tree_util.tree_leaves_with_path(variables, is_leaf=meta.is_axis_metadata)
    for path, box in boxes:
        annotation = Annotation.of(getattr(box, "names", None), getattr(box, "rules", None))
        if annotation is not None:
            name = path_name(path)
            found[name if name.startswith("params/") else f"model_state/{name}"] = annotation
    with jax.sharding.use_abstract_mesh(_NO_MESH):  # where unboxing constrains nothing
        return found, dict(meta.unbox(variables))


def _stream_keys(key: jax.Array, streams: Sequence[str]) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(key, index) for index, name in enumerate(streams)}


class BoundLinen:
    """A linen module with its variables, the `model` that an objective gets.

    Attributes:
      training: Whether dropout is to be active.
      model_state: The model state after the latest call.
    """

    def __init__(
        self,
        module: Any,
        variables: Variables,
        key: jax.Array,
        streams: Sequence[str],
        *,
        training: bool,
    ) -> None:
        self.training = training
        self.model_state = variables.model_state
        self._module, self._params = module, variables.params
        self._key, self._streams = key, streams
        self._calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `module.apply`; in training, updates the model state.

        Args:
          *args: Inputs of the module.
          **kwargs: Keyword arguments of the module.

        Returns:
          The output of the module.
        """
        key = jax.random.fold_in(self._key, self._calls)  # so a second call draws different masks
        self._calls += 1
        result, changed = self._module.apply(
            {"params": self._params, **self.model_state},
            *args,
            rngs=_stream_keys(key, self._streams),
            mutable=list(self.model_state) if self.training else [],
            **kwargs,
        )
        self.model_state = {**self.model_state, **changed}
        return result
