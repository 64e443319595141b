"""Running a target as the real `__main__` of a process that was forked, not started."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import sys
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType, ModuleType

from shardwise.errors import LaunchError
from shardwise.launcher.local.target import Module, Script


def become(target: Script | Module) -> CodeType:
    """Make this process look as if Python had been started on `target`, and return its code.

    `__main__` is a fresh module with the file, spec and loader that `python` gives it, so that pickling, spawned
    DataLoader workers and mp.spawn find their way back to it.
    """
    return _become_script(target) if isinstance(target, Script) else _become_module(target)


def execute(code: CodeType) -> None:
    """Run the code that `become` returned, as `__main__`."""
    exec(code, sys.modules["__main__"].__dict__)  # noqa: S102 - running the user's script is the job


def _become_script(target: Script) -> CodeType:
    path = str(Path(target.path).absolute())  # as Python does; argv keeps what was typed
    main = _fresh_main()
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.path[0] = str(Path(path).resolve().parent)
    sys.argv[:] = [target.path, *target.arguments]
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _become_module(target: Module) -> CodeType:
    sys.path[0] = str(Path.cwd())
    sys.argv[:] = ["-m", *target.arguments]
    spec = importlib.util.find_spec(target.module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{target.module}.__main__")
    loader = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec is not None and isinstance(loader, InspectLoader) else None
    if spec is None or code is None:
        raise LaunchError(
            f"module {target.module!r} cannot be run", code="launch.module-not-runnable", fix="give it a __main__.py"
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
