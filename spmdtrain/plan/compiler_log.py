"""What XLA's compilers write to stderr, kept and read."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

# https://github.com/openxla/xla/blob/main/xla/service/spmd/spmd_partitioner.cc; older ones say "was
# not able to go".
_REMATERIALIZES = re.compile(
    r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from "
    r"sharding "
    r"(?P<given>\{.*?\}(?: last_tile_dim_replicate\})?) to (?P<wanted>\{.*?\}) "
    r"(?:efficiently|without).*?operation:? (?P<operation>%.*)"
)


LOG = "compiler-log-"  # what the name of its file in the folder for temporary files begins with


@dataclass(frozen=True)
class Resharded:
    """An array that the partitioner makes whole on each device, to split it in another way."""

    given: str
    """How it was split, in XLA's words."""
    wanted: str
    """How it is needed."""
    operation: str
    """The instruction that needs it so, before partitioning."""


@dataclass
class CompilerLog:
    """What was written, line by line; there once the context of `kept_log` is left."""

    lines: list[str] = field(default_factory=list)

    @property
    def resharded(self) -> list[Resharded]:
        """The partitioner's warnings of that kind, each once."""
        found = (_REMATERIALIZES.search(line) for line in self.lines)
        return list(dict.fromkeys(Resharded(**match.groupdict()) for match in found if match))


@contextlib.contextmanager
def kept_log() -> Iterator[CompilerLog]:
    """Keeps what this process writes to its stderr, that of libraries in C++ too.

    After an exception it is written there, after all.
    """
    log = CompilerLog()
    sys.stderr.flush()
    stderr = os.dup(2)
    # With a name: of a compiler that takes the process along, it is all that is left.
    with tempfile.NamedTemporaryFile("w+", errors="replace", prefix=LOG) as file:
        os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            log.lines = file.read().splitlines()
            if sys.exc_info()[0] is not None:
                sys.stderr.writelines(f"{line}\n" for line in log.lines)


def short(error: Exception) -> str:
    """The first line of what a compiler says, and the second where that is only its heading."""
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return (f"{first} {others[0]}" if first.endswith(":") and others else first)[:300]
