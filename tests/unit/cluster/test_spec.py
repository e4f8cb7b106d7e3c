import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from helpers import BOUND

from spmdtrain.cluster.spec import (
    Address,
    ClusterSpec,
    Role,
    Task,
    from_environment,
    from_tf_config,
)
from spmdtrain.errors import UserError

settings = hypothesis.settings(max_examples=30, deadline=None, derandomize=True)

Config = dict[str, Any]


def config(
    kind: str | None = None, index: object = None, /, **jobs: object
) -> dict[str, dict[str, object]]:
    """A TF_CONFIG before it is text."""
    task = {} if kind is None else {"task": {"type": kind, "index": index}}
    return {"cluster": jobs} | task


def read(kind: str | None = None, index: object = None, /, **jobs: object) -> ClusterSpec:
    return from_tf_config(json.dumps(config(kind, index, **jobs)))


def refusal(value: object) -> str:
    """What a TF_CONFIG is refused with; always one line."""
    with pytest.raises(UserError) as caught:
        from_tf_config(value if isinstance(value, str) else json.dumps(value))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 500
    assert message.startswith("TF_CONFIG: ")
    return message.removeprefix("TF_CONFIG: ")


# --- Addresses ---


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("localhost:1", "localhost", 1),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("worker-0.job_1.svc.cluster.local:2222", "worker-0.job_1.svc.cluster.local", 2222),
        ("3com.example.:80", "3com.example.", 80),
        ("[::1]:2222", "::1", 2222),
        ("[2001:db8::a:1]:2222", "2001:db8::a:1", 2222),
    ],
)
def test_an_address_is_a_host_and_a_port_and_prints_as_it_was_written(
    text: str, host: str, port: int
) -> None:
    address = Address.parse(text, "here")
    assert address == Address(host, port)
    assert str(address) == text


@settings
@hypothesis.given(
    st.one_of(
        st.from_regex(r"[a-z][a-z0-9-]{0,8}(\.[a-z]{1,5})?", fullmatch=True),
        st.ip_addresses(v=4).map(str),
        st.ip_addresses(v=6).map(lambda ip: f"[{ip}]"),
    ),
    st.integers(1, 65535),
)
def test_any_name_and_any_ip_address_with_a_port_is_an_address(host: str, port: int) -> None:
    address = Address.parse(f"{host}:{port}", "here")
    assert address == Address(host.strip("[]"), port)
    assert str(address) == f"{host}:{port}"


NO_PORT = "it has no port; write host:port"
BROKEN_ADDRESSES: dict[str, list[object]] = {
    NO_PORT: ["", "host", "[::1]"],
    "it has no host; write host:port": [":2222"],
    "its port must be a whole number from 1 to 65535": [
        *("host:", "host:0", "host:65536", "host:70000", "host:123456789", "host:+5", "host:-5"),
        *("host:5.0", "host:http", "host:022", "host:5/path"),
        "host:٢٢٢٢",  # digits to int(), not to a socket
    ],
    "it must have no spaces; write host:port": [
        *("host: 5", " host:5", "ho st:5", "host:5\n", "host\u2028:5"),
        "host\udc80:5",  # a byte of the environment that is not UTF-8
    ],
    "leave out the scheme; write host:port": ["http://host:5", "grpc://host:5"],
    "its host is neither a host name nor an IP address; write host:port": [
        *("host/path:5", "höst:5", "-host:5", "10.0.0.256:5", "10.1:5", "010.0.0.1:5"),
        *("[]:5", "[host]:5", "[10.0.0.1]:5", "[::g]:5"),
    ],
    "it has several colons; write host:port, an IPv6 host in brackets: [::1]:2222": [
        *("::1", "::1:2222", "2001:db8::1", "[::1:2222", "host:1:2"),
    ],
    "it must be a string, host:port": [None, True, 2222, 1.5, ["host:1"], {"host": "a:1"}],
}


@pytest.mark.parametrize(
    ("value", "fault"),
    [(value, fault) for fault, values in BROKEN_ADDRESSES.items() for value in values],
)
def test_a_broken_address_is_refused_with_its_field_its_value_and_its_fault(
    value: object, fault: str
) -> None:
    message = refusal(config("worker", 0, worker=["good:1", value]))
    shown = repr(value) if isinstance(value, str) else json.dumps(value)
    assert message == f"cluster.worker[1] is {shown}: {fault}"


def test_a_field_is_named_as_the_caller_names_it() -> None:
    with pytest.raises(UserError, match=r"^--coordinator is 'host': it has no port"):
        Address.parse("host", "--coordinator")


# --- What TensorFlow takes, and what it means ---

Facts = tuple[str, int | None, int, bool, str | None]


def facts(spec: ClusterSpec) -> Facts:
    """The role, the rank, the number of processes, whether it is the chief, the coordinator."""
    coordinator = None if spec.coordinator is None else str(spec.coordinator)
    return spec.role.value, spec.rank, spec.num_processes, spec.is_chief, coordinator


@pytest.mark.parametrize("text", [None, "", "{}", '{"task": {}}', '{"environment": "cloud"}'])
def test_without_a_cluster_a_run_is_local(text: str | None) -> None:
    spec = from_tf_config(text)
    assert facts(spec) == ("local", 0, 1, True, None)
    assert (spec.task_type, spec.task_index, spec.name) == (None, None, "local")
    assert spec.as_json() == {
        "role": "local",
        "task_type": None,
        "task_index": None,
        "rank": 0,
        "num_processes": 1,
        "is_chief": True,
        "coordinator": None,
        "jobs": {},
    }


FULL = {
    "evaluator": ["e:1"],
    "ps": ["p:1", "p:2"],
    "worker": ["w:1", "w:2"],
    "chief": ["c:1"],
}
TWO_WORKERS = {"worker": ["a:1", "b:1"]}
MASTER = {"master": ["m:1"], "worker": ["a:1"], "ps": ["b:1"]}
ROLES: list[tuple[dict[str, list[str]], str, int, Facts, str]] = [
    # The chief comes first, then the workers; the others have no rank.
    (FULL, "chief", 0, ("train", 0, 3, True, "c:1"), "chief"),
    (FULL, "worker", 0, ("train", 1, 3, False, "c:1"), "worker 0"),
    (FULL, "worker", 1, ("train", 2, 3, False, "c:1"), "worker 1"),
    (FULL, "ps", 1, ("ps", None, 3, False, "c:1"), "ps 1"),
    (FULL, "evaluator", 0, ("evaluate", None, 3, False, "c:1"), "evaluator 0"),
    # Without a chief worker 0 is it.
    (TWO_WORKERS, "worker", 0, ("train", 0, 2, True, "a:1"), "worker 0"),
    (TWO_WORKERS, "worker", 1, ("train", 1, 2, False, "a:1"), "worker 1"),
    # A single task is local and knows its address.
    ({"worker": ["a:1"]}, "worker", 0, ("local", 0, 1, True, "a:1"), "local"),
    ({"chief": ["a:1"]}, "chief", 0, ("local", 0, 1, True, "a:1"), "local"),
    # A single process beside other tasks trains.
    ({"worker": ["a:1"], "ps": ["b:1"]}, "worker", 0, ("train", 0, 1, True, "a:1"), "worker 0"),
    (
        {"worker": ["a:1"], "evaluator": ["b:1"]},
        *("worker", 0, ("train", 0, 1, True, "a:1"), "worker 0"),
    ),
    # An evaluator or a parameter server alone does not train.
    ({"evaluator": ["e:1"]}, "evaluator", 0, ("evaluate", None, 1, False, None), "evaluator 0"),
    ({"ps": ["p:1"]}, "ps", 0, ("ps", None, 1, False, None), "ps 0"),
    # An evaluator need not be in the cluster.
    ({}, "evaluator", 7, ("evaluate", None, 1, False, None), "evaluator 7"),
    ({"chief": ["c:1"]}, "evaluator", 7, ("evaluate", None, 1, False, "c:1"), "evaluator 7"),
    (TWO_WORKERS, "evaluator", 7, ("evaluate", None, 2, False, "a:1"), "evaluator 7"),
]


@pytest.mark.parametrize(("jobs", "kind", "index", "expected", "name"), ROLES)
def test_a_task_has_the_role_and_the_rank_of_its_place_in_the_cluster(
    jobs: dict[str, list[str]], kind: str, index: int, expected: Facts, name: str
) -> None:
    spec = read(kind, index, **jobs)
    role, rank, count, chief, coordinator = expected
    assert facts(spec) == expected
    assert (spec.task_type, spec.task_index, spec.name) == (kind, index, name)
    assert spec.has_ps == ("ps" in jobs)
    tasks = [Task(kind, n, Address.parse(text, "")) for n, text in enumerate(jobs.get(kind, []))]
    assert spec.task == (tasks[index] if index < len(tasks) else None)
    assert spec.as_json() == {
        "role": role,
        "task_type": kind,
        "task_index": index,
        "rank": rank,
        "num_processes": count,
        "is_chief": chief,
        "coordinator": coordinator,
        "jobs": jobs,
    }


def test_the_training_tasks_are_in_the_order_of_their_ranks() -> None:
    spec = read("ps", 1, **FULL)
    assert [str(task) for task in spec.processes] == ["chief", "worker 0", "worker 1"]
    assert [str(task.address) for task in spec.processes] == ["c:1", "w:1", "w:2"]
    assert list(spec.jobs) == ["chief", "worker", "ps", "evaluator"]
    assert str(spec.task) == "ps 1"


@pytest.mark.parametrize("job", ["worker", "chief", "master"])
def test_a_single_task_needs_no_name(job: str) -> None:
    spec = read(**{job: ["a:1"]})
    assert facts(spec) == ("local", 0, 1, True, "a:1")
    assert (spec.task_type, spec.task_index) == (None, None)
    assert str(spec.own_task.address) == "a:1"


# What others put into TF_CONFIG.
MORE: Config = {
    **{"environment": "cloud", "job": {"x": [None]}, "rpc_layer": "grpc"},
    **{"session_master": "", "eval_session_master": "", "service": {}, "model_dir": "/m"},
    "cluster": TWO_WORKERS,
    "task": {"type": "worker", "index": 1, "cloud": True, "trial": "3"},
}
SPELLINGS: dict[str, tuple[Config, Config]] = {
    "TensorFlow 1's name of the chief, in the chief": (
        config("master", 0, **MASTER),
        config("chief", 0, chief=["m:1"], worker=["a:1"], ps=["b:1"]),
    ),
    "TensorFlow 1's name of the chief, in a worker": (
        config("worker", 0, **MASTER),
        config("worker", 0, chief=["m:1"], worker=["a:1"], ps=["b:1"]),
    ),
    "TensorFlow 1's name of the chief, in a server": (
        config("ps", 0, **MASTER),
        config("ps", 0, chief=["m:1"], worker=["a:1"], ps=["b:1"]),
    ),
    "TensorFlow 1's name of a single task": (
        config("master", 0, master=["a:1"]),
        config("chief", 0, chief=["a:1"]),
    ),
    "a single worker without its index": (
        {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}},
        config("worker", 0, worker=["a:1"]),
    ),
    "a single chief without its index": (
        {"cluster": {"chief": ["a:1"]}, "task": {"type": "chief"}},
        config("chief", 0, chief=["a:1"]),
    ),
    "a single master without its index": (
        {"cluster": {"master": ["a:1"]}, "task": {"type": "master"}},
        config("chief", 0, chief=["a:1"]),
    ),
    "an index that is a numeric string": (
        config("worker", "1", **TWO_WORKERS),
        config("worker", 1, **TWO_WORKERS),
    ),
    "keys of others": (MORE, config("worker", 1, **TWO_WORKERS)),
}


@pytest.mark.parametrize(("other", "usual"), SPELLINGS.values(), ids=SPELLINGS)
def test_another_spelling_of_a_task_is_the_same_task(other: Config, usual: Config) -> None:
    assert from_tf_config(json.dumps(other)) == from_tf_config(json.dumps(usual))


# --- Any cluster ---

addresses = st.builds(
    lambda host, port: f"{host}:{port}",
    st.sampled_from(["a", "w-0.job.svc", "10.0.0.1", "[::1]", "[2001:db8::a:1]"]),
    st.integers(1, 65535),
)


@st.composite
def clusters(draw: st.DrawFn, least: int = 1) -> dict[str, list[str]]:
    """Jobs with at least so many training tasks, in any order."""
    chief = draw(st.integers(0, 1))
    sizes = {
        "chief": chief,
        "worker": draw(st.integers(max(0, least - chief), 5)),
        "ps": draw(st.integers(0, 3)),
        "evaluator": draw(st.integers(0, 1)),
    }
    total = sum(sizes.values())
    left = draw(st.lists(addresses, min_size=total, max_size=total, unique=True))
    jobs = {job: [left.pop() for _ in range(size)] for job, size in sizes.items() if size}
    return {job: jobs[job] for job in draw(st.permutations(list(jobs)))}


@settings
@hypothesis.given(clusters())
def test_the_training_tasks_are_numbered_without_gaps_and_one_is_the_chief(
    jobs: dict[str, list[str]],
) -> None:
    training = [(job, i) for job in ("chief", "worker") for i in range(len(jobs.get(job, [])))]
    specs = [read(job, i, **jobs) for job, i in training]
    assert [spec.rank for spec in specs] == list(range(len(training)))
    assert [spec.is_chief for spec in specs] == [True] + [False] * (len(training) - 1)
    assert {spec.num_processes for spec in specs} == {len(training)}
    assert {str(spec.coordinator) for spec in specs} == {jobs[training[0][0]][0]}
    for spec, (job, i) in zip(specs, training, strict=True):
        assert str(spec.processes[spec.rank or 0].address) == jobs[job][i]
        assert spec.role is (Role.LOCAL if len(spec.tasks) == 1 else Role.TRAIN)
        assert spec.as_json()["jobs"] == jobs
        assert pickle.loads(pickle.dumps(spec)) == spec


@settings
@hypothesis.given(clusters(), st.data())
def test_a_cluster_of_objects_of_indices_or_as_it_is_printed_is_the_same_cluster(
    jobs: dict[str, list[str]], data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(jobs)))
    index = data.draw(st.integers(0, len(jobs[kind]) - 1))
    spec = read(kind, index, **jobs)
    objects = {
        job: {str(i): texts[i] for i in data.draw(st.permutations(range(len(texts))))}
        for job, texts in jobs.items()
    }
    assert read(kind, index, **objects) == spec
    printed = json.loads(json.dumps(spec.as_json()))
    assert read(printed["task_type"], printed["task_index"], **printed["jobs"]) == spec


# --- Any breakage ---

Breakage = Callable[[Config, str, int], str]


def break_address(text: Callable[[str], object]) -> Breakage:
    def breakage(broken: Config, job: str, index: int) -> str:
        broken["cluster"][job][index] = text(broken["cluster"][job][index])
        return f"cluster.{job}[{index}] is "

    return breakage


def break_job(value: Callable[[list[str]], object], field: str = "cluster.{} ") -> Breakage:
    def breakage(broken: Config, job: str, index: int) -> str:
        broken["cluster"][job] = value(broken["cluster"][job])
        return field.format(job)

    return breakage


def break_task(field: str, value: object) -> Breakage:
    def breakage(broken: Config, job: str, index: int) -> str:
        broken["task"][field] = value
        return f"task.{field} is "

    return breakage


def misspell_job(broken: Config, job: str, index: int) -> str:
    broken["cluster"][f"{job}s"] = broken["cluster"].pop(job)
    return f"cluster has an unknown job '{job}s'. Did you mean '{job}'?"


def index_too_large(broken: Config, job: str, index: int) -> str:
    broken["task"] = {"type": job, "index": len(broken["cluster"][job])}
    return f"task.index is {len(broken['cluster'][job])}: cluster.{job} has "


def forget(*path: str) -> Breakage:
    def breakage(broken: Config, job: str, index: int) -> str:
        parent = broken
        for key in path[:-1]:
            parent = parent[key]
        del parent[path[-1]]
        return f"{'.'.join(path)} is missing"

    return breakage


BREAKAGES: dict[str, Breakage] = {
    "no port": break_address(lambda text: text.rpartition(":")[0]),
    "port 0": break_address(lambda text: text.rpartition(":")[0] + ":0"),
    "port 70000": break_address(lambda text: text.rpartition(":")[0] + ":70000"),
    "no host": break_address(lambda text: ":" + text.rpartition(":")[2]),
    "a scheme": break_address(lambda text: f"grpc://{text}"),
    "a space": break_address(lambda text: f"{text} "),
    "null": break_address(lambda text: None),
    "a list": break_address(lambda text: [text]),
    "a string for a job": break_job(lambda texts: texts[0]),
    "a number for a job": break_job(len),
    "an empty job": break_job(lambda texts: []),
    "an empty object for a job": break_job(lambda texts: {}),
    "indices from 1": break_job(
        lambda texts: {str(i): text for i, text in enumerate(texts, start=1)},
        "cluster.{} has the index ",
    ),
    "an address twice": break_job(lambda texts: [*texts, texts[0]], "cluster.{}["),
    "an unknown job": misspell_job,
    "an unknown type": break_task("type", "wroker"),
    "a number for a type": break_task("type", 1),
    "null for a type": break_task("type", None),
    "an index below 0": break_task("index", -1),
    "a fractional index": break_task("index", 0.0),
    "true for an index": break_task("index", True),
    "null for an index": break_task("index", None),
    "words for an index": break_task("index", "first"),
    "an index too large": index_too_large,
    "no task": forget("task"),
    "no type": forget("task", "type"),
    "no index": forget("task", "index"),
}


@hypothesis.settings(settings, max_examples=10)
@hypothesis.given(clusters(least=2), st.data())
def test_one_breakage_in_any_cluster_is_refused_by_its_field(
    jobs: dict[str, list[str]], data: st.DataObject
) -> None:
    kind, job = (data.draw(st.sampled_from(sorted(jobs))) for _ in range(2))
    whole = json.dumps(config(kind, data.draw(st.integers(0, len(jobs[kind]) - 1)), **jobs))
    from_tf_config(whole)
    index = data.draw(st.integers(0, len(jobs[job]) - 1))
    for name, breakage in BREAKAGES.items():
        broken = json.loads(whole)
        hypothesis.note(name)
        field = breakage(broken, job, index)
        assert refusal(broken).startswith(field)


# --- Each breakage ---

WORKERS = ["a:1", "b:1"]
# A value, or the text of a TF_CONFIG; what the message begins with.
BROKEN: list[tuple[object, str]] = [
    # The whole
    ([1, 2], "the value is [1, 2]: it must be an object"),
    ('"worker"', "the value is 'worker': it must be an object"),
    ("null", "the value is null: it must be an object"),
    ({"cluster": WORKERS}, 'cluster is ["a:1", "b:1"]: it must be an object'),
    ({"cluster": None}, "cluster is null: it must be an object"),
    ({"task": "worker 0"}, "task is 'worker 0': it must be an object"),
    ({"task": None}, "task is null: it must be an object"),
    # Keys
    ({"clusters": {"worker": WORKERS}}, "there is no key 'clusters'. Did you mean 'cluster'?"),
    ({"Cluster": {"worker": WORKERS}}, "there is no key 'Cluster'. Did you mean 'cluster'?"),
    ({**config("chief", 0, chief=["a:1"]), "taks": {}}, "there is no key 'taks'. Did you mean 't"),
    ({"worker": WORKERS}, "there is no key 'worker'. There are: cluster, task."),
    (
        {"cluster": {"worker": WORKERS}, "task": {"type": "worker", "idx": 1}},
        "task has an unknown key 'idx'. Did you mean 'index'?",
    ),
    (
        {"sparseCluster": {"worker": {"1": "a:1"}, "ps": []}, "task": {"type": "worker"}},
        'sparseCluster is {"worker": {"1": "a:1"}, "ps": []}: a TFJob with enableDynamicWorker',
    ),
    ({"cluster": {}}, 'cluster is empty: list the addresses of all tasks, "cluster": {"worker":'),
    ({"cluster": {}, "task": {"cloud": "x"}}, "cluster is empty: list the addresses"),
    (config("chief", 0), "cluster is empty: list the addresses"),
    (config("worker", 0), "cluster is empty: list the addresses"),
    ({"task": {"type": "chief", "index": 0}}, "cluster is missing: list the addresses"),
    # Jobs
    (config(wroker=WORKERS), "cluster has an unknown job 'wroker'. Did you mean 'worker'?"),
    (config(gpu=WORKERS), "cluster has an unknown job 'gpu'. There are: master, chief, worker, "),
    (config("worker", 0, worker="a:1"), "cluster.worker is 'a:1': it must be a list"),
    (config("worker", 0, worker=None), "cluster.worker is null: it must be a list"),
    (config("worker", 0, worker=[]), "cluster.worker is empty, []: give addresses"),
    (config("worker", 0, worker=["a:1"], ps=[]), "cluster.ps is empty, []: give addresses"),
    (
        config("worker", 0, chief=WORKERS, worker=["c:1"]),
        'cluster.chief is ["a:1", "b:1"]: there can be one chief, not 2',
    ),
    (
        config("master", 0, master=WORKERS),
        'cluster.master is ["a:1", "b:1"]: there can be one master, not 2',
    ),
    (
        config("chief", 0, master=["a:1"], chief=["b:1"]),
        'cluster.chief is ["b:1"] and cluster.master is ["a:1"]: they are one job',
    ),
    (
        config("evaluator", 0, evaluator=WORKERS),
        'cluster.evaluator is ["a:1", "b:1"]: there can be one evaluator, not 2',
    ),
    # Indices for keys
    (
        config("worker", 0, worker={"0": "a:1", "2": "b:1"}),
        "cluster.worker has the index '2': number its 2 addresses from '0' to '1'",
    ),
    (config("worker", 0, worker={"00": "a:1"}), "cluster.worker has the index '00': number its 1"),
    (config("worker", 0, worker={"+0": "a:1"}), "cluster.worker has the index '+0': number its 1"),
    (
        config("worker", 0, worker={"\u0660": "a:1"}),
        "cluster.worker has the index '\u0660': number its 1",
    ),
    (config("worker", 0, worker={"a:1": 0}), "cluster.worker has the index 'a:1': number its 1"),
    (config("worker", 0, worker={}), "cluster.worker is empty, []: give addresses"),
    (
        config("ps", 0, worker=["a:1"], ps={"0": "b:1", "1": 2222}),
        "cluster.ps[1] is 2222: it must be a string, host:port",
    ),
    # Addresses of two tasks
    (
        config("worker", 0, worker=["a:1", "b:1", "a:1"]),
        "cluster.worker[2] is 'a:1', the same address as cluster.worker[0]: give each task its own",
    ),
    (
        config("worker", 0, worker=["a.B:1"], ps=["c:1", "A.b:1"]),
        "cluster.ps[1] is 'A.b:1', the same address as cluster.worker[0]",
    ),
    (
        config("worker", 0, chief=["[::1]:1"], worker=["[0:0::0:1]:1"]),
        "cluster.worker[0] is '[0:0::0:1]:1', the same address as cluster.chief[0]",
    ),
    # The task
    (config(worker=WORKERS), "task is missing, but the cluster has 2 tasks: name the"),
    ({"cluster": {"worker": WORKERS}, "task": {"cloud": 1}}, "task is missing, but the cluster"),
    ({"task": {"index": 0}}, 'task.type is missing, task is {"index": 0}: write "task": {'),
    (
        {"cluster": {"worker": WORKERS}, "task": {"type": "worker"}},
        'task.index is missing, task is {"type": "worker"}: write "task": {',
    ),
    (config("Worker", 0, worker=WORKERS), "task.type is unknown, 'Worker'. Did you mean 'worker'?"),
    (config("", 0, worker=WORKERS), "task.type is unknown, ''. There are: master, chief, "),
    (config("worker", 2, worker=WORKERS), "task.index is 2: cluster.worker has 2 tasks, the last"),
    (config("worker", "2", worker=WORKERS), "task.index is 2: cluster.worker has 2 tasks"),
    (config("master", 1, master=["a:1"]), "task.index is 1: cluster.master has 1 tasks"),
    (config("evaluator", 1, evaluator=["a:1"]), "task.index is 1: cluster.evaluator has 1 tasks"),
    (
        config("ps", 0, worker=WORKERS, chief=["c:1"]),
        "task.type is 'ps' (task.index 0), but the cluster has no such task; it has: chief, worker",
    ),
    (config("chief", 0, worker=["a:1"]), "task.type is 'chief' (task.index 0), but the cluster"),
    (config("worker", 0, chief=["a:1"]), "task.type is 'worker' (task.index 0), but the cluster"),
    (config("worker", 1), "task.type is 'worker' (task.index 1), but the cluster has no such "),
    (config("ps", 0), "task.type is 'ps' (task.index 0), but the cluster has no such task; it is"),
    *(
        (config("worker", index, worker=WORKERS), f"task.index is {shown}: it must be a whole")
        for index, shown in [
            (-1, "-1"),
            (1.0, "1.0"),
            (True, "true"),
            (False, "false"),
            (None, "null"),
            ([0], "[0]"),
            ("", "''"),
            ("-1", "'-1'"),
            ("+1", "'+1'"),
            (" 1", "' 1'"),
            ("1.0", "'1.0'"),
            ("\u0661", "'\u0661'"),
        ]
    ),
    (config("evaluator", -1, worker=WORKERS), "task.index is -1: it must be a whole number"),
    # A long value is cut
    (config("worker", 0, worker=["x" * 10_000]), f"cluster.worker[0] is '{'x' * 99}...: {NO_PORT}"),
    # A text that is not JSON
    ("{", "not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
    (" ", "not JSON: Expecting value at line 1, column 2"),
    ("{cluster: {}}", "not JSON: Expecting property name enclosed in double quotes at line 1"),
    ('{"cluster": {}\n "task": 1}', "not JSON: Expecting ',' delimiter at line 2, column 2"),
    ('{"cluster": {}} x', "not JSON: Extra data at line 1, column 17, near "),
    ('\ufeff{"cluster": {}}', "not JSON: Unexpected UTF-8 BOM"),
    ('{"task": NaN}', "it contains NaN, which is not JSON"),
    ('{"more": [-Infinity]}', "it contains -Infinity, which is not JSON"),
    (
        '{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}}',
        'the key \'worker\' occurs twice, with ["a:1"] and ["b:1"]: keep one',
    ),
    ('{"task": {}, "task": {}}', "the key 'task' occurs twice, with {} and {}: keep one"),
    (
        '{"cluster": {"worker": {"0": "a:1", "0": "b:1"}}}',
        "the key '0' occurs twice, with 'a:1' and 'b:1': keep one",
    ),
    ("[" * 100_000, "its objects or lists are nested too deeply"),
    ('{"x":' * 100_000, "its objects or lists are nested too deeply"),
    ('{"task": {"type": "worker", "index": ' + "9" * 5000 + "}}", "Exceeds the limit"),
    ('{"task": {"type": "worker", "index": "' + "9" * 5000 + '"}}', "Exceeds the limit"),
    (
        '{"cluster": {"worker": [a:1]}}',
        'not JSON: Expecting value at line 1, column 25, near \'": {"worker": [a:1]}}\'',
    ),
]


@pytest.mark.parametrize(("value", "expected"), BROKEN, ids=[text[:60] for _, text in BROKEN])
def test_what_is_broken_is_refused_with_its_field_and_its_value_or_its_place(
    value: object, expected: str
) -> None:
    assert refusal(value).startswith(expected)


def test_a_value_nested_nearly_too_deeply_is_refused_in_one_line() -> None:
    for depth in range(100, 1500, 50):
        refusal('{"cluster": ' + "[" * depth + "]" * depth + "}")


@settings
@hypothesis.given(st.text())
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    try:
        from_tf_config(text)
    except UserError as error:
        assert len(str(error).splitlines()) == 1


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 3),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(["worker", "chief", "a:1", "b:1", "0", "1", "evaluator"]),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["worker", "type", "index", "0", "1"]), inner, max_size=3),
    ),
    max_leaves=6,
)


@settings
@hypothesis.given(json_values, json_values)
def test_any_cluster_and_task_are_read_or_refused_in_one_line(cluster: Any, task: Any) -> None:
    text = json.dumps({"cluster": cluster, "task": task})
    try:
        assert from_tf_config(text).num_processes >= 1
    except UserError as error:
        assert len(str(error).splitlines()) == 1


# --- Slurm and Open MPI ---


def environ(kind: str, index: int, /, **others: str) -> dict[str, str]:
    jobs = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"], "evaluator": ["e:1"]}
    return {"TF_CONFIG": json.dumps(config(kind, index, **jobs)), **others}


AGREEING: list[dict[str, str]] = [
    {},
    {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"},
    {"SLURM_NTASKS": "3", "SLURM_PROCID": "2"},
    {"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "8", "SLURM_PROCID": "2"},
    {"SLURM_NTASKS": "8"},  # no task of the job: its login node
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # a launcher inside one task
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"},
    {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
]


@pytest.mark.parametrize("others", AGREEING)
def test_a_scheduler_may_say_the_same_or_have_one_task(others: dict[str, str]) -> None:
    assert from_environment(environ("worker", 1, **others)).rank == 2


DISAGREEING: list[tuple[dict[str, str], str]] = [
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, "SLURM_STEP_NUM_TASKS is '2', but TF_CON"),
    ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS is '4', but TF_CONFIG has 3 training"),
    ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}, "SLURM_NTASKS is '4', but TF_CONFIG has 3 train"),
    (
        {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"},
        "SLURM_PROCID is '1', but according to TF_CONFIG this is worker 1, rank 2",
    ),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE is '2', but TF_CONFIG has 3 training"),
    (
        {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0"},
        "OMPI_COMM_WORLD_RANK is '0', but according to TF_CONFIG this is worker 1, rank 2",
    ),
]


@pytest.mark.parametrize(("others", "expected"), DISAGREEING)
def test_a_scheduler_that_started_something_else_is_an_error(
    others: dict[str, str], expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        from_environment(environ("worker", 1, **others))
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("others", [others for others, _ in DISAGREEING])
def test_the_scheduler_is_asked_of_training_tasks_of_several_alone(others: dict[str, str]) -> None:
    assert from_environment(environ("evaluator", 0, **others)).role is Role.EVALUATE
    assert from_environment(environ("ps", 0, **others)).role is Role.PS
    assert from_environment(others).role is Role.LOCAL
    single = {"TF_CONFIG": json.dumps(config("chief", 0, chief=["c:1"], evaluator=["e:1"]))}
    assert from_environment(single | others).role is Role.TRAIN


def test_the_environment_is_read_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", environ("chief", 0)["TF_CONFIG"])
    assert from_environment().name == "chief"
    monkeypatch.delenv("TF_CONFIG")
    assert from_environment().name == "local"


# --- What it imports ---


def test_reading_and_printing_import_neither_jax_nor_sockets() -> None:
    code = """
import sys
from spmdtrain.cluster.command import main
assert main(["--json", "--no-network"]) == 0
print(sorted({"jax", "numpy", "socket", "rich.console"} & set(sys.modules)))
assert main(["--json"]) == 0
print(sorted({"jax", "numpy", "socket", "rich.console"} & set(sys.modules)))
"""
    env = os.environ | {"TF_CONFIG": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=BOUND
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (lines[1], lines[3]) == ("[]", "['socket']")
