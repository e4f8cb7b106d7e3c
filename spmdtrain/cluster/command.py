"""`python -m spmdtrain.cluster`: prints the cluster of TF_CONFIG and checks its network."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from spmdtrain.cluster.spec import ClusterSpec, Role, from_environment
from spmdtrain.errors import ExitCode, UserError, exit_code_of, exit_if_output_is_closed
from spmdtrain.strategies import ASYNCHRONOUS

# -- Checks of a cluster before a job starts in it: parameter servers, token, network --------------


@dataclass(frozen=True)
class Finding:
    """The result of one check of a cluster.

    `what` is the task or part of the cluster that was checked; `text` is for the user.
    """

    level: Literal["ok", "warning", "error"]
    what: str
    text: str


def check_servers(spec: ClusterSpec) -> list[Finding]:
    """Checks that parameter servers can run in a cluster with `ps` tasks."""
    if not spec.has_ps:
        return []
    if missing := spec.why_no_servers:
        needed = f"strategy {ASYNCHRONOUS} needs a chief, a worker and a ps task"
        text = f"{needed}; this cluster has {missing}"
        return [Finding("error", "parameter servers", text)]
    workers = [str(task) for task in spec.processes[1:]]
    shown = ", ".join(workers[:4]) + (f" and {len(workers) - 4} more" if len(workers) > 4 else "")
    text = f"with strategy {ASYNCHRONOUS} {spec.chief} is the chief, and these compute: {shown}"
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


# -- `python -m spmdtrain.cluster`: prints the cluster of TF_CONFIG and checks its network ---------


@dataclass(frozen=True)
class Options:
    """The command's options."""

    json: bool = False
    """Print only one JSON object."""
    network: bool = True
    """Also check host names, addresses and ports from this machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, by default with the arguments of the process; returns the exit code."""
    import tyro

    with exit_if_output_is_closed():
        options = tyro.cli(
            Options, args=arguments, prog="python -m spmdtrain.cluster", description=__doc__
        )
        return exit_code_of(lambda: execute(options))


def execute(options: Options) -> int:
    """Prints the cluster and the findings; returns the exit code.

    Raises:
      UserError: If a finding is an error, or TF_CONFIG is not valid.
    """
    spec = from_environment()
    if not options.json:
        _print_spec(spec)
    findings = check_servers(spec)
    if options.network:
        findings += check_network(spec) + check_token(spec)
    if options.json:
        checked = {"findings": [asdict(x) for x in findings]} if options.network else {}
        print(json.dumps(spec.as_json() | checked))
    else:
        _print_findings(findings)
    if faults := dict.fromkeys(x.what for x in findings if x.level == "error"):
        raise UserError(f"checks failed: {', '.join(faults)}")
    return ExitCode.DONE


def _print_spec(spec: ClusterSpec) -> None:
    from spmdtrain.document.blocks import TableBlock
    from spmdtrain.document.terminal import Terminal

    terminal = Terminal()
    facts = [f"role {spec.role}"]
    if spec.role is not Role.LOCAL:
        facts.append(spec.name)
    if spec.rank is not None:
        facts.append(f"rank {spec.rank} of {spec.num_processes}")
    terminal.line(", ".join(facts))
    if spec.tasks:
        ranks = {task: str(rank) for rank, task in enumerate(spec.processes)}
        rows = [
            (str(x), str(x.address), ranks.get(x, ""), "this one" if x == spec.task else "")
            for x in spec.tasks
        ]
        terminal.show(TableBlock(("task", "address", "rank", ""), rows))


def _print_findings(findings: Sequence[Finding]) -> None:
    from rich.text import Text

    from spmdtrain.document.terminal import Terminal

    terminal = Terminal()
    colors = {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in findings:
        level = f"{finding.level:<8}", colors[finding.level]
        terminal.console.print(Text.assemble(level, f"{finding.what}: {finding.text}"))
