"""`python -m spmdtrain.cluster`: what TF_CONFIG says, and whether the network bears it out."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from spmdtrain.cluster.checks import Finding, check_network, check_servers, check_token
from spmdtrain.cluster.spec import ClusterSpec, Role, from_environment
from spmdtrain.errors import ExitCode, UserError, exit_code_of

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Options:
    """The command's options."""

    json: bool = False
    """Print one JSON object and nothing else."""
    network: bool = True
    """Also look at the network from this machine: names, addresses, ports."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    import tyro

    options = tyro.cli(
        Options, args=arguments, prog="python -m spmdtrain.cluster", description=__doc__
    )
    return exit_code_of(lambda: execute(options))


def execute(options: Options) -> int:
    """Print the cluster and the findings; raises `UserError` where one of them is an error."""
    spec = from_environment()
    if not options.json:
        _print_spec(spec)
    findings = check_servers(spec)
    if options.network:
        findings += check_network(spec) + check_token(spec)
    if options.json:
        checked = {"findings": [asdict(one) for one in findings]} if options.network else {}
        print(json.dumps(spec.as_json() | checked))
    else:
        _print_findings(findings)
    if faults := dict.fromkeys(one.what for one in findings if one.level == "error"):
        raise UserError(f"checks failed: {', '.join(faults)}")
    return ExitCode.DONE


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal:
        console.width = 1000  # a file has no edge: a wide table is not to be cut off
    return console


def _print_spec(spec: ClusterSpec) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = _console()
    facts = [f"role {spec.role}"]
    if spec.role is not Role.LOCAL:
        facts.append(spec.name)
    if spec.rank is not None:
        facts.append(f"rank {spec.rank} of {spec.num_processes}")
    console.print(", ".join(facts), markup=False)
    if spec.tasks:
        ranks = {task: str(rank) for rank, task in enumerate(spec.processes)}
        table = Table("task", "address", "rank", "")
        table.columns[1].overflow = "fold"
        for task in spec.tasks:
            mark = "this one" if task == spec.task else ""
            table.add_row(str(task), escape(str(task.address)), ranks.get(task, ""), mark)
        console.print(table)


def _print_findings(findings: Sequence[Finding]) -> None:
    from rich.markup import escape

    console = _console()
    colours = {"ok": "green", "warning": "yellow", "error": "red"}
    for one in findings:
        level = f"[{colours[one.level]}]{one.level:<8}[/]"
        console.print(f"{level}{escape(f'{one.what}: {one.text}')}")
