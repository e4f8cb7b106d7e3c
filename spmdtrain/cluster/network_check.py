"""Checks of a cluster's network from this machine: host names, addresses and ports.

The cluster is plain data, and so are the results: level, what was checked, and a text.
"""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

RESOLVE_SECONDS = 2.5
CONNECT_SECONDS = 2.0

Result = tuple[Literal["ok", "warning", "error"], str, str]
Addresses = Mapping[str, tuple[str, int]]  # task to host and port
IPs = Mapping[str, list[str] | str]  # host to the result of `resolve_host`
K = TypeVar("K")
V = TypeVar("V")


def examine_network(
    addresses: Addresses, *, own: str | None, training: Sequence[str]
) -> Iterator[Result]:
    """Checks the network of a cluster from this machine.

    `own` is the name of this process' task; None if it has none. `training` has the names of the
    training tasks by rank.
    """
    if not addresses:
        yield "ok", "network", "a local run needs none"
        return
    hosts, hostname = {host for host, _ in addresses.values()}, socket.gethostname()
    resolved = together(resolve_host, hosts | {hostname}, RESOLVE_SECONDS)
    ips = {host: resolved[host] for host in hosts & resolved.keys()}
    yield from _names(addresses, ips)
    yield from _loopback(addresses, ips)
    if own is not None and not any(map(is_own_only, hosts | {hostname})):
        yield from _own_name(hostname, resolved)
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
            f"all training tasks connect to port {port} of {host} ({training[0]}); gloo and NCCL "
            "choose further ports: open all ports between these machines",
        )


# -- checks ----------------------------------------------------------------------------------------


def _names(addresses: Addresses, ips: IPs) -> Iterator[Result]:
    unknown = 0
    for task, (host, _) in addresses.items():
        resolved = ips.get(host, f"no answer in {RESOLVE_SECONDS} s")
        if isinstance(resolved, str):
            unknown += 1
            yield (
                "error",
                task,
                f"the host name {host} does not resolve on this machine: {resolved}",
            )
    if not unknown:
        yield "ok", "names", f"all host names resolve ({len(ips)})"


def _loopback(addresses: Addresses, ips: IPs) -> Iterator[Result]:
    own_only = {task: is_own_only(host) for task, (host, _) in addresses.items()}
    if all(own_only.values()):
        return
    for task, (host, _) in addresses.items():
        if own_only[task]:
            yield (
                "error",
                task,
                f"{host} means a different machine on each host, but the cluster has several "
                "hosts: give an address at which the others reach this task",
            )
        elif any(map(is_own_only, _known(ips, host))):
            yield (
                "warning",
                task,
                f"{host} resolves on this machine to {', '.join(_known(ips, host))}, which other "
                "machines cannot reach, and gloo may listen there: correct it in /etc/hosts",
            )


def _own_name(hostname: str, ips: IPs) -> Iterator[Result]:
    if any(map(is_own_only, _known(ips, hostname))):
        yield (
            "warning",
            "this machine",
            f"its host name, {hostname}, resolves to {', '.join(_known(ips, hostname))}, where "
            "gloo then listens and other machines cannot connect: correct it in /etc/hosts (NCCL "
            "is not affected)",
        )


def _doubles(addresses: Addresses, ips: IPs) -> Iterator[Result]:
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


def _own(own: str, address: tuple[str, int], ips: IPs, listens: bool) -> Iterator[Result]:
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
        in_use = f"port {port} of this machine is not free: {fault}"
        if listens:
            yield "error", own, f"{in_use}; the other tasks must connect to it"
        else:
            yield "warning", own, f"{in_use}; only rank 0 needs its port"
    else:
        yield "ok", own, f"{host} is this machine, and port {port} is free"


def _others(
    addresses: Addresses,
    ips: IPs,
    own: str,
    training: Sequence[str],
) -> Iterator[Result]:
    tasks = [task for task in training if task != own and _known(ips, addresses[task][0])]
    answers = together(connect, {addresses[task] for task in tasks}, CONNECT_SECONDS)
    reached = 0
    for task in tasks:
        host, port = addresses[task]
        answer = answers.get((host, port), f"no answer in {CONNECT_SECONDS} s")
        if answer not in (LISTENS, REFUSES):
            yield (
                "error",
                task,
                f"{host}, port {port}, cannot be reached ({answer}): is the machine up, and does "
                "its firewall accept connections from this one?",
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
        yield "ok", "machines", f"the hosts of all other tasks answer ({len(tasks)})"


def _known(ips: IPs, host: str) -> list[str]:
    """Returns the IP addresses of a host; an empty list if it does not resolve."""
    resolved = ips.get(host, "")
    return resolved if isinstance(resolved, list) else []


# -- this machine ----------------------------------------------------------------------------------

LISTENS, REFUSES = "listens", "refuses"


def resolve_host(host: str) -> list[str] | str:
    """Returns the IP addresses of a host, or why it does not resolve."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:  # a label that is empty or longer than 63 characters
        return "it is not a host name"
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in infos))


def is_own_only(host: str) -> bool:
    """Returns whether a host name or address means the local machine on every host: localhost."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".").split(".")[-1] == "localhost"
    return ip.is_loopback or ip.is_unspecified


def is_here(ip: str) -> bool:
    """Returns whether an IP address belongs to this machine: a socket can be bound to it."""
    try:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True


def why_not_free(port: int) -> str | None:
    """Returns why no program can listen at a TCP port of this machine; None if one can.

    The port is checked on all addresses at once, because JAX's coordinator listens on all of them.
    """
    both = socket.has_dualstack_ipv6()
    try:
        with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as probe:
            if both:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # SO_REUSEADDR ignores connections of an ended run in TIME_WAIT; SO_REUSEPORT would
            # share the port with a listener.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        return error.strerror or str(error)
    return None


def connect(address: tuple[str, int]) -> str:
    """Returns `LISTENS`, `REFUSES`, or why the host cannot be reached."""
    try:
        socket.create_connection(address, timeout=CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return REFUSES
    except OSError as error:
        return error.strerror or str(error)
    return LISTENS


def together(call: Callable[[K], V], keys: Iterable[K], seconds: float) -> dict[K, V]:
    """Calls a function for all keys in parallel; waits at most `seconds`.

    Returns key to result, for the calls that have returned in time.
    """
    results: dict[K, V] = {}

    def work(key: K) -> None:
        results[key] = call(key)

    # Not a pool, because the interpreter waits for pools at exit, and a resolver may take a minute.
    threads = [threading.Thread(target=work, args=(key,), daemon=True) for key in keys]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(results)
