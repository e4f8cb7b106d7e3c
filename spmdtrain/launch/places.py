"""The places of a job's processes on this machine, of which some may be lost for a while."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from spmdtrain.distributed.progress import TASK
from spmdtrain.launch.task_env import EVALUATOR, training_tasks

_AWAY = 10.0  # seconds until a lost place is used again; doubled each time that it is lost
_LONGEST_AWAY = 300.0


class Places:
    """The places in which the processes of a job run, each with devices of its own.

    A place is lost if its process is killed. The job then goes on in the others: in as many as its
    batch size and its model can be split over, and at least `minimum`. Lost places are used again
    after some seconds.

    Args:
      environments: The environment of each task, without TF_CONFIG. The places have these names.
      servers: Number of parameter servers.
      minimum: Smallest number of training processes; None if the job needs all places.
    """

    def __init__(
        self,
        environments: Mapping[str, Mapping[str, str]],
        servers: int,
        minimum: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._servers, self._minimum, self._clock = servers, minimum, clock
        self._own = {n: env for n, env in environments.items() if n != EVALUATOR}
        self._evaluator = {n: env for n, env in environments.items() if n == EVALUATOR}
        self._back: dict[str, float] = {}  # lost places, and when each may be used again
        self._times: dict[str, int] = {}  # how often each place was lost
        self._refused: set[int] = set()  # numbers of processes that the run cannot have
        self._used = list(self._own)

    @property
    def total(self) -> int:
        """Number of training processes in all places."""
        return len(self._own) - self._servers

    @property
    def processes(self) -> int:
        """Number of training processes of the job as it is now."""
        return len(self._used) - self._servers

    @property
    def tasks(self) -> list[str]:
        """The names of the training tasks and servers of the job as it is now."""
        return training_tasks(self.processes, self._servers)

    @property
    def environments(self) -> dict[str, dict[str, str]]:
        """The environment of each task of the job as it is now."""
        own = zip(self.tasks, self._used, strict=True)
        found = {task: {**self._own[place], TASK: task} for task, place in own}
        return found | {name: dict(env) for name, env in self._evaluator.items()}

    def leave_out(self, task: str) -> None:
        """Uses the place of a task no more, because one of its devices is faulty.

        Each later process takes the name of the one before it.
        """
        place = self._place_of(task)
        self._back.pop(place, None)
        del self._own[place]
        self._used.remove(place)

    def lose(self, tasks: Iterable[str], cannot: Iterable[int]) -> bool:
        """Leaves out the places of lost tasks for a while; returns whether the job can go on.

        If not, nothing changes. `cannot` has numbers of processes that the run refuses.
        """
        self._refused |= set(cannot)
        lost = [self._place_of(task) for task in tasks]
        left = [place for place in self._own if place not in {*lost, *self._back}]
        if (used := self._largest(left)) is None:
            return False
        for place in lost:
            self._times[place] = self._times.get(place, 0) + 1
            away = min(_LONGEST_AWAY, _AWAY * 2.0 ** (self._times[place] - 1))
            self._back[place] = self._clock() + away
        self._used = used
        return True

    def refuse(self) -> bool:
        """Notes that the run cannot have as many processes as it has now.

        Returns whether it can go on with fewer; otherwise it gets all places again.
        """
        self._refused.add(self.processes)
        left = [place for place in self._own if place not in self._back]
        used = self._largest(left)
        if used is None:
            self.take_back()
            return False
        self._used = used
        return True

    @property
    def is_reduced(self) -> bool:
        """Whether the job has fewer processes than places."""
        return len(self._used) < len(self._own)

    @property
    def may_take_back(self) -> bool:
        """Whether all lost places may be used again."""
        return self.is_reduced and all(at <= self._clock() for at in self._back.values())

    def take_back(self) -> None:
        """Uses all places again."""
        self._back.clear()
        self._used = list(self._own)

    def _largest(self, places: Sequence[str]) -> list[str] | None:
        """Returns the places that the job uses of those given; None if it cannot go on."""
        least = math.inf if self._minimum is None else self._minimum
        for count in range(len(places), 0, -1):
            if count >= least and count not in self._refused:
                return list(places[:count])
        return None

    def _place_of(self, task: str) -> str:
        return self._used[self.tasks.index(task)]
