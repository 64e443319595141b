"""Bad input gets one sentence naming the value, the fact and the fix; exit code 2; no run directory left."""

import contextlib
import socket

import pytest

from refusals import assert_refused
from shardwise.cli.main import main

pytestmark = pytest.mark.usefixtures("forked_parents")

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
no_data = make(data=sw.datasets.idx_folder("no/such/directory"))
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
    "typo in a key": (["job.py", "--set", "batchsize=8"], ("cli.set-unknown-key", "'batch_size'")),
    "typo in a nested key": (["job.py", "--set", "optimizer.lrr=1"], ("cli.set-unknown-key", "'lr'")),
    "key of a section by itself": (["job.py", "--set", "lr=1e-4"], ("cli.set-unknown-key", "'optimizer.lr'")),
    "typo in a section": (["job.py", "--set", "optimiser.lr=1"], ("cli.set-unknown-key", "'optimizer.lr'")),
    "key as an option": (["job.py", "--lr", "1e-4"], ("", "--lr", "--set optimizer.lr=VALUE")),
    "option like no other": (["job.py", "--verbosity", "2"], ("", "--verbosity", "shardwise train --help")),
    "preset with another number": (["job.py", "--nproc", "2", "--plan", "zero5"], ("plan.unknown-preset", "'zero5'")),
    "no equals sign": (["job.py", "--set", "batch_size"], ("cli.set-syntax", "key=value")),
    "batch smaller than the world": (
        ["job.py", "--nproc", "4", "--set", "batch_size=3"],
        ("plan.batch-too-small", "batch_size 3", 4),
    ),
    "batch that does not divide": (
        ["job.py", "--nproc", "3", "--set", "batch_size=64"],
        ("plan.batch-not-divisible", "63 or 66"),
    ),
    "missing job attribute": (["job.py:jobb"], ("job.attribute-missing", "'job'")),
    "attribute that is not a job": (["job.py:number"], ("job.not-a-job", "number")),
    "wrong type": (["job.py", "--set", "batch_size=many"], ("job.not-whole-number", "batch_size", "'many'")),
    "NaN learning rate": (["job.py", "--set", "optimizer.lr=nan"], ("optimizer.setting-out-of-range", "lr=nan")),
    "no such file": (["nowhere.py"], ("job.file-not-found", "nowhere.py")),
    "job that raises on import": (["raises.py"], ("job.file-raised", "ZeroDivisionError", "line 2")),
    "job with a syntax error": (["syntax.py"], ("job.file-raised", "SyntaxError", "line 1")),
    "unknown preset": (["job.py", "--plan", "fspd"], ("plan.unknown-preset", "'fsdp'")),
    "sequences split under a loss by sample": (
        ["job.py", "--nproc", "2", "--plan", "cp"],
        ("support.cp-loss-by-sample", "the job's loss"),
    ),
    "unknown precision": (["job.py", "--set", "precision.compute=bf61"], ("plan.unknown-choice", "'bf16'")),
    "plan file that does not exist": (["job.py", "--plan", "none.toml"], ("plan.read-failed", "none.toml")),
    "plan file with a typo": (["job.py", "--plan", "typo.toml"], ("plan.unknown-key", "'micro_batch'")),
    "run directory in use": (["job.py", "--run-dir", "used"], ("run.directory-not-empty", "used")),
    "zero processes": (["job.py", "--nproc", "0"], ("", "nproc")),
    "unknown option": (["job.py", "--nprocs", "2"], ("", "--nproc")),
    "rule that keeps nothing": (["job.py", "--keep", "0"], ("checkpoint.keep-rule-invalid", "a count (3)")),
    "rule without a unit": (["job.py", "--keep", "3,1.5"], ("checkpoint.keep-rule-invalid", "'1.5'")),
    "two counts": (["job.py", "--keep", "3,4"], ("checkpoint.keep-rule-repeated", "count")),
    "no GPU": (["job.py", "--device", "cuda"], ("launch.no-gpu", "--device cuda")),
    "mpi without mpirun": (
        ["job.py", "--nproc", "3", "--backend", "MPI"],
        ("launch.mpi-without-mpirun", "mpirun -n 3 shardwise train"),
    ),
    "mpi on GPUs": (
        ["job.py", "--device", "cuda", "--backend", "mpi"],
        ("world.backend-device-mismatch", "--backend mpi"),
    ),
}

STRATEGIES = {
    "tp that does not divide the heads": (
        ["job.py:untied", "--nproc", "3", "--plan", "tp"],
        ("plan.tp-not-divisible", "use tp 1, 2 or 4 with a multiple of that many ranks"),
    ),
    "tp that does not divide the heads, but half of it does": (
        ["job.py:untied", "--nproc", "6", "--plan", "tp"],
        ("plan.tp-not-divisible", "use tp 1 or 2"),
    ),
    "tp without rules": (
        ["job.py", "--nproc", "2", "--plan", "tp"],
        (
            "support.tp-no-rules",
            'Job(tensor_rules={"1": "column_gathered"})',
            "shardwise verify job.py --propose-rules",
        ),
    ),
    "tp without rules for a pair": (
        ["job.py:mlp", "--nproc", "2", "--plan", "tp"],
        (
            "support.tp-no-rules",
            'Job(tensor_rules={"layers.*.up": "column", "layers.*.down": "row"})',
            "shardwise verify job.py:mlp --propose-rules",
        ),
    ),
    "pp beyond the layers": (
        ["job.py:untied", "--nproc", "4", "--plan", "pp"],
        ("plan.pipeline-too-many-stages", "use pp = 2"),
    ),
    "pp of a model without layers": (
        ["job.py", "--nproc", "2", "--plan", "pp"],
        ("support.pipeline-no-blocks", "Job(layers="),
    ),
    "pp of layers that share a weight": (
        ["job.py:shared", "--nproc", "2", "--plan", "pp"],
        ("support.pipeline-tied-weights", "blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight"),
    ),
    "pp with too few micro-batches": (
        ["job.py:untied", "--nproc", "2", "--plan", "pp", "--set", "accumulation=1"],
        ("plan.pipeline-accumulation", "use accumulation = 2"),
    ),
    "pp split that does not rise": (
        ["job.py:untied", "--nproc", "2", "--plan", "pp", "--set", "pipeline.split=[5]"],
        ("plan.pipeline-split-invalid", "split = [1]"),
    ),
    "pp split that is not a list": (
        ["job.py:untied", "--nproc", "2", "--plan", "pp", "--set", "pipeline.split=(5,)"],
        ("plan.pipeline-split-not-list", "'(5,)'"),
    ),
    "batch that micro-batches x replicas do not divide": (
        ["job.py:untied", "--nproc", "4", "--plan", "pp2.replicate2", "--set", "accumulation=5"],
        ("plan.batch-not-divisible", "40 or 50"),
    ),
    "split backward on shards": (
        ["job.py:untied", "--nproc", "4", "--plan", "pp2.shard2", "--set", "pipeline.schedule=zbv"],
        ("support.split-backward-sharded", "'zbv'"),
    ),
    "fp16 on fp64 weights": (
        [
            "job.py",
            *(option for key in ("parameter", "optimizer", "reduce") for option in ("--set", f"precision.{key}=fp64")),
            *("--set", "precision.compute=fp16"),
        ],
        ("support.fp64-mix", "precision.compute"),
    ),
    "sequence parallel without tp": (
        ["job.py", "--set", "sequence_parallel=true"],
        ("plan.sequence-parallel-without-tp", "use tp 2"),
    ),
    "zero without shards": (
        ["job.py", "--nproc", "2", "--plan", "ddp", "--set", "zero=2"],
        ("plan.zero-shard-mismatch", "zero = 2"),
    ),
    "product for another world": (
        ["job.py", "--nproc", "2", "--plan", "shard2.tp2"],
        ("layout.world-size-mismatch", "shard2.tp2", 4),
    ),
    "offload without shards": (
        ["job.py", "--nproc", "2", "--plan", "ddp", "--set", "offload.parameters=cpu"],
        ("support.offload-whole-parameters", "zero3"),
    ),
    "compression without buckets": (
        ["job.py", "--nproc", "2", "--plan", "zero3", "--set", "communication.compression=bf16"],
        ("support.compression-without-ddp", "--plan ddp"),
    ),
}

IN_THE_RANKS = {
    "unreadable data directory": (["job.py:no_data"], ("data.folder-not-found", "no/such/directory")),
    "no training data": (["job.py:no_train"], ("data.no-train-split", "'train'")),
    "model that is not a module": (["job.py:no_module"], ("job.model-not-of-engine", "torch.nn.Module")),
    "weights that are not there": (["job.py:no_weights"], ("model.weights-not-found", "missing.pt")),
    "metric that is not measured": (["job.py", "--keep", "max:accuracy"], ("train.keep-metric-unknown", "'accuracy'")),
    "nothing to train": (["job.py:frozen"], ("model.no-trainable-parameter",)),
    "unknown backend": (["job.py", "--backend", "glooo"], ("world.unknown-backend", "'gloo'")),
    "backend this torch lacks": (["job.py", "--backend", "ucc"], ("world.backend-not-available", "USE_UCC=1")),
}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "raises.py").write_text("x = 1\ny = 1 / 0")
    (tmp_path / "syntax.py").write_text("def f(:")
    (tmp_path / "typo.toml").write_text("version = 1\nmicro_bach = 2")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "something").write_text("")
    return tmp_path


def check(directory, capfd, arguments, code, *values):
    before = {path for path in directory.rglob("*") if "__pycache__" not in path.parts}
    exit_code = main(arguments)
    captured = capfd.readouterr()
    assert exit_code == 2, captured.err
    assert len(captured.err.strip().splitlines()) == 1, captured.err
    assert_refused(captured.err, code, *values)
    assert {path for path in directory.rglob("*") if "__pycache__" not in path.parts} == before


@pytest.mark.parametrize(("arguments", "refusal"), (QUICK | STRATEGIES).values(), ids=QUICK | STRATEGIES)
def test_refused_before_any_process_starts(directory, capfd, arguments, refusal):
    check(directory, capfd, ["train", *arguments], *refusal)


@pytest.mark.representative("unknown backend", "no training data", "model that is not a module")
@pytest.mark.parametrize(("arguments", "refusal"), IN_THE_RANKS.values(), ids=IN_THE_RANKS)
def test_refused_by_the_ranks_before_the_first_step(directory, capfd, arguments, refusal):
    check(directory, capfd, ["train", *arguments], *refusal)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [(["trian"], ("", "'train'")), (["doctor", "job.py"], ("", "'job.py'")), (["--verbose"], ("", "--verbose"))],
)
def test_refused_by_the_command_line(directory, capfd, arguments, refusal):
    check(directory, capfd, arguments, *refusal)


@pytest.mark.parametrize("verb", [[], ["train"], ["plan"], ["checkpoint", "convert"]])
def test_a_command_without_arguments_prints_its_help_in_lines(capfd, verb):
    assert main(verb) == 2
    shown = capfd.readouterr().err.splitlines()
    assert shown[0].startswith(" ".join(["Usage: shardwise", *verb]))
    assert "Options:" in shown
    assert any(line.endswith("Show this message and exit.") for line in shown)


def test_world_size_without_rank(directory, capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check(directory, capfd, ["train", "job.py"], "env.rank-missing", "WORLD_SIZE=2", "export RANK")


def test_nproc_inside_somebody_elses_world(directory, capfd, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    check(directory, capfd, ["train", "job.py", "--nproc", "2"], "cli.option-inside-world", "--nproc")


def test_port_in_use(directory, capfd, monkeypatch):
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        check(directory, capfd, ["train", "job.py"], "rendezvous.listen-failed")


def test_parameters_without_gradient_are_named_by_rank(directory, capfd):
    assert main(["train", "job.py:unused", "--nproc", "2"]) == 2
    last_line = capfd.readouterr().err.strip().splitlines()[-1]
    assert "rank 1: forgotten.bias, forgotten.weight" in last_line
    assert "find_unused_parameters=true" in last_line
    assert not (directory / "runs").exists()


def test_debug_shows_the_traceback(directory, capfd):
    assert main(["--debug", "train", "raises.py"]) == 2
    assert "Traceback" in capfd.readouterr().err
