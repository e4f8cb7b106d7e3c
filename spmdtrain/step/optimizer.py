"""Optimizer updates of parameters, their extra arguments, and frozen base models."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmdtrain.adapters.base import ExtendsBase, Variables
from spmdtrain.errors import UserError
from spmdtrain.step.state import TrainState, first_average
from spmdtrain.tree import named_leaves, path_name, promoted, with_own_containers

# -- Checks that a run can use an optimizer --------------------------------------------------------

PyTree = Any


def check_optimizer(
    optimizer: optax.GradientTransformation, opt_state: PyTree, *, averages: bool
) -> None:
    """Raises `UserError` if a step cannot run an optimizer, or its result is not what it promises.

    Shapes of the state suffice. `averages` tells whether the run keeps a moving average of
    parameters.
    """
    extra_names(optimizer)  # raises an error if the step does not have an argument
    if averages and is_schedule_free(opt_state):
        raise UserError(
            "ema_decay is set, and the optimizer is schedule-free: it averages the parameters "
            "itself, and evaluation uses that average. Leave ema_decay out"
        )

    def refused(node: Any) -> bool:
        kinds = optax.contrib.SAMState, optax.contrib.DifferentiallyPrivateAggregateState
        return isinstance(node, kinds)

    for node in jax.tree.leaves(opt_state, is_leaf=refused):
        if isinstance(node, optax.contrib.SAMState) and node.cache is not None:
            raise UserError(
                "optax.contrib.sam has opaque_mode=False: between its updates the parameters are "
                "displaced, and an evaluation or a checkpoint would use them. Set opaque_mode=True"
            )
        if isinstance(node, optax.contrib.DifferentiallyPrivateAggregateState):
            raise UserError(
                "optax.contrib.differentially_private_aggregate (dpsgd) needs the gradient of each "
                "example, and a step has that of the mean loss. Compute them in a step of a Loop"
            )


# -- The extra arguments of optax optimizers: which ones an optimizer takes, and their values ------

_OFFERED = ("value", "grad", "value_fn", "obj_fn", "grad_fn")
_OF_LOSS = frozenset({"value_fn", "obj_fn", "grad_fn"})


@dataclass(frozen=True)
class ExtraArguments:
    """The values of the extra arguments in a step.

    Attributes:
      value: The weighted mean loss of the global batch, a scalar; `value`.
      grad: Its gradients with respect to the trained parameters; `grad`.
      value_fn: A function from trained parameters to the loss of the same batch with the same
        random key; `value_fn`, and `obj_fn` (`optax.contrib.sophia`). None if it is not known.
      grad_fn: A function from trained parameters and a number, which is ignored, to the gradients;
        `grad_fn` (`optax.contrib.sam`). None if it is not known.
    """

    value: jax.Array
    grad: PyTree
    value_fn: Callable[[PyTree], jax.Array] | None = None
    grad_fn: Callable[[PyTree, Any], PyTree] | None = None

    def of(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the arguments of these names."""
        found = {
            "value": self.value,
            "grad": self.grad,
            "value_fn": self.value_fn,
            "obj_fn": self.value_fn,
            "grad_fn": self.grad_fn,
        }
        return {name: found[name] for name in names}


def update_with(
    optimizer: optax.GradientTransformation,
    gradients: PyTree,
    opt_state: PyTree,
    trained: PyTree,
    extra: ExtraArguments,
) -> tuple[PyTree, PyTree]:
    """Returns an optimizer's updates and new state; it gets the extra arguments it declares."""
    update: Any = optimizer.update
    given = extra.of(extra_names(optimizer))
    own = with_own_containers((gradients, opt_state, trained))
    found = update(*own, **given)
    if not (isinstance(found, tuple) and len(found) == 2):
        raise UserError(
            f"the optimizer's update returned {_kind(found)}: it must return (updates, state)"
        )
    _check_fits(found[0], trained)
    return found


def _check_fits(updates: PyTree, trained: PyTree) -> None:
    """Raises `UserError` if updates cannot be added to the trained parameters."""
    shapes = {name: jnp.shape(x) for name, x in named_leaves(trained).items()}
    added = {name: jnp.shape(x) for name, x in named_leaves(updates).items()}
    for name in {**shapes, **added}:
        if name not in shapes or name not in added:
            raise UserError(
                f"the optimizer's update returned {'no' if name in shapes else 'an'} update of "
                f"{name}: it must return updates with the structure of the gradients"
            )
        if added[name] != shapes[name] and added[name] != ():
            raise UserError(
                f"the optimizer's update returned an update of {name} with shape {added[name]}: "
                f"the parameter has shape {shapes[name]}"
            )


def _kind(value: Any) -> str:
    """Returns the type of a value for a message, with the number of elements of a tuple."""
    name = type(value).__name__
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a value of type {name}"


def extra_names(optimizer: optax.GradientTransformation) -> list[str]:
    """Returns the names of the extra arguments that an optimizer and its parts declare.

    The transformations that a chain or another wrapper calls are in the closures of its functions.

    Raises:
      UserError: If it requires an argument that a step does not have.
    """
    own = _parameters(optimizer.update) or []
    names: set[str] = set()
    functions = (optimizer.init, optimizer.update)
    for function in reachable_functions(functions, follows=lambda function: True):
        parameters = _parameters(function) or []
        # optax calls updates with `params=`, so an update function has a parameter of this name.
        if [p.name for p in parameters[2:3]] != ["params"]:
            continue
        for parameter in parameters[3:]:
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if parameter.name in _OFFERED:
                names.add(parameter.name)
            elif parameter.default is parameter.empty:
                raise UserError(
                    f"the optimizer's {_name(function)} requires the extra argument "
                    f"{parameter.name!r}, which a step does not have: it passes "
                    f"{', '.join(_OFFERED)}. Rename the argument or give it a default"
                )
    if not any(p.kind is p.VAR_KEYWORD for p in own):
        names &= {p.name for p in own}
    return [name for name in _OFFERED if name in names]


def evaluates_loss(optimizer: optax.GradientTransformation) -> bool:
    """Returns whether an optimizer evaluates the loss or its gradients at other parameters."""
    return not _OF_LOSS.isdisjoint(extra_names(optimizer))


def reachable_functions(
    functions: Any, *, follows: Callable[[Callable[..., Any]], bool]
) -> Iterator[Callable[..., Any]]:
    """Yields a function, or a tuple of several, and recursively the functions in their closures.

    The closure of a function is searched if `follows` returns True for it.
    """
    seen: set[int] = set()
    pending = [functions]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, tuple | list):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
        elif callable(item):
            yield item
            if follows(item):
                pending += _held_by(item)


def closure_of(function: Any) -> dict[str, Any]:
    """Returns the values of the outer variables of a function by name."""
    cells = getattr(function, "__closure__", None)
    if not cells:
        return {}
    try:
        return {
            name: cell.cell_contents
            for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
        }
    except ValueError:  # a variable without a value yet
        return {}


def _held_by(function: Any) -> list[Any]:
    """Returns the objects that a function refers to and that may call other functions."""
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    if inspect.ismethod(function):  # of `optax.MultiSteps`, for example
        held = getattr(function.__self__, "__dict__", {})
        return [function.__func__, *held.values()]
    found = closure_of(function)
    held = [*found.values(), getattr(function, "__wrapped__", None)]
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function).globals.values()
        held += [x.update for x in names if hasattr(x, "init") and hasattr(x, "update")]
    held += [x.update for x in found.values() if hasattr(x, "init") and hasattr(x, "update")]
    if {"inner_factory", "other_hps", "numeric_hps", "sched_hps"} <= found.keys():
        # `optax.inject_hyperparams` creates its inner optimizer in each update.
        scheduled = {name: f(f.init()) for name, f in found["sched_hps"].items()}
        given = found["other_hps"] | found["numeric_hps"] | scheduled
        held.append(found["inner_factory"](**given).update)
    return held


def _parameters(function: Any) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return None


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__)).split(".")[0]


# -- Optimizer updates of all parameters, or of a parameter server's part --------------------------

_LARGEST_SUM = 1e6
"""Gradients of sums over a batch can exceed smaller limits, such as those of float16 and float8."""


@dataclass(frozen=True)
class Updated:
    """The result of an update.

    Attributes:
      params: All parameters after it.
      updates: What was added to the trained parameters, None in place of the others.
    """

    params: PyTree
    opt_state: PyTree
    updates: PyTree
    gradients: PyTree


@dataclass(frozen=True)
class Update:
    """The optimizer with the parameters that it trains and their average.

    The average is a moving average, or the average of a schedule-free optimizer.

    Attributes:
      frozen: Regular expressions; a parameter whose path one of them matches is not trained, and a
        leaf of the model state keeps its value.
      ema_decay: The decay of the moving average of the parameters; None for no average.

    Raises:
      UserError: If `optimizer` is not an optax optimizer.
    """

    optimizer: optax.GradientTransformation
    frozen: Sequence[str] = ()
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        optimizer = self.optimizer
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise UserError(
                f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}: it must "
                "be an optax optimizer, for example optax.adam(1e-3)"
            )

    def init(self, params: PyTree) -> PyTree:
        """Returns the initial state of the optimizer for these parameters, frozen ones included.

        Raises:
          UserError: If the optimizer compares an `nnx.State` or another tree with them.
          ValueError: If the optimizer does not fit the parameters otherwise.
        """
        trained = self.partition(params)[0]
        try:
            return _settled(self.optimizer, self.optimizer.init(trained), trained)
        except ValueError as error:
            if "pytree structure error" not in str(error):
                raise
            from flax import nnx  # slow to import

            is_state = str(nnx.State) in str(error)
            remedy = "nnx.to_pure_dict(state)" if is_state else "such dictionaries"
            raise UserError(
                f"the optimizer compares {'an nnx.State' if is_state else 'another tree'} (a mask "
                "of optax.masked, or labels of optax.partition) with the parameters, which are "
                f"nested dictionaries here: give it {remedy}, or a function of the parameters"
            ) from error

    def first_average(self, params: PyTree) -> PyTree:
        """Returns the average before the first step; an empty dictionary without an average."""
        free = is_schedule_free(jax.eval_shape(self.init, params))
        return first_average(params) if free or self.ema_decay is not None else {}

    @property
    def averaged_before(self) -> PyTree:
        """The field `averaged_before` of the state before the first step."""
        return {} if self.ema_decay is None else jnp.zeros((), jnp.int32)

    def __call__(
        self,
        params: PyTree,
        opt_state: PyTree,
        gradients: PyTree,
        extra: ExtraArguments,
        before: Sequence[jax.Array] = (),
    ) -> Updated:
        """Returns the parameters and the optimizer's state after a step.

        Args:
          params: All parameters.
          gradients: Gradients of the trained parameters, None in place of the others.
          extra: The arguments for optimizers that use more than the gradients.
          before: With the gradients, the results of all collectives of the step so far. They matter
            to updates with collectives in a loop (see `in_loop_of_one_turn`).
        """
        trained, frozen = self.partition(params)
        updates, opt_state = update_with(self.optimizer, gradients, opt_state, trained, extra)
        params = merge(optax.apply_updates(trained, updates), frozen)
        return Updated(params, opt_state, updates, gradients)

    def partition(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the trained parameters and the others, each with None in place of the rest."""
        # With `optax.selective_transform` instead, the gradients of the others would be computed
        # and reduced too, before it replaces their updates by 0.
        if not self.frozen:
            return params, None

        def part(belongs: Callable[[str], bool]) -> PyTree:
            return jax.tree_util.tree_map_with_path(
                lambda path, x: x if belongs(path_name(path)) else None, params
            )

        return part(lambda name: not self.is_frozen(name)), part(self.is_frozen)

    def is_frozen(self, name: str) -> bool:
        """Returns whether a variable is not trained, by its path in the model."""
        return matches_any(self.frozen, name)

    def check(self, params: PyTree, opt_state: PyTree, state_names: Iterable[str] = ()) -> None:
        """Checks the optimizer and the patterns of `freeze`; shapes suffice.

        `state_names` has the paths of the layers' model state.

        Raises:
          UserError: If the optimizer cannot be used (see `check_optimizer`), if a pattern matches
            neither a parameter nor a part of the model state, or if nothing is left to train.
        """
        check_optimizer(self.optimizer, opt_state, averages=self.ema_decay is not None)
        names, states = list(named_leaves(params)), list(state_names)
        for pattern in self.frozen:
            if not any(re.search(pattern, name) for name in [*names, *states]):
                raise UserError(f"freeze: {pattern!r} matches no parameter's path: {names}")
        trained = named_leaves(self.partition(params)[0])
        if self.frozen and not trained:
            raise UserError(f"freeze: no parameter is left to train of {names}")
        for name, x in trained.items():
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                raise UserError(
                    f"parameter {name} is {x.dtype}, which has no gradient: freeze it (freeze="
                    f"({re.escape(name)!r},)), or give it a floating-point dtype"
                )
            if (largest := _largest_number(x.dtype)) < _LARGEST_SUM:
                raise UserError(
                    f"parameter {name} is {x.dtype}, whose largest number is "
                    f"{largest:g}: the gradient of a batch's sum can exceed "
                    "it where that of the mean does not. Give it float32 (param_dtype="
                    f"jnp.float32) or bfloat16, or freeze it (freeze=({re.escape(name)!r},))"
                )

    def average(
        self, averaged: PyTree, params: PyTree, opt_state: PyTree, step: jax.Array
    ) -> PyTree:
        """Returns the average of the parameters after an update.

        The average of a schedule-free optimizer is computed from its state. Otherwise it is an
        exponential moving average. The decay of update k, counted from 1, is at most (1 + k) /
        (10 + k), so that the average soon forgets the initial values, as TensorFlow's
        `ExponentialMovingAverage` with `num_updates` does.

        `averaged` is the average before the update, which contains `step` updates; `params` and
        `opt_state` are those after the update.
        """
        if is_schedule_free(opt_state):
            return average_in(opt_state, params)
        if self.ema_decay is None:
            return averaged
        count = step.astype(jnp.float32)
        decay = jnp.minimum(self.ema_decay, (2.0 + count) / (11.0 + count))

        # `optax.ema` averages updates, from 0 and with a fixed decay. `optax.incremental_update`
        # computes s * new + (1 - s) * old, by whose rounding the average of a parameter that does
        # not change would drift, and returns float32 for a bfloat16 average.
        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            if not jnp.issubdtype(new.dtype, jnp.inexact):
                return new  # frozen: flags, integers, random keys
            change = new.astype(old.dtype) - old
            return old + (1 - decay).astype(old.dtype) * change

        return jax.tree.map(average, averaged, params)


def _settled(optimizer: optax.GradientTransformation, state: PyTree, trained: PyTree) -> PyTree:
    """Returns an initial state with the arrays and dtypes that it has after an update.

    `optax.monitor` has no measurements before the first one. `optax.inject_hyperparams` multiplies
    by numbers of the widest dtype among the parameters, so the moments of narrower ones widen.
    """
    is_monitor = partial(_is_a, optax.MonitorState)
    has_monitor = any(map(is_monitor, jax.tree.leaves(state, is_leaf=is_monitor)))
    if not has_monitor and len({x.dtype for x in jax.tree.leaves(trained)}) < 2:
        return state  # an update is traced only where it may differ

    def update(trained: PyTree, state: PyTree) -> PyTree:
        loss = jnp.zeros((), jnp.float32)
        extra = ExtraArguments(loss, trained, lambda params: loss, lambda params, _: params)
        return update_with(optimizer, trained, state, trained, extra)[1]

    after = jax.eval_shape(update, trained, state)

    def fit(before: Any, after: Any) -> Any:
        if is_monitor(before):
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), after.measurements)
            states = jax.tree.map(fit, before.measure_states, after.measure_states)
            return before._replace(measurements=zeros, measure_states=states)
        widens = before.shape == after.shape and before.dtype != after.dtype
        if widens and promoted(before.dtype, after.dtype) == after.dtype:
            return before.astype(after.dtype)
        return before

    # Another structure is refused as a step's.
    structure: Any
    leaves, structure = jax.tree.flatten(state, is_leaf=is_monitor)
    others, other = jax.tree.flatten(after, is_leaf=is_monitor)
    return state if structure != other else structure.unflatten(map(fit, leaves, others))


def _largest_number(dtype: Any) -> float:
    """Returns the largest number of a floating-point dtype; of others, infinity."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return math.inf
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _is_a(kind: type, node: Any) -> bool:
    return isinstance(node, kind)


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Returns whether one of some regular expressions matches anywhere in a path."""
    return any(re.search(pattern, name) for pattern in patterns)


def merge(params: PyTree, frozen: PyTree) -> PyTree:
    """Joins the two parts that `Update.partition` returns."""
    if frozen is None:
        return params
    return jax.tree.map(
        lambda x, y: y if x is None else x, params, frozen, is_leaf=lambda x: x is None
    )


def clipped(
    transformation: optax.GradientTransformation, gradients: PyTree, trained: PyTree, loss: Any
) -> PyTree:
    """Applies the part of an optimizer that runs on workers to the whole gradients.

    It is gradient clipping, for example, and keeps no state.
    """
    extra = ExtraArguments(jnp.asarray(loss), gradients)
    state = transformation.init(trained)
    return update_with(transformation, gradients, state, trained, extra)[0]


# -- The parameters with which a schedule-free optimizer's model is evaluated ----------------------
#
# Such an optimizer (Defazio et al., "The Road Less Scheduled", 2024) computes gradients at one
# point and averages others. The model is evaluated with the average.


def is_schedule_free(opt_state: PyTree) -> bool:
    """Returns whether the state of an optimizer contains the state of a schedule-free one."""
    return bool(_nodes(opt_state))


def average_in(opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the average of the parameters, in at least float32.

    Parameters that the schedule-free optimizer does not update are returned as they are.
    """
    wide = jax.tree.map(lambda x: jnp.asarray(x, promoted(x.dtype, jnp.float32)), params)
    averages: dict[str, jax.Array] = {}
    named = named_leaves(wide)
    for node in _nodes(opt_state):
        z = named_leaves(node.z)
        of_node = {name: named[name] for name in z}
        state = node._replace(z={name: x.astype(named[name].dtype) for name, x in z.items()})
        averages |= optax.contrib.schedule_free_eval_params(state, of_node)
    return jax.tree_util.tree_map_with_path(lambda at, x: averages.get(path_name(at), x), wide)


def _nodes(opt_state: PyTree) -> list[Any]:
    def is_node(x: Any) -> bool:
        return isinstance(x, optax.contrib.ScheduleFreeState)

    return [x for x in jax.tree.leaves(opt_state, is_leaf=is_node) if is_node(x)]


# -- The frozen base model of a run that trains low-rank factors -----------------------------------


@dataclass(frozen=True)
class BaseModel:
    """The variables of the state that belong to a frozen base model.

    Checkpoints leave them out if `init_from` gives their values, because a resume reads them there.

    Attributes:
      patterns: Regular expressions of their paths in the model.
      alpha: The scale of the low-rank factors.
      added: Paths in the model of the parameters that a file of the base model does not have.
      is_saved: Whether checkpoints contain the base model.
    """

    patterns: Sequence[str]
    alpha: float
    added: frozenset[str]
    is_saved: bool

    @classmethod
    def of(cls, adapter: ExtendsBase, *, is_saved: bool) -> "BaseModel":
        """Returns the base model of an adapter whose `init` was traced."""
        added = frozenset(name.partition("/")[2] for name in adapter.derived)
        return cls(tuple(adapter.frozen), adapter.alpha, added, is_saved)

    def saved_part(self, state: TrainState) -> TrainState:
        """Returns a state with None in place of the leaves that checkpoints leave out."""
        return state if self.is_saved else self.without_base(state)

    def without_base(self, state: TrainState) -> TrainState:
        """Returns a state, or its shapes or shardings, with None in place of the base model."""
        of_model = [name for name, row in state.FIELDS.items() if row.of_model]
        own = {name: self._part(getattr(state, name), base=False) for name in of_model}
        return dataclasses.replace(state, **own)

    def values(self, variables: Variables) -> Variables:
        """Returns variables with None in place of all that are not of the base model."""
        return Variables(*(self._part(tree, base=True) for tree in variables))

    def _part(self, tree: PyTree, *, base: bool) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x if matches_any(self.patterns, path_name(path)) == base else None, tree
        )


def with_base(variables: Variables, base: Variables) -> Variables:
    """Joins the variables of a checkpoint without base model with those of the base model."""

    def joined(own: PyTree, of_base: PyTree) -> PyTree:
        return merge(own, of_base) if jax.tree.leaves(own) else of_base

    return Variables(*map(joined, variables, base))
