"""Helpers for tests of training code: multi-process jobs, assertions about compiled steps."""

from spmdtrain.testing.processes import (
    Command,
    Process,
    ProcessResult,
    RunningJob,
    run_processes,
    start_processes,
)

__all__ = ["Command", "Process", "ProcessResult", "RunningJob", "run_processes", "start_processes"]
