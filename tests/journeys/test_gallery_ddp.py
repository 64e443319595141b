"""Chapter 1 of the gallery and the guide: the commands of both READMEs run, with less data and fewer processes."""

import gzip
import importlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "examples"
CHAPTER = GUIDE / "01-ddp-basics"
DIGITS = ROOT / "src/shardwise/data/files/digits"

MARKDOWN = re.MULTILINE | re.DOTALL

SMALL = "--data nowhere --limit 300"
"""Options that make a run quick: the packaged digits, and few of them."""


def commands(folder: Path) -> list[str]:
    """Return the commands of a README's bash blocks, comments left out."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (folder / "README.md").read_text(), MARKDOWN)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def command(folder: Path, *parts: str) -> str:
    """Return the one command of a README that has all `parts`, for two processes."""
    found = [line for line in commands(folder) if all(part in line for part in parts)]
    assert len(found) == 1, f"{parts} should name one command of {folder / 'README.md'}, not {found}"
    return re.sub(r"--nproc_per_node=\d+", "--nproc_per_node=2", found[0])


def start(line: str, folder: Path, **variables: str) -> subprocess.Popen:
    bin_folder = Path(sys.executable).parent
    environment = os.environ | {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "PET_LOCAL_ADDR": "127.0.0.1",  # torchrun's --local_addr: the two nodes of a test are this machine
    }
    return subprocess.Popen(
        ["bash", "-c", line],
        cwd=folder,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, seconds: float = 60) -> str:
    """Wait for the end and return what was printed; leave no process behind if it takes too long."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        stop(process)
        pytest.fail(f"{process.args[-1]} still ran after {seconds} s:\n{process.communicate(timeout=10)[0]}")
    finally:
        stop(process)
    assert process.returncode == 0, output
    return output


def stop(process: subprocess.Popen) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):  # torchrun ends its workers when asked to, not when killed
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue


def run(line: str, folder: Path, **variables: str) -> str:
    return finish(start(line, folder, **variables))


def run_together(*processes: subprocess.Popen) -> str:
    """Wait for processes that need each other, and return all they printed."""
    try:
        return "".join(finish(process) for process in processes)
    finally:
        for process in processes:
            stop(process)


def on_this_machine(line: str, port: int) -> str:
    """Turn one node's command into one with a single process that meets the others here."""
    line = re.sub(r"--nproc_per_node=\d+", "--nproc_per_node=1", line)
    return line.replace("10.0.0.1", "127.0.0.1").replace("29500", str(port))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def accuracy(output: str) -> float:
    return float(re.findall(r"test accuracy ([\d.]+)%", output)[-1])


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def epochs(output: str) -> list[str]:
    return re.findall(r"^epoch .*", output, re.MULTILINE)


@pytest.mark.slow
def test_train_ddp_reads_idx_files_and_counts_each_test_sample_once(tmp_path):
    for packed in DIGITS.glob("*.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    line = command(CHAPTER, "torchrun", "train_ddp.py", "--epochs 3", "--batch-size 128", "--lr 0.001")
    output = run(f"{line} --data {tmp_path}", CHAPTER)
    assert len(epochs(output)) == 3
    assert accuracy(output) > 80
    # 359 samples on two ranks: a padding sampler would have counted 360.
    assert accuracy(output) in [round(100 * right / 359, 2) for right in range(360)]


@pytest.mark.slow
def test_ddp_mnist_under_torchrun_says_that_digits_stand_in_for_mnist():
    output = run(f"{command(GUIDE, 'torchrun', 'ddp_mnist.py')} --data nowhere", GUIDE)
    assert "no MNIST in nowhere" in output
    assert "world size 2" in output
    assert accuracy(output) > 85


def test_ddp_mnist_runs_alone():
    output = run(f"{command(CHAPTER, 'python ddp_mnist.py')} {SMALL}", CHAPTER)
    assert "world size 1" in output
    assert len(epochs(output)) == 3


@pytest.mark.parametrize("script", ["train_ddp.py", "ddp_training.py"])
def test_plain_scripts_without_torchrun_say_what_to_type(script):
    process = start(f"python {script}", CHAPTER)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.splitlines()[-1].startswith(f"start it by torchrun --nproc_per_node=2 {script}")


def test_ddp_mnist_runs_under_bare_srun():
    line = command(GUIDE, "srun", "ddp_mnist.py").partition("--ntasks=4 ")[2]
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    tasks = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    output = run_together(
        *(
            start(f"{line} {SMALL}", GUIDE, **job, **tasks, SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0")
            for rank in ("0", "1")
        )
    )
    assert "world size 2" in output


@pytest.mark.slow
def test_train_byt5_ddp_lowers_its_loss():
    output = run(f"{command(CHAPTER, '--nproc_per_node=2 train_byt5_ddp.py')} --steps 20 --report 5", CHAPTER)
    assert losses(output)[-1] < losses(output)[0] - 1


@pytest.mark.slow
def test_train_byt5_ddp_meets_over_c10d():
    line = on_this_machine(command(CHAPTER, "--rdzv_backend=c10d", "train_byt5_ddp.py"), free_port())
    node = f"{line} --steps 4 --report 4"
    output = run_together(start(node, CHAPTER), start(node, CHAPTER))
    assert output.count("step 4 of 4: loss") == 1  # one rank 0, so one world


def test_train_byt5_ddp_without_transformers_names_the_pip_line(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError")
    process = start("python train_byt5_ddp.py", CHAPTER, PYTHONPATH=str(tmp_path))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.splitlines()[-1] == "train_byt5_ddp.py needs transformers: pip install transformers"


@pytest.mark.slow
def test_ddp_training_resumes_to_the_numbers_of_an_uninterrupted_run(tmp_path):
    options = f"{SMALL} --batch-size 24 --checkpoint {tmp_path}"  # 7 batches a rank: windows of 4 and 3
    first = run(f"{command(CHAPTER, '--epochs 1 --accumulate 4')} {options}/a.pt", CHAPTER)
    resumed = run(f"{command(CHAPTER, '--resume')} {options}/a.pt", CHAPTER)
    spawned = run(f"{command(CHAPTER, '--spawn 2')} --epochs 2 --accumulate 4 {options}/b.pt", CHAPTER)
    assert "resumed" in resumed
    assert [line.split(":")[1] for line in epochs(first) + epochs(resumed)] == [
        line.split(":")[1] for line in epochs(spawned)
    ]


def test_ddp_training_steps_on_a_window_of_uneven_batches_as_on_one_batch(monkeypatch):
    import torch
    import torch.distributed as dist

    monkeypatch.syspath_prepend(CHAPTER)
    ddp_training = importlib.import_module("ddp_training")
    images, labels = torch.randn(10, 4), torch.arange(10)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        one, many = (linear_training(ddp_training) for _ in range(2))
        ddp_training.optimizer_step(one, [(images, labels)], clip=1e9)
        window = list(zip(images.split([5, 4, 1]), labels.split([5, 4, 1]), strict=True))
        ddp_training.optimizer_step(many, window, clip=1e9)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(one.model.module.weight, many.model.module.weight)


def linear_training(ddp_training):
    import torch

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # Adam's first step would not see a wrong scale
    return ddp_training.Training(
        device=torch.device("cpu"),
        dtype=torch.float32,
        model=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.ConstantLR(optimizer),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
    )


@pytest.mark.slow
def test_ddp_training_runs_on_two_nodes(tmp_path):
    port = free_port()
    nodes = [on_this_machine(command(GUIDE, f"--node_rank={node}", "ddp_training.py"), port) for node in (0, 1)]
    options = f"{SMALL} --epochs 1 --checkpoint {tmp_path}/c.pt"
    output = run_together(*(start(f"{node} {options}", GUIDE) for node in nodes))
    assert "world size 2" in output
    assert len(epochs(output)) == 1


@pytest.mark.slow
def test_launch_ddp_falls_back_to_two_cpu_processes():
    line = command(CHAPTER, "./launch_ddp.sh")
    output = run(f"{line} {SMALL} --epochs 1", CHAPTER)
    assert "world size 2, on cpu" in output


def test_launch_multinode_ddp_prints_lines_that_torchrun_accepts():
    from torch.distributed.run import parse_args

    printed = run(command(CHAPTER, "./launch_multinode_ddp.sh"), CHAPTER, NNODES="3", MASTER_ADDR="node0")
    lines = [parse_args(shlex.split(line)[1:]) for line in printed.splitlines() if line.startswith("torchrun")]
    *static, c10d = lines
    assert [(line.nnodes, line.node_rank, line.master_addr) for line in static] == [
        ("3", rank, "node0") for rank in (0, 1, 2)
    ]
    assert (c10d.nnodes, c10d.rdzv_backend, c10d.rdzv_endpoint) == ("3", "c10d", "node0:29500")
    assert {line.training_script for line in lines} == {"train_ddp.py"}


def test_launch_scripts_are_executable():
    assert all(shutil.which(script) for script in CHAPTER.glob("*.sh"))


def test_prerequisites_command_says_what_this_machine_has():
    assert re.search(r"GPUs: \d+ {2}NCCL: (True|False)", run(command(GUIDE, "is_nccl_available"), GUIDE))


def test_quoted_code_is_the_files_own_text():
    quotes = [
        quote
        for folder in (GUIDE, CHAPTER)
        for quote in re.findall(
            r"<!-- quote: (\S+) (\S+) -->\n```python\n(.*?)```\n<!-- end quote -->",
            (folder / "README.md").read_text(),
            MARKDOWN,
        )
    ]
    assert len(quotes) == 2
    for path, marker, shown in quotes:
        [block] = re.findall(rf"^ *# <{marker}>\n(.*?)^ *# </{marker}>", (ROOT / path).read_text(), MARKDOWN)
        assert textwrap.dedent(block) == shown


def test_every_launcher_and_script_of_the_readmes_is_run_here():
    lines = [shlex.split(line) for line in commands(GUIDE) + commands(CHAPTER)]
    pairs = {(line[0], *(Path(word).name for word in line[1:] if word.endswith(".py"))) for line in lines}
    assert pairs == {
        ("torchrun", "train_ddp.py"),
        ("torchrun", "ddp_mnist.py"),
        ("python", "ddp_mnist.py"),
        ("srun", "ddp_mnist.py"),
        ("torchrun", "train_byt5_ddp.py"),
        ("torchrun", "ddp_training.py"),
        ("python", "ddp_training.py"),
        ("./launch_ddp.sh", "ddp_mnist.py"),
        ("./launch_multinode_ddp.sh",),
        ("python",),  # -c: what this machine has
        ("shardwise", "digits.py"),  # make demo, and the journeys of train
    }
