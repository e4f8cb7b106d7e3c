"""flax.nnx modules as pure functions over plain dictionaries."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from spmdtrain.adapters.base import Function, Mode, Variables
from spmdtrain.errors import UserError

PyTree = Any


class NnxModel:
    """An nnx module, split once into plain dictionaries.

    Inside the step it is merged again while JAX traces, which costs nothing at run time. The
    model's own random streams are not carried along: each run seeds them from its key.
    """

    def __init__(self, make: Callable[[PyTree, nnx.Rngs], nnx.Module], given: PyTree) -> None:
        self.given = given
        self._make = make
        self._structure: _NnxStructure | None = None

    @classmethod
    def of(cls, model: Any) -> "NnxModel | None":
        """Of a module, or of a function of `rngs` that makes one; None for what is neither."""
        if isinstance(model, nnx.Module):
            graph, state = nnx.split(model)
            # As host arrays: wherever the user's own arrays live, the mesh may be somewhere else.
            given = jax.tree.map(lambda leaf: leaf if _is_key(leaf) else np.asarray(leaf), state)
            return cls(lambda given, rngs: nnx.merge(graph, given), given)
        if callable(model):
            return cls(lambda _, rngs: model(rngs=rngs), {})
        return None

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


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


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
