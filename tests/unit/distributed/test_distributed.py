"""What is decided before there is a job, and what an error of a job says."""

import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import BOUND, environment, run, small_experiment
from jax._src import distributed as jax_distributed
from processes import free_port, tf_config

from spmdtrain.cluster.spec import ClusterSpec, from_tf_config
from spmdtrain.distributed import failures, initialize, process_group
from spmdtrain.distributed.initialize import ClusterOptions
from spmdtrain.distributed.progress import CONTEXT
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import ClusterError, NonFiniteError, UserError
from spmdtrain.run import main
from spmdtrain.testing import run_processes, start_processes
from spmdtrain.train.trainer import Trainer

ADDRESSES = ("127.0.0.1:4001", "127.0.0.1:4002", "127.0.0.1:4003")


def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which nothing has been decided yet."""
    monkeypatch.setattr(CONTEXT, "initialized", False)
    monkeypatch.setattr(CONTEXT, "deferred", None)
    monkeypatch.setattr(CONTEXT, "job", None)


# -- descriptions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ClusterOptions(processes=2, process_id=0),
            "coordinator is missing: coordinator, processes and",
        ),
        (ClusterOptions(coordinator="a:1", process_id=0), "processes is missing"),
        (ClusterOptions(coordinator="a:1", processes=2), "process_id is missing"),
        (
            ClusterOptions(coordinator="a:1", processes=2, process_id=2),
            "process_id is 2: with processes=2",
        ),
        (ClusterOptions(coordinator="a:1", processes=2, process_id=-1), "process_id is -1"),
        (
            ClusterOptions(coordinator="a:1", processes=0, process_id=0),
            "processes is 0: it must be",
        ),
        (ClusterOptions(coordinator="a", processes=2, process_id=0), "coordinator"),
        (ClusterOptions(coordinator="a:70000", processes=2, process_id=0), "coordinator.*70000"),
    ],
)
def test_three_options_that_do_not_make_a_cluster_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: ClusterOptions, message: str
) -> None:
    unsettled(monkeypatch)
    with pytest.raises(UserError, match=message):
        initialize.initialize(from_tf_config(None), explicit=given)


@pytest.mark.parametrize(
    ("text", "detect", "other"),
    [(tf_config(ADDRESSES, 1), False, "TF_CONFIG"), (None, True, "auto_detect=True")],
)
def test_two_descriptions_are_refused(
    monkeypatch: pytest.MonkeyPatch, text: str | None, detect: bool, other: str
) -> None:
    unsettled(monkeypatch)
    given = ClusterOptions(coordinator="a:1", processes=2, process_id=0)
    with pytest.raises(UserError, match=f"exclude {other}"):
        initialize.initialize(from_tf_config(text), auto_detect=detect, explicit=given)


def test_where_nothing_is_to_be_found_auto_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    unsettled(monkeypatch)
    for name in ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="auto_detect=True: found no"):
        initialize.initialize(from_tf_config(None), auto_detect=True)


def test_what_is_found_but_not_usable_is_never_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    unsettled(monkeypatch)
    monkeypatch.setenv("SLURM_JOB_ID", "12")  # and nothing else that Slurm sets
    for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="auto_detect=True: "):
        initialize.initialize(from_tf_config(None), auto_detect=True)


def test_what_slurm_says_is_found_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    described = {
        "SLURM_JOB_ID": "120",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
    }
    for name, value in described.items():
        monkeypatch.setenv(name, value)
    found = initialize.find_party(from_tf_config(None), True, ClusterOptions())
    assert found is not None
    assert (found.host, found.rank) == ("node3", 2) and 1024 < found.port < 65536
    assert list(found.names) == ["process 0", "process 1", "process 2", "process 3"]
    # Never by accident.
    assert initialize.find_party(from_tf_config(None), False, ClusterOptions()) is None


def in_cluster(task: str, **jobs: list[str]) -> ClusterSpec:
    """A cluster with a parameter server, as one of its tasks sees it."""
    jobs = jobs or {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    return from_tf_config(json.dumps({"cluster": jobs, "task": {"type": task, "index": 0}}))


def test_a_server_is_refused_by_a_synchronous_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    unsettled(monkeypatch)
    initialize.initialize(in_cluster("ps"))  # the strategy is not known yet
    with pytest.raises(UserError, match="ps 0"):
        initialize.initialize(strategy="mirrored")


def test_an_evaluator_joins_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    unsettled(monkeypatch)
    monkeypatch.setattr(initialize, "join_rendezvous", None)
    initialize.initialize(in_cluster("evaluator"))
    assert CONTEXT.initialized


def test_with_servers_the_strategy_decides_who_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    met = []

    def meet(party: Any, timeout: float, tell: Any) -> None:
        met.append((party.names[party.rank], timeout))
        raise ClusterError("enough")

    monkeypatch.setattr(initialize, "join_rendezvous", meet)
    is_started = "spmdtrain.distributed.initialize.xla_bridge.backends_are_initialized"
    monkeypatch.setattr(is_started, lambda: False)
    unsettled(monkeypatch)
    initialize.initialize(in_cluster("worker"), timeout=7.0)
    initialize.initialize()
    assert met == []
    with pytest.raises(ClusterError):
        initialize.initialize(strategy="fully_sharded")
    assert met == [("worker 0", 7.0)]
    unsettled(monkeypatch)
    initialize.initialize(in_cluster("worker"), strategy="parameter_server")
    assert met == [("worker 0", 7.0)] and CONTEXT.initialized
    monkeypatch.setattr(is_started, lambda: True)
    unsettled(monkeypatch)
    initialize.initialize(in_cluster("worker"))
    with pytest.raises(UserError, match=r"initialize\(strategy"):
        initialize.initialize(strategy="mirrored")


def test_who_it_is_is_taken_from_the_description() -> None:
    found = initialize.find_party(from_tf_config(tf_config(ADDRESSES, 2)), False, ClusterOptions())
    assert found is not None
    assert (found.host, found.port, found.rank) == ("127.0.0.1", 4001, 2)
    assert list(found.names) == ["chief", "worker 0", "worker 1"]
    assert list(found.addresses) == list(ADDRESSES)
    about = dict(found.about)
    assert about["jax"] == jax.__version__ and len(about["spmdtrain/run.py"]) == 12


def test_processes_of_other_code_in_a_subfolder_or_of_another_script_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package, script = tmp_path / "spmdtrain", tmp_path / "train.py"
    (package / "models").mkdir(parents=True)
    changed = package / "models" / "layers.py"
    monkeypatch.setattr(initialize, "__file__", str(package / "distributed" / "initialize.py"))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    changed.write_text("a = 1")
    script.write_text("b = 1")
    before = initialize.process_properties()
    for path, name in ((changed, "spmdtrain/models/layers.py"), (script, "the script train.py")):
        path.write_text("c = 1")
        after = initialize.process_properties()
        assert {key for key in before if before[key] != after[key]} == {name}
        before = after


def test_a_job_comes_too_late_when_jax_has_started_its_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsettled(monkeypatch)
    assert jax.device_count() == 8
    message = "JAX's backends are already initialized, but this process is worker 1 of 3: call"
    with pytest.raises(UserError, match=message):
        initialize.initialize(from_tf_config(tf_config(ADDRESSES, 2)))


@pytest.mark.drill
def test_the_error_for_a_model_made_before_the_job_says_how_to_fix_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import jax, optax\nfrom flax import nnx\nfrom spmdtrain import Trainer\n"
        "model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))\n"
        "Trainer(model=model, objective=lambda m, b: {}, optimizer=optax.sgd(0.1))\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)],
        env=environment() | {"TF_CONFIG": tf_config(ADDRESSES, 0)},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert ended.returncode != 0
    last = ended.stderr.splitlines()[-1]
    assert "JAX's backends are already initialized, but this process is chief of 3: call" in last


@pytest.mark.drill
def test_one_process_of_one_is_alone(tmp_path: Path) -> None:
    """By the options, too; and a trainer does not look for a job again."""
    port = free_port()
    options = ("--coordinator", f"127.0.0.1:{port}", "--processes", 1, "--process-id", 0)
    ended = run(small_experiment(tmp_path), "--workdir", tmp_path / "run", *options)
    assert ended.returncode == 0 and "processes" not in ended.stdout, ended.stderr


def test_alone_all_agreement_is_trivial() -> None:
    assert (process_group.count(), process_group.rank()) == (1, 0)
    assert process_group.is_chief() and not process_group.preempted()
    assert process_group.broadcast("x") == "x" and process_group.gather(3) == [3]
    assert process_group.collect(None) == [None] and process_group.summed({"a": 2}) == {"a": 2}
    process_group.barrier()
    process_group.agree("anything", object())
    error = KeyError("as it was")
    with pytest.raises(KeyError) as raised:
        process_group.run_on_all(lambda: (_ for _ in ()).throw(error), KeyError)
    assert raised.value is error
    assert failures.reason(ValueError("a\nb")) == "ValueError: a b"


# -- differences -----------------------------------------------------------------------------------


class Store:
    """The key-value store of a job whose processes are threads."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout: int) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, 30)
            return self.values[key]

    def key_value_delete(self, key: str) -> None:
        del self.values[key]


def refusals(
    monkeypatch: pytest.MonkeyPatch, values: list[Any], what: str = "", **options: Any
) -> set[str]:
    """The messages of `agree` in processes with these values; all of them have the same."""
    store, of_thread = Store(), threading.local()
    names = ["chief", *(f"worker {n}" for n in range(len(values) - 1))]
    monkeypatch.setattr(process_group, "current", lambda: of_thread.job)

    def call(rank: int) -> str:
        of_thread.job = process_group.Job(names, rank, store)
        try:
            process_group.agree(what, values[rank], **options)
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(values)) as processes:
        return set(processes.map(call, range(len(values))))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"a": {"b": 1}, "c": [1, 3]}, "c is [1, 3] in worker 1 and [1, 2] in chief"),
        ({"a": {"b": 1.5}, "c": [1, 2]}, "a.b is 1.5 in worker 1 and 1 in chief"),
        ({"a": {}, "c": [1, 2]}, "a.b is not set in worker 1 and 1 in chief"),
        ({"a": {"b": 1, "d": 2}, "c": [1, 2]}, "a.d is 2 in worker 1 and not set in chief"),
    ],
)
def test_the_first_difference_is_named_with_both_values(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], difference: str
) -> None:
    mine = {"a": {"b": 1}, "c": (1, 2)}
    (message,) = refusals(monkeypatch, [mine, mine, other])
    expected = "start all processes of a job with the same code and settings"
    assert message == f"worker 1 and chief differ: {difference}; {expected}"


def test_all_processes_that_differ_are_named_with_what_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (message,) = refusals(monkeypatch, [1, 2, 1, 2, 3], "seed", advice="give 1")
    which, values = message.split(": ")
    assert which == "worker 0 and worker 2 and worker 3 and chief differ"
    assert values == "seed is 2 in worker 0 and worker 2 and 3 in worker 3 and 1 in chief; give 1"
    (message,) = refusals(monkeypatch, [0, *range(20)], "rank")
    assert message.startswith("worker 1, worker 2, worker 3, ") and "and 11 more" in message


def test_details_say_where_a_value_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def details() -> dict[str, str]:
        lines = ["x", "y", "z"] if process_group.is_chief() else ["x", "z"]
        return {f"line {number}": line for number, line in enumerate(lines)}

    options: dict[str, Any] = {"details": details, "differ": "compiled different programs"}
    (message,) = refusals(monkeypatch, ["abc", "def", "def"], "the program", **options)
    which = "worker 0 and worker 1 and chief compiled different programs"
    assert message.startswith(f"{which}: line 1 is z in worker 0 and worker 1 and y in chief; ")
    options["details"] = dict  # the program alone differs
    (message,) = refusals(monkeypatch, ["abc", "def"], "the program", **options)
    assert "the program is def in worker 0 and abc in chief; " in message


def test_the_same_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [{"a": {"b": Path("x")}, "c": (1, 2)}, {"c": [1, 2], "a": {"b": "x"}}]
    assert refusals(monkeypatch, values) == {""}


def test_nested_values_are_named_by_their_path() -> None:
    found = process_group.flatten({"a": {"b": {"c": (1,)}, "d": None}, "e": Path("x")})
    assert found == {"a.b.c": [1], "a.d": None, "e": "x"}


# -- errors that only say that another process has gone --------------------------------------------

LOST = [
    # As JAX 0.10 printed them when a process of a job was killed.
    "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection "
    "closed by peer [127.0.0.1]:10116",
    "FAILED_PRECONDITION: Buffer Definition Event: Gloo all-reduce failed: [external/gloo/gloo/"
    "transport/tcp/pair.cc:538] Read error [127.0.0.1]:29217: Connection reset by peer",
    "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n"
    "/job:jax_worker/replica:0/task:1",
    "INTERNAL: NCCL operation ncclAllReduce failed: remote process exited or there was a network "
    "error",
    "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1234: "
    "Failed to connect to remote host: Connection refused",
    "ABORTED: Coordination service has stopped",
]
OWN = [
    "RESOURCE_EXHAUSTED: Out of memory allocating 12345 bytes",
    "INVALID_ARGUMENT: Executable expected parameter 0 of size 4 but got buffer of size 8",
    "INTERNAL: CUDA error: an illegal memory access was encountered",
    "NOT_FOUND: no such key: spmdtrain/named/x",
]


@pytest.mark.parametrize("text", LOST)
def test_a_lost_connection_is_known(text: str) -> None:
    assert failures.is_lost(jax.errors.JaxRuntimeError(text))
    assert failures.is_lost(ValueError(text))
    # Also where it was caught on the way.
    outer = RuntimeError("a step failed")
    outer.__cause__ = ValueError(text)
    assert failures.is_lost(outer)
    outer = RuntimeError("while it was handled")
    outer.__context__ = jax.errors.JaxRuntimeError(text)
    assert failures.is_lost(outer)


@pytest.mark.parametrize("text", OWN)
def test_an_error_of_its_own_is_none(text: str) -> None:
    assert not failures.is_lost(jax.errors.JaxRuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the connection closed by peer is no loss in a file of yours"),
        ValueError("row 7: heartbeat is not a number"),
        UserError("mesh: gloo"),
        NonFiniteError("step 3: loss not finite"),
        OSError("Connection reset by peer"),  # for example of a storage
        KeyError("gloo"),
    ],
)
def test_an_error_of_the_users_is_none_whatever_its_words(error: Exception) -> None:
    assert not failures.is_lost(error)


SCHEDULED = """
import os
import spmdtrain

def threads(policy):
    return {n for n in os.listdir("/proc/self/task") if os.sched_getscheduler(int(n)) == policy}

spmdtrain.initialize()
import jax
before = threads(os.SCHED_OTHER)
jax.devices()
print(len(threads(os.SCHED_BATCH)) > 0, str(os.getpid()) in threads(os.SCHED_OTHER) & before)
"""


@pytest.mark.slow
def test_threads_of_cpu_collectives_preempt_no_other() -> None:
    """gloo's took a whole time slice from the thread it waited for: 10 ms for each collective."""
    found = run_processes(python(SCHEDULED), processes=2, timeout=BOUND)
    assert [one.output.splitlines()[-1] for one in found] == ["True True", "True True"]


# -- the helper for tests of users' own ------------------------------------------------------------

ECHO = "import json, os; c = json.loads(os.environ['TF_CONFIG']); print(c['task']['type'], "


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_run_processes_gives_each_its_place_and_its_devices() -> None:
    script = (
        ECHO + "c['task']['index'], os.environ['JAX_NUM_CPU_DEVICES'], 'XLA_FLAGS' in os.environ)"
    )
    found = run_processes(
        python(script),
        processes=3,
        devices_per_process=[1, 2, 3],
        timeout=30,
        env={"MORE": "1"},
    )
    assert [one.output.split() for one in found] == [
        ["chief", "0", "1", "False"],
        ["worker", "0", "2", "False"],
        ["worker", "1", "3", "False"],
    ]
    assert [one.task for one in found] == ["chief", "worker 0", "worker 1"]
    assert [one.code for one in found] == [0, 0, 0] and not any(one.killed for one in found)


FAILS = """
import json, os, subprocess, sys, time
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
print("here is", rank)
if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker":
    sys.exit(7)
subprocess.Popen(["sleep", "543.21"])
time.sleep(100)
"""


def asleep() -> bool:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return "sleep 543.21" in listed.stdout.splitlines()


@pytest.mark.slow
def test_run_processes_kills_the_rest_and_prints_every_log() -> None:
    with pytest.raises(AssertionError) as raised:
        run_processes(python(FAILS), processes=2, timeout=BOUND, grace=0.5)
    text = str(raised.value)
    assert "processes failed, exit codes chief: -9, worker 0: 7" in text
    assert "[chief] here is 0" in text and "[worker 0] here is 0" in text
    assert not asleep()
    chief, worker = run_processes(python(FAILS), processes=2, timeout=BOUND, grace=0.5, check=False)
    assert (chief.code, chief.killed, worker.code, worker.killed) == (-9, True, 7, False)
    assert chief.seconds > worker.seconds + 0.4


@pytest.mark.slow
def test_run_processes_ends_in_time_whatever_happens() -> None:
    for check in (True, False):
        with pytest.raises(
            AssertionError, match=r"timeout: chief, worker 0 still running\n(?s:.*)up"
        ):
            run_processes(
                python("import time; print('up'); time.sleep(100)"),
                processes=2,
                timeout=1.5,
                check=check,
            )


def test_a_started_job_can_be_waited_for_and_sent_signals() -> None:
    script = "import time; print('ready'); time.sleep(100)"
    with start_processes(python(script), processes=2, timeout=BOUND, grace=0.3) as job:
        job[1].wait_for("ready", timeout=30)
        with pytest.raises(AssertionError, match=r"chief ran for 0\.1 s without 'never':\nready"):
            job[0].wait_for("ready", timeout=30)
            job[0].wait_for("never", timeout=0.1)
        job[1].send(15)
        assert [(one.code, one.killed) for one in job.wait(check=False)] == [
            (-9, True),
            (-15, False),
        ]
        with pytest.raises(AssertionError, match="worker 0 exited with code -15 without 'never'"):
            job[1].wait_for("never", timeout=30)


def test_what_a_test_leaves_behind_is_killed() -> None:
    pids = []
    with (
        pytest.raises(ZeroDivisionError),
        start_processes(python("import time; time.sleep(100)"), processes=2, timeout=BOUND) as job,
    ):
        pids = [process.pid for process in job.processes]
        raise ZeroDivisionError
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_once_agreed_to_stop_stays_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX returns true at one point only; a later query must return true as well."""

    class Manager:
        def reached_sync_point(self, point: int) -> bool:
            return point == 3

    monkeypatch.setattr(CONTEXT, "job", process_group.Job(["chief", "worker 0"], 0, None))
    monkeypatch.setattr(jax_distributed.global_state, "preemption_sync_manager", Manager())
    assert [process_group.preempted() for _ in range(5)] == [False, False, True, True, True]


def test_of_several_processes_only_callbacks_may_stop_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = np.ones((8, 1), np.float32)
    fits = itertools.count()
    trainer = Trainer(
        model=partial(nnx.Linear, 1, 1),
        objective=lambda model, batch: {"loss": model(batch)},
        optimizer=optax.sgd(0.1),
        callbacks={
            "step": lambda event: event.trainer.stop(),
            "fit_start": lambda event: print(1 / (1 - next(fits))),
        },
        terminal=Terminal(quiet=True),
    )
    assert trainer.fit(x, steps=5, global_batch_size=8).step == 1
    with pytest.raises(ZeroDivisionError):  # it is over, too, when it has failed
        trainer.fit(x, steps=5, global_batch_size=8)
    monkeypatch.setattr(process_group, "count", lambda: 2)
    with pytest.raises(UserError, match=r"stop\(\)"):
        trainer.stop()


@pytest.mark.parametrize("option", ["--coordinator", "--processes", "--process-id"])
def test_an_evaluator_is_none_of_the_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    config = ["--config", str(small_experiment(tmp_path)), "--workdir", str(tmp_path / "run")]
    assert main([*config, "--role", "evaluate", option, "1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option} does not apply to an evaluator")
    assert not (tmp_path / "run").exists()
