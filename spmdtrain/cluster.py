"""`python -m spmdtrain.cluster`: what TF_CONFIG says, and whether the network bears it out."""

import enum
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from spmdtrain import tfconfig
from spmdtrain.errors import ExitCode, UserError, exit_code_of
from spmdtrain.tfconfig import Address as Address

if TYPE_CHECKING:
    from rich.console import Console


class Role(enum.StrEnum):
    """What a task is there for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PS = "ps"
    LOCAL = "local"


@dataclass(frozen=True)
class Task:
    """An entry of the cluster; as a string `worker 2`, and `chief` without a number."""

    type: str
    index: int
    address: Address

    def __str__(self) -> str:
        return _name(self.type, self.index)


@dataclass(frozen=True)
class ClusterSpec:
    """The tasks of a cluster, and which of them this is."""

    jobs: Mapping[str, tuple[Address, ...]]
    """Job to addresses; of chief, worker, ps, evaluator those that are there, in this order."""
    task_type: str | None
    task_index: int | None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task, training tasks first and in the order of their ranks."""
        return tuple(
            Task(job, index, address)
            for job, addresses in self.jobs.items()
            for index, address in enumerate(addresses)
        )

    @property
    def processes(self) -> tuple[Task, ...]:
        """The training tasks, in the order of their ranks."""
        return tuple(task for task in self.tasks if task.type in ("chief", "worker"))

    @property
    def num_processes(self) -> int:
        """How many tasks train together."""
        return max(1, len(self.processes))

    @property
    def task(self) -> Task | None:
        """This task's own entry; None where the cluster has none."""
        if self.task_type is None:  # then there is at most one
            return next(iter(self.tasks), None)
        own = (self.task_type, self.task_index)
        return next((task for task in self.tasks if (task.type, task.index) == own), None)

    @property
    def role(self) -> Role:
        """What this task is there for; a single task that trains is a plain local run."""
        if self.task_type == "evaluator":
            return Role.EVALUATE
        if self.task_type == "ps":
            return Role.PS
        return Role.TRAIN if len(self.tasks) > 1 else Role.LOCAL

    @property
    def rank(self) -> int | None:
        """The number of this process among those that train: chief first, then workers."""
        if self.role is Role.TRAIN:
            assert self.task is not None
            return self.processes.index(self.task)
        return 0 if self.role is Role.LOCAL else None

    @property
    def is_chief(self) -> bool:
        """Whether this is the one task that writes what is written once."""
        return self.rank == 0

    @property
    def chief(self) -> Task:
        """The task of rank 0: the chief, or worker 0 of a cluster without one."""
        return self.processes[0]

    @property
    def why_no_servers(self) -> str | None:
        """What strategy parameter_server lacks in this cluster; None if it can run here."""
        missing = [] if self.processes else ["chief"]
        missing += [] if len(self.processes) > 1 else ["worker besides the chief"]
        missing += [] if self.has_ps else ["ps task"]
        return f"no {' and no '.join(missing)}" if missing else None

    @property
    def coordinator(self) -> Address | None:
        """The address of rank 0, where it has one."""
        return self.processes[0].address if self.processes else None

    @property
    def name(self) -> str:
        """What to call this task in a message."""
        if self.role is Role.LOCAL or self.task_type is None or self.task_index is None:
            return "local"
        return _name(self.task_type, self.task_index)

    @property
    def has_ps(self) -> bool:
        """Whether the cluster has parameter servers."""
        return "ps" in self.jobs

    @property
    def has_evaluator(self) -> bool:
        """Whether the cluster lists an evaluator."""
        return "evaluator" in self.jobs

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "role": self.role.value,
            "task_type": self.task_type,
            "task_index": self.task_index,
            "rank": self.rank,
            "num_processes": self.num_processes,
            "is_chief": self.is_chief,
            "coordinator": None if self.coordinator is None else str(self.coordinator),
            "jobs": {job: [str(one) for one in addresses] for job, addresses in self.jobs.items()},
        }


# --- Reading ---


def from_environment(environ: Mapping[str, str] = os.environ) -> ClusterSpec:
    """The cluster of the variable TF_CONFIG.

    Raises `UserError` where it is broken, or where Slurm or Open MPI started something else.
    """
    spec = from_tf_config(environ.get("TF_CONFIG"))
    if spec.role is not Role.TRAIN or spec.num_processes == 1:
        return spec
    # Outside of a task, as in the shell of salloc, SLURM_NTASKS may be there and means nothing.
    by_job = "SLURM_STEP_NUM_TASKS" not in environ and "SLURM_PROCID" in environ
    slurm = "SLURM_NTASKS" if by_job else "SLURM_STEP_NUM_TASKS"
    pairs = ((slurm, "SLURM_PROCID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"))
    for size, rank in pairs:
        # A launcher in a single task of theirs starts the processes itself; and evaluators may be
        # tasks of theirs that are none of the training's processes.
        others = len(spec.tasks) > spec.num_processes and environ.get(size) == str(len(spec.tasks))
        if environ.get(size, "") in ("", "1") or others:
            continue
        if environ[size] != str(spec.num_processes):
            raise UserError(
                f"{size} is {environ[size]!r}, but TF_CONFIG has {spec.num_processes} "
                "training processes: start as many, or unset one of the two"
            )
        if environ.get(rank, "") not in ("", str(spec.rank)):
            raise UserError(
                f"{rank} is {environ[rank]!r}, but by TF_CONFIG this is {spec.name}, "
                f"rank {spec.rank}: number the tasks alike, or unset one of the two"
            )
    return spec


def from_tf_config(text: str | None) -> ClusterSpec:
    """The cluster that a value of TF_CONFIG describes; None or "" is a plain local run.

    Raises `UserError`, naming the field.
    """
    return ClusterSpec(*tfconfig.parse(text or "{}"))


def _name(job: str, index: int) -> str:
    return job if job == "chief" else f"{job} {index}"


# --- The doctor ---


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
    from spmdtrain import job_token
    from spmdtrain.rendezvous import is_loopback

    address = spec.coordinator
    if spec.role is not Role.TRAIN or address is None or is_loopback(address.host):
        return []
    said: list[str] = []
    try:
        token = job_token.read(environ, tell=said.append)
    except UserError as error:
        return [Finding("error", "job token", str(error))]
    if not token:
        return [Finding("warning", "job token", job_token.advice(str(address)))]
    if said:
        return [Finding("warning", "job token", said[0].removeprefix("warning: "))]
    return [Finding("ok", "job token", "given; all processes must have the same")]


def check_network(spec: ClusterSpec) -> list[Finding]:
    """Look at the network of a cluster from this machine; takes some seconds at most."""
    from spmdtrain import doctor

    return [
        Finding(*found)
        for found in doctor.examine(
            {str(task): (task.address.host, task.address.port) for task in spec.tasks},
            own=str(spec.task) if spec.task else None,
            training=[str(task) for task in spec.processes],
        )
    ]


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


if __name__ == "__main__":
    sys.exit(main())
