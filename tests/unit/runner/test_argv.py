"""The command that every node of a run would run."""

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwise.cli.main import cli
from shardwise.runner.local import resume_argv
from shardwise.training.spec import TrainSpec


@pytest.fixture
def dry_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def run(*argv):
        done = CliRunner().invoke(cli, ["launch", *argv, "--dry-run", "train.py", "--lr", "1 e"], standalone_mode=False)
        assert done.exception is None, done.exception
        return done.output.splitlines()

    return run


def nodes_of(lines):
    return [shlex.split(line) for line in lines if line.startswith("shardwise ")]


def test_every_node_gets_the_same_argv_but_its_rank(dry_run):
    lines = dry_run("--nnodes=2", "--nproc=2", "--tee", "3", "--rdzv_backend=c10d", "--rdzv_endpoint=a:29400")
    first, second = nodes_of(lines)
    assert [argument for argument in first if argument not in second] == ["--node-rank=0"]
    assert second[1:7] == [
        *("launch", "--nnodes=2", "--node-rank=1", "--master-addr=a", "--master-port=29400", "--rdzv-id=none"),
    ]
    assert second[7:] == ["--nproc-per-node=2", "--tee=3", "train.py", "--lr", "1 e"]


def test_every_rank_is_shown_with_its_environment(dry_run):
    lines = dry_run("--nnodes=1:3", "--nproc=2", "--master_addr=a")
    assert [line.split()[1] for line in lines if line.startswith("#   ")] == [f"RANK={rank}" for rank in range(6)]
    assert [line for line in lines if line.startswith("# node")] == [
        "# node 0",
        "# node 1 (optional)",
        "# node 2 (optional)",
    ]


def test_what_is_printed_prints_the_same_again(dry_run):
    (node, _) = nodes_of(dry_run("--nnodes=2", "--nproc=2", "--max-restarts=3", "--master_addr=a"))
    again = nodes_of(dry_run(*node[2 : node.index("train.py")]))
    assert again[0] == node


def test_command_that_continues_a_run_names_it_and_has_the_options_of_its_node():
    spec = TrainSpec.of("job.py", nnodes="2", node_rank=1, master_addr="a", save_every=5, resume="elsewhere")
    options = ["--save-every=5", "--nnodes=2", "--node-rank=1", "--master-addr=a", "--run-dir=runs/x", "--resume=auto"]
    assert resume_argv(spec, Path("runs/x")) == ["shardwise", "train", "job.py", *options]
