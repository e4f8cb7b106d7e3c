"""What this machine sees of a cluster's network: names, addresses, ports.

The cluster comes as plain data, and so do the findings: level, what was looked at, what was found.
"""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

_RESOLVE_SECONDS = 2.5
_CONNECT_SECONDS = 2.0

Found = tuple[Literal["ok", "warning", "error"], str, str]
Addresses = Mapping[str, tuple[str, int]]  # task to host and port
IPs = Mapping[str, list[str] | str]  # host to what `resolve` says of it
K = TypeVar("K")
V = TypeVar("V")


def examine(addresses: Addresses, *, own: str | None, training: Sequence[str]) -> Iterator[Found]:
    """Check the network of a cluster; `training` are the tasks that train, by rank."""
    if not addresses:
        yield "ok", "network", "a plain local run needs none"
        return
    hosts, here = {host for host, _ in addresses.values()}, socket.gethostname()
    found = together(resolve, hosts | {here}, _RESOLVE_SECONDS)
    ips = {host: found[host] for host in hosts & found.keys()}
    yield from _names(addresses, ips)
    yield from _loopback(addresses, ips)
    if own is not None and not any(map(is_own_only, hosts | {here})):
        yield from _own_name(here, found)
    yield from _doubles(addresses, ips)
    trains = len(training) > 1 and own in training
    if own is not None:
        yield from _own(own, addresses[own], ips, trains and own == training[0])
    if own is not None and trains:
        yield from _others(addresses, ips, own, training)
        host, port = addresses[training[0]]
        yield (
            "ok",
            "firewall",
            f"all tasks that train connect to port {port} of {host} ({training[0]}), and gloo and "
            "NCCL to ports of their own choosing: let all ports through between these machines",
        )


# --- The checks ---


def _names(addresses: Addresses, ips: IPs) -> Iterator[Found]:
    unknown = 0
    for task, (host, _) in addresses.items():
        found = ips.get(host, f"no answer in {_RESOLVE_SECONDS} s")
        if isinstance(found, str):
            unknown += 1
            yield "error", task, f"the name {host} cannot be resolved here: {found}"
    if not unknown:
        yield "ok", "names", f"all of them resolve ({len(ips)})"


def _loopback(addresses: Addresses, ips: IPs) -> Iterator[Found]:
    own_only = {task: is_own_only(host) for task, (host, _) in addresses.items()}
    if all(own_only.values()):
        return
    for task, (host, _) in addresses.items():
        if own_only[task]:
            yield (
                "error",
                task,
                f"{host} is a different machine wherever it is read, and the cluster has other "
                "hosts: give an address by which they reach it",
            )
        elif any(map(is_own_only, _known(ips, host))):
            yield (
                "warning",
                task,
                f"{host} resolves to {', '.join(_known(ips, host))} here, which no other machine "
                "reaches, and gloo may listen there: mend it in /etc/hosts",
            )


def _own_name(here: str, ips: IPs) -> Iterator[Found]:
    if any(map(is_own_only, _known(ips, here))):
        yield (
            "warning",
            "this machine",
            f"its own name, {here}, resolves to {', '.join(_known(ips, here))}, where gloo then "
            "listens, and no other machine reaches it: mend it in /etc/hosts (NCCL does not mind)",
        )


def _doubles(addresses: Addresses, ips: IPs) -> Iterator[Found]:
    tasks: dict[tuple[str, int], str] = {}
    for task, (host, port) in addresses.items():
        for ip in _known(ips, host):
            first = tasks.setdefault((ip, port), task)
            if first != task:
                yield (
                    "error",
                    task,
                    f"{host} and {addresses[first][0]} ({first}) are the same address, {ip}, with "
                    f"the same port, {port}: give each task its own",
                )
                break


def _own(own: str, address: tuple[str, int], ips: IPs, listens: bool) -> Iterator[Found]:
    host, port = address
    if not _known(ips, host):
        return
    if not any(map(is_here, _known(ips, host))):
        yield (
            "warning",
            own,
            f"{host} is not this machine, {socket.gethostname()}: is task.index right?",
        )
    elif fault := why_not_free(port):
        taken = f"port {port} is not free here: {fault}"
        if listens:
            yield "error", own, f"{taken}; the others are to connect to it"
        else:
            yield "warning", own, f"{taken}; only rank 0 of several needs its port"
    else:
        yield "ok", own, f"{host} is this machine, and port {port} is free"


def _others(
    addresses: Addresses,
    ips: IPs,
    own: str,
    training: Sequence[str],
) -> Iterator[Found]:
    tasks = [task for task in training if task != own and _known(ips, addresses[task][0])]
    answers = together(connect, {addresses[task] for task in tasks}, _CONNECT_SECONDS)
    reached = 0
    for task in tasks:
        host, port = addresses[task]
        answer = answers.get((host, port), f"no answer in {_CONNECT_SECONDS} s")
        if answer not in (LISTENS, REFUSES):
            yield (
                "error",
                task,
                f"{host}, port {port}, cannot be reached ({answer}): is the machine up, and does "
                "a firewall let this one through?",
            )
            continue
        reached += 1
        if task == training[0] and answer == LISTENS:
            yield "ok", task, f"accepts connections on port {port} of {host}"
        elif task == training[0]:
            yield (
                "warning",
                task,
                f"{host} answers, but nothing listens on port {port} yet: it may not have started",
            )
    if tasks and reached == len(tasks):
        yield "ok", "machines", f"those of the other tasks answer ({len(tasks)})"


def _known(ips: IPs, host: str) -> list[str]:
    """The IP addresses of a host; none where it could not be resolved."""
    found = ips.get(host, "")
    return found if isinstance(found, list) else []


# --- The machine ---

LISTENS, REFUSES = "listens", "refuses"


def resolve(host: str) -> list[str] | str:
    """The IP addresses of a host, or why there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:  # a label of more than 63 letters, or of none
        return "it is not a host name"
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def is_own_only(host: str) -> bool:
    """Whether a host is the machine itself wherever it is read, as localhost is."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".").split(".")[-1] == "localhost"
    return ip.is_loopback or ip.is_unspecified


def is_here(ip: str) -> bool:
    """Whether an IP address is one of this machine: only to such can a socket be bound."""
    try:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


def why_not_free(port: int) -> str | None:
    """Why nothing can listen on a port of this machine; None where it can.

    On all its addresses at once, as JAX's coordinator does.
    """
    both = socket.has_dualstack_ipv6()
    try:
        with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as probe:
            if both:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # What an ended run leaves in TIME_WAIT does not count; SO_REUSEPORT would share.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        return error.strerror or str(error)
    return None


def connect(address: tuple[str, int]) -> str:
    """`LISTENS`, `REFUSES`, or why the host cannot be reached."""
    try:
        socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return REFUSES
    except OSError as error:
        return error.strerror or str(error)
    return LISTENS


def together(call: Callable[[K], V], keys: Iterable[K], seconds: float) -> dict[K, V]:
    """What `call` returns for each key, all at once, without those that take longer."""
    results: dict[K, V] = {}

    def work(key: K) -> None:
        results[key] = call(key)

    # Not a pool: the interpreter would wait for it at its end, and a resolver may take a minute.
    threads = [threading.Thread(target=work, args=(key,), daemon=True) for key in keys]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(results)
