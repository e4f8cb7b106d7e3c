"""First calls of compiled programs, synchronized over all processes of a job.

A collective fails if a process enters it much later than the others: gloo waits 30 seconds for its
first connections, whatever its timeout is. Compile times differ by more than that between hosts.
Different programs would hang, or compute something else in one process.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import jax

# JAX has no public name for a program without source locations and addresses of callbacks.
from jax._src import cache_key

from spmdtrain.distributed import process_group
from spmdtrain.distributed.progress import Phase, phase

_LONGEST = 200  # characters of a line in a message


def await_compiled(lowered: jax.stages.Lowered | None) -> None:
    """Waits until all processes have compiled the same program.

    `lowered` is None without `jit`: this process has no program to compare.

    Raises:
      UserError: If a process has compiled another program; names the process and the first line
        that differs.
    """
    if process_group.count() == 1:
        return
    with phase(Phase.COMPILED):
        process_group.agree(
            "the program",
            None if lowered is None else _digest(lowered),
            "what a model computes must not depend on the process, on the order of a set, or on "
            "other libraries or settings",
            differ="compiled different programs",
            details=lambda: {} if lowered is None else _lines(lowered),
        )


def _digest(lowered: jax.stages.Lowered) -> str:
    module: Any = lowered.compiler_ir("stablehlo")
    # Addresses of callbacks differ between processes. Since JAX 0.11 a program has none.
    callbacks: Any = getattr(cache_key, "IgnoreCallbacks", None)
    ignored: Any = callbacks.ALL if callbacks else True
    program = cache_key._canonicalize_ir(module, ignored)
    return hashlib.sha256(program).hexdigest()


def _lines(lowered: jax.stages.Lowered) -> dict[str, str]:
    """Returns the lines of a program by name; of a long line its beginning and a digest."""
    found = {}
    for number, line in enumerate(map(str.strip, lowered.as_text().splitlines()), start=1):
        rest = hashlib.sha256(line.encode()).hexdigest()[:8] if len(line) > _LONGEST else ""
        found[f"line {number}"] = f"{line[:_LONGEST]!r}" + f"... (SHA-256 {rest})" * bool(rest)
    return found


def call_together(jitted: Any, *args: Any) -> Any:
    """Calls a jitted function after all processes have compiled it for these arguments.

    The shapes are equal in all processes. For programs that are called repeatedly use `Together`.
    """
    if process_group.count() > 1:
        with phase(Phase.COMPILE):
            lowered = jitted.lower(*args)
            lowered.compile()
        await_compiled(lowered)
    return jitted(*args)


class Together:
    """A jitted function whose first call for given shapes waits until all processes compiled it.

    Args:
      constant: Number of leading arguments whose shapes are the same in all calls.
      check: Called with the open jaxpr and the arguments before the first call for given shapes;
        may raise.
    """

    def __init__(
        self, jitted: Any, constant: int = 0, check: Callable[[Any, Any], None] | None = None
    ) -> None:
        self._jitted, self._constant, self._check = jitted, constant, check
        self._compiled: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        """Calls the function. All processes make the same calls, from the thread that trains."""
        if self._check is not None or process_group.count() > 1:
            leaves, treedef = jax.tree.flatten(args[self._constant :])
            shapes = (treedef, *map(jax.typeof, leaves))
            if shapes not in self._compiled:
                if self._check is not None:
                    self._check(self._jitted.trace(*args).jaxpr.jaxpr, args)
                result = call_together(self._jitted, *args)
                self._compiled.add(shapes)
                return result
        return self._jitted(*args)
