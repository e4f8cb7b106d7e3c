"""Helpers for tests of training code: multi-process jobs, compiled steps, comparisons of loops."""

import importlib
from typing import TYPE_CHECKING, Any

from spmdtrain.testing.processes import (
    Command,
    Process,
    ProcessResult,
    RunningJob,
    run_processes,
    start_processes,
)

if TYPE_CHECKING:
    from spmdtrain.testing.comparison import LossComparison, compare_losses

__all__ = [
    "Command",
    "LossComparison",
    "Process",
    "ProcessResult",
    "RunningJob",
    "compare_losses",
    "run_processes",
    "start_processes",
]


def __getattr__(name: str) -> Any:
    """Imports `comparison` on first use, because it imports JAX, which jobs do not need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.comparison"), name)
