"""A real SLURM of two nodes: bare tasks, launchers, scripts that --slurm made, requeues, kills, and Open MPI."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from env import slurm

pytestmark = [
    pytest.mark.skipif(bool(slurm.why_not()), reason=slurm.why_not() or "never"),
    pytest.mark.timeout(240),
]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHARDWISE = [sys.executable, "-m", "shardwise"]
AGENTS = ["srun", "--nodes=2", "--ntasks-per-node=1", *SHARDWISE]

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"sum {int(total)} from rank {dist.get_rank()} on {os.uname().nodename}", flush=True)
if "wait" in sys.argv:
    with open(f"rank{dist.get_rank()}.pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(200)
dist.destroy_process_group()
"""

WORLD = """
import shardwise as sw
from shardwise.environment import has_own_gpu, identify, visible_cuda_devices
from shardwise.dist.start import gpu_index

with sw.world() as world:
    total = world.sum({"ranks": 1})["ranks"]
    shown = visible_cuda_devices()
    gpu = shown[gpu_index(identify(), len(shown), own_gpu=has_own_gpu())] if shown else ""
    print(f"sum {total:g} from rank {world.rank} on node {world.node} gpu {gpu}", flush=True)
"""

JOB = """
import time
import torch
import shardwise as sw

job = sw.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
    data=sw.datasets.digits,
    loss=sw.losses.cross_entropy,
    optimizer=sw.adamw(lr=1e-3),
    batch_size=64,
    steps=40,
    on_step=lambda _: time.sleep(0.2),
)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.cluster(2, shared=tmp_path_factory.mktemp("slurm"), gpus=4) as made:
        yield made


@pytest.fixture
def folder(cluster, request):
    """A folder that all hosts share, with the scripts; at the end no job and no process may be left."""
    made = cluster.folder.parent / re.sub(r"\W+", "-", request.node.name)
    made.mkdir()
    for name, text in {"script.py": SCRIPT, "world.py": WORLD, "job.py": JOB}.items():
        (made / name).write_text(text)
    yield made
    cluster.run(["scancel", "--user=root"])
    until(lambda: not cluster.run(["squeue", "--noheader"]).stdout)
    until(lambda: not cluster.left_on_nodes())


def until(is_so, timeout=60):
    deadline = time.monotonic() + timeout
    while not (found := is_so()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.1)
    return found


def sums(text):
    return sorted(re.findall(r"^sum .*", text, re.MULTILINE))


def on_both(total):
    half = total // 2
    return [f"sum {total} from rank {rank} on host{rank // half}" for rank in range(total)]


def submit(cluster, folder, *argv):
    """Submit by --slurm; return the job's id and its run directory."""
    done = cluster.run([*SHARDWISE, *argv], cwd=folder)
    return done.stdout.strip(), next((folder / "runs").iterdir())


def test_one_launcher_per_node_finds_the_others_by_the_job(cluster, folder):
    done = cluster.run([*AGENTS, "launch", "--nproc", "2", "script.py"], cwd=folder)
    assert sums(done.stdout) == on_both(4)
    assert len(list((folder / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["srun", "-N2", "--ntasks-per-node=2", *SHARDWISE, "launch", "script.py"], "use srun --ntasks-per-node=1"),
        ([*AGENTS, "launch", "--nnodes", "3", "script.py"], "use srun --nodes=3 --ntasks-per-node=1, or --nnodes 2"),
        ([*SHARDWISE, "launch", "--slurm", "partition=nope", "script.py"], "invalid partition specified: nope"),
        ([*SHARDWISE, "launch", "--slurm", "timm=5", "script.py"], "unrecognized option '--timm=5'"),
        ([*SHARDWISE, "launch", "--slurm", "--nnodes", "3", "script.py"], "[launch.slurm-never-starts]"),
        ([*SHARDWISE, "launch", "--slurm", "gpus-per-node=9", "script.py"], "[launch.slurm-never-starts]"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(cluster, folder, argv, expected):
    done = cluster.run(argv, cwd=folder, check=False)
    assert done.returncode == 2
    messages = {line for line in done.stderr.splitlines() if not line.startswith("srun: ")}
    assert len(messages) == 1, done.stderr  # the same by every task
    assert expected in messages.pop()
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


@pytest.mark.prove
def test_bare_tasks_join_on_one_node_and_on_two(cluster, folder):
    line = re.search(r"^srun .*ddp_mnist.py$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)[0]
    assert line == "srun --gpus=4 --ntasks=4 python 01-ddp-basics/ddp_mnist.py"
    argv = shlex.split(line.replace("=4", "=2").replace("python", sys.executable))
    small = ["--data", "nowhere", "--limit", "300", "--epochs", "1"]
    done = cluster.run([*argv, *small], cwd=EXAMPLES, timeout=120)
    assert "world size 2" in done.stdout
    done = cluster.run(["srun", "-N2", "--ntasks-per-node=1", sys.executable, "world.py"], cwd=folder)
    assert sums(done.stdout) == ["sum 2 from rank 0 on node 0 gpu ", "sum 2 from rank 1 on node 1 gpu "]


@pytest.mark.prove
@pytest.mark.parametrize("asked", [["--gpus-per-task=1"], ["--gpus=2"], ["--gpus=2", "--gpu-bind=single:1"]])
def test_each_task_takes_its_own_gpu_however_slurm_shows_them(cluster, folder, asked):
    done = cluster.run(["srun", "--nodes=1", "--ntasks=2", *asked, sys.executable, "world.py"], cwd=folder)
    assert sums(done.stdout) == [f"sum 2 from rank {rank} on node 0 gpu {rank}" for rank in range(2)]


@pytest.mark.prove
def test_script_made_by_slurm_option_runs_on_all_nodes(cluster, folder):
    job, run = submit(cluster, folder, "launch", "--slurm", "time=5", "--nnodes=2", "--nproc=2", "script.py")
    cluster.wait(job, "COMPLETED")
    assert sums((run / f"slurm-{job}.out").read_text()) == on_both(4)
    assert (run / "job.sbatch").read_text().startswith("#!/bin/bash\n#SBATCH")
    assert "SHARDWISE_SECRET" not in (run / "environment.json").read_text()


@pytest.mark.prove
@pytest.mark.parametrize("shell", [[], ["srun", "--nodes=1", "--ntasks=1"]], ids=["salloc", "shell on a node"])
def test_inside_an_allocation_it_runs_there(cluster, folder, shell):
    argv = [*SHARDWISE, "launch", "--slurm", "--nproc=2", "script.py"]
    done = cluster.run(["salloc", "-N2", *shell, *argv], cwd=folder)
    assert sums(done.stdout) == on_both(4)


@pytest.mark.prove
def test_requeued_training_resumes_from_its_checkpoint(cluster, folder):
    argv = ["train", "job.py", "--slurm", "time=5", "--nnodes=2", "--nproc=1"]
    job, run = submit(cluster, folder, *argv)
    until(lambda: steps_of(run))
    # What SLURM sends itself, at the time that --signal names.
    cluster.run(["scancel", "--batch", "--signal=USR1", job])
    cluster.start_again_soon(job)
    cluster.wait(job, "COMPLETED")
    assert [path.name for path in (folder / "runs").iterdir()] == [run.name]
    notes = [event["text"] for event in events_of(run) if event["kind"] == "note"]
    resumed = [int(re.search(r"at step (\d+)", text)[1]) for text in notes if text.startswith("resumed from")]
    assert len(resumed) == 1
    assert 0 < resumed[0] < 40
    assert json.loads((run / "report.json").read_text())["result"]["steps"] == 40
    assert "stopped and saved" in (run / f"slurm-{job}.out").read_text()


@pytest.mark.prove
@pytest.mark.parametrize("delay_s", [0.3, 1.0, 2.0])
def test_training_is_requeued_also_when_the_signal_comes_before_its_first_step(cluster, folder, delay_s):
    job, run = submit(cluster, folder, "train", "job.py", "--slurm", "time=5", "--nnodes=2", "--nproc=1")
    until(lambda: output_of(run, job))  # srun's own first lines
    time.sleep(delay_s)
    cluster.run(["scancel", "--batch", "--signal=USR1", job])
    assert cluster.wait(job, "PENDING", "FAILED", "COMPLETED") == "PENDING"


@pytest.mark.prove
def test_elastic_job_outlives_a_node(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    with slurm.cluster(2, shared=tmp_path) as cluster:
        argv = ["train", "job.py", "--slurm", "time=5", "--nnodes=1:2", "--nproc=1", "--save-every=2"]
        job, run = submit(cluster, tmp_path, *argv)
        until((run / "checkpoints" / "latest").exists)  # one is published
        cluster.nodes[1].power_off()
        cluster.wait(job, "COMPLETED", timeout=120)
        output = (run / f"slurm-{job}.out").read_text()
    assert "node 1 (host1) is lost" in output
    assert "resumed from" in output
    assert json.loads((run / "report.json").read_text())["result"]["steps"] == 40


@pytest.mark.prove
def test_job_that_saves_nothing_is_not_requeued(cluster, folder):
    job, run = submit(cluster, folder, "launch", "--slurm", "time=5", "--nnodes=2", "script.py", "wait")
    until(lambda: sums(output_of(run, job)))
    cluster.run(["scancel", "--batch", "--signal=USR1", job])
    assert cluster.wait(job, "FAILED", "PENDING", "COMPLETED") == "FAILED"


@pytest.mark.prove
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_killed_task_is_named_and_nothing_is_left(cluster, folder, victim):
    with (folder / "out").open("w") as out:
        task = cluster.popen([*AGENTS, "launch", "script.py", "wait"], cwd=folder, stdout=out, stderr=out)
    until(lambda: len(sums((folder / "out").read_text())) == 2 and (folder / "rank1.pid").exists())
    processes = cluster.nodes[1].processes()
    launchers = [pid for pid, command in processes.items() if "shardwise launch" in command]
    pid = min(launchers) if victim == "launcher" else rank_of(folder, processes)
    started = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert task.wait(30) != 0
    assert time.monotonic() - started < 15
    output = (folder / "out").read_text()
    assert ("rank 1" if victim == "rank" else "node 1") in output
    assert "SIGKILL" in output or victim == "launcher"
    until(lambda: not cluster.left_on_nodes(), timeout=10)


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Debian's openmpi-bin")
def test_ranks_of_mpirun_join_on_one_node_and_on_two(cluster, folder):
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "world.py"]
    done = cluster.run(mpirun, cwd=folder)
    assert sums(done.stdout) == [f"sum 2 from rank {rank} on node 0 gpu " for rank in range(2)]
    done = cluster.run(["salloc", "-N2", "--ntasks-per-node=1", *mpirun], cwd=folder)
    assert sums(done.stdout) == [f"sum 2 from rank {rank} on node {rank} gpu " for rank in range(2)]


def events_of(run):
    path = run / "events" / "rank0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(run):
    return [event for event in events_of(run) if event["kind"] == "steps"]


def output_of(run, job):
    path = run / f"slurm-{job}.out"
    return path.read_text() if path.exists() else ""


def rank_of(folder, processes):
    """Return the process of rank 1 as this side counts, which wrote down the number it has on its node."""
    number = (folder / "rank1.pid").read_text()
    return next(pid for pid in processes if re.search(rf"^NSpid:.*\t{number}$", status_of(pid), re.MULTILINE))


def status_of(pid):
    return Path(f"/proc/{pid}/status").read_text()
