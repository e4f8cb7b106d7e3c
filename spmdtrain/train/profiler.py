"""A profiler trace of some steps, for TensorBoard or Perfetto."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from spmdtrain.config.run_config import RunConfig
from spmdtrain.distributed import process_group
from spmdtrain.errors import StorageError
from spmdtrain.record import no_follow
from spmdtrain.record.storage import folder_of, one_line


def profiled_steps(config: RunConfig, first: int, log: Callable[[str], None]) -> "ProfiledSteps":
    """Returns the trace of `profile_steps` for a run that resumes from step `first`.

    `log` receives a line if there is nothing left to trace.
    """
    # Process 0 alone: the others' traces would be written to the same files.
    steps = config.profile_range() if process_group.is_chief() else None
    if steps and first >= steps[1]:
        log(f"nothing to profile: step {first} is past {config.profile_steps}")
    return ProfiledSteps(steps, config.workdir)


class ProfiledSteps:
    """Traces a range of steps (both ends included) into a folder; nothing without a range."""

    def __init__(self, steps: tuple[int, int] | None, folder: str | None) -> None:
        self._first, self._last = steps or (0, 0)
        self._folder = folder
        self._running = False
        self._marker: jax.profiler.StepTraceAnnotation | None = None

    def __enter__(self) -> "ProfiledSteps":
        return self

    def before(self, step: int) -> None:
        """Starts the trace or marks the step; call it before `step` is dispatched."""
        if self._folder and self._first <= step <= self._last and not self._running:
            folder = Path(folder_of(self._folder))
            try:
                for name in ("plugins", "plugins/profile"):  # where the profiler writes
                    no_follow.make_subfolder(folder, name)
            except OSError as error:
                raise StorageError(f"no trace can be written: {one_line(error)}") from error
            jax.profiler.start_trace(str(folder))
            self._running = True
        if self._running:  # tools group operations by the markers of steps
            self._marker = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._marker.__enter__()

    def after(self, step: int, output: Any) -> None:
        """Ends the mark of `step` after its dispatch; waits for the last traced `output`."""
        if self._marker is not None:
            self._marker.__exit__(None, None, None)
            self._marker = None
        if step == self._last and self._running:
            jax.block_until_ready(output)
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def __exit__(self, *_: object) -> None:
        self._stop()
