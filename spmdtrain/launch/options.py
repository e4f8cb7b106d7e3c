"""Options of the command `python -m spmdtrain.launch`."""

from dataclasses import dataclass

HANG_TIMEOUT = 900.0
"""Seconds without progress in phases whose duration is not measured."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Start the processes of a training on this machine, watch them, and restart them together."""

    processes: int
    """Number of training processes: a chief and workers."""
    ps: int = 0
    """Number of parameter servers to start, for --strategy parameter_server. Workers are
    then restarted one by one, without the others."""
    devices_per_process: int | None = None
    """Devices of each process: GPUs if there are any, else virtual CPU devices. None means
    all GPUs, for a single process, or the cpu_devices of the experiment."""
    evaluator: bool = False
    """Also start an evaluator, which is not one of the training processes. With --evaluated-by
    evaluator in the command, the training leaves the validation split to it."""
    max_restarts: int = 3
    """Largest number of restarts without a new checkpoint between them."""
    hang_timeout: float | None = None
    """Seconds without progress after which the job counts as hung; 0 disables this. The default
    is five times the longest pause between steps so far, at least 60, and 900 for the first steps,
    compilations, saves and callbacks, for an evaluator, and with --ps."""
    grace: float = 120
    """Seconds that the tasks have to save and exit after a signal."""
