"""Profiler traces of some steps of a run, for TensorBoard or Perfetto."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError
from spmdtrain.record import no_follow
from spmdtrain.record.requests import Request, State
from spmdtrain.record.storage import folder_of, one_line
from spmdtrain.strategies import strategy
from spmdtrain.train.session import RunSession


class ProfiledSteps:
    """Traces steps (both ends included) into the workdir, if it is set.

    `log` receives a line that says where the trace is.
    """

    def __init__(
        self, folder: str | None, steps: tuple[int, int], log: Callable[[str], None]
    ) -> None:
        self._first, self.last = steps
        # Process 0 alone: the others' traces would be written to the same files.
        self._folder, self._log = folder if process_group.is_chief() else None, log
        self._running = False
        self._marker: jax.profiler.StepTraceAnnotation | None = None

    def start(self) -> None:
        """Starts the trace unless it runs; raises `StorageError` if it cannot be written."""
        if not self._folder or self._running:
            return
        folder = Path(folder_of(self._folder))
        try:
            for name in ("plugins", "plugins/profile"):  # where the profiler writes
                no_follow.make_subfolder(folder, name)
        except OSError as error:
            raise StorageError(f"no trace can be written: {one_line(error)}") from error
        jax.profiler.start_trace(str(folder))
        self._running = True

    def before(self, step: int) -> None:
        """Starts the trace or marks the step; call it before `step` is dispatched."""
        if self._first <= step <= self.last:
            self.start()
        if self._running:  # tools group operations by the markers of steps
            self._marker = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._marker.__enter__()

    def after(self, step: int, output: Any) -> None:
        """Ends the mark of `step` after its dispatch; waits for the last traced `output`."""
        if self._marker is not None:
            self._marker.__exit__(None, None, None)
            self._marker = None
        if step >= self.last and self._running:
            jax.block_until_ready(output)
            self.close()

    def close(self) -> None:
        """Ends the trace if it has not ended."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            self._log(
                f"profile from step {self._first}: {self._folder}/plugins/profile; to open it: "
                f"pip install xprof, xprof {self._folder}, or give its trace.json.gz to "
                "https://ui.perfetto.dev"
            )


@dataclass
class Profiles:
    """The traces of one fit, one after another.

    Attributes:
      closing: Ends a trace that has not ended with its last step.
      line: Prints a line on the terminal.
      current: The steps that are traced, or were last; None before.
    """

    closing: contextlib.ExitStack
    line: Callable[[str], None]
    current: ProfiledSteps | None = None

    def begin(self, config: RunConfig, first: int) -> None:
        """Traces the steps of the option `profile_steps`, unless the run resumes after them.

        `first` is the step from which it resumes.
        """
        steps = config.profile_range()
        assert steps is not None
        if first >= steps[1]:
            self.line(f"nothing to profile: step {first} is past {config.profile_steps}")
            return
        self.current = ProfiledSteps(config.workdir, steps, self.line)
        self.closing.callback(self.current.close)

    def ask(self, run: RunSession, step: int, request: Request) -> tuple[State, str]:
        """Starts the trace that the owner of a run asks for after a step; returns the answer."""
        if strategy(run.config.strategy).is_asynchronous:
            return State.REFUSED, "with parameter servers the steps run in other processes"
        if self.current is not None and self.current.last > step:
            return State.REFUSED, f"a profile up to step {self.current.last:,} comes first"
        steps = step + 1, min(step + request.steps, run.schedule.total)
        answer = partial(run.signals.requests.answer, request, State.DONE)

        def end(text: str) -> None:
            self.line(text)
            answer(text)

        asked = ProfiledSteps(run.config.workdir, steps, end)
        try:
            asked.start()
        except (RuntimeError, StorageError) as error:  # the user's code may profile already
            return State.REFUSED, f"no profile can be started: {one_line(error)}"
        self.current = asked
        self.closing.callback(asked.close)
        return State.ACCEPTED, f"it profiles steps {steps[0]:,} to {steps[1]:,}"
