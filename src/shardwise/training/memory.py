"""How much memory a rank has taken at most: on its GPU, or of the host where it computes there."""

from __future__ import annotations

import resource
import sys

import torch

_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak so far: bytes of tensors on a GPU, else of resident memory; under 0.1 ms."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # Not getrusage, whose peak begins with that of the process that started this one.
        with open("/proc/self/status", "rb") as status:  # noqa: PTH123 - half the time of Path.read_bytes
            line = next((line for line in status if line.startswith(b"VmHWM:")), b"")
    except OSError:
        line = b""
    if line:
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
