"""The adapter of flax.linen modules."""

import contextlib
import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from spmdtrain.adapters.base import Function, Mode, NameOutputs, Variables, check_call
from spmdtrain.errors import UserError
from spmdtrain.record.storage import one_line
from spmdtrain.sharding.placement import current_batch_axis
from spmdtrain.sharding.rules import Annotation
from spmdtrain.tree import path_name

PyTree = Any


class LinenModel:
    """A flax.linen module.

    The objective gets a `BoundLinen` and calls it: `model(x, train=model.training)`.

    Args:
      module: The module. Attributes of its mode that are None (see `eval_module`) are those of
        training in training.
      *inputs: Example inputs for `module.init`.
      eval_module: The module in evaluation, for a module whose attributes decide about dropout and
        batch statistics. By default a copy in which `deterministic` and `use_running_average` are
        True, and `train`, `training` and `is_training` False, if they are attributes of the module,
        and not arguments of its call.
      streams: Name or names of the random streams that the module draws from.
      **kwargs: Keyword arguments for `module.init`.

    Raises:
      UserError: If the module is a class, or needs inputs that are not given.

    Attributes:
      modes: Whether the module is given in evaluation mode, with the path ""; empty if no attribute
        is its mode.
      annotations: The names in the boxes of the variables (`nn.Partitioned`) by path; known after
        `init`. The variables themselves are unboxed.
    """

    def __init__(
        self,
        module: Any,
        *inputs: PyTree,
        eval_module: Any = None,
        streams: str | Sequence[str] = ("dropout",),
        **kwargs: Any,
    ) -> None:
        self.given: PyTree = {}
        self.annotations: dict[str, Annotation] = {}
        self.module = self.eval_module = module
        self.modes: dict[str, bool] = {}
        self.streams = (streams,) if isinstance(streams, str) else tuple(streams)
        self._inputs, self._kwargs = inputs, kwargs
        self._frozen_state: frozenset[str] = frozenset()
        if isinstance(module, type):
            raise UserError(f"LinenModel: {module.__name__} is a class: give an instance")
        if eval_module is not None:
            if not isinstance(eval_module, type(module)):
                raise UserError(
                    f"LinenModel: eval_module is {eval_module!r:.80}: it must be a "
                    f"{type(module).__name__} with other attributes"
                )
            self.eval_module = eval_module
        elif modes := _modes_of(module):
            unset = {name: not modes[name] for name in modes if getattr(module, name) is None}
            self.module = module.clone(**unset) if unset else module
            self.eval_module = module.clone(**modes)
            # Attributes that are set say so of the whole module, as those of a layer of nnx do.
            self.modes = {"": any(getattr(module, name) is x for name, x in modes.items())}
        if not inputs and not kwargs:
            call = inspect.unwrap(type(module).__call__)  # flax wraps it
            check_call(call, "LinenModel(module, *inputs): module()", module)

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        rngs = _stream_keys(key, ("params", *self.streams))
        boxed = _init_variables(lambda: self.module.init(rngs, *self._inputs, **self._kwargs))
        self.annotations, variables = _unboxed(boxed)
        return Variables(variables.pop("params", {}), variables)

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        module = self.module if mode is Mode.TRAIN else self.eval_module
        bound = BoundLinen(module, variables, key, self.streams, training=mode is Mode.TRAIN)
        frozen = self._frozen_state if mode is Mode.TRAIN else frozenset()
        axis = current_batch_axis()
        with contextlib.ExitStack() as stack:
            if frozen:
                stack.enter_context(_stored_statistics(frozen))
            if axis is not None:
                stack.enter_context(_averaged_statistics(axis))
            result = function(bound, batch)
        return result, bound.model_state

    def layer_path(self, name: str) -> str:
        """Returns the path in the model's layers of a leaf of the model state.

        Args:
          name: The path of the leaf in the model state.
        """
        return name.partition("/")[2]  # without the collection, such as `batch_stats`

    def named_layers(
        self, model: Any, name: NameOutputs
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which each call of a layer returns `name(path, outputs)`.

        Args:
          model: The `BoundLinen`.
          name: Names the outputs.
        """
        from flax import linen  # slow to import

        def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            outputs, path = call(*args, **kwargs), "/".join(context.module.path)
            is_layer = path and context.method_name == "__call__"
            return name(path, outputs) if is_layer else outputs

        return linen.intercept_methods(intercept)

    def with_frozen_state(self, names: Collection[str]) -> "LinenModel":
        """Returns a copy whose batch normalizations use their stored statistics in training.

        Args:
          names: Paths in the model state of the statistics that are frozen.
        """
        frozen = copy.copy(self)
        frozen._frozen_state = frozenset(map(self.layer_path, names))
        return frozen

    def merge(self, variables: Variables) -> "BoundLinen":
        key = jax.random.key(0)
        return BoundLinen(self.eval_module, variables, key, self.streams, training=False)


_MODES: Mapping[str, bool] = {
    **dict.fromkeys(("deterministic", "use_running_average"), True),
    **dict.fromkeys(("train", "training", "is_training"), False),
}
"""The values that attributes of linen modules have in evaluation."""


def _modes_of(module: Any) -> dict[str, bool]:
    """Returns the attributes that are a module's mode, with their values in evaluation.

    Not those that an objective gives as arguments of the call.
    """
    call = inspect.unwrap(type(module).__call__)  # flax wraps it
    given = inspect.signature(call).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in given.values()):
        return {}
    fields = getattr(module, "__dataclass_fields__", {})
    own = {name: x for name, x in _MODES.items() if name in fields and name not in given}
    return {n: x for n, x in own.items() if isinstance(getattr(module, n), bool | None)}


_NO_MESH = AbstractMesh((), ())


def _stored_statistics(frozen: Collection[str]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which some batch normalizations use their stored statistics.

    `frozen` are paths of these statistics, without the collection.
    """
    from flax import linen  # slow to import

    layers = {name.rpartition("/")[0] for name in frozen}

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        is_call = isinstance(layer, linen.BatchNorm) and context.method_name == "__call__"
        if not is_call or layer.use_running_average or "/".join(layer.path) not in layers:
            return call(*args, **kwargs)
        # A copy, because Flax refuses the argument if the layer has the attribute as well.
        fixed = layer.clone(parent=layer.scope, use_running_average=True)
        others = {name: x for name, x in kwargs.items() if name != "use_running_average"}
        return fixed(args[0], **others) if args else fixed(**others)

    return linen.intercept_methods(intercept)


def _averaged_statistics(axis: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which batch normalizations average their statistics over an axis."""
    from flax import linen  # slow to import

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        is_call = isinstance(layer, linen.BatchNorm) and context.method_name == "__call__"
        if not is_call or layer.axis_name == axis:
            return call(*args, **kwargs)
        return layer.clone(parent=layer.scope, axis_name=axis)(*args, **kwargs)

    return linen.intercept_methods(intercept)


def _init_variables(init: Callable[[], Any]) -> Any:
    """Initializes a module's variables, if possible without a mesh.

    In a mesh Flax constrains each new variable to its annotation, and names that are not axes are
    errors. Only a module whose code needs the mesh is initialized in it.
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
        """Calls `module.apply` with the arguments; in training, updates the model state."""
        from flax import errors  # slow to import

        key = jax.random.fold_in(self._key, self._calls)  # so a second call draws different masks
        self._calls += 1
        try:
            result, changed = self._module.apply(
                {"params": self._params, **self.model_state},
                *args,
                rngs=_stream_keys(key, self._streams),
                mutable=list(self.model_state) if self.training else [],
                **kwargs,
            )
        except errors.ModifyScopeVariableError as error:
            if self.training:  # another collection than those of the model state
                raise
            raise UserError(
                f"in evaluation, {type(self._module).__name__} updates its state, as in training: "
                "call it with model.training, or give LinenModel(..., eval_module=...), the module "
                f"with attributes of evaluation. {one_line(error)}"
            ) from error
        self.model_state = {**self.model_state, **changed}
        return result
