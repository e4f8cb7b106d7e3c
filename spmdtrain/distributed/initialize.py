"""Initialization of JAX's distributed system from the description of a cluster."""

import dataclasses
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

# JAX has no public name for cluster detection, nor for whether its backends are initialized.
from jax._src import clusters, hardware_utils, xla_bridge

from spmdtrain.cluster import job_token
from spmdtrain.cluster.rendezvous import Party, is_loopback, join_rendezvous
from spmdtrain.cluster.spec import Address, ClusterSpec, Role, from_environment
from spmdtrain.distributed import failures, numeric_settings, process_group, progress
from spmdtrain.distributed.progress import CONTEXT
from spmdtrain.errors import UserError, install_hook, option
from spmdtrain.strategies import ASYNCHRONOUS
from spmdtrain.strategies import strategy as strategy_of

_HEARTBEAT = 20  # seconds after which JAX considers a silent process dead


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """An explicit description of a cluster, instead of TF_CONFIG."""

    coordinator: str | None = None
    """HOST:PORT of process 0, the same in every process."""
    processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Rank of this process, from 0."""


def initialize(
    spec: ClusterSpec | None = None,
    *,
    strategy: str | None = None,
    auto_detect: bool = False,
    explicit: ClusterOptions | None = None,
    timeout: float = 300.0,
    hang_timeout: float | None = None,
    warn: Callable[[str], None] = failures.to_stderr,
) -> None:
    """Joins the job that TF_CONFIG (or `spec`) describes. Call it before using a JAX device.

    Without a description this process is alone. Further calls do nothing.

    An evaluator task joins no job. If the cluster has `ps` tasks, the strategy decides whether the
    processes join: without `strategy` the decision is left to the `Trainer`, `Loop` or
    `Coordinator`, which must be created before anything uses a JAX device.

    The processes authenticate each other by the token in SPMDTRAIN_JOB_TOKEN, or in the file that
    SPMDTRAIN_JOB_TOKEN_FILE names, if one of them is set.

    From the first call on, the process ends with the exit codes of the commands after an uncaught
    error, unless SPMDTRAIN_EXCEPTHOOK=off.

    Args:
      spec: The cluster; default: the one that TF_CONFIG describes.
      strategy: Name of the strategy of the run. It is needed only in a cluster with `ps` tasks, and
        only by scripts that use JAX before they create a `Trainer` or `Loop`.
      auto_detect: Whether JAX may detect a TPU pod, Slurm, Open MPI or Kubernetes if there is no
        TF_CONFIG.
      explicit: The cluster, instead of TF_CONFIG.
      timeout: Seconds within which all processes must join.
      hang_timeout: Seconds without progress in any process after which the job fails with the name
        of the task that blocks the others; 0 disables this. Default: five times the longest pause
        between two steps so far, at least 60; 30 minutes while a process compiles, saves or runs a
        callback, and during the first steps. Under a launcher, which watches the processes itself,
        and for a process that is alone, the default is 0.
      warn: Called with lines for the user: the missing tasks, and warnings about the token.

    Raises:
      UserError: If the description or the token is not valid, or this is a `ps` task of a
        synchronous strategy.
      ClusterError: If tasks are missing after `timeout` seconds; names them.
    """
    install_hook()
    if CONTEXT.initialized:
        return
    if CONTEXT.deferred is not None:
        if strategy is None:
            return
        call, CONTEXT.deferred = CONTEXT.deferred, None
        call(strategy=strategy)
        return
    _skip_absent_tpus()
    progress.begin()
    given = hang_timeout
    if hang_timeout is None and progress.launched():
        hang_timeout = 0.0
    for name, seconds in (("timeout", timeout), ("hang_timeout", hang_timeout)):
        if seconds is not None and not seconds >= 0:
            raise UserError(f"{name} is {seconds}: it must be 0 or more seconds")
    is_asynchronous = None if strategy is None else strategy_of(strategy).is_asynchronous
    if (job := process_group.current()) is not None:  # the script initialized JAX itself
        _start_watching(job, hang_timeout)
        process_group.agree("", process_properties())
        return
    spec = spec or from_environment()
    if spec.role is Role.EVALUATE or is_asynchronous:
        # An evaluator waits for checkpoints, and an executor of servers for its workers.
        CONTEXT.initialized = True
        if given:
            failures.watch_alone(given)
        return
    if spec.has_ps and is_asynchronous is None:
        CONTEXT.deferred = functools.partial(
            initialize,
            spec,
            auto_detect=auto_detect,
            explicit=explicit,
            timeout=timeout,
            hang_timeout=given,
            warn=warn,
        )
        return
    if spec.role is Role.PS:
        raise UserError(
            f"according to TF_CONFIG this process is {spec.name}, a parameter server, which "
            f"strategy {strategy} does not use: start only the chief, the workers and the "
            f"evaluator, or choose strategy {ASYNCHRONOUS}"
        )
    party = find_party(spec, auto_detect, explicit or ClusterOptions())
    if party is None or len(party.names) == 1:
        CONTEXT.initialized = True
        if given:
            failures.watch_alone(given)
        return
    if xla_bridge.backends_are_initialized():
        raise UserError(
            "JAX's backends are already initialized, but this process is "
            f"{party.names[party.rank]} of {len(party.names)}: call {_first_call(spec)} first, "
            "before anything uses a device, such as the creation of a model"
        )
    local = is_loopback(party.host)
    exposed = None if local or party.rank else party.coordinator
    party = dataclasses.replace(party, token=job_token.read(exposed=exposed, warn=warn))
    join_rendezvous(party, timeout, warn)
    jax.distributed.initialize(
        coordinator_address=party.coordinator,
        num_processes=len(party.names),
        process_id=party.rank,
        local_device_ids=party.local_device_ids,
        cluster_detection_method="deactivate",  # because the cluster is already described
        coordinator_bind_address=party.coordinator if local else None,
        initialization_timeout=max(10, int(timeout)),
        heartbeat_timeout_seconds=_HEARTBEAT,
        shutdown_timeout_seconds=failures.SHUTDOWN,
    )
    _start_watching(process_group.enter(party.names), hang_timeout)


def _keep_gloo_from_preempting() -> None:
    """Gives the threads of JAX's CPU backend a policy by which a wake-up preempts no thread.

    gloo's receiving thread polls without a pause while another thread sends and holds the lock of
    the connection. If it has preempted that thread, it polls for a whole time slice: where both
    share a core, a collective takes 5 to 10 ms instead of 0.1 ms.
    """
    if not hasattr(os, "SCHED_BATCH"):  # not on Linux
        return
    backend = xla_bridge._backend_factories["cpu"]

    def create() -> Any:
        is_set = _set_policy(os.SCHED_OTHER, os.SCHED_BATCH)  # the new threads inherit it
        try:
            return backend.factory()
        finally:
            if is_set:
                _set_policy(os.SCHED_BATCH, os.SCHED_OTHER)

    xla_bridge._backend_factories["cpu"] = dataclasses.replace(backend, factory=create)


def _set_policy(before: int, after: int) -> bool:
    """Replaces a scheduling policy of this thread; returns False if that is not possible."""
    try:
        if os.sched_getscheduler(0) != before:
            return False
        os.sched_setscheduler(0, after, os.sched_getparam(0))
    except OSError:  # a sandbox may forbid it
        return False
    return True


def _first_call(spec: ClusterSpec) -> str:
    """Returns the call that joins the job at once."""
    return f"spmdtrain.initialize({'strategy=...' if spec.has_ps else ''})"


def _start_watching(job: process_group.Job, hang_timeout: float | None) -> None:
    CONTEXT.initialized = True
    if not jax.config.jax_enable_preemption_service:  # type: ignore[attr-defined]
        raise UserError(
            "jax_enable_preemption_service is off, but several processes need it to stop and save "
            "at the same step: turn it on"
        )
    _keep_gloo_from_preempting()
    progress.begin(always=True)
    failures.start_watching(job, hang_timeout)


@dataclass(frozen=True)
class _Party(Party):
    local_device_ids: Sequence[int] | None = None


def set_single_process() -> None:
    """Makes this process join no job, whatever TF_CONFIG says. It is for evaluators."""
    _skip_absent_tpus()
    progress.begin()
    CONTEXT.initialized = True


def _skip_absent_tpus() -> None:
    """Keeps JAX from initializing TPUs on a host without TPU chips.

    libtpu is also installed for planning, and then logs long messages about missing TPUs.
    """
    requested = jax.config.jax_platforms or "JAX_FORCE_TPU_INIT" in os.environ  # type: ignore[attr-defined]
    if requested or xla_bridge.backends_are_initialized():
        return
    chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    factories = xla_bridge._backend_factories
    if not chips and "tpu" in factories:
        # It stays a known platform, because Pallas, imported later, registers rules for it.
        factories["tpu"] = dataclasses.replace(
            factories["tpu"], factory=lambda: None, fail_quietly=True
        )


def find_party(spec: ClusterSpec, detect: bool, explicit: ClusterOptions) -> _Party | None:
    """Returns the processes to join, from any of the descriptions; None for a single process."""
    options = [explicit.coordinator, explicit.processes, explicit.process_id]
    described = spec.role is not Role.LOCAL
    if any(x is not None for x in options):
        if described or detect:
            other = "TF_CONFIG" if described else _detection()
            raise UserError(f"{_all_three()} exclude {other}: give one of the two")
        return _explicit_party(explicit)
    if described:
        assert spec.coordinator is not None and spec.rank is not None
        return _Party(
            host=spec.coordinator.host,
            port=spec.coordinator.port,
            names=[str(task) for task in spec.processes],
            rank=spec.rank,
            about=process_properties(),
            addresses=[str(task.address) for task in spec.processes],
        )
    return _detected_party() if detect else None


def _detection() -> str:
    found = option("cluster", "auto")
    return found if found.startswith("--") else "auto_detect=True"


def _all_three() -> str:
    return f"{option('coordinator')}, {option('processes')} and {option('process_id')}"


def _explicit_party(explicit: ClusterOptions) -> _Party:
    for name in ("coordinator", "processes", "process_id"):
        if getattr(explicit, name) is None:
            raise UserError(f"{option(name)} is missing: {_all_three()} must be given together")
    address, size, rank = explicit.coordinator, explicit.processes, explicit.process_id
    assert address is not None and size is not None and rank is not None
    if size < 1:
        raise UserError(f"{option('processes')} is {size}: it must be above 0")
    if not 0 <= rank < size:
        raise UserError(
            f"{option('process_id')} is {rank}: with {option('processes', size)} it is 0 to "
            f"{size - 1}"
        )
    parsed = Address.parse(address, option("coordinator"))
    names = [f"process {number}" for number in range(size)]
    return _Party(
        host=parsed.host, port=parsed.port, names=names, rank=rank, about=process_properties()
    )


def _detected_party() -> _Party:
    """Returns the cluster that JAX detects."""
    try:
        address, size, rank, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, 60
        )
    except Exception as error:
        raise UserError(f"{_detection()}: detecting the cluster failed: {error}") from error
    if address is None or size is None or rank is None:
        raise UserError(
            f"{_detection()}: found no TPU pod, Slurm, Open MPI or Kubernetes job; describe "
            f"the cluster by TF_CONFIG, or by {_all_three()}"
        )
    host, _, port = address.rpartition(":")
    names = [f"process {number}" for number in range(size)]
    return _Party(
        host=host.strip("[]"),
        port=int(port),
        names=names,
        rank=rank,
        about=process_properties(),
        local_device_ids=devices,
    )


def process_properties() -> dict[str, str]:
    """Returns the versions, settings and source digests that must be equal in all processes.

    The source files are the files of this package and, if Python runs a script, the script. The
    command itself compares its experiment file.
    """
    python = ".".join(map(str, sys.version_info[:3]))
    package = Path(__file__).parents[1]
    files = {
        f"{package.name}/{path.relative_to(package).as_posix()}": path
        for path in sorted(package.rglob("*.py"))
    }
    script = getattr(sys.modules["__main__"], "__file__", None)
    # Installed commands have no suffix; their first line names the Python of their host.
    if script and (path := Path(script).resolve()).suffix == ".py" and path.is_file():
        files.setdefault(f"the script {path.name}", path)
    digests = {name: hashlib.sha256(path.read_bytes()) for name, path in files.items()}
    return (
        numeric_settings.versions()  # first, because other versions have other settings
        | {"python": python}
        | numeric_settings.settings()
        | {name: digest.hexdigest()[:12] for name, digest in digests.items()}
    )


def leave() -> None:
    """Leaves the job at the end of a run. Waits until all processes have called it."""
    if process_group.current() is not None:
        with progress.phase(progress.Phase.END):
            process_group.barrier()  # first, because a failure of a process is still noticed here
            failures.stop_watching()
            process_group.clear_job()
            jax.distributed.shutdown()
