"""A server of one page, for browsers on this machine only."""

import http.server
import json
import socketserver
import sys
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from spmdtrain.errors import StorageError, UserError
from spmdtrain.page.blocks import Page
from spmdtrain.page.render import page_content, render_page

ADDRESS = "127.0.0.1"


class PageServer:
    """Serves a page that changes, on 127.0.0.1 only.

    Args:
      read: Returns the page and its version. It is called in one thread at a time. Two pages with
        the same version are equal.
      port: 0 chooses a free port.

    Raises:
      UserError: If the port cannot be used.
    """

    def __init__(self, read: Callable[[], tuple[Page, str]], port: int = 0) -> None:
        self._read, self._lock = read, threading.Lock()

        class Handler(_Handler):
            page_server = self

        try:
            self._server = _Server((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {port} of {ADDRESS} cannot be used: {error}; choose another with --port, or "
                "0 for any free port"
            ) from error

    @property
    def port(self) -> int:
        """The port."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.port}/"

    def serve(self) -> None:
        """Serves until `close` is called in another thread, or an exception such as Ctrl-C."""
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self._server.server_close()

    def close(self) -> None:
        """Ends `serve`."""
        self._server.shutdown()

    def html(self) -> str:
        """Returns the whole page."""
        with self._lock:
            page, version = self._read()
        return render_page(page, follow=version)

    def update(self, version: str) -> dict[str, Any] | None:
        """Returns what has changed since `version` as a JSON object; None if nothing has."""
        with self._lock:
            page, newest = self._read()
        return None if newest == version else page_content(page) | {"version": newest}


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True  # an open connection does not delay the end
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the browser has left
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    page_server: PageServer

    def do_GET(self) -> None:
        hosts = {f"{name}:{self.page_server.port}" for name in (ADDRESS, "localhost")}
        if self.headers.get("Host") not in hosts:
            # A name that resolves to this machine: a foreign web page could read the run by it.
            self.send_error(421, "this server answers to 127.0.0.1 and localhost only")
            return
        try:
            self._answer()
        except (UserError, StorageError) as error:  # the next request may succeed
            self.send_error(503, explain=str(error))

    def _answer(self) -> None:
        address = urlsplit(self.path)
        if address.path == "/":
            self._send("text/html; charset=utf-8", self.page_server.html())
        elif address.path == "/update":
            version = parse_qs(address.query).get("version", [""])[0]
            update = self.page_server.update(version)
            if update is None:
                self.send_response(204)
                self.end_headers()
            else:
                self._send("application/json", json.dumps(update, allow_nan=False))
        else:
            self.send_error(404)

    def _send(self, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing for each request."""
