"""What the launcher tells each task of a job: its place in the cluster, and its devices."""

import contextlib
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdtrain.cluster import job_token
from spmdtrain.cluster.spec import Role, from_tf_config
from spmdtrain.distributed.progress import TASK
from spmdtrain.errors import UserError

EVALUATOR = "evaluator"
_VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"
# What says that somebody else has described the cluster: inside of a Slurm task, say.
_OTHERS = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")


def training_tasks(processes: int, ps: int = 0) -> list[str]:
    """The names of the training tasks, in the order of their processes in the cluster."""
    workers = [f"worker {index}" for index in range(processes - 1)]
    return ["chief", *workers, *(f"ps {index}" for index in range(ps))]


def tf_configs(names: Sequence[str]) -> dict[str, str]:
    """The TF_CONFIG of each task, with ports of this machine that nothing listens on."""
    cluster: dict[str, list[str]] = {}
    for name, port in zip(names, _free_ports(len(names)), strict=True):
        cluster.setdefault(name.split()[0], []).append(f"127.0.0.1:{port}")
    configs = {}
    for name in names:
        kind, _, index = name.partition(" ")
        task = {"type": kind, "index": int(index or 0)}
        configs[name] = json.dumps({"cluster": cluster, "task": task})
    return configs


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:  # all at once, so that they differ
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def gpus_of(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that may be shared out, as CUDA names them; none where JAX is to use the CPU."""
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
    """The environment of each task but for its TF_CONFIG; `devices` is how many each has.

    All tasks share one job token: the inherited one if there is one, else a new one.
    """
    refuse_cluster(inherited.get("TF_CONFIG"))
    base = {n: value for n, value in inherited.items() if n not in ("TF_CONFIG", *_OTHERS)}
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
        for name, mine in _shared_out(gpus, names, devices).items():
            environments[name]["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
            if not mine:
                environments[name]["JAX_PLATFORMS"] = "cpu"
    return environments


def _shared_out(
    gpus: Sequence[str], names: Sequence[str], devices: int | None
) -> dict[str, Sequence[str]]:
    """The GPUs of each task: its own, as no two processes can use the same; none left is none."""
    training = [name for name in names if name != EVALUATOR and not name.startswith("ps")]
    each = devices or len(gpus)
    wanted = len(training) * each
    if wanted > len(gpus):
        counted = each if devices else f"all {each}"
        raise UserError(
            f"{len(training)} processes x {counted} GPUs = {wanted}, but there are {len(gpus)} "
            f"({','.join(gpus)}): change --processes or --devices-per-process, or set "
            "JAX_PLATFORMS=cpu"
        )
    shares = {name: gpus[i * each : (i + 1) * each] for i, name in enumerate(training)}
    shares |= {name: [] for name in names if name.startswith("ps")}  # whose products are few
    left = gpus[wanted : wanted + each]
    return shares | ({EVALUATOR: left} if EVALUATOR in names else {})


def refuse_cluster(tf_config: str | None) -> None:
    """A `UserError` for a TF_CONFIG of several tasks: then something else starts the processes."""
    spec = from_tf_config(tf_config)
    if spec.role is not Role.LOCAL:
        raise UserError(
            f"TF_CONFIG makes this {spec.name} of a cluster, and the launcher makes one of its "
            "own: start the command itself on each of them, or unset TF_CONFIG"
        )
