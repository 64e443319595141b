"""The uploads of a run: checkpoints go to object storage in the background, and a run on an empty disk continues there.

Rank 0 does the work, and training waits for it twice: at the start for a download, and at the end for the last upload.
While rank 0 works, all ranks exchange its state several times a second: one long collective would exceed the timeout of
the process group, or look like a hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.checkpoint.directory import CheckpointDirectory
from shardwise.checkpoint.disk import CheckpointError, DamagedError, no_results, run_collectively, run_on_main
from shardwise.checkpoint.download import download_newest, read_remote_manifest
from shardwise.checkpoint.names import parse_name
from shardwise.checkpoint.remote import RemoteCheckpoints, find_remote
from shardwise.checkpoint.uploader import Uploader
from shardwise.errors import DataError
from shardwise.runs.failure import NOT_UPLOADED
from shardwise.spec import is_url

if TYPE_CHECKING:
    from pathlib import Path

    import torch.distributed as dist

    from shardwise.checkpoint import CheckpointEntry, SaveReport
    from shardwise.checkpoint.uploader import UploadReport
    from shardwise.dist import World
    from shardwise.runs import EventLog
    from shardwise.runs.directory import Keep
    from shardwise.training.spec import SaveSpec


class Uploads:
    """Uploads the checkpoints of a run and downloads the one to resume from; used identically on every rank.

    Without `spec.upload` and a URL in `spec.resume`, no method does anything.
    """

    def __init__(
        self,
        spec: SaveSpec,
        folder: Path,
        keep: Keep,
        *,
        world: World,
        group: dist.ProcessGroup | None,
        events: EventLog,
    ) -> None:
        self._spec, self._folder, self._group, self._events = spec, folder, group, events
        self._uploader: Uploader | None = None
        if spec.upload is not None and world.is_main:
            self._uploader = Uploader(RemoteCheckpoints.of_run(spec.upload), keep)
        self._failed: UploadReport | None = None
        """The last upload, if it failed."""

    def download(self) -> None:
        """Download the checkpoint to resume from, if it is remote. Communicates over the group; call on every rank."""
        is_remote = self._spec.resume == "auto" and self._spec.upload is not None
        if is_remote or is_url(self._spec.resume):
            for note in run_on_main(self._group, "downloading a checkpoint", self._download):
                self._events.write("note", text=note)

    def submit_latest(self) -> None:
        """Start to upload the newest local checkpoint, in case an earlier process did not finish that."""
        latest = CheckpointDirectory(self._folder).latest()
        if self._uploader is not None and latest is not None:
            self._uploader.submit(latest)

    def submit(self, saved: SaveReport) -> None:
        """Start to upload a saved checkpoint; called by the thread that saved it."""
        if self._uploader is not None:
            self._uploader.submit(saved.path)

    def paths(self) -> set[Path]:
        """Return the local checkpoints that must not be removed yet."""
        return self._uploader.paths() if self._uploader is not None else set()

    def write_events(self) -> None:
        """Write the events of uploads that have ended since the last call."""
        if self._uploader is None:
            return
        for report in self._uploader.take_reports():
            if report.skipped_for:
                self._note(f"checkpoint {report.name} was not uploaded, because {report.skipped_for} is newer")
                continue
            self._failed = report if report.error is not None else None
            if report.error is not None:
                self._note(f"checkpoint {report.name} was not uploaded, the next upload tries again: {report.error}")
                continue
            step, _ = parse_name(report.name) or (0, 1)
            self._events.write("upload", step=step, bytes=report.num_bytes, seconds=report.seconds)
            if report.note:
                self._note(f"checkpoint {report.name} was uploaded, but older ones remain: {report.note}")

    def check(self) -> None:
        """Raise the error of the last upload if `must_save` is set. Communicates over the group; call on every rank."""
        self.write_events()
        if self._spec.upload is None or not self._spec.must_save:
            return

        def check() -> None:
            if self._failed is not None and self._failed.error is not None:
                error = self._failed.error
                raise CheckpointError(error.fact, code=error.code, fix=error.fix)

        run_collectively(self._group, f"uploading to {self._spec.upload}", check, no_results)

    def finish(self, timeout_s: float | None) -> str:
        """Wait for the last upload and return its outcome as the end of a sentence; empty without uploads.

        Communicates over the group; call on every rank.
        """
        if self._spec.upload is None:
            return ""
        outcome = run_on_main(self._group, f"uploading to {self._spec.upload}", lambda: self._finish(timeout_s))
        self.check()
        if outcome:
            self._note(f"the last checkpoint is saved {outcome}")
        return outcome

    def _finish(self, timeout_s: float | None) -> str:
        latest, uploader = CheckpointDirectory(self._folder).latest(), self._uploader
        if uploader is None or latest is None:
            return ""
        has_failed_before = uploader.last is not None and uploader.last.error is not None
        if not uploader.paths() and has_failed_before:
            uploader.submit(latest)
        has_ended = uploader.wait(timeout_s)
        if has_ended and uploader.last is not None and uploader.last.name == latest.name and not uploader.last.error:
            return f"and uploaded to {self._spec.upload}"
        return f"{NOT_UPLOADED} to {self._spec.upload}; --resume auto continues the upload"

    def _download(self) -> list[str]:
        """Download the newest checkpoint, unless a local one is at least as new; return notes."""
        if is_url(self._spec.resume):
            remote, names = find_remote(str(self._spec.resume))
            return self._download_newest(remote, names)
        remote = RemoteCheckpoints.of_run(str(self._spec.upload))
        local, _ = CheckpointDirectory(self._folder).newest_good(deep=False)
        if local is None:
            names = remote.newest_first()
            return self._download_newest(remote, names) if names else []
        try:
            names = _newer_than(local, remote)
            return self._download_newest(remote, names) if names else []
        except (DataError, DamagedError) as error:
            return [f"continuing from the local checkpoint {local.path.name}: {error}"]

    def _download_newest(self, remote: RemoteCheckpoints, names: list[str]) -> list[str]:
        notes: list[str] = []
        path = download_newest(remote, names, self._folder, notes.append)
        return [*notes, f"downloaded {path.name} from {remote}"]

    def _note(self, text: str) -> None:
        self._events.write("note", text=text)


def _newer_than(local: CheckpointEntry, remote: RemoteCheckpoints) -> list[str]:
    """Return the remote checkpoints that were saved after the newest local one: another node trained since then."""
    newer = []
    for name in remote.newest_first():
        manifest, _ = read_remote_manifest(remote, name)
        if manifest.saved_at <= local.saved_at:
            break
        newer.append(name)
    return newer
