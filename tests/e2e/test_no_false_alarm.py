"""Slow steps that are not hangs, at their full length: ten thousand steps, a minute of compiling, slow storage."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]
LONG_S = 60.0
"""Of compiling in one rank; the limit is 10 s by default."""
JOB = """
import os, time, torch
import shardwise as sw

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 4096
    def __getitem__(self, index): return torch.full((4,), index / 4096), torch.tensor(index % 2)

SLOW_S, fsync = float(os.environ.get("SLOW_S", 0)), os.fsync

def slow_fsync(fd):
    time.sleep(SLOW_S)
    fsync(fd)

if SLOW_S and os.environ.get("RANK") == "0":
    os.fsync = slow_fsync  # storage that takes its time, seen by one rank

job = sw.Job(
    model=lambda: torch.nn.Linear(4, 2),
    data=lambda split: Rows() if split == "train" else None,
    loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-3), batch_size=8, steps=10_000,
)
"""


def run(folder, *argv, **environ):
    """Run a command of shardwise that must succeed; return its seconds, its verdicts, its notes on waiting, its output.

    A note that a rank is slow is not an alarm: on a machine that others use too, it may be true.
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *argv],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )
    took_s = time.monotonic() - began
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    path = folder / "run" / "events" / "launcher.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    verdicts = [event["text"] for event in events if event["kind"] == "verdict"]
    waits = [event["text"] for event in events if event["kind"] == "note" and " wait" in event["text"]]
    print(f"{took_s:.0f} s", *verdicts, *waits, sep="\n  ")  # with -s: the figures of docs/guides/hang.md
    return took_s, verdicts, [text for text in waits if "is slow" not in text], shown


TRAIN = ["train", "job.py", "--nproc", "2", "--device", "cpu", "--plan", "ddp", "--run-dir", "run"]


@pytest.mark.parametrize("limit", [[], ["--hang-after", "2"]], ids=["default", "2s"])
def test_ten_thousand_steps_give_no_alarm(tmp_path, limit):
    (tmp_path / "job.py").write_text(JOB)
    _, verdicts, waits, _ = run(tmp_path, *TRAIN, *limit, "--save-every", "1000")
    assert (verdicts, waits) == ([], [])
    end = json.loads((tmp_path / "run" / "events" / "rank0.jsonl").read_text().splitlines()[-1])
    assert end["steps"] == 10_000


@pytest.mark.parametrize(("limit_s", "slow_s"), [("10", "8"), ("2", "3")])
def test_storage_slower_than_the_limit_gives_no_alarm_while_training_continues(tmp_path, limit_s, slow_s):
    (tmp_path / "job.py").write_text(JOB)
    how = ["--hang-after", limit_s, "--save-every", "4000"]
    took_s, verdicts, _, shown = run(tmp_path, *TRAIN, *how, SLOW_S=slow_s)
    assert verdicts == []
    assert took_s > 2 * float(limit_s)
    assert "not saved" not in shown


PIPE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    with open("storage", "wb") as storage:
        torch.save({str(i): torch.zeros(1 << 18) for i in range(24)}, storage)
dist.barrier()
"""


def test_a_save_into_a_pipe_that_takes_one_megabyte_a_second_gives_no_alarm(tmp_path):
    (tmp_path / "save.py").write_text(PIPE)
    os.mkfifo(tmp_path / "storage")
    reader = threading.Thread(target=_drain, args=(tmp_path / "storage",), daemon=True)
    reader.start()
    took_s, verdicts, waits, _ = run(tmp_path, "launch", "--nproc", "2", "--run-dir", "run", "save.py")
    reader.join(10)
    assert took_s > 20
    assert verdicts == []
    assert all("rank 0 saves or loads a checkpoint" in text for text in waits if text.startswith("rank 1 waits"))


def _drain(path, bytes_per_s=1 << 20):
    """Read a pipe as slowly as a bad disk writes."""
    with path.open("rb") as pipe:
        while pipe.read(bytes_per_s // 4):
            time.sleep(0.25)


COMPILE = """
import sys, time, torch, torch.distributed as dist
torch._inductor.config.force_disable_caches = True

def network(width, depth=4):
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width + i), torch.nn.GELU(), torch.nn.LayerNorm(width + i),
              torch.nn.Linear(width + i, width), torch.nn.Softmax(-1)) for i in range(depth)]
    return torch.nn.Sequential(*blocks)

dist.init_process_group("gloo")
if dist.get_rank() in map(int, sys.argv[2].split(",")):
    begun, width = time.monotonic(), 16
    while time.monotonic() - begun < float(sys.argv[1]):
        torch.compile(network(width), fullgraph=True)(torch.ones(4, width)).sum().backward()
        width += 16
    print("compiled", width // 16 - 1, "graphs in", round(time.monotonic() - begun), "s")
dist.barrier()
"""


@pytest.mark.parametrize("ranks", ["0", "0,1"])
def test_a_minute_of_compiling_is_a_note_at_most(tmp_path, ranks):
    (tmp_path / "compiles.py").write_text(COMPILE)
    how = ["--nproc", "2", "--run-dir", "run", "compiles.py", str(LONG_S), ranks]
    took_s, verdicts, waits, shown = run(tmp_path, "launch", *how)
    assert verdicts == []
    assert took_s > LONG_S
    assert shown.count("compiled") == len(ranks.split(","))
    if ranks == "0":
        assert any("rank 0 compiles" in text for text in waits), waits
