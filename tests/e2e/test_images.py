"""Training on images: a stopped run continues on another number of ranks with equal losses; bad images are named."""

import shutil

import pytest
import torch
from data.test_images import make_folder

from e2e.processes import Command
from e2e.test_resume import losses
from refusals import assert_refused

JOB = """
import os, signal
from pathlib import Path
import shardwise as sw

def on_step(context):
    if context.step == 3 and Path("stops").exists():
        Path("stops").unlink(missing_ok=True)
        os.kill(os.getpid(), signal.SIGTERM)

def model():
    resnet = sw.models.resnet18(num_classes=3, norm="group", stem="small")
    resnet.stages = resnet.stages[:1]
    resnet.head = type(resnet.head)(64, 3)
    return resnet

job = sw.Job(
    model=model, data=sw.datasets.images("train", test="test", size=8, augment=True), loss=sw.losses.cross_entropy,
    optimizer=sw.adamw(lr=1e-3), batch_size=4, epochs=2, num_workers=1, on_step=on_step,
)
"""


def train(folder, *arguments):
    done = Command(folder, "train", "job.py", "--plan", "ddp", *arguments).finish()
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path):
    """A job with twelve training and three test images."""
    (tmp_path / "job.py").write_text(JOB)
    make_folder(tmp_path / "train", per_class=4)
    make_folder(tmp_path / "test", per_class=1)
    return tmp_path


def test_a_run_stopped_on_two_ranks_continues_on_one_with_equal_losses(folder):
    code, output = train(folder, "--nproc", "2", "--run-dir", "whole")
    assert code == 0, output
    (folder / "stops").touch()
    code, output = train(folder, "--nproc", "2", "--run-dir", "stopped")
    assert code == 75, output
    code, output = train(folder, "--nproc", "1", "--run-dir", "stopped", "--resume", "auto")
    assert code == 0, output
    both, whole = losses(folder / "stopped"), losses(folder / "whole")
    assert sorted(both) == sorted(whole) == list(range(6))
    torch.testing.assert_close(torch.tensor(list(both.values())), torch.tensor(list(whole.values())), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("split", "exit_code"), [("train", 2), ("test", 1)])
def test_a_damaged_image_read_by_a_loader_worker_is_named(split, exit_code, folder):
    path = folder / split / "bee" / "inner" / "0.png"
    path.write_bytes(path.read_bytes()[:100])
    code, output = train(folder)
    assert code == exit_code, output  # 2 before the first step
    assert f"{path.relative_to(folder)} cannot be decoded" in output
    assert "[data.image-invalid]" in output


def test_a_missing_test_split_is_refused_before_the_first_step(folder):
    shutil.rmtree(folder / "test")
    before = sorted(folder.rglob("*"))
    code, output = train(folder)
    assert code == 2, output
    assert_refused(output, "data.folder-not-found", "test")
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts] == before
