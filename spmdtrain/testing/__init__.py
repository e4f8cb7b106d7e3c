"""Helpers for tests of training code: jobs of several processes, claims about compiled steps."""

from spmdtrain.testing.processes import (
    Command,
    Job,
    Process,
    ProcessResult,
    run_processes,
    start_processes,
)

__all__ = ["Command", "Job", "Process", "ProcessResult", "run_processes", "start_processes"]
