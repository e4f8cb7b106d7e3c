"""A strict parser of TF_CONFIG, which rejects values that would fail later in TensorFlow."""

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdtrain.errors import UserError, did_you_mean

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


def parse(text: str) -> tuple[dict[str, tuple[Address, ...]], str | None, int | None]:
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
