"""Versions of installed packages, also where the source tree of this one is on the path without an installation."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

UNKNOWN = "unknown"
_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
"""Of a source tree; an installed package has none there."""


def package_version(name: str) -> str:
    """Return the version of a package, or "unknown"; the package is not imported.

    A source tree on PYTHONPATH has no metadata: then this package's version comes from pyproject.toml, another's from
    its version.py (torch has one).
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return _version_in_sources(name)


def _version_in_sources(name: str) -> str:
    if name == "shardwise":
        return _find(_PYPROJECT, r'^name = "shardwise"\nversion = "([^"]+)"')
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return UNKNOWN
    return _find(Path(spec.origin).with_name("version.py"), r"^__version__ = ['\"]([^'\"]+)['\"]")


def _find(path: Path, pattern: str) -> str:
    try:
        found = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return UNKNOWN
    return found[1] if found else UNKNOWN
