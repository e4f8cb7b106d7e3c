"""Pages as HTML files without network requests, and a local server of one page."""

import base64
import functools
import hashlib
import http.server
import json
import re
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from spmdtrain.document.blocks import ChartBlock, Page
from spmdtrain.errors import StorageError, UserError, foreign, import_extra

# -- Rendering of a page as one HTML file without network requests ---------------------------------

_LONGEST_TEXT = 4000


def render_page(page: Page, *, follow: str | None = None) -> str:
    """Returns a page as HTML. All text of the page is escaped.

    Args:
      follow: The version of the page, if a server offers newer ones; see `PageServer`.

    Raises:
      UserError: If a library of the extra `report` is not installed.
    """
    content = page_content(page)
    charts = any(content["charts"])
    scripts = [_script_safe(_vega())] if charts else []
    scripts.append(_script_safe(_asset("page.js")))
    connect = "'none'" if follow is None else "'self'"
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    html: str = (
        _environment()
        .get_template("page.html")
        .render(
            page=page,
            policy=policy,
            style=_asset("page.css"),
            scripts=scripts,
            main=content["main"],
            data=_json_in_script({"charts": content["charts"], "version": follow}),
        )
    )
    return html


def page_content(page: Page) -> dict[str, Any]:
    """Returns the parts of a followed page that change.

    They are a JSON object: `title`, the HTML of the `main` element, and `charts` by their ids.
    """
    sections = [section for section in page.sections if section.blocks]
    charts: dict[str, Mapping[str, Any]] = {}
    ids: dict[int, str] = {}
    for section in sections:
        for block in section.blocks:
            if isinstance(block, ChartBlock):
                # The same chart keeps its id while others appear, so that it is not drawn again.
                label = hashlib.sha256(f"{section.title}\0{block.title}".encode()).hexdigest()[:10]
                name = f"chart-{label}"
                while name in charts:
                    name += "-"
                ids[id(block)] = name
                # What Vega tells a screen reader.
                label = foreign(block.title or section.title or page.title, _LONGEST_TEXT)
                spec = {**block.spec, "description": label}
                charts[name] = {"spec": spec, "data": block.data, "hover": block.hover}
    template = _environment().get_template("main.html")
    main = template.render(
        page=page, sections=sections, chart_ids=lambda block: ids[id(block)], anchor=_anchor
    )
    return {"title": foreign(page.title, 200), "main": main, "charts": charts}


def _anchor(title: str) -> str:
    return re.sub("[^a-z0-9]+", "-", title.lower()).strip("-") or "section"


@functools.cache
def _environment() -> Any:
    jinja2 = import_extra("jinja2", "report", "HTML pages")
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        finalize=_one_line,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _one_line(value: Any) -> Any:
    """Returns a text without control characters, any other argument of the template as it is."""
    return foreign(value, _LONGEST_TEXT) if type(value) is str else value


@functools.cache
def _asset(name: str) -> str:
    return resources.files("spmdtrain.document").joinpath("assets", name).read_text("utf-8")


@functools.cache
def _vega() -> str:
    """Returns the libraries Vega, Vega-Lite and Vega-Embed as one script."""
    bundle: str = import_extra("vl_convert", "report", "charts").javascript_bundle()
    return bundle


def _script_safe(code: str) -> str:
    """Returns JavaScript that may stand in a script element; only string literals in it change."""
    return re.sub("<(?=/script|!--)", r"\\x3c", code, flags=re.IGNORECASE)


def _json_in_script(content: Any) -> str:
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# -- A server of one page, for browsers on this machine only ---------------------------------------

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
