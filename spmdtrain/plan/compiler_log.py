"""Capture of what XLA's compilers write to stderr."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field

# https://github.com/openxla/xla/blob/main/xla/service/spmd/spmd_partitioner.cc; older versions
# write "was not able to go".
_REMATERIALIZES = re.compile(
    r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from "
    r"sharding "
    r"(?P<given>\{.*?\}(?: last_tile_dim_replicate\})?) to (?P<wanted>\{.*?\}) "
    r"(?:efficiently|without).*?operation:? (?P<operation>%.*)"
)


LOG = "compiler-log-"  # prefix of the log's file name in the temporary folder


@dataclass(frozen=True)
class Resharded:
    """An array that the partitioner replicates on each device to change its sharding."""

    given: str
    """Sharding before, in XLA's notation."""
    wanted: str
    """Required sharding."""
    operation: str
    """The instruction that requires it, before partitioning."""


@dataclass
class CompilerLog:
    """Captured output by lines; available after the context of `kept_log` exits."""

    lines: list[str] = field(default_factory=list)

    @property
    def resharded(self) -> list[Resharded]:
        """The partitioner's warnings of full rematerialization, without duplicates."""
        matches = (_REMATERIALIZES.search(line) for line in self.lines)
        return list(dict.fromkeys(Resharded(**match.groupdict()) for match in matches if match))


@contextlib.contextmanager
def kept_log() -> Iterator[CompilerLog]:
    """Captures what this process writes to stderr, including C++ libraries.

    The log has its lines after the exit. If the context exits with an exception, the captured
    output is written to stderr.
    """
    log = CompilerLog()
    sys.stderr.flush()
    stderr = os.dup(2)
    # A named file, because it is all that remains if the compiler aborts the process.
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
    """Returns the first line of an error, with the second if the first is only a heading.

    At most 300 characters are returned.
    """
    first, *others = str(error).strip().splitlines() or [type(error).__name__]
    return (f"{first} {others[0]}" if first.endswith(":") and others else first)[:300]
