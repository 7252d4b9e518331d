"""A headless Chromium through chromedriver's own protocol, for tests of pages; needs both."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
# Without the last five the browser itself looks for updates and accounts.
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """One window."""

    def __init__(self, address: str, session: str) -> None:
        self.address = f"{address}/session/{session}"

    def tell(self, method: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.ask("goog/cdp/execute", cmd=method, params=parameters)

    def ask(self, path: str, **body: Any) -> Any:
        return _post(f"{self.address}/{path}", body)

    def show(self, file: Path, *, width: int, dark: bool) -> None:
        """Open a file at a width of so many CSS pixels."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])
        self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.ask("url", url=file.resolve().as_uri())

    def run(self, script: str) -> Any:
        """What the body of a JavaScript function returns in the page."""
        return self.ask("execute/sync", script=script, args=[])

    def picture(self, file: Path) -> None:
        """The whole page as a PNG."""
        answer = self.tell("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    def console(self) -> list[str]:
        """What the page wrote to the console since the last call."""
        return [entry["message"] for entry in self.ask("se/log", type="browser")]

    def requested(self) -> list[str]:
        """Addresses that were asked for since the last call."""
        events = [json.loads(entry["message"]) for entry in self.ask("se/log", type="performance")]
        return [
            event["message"]["params"]["request"]["url"]
            for event in events
            if event["message"]["method"] == "Network.requestWillBeSent"
        ]


@contextmanager
def browser(scratch: Path) -> Iterator[Browser]:
    """A window whose profile lies in `scratch`; both processes end with it."""
    assert CHROMIUM and DRIVER
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    found = None
    try:
        _wait(f"{address}/status")
        wanted = {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "goog:chromeOptions": {
                "binary": CHROMIUM,
                "args": [*OPTIONS, f"--user-data-dir={scratch / 'profile'}"],
            },
        }
        opened = _post(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
        found = Browser(address, opened["sessionId"])
        yield found
    finally:
        if found is not None:
            urllib.request.urlopen(urllib.request.Request(found.address, method="DELETE")).read()
        driver.terminate()
        driver.wait(10)


def _post(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{address}: {error.read().decode()[:500]}") from None


def _wait(address: str) -> None:
    until = time.monotonic() + 20
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).read()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
