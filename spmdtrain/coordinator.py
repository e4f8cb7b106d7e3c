"""Functions that workers run, each at its own pace, around parameters that servers have.

For loops of one's own, as `tf.distribute`'s `ClusterCoordinator` has them; the `Trainer`'s are made
by strategy parameter_server.
"""

import contextlib
import dataclasses
import inspect
import itertools
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain import cluster, ray_crew
from spmdtrain.config import RunConfig
from spmdtrain.crew import Came, Done, Event, Failed, Lost
from spmdtrain.division import Computed, Division
from spmdtrain.errors import ClusterError, NonFiniteError, UserError
from spmdtrain.parameter_server import take_part
from spmdtrain.partitioners import MinSize, Partitioner
from spmdtrain.placement import prepare
from spmdtrain.server import Landed, Pulled
from spmdtrain.sharding import named_leaves
from spmdtrain.signals import StopSignals
from spmdtrain.state import TrainState
from spmdtrain.terminal import Terminal
from spmdtrain.updates import Update, clipped

PyTree = Any
_is_used = False  # whether this process has had one
_LOOK = 0.05  # seconds between two looks at what workers do, and at whether a signal has come
_FATAL = 4  # workers that are lost with a call, and it is to blame
_MOST = 256  # calls that wait for a worker, before schedule() waits, too


@dataclasses.dataclass(frozen=True)
class _Sent:
    """A function that is sent to each worker once: there it keeps what it has compiled."""

    number: int
    reference: Sequence[Any]
    """Of Ray's, in a list, so that Ray does not put the function itself in its place."""


@dataclasses.dataclass(frozen=True)
class PerWorker:
    """What stands for a thing that each worker has one of; see `Coordinator.per_worker`."""

    make: _Sent


@dataclasses.dataclass(frozen=True)
class _Call:
    """A function to be run, and with what."""

    number: int
    function: _Sent
    arguments: bytes
    """args and kwargs, pickled: as they were when it was scheduled."""
    floor: int = 0
    """Those of lower numbers have all been run."""


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
    SIGTERM or Ctrl-C they raise `Preempted`. `init_timeout`: seconds in which the chief and the
    servers have to come. Raises `UserError` where TF_CONFIG has no such tasks.
    """

    def __init__(self, *, init_timeout: float = 300.0, terminal: Terminal | None = None) -> None:
        self._timeout, self._terminal = init_timeout, terminal or Terminal()
        self._stack = contextlib.ExitStack()
        self._changed = threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._out: dict[str, _Call] = {}  # by worker
        self._values: dict[int, Value] = {}  # of what is waiting or out
        self._error: Exception | None = None
        self._broken: Exception | None = None  # what has ended the thread
        self._over = True  # until it has begun
        self._next = 0  # the number of the next call
        self._functions: dict[Hashable, tuple[Callable[..., Any], _Sent]] = {}
        self._sent = itertools.count()
        self._shares = itertools.count()
        self._signals = StopSignals()
        self._lost: set[str] = set()
        self._killed: Counter[int] = Counter()

    def __enter__(self) -> "Coordinator":
        global _is_used
        take_part(self._timeout)
        if _is_used:
            raise UserError(
                "a script has one Coordinator: the workers and servers have ended with the first"
            )
        _is_used = True
        prepare(RunConfig(strategy="parameter_server"))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._signals)
            self._job = stack.enter_context(
                ray_crew.begin(cluster.from_environment(), self._timeout)
            )
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
            key = function if isinstance(function, Hashable) else id(function)
            if key not in self._functions:
                self._functions[key] = function, self._send(function, "schedule")
            sent = self._functions[key][1]
            call = _Call(self._next, sent, arguments)
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
            if self._is_done:
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
        _check_params(params)
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
        division = Division.of(
            jax.eval_shape(lambda: state), update, servers, partitioner or MinSize(servers)
        )
        held = self._job.serve(division, state, self._next)
        return Shared(next(self._shares), division, held)

    # -- the work -------------------------------------------------------------------------------

    def _send(self, function: Callable[..., Any], of: str) -> _Sent:
        if not callable(function):
            raise UserError(f"{of}() is given a {type(function).__name__}: it takes a function")
        try:
            reference = self._job.ray.put(function)
        except TypeError as error:
            name = getattr(function, "__qualname__", type(function).__name__)
            why = str(error.__cause__ or error).strip().splitlines()[0]
            raise UserError(f"{name} cannot be sent to workers: {why}") from error
        return _Sent(next(self._sent), [reference])

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
        self._signals.stop_if_received()

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

    def _take(self, event: Event) -> None:
        call = self._out.pop(event.worker, None)
        match event:
            case Done(_, result) if call is not None:
                self._values.pop(call.number)._settle(result)
            case Failed(_, error):
                if call is not None:
                    self._values.pop(call.number)._settle(None, error)
                self._fail(error)
            case Lost(worker, reason):
                again = ""
                if call is not None:
                    self._do_again(call, worker, reason)
                    again = "; what it was doing is done again"
                self._lost.add(worker)
                self._terminal.line(f"{worker} is lost ({reason}){again}")
            case Came(worker) if worker in self._lost:
                self._lost.remove(worker)
                self._terminal.line(f"{worker} is back")

    def _do_again(self, call: _Call, worker: str, reason: str) -> None:
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
        for call in self._waiting:
            why = UserError(f"not run, as another function raised {type(error).__name__}: {error}")
            self._values.pop(call.number)._settle(None, why)
        self._waiting.clear()


@dataclasses.dataclass(frozen=True)
class Shared:
    """Parameters that servers have; see `Coordinator.share`."""

    number: int
    division: Division
    servers: Sequence[Any]

    def pull(self) -> PyTree:
        """The parameters as they are now, in NumPy arrays."""
        parts = self._answers("pull")
        if (call := _current) is not None:
            call.pulled[self.number] = parts
        return self.division.pulled(parts)[0]

    def push(self, gradients: PyTree, loss: Any) -> int:
        """Have the servers make an update; how many others came since the pull.

        In a scheduled function, once, after a pull. However often that is run again, its update is
        made once. `loss` is for optimizers that look at it. Raises `UserError`, and
        `NonFiniteError` where the parameters are no numbers any more.
        """
        import ray

        call = _current
        if call is None:
            raise UserError("push() is for a function that a worker runs: schedule one")
        if (parts := call.pulled.get(self.number)) is None:
            raise UserError("push() comes after a pull(), and once in a function")
        del call.pulled[self.number]
        params, _ = self.division.pulled(parts)
        _check_like(gradients, params)
        if np.shape(loss):
            raise UserError(f"push() is given a loss of shape {np.shape(loss)}: give their mean")
        whole = clipped(self.division.on_worker, gradients, params, loss)
        computed = Computed(jax.tree.map(np.asarray, whole), {}, {"loss": float(loss)})
        pushes = [
            dataclasses.replace(push, floor=call.floor)
            for push in self.division.pushes(call.number, computed, parts)
        ]
        landed: list[Landed] = ray_crew.answers(
            ray,
            [server.push.remote(push) for server, push in zip(self.servers, pushes, strict=True)],
        )
        if not all(all(one.finite) for one in landed):
            raise NonFiniteError(f"the parameters are not finite after a push of loss {loss}")
        return max(one.staleness for one in landed)

    def state(self) -> tuple[PyTree, PyTree]:
        """Parameters and optimizer state as they are now, whole: to be saved, say.

        After `join`, as each server has its part at a time of its own.
        """
        held = [held for held, _ in self._answers("held")]
        whole = self.division.state(held, 0, None)
        return whole.params, whole.opt_state

    def _answers(self, what: str) -> list[Any]:
        import ray

        return ray_crew.answers(ray, [getattr(server, what).remote() for server in self.servers])


def _check_params(params: PyTree) -> None:
    """Raise `UserError` where they are not arrays of floating-point numbers."""
    for name, leaf in (leaves := named_leaves(params)).items():
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            what = getattr(leaf, "dtype", type(leaf).__name__)
            raise UserError(f"share() is given {name or 'params'}, {what}: it takes float arrays")
    if not leaves:
        raise UserError("share() is given no parameters")


def _check_like(gradients: PyTree, params: PyTree) -> None:
    """Raise `UserError` where gradients are not of the parameters' names and shapes."""
    found, expected = (
        {name: np.shape(leaf) for name, leaf in named_leaves(tree).items()}
        for tree in (gradients, params)
    )
    for name in [*expected, *found]:
        if (given := found.get(name)) != (shape := expected.get(name)):
            what = name or "gradients"
            raise UserError(f"push() is given {what} of shape {given}: the parameter's is {shape}")


@dataclasses.dataclass
class _Running:
    """The call that this process is running."""

    number: int
    floor: int
    pulled: dict[int, list[Pulled]] = dataclasses.field(default_factory=dict)


_current: _Running | None = None


class Runner:
    """A worker's side: runs what it is given, one call after the other."""

    def __init__(self) -> None:
        prepare(RunConfig(strategy="parameter_server"))
        self._functions: dict[int, Callable[..., Any]] = {}
        self._own: dict[int, Any] = {}

    def __call__(self, call: _Call) -> Any:
        """What the function returns, jax.Arrays as NumPy arrays."""
        global _current
        function, arguments = self._function(call.function), pickle.loads(call.arguments)
        args, kwargs = jax.tree.map(
            self._own_of, arguments, is_leaf=lambda x: isinstance(x, PerWorker)
        )
        _current = _Running(call.number, call.floor)
        try:
            found = function(*args, **kwargs)
        except SystemExit as stop:
            raise RuntimeError(f"the function has called sys.exit({stop.code!r})") from stop
        finally:
            _current = None
        if inspect.isgenerator(found):
            raise UserError("the function returns a generator, which cannot be sent: a list can")
        return jax.device_get(found)

    def _function(self, sent: _Sent) -> Callable[..., Any]:
        import ray

        if sent.number not in self._functions:
            self._functions[sent.number] = ray.get(sent.reference[0])
        return self._functions[sent.number]

    def _own_of(self, x: Any) -> Any:
        if not isinstance(x, PerWorker):
            return x
        if x.make.number not in self._own:
            self._own[x.make.number] = self._function(x.make)()
        return self._own[x.make.number]
