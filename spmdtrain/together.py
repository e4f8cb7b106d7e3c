"""First calls of compiled programs, which all processes of a job make at the same time.

A collective fails if a process enters it much later than the others: gloo waits 30 seconds for its
first connections, whatever its timeout is. Compile times differ by more than that between hosts.
"""

from collections.abc import Callable
from typing import Any

import jax

from spmdtrain import processes
from spmdtrain.phases import Phase, within


def await_compiled() -> None:
    """Returns when all processes have called it, each after it compiled the same program."""
    if processes.count() > 1:
        with within(Phase.COMPILED):
            processes.barrier()


def call_together(jitted: Any, *args: Any) -> Any:
    """Calls a jitted function after all processes have compiled it for these arguments.

    For programs that are called once; `Together` is for the others.

    Args:
      jitted: What `jax.jit` returned.
      *args: Its arguments, whose shapes are equal in all processes.

    Returns:
      Its result.
    """
    if processes.count() > 1:
        with within(Phase.COMPILE):
            jitted.lower(*args).compile()
        await_compiled()
    return jitted(*args)


class Together:
    """A jitted function whose first call for given shapes waits until all processes compiled it.

    Args:
      jitted: What `jax.jit` returned.
      constant: Number of leading arguments whose shapes are the same in all calls.
    """

    def __init__(self, jitted: Callable[..., Any], constant: int = 0) -> None:
        self._jitted, self._constant = jitted, constant
        self._compiled: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        """Calls the function. All processes call it alike, from the thread that trains."""
        if processes.count() > 1:
            leaves, treedef = jax.tree.flatten(args[self._constant :])
            shapes = (treedef, *map(jax.typeof, leaves))
            if shapes not in self._compiled:
                found = call_together(self._jitted, *args)
                self._compiled.add(shapes)
                return found
        return self._jitted(*args)
