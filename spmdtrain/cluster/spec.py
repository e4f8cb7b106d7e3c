"""The cluster that TF_CONFIG describes: its tasks and their roles."""

import difflib
import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmdtrain.cluster import tf_config
from spmdtrain.cluster.tf_config import Address
from spmdtrain.errors import UserError

_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "SPMDTRAIN_JOB_TOKEN": (),
    "SPMDTRAIN_JOB_TOKEN_FILE": (),
    "SPMDTRAIN_TRACEBACK": ("1", "0"),
    "SPMDTRAIN_EXCEPTHOOK": ("off", "on"),
}
"""Environment variables for users, with their values; () if any text is one."""
_ALIKE = 0.85  # Kubernetes sets SPMDTRAIN_PORT and the like for a service of that name


class Role(enum.StrEnum):
    """The role of a task."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    PS = "ps"
    LOCAL = "local"


@dataclass(frozen=True)
class Task:
    """An entry of the cluster. Its string is `worker 2`, or `chief` without an index."""

    type: str
    index: int
    address: Address

    def __str__(self) -> str:
        return _name(self.type, self.index)


@dataclass(frozen=True)
class ClusterSpec:
    """The tasks of a cluster, and the task of this process."""

    jobs: Mapping[str, tuple[Address, ...]]
    """Job to addresses, for the existing jobs of chief, worker, ps and evaluator, in this order."""
    task_type: str | None
    task_index: int | None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks; the training tasks come first, in the order of their ranks."""
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
        """The number of training tasks; 1 without a cluster."""
        return max(1, len(self.processes))

    @property
    def task(self) -> Task | None:
        """The entry of this process; None if the cluster has none."""
        if self.task_type is None:  # then the cluster has at most one task
            return next(iter(self.tasks), None)
        own = (self.task_type, self.task_index)
        return next((task for task in self.tasks if (task.type, task.index) == own), None)

    @property
    def own_task(self) -> Task:
        """The entry of this process, which has one. Raises `LookupError` otherwise."""
        if self.task is None:
            raise LookupError("the cluster has no task of this process")
        return self.task

    @property
    def role(self) -> Role:
        """The role of this process; a training task without other tasks is a local run."""
        if self.task_type == "evaluator":
            return Role.EVALUATE
        if self.task_type == "ps":
            return Role.PS
        return Role.TRAIN if len(self.tasks) > 1 else Role.LOCAL

    @property
    def rank(self) -> int | None:
        """The rank of this process among the training tasks: the chief first, then the workers."""
        if self.role is Role.TRAIN:
            return self.processes.index(self.own_task)
        return 0 if self.role is Role.LOCAL else None

    @property
    def is_chief(self) -> bool:
        """Whether this process has rank 0, which alone writes logs and metrics."""
        return self.rank == 0

    @property
    def chief(self) -> Task:
        """The task of rank 0: the chief, or worker 0 of a cluster without one."""
        return self.processes[0]

    @property
    def why_no_servers(self) -> str | None:
        """The tasks that strategy parameter_server needs and this cluster lacks; None if none."""
        missing = [] if self.processes else ["chief"]
        missing += [] if len(self.processes) > 1 else ["worker besides the chief"]
        missing += [] if self.has_ps else ["ps task"]
        return f"no {' and no '.join(missing)}" if missing else None

    @property
    def coordinator(self) -> Address | None:
        """The address of rank 0; None without training tasks."""
        return self.processes[0].address if self.processes else None

    @property
    def name(self) -> str:
        """The name of this task in messages."""
        if self.role is Role.LOCAL or self.task_type is None or self.task_index is None:
            return "local"
        return _name(self.task_type, self.task_index)

    @property
    def has_ps(self) -> bool:
        """Whether the cluster has parameter servers."""
        return "ps" in self.jobs

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON object that `--json` prints."""
        return {
            "role": self.role.value,
            "task_type": self.task_type,
            "task_index": self.task_index,
            "rank": self.rank,
            "num_processes": self.num_processes,
            "is_chief": self.is_chief,
            "coordinator": None if self.coordinator is None else str(self.coordinator),
            "jobs": {job: [str(x) for x in addresses] for job, addresses in self.jobs.items()},
        }


def from_environment(environ: Mapping[str, str] = os.environ) -> ClusterSpec:
    """Returns the cluster of the environment variable TF_CONFIG.

    Raises:
      UserError: If TF_CONFIG is not valid, or if Slurm or Open MPI started another number of
        processes or gave this one another rank; or if a variable has an unknown value, or nearly
        the name of a variable of spmdtrain.
    """
    _check_variables(environ)
    spec = from_tf_config(environ.get("TF_CONFIG"))
    if spec.role is not Role.TRAIN or spec.num_processes == 1:
        return spec
    # Outside of a task, such as in the shell of salloc, SLURM_NTASKS may be set without meaning.
    by_job = "SLURM_STEP_NUM_TASKS" not in environ and "SLURM_PROCID" in environ
    slurm = "SLURM_NTASKS" if by_job else "SLURM_STEP_NUM_TASKS"
    pairs = ((slurm, "SLURM_PROCID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"))
    for size, rank in pairs:
        # With a single Slurm or Open MPI task, a launcher in it starts the processes itself. Their
        # tasks may also include evaluators, which are not training processes.
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
                f"{rank} is {environ[rank]!r}, but according to TF_CONFIG this is {spec.name}, "
                f"rank {spec.rank}: use the same order of tasks, or unset one of the two"
            )
    return spec


def _check_variables(environ: Mapping[str, str]) -> None:
    for name, value in environ.items():
        if name in _VARIABLES:
            values = _VARIABLES[name]
            if values and value not in ("", *values):
                raise UserError(f"{name} is {value!r}: set it to {' or '.join(values)}")
        elif near := difflib.get_close_matches(name, _VARIABLES, n=1, cutoff=_ALIKE):
            raise UserError(f"the variable {name} is unknown. Did you mean {near[0]!r}?")


def from_tf_config(text: str | None) -> ClusterSpec:
    """Returns the cluster that a value of TF_CONFIG describes; None or "" is a local run.

    Raises:
      UserError: If the value is not valid; names the field.
    """
    return ClusterSpec(*tf_config.parse(text or "{}"))


def _name(job: str, index: int) -> str:
    return job if job == "chief" else f"{job} {index}"
