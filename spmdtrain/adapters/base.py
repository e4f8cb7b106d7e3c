"""The `Adapter` protocol, and the context in which annotated models run."""

import contextlib
import enum
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from spmdtrain.errors import UserError
from spmdtrain.record.storage import one_line
from spmdtrain.sharding.mesh import BATCH_AXES
from spmdtrain.sharding.placement import Placement, is_under_shard_map
from spmdtrain.sharding.rules import Annotation, AxisRules, DimsOf, axes_of_entry
from spmdtrain.strategies import AXES
from spmdtrain.tree import named_leaves

# -- The `Adapter` protocol: a model of any library as pure functions over plain pytrees -----------

PyTree = Any
Function = Callable[[Any, PyTree], PyTree]
"""An objective or a predict function: (model, batch) -> outputs."""


class Mode(enum.Enum):
    """The mode of a model, which decides about dropout and batch statistics."""

    TRAIN = "train"
    EVAL = "eval"


class Variables(NamedTuple):
    """The values of a model.

    Both fields are plain nested dictionaries of arrays for nnx, linen and Keras models.

    Attributes:
      params: The parameters, which the optimizer trains.
      model_state: Other values that the model carries from step to step (batch statistics).
    """

    params: PyTree
    model_state: PyTree


@runtime_checkable
class Annotated(Protocol):
    """An adapter whose model may annotate its arrays with names or axes."""

    annotations: Mapping[str, Annotation]
    """The annotations by path in the state (`params/layers/0/kernel`); known after `init`."""


def check_call(function: Callable[..., Any], what: str, *args: Any, **kwargs: Any) -> None:
    """Raises `UserError` if a function of the user does not take the arguments, without calling it.

    `what` names the call in the message.
    """
    if not callable(function):
        raise UserError(f"{what}: a {type(function).__name__} is not a function")
    is_flax = type(function).__module__.startswith("flax.")
    try:
        if isinstance(function, type) and is_flax:  # whose metaclass hides the arguments
            init = inspect.signature(function.__init__, follow_wrapped=False)  # type: ignore[misc]
            init.bind(None, *args, **kwargs)
        else:  # a decorator may supply arguments of the function that it wraps
            inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(f"{what}: {error}") from error
    except ValueError:
        return  # it has no signature


def annotations_of(adapter: "Adapter") -> Mapping[str, Annotation]:
    """Returns the annotations by path, which `init` has set; empty if the adapter reads none."""
    return adapter.annotations if isinstance(adapter, Annotated) else {}


@runtime_checkable
class HasModes(Protocol):
    """An adapter whose layers have modes (train or evaluate), which training does not change."""

    modes: Mapping[str, bool]
    """Whether the user's model has each layer in evaluation mode, by path; known after `init`."""


def describe_modes(adapter: "Adapter") -> str:
    """Returns which layers stay in evaluation mode in training (known after `init`); "" if none."""
    modes = adapter.modes if isinstance(adapter, HasModes) else {}
    names = [name or "the model itself" for name, in_evaluation in modes.items() if in_evaluation]
    if not names:
        return ""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{len(names)} of {len(modes)} layers with a mode are in evaluation mode, as the model "
        f"was given, and stay in it in training: {shown}"
    )


@runtime_checkable
class TakesExamples(Protocol):
    """An adapter whose model takes one example, so that objectives map it over the batch."""

    def on_batch(self, model: Any) -> Callable[..., Any]:
        """Returns the function of a whole batch, for the `model` that an objective gets."""
        ...


@runtime_checkable
class HasFileNames(Protocol):
    """An adapter of a library whose files name arrays by their place in the model."""

    def file_names(self) -> Mapping[str, str | None]:
        """Returns the path in the model of each array in its library's file; None for others."""
        ...


def file_names_of(adapter: "Adapter") -> Mapping[str, str | None]:
    """Returns the adapter's `file_names`; empty if the files of its library have no such names."""
    return adapter.file_names() if isinstance(adapter, HasFileNames) else {}


@runtime_checkable
class ExtendsBase(Protocol):
    """An adapter that adds trained parameters to the frozen parameters of a base model."""

    alpha: float
    """The scale of the low-rank factors (see `LoraModel`)."""
    frozen: Sequence[str]
    """Regular expressions of the base model's variables, by path in the model."""
    derived: Mapping[str, DimsOf]
    """The dims that each added parameter shares with a parameter of the base model, by path in the
    state; known after `init`.
    """


@runtime_checkable
class ComputesParams(Protocol):
    """An adapter that computes the parameters of its base model from the parameters of the state.

    The step computes them in the dtype of the state, before it casts them to the compute dtype.
    `run` and `merge` compute them as well.
    """

    base: "Adapter"
    """The model that gets the computed parameters."""

    def is_operand(self, name: str) -> bool:
        """Returns whether `base_params` computes with a parameter, by its path in `params`."""
        ...

    def base_params(self, params: PyTree) -> PyTree:
        """Returns the parameters of the base model. Traced under `jit`.

        `params` may have None in place of all operands, or in place of all other parameters.
        """
        ...


@runtime_checkable
class FreezesState(Protocol):
    """An adapter whose layers can train with their stored batch statistics."""

    def layer_path(self, name: str) -> str:
        """Converts a path in the model state to a path in the model's layers."""
        ...

    def with_frozen_state(self, names: Collection[str]) -> "Adapter":
        """Returns a copy whose batch normalizations use their stored statistics in training.

        `names` are paths of these statistics in the model state. `init` must have been traced.
        """
        ...


def layer_paths(adapter: "Adapter", model_state: PyTree) -> dict[str, str]:
    """Returns the path in the model's layers for each path in the model state; shapes suffice."""
    names = named_leaves(model_state)
    return {n: adapter.layer_path(n) if isinstance(adapter, FreezesState) else n for n in names}


NameOutputs = Callable[[str, PyTree], PyTree]
"""Names the outputs of a layer: (path of the layer, outputs) -> outputs."""


@runtime_checkable
class NamesLayers(Protocol):
    """An adapter that knows the paths of the layers of its model."""

    def named_layers(self, model: Any, name: NameOutputs) -> AbstractContextManager[None]:
        """Returns a context in which each call of a layer returns `name(path, outputs)`.

        The path is the one with which those of the layer's parameters begin. The model itself, with
        the path "", is left out.

        Args:
          model: The model that an objective gets.
          name: Names the outputs.
        """
        ...


@contextlib.contextmanager
def with_named_outputs(layers: Iterable[tuple[str, Any]], name: NameOutputs) -> Iterator[None]:
    """Makes each call of some layers, given with their paths, return `name(path, outputs)`.

    Each layer has a class of its own meanwhile: Python looks for `__call__` in the class, and
    transformations of a library (`nnx.scan`) make copies of a layer from its class.
    """
    changed = []

    def named(path: str, kind: Any) -> Any:
        @wraps(kind.__call__)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return name(path, kind.__call__(self, *args, **kwargs))

        own = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        return type(kind)(kind.__name__, (kind,), own)

    try:
        for path, layer in layers:
            kind = type(layer)
            if path and callable(layer):
                object.__setattr__(layer, "__class__", named(path, kind))  # also if it is frozen
                changed.append((layer, kind))
        yield
    finally:
        for layer, kind in changed:
            object.__setattr__(layer, "__class__", kind)


@runtime_checkable
class Adapter(Protocol):
    """A model as pure functions."""

    given: PyTree
    """The arrays that `init` starts from; an empty dictionary if it starts from the key alone.
    They are passed to `init` as an argument, so that they are not compiled in as constants."""

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        """Returns the initial variables. Traced under `jit`.

        Args:
          given: The attribute `given`, on the devices.
          key: The random key of the initialization.
        """
        ...

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        """Calls `function(model, batch)`. Traced under `jit`.

        Args:
          function: An objective or a predict function.
          variables: The values of the model.
          batch: The batch.
          key: The random key from which dropout and other random streams derive.
          mode: Whether the model trains.

        Returns:
          The function's outputs, and the model state after the call.
        """
        ...

    def merge(self, variables: Variables) -> Any:
        """Returns the model with these values, in evaluation mode, for calls outside of a run.

        Args:
          variables: The values of the model.
        """
        ...


# -- The context in which annotated models run: a mesh for their constraints, and their axis rules

T = TypeVar("T")
_ONE_DEVICE = AbstractMesh((1,) * len(AXES), AXES, (AxisType.Auto,) * len(AXES))


class ModelContext:
    """The context in which annotated Flax models expect to be called. Traced under `jit`.

    Constraints of activations (`jax.lax.with_sharding_constraint` with a `PartitionSpec`, Flax's
    `with_logical_constraint`) apply to the mesh of the run, and Flax's `logical_axis_rules` are
    the experiment's. Without annotations and axis rules, it is not active and only calls.
    """

    def __init__(
        self, placement: Placement, axis_rules: AxisRules | None, *, annotated: bool = False
    ) -> None:
        if not isinstance(axis_rules, AxisRules | None):
            raise UserError(
                f"axis_rules is a {type(axis_rules).__name__}: it must be AxisRules(...)"
            )
        self._placement, self._axis_rules = placement, axis_rules
        self.is_active = annotated or axis_rules is not None
        self._explicit = () if axis_rules is None else tuple(axis_rules.explicit)

    def batch_specs(self, batch: PyTree) -> PyTree:
        """Returns the specs of a batch's arrays in the model, for `specs` of `call`."""
        placement = self._placement
        axes = tuple(axis for axis in BATCH_AXES if placement.size(axis) > 1)
        split = PartitionSpec(axes)

        def spec(x: Any) -> PartitionSpec:
            divides = x.ndim > 0 and x.shape[0] % placement.batch_shards == 0
            return split if divides else PartitionSpec()

        return jax.tree.map(spec, batch)

    @property
    def applies(self) -> bool:
        """Whether the context changes what the calling code computes."""
        # Under `shard_map` each device computes alone: there is nothing to constrain.
        return self.is_active and not is_under_shard_map(self._placement)

    def call(self, function: Callable[..., T], *args: PyTree, specs: Any = None) -> T:
        """Calls `function(*args)` in the context.

        Args:
          function: A function that does not close over arrays.
          specs: A function that returns the `PartitionSpec`s by argument, for explicit axes. By
            default arguments keep automatic axes.

        Raises:
          UserError: If the model needs explicit axes that are automatic.
        """
        if not self.applies:
            return function(*args)
        mesh = self._placement.mesh
        with (
            jax.sharding.use_abstract_mesh(_ONE_DEVICE if mesh is None else mesh.abstract_mesh),
            self._flax_rules(),
        ):
            if self._explicit and specs is not None:
                explicit = jax.tree.map(self._only_explicit, specs())
                function = jax.sharding.explicit_axes(
                    function, axes=self._explicit, in_sharding=explicit
                )
            try:
                return function(*args)
            except ValueError as error:
                if "of type Auto" not in str(error):  # JAX has no type for this error
                    raise
                raise UserError(
                    "the model passes out_sharding to an operation, and its axes are automatic: "
                    f"name them in AxisRules(explicit=(...)). {one_line(error)}"
                ) from error

    def _only_explicit(self, spec: PartitionSpec) -> PartitionSpec:
        """Returns a spec without automatic axes, whose use XLA decides."""
        kept = [tuple(a for a in axes_of_entry(e) if a in self._explicit) for e in spec]
        return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in kept))

    @contextlib.contextmanager
    def _flax_rules(self) -> Iterator[None]:
        if self._axis_rules is None:
            yield
            return
        from flax.core import spmd  # slow to import, and only annotated models need it

        with spmd.logical_axis_rules(self._axis_rules.pairs):
            yield
