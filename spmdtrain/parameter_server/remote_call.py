"""Calls of functions that a `Coordinator` sends to workers, and their execution there."""

import dataclasses
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed.progress import CONTEXT, Phase, phase
from spmdtrain.errors import UserError
from spmdtrain.parameter_server.server import Pulled
from spmdtrain.sharding.placement import configure_backend

CACHE_SIZE = 64  # functions that the chief keeps, and each worker with their compiled programs


@dataclasses.dataclass(frozen=True)
class RemoteFunction:
    """A function that is sent to each worker once, and keeps its compiled programs there."""

    number: int
    reference: Sequence[Any]
    """Ray's reference, in a list because Ray replaces a direct reference by the function."""


@dataclasses.dataclass(frozen=True)
class PerWorker:
    """A placeholder for an object that each worker makes; see `Coordinator.per_worker`."""

    make: RemoteFunction


@dataclasses.dataclass(frozen=True)
class Call:
    """A scheduled call of a function."""

    number: int
    function: RemoteFunction
    arguments: bytes
    """The pair (args, kwargs), pickled when the call was scheduled."""
    floor: int = 0
    """All calls of lower numbers have ended."""


class LruCache:
    """A cache that keeps the `count` most recently used values."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._values = OrderedDict[Hashable, Any]()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the value of a key; if it is not in the cache, adds the result of `make()`."""
        if key not in self._values:
            self._values[key] = make()
        self._values.move_to_end(key)
        if len(self._values) > self._count:
            self._values.popitem(last=False)
        return self._values[key]


@dataclasses.dataclass
class Running:
    """The call that this process is running (`CONTEXT.running_call`).

    Attributes:
      floor: All calls of lower numbers have ended.
      pulled: The servers' answers to the last pull, by the number of the shared parameters.
      pushed: Numbers of the shared parameters that have been pushed.
    """

    number: int
    floor: int
    pulled: dict[int, list[Pulled]] = dataclasses.field(default_factory=dict)
    pushed: set[int] = dataclasses.field(default_factory=set)


class Runner:
    """Runs calls in a worker, one after the other."""

    def __init__(self) -> None:
        configure_backend(RunConfig(strategy="parameter_server"))
        self._functions = LruCache(CACHE_SIZE)
        self._per_worker: dict[int, Any] = {}

    def __call__(self, call: Call) -> Any:
        """Returns the result of a call, with JAX arrays as NumPy arrays.

        Raises:
          UserError: If the function returns a generator.
          RuntimeError: If the function calls `sys.exit`.
        """
        function, arguments = self._function(call.function), pickle.loads(call.arguments)
        args, kwargs = jax.tree.map(
            self._resolve, arguments, is_leaf=lambda x: isinstance(x, PerWorker)
        )
        CONTEXT.running_call = Running(call.number, call.floor)
        try:
            with phase(Phase.STEP, call.number + 1):
                result = function(*args, **kwargs)
        except SystemExit as stop:
            raise RuntimeError(f"the function called sys.exit({stop.code!r})") from stop
        finally:
            CONTEXT.running_call = None
        if inspect.isgenerator(result):
            raise UserError("the function returns a generator, which cannot be sent; use a list")
        return jax.device_get(result)

    def _function(self, remote: RemoteFunction) -> Callable[..., Any]:
        import ray

        return self._functions.get(remote.number, lambda: ray.get(remote.reference[0]))

    def _resolve(self, x: Any) -> Any:
        if not isinstance(x, PerWorker):
            return x
        if x.make.number not in self._per_worker:
            self._per_worker[x.make.number] = self._function(x.make)()
        return self._per_worker[x.make.number]
