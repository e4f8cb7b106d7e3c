"""Lines over a socket: whole, in order, bounded, and authentic."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdtrain.cluster import job_token
from spmdtrain.cluster.job_token import Line, parse_line
from spmdtrain.errors import foreign

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
