"""Checks of a cluster before a job starts in it: parameter servers, token, network."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from spmdtrain.cluster.spec import ClusterSpec, Role
from spmdtrain.errors import UserError


@dataclass(frozen=True)
class Finding:
    """What one check of the network says."""

    level: Literal["ok", "warning", "error"]
    what: str
    text: str


def check_servers(spec: ClusterSpec) -> list[Finding]:
    """Checks that strategy parameter_server can run in a cluster with `ps` tasks."""
    if not spec.has_ps:
        return []
    if missing := spec.why_no_servers:
        needed = "strategy parameter_server needs a chief, a worker and a ps task"
        what = f"{needed}; this cluster has {missing}"
        return [Finding("error", "parameter servers", what)]
    workers = [str(task) for task in spec.processes[1:]]
    shown = ", ".join(workers[:4]) + (f" and {len(workers) - 4} more" if len(workers) > 4 else "")
    what = f"with strategy parameter_server {spec.chief} is the chief, and these compute: {shown}"
    return [Finding("ok", "parameter servers", what)]


def check_token(spec: ClusterSpec, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Checks that the training processes authenticate each other if they are on several machines.

    Args:
      spec: The cluster.
      environ: The environment that may name the token.
    """
    from spmdtrain.cluster import job_token
    from spmdtrain.cluster.rendezvous import is_loopback

    address = spec.coordinator
    if spec.role is not Role.TRAIN or address is None or is_loopback(address.host):
        return []
    said: list[str] = []
    try:
        token = job_token.read(environ, warn=said.append)
    except UserError as error:
        return [Finding("error", "job token", str(error))]
    if not token:
        return [Finding("warning", "job token", job_token.advice(str(address)))]
    if said:
        return [Finding("warning", "job token", said[0].removeprefix("warning: "))]
    return [Finding("ok", "job token", "given; all processes must have the same")]


def check_network(spec: ClusterSpec) -> list[Finding]:
    """Look at the network of a cluster from this machine; takes some seconds at most."""
    from spmdtrain.cluster import network_check

    return [
        Finding(*found)
        for found in network_check.examine(
            {str(task): (task.address.host, task.address.port) for task in spec.tasks},
            own=str(spec.task) if spec.task else None,
            training=[str(task) for task in spec.processes],
        )
    ]
