"""Bad input gets one sentence naming the value, the fact and the fix; exit code 2; no run directory left."""

import contextlib
import socket

import pytest

from shardwise.cli.main import main

JOB = """
import torch
import shardwise as sw


class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.forgotten = torch.nn.Linear(64, 10), torch.nn.Linear(64, 10)

    def forward(self, images):
        return self.used(images.flatten(1))


def make(**changes):
    fields = dict(
        model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)),
        data=sw.datasets.digits, loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-3),
        batch_size=64, steps=1,
    )
    return sw.Job(**{**fields, **changes})


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: torch.nn.ModuleDict({"up": torch.nn.Linear(64, 96), "down": torch.nn.Linear(96, 64)})
        self.layers, self.head = torch.nn.ModuleList(block() for _ in range(2)), torch.nn.Linear(64, 10)


job = make()
mlp = make(model=MLP)
no_data = make(data=sw.datasets.idx_folder("no/such/folder"))
no_train = make(data=lambda split: None)
no_module = make(model=lambda: 3)
no_weights = make(weights="missing.pt")
unused = make(model=Unused)
frozen = make(model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).requires_grad_(False))
number = 3


def decoder(**changes):
    return make(
        model=lambda: sw.models.decoder("gpt2-tiny", vocab_size=64, **changes),
        loss=sw.losses.token_cross_entropy, batch_size=48,
    )


def shared_layers():
    model = sw.models.decoder("gpt2-tiny", vocab_size=64, tie_head=False)
    model.blocks[-1].mlp.up.weight = model.blocks[0].mlp.up.weight
    return model


untied = decoder(tie_head=False)
shared = make(model=shared_layers, loss=sw.losses.token_cross_entropy, batch_size=48)
"""

QUICK = {
    "typo in a key": (["job.py", "--set", "batchsize=8"], "'batch_size'"),
    "typo in a nested key": (["job.py", "--set", "optimizer.lrr=1"], "'lr'"),
    "key of a section by itself": (["job.py", "--set", "lr=1e-4"], "did you mean 'optimizer.lr'?"),
    "typo in a section": (["job.py", "--set", "optimiser.lr=1"], "did you mean 'optimizer.lr'?"),
    "key as an option": (["job.py", "--lr", "1e-4"], "there is no option --lr: use --set optimizer.lr=VALUE"),
    "option like no other": (["job.py", "--verbosity", "2"], "--verbosity: shardwise train --help lists them"),
    "preset with another number": (["job.py", "--nproc", "2", "--plan", "zero5"], "not a preset, a product or a .toml"),
    "no equals sign": (["job.py", "--set", "batch_size"], "key=value"),
    "batch smaller than the world": (["job.py", "--nproc", "4", "--set", "batch_size=3"], "smaller than the 4 ranks"),
    "batch that does not divide": (["job.py", "--nproc", "3", "--set", "batch_size=64"], "63 or 66"),
    "missing job attribute": (["job.py:jobb"], "did you mean 'job'"),
    "attribute that is no job": (["job.py:number"], "not a Job"),
    "wrong type": (["job.py", "--set", "batch_size=many"], "whole number"),
    "NaN learning rate": (["job.py", "--set", "optimizer.lr=nan"], "finite"),
    "no such file": (["nowhere.py"], "is not there"),
    "job that raises on import": (["raises.py"], "ZeroDivisionError at line 2"),
    "job with a syntax error": (["syntax.py"], "SyntaxError at line 1"),
    "unknown preset": (["job.py", "--plan", "fspd"], "'fsdp'"),
    "sequences cut under a loss by sample": (["job.py", "--nproc", "2", "--plan", "cp"], "counts samples, not tokens"),
    "unknown precision": (["job.py", "--set", "precision.compute=bf61"], "bf16"),
    "plan file that is not there": (["job.py", "--plan", "none.toml"], "cannot be read"),
    "plan file with a typo": (["job.py", "--plan", "typo.toml"], "micro_batch"),
    "run directory in use": (["job.py", "--run-dir", "used"], "not empty"),
    "zero processes": (["job.py", "--nproc", "0"], "nproc"),
    "unknown option": (["job.py", "--nprocs", "2"], "--nproc"),
    "rule that keeps nothing": (["job.py", "--keep", "0"], "a count (3)"),
    "rule without a unit": (["job.py", "--keep", "3,1.5"], "'1.5', which is no rule"),
    "two counts": (["job.py", "--keep", "3,4"], "says count twice"),
    "no GPU": (["job.py", "--device", "cuda"], "no NVIDIA GPU"),
    "mpi without mpirun": (["job.py", "--nproc", "3", "--backend", "MPI"], "mpirun -n 3 shardwise train"),
    "mpi on GPUs": (["job.py", "--device", "cuda", "--backend", "mpi"], "--backend mpi carries tensors of the CPU"),
}

STRATEGIES = {
    "tp that does not divide the heads": (["job.py:untied", "--nproc", "3", "--plan", "tp"], "use tp 1, 2 or 4"),
    "tp without rules": (
        ["job.py", "--nproc", "2", "--plan", "tp"],
        'give Job(tensor_rules={"1": "column_gathered"}), have them proposed (shardwise verify job.py --propose-rules)',
    ),
    "tp without rules for a pair": (
        ["job.py:mlp", "--nproc", "2", "--plan", "tp"],
        '{"layers.*.up": "column", "layers.*.down": "row"}), have them proposed (shardwise verify job.py:mlp --pro',
    ),
    "pp beyond the layers": (["job.py:untied", "--nproc", "4", "--plan", "pp"], "use pp = 2"),
    "pp of a model without layers": (["job.py", "--nproc", "2", "--plan", "pp"], "repeated blocks"),
    "pp of layers that share a weight": (
        ["job.py:shared", "--nproc", "2", "--plan", "pp"],
        "blocks.0.mlp.up.weight and blocks.1.mlp.up.weight are one parameter",
    ),
    "pp with too few micro-batches": (
        ["job.py:untied", "--nproc", "2", "--plan", "pp", "--set", "accumulation=1"],
        "use accumulation = 2",
    ),
    "pp split that does not rise": (
        ["job.py:untied", "--nproc", "2", "--plan", "pp", "--set", "pipeline.split=[5]"],
        "split = [1]",
    ),
    "pp split that is no list": (
        ["job.py:untied", "--nproc", "2", "--plan", "pp", "--set", "pipeline.split=(5,)"],
        "a list of layers",
    ),
    "batch that micro-batches x replicas do not divide": (
        ["job.py:untied", "--nproc", "4", "--plan", "pp2.replicate2", "--set", "accumulation=5"],
        "40 or 50",
    ),
    "split backward on shards": (
        ["job.py:untied", "--nproc", "4", "--plan", "pp2.shard2", "--set", "pipeline.schedule=zbv"],
        "trains wrongly",
    ),
    "fp16 on fp64 weights": (
        [
            "job.py",
            *(word for key in ("parameter", "optimizer", "reduce") for word in ("--set", f"precision.{key}=fp64")),
            *("--set", "precision.compute=fp16"),
        ],
        "compute in fp64",
    ),
    "sequence parallel without tp": (["job.py", "--set", "sequence_parallel=true"], "use tp 2"),
    "zero without shards": (["job.py", "--nproc", "2", "--plan", "ddp", "--set", "zero=2"], "shard is above 1"),
    "product for another world": (["job.py", "--nproc", "2", "--plan", "shard2.tp2"], "needs 4 ranks"),
    "offload without shards": (
        ["job.py", "--nproc", "2", "--plan", "ddp", "--set", "offload.parameters=cpu"],
        "use zero3",
    ),
    "compression without buckets": (
        ["job.py", "--nproc", "2", "--plan", "zero3", "--set", "communication.compression=bf16"],
        "use --plan ddp",
    ),
}

IN_THE_RANKS = {
    "unreadable data folder": (["job.py:no_data"], "no/such/folder"),
    "no training data": (["job.py:no_train"], "no dataset for split 'train'"),
    "model that is no module": (["job.py:no_module"], "torch.nn.Module"),
    "weights that are not there": (["job.py:no_weights"], "missing.pt"),
    "metric that is not measured": (["job.py", "--keep", "max:accuracy"], "'accuracy' is to stay"),
    "nothing to train": (["job.py:frozen"], "no trainable parameter"),
    "unknown backend": (["job.py", "--backend", "glooo"], "'gloo'"),
    "backend this torch lacks": (["job.py", "--backend", "ucc"], "USE_UCC=1"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "raises.py").write_text("x = 1\ny = 1 / 0")
    (tmp_path / "syntax.py").write_text("def f(:")
    (tmp_path / "typo.toml").write_text("version = 1\nmicro_bach = 2")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "something").write_text("")
    return tmp_path


def check(folder, capfd, arguments, word):
    before = {path for path in folder.rglob("*") if "__pycache__" not in path.parts}
    code = main(arguments)
    captured = capfd.readouterr()
    assert code == 2, captured.err
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("shardwise: ")
    assert word in lines[0]
    assert {path for path in folder.rglob("*") if "__pycache__" not in path.parts} == before


@pytest.mark.parametrize(("arguments", "word"), (QUICK | STRATEGIES).values(), ids=QUICK | STRATEGIES)
def test_refused_before_any_process_starts(folder, capfd, arguments, word):
    check(folder, capfd, ["train", *arguments], word)


@pytest.mark.parametrize(("arguments", "word"), IN_THE_RANKS.values(), ids=IN_THE_RANKS)
def test_refused_by_the_ranks_before_the_first_step(folder, capfd, arguments, word):
    check(folder, capfd, ["train", *arguments], word)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["trian"], "'train'"), (["doctor", "job.py"], "no part 'job.py'"), (["--verbose"], "--verbose")],
)
def test_refused_by_the_command_line(folder, capfd, arguments, word):
    check(folder, capfd, arguments, word)


@pytest.mark.parametrize("verb", [[], ["watch"], ["plan"], ["checkpoint", "convert"]])
def test_a_command_without_arguments_prints_its_help_in_lines(capfd, verb):
    assert main(verb) == 2
    shown = capfd.readouterr().err.splitlines()
    assert shown[0].startswith(" ".join(["Usage: shardwise", *verb]))
    assert "Options:" in shown
    assert any(line.endswith("Show this message and exit.") for line in shown)


def test_world_size_without_rank(folder, capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check(folder, capfd, ["train", "job.py"], "WORLD_SIZE=2 is set but RANK is not")


def test_nproc_inside_somebody_elses_world(folder, capfd, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    check(folder, capfd, ["train", "job.py", "--nproc", "2"], "leave --nproc out")


def test_port_in_use(folder, capfd, monkeypatch):
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        check(folder, capfd, ["train", "job.py"], "in use")


def test_parameters_without_gradient_are_named_by_rank(folder, capfd):
    assert main(["train", "job.py:unused", "--nproc", "2"]) == 2
    last_line = capfd.readouterr().err.strip().splitlines()[-1]
    assert "rank 1: forgotten.bias, forgotten.weight" in last_line
    assert "find_unused_parameters=true" in last_line
    assert not (folder / "runs").exists()


def test_debug_shows_the_traceback(folder, capfd):
    assert main(["--debug", "train", "raises.py"]) == 2
    assert "Traceback" in capfd.readouterr().err
