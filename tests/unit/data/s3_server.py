"""Servers on loopback for tests of object storage: S3 by moto, and a web server whose faults a test sets."""

import http.server
import logging
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

BUCKET = "bucket"
KEY, SECRET = "AKIATESTKEY", "test/secret+that-must-not-leak"


@contextmanager
def s3_server():
    """Run an S3 server on loopback and yield its endpoint; sets AWS_ENDPOINT_URL and keys, and creates BUCKET."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it prints each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with _credentials(f"http://{host}:{port}") as endpoint:
            yield endpoint
    finally:
        server.stop()


SERVE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from data.s3_server import s3_server
with s3_server() as endpoint:
    print(endpoint, flush=True)
    sys.stdin.read()
"""


@contextmanager
def s3_process():
    """Run the same server in a process of its own, for tests that fork: a forked thread may leave a lock behind."""
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        with _credentials(process.stdout.readline().strip()) as endpoint:
            yield endpoint
        process.stdin.close()


@contextmanager
def _credentials(endpoint):
    """Set the variables of an endpoint, create BUCKET if it does not exist, and yield the endpoint."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
            patch.delenv(name)
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("NO_PROXY", "127.0.0.1")
        _client(endpoint).create_bucket(Bucket=BUCKET)
        yield endpoint


def upload(endpoint, folder, prefix):
    """Copy the files of a folder to BUCKET and return their URL."""
    client = _client(endpoint)
    for path in sorted(Path(folder).iterdir()):
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


def put(endpoint, key, content):
    """Write one object to BUCKET."""
    _client(endpoint).put_object(Bucket=BUCKET, Key=key, Body=content)


def delete(endpoint, key):
    """Delete one object of BUCKET."""
    _client(endpoint).delete_object(Bucket=BUCKET, Key=key)


def _client(endpoint):
    import boto3

    return boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1"
    )


class WebServer(http.server.ThreadingHTTPServer):
    """Serves a folder with ranges of bytes, and applies `fault`: a test sets it."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.num_failures = 0
        """GET requests that are answered with 503 from now on."""
        self.status = None
        """Answer to every request; None for the content."""
        self.hangs = self.truncates = self.ignores_ranges = False
        self.ranges = []
        """Path and range of each GET request that was answered."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body):
        server = self.server
        if server.hangs:
            time.sleep(60)
        path = server.folder / self.path.lstrip("/")
        status = server.status
        if with_body and server.num_failures:
            server.num_failures -= 1
            status = 503
        if status is None and not path.is_file():
            status = 404
        if status is not None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found and not server.ignores_ranges:
            server.ranges.append((self.path, int(found[1]), int(found[2]) + 1))
            total, content = len(content), content[int(found[1]) : int(found[2]) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {found[1]}-{found[2]}/{total}")
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content[: len(content) // 2] if server.truncates else content)
        if with_body and server.truncates:
            self.close_connection = True


@contextmanager
def web_server(folder):
    """Run a WebServer of a folder on loopback."""
    server = WebServer(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
