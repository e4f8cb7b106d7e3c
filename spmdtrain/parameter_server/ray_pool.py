"""The servers and workers of a job on Ray: their actors, as the chief uses them."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.cluster.spec import ClusterSpec
from spmdtrain.distributed import initialize, progress
from spmdtrain.distributed.code_digest import user_modules
from spmdtrain.errors import ClusterError, PreemptedExit, UserError, describe_sys_exit, for_users
from spmdtrain.parameter_server import ray_nodes
from spmdtrain.parameter_server.partition import ServerPartition
from spmdtrain.parameter_server.scheduler import Done, Failed, PoolEvent, WorkerJoined, WorkerLost
from spmdtrain.parameter_server.server import Counts, Pulled, Push, PushResult, Server, ServerState
from spmdtrain.step.state import TrainState

# -- The servers and workers of a job on Ray, as its chief uses them -------------------------------

_POLL = 0.5  # seconds between two calls of check_interrupt while waiting for servers
SILENCE = 20.0  # seconds without an answer of a server until the user is informed
RETRY_SECONDS = 1.0  # seconds until a lost worker is called again
_MAX_LOSSES = 4  # of a worker during its initialization
_SHARE = 0.001  # of a task's resource that a server takes, because it may have several


class RayJob:
    """A job of a chief, workers and parameter servers, as the chief uses it.

    The module `ray` is connected to the job. `serve` waits `timeout` seconds for the servers.
    """

    def __init__(self, ray: Any, spec: ClusterSpec, timeout: float) -> None:
        self.ray = ray
        self._timeout = timeout
        self._servers = [task for task in spec.tasks if task.type == "ps"]
        self._workers = list(spec.processes[1:])
        self.coming = [*self._servers, *self._workers]
        """The tasks that may not have started yet."""
        _pickle_user_modules_by_value(ray)

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self._servers)

    @property
    def workers(self) -> int:
        """Number of workers in the cluster."""
        return len(self._workers)

    def serve(
        self,
        partition: ServerPartition,
        state: TrainState,
        first: int,
        max_staleness: int | None = None,
        *,
        check_interrupt: Callable[[], None],
    ) -> list[Any]:
        """Starts the servers with their parts of a state; returns their Ray actors in task order.

        Args:
          state: Contains all batches below `first`.
          max_staleness: See `Server`.
          check_interrupt: Called while waiting for the servers; may raise.

        Raises:
          UserError: If a server does not start in time.
        """
        actor = self.ray.remote(ServerActor)
        servers = {
            task: actor.options(
                num_cpus=0, max_restarts=0, resources={ray_nodes.resource(task): _SHARE}
            ).remote(partition, partition.held_by(n, state), first, max_staleness)
            for n, task in enumerate(self._servers)
        }
        calls = {server.ready.remote(): task for task, server in servers.items()}
        missing, until = list(calls), time.monotonic() + self._timeout
        while missing and time.monotonic() < until:
            check_interrupt()
            _, missing = self.ray.wait(missing, num_returns=len(missing), timeout=_POLL)
        self.coming = []
        if missing:
            names = ", ".join(str(calls[call]) for call in missing)
            raise UserError(
                f"{names} of {self.servers} parameter servers: not started after "
                f"{self._timeout:g} s; start them with the TF_CONFIG of the chief, except for task"
            )
        self.ray.get(list(calls))
        return list(servers.values())

    def worker_pool(self, make: Callable[[], Callable[[Any], Any]]) -> "RayWorkerPool":
        """Returns the pool of the job's workers, which may start at any time.

        `make` is called in each worker's process and returns the function that processes work
        items.
        """
        actor = self.ray.remote(WorkerActor)
        actors = {
            str(task): actor.options(
                num_cpus=0, max_restarts=-1, resources={ray_nodes.resource(task): 1}
            ).remote()
            for task in self._workers
        }
        workers = {name: RayWorker(actor) for name, actor in actors.items()}
        return RayWorkerPool(self.ray, workers, self.ray.put(make))


@contextlib.contextmanager
def start_job(spec: ClusterSpec, timeout: float) -> Iterator[RayJob]:
    """Starts a job as its chief. Its tasks end with the block: `finished`, `preempted` or `failed`.

    A `SystemExit` of the block is `finished` if its code is 0 or None, and a `PreemptedExit` is
    `preempted`. `timeout` is the number of seconds to wait for the chief's node, and later for the
    servers.

    Raises:
      UserError: If Ray is missing or unauthenticated, or the chief's address cannot be used.
    """
    with ray_nodes.head(spec, timeout) as ray:
        job, how = RayJob(ray, spec, timeout), "failed"
        try:
            yield job
            how = "finished"
        except SystemExit as stop:
            if not stop.code:
                how = "finished"
            elif isinstance(stop, PreemptedExit):
                how = "preempted"
            raise
        finally:
            ray_nodes.publish_end(ray, how, job.coming)


@dataclass
class RayWorker:
    """A worker's actor and its state."""

    actor: Any
    call: Any = None
    """Its pending call, if any."""
    is_running: bool = False
    """Whether its process runs."""
    is_ready: bool = False
    """Whether its process has created the function that processes work items."""
    losses: int = 0
    """Number of losses during initialization since it was ready."""
    retry_at: float = 0.0
    """When to call it next, if it is not ready."""


@dataclass
class RayWorkerPool:
    """The workers of a job on Ray, including those that have not started or are lost.

    `make` is a reference to the function that initializes a worker; it is kept for restarted
    workers.
    """

    ray: Any
    workers: Mapping[str, RayWorker]
    make: Any

    @property
    def is_empty(self) -> bool:
        """Whether no worker is available."""
        return not any(worker.is_ready for worker in self.workers.values())

    def idle(self) -> Sequence[str]:
        return [name for name, own in self.workers.items() if own.is_ready and not own.call]

    def give(self, worker: str, work: Any) -> None:
        own = self.workers[worker]
        own.call = own.actor.do.remote(work)

    def events(self, timeout: float) -> list[PoolEvent]:
        for worker in self.workers.values():
            if not worker.is_ready and worker.call is None and time.monotonic() >= worker.retry_at:
                if worker.is_running:
                    worker.call = worker.actor.begin.remote(self.make)
                else:
                    worker.call = worker.actor.ready.remote()
        calls = {worker.call: name for name, worker in self.workers.items() if worker.call}
        if not calls:
            time.sleep(min(timeout, RETRY_SECONDS))
            return []
        done, _ = self.ray.wait(list(calls), num_returns=1, timeout=timeout)
        more, _ = self.ray.wait(list(calls), num_returns=len(calls), timeout=0)
        events = [self._event(calls[call], call) for call in dict.fromkeys([*done, *more])]
        return [event for event in events if event is not None]

    def _event(self, name: str, call: Any) -> PoolEvent | None:
        """Returns the event of a call that has ended; None if the worker is not ready yet."""
        worker, exceptions = self.workers[name], self.ray.exceptions
        was_running, was_ready, worker.call = worker.is_running, worker.is_ready, None
        try:
            result = self.ray.get(call)
        except exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(
                cause, exceptions.RayActorError
            ):  # of a server: a worker calls no other actor
                cause = _server_lost(cause)
            elif for_users(cause) is None:
                cause.add_note(f"in {name}:\n{error}")
            return Failed(name, cause)
        except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
            if getattr(error, "actor_init_failed", False):
                return Failed(name, error)
            worker.is_running = worker.is_ready = False
            worker.retry_at = time.monotonic() + RETRY_SECONDS
            if was_ready:
                return WorkerLost(name, _reason(error))
            return self._lost_early(name, _reason(error)) if was_running else None
        except exceptions.RayError as error:  # such as an exception that cannot be unpickled
            return Failed(name, error)
        if was_ready:
            return Done(name, result)
        worker.is_running, worker.is_ready = True, was_running
        if not was_running:
            return None
        worker.losses = 0
        return WorkerJoined(name)

    def _lost_early(self, name: str, reason: str) -> PoolEvent:
        """Returns the event of a loss during initialization: an error if it is repeated."""
        worker = self.workers[name]
        worker.losses += 1
        if worker.losses < _MAX_LOSSES:
            return WorkerLost(name, f"{reason}, during initialization")
        return Failed(
            name,
            ClusterError(
                f"{name} was lost {_MAX_LOSSES} times during initialization (last reason: "
                f"{reason}). The dataset may need more memory than it has"
            ),
        )


def answers(ray: Any, calls: Sequence[Any]) -> list[Any]:
    """Returns the results of calls of servers; raises `ClusterError` if a server is lost."""
    try:
        results: list[Any] = ray.get(list(calls))
    except ray.exceptions.RayActorError as error:
        raise _server_lost(error) from error
    return results


def await_answers(
    ray: Any,
    calls: Mapping[Any, str],
    on_silence: Callable[[str], None],
    check_interrupt: Callable[[], None],
) -> list[Any]:
    """Returns the results of calls of servers, in a wait that a signal can end.

    Args:
      calls: References to the results, each with the name of its server.
      on_silence: Called once with the names of the servers that have not answered for 20 s.
      check_interrupt: Called while results are pending; may raise.

    Raises:
      ClusterError: If a server is lost.
    """
    missing, began, was_silent = list(calls), time.monotonic(), False
    while missing:
        _, missing = ray.wait(missing, num_returns=len(missing), timeout=_POLL)
        if not missing:
            break
        if time.monotonic() - began > SILENCE and not was_silent:
            on_silence(" and ".join(calls[call] for call in missing))
            was_silent = True
        check_interrupt()
    return answers(ray, list(calls))


def _server_lost(error: Exception) -> ClusterError:
    return ClusterError(
        f"a parameter server is lost, and its part of the state with it ({_reason(error)}): "
        "restart the job from its last checkpoint"
    )


def _reason(error: Exception) -> str:
    """Returns a short reason; Ray's own messages are paragraphs of identifiers."""
    reasons = {
        "ActorDiedError": "its process is dead",
        "ActorUnavailableError": "its process does not answer",
    }
    return reasons.get(type(error).__name__, type(error).__name__)


def _pickle_user_modules_by_value(ray: Any) -> None:
    """Makes Ray pickle the user's modules by value, because other hosts may lack the files."""
    for module in user_modules(_new_process_path()):
        ray.cloudpickle.register_pickle_by_value(module)


def _new_process_path() -> list[str]:
    """Returns `sys.path` of a new process, without the folder of an experiment or a script."""
    command = [sys.executable, "-P", "-c", "import json, sys; print(json.dumps(sys.path))"]
    path: list[str] = json.loads(subprocess.check_output(command))
    return path


# -- Ray actors of workers and parameter servers ---------------------------------------------------


class ServerActor:
    """A parameter server (see `Server`) in its own process."""

    def __init__(
        self, partition: ServerPartition, held: ServerState, step: int, max_staleness: int | None
    ) -> None:
        _initialize_process()
        self._server = Server(partition.on_server, held, step, max_staleness)

    def ready(self) -> None:
        """Returns when the process of the actor runs."""

    def pull(self, number: int | None = None) -> Pulled:
        """Returns the current parameters; see `Server.pull`."""
        return self._server.pull(number)

    def push(self, pushed: Push) -> PushResult:
        """Applies a push; see `Server.push`."""
        with progress.phase(progress.Phase.STEP, pushed.number + 1):
            return self._server.push(pushed)

    def held(self) -> tuple[ServerState, int]:
        """Returns the part of the state, and the bound below which all batches are in it."""
        return self._server.held(), self._server.applied.complete

    def counts(self) -> Counts:
        """Returns the numbers of pushes by result."""
        return self._server.counts


class WorkerActor:
    """A worker in its own process.

    It has no arguments, because Ray restarts it after a loss and may have lost them by then.
    """

    def __init__(self) -> None:
        _initialize_process()
        self._function: Callable[[Any], Any] | None = None

    def ready(self) -> None:
        """Returns when the process of the actor runs."""

    def begin(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        """Makes the function that processes work items, if there is none yet."""
        if self._function is None:
            with _exit_as_error():
                self._function = make()

    def do(self, work: Any) -> Any:
        """Returns the result of a work item."""
        assert self._function is not None
        with _exit_as_error():
            return self._function(work)


@contextlib.contextmanager
def _exit_as_error() -> Iterator[None]:
    """Raises `RuntimeError` in place of `SystemExit`, because Ray would end the actor for good."""
    try:
        yield
    except SystemExit as stop:
        raise RuntimeError(describe_sys_exit(stop, "in a worker")) from stop


def _initialize_process() -> None:
    """Sets up the process of an actor.

    It is a single process for JAX, writes to the output of its task, and is killed when its
    parent process, Ray's node, ends.
    """
    initialize.set_single_process()
    progress.begin_for_task()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # the task's output is closed, or a socket
            path = f"/proc/{os.environ[ray_nodes.TASK_PROCESS]}/fd/{descriptor}"
            target = os.open(path, os.O_WRONLY | os.O_APPEND)
            os.dup2(target, descriptor)
            os.close(target)
