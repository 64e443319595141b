"""The device of a rank: the GPU of its local rank where there is one, else the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.environment import has_own_gpu
from shardwise.errors import WorldError

if TYPE_CHECKING:
    from shardwise.environment import Identity


def choose_device(asked: str | torch.device | None, identity: Identity) -> torch.device:
    """Return the device for this rank and make it torch's current one; one that is not there is refused."""
    wanted = _parse(asked) if asked is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.type == "cpu":
        return torch.device("cpu")
    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_visible == 0:
        raise WorldError(
            f"device {asked!s} was asked, but no GPU is visible", code="world.no-gpu", fix="use device='cpu'"
        )
    if ":" not in str(wanted):
        wanted = torch.device("cuda", gpu_index(identity, num_visible, own_gpu=has_own_gpu()))
    elif wanted.index >= num_visible:
        raise WorldError(
            f"device {asked!s} was asked, but {num_visible} GPUs are visible",
            code="world.gpu-index-invalid",
            fix=f"use cuda:0 to cuda:{num_visible - 1}",
        )
    torch.cuda.set_device(wanted)
    return wanted


def _parse(asked: str | torch.device) -> torch.device:
    try:
        device = torch.device(asked)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise WorldError(
            f"device {asked!s} is not one a world runs on",
            code="world.unknown-device",
            fix="use 'cpu', 'cuda' or 'cuda:0'",
        )
    return device


def gpu_index(identity: Identity, num_visible: int, *, own_gpu: bool) -> int:
    """Return which of the visible GPUs is this rank's; `own_gpu` when the launcher shows each rank its own."""
    if own_gpu and num_visible == 1:
        return 0
    if identity.local_rank < num_visible:
        return identity.local_rank
    if identity.local_rank_assumed:
        raise WorldError(
            f"local rank {identity.local_rank} (taken from the rank, as LOCAL_RANK is not set) has no GPU of its"
            f" own: {num_visible} visible",
            code="world.local-rank-without-gpu",
            fix="export LOCAL_RANK=<rank on this node>, or pass local_rank=",
        )
    raise WorldError(
        f"local rank {identity.local_rank} has no GPU of its own: {num_visible} visible",
        code="world.local-rank-without-gpu",
        fix=f"start at most {num_visible} ranks on this node, widen CUDA_VISIBLE_DEVICES, or pass device='cuda:0' if"
        " every rank sees a GPU of its own",
    )
