"""A Python that lacks some installed packages: an environment of links to all others."""

import shutil
import sys
import sysconfig
from pathlib import Path


def python_lacking(folder, *prefixes):
    """Return the interpreter of a new environment in `folder` without what begins with any of `prefixes`."""
    site = Path(sysconfig.get_path("purelib"))
    links = folder / site.relative_to(sys.prefix)
    links.mkdir(parents=True)
    for entry in site.iterdir():
        if not entry.name.lower().startswith(prefixes):
            (links / entry.name).symlink_to(entry)
    shutil.copy(Path(sys.prefix, "pyvenv.cfg"), folder)
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.symlink_to(sys._base_executable)
    return python
