"""Garbage collections that do not visit the long-lived objects of a run again."""

import gc
from collections.abc import Mapping
from typing import Any, ClassVar

_OF_PYTHON = 1_000  # CPython 3.12 itself excludes 375 objects


class LongLivedObjects:
    """Excludes from later garbage collections what survives the first full one among the steps.

    A step creates a Python object for each array of the state. With thousands of arrays, that
    starts a full collection every few dozen steps. Each visits all modules, programs and
    experiments of the process, which takes a tenth of the time of a step of 2,000 arrays.

    This is a context manager. Once all open ones have ended, collections visit all objects again.
    """

    _open: ClassVar[set["LongLivedObjects"]] = set()  # after their first steps
    _excluded_before: ClassVar[bool] = False  # by the run command or the user: these stay excluded

    def __init__(self) -> None:
        self._waits = False

    def begin(self) -> None:
        """Waits for a full collection; call it when the first step has been dispatched.

        Objects that `gc.freeze` excludes are not freed if they are in a reference cycle. Therefore
        it is called after the step has been traced, which leaves cycles, and directly after a
        collection.
        """
        if not self._open:
            LongLivedObjects._excluded_before = gc.get_freeze_count() > _OF_PYTHON
        self._open.add(self)
        self._waits = True
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, info: Mapping[str, Any]) -> None:
        """Receives the beginning and the end of each collection."""
        if self._waits and phase == "stop" and info["generation"] == 2:
            self._waits = False
            gc.freeze()
            if self not in self._open:  # it has ended while another thread collected
                self._include_again()

    def _include_again(self) -> None:
        if not (self._open or self._excluded_before):
            gc.unfreeze()

    def __enter__(self) -> "LongLivedObjects":
        return self

    def __exit__(self, *_: object) -> None:
        if self in self._open:
            gc.callbacks.remove(self._collected)
            self._open.remove(self)
            self._include_again()
