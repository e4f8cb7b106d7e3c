"""The adapter of flax.nnx modules."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from spmdtrain.adapters.base import (
    Function,
    Mode,
    NameOutputs,
    Variables,
    check_call,
    with_named_outputs,
)
from spmdtrain.errors import UserError
from spmdtrain.sharding.placement import current_batch_axis
from spmdtrain.sharding.rules import Annotation
from spmdtrain.tree import is_key

PyTree = Any


class NnxModel:
    """An nnx module, split once into plain dictionaries.

    The step merges it again while JAX traces, which costs nothing at run time. The states of the
    model's random streams are not part of the variables: each call of `run` seeds them from its
    key.

    Args:
      make: Returns the module for (given, rngs).
      given: The arrays of an existing module; an empty dictionary if `make` draws them.

    Attributes:
      annotations: The `out_sharding` metadata of the variables by path; known after `init`.
      modes: See `HasModes`. Training keeps these modes; evaluation sets all to evaluation.
    """

    def __init__(self, make: Callable[[PyTree, nnx.Rngs], nnx.Module], given: PyTree) -> None:
        self.given = given
        self.annotations: dict[str, Annotation] = {}
        self.modes: dict[str, bool] = {}
        self._make = make
        self._structure: _NnxStructure | None = None
        self._frozen_state: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: Any) -> "NnxModel | None":
        """Returns the adapter of a module or a function of `rngs`; None if `model` is neither."""
        if isinstance(model, nnx.Module):
            graph, state = nnx.split(model)
            # As host arrays, because the mesh may use other devices than the user's arrays.
            given = jax.tree.map(lambda leaf: leaf if is_key(leaf) else np.asarray(leaf), state)
            return cls(lambda given, rngs: nnx.merge(graph, given), given)
        if callable(model):
            what = "model must be a function of rngs, such as functools.partial(Model, size)"
            check_call(model, what, rngs=None)
            return cls(lambda _, rngs: model(rngs=rngs), {})
        return None

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        # The jitted initialization places arrays; Flax would need axes in place of names.
        with nnx.use_eager_sharding(False):
            model = self._make(given, nnx.Rngs(key))
        if not isinstance(model, nnx.Module):
            raise UserError(f"model(rngs=...) returned a {type(model).__name__}, not an nnx.Module")
        _check_attributes(model)
        self.modes = {
            "/".join(map(str, path)): any(found.values())
            for path, module in nnx.iter_modules(model)
            if (found := _modes_of(module))
        }
        graph, *states = nnx.split(model, *_KINDS)
        params, streams, rest = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x)) if isinstance(x, _NUMBERS) else x, states
        )
        self.annotations = _annotations(params, "params") | _annotations(rest, "model_state")
        self._structure = _NnxStructure(graph, _Layout(params), _Layout(streams), _Layout(rest))
        return Variables(_to_dict(params), _to_dict(rest))

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        structure = self._structure
        assert structure is not None, "call init() first"
        model = structure.merge(variables, key, mode)
        if mode is Mode.TRAIN and self._frozen_state:
            _use_stored_statistics(model, self._frozen_state)
        if (axis := current_batch_axis()) is not None:
            _average_statistics(model, axis)
        result = function(model, batch)
        nnx.pop(model, nnx.Intermediate)  # values from `sow` are not state
        rest: Any = nnx.split(model, *_KINDS)[-1]
        after = _to_dict(rest)
        before, now = (
            sorted(traverse_util.flatten_dict(x, sep="/")) for x in (variables.model_state, after)
        )
        if before != now:
            _refuse_other_variables(rest, before)
        return result, after

    def layer_path(self, name: str) -> str:
        return name

    def named_layers(self, model: Any, name: NameOutputs) -> AbstractContextManager[None]:
        layers = [("/".join(map(str, path)), layer) for path, layer in nnx.iter_modules(model)]
        return with_named_outputs(layers, name)

    def with_frozen_state(self, names: Collection[str]) -> "NnxModel":
        frozen = copy.copy(self)
        frozen._frozen_state = frozenset(names)
        return frozen

    def merge(self, variables: Variables) -> nnx.Module:
        structure = self._structure
        assert structure is not None, "call init() first"
        return structure.merge(variables, jax.random.key(0), Mode.EVAL)


_KINDS: Any = (nnx.Param, nnx.RngState, ...)
_NUMBERS = (bool, int, float, complex)
"""The variables of a module: parameters, random streams, and all others."""


class _NnxStructure(NamedTuple):
    """The structure of a module without its values."""

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
            _train_as_given(model)
        else:
            model.eval()
        return model


_MODES = ("deterministic", "use_running_average")  # what Flax's `train` and `eval` set


def _modes_of(module: nnx.Module) -> dict[str, bool]:
    """Returns whether evaluation is set, by the name of the mode; None counts as not set."""
    return {n: bool(getattr(module, n)) for n in _MODES if hasattr(module, n)}


def _train_as_given(model: nnx.Module) -> None:
    """Sets the training mode, except where the user has set evaluation."""
    in_evaluation = [
        (module, name)
        for _, module in nnx.iter_modules(model)
        for name, is_set in _modes_of(module).items()
        if is_set
    ]
    model.train()  # sets modes that are None as well, and a model may override it
    for module, name in in_evaluation:
        setattr(module, name, True)


def _check_attributes(model: nnx.Module) -> None:
    """Checks that no attribute is an array of the trace, which `nnx.split` takes as a constant."""
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            leaves = jax.tree.leaves(value, is_leaf=_is_of_flax)
            if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                _refuse_plain_array((*map(str, path), name))


def _is_of_flax(value: Any) -> bool:
    return isinstance(value, (nnx.Pytree, nnx.Variable))


def _refuse_plain_array(names: Sequence[str]) -> NoReturn:
    raise UserError(
        f"the model's {'.'.join(names)} is a plain array: make it an nnx.Param to train it, or an "
        "nnx.Variable"
    )


def _refuse_other_variables(state: Any, before: Collection[str]) -> NoReturn:
    """Raises `UserError` because a model has made or removed variables while it ran."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_of_flax)
    kinds = {"/".join(_names((*path, _VALUE))): type(leaf).__name__ for path, leaf in leaves}
    known = {name for name in kinds if any(f"{x}/".startswith(f"{name}/") for x in before)}
    made = [f"{name} of {kind}" for name, kind in kinds.items() if name not in known]
    if not made:
        raise UserError(
            "the model removed variables while it ran, which the next step needs: "
            f"{', '.join(before)} became {', '.join(known) or 'none'}"
        )
    kind = made[0].rpartition(" ")[2]
    raise UserError(
        f"the model made variables while it ran, which the next step would not have: "
        f"{', '.join(made)}. Make them in __init__; take values from `sow` out in the objective, "
        f"after the call: nnx.pop(model, {kind})"
    )


def _use_stored_statistics(model: nnx.Module, frozen: Collection[str]) -> None:
    """Sets the batch normalizations that have frozen variables to evaluation."""
    layers = {name.rpartition("/")[0] for name in frozen}
    for path, module in nnx.iter_modules(model):
        if "/".join(map(str, path)) in layers and hasattr(module, "use_running_average"):
            module.use_running_average = True


def _average_statistics(model: nnx.Module, axis: str) -> None:
    """Sets the batch normalizations to average their statistics over a named axis."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            module.axis_name = axis


_VALUE = jax.tree_util.GetAttrKey("value")  # the last entry of the path of a Variable's value


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns a leaf's path in the plain dictionary, with keys as strings as in checkpoints."""
    names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path if key != _VALUE)
    if _VALUE not in path:
        _refuse_plain_array(names)
    return names


def _annotations(state: Any, root: str) -> dict[str, Annotation]:
    """Returns the annotations of the variables of a state, by path."""
    found = {}
    variables = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    for path, variable in variables:
        if not isinstance(variable, nnx.Variable):
            continue
        metadata = variable.get_metadata()
        table = metadata.get("sharding_rules")
        if (annotation := Annotation.of(metadata.get("out_sharding"), table)) is not None:
            found["/".join([root, *_names((*path, _VALUE))])] = annotation
    return found


def _to_dict(state: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return traverse_util.unflatten_dict({_names(path): leaf for path, leaf in leaves})


class _Layout:
    """The structure of an `nnx.State`, to rebuild it from plain values."""

    def __init__(self, state: Any) -> None:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
        self._treedef: Any = treedef
        self._paths = [_names(path) for path, _ in leaves]
        self._leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in leaves]

    def from_dict(self, tree: Mapping[str, Any]) -> Any:
        flat = traverse_util.flatten_dict(tree)
        return self._treedef.unflatten([flat[path] for path in self._paths])

    def from_key(self, key: jax.Array) -> Any:
        """Returns newly seeded random streams: keys derived from `key`, counts of 0."""
        return self._treedef.unflatten(
            [
                _keys(jax.random.fold_in(key, index), leaf.shape)
                if is_key(leaf)
                else jnp.zeros(leaf.shape, leaf.dtype)
                for index, leaf in enumerate(self._leaves)
            ]
        )


def _keys(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns one key, or an array of keys, one for each of the stacked layers."""
    return jax.random.split(key, shape) if shape else key
