"""Tasks as nodes of Ray: a chief that cannot listen where it should, or is gone meanwhile."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest

from spmdtrain import UserError
from spmdtrain.cluster.spec import ClusterSpec, from_environment
from spmdtrain.errors import ClusterError
from spmdtrain.parameter_server import ray_nodes, ray_pool
from spmdtrain.parameter_server.scheduler import Failed, PoolEvent, WorkerJoined, WorkerLost

exceptions = pytest.importorskip("ray").exceptions


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restores the environment: some of Ray's options are environment variables."""
    with mock.patch.dict(os.environ):
        yield


def spec_of(chief: str, kind: str = "chief") -> ClusterSpec:
    tasks = {"chief": [chief], "worker": ["127.0.0.1:20001"], "ps": ["127.0.0.1:20002"]}
    config = {"cluster": tasks, "task": {"type": kind, "index": 0}}
    return from_environment({"TF_CONFIG": json.dumps(config)})


@pytest.mark.slow
def test_an_address_that_another_process_keeps_is_waited_for_and_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        chief = f"127.0.0.1:{other.getsockname()[1]}"
        began = time.monotonic()
        with (
            pytest.raises(UserError, match=f"{chief}, .*already in use"),
            ray_nodes.head(spec_of(chief), 1.0),
        ):
            pytest.fail("it has begun")
        assert 1.0 <= time.monotonic() - began < 20.0


def test_an_address_of_no_interface_here_is_named_at_once() -> None:
    began = time.monotonic()
    with (
        pytest.raises(UserError, match=r"192\.0\.2\.1:2000, .*Cannot assign"),
        ray_nodes.head(spec_of("192.0.2.1:2000"), 60.0),  # of a network kept for documentation
    ):
        pytest.fail("it has begun")
    assert time.monotonic() - began < 20.0


@pytest.mark.parametrize(("kind", "task"), [("ps", "ps 0"), ("worker", "worker 0")])
def test_a_task_that_waits_for_its_chief_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, task: str
) -> None:
    monkeypatch.setattr(ray_nodes, "REPORT_INTERVAL", 0.1)
    monkeypatch.setattr(ray_nodes, "import_ray", lambda spec: None)
    monkeypatch.setattr(ray_nodes, "_listens", lambda host, port: False)
    with pytest.raises(UserError, match=r"the chief has not started after 0\.5 s"):
        ray_nodes.serve(spec_of("10.0.0.1:2222", kind), 0.5)
    said = f"{task} waits for the chief at 10.0.0.1:2222 (for 0 s, at most 0.5): nothing listens"
    assert said in capsys.readouterr().err


class Remote:
    """A method of an actor, which fails as a list says."""

    def __init__(self, *faults: Exception | None) -> None:
        self.faults = list(faults)

    def remote(self, *arguments: object) -> "Remote":
        return self

    def answer(self) -> None:
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault


def crew_of(worker: object) -> ray_pool.RayWorkerPool:
    """Of one worker, on a Ray whose calls have all been made as soon as they are looked for."""
    ray = SimpleNamespace(
        exceptions=exceptions,
        wait=lambda calls, num_returns, timeout: (calls, []),
        get=lambda call: call.answer(),
    )
    return ray_pool.RayWorkerPool(
        ray, {"worker 0": ray_pool.RayWorker(worker)}, "how it gets ready"
    )


def test_a_worker_that_dies_during_its_start_is_reported_and_finally_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spmdtrain.parameter_server.ray_pool.RETRY_SECONDS", 0.0)
    died = exceptions.ActorDiedError
    # It is not there twice, dies twice, comes, is lost, and then dies for ever.
    worker = SimpleNamespace(
        ready=Remote(died(), died()),
        begin=Remote(died(), died(), None, *[died() for _ in range(9)]),
        do=Remote(died()),
    )
    crew, found = crew_of(worker), list[PoolEvent]()
    while not any(isinstance(event, Failed) for event in found):
        found += crew.events(0.0)
        if crew.idle():
            crew.give("worker 0", 1)
    early, late = "its process is dead, during initialization", "its process is dead"
    lost = [WorkerLost("worker 0", early)] * 2
    assert found[:4] == [*lost, WorkerJoined("worker 0"), WorkerLost("worker 0", late)]
    assert found[4:-1] == [WorkerLost("worker 0", early)] * 3
    assert isinstance(found[-1], Failed) and isinstance(found[-1].error, ClusterError)
    assert str(found[-1].error).startswith("worker 0 was lost 4 times during initialization")


WAITS = """
import sys, time
from spmdtrain.parameter_server import ray_nodes
from spmdtrain.cluster.spec import Address

ray_nodes._CHIEF_TIMEOUT = 1.0
with ray_nodes._chief_watcher(Address("127.0.0.1", int(sys.argv[1])), lambda: None):
    time.sleep(float(sys.argv[2]))  # as Ray does, where the chief has gone meanwhile
print("begun")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_there", "seconds", "ended"),
    [(False, 60.0, (1, "", "error: the chief is gone\n")), (True, 3.0, (0, "begun\n", ""))],
)
def test_a_task_whose_node_waits_for_a_chief_that_is_gone_ends(
    is_there: bool, seconds: float, ended: tuple[int, str, str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as chief:
        port = chief.getsockname()[1]
        if not is_there:
            chief.close()
        found = subprocess.run(
            [sys.executable, "-c", WAITS, str(port), str(seconds)],
            capture_output=True,
            text=True,
            timeout=50,
        )
    assert (found.returncode, found.stdout, found.stderr) == ended
