"""What a measurement was made on: the machine, its devices and the software, in words."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import torch

from shardwise.hardware.probe import probe_gpus, usable_cores
from shardwise.versions import package_version


def machine_facts(device: torch.device | None) -> tuple[tuple[str, str], ...]:
    """Return (name, value) of this host, what it computes with, and the versions that decide a measurement.

    `device` is the one that was measured on, or None where it does not matter. CUDA is not started.
    """
    facts = [
        ("host", socket.gethostname()),
        ("processor", f"{_processor()}, {_cores(usable_cores())} usable"),
        ("memory", f"{_memory() / 2**30:.1f} GiB"),
        ("GPUs", _gpus()),
        ("measured on", str(device) if device is not None else ""),
        ("torch", str(torch.__version__)),
        ("backends", ", ".join(_backends())),
        ("shardwise", package_version("shardwise")),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("date", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
    ]
    return tuple((name, value) for name, value in facts if value)


def _processor() -> str:
    """Return the processor's name as Linux gives it, else the architecture."""
    listing = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", listing.read_text() if listing.exists() else "", re.MULTILINE)
    return re.sub(r"\s+", " ", found[1]).strip() if found else platform.machine()


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _memory() -> int:
    """Return bytes of memory of the whole host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpus() -> str:
    counts = Counter((gpu.name, gpu.memory_bytes) for gpu in probe_gpus())
    return ", ".join(f"{count} x {name} ({size / 2**30:.1f} GiB)" for (name, size), count in counts.items()) or "none"


def _backends() -> list[str]:
    """Return the communication libraries of this torch, with versions where they have one of their own."""
    names = ["gloo"] if torch.distributed.is_gloo_available() else []
    if torch.version.cuda:
        names.append(f"CUDA {torch.version.cuda}")
    if torch.distributed.is_nccl_available():
        names.append("NCCL " + ".".join(str(part) for part in torch.cuda.nccl.version()))
    return names
