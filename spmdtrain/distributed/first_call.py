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
from spmdtrain.errors import UserError

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
        digests = process_group.gather(None if lowered is None else _digest(lowered))
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is not None:
        _refuse(lowered, odd)


def _digest(lowered: jax.stages.Lowered) -> str:
    module: Any = lowered.compiler_ir("stablehlo")
    # Addresses of callbacks differ between processes. Since JAX 0.11 a program has none.
    callbacks: Any = getattr(cache_key, "IgnoreCallbacks", None)
    ignored: Any = callbacks.ALL if callbacks else True
    program = cache_key._canonicalize_ir(module, ignored)
    return hashlib.sha256(program).hexdigest()


def _refuse(lowered: jax.stages.Lowered | None, odd: int) -> None:
    """Raises `UserError` with the first line that differs between the programs of two processes."""
    lines = [] if lowered is None else lowered.as_text().splitlines()
    compared = process_group.rank() in (0, odd)
    short = [hashlib.sha256(line.encode()).hexdigest()[:8] for line in lines]
    all_lines = process_group.gather(short if compared else [])
    chief, other = all_lines[0], all_lines[odd]
    unequal = next((n for n, (a, b) in enumerate(zip(chief, other, strict=False)) if a != b), None)
    first = min(len(chief), len(other)) if unequal is None else unequal
    line = lines[first].strip()[:_LONGEST] if first < len(lines) else "nothing"
    texts = process_group.gather(line if compared else "")
    names = process_group.names()
    raise UserError(
        f"{names[odd]} and {names[0]} compiled different programs: line {first + 1} is "
        f"{texts[odd]!r} in {names[odd]} and {texts[0]!r} in {names[0]}; what a model computes "
        "must not depend on the process, on the order of a set, or on other libraries or settings"
    )


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
