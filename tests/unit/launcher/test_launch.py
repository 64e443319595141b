import os
import signal
import time

import pytest
import torch

from refusals import refuses
from shardwise.errors import JobError, RankFailedError
from shardwise.launcher.local.function import run_forked
from shardwise.testing import run_ranks


def test_results_come_back_by_rank():
    assert run_ranks(lambda world, x: (world.rank, x), 3, "hello") == [(0, "hello"), (1, "hello"), (2, "hello")]


def test_first_failing_ranks_own_exception_is_raised_with_its_traceback():
    def body(world):
        if world.rank == 1:
            raise JobError("rank one is unhappy", code="job.not-a-job", fix="cheer it up")
        world.barrier()

    with pytest.raises(JobError, match="unhappy") as caught:
        run_ranks(body, 2)
    assert "on rank 1" in caught.value.__notes__[0]


def test_exception_that_cannot_travel_keeps_its_message():
    class Local(Exception):  # noqa: N818 - a class the parent cannot unpickle
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    def body(rank):
        raise Local("this", "that")

    with refuses("launch.rank-failed", "Local: this and that", kind=RankFailedError):
        run_forked(body, 1, timeout_s=20)


def test_killed_rank_is_the_root_cause_not_the_peer_that_noticed():
    def body(world):
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()

    with refuses("launch.rank-exited", "rank 1", "SIGKILL", kind=RankFailedError):
        run_ranks(body, 2)


def test_stuck_ranks_are_ended_and_their_stacks_shown():
    def stuck_here(world):
        if world.rank == 1:
            time.sleep(60)

    started = time.monotonic()
    with refuses("launch.rank-timeout", "stuck_here", kind=RankFailedError):
        run_ranks(stuck_here, 2, timeout_s=1)
    assert time.monotonic() - started < 30


def test_no_process_is_left_after_a_failure():
    def body(rank):
        if rank == 0:
            raise ValueError("rank zero")
        time.sleep(60)

    with pytest.raises(ValueError, match="rank zero"):
        run_forked(body, 3, timeout_s=30)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_forked_ranks_compute_after_their_parent_used_every_thread():
    torch.randn(400, 400, requires_grad=True).mm(torch.randn(400, 400)).sum().backward()
    sums = run_ranks(lambda world: torch.ones(300, 300).mm(torch.ones(300, 300)).sum().item(), 2)
    assert sums == [300.0**3] * 2
