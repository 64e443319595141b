"""Chapter 1 of the gallery and the guide: the commands of both READMEs run, with less data and fewer processes."""

import argparse
import copy
import gzip
import importlib
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw
from e2e.gallery import EXAMPLES, FORKED, ROOT, Chapter, finish, losses, stop
from e2e.processes import wait_for
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
    """Turn one node's command into one with a single process that joins the others here."""
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


@pytest.mark.slow
def test_train_ddp_trains_a_resnet50(tmp_path, launched):
    [line] = launched([command(CHAPTER, "train_ddp.py", "--model resnet50")])
    if line.startswith(FORKED):
        line = f"{line} --limit 64 --epochs 1"
    output = CHAPTER.run(f"{line} --data nowhere", tmp_path)
    found = losses(output)
    assert all(0 < loss < 10 for loss in found)
    if not line.startswith(FORKED):
        assert found == sorted(found, reverse=True)
        assert accuracy(output) > 50


def test_the_resnet50_of_the_gallery_has_the_parameters_of_shardwises(monkeypatch):
    monkeypatch.syspath_prepend(CHAPTER.folder)
    ours = sw.models.resnet50(num_classes=1000, in_channels=3)
    theirs = importlib.import_module("resnet").resnet50(1000, 3)
    shapes = [sorted(tuple(each.shape) for each in model.parameters()) for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


@pytest.mark.prove
def test_ddp_mnist_under_torchrun_reports_that_digits_replace_mnist():
    output = GUIDE.run(f"{command(GUIDE, 'torchrun', 'ddp_mnist.py')} --data nowhere")
    assert "no MNIST in nowhere" in output
    assert "world size 2" in output
    assert accuracy(output) > 85


def test_ddp_mnist_runs_alone():
    [line] = [line for line in CHAPTER.commands("ddp_mnist.py") if line.startswith("python")]
    output = CHAPTER.run(f"{FORKED}{line} {SMALL}")
    assert "world size 1" in output
    assert len(epochs(output)) == 3


@pytest.mark.prove
def test_ranks_start_without_a_launcher_by_the_variables_that_the_page_sets():
    [line] = re.findall(r"`(RANK=0 LOCAL_RANK=0 .*? python train_ddp.py)`", CHAPTER.readme)
    line = f"{line.replace('29500', str(free_port()))} --epochs 1 {SMALL}"
    ranks = [CHAPTER.start(line), CHAPTER.start(line.replace("RANK=0", "RANK=1"))]
    assert accuracy(run_together(*ranks)) > 10


@pytest.mark.representative("train_ddp.py")
@pytest.mark.parametrize("script", ["train_ddp.py", "ddp_training.py"])
def test_plain_scripts_without_torchrun_name_the_command(script):
    done = CHAPTER.fork(f"python {script}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"start it by torchrun --nproc_per_node=2 {script}")


@pytest.mark.prove
def test_ddp_mnist_runs_with_the_variables_of_a_preset():
    line = command(GUIDE, "--preset workstation", "ddp_mnist.py")
    assert "world size 2" in GUIDE.run(f"{line} {SMALL}")


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
@pytest.mark.parametrize(
    "parts", [("--rdzv_id=100", "--rdzv_id=100"), ("--node_rank=0 --rdzv", "--node_rank=1 --rdzv")]
)
def test_train_byt5_ddp_joins_by_c10d_rendezvous(parts):
    port = free_port()
    nodes = [
        on_this_machine(command(CHAPTER, part, "--rdzv_backend=c10d", "train_byt5_ddp.py"), port) for part in parts
    ]
    output = run_together(*(CHAPTER.start(f"{node} --steps 4 --report 4") for node in nodes))
    assert output.count("step 4 of 4: loss") == 1  # one rank 0, so one world
    ignored = "node_rank is only used for static rdzv_backend"  # of node 1: 0 is torchrun's default
    assert output.count(ignored) == sum("node_rank=1" in node for node in nodes)


def test_train_byt5_ddp_without_transformers_names_the_pip_line(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError")
    done = CHAPTER.fork("python train_byt5_ddp.py", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "train_byt5_ddp.py needs transformers: pip install transformers"


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


DDP_OPTIONS = {
    "lr": 0.01,
    "precision": "fp32",
    "batch_size": 8,
    "accumulate": 2,
    "clip": 1.0,
    "epochs": 2,
    "seed": 0,
    "workers": 0,
    "save_every": None,
}


@pytest.fixture
def ddp_training(monkeypatch):
    """The template, with a network that drops out units, and its options without a command line."""
    from torch import nn

    monkeypatch.syspath_prepend(CHAPTER.folder)
    module = importlib.import_module("ddp_training")
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    monkeypatch.setattr(module, "build_model", lambda: copy.deepcopy(network))
    return module


class StopAfter:
    """A stop signal that this process sends to itself after some steps, on rank 1 alone."""

    def __init__(self, ddp_training, steps):
        self.signal, self.steps = ddp_training.StopSignal(), steps

    def on_any_rank(self):
        import torch.distributed as dist

        self.steps -= 1
        if self.steps == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.signal.on_any_rank()


def train_template(ddp_training, device, path, stop_after=0, *, resume=False, **changes):
    """Train the template on this rank; return a mask that it drew first, and its weights."""
    import torch

    options = argparse.Namespace(**(DDP_OPTIONS | changes), checkpoint=path)
    data = importlib.import_module("idx_data").load_images("nowhere", limit=96)
    training = ddp_training.build(options, device)
    mask = training.model.module[1](torch.ones(64))
    progress = ddp_training.resume(training, options) if resume else ddp_training.Progress()
    ddp_training.train(training, data, options, progress, StopAfter(ddp_training, stop_after))
    torch.distributed.barrier()  # the file is there
    return mask, training.model.module[2].weight.detach().clone()


def test_ddp_training_stopped_by_a_signal_to_one_rank_resumes_to_the_same_weights(ddp_training, tmp_path, capfd):
    import torch

    def body(world):
        mask, whole = train_template(ddp_training, world.device, tmp_path / "whole.pt")
        train_template(ddp_training, world.device, tmp_path / "parts.pt", stop_after=4)  # of 3 steps an epoch
        state = torch.load(tmp_path / "parts.pt", weights_only=True)
        _, resumed = train_template(ddp_training, world.device, tmp_path / "parts.pt", resume=True, workers=1)
        return mask, whole, resumed, state["progress"]

    (first, whole, resumed, progress), (second, *_) = run_ranks(body, 2)
    assert not torch.equal(first, second)  # each rank draws masks of its own
    assert (progress["epoch"], progress["samples"]) == (1, 32)  # a step of 8 samples x 2 accumulated x 2 ranks
    assert torch.equal(resumed, whole)
    lines = epochs(capfd.readouterr().out)
    assert [lines[0], lines[1]] == [lines[2], lines[3]]  # printed by the whole run, then by the two parts


def test_ddp_training_killed_within_an_epoch_resumes_from_its_last_checkpoint(ddp_training, tmp_path, monkeypatch):
    import torch

    positions, write = [], ddp_training.write

    def write_each(state, path):
        positions.append(state["progress"]["samples"])
        write(state, path.with_name(f"{path.name}-{len(positions)}"))

    monkeypatch.setattr(ddp_training, "write", write_each)

    def body(world):
        _, whole = train_template(ddp_training, world.device, tmp_path / "c", epochs=1, save_every=2)
        _, resumed = train_template(ddp_training, world.device, tmp_path / "c-1", epochs=1, resume=True)
        return whole, resumed, positions

    (whole, resumed, positions), _ = run_ranks(body, 2)
    assert positions[:2] == [64, 0]  # after two of three steps, and after the epoch
    assert torch.equal(resumed, whole)


def test_options_of_ddp_training_do_what_their_help_describes(ddp_training, tmp_path):
    import torch

    def weights_with(world, **changes):
        return train_template(ddp_training, world.device, tmp_path / "c.pt", **({"epochs": 1} | changes))[1]

    def body(world):
        usual = weights_with(world)
        changed = [
            {"lr": 0.02},
            {"clip": 1e-3},
            {"precision": "bf16"},
            {"precision": "fp16"},
            {"seed": 1},
            {"batch_size": 4},
            {"accumulate": 1},
        ]
        with pytest.raises(SystemExit):
            train_template(ddp_training, world.device, tmp_path / "c.pt", seed=5, resume=True)
        return [not torch.equal(usual, weights_with(world, **change)) for change in changed]

    assert run_ranks(body, 2)[0] == [True] * 7


def test_every_option_of_ddp_training_is_tested_here(ddp_training, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ddp_training.py"])
    by_commands = {"checkpoint", "resume", "data", "limit", "spawn"}  # SMALL, and the commands of the README
    assert set(vars(ddp_training.parse_options())) == set(DDP_OPTIONS) | by_commands


@pytest.mark.prove
@pytest.mark.parametrize("starter", ["torchrun --nproc_per_node=2 ddp_training.py", "python ddp_training.py --spawn 2"])
def test_ddp_training_saves_and_ends_when_its_starter_is_asked_to(starter, tmp_path):
    line = f"exec {starter} {SMALL} --epochs 200 --batch-size 8 --checkpoint {tmp_path}/c.pt"
    process = CHAPTER.start(line, tmp_path)
    wait_for((tmp_path / "c.pt").exists, seconds=120)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert "stopped in epoch" in output
    resumed = CHAPTER.run(f"{starter} {SMALL} --epochs 1 --checkpoint {tmp_path}/c.pt --resume", tmp_path)
    assert "resumed from" in resumed


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


def test_ddp_training_steps_on_a_window_of_uneven_batches_as_on_one_batch(ddp_training):
    import torch
    import torch.distributed as dist

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


def test_launch_ddp_falls_back_to_two_cpu_processes(tmp_path):
    (tmp_path / "torchrun").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/arguments\n')
    (tmp_path / "torchrun").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    CHAPTER.run(f"{command(CHAPTER, './launch_ddp.sh')} {SMALL} --epochs 1", PATH=path)
    arguments = (tmp_path / "arguments").read_text().splitlines()
    done = CHAPTER.fork(shlex.join(["shardwise", "launch", "--run-dir", str(tmp_path / "run"), *arguments]))
    assert "world size 2, on cpu" in done.stdout


@pytest.mark.prove
def test_launch_ddp_starts_torchrun():
    output = CHAPTER.run(f"{command(CHAPTER, './launch_ddp.sh')} {SMALL} --epochs 1")
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


@pytest.mark.slow
def test_every_init_method_and_every_option_of_ddp_prints_what_the_readme_shows(tmp_path, launched):
    lines = [command(CHAPTER, "torchrun", script) for script in ("init_methods.py", "ddp_options.py")]
    for line in launched(lines):
        output = CHAPTER.run(line, tmp_path)
        printed = [each for each in output.splitlines() if re.match(r"(?!built)[a-z_]+ +\S", each)]
        assert ("built gloo True, nccl " in output) == ("init_methods" in line)
        expected = 8 if "init_methods" in line else 9
        assert len([each for each in printed if each in CHAPTER.readme]) == expected, printed


def test_the_tables_have_every_parameter_of_init_process_group_and_every_option_of_ddp(monkeypatch):
    import torch.distributed as dist

    parameters = [name for name in inspect.signature(dist.init_process_group).parameters if not name.startswith("_")]
    assert [name for name in parameters if f"| `{name}` |" not in CHAPTER.readme] == []
    monkeypatch.syspath_prepend(CHAPTER.folder)
    shown = set(importlib.import_module("ddp_options").OPTIONS)
    named = "bucket_cap_mb find_unused_parameters gradient_as_bucket_view static_graph broadcast_buffers process_group"
    sampler = {"drop_last", "set_epoch"}
    assert {*named.split(), "device_ids", *sampler} == shown  # the guide's list; module is what is wrapped


@pytest.mark.prove
def test_the_job_of_the_chapter_trains(tmp_path):
    line = command(CHAPTER, "shardwise train digits_job.py")
    assert accuracy(CHAPTER.run(line, tmp_path).replace("test accuracy   ", "test accuracy ")) > 85


@pytest.mark.prove
def test_ddp_training_takes_all_its_options_together(tmp_path, launched):
    [line] = launched([command(CHAPTER, "--save-every 5")])
    assert len(epochs(CHAPTER.run(f"{line} {SMALL} --lr 0.002 --clip 0.5 --precision bf16", tmp_path))) == 3


def test_launch_scripts_are_executable():
    assert all(shutil.which(script) for script in CHAPTER.folder.glob("*.sh"))


def test_prerequisites_command_lists_what_this_machine_has():
    assert re.search(r"GPUs: \d+ {2}NCCL: (True|False)", GUIDE.run(FORKED + command(GUIDE, "is_nccl_available")))


def test_every_launcher_and_script_of_the_readmes_is_run_here():
    lines = [shlex.split(line) for line in GUIDE.commands() + CHAPTER.commands()]
    pairs = {(line[0], *(Path(argument).name for argument in line[1:] if argument.endswith(".py"))) for line in lines}
    assert pairs == {
        ("torchrun", "train_ddp.py"),
        ("torchrun", "ddp_mnist.py"),
        ("python", "ddp_mnist.py"),
        ("srun", "ddp_mnist.py"),
        ("torchrun", "train_byt5_ddp.py"),
        ("torchrun", "ddp_training.py"),
        ("python", "ddp_training.py"),
        ("torchrun", "ddp_benchmark.py"),
        ("torchrun", "init_methods.py"),
        ("torchrun", "ddp_options.py"),
        ("./launch_ddp.sh", "ddp_mnist.py"),
        ("./launch_multinode_ddp.sh",),
        ("mpirun", "ddp_mnist.py"),  # test_mpi
        ("./launch_mpi_ddp.sh", "train_ddp.py"),  # test_mpi
        ("python",),  # -c: what this machine has
        ("deepspeed", "deepspeed_train.py"),  # test_gallery_deepspeed
        ("torchrun", "fsdp_transformer.py"),  # test_gallery_course: the matrix
        ("torchrun", "lora_finetune.py"),  # test_gallery_course
        ("shardwise", "hybrid_parallelism.py"),  # test_gallery_course
        ("shardwise", "decoder_job.py"),  # test_gallery_course
        ("torchrun", "distributed_benchmarks.py"),  # test_gallery_nccl, by the command of its chapter
        ("shardwise", "digits.py"),  # make demo, and the e2e tests of train
        ("shardwise", "digits_job.py"),
        ("shardwise", "ddp_mnist.py"),  # launch --preset
        ("shardwise",),  # bench comm --explain and doctor env: their own tests
    }
