"""A proxy before an S3 server on loopback, which counts requests and injects faults."""

import http.client
import http.server
import threading
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}


class S3Proxy(http.server.ThreadingHTTPServer):
    """Forwards requests; `fault(method, path, number)` may name what happens to one, by number from 1.

    error: the answer is 500; denied: 403; cut: the connection ends before the server has the request; lost: it ends
    after that, without an answer.
    """

    daemon_threads = True

    def __init__(self, endpoint):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.origin = urlsplit(endpoint).netloc
        self.fault = lambda method, path, number: None
        self.requests = []
        """Method, path with query, and bytes of the body of each request, faults included."""
        self.lock = threading.Lock()

    def reset(self, fault=lambda method, path, number: None):
        """Forget earlier requests, and set the fault."""
        self.requests.clear()
        self.fault = fault

    def handle_error(self, request, client_address):
        """Stay silent when a client closes its connection."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def _forward(self):
        server, command = self.server, self.command
        if self.headers.get("Expect"):  # aiobotocore asks before it sends a body
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with server.lock:
            server.requests.append((command, self.path, len(body)))
            fault = server.fault(command, self.path, len(server.requests))
        if fault == "cut":
            self.close_connection = True
            return
        if fault in {"error", "denied"}:
            self._answer(*{"error": (500, "InternalError"), "denied": (403, "AccessDenied")}[fault])
            return
        origin = http.client.HTTPConnection(server.origin)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        origin.request(command, self.path, body, headers)
        answer = origin.getresponse()
        content = answer.read()
        if fault == "lost":
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        self.wfile.write(content)
        origin.close()

    def do_GET(self):
        self._forward()

    def do_HEAD(self):
        self._forward()

    def do_PUT(self):
        self._forward()

    def do_POST(self):
        self._forward()

    def do_DELETE(self):
        self._forward()

    def _answer(self, status, code):
        content = f"<Error><Code>{code}</Code><Message>{code} of the test</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def s3_proxy(endpoint):
    """Run a proxy before an S3 server, and direct AWS_ENDPOINT_URL to it."""
    proxy = S3Proxy(endpoint)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_address[1]}")
        try:
            yield proxy
        finally:
            proxy.shutdown()
            proxy.server_close()
