"""The places of a job: which of them are used, lost and taken in again."""

from typing import Any

import pytest

from spmdtrain.launch.command import main
from spmdtrain.launch.launcher import Places
from spmdtrain.launch.task_env import environments_of, training_tasks


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def places(minimum: int | None = 1, count: int = 4) -> tuple[Places, Clock]:
    clock, names = Clock(), [*training_tasks(count), "evaluator"]
    gpus = [str(number) for number in range(count + 1)]
    environments = environments_of(names, 1, {}, gpus)
    return Places(environments, 0, minimum, clock, lambda: environments), clock


def devices(of: Places) -> dict[str, str]:
    found = of.environments
    assert all(env["SPMDTRAIN_TASK"] == name for name, env in found.items())
    return {name: env["CUDA_VISIBLE_DEVICES"] for name, env in found.items()}


def test_a_faulty_device_is_never_used_again() -> None:
    """The other processes keep their devices, whatever they are called then."""
    for faulty, left in {"chief": "12", "worker 0": "02"}.items():
        of, _ = places(count=3)
        of.leave_out(faulty)
        assert devices(of) == {"chief": left[0], "worker 0": left[1], "evaluator": "3"}
        assert not of.is_reduced and of.total == 2


def test_the_largest_number_that_the_run_can_have_continues_and_others_wait() -> None:
    of, clock = places()
    assert of.lose(["worker 0"], {3: "not a power of two"})
    assert devices(of) == {"chief": "0", "worker 0": "2", "evaluator": "4"}
    # The place that waits takes the place of the next one that is lost.
    assert of.lose(["chief"], {})
    assert devices(of) == {"chief": "2", "worker 0": "3", "evaluator": "4"}
    assert of.lose(["worker 0"], {}) and of.processes == 1
    assert not of.lose(["chief"], {}) and of.processes == 1
    clock.now = 9.9
    assert not of.may_take_back
    clock.now = 10.0
    assert of.may_take_back
    of.take_back()
    assert [*devices(of).values()] == ["0", "1", "2", "3", "4"] and not of.may_take_back


@pytest.mark.parametrize(("lost", "used"), [(0, [1, 3]), (1, [0, 2]), (2, [1, 3]), (3, [0, 2])])
def test_the_places_that_continue_have_the_copies_of_those_that_do_not(
    lost: int, used: list[int]
) -> None:
    """Each place keeps a copy of the one before it, as hosts do of snapshots."""
    of, _ = places()
    assert of.lose([training_tasks(4)[lost]], {3: "not a power of two"})
    found = devices(of)
    assert [int(found[task]) for task in of.tasks] == used
    assert all({place, (place + 1) % 4} & {*used} for place in range(4))


def test_absent_places_are_not_used_and_a_number_that_was_refused_is_not_tried() -> None:
    clock, names = Clock(), training_tasks(4)
    present = [*names]
    of = Places(environments_of(names, 1, {}, []), 0, 2, clock, lambda: present)
    present.remove("worker 1")
    assert of.use_present() and of.used == ["chief", "worker 0", "worker 2"]
    assert of.refuse() and of.used == ["chief", "worker 0"]
    present.remove("worker 0")
    assert of.use_present() and of.used == ["chief", "worker 2"]
    present.remove("worker 2")
    assert not of.lose(["worker 0"], {})  # what is left is below the minimum
    of.take_back()
    assert not of.use_present()
    # Another launcher leads, which knows what this one has found out.
    other = Places(environments_of(names, 1, {}, []), 0, 2, clock, lambda: names[:3])
    of.leave_out("worker 0")
    other.restore(of.known)
    assert other.use_present() and other.total == 3 and "worker 2" not in other.used


def test_a_place_that_is_lost_again_stays_away_for_longer() -> None:
    of, clock = places()
    for wait in (10, 20, 40, 80, 160, 300, 300):
        assert of.lose(["worker 2"], {})
        clock.now += wait - 1
        assert not of.may_take_back
        clock.now += 1
        assert of.may_take_back
        of.take_back()
    assert of.lose(["worker 1"], {})
    clock.now += 10
    assert of.may_take_back


def test_a_number_that_the_run_refuses_is_not_tried_again() -> None:
    of, _ = places(minimum=2)
    assert of.lose(["worker 1"], {}) and of.processes == 3
    assert of.refuse() and of.processes == 2
    assert not of.refuse() and of.processes == 4 and not of.is_reduced
    assert not of.lose(["worker 1"], {})


def test_without_a_minimum_or_below_it_the_job_needs_all() -> None:
    for minimum, lost in ((None, 1), (3, 2)):
        of, _ = places(minimum)
        assert not of.lose(training_tasks(4)[:lost], {})
        assert of.processes == 4 and not of.is_reduced


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([2, "--min-processes", 0], "--min-processes is 0: it must be at least 1"),
        ([2, "--min-processes", 2], "--min-processes is 2 of 2: give less than --processes"),
        ([2, "--ps", 1, "--min-processes", 1], "with --ps workers are restarted one by one"),
    ],
)
def test_a_minimum_that_makes_no_sense_is_refused(
    options: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--processes", *map(str, options), "--", "python", "-c", ""]) == 2
    assert message in capsys.readouterr().err
