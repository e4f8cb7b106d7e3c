"""The server of a page that is followed."""

import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from helpers import BOUND

from spmdtrain import UserError
from spmdtrain.document.blocks import NoteBlock, Page, Section
from spmdtrain.document.html import PageServer
from spmdtrain.errors import StorageError

NOTES = ["first"]


@contextlib.contextmanager
def serving(server: PageServer) -> Iterator[PageServer]:
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.close()
    thread.join()


@pytest.fixture
def server() -> Iterator[PageServer]:
    NOTES[:] = ["first"]

    def read() -> tuple[Page, str]:
        return Page("run", [Section("", [NoteBlock(note) for note in NOTES])]), f"v{len(NOTES)}"

    with serving(PageServer(read)) as server:
        yield server


def get(server: PageServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=BOUND)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_an_update_is_sent_only_if_there_is_one(server: PageServer) -> None:
    status, html = get(server, "/")
    assert status == 200 and "first" in html and '"version":"v1"' in html
    assert "connect-src &#39;self&#39;" in html
    assert get(server, "/update?version=v1") == (204, "")
    NOTES.append("second")
    status, text = get(server, "/update?version=v1")
    update = json.loads(text)
    assert status == 200 and update["version"] == "v2" and "second" in update["main"]
    assert get(server, "/etc/passwd")[0] == 404


def test_a_page_that_cannot_be_read_is_an_error_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def read() -> tuple[Page, str]:
        raise StorageError("metrics.jsonl <b> cannot be read")

    with serving(PageServer(read)) as server:
        for path in ("/", "/update?version=v1"):
            status, text = get(server, path)
            assert status == 503 and "metrics.jsonl &lt;b&gt; cannot be read" in text
    assert capsys.readouterr().err == ""


def test_a_browser_that_leaves_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    has_asked, has_left = threading.Event(), threading.Event()

    def read() -> tuple[Page, str]:
        has_asked.set()
        assert has_left.wait(60)
        return Page("run", []), "v1"

    with serving(PageServer(read)) as server:
        browser = socket.create_connection(("127.0.0.1", server.port))
        browser.sendall(f"GET / HTTP/1.1\r\nHost: localhost:{server.port}\r\n\r\n".encode())
        assert has_asked.wait(60)
        browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        browser.close()  # with a reset
        has_left.set()
        while [x for x in threading.enumerate() if "process_request" in x.name]:
            time.sleep(0.01)
    assert capsys.readouterr().err == ""


def test_other_machines_and_other_names_are_refused(server: PageServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}/"
    # A web page whose name resolves to this machine could otherwise read the run.
    assert get(server, "/", host=f"evil.example:{server.port}")[0] == 421
    assert get(server, "/", host=f"localhost:{server.port}")[0] == 200
    with socket.create_server(("127.0.0.2", server.port)):  # the port is free elsewhere
        pass


def test_a_used_port_is_an_error_for_users(server: PageServer) -> None:
    with pytest.raises(UserError, match=f"port {server.port} .* choose another with --port"):
        PageServer(lambda: (Page("p", []), ""), server.port)
    with pytest.raises(UserError, match="port 99999 "):
        PageServer(lambda: (Page("p", []), ""), 99999)
