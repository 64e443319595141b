"""Chapter 1 of the gallery and the guide: the commands of both READMEs run, with less data and fewer processes."""

import argparse
import copy
import gzip
import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from e2e.gallery import EXAMPLES, ROOT, Chapter, finish, losses, stop
from env.ports import free_port
from shardwise.testing import run_ranks

pytestmark = pytest.mark.timeout(240)

GUIDE = Chapter(EXAMPLES)
CHAPTER = Chapter(EXAMPLES / "01-ddp-basics")
DIGITS = ROOT / "src/shardwise/data/files/digits"

SMALL = "--data nowhere --limit 300"
"""Options that make a run quick: the packaged digits, and few of them."""


def command(chapter: Chapter, *parts: str) -> str:
    """Return the one command of a README that has all `parts`, for two processes."""
    found = chapter.commands(*parts)
    assert len(found) == 1, f"{parts} should name one command of {chapter.folder / 'README.md'}, not {found}"
    return re.sub(r"--nproc_per_node=\d+", "--nproc_per_node=2", found[0])


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


def accuracy(output: str) -> float:
    return float(re.findall(r"test accuracy ([\d.]+)%", output)[-1])


def epochs(output: str) -> list[str]:
    return re.findall(r"^epoch .*", output, re.MULTILINE)


@pytest.mark.prove
def test_train_ddp_reads_idx_files_and_counts_each_test_sample_once(tmp_path):
    for packed in DIGITS.glob("*.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    line = command(CHAPTER, "torchrun", "train_ddp.py", "--epochs 3", "--batch-size 128", "--lr 0.001")
    output = CHAPTER.run(f"{line} --data {tmp_path}")
    assert len(epochs(output)) == 3
    assert accuracy(output) > 80
    # 359 samples on two ranks: a padding sampler would have counted 360.
    assert accuracy(output) in [round(100 * right / 359, 2) for right in range(360)]


@pytest.mark.prove
def test_ddp_mnist_under_torchrun_says_that_digits_stand_in_for_mnist():
    output = GUIDE.run(f"{command(GUIDE, 'torchrun', 'ddp_mnist.py')} --data nowhere")
    assert "no MNIST in nowhere" in output
    assert "world size 2" in output
    assert accuracy(output) > 85


def test_ddp_mnist_runs_alone():
    [line] = [line for line in CHAPTER.commands("ddp_mnist.py") if line.startswith("python")]
    output = CHAPTER.run(f"{line} {SMALL}")
    assert "world size 1" in output
    assert len(epochs(output)) == 3


@pytest.mark.representative("train_ddp.py")
@pytest.mark.parametrize("script", ["train_ddp.py", "ddp_training.py"])
def test_plain_scripts_without_torchrun_say_what_to_type(script):
    process = CHAPTER.start(f"python {script}")
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 1
    assert output.splitlines()[-1].startswith(f"start it by torchrun --nproc_per_node=2 {script}")


@pytest.mark.prove
def test_ddp_mnist_runs_under_bare_srun():
    line = command(GUIDE, "srun", "ddp_mnist.py").partition("--ntasks=4 ")[2]
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
    tasks = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    output = run_together(
        *(
            GUIDE.start(f"{line} {SMALL}", **job, **tasks, SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0")
            for rank in ("0", "1")
        )
    )
    assert "world size 2" in output


@pytest.mark.prove
def test_train_byt5_ddp_lowers_its_loss(tmp_path, launched):
    [line] = launched([command(CHAPTER, "--nproc_per_node=2 train_byt5_ddp.py")])
    output = CHAPTER.run(f"{line} --steps 20 --report 5", tmp_path)
    assert losses(output)[-1] < losses(output)[0] - 1


@pytest.mark.slow
def test_ddp_benchmark_prints_both_scalings_of_every_world(tmp_path, launched):
    row = re.compile(r"^(strong|weak) +(\d+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)%$", re.MULTILINE)
    worlds = [("strong", "1", "32"), ("strong", "2", "32"), ("weak", "1", "32"), ("weak", "2", "64")]
    assert [found[:3] for found in row.findall(CHAPTER.readme)] == worlds
    [line] = launched([command(CHAPTER, "torchrun", "ddp_benchmark.py")])
    rows = row.findall(CHAPTER.run(f"{line} --steps 1 --batch-size 4", tmp_path))
    assert [found[2] for found in rows] == ["4", "4", "4", "8"]
    for kind, *numbers in rows:
        size, samples, milliseconds, throughput, efficiency = map(float, numbers)
        alone = next(float(found[4]) for found in rows if found[:2] == (kind, "1"))
        assert throughput == pytest.approx(1000 * samples / milliseconds, rel=0.02)
        assert efficiency == pytest.approx(100 * throughput / (size * alone), rel=0.02, abs=0.1)


def test_ddp_benchmark_measures_powers_of_two_and_the_whole_world(monkeypatch):
    monkeypatch.syspath_prepend(CHAPTER.folder)
    world_sizes = importlib.import_module("ddp_benchmark").world_sizes
    assert [world_sizes(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.prove
def test_train_byt5_ddp_meets_over_c10d():
    line = on_this_machine(command(CHAPTER, "--rdzv_backend=c10d", "train_byt5_ddp.py"), free_port())
    node = f"{line} --steps 4 --report 4"
    output = run_together(CHAPTER.start(node), CHAPTER.start(node))
    assert output.count("step 4 of 4: loss") == 1  # one rank 0, so one world


def test_train_byt5_ddp_without_transformers_names_the_pip_line(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError")
    process = CHAPTER.start("python train_byt5_ddp.py", PYTHONPATH=str(tmp_path))
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 1
    assert output.splitlines()[-1] == "train_byt5_ddp.py needs transformers: pip install transformers"


@pytest.mark.prove
def test_ddp_training_resumes_to_the_numbers_of_an_uninterrupted_run(tmp_path, launched):
    options = f"{SMALL} --batch-size 24 --checkpoint {tmp_path}"  # 7 batches a rank: windows of 4 and 3
    lines = launched(command(CHAPTER, *parts) for parts in (["--epochs 1 --accumulate 4"], ["--resume"]))
    first, resumed = (CHAPTER.run(f"{line} {options}/a.pt", tmp_path) for line in lines)
    spawned = CHAPTER.run(f"{command(CHAPTER, '--spawn 2')} --epochs 2 --accumulate 4 {options}/b.pt")
    assert "resumed" in resumed
    assert [line.split(":")[1] for line in epochs(first) + epochs(resumed)] == [
        line.split(":")[1] for line in epochs(spawned)
    ]


def test_ddp_training_with_dropout_draws_masks_by_rank_and_resumes_to_the_same_weights(tmp_path, monkeypatch):
    import torch
    from torch import nn

    monkeypatch.syspath_prepend(CHAPTER.folder)
    ddp_training = importlib.import_module("ddp_training")
    dropout = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    monkeypatch.setattr(ddp_training, "build_model", lambda: copy.deepcopy(dropout))
    data = importlib.import_module("idx_data").load_images("nowhere", limit=96)

    def trained(device, name, epochs, *, resume=False):
        options = argparse.Namespace(lr=0.01, precision="fp32", batch_size=16, accumulate=1, clip=1.0, epochs=epochs)
        options.checkpoint = tmp_path / name
        training = ddp_training.build(options, device)
        mask = training.model.module[1](torch.ones(64))
        first_epoch = ddp_training.resume(training, options.checkpoint) if resume else 0
        ddp_training.train(training, data, options, first_epoch)
        return mask, training.model.module[2].weight.detach().clone()

    def body(world):
        mask, whole = trained(world.device, "whole.pt", 2)
        trained(world.device, "parts.pt", 1)
        world.barrier()  # the file is there
        _, resumed = trained(world.device, "parts.pt", 2, resume=True)
        return mask, whole, resumed

    (first, whole, resumed), (second, *_) = run_ranks(body, 2)
    assert not torch.equal(first, second)
    assert torch.equal(resumed, whole)


@pytest.mark.parametrize("images", [8, 28])
def test_gradients_of_the_gallerys_resnet_in_bfloat16_are_those_of_float32(monkeypatch, images):
    import torch

    monkeypatch.syspath_prepend(CHAPTER.folder)
    block = importlib.import_module("resnet").Block(16, 32, 2)
    batch = torch.randn(16, 16, images // 8, images // 8)  # as the last block with a stride gets them, or wider
    found = [weight_gradient(block, batch, torch.bfloat16) for _ in range(3)]
    expected = weight_gradient(block, batch, torch.float32)
    for each in found:
        torch.testing.assert_close(each, expected, rtol=0, atol=0.05 * float(expected.abs().max()))


def weight_gradient(block, batch, dtype):
    import torch

    block.zero_grad()
    for size in (1_000, 5_000, 20_000, 100_000):
        torch.full((size,), float("nan"))  # what is not written afterwards is not right by chance
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        loss = block.residual[0](batch).float().square().sum()
    loss.backward()
    return block.residual[0].weight.grad.clone()


def test_ddp_training_steps_on_a_window_of_uneven_batches_as_on_one_batch(monkeypatch):
    import torch
    import torch.distributed as dist

    monkeypatch.syspath_prepend(CHAPTER.folder)
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


@pytest.mark.prove
def test_ddp_training_runs_on_two_nodes(tmp_path):
    port = free_port()
    nodes = [on_this_machine(command(GUIDE, f"--node_rank={node}", "ddp_training.py"), port) for node in (0, 1)]
    options = f"{SMALL} --epochs 1 --checkpoint {tmp_path}/c.pt"
    output = run_together(*(GUIDE.start(f"{node} {options}") for node in nodes))
    assert "world size 2" in output
    assert len(epochs(output)) == 1


@pytest.mark.slow
def test_launch_ddp_falls_back_to_two_cpu_processes():
    line = command(CHAPTER, "./launch_ddp.sh")
    output = CHAPTER.run(f"{line} {SMALL} --epochs 1")
    assert "world size 2, on cpu" in output


def test_launch_multinode_ddp_prints_lines_that_torchrun_accepts():
    from torch.distributed.run import parse_args

    printed = CHAPTER.run(command(CHAPTER, "./launch_multinode_ddp.sh"), NNODES="3", MASTER_ADDR="node0")
    lines = [parse_args(shlex.split(line)[1:]) for line in printed.splitlines() if line.startswith("torchrun")]
    *static, c10d = lines
    assert [(line.nnodes, line.node_rank, line.master_addr) for line in static] == [
        ("3", rank, "node0") for rank in (0, 1, 2)
    ]
    assert (c10d.nnodes, c10d.rdzv_backend, c10d.rdzv_endpoint) == ("3", "c10d", "node0:29500")
    assert {line.training_script for line in lines} == {"train_ddp.py"}


def test_launch_scripts_are_executable():
    assert all(shutil.which(script) for script in CHAPTER.folder.glob("*.sh"))


def test_prerequisites_command_says_what_this_machine_has():
    assert re.search(r"GPUs: \d+ {2}NCCL: (True|False)", GUIDE.run(command(GUIDE, "is_nccl_available")))


def test_every_launcher_and_script_of_the_readmes_is_run_here():
    lines = [shlex.split(line) for line in GUIDE.commands() + CHAPTER.commands()]
    pairs = {(line[0], *(Path(word).name for word in line[1:] if word.endswith(".py"))) for line in lines}
    assert pairs == {
        ("torchrun", "train_ddp.py"),
        ("torchrun", "ddp_mnist.py"),
        ("python", "ddp_mnist.py"),
        ("srun", "ddp_mnist.py"),
        ("torchrun", "train_byt5_ddp.py"),
        ("torchrun", "ddp_training.py"),
        ("python", "ddp_training.py"),
        ("torchrun", "ddp_benchmark.py"),
        ("./launch_ddp.sh", "ddp_mnist.py"),
        ("./launch_multinode_ddp.sh",),
        ("mpirun", "ddp_mnist.py"),  # test_mpi
        ("./launch_mpi_ddp.sh", "train_ddp.py"),  # test_mpi
        ("python",),  # -c: what this machine has
        ("deepspeed", "deepspeed_train.py"),  # test_gallery_deepspeed
        ("shardwise", "digits.py"),  # make demo, and the journeys of train
    }
