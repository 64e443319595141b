"""Whether a folder is one and the same storage on every rank, found out before there is anything to lose."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.agreement import nothing_more, rank_in, size_of, together
from shardwise.checkpoint.disk import TEMPORARY, is_seen, write_synced
from shardwise.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    import torch.distributed as dist


def check_storage(folder: Path | str, *, group: dist.ProcessGroup | None) -> None:
    """Make `folder` and prove that every rank can see what rank 0 writes there; communicates over `group`.

    Called on every rank, before the first save. Raises the same CheckpointError on all of them.
    """
    folder, doing = Path(folder), f"preparing to save into {folder}"

    def share(_: list[None]) -> list[tuple[Path, str]]:
        folder.mkdir(parents=True, exist_ok=True)
        token = folder / f"{TEMPORARY}token-{secrets.token_hex(8)}"
        write_synced(token, b"")
        return [(token, socket.gethostname())] * size_of(group)

    token, maker = together(group, doing, lambda: None, share)

    def look() -> None:
        if not is_seen(token):
            raise CheckpointError(
                f"{folder} is not the same storage on {maker} and {socket.gethostname()}",
                code="checkpoint.storage-not-shared",
                fix="save to storage that every node shares",
            )

    try:
        together(group, doing, look, nothing_more)
    finally:
        if rank_in(group) == 0:
            token.unlink(missing_ok=True)
