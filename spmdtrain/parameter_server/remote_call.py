"""What a `Coordinator` gives to workers: a function with its arguments, and how they run it."""

import dataclasses
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from spmdtrain.config import RunConfig
from spmdtrain.distributed.progress import Phase, phase
from spmdtrain.errors import UserError
from spmdtrain.parameter_server.server import Pulled
from spmdtrain.sharding.placement import configure_backend

KEPT = 64  # functions that the chief keeps, and each worker with what they have compiled


@dataclasses.dataclass(frozen=True)
class RemoteFunction:
    """A function that is sent to each worker once: there it keeps what it has compiled."""

    number: int
    reference: Sequence[Any]
    """Of Ray's, in a list, so that Ray does not put the function itself in its place."""


@dataclasses.dataclass(frozen=True)
class PerWorker:
    """What stands for a thing that each worker has one of; see `Coordinator.per_worker`."""

    make: RemoteFunction


@dataclasses.dataclass(frozen=True)
class Call:
    """A function to be run, and with what."""

    number: int
    function: RemoteFunction
    arguments: bytes
    """args and kwargs, pickled: as they were when it was scheduled."""
    floor: int = 0
    """Those of lower numbers have all been run."""


class LruCache:
    """The things that were asked for last, as many as `count`: others are made again."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._things = OrderedDict[Hashable, Any]()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """That of a key."""
        if key not in self._things:
            self._things[key] = make()
        self._things.move_to_end(key)
        if len(self._things) > self._count:
            self._things.popitem(last=False)
        return self._things[key]


@dataclasses.dataclass
class Running:
    """The call that this process is running."""

    number: int
    floor: int
    pulled: dict[int, list[Pulled]] = dataclasses.field(default_factory=dict)
    """By the number of what is shared, as what was pushed."""
    pushed: set[int] = dataclasses.field(default_factory=set)


current: Running | None = None


class Runner:
    """A worker's side: runs what it is given, one call after the other."""

    def __init__(self) -> None:
        configure_backend(RunConfig(strategy="parameter_server"))
        self._functions = LruCache(KEPT)
        self._own: dict[int, Any] = {}

    def __call__(self, call: Call) -> Any:
        """What the function returns, jax.Arrays as NumPy arrays."""
        global current
        function, arguments = self._function(call.function), pickle.loads(call.arguments)
        args, kwargs = jax.tree.map(
            self._own_of, arguments, is_leaf=lambda x: isinstance(x, PerWorker)
        )
        current = Running(call.number, call.floor)
        try:
            with phase(Phase.STEP, call.number + 1):
                found = function(*args, **kwargs)
        except SystemExit as stop:
            raise RuntimeError(f"the function has called sys.exit({stop.code!r})") from stop
        finally:
            current = None
        if inspect.isgenerator(found):
            raise UserError("the function returns a generator, which cannot be sent: a list can")
        return jax.device_get(found)

    def _function(self, sent: RemoteFunction) -> Callable[..., Any]:
        import ray

        return self._functions.get(sent.number, lambda: ray.get(sent.reference[0]))

    def _own_of(self, x: Any) -> Any:
        if not isinstance(x, PerWorker):
            return x
        if x.make.number not in self._own:
            self._own[x.make.number] = self._function(x.make)()
        return self._own[x.make.number]
