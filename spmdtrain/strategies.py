"""Strategies by name: plain data about the mesh and about what is sharded over it."""

from collections.abc import Mapping
from dataclasses import dataclass

from spmdtrain.errors import UserError, did_you_mean

AXES = ("replica", "data", "fsdp", "expert", "context", "tensor")  # the slowest links first
STATE = ("params", "opt_state", "averaged")  # fields of the state with the size of the parameters


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
    on_host: frozenset[str] = frozenset()
    """Fields of the state that stay in host memory between steps."""
    is_asynchronous: bool = False
    """Workers, each mirrored over its own devices, compute the steps independently of each other,
    and parameter servers hold the state. Otherwise one program on a mesh computes each step."""
    backend: str = "spmdtrain.train.executor:Backend"
    """`module:class` that creates the executor of steps (`spmdtrain.train.executor.Backend`)."""


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
    Strategy(name="central_storage", on_host=frozenset(STATE)),
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
        on_host=frozenset().union(*(member.on_host for member in members)),
    )


def mesh_sizes(of: Strategy, given: Mapping[str, int | None]) -> dict[str, int]:
    """Returns the size of each axis, in mesh order: the given size, or the strategy's default.

    `given` has None for the default. At most one of data, fsdp, expert, context and tensor is -1
    (the remaining devices), unless the user gives -1 twice. A replica of -1 means one group for
    each host or slice (see `mesh.build_mesh`).
    """
    own = dict(of.sizes)
    sizes = {axis: own.get(axis, 1) if given.get(axis) is None else given[axis] for axis in AXES}
    taken = [axis for axis in AXES[1:] if given.get(axis) == -1]
    if taken:  # a given -1 takes the remaining devices, so the strategy's -1 becomes 1
        sizes |= {axis: 1 for axis in AXES[1:] if given.get(axis) is None and own.get(axis) == -1}
    elif all(sizes[axis] != -1 for axis in AXES[1:]) and given.get("data") is None:
        sizes["data"] = -1
    return {axis: size for axis, size in sizes.items() if size is not None}
