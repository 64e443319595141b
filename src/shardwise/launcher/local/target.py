"""What a rank runs: a script, a module, or a program that is not Python."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import msgspec

from shardwise.errors import LaunchError


class Script(msgspec.Struct, frozen=True, tag="script"):
    """A Python file."""

    path: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short name for run directories."""
        return Path(self.path).stem or "script"

    def words(self) -> list[str]:
        """Return what the user typed, the same on every machine."""
        return [self.path, *self.arguments]

    def argv(self) -> list[str]:
        """Return the command line of a fresh interpreter."""
        return [sys.executable, "-u", *self.words()]


class Module(msgspec.Struct, frozen=True, tag="module"):
    """A Python module, as with `python -m`."""

    module: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short name for run directories."""
        return self.module.rpartition(".")[2]

    def words(self) -> list[str]:
        """Return what the user typed, the same on every machine."""
        return ["-m", self.module, *self.arguments]

    def argv(self) -> list[str]:
        """Return the command line of a fresh interpreter."""
        return [sys.executable, "-u", *self.words()]


class Program(msgspec.Struct, frozen=True, tag="program"):
    """Any executable."""

    program: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short name for run directories."""
        return Path(self.program).name

    def words(self) -> list[str]:
        """Return what the user typed, the same on every machine."""
        return [self.program, *self.arguments]

    def argv(self) -> list[str]:
        """Return the command line."""
        return self.words()


Target = Script | Module | Program


def check_target(target: Target) -> None:
    """Refuse a target that cannot be started, before anything is."""
    if isinstance(target, Script):
        path = Path(target.path)
        if not path.exists():
            raise LaunchError(
                f"script {target.path} is not there",
                code="launch.script-not-found",
                fix="name a Python file, or use -m for a module",
            )
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise LaunchError(
                f"{target.path} is a folder without __main__.py",
                code="launch.script-is-folder",
                fix="name a Python file",
            )
    elif isinstance(target, Module):
        _check_module(target.module)
    elif shutil.which(target.program) is None:
        raise LaunchError(
            f"program {target.program} is not on the path",
            code="launch.program-not-found",
            fix="name an executable, or leave --no-python out",
        )


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # where python -m looks first
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise LaunchError(
            f"there is no module {top!r}",
            code="launch.module-not-found",
            fix="name a module that python -m finds, or a script without -m",
        )
