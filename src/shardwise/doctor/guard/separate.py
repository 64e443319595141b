"""Ranks that train separately: each makes optimizer steps, and none has started a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.runs.calls import ENOUGH_SEPARATE_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIX = (
    "call torch.distributed.init_process_group() and synchronize gradients, for example with"
    " DistributedDataParallel (examples/01-ddp-basics), or use one process if separate models are what you want"
)


def describe_separate(steps: Mapping[int, int], *, has_peers: bool, is_over: bool) -> str:
    """Return the note on ranks that train separately, from their optimizer steps without a process group; or nothing.

    `has_peers` if other nodes have ranks too. While ranks run, some steps may be a warm-up before the group starts.
    """
    if not steps or (len(steps) == 1 and not has_peers):
        return ""
    if min(steps.values()) < (1 if is_over else ENOUGH_SEPARATE_STEPS):
        return ""
    ranks = f"ranks {min(steps)} to {max(steps)} each train" if len(steps) > 1 else f"rank {min(steps)} trains"
    return (
        f"{ranks} a separate copy of the model: the script has not started a process group, so nothing is synchronized,"
        f" and files that ranks write under one name overwrite each other: {_FIX}"
    )
