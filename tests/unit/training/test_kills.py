"""Kill -9 at random moments, resume on another number of ranks: every sample once, and the weights of a quiet run."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import shardwise as sw
from jobs import FP64
from shardwise.plans import Plan
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.loop import run_loop
from shardwise.training.spec import SaveSpec

ROWS, BATCH = 46, 8
STEPS_PER_EPOCH = -(-ROWS // BATCH)


class Points(torch.utils.data.Dataset):
    """Rows that carry their own number."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        time.sleep(0.002)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, dtype=torch.float64, generator=generator), torch.tensor(index), torch.tensor(index % 3)


def make_job(log, epochs):
    """Every rank writes which rows it trained on, by step; the loss sees real rows only, no filler."""

    def loss_sum(output, batch):
        lines.append(batch[1].tolist())
        return torch.nn.functional.cross_entropy(output, batch[-1], reduction="sum")

    def on_step(context):
        with log.open("a") as file:
            for indices in lines:
                file.write(f"{context.report.number} {' '.join(map(str, indices))}\n")
        lines.clear()

    lines = []
    return sw.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3)),
        data=lambda split: Points() if split == "train" else None,
        loss=sw.Loss(sum=loss_sum),
        optimizer=sw.adamw(lr=1e-2),
        batch_size=BATCH,
        epochs=epochs,
        forward=lambda model, batch: model(batch[0]),
        on_step=on_step,
    )


def train(world, name, folder, attempt, epochs):
    log = folder / f"{attempt}-{world.rank}.log"
    plan = Plan(**{**vars(Plan.preset(name, world.size, batch_size=BATCH)), "precision": FP64})
    save = SaveSpec(every=3, keep="2")
    job, folder = make_job(log, epochs), folder / "checkpoints"
    _, step = run_loop(job, plan, world, EventLog(None), Timeline(), checkpoints=folder, save=save)
    return sw.full_state_dict(step.model)


def train_until_killed(name, nproc, folder, attempt, *, epochs, seconds):
    """Train in a process of its own and kill it, and its ranks with it; return whether it was done before."""
    done = folder / "done.pt"
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        torch.save(run_ranks(train, nproc, name, folder, attempt, epochs, timeout_s=300)[0], folder / "half-done.pt")
        (folder / "half-done.pt").rename(done)
        os._exit(0)
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and not done.exists():
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return done.exists()


def rows_by_step(folder, attempts):
    """Which rows each step used, in the last attempt that reached it."""
    used = {}
    for attempt in range(attempts):
        reached = {}
        for log in sorted(folder.glob(f"{attempt}-*.log")):
            for line in log.read_text().splitlines():
                number, *rows = map(int, line.split())
                reached.setdefault(number, []).extend(rows)
        used.update(reached)
    return used


def check(kills, epochs, folder):
    (folder / "quiet").mkdir()
    quiet = run_ranks(train, 1, "ddp", folder / "quiet", 0, epochs, timeout_s=300)[0]
    random_ = random.Random(3)
    folder = folder / "killed"
    folder.mkdir()
    for attempt in range(kills):
        nproc, name = random_.choice([(1, "ddp"), (2, "ddp"), (2, "zero3"), (4, "zero3"), (4, "zero1")])
        seconds = random_.uniform(0.15, 0.9)
        assert not train_until_killed(name, nproc, folder, attempt, epochs=epochs, seconds=seconds), "too short a job"
    assert train_until_killed("ddp", 1, folder, kills, epochs=epochs, seconds=300)
    final = torch.load(folder / "done.pt")
    for name, value in quiet.items():
        torch.testing.assert_close(final[name], value, rtol=1e-9, atol=1e-11, msg=name)
    used = rows_by_step(folder, kills + 1)
    assert sorted(used) == list(range(epochs * STEPS_PER_EPOCH))
    for epoch in range(epochs):
        steps = range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        assert Counter(row for step in steps for row in used[step]) == Counter(range(ROWS))


@pytest.mark.slow
def test_a_few_kills_lose_and_repeat_nothing(tmp_path: Path):
    check(5, 30, tmp_path)


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_a_hundred_kills_lose_and_repeat_nothing(tmp_path: Path):
    check(100, 400, tmp_path)
