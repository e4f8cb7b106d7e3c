"""The token of a job: where it comes from, and the lines over sockets that it makes authentic."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import BOUND, environment
from hypothesis import given
from hypothesis import strategies as st
from processes import as_task, free_port, tf_config

from spmdtrain.cluster import job_token
from spmdtrain.cluster.command import check_token
from spmdtrain.cluster.job_token import TOKEN, TOKEN_FILE, Line, parse_line
from spmdtrain.cluster.spec import from_tf_config
from spmdtrain.distributed import failures, process_group
from spmdtrain.distributed.progress import CONTEXT
from spmdtrain.errors import UserError, foreign
from spmdtrain.launch.task_env import environments_of

GOOD = "0123456789abcdef"


def unheard(text: str) -> None:
    raise AssertionError(text)


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{GOOD}\n")
    file.chmod(0o600)
    assert job_token.read({TOKEN: GOOD}, warn=unheard) == GOOD.encode()
    assert job_token.read({TOKEN_FILE: str(file), TOKEN: ""}, warn=unheard) == GOOD.encode()
    assert job_token.read({}, warn=unheard) == b""


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0, "No such file"),
        ("short\n", 0o600, "the token has 5 characters; expected 16 to 4096"),
        ("x" * 5000, 0o600, "the token has 4098 characters"),
        ("", 0o600, "the token has 0 characters"),
    ],
)
def test_a_file_that_holds_no_token_is_an_error(
    tmp_path: Path, content: str | None, mode: int, said: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(UserError) as error:
        job_token.read({TOKEN_FILE: str(file)}, warn=unheard)
    assert str(error.value).startswith(f"{TOKEN_FILE}={file}: ") and said in str(error.value)


@pytest.mark.timeout(30)
def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    for place in ("token", "."):
        with pytest.raises(UserError, match=r"not a regular file|cannot be read"):
            job_token.read({TOKEN_FILE: str(tmp_path / place)}, warn=unheard)


def test_a_short_token_is_an_error_that_does_not_show_it() -> None:
    with pytest.raises(UserError, match="6 characters") as error:
        job_token.read({TOKEN: "hidden"}, warn=unheard)
    assert "hidden" not in str(error.value)


def test_both_variables_are_an_error() -> None:
    with pytest.raises(UserError, match="both set"):
        job_token.read({TOKEN: GOOD, TOKEN_FILE: "/token"}, warn=unheard)


def test_a_file_that_everybody_can_read_is_warned_of(tmp_path: Path) -> None:
    file, said = tmp_path / "token", list[str]()
    file.write_text(GOOD)
    file.chmod(0o644)
    assert job_token.read({TOKEN_FILE: str(file)}, warn=said.append) == GOOD.encode()
    (warning,) = said
    assert "readable by all users" in warning


def test_an_exposed_job_without_a_token_is_warned_of() -> None:
    said = list[str]()
    assert job_token.read({}, exposed="10.0.0.1:2222", warn=said.append) == b""
    (warning,) = said
    assert "10.0.0.1:2222 can join or end it" in warning
    assert job_token.read({TOKEN: GOOD}, exposed="10.0.0.1:2222", warn=unheard) == GOOD.encode()


def test_tokens_differ_and_are_long_enough() -> None:
    one, other = job_token.create(), job_token.create()
    assert one != other and len(one) == 64
    assert job_token.read({TOKEN: one}, warn=unheard) == one.encode()


def test_the_launcher_gives_all_tasks_one_token() -> None:
    names = ["chief", "worker 0", "evaluator"]
    given = environments_of(names, None, {}, [])
    (token,) = {given[name][TOKEN] for name in names}
    assert len(token) == 64
    assert environments_of(names, None, {}, [])["chief"][TOKEN] != token
    assert environments_of(["chief"], None, {TOKEN: GOOD}, [])["chief"][TOKEN] == GOOD
    assert TOKEN not in environments_of(["chief"], None, {TOKEN_FILE: "/token"}, [])["chief"]


@pytest.mark.parametrize(
    ("host", "environ", "level"),
    [
        ("10.0.0.1", {}, "warning"),
        ("10.0.0.1", {TOKEN: GOOD}, "ok"),
        ("10.0.0.1", {TOKEN: "short"}, "error"),
        ("127.0.0.1", {}, None),
    ],
)
def test_the_doctor_checks_the_token(host: str, environ: dict[str, str], level: str | None) -> None:
    cluster = {"worker": [f"{host}:1", f"{host}:2"]}
    spec = from_tf_config(json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    found = check_token(spec, environ)
    assert [one.level for one in found] == ([level] if level else [])
    assert check_token(from_tf_config(None), environ) == []


@pytest.mark.drill
@pytest.mark.parametrize("token", ["", GOOD])
def test_process_0_warns_if_other_machines_reach_a_job_without_a_token(token: str) -> None:
    addresses = [f"192.0.2.{number}:{free_port()}" for number in (1, 2)]
    script = "import spmdtrain; spmdtrain.initialize(timeout=0.1)"
    done = subprocess.run(
        as_task(tf_config(addresses, 0), [sys.executable, "-c", script]),
        env=environment() | {TOKEN: token},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert "gave up after 0.1 s" in done.stderr
    assert done.stderr.count("warning: this job has no token: any program") == (not token)


# -- through JAX's key-value store -----------------------------------------------------------------


class Store:
    """A key-value store to which a stranger has written."""

    def __init__(self, value: object) -> None:
        self._value = json.dumps(value)

    def key_value_try_get(self, key: str) -> str:
        return self._value

    def blocking_key_value_get(self, key: str, timeout: int) -> str:
        return self._value


EVIL = "a\x1b[2J\u202eb"


def test_another_process_s_reason_is_shown_escaped() -> None:
    record = {"rank": 0, "name": EVIL, "code": 1, "reason": EVIL, "lost": False}
    found = failures.first_failure(process_group.Job(["chief", "worker 0"], 1, Store(record)))
    assert found is not None
    assert failures.describe_failure(found) == r"a\x1b[2J\u202eb failed: a\x1b[2J\u202eb"


def test_another_process_s_error_is_raised_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "test_another_process_s_error_is_raised_escaped"
    sent = [f"broadcast in {name}", "", [f"{EVIL}\nsecond", None]]
    job = process_group.Job(["chief", "worker 0"], 1, Store(sent))
    job.client.key_value_set = lambda *_: None
    monkeypatch.setattr(CONTEXT, "job", job)
    with pytest.raises(UserError) as error:
        process_group.run_on_all(lambda: None, UserError)
    assert str(error.value) == "a\\x1b[2J\\u202eb\nsecond"
    job.client = Store([EVIL, EVIL, None])
    with pytest.raises(UserError, match=r"in chief by a\\x1b\[2J\\u202eb \[a\\x1b") as error:
        process_group.broadcast(None)
    assert "\x1b" not in str(error.value)


# -- lines over a socket: whole, in order, bounded, and authentic ----------------------------------

CHIEF, WORKER = "1" * 32, "2" * 32


@contextmanager
def ends(chief: bytes = b"secret", worker: bytes = b"secret") -> Iterator[tuple[Line, Line]]:
    """Both ends of a connection after the exchange of nonces; their tokens."""
    one, other = socket.socketpair()
    with one, other:
        pair = Line(one, "chief"), Line(other, "worker")
        for line, token in zip(pair, (chief, worker), strict=True):
            line.authenticate(token, worker_nonce=WORKER, chief_nonce=CHIEF)
        yield pair


def arrived(line: Line) -> list[dict[str, Any] | None]:
    assert line.read()
    return list(line.messages())


@pytest.mark.slow
@given(
    messages=st.lists(
        st.dictionaries(st.text(max_size=8), st.text(max_size=8) | st.integers(), max_size=3),
        max_size=4,
    ),
    cuts=st.lists(st.integers(1, 40), max_size=10),
)
def test_messages_come_whole_and_in_order_however_they_are_cut(
    messages: list[dict[str, Any]], cuts: list[int]
) -> None:
    here, there = socket.socketpair()
    with here, there, ends() as (chief, worker):
        for one in messages:
            chief.send(one)
        text = worker.socket.recv(2**20) if messages else b""
        worker.socket.close()
        worker.socket = there
        found = []
        for cut in [*cuts, len(text)]:
            piece, text = text[:cut], text[cut:]
            if piece:
                here.sendall(piece)
                found += arrived(worker)
        assert found == messages


@given(st.binary(min_size=1, max_size=200), st.booleans())
def test_anything_else_is_none_and_raises_nothing(noise: bytes, sealed: bool) -> None:
    one, other = socket.socketpair()
    with one, other:
        receiver = Line(other, "chief")
        if sealed:
            receiver.authenticate(b"secret", WORKER, CHIEF)
        one.sendall(noise + b"\n")
        for message in arrived(receiver):
            assert message is None or (isinstance(message, dict) and not sealed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"a": {"b": {"c": [1]}}}', {"a": {"b": {"c": [1]}}}),
        (b'{"a": {"b": {"c": [[1]]}}}', None),
        (b'{"a": "[[[[[[ \\" {{{{{"}', {"a": '[[[[[[ " {{{{{'}),
        (b'{"a":' + b"[" * 500_000, None),
        (b"{" * 500_000, None),
        (b'{"a": ' + b"9" * 10_000 + b"}", None),  # more digits than Python converts
        (b"[1]", None),
        (b"\xff", None),
        ('{"\u2200":'.encode("utf-16-le") + "[".encode("utf-16-le") * 100_000, None),
        ('{"a": 1}'.encode("utf-16"), None),  # JSON in UTF-8 alone is read
    ],
    ids=[
        "four",
        "five",
        "strings",
        "lists",
        "objects",
        "digits",
        "list",
        "bytes",
        "UTF-16",
        "mark",
    ],
)
def test_nesting_is_bounded(text: bytes, expected: object) -> None:
    assert parse_line(text) == expected


def test_the_scan_of_a_line_takes_time_in_proportion_to_its_length() -> None:
    began = time.process_time()
    for text in (b'{"a": "' + b'\\"' * 250_000, b'"' * 500_000, b"\\" * 500_000):
        assert parse_line(text) is None
    assert time.process_time() - began < 5


def test_a_line_is_authentic_once_in_its_order_direction_and_connection() -> None:
    with ends() as (chief, worker):
        chief.send({"go": True})
        text = worker.socket.recv(1000)
        assert b"secret" not in text
        worker.socket.sendall(text)  # reflected
        assert arrived(chief) == [None]
    with ends() as (chief, worker):
        chief.socket.sendall(text * 2)  # in another connection, of the same nonces: once
        assert arrived(worker) == [{"go": True}, None]
    with ends() as (chief, worker):
        chief.socket.sendall(text.replace(b"true", b"null"))
        assert arrived(worker) == [None]
    with ends() as (chief, worker):
        worker.authenticate(b"secret", worker_nonce=WORKER, chief_nonce="3" * 32)
        chief.socket.sendall(text)
        assert arrived(worker) == [None]
    with ends(worker=b"another") as (chief, worker):
        chief.socket.sendall(text)
        assert arrived(worker) == [None]


def test_bytes_are_authentic_once_in_their_order_direction_and_connection() -> None:
    content, soon = bytes(range(256)) * 8, time.monotonic() + 5

    def found(receiver: Line, size: int = len(content)) -> bytes | None:
        into = bytearray(size)
        return bytes(into) if receiver.receive_bytes(memoryview(into), soon) else None

    with ends() as (chief, worker):
        chief.send({"size": len(content)})
        chief.send_bytes(memoryview(content), soon)
        chief.send({"end": 1})
        assert worker.answer(soon) == {"size": len(content)}  # bytes may arrive with the line
        assert found(worker) == content
        assert worker.answer(soon) == {"end": 1}
    with ends() as (chief, worker):
        chief.send_bytes(memoryview(content), soon)
        sent = worker.socket.recv(10_000)
        assert len(sent) == len(content) + 64 and b"secret" not in sent
        worker.socket.sendall(sent)  # reflected
        assert found(chief) is None
    for altered in (sent[:5] + b"x" + sent[6:], sent[:-1] + b"x", b"\0" + sent):
        with ends() as (chief, worker):
            chief.socket.sendall(altered)
            assert found(worker) is None
    with ends() as (chief, worker):
        chief.socket.sendall(sent * 2)  # in another connection, of the same nonces: once
        assert (found(worker), found(worker)) == (content, None)
    with ends(worker=b"another") as (chief, worker):
        chief.socket.sendall(sent)
        assert found(worker) is None
    with ends() as (chief, worker):
        chief.send_bytes(memoryview(content), soon)
        assert found(worker, len(content) - 64) is None  # of another number than was sent
    with ends() as (chief, worker):
        chief.socket.close()
        with pytest.raises(ConnectionResetError):
            found(worker)


def test_bytes_are_waited_for_until_their_deadline() -> None:
    with ends() as (chief, worker):
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            worker.receive_bytes(memoryview(bytearray(8)), began + 0.2)
        with pytest.raises(TimeoutError):  # the other end reads nothing
            chief.send_bytes(memoryview(bytes(2**26)), began + 0.4)
        assert time.monotonic() - began < 5


def test_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    with one, other:
        line = Line(other, "chief")
        one.sendall(json.dumps({"spmdtrain": "x" * job_token.MAX_GREETING}).encode())
        assert arrived(line) == [None]  # before its end
    monkeypatch.setattr(job_token, "MAX_LINE", 3000)
    with ends() as (chief, worker):
        chief.send({"waiting": "x" * 2000})
        assert arrived(worker) == [{"waiting": "x" * 2000}]
        chief.send({"waiting": "x" * 3000})
        assert arrived(worker) == [None]


@given(st.text(max_size=50))
def test_text_from_the_network_is_one_printable_line(text: str) -> None:
    shown = foreign(text)
    assert len(shown.splitlines()) <= 1
    shown.encode()
    assert not set(shown) & set("\x00\x1b\x7f\x9b\u202e\u2066\u2028")
    assert len(foreign(text * 1000, 100)) <= 103


def test_an_escape_sequence_is_shown() -> None:
    assert foreign("a\x1b[2J\nb\u202ec\ud800") == r"a\x1b[2J\nb\u202ec\ud800"
