"""Environment variables and free ports of launched tasks."""

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdtrain.cluster import job_token
from spmdtrain.cluster.network_check import why_not_free
from spmdtrain.cluster.spec import Role, from_tf_config
from spmdtrain.distributed.progress import TASK
from spmdtrain.errors import UserError, option
from spmdtrain.record.user_folders import exclusive_file

# -- Environment variables of launched tasks: TF_CONFIG, job token and devices ---------------------

EVALUATOR = "evaluator"
_VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"
# Variables of schedulers that describe another cluster, such as in a Slurm task.
_SCHEDULER_VARIABLES = (
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)


def training_tasks(processes: int, ps: int = 0) -> list[str]:
    """Returns the names of the training tasks in rank order, then the names of the servers."""
    workers = [f"worker {index}" for index in range(processes - 1)]
    return ["chief", *workers, *(f"ps {index}" for index in range(ps))]


def tf_configs(names: Sequence[str]) -> dict[str, str]:
    """Returns the TF_CONFIG of each task, with free ports of this machine."""
    cluster: dict[str, list[str]] = {}
    for name, port in zip(names, free_ports(len(names)), strict=True):
        cluster.setdefault(name.split()[0], []).append(f"127.0.0.1:{port}")
    configs = {}
    for name in names:
        kind, _, index = name.partition(" ")
        task = {"type": kind, "index": int(index or 0)}
        configs[name] = json.dumps({"cluster": cluster, "task": task})
    return configs


def gpus_of(environment: Mapping[str, str]) -> list[str]:
    """Returns the available GPUs as CUDA names them; an empty list if JAX_PLATFORMS is `cpu`."""
    if environment.get("JAX_PLATFORMS") == "cpu":
        return []
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    names = [name.strip() for name in listed.split(",")]
    return [name for name in names if name not in ("", "-1")]


def environments_of(
    names: Sequence[str],
    devices: int | None,
    inherited: Mapping[str, str],
    gpus: Sequence[str],
) -> dict[str, dict[str, str]]:
    """Returns the environment of each task, without its TF_CONFIG.

    All tasks share one job token: the inherited one, or a new one. `inherited` is the environment
    of the launcher. `devices` is the number of devices of each task; None for all GPUs, or JAX's
    default on the CPU.

    Raises:
      UserError: If there are too few GPUs, or the inherited TF_CONFIG describes a cluster.
    """
    refuse_cluster(inherited.get("TF_CONFIG"))
    base = {
        n: value for n, value in inherited.items() if n not in ("TF_CONFIG", *_SCHEDULER_VARIABLES)
    }
    base["PYTHONUNBUFFERED"] = "1"
    if not job_token.is_set(inherited):
        base[job_token.TOKEN] = job_token.create()
    if devices is not None:
        base["JAX_NUM_CPU_DEVICES"] = str(devices)
        flags = base.pop("XLA_FLAGS", "").split()
        kept = [flag for flag in flags if not flag.startswith(_VIRTUAL_DEVICES)]
        base |= {"XLA_FLAGS": " ".join(kept)} if kept else {}
    environments = {name: {**base, TASK: name} for name in names}
    if gpus:
        for name, own in _assign_gpus(gpus, names, devices).items():
            environments[name]["CUDA_VISIBLE_DEVICES"] = ",".join(own)
            if not own:
                environments[name]["JAX_PLATFORMS"] = "cpu"
    return environments


def _assign_gpus(
    gpus: Sequence[str], names: Sequence[str], devices: int | None
) -> dict[str, Sequence[str]]:
    """Returns the GPUs of each task. No two processes share a GPU."""
    training = [name for name in names if name != EVALUATOR and not name.startswith("ps")]
    each = devices or len(gpus)
    wanted = len(training) * each
    if wanted > len(gpus):
        counted = each if devices else f"all {each}"
        raise UserError(
            f"{len(training)} processes x {counted} GPUs = {wanted}, but there are {len(gpus)} "
            f"({','.join(gpus)}): change {option('processes')} or "
            f"{option('devices_per_process')}, or set JAX_PLATFORMS=cpu"
        )
    shares = {name: gpus[i * each : (i + 1) * each] for i, name in enumerate(training)}
    shares |= {name: [] for name in names if name.startswith("ps")}  # servers compute little
    left = gpus[wanted : wanted + each]
    return shares | ({EVALUATOR: left} if EVALUATOR in names else {})


def refuse_cluster(tf_config: str | None) -> None:
    """Raises `UserError` if TF_CONFIG describes a cluster: its processes are started elsewhere."""
    spec = from_tf_config(tf_config)
    if spec.role is not Role.LOCAL:
        raise UserError(
            f"TF_CONFIG makes this process {spec.name} of a cluster, but the launcher creates its "
            f"own cluster: leave {option('processes')} out, which starts the process of this "
            "machine, or unset TF_CONFIG"
        )


# -- Free TCP ports of this machine for the tasks of a launched job --------------------------------

_FIRST = 20_000  # the ports below are those of well-known services and of Ray's workers
PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of the ephemeral ports
_FIRST_EPHEMERAL = 32_768  # on Linux; macOS starts at 49152


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that no program listens at.

    A task listens at its port only seconds later. Therefore the ports are below the ephemeral
    ports, which the kernel gives to outgoing connections, and the launchers of a user take the next
    ports in turn: two launchers that run at the same time use different ones.

    Raises:
      UserError: If fewer than `count` ports are free.
    """
    ports = candidate_ports()
    with exclusive_file("next-port") as file:
        file.seek(0)
        text = file.read(20)
        start = int(text) if text.isdecimal() else random.randrange(len(ports))
        in_turn = (ports[(start + i) % len(ports)] for i in range(len(ports)))
        free = list(itertools.islice((p for p in in_turn if why_not_free(p) is None), count))
        if len(free) < count:
            raise UserError(
                f"{count} free ports are needed on this machine, but only {len(free)} of "
                f"{ports.start} to {ports.stop - 1} are free"
            )
        file.seek(0)
        file.truncate()
        file.write(str(ports.index(free[-1]) + 1))
    return free


def candidate_ports() -> range:
    """Returns the ports below the ephemeral ports; all high ports if those leave too few."""
    text = PORT_RANGE_FILE.read_text() if PORT_RANGE_FILE.exists() else ""
    first = int(text.split()[0]) if text else _FIRST_EPHEMERAL
    return range(_FIRST, first if first >= _FIRST + 1000 else 65_536)
