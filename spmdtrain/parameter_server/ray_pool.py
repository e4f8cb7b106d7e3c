"""The chief's side of a job on Ray: its servers, and the workers that come and go."""

import contextlib
import importlib.machinery
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.cluster.spec import ClusterSpec
from spmdtrain.errors import ClusterError, PreemptedExit, UserError, for_users
from spmdtrain.parameter_server import ray_nodes
from spmdtrain.parameter_server.ray_actors import ServerActor, WorkerActor
from spmdtrain.parameter_server.state_partition import ServerPartition
from spmdtrain.parameter_server.worker_pool import Done, Failed, PoolEvent, WorkerJoined, WorkerLost
from spmdtrain.step.state import TrainState
from spmdtrain.xla.hlo_parser import is_library

_LOOK = 0.5  # seconds between two looks at whether to go on waiting for servers
_AGAIN = 1.0  # seconds until a worker that was lost is asked again whether it is there
_FATAL = 4  # times that a worker is lost while it gets ready
_SHARE = 0.001  # of a task's place that a server takes, as it may have several


class RayJob:
    """A job of a chief, workers and parameter servers, as its chief has it.

    `ray` is the module.
    """

    def __init__(self, ray: Any, spec: ClusterSpec, timeout: float) -> None:
        self.ray = ray
        self._timeout = timeout
        self._servers = [task for task in spec.tasks if task.type == "ps"]
        self._workers = list(spec.processes[1:])
        self.coming = [*self._servers, *self._workers]
        """The tasks that nobody has waited for yet."""
        _by_value(ray)

    @property
    def servers(self) -> int:
        """How many there are."""
        return len(self._servers)

    @property
    def workers(self) -> int:
        """How many are to come."""
        return len(self._workers)

    def serve(
        self,
        division: ServerPartition,
        state: TrainState,
        first: int,
        max_staleness: int | None = None,
        *,
        may_stop: Callable[[], None],
    ) -> list[Any]:
        """The servers' actors, with their parts of a state in which all batches below `first` are.

        Calls `may_stop`, which may raise, while it waits for them. Raises `UserError` where one has
        not come in time.
        """
        actor = self.ray.remote(ServerActor)
        made = {
            task: actor.options(
                num_cpus=0, max_restarts=0, resources={ray_nodes.resource(task): _SHARE}
            ).remote(division, division.held_by(n, state), first, max_staleness)
            for n, task in enumerate(self._servers)
        }
        asked = {server.ready.remote(): task for task, server in made.items()}
        missing, until = list(asked), time.monotonic() + self._timeout
        while missing and time.monotonic() < until:
            may_stop()
            _, missing = self.ray.wait(missing, num_returns=len(missing), timeout=_LOOK)
        self.coming = []
        if missing:
            names = ", ".join(str(asked[call]) for call in missing)
            raise UserError(
                f"{names} of {self.servers} parameter servers: not there after "
                f"{self._timeout:g} s; start them with the same TF_CONFIG, but for their task"
            )
        self.ray.get(list(asked))
        return list(made.values())

    def crew(self, make: Callable[[], Callable[[Any], Any]]) -> "RayCrew":
        """The workers, each of which does what `make` makes there, as soon as it comes."""
        actor = self.ray.remote(WorkerActor)
        made = {
            str(task): actor.options(
                num_cpus=0, max_restarts=-1, resources={ray_nodes.resource(task): 1}
            ).remote()
            for task in self._workers
        }
        return RayCrew(
            self.ray, {name: _Place(of) for name, of in made.items()}, self.ray.put(make)
        )


@contextlib.contextmanager
def begin(spec: ClusterSpec, timeout: float) -> Iterator[RayJob]:
    """Be the chief of a job. Its tasks end with the block: as `finished`, `preempted` or `failed`.

    Raises `UserError`.
    """
    with ray_nodes.head(spec, timeout) as ray:
        job, how = RayJob(ray, spec, timeout), "failed"
        try:
            yield job
            how = "finished"
        except PreemptedExit:
            how = "preempted"
            raise
        except SystemExit as stop:
            if not stop.code:
                how = "finished"
            raise
        finally:
            ray_nodes.tell_end(ray, how, job.coming)


@dataclass
class _Place:
    """A worker's actor, and what it is doing."""

    actor: Any
    call: Any = None
    is_there: bool = False
    """Its process: what is to be done there has not been made yet, unless it is ready."""
    is_ready: bool = False
    lost: int = 0
    """How often it was while it got ready, since it was last."""
    ask_at: float = 0.0
    """When to ask whether it is there, if it is not."""


@dataclass
class RayCrew:
    """The workers of a job, those that have not come yet and those that are gone included."""

    ray: Any
    places: Mapping[str, _Place]
    make: Any
    """What every worker is told when it comes: kept, for those that come again."""

    @property
    def is_empty(self) -> bool:
        """Whether no worker is there."""
        return not any(place.is_ready for place in self.places.values())

    def idle(self) -> Sequence[str]:
        return [name for name, place in self.places.items() if place.is_ready and not place.call]

    def give(self, worker: str, work: Any) -> None:
        place = self.places[worker]
        place.call = place.actor.do.remote(work)

    def events(self, timeout: float) -> list[PoolEvent]:
        for place in self.places.values():
            if not place.is_ready and place.call is None and time.monotonic() >= place.ask_at:
                ask = place.actor.begin if place.is_there else place.actor.ready
                place.call = ask.remote(*([self.make] if place.is_there else []))
        calls = {place.call: name for name, place in self.places.items() if place.call}
        if not calls:
            time.sleep(min(timeout, _AGAIN))
            return []
        done, _ = self.ray.wait(list(calls), num_returns=1, timeout=timeout)
        more, _ = self.ray.wait(list(calls), num_returns=len(calls), timeout=0)
        found = [self._event(calls[call], call) for call in dict.fromkeys([*done, *more])]
        return [event for event in found if event is not None]

    def _event(self, name: str, call: Any) -> PoolEvent | None:
        """What has come of a call; None where a worker is not there still."""
        place, exceptions = self.places[name], self.ray.exceptions
        was_there, was_ready, place.call = place.is_there, place.is_ready, None
        try:
            result = self.ray.get(call)
        except exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, exceptions.RayActorError):  # of a server: it has asked no other
                cause = _server_lost(cause)
            elif for_users(cause) is None:
                cause.add_note(f"in {name}:\n{error}")
            return Failed(name, cause)
        except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
            if getattr(error, "actor_init_failed", False):
                return Failed(name, error)
            place.is_there = place.is_ready = False
            place.ask_at = time.monotonic() + _AGAIN
            if was_ready:
                return WorkerLost(name, _reason(error))
            return self._lost_early(name, _reason(error)) if was_there else None
        except exceptions.RayError as error:  # an exception that does not survive its journey, say
            return Failed(name, error)
        if was_ready:
            return Done(name, result)
        place.is_there, place.is_ready = True, was_there
        if not was_there:
            return None
        place.lost = 0
        return WorkerJoined(name)

    def _lost_early(self, name: str, reason: str) -> PoolEvent:
        """A worker was lost that was getting ready: again and again, and it is an error."""
        place = self.places[name]
        place.lost += 1
        if place.lost < _FATAL:
            return WorkerLost(name, f"{reason}, while it got ready")
        return Failed(
            name,
            ClusterError(
                f"{name} was lost {_FATAL} times while it got ready (the last: {reason}): do the "
                "examples take more memory than there is?"
            ),
        )


def answers(ray: Any, calls: Sequence[Any]) -> list[Any]:
    """What servers answer. Raises `ClusterError` where one is lost."""
    try:
        found: list[Any] = ray.get(list(calls))
    except ray.exceptions.RayActorError as error:
        raise _server_lost(error) from error
    return found


def _server_lost(error: Exception) -> ClusterError:
    return ClusterError(
        f"a parameter server is lost, and its part of the state with it ({_reason(error)}): start "
        "the job again from its last checkpoint"
    )


def _reason(error: Exception) -> str:
    """In a few words: Ray's own are a paragraph of its identifiers."""
    what = {
        "ActorDiedError": "its process is dead",
        "ActorUnavailableError": "its process does not answer",
    }
    return what.get(type(error).__name__, type(error).__name__)


def _by_value(ray: Any) -> None:
    """Have what the user's own modules define sent along: a file of another host is not read."""
    path = _fresh_path()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not _is_found(module, path) and not is_library(file):
            ray.cloudpickle.register_pickle_by_value(module)


def _is_found(module: Any, path: Sequence[str]) -> bool:
    """Whether a process that has this path finds the module by its name."""
    top = module.__name__.partition(".")[0]
    return importlib.machinery.PathFinder.find_spec(top, list(path)) is not None


def _fresh_path() -> list[str]:
    """Where a new process looks for modules: not in the folder of an experiment, or of a script."""
    ask = [sys.executable, "-P", "-c", "import json, sys; print(json.dumps(sys.path))"]
    found: list[str] = json.loads(subprocess.check_output(ask))
    return found
