"""Free TCP ports of this machine for the tasks of a launched job."""

import itertools
import random
from pathlib import Path

from spmdtrain.cluster.network_check import why_not_free
from spmdtrain.errors import UserError
from spmdtrain.record.user_folders import exclusive_file

_FIRST = 20_000  # the ports below are those of well-known services and of Ray's workers
PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # of the ephemeral ports
_FIRST_EPHEMERAL = 32_768  # on Linux; macOS starts at 49152


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that no program listens at.

    A task listens at its port only seconds later. Therefore the ports are below the ephemeral
    ports, which the kernel gives to outgoing connections, and the launchers of a user take the next
    ports in turn: two launchers that run at the same time use different ones.

    Raises:
      UserError: If fewer than `count` ports are free.
    """
    ports = candidate_ports()
    with exclusive_file("next-port") as file:
        file.seek(0)
        text = file.read(20)
        start = int(text) if text.isdecimal() else random.randrange(len(ports))
        in_turn = (ports[(start + i) % len(ports)] for i in range(len(ports)))
        free = list(itertools.islice((p for p in in_turn if why_not_free(p) is None), count))
        if len(free) < count:
            raise UserError(
                f"{count} free ports are needed on this machine, but only {len(free)} of "
                f"{ports.start} to {ports.stop - 1} are free"
            )
        file.seek(0)
        file.truncate()
        file.write(str(ports.index(free[-1]) + 1))
    return free


def candidate_ports() -> range:
    """Returns the ports below the ephemeral ports; all high ports if those leave too few."""
    text = PORT_RANGE_FILE.read_text() if PORT_RANGE_FILE.exists() else ""
    first = int(text.split()[0]) if text else _FIRST_EPHEMERAL
    return range(_FIRST, first if first >= _FIRST + 1000 else 65_536)
