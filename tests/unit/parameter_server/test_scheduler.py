"""Batches are added exactly once and stay fresh, whatever becomes of the workers."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

from spmdtrain.errors import ClusterError
from spmdtrain.parameter_server.partition import batch_result
from spmdtrain.parameter_server.scheduler import (
    BatchQueue,
    BatchScheduler,
    Done,
    Failed,
    PoolEvent,
    WorkerJoined,
    WorkerLost,
)
from spmdtrain.parameter_server.server import Push, PushResult, Server, ServerState
from spmdtrain.step.optimizer import Update

QUEUE_WORKERS = ("a", "b", "c")


def test_what_is_lost_is_given_again_and_first() -> None:
    queue = BatchQueue(0)
    queue.limit = 5
    assert [queue.give(worker, 0.0) for worker in QUEUE_WORKERS] == [0, 1, 2]
    assert queue.requeue("b") == [1]
    assert queue.give("a", 0.0) == 1 and queue.give("a", 0.0) == 3


def test_who_lands_a_batch_first_lands_it() -> None:
    queue = BatchQueue(7)
    queue.limit = 8
    assert queue.give("a", now=1.0) == 7 and queue.give("b", now=1.0) is None
    assert queue.overdue(1.0) == [] and queue.overdue(1.5) == [7]
    queue.assign_backup(7, "b", now=2.0)
    assert queue.overdue(1.5) == []
    assert queue.requeue("a") == []  # the other has it still
    assert queue.complete(7) and not queue.complete(7)
    assert (queue.applied.complete, queue.is_idle) == (8, True)


def test_it_can_be_held() -> None:
    queue = BatchQueue(0)
    queue.limit = 10
    for worker in QUEUE_WORKERS:
        queue.give(worker, 0.0)
    assert queue.stop_dispatch() == 3 and queue.give("a", 0.0) is None
    queue.requeue("a")
    assert queue.give("b", 0.0) == 0  # it was given out before


@pytest.mark.slow
@given(
    st.none() | st.integers(0, 4),
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(QUEUE_WORKERS), st.sampled_from(("give", "land", "lose")))),
)
def test_each_lands_once_and_is_fresh(
    max_staleness: int | None, first: int, events: list[tuple[str, str]]
) -> None:
    total = first + 12
    queue = BatchQueue(first, max_staleness)
    queue.limit = total
    held: dict[str, tuple[int, int]] = {}  # a batch, and the updates that its worker has read
    landed: list[int] = []

    def step(worker: str, event: str) -> bool:
        if event == "give":
            if worker in held:
                return False
            number = queue.give(worker, 0.0)
            if number is not None:
                held[worker] = number, len(landed)
            return number is not None
        if worker not in held:
            return False
        if event == "lose":
            assert queue.requeue(worker) == [held.pop(worker)[0]]
        elif event == "land":
            number, read = held.pop(worker)
            assert queue.complete(number)
            if max_staleness is not None:
                assert len(landed) - read <= max_staleness
            landed.append(number)
        return True

    for worker, event in events:
        step(worker, event)
    # In any order of events: as long as one worker works, every batch is added.
    while not (queue.is_idle and queue.applied.complete == total):
        assert any(step(worker, event) for worker in QUEUE_WORKERS for event in ("give", "land"))
    assert sorted(landed) == list(range(first, total))


# -- workers that are lost, stopped or slow, between any two messages ------------------------------
#
# The crew is one of this process, whose messages are delivered in whatever order hypothesis likes.

WORKERS = ("worker 0", "worker 1", "worker 2")


def servers(count: int, max_staleness: int | None) -> list[Server]:
    update = Update(optax.sgd(1.0))
    held = ServerState({"w": jnp.zeros(1)}, update.init({"w": jnp.zeros(1)}), {}, {})
    return [Server(update, held, 0, max_staleness) for _ in range(count)]


@dataclass
class Work:
    """A batch in a worker's hands, and the servers it has still to go to."""

    number: int
    versions: list[int]
    left: list[int]
    said: list[PushResult] = field(default_factory=list)


@dataclass
class Strange:
    """Workers that do one thing each time it is said so: push to a server, hang, or die."""

    servers: list[Server]
    choices: list[int]
    now: float = 0.0
    work: dict[str, Work] = field(default_factory=dict)
    pushes: Counter[int] = field(default_factory=Counter)
    killed: Counter[int] = field(default_factory=Counter)
    patient: int = 3
    """How many workers are lost with the same batch at most: one more, and it is to blame."""

    @property
    def is_empty(self) -> bool:
        return False

    def idle(self) -> Sequence[str]:
        return [worker for worker in WORKERS if worker not in self.work]

    def give(self, worker: str, work: int) -> None:
        versions = [server.pull().version for server in self.servers]
        self.work[worker] = Work(work, versions, list(range(len(self.servers))))

    def events(self, timeout: float) -> list[PoolEvent]:
        self.now += timeout
        if not self.work:
            return []
        choice = self.choices.pop() if self.choices else 0
        workers = sorted(self.work)
        worker = workers[choice % len(workers)]
        if choice % 7 == 6 and self.killed[self.work[worker].number] < self.patient:
            self.killed[self.work.pop(worker).number] += 1
            return [WorkerLost(worker, "killed")]
        if choice % 7 == 5:
            return []  # all workers are idle
        return self._push(worker, self.work[worker])

    def gradient(self, worker: str, work: Work) -> float:
        return float(2.0**work.number)

    def _push(self, worker: str, work: Work) -> list[PoolEvent]:
        server = work.left.pop(0)
        gradient = {"w": np.full(1, self.gradient(worker, work), np.float32)}
        pushed = Push(work.number, work.versions[server], gradient, {}, 0.0)
        landed = self.servers[server].push(pushed)
        self.pushes[work.number] += landed.is_new
        work.said.append(landed)
        if work.left:
            return []
        del self.work[worker]
        result = batch_result(work.number, {"loss": float(work.number)}, work.said)
        return [Done(worker, result)]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3),
    st.none() | st.integers(0, 4),
    st.lists(st.integers(0, 1000), max_size=60),
    st.sampled_from([1.0, 1000.0]),
)
def test_each_batch_is_added_once_to_each_server(
    count: int, max_staleness: int | None, choices: list[int], patience: float
) -> None:
    total = 10
    crew = Strange(servers(count, max_staleness), choices)
    queue = BatchQueue(0, max_staleness)
    queue.limit = total
    run = BatchScheduler(crew, queue, patience, clock=lambda: crew.now)
    outcomes = [run.take(number) for number in range(total)]
    run.drain()
    assert [outcome.metrics["loss"] for outcome in outcomes] == list(range(total))
    assert crew.pushes == dict.fromkeys(range(total), count)
    for server in crew.servers:
        assert server.pull().version == server.applied.complete == total
        np.testing.assert_array_equal(server.pull().params["w"], -np.full(1, 2.0**total - 1))
    if max_staleness is not None:
        assert max(outcome.staleness for outcome in outcomes) <= max_staleness
        # None had to be refused: what is given out can be no staler, if no worker is lost.
        if 6 not in {choice % 7 for choice in choices} and patience > 10 * len(choices):
            assert all(server.counts.stale == 0 for server in crew.servers)


@dataclass
class Exact(Strange):
    """Their gradients are of what they have pulled from all servers."""

    seen: dict[str, float] = field(default_factory=dict)

    def give(self, worker: str, work: int) -> None:
        pulled = [server.pull(work) for server in self.servers]
        self.seen[worker] = sum(float(one.params["w"][0]) for one in pulled)
        self.work[worker] = Work(
            work, [one.version for one in pulled], list(range(len(self.servers)))
        )

    def gradient(self, worker: str, work: Work) -> float:
        return math.sin(self.seen[worker] + work.number)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(0, 1000), max_size=60))
def test_without_staleness_the_numbers_are_the_same_whichever_worker_is_killed(
    count: int, choices: list[int]
) -> None:
    crew, total = Exact(servers(count, 0), choices), 10
    queue = BatchQueue(0, 0)
    queue.limit = total
    run = BatchScheduler(crew, queue, 1000.0, clock=lambda: crew.now)
    for number in range(total):
        run.take(number)
    w = np.float32(0.0)
    for number in range(total):
        w -= np.float32(math.sin(count * float(w) + number))
    for server in crew.servers:
        assert float(server.pull().params["w"][0]) == pytest.approx(float(w), rel=1e-5)


def test_a_batch_that_is_long_out_is_given_to_one_more() -> None:
    crew, messages = Strange(servers(1, None), [5] * 4), list[str]()
    queue = BatchQueue(0)
    queue.limit = 1
    run = BatchScheduler(crew, queue, 1.0, messages.append, clock=lambda: crew.now)
    assert run.take(0).number == 0
    assert messages == [
        "worker 0: batch 0 has taken more than 1 s; worker 1 computes it too (reported once)"
    ]


def test_a_lost_worker_is_reported_with_its_batch() -> None:
    crew, messages = Strange(servers(1, None), [6]), list[str]()
    queue = BatchQueue(0)
    queue.limit = 1
    run = BatchScheduler(crew, queue, 1.0, messages.append, clock=lambda: crew.now)
    assert run.take(0).number == 0
    assert messages == ["worker 0 is lost (killed); batch 0 is reassigned"]


def test_a_batch_that_kills_each_worker_is_named() -> None:
    crew = Strange(servers(1, None), [6] * 9, patient=9)
    queue = BatchQueue(0)
    queue.limit = 1
    with pytest.raises(ClusterError) as caught:
        BatchScheduler(crew, queue, 1.0).take(0)
    assert str(caught.value) == (
        "batch 0 was lost 4 times with its worker (worker 0, worker 0, worker 0, worker 0; last "
        "reason: killed). It may need more memory than a worker has"
    )


def test_an_error_of_the_users_is_raised() -> None:
    class Raises(Strange):
        def _push(self, worker: str, work: Work) -> list[PoolEvent]:
            return [Failed(worker, ZeroDivisionError("in the objective"))]

    crew = Raises(servers(1, None), [])
    queue = BatchQueue(0)
    queue.limit = 1
    with pytest.raises(ZeroDivisionError, match="in the objective"):
        BatchScheduler(crew, queue, 1.0).take(0)


@dataclass
class Scripted(Strange):
    """Events in the order of a list, instead: each a worker that comes, or is lost."""

    script: list[list[PoolEvent]] = field(default_factory=list)
    there: set[str] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        return not self.there

    def idle(self) -> Sequence[str]:
        return [worker for worker in super().idle() if worker in self.there]

    def events(self, timeout: float) -> list[PoolEvent]:
        if not self.script:
            return super().events(timeout)
        found = self.script.pop(0)
        for event in found:
            if isinstance(event, WorkerLost):
                self.there.discard(event.worker)
                self.work.pop(event.worker, None)
            else:
                self.there.add(event.worker)
        return found


def test_who_waits_for_a_worker_hears_so_and_may_stop() -> None:
    script: list[list[PoolEvent]] = [
        [],
        [],
        [WorkerJoined("worker 2")],
        [WorkerLost("worker 2", "killed")],
        [],
    ]
    crew, messages, asked = Scripted(servers(1, None), [], script=script), list[str](), list[int]()
    crew.script.append([WorkerJoined("worker 2")])
    queue = BatchQueue(0)
    queue.limit = 1

    def may_stop(is_empty: bool) -> None:
        if is_empty:
            asked.append(len(crew.script))

    times = iter(range(0, 1000, 15))
    run = BatchScheduler(
        crew, queue, 1000.0, messages.append, may_stop, clock=lambda: float(next(times))
    )
    assert run.take(0).number == 0
    assert messages == [
        "no worker has been available for 20 s; waiting for one",
        "worker 2 is lost (killed); batch 0 is reassigned",
        "no worker has been available for 20 s; waiting for one",
        "worker 2 is back",
    ]
    assert asked == [6, 5, 4, 2, 1]
    assert run.batches == {"worker 2": 1}


def test_a_batch_that_hangs_and_is_waited_for_goes_before_new_ones() -> None:
    class Hangs(Strange):
        def events(self, timeout: float) -> list[PoolEvent]:
            self.now += timeout
            moving = [worker for worker in self.work if worker != "worker 0"]
            return self._push(moving[0], self.work[moving[0]]) if moving else []

    crew, messages = Hangs(servers(1, None), []), list[str]()
    queue = BatchQueue(0)
    queue.limit = 10_000
    run = BatchScheduler(crew, queue, None, messages.append, clock=lambda: crew.now)
    assert run.take(0).number == 0
    # Half a second for each of the other two's: 60 s are bearable while none has come, then 3.
    assert 10.0 < crew.now < 30.0 and run.batches["worker 0"] == 0
    assert messages[0].startswith("worker 0: batch 0 has taken more than")


def test_batches_without_a_result_are_reported_once() -> None:
    crew, waits = Strange(servers(1, None), [0] + [5] * 300), list[float]()
    queue = BatchQueue(0)
    queue.limit = 2
    run = BatchScheduler(crew, queue, 1000.0, on_silence=waits.append, clock=lambda: crew.now)
    run.take(0)
    assert waits == [60.0] and crew.now >= 150.0
    crew.choices = [5] * 1000
    run.take(1)
    # Three times the duration of the batch.
    assert len(waits) == 2 and waits[1] == pytest.approx(3 * 150.5)
    crew.now += 1000.0  # no batch is pending: no wait to report
    queue.limit = 3
    run.take(2)
    queue.limit = 5
    run.take(3)
    crew.now += 1000.0  # what is out comes as soon as it is looked for
    run.take(4)
    assert len(waits) == 2


def test_how_long_is_too_long_is_learned_from_what_came() -> None:
    crew = Strange(servers(1, None), [])
    queue = BatchQueue(0)
    queue.limit = 100
    run = BatchScheduler(crew, queue, None, clock=lambda: crew.now)
    assert run.batch_timeout() == 60.0  # nothing is known yet: a first batch compiles the step
    crew.now = 0.0
    for number in range(50):
        run.take(number)
    median = run.batch_timeout() / 3
    assert 0.5 <= median <= 3.0  # three workers, one of whom pushes each half second
