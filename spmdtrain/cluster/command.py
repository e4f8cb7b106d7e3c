"""`python -m spmdtrain.cluster`: prints the cluster of TF_CONFIG and checks its network."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from spmdtrain.cluster.checks import Finding, check_network, check_servers, check_token
from spmdtrain.cluster.spec import ClusterSpec, Role, from_environment
from spmdtrain.errors import ExitCode, UserError, exit_code_of, exit_if_output_is_closed

if TYPE_CHECKING:
    from rich.console import Console


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


def make_console() -> "Console":
    """Returns a console that prints text unchanged and does not wrap it."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal:
        console.width = 1000  # rich would otherwise cut a wide table off in a file
    return console


def _print_spec(spec: ClusterSpec) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = make_console()
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

    console = make_console()
    colors = {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in findings:
        level = f"[{colors[finding.level]}]{finding.level:<8}[/]"
        console.print(f"{level}{escape(f'{finding.what}: {finding.text}')}")
