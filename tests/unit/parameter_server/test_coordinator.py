"""A coordinator in real processes: what it runs, what it raises, what it survives."""

import contextlib
import importlib.util
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
from helpers import BOUND

from spmdtrain import Coordinator, PreemptedExit, UserError
from spmdtrain.cluster.spec import ClusterSpec
from spmdtrain.distributed import progress
from spmdtrain.distributed.progress import CONTEXT
from spmdtrain.parameter_server import ray_pool
from spmdtrain.parameter_server.coordinator import Call
from spmdtrain.parameter_server.executor import ServerBackend
from spmdtrain.parameter_server.scheduler import Done, Failed, PoolEvent, WorkerJoined, WorkerLost

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)


class Crew:
    """Workers that do what a test says, each time that the coordinator looks."""

    def __init__(self, *workers: str) -> None:
        self.workers = workers
        self.given = queue.Queue[tuple[str, Call]]()
        self.coming = queue.Queue[PoolEvent | Exception]()

    def idle(self) -> Sequence[str]:
        return self.workers  # Ray's are idle again before what they have done is taken

    def give(self, worker: str, work: Call) -> None:
        self.given.put((worker, work))

    def events(self, timeout: float) -> list[PoolEvent]:
        try:
            found = self.coming.get(timeout=timeout)
        except queue.Empty:
            return []
        if isinstance(found, Exception):
            raise found
        return [found]


@dataclass
class Job:
    """One that needs no Ray: what is sent stays here."""

    ray: object
    made: Crew

    def worker_pool(self, make: object) -> Crew:
        return self.made


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Crew:
    """Of a chief whose job is a `Job`."""
    found = Crew("worker 0")

    @contextlib.contextmanager
    def start_job(spec: object, timeout: float) -> Iterator[Job]:
        yield Job(SimpleNamespace(cloudpickle=pickle, put=lambda x: x), found)

    monkeypatch.setattr(
        "spmdtrain.parameter_server.coordinator.run_task_role", lambda timeout: None
    )
    monkeypatch.setattr("spmdtrain.parameter_server.ray_pool.start_job", start_job)
    monkeypatch.setattr(CONTEXT, "has_coordinator", False)
    return found


def test_what_breaks_the_crew_is_what_is_raised(crew: Crew) -> None:
    crew.coming.put(OSError("the chief's node is gone"))
    with pytest.raises(OSError, match="node is gone"), Coordinator() as coordinator:
        with pytest.raises(OSError, match="node is gone"):
            while coordinator.done():  # until the coordinator's thread has ended
                time.sleep(0.01)
        for wait in (coordinator.join, coordinator.done, lambda: coordinator.schedule(len, [])):
            with pytest.raises(OSError, match="node is gone"):
                wait()
    with pytest.raises(UserError, match="`with` block"):
        Coordinator().schedule(len, [])


def test_a_worker_keeps_the_function_assigned_before_its_arrival_was_reported(crew: Crew) -> None:
    with Coordinator() as coordinator:
        value = coordinator.schedule(len, [])
        crew.given.get(timeout=BOUND)
        crew.coming.put(WorkerJoined("worker 0"))
        while not crew.coming.empty():
            time.sleep(0.01)
        assert not coordinator.done()
        crew.coming.put(Done("worker 0", 3))
        assert coordinator.fetch(value) == 3


def test_each_event_of_a_worker_counts_as_progress(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the launcher would end a job whose chief only schedules and waits."""
    monkeypatch.setattr(CONTEXT, "channel", None)
    progress.begin(always=True)

    def published() -> int:
        record = progress.local_record("chief")
        assert record is not None
        return record.changes

    with Coordinator() as coordinator:
        value = coordinator.schedule(len, [])
        crew.given.get(timeout=BOUND)
        for event in (WorkerJoined("worker 0"), WorkerJoined("worker 1"), Done("worker 0", 3)):
            before = published()
            crew.coming.put(event)
            end = time.monotonic() + BOUND
            while published() == before:
                assert time.monotonic() < end, f"{event} published nothing"
                time.sleep(0.01)
        assert coordinator.fetch(value) == 3


def test_done_raises_what_has_failed_while_others_run(crew: Crew) -> None:
    crew.workers = ("worker 0", "worker 1")
    with Coordinator() as coordinator:
        value, other = (coordinator.schedule(len, []) for _ in range(2))
        crew.coming.put(Failed("worker 0", ZeroDivisionError("in it")))
        with pytest.raises(ZeroDivisionError):
            coordinator.fetch(value)
        with pytest.raises(ZeroDivisionError):
            coordinator.done()
        assert not coordinator.done()
        crew.coming.put(Done("worker 1", 0))
        assert coordinator.fetch(other) == 0


def test_what_was_lost_half_done_is_done_whatever_else_fails(crew: Crew) -> None:
    crew.workers = ("worker 0", "worker 1")
    with Coordinator() as coordinator:
        lost, failing = (coordinator.schedule(len, []) for _ in range(2))
        never = coordinator.schedule(len, [])
        crew.workers = ()
        crew.coming.put(WorkerLost("worker 0", "killed"))
        crew.coming.put(Failed("worker 1", ZeroDivisionError("in it")))
        with pytest.raises(ZeroDivisionError):
            coordinator.fetch(failing)
        with pytest.raises(UserError, match="ZeroDivision"):
            coordinator.fetch(never)
        crew.workers = ("worker 0",)
        crew.coming.put(WorkerJoined("worker 0"))
        crew.coming.put(Done("worker 0", 5))
        assert coordinator.fetch(lost) == 5
        with pytest.raises(ZeroDivisionError):
            coordinator.join()


def test_asked_to_stop_it_lets_land_what_is_out_and_runs_nothing_more(crew: Crew) -> None:
    with pytest.raises(PreemptedExit), Coordinator() as coordinator:
        values = [coordinator.schedule(len, []) for _ in range(5)]
        crew.given.get(timeout=BOUND)
        signal.raise_signal(signal.SIGTERM)
        timer = threading.Timer(0.5, crew.coming.put, [Done("worker 0", 7)])
        timer.start()
        try:
            coordinator.join()
        finally:
            assert crew.given.empty()
            assert coordinator.fetch(values[0]) == 7
            for value in values[1:]:
                with pytest.raises(UserError, match="stopping"):
                    coordinator.fetch(value)


def test_functions_of_each_call_are_not_kept_for_ever(crew: Crew) -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None:
            pass

    crew.workers = tuple(f"worker {number}" for number in range(250))

    def sent(function: Callable[..., object], *args: object) -> int:
        """Returns the number under which the function of a new call is sent."""
        coordinator.schedule(function, *args)
        _, call = crew.given.get(timeout=BOUND)
        return call.function.number

    with contextlib.suppress(OSError), Coordinator() as coordinator:
        assert sent(len, []) == sent(len, []) == 0
        assert sent(Unhashable()) == 1
        functions = [partial(int, number) for number in range(200)]
        assert [sent(one) for one in functions] == list(range(2, 202))
        assert sent(functions[-64]) == 202 - 64  # the last 64 are kept
        assert sent(functions[-65]) == 202
        crew.coming.put(OSError("enough"))


@pytest.mark.parametrize(
    ("raised", "how"),
    [
        (None, "finished"),
        (SystemExit(0), "finished"),
        (SystemExit(3), "failed"),
        (PreemptedExit("SIGTERM"), "preempted"),
        (ValueError("of the script"), "failed"),
    ],
)
def test_the_end_of_a_job_is_reported(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException | None, how: str
) -> None:
    messages = list[str]()
    ray = SimpleNamespace(cloudpickle=SimpleNamespace(register_pickle_by_value=lambda _: None))
    monkeypatch.setattr(
        "spmdtrain.parameter_server.ray_nodes.head", lambda *_: contextlib.nullcontext(ray)
    )
    monkeypatch.setattr(
        "spmdtrain.parameter_server.ray_nodes.publish_end",
        lambda ray, how, coming: messages.append(how),
    )
    spec = ClusterSpec({}, None, None)
    with contextlib.suppress(SystemExit, ValueError), ray_pool.start_job(spec, 1.0):
        if raised is not None:
            raise raised
    with contextlib.suppress(SystemExit, ValueError), ServerBackend().open(1.0):
        if raised is not None:
            raise raised
    # During a training, an exit with code 0 is a failure too.
    assert messages == [
        how,
        "failed" if isinstance(raised, SystemExit) and not raised.code else how,
    ]


def test_a_script_has_one(crew: Crew) -> None:
    with Coordinator() as coordinator:
        assert coordinator.done()
    with pytest.raises(UserError, match="one Coordinator"):
        Coordinator().__enter__()


def test_it_takes_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(UserError, match="TF_CONFIG"):
        Coordinator().__enter__()
