"""A real headless Chromium for tests of pages, driven through the DevTools protocol over a pair of pipes."""

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

PROGRAM = shutil.which("chromium")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",  # JSON messages that end with NUL, on descriptors 3 and 4: no port, no websocket
    "--no-sandbox",  # root, as in containers, may not have one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
)
PATIENCE_S = 60.0
"""For one answer of the browser: a machine with every core busy is slow, and only a hang is not."""

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no chromium here: make env-packages")


@contextlib.contextmanager
def chromium():
    """Start a browser with a profile of its own, and end it with all its processes."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        theirs_in, ours_out = _pipe()
        ours_in, theirs_out = _pipe()
        pid = os.posix_spawn(
            PROGRAM,
            [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            {**os.environ, "HOME": profile},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs_in, 3),
                (os.POSIX_SPAWN_DUP2, theirs_out, 4),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setpgroup=0,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_in, ours_out)
        finally:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(ours_in)
            os.close(ours_out)


class Browser:
    """The protocol: calls with their answers, and events handed to the page they are about."""

    def __init__(self, ours_in, ours_out):
        self._in, self._out = ours_in, ours_out
        self._numbers = itertools.count(1)
        self._rest = b""
        self._answers = {}
        self._pages = {}

    def open(self, url):
        """Open a page in a tab of its own and wait until it has loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Runtime", "Log", "Page"):
            page.call(f"{domain}.enable")
        page.go(url)
        return page

    def call(self, method, session=None, **params):
        """Send a command and return its result; what comes meanwhile is taken in."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while number not in self._answers:
            assert self.listen(deadline - time.monotonic()), f"chromium did not answer {method}"
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def listen(self, timeout_s):
        """Take in what comes within this time; return whether anything did."""
        ready, _, _ = select.select([self._in], [], [], max(0.0, timeout_s))
        if not ready:
            return False
        new = os.read(self._in, 1 << 20)
        assert new, "chromium has ended"
        *whole, self._rest = (self._rest + new).split(b"\0")
        for text in whole:
            message = json.loads(text)
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self._pages:
                self._pages[message["sessionId"]].hear(message["method"], message["params"])
        return True


class Page:
    """One tab: evaluate, look, and know what its console complained of."""

    def __init__(self, browser, session, target):
        self._browser, self._session, self._target = browser, session, target
        self._has_loaded = False
        self.errors = []
        """Errors of the console, exceptions nobody caught, and requests that failed, as text."""

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def go(self, url):
        """Load another address in this tab and wait until it is there."""
        self._has_loaded = False
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + PATIENCE_S
        while not self._has_loaded:
            assert self._browser.listen(deadline - time.monotonic()), f"{url} did not load"

    def evaluate(self, expression):
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression, timeout_s=PATIENCE_S):
        """Wait until a JavaScript expression is true, and return its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}; errors: {self.errors}"
            self._browser.listen(0.05)
        return value

    def show(self, width=1200, height=900, *, dark=False, scale=1):
        """Set the size of the window in CSS pixels, and the colour scheme that the user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path, width=1200, height=900, *, dark=False, whole=False, scale=1):
        """Write a PNG of the window; of the whole page, however long, if `whole`."""
        self.show(width, height, dark=dark, scale=scale)
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(picture["data"]))

    def move(self, x, y):
        """Move the mouse there, in CSS pixels of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x, y):
        """Press and release the left button there."""
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hear(self, method, params):
        """Take in one event."""
        if method == "Page.loadEventFired":
            self._has_loaded = True
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "assert"}:
            values = [str(part.get("value", part.get("description"))) for part in params["args"]]
            self.errors.append(" ".join(values))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".strip())


def _pipe():
    """Return a pipe whose ends are above the numbers that the browser wants; no other child inherits them."""
    return tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in _owned(os.pipe()))


def _owned(ends):
    """Yield each descriptor and close it after its copy is made."""
    for end in ends:
        yield end
        os.close(end)
