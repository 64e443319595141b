"""The target of a rank: a script, a module or a program, and how a forked process runs it as `__main__`."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import shutil
import sys
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType, ModuleType

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

    def typed(self) -> list[str]:
        """Return the command as the user typed it, which is the same on every machine."""
        return [self.path, *self.arguments]

    def argv(self) -> list[str]:
        """Return the command line of a new interpreter."""
        return [sys.executable, "-u", *self.typed()]


class Module(msgspec.Struct, frozen=True, tag="module"):
    """A Python module, as with `python -m`."""

    module: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short name for run directories."""
        return self.module.rpartition(".")[2]

    def typed(self) -> list[str]:
        """Return the command as the user typed it, which is the same on every machine."""
        return ["-m", self.module, *self.arguments]

    def argv(self) -> list[str]:
        """Return the command line of a new interpreter."""
        return [sys.executable, "-u", *self.typed()]


class Program(msgspec.Struct, frozen=True, tag="program"):
    """Any executable."""

    program: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Short name for run directories."""
        return Path(self.program).name

    def typed(self) -> list[str]:
        """Return the command as the user typed it, which is the same on every machine."""
        return [self.program, *self.arguments]

    def argv(self) -> list[str]:
        """Return the command line."""
        return self.typed()


Target = Script | Module | Program


def check_target(target: Target) -> None:
    """Raise LaunchError if the script, module or program does not exist."""
    if isinstance(target, Script):
        path = Path(target.path)
        if not path.exists():
            raise LaunchError(
                f"script {target.path} does not exist",
                code="launch.script-not-found",
                fix="pass a Python file, or use -m for a module",
            )
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise LaunchError(
                f"{target.path} is a directory without __main__.py",
                code="launch.script-is-folder",
                fix="pass a Python file",
            )
    elif isinstance(target, Module):
        _check_module(target.module)
    elif shutil.which(target.program) is None:
        raise LaunchError(
            f"program {target.program} is not on the PATH",
            code="launch.program-not-found",
            fix="pass an executable, or remove --no-python",
        )


def _check_module(name: str) -> None:
    top = name.partition(".")[0]
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # the first entry under python -m
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise LaunchError(
            f"module {top!r} does not exist",
            code="launch.module-not-found",
            fix="pass a module that python -m finds, or a script without -m",
        )


# Running a target as `__main__` of a forked process.


def set_main(target: Script | Module) -> CodeType:
    """Set up `__main__`, sys.argv and sys.path as `python TARGET` does, and return the code of the target.

    `__main__` is a new module with the file, spec and loader that `python` sets, so that pickle, spawned DataLoader
    workers and mp.spawn can import it.
    """
    return _set_script(target) if isinstance(target, Script) else _set_module(target)


def _set_script(target: Script) -> CodeType:
    path = str(Path(target.path).absolute())  # as in Python; argv contains the path as typed
    main = _fresh_main()
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.path[0] = str(Path(path).resolve().parent)
    sys.argv[:] = [target.path, *target.arguments]
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _set_module(target: Module) -> CodeType:
    sys.path[0] = str(Path.cwd())
    sys.argv[:] = ["-m", *target.arguments]
    spec = importlib.util.find_spec(target.module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{target.module}.__main__")
    code = None
    if spec is not None and isinstance(spec.loader, InspectLoader):
        code = spec.loader.get_code(spec.name)
    if spec is None or code is None:
        raise LaunchError(
            f"module {target.module!r} has no code to run", code="launch.module-not-runnable", fix="add a __main__.py"
        )
    main = _fresh_main()
    main.__file__, main.__loader__, main.__spec__ = spec.origin, spec.loader, spec
    main.__package__ = spec.parent
    sys.argv[0] = spec.origin or target.module
    return code


def _fresh_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main
