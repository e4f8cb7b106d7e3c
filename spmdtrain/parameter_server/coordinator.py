"""Asynchronous functions on workers, with parameters on servers."""

import contextlib
import dataclasses
import inspect
import itertools
import pickle
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain.cluster.spec import from_environment
from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed.failures import StopSignals
from spmdtrain.distributed.progress import CONTEXT, Phase, heartbeat, phase
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import ClusterError, NonFiniteError, UserError
from spmdtrain.parameter_server import ray_pool
from spmdtrain.parameter_server.partition import Computed, MinSize, Partitioner, ServerPartition
from spmdtrain.parameter_server.ray_nodes import run_task_role
from spmdtrain.parameter_server.scheduler import Done, Failed, PoolEvent, WorkerJoined, WorkerLost
from spmdtrain.parameter_server.server import Pulled, PushResult
from spmdtrain.sharding.placement import configure_backend
from spmdtrain.step.optimizer import Update, clipped
from spmdtrain.step.state import TrainState
from spmdtrain.tree import named_leaves

# -- Calls of functions that a `Coordinator` sends to workers, and their execution there -----------

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


# -- Asynchronous functions on workers, with parameters on servers ---------------------------------
#
# `Coordinator` is for custom loops, like `ClusterCoordinator` of `tf.distribute`. A `Trainer` uses
# strategy parameter_server.

PyTree = Any
_POLL = 0.05  # seconds between two checks for events of workers, and for signals
_MAX_LOSSES = 4  # workers lost with the same call until the call is considered the cause
_GRACE = 15.0  # seconds after a signal in which running calls may end
_MAX_WAITING = 256  # calls that wait for a worker until schedule() waits too


def _key(function: Callable[..., Any]) -> Hashable:
    """Returns a key that equal functions share; unhashable functions have one each."""
    try:
        hash(function)
    except TypeError:
        return id(function)
    return function


class Value:
    """The pending result of a scheduled function. `Coordinator.fetch` waits for it."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def _set(self, result: Any, error: Exception | None = None) -> None:
        self._result, self._error = result, error
        self._ready.set()

    def __reduce__(self) -> Any:
        raise UserError("a Value cannot be an argument of a scheduled function: fetch it first")


class Coordinator:
    """Runs functions on the workers of a TF_CONFIG.

    A context manager, whose block only the chief executes: the other tasks serve it and exit.

        with Coordinator() as coordinator:
            shared = coordinator.share(params, optax.adam(1e-3))

            def step(number):
                params = shared.pull()
                loss, gradients = value_and_grad(params, batch_of(number))
                shared.push(gradients, loss)
                return loss

            losses = [coordinator.schedule(step, number) for number in range(1000)]
            coordinator.join()
            print(coordinator.fetch(losses)[-1])

    The call of a lost worker is run again by another worker. The first error of a function is
    raised by the next `schedule`, `join` or `done`; calls that had not started by then are not
    run. After SIGTERM or Ctrl-C these methods raise `PreemptedExit`.

    Args:
      init_timeout: Seconds to wait for the chief and the servers.
      terminal: Receives lines such as the loss of a worker; by default a new one.

    Raises:
      UserError: On entry, if TF_CONFIG lacks tasks.
    """

    def __init__(self, *, init_timeout: float = 300.0, terminal: Terminal | None = None) -> None:
        self._timeout, self._terminal = init_timeout, terminal or Terminal()
        self._stack = contextlib.ExitStack()
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._running: dict[str, Call] = {}  # by worker
        self._values: dict[int, Value] = {}  # of waiting and running calls
        self._error: Exception | None = None
        self._thread_error: Exception | None = None  # the error that ended the thread
        self._closed = True  # until entry, and after exit
        self._drain_failed = False  # whether calls were still running _GRACE seconds after a signal
        self._next = 0  # the number of the next call
        # With the functions themselves, because some are identified by their id.
        self._functions = LruCache(CACHE_SIZE)
        self._function_numbers = itertools.count()
        self._share_numbers = itertools.count()
        self._signals = StopSignals()
        self._lost: set[str] = set()
        self._losses: Counter[int] = Counter()  # by call

    def __enter__(self) -> "Coordinator":
        run_task_role(self._timeout)
        if CONTEXT.has_coordinator:
            raise UserError(
                "a script can use one Coordinator: the workers and servers ended with the first"
            )
        CONTEXT.has_coordinator = True
        configure_backend(RunConfig(strategy="parameter_server"))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._signals)
            self._job = stack.enter_context(ray_pool.start_job(from_environment(), self._timeout))
            self._pool = self._job.worker_pool(Runner)
            self._closed = False
            thread = threading.Thread(target=self._work, name="coordinator", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(setattr, self, "_closed", True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self._stack.__exit__(kind, *error)
            return
        with self._stack:
            self.join()

    def __reduce__(self) -> Any:
        raise UserError("a Coordinator cannot be used in a function that a worker runs")

    # -- public methods ------------------------------------------------------------------------

    def schedule(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """Schedules `function(*args, **kwargs)` on a worker.

        Returns at once, unless 256 calls are waiting. The function is sent to a worker once, with
        the current values of all variables that it refers to.

        Args:
          function: The function. JAX arrays in its result are fetched as NumPy arrays.
          *args: Its arguments; a `PerWorker` is replaced by the worker's object.
          **kwargs: Its keyword arguments, likewise.

        Returns:
          The pending result.
        """
        with self._changed:
            self._wait(lambda: len(self._waiting) < _MAX_WAITING or self._error is not None)
            self._raise()
            arguments = self._job.ray.cloudpickle.dumps((args, kwargs))
            remote = self._functions.get(
                _key(function), lambda: (function, self._send(function, "schedule"))
            )[1]
            call = Call(self._next, remote, arguments)
            self._next += 1
            value = self._values[call.number] = Value()
            self._waiting.append(call)
            self._assign()
        return value

    def join(self) -> None:
        """Waits until all scheduled calls have ended; raises the first error of any of them."""
        with self._changed:
            self._wait(lambda: self._is_done)
            self._raise()

    def done(self) -> bool:
        """Returns whether all scheduled calls have ended; raises the first error of any of them."""
        with self._changed:
            self._raise()
            return self._is_done

    def fetch(self, values: PyTree) -> PyTree:
        """Waits for results.

        Args:
          values: A tree with `Value` leaves.

        Returns:
          The tree with the results in their place.

        Raises:
          Exception: The error of the function.
        """
        return jax.tree.map(self._fetched, values, is_leaf=lambda value: isinstance(value, Value))

    def per_worker(self, make: Callable[[], Any]) -> PerWorker:
        """Returns a placeholder for an object that each worker makes for itself.

        An example is an iterator over a dataset. Pass the placeholder as an argument of `schedule`.

        Args:
          make: Returns the object; called in a worker at its first use, and again after a restart.
        """
        self._check()
        return PerWorker(self._send(make, "per_worker"))

    def share(
        self,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        opt_state: PyTree = None,
        partitioner: Partitioner | None = None,
    ) -> "Shared":
        """Distributes parameters over the servers, which update them by pushed gradients.

        Args:
          params: Tree of floating-point arrays.
          optimizer: The optimizer.
          opt_state: Its state, from an earlier `Shared.state()`; by default a new one.
          partitioner: Determines the number of shards of each parameter; by default
            `MinSize(number of servers)`.

        Returns:
          The parameters, to be pulled and pushed by scheduled functions.

        Raises:
          UserError: If the optimizer cannot be split, or a server does not start in time.
        """
        self._check()
        check_params(params)
        update = Update(optimizer)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=update.init(params) if opt_state is None else opt_state,
            averaged=update.first_average(params),
            model_state={},
            key=jnp.zeros((), jnp.uint32),
        )
        state = jax.tree.map(np.asarray, state)
        servers = self._job.servers
        partition = ServerPartition.of(
            jax.eval_shape(lambda: state), update, servers, partitioner or MinSize(servers)
        )
        actors = self._job.serve(partition, state, self._next, check_interrupt=self._check)
        return Shared(next(self._share_numbers), partition, actors)

    # -- implementation -------------------------------------------------------------------------

    def _send(self, function: Callable[..., Any], method: str) -> RemoteFunction:
        if not callable(function):
            raise UserError(
                f"{method}() was given a {type(function).__name__}: expected a function"
            )
        try:
            reference = self._job.ray.put(function)
        except TypeError as error:
            name = getattr(function, "__qualname__", type(function).__name__)
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise UserError(f"{name} cannot be sent to workers: {reason}") from error
        return RemoteFunction(next(self._function_numbers), [reference])

    def _fetched(self, value: Any) -> Any:
        if not isinstance(value, Value):
            return value
        while not value._ready.wait(_POLL):
            self._check()
        if value._error is not None:
            raise value._error
        return value._result

    @property
    def _is_done(self) -> bool:
        return not self._waiting and not self._running

    def _wait(self, until: Callable[[], bool]) -> None:
        while not until():
            self._check()
            self._changed.wait(_POLL)

    def _check(self) -> None:
        """Raises an error if waiting cannot end: the job is ending, or the thread has failed."""
        if self._thread_error is not None:
            raise self._thread_error
        if self._closed:
            raise UserError("the coordinator was used outside of its `with` block")
        if self._signals.stop_requested():
            self._drain()
            self._signals.stop_if_received()

    def _drain(self) -> None:
        """Waits for the running calls and starts no others, so that all servers agree."""
        if self._drain_failed:
            return
        with self._changed:
            self._drop("the job is stopping")
            deadline = time.monotonic() + _GRACE
            while not self._is_done and self._thread_error is None and time.monotonic() < deadline:
                self._changed.wait(_POLL)
            if not self._is_done:
                self._drain_failed = True
                self._terminal.line(
                    f"calls are still running {_GRACE:g} s after the signal: some servers may "
                    "have applied their updates and others not"
                )

    def _raise(self) -> None:
        self._check()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        """Assigns calls to workers and processes the events of the pool, in a thread."""
        try:
            while not self._closed:
                with self._changed:
                    self._assign()
                events = self._pool.events(_POLL)
                with self._changed:
                    for event in events:
                        self._process(event)
                    self._changed.notify_all()
        except Exception as error:  # for example of Ray; waiting methods raise it
            with self._changed:
                self._thread_error = error
                self._fail(error)
                for call in self._running.values():
                    self._values.pop(call.number)._set(None, error)
                self._running.clear()
                self._changed.notify_all()

    def _assign(self) -> None:
        for worker in self._pool.idle():
            # The pool may report a worker idle whose event has not been processed here yet.
            if self._waiting and worker not in self._running:
                call = self._running[worker] = self._waiting.popleft()
                floor = min(other.number for other in (*self._running.values(), *self._waiting))
                self._pool.give(worker, dataclasses.replace(call, floor=floor))

    def _process(self, event: PoolEvent) -> None:
        # A worker that has joined may have received a call before this event is processed.
        call = None if isinstance(event, WorkerJoined) else self._running.pop(event.worker, None)
        heartbeat()  # otherwise the launcher would consider the job hung
        match event:
            case Done(_, result) if call is not None:
                with phase(Phase.STEP, call.number + 1):
                    pass  # records the position of the job for the launcher's reports
                self._values.pop(call.number)._set(result)
            case Failed(_, error):
                if call is not None:
                    self._values.pop(call.number)._set(None, error)
                self._fail(error)
            case WorkerLost(worker, reason):
                consequence = ""
                if call is not None:
                    self._reschedule(call, worker, reason)
                    consequence = "; its call is run again"
                self._lost.add(worker)
                self._terminal.line(f"{worker} is lost ({reason}){consequence}")
            case WorkerJoined(worker) if worker in self._lost:
                self._lost.remove(worker)
                self._terminal.line(f"{worker} is back")

    def _reschedule(self, call: Call, worker: str, reason: str) -> None:
        """Schedules a call again, unless it was lost with too many workers."""
        self._losses[call.number] += 1
        if self._losses[call.number] < _MAX_LOSSES:
            self._waiting.appendleft(call)
            return
        error = ClusterError(
            f"call {call.number} was lost {_MAX_LOSSES} times with its worker (last: {worker}, "
            f"{reason}). It may need more memory than a worker has"
        )
        self._values.pop(call.number)._set(None, error)
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Stores an error for the next public method, and drops the waiting calls."""
        self._error = self._error or error
        self._drop(f"another function raised {type(error).__name__}: {error}")

    def _drop(self, reason: str) -> None:
        """Drops the calls that have not started.

        A call that was lost with its worker stays, because some servers may have its update.
        """
        waiting, self._waiting = self._waiting, deque[Call]()
        for call in waiting:
            if self._losses[call.number] and self._thread_error is None:
                self._waiting.append(call)
            else:
                self._values.pop(call.number)._set(None, UserError(f"not run because {reason}"))


# -- Parameters on servers, for functions that workers run -----------------------------------------


@dataclasses.dataclass(frozen=True)
class Shared:
    """Parameters on servers; see `Coordinator.share`.

    `number` identifies these parameters among those that are shared; `servers` are Ray actors.
    """

    number: int
    partition: ServerPartition
    servers: Sequence[Any]

    def pull(self) -> PyTree:
        """Returns the current parameters, NumPy arrays."""
        parts = self._call("pull")
        running: Running | None = CONTEXT.running_call
        if running is not None:
            running.pulled[self.number] = parts
        return self.partition.pulled(parts)[0]

    def push(self, gradients: PyTree, loss: Any) -> int:
        """Updates the parameters on the servers.

        A scheduled function may call this once, after `pull`. If the function is run again because
        its worker was lost, the update is still applied once.

        Args:
          gradients: Gradients, with the structure and shapes of the parameters.
          loss: The loss, a scalar, for optimizers that use it.

        Returns:
          The number of updates between the pull and this one.

        Raises:
          UserError: If the call is not allowed here, or the arguments have other shapes.
          NonFiniteError: If a parameter or the loss is NaN or infinite after the update.
        """
        import ray

        running: Running | None = CONTEXT.running_call
        if running is None:
            raise UserError("push() was called outside a function that a worker runs: schedule one")
        parts = running.pulled.get(self.number)
        if parts is None or self.number in running.pushed:
            raise UserError("push() must be called after pull(), and once in a function")
        running.pushed.add(self.number)
        params, _ = self.partition.pulled(parts)
        _check_gradients(gradients, params)
        if np.shape(loss):
            raise UserError(f"push() was given a loss of shape {np.shape(loss)}: pass its mean")
        transformed = clipped(self.partition.on_worker, gradients, params, loss)
        computed = Computed(jax.tree.map(np.asarray, transformed), {}, {"loss": float(loss)})
        pushes = [
            dataclasses.replace(push, floor=running.floor)
            for push in self.partition.pushes(running.number, computed, parts)
        ]
        results: list[PushResult] = ray_pool.answers(
            ray,
            [server.push.remote(push) for server, push in zip(self.servers, pushes, strict=True)],
        )
        if not all(all(result.finite) for result in results):
            raise NonFiniteError(f"the parameters are not finite after a push of loss {loss}")
        return max(result.staleness for result in results)

    def state(self) -> tuple[PyTree, PyTree]:
        """Returns the current parameters and optimizer state, for example to save them.

        Call after `join`, because the servers' parts are not read at the same time.
        """
        held = [held for held, _ in self._call("held")]
        state = self.partition.state(held, 0, None)
        return state.params, state.opt_state

    def _call(self, method: str) -> list[Any]:
        import ray

        return ray_pool.answers(ray, [getattr(server, method).remote() for server in self.servers])


def check_params(params: PyTree) -> None:
    """Raises `UserError` if a leaf is not a floating-point array, or there is none."""
    for name, leaf in (leaves := named_leaves(params)).items():
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            raise UserError(
                f"share() was given {name or 'params'} of dtype {kind}: expected float arrays"
            )
    if not leaves:
        raise UserError("share() was given no parameters")


def _check_gradients(gradients: PyTree, params: PyTree) -> None:
    """Raises `UserError` if gradients do not have the parameters' names and shapes."""
    actual, expected = (
        {name: np.shape(leaf) for name, leaf in named_leaves(tree).items()}
        for tree in (gradients, params)
    )
    for name in [*expected, *actual]:
        if (given := actual.get(name)) != (shape := expected.get(name)):
            raise UserError(
                f"push() was given {name or 'gradients'} of shape {given}: the parameter has "
                f"shape {shape}"
            )
