"""From the description of a cluster to an initialised JAX cluster."""

import dataclasses
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

# JAX has no public name for what it finds out about a cluster, nor for whether it has begun to use
# devices.
from jax._src import clusters, hardware_utils, xla_bridge

from spmdtrain.cluster import job_token
from spmdtrain.cluster.rendezvous import Party, is_loopback, join_rendezvous
from spmdtrain.cluster.spec import ClusterSpec, Role, from_environment
from spmdtrain.cluster.tf_config import Address
from spmdtrain.distributed import failures, numeric_settings, process_group, progress
from spmdtrain.errors import UserError
from spmdtrain.strategies import strategy as strategy_of

_HEARTBEAT = 20  # seconds after which JAX gives up a process that has died
_SHUTDOWN = 300  # seconds that those who are done wait for the others
HANG_TIMEOUT = 1800.0  # seconds


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """A cluster described by hand, where there is no TF_CONFIG."""

    coordinator: str | None = None
    """HOST:PORT of process 0, the same in every process."""
    processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which of them this one is, from 0."""


_settled = False  # whether it has been decided whom this process is with
_deferred: Callable[..., None] | None = None  # `initialize` as called before the strategy was known


def initialize(
    spec: ClusterSpec | None = None,
    *,
    strategy: str | None = None,
    auto_detect: bool = False,
    explicit: ClusterOptions | None = None,
    timeout: float = 300.0,
    hang_timeout: float | None = None,
    tell: Callable[[str], None] = failures.to_stderr,
) -> None:
    """Joins the job that TF_CONFIG describes (or `spec`), before anything uses a JAX device.

    Without TF_CONFIG this process is alone, unless `explicit` says otherwise, or `detect` asks JAX
    to find a TPU pod, Slurm, Open MPI or Kubernetes. Once joined or alone, nothing more happens.

    An evaluator task joins no job. If the cluster has `ps` tasks, the strategy decides whether the
    processes join: without `strategy` this is left to the `Trainer`, `Loop` or `Coordinator`, which
    has to be made before anything uses a JAX device.

    The processes authenticate each other by the token of SPMDTRAIN_JOB_TOKEN or the file of
    SPMDTRAIN_JOB_TOKEN_FILE, if there is one.

    Where no process has moved for `hang_timeout` seconds (30 minutes; never under a launcher, which
    watches by itself), the one that holds the others is named, and the job ends.

    Args:
      spec: The cluster, if it is not that of TF_CONFIG.
      strategy: Name of the strategy of the run; needed only in a cluster with `ps` tasks, and only
        by scripts that use JAX before they make a `Trainer` or `Loop`.
      auto_detect: Whether JAX may detect the cluster.
      explicit: The cluster, described by hand.
      timeout: Seconds in which all processes have to come.
      hang_timeout: Seconds without progress after which the job ends; 0 is never.
      tell: Receives the lines that name the missing tasks.

    Raises:
      UserError: If the description or the token is wrong, or this is a `ps` task of a synchronous
        strategy.
      ClusterError: If tasks are missing after `timeout` seconds; names them.
    """
    global _settled, _deferred
    if _settled:
        return
    if _deferred is not None:
        if strategy is None:
            return
        call, _deferred = _deferred, None
        call(strategy=strategy)
        return
    _leave_out_tpus()
    progress.begin()
    given = hang_timeout
    if hang_timeout is None:
        hang_timeout = 0.0 if progress.launched() else HANG_TIMEOUT
    for name, seconds in (("timeout", timeout), ("hang_timeout", hang_timeout)):
        if not seconds >= 0:
            raise UserError(f"{name} is {seconds}: it must be 0 or more seconds")
    by_servers = None if strategy is None else strategy_of(strategy).by_servers
    if (job := process_group.current()) is not None:  # by the script itself
        _begin(job, hang_timeout)
        process_group.check_same(_about())
        return
    spec = spec or from_environment()
    if spec.role is Role.EVALUATE or by_servers:
        _settled = True
        return
    if spec.has_ps and by_servers is None:
        _deferred = functools.partial(
            initialize,
            spec,
            auto_detect=auto_detect,
            explicit=explicit,
            timeout=timeout,
            hang_timeout=given,
            tell=tell,
        )
        return
    if spec.role is Role.PS:
        raise UserError(
            f"by TF_CONFIG this process is {spec.name}, a parameter server, which strategy "
            f"{strategy} does not use: start only the chief, the workers and the evaluator, or "
            "choose strategy parameter_server"
        )
    party = _party(spec, auto_detect, explicit or ClusterOptions())
    if party is None or len(party.names) == 1:
        _settled = True
        return
    if xla_bridge.backends_are_initialized():
        raise UserError(
            f"JAX has already started its devices, and this process is {party.names[party.rank]} "
            f"of {len(party.names)}: call {_first_call(spec)} first, before anything is put on "
            "a device (a model made, say)"
        )
    local = is_loopback(party.host)
    exposed = None if local or party.rank else party.coordinator
    party = dataclasses.replace(party, token=job_token.read(exposed=exposed, tell=tell))
    join_rendezvous(party, timeout, tell)
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
    _begin(process_group.enter(party.names), hang_timeout)


def _first_call(spec: ClusterSpec) -> str:
    """Returns the call that joins the job at once."""
    return f"spmdtrain.initialize({'strategy=...' if spec.has_ps else ''})"


def _begin(job: process_group.Job, hang_timeout: float) -> None:
    global _settled
    _settled = True
    if not jax.config.jax_enable_preemption_service:  # type: ignore[attr-defined]
        raise UserError(
            "jax_enable_preemption_service is off: several processes need it to stop and save "
            "together"
        )
    progress.begin(always=True)
    failures.begin(job, hang_timeout)


@dataclass(frozen=True)
class _Party(Party):
    local_device_ids: Sequence[int] | None = None


def set_single_process() -> None:
    """Be part of no job, whatever the environment says: an evaluator, say."""
    global _settled
    _leave_out_tpus()
    progress.begin()
    _settled = True


def _leave_out_tpus() -> None:
    """Keeps JAX from looking for TPUs where there are none.

    libtpu is installed to plan for them, too, and then says in many words that it finds none.
    """
    asked = jax.config.jax_platforms or "JAX_FORCE_TPU_INIT" in os.environ  # type: ignore[attr-defined]
    if asked or xla_bridge.backends_are_initialized():
        return
    chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    factories = xla_bridge._backend_factories
    if not chips and "tpu" in factories:
        # It stays a platform that is known: Pallas, imported later, has rules for it.
        factories["tpu"] = dataclasses.replace(
            factories["tpu"], factory=lambda: None, fail_quietly=True
        )


def _party(spec: ClusterSpec, detect: bool, explicit: ClusterOptions) -> _Party | None:
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


def _by_hand(explicit: ClusterOptions) -> _Party:
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
    found = Address.parse(address, "--coordinator")
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
    """Returns what must be equal in all processes: versions, settings, digests of source files.

    The files are those of this package and, if Python runs a script, the script itself. The command
    compares its experiment file by itself.
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
        numeric_settings.versions()  # first: other versions have other settings
        | {"python": python}
        | numeric_settings.settings()
        | {name: digest.hexdigest()[:12] for name, digest in digests.items()}
    )


def leave() -> None:
    """The end of a run that all processes have come to."""
    if process_group.current() is not None:
        with progress.phase(progress.Phase.END):
            process_group.barrier()  # first: here it is still noticed when one fails
            failures.end()
            process_group.leave()
            jax.distributed.shutdown()
