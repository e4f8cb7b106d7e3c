"""Commands as another user of this machine: one without privileges or an entry in /etc/passwd."""

from collections.abc import Sequence

UID = 54321


def as_stranger(command: Sequence[object]) -> list[str]:
    """Returns a command that runs another one as user 54321.

    It may read all files, because the interpreter may lie in a home folder, and write only its own.
    """
    may_read = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    user = ["--reuid", str(UID), "--regid", str(UID), "--clear-groups"]
    return ["setpriv", *user, *may_read, *map(str, command)]
