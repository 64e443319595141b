"""`shardwise train --preset`: variables reach the ranks, and the run reports which of them NCCL read."""

import json
import os

import pytest

from e2e.processes import Command
from shardwise.cli.main import main

JOB = """
import os, socket, torch
import shardwise as sw

def log(context):
    # as NCCL fills the pattern in
    path = os.environ["NCCL_DEBUG_FILE"].replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
    value = os.environ["NCCL_BUFFSIZE"]
    open(path, "w").write(f"vm:1:1 [0] NCCL INFO NCCL_BUFFSIZE set by environment to {value}.\\n")

job = sw.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    data=sw.datasets.digits, loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-2),
    batch_size=128, steps=1, on_step=log,
)
"""
PRESET = ["--preset", "gcp"]


def shardwise(folder, *argv):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL", "OMP"))}
    (folder / "job.py").write_text(JOB)
    return Command(folder, *argv, environ=kept).finish()


def test_a_preset_reaches_the_ranks_of_a_training_and_the_run_reports_what_took_effect(tmp_path):
    done = shardwise(tmp_path, "train", "job.py", "--device", "cpu", "--run-dir", "run", *PRESET)
    assert done.returncode == 0, done.stderr
    assert "preset gcp sets NCCL_DEBUG=INFO NCCL_IB_DISABLE=1" in done.stderr
    assert "preset gcp: NCCL read 1 of" in done.stderr
    assert "preset gcp: NCCL_SOCKET_NTHREADS: 4: NCCL never read it" in done.stderr
    report = json.loads(shardwise(tmp_path, "doctor", "run", "run", "--json").stdout)
    states = {verdict["name"]: verdict["state"] for verdict in report["verdicts"]}
    assert (states["NCCL_BUFFSIZE"], states["NCCL_SOCKET_NTHREADS"]) == ("ok", "warn")


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Start a training with these arguments and variables; return its exit code and its error."""

    def start(argv, environ):
        (tmp_path / "job.py").write_text(JOB)
        monkeypatch.chdir(tmp_path)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        code = main(["train", "job.py", "--device", "cpu", "--run-dir", "run", *argv])
        return code, capsys.readouterr().err

    return start


@pytest.mark.parametrize(
    ("argv", "environ", "fact"),
    [
        (["--preset", "gpc"], {}, "choose one of gcp"),
        (["--nproc", "2", "--plan", "ddp"], {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "SIGSEGV"),
        (PRESET, {"GLOO_SOCKET_IFNAME": "nowhere0"}, "nowhere0 is not an interface of this machine"),
        (PRESET, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "doctor env --preset gcp --export"),
    ],
    ids=["unknown", "DETAIL with DDP on gloo", "no such interface", "a rank that others started"],
)
def test_what_cannot_work_is_refused_before_anything_starts(train, tmp_path, argv, environ, fact):
    code, complaint = train(argv, environ)
    assert (code, fact in complaint) == (2, True), complaint
    assert not (tmp_path / "run").exists()
