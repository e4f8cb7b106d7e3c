"""Strangers at the rendezvous: they take no seat, end no job, exhaust nothing, forge no line."""

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import BOUND, TESTS, saved_steps
from processes import (
    STEPS,
    as_task,
    codes,
    drill,
    free_port,
    quiet,
    run_line,
    show,
    tf_config,
)
from rendezvous_helpers import (
    NONCE,
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
    received,
    refusal,
    until,
)

from spmdtrain.cluster import rendezvous
from spmdtrain.cluster.job_token import Line
from spmdtrain.cluster.rendezvous import Party
from spmdtrain.errors import ClusterError, UserError
from spmdtrain.testing import start_processes

TOKEN = b"0123456789abcdef0123456789abcdef"
OTHER = b"another token of the same length"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for in seconds is waited for in tenths."""
    monkeypatch.setattr(rendezvous, "REPORT_INTERVAL", 0.3)
    monkeypatch.setattr(rendezvous, "EARLIER_JOB_TIMEOUT", 0.0)
    monkeypatch.setattr(rendezvous, "LATE_TIMEOUT", 0.5)


def ends_unheard(connection: socket.socket) -> bool:
    """Whether process 0 hangs up without another word."""
    try:
        return received(connection) == b""
    except ConnectionResetError:
        return True


def test_processes_with_one_token_meet() -> None:
    assert all_meet(parties(3, token=TOKEN, jax="1")) == [None] * 3


def test_processes_with_one_token_that_differ_are_refused() -> None:
    who = parties(2, token=TOKEN, jax="1")
    first, second = all_meet([who[0], replace(who[1], about={"jax": "2"})])
    assert "differ: jax is 2 there and 1 here" in refusal(first, UserError)
    assert str(first) == refusal(second, UserError)


@pytest.mark.parametrize("token", [b"", OTHER], ids=["no token", "another token"])
def test_a_foreign_hello_takes_no_seat(token: bytes) -> None:
    who = parties(2, token=TOKEN)
    with gathering(who[0]) as (endings, messages):
        with knock(who[0]) as stranger:
            line = greeted(stranger, token)
            with contextlib.suppress(OSError):  # it may have been hung up on
                line.send(hello(who[1]))
            assert ends_unheard(stranger)
        assert not endings
        assert ending(who[1], 10, messages) is None
    assert endings == [None]
    why = "another job token" if token else "no job token"
    assert messages.lines[0][-1] == f"refused 1 connection, the last from 127.0.0.1: it has {why}"


@pytest.mark.parametrize("change", ["about", "rank taken", "replayed"])
def test_a_foreign_hello_does_not_end_the_job(change: str) -> None:
    who = parties(3, token=TOKEN)
    with gathering(who[0], who[1]) as (endings, messages):
        until(lambda: bool(messages.lines[1]))  # it has its seat
        with knock(who[0]) as stranger:
            line = greeted(stranger, OTHER)
            about = {"jax": "evil\x1b[2J\nline two"} if change == "about" else {}
            line.send(hello(who[1]) | {"about": about})
            assert ends_unheard(stranger)
        assert ending(who[2], 10, messages) is None
    assert endings == [None, None]
    assert all(line.isprintable() for lines in messages.lines.values() for line in lines)


def test_what_a_process_said_once_is_worth_nothing_in_another_connection() -> None:
    """A stranger that has recorded a worker's handshake sends the same bytes."""
    who = parties(2, token=TOKEN)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        recorded = Line(theirs, "worker")
        recorded.authenticate(TOKEN, worker_nonce=NONCE, chief_nonce="a" * 32)
        recorded.send(hello(who[1]))
        text = ours.recv(10_000)
    with gathering(who[0]) as (endings, messages), knock(who[0]) as stranger:
        stranger.sendall(greeting(token=True))
        assert json.loads(received(stranger))["nonce"] != "a" * 32
        stranger.sendall(text)
        assert ends_unheard(stranger)
        assert ending(who[1], 10, messages) is None
    assert endings == [None]


def test_the_token_does_not_cross_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    who = parties(2, token=TOKEN)
    sent: list[bytes] = []
    sends = socket.socket.sendall

    class Recorded(socket.socket):
        def sendall(self, data: bytes, *args: int) -> None:  # type: ignore[override]
            sent.append(bytes(data))
            sends(self, data, *args)

    monkeypatch.setattr(socket, "socket", Recorded)
    assert all_meet(who) == [None, None]
    assert len(sent) == 4  # two greetings, who it is, and the word to go
    assert TOKEN not in b"".join(sent) and TOKEN.hex().encode() not in b"".join(sent)


# -- a wrong token ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_with_another_token_gets_an_error_and_process_0_names_it() -> None:
    who = parties(2, token=TOKEN)
    with gathering(who[0], timeout=1.5) as (endings, messages):
        error = refusal(ending(replace(who[1], token=OTHER), 10, messages), ClusterError)
    assert error.endswith("it does not accept the SPMDTRAIN_JOB_TOKEN of this process")
    assert "1 of 2 processes have joined; missing: worker 0" in refusal(endings[0], ClusterError)
    assert str(endings[0]).endswith("the last from 127.0.0.1: it has another job token")


@pytest.mark.slow
@pytest.mark.parametrize("chief", [True, False])
def test_a_token_on_one_side_only_is_reported(chief: bool) -> None:
    who = parties(2)
    having = who[0 if chief else 1]
    who[having.rank] = replace(having, token=TOKEN)
    with gathering(who[0], timeout=1.5) as (endings, messages):
        error = ending(who[1], 10, messages)
    if chief:
        expected = f"chief at 127.0.0.1:{who[0].port} has a job token, but this process has none"
        assert refusal(error, UserError).startswith(expected)
    else:
        assert "it has no SPMDTRAIN_JOB_TOKEN" in refusal(error, ClusterError)
    assert "refused 1 connection" in refusal(endings[0], ClusterError)


@pytest.mark.parametrize("word", ["go", "wrong", "failed", "waiting"])
def test_a_false_process_0_is_not_believed(word: str) -> None:
    worker = parties(2, token=TOKEN)[1]
    with (
        socket.create_server(("127.0.0.1", worker.port)) as listener,
        gathering(worker) as (endings, messages),
    ):
        connection, _ = listener.accept()
        with connection:
            received(connection)
            false = Line(connection, "chief")
            false.send({"nonce": NONCE, "token": True})
            false.authenticate(OTHER, worker_nonce=NONCE, chief_nonce=NONCE)
            false.send({word: "a lie"})
            with contextlib.suppress(OSError):
                received(connection)
    expected = "it does not have the SPMDTRAIN_JOB_TOKEN of this process"
    assert refusal(endings[0], ClusterError).endswith(expected)
    assert messages.lines[1] == []


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [b"", TOKEN], ids=["no token", "token"])
def test_deeply_nested_json_is_sent_away(token: bytes) -> None:
    """`json` would raise RecursionError, which ended the job."""
    who = parties(2, token=token)
    deep = b'{"a":' + b"[" * 100_000 + b"\n"
    with gathering(who[0]) as (endings, messages):
        for text in (deep, deep[:500] + b"\n"):
            with knock(who[0]) as stranger, contextlib.suppress(OSError):
                stranger.sendall(text)
                assert ends_unheard(stranger)
        assert not endings
        assert ending(who[1], 10, messages) is None
    assert endings == [None]


def test_deeply_nested_json_behind_a_greeting_is_sent_away() -> None:
    """Without a token everybody gets this far; the bytes are authentic by an empty key."""
    who = parties(2)
    with gathering(who[0]) as (endings, messages):
        with knock(who[0]) as stranger:
            line = greeted(stranger)
            text = b'{"a":' + b"[" * 100_000
            stranger.sendall(text + b" " + line.mac("worker", text) + b"\n")
            assert ends_unheard(stranger)
        assert ending(who[1], 10, messages) is None
    assert endings == [None]


@contextlib.contextmanager
def files_allowed(number: int) -> Iterator[None]:
    """While entered, this process may open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and number > hard:
        pytest.skip(f"no more than {hard} files may be opened here (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def refused(messages: Messages) -> int:
    """Returns how many connections process 0 has refused, as it says."""
    found = [re.search(r"refused (\d+) connection", line) for line in messages.lines[0]]
    return max((int(one[1]) for one in found if one), default=0)


def test_1100_silent_connections_do_not_exhaust_descriptors() -> None:
    who = parties(3, token=TOKEN)
    with (
        files_allowed(4096),
        gathering(who[0], who[1]) as (endings, messages),
        contextlib.ExitStack() as stack,
    ):
        until(lambda: bool(messages.lines[1]))
        before = open_files()
        for _ in range(1100):
            stack.enter_context(knock(who[0]))
        until(lambda: refused(messages) >= 1100 - rendezvous.MAX_UNAUTHENTICATED)
        assert open_files() - before - 1100 <= rendezvous.MAX_UNAUTHENTICATED
        assert ending(who[2], 20, messages) is None
    assert endings == [None, None]


def test_connections_that_greet_and_say_no_more_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    who = parties(2, token=TOKEN)
    monkeypatch.setattr(rendezvous, "MAX_UNAUTHENTICATED", 4)
    monkeypatch.setattr(rendezvous, "GRACE_PERIOD", 0.1)
    with gathering(who[0]) as (endings, messages), contextlib.ExitStack() as stack:
        for _ in range(12):
            greeted(stack.enter_context(knock(who[0])), OTHER)
        assert ending(who[1], 10, messages) is None
    assert endings == [None]


def test_when_files_run_out_a_stranger_gives_way() -> None:
    who = parties(2, token=TOKEN)
    with gathering(who[0]) as (endings, messages), contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(knock(who[0]))
        until(lambda: open_files() > 60)
        with files_allowed(next_descriptor(stack) + 1):  # for the worker's end of its connection
            assert ending(who[1], 20, messages) is None
    assert endings == [None]
    assert "there are too many open files" in messages.lines[0][-1]


def next_descriptor(stack: contextlib.ExitStack) -> int:
    """Returns the lowest descriptor that is free after all that are open, without gaps."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while (found := os.open(os.devnull, os.O_RDONLY)) < highest:
        stack.callback(os.close, found)
    os.close(found)
    return found


def test_a_connection_that_does_not_identify_itself_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    who = parties(2, token=TOKEN)
    monkeypatch.setattr(rendezvous, "HANDSHAKE_TIMEOUT", 0.2)
    with gathering(who[0]) as (endings, messages):
        with knock(who[0]) as silent, knock(who[0]) as greets:
            greeted(greets, TOKEN)
            for stranger in (silent, greets):
                assert ends_unheard(stranger)
        until(lambda: any("refused 2 connections" in line for line in messages.lines[0]))
        assert ending(who[1], 10, messages) is None
    assert endings == [None]


# -- without a token -------------------------------------------------------------------------------


def test_what_a_process_says_of_itself_is_escaped_and_cut() -> None:
    who = parties(2)
    evil = "worker\x1b[2J\u202e\n" + "x" * 5000
    with gathering(who[0]) as (endings, _), knock(who[0]) as stranger:
        line = greeted(stranger)
        line.send(hello(who[1]) | {"name": evil, "where": evil, "about": {evil: evil}})
        answer = message(line)
    error = refusal(endings[0], UserError)
    assert error.isprintable() and len(error) < 3000
    assert r"worker\x1b[2J\u202e\n" in error
    assert answer == {"wrong": error}


@pytest.mark.parametrize(
    "change",
    [{"rank": True}, {"rank": 1.0}, {"about": {"jax": ["1"]}}, {"size": "2"}],
    ids=["bool", "float", "list", "text"],
)
def test_a_hello_of_other_types_is_sent_away(change: dict[str, object]) -> None:
    who = parties(2)
    with gathering(who[0]) as (endings, messages):
        with knock(who[0]) as stranger:
            greeted(stranger).send(hello(who[1]) | change)
            assert ends_unheard(stranger)
        assert ending(who[1], 10, messages) is None
    assert endings == [None]


def test_a_false_process_0_of_a_job_without_a_token_cannot_write_to_the_terminal() -> None:
    worker = parties(2)[1]
    with (
        socket.create_server(("127.0.0.1", worker.port)) as listener,
        gathering(worker) as (endings, messages),
    ):
        connection, _ = listener.accept()
        with connection:
            nonce = json.loads(received(connection))["nonce"]
            line = Line(connection, "chief")
            line.send({"nonce": NONCE, "token": False})
            line.authenticate(b"", worker_nonce=nonce, chief_nonce=NONCE)
            line.send({"waiting": "a\x1b[2Jb"})
            line.send({"wrong": "c\nd"})
            received(connection)
    assert messages.lines[1] == [r"a\x1b[2Jb"]
    assert refusal(endings[0], UserError) == r"c\nd"


def test_the_token_is_not_shown() -> None:
    assert TOKEN.decode() not in repr(Party("h", 1, ["chief"], 0, token=TOKEN))


# -- a real job ------------------------------------------------------------------------------------

ATTACKER = """
import json, socket, sys, time
from pathlib import Path

from rendezvous_helpers import NONCE, greeted, greeting, hello, knock, parties
from spmdtrain.cluster.rendezvous import Party

port, go, names = int(sys.argv[1]), Path(sys.argv[2]), ["chief", "worker 0"]
worker = Party("127.0.0.1", port, names, 1)
until = time.monotonic() + 60
while time.monotonic() < until:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        break
    except OSError:
        time.sleep(0.1)
for text in (b'{"a":' + b"[" * 100_000 + b"\\n", b"GET / HTTP/1.1\\r\\n\\r\\n", b"\\x00" * 5000):
    knock(worker).sendall(text)
silent = [knock(worker) for _ in range(1100)]
for token in (b"", b"a token that the job does not have"):
    stranger = knock(worker)
    try:
        line = greeted(stranger, token)
        line.send(hello(worker) | {"about": {"jax": "\\x1b[2J"}})
        while line.read():
            print("heard", list(line.messages()))
    except OSError as error:
        print("refused:", error)
go.touch()
time.sleep(20)
"""


@pytest.mark.drill
def test_a_job_trains_though_strangers_attack_its_rendezvous(tmp_path: Path) -> None:
    """The chief may open 512 files; the worker joins during the attack."""
    addresses, go = [f"127.0.0.1:{free_port()}" for _ in range(2)], tmp_path / "go"
    line = run_line(drill(tmp_path), "--workdir", tmp_path / "run")
    before = {0: "ulimit -n 512", 1: f"until test -e {go}; do sleep 0.1; done"}
    shells = {rank: ["bash", "-c", f'{text}; exec "$@"', "task"] for rank, text in before.items()}
    attack = [sys.executable, "-c", ATTACKER, addresses[0].split(":")[1], str(go)]
    with start_processes(
        lambda rank: as_task(tf_config(addresses, rank), [*shells[rank], *line]),
        processes=2,
        timeout=BOUND,
        env=quiet(),
    ) as job:
        attacker = subprocess.Popen(attack, cwd=TESTS, stdout=subprocess.PIPE, text=True)
        try:
            ended = job.wait(check=False)
        finally:
            attacker.kill()
            heard, _ = attacker.communicate()
    assert codes(ended) == [0, 0], show(ended)
    assert saved_steps(tmp_path / "run")[-1] == STEPS
    assert "heard" not in heard
    refused = re.search(r"refused (\d+) connections, the last from 127", ended[0].output)
    assert refused is not None and int(refused[1]) >= 970
    assert "\x1b" not in ended[0].output
