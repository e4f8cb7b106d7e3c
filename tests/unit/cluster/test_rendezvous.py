"""The processes of a job meet: who is missing, who differs, and who has nothing to do with it."""

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from helpers import REPOSITORY
from processes import free_port
from rendezvous_helpers import (
    NAMES,
    Messages,
    all_meet,
    ending,
    gathering,
    greeted,
    greeting,
    hello,
    knock,
    message,
    parties,
    refusal,
    until,
)

from spmdtrain.cluster import rendezvous
from spmdtrain.cluster.rendezvous import Party, join_rendezvous
from spmdtrain.errors import ClusterError, UserError


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for in seconds is waited for in tenths."""
    monkeypatch.setattr(rendezvous, "REPORT_INTERVAL", 0.3)
    monkeypatch.setattr(rendezvous, "RESOLVE_TIMEOUT", 0.5)
    monkeypatch.setattr(rendezvous, "BIND_TIMEOUT", 0.5)
    monkeypatch.setattr(rendezvous, "LATE_TIMEOUT", 0.5)


# -- who comes, and who does not -------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_when_all_have_joined_all_continue_and_the_port_is_free(size: int) -> None:
    who = parties(size, jax="1")
    assert all_meet(who) == [None] * size
    with socket.socket() as after:  # as JAX binds it: without waiting for anything
        after.bind(("127.0.0.1", who[0].port))


def test_the_last_may_join_late_and_all_print_who_is_missing() -> None:
    who = parties(4)
    with gathering(*who[:3]) as (endings, messages):
        line = f"waiting: 3 of 4 processes have joined; missing: worker 2 at {who[0].addresses[3]}"
        until(lambda: all(line in messages.lines[rank] for rank in range(3)))
        assert ending(who[3], 10, messages) is None
    assert endings == [None] * 3


def test_process_0_may_come_last() -> None:
    who = parties(3)
    with gathering(*who[1:]) as (endings, messages):
        awaited = f"waiting for chief at 127.0.0.1:{who[0].port}: Connection refused"
        until(lambda: awaited in messages.lines[1] and awaited in messages.lines[2])
        assert ending(who[0], 10, messages) is None
    assert endings == [None] * 2


@pytest.mark.slow
def test_who_is_missing_is_named_in_every_process() -> None:
    who = parties(4)
    began = time.monotonic()
    found = all_meet([who[0], who[2]], timeout=1.0)
    assert time.monotonic() - began < 30
    one, three = who[0].addresses[1], who[0].addresses[3]
    expected = (
        f"gave up after 1 s: 2 of 4 processes have joined; missing: worker 0 at {one}, "
        f"worker 2 at {three}"
    )
    assert [refusal(error, ClusterError) for error in found] == [expected, expected]


def test_of_many_missing_the_first_are_named() -> None:
    names = ["chief", *(f"worker {n}" for n in range(20))]
    alone = Party(host="127.0.0.1", port=free_port(), names=names, rank=0)
    error = refusal(ending(alone, 0.3, Messages()), ClusterError)
    shown = ", ".join(f"worker {n}" for n in range(8))
    joined = "1 of 21 processes have joined"
    assert error == f"gave up after 0.3 s: {joined}; missing: {shown} and 12 more"


def test_a_process_0_that_does_not_come_is_named() -> None:
    who = parties(2)
    error = refusal(ending(who[1], 0.7, Messages()), ClusterError)
    assert re.fullmatch(
        rf"worker 0 could not reach chief at 127\.0\.0\.1:{who[0].port} for 0\.7 s: "
        "Connection refused; it has not started, or its port is closed to this machine",
        error,
    )


def test_a_process_that_goes_away_before_the_rest_have_come_may_come_back() -> None:
    who = parties(3)
    with gathering(who[0]) as (endings, messages):
        with knock(who[0]) as first:
            greeted(first).send(hello(who[1]))
            until(lambda: any("2 of 3" in line for line in messages.lines[0]))
        until(lambda: "worker 0 has disconnected" in messages.lines[0])
        assert all_meet(who[1:], 10) == [None, None]
    assert endings == [None]


@pytest.mark.slow
def test_without_an_answer_after_it_has_come_back_it_counts_as_missing() -> None:
    who = parties(3)
    with gathering(who[0], timeout=2) as (endings, messages):
        with knock(who[0]) as first:
            greeted(first).send(hello(who[1]))
            until(lambda: any("2 of 3" in line for line in messages.lines[0]))
        until(lambda: "worker 0 has disconnected" in messages.lines[0])
    assert "1 of 3 processes have joined; missing: worker 0 at" in refusal(endings[0], ClusterError)


def test_a_process_0_that_dies_while_it_gathers_is_named() -> None:
    who = parties(3)
    script = (
        "from spmdtrain.cluster import rendezvous\n"
        "from spmdtrain.cluster.rendezvous import Party, join_rendezvous\n"
        "rendezvous.REPORT_INTERVAL = 0.1\n"
        f"join_rendezvous(Party('127.0.0.1', {who[0].port}, {NAMES[:3]!r}, 0), 60, print)"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY) as zero:
        try:
            knock(who[0]).close()
            with gathering(replace(who[1], addresses=())) as (endings, messages):
                until(lambda: bool(messages.lines[1]))  # it has been let in
                os.kill(zero.pid, signal.SIGKILL)
        finally:
            zero.kill()
    expected = f"chief at 127.0.0.1:{who[0].port} disconnected while the job was starting"
    assert refusal(endings[0], ClusterError) == expected


# -- a wrong description ---------------------------------------------------------------------------


def test_a_taken_port_is_reported_within_seconds() -> None:
    who = parties(2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", who[0].port))
        other.listen()
        began = time.monotonic()
        error = refusal(ending(who[0], 60, Messages()), UserError)
        assert time.monotonic() - began < 30
    assert error == (
        f"port {who[0].port} of this machine cannot be used by chief: Address already in use; "
        "it is in use by another program, a second process of that name, or an earlier run that "
        "has not ended"
    )


def test_a_port_that_is_let_go_of_in_time_is_no_fault() -> None:
    who = parties(2)
    other = socket.socket()
    other.bind(("127.0.0.1", who[0].port))
    other.listen()
    closing = threading.Timer(0.3, other.close)
    closing.start()
    with gathering(who[0]) as (endings, messages):
        closing.join()
        assert ending(who[1], 10, messages) is None
    assert endings == [None]


def test_a_second_process_0_is_refused_and_the_first_continues() -> None:
    who = parties(2)
    with gathering(who[0]) as (endings, messages):
        knock(who[0]).close()
        assert "a second process of that name" in refusal(ending(who[0], 10, messages), UserError)
        assert ending(who[1], 10, messages) is None
    assert endings == [None]


def test_two_processes_of_one_rank_are_refused_in_every_process() -> None:
    who = parties(3)
    with gathering(who[0], who[1]) as (endings, messages):
        until(lambda: bool(messages.lines[1]))
        second = ending(who[1], 10, messages)
    own = re.escape(f"{socket.gethostname()}, process {os.getpid()}")
    expected = rf"two processes are worker 0: {own} and {own}; give each task its own index"
    for error in [*endings, second]:
        assert re.fullmatch(expected, refusal(error, UserError))


def test_a_name_that_does_not_resolve_is_reported_within_seconds() -> None:
    who = [replace(party, host="no-such-host.invalid") for party in parties(2)]
    began = time.monotonic()
    error = refusal(ending(who[1], 300, Messages()), UserError)
    assert time.monotonic() - began < 10
    assert error.startswith("no-such-host.invalid, the host of chief, cannot be resolved from")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"about": {"jax": "1", "flax": "3"}}, "flax is 3 there and 2 here"),
        ({"about": {"jax": "1"}}, "flax is not set there and 2 here"),
        (
            {"about": {"jax": "1", "flax": "2", "torch": "9"}},
            "torch is 9 there and not set here",
        ),
        (
            {"names": ["chief", "worker 0", "worker 9"]},
            "names is chief, worker 0, worker 9 there and chief, worker 0, worker 1 here",
        ),
        ({"names": NAMES}, "processes is 4 there and 3 here"),
    ],
    ids=["version", "less", "more", "names", "number"],
)
def test_processes_that_differ_are_refused_by_name_and_value(
    change: dict[str, Any], difference: str
) -> None:
    who = parties(3, jax="1", flax="2")
    with gathering(who[0], who[2]) as (endings, messages):
        until(lambda: bool(messages.lines[2]))  # it listens: a later one finds no listener
        odd = ending(replace(who[1], **change), 10, messages)
    where = re.escape(f"{socket.gethostname()}, process {os.getpid()}")
    expected = rf"worker 0 \({where}\) and chief differ: {re.escape(difference)}"
    for error in [*endings, odd]:
        assert re.fullmatch(expected, refusal(error, UserError))


# -- strangers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",  # TLS, without a line's end
        b"\x00" * 100_000,
        b"{" * 1_200_000,  # begins like ours, and does not end
        b'{"spmdtrain": "goodbye"}\n',
        b"[1, 2]\n",
        b'{"a": 1}\n{"b": 2}\n',
        b"null\n\n\n",
        b'{"spmdtrain": "hello"}\n',
        b'{"spmdtrain": "hello", "rank": "x", "name": 1, "where": 2, "size": 3, "about": 4}\n',
        b"\xff\xfe\n",
        b"\n",
    ],
    ids=[
        "http",
        "tls",
        "zeros",
        "endless",
        "other",
        "list",
        "two",
        "null",
        "half",
        "types",
        "bytes",
        "empty",
    ],
)
def test_a_stranger_at_the_port_is_sent_away(words: bytes) -> None:
    who = parties(2)
    with gathering(who[0]) as (endings, messages):
        # It may be hung up on in the midst of what it says.
        with knock(who[0]) as stranger, contextlib.suppress(OSError):
            stranger.sendall(words)
            assert stranger.recv(100) == b""
        assert ending(who[1], 10, messages) is None
    assert endings == [None]


def test_strangers_who_are_silent_or_gone_do_not_disturb() -> None:
    who = parties(3)
    with gathering(who[0]) as (endings, messages), contextlib.ExitStack() as stack:
        stack.enter_context(knock(who[0]))  # says nothing
        stack.enter_context(knock(who[0])).sendall(greeting()[:20])  # nor this one its name
        knock(who[0]).close()
        with knock(who[0]) as abrupt:  # a reset in the place of an end
            abrupt.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert all_meet(who[1:], 10, messages) == [None, None]
    assert endings == [None]


def test_a_greeting_in_pieces_is_understood() -> None:
    who = parties(2)
    with gathering(who[0]) as (endings, _), knock(who[0]) as slow:
        line = greeted(slow)
        line.send(hello(who[1]))
        assert message(line) == {"go": True}
    assert endings == [None]


@contextlib.contextmanager
def another_program(port: int, answer: bytes, *, abrupt: bool = False) -> Iterator[None]:
    """Another program that listens on the port and answers connections one after the other."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(0.05)

        def answer_one(connection: socket.socket) -> None:
            if abrupt:
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return
            connection.settimeout(10)
            connection.recv(65536)
            connection.sendall(answer)
            if answer:
                connection.recv(1)

        def serve() -> None:
            # More than one: a caller that is reset while it still connects calls again.
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    with connection:
                        answer_one(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=20)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",  # what gRPC begins with: the job has begun
        b'{"error": "what?"}\n',
    ],
    ids=["http", "grpc", "json"],
)
def test_another_program_at_the_port_of_process_0_is_reported(
    monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    who = parties(2)
    monkeypatch.setattr(rendezvous, "EARLIER_JOB_TIMEOUT", 0.0)
    with another_program(who[0].port, answer):
        error = refusal(ending(who[1], 10, Messages()), ClusterError)
    assert error == (
        f"127.0.0.1:{who[0].port} is not chief of a job that is starting: another program "
        "uses the port, or the job has started with another worker 0"
    )


@pytest.mark.parametrize("abrupt", [False, True])
def test_one_that_closes_the_connection_is_reported(
    monkeypatch: pytest.MonkeyPatch, abrupt: bool
) -> None:
    who = parties(2)
    monkeypatch.setattr(rendezvous, "EARLIER_JOB_TIMEOUT", 0.0)
    with another_program(who[0].port, b"", abrupt=abrupt):
        error = refusal(ending(who[1], 10, Messages()), ClusterError)
    assert error.startswith(f"127.0.0.1:{who[0].port} is not chief of a job that is starting")


@pytest.mark.slow
def test_on_kubernetes_a_name_may_come_with_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(rendezvous, "RESOLVE_TIMEOUT", 0.0)
    _, worker = parties(2, host="no-such-pod.invalid")
    with pytest.raises(ClusterError, match="no-such-pod"):
        join_rendezvous(worker, 1.0, print)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(UserError, match="resolved"):
        join_rendezvous(worker, 1.0, print)


@pytest.mark.slow
def test_a_job_that_is_still_dying_at_the_port_is_waited_for() -> None:
    who = parties(2)
    with gathering(who[1]) as (endings, messages):
        with another_program(who[0].port, b"\x00\x00\x12\x04\x00"):
            time.sleep(0.5)
        assert not endings
        assert (
            ending(who[0], 10, messages) is None
        )  # it has let go of the port, and the next is there
    assert endings == [None]


def test_a_process_that_connects_to_itself_keeps_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own port, which the system chooses, may be the one that it calls, as long as it is free.

    TCP then connects the socket with itself. To call again and again makes that likely in the end.
    """
    who = parties(2)
    connect, calls = socket.create_connection, []

    def to_itself(address: tuple[str, int], timeout: float) -> socket.socket:
        calls.append(address)
        if len(calls) > 1:
            return connect(address, timeout=timeout)
        found = socket.socket()
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.connect(address)
        assert found.getsockname() == found.getpeername()
        return found

    monkeypatch.setattr(socket, "create_connection", to_itself)
    with gathering(who[1]) as (endings, messages):
        until(lambda: bool(calls))
        time.sleep(0.3)
        assert ending(who[0], 10, messages) is None
    assert endings == [None] and len(calls) > 1


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "::1", socket.gethostname()])
def test_they_meet_at_an_address_of_any_kind(host: str) -> None:
    try:
        socket.getaddrinfo(host, 1)
        if host == "::1":
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
    except OSError:
        pytest.skip(f"{host} is no address of this machine")
    assert all_meet(parties(3, host=host)) == [None, None, None]


def test_a_job_of_one_machine_listens_nowhere_else() -> None:
    who = parties(2)
    with gathering(who[0]) as (endings, messages):
        knock(who[0]).close()
        with (
            pytest.raises(OSError, match="refused"),
            socket.create_connection(("127.0.0.2", who[0].port)),
        ):
            pass
        assert ending(who[1], 10, messages) is None
    assert endings == [None]


def test_an_address_is_written_as_one() -> None:
    assert Party("10.0.0.1", 5, NAMES, 0).coordinator == "10.0.0.1:5"
    assert Party("fe80::1", 5, NAMES, 0).coordinator == "[fe80::1]:5"
