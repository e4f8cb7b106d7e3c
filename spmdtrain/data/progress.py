"""A progress bar for work before the first step that may take long."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from spmdtrain.distributed import process_group
from spmdtrain.document.terminal import Terminal

PROGRESS_DELAY = 3.0  # seconds before a bar appears
_hidden = False
"""Whether bars are hidden in this process. It is global because datasets have no configuration."""


def hide_progress(*, hidden: bool) -> None:
    """Hides or shows the bars of datasets, as the option `quiet` of a command says."""
    global _hidden
    _hidden = hidden


@contextmanager
def delayed_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on the first process's terminal once the work takes long.

    Yields a function of the amount of `total` that is done, to be called in one thread.
    """
    terminal = Terminal(quiet=_hidden or not process_group.is_chief())
    started, has_bar = time.perf_counter(), False
    with ExitStack() as stack:

        def advance(done: int) -> None:
            nonlocal has_bar
            if not has_bar and time.perf_counter() - started > PROGRESS_DELAY:
                stack.enter_context(terminal.progress(description, done=done, total=total))
                has_bar = True
            terminal.advance(done)

        yield advance
