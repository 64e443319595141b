"""Ranks that train separate copies of a model: noted where it is so, and nowhere else."""

import importlib.util
import sys

import pytest
import torch
import torch._dynamo  # by optimizers, on every rank otherwise
import torch.distributed as dist
from torch.distributed import rpc

from shardwise.diagnosis.guard.guard import Guard, describe_separate
from shardwise.launcher.local.attempts import LocalLaunch, launch
from shardwise.launcher.local.function import run_forked
from shardwise.launcher.local.target import Script
from shardwise.launcher.spec import HangSpec
from shardwise.recorder import start_record
from shardwise.recorder.start import OTHER_TRANSPORTS
from shardwise.runs import create_run
from shardwise.runs.calls import ENOUGH_SEPARATE_STEPS


def train(steps=3):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(steps):
        weight.sum().backward()
        optimizer.step()


def separately(_rank, _rendezvous):
    train()


def with_a_group(rank, rendezvous):
    dist.init_process_group("gloo", rendezvous, rank=rank, world_size=2)
    train()
    dist.barrier()  # or a rank would leave while the other still connects
    dist.destroy_process_group()
    train()  # such as an evaluation that fits something


def warming_up(rank, rendezvous):
    train(ENOUGH_SEPARATE_STEPS - 1)
    with_a_group(rank, rendezvous)


def by_remote_calls(rank, rendezvous):
    options = rpc.TensorPipeRpcBackendOptions(init_method=rendezvous)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    train()
    rpc.shutdown()


def with_mpi4py(_rank, _rendezvous):
    importlib.import_module("mpi4py")
    train()


def on_one_rank(rank, _rendezvous):
    if rank == 0:
        train()


def not_at_all(_rank, _rendezvous):
    torch.ones(2, requires_grad=True).sum().backward()


@pytest.mark.parametrize(
    ("script", "is_noted"),
    [
        (separately, True),
        (with_a_group, False),
        (warming_up, False),
        (by_remote_calls, False),
        (with_mpi4py, False),
        (on_one_rank, False),
        (not_at_all, False),
    ],
)
def test_two_ranks_that_train_without_a_process_group_are_noted(tmp_path, monkeypatch, script, is_noted):
    if script is with_mpi4py and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpi4py")
    for name in OTHER_TRANSPORTS:  # imported by another test, such as mlx.core: ranks are forks of this process
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    run, notes = create_run(tmp_path / "run", "run"), []
    guard = Guard(run, HangSpec(), notes.append)
    guard.follow(range(2))

    def body(rank):
        start_record(run, rank, 2)
        script(rank, f"file://{tmp_path}/rendezvous")  # a free port may be taken until the ranks use it

    run_forked(body, 2, timeout_s=60)
    guard.tick()
    assert [text.partition(":")[2].strip() for text in notes] == [note_of(0, 1)] * is_noted


def note_of(*ranks):
    return describe_separate(dict.fromkeys(ranks, ENOUGH_SEPARATE_STEPS), has_peers=False, is_over=False)


def test_a_note_while_ranks_run_waits_for_more_steps_than_a_warm_up():
    some, many = ENOUGH_SEPARATE_STEPS - 1, ENOUGH_SEPARATE_STEPS
    assert not describe_separate({0: many, 1: some}, has_peers=False, is_over=False)
    text = describe_separate({0: many, 1: many}, has_peers=False, is_over=False)
    assert text.startswith("ranks 0 to 1 each train a separate copy of the model")
    assert "init_process_group" in text
    assert describe_separate({0: 1, 1: 1}, has_peers=False, is_over=True) == text
    assert not describe_separate({0: many, 1: 0}, has_peers=False, is_over=True)


def test_one_rank_on_each_node_is_noted_and_one_rank_in_all_is_not():
    assert describe_separate({3: 20}, has_peers=True, is_over=True).startswith("rank 3 trains a separate copy")
    assert not describe_separate({0: 20}, has_peers=False, is_over=True)


SCRIPT = """
import os, time, torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight])
while not os.path.exists("noted"):
    weight.sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def test_the_note_comes_while_the_script_runs_and_only_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    run, notes = create_run(tmp_path / "run", "run"), []

    def note(text):
        notes.append(text)
        (tmp_path / "noted").touch()

    guard = Guard(run, HangSpec(), note)
    guard.follow(range(2))
    spec = LocalLaunch(target=Script("script.py"), nproc=2, record=True, preload=("torch", "torch._dynamo"))
    launched = launch(spec, run, observers=[guard])
    assert launched.outcome.interrupted == 0
    assert notes == [f"shardwise: {note_of(0, 1)}"]
    assert "separate copy" in run.launcher_events().read_text()
