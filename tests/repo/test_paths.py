"""How many files one opens from the shell to `backward`: those whose functions are on the stack, by a call trace."""

import json
import sys
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.cli.main import main
from shardwise.launcher.local import attempts
from shardwise.launcher.local.function import run_forked
from shardwise.launcher.local.starters import ForkStarter
from shardwise.testing import run_ranks

SOURCE = Path(shardwise.__file__).parent
STACK = """
import json
import sys
from pathlib import Path

import torch

import shardwise as sw

SOURCE = Path(sw.__file__).parent


def write_stack():
    frame, files = sys._getframe(), set()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            files.add(str(path.relative_to(SOURCE)))
        frame = frame.f_back
    Path(__file__).with_name("stack.json").write_text(json.dumps(sorted(files)))
"""
JOB = (
    STACK
    + """
unpatched = torch.autograd.backward


def backward(*args, **kwargs):
    torch.autograd.backward = unpatched
    write_stack()
    return unpatched(*args, **kwargs)


torch.autograd.backward = backward
job = sw.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    data=sw.datasets.digits, loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-3), batch_size=256, steps=1,
)
"""
)
RESTARTED = (
    STACK
    + """
if not Path("stack.json").exists():
    write_stack()
    sys.exit(1)
"""
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # undone after a job file replaced it
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def open_files():
    """Return the files of the package whose functions are on the stack of this process."""
    frame, files = sys._getframe(), set()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            files.add(str(path.relative_to(SOURCE)))
        frame = frame.f_back
    return files


@pytest.fixture
def trace(monkeypatch):
    """Return a function that adds the files on the stack to `trace.files` whenever a function is called."""

    def add(owner, name):
        traced = getattr(owner, name)
        own = str(Path(sys.modules[traced.__module__].__file__).relative_to(SOURCE))

        def call(*args, **kwargs):
            add.files.update(open_files(), {own})
            return traced(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    add.files = set()
    return add


def test_train_passes_nine_files_from_the_shell_to_backward(folder, trace):
    trace(ForkStarter, "start_rank")
    assert main(["train", "job.py"]) == 0
    files = trace.files | set(json.loads((folder / "stack.json").read_text()))
    assert {"cli/main.py", "runner/train.py", "worker.py", "training/loop.py"} <= files
    assert len(files) <= 9, sorted(files)


def test_launch_with_a_restart_passes_nine_files(folder, trace):
    (folder / "script.py").write_text(RESTARTED)
    trace(ForkStarter, "start_rank")
    trace(attempts, "supervise")
    trace(attempts, "decide")

    def launch(_rank):
        code = main(["launch", "--max-restarts", "1", "script.py"])
        return code, trace.files

    # In a fork: `launch` adopts orphaned processes and ends all that it started, which is not for this process.
    [(code, found)] = run_forked(launch, 1, timeout_s=60)
    assert code == 0
    files = found | set(json.loads((folder / "stack.json").read_text()))
    files -= {"launcher/local/function.py", "launcher/local/processes.py"}  # of this test's own fork
    assert {"runner/launch.py", "launcher/policy.py", "launcher/local/fork_parent.py"} <= files
    assert len(files) <= 9, sorted(files)


def test_verify_passes_nine_files_from_the_shell_to_backward_of_a_plan(folder):
    """A rank is forked from within `verify`, so that its stack holds both processes."""
    assert main(["verify", "job.py", "--plans", "ddp", "--nproc", "2", "--steps", "1"]) == 0
    files = json.loads((folder / "stack.json").read_text())
    assert {"cli/main.py", "parity/verify.py", "parity/runner.py", "training/step/plain.py"} <= set(files)
    assert len(files) <= 9, files


def test_train_passes_six_files_in_a_world_that_torchrun_started(folder):
    assert run_ranks(lambda world: main(["train", "job.py", "--run-dir", "run"]), 2) == [0, 0]
    files = json.loads((folder / "stack.json").read_text())
    assert {"cli/main.py", "runner/train.py", "training/loop.py"} <= set(files)
    assert len(set(files) - {"testing.py", "launcher/local/function.py", "launcher/local/processes.py"}) <= 6, files
