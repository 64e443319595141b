"""Faults in a running job: each is named with rank, operation and line; what only takes long is left in peace."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.processes import shardwise

FAULTS = Path(__file__).with_name("faults.py")
LIMIT_S, LATE_S = 2.0, 5.0


@dataclass
class Launched:
    code: int
    shown: str
    verdicts: list
    notes: list
    stacks: dict
    injected_at: float


def launch(folder, script, *arguments, stop=True, forked=False, **environ):
    """Run a script on two ranks and return the verdicts, notes and output; `forked`, the launcher imports no torch."""
    how = ["--hang-after", str(LIMIT_S), "--on-hang", "stop" if stop else "report", "--run-dir", "run"]
    argv = ["launch", "--nproc", "2", *how, script, *arguments]
    if forked:
        done = shardwise(folder, *argv, timeout_s=250, **environ)
    else:
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *argv],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
            env={**os.environ, **environ},
        )
    lines = (folder / "run" / "events" / "launcher.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    injected = folder / "injected"
    return Launched(
        code=done.returncode,
        shown=done.stdout + done.stderr,
        verdicts=[event for event in events if event["kind"] == "verdict"],
        notes=[event for event in events if event["kind"] == "note"],
        stacks={path.stem: path.read_text() for path in (folder / "run" / "stacks").glob("*.txt")},
        injected_at=float(injected.read_text()) if injected.exists() else 0.0,
    )


def line(name):
    """Return FILE:LINE of a marked line of the faults."""
    lines = FAULTS.read_text().splitlines()
    return f"faults.py:{next(i for i, text in enumerate(lines, 1) if text.endswith(f'# line: {name}'))}"


@pytest.fixture
def folder(tmp_path):
    shutil.copy(FAULTS, tmp_path)
    return tmp_path


NAMED = {
    "python": [r"rank 0 waits in all_reduce #\d+", line("first"), r"rank 1 is in stuck_in_python", line("python")],
    "c": [
        r"rank 0 waits in all_reduce #\d+",
        line("first"),
        r"rank 1 is in stuck_in_c",
        line("c"),
        "holds the interpreter",
    ],
    "loader": [r"rank 0 waits in all_reduce #\d+", line("first"), r"rank 1 waits for data", line("loop")],
    "skip": [r"rank 1 skipped all_reduce #11", line("first"), line("second")],
    "operation": ["differ in the operation", r"rank 1: broadcast #11", line("operation"), line("first")],
    "shape": ["differ in the shape", r"rank 1: all_reduce #11 \(sum, float32\[6\]\)", line("shape"), line("first")],
    "dtype": ["differ in the dtype", r"rank 1: all_reduce #11 \(sum, int32\[4\]\)", line("dtype"), line("first")],
    "reduce": ["differ in the reduce operation", r"rank 1: all_reduce #11 \(max", line("reduce"), line("first")],
    "order": ["opposite order", "rank 1 is in all_reduce", line("first"), line("second")],
}


def check(folder, fault, **how):
    done = launch(folder, "faults.py", fault, **how)
    assert done.code == 1, done.shown
    text = done.verdicts[0]["text"]
    for pattern in NAMED[fault]:
        assert re.search(pattern, text), f"{pattern!r} is not in: {text}"
    assert text in done.shown
    return done


def test_a_rank_stuck_in_c_that_holds_the_interpreter_is_named_and_all_stacks_are_kept(folder):
    done = check(folder, "c", forked=True)
    assert f'{FAULTS.name}", line {line("c").partition(":")[2]} in stuck_in_c' in done.stacks["rank1"]
    assert "in wait" in done.stacks["rank0"]


def test_a_reduce_operation_that_would_give_wrong_numbers_is_named(folder):
    check(folder, "reduce", forked=True)


@pytest.mark.prove
@pytest.mark.parametrize("fault", sorted(NAMED))
def test_a_fault_is_named_with_rank_operation_and_line_within_seconds(folder, fault):
    done = check(folder, fault)
    if fault != "order":  # which is there from the start
        assert done.verdicts[0]["at"] - done.injected_at <= LIMIT_S + LATE_S


@pytest.mark.prove
def test_a_dead_peer_is_named_with_what_others_were_in(folder):
    done = launch(folder, "faults.py", "dead")
    assert done.code == 1
    assert "rank 1 failed first: SIGKILL" in done.shown
    assert re.search(rf"rank 0 was in all_reduce #11 .*{line('first')}; rank 1 had left all_reduce #10", done.shown)


@pytest.mark.prove
def test_a_rank_that_is_half_as_fast_is_named(folder):
    done = launch(folder, "faults.py", "slow", stop=False)
    assert done.code == 0, done.shown
    [note] = [event for event in done.notes if "slow" in event["text"]]
    assert re.search(rf"rank 1 is slow: .* in all_reduce at {line('first')} .*it computes longer", note["text"])
    assert done.verdicts == []


@pytest.mark.prove
def test_by_default_a_hang_is_reported_and_the_job_continues(tmp_path):
    (tmp_path / "late.py").write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1: time.sleep(5)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "print('done')\n"
    )
    done = launch(tmp_path, "late.py", stop=False)
    assert done.code == 0
    assert done.shown.count("done") == 2
    assert re.search(r"rank 0 waits in all_reduce #1 .*late.py:4 .*; rank 1 is at late.py:3", done.verdicts[0]["text"])
    assert "the ranks that waited continue" in done.shown


@pytest.mark.prove
def test_a_rank_that_never_starts_its_world_is_named(tmp_path):
    (tmp_path / "absent.py").write_text(
        "import os, time, torch.distributed as dist\n"
        "if os.environ['RANK'] == '1': time.sleep(1000)\n"
        "dist.init_process_group('gloo')\n"
    )
    done = launch(tmp_path, "absent.py")
    assert re.search(r"rank 0 waits in init_process_group #1 at absent.py:3 .*rank 1 is at absent.py:2", done.shown)


@pytest.mark.prove
def test_gradients_of_ddp_that_wait_are_named_by_the_line_of_backward(tmp_path):
    (tmp_path / "ddp.py").write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "for step in range(9):\n"
        "    loss = model(torch.ones(2, 4)).sum()\n"
        "    if step == 3 and dist.get_rank() == 1: time.sleep(1000)\n"
        "    loss.backward()\n"
    )
    done = launch(tmp_path, "ddp.py")
    assert re.search(r"rank 0 waits in all_reduce #\d+ \(gradients, .*ddp.py:7 .*rank 1 is at ddp.py:6", done.shown)


SKIPPED = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
for step in range(4):
    loss = model(torch.ones(2, 64)).sum()
    if dist.get_rank() == 0 or step < 2:
        dist.all_reduce(torch.ones(int(sys.argv[1])))
    loss.backward()
"""


def check_skipped(folder, size, **how):
    """Rank 1 skips a collective before DDP's backward: gloo aborts the rank that receives more than it expects."""
    (folder / "skipped.py").write_text(SKIPPED)
    done = launch(folder, "skipped.py", str(size), **how)
    assert done.code == 1
    *_, last, _ = done.shown.splitlines()
    pattern = (
        rf"rank 1 did not call all_reduce #3 \(sum, float32\[{size}\]\) at skipped.py:8, which rank 0 called: rank 1"
    )
    assert re.match(
        pattern + r" was in (all_reduce \(gradients, .*float32\[4160\]\)|backward) at skipped.py:9", last
    ), done.shown
    assert done.verdicts[-1]["text"] == last
    return last


def test_a_rank_that_skips_a_collective_before_backward_is_named_though_its_peer_aborts(tmp_path):
    last = check_skipped(tmp_path, 3, forked=True)
    assert "; so rank 0 failed first: SIGABRT" in last
    assert "gradients, in backward, float32[4160]" in last


@pytest.mark.prove
def test_a_rank_that_skips_a_collective_before_backward_is_named_when_it_aborts_itself(folder):
    assert "; so rank 1 failed first: SIGABRT" in check_skipped(folder, 100_000)


SNIPPETS = {
    "broadcast": (
        "tensor = torch.tensor([1, 2, 3, 4]) if rank == 0 else torch.zeros(4)\ndist.broadcast(tensor, src=0)",
        r"rank 0: broadcast #1 \(root 0, int64\[4\]\) .*rank 1: broadcast #1 \(root 0, float32\[4\]\)",
    ),
    "send": (
        "if rank == 0: dist.send(torch.tensor([1, 2, 3]), dst=1)\nelse: dist.recv(torch.zeros(3), src=0)",
        r"rank 0: send #1 \(to rank 1, int64\[3\]\) .*rank 1: recv #1 \(from rank 0, float32\[3\]\)",
    ),
}
"""Examples of guides, as they are printed there: integers on one side, floats on the other."""


@pytest.mark.prove
@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_that_mix_dtypes_are_named_though_they_abort_in_c(tmp_path, name):
    code, pattern = SNIPPETS[name]
    head = "import time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nrank = dist.get_rank()\n"
    (tmp_path / "snippet.py").write_text(f"{head}{code}\ntime.sleep(3)\n")
    done = launch(tmp_path, "snippet.py")
    assert done.code == 1
    assert re.search(f"ranks differ in the dtype .*{pattern}", done.shown.splitlines()[-2]), done.shown


@pytest.mark.prove
def test_ranks_that_are_fresh_processes_are_recorded_too(folder):
    how = ["--hang-after", str(LIMIT_S), "--on-hang", "stop", "--start-method", "spawn"]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "launch", "--nproc", "2", *how, "faults.py", "python"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 1
    assert "rank 1 is in stuck_in_python" in done.stderr


CALM = """
import sys, time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 0 and rank == 1: time.sleep(14)
        return torch.ones(4)

def evaluate(seconds):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.LayerNorm(256))
    end = time.time() + seconds
    with torch.no_grad():
        while time.time() < end:
            model(torch.ones(64, 256)).sum().item()

def score(seconds):
    end, total = time.time() + seconds, 0
    while time.time() < end:
        total += 1

def validate(seconds):
    time.sleep(seconds)

def save(seconds):
    state, end = {str(i): torch.zeros(1_000_000) for i in range(20)}, time.time() + seconds
    while time.time() < end:
        torch.save(state, "big.pt")

dist.init_process_group("gloo")
rank, kind = dist.get_rank(), sys.argv[1]
if kind == "steps":
    for _ in range(10_000):
        dist.all_reduce(torch.ones(8))
elif kind == "batch":
    for batch in DataLoader(Data()):
        dist.all_reduce(batch)
elif kind == "compile":
    if rank == 0:
        torch._inductor.config.force_disable_caches = True
        torch.compile(lambda x: (x.sin() @ x).softmax(-1))(torch.ones(64, 64))
elif rank == 0:
    {"evaluate": evaluate, "save": save, "score": score, "validate": validate}[kind](14)
dist.barrier()
"""


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["steps", "batch", "evaluate", "save", "compile", "score", "validate"])
def test_a_slow_collective_is_not_a_hang(tmp_path, kind):
    (tmp_path / "calm.py").write_text(CALM)
    done = launch(tmp_path, "calm.py", kind)
    assert done.code == 0, done.shown
    assert done.verdicts == []
