"""ObjectStore: objects are listed, read, written and deleted through fsspec, with timeouts and retries.

fsspec and its file systems are imported at the first request. Their event loop does not survive a fork, so each process
has a file system of its own. Those of a parent process are kept: to close one in a child would write to the sockets
of the parent. All retries are here (those of the libraries are off), so that their number and duration are bounded.
Credentials come from what each library reads by itself, and no message contains a query string or a user name.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import os
import re
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.data.storage.locations import RemotePath

_VERSION_FIELDS = ("ETag", "etag", "generation", "LastModified", "Last-Modified", "mtime", "created")
"""Fields of fsspec's metadata that change with the content, in the order of preference: S3, GCS, HTTP, memory."""
_CONNECT_S = 5
S3 = {"s3", "s3a"}
"""Schemes of s3fs."""


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is repeated, and how long it waits."""

    attempts: int
    delay_s: float
    """Before the second attempt; doubles each time, with up to 50 % more at random."""
    timeout_s: float
    """Of one attempt."""


OPENING = RetryPolicy(attempts=3, delay_s=0.3, timeout_s=5)
"""Metadata: a wrong endpoint is reported after one second if it refuses connections, after 16 if it never answers."""
READING = RetryPolicy(attempts=6, delay_s=0.5, timeout_s=30)
"""Content: a server that is away for 15 seconds does not stop a training."""
WRITING = RetryPolicy(attempts=6, delay_s=0.5, timeout_s=120)
"""Objects and parts of at most 16 MiB: 1.1 Mbit/s are enough."""
_LEAST_BYTES_PER_S = 2**18
"""Of a file that is sent in one request."""


@dataclass(frozen=True)
class ObjectFacts:
    """The metadata of an object, or of a folder."""

    size: int
    version: str
    """Changes with the content."""
    is_folder: bool = False
    md5: str = ""
    """MD5 of the content, or on S3 after an upload in N parts "MD5-N", of the MD5 of its parts; empty if unknown."""


class ObjectStore:
    """The objects of one URL scheme."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self._by_process: dict[int, Any] = {}
        """Process id -> file system of fsspec."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.scheme,)

    def check_scheme(self) -> None:
        """Raise DataError if fsspec does not know the scheme, or MissingExtraError if a package is not installed."""
        _file_system_class(self.scheme)

    def facts(self, path: RemotePath, policy: RetryPolicy = OPENING) -> ObjectFacts | None:
        """Return the metadata of an object or a folder; None if there is none."""
        try:
            info = self._request(path, policy, "info", str(path))
        except FileNotFoundError:
            return None
        return _facts_of(path, info)

    def list(self, folder: RemotePath) -> dict[str, ObjectFacts]:
        """Return name -> metadata of the objects in a folder; raises FileNotFoundError if there is none."""
        found = {}
        for info in self._request(folder, READING, "ls", str(folder), detail=True):
            name = info["name"].rstrip("/").rpartition("/")[2]
            if info["size"] is None:  # listings of web servers
                facts = self.facts(folder / name)
                if facts is not None:
                    found[name] = facts
            else:
                found[name] = _facts_of(folder / name, info)
        return found

    def read(self, path: RemotePath, start: int, stop: int) -> bytes:
        """Return a range of bytes of an object; raises FileNotFoundError if it does not exist."""
        return bytes(self._request(path, READING, "cat_file", str(path), start=start, end=stop, expected=stop - start))

    def read_all(self, path: RemotePath) -> bytes:
        """Return the content of a small object; raises FileNotFoundError if it does not exist."""
        facts = self.facts(path)
        if facts is None or facts.is_folder:
            raise FileNotFoundError(str(path))
        return self.read(path, 0, facts.size) if facts.size else b""

    def find(self, folder: RemotePath) -> dict[str, ObjectFacts]:
        """Return the objects below a folder by their name in it, such as "a/b"; empty if there are none."""
        start = str(folder.key).strip("/") + "/"
        try:
            found = self._request(folder, READING, "find", str(folder), detail=True)
        except FileNotFoundError:
            return {}
        objects = {}
        for name, info in found.items():
            if info["type"] == "file":  # some stores have objects that stand for empty folders
                short = name.strip("/").removeprefix(start)
                objects[short] = _facts_of(folder / short, info)
        return objects

    def write(self, path: RemotePath, content: bytes, policy: RetryPolicy = WRITING) -> None:
        """Write an object; on object storage, it appears or is replaced at once, when all its bytes have arrived."""
        self._change(path, policy, "pipe_file", str(path), content)

    def put(self, path: RemotePath, file: Path) -> None:
        """Write an object with the content of a local file, in one request of the file system."""
        policy = replace(WRITING, timeout_s=WRITING.timeout_s + file.stat().st_size / _LEAST_BYTES_PER_S)
        self._change(path, policy, "put_file", str(file), str(path))

    def delete(self, path: RemotePath, policy: RetryPolicy = WRITING) -> None:
        """Delete an object; does nothing if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            self._request(path, policy, "rm_file", str(path), verb="deleted")

    def call_s3(self, path: RemotePath, method: str, **arguments: Any) -> Any:
        """Return the answer of S3 to a request of its API; raises FileNotFoundError for a missing bucket or upload."""
        return self._request(path, WRITING, "call_s3", method, verb="written", **arguments)

    def _change(self, path: RemotePath, policy: RetryPolicy, method: str, *arguments: str | bytes) -> None:
        try:
            self._request(path, policy, method, *arguments, verb="written")
        except FileNotFoundError:
            raise DataError(
                f"{path} cannot be written, because its bucket does not exist",
                code="data.bucket-missing",
                fix="create the bucket, or pass another URL",
            ) from None

    def _request(
        self,
        path: RemotePath,
        policy: RetryPolicy,
        method: str,
        *arguments: Any,
        expected: int | None = None,
        verb: str = "read",
        **options: Any,
    ) -> Any:
        """Return the result of a method of the file system; repeats it after errors that may pass.

        `verb` is what the request does to `path` (read, written, deleted), for errors.
        """
        file_system = self._file_system()
        if file_system.async_impl:
            options["timeout"] = policy.timeout_s
        call: Callable[..., Any] = getattr(file_system, method)
        problem = ""
        for attempt in range(policy.attempts):
            if attempt:
                time.sleep(policy.delay_s * 2 ** (attempt - 1) * (1 + secrets.randbelow(500) / 1000))
            try:
                result = call(*arguments, **options)
            except Exception as error:  # noqa: BLE001 - each library has errors of its own
                problem = _transient_problem(path, error, verb)
                continue
            if expected is None or len(result) == expected:
                return result
            if len(result) > expected:
                raise _no_ranges(path)
            problem = f"the server sent {len(result)} of {expected} bytes"
        raise DataError(
            f"{path} cannot be {verb} after {policy.attempts} attempts ({problem})",
            code="data.storage-unreachable",
            fix="check the endpoint, such as AWS_ENDPOINT_URL, and the network, then run the command again",
        )

    def _file_system(self) -> Any:
        """Return the file system of this process."""
        process = os.getpid()
        if process not in self._by_process:
            self._by_process.setdefault(process, _make_file_system(self.scheme))
        return self._by_process[process]


def _file_system_class(scheme: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise MissingExtraError.of(f"reading {scheme}:// URLs", "storage") from None
    try:
        return fsspec.get_filesystem_class(scheme)
    except ImportError:
        raise MissingExtraError.of(f"reading {scheme}:// URLs", "storage") from None
    except ValueError:
        raise DataError(
            f"the scheme {scheme}:// is unknown",
            code="data.scheme-unknown",
            fix="use s3://, gs://, http://, https:// or file://, or another scheme of fsspec",
        ) from None


def _make_file_system(scheme: str) -> Any:
    kind = _file_system_class(scheme)
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in S3:
        timeouts = {"connect_timeout": _CONNECT_S, "read_timeout": READING.timeout_s}
        options["config_kwargs"] = {**timeouts, "retries": {"total_max_attempts": 1}, "max_pool_connections": 32}
    elif scheme in {"http", "https"}:
        timeout = importlib.import_module("aiohttp").ClientTimeout(total=None, sock_connect=_CONNECT_S)
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True}  # proxies and ~/.netrc
    file_system = kind(**options)
    file_system.retries = 1  # of s3fs
    return file_system


def _facts_of(path: RemotePath, info: dict[str, Any]) -> ObjectFacts:
    if info["type"] == "directory":
        return ObjectFacts(size=0, version="", is_folder=True)
    if info.get("size") is None or info.get("partial") is False:
        raise _no_ranges(path)
    version = next((str(info[name]) for name in _VERSION_FIELDS if info.get(name)), "")
    size = int(info["size"])
    return ObjectFacts(size=size, version=f"{size} {version}", md5=_md5_of(path.scheme, info))


def _md5_of(scheme: str, info: dict[str, Any]) -> str:
    """Return the MD5 that a store reports; S3 with its own encryption keys has another value, which matches no file."""
    if scheme in S3:
        return str(info.get("ETag", "")).strip('"')
    if info.get("md5Hash"):  # of Google Cloud Storage
        return base64.b64decode(info["md5Hash"]).hex()
    return ""


# Errors: what cannot pass is raised at once, everything else is repeated.


def _transient_problem(path: RemotePath, error: Exception, verb: str) -> str:
    """Return the text of an error that may pass; raises FileNotFoundError or DataError for others."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ is not None else error
    names = {kind.__name__ for kind in type(cause).__mro__}
    status = getattr(cause, "status", None)  # of aiohttp
    if status is None and "ClientError" in names:  # of botocore
        status = getattr(cause, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
    if names & {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ProfileNotFound"}:
        raise DataError(
            f"there are no credentials for {path} ({_redacted(cause)})",
            code="data.credentials-missing",
            fix="set those of the library, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
            f" or FSSPEC_{path.scheme.upper()}_ANON=true for public data",
        ) from None
    if isinstance(cause, PermissionError) or status in {401, 403}:
        raise DataError(
            f"{path} cannot be {verb} ({_redacted(cause)})",
            code="data.access-denied",
            fix=f"check that the bucket exists and that its objects may be {verb} with these credentials",
        ) from None
    if isinstance(cause, FileNotFoundError) or status in {404, 410}:
        raise FileNotFoundError(str(path)) from None
    if names & {"ParamValidationError", "InvalidURL", "NotImplementedError"} or status == 416:
        raise DataError(
            f"{path} cannot be {verb} ({_redacted(cause)})",
            code="data.read-failed" if verb == "read" else "data.write-failed",
            fix="pass the URL of an object" if verb == "read" else "pass a URL of s3://, gs:// or another object store",
        ) from None
    if "TimeoutError" in names or "FSTimeoutError" in names:
        return "no answer in time"
    return _redacted(cause)


def _redacted(error: BaseException) -> str:
    """Return an error in one line, without user names and query strings of URLs."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"(\w+://[^\s'\"?]*)\?[^\s'\")]*", r"\1?***", text)
    return re.sub(r"(\w+://)[^\s/'\"]*@", r"\1***@", text)


def _no_ranges(path: RemotePath) -> DataError:
    return DataError(
        f"the server of {path} does not return its size or ranges of its bytes",
        code="data.ranges-unsupported",
        fix="copy the data to a local folder or to object storage",
    )
