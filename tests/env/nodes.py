"""Nodes of a run on hosts that are namespaces: start, watch, and look at what is left."""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LAUNCH = [sys.executable, "-m", "shardwise", "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

SCRIPT = """
import json, os, pathlib, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

steps, pause = int(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
saved, first = pathlib.Path("saved.pt"), 0
if saved.exists():
    state = torch.load(saved)
    model.module.load_state_dict(state["model"])
    first = state["step"]
if dist.get_rank() == 0:
    with open("attempts", "a") as file:
        file.write(f"{dist.get_world_size()} {first}\\n")
pathlib.Path(f"pid.{os.uname().nodename}").write_text(str(os.getpid()))
for step in range(first, steps):
    model(torch.ones(3, 4) * step).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "step": step + 1}, "partial.pt")
        os.replace("partial.pt", saved)
        pathlib.Path("progress").write_text(str(step + 1))
    time.sleep(pause)
total = torch.ones(1)
dist.all_reduce(total)
os.write(1, f"done {dist.get_rank()} of {int(total)} on {os.uname().nodename}\\n".encode())
dist.destroy_process_group()
"""
"""A DDP job that saves after every step and resumes at the save; `attempts` has world size and first step."""
LIGHT = (
    SCRIPT.replace("from torch.nn.parallel import DistributedDataParallel\n", "")
    .replace("DistributedDataParallel(torch.nn.Linear(4, 2))", "torch.nn.Linear(4, 2)")
    .replace("model.module", "model")
    .replace(
        "            parameter -= 0.01", "            dist.all_reduce(parameter.grad)\n            parameter -= 0.01"
    )
)
"""The same without DDP, whose first use imports 800 modules."""


@dataclass
class Node:
    """One launcher on one host."""

    host: object
    guest: object
    out: Path

    def output(self):
        return self.out.read_text(errors="replace")

    def wait(self, seconds=60):
        return self.guest.wait(seconds)


def start(host, folder, argv, *, cwd=None):
    """Start a launcher (`argv` from its program on) on a host; its output goes to a file in `folder`."""
    out = folder / f"out.{host.name}"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with out.open("ab") as file:
        guest = host.popen(argv, cwd=cwd or folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ)
    return Node(host, guest, out)


def wait_until(condition, seconds, what=lambda: ""):
    """Return the seconds until `condition` holds."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, what()
        time.sleep(0.05)
    return time.monotonic() - begun


def progress(folder):
    """Return how many steps are done."""
    path = folder / "progress"
    return int(path.read_text() or 0) if path.exists() else 0


def attempts(folder):
    """Return (world size, first step) of every attempt that came to its first step."""
    path = folder / "attempts"
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def last_line(output):
    """The last line a user reads, but for the one that names the run directory after every failure."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("shardwise: the run is in")]
    return re.sub(r"pid \d+", "pid N", lines[-1]) if lines else ""
