"""From the description of a cluster to an initialised JAX cluster; what its processes agree on.

Nothing here goes through the devices: values travel through the key-value store that JAX's
coordination service on process 0 offers, so that no agreement can get in the way of a collective.
With one process, all of it is trivial.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import jax

# JAX has no public name for its key-value store, for whether it has begun to use devices, and for
# what it finds out about a cluster. Only this module uses the private ones.
from jax._src import clusters, xla_bridge
from jax._src import distributed as jax_distributed

from spmdtrain import cluster, phases
from spmdtrain.cluster import ClusterSpec, Role
from spmdtrain.errors import ExitCode, UserError, for_users
from spmdtrain.rendezvous import Party, is_loopback, meet

T = TypeVar("T")

_HEARTBEAT = 20  # seconds after which JAX gives up a process that has died
_LEAVING = 10  # seconds that a process has to leave things in order once the job has failed
_SHUTDOWN = 30  # seconds that those who are done wait for the others
_COMPARED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_KEY = "spmdtrain"
_FAILURE = f"{_KEY}/failure"
# What JAX and its transports say where it is another process that has gone.
_STATUS = re.compile("[A-Z_]+: ")
_LOST = (
    *("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "socket closed"),
    *("coordination", "heartbeat", "unavailable:"),
)


@dataclass(frozen=True, kw_only=True)
class Explicit:
    """A cluster described by hand, where there is no TF_CONFIG."""

    coordinator: str | None = None
    """HOST:PORT of process 0, the same in every process."""
    processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which of them this one is, from 0."""


@dataclass
class _Job:
    """The processes that train together, and this one among them."""

    names: Sequence[str]
    rank: int
    client: Any
    count: int = 0
    """Agreements so far: they are numbered alike in all processes, as all make the same."""
    points: int = 0
    unread: list[str] = field(default_factory=list)
    """Keys of process 0 that others may still read."""
    ending: threading.Lock = field(default_factory=threading.Lock)
    failing: bool = False
    """Whether the main thread has met with a failure, and is about to end."""
    on_failure: Callable[[str], None] = lambda reason: None

    @property
    def name(self) -> str:
        return self.names[self.rank]


_job: _Job | None = None
_settled = False  # whether it has been decided that this process is alone


# -- joining ---------------------------------------------------------------------------------------


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def initialize(
    spec: ClusterSpec | None = None,
    *,
    detect: bool = False,
    explicit: Explicit | None = None,
    timeout: float = 300.0,
    tell: Callable[[str], None] = _to_stderr,
) -> None:
    """Join the job that TF_CONFIG describes (or `spec`), before anything uses a JAX device.

    Without TF_CONFIG this process is alone, unless `explicit` says otherwise, or `detect` asks JAX
    to find a TPU pod, Slurm, Open MPI or Kubernetes. Once joined or alone, nothing more happens.
    Raises `UserError` for a wrong description and `ClusterError`, which names the missing tasks,
    after `timeout` seconds.
    """
    global _job, _settled
    if _settled or _current() is not None:
        return
    phases.begin()
    spec = spec or cluster.from_environment()
    if spec.role in (Role.PS, Role.EVALUATE):
        raise UserError(
            f"this process is {spec.name}, which trains nothing: start it with "
            "python -m spmdtrain.run"
        )
    party = _party(spec, detect, explicit or Explicit())
    if party is None or len(party.names) == 1:
        _settled = True
        return
    if xla_bridge.backends_are_initialized():
        raise UserError(
            f"JAX has already started its devices, and this process is {party.names[party.rank]} "
            f"of {len(party.names)}: call spmdtrain.initialize() first, before anything is put on "
            "a device (a model made, say)"
        )
    meet(party, timeout, tell)
    local = is_loopback(party.host)
    jax.distributed.initialize(
        coordinator_address=party.coordinator,
        num_processes=len(party.names),
        process_id=party.rank,
        local_device_ids=party.local_device_ids,
        cluster_detection_method="deactivate",  # it has been described: nothing else may
        coordinator_bind_address=party.coordinator if local else None,
        initialization_timeout=max(10, int(timeout)),
        heartbeat_timeout_seconds=_HEARTBEAT,
        shutdown_timeout_seconds=_SHUTDOWN,
    )
    _begin(party.names)


@dataclass(frozen=True)
class _Party(Party):
    local_device_ids: Sequence[int] | None = None


def stay_alone() -> None:
    """Be part of no job, whatever the environment says: an evaluator, say."""
    global _settled
    phases.begin()
    _settled = True


def _party(spec: ClusterSpec, detect: bool, explicit: Explicit) -> _Party | None:
    """Whom to meet, from whichever of the descriptions there is; None for a process alone."""
    by_hand = [explicit.coordinator, explicit.processes, explicit.process_id]
    described = spec.role is not Role.LOCAL
    if any(x is not None for x in by_hand):
        if described or detect:
            other = "TF_CONFIG" if described else "--cluster auto"
            raise UserError(f"--coordinator, --processes, --process-id and {other}: give one")
        return _by_hand(explicit)
    if described:
        assert spec.coordinator is not None and spec.rank is not None
        return _Party(
            host=spec.coordinator.host,
            port=spec.coordinator.port,
            names=[str(task) for task in spec.processes],
            rank=spec.rank,
            about=_about(),
            addresses=[str(task.address) for task in spec.processes],
        )
    return _detected() if detect else None


def _by_hand(explicit: Explicit) -> _Party:
    for name in ("coordinator", "processes", "process_id"):
        if getattr(explicit, name) is None:
            option = f"--{name}".replace("_", "-")
            raise UserError(f"{option} is missing: it goes with the other two")
    address, size, rank = explicit.coordinator, explicit.processes, explicit.process_id
    assert address is not None and size is not None and rank is not None
    if size < 1:
        raise UserError(f"--processes is {size}: it must be above 0")
    if not 0 <= rank < size:
        raise UserError(f"--process-id is {rank}: with --processes {size} it is 0 to {size - 1}")
    found = cluster.Address.parse(address, "--coordinator")
    names = [f"process {number}" for number in range(size)]
    return _Party(host=found.host, port=found.port, names=names, rank=rank, about=_about())


def _detected() -> _Party:
    """The cluster that JAX finds by itself."""
    try:
        address, size, rank, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, 60
        )
    except Exception as error:
        raise UserError(f"--cluster auto: what was found is not usable: {error}") from error
    if address is None or size is None or rank is None:
        raise UserError(
            "--cluster auto: found no TPU pod, Slurm, Open MPI or Kubernetes job here; describe it "
            "by TF_CONFIG, or by --coordinator, --processes and --process-id"
        )
    host, _, port = address.rpartition(":")
    names = [f"process {number}" for number in range(size)]
    return _Party(
        host=host.strip("[]"),
        port=int(port),
        names=names,
        rank=rank,
        about=_about(),
        local_device_ids=devices,
    )


def _about() -> dict[str, str]:
    """The code that this process runs: Python's, the libraries' and our own."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    versions = {name: importlib.metadata.version(name) for name in _COMPARED}
    python = ".".join(map(str, sys.version_info[:3]))
    return versions | {"python": python, "the code of spmdtrain": digest.hexdigest()[:12]}


def _begin(names: Sequence[str]) -> _Job:
    global _job
    state = jax_distributed.global_state
    _job = _Job(names, state.process_id, state.client)
    sys.excepthook = _end_on_exception
    threading.Thread(target=_watch, args=(_job,), name="watch-the-others", daemon=True).start()
    return _job


def _current() -> _Job | None:
    """The job, also where the user's own script has called `jax.distributed.initialize`."""
    if _job is None and jax.distributed.is_initialized():
        size = jax_distributed.global_state.num_processes
        if size > 1:
            return _begin([f"process {number}" for number in range(size)])
    return _job


# -- who -------------------------------------------------------------------------------------------


def process_count() -> int:
    """How many processes train together; does not start JAX's devices."""
    job = _current()
    return 1 if job is None else len(job.names)


def rank() -> int:
    """Which of the processes this one is, from 0."""
    job = _current()
    return 0 if job is None else job.rank


def is_chief() -> bool:
    """Whether this is process 0: it alone writes logs, metrics and status."""
    return rank() == 0


def task_names() -> Sequence[str]:
    """What the processes are called, by rank."""
    job = _current()
    return ["this process"] if job is None else job.names


# -- agreeing --------------------------------------------------------------------------------------


def broadcast(value: T) -> T:
    """Process 0's value, of what JSON holds; all processes call it, in the same order."""
    job = _current()
    if job is None:
        return value
    job.count += 1
    key = f"{_KEY}/{job.count}"
    if job.rank == 0:
        job.client.key_value_set(key, json.dumps(value))
        job.unread.append(key)
        found: T = value
    else:
        found = json.loads(_get(job, key))
    if job.count % 256 == 0:
        collect(None)  # so that what nobody reads any more is let go of
    return found


def collect(value: T) -> list[T]:
    """The values of all processes by rank, in process 0; elsewhere nothing. As `broadcast`."""
    job = _current()
    if job is None:
        return [value]
    job.count += 1
    key = f"{_KEY}/{job.count}"
    if job.rank != 0:
        job.client.key_value_set(f"{key}/{job.rank}", json.dumps(value))
        return []
    found = [value]
    for rank in range(1, len(job.names)):
        found.append(json.loads(_get(job, f"{key}/{rank}")))
        job.client.key_value_delete(f"{key}/{rank}")
    # All have come here, so all have read what was broadcast before.
    for old in job.unread:
        job.client.key_value_delete(old)
    job.unread.clear()
    return found


def gather(value: T) -> list[T]:
    """The values of all processes by rank, in all of them. As `broadcast`."""
    return broadcast(collect(value))


def barrier() -> None:
    """Return when all processes are here."""
    gather(None)


def jointly(call: Callable[[], T], expected: type[Exception]) -> T:
    """What `call()` returns; where it raises `expected` in any process, that is raised in all."""
    fault, value = None, None
    try:
        value = call()
    except expected as error:
        if process_count() == 1:
            raise
        fault = str(error)
    if process_count() > 1:
        for found in gather(fault):
            if found is not None:
                raise expected(found)
    return value  # type: ignore[return-value]


def summed(parts: Mapping[str, int]) -> dict[str, int]:
    """Sums by name over all processes. As `broadcast`."""
    if process_count() == 1:
        return dict(parts)
    total: dict[str, int] = {}
    for found in collect(dict(parts)):
        for name, part in found.items():
            total[name] = total.get(name, 0) + part
    return broadcast(total)


def check_same(what: Mapping[str, Any]) -> None:
    """Raise `UserError`, which names the first difference, unless it is the same in all processes.

    `what` is nested dictionaries of what JSON holds.
    """
    if process_count() == 1:
        return
    mine = _flat(what)
    text = json.dumps(mine, sort_keys=True, default=str)
    digests = gather(hashlib.sha256(text.encode()).hexdigest())
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    first, other = (flats[rank] for flats in [gather(mine)] for rank in (0, odd))
    names = task_names()
    for key in [*first, *other]:
        if first.get(key) != other.get(key):
            raise UserError(
                f"{names[odd]} and {names[0]} differ: {key} is {other.get(key)} in {names[odd]} "
                f"and {first.get(key)} in {names[0]}; all processes of a job are started alike"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = json.loads(json.dumps(value, default=str))
    return found


def publish(key: str, value: Any) -> None:
    """Give a value to whoever asks for it by name: from any thread, in no order."""
    job = _current()
    assert job is not None
    job.client.key_value_set(f"{_KEY}/named/{key}", json.dumps(value))


def take(key: str) -> Any:
    """A published value, when it is there; it can be taken once."""
    job = _current()
    assert job is not None
    value = json.loads(_get(job, f"{_KEY}/named/{key}"))
    job.client.key_value_delete(f"{_KEY}/named/{key}")
    return value


def _get(job: _Job, key: str) -> str:
    """The value of a key, when it is there; whoever fails to set it ends all (see `_watch`)."""
    while True:
        try:  # a few seconds each, for Python to look after signals in between
            return str(job.client.blocking_key_value_get(key, 5_000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


# -- being stopped ---------------------------------------------------------------------------------


def preempted() -> bool:
    """Whether to stop now, as some process was sent SIGTERM: the same answer in all of them.

    All call it at the same points, each step say: JAX agrees on one of these points, the first
    that none of them has passed yet.
    """
    job = _current()
    if job is None:
        return False
    job.points += 1
    manager = jax_distributed.global_state.preemption_sync_manager
    if manager is None:
        return False
    return bool(manager.reached_sync_point(job.points))


# -- failing ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_failure(callback: Callable[[str], None]) -> Iterator[None]:
    """While entered, `callback` is given the reason when another process's failure ends this one.

    It comes from a thread of its own, as the main one may be waiting for the process that failed.
    """
    job = _current()
    if job is not None:
        job.on_failure = callback
    try:
        yield
    finally:
        if job is not None:
            job.on_failure = lambda reason: None


def reason(error: BaseException) -> str:
    """Why this run fails, in one line: this error, or the failure elsewhere that it comes from."""
    own = " ".join(f"{type(error).__name__}: {error}".split())
    job = _current()
    if job is None:
        return own
    job.failing = True
    code, _ = for_users(error) or (ExitCode.FAILED, "")
    first = _announce(job, code, own, lost=_is_lost(error))
    return own if first["rank"] == job.rank else _of_another(first)


def fail(code: int, line: str, error: BaseException, show: Callable[[], None]) -> int:
    """Tell of a failure by `show()`. In a job all processes end with it, this one at once.

    `line` is what is told in one line. Returns `code`, where this process is alone.
    """
    job = _current()
    if job is None:
        show()
        phases.tell_reason(code, line)
        return code
    lost = _is_lost(error)
    first = _announce(job, code, line, lost=lost)
    mine = first["rank"] == job.rank
    if lost and mine:
        _to_stderr(f"{job.name} ends: {first['reason']}")
    elif not lost and (mine or not _same(first["reason"], line)):
        show()
    _end(job, first)


def fail_in_words(code: int, line: str, error: Exception) -> int:
    """As `fail`, for an error that is meant for users."""
    return fail(code, line, error, lambda: _to_stderr(line))


def _end_on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """For a process of a job: a plain exception would leave the others waiting for minutes."""
    code = ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.FAILED
    line = " ".join(f"{kind.__name__}: {error}".split())
    fail(code, line, error, lambda: traceback.print_exception(kind, error, trace))


def _is_lost(error: BaseException) -> bool:
    """Whether an error only says that another process is no longer there."""
    cause: BaseException | None = error
    while cause is not None:
        # Of ValueErrors, only those that JAX makes of what its transports say.
        text, from_jax = str(cause), isinstance(cause, (jax.errors.JaxRuntimeError, ValueError))
        if from_jax and _STATUS.match(text):
            return any(words in text.lower() for words in _LOST)
        cause = cause.__cause__ or cause.__context__
    return False


def _same(one: str, other: str) -> bool:
    return one.rpartition(": ")[2] == other.rpartition(": ")[2]


def _announce(job: _Job, code: int, line: str, *, lost: bool) -> dict[str, Any]:
    """The failure that came first, of which all processes are told: this one, or another's."""
    if lost:  # whoever knows why may need a moment to say so
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            if (found := _announced(job)) is not None:
                return found
            time.sleep(0.1)
        line = f"lost the connection to another process of the job ({line[:200]})"
    own = {"rank": job.rank, "name": job.name, "code": int(code), "reason": line, "lost": lost}
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # there already, or nobody to tell
        job.client.key_value_set(_FAILURE, json.dumps(own))
    return _announced(job) or own


def _announced(job: _Job) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(job.client.key_value_try_get(_FAILURE))
    except jax.errors.JaxRuntimeError:
        return None
    return found


def _of_another(failure: Mapping[str, Any]) -> str:
    return f"{failure['name']} {'' if failure['lost'] else 'failed: '}{failure['reason']}"


def _watch(job: _Job) -> None:
    """End this process soon after another one has failed, whatever it is waiting for."""
    while _job is job:
        if (failure := _announced(job)) is not None and failure["rank"] != job.rank:
            # The main thread may be about to find out by itself, and to leave things in order.
            time.sleep(1.5)
            if job.failing:
                time.sleep(_LEAVING)
            else:
                job.on_failure(_of_another(failure))
            _end(job, failure)
        time.sleep(0.3)


def _end(job: _Job, failure: Mapping[str, Any]) -> NoReturn:
    """End this process at once, with the code of the failure that came first."""
    if not job.ending.acquire(blocking=False):
        time.sleep(60)  # another thread is at it
    mine, why = failure["rank"] == job.rank, str(failure["reason"])
    if not mine:
        why = _of_another(failure)
        _to_stderr(f"{job.name} ends, as {why}")
    phases.tell_reason(failure["code"], why, own=mine and not failure["lost"])
    with contextlib.suppress(Exception):
        job.client.key_value_set(f"{_KEY}/gone/{job.rank}", "")
        if job.rank == 0:  # the store ends with it, and the others are to read it first
            until = time.monotonic() + 5
            gone = 0
            while gone < len(job.names) and time.monotonic() < until:
                gone = len(job.client.key_value_dir_get(f"{_KEY}/gone/"))
                time.sleep(0.05)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # Not sys.exit: JAX would then wait for processes that come no more.
    os._exit(failure["code"])


def leave() -> None:
    """The end of a run that all processes have come to."""
    global _job
    if _current() is not None:
        with phases.within(phases.Phase.END):
            _job = None
            jax.distributed.shutdown()
