"""A headless Chromium for tests of pages, driven by the DevTools protocol over two pipes."""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Makes the pipes the protocol's descriptors: 3 is read, 4 is written. A function that runs after a
# fork would do the same, but JAX warns of forks.
LAUNCH = """
import os, sys
reads, writes = (os.dup(int(number)) for number in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.set_inheritable(3, True)  # which `dup2` leaves as it is if the numbers are equal
os.set_inheritable(4, True)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE = 300.0  # seconds; far more than any page takes


class Browser:
    """One tab. `evaluate` runs JavaScript in its page."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers = to, os.fdopen(answers, "rb")
        self.messages: list[str] = []
        """Errors and warnings of the page."""
        self.requests: list[str] = []
        """The addresses that the page has requested."""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        self._answers.close()

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        content = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            content += byte
        answer: dict[str, Any] = json.loads(content)
        params = answer.get("params", {})
        match answer.get("method"):
            case "Runtime.exceptionThrown":
                self.messages.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.messages.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.messages.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
        return answer

    def open(self, address: str | Path, width: int = 1280, height: int = 900) -> None:
        """Opens a page, whose messages and requests are collected from now on."""
        self.messages, self.requests = [], []
        self._call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        url = address.absolute().as_uri() if isinstance(address, Path) else address
        self._call("Page.navigate", url=url)

    def dark(self, on: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self._call("Emulation.setEmulatedMedia", features=[feature])

    def evaluate(self, code: str) -> Any:
        """The value of an expression, as JSON."""
        result = self._call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, code: str) -> Any:
        """The value of an expression, once it is true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.evaluate(code)):
            assert time.monotonic() < end, (code, self.messages)
            time.sleep(0.02)
        return value

    def drawn(self) -> None:
        """Returns when all charts are drawn."""
        self.wait("document.documentElement?.dataset.drawn === 'yes'")

    def texts(self, selector: str) -> list[str]:
        """The visible text of all elements of a CSS selector."""
        code = (
            f"[...document.querySelectorAll({json.dumps(selector)})].map(x => x.innerText.trim())"
        )
        found: list[str] = self.evaluate(code)
        return found

    def move_pointer(self, x: float, y: float) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, file: Path, whole: bool = True) -> None:
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a new profile; skips the test if none is installed."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser is installed: looked for {', '.join(NAMES)}")
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run"
    ours, theirs = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser_command = [found, *flags.split(), "--remote-debugging-pipe"]
        browser_command.append(f"--user-data-dir={profile}")
        process = subprocess.Popen(
            [sys.executable, "-IS", "-c", LAUNCH, f"{ours[0]}", f"{theirs[1]}", *browser_command],
            stderr=subprocess.DEVNULL,
            pass_fds=(ours[0], theirs[1]),
        )
        os.close(ours[0])
        os.close(theirs[1])
        browser = None
        try:
            browser = Browser(ours[1], theirs[0])
            yield browser
        finally:
            process.terminate()
            process.wait(20)
            os.close(ours[1])
            if browser is not None:
                browser.close()
