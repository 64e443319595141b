"""Findings of a measurement as values: plots, tables, heat maps, and the machine they were measured on."""

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
from shardwise.hardware.probe import probe_gpus, usable_cores
from shardwise.runs.console import counted
from shardwise.versions import package_version


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a plot."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    """For what was predicted or fitted, beside what was measured."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Lines over a common axis; points that are not above 0 have no place on a logarithmic one."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False
    x_is_bytes: bool = False
    """Whether ticks are written as 4 KiB, 1 MiB."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars made of parts, one a row: (label, value of each part)."""

    title: str
    unit: str
    parts: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Heat:
    """A matrix as colours, with each value written in its cell; None is an empty cell."""

    title: str
    unit: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    marked: tuple[tuple[int, int], ...] = ()
    """Cells (row, column) that the text speaks of."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of words under a header."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report: what was found in words, then what shows it."""

    title: str
    text: str = ""
    parts: tuple[Plot | Bars | Heat | Table, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that one measurement has to say."""

    title: str
    verdict: str
    """The one sentence to read if only one is read."""
    facts: tuple[tuple[str, str], ...]
    """Of the machine and the software: (name, value)."""
    method: tuple[str, ...]
    """How it was measured, in sentences."""
    sections: tuple[Section, ...] = field(default=())


# What a measurement was made on: the machine, its devices and the software, in words.


def machine_facts(device: torch.device | None) -> tuple[tuple[str, str], ...]:
    """Return (name, value) of this host, what it computes with, and the versions that decide a measurement.

    `device` is the one that was measured on, or None where it does not matter. CUDA is not started.
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
    """Return the processor's name as Linux gives it, else the architecture."""
    listing = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", listing.read_text() if listing.exists() else "", re.MULTILINE)
    return re.sub(r"\s+", " ", found[1]).strip() if found else platform.machine()


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


# Where the ranks of a measurement compute: with gloo, several may share one GPU.


def rank_device(asked: str | None, backend: str | None) -> str | None:
    """Return what to ask a world for: as asked, but gloo's ranks beyond the GPUs share them in turn."""
    if backend != "gloo" or asked not in (None, "cuda") or not torch.cuda.is_available():
        return asked
    return f"cuda:{identify().local_rank % torch.cuda.device_count()}"
