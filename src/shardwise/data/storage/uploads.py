"""Resumable uploads of files: what the store already has is not sent again, and on S3 a large file continues by parts.

The idea: the state of an upload is in the store alone, so it survives the loss of the process and of its disk. A file
is complete if its object has the same size and MD5. A large file is sent to S3 in parts, whose size depends on the size
of the file only; a later process lists the parts of the unfinished upload and sends those that are missing or differ.
Invariant: an upload aborts the unfinished ones below its root that it does not continue, so none is left after it. One
process at a time may upload below a root.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from shardwise.data.storage.locations import RemotePath
from shardwise.data.storage.objects import S3
from shardwise.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from shardwise.data.storage.objects import ObjectFacts

PART_BYTES = 2**24
"""Size of a part, and of the largest file that is sent in one request; all threads have 64 MiB in host memory."""
_MAX_PARTS = 10_000
"""Of S3; with parts of PART_BYTES, 156 GiB. Parts of larger files are larger."""
_NUM_THREADS = 4


def upload_files(files: Mapping[str, Path], folder: RemotePath, root: RemotePath) -> int:
    """Upload files to a folder below `root`, under the names of `files`; return the number of bytes that were sent.

    Several requests run at the same time. Raises the first error when all of them have ended.
    """
    existing = folder.store.find(folder)
    unfinished = unfinished_uploads(root)
    large: list[PartUpload] = []
    tasks: list[Callable[[], int]] = []
    for name, file in files.items():
        target, size = folder / name, file.stat().st_size
        if is_equal(file, existing.get(name)):
            continue
        if folder.scheme in S3 and size > PART_BYTES:
            started = unfinished.pop(target, [])
            abort_uploads(target, started[1:])
            large.append(PartUpload(file, target, started[0] if started else None))
            tasks += large[-1].tasks()
        else:
            tasks.append(partial(_send, file, target))
    for target, ids in unfinished.items():
        abort_uploads(target, ids)
    sent = sum(run_in_threads(tasks))
    for upload in large:
        upload.complete()
    return sent


def _send(file: Path, target: RemotePath) -> int:
    size = file.stat().st_size
    if size <= PART_BYTES:
        target.store.write(target, file.read_bytes())
    else:
        target.store.put(target, file)
    return size


def is_equal(file: Path, facts: ObjectFacts | None) -> bool:
    """Return whether an object has the size and the MD5 of a file; False if the store does not report its MD5."""
    size = file.stat().st_size
    if facts is None or facts.size != size or not facts.md5:
        return False
    if "-" not in facts.md5:
        found = _md5(file, 0, size).hexdigest()
    else:
        sums = [_md5(file, start, stop).digest() for start, stop in parts_of(size)]
        found = f"{hashlib.md5(b''.join(sums), usedforsecurity=False).hexdigest()}-{len(sums)}"
    return found == facts.md5


def parts_of(size: int) -> list[tuple[int, int]]:
    """Return the first and the last byte (exclusive) of each part of a file."""
    length = max(PART_BYTES, -(-size // _MAX_PARTS))
    return [(start, min(start + length, size)) for start in range(0, size, length)]


def _md5(file: Path, start: int, stop: int) -> hashlib._Hash:
    found = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as stream:
        stream.seek(start)
        for first in range(start, stop, PART_BYTES):
            found.update(stream.read(min(PART_BYTES, stop - first)))
    return found


class PartUpload:
    """An upload of one file to S3 in parts, which a process started or continues."""

    def __init__(self, file: Path, target: RemotePath, upload_id: str | None) -> None:
        """Continue the upload `upload_id`, or start a new one."""
        self._file, self._target = file, target
        self._etags: dict[int, str] = {}
        """Part number, from 1 -> checksum that S3 requires at the end."""
        self._is_new = upload_id is None
        if upload_id is None:
            upload_id = str(_call(target, "create_multipart_upload")["UploadId"])
        self._id = upload_id

    def tasks(self) -> list[Callable[[], int]]:
        """Return a function for each part that S3 does not have, which sends it and returns its size."""
        stored = {} if self._is_new else self._stored_parts()
        tasks: list[Callable[[], int]] = []
        for number, (start, stop) in enumerate(parts_of(self._file.stat().st_size), start=1):
            size, etag = stored.get(number, (0, ""))
            if size == stop - start and _md5(self._file, start, stop).hexdigest() == etag.strip('"'):
                self._etags[number] = etag
            else:
                tasks.append(partial(self._send, number, start, stop))
        return tasks

    def complete(self) -> None:
        """Make the object appear, after all parts were sent."""
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self._etags.items())]
        try:
            _call(self._target, "complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts})
        except FileNotFoundError:
            # S3 may have completed the upload although the connection was lost before its answer arrived.
            if not is_equal(self._file, self._target.store.facts(self._target)):
                raise _ended_elsewhere(self._target) from None

    def _send(self, number: int, start: int, stop: int) -> int:
        with self._file.open("rb") as stream:
            stream.seek(start)
            content = stream.read(stop - start)
        try:
            answer = _call(self._target, "upload_part", UploadId=self._id, PartNumber=number, Body=content)
        except FileNotFoundError:
            raise _ended_elsewhere(self._target) from None
        self._etags[number] = str(answer["ETag"])
        return len(content)

    def _stored_parts(self) -> dict[int, tuple[int, str]]:
        """Return part number -> size and checksum of the parts that S3 has."""
        found: dict[int, tuple[int, str]] = {}
        pages = _pages(self._target, "list_parts", {"NextPartNumberMarker": "PartNumberMarker"}, UploadId=self._id)
        for page in pages:
            for part in page.get("Parts", []):
                found[int(part["PartNumber"])] = (int(part["Size"]), str(part["ETag"]))
        return found


def unfinished_uploads(root: RemotePath) -> dict[RemotePath, list[str]]:
    """Return the objects below `root` that were partly uploaded to S3, with the ids of their uploads, newest first."""
    if root.scheme not in S3:
        return {}
    bucket, prefix = root.key.parts[0], "/".join(root.key.parts[1:]) + "/"
    found: dict[RemotePath, list[tuple[str, str]]] = {}
    markers = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}
    for page in _pages(root, "list_multipart_uploads", markers, Prefix=prefix):
        for upload in page.get("Uploads", []):
            if upload["Key"].startswith(prefix):  # some servers ignore the prefix
                path = RemotePath(root.scheme, PurePosixPath(bucket) / upload["Key"], root.store)
                found.setdefault(path, []).append((str(upload.get("Initiated", "")), str(upload["UploadId"])))
    return {path: [each for _, each in sorted(uploads, reverse=True)] for path, uploads in found.items()}


def abort_uploads(target: RemotePath, ids: Iterable[str]) -> None:
    """Delete the parts of unfinished uploads of one object."""
    for upload_id in ids:
        try:
            _call(target, "abort_multipart_upload", UploadId=upload_id)
        except FileNotFoundError:
            continue


def _pages(path: RemotePath, method: str, markers: Mapping[str, str], **arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield the pages of a listing of S3; `markers` maps fields of a page to arguments of the request for the next."""
    while True:
        page = _call(path, method, **arguments)
        yield page
        if not page.get("IsTruncated"):
            return
        for field, name in markers.items():
            arguments[name] = page[field]


def _call(path: RemotePath, method: str, **arguments: Any) -> dict[str, Any]:
    """Return the answer of S3; raises FileNotFoundError if the bucket or the upload does not exist."""
    if "Prefix" not in arguments:
        arguments["Key"] = "/".join(path.key.parts[1:])
    answer: dict[str, Any] = path.store.call_s3(path, method, Bucket=path.key.parts[0], **arguments)
    return answer


def _ended_elsewhere(target: RemotePath) -> DataError:
    return DataError(
        f"the upload of {target} was ended by another process",
        code="data.upload-aborted",
        fix="use one URL for each run",
    )


def run_in_threads(tasks: Iterable[Callable[[], int]]) -> list[int]:
    """Run tasks in a few threads and return their results in any order; raise the first error when all have ended.

    The threads are daemons, so that a process that fails does not wait for requests that are still being repeated.
    """
    waiting: queue.SimpleQueue[Callable[[], int]] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    results: list[int] = []
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                results.append(task())
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True, name="storage") for _ in range(_NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
