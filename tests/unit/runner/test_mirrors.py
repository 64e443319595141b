"""Mirrors beside a training: it continues and ends as without them, whatever the tracker does."""

import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from runs.synthetic import attempt_event, empty_run, start_event, steps_event, write

from e2e.processes import Command
from shardwise.monitor.sinks import SinkSpec
from shardwise.runner import observers

JOB = """
import torch
import shardwise as sw

job = sw.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    data=sw.datasets.digits, loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-3), batch_size=256, steps=8,
)
"""


def trained_run(path):
    run = empty_run(path)
    write(run.launcher_events(), attempt_event(1.0, 1), {"at": 9.0, "kind": "finish", "state": "finished"})
    write(run.events(0), start_event(2.0, 1, 2), steps_event(3.0, 0, [2.0, 1.0]))
    return run


def stand_in(folder, monkeypatch, how):
    """Put a package in the place of wandb that does this when it is imported."""
    (folder / "wandb").mkdir(parents=True)
    (folder / "wandb" / "__init__.py").write_text(how)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_tracker_that_hangs_is_ended_and_nothing_of_it_stays(tmp_path, monkeypatch, capfd):
    hang = "import os, subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\nopen('pids', 'w').write("
    hang += "f'{os.getpid()} {child.pid}')\nos.rename('pids', 'hangs')\ntime.sleep(600)\n"
    stand_in(tmp_path / "packages", monkeypatch, hang)
    monkeypatch.chdir(tmp_path)
    mirrors = observers.Mirrors(trained_run(tmp_path / "run"), [SinkSpec("wandb", "digits")])
    monkeypatch.setattr(observers, "_MIRROR_WAIT_S", 0.1)
    deadline((tmp_path / "hangs").exists)
    mirrors.close()
    assert "wandb:digits is incomplete (timeout)" in capfd.readouterr().err
    deadline(lambda: not any(is_alive(int(pid)) for pid in (tmp_path / "hangs").read_text().split()))


def test_a_tracker_that_fails_is_reported_in_one_line(tmp_path, monkeypatch, capfd):
    stand_in(tmp_path / "packages", monkeypatch, "raise OSError('the disk is full')\n")
    monkeypatch.setattr(observers, "_MIRROR_WAIT_S", 120.0)
    observers.Mirrors(trained_run(tmp_path / "run"), [SinkSpec("wandb", "digits")]).close()
    [line] = capfd.readouterr().err.splitlines()
    assert "wandb:digits is incomplete (wandb:digits failed (the disk is full)" in line
    assert line.endswith(f"shardwise watch {tmp_path}/run --sink wandb:digits")


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="no tensorboard: pip install 'shardwise[tensorboard]'")
def test_a_training_is_in_the_tracker_when_it_ends(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "job.py").write_text(JOB)
    argv = ["train", "job.py", "--nproc", "2", "--run-dir", "run", "--sink", "tensorboard:logs"]
    done = Command(tmp_path, *argv).finish(240)
    assert done.returncode == 0, done.stderr
    if "is incomplete (timeout)" in done.stderr:  # a busy machine: then the command that it names must send the rest
        again = ["-m", "shardwise", "watch", "run", "--sink", "tensorboard:logs"]
        subprocess.run([sys.executable, *again], cwd=tmp_path, timeout=240, check=True)
    board = EventAccumulator(str(tmp_path / "logs" / "run"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == list(range(1, 9))
    assert {"train/samples_per_s", "memory_gib/rank1", "evaluation/loss"} <= set(board.Tags()["scalars"])


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def deadline(is_true, seconds=60):
    """Wait for it, however slow the machine is."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)
