"""How the commands of the gallery are started: from a warm server here, as they are written in `make prove`."""

import os
import re
import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def warm_runtime(tmp_path_factory):
    """The folder of the warm servers that chapters start; they end with the tests."""
    folder = tmp_path_factory.mktemp("warm")
    yield folder
    command = [sys.executable, "-m", "shardwise", "launch", "--warm-server", "stop"]
    subprocess.run(command, env={**os.environ, "XDG_RUNTIME_DIR": str(folder)}, check=False, capture_output=True)


@pytest.fixture(params=["warm", pytest.param("written", marks=pytest.mark.prove)])
def launched(request, monkeypatch):
    """A function from commands of a README to those that are run.

    torchrun imports torch once more than there are ranks, and a script brings the rest: 8 s of two cores. Forks of a
    warm server are the ranks of a cold start (test_launch_warm), for a second.
    """
    if request.param == "written":
        return list
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(request.getfixturevalue("warm_runtime")))
    return warmed


def warmed(lines):
    """Return the commands with a warm start in place of their launcher; those that are then alike, once."""
    warm = (re.sub(r"^(torchrun|shardwise launch) ", "shardwise launch --warm ", line) for line in lines)
    return list(dict.fromkeys(warm))
