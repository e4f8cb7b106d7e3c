"""The cluster that TF_CONFIG describes: a strict parser, tasks and their roles."""

import difflib
import enum
import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.errors import UserError, did_you_mean

# -- A strict parser of TF_CONFIG, which rejects values that would fail later in TensorFlow --------

_JOBS = ("chief", "worker", "ps", "evaluator")
_MASTER = "master"  # TensorFlow 1's name of the chief
_CLUSTER = '{"worker": ["host:port"]}'
_KEYS = ("cluster", "task")
_TASK_KEYS = ("type", "index")
# Keys that TFJob, Google Cloud and TensorFlow's estimators and resolvers write. They name no task.
_OTHERS = (
    *("environment", "job", "rpc_layer", "session_master", "eval_session_master"),
    *("service", "model_dir"),
)
_TASK_OTHERS = ("cloud", "trial")  # of Google Cloud
_SPARSE = "sparseCluster"
_EXAMPLE = '"task": {"type": "worker", "index": 0}'


@dataclass(frozen=True)
class Address:
    """The address of a task. Its string is `host:port`, with an IPv6 host in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: object, field: str) -> "Address":
        """Returns the address that a text `host:port` names.

        Raises:
          UserError: If `text` is not a string of this form; names it as `field`.
        """
        fault = None
        if not isinstance(text, str):
            raise UserError(f"{field} is {_shown(text)}: it must be a string, host:port")
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not text.isprintable() or " " in text:
            fault = "it must have no spaces; write host:port"
        elif "://" in text:
            fault = "leave out the scheme; write host:port"
        elif not colon or text.endswith("]"):
            fault = "it has no port; write host:port"
        elif not host:
            fault = "it has no host; write host:port"
        elif ":" in host and not bracketed:
            fault = "it has several colons; write host:port, an IPv6 host in brackets: [::1]:2222"
        elif not _is_host(host[1:-1] if bracketed else host, bracketed):
            fault = "its host is neither a host name nor an IP address; write host:port"
        elif not re.fullmatch("[1-9][0-9]{0,4}", port) or int(port) > 65535:
            fault = "its port must be a whole number from 1 to 65535"
        if fault:
            raise UserError(f"{field} is {_shown(text)}: {fault}")
        return cls(host[1:-1] if bracketed else host, int(port))


def parse_tf_config(text: str) -> tuple[dict[str, tuple[Address, ...]], str | None, int | None]:
    """Parses a value of TF_CONFIG, a JSON object.

    For the format see
    https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver

    Returns:
      Job to addresses (chief, worker, ps, evaluator), task type and task index.

    Raises:
      UserError: If the value is not valid; names the field.
    """
    try:
        config = json.loads(text, object_pairs_hook=_pairs, parse_constant=_constant)
        config = _object(config, "the value", '{"cluster": ..., "task": ...}')
        _check_keys(config)
        jobs = _jobs(_object(config.get("cluster", {}), "cluster", _CLUSTER))
        task = _object(config.get("task", {}), "task", '{"type": "worker", "index": 0}')
        for key in task.keys() - {*_TASK_KEYS, *_TASK_OTHERS}:
            raise UserError(f"task has an unknown key {_shown(key)}.{_near(key, _TASK_KEYS)}")
        kind, index = _task(task, jobs)
        if not jobs and (kind in ("chief", "worker") or (kind is None and "cluster" in config)):
            how = "empty" if "cluster" in config else "missing"
            raise UserError(
                f'cluster is {how}: list the addresses of all tasks, "cluster": {_CLUSTER}, or '
                "unset TF_CONFIG for a run of one process"
            )
        return jobs, kind, index
    except json.JSONDecodeError as error:
        near = _shown(error.doc[max(0, error.pos - 15) : error.pos + 15])
        fault = f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}, near {near}"
    except RecursionError:
        fault = "its objects or lists are nested too deeply"
    except ValueError as error:  # a UserError from below, or an integer with thousands of digits
        fault = str(error)
    raise UserError(f"TF_CONFIG: {fault}")


def _check_keys(config: Mapping[str, Any]) -> None:
    if _SPARSE in config:
        raise UserError(
            f"{_SPARSE} is {_shown(config[_SPARSE])}: a TFJob with enableDynamicWorker writes it, "
            "which names no other worker, and processes that train together must know all tasks: "
            "set enableDynamicWorker: false"
        )
    for key in config:
        if key not in _KEYS and key not in _OTHERS:
            raise UserError(f"there is no key {_shown(key)}.{_near(key, _KEYS)}")


def _near(key: str, known: Sequence[str]) -> str:
    """Returns the nearest known key, also if only its case differs."""
    return did_you_mean(key.lower(), known)


def _jobs(cluster: dict[str, Any]) -> dict[str, tuple[Address, ...]]:
    known = (_MASTER, *_JOBS)
    for name in cluster:
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(f"cluster has an unknown job {_shown(name)}.{near}")
    if "chief" in cluster and _MASTER in cluster:
        raise UserError(
            f"cluster.chief is {_shown(cluster['chief'])} and cluster.master is "
            f"{_shown(cluster[_MASTER])}: they are one job; leave one of them out"
        )
    jobs: dict[str, tuple[Address, ...]] = {}
    fields: dict[tuple[str, int], str] = {}
    for name in (name for name in known if name in cluster):
        addresses = []
        for index, text in enumerate(_entries(cluster[name], f"cluster.{name}")):
            field = f"cluster.{name}[{index}]"
            address = Address.parse(text, field)
            other = fields.setdefault((_one_spelling(address.host), address.port), field)
            if other != field:
                raise UserError(
                    f"{field} is {_shown(text)}, the same address as {other}: give each task its "
                    "own"
                )
            addresses.append(address)
        if len(addresses) > 1 and name not in ("worker", "ps"):
            raise UserError(
                f"cluster.{name} is {_shown(cluster[name])}: there can be one {name}, "
                f"not {len(addresses)}"
            )
        jobs["chief" if name == _MASTER else name] = tuple(addresses)
    return jobs


def _entries(value: Any, field: str) -> list[Any]:
    """Returns the values of a list, or of an object whose keys are indices."""
    if isinstance(value, dict):
        indices = [str(index) for index in range(len(value))]
        for key in value.keys() - set(indices):
            raise UserError(
                f"{field} has the index {_shown(key)}: number its {len(value)} addresses "
                f"from '0' to '{len(value) - 1}'"
            )
        value = [value[index] for index in indices]
    if not isinstance(value, list):
        raise UserError(f'{field} is {_shown(value)}: it must be a list, ["host:port", ...]')
    if not value:
        raise UserError(f"{field} is empty, {_shown(value)}: give addresses, or leave it out")
    return value


def _task(
    task: dict[str, Any], jobs: Mapping[str, Sequence[Address]]
) -> tuple[str, int] | tuple[None, None]:
    count = sum(map(len, jobs.values()))
    if "type" not in task and "index" not in task:
        if count > 1:
            raise UserError(
                f"task is missing, but the cluster has {count} tasks: name the task of this "
                f"process, {_EXAMPLE}"
            )
        return None, None
    if "type" not in task:
        raise UserError(f"task.type is missing, task is {_shown(task)}: write {_EXAMPLE}")
    name, known = task["type"], (_MASTER, *_JOBS)
    if not isinstance(name, str):
        raise UserError(f"task.type is {_shown(name)}: it must be a string, such as 'worker'")
    if name not in known:
        raise UserError(f"task.type is unknown, {_shown(name)}.{did_you_mean(name, known)}")
    if "index" not in task and count > 1:
        raise UserError(f"task.index is missing, task is {_shown(task)}: write {_EXAMPLE}")
    index = _index(task.get("index", 0))
    job = "chief" if name == _MASTER else name
    if job in jobs:
        if index >= len(jobs[job]):
            raise UserError(
                f"task.index is {_shown(index)}: cluster.{name} has {len(jobs[job])} tasks, "
                f"the last is {len(jobs[job]) - 1}"
            )
    elif job == "ps" or (job != "evaluator" and (jobs or index > 0)):
        content = f"it has: {', '.join(jobs)}" if jobs else "it is empty"
        raise UserError(
            f"task.type is {name!r} (task.index {_shown(index)}), but the cluster has no such "
            f"task; {content}"
        )
    return job, index


def _index(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch("[0-9]+", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"task.index is {_shown(value)}: it must be a whole number, 0 or more")
    return value


def _object(value: Any, field: str, example: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{field} is {_shown(value)}: it must be an object, {example}")
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise UserError(
                f"the key {_shown(key)} occurs twice, with {_shown(result[key])} and "
                f"{_shown(value)}: keep one of them"
            )
        result[key] = value
    return result


def _constant(name: str) -> None:
    raise UserError(f"it contains {name}, which is not JSON: write a finite number or a string")


def _is_host(host: str, bracketed: bool) -> bool:
    if not bracketed and not re.fullmatch("[0-9.]+", host):
        return re.fullmatch("[A-Za-z0-9_][A-Za-z0-9_.-]*", host) is not None
    try:  # stricter than a resolver, which reads 10.1 as 10.0.0.1, and 010.0.0.1 as 8.0.0.1
        (ipaddress.IPv6Address if bracketed else ipaddress.IPv4Address)(host)
    except ValueError:
        return False
    return True


def _one_spelling(host: str) -> str:
    """Normalizes the case of a host name, and the notation of an IPv6 address."""
    return str(ipaddress.IPv6Address(host)) if ":" in host else host.lower().rstrip(".")


def _shown(value: Any) -> str:
    """Returns a value for a message: in one line of at most 100 characters."""
    text = repr(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


# -- The cluster that TF_CONFIG describes: its tasks and their roles -------------------------------

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
        """The tasks that parameter servers need and this cluster lacks; None if none."""
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
    return ClusterSpec(*parse_tf_config(text)) if text else ClusterSpec({}, None, None)


def _name(job: str, index: int) -> str:
    return job if job == "chief" else f"{job} {index}"
