"""Batches land exactly once and stay fresh, whatever becomes of the workers."""

import hypothesis.strategies as st
from hypothesis import given

from spmdtrain.parameter_server.scheduler import BatchQueue

WORKERS = ("a", "b", "c")


def test_what_is_lost_is_given_again_and_first() -> None:
    queue = BatchQueue(0)
    queue.limit = 5
    assert [queue.give(worker, 0.0) for worker in WORKERS] == [0, 1, 2]
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
    for worker in WORKERS:
        queue.give(worker, 0.0)
    assert queue.stop_dispatch() == 3 and queue.give("a", 0.0) is None
    queue.requeue("a")
    assert queue.give("b", 0.0) == 0  # it was given out before


@given(
    st.none() | st.integers(0, 4),
    st.integers(0, 5),
    st.lists(st.tuples(st.sampled_from(WORKERS), st.sampled_from(("give", "land", "lose")))),
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
        assert any(step(worker, event) for worker in WORKERS for event in ("give", "land"))
    assert sorted(landed) == list(range(first, total))
