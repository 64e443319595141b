"""The compile cache in the run directory, with which a restart or a new node starts without compiling.

torch exports the compiled graphs and kernels of a process as one artifact. Each distinct program of a run has one,
written by the first rank that compiles it. Graphs differ by pipeline stage, by tensor-parallel shard and by device
index, which torch includes in the keys of its cache; data-parallel ranks compile the same graphs.

An artifact is code that this process will execute. The invariant: `load` passes an artifact to torch only if it is a
file of this user that nobody else can write, its SHA-256 matches, and it was compiled with the same versions for the
same device. It reads only the directory of its own run, never the checkpoint that `--resume` names.

Reference: https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardwise.checkpoint.disk import replace_synced
from shardwise.hardware.probe import package_version

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwise.dist import World
    from shardwise.plans import Plan

_STEPS = 3
"""Steps of this process before the artifact is saved: later steps rarely compile."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class ArtifactFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the JSON file beside an artifact."""

    sha256: str
    versions: dict[str, str]


class CompileArtifact:
    """Loads the compile cache of one rank from the run directory, and saves it once; used identically on every rank.

    It does nothing for an eager plan, nor with context parallelism, for which torch's cache restores wrong graphs.
    `note` receives the reason why an artifact is ignored or cannot be saved.
    """

    def __init__(self, folder: Path, plan: Plan, world: World, note: Callable[[str], None]) -> None:
        self._is_enabled = plan.compile != "none" and plan.layout.cp == 1
        self._path = folder / f"{_program_name(plan, world)}.bin"
        self._is_writer = _is_first_of_program(plan, world)
        self._device, self._note = world.device, note
        self._loaded: set[str] = set()
        """Keys of the graphs in the loaded artifact."""
        self._steps_left = _STEPS
        self._writer: threading.Thread | None = None
        self._error = ""

    def load(self) -> None:
        """Add the artifact of this rank's program to torch's compile cache, if it can be trusted."""
        if not self._is_enabled:
            return
        try:
            info = torch.compiler.load_cache_artifacts(read_artifact(self._path, versions_for(self._device)))
        except FileNotFoundError:  # the first start of the run
            return
        except Exception as error:  # noqa: BLE001 - whatever fails here, the model can be compiled
            self._note(f"compiled graphs in {self._path} are ignored: {error}")
            return
        if info is None:
            self._note(f"compiled graphs in {self._path} are ignored: torch cannot deserialize them")
            return
        self._loaded = _keys(info)

    def after_step(self) -> None:
        """Save the artifact in the background after the first steps of this process."""
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._save()
        elif self._writer is not None and not self._writer.is_alive():
            self._settle()

    def finish(self) -> None:
        """Save the artifact if the training had fewer steps, and wait until it is durable."""
        if 0 < self._steps_left < _STEPS:
            self._steps_left = 0
            self._save()
        self._settle()

    def _save(self) -> None:
        """Export the compile cache, which copies it in memory, and start to write it unless it was loaded."""
        if not (self._is_enabled and self._is_writer):
            return
        try:
            exported = torch.compiler.save_cache_artifacts()
        except Exception as error:  # noqa: BLE001 - training does not depend on the artifact
            self._note(f"compiled graphs are not saved: {error}")
            return
        if exported is None or _keys(exported[1]) <= self._loaded:
            return
        self._writer = threading.Thread(target=self._write, args=(exported[0],), name="compile artifact")
        self._writer.start()

    def _write(self, content: bytes) -> None:
        try:
            write_artifact(self._path, content, versions_for(self._device))
        except Exception as error:  # noqa: BLE001 - reported by the main thread
            self._error = str(error)

    def _settle(self) -> None:
        """Wait for the writing thread; events are not written from that thread."""
        if self._writer is None:
            return
        self._writer.join()
        self._writer = None
        if self._error:
            self._note(f"compiled graphs are not saved: {self._error}")


def _program_name(plan: Plan, world: World) -> str:
    """Return the name of this rank's compiled program: its pipeline stage, tensor-parallel shard and device."""
    coordinate = plan.layout.coordinate(world.rank)
    index = "" if world.device.index is None else world.device.index
    return f"pp{coordinate.pp}-tp{coordinate.tp}-{world.device.type}{index}"


def _is_first_of_program(plan: Plan, world: World) -> bool:
    """Whether no lower rank compiles the same program; nodes are assumed to have equal numbers of ranks."""

    def program_of(rank: int) -> tuple[int, ...]:
        coordinate = plan.layout.coordinate(rank)
        device = 0 if world.device.index is None else rank % world.local_size
        return coordinate.pp, coordinate.tp, device

    mine = program_of(world.rank)
    return all(program_of(rank) != mine for rank in range(world.rank))


def _keys(info: Any) -> set[str]:
    """Return the keys of the graphs and kernels that torch's CacheInfo lists."""
    return set().union(*info.artifacts.values())


# The files: the artifact, and the facts to check before it is loaded.


def versions_for(device: torch.device) -> dict[str, str]:
    """Return what must be equal where an artifact is saved and where it is loaded."""
    name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "torch": str(torch.__version__),  # a subclass of str
        "triton": package_version("triton"),
        "CUDA": torch.version.cuda or "none",
        "device": name,
        "Python": platform.python_version(),
        "shardwise": package_version("shardwise"),
    }


def write_artifact(path: Path, content: bytes, versions: dict[str, str]) -> None:
    """Write an artifact and its facts atomically, readable only by this user."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    facts = ArtifactFacts(sha256=hashlib.sha256(content).hexdigest(), versions=versions)
    # After a crash between the two files the checksum does not match, and the next run replaces both.
    replace_synced(path, content, mode=0o600)
    replace_synced(path.with_suffix(".json"), msgspec.json.encode(facts), mode=0o600)


def read_artifact(path: Path, versions: dict[str, str]) -> bytes:
    """Return the content of an artifact; raises OSError, ValueError or MsgspecError if it must not be loaded."""
    facts = msgspec.json.decode(_read_own(path.with_suffix(".json")), type=ArtifactFacts)
    for name, version in versions.items():
        compiled_with = facts.versions.get(name, "none")
        if compiled_with != version:
            raise ValueError(f"compiled for {name} {compiled_with}, this process has {version}")
    content = _read_own(path)
    if hashlib.sha256(content).hexdigest() != facts.sha256:
        raise ValueError("the checksum does not match")
    return content


def _read_own(path: Path) -> bytes:
    """Return the content of a regular file that belongs to this user and that no other user can write."""
    # The open file is checked, not its name, which somebody could replace in between; a pipe must not block.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        if status.st_uid != os.geteuid():
            raise ValueError(f"{path.name} belongs to user {status.st_uid}, this process runs as {os.geteuid()}")
        if status.st_mode & _OTHERS_WRITE:
            raise ValueError(f"{path.name} is writable by other users")
        return file.read()
