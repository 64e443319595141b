"""The content of a report as values: sections with plots and tables, and facts about the machine."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from shardwise.environment import identify
from shardwise.hardware.probe import package_version, probe_gpus, usable_cores
from shardwise.plots.figures import Bars, Heat, Plot, Table  # noqa: TC001 - the type of a field
from shardwise.runs.console import counted


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of a report: its text, then plots and tables."""

    title: str
    text: str = ""
    parts: tuple[Plot | Bars | Heat | Table, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The content of the report of one benchmark."""

    title: str
    verdict: str
    """The summary in one sentence."""
    facts: tuple[tuple[str, str], ...]
    """(name, value) of the machine and the software."""
    method: tuple[str, ...]
    """Sentences about the method of measurement."""
    sections: tuple[Section, ...] = field(default=())


# Facts about the machine, its devices and its software, as text.


def machine_facts(device: torch.device | None) -> tuple[tuple[str, str], ...]:
    """Return (name, value) of this host, its devices, and the software versions that affect a measurement.

    `device` is the measured device, or None if it does not matter. CUDA is not initialized.
    """
    facts = [
        ("host", socket.gethostname()),
        ("processor", f"{_processor()}, {counted(usable_cores(), 'core')} usable"),
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
    """Return the processor's name from /proc/cpuinfo, otherwise the architecture."""
    listing = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", listing.read_text() if listing.exists() else "", re.MULTILINE)
    return re.sub(r"\s+", " ", found[1]).strip() if found else platform.machine()


def _memory() -> int:
    """Return the bytes of host memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpus() -> str:
    counts = Counter((gpu.name, gpu.memory_bytes) for gpu in probe_gpus())
    return ", ".join(f"{count} x {name} ({size / 2**30:.1f} GiB)" for (name, size), count in counts.items()) or "none"


def _backends() -> list[str]:
    """Return the communication libraries of torch, with versions if available."""
    names = ["gloo"] if torch.distributed.is_gloo_available() else []
    if torch.version.cuda:
        names.append(f"CUDA {torch.version.cuda}")
    if torch.distributed.is_nccl_available():
        names.append("NCCL " + ".".join(str(part) for part in torch.cuda.nccl.version()))
    return names


# The device of a rank. With gloo, several ranks may share one GPU.


def rank_device(device: str | None, backend: str | None) -> str | None:
    """Return the device of this rank: `device`, except that gloo ranks are distributed over the GPUs."""
    if backend != "gloo" or device not in (None, "cuda") or not torch.cuda.is_available():
        return device
    return f"cuda:{identify().local_rank % torch.cuda.device_count()}"
