"""The server of a page that is followed."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from spmdtrain import UserError
from spmdtrain.page.blocks import NoteBlock, Page, Section
from spmdtrain.page.local_server import PageServer

NOTES = ["first"]


@pytest.fixture
def server() -> Iterator[PageServer]:
    NOTES[:] = ["first"]

    def read() -> tuple[Page, str]:
        return Page("run", [Section("", [NoteBlock(note) for note in NOTES])]), f"v{len(NOTES)}"

    server = PageServer(read)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield server
    server.close()
    thread.join()


def get(server: PageServer, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
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
