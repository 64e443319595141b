"""Uploader: a background thread that copies checkpoints to object storage while training continues.

One checkpoint is uploaded at a time. If several are finished meanwhile, the next upload takes the newest. A failed
upload changes nothing that exists remotely, and what it has sent is not sent again by the next upload of the same
checkpoint, in this process or a later one. All methods are called by rank 0 only and do not communicate.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.async_save import NICENESS
from shardwise.checkpoint.directory import CheckpointEntry, best_first, entry_of, to_remove
from shardwise.checkpoint.disk import CheckpointError, DamagedError, as_shardwise_error, run_in_background
from shardwise.checkpoint.download import read_remote_manifest
from shardwise.checkpoint.manifest import MAX_BYTES, decode, read_regular
from shardwise.checkpoint.names import BEST, LATEST, MANIFEST, parse_name

if TYPE_CHECKING:
    from shardwise.checkpoint.remote import RemoteCheckpoints
    from shardwise.errors import ShardwiseError
    from shardwise.runs.directory import Keep


@dataclass(frozen=True)
class UploadReport:
    """The result of uploading a checkpoint, or of trying to."""

    name: str
    """Name of the checkpoint."""
    num_bytes: int = 0
    """Number of bytes that were sent; 0 if the checkpoint was already complete."""
    seconds: float = 0.0
    error: ShardwiseError | None = None
    """Why the checkpoint was not uploaded; None if it was."""
    skipped_for: str = ""
    """The newer checkpoint that was uploaded in its place; empty if the upload was tried."""
    note: str = ""
    """What failed after the upload, such as the removal of an older checkpoint."""


class Uploader:
    """Uploads checkpoints in a background thread, and applies the rules of `keep` to the remote ones."""

    def __init__(self, remote: RemoteCheckpoints, keep: Keep) -> None:
        self._remote, self._keep = remote, keep
        self._entries: dict[str, CheckpointEntry] = {}
        """Remote checkpoints whose manifest was read before; of their paths, only the names are used."""
        self._condition = threading.Condition()
        self._current: Path | None = None
        self._next: Path | None = None
        self._reports: list[UploadReport] = []
        self._last: UploadReport | None = None

    def submit(self, path: Path) -> None:
        """Upload a checkpoint as soon as the running upload has ended; it replaces another one that waits."""
        with self._condition:
            if self._next is not None and self._next != path:
                self._reports.append(UploadReport(self._next.name, skipped_for=path.name))
            self._next = path
            if self._current is None:
                self._current, self._next = self._next, None
                run_in_background(self._run, "upload", niceness=NICENESS)

    def paths(self) -> set[Path]:
        """Return the local checkpoints that are being uploaded or will be."""
        with self._condition:
            return {path for path in (self._current, self._next) if path is not None}

    def take_reports(self) -> list[UploadReport]:
        """Return the reports since the last call."""
        with self._condition:
            taken, self._reports = self._reports, []
        return taken

    @property
    def last(self) -> UploadReport | None:
        """The report of the upload that ended last."""
        return self._last

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until no upload is running or waiting and return whether that is so."""
        with self._condition:
            return self._condition.wait_for(lambda: self._current is None, timeout_s)

    def _run(self) -> None:
        path = self._current
        while path is not None:
            report = self._upload(path)
            with self._condition:
                self._reports.append(report)
                self._last = report
                self._current, self._next = self._next, None
                path = self._current  # read under the lock: after it, `submit` may start another thread
                self._condition.notify_all()

    def _upload(self, path: Path) -> UploadReport:
        began = time.perf_counter()
        try:
            num_bytes = self._publish(path)
        except Exception as error:  # noqa: BLE001 - a failed upload must not end the training
            return UploadReport(path.name, seconds=time.perf_counter() - began, error=as_shardwise_error(error))
        note = ""
        try:
            self._retain(path.name)
        except Exception as error:  # noqa: BLE001 - the next upload tries again
            note = str(as_shardwise_error(error))
        return UploadReport(path.name, num_bytes, time.perf_counter() - began, note=note)

    def _publish(self, path: Path) -> int:
        try:
            data = read_regular(path / MANIFEST, MAX_BYTES)
            manifest = decode(data, str(path / MANIFEST))
            num_bytes = self._remote.publish(path.name, {file: path / file for file in manifest.files}, data)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} was removed during its upload", code="checkpoint.removed-during-upload"
            ) from None
        self._entries[path.name] = entry_of(path, manifest)
        self._remote.set_name(LATEST, path.name)
        return num_bytes

    def _retain(self, newest: str) -> None:
        """Write `best`, and delete remote checkpoints that no rule retains, earlier saves of a step, and remnants."""
        listing = self._remote.scan()
        entries = self._known(listing.complete)
        for best in best_first(entries, self._keep)[:1]:
            self._remote.set_name(BEST, best.path.name)
        gone = {entry.path.name for entry in to_remove(entries, self._keep, now=time.time())}
        step, _ = parse_name(newest) or (None, None)
        gone |= {entry.path.name for entry in entries if entry.step == step}
        for name in (*sorted(gone - {newest}), *listing.incomplete):
            self._remote.remove(name, listing.objects[name])
            self._entries.pop(name, None)

    def _known(self, names: list[str]) -> list[CheckpointEntry]:
        """Return the entries of remote checkpoints with a valid manifest, ordered by the time they were saved."""
        for name in names:
            if name not in self._entries:
                with contextlib.suppress(DamagedError):
                    manifest, _ = read_remote_manifest(self._remote, name)
                    self._entries[name] = entry_of(Path(name), manifest)
        found = [self._entries[name] for name in names if name in self._entries]
        return sorted(found, key=lambda entry: entry.saved_at)
