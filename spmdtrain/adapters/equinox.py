"""The adapter of Equinox modules."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np

from spmdtrain.adapters.base import (
    Function,
    Mode,
    NameOutputs,
    Variables,
    check_call,
    with_named_outputs,
)
from spmdtrain.errors import UserError, import_extra
from spmdtrain.sharding.placement import current_batch_axis
from spmdtrain.tree import is_key

PyTree = Any
Path = tuple[str, ...]


class EquinoxModel:
    """An Equinox module, or a module and its state.

    The objective gets the module itself: `jax.vmap(model)(x)`. Of a module with state it gets a
    `BoundEquinox`, whose call maps the module over the batch and keeps the new state: `model(x)`.

    Parameters are the arrays of floating-point or complex numbers. Other arrays of the module are
    part of the model state, which training does not change; everything else is kept as it is.

    Args:
      model: A module, from whose values training starts; a pair of a module and its state, as
        `eqx.nn.make_with_state` returns; or a function of `key` that returns one of these, such as
        `functools.partial(eqx.nn.MLP, 784, 10, 64, 2)`. The module may also be a container of
        modules.

    Raises:
      UserError: If Equinox is not installed, `model` holds no parameters, its state is missing, or
        a function does not take `key`.

    Attributes:
      modes: See `HasModes`. Training keeps these modes; evaluation is `eqx.nn.inference_mode`.
    """

    def __init__(self, model: Any) -> None:
        eqx = import_extra("equinox", "equinox", "Equinox models")
        self.given: PyTree = {}
        self.modes: dict[str, bool] = {}
        self._structure: _Structure | None = None
        self._frozen_state: frozenset[str] = frozenset()
        if callable(model) and not isinstance(model, eqx.Module):
            what = "EquinoxModel: a function of key, such as functools.partial(Model, size)"
            check_call(model, what, key=None)
            self._make: Callable[[PyTree, jax.Array], Any] = lambda _, key: model(key=key)
            return
        structure, values = _split(model)
        # As host arrays, because the mesh may use other devices than the user's arrays.
        host = {n: x if is_key(x) else np.asarray(x) for n, x in values.items()}
        self.given = {"/".join(path): x for path, x in host.items()}

        def make(given: PyTree, key: jax.Array) -> Any:
            module, state = structure.fill({path: given["/".join(path)] for path in host})
            return module if state is None else (module, state)

        self._make = make

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        self._structure, values = _split(self._make(given, key))
        self.modes = self._structure.modes
        params = {path: x for path, x in values.items() if path in self._structure.params}
        rest = {path: x for path, x in values.items() if path not in params}
        return Variables(_nested(params), _nested(rest))

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        model = self._bound(variables, mode)
        result = function(model, batch)
        if mode is Mode.EVAL or not isinstance(model, BoundEquinox):
            return result, variables.model_state
        assert self._structure is not None
        before = _flat(variables.model_state)
        after = {**before, **self._structure.values_of_state(model.state)}
        for path, new in after.items():
            if new.shape != before[path].shape:
                raise UserError(
                    f"the model's state {'/'.join(path)} has shape {list(new.shape)} after the "
                    f"objective, and had {list(before[path].shape)}: call the model with one state "
                    "for all examples: jax.vmap(..., in_axes=(0, None), out_axes=(0, None))"
                )
        return result, _nested(after)

    def merge(self, variables: Variables) -> Any:
        """Returns the module, or a `BoundEquinox` of a module with state, in inference mode.

        Args:
          variables: The values of the model.
        """
        return self._bound(variables, Mode.EVAL)

    def on_batch(self, model: Any) -> Callable[..., Any]:
        """Returns the function of a whole batch, for the model that an objective gets.

        Args:
          model: The module, or a `BoundEquinox`.
        """
        return model if isinstance(model, BoundEquinox) else jax.vmap(model)

    def layer_path(self, name: str) -> str:
        """Returns the path in the model's layers of a leaf of the model state.

        Args:
          name: The path of the leaf in the model state.
        """
        return name

    def named_layers(self, model: Any, name: NameOutputs) -> AbstractContextManager[None]:
        """Returns a context in which each call of a layer returns `name(path, outputs)`.

        Args:
          model: The module, or a `BoundEquinox`.
          name: Names the outputs, of one example if the objective maps the module over a batch.
        """
        module = model.module if isinstance(model, BoundEquinox) else model
        layers = [("/".join(path), layer) for path, layer in _layers(module)]
        return with_named_outputs(layers, name)

    def with_frozen_state(self, names: Collection[str]) -> "EquinoxModel":
        """Returns a copy whose layers use their stored state in training.

        Args:
          names: Paths in the model state of the leaves that are frozen.
        """
        frozen = copy.copy(self)
        frozen._frozen_state = frozenset(names)
        return frozen

    def file_names(self) -> Mapping[str, str | None]:
        """Returns the path of each leaf of an `.eqx` file of this model; None if it is no array.

        The leaves are those that `eqx.tree_serialise_leaves` writes: of the module, or of the pair
        (module, state). They have no names and are counted from 0.
        """
        assert self._structure is not None, "call init() first"
        return {f"leaf {i}": name for i, name in enumerate(self._structure.saved())}

    def _bound(self, variables: Variables, mode: Mode) -> Any:
        import equinox as eqx

        assert self._structure is not None, "call init() first"
        values = _flat(variables.params) | _flat(variables.model_state)
        frozen = self._frozen_state if mode is Mode.TRAIN else frozenset()
        module, state = self._structure.fill(values, frozen)
        if mode is Mode.EVAL:
            module = eqx.nn.inference_mode(module)
        else:
            _check_normalizations(module)
        return module if state is None else BoundEquinox(module, state)


class BoundEquinox:
    """An Equinox module with its state, the `model` that an objective gets.

    A call maps the module over a batch: `model(x)` is

        jax.vmap(model.module, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            x, model.state
        )

    without the new state, which it assigns to `model.state`. The axis has the name that the batch
    normalizations of the module give it. An objective may do the same itself, for example for a
    module that is called otherwise.

    Attributes:
      module: The module.
      state: Its state, an `eqx.nn.State`. The last value that the objective assigns is kept.
    """

    def __init__(self, module: Any, state: Any) -> None:
        self.module, self.state = module, state

    def __call__(self, *args: PyTree, key: jax.Array | None = None) -> PyTree:
        """Calls `module(*args, state)`, or `module(*args, state, key=key)`, for each example.

        Args:
          *args: Arguments of leading dim B.
          key: A random key, from which each example gets its own.

        Returns:
          The outputs, of leading dim B.
        """
        inputs = (*[0] * len(args), None)
        named: dict[str, jax.Array] = {}
        if key is not None:
            named["key"] = jax.random.split(key, jax.tree.leaves(args)[0].shape[0])

        def call(named: dict[str, jax.Array], *args: PyTree) -> tuple[PyTree, PyTree]:
            result: tuple[PyTree, PyTree] = self.module(*args, **named)
            return result

        mapped = jax.vmap(
            call, in_axes=(0, *inputs), out_axes=(0, None), axis_name=_axis_of(self.module)
        )
        outputs, self.state = mapped(named, *args, self.state)
        return outputs


# -- Modules as dictionaries of arrays -------------------------------------------------------------


class _Structure(NamedTuple):
    """A module and its state without the values of their arrays.

    Attributes:
      treedef: The tree of the module.
      leaves: Path and value of the module's leaves; None for arrays.
      params: The paths of the parameters.
      states: Path and tree of each value of the state, by its marker; None without a state.
    """

    treedef: Any
    leaves: list[tuple[Path, Any]]
    params: frozenset[Path]
    states: dict[Any, tuple[Path, Any]] | None

    @property
    def modes(self) -> dict[str, bool]:
        """Whether each layer with a mode is in inference mode, by path."""
        return {
            "/".join(path[:-1]): leaf
            for path, leaf in self.leaves
            if path[-1:] == ("inference",) and isinstance(leaf, bool)
        }

    def fill(
        self, values: Mapping[Path, Any], frozen: Collection[str] = frozenset()
    ) -> tuple[Any, Any]:
        """Returns the module and its state; layers with state in `frozen` are in inference mode."""
        import equinox as eqx

        fixed = {
            path[:-1]  # of the layer whose attribute the state's index is
            for path, _ in (self.states or {}).values()
            if any(f"{name}/".startswith("/".join((*path, ""))) for name in frozen)
        }
        leaves = []
        for path, leaf in self.leaves:
            is_fixed = path[-1:] == ("inference",) and path[:-1] in fixed
            leaves.append(values[path] if leaf is None else is_fixed or leaf)
        module = jax.tree.unflatten(self.treedef, leaves)
        if self.states is None:
            return module, None
        parts = []
        for path, treedef in self.states.values():
            parts.append(treedef.unflatten([values[n] for n in _paths_in(path, treedef)]))
        rebuild: Any = eqx.nn.State.tree_unflatten
        return module, rebuild(tuple(self.states), parts)

    def values_of_state(self, state: Any) -> dict[Path, Any]:
        """Returns the arrays of a state by path."""
        assert self.states is not None
        values: dict[Path, Any] = {}
        for marker, part in _items(state).items():
            path, treedef = self.states[marker]
            values |= zip(_paths_in(path, treedef), jax.tree.leaves(part), strict=True)
        return values

    def saved(self) -> list[str | None]:
        """Returns the paths of the leaves that Equinox writes, in this order."""
        names = [
            "/".join(path) if leaf is None else None
            for path, leaf in self.leaves
            if leaf is None or isinstance(leaf, (bool, int, float, complex))
        ]
        for path, treedef in (self.states or {}).values():
            names += ["/".join(name) for name in _paths_in(path, treedef)]
        return names


def _split(model: Any) -> tuple[_Structure, dict[Path, Any]]:
    """Returns the structure of a module, or of a module and its state, and the arrays by path."""
    import equinox as eqx

    def is_index(node: Any) -> bool:
        return isinstance(node, eqx.nn.StateIndex)

    is_pair = isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], eqx.nn.State)
    module, state = model if is_pair else (model, None)
    nodes = jax.tree_util.tree_leaves_with_path(module, is_leaf=is_index)
    indices = {node.marker: _names(path) for path, node in nodes if is_index(node)}
    stored = {} if state is None else _items(state)
    if indices.keys() != stored.keys():
        without = sorted("/".join(indices[marker]) for marker in indices.keys() - stored.keys())
        raise UserError(
            f"EquinoxModel: the module has state at {without[0]}, which is not given: give the "
            "pair (module, state) that eqx.nn.make_with_state(Model)(...) returns, or a function "
            "of key that returns it"
            if without
            else "EquinoxModel: the state is of another module: give the pair (module, state) that "
            "one call of eqx.nn.make_with_state(Model)(...) returned"
        )
    module = eqx.nn.delete_init_state(module)  # the arrays from which the state was made
    found, treedef = jax.tree_util.tree_flatten_with_path(module)
    named = [(_names(path), leaf) for path, leaf in found]
    values = {path: leaf for path, leaf in named if eqx.is_array(leaf)}
    params = frozenset(
        path
        for path, x in values.items()
        if not is_key(x) and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)
    )
    if not params or () in params:
        raise UserError(
            f"EquinoxModel: a {type(module).__module__}.{type(module).__name__} "
            f"{'has no parameters' if not params else 'is no module'}: give an Equinox module, a "
            "pair (module, state), or a function of key that returns one of them"
        )
    leaves = [(path, None if path in values else leaf) for path, leaf in named]
    states = {marker: (indices[marker], jax.tree.structure(x)) for marker, x in stored.items()}
    for marker, part in stored.items():
        path, tree = states[marker]
        values |= zip(_paths_in(path, tree), jax.tree.leaves(part), strict=True)
    return _Structure(treedef, leaves, params, states if is_pair else None), values


def _items(state: Any) -> dict[Any, Any]:
    """Returns the values of a state by marker."""
    try:
        values, markers = state.tree_flatten()
    except ValueError as error:
        raise UserError(
            "the objective has used the model's state and not kept the new one: assign it, as in "
            "outputs, model.state = model.module(x, model.state)"
        ) from error
    return dict(zip(markers, values, strict=True))


def _names(path: tuple[Any, ...]) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _paths_in(path: Path, treedef: Any) -> list[Path]:
    """Returns the paths of the leaves of a tree that is stored at a path."""
    tree = treedef.unflatten(range(treedef.num_leaves))
    return [(*path, *_names(inner)) for inner, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _nested(values: Mapping[Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return tree


def _flat(tree: PyTree) -> dict[Path, Any]:
    return {_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _layers(module: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the modules in a module, with their paths."""
    import equinox as eqx

    def is_inner(node: Any) -> bool:
        return isinstance(node, eqx.Module) and node is not module

    for keys, node in jax.tree_util.tree_leaves_with_path(module, is_leaf=is_inner):
        if is_inner(node):
            inner = (*path, *_names(keys))
            yield inner, node
            yield from _layers(node, inner)


# -- Batch normalizations --------------------------------------------------------------------------


def _axis_of(module: Any) -> str:
    """Returns the axis name of the module's batch normalizations; "batch" without any."""
    names = [norm.axis_name for norm in _normalizations(module)] or ["batch"]
    if others := [name for name in names if name != names[0] or not isinstance(name, str)]:
        raise UserError(
            f"a batch normalization of the model averages over {others[-1]!r}, and a call of the "
            f"model maps over one axis, {names[0]!r}: call model.module with jax.vmap instead, and "
            "assign model.state"
        )
    name: str = names[0]
    return name


def _check_normalizations(module: Any) -> None:
    """Raises `UserError` for training that batch normalizations of Equinox do not allow."""
    trained = [norm for norm in _normalizations(module) if not norm.inference]
    if trained and current_batch_axis() is not None:
        raise UserError(
            "exact: a batch normalization of Equinox averages over one axis of jax.vmap, and the "
            "parts of the batch are another: set it to inference, or leave out exact"
        )
    is_local = bool(jax.sharding.get_abstract_mesh().manual_axes)
    if is_local and any(norm.mode == "ema" for norm in trained):
        raise UserError(
            "batch_statistics is replica: Equinox cannot set the state of BatchNorm(mode='ema') on "
            "each device: make it BatchNorm(mode='batch')"
        )


def _normalizations(module: Any) -> list[Any]:
    import equinox as eqx

    def is_one(node: Any) -> bool:
        return isinstance(node, eqx.nn.BatchNorm)

    return [node for node in jax.tree.leaves(module, is_leaf=is_one) if is_one(node)]
