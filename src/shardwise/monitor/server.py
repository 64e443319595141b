"""The local web page of a run: an HTTP server on the loopback interface, protected by a token."""

from __future__ import annotations

import hmac
import re
import secrets
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import msgspec

from shardwise.errors import InputError
from shardwise.runs.events import end_of_file
from shardwise.runs.history import Row  # noqa: TC001
from shardwise.runs.status import (
    Entry,  # noqa: TC001 - read at run time by msgspec
    RunStatus,  # noqa: TC001 - read at run time by msgspec
)

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.runs.state import RunState


HOST = "127.0.0.1"
REFRESH_S = 0.5
IDLE_S = 10.0
"""Without a request for this long, the state is not refreshed."""
LOG_BYTES = 1 << 16
_TOKEN = re.compile(r"[A-Za-z0-9_-]{20,}")
_FILES = ("index.html", "page.css", "page.js", "chart.js", "table.js", "format.js", "icon.svg")
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Port and token of a run's page, stored in the run directory so that a page finds a restarted server."""

    port: int
    token: str


class PageServer(ThreadingHTTPServer):
    """Serves the state of one run; a thread refreshes the state while a browser requests it."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, state: RunState, port: int, token: str) -> None:
        self.state = state
        self.token = token
        self.lock = threading.Lock()
        """Locked while a chunk of the files is folded into the state, and while a response is built from it."""
        self.wanted_at = time.monotonic()
        self._stop = threading.Event()
        self._refreshing = threading.Thread(target=self._refresh, name="refresh", daemon=True)
        super().__init__((HOST, port), _PageRequests)  # raises and closes this server if the port is in use
        self._refreshing.start()

    @property
    def url(self) -> str:
        """The page's address; its token grants access."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def server_close(self) -> None:
        """Stop the refresh thread and release the port."""
        self._stop.set()
        super().server_close()
        if self._refreshing.is_alive():
            self._refreshing.join()

    def _refresh(self) -> None:
        while not self._stop.is_set():
            is_behind = False
            if time.monotonic() - self.wanted_at < IDLE_S:
                with self.lock:
                    is_behind = self.state.refresh()
            self._stop.wait(0.001 if is_behind else REFRESH_S)


def page_server(state: RunState, port: int | None) -> PageServer:
    """Return a server that listens on `port`; None means the last port if it is free, otherwise any free port."""
    known = _remembered(state.run.path)
    token = known.token if known is not None else secrets.token_urlsafe(24)
    wanted = [0] if known is None else [known.port, 0]
    if port is not None:
        wanted = [port]
    for number in wanted:
        try:
            server = PageServer(state, number, token)
        except (OSError, OverflowError) as error:
            failure = error
        else:
            _remember(state.run.path, Address(port=server.server_port, token=token))
            return server
    reason = getattr(failure, "strerror", None) or failure
    raise InputError(
        f"cannot listen on port {port} ({reason})",
        code="watch.listen-failed",
        fix="use another --port, or omit --port",
    )


def _remembered(run: Path) -> Address | None:
    try:
        known = msgspec.json.decode((run / "watch.json").read_bytes(), type=Address)
    except (OSError, ValueError):
        return None
    return known if _TOKEN.fullmatch(known.token) and 0 < known.port < 1 << 16 else None


def _remember(run: Path, address: Address) -> None:
    """Store the address in a file that only its owner can read; without write access it is not stored."""
    path = run / "watch.json"
    try:
        path.touch(mode=0o600)
        path.chmod(0o600)
        path.write_bytes(msgspec.json.encode(address))
    except OSError:
        return


class _PageRequests(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 30  # ends the thread of an idle connection

    def do_GET(self) -> None:
        """Serve the page and its files, increments of the state, and the logs of a rank."""
        parts = urlsplit(self.path)
        token, _, name = parts.path.removeprefix("/").partition("/")
        if not self._is_allowed(token):
            self._respond(HTTPStatus.FORBIDDEN, "text/plain", b"wrong token: open the complete printed address\n")
            return
        self.server.wanted_at = time.monotonic()
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        rank = query.get("rank", "")
        file = name or "index.html"
        if name == "state":
            with self.server.lock:
                found = increment(self.server.state, query.get("since", ""))
            self._respond(HTTPStatus.OK, "application/json", msgspec.json.encode(found))
        elif name == "log" and rank.isascii() and rank.isdigit():
            self._respond(HTTPStatus.OK, "application/json", msgspec.json.encode(self._logs(int(rank))))
        elif file in _FILES:
            content = resources.files("shardwise.monitor").joinpath("page", file).read_bytes()
            kind = _KINDS[file.rpartition(".")[2]]
            self._respond(HTTPStatus.OK, f"{kind}; charset=utf-8", content)
        else:
            self._respond(HTTPStatus.NOT_FOUND, "text/plain", b"this page does not exist\n")

    def _is_allowed(self, token: str) -> bool:
        """Return whether the token is correct and the Host header is this machine, which prevents DNS rebinding."""
        port = self.server.server_port
        is_here = self.headers.get("Host", "") in {f"{HOST}:{port}", f"localhost:{port}"}
        return hmac.compare_digest(token.encode(), self.server.token.encode()) and is_here

    def _logs(self, rank: int) -> dict[str, str]:
        run = self.server.state.run
        return {
            "out": end_of_file(run.stdout(rank), LOG_BYTES),
            "err": end_of_file(run.stderr(rank), LOG_BYTES),
            "error": _traceback(run.error(rank)),
        }

    def _respond(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        """Return the server name without versions."""
        return "shardwise"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the standard library's name
        """Log nothing: the address contains the token, and the terminal shows the output of `watch`."""


def _traceback(path: Path) -> str:
    try:
        return str(msgspec.json.decode(path.read_bytes())["traceback"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


# Increments of the state: a page first receives the complete state, then the changes since its cursor.


class CurveIncrement(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a curve that replace all rows from index `start`."""

    start: int
    width: int
    """Steps per row."""
    rows: list[Row]


class Increment(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a page that requests the state."""

    cursor: str
    whole: bool
    """Whether this is the complete state, which replaces all data of the page."""
    status: RunStatus
    curves: dict[str, CurveIncrement]
    entries: list[Entry]


class _Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a page in the state: its identity, and the length of each curve and of the history."""

    identity: str
    curves: dict[str, tuple[int, int]]
    entries: int


def increment(state: RunState, cursor: str) -> Increment:
    """Return the changes in `state` since `cursor`, or the complete state if the cursor is empty or of another run."""
    known = _read(cursor)
    is_whole = known is None or known.identity != state.identity
    if known is None or is_whole:
        known = _Cursor(identity=state.identity, curves={}, entries=0)
    curves, seen = {}, {}
    for name, curve in state.training.curves.items():
        generation, length = known.curves.get(name, (-1, 0))
        start = 0
        if generation == curve.generation:
            start = max(0, length - 1)  # the last row may have changed
        seen[name] = (curve.generation, len(curve))
        if len(curve) > start or generation != curve.generation:
            curves[name] = CurveIncrement(start=start, width=curve.width, rows=curve.rows(start))
    entries = state.history.since(known.entries)
    now_known = _Cursor(identity=state.identity, curves=seen, entries=state.history.count)
    return Increment(
        cursor=msgspec.json.encode(now_known).decode(),
        whole=is_whole,
        status=state.status(),
        curves=curves,
        entries=entries,
    )


def _read(cursor: str) -> _Cursor | None:
    try:
        return msgspec.json.decode(cursor, type=_Cursor)
    except ValueError:  # an empty or invalid cursor
        return None
