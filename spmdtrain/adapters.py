"""From a model, whatever library it comes from, to pure functions over plain pytrees.

The rest of spmdtrain knows only the `Adapter` protocol. `adapt` finds the right one.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from spmdtrain.errors import UserError

PyTree = Any
Function = Callable[[Any, PyTree], PyTree]  # an objective or predict function of (model, batch)


class Mode(enum.Enum):
    """What a model is run for: dropout and batch statistics differ."""

    TRAIN = "train"
    EVAL = "eval"


class Variables(NamedTuple):
    """What a model is made of: trained parameters, and state it carries (batch statistics).

    Both are plain nested dictionaries of arrays for nnx and linen models.
    """

    params: PyTree
    model_state: PyTree


@runtime_checkable
class Adapter(Protocol):
    """A model as pure functions."""

    given: PyTree
    """Arrays that `init` starts from, handed to it as an argument so that they are not compiled
    in as constants; an empty dictionary where it starts from the key alone."""

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        """The initial variables; traced under `jit`."""
        ...

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        """`function(model, batch)` and the model state afterwards; traced under `jit`.

        `key` feeds dropout and the like.
        """
        ...

    def merge(self, variables: Variables) -> Any:
        """The model with these values, to call outside a run."""
        ...


def adapt(model: Any) -> Adapter:
    """The adapter of an nnx module, or of a function of `rngs` that makes one."""
    if isinstance(model, Adapter):
        return model
    if isinstance(model, nnx.Module):
        graph, state = nnx.split(model)
        # As host arrays: wherever the user's own arrays live, the mesh may be somewhere else.
        given = jax.tree.map(lambda leaf: leaf if _is_key(leaf) else np.asarray(leaf), state)
        return NnxModel(lambda given, rngs: nnx.merge(graph, given), given)
    hint = ""
    if _is_from(model, "flax.linen"):
        hint = ": wrap it in LinenModel(module, example_input)"
    elif _is_from(model, "keras"):
        hint = ": wrap it in KerasModel(model)"
    elif callable(model):
        return NnxModel(lambda _, rngs: model(rngs=rngs), {})
    raise UserError(
        f"model is a {type(model).__module__}.{type(model).__name__}{hint}. It must be an nnx "
        "module, a function of rngs that makes one, a LinenModel, KerasModel or FunctionModel"
    )


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _is_from(model: Any, library: str) -> bool:
    """Whether the model is of a class of that library's, or of one made from such a class."""
    return any(f"{cls.__module__}.".startswith(f"{library}.") for cls in type(model).__mro__)


# -- flax.nnx ------------------------------------------------------------------------------------


class NnxModel:
    """An nnx module, split once into plain dictionaries.

    Inside the step it is merged again while JAX traces, which costs nothing at run time. The
    model's own random streams are not carried along: each run seeds them from its key.
    """

    def __init__(self, make: Callable[[PyTree, nnx.Rngs], nnx.Module], given: PyTree) -> None:
        self.given = given
        self._make = make
        self._structure: _NnxStructure | None = None

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        model = self._make(given, nnx.Rngs(key))
        if not isinstance(model, nnx.Module):
            raise UserError(f"model(rngs=...) returned a {type(model).__name__}, not an nnx.Module")
        graph, params, streams, rest = _split(model)
        self._structure = _NnxStructure(graph, _Layout(params), _Layout(streams), _Layout(rest))
        return Variables(_to_dict(params), _to_dict(rest))

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        structure = self._structure
        assert structure is not None, "init() comes first"
        model = structure.merge(variables, key, mode)
        result = function(model, batch)
        nnx.pop(model, nnx.Intermediate)  # what the model sowed for a look is no state
        _, _, _, rest = _split(model)
        after = _to_dict(rest)
        before = variables.model_state
        if (names := sorted(_flat(before))) != (now := sorted(_flat(after))):
            raise UserError(
                "the model's variables other than parameters changed while it ran: "
                f"{names} became {now}"
            )
        return result, after

    def merge(self, variables: Variables) -> nnx.Module:
        """The module with these values, in eval mode."""
        structure = self._structure
        assert structure is not None, "init() comes first"
        return structure.merge(variables, jax.random.key(0), Mode.EVAL)


class _NnxStructure(NamedTuple):
    """What is left of a module once its values are taken out."""

    graph: Any
    params: "_Layout"
    streams: "_Layout"
    rest: "_Layout"

    def merge(self, variables: Variables, key: jax.Array, mode: Mode) -> nnx.Module:
        model: nnx.Module = nnx.merge(
            self.graph,
            self.params.from_dict(variables.params),
            self.streams.from_key(key),
            self.rest.from_dict(variables.model_state),
        )
        if mode is Mode.TRAIN:
            model.train()
        else:
            model.eval()
        return model


def _split(model: nnx.Module) -> tuple[Any, Any, Any, Any]:
    """Graph, parameters, random streams, and all other variables."""
    graph, *states = nnx.split(model, nnx.Param, nnx.RngState, ...)
    params, streams, rest = states
    return graph, params, streams, rest


_VALUE = jax.tree_util.GetAttrKey("value")  # a Variable's own entry in the path of its value


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """A leaf's path in the plain dictionary, where keys are strings, as checkpoints have them."""
    names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path if key != _VALUE)
    if _VALUE not in path:
        raise UserError(
            f"the model's {'.'.join(names)} is a plain array: make it an nnx.Param if it is to be "
            "trained, or an nnx.Variable"
        )
    return names


def _to_dict(state: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return traverse_util.unflatten_dict({_names(path): leaf for path, leaf in leaves})


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep="/")


class _Layout:
    """How to make an `nnx.State` again from plain values."""

    def __init__(self, state: Any) -> None:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
        self._treedef: Any = treedef
        self._paths = [_names(path) for path, _ in leaves]
        self._leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in leaves]

    def from_dict(self, tree: Mapping[str, Any]) -> Any:
        flat = traverse_util.flatten_dict(tree)
        return self._treedef.unflatten([flat[path] for path in self._paths])

    def from_key(self, key: jax.Array) -> Any:
        """Random streams begun anew: keys derived from `key`, counts at 0."""
        return self._treedef.unflatten(
            [
                _keys(jax.random.fold_in(key, index), leaf.shape)
                if _is_key(leaf)
                else jnp.zeros(leaf.shape, leaf.dtype)
                for index, leaf in enumerate(self._leaves)
            ]
        )


def _keys(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One key, or one for each layer of a model whose layers are stacked."""
    return jax.random.split(key, shape) if shape else key


# -- flax.linen ----------------------------------------------------------------------------------


class LinenModel:
    """A flax.linen module.

    `inputs` are example inputs for `module.init`. The objective calls `model(x, ...)`; the bound
    model's `training` says whether dropout is to be active: `model(x, train=model.training)`.
    `streams` names the random streams that the module draws from.
    """

    def __init__(
        self, module: Any, *inputs: PyTree, streams: Sequence[str] = ("dropout",), **kwargs: Any
    ) -> None:
        self.given: PyTree = {}
        self.module = module
        self.streams = tuple(streams)
        self._inputs, self._kwargs = inputs, kwargs

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        rngs = _stream_keys(key, ("params", *self.streams))
        variables = dict(self.module.init(rngs, *self._inputs, **self._kwargs))
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


def _stream_keys(key: jax.Array, streams: Sequence[str]) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(key, number) for number, name in enumerate(streams)}


class BoundLinen:
    """A linen module with its variables: what an objective calls as `model`."""

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
        """`module.apply`, the carried state updated when training."""
        key = jax.random.fold_in(self._key, self._calls)  # a second call draws other masks
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


# -- plain functions -----------------------------------------------------------------------------


class FunctionModel:
    """Plain pure functions: `init(key)` makes the parameters, any pytree.

    The objective gets `partial(apply, params)` as its model, or the parameters themselves where
    there is no `apply`.
    """

    def __init__(
        self, init: Callable[[jax.Array], PyTree], apply: Callable[..., Any] | None = None
    ) -> None:
        self.given: PyTree = {}
        self._init, self._apply = init, apply

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        return Variables(self._init(key), {})

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        return function(self.merge(variables), batch), variables.model_state

    def merge(self, variables: Variables) -> Any:
        params = variables.params
        return params if self._apply is None else partial(self._apply, params)
