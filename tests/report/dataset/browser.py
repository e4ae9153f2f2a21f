"""A page in a headless Chromium, if there is one: what it logs, what it asks the network for, how it lies on a screen.

The browser is spoken to in its own protocol over two pipes, so nothing needs to be installed beside it.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")
SECONDS = 60


def find_browser() -> str | None:
    """A Chromium that can be started, or None."""
    named = os.environ.get("TUNINGFORK_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. `said` holds console messages and errors, `requests` the addresses asked for beside its own."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.said: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int, dark: bool = False) -> None:
        """Load a file in a window of that width, and wait until it has loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self.said, self.requests, self._loaded = [], [], False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._take()

    def value(self, expression: str) -> Any:
        """What a JavaScript expression evaluates to."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._take()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _take(self) -> dict[str, Any]:
        """The next message of the browser; events are noted."""
        while b"\0" not in self._buffer:
            more = os.read(self._from, 1 << 20)
            assert more, "the browser has gone"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        event, about = message.get("method"), message.get("params", {})
        if event == "Runtime.consoleAPICalled":
            self.said.append(f"{about['type']}: {about['args']}")
        elif event == "Runtime.exceptionThrown":
            self.said.append(str(about["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.said.append(f"{about['entry']['level']}: {about['entry']['text']}")
        elif event == "Network.requestWillBeSent" and about["type"] != "Document":
            self.requests.append(about["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True
        return message


@contextmanager
def browser(path: str) -> Iterator[Page]:
    """Start a browser and give its page; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        # The browser reads from its descriptor 3 and writes to its descriptor 4; a shell puts the pipes there.
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        script = f'exec "$@" 3<&{to_read} 4>&{from_write}'
        process = subprocess.Popen(
            ["/bin/bash", "-c", script, "browser", path, *flags],
            pass_fds=(to_read, from_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(to_write, from_read)
        finally:
            process.terminate()
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(to_write)
            os.close(from_read)
