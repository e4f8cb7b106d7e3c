"""Helpers for tests of training code: jobs of several processes, claims about compiled steps."""

from spmdtrain.testing.processes import Command, Finished, Job, Process, run_processes, started

__all__ = ["Command", "Finished", "Job", "Process", "run_processes", "started"]
