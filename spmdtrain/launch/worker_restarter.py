"""Restarts of single workers under parameter servers."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from spmdtrain.distributed import progress
from spmdtrain.errors import ExitCode
from spmdtrain.launch.child import Child
from spmdtrain.launch.exit_report import CauseRank, Restarts, TaskExit, cause_rank, describe_exit

if TYPE_CHECKING:
    from spmdtrain.launch.launcher import Launcher


class WorkerRestarter:
    """Restarts of single workers under parameter servers, while the others continue.

    A restarted task keeps its TF_CONFIG of `configs`.
    """

    def __init__(self, launcher: "Launcher", configs: Mapping[str, str]) -> None:
        self._launcher, self._configs = launcher, configs
        self._restarts: dict[str, Restarts] = {}
        self._due: dict[str, float] = {}
        self._workers = {name for name in configs if name.startswith("worker")}
        self._given_up: set[str] = set()

    def take(self, ended: TaskExit) -> bool:
        """Schedules a restart if the task is a worker that has failed.

        Returns whether the other tasks continue: the worker will be restarted, or other workers
        remain.
        """
        final_codes = (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.PREEMPTED)
        final = (
            ended.ours or ended.code in final_codes or cause_rank(ended) is CauseRank.CONSEQUENCE
        )
        if final or not ended.task.startswith("worker") or self._launcher.signals.received:
            return False
        limit = self._launcher.options.max_restarts
        restarts = self._restarts.setdefault(ended.task, Restarts(limit))
        chief = progress.read(self._launcher.folder, "chief")
        if (wait := restarts.next(chief.saved if chief else -1)) is None:
            self._given_up.add(ended.task)
            if self._workers <= self._given_up:
                return False
            self._launcher.log(
                f"{describe_exit(ended)}; the others continue; no restarts left of {limit}"
            )
            return True
        self._due[ended.task] = time.monotonic() + wait
        self._launcher.log(
            f"{describe_exit(ended)}; the others continue; restart {restarts.used} of {limit} of "
            f"{ended.task} in {wait:g} s"
        )
        return True

    def start_due(self) -> list[Child]:
        """Starts the workers whose restart is due, and returns them."""
        due = [name for name, at in self._due.items() if time.monotonic() >= at]
        for name in due:
            del self._due[name]
        return [self._launcher.start(name, self._configs[name]) for name in due]
