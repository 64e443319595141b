"""Versions of packages, with and without an installation of this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.hardware.probe import package_version

SHOW = """
from shardwise.launcher.nodes.node import NodesSpec, node_facts
from shardwise.hardware.probe import package_version
facts = node_facts(NodesSpec(least=1, most=1, host="127.0.0.1", port=1), "train.py")
print(facts["shardwise"], facts["torch"], package_version("no_such_package"))
"""


@pytest.fixture
def packages(tmp_path):
    """Return a folder with every installed package, but without the metadata of shardwise and torch."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not entry.name.startswith(("shardwise", "_shardwise", "torch-")) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    return folder


def run(packages, sources, *argv):
    interpreter = sys._base_executable  # outside of the environment in which shardwise is installed
    environ = {**os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{packages}"}
    return subprocess.run([interpreter, *argv], env=environ, cwd=packages, capture_output=True, text=True, check=True)


def test_source_tree_without_an_installation_has_the_version_of_its_pyproject(packages):
    sources = Path(shardwise.__file__).parents[1]
    version, release = package_version("shardwise"), torch.__version__.partition("+")[0]
    assert run(packages, sources, "-m", "shardwise", "--version").stdout == f"shardwise {version}\n"
    assert run(packages, sources, "-c", SHOW).stdout.split() == [version, release, "unknown"]


def test_copied_sources_without_a_pyproject_have_an_unknown_version(packages, tmp_path):
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "shardwise").symlink_to(Path(shardwise.__file__).parent)
    shown = run(packages, tmp_path / "sources", "-m", "shardwise", "--version")
    assert shown.stdout == "shardwise unknown\n"
