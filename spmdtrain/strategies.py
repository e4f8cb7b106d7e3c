"""Strategies by name: plain data about the mesh and about what is sharded over it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spmdtrain.errors import UserError, did_you_mean

# -- The axes of the mesh: other modules ask for their properties, not for their names -------------


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of the mesh."""

    name: str
    spans_hosts: bool = False
    """It is the outer axis, over hosts or slices and the slow links between them."""
    splits_batch: bool = False
    """The examples of a batch are split over it."""
    takes_rest: bool = False
    """By default its size is the number of remaining devices."""
    splits_params: bool = False
    """Strategies with `shards_params` split the parameters, and what has their shapes, over it."""
    splits_optimizer: bool = False
    """Strategies with `shards_optimizer` split the optimizer's state over it."""
    splits_experts: bool = False
    """Its devices hold different experts, and send each other their tokens."""
    splits_sequence: bool = False
    """The tokens of each example are split over it."""
    splits_tensors: bool = False
    """Single tensors, and the products with them, are split over it."""
    only_by_rules: bool = False
    """Parameters are split over it by rules and annotations alone."""
    adds_up: str = "sums are added up"
    """The additions over it, whose order is not that of one device; for messages."""

    @property
    def shares_examples(self) -> bool:
        """Whether several devices along it compute an example together."""
        return self.splits_experts or self.splits_sequence or self.splits_tensors


MESH_AXES = (  # the slowest links first
    Axis(name="replica", spans_hosts=True, splits_batch=True),
    Axis(name="data", splits_batch=True, takes_rest=True, splits_optimizer=True),
    Axis(name="fsdp", splits_batch=True, splits_params=True),
    Axis(
        name="expert",
        splits_batch=True,
        splits_experts=True,
        only_by_rules=True,
        adds_up="the gradients of an expert are added up",
    ),
    Axis(name="context", splits_sequence=True, adds_up="attention adds up its parts"),
    Axis(name="tensor", splits_tensors=True, only_by_rules=True),
)
AXES = tuple(axis.name for axis in MESH_AXES)


def axes_that(has: Callable[[Axis], bool]) -> tuple[str, ...]:
    """Returns the names of the axes with a property, in mesh order."""
    return tuple(axis.name for axis in MESH_AXES if has(axis))


(OUTER_AXIS,) = axes_that(lambda axis: axis.spans_hosts)
(REST_AXIS,) = axes_that(lambda axis: axis.takes_rest)
(PARAMS_AXIS,) = axes_that(lambda axis: axis.splits_params)
(OPTIMIZER_AXIS,) = axes_that(lambda axis: axis.splits_optimizer)
(EXPERT_AXIS,) = axes_that(lambda axis: axis.splits_experts)
(SEQUENCE_AXIS,) = axes_that(lambda axis: axis.splits_sequence)
(TENSOR_AXIS,) = axes_that(lambda axis: axis.splits_tensors)

# -- The fields of the state, whose rows are in `step/state.py` ------------------------------------


@dataclass(frozen=True, kw_only=True)
class StateField:
    """The properties of a field of the state. Other modules ask for these where they can."""

    item: str
    """The item of a checkpoint that contains it."""
    is_tree: bool = True
    """It is a tree of arrays, not a single number or key."""
    replicated: bool = False
    """Every device has all of it, and no rule applies to it."""
    like_params: bool = False
    """Its arrays have the parameters' paths and are split like them. Strategies can shard them and
    keep them in host memory."""
    of_model: bool = False
    """The paths of its arrays are those of the model's arrays."""
    of_optimizer: bool = False
    """It is the optimizer's, which ZeRO shards and `sharding.offload` selects."""
    evaluated: bool = False
    """Evaluations use it in place of the parameters, if it has arrays."""
    title: str = ""
    """Its name in tables."""
    kind: str = "model"
    """What messages name if the arrays of two runs differ in this field."""
    renewed: bool = False
    """A start begins with a new one, or without, if its checkpoint does not have the same."""
    copied: bool = False
    """Each copy of the state has its own: its arrays have a leading dim of copies, which is split
    over the axes of `Placement.apart`."""


# -- Strategies ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The placement of a model on devices. Names can be joined by `+`: `hybrid+fully_sharded`."""

    name: str
    has_mesh: bool = True
    devices: int | None = None
    """Number of devices; None: any number."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Default sizes of the mesh axes; -1 takes the remaining devices (see `mesh_sizes`)."""
    max_shards: int | None = None
    """The largest default size of the fsdp axis, with the other devices along data. None: any."""
    shards_params: bool = False
    """Parameters, gradients and optimizer state are sharded over the fsdp axis."""
    shards_optimizer: bool = False
    """The optimizer state is sharded over the data axis."""
    needs_rules: bool = False
    """The experiment's rules must say what is sharded over tensor: there is no default rule."""
    on_host: bool = False
    """Arrays of the state with the parameters' shapes stay in host memory between steps."""
    is_asynchronous: bool = False
    """Workers, each mirrored over its own devices, compute the steps independently of each other,
    and parameter servers hold the state. Otherwise one program on a mesh computes each step."""
    backend: str = "spmdtrain.train.executor:Backend"
    """`module:class` that creates the executor of steps (`spmdtrain.train.executor.Backend`)."""

    def split_axes(self, field: StateField) -> tuple[str, ...]:
        """Returns the axes over which large arrays of a field of the state are split by default."""
        by_params = self.shards_params and field.like_params
        by_optimizer = self.shards_optimizer and field.of_optimizer
        return (PARAMS_AXIS,) * by_params + (OPTIMIZER_AXIS,) * by_optimizer


_ALL = (
    # No mesh: the default device, as with a plain jax.jit.
    Strategy(name="default", has_mesh=False, devices=1),
    # Everything on one chosen device.
    Strategy(name="one_device", devices=1),
    # Parameters replicated, the batch split over data.
    Strategy(name="mirrored"),
    # The same, with the optimizer state sharded over data (ZeRO-1).
    Strategy(name="zero", shards_optimizer=True),
    # Parameters, gradients and optimizer state sharded over fsdp (ZeRO-3).
    # With 512 shards, the TPU's compiler gathers slices of a few rows by all-reduces;
    # 64 shards, on two of the three dims of a torus, are gathered and scattered as such.
    Strategy(
        name="fully_sharded",
        sizes=(("data", 1), ("fsdp", -1)),
        max_shards=64,
        shards_params=True,
    ),
    # Tensors sharded over tensor by the experiment's rules.
    Strategy(name="tensor_parallel", sizes=(("tensor", 2),), needs_rules=True),
    # Parameters and optimizer state in host memory, copied to the devices for each step.
    Strategy(name="central_storage", on_host=True),
    # An outer axis over hosts or slices, and the other axes within each.
    Strategy(name="hybrid", sizes=(("replica", -1),)),
    # Parameter servers and asynchronous workers.
    Strategy(
        name="parameter_server",
        is_asynchronous=True,
        backend="spmdtrain.parameter_server.executor:ServerBackend",
    ),
)
STRATEGIES: Mapping[str, Strategy] = {strategy.name: strategy for strategy in _ALL}
DEFAULT = STRATEGIES["default"]
ASYNCHRONOUS = next(name for name, each in STRATEGIES.items() if each.is_asynchronous)
"""The name of the strategy with parameter servers, for messages."""


def strategy(name: str) -> Strategy:
    """Returns the strategy of a name, or the combination of several joined by `+`.

    Raises `UserError` if a name is unknown, or if the strategies cannot be combined.
    """
    parts = name.split("+")
    for part in parts:
        if part not in STRATEGIES:
            raise UserError(f"there is no strategy {part!r}.{did_you_mean(part, STRATEGIES)}")
    members = [STRATEGIES[part] for part in dict.fromkeys(parts)]
    if len(members) == 1:
        return members[0]
    for member in members:
        if member.is_asynchronous:
            raise UserError(f"strategy {name}: {member.name} cannot be combined with another")
        if member.devices == 1:
            raise UserError(
                f"strategy {name}: {member.name} is for one device, and cannot be combined with "
                "another"
            )
    return Strategy(
        name="+".join(member.name for member in members),
        sizes=tuple({axis: size for member in members for axis, size in member.sizes}.items()),
        max_shards=min((m.max_shards for m in members if m.max_shards), default=None),
        shards_params=any(member.shards_params for member in members),
        shards_optimizer=any(member.shards_optimizer for member in members),
        needs_rules=any(member.needs_rules for member in members),
        on_host=any(member.on_host for member in members),
    )


def mesh_sizes(of: Strategy, given: Mapping[str, int | None]) -> dict[str, int]:
    """Returns the size of each axis, in mesh order: the given size, or the strategy's default.

    `given` has None for the default. At most one of data, fsdp, expert, context and tensor is -1
    (the remaining devices), unless the user gives -1 twice. A replica of -1 means one group for
    each host or slice (see `mesh.build_mesh`).
    """
    own, inner = dict(of.sizes), axes_that(lambda axis: not axis.spans_hosts)
    sizes = {axis: own.get(axis, 1) if given.get(axis) is None else given[axis] for axis in AXES}
    taken = [axis for axis in inner if given.get(axis) == -1]
    if taken:  # a given -1 takes the remaining devices, so the strategy's -1 becomes 1
        sizes |= {axis: 1 for axis in inner if given.get(axis) is None and own.get(axis) == -1}
    elif all(sizes[axis] != -1 for axis in inner) and given.get(REST_AXIS) is None:
        sizes[REST_AXIS] = -1
    return {axis: size for axis, size in sizes.items() if size is not None}
