"""Checks of a cluster before a job starts in it: parameter servers, token, network."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from spmdtrain.cluster.spec import ClusterSpec, Role
from spmdtrain.errors import UserError


@dataclass(frozen=True)
class Finding:
    """The result of one check of a cluster.

    `what` is the task or part of the cluster that was checked; `text` is for the user.
    """

    level: Literal["ok", "warning", "error"]
    what: str
    text: str


def check_servers(spec: ClusterSpec) -> list[Finding]:
    """Checks that strategy parameter_server can run in a cluster with `ps` tasks."""
    if not spec.has_ps:
        return []
    if missing := spec.why_no_servers:
        needed = "strategy parameter_server needs a chief, a worker and a ps task"
        text = f"{needed}; this cluster has {missing}"
        return [Finding("error", "parameter servers", text)]
    workers = [str(task) for task in spec.processes[1:]]
    shown = ", ".join(workers[:4]) + (f" and {len(workers) - 4} more" if len(workers) > 4 else "")
    text = f"with strategy parameter_server {spec.chief} is the chief, and these compute: {shown}"
    return [Finding("ok", "parameter servers", text)]


def check_token(spec: ClusterSpec, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Checks that the training processes authenticate each other if they are on several machines.

    Returns one finding; none if this task does not train, or the coordinator has a loopback
    address.
    """
    from spmdtrain.cluster import job_token
    from spmdtrain.cluster.rendezvous import is_loopback

    address = spec.coordinator
    if spec.role is not Role.TRAIN or address is None or is_loopback(address.host):
        return []
    warnings: list[str] = []
    try:
        token = job_token.read(environ, warn=warnings.append)
    except UserError as error:
        return [Finding("error", "job token", str(error))]
    if not token:
        return [Finding("warning", "job token", job_token.advice(str(address)))]
    if warnings:
        return [Finding("warning", "job token", warnings[0].removeprefix("warning: "))]
    return [Finding("ok", "job token", "set; it must be the same in all processes")]


def check_network(spec: ClusterSpec) -> list[Finding]:
    """Checks the network of a cluster from this machine, which takes at most a few seconds."""
    from spmdtrain.cluster import network_check

    return [
        Finding(*finding)
        for finding in network_check.examine_network(
            {str(task): (task.address.host, task.address.port) for task in spec.tasks},
            own=str(spec.task) if spec.task else None,
            training=[str(task) for task in spec.processes],
        )
    ]
