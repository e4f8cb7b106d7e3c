"""The evaluator task of a job."""

import math
import signal
import time
from typing import TYPE_CHECKING

from spmdtrain.distributed import progress
from spmdtrain.distributed.progress import IdleTimer
from spmdtrain.errors import ExitCode
from spmdtrain.launch.child import Child
from spmdtrain.launch.exit_report import Restarts, TaskExit, describe_exit
from spmdtrain.launch.options import HANG_TIMEOUT
from spmdtrain.launch.task_env import EVALUATOR

if TYPE_CHECKING:
    from spmdtrain.launch.launcher import Launcher


class EvaluatorTask:
    """The evaluator task, which exits and restarts independently of the training tasks."""

    def __init__(self, launcher: "Launcher") -> None:
        self._launcher = launcher
        self._restarts = Restarts(launcher.options.max_restarts)
        self._child: Child | None = None
        self._due = math.inf  # time of the next restart
        self._config = ""
        self.code: int | None = None
        """The final exit code; None before that."""

    def start(self, tf_config: str) -> None:
        """Starts the evaluator for the first time."""
        self._config = tf_config
        self._child = self._launcher.start(EVALUATOR, tf_config)

    def poll(self) -> None:
        """Handles the exit of the evaluator, and restarts it when that is due."""
        if self._child is None:
            if time.monotonic() >= self._due:
                self._due = math.inf
                self._child = self._launcher.start(EVALUATOR, self._config)
        elif self._child.poll():
            ended, self._child = self._launcher.exit_of(self._child), None
            self._handle_exit(ended)

    def _handle_exit(self, ended: TaskExit) -> None:
        """Schedules a restart, or takes the exit code as final."""
        final = ended.ours or ended.code in (ExitCode.DONE, ExitCode.BAD_INPUT)
        if self._launcher.over and ended.status == ExitCode.PREEMPTED:
            final = True  # the training was preempted too, and all checkpoints are evaluated
        final = final or bool(self._launcher.signals.received)
        wait = None if final else self._restarts.next(ended.record.step if ended.record else -1)
        if wait is None:
            self.code = ended.code
            next_ = "" if final else f"; no restarts left of {self._restarts.limit}"
        else:
            self._due = time.monotonic() + wait
            next_ = f"; restart {self._restarts.used} of {self._restarts.limit} in {wait:g} s"
        self._launcher.log(f"{describe_exit(ended)}{next_}")

    def finish(self) -> int:
        """Waits for the evaluator after the end of the training; returns its exit code."""
        launcher, grace = self._launcher, self._launcher.options.grace
        given = launcher.options.hang_timeout
        hang_timeout = HANG_TIMEOUT if given is None else given or math.inf
        signals, watch, asked = launcher.signals, IdleTimer(max_interval=1.0), False
        while self.code is None:
            record = progress.read(launcher.folder, EVALUATOR)
            # A restart counts as progress, because the number of restarts is bounded.
            idle = watch.idle((record, self._child))
            if self._child is None and signals.received:
                return 128 + signals.received  # instead of the restart that is due later
            if self._child is not None and signals.received and not asked:
                asked = True
                launcher.deadline = min(launcher.deadline, time.monotonic() + grace)
                self._child.send(signal.SIGTERM, record.pid if record else None)
            if self._child is not None:
                if signals.repeated or time.monotonic() >= launcher.deadline:
                    self._child.kill()
                elif idle >= hang_timeout and signal.SIGKILL not in self._child.sent:
                    launcher.log(
                        f"the evaluator has made no progress for {hang_timeout:g} s: killed"
                    )
                    self._child.kill()
            launcher.tick()
        return self.code
