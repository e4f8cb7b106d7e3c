"""Google Cloud Storage with one bucket, in memory: as much of it as gcsfs and TensorStore use.

Of the JSON API (https://cloud.google.com/storage/docs/json_api) all else is answered 501 and kept
in `unknown`.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import parse_qsl, unquote, urlsplit

BUCKET = "bucket"
OBJECTS = f"/storage/v1/b/{BUCKET}/o"
PAGE = 3  # entries in a page of a listing: few, so that there is always a second page

Answer = tuple[int, dict[str, str], bytes]


@dataclass(frozen=True)
class Stored:
    content: bytes
    generation: int


@dataclass
class FakeGcs:
    """The bucket, and where it is served."""

    address: str
    objects: dict[str, Stored] = field(default_factory=dict)
    uploads: dict[str, tuple[str, bytearray]] = field(default_factory=dict)  # resumable ones
    unknown: list[str] = field(default_factory=list)
    down: bool = False  # refuses every write
    before_write: Callable[[str], None] = lambda request: None
    lock: threading.Lock = field(default_factory=threading.Lock)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def environment(self) -> dict[str, str]:
        """What sends gcsfs, Orbax and TensorStore here, and keeps them from any other host."""
        return {
            "STORAGE_EMULATOR_HOST": self.address,
            "TENSORSTORE_GCS_HTTP_URL": self.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",  # or TensorStore looks for credentials
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # asks for the kind of bucket by gRPC
        }

    def under(self, prefix: str) -> dict[str, bytes]:
        """The objects below a folder, by their names in it."""
        with self.lock:
            return {
                name.removeprefix(prefix): stored.content
                for name, stored in self.objects.items()
                if name.startswith(prefix)
            }

    # -- the requests; each returns status, headers, body ------------------------------------------

    def answer(
        self, method: str, path: str, query: dict[str, str], range_: str | None, body: bytes
    ) -> Answer:
        if method != "GET":
            self.before_write(f"{method} {path} {query.get('name', '')}")
        name, moves, to = map(unquote, path.partition(f"{OBJECTS}/")[2].partition("/moveTo/o/"))
        if self.down and method != "GET":
            return _json(401, {"error": {"message": "no more writes"}})
        if f"/b/{BUCKET}" not in path:
            return _json(404, {"error": {"message": "no such bucket"}})
        if method == "POST" and path == f"/upload{OBJECTS}":
            return self.upload(query, range_, body)
        if method == "GET" and path == f"/storage/v1/b/{BUCKET}":
            return _json(200, {"kind": "storage#bucket", "name": BUCKET})
        if method == "GET" and path == OBJECTS:
            return self.listing(query)
        if (method not in ("GET", "DELETE") and not moves) or name == "":
            return _json(501, {"error": {"message": "not faked"}})
        stored = self.objects.get(name)
        if (refusal := _refusal(query, stored)) is not None:
            return refusal
        if stored is None:
            return _json(404, {"error": {"message": "No such object"}})
        if moves:
            del self.objects[name]
            return self.store(to, stored.content, {})
        if method == "GET" and query.get("alt") == "media":
            return _media(stored, range_)
        if method == "GET":
            return _json(200, _resource(name, stored))
        del self.objects[name]
        return 204, {}, b""

    def listing(self, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        entries: dict[str, Stored | None] = {}  # None for what stands for a folder
        for name in sorted(n for n in self.objects if n.startswith(prefix)):
            head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            entries[prefix + head + delimiter if found else name] = (
                None if found else self.objects[name]
            )
        after = [name for name in entries if name > query.get("pageToken", "")]
        page = after[: min(PAGE, int(query.get("maxResults", PAGE)))]
        found_here = [(name, entries[name]) for name in page]
        content: dict[str, object] = {
            "kind": "storage#objects",
            "items": [_resource(name, stored) for name, stored in found_here if stored],
            "prefixes": [name for name, stored in found_here if stored is None],
        }
        if len(page) < len(after):
            content["nextPageToken"] = page[-1]
        return _json(200, content)

    def upload(self, query: dict[str, str], range_: str | None, body: bytes) -> Answer:
        if query["uploadType"] == "media":
            return self.store(query["name"], body, query)
        if query["uploadType"] != "resumable":
            return _json(501, {"error": {"message": "not faked"}})
        if "upload_id" not in query:
            upload_id = str(next(self.numbers))
            self.uploads[upload_id] = (query["name"], bytearray())
            where = f"{self.address}/upload{OBJECTS}?uploadType=resumable&upload_id={upload_id}"
            return 200, {"Location": where}, b""
        name, received = self.uploads[query["upload_id"]]
        received += body
        if range_ is not None and range_.endswith("/*"):
            return 308, {"Range": f"bytes=0-{len(received) - 1}"}, b""
        del self.uploads[query["upload_id"]]
        return self.store(name, bytes(received), query)

    def store(self, name: str, content: bytes, query: dict[str, str]) -> Answer:
        if (refusal := _refusal(query, self.objects.get(name))) is not None:
            return refusal
        self.objects[name] = Stored(content, next(self.numbers))
        return _json(200, _resource(name, self.objects[name]))


def _refusal(query: dict[str, str], stored: Stored | None) -> Answer | None:
    generation = str(stored.generation if stored else 0)
    if query.get("ifGenerationMatch", generation) != generation:
        return _json(412, {"error": {"message": "another generation"}})
    if query.get("ifGenerationNotMatch") == generation:
        return 304, {}, b""
    return None


def _media(stored: Stored, range_: str | None) -> Answer:
    headers = {"X-Goog-Generation": str(stored.generation), "X-Goog-Metageneration": "1"}
    if range_ is None:
        return 200, headers, stored.content
    first, last = map(int, range_.removeprefix("bytes=").split("-"))
    content = stored.content[first : last + 1]
    if not content:
        return 416, headers, b""
    headers["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{len(stored.content)}"
    return 206, headers, content


def _resource(name: str, stored: Stored) -> dict[str, str]:
    return {
        "kind": "storage#object",
        "name": name,
        "bucket": BUCKET,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.content)),
    }


def _json(status: int, content: object) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(content).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open
    wbufsize = -1  # an answer leaves in one piece, or TCP waits before it sends the second
    storage: FakeGcs

    def handle(self) -> None:
        with suppress(ConnectionError):  # gcsfs hangs up when it no longer wants to know
            super().handle()

    def respond(self) -> None:
        url = urlsplit(self.path)
        path = re.sub("^/download", "", url.path)
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        range_ = self.headers["Content-Range"] or self.headers["Range"]
        with self.storage.lock:
            status, headers, content = self.storage.answer(
                self.command, path, dict(parse_qsl(url.query)), range_, body
            )
            if status == 501:
                self.storage.unknown.append(f"{self.command} {self.path}")
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = do_PUT = do_PATCH = respond

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def fake_gcs() -> Iterator[FakeGcs]:
    """Serve an empty bucket until the end of the block."""

    class Handler(_Handler):
        pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        Handler.storage = storage = FakeGcs(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield storage
        finally:
            server.shutdown()
            thread.join()
