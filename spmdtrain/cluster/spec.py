"""The cluster that TF_CONFIG describes: its tasks and their roles."""

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmdtrain.cluster import tf_config
from spmdtrain.cluster.tf_config import Address
from spmdtrain.errors import UserError


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
    return ClusterSpec(*tf_config.parse(text or "{}"))


def _name(job: str, index: int) -> str:
    return job if job == "chief" else f"{job} {index}"
