"""Run directories of version 1, one archive each: a run that finished, one whose rank was killed, one with an error."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

from goldens.entry import command, run_status
from goldens.outputs import without_sentences
from goldens.store import DATA

FOLDER = DATA / "run_directories"
ROOT = Path(__file__).resolve().parents[2]
JOBS = {
    "finished": "from tiny import job",
    "killed": """
import dataclasses, os, signal
import tiny

def on_step(context):
    if context.step == 4 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

job = dataclasses.replace(tiny.job, on_step=on_step)
""",
    "error": """
import dataclasses, os
import tiny

def on_step(context):
    if context.step == 3 and os.environ["RANK"] == "1":
        raise ValueError("the third step is not wanted")

job = dataclasses.replace(tiny.job, on_step=on_step)
""",
}
"""Name of a run: its job file."""


def write_all(folder):
    """Train every job on two ranks and archive its run directory, without the names of this machine."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "tests" / "goldens" / "tiny.py", folder)
    for name, text in JOBS.items():
        (folder / f"{name}.py").write_text(text)
        arguments = ["train", f"{name}.py", "--nproc", "2", "--plan", "ddp", "--run-dir", name, "--save-every", "6"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([sys.executable, "-m", "shardwise", *arguments], cwd=folder, env=environment, check=False)
        _anonymize(folder / name, str(folder.resolve()), str(ROOT))
        with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(folder / name, name)


def _anonymize(run, *paths):
    """Replace paths and the host name by others of the same length, since rings have fields of a fixed size."""
    for file in [path for path in run.rglob("*") if path.is_file()]:
        content = file.read_bytes()
        for path in sorted(paths, key=len, reverse=True):
            content = content.replace(path.encode(), ("/" + "p" * (len(path) - 1)).encode())
        host = socket.gethostname()
        content = content.replace(f'"{host}"'.encode(), f'"{"h" * len(host)}"'.encode())
        file.write_bytes(content)


def readings(folder):
    """Return what `doctor run` and `watch` read from every run directory."""
    found = {}
    for name, path in unpack(folder).items():
        code, text = command("doctor", "run", path, "--json")
        explained = without_sentences(json.loads(text))
        found[name] = {"exit code": code, "doctor run": explained, "watch": run_status(path)}
    return found


def unpack(folder):
    """Unpack all runs and return their directories by name."""
    for name in JOBS:
        with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    return {name: folder / name for name in JOBS}
