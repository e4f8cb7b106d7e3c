"""Functions that workers run, each at its own pace, around parameters that servers have.

For loops of one's own, as `tf.distribute`'s `ClusterCoordinator` has them; the `Trainer`'s are made
by strategy parameter_server.
"""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain.cluster.spec import from_environment
from spmdtrain.config import RunConfig
from spmdtrain.distributed.preemption import StopSignals
from spmdtrain.distributed.progress import Phase, heartbeat, phase
from spmdtrain.errors import ClusterError, UserError
from spmdtrain.parameter_server import ray_pool
from spmdtrain.parameter_server.partition import MinSize, Partitioner
from spmdtrain.parameter_server.remote_call import (
    KEPT,
    Call,
    LruCache,
    PerWorker,
    RemoteFunction,
    Runner,
)
from spmdtrain.parameter_server.roles import run_task_role
from spmdtrain.parameter_server.shared_params import Shared, check_params
from spmdtrain.parameter_server.state_partition import ServerPartition
from spmdtrain.parameter_server.worker_pool import Done, Failed, PoolEvent, WorkerJoined, WorkerLost
from spmdtrain.sharding.placement import configure_backend
from spmdtrain.step.optimizer import Update
from spmdtrain.step.state import TrainState
from spmdtrain.terminal import Terminal

PyTree = Any
_is_used = False  # whether this process has had one
_LOOK = 0.05  # seconds between two looks at what workers do, and at whether a signal has come
_FATAL = 4  # workers that are lost with a call, and it is to blame
_REST = 15.0  # seconds after a signal in which what is out may come in
_MOST = 256  # calls that wait for a worker, before schedule() waits, too


def _key(function: Callable[..., Any]) -> Hashable:
    """Functions that are equal are sent once; of those that cannot tell, each is its own."""
    try:
        hash(function)
    except TypeError:
        return id(function)
    return function


class Value:
    """What a scheduled function returns, once it has run. `Coordinator.fetch` waits for it."""

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._result: Any = None
        self._error: Exception | None = None

    def _settle(self, result: Any, error: Exception | None = None) -> None:
        self._result, self._error = result, error
        self._settled.set()

    def __reduce__(self) -> Any:
        raise UserError("a value that another function returns is no argument: fetch it first")


class Coordinator:
    """Has the workers of a TF_CONFIG run functions; the chief alone gets past its beginning.

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

    What a worker was doing when it was lost, another does again. The first error of a function is
    raised by the next `schedule`, `join` or `done`; what had not begun by then is not run. After
    SIGTERM or Ctrl-C they raise `PreemptedExit`. `init_timeout`: seconds in which the chief and the
    servers have to come. Raises `UserError` where TF_CONFIG has no such tasks.
    """

    def __init__(self, *, init_timeout: float = 300.0, terminal: Terminal | None = None) -> None:
        self._timeout, self._terminal = init_timeout, terminal or Terminal()
        self._stack = contextlib.ExitStack()
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._out: dict[str, Call] = {}  # by worker
        self._values: dict[int, Value] = {}  # of what is waiting or out
        self._error: Exception | None = None
        self._broken: Exception | None = None  # what has ended the thread
        self._over = True  # until it has begun
        self._restless = False  # whether it has not come to rest after a signal
        self._next = 0  # the number of the next call
        # With the functions themselves, as some go by their id.
        self._functions = LruCache(KEPT)
        self._sent = itertools.count()
        self._shares = itertools.count()
        self._signals = StopSignals()
        self._lost: set[str] = set()
        self._killed: Counter[int] = Counter()

    def __enter__(self) -> "Coordinator":
        global _is_used
        run_task_role(self._timeout)
        if _is_used:
            raise UserError(
                "a script has one Coordinator: the workers and servers have ended with the first"
            )
        _is_used = True
        configure_backend(RunConfig(strategy="parameter_server"))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._signals)
            self._job = stack.enter_context(ray_pool.begin(from_environment(), self._timeout))
            self._crew = self._job.crew(Runner)
            self._over = False
            thread = threading.Thread(target=self._work, name="coordinator", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(setattr, self, "_over", True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self._stack.__exit__(kind, *error)
            return
        with self._stack:
            self.join()

    def __reduce__(self) -> Any:
        raise UserError("a Coordinator is for the chief alone: a function of workers has none")

    # -- what is to be run ---------------------------------------------------------------------

    def schedule(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """Have a worker run `function(*args, **kwargs)`; returns at once, unless many wait already.

        It is sent to a worker once, with all that it refers to as it is then. What it returns is
        fetched as NumPy arrays. `PerWorker` among the arguments stands for the worker's own.
        """
        with self._changed:
            self._wait(lambda: len(self._waiting) < _MOST or self._error is not None)
            self._raise()
            arguments = self._job.ray.cloudpickle.dumps((args, kwargs))
            sent = self._functions.get(
                _key(function), lambda: (function, self._send(function, "schedule"))
            )[1]
            call = Call(self._next, sent, arguments)
            self._next += 1
            value = self._values[call.number] = Value()
            self._waiting.append(call)
            self._give()
        return value

    def join(self) -> None:
        """Return once all that was scheduled has run; raises the first error of any of it."""
        with self._changed:
            self._wait(lambda: self._is_done)
            self._raise()

    def done(self) -> bool:
        """Whether all that was scheduled has run; raises the first error of any of it."""
        with self._changed:
            self._raise()
            return self._is_done

    def fetch(self, values: PyTree) -> PyTree:
        """What was returned, in the place of each `Value` of a tree, once it is there.

        Raises what the function has raised.
        """
        return jax.tree.map(self._fetched, values, is_leaf=lambda value: isinstance(value, Value))

    def per_worker(self, make: Callable[[], Any]) -> PerWorker:
        """A thing that each worker has one of: `make()`, called there when it is first used.

        An iterator over a dataset, say. A worker that is lost and comes again makes another.
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
        """Put parameters on the servers, which update them by what is pushed.

        `opt_state`: of an earlier `Shared.state()`; a new one where it is None. Raises `UserError`
        for an optimizer that cannot be divided, and where a server does not come in time.
        """
        self._check()
        check_params(params)
        update = Update(optimizer)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=update.init(params) if opt_state is None else opt_state,
            averaged={},
            model_state={},
            key=jnp.zeros((), jnp.uint32),
        )
        state = jax.tree.map(np.asarray, state)
        servers = self._job.servers
        division = ServerPartition.of(
            jax.eval_shape(lambda: state), update, servers, partitioner or MinSize(servers)
        )
        held = self._job.serve(division, state, self._next, may_stop=self._check)
        return Shared(next(self._shares), division, held)

    # -- the work -------------------------------------------------------------------------------

    def _send(self, function: Callable[..., Any], of: str) -> RemoteFunction:
        if not callable(function):
            raise UserError(f"{of}() is given a {type(function).__name__}: it takes a function")
        try:
            reference = self._job.ray.put(function)
        except TypeError as error:
            name = getattr(function, "__qualname__", type(function).__name__)
            why = str(error.__cause__ or error).strip().splitlines()[0]
            raise UserError(f"{name} cannot be sent to workers: {why}") from error
        return RemoteFunction(next(self._sent), [reference])

    def _fetched(self, value: Any) -> Any:
        if not isinstance(value, Value):
            return value
        while not value._settled.wait(_LOOK):
            self._check()
        if value._error is not None:
            raise value._error
        return value._result

    @property
    def _is_done(self) -> bool:
        return not self._waiting and not self._out

    def _wait(self, until: Callable[[], bool]) -> None:
        while not until():
            self._check()
            self._changed.wait(_LOOK)

    def _check(self) -> None:
        """Raise where what is waited for will not come."""
        if self._broken is not None:
            raise self._broken
        if self._over:
            raise UserError("use the coordinator within its `with`, with which it ends")
        if self._signals.asked():
            self._come_to_rest()
            self._signals.stop_if_received()

    def _come_to_rest(self) -> None:
        """Give out nothing more, and let land what is out: what is shared is whole then."""
        if self._restless:
            return
        with self._changed:
            self._drop("the job was asked to stop")
            until = time.monotonic() + _REST
            while not self._is_done and self._broken is None and time.monotonic() < until:
                self._changed.wait(_LOOK)
            if not self._is_done:
                self._restless = True
                self._terminal.line(
                    f"what was given out is not done {_REST:g} s after the signal: of that, some "
                    "servers may have more than others"
                )

    def _raise(self) -> None:
        self._check()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        """Give calls to workers and take what comes of them, in a thread of its own."""
        try:
            while not self._over:
                with self._changed:
                    self._give()
                events = self._crew.events(_LOOK)
                with self._changed:
                    for event in events:
                        self._take(event)
                    self._changed.notify_all()
        except Exception as error:  # of Ray, say: whoever waits is to know
            with self._changed:
                self._broken = error
                self._fail(error)
                for call in self._out.values():
                    self._values.pop(call.number)._settle(None, error)
                self._out.clear()
                self._changed.notify_all()

    def _give(self) -> None:
        for worker in self._crew.idle():
            # Of one that is out, the end may be known to the crew and not yet taken here.
            if self._waiting and worker not in self._out:
                call = self._out[worker] = self._waiting.popleft()
                floor = min(one.number for one in (*self._out.values(), *self._waiting))
                self._crew.give(worker, dataclasses.replace(call, floor=floor))

    def _take(self, event: PoolEvent) -> None:
        # One that has just come may have been given something before that is taken here.
        call = None if isinstance(event, WorkerJoined) else self._out.pop(event.worker, None)
        heartbeat()  # else the launcher would take the job for hung
        match event:
            case Done(_, result) if call is not None:
                with phase(Phase.STEP, call.number + 1):
                    pass  # where the job is, for the launcher to tell
                self._values.pop(call.number)._settle(result)
            case Failed(_, error):
                if call is not None:
                    self._values.pop(call.number)._settle(None, error)
                self._fail(error)
            case WorkerLost(worker, reason):
                again = ""
                if call is not None:
                    self._do_again(call, worker, reason)
                    again = "; what it was doing is done again"
                self._lost.add(worker)
                self._terminal.line(f"{worker} is lost ({reason}){again}")
            case WorkerJoined(worker) if worker in self._lost:
                self._lost.remove(worker)
                self._terminal.line(f"{worker} is back")

    def _do_again(self, call: Call, worker: str, reason: str) -> None:
        """Unless it kills whoever runs it."""
        self._killed[call.number] += 1
        if self._killed[call.number] < _FATAL:
            self._waiting.appendleft(call)
            return
        error = ClusterError(
            f"what was scheduled as number {call.number} was lost with {_FATAL} workers (the last: "
            f"{worker}, {reason}): does it take more memory than there is?"
        )
        self._values.pop(call.number)._settle(None, error)
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Keep an error for who asks next, and run nothing of what has not begun."""
        self._error = self._error or error
        self._drop(f"another function raised {type(error).__name__}: {error}")

    def _drop(self, why: str) -> None:
        """Run nothing of what has not begun. What was lost goes on: some servers may have it."""
        waiting, self._waiting = self._waiting, deque[Call]()
        for call in waiting:
            if self._killed[call.number] and self._broken is None:
                self._waiting.append(call)
            else:
                self._values.pop(call.number)._settle(None, UserError(f"not run, as {why}"))
