"""The strategies by name: plain data that says how a mesh is shaped and what is split over it."""

from collections.abc import Mapping
from dataclasses import dataclass

from spmdtrain.errors import UserError, did_you_mean

AXES = ("replica", "data", "fsdp", "tensor")  # in mesh order: the slowest links first
STATE = ("params", "opt_state", "averaged")  # what of the state has the size of the parameters


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How a model is placed on devices. Two may be joined by `+`: `hybrid+fully_sharded`."""

    name: str
    has_mesh: bool = True
    devices: int | None = None
    """How many devices it takes; None: any number."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Sizes of the mesh axes where none is given; -1 takes the rest (see `mesh_sizes`)."""
    shards_params: bool = False
    """Parameters, and all that goes with them, are split over the fsdp axis."""
    shards_optimizer: bool = False
    """The optimizer's state is split over the data axis."""
    needs_rules: bool = False
    """It places nothing by itself: the experiment's rules say what is split over tensor."""
    on_host: frozenset[str] = frozenset()
    """The fields of the state that stay in host memory between steps."""
    by_servers: bool = False
    """Parameter servers have the state; workers, mirrored over their own devices, make the steps,
    each at its own pace."""
    backend: str = "spmdtrain.train.executor:MeshBackend"
    """The class that makes the executor of steps (see `spmdtrain.train.executor.Backend`)."""


_ALL = (
    # No mesh: the default device, as a plain jax.jit has it.
    Strategy(name="default", has_mesh=False, devices=1),
    # Everything on one chosen device.
    Strategy(name="one_device", devices=1),
    # Parameters replicated, the batch split over data.
    Strategy(name="mirrored"),
    # The same, with the optimizer's state split over data (ZeRO-1).
    Strategy(name="zero", shards_optimizer=True),
    # Parameters, gradients and the optimizer's state split over fsdp (ZeRO-3).
    Strategy(name="fully_sharded", sizes=(("data", 1), ("fsdp", -1)), shards_params=True),
    # Tensors split over tensor by the experiment's rules.
    Strategy(name="tensor_parallel", sizes=(("tensor", 2),), needs_rules=True),
    # Parameters and the optimizer's state in host memory, brought to the devices for a step.
    Strategy(name="central_storage", on_host=frozenset(STATE)),
    # An outer axis over hosts or slices, the other axes within each.
    Strategy(name="hybrid", sizes=(("replica", -1),)),
    # Asynchronous workers around parameter servers.
    Strategy(
        name="parameter_server",
        by_servers=True,
        backend="spmdtrain.parameter_server.executor:ServerBackend",
    ),
)
STRATEGIES: Mapping[str, Strategy] = {one.name: one for one in _ALL}
DEFAULT = STRATEGIES["default"]


def strategy(name: str) -> Strategy:
    """The strategy of that name, or the product of several: `fully_sharded+tensor_parallel`.

    Raises `UserError` for a name that is none, and for what makes no sense together.
    """
    parts = name.split("+")
    for part in parts:
        if part not in STRATEGIES:
            raise UserError(f"there is no strategy {part!r}.{did_you_mean(part, STRATEGIES)}")
    found = [STRATEGIES[part] for part in dict.fromkeys(parts)]
    if len(found) == 1:
        return found[0]
    for one in found:
        if one.by_servers:
            raise UserError(f"strategy {name}: {one.name} joins no other")
        if one.devices == 1:
            raise UserError(
                f"strategy {name}: {one.name} is for one device alone, and joins no other"
            )
    return Strategy(
        name="+".join(one.name for one in found),
        sizes=tuple({axis: size for one in found for axis, size in one.sizes}.items()),
        shards_params=any(one.shards_params for one in found),
        shards_optimizer=any(one.shards_optimizer for one in found),
        needs_rules=any(one.needs_rules for one in found),
        on_host=frozenset().union(*(one.on_host for one in found)),
    )


def mesh_sizes(of: Strategy, given: Mapping[str, int | None]) -> dict[str, int]:
    """Axis name to size, in mesh order: what is given, else the strategy's own.

    At most one of data, fsdp and tensor is -1, the rest of the devices, unless that is given
    twice. A replica of -1 is one for each host or slice (see `mesh.build_mesh`).
    """
    own = dict(of.sizes)
    sizes = {axis: own.get(axis, 1) if given.get(axis) is None else given[axis] for axis in AXES}
    taken = [axis for axis in AXES[1:] if given.get(axis) == -1]
    if taken:  # the rest is spoken for
        sizes |= {axis: 1 for axis in AXES[1:] if given.get(axis) is None and own.get(axis) == -1}
    elif all(sizes[axis] != -1 for axis in AXES[1:]) and given.get("data") is None:
        sizes["data"] = -1
    return {axis: size for axis, size in sizes.items() if size is not None}
