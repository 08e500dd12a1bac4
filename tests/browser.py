"""A headless Chromium for tests, driven over the DevTools protocol through its pipe: no port, and no library.

`--remote-debugging-pipe` reads commands from file descriptor 3 and writes answers and events to 4, each message one
object of JSON that ends in a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
_SECONDS = 60


def find_browser() -> str:
    """The browser's place; skips the test where there is none."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("no Chromium: install Debian's package chromium, or name one in CHROMIUM")
    return found


class Browser:
    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp()
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def take_pipes() -> None:
            os.dup2(os.dup(to_browser), 3)
            os.dup2(os.dup(from_browser), 4)

        command = [find_browser(), *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._folder}", "about:blank"]
        # 3 and 4 are among the kept ones: what is dup'ed onto them is inherited.
        self._process = subprocess.Popen(
            command, preexec_fn=take_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number = b"", 0
        self.problems: list[str] = []  # What the console was told of errors and warnings, and exceptions.
        self.asked: list[str] = []  # Addresses that the page asked a network for.
        # Chromium 156 lists a target of its own before the page.
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Open a file, and wait until its script has done its work."""
        self.problems.clear()
        self.asked.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.absolute().as_uri())
        self.wait("document.documentElement?.dataset.ready")

    def wait(self, condition: str) -> None:
        """Until it is true of the page."""
        end = time.monotonic() + _SECONDS
        while not self.run(condition):
            assert time.monotonic() < end, (condition, self.problems)
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def click(self, x: float, y: float) -> None:
        """Move the mouse there in the window, and press its button."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._call(method, self._session, **parameters)

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], _SECONDS)
            read = os.read(self._in, 1 << 20) if ready else b""
            assert read, "the browser says nothing"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        said = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(said["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(said["args"])[:2000])
            case "Log.entryAdded" if said["entry"]["level"] in ("error", "warning"):
                self.problems.append(said["entry"]["text"])
            case "Network.requestWillBeSent" if said["request"]["url"].partition(":")[0] not in (
                "file",
                "data",
                "blob",
            ):
                self.asked.append(said["request"]["url"])
