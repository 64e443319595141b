"""Real ranks join by every method, and each failure is one sentence."""

import hashlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist

from e2e.processes import wait_for
from env.ports import free_port
from refusals import refuses
from shardwise.dist import world
from shardwise.dist.rendezvous import FileStore, HashStore
from shardwise.dist.world import has_runnable_threads
from shardwise.environment import adopt, rank_environment
from shardwise.launcher.local.function import run_forked


def report(**arguments):
    """Start this rank's world, use it, and describe it."""
    with world(timeout_s=30, device="cpu", **arguments) as me:
        total = me.sum({"rank": me.rank + 1.0})["rank"]
        return {
            "rank": me.rank,
            "local_rank": me.local_rank,
            "source": me.source,
            "method": me.init_method,
            "sum": total,
        }


def started(body, nproc=2):
    return run_forked(body, nproc, timeout_s=200)


def alone(body):
    """Run `body` in a process of its own that no launcher has touched."""

    def child(_):
        adopt({"PATH": os.environ["PATH"]})
        return body()

    return started(child, 1)[0]


def expect_two(results, source, method):
    for rank, result in enumerate(results):
        assert result == {"rank": rank, "local_rank": rank, "source": source, "method": method, "sum": 3.0}


def test_two_ranks_join_by_env():
    port = free_port()

    def body(_):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        return report()

    expect_two(started(body), "shardwise", "env://")


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="Linux has scheduling policies")
def test_gloo_does_not_preempt_its_own_senders_unless_the_user_has_set_a_policy(tmp_path):
    def body(_, policy):
        os.sched_setscheduler(0, policy, os.sched_param(0))
        report(init_method=f"file://{tmp_path}/store")
        return os.sched_getscheduler(0)

    assert started(lambda rank: body(rank, os.SCHED_OTHER)) == [os.SCHED_BATCH] * 2
    assert started(lambda rank: body(rank, os.SCHED_IDLE)) == [os.SCHED_IDLE] * 2
    assert started(lambda rank: body(rank, os.SCHED_OTHER), 1) == [os.SCHED_OTHER]


def test_two_ranks_join_by_tcp():
    url = f"tcp://127.0.0.1:{free_port()}"
    expect_two(started(lambda _: report(init_method=url)), "shardwise", url)


def test_two_ranks_join_by_a_host_name():
    url = f"tcp://localhost:{free_port()}"
    expect_two(started(lambda _: report(init_method=url)), "shardwise", url)


def test_two_ranks_join_by_file_and_leave_none(tmp_path):
    url = f"file://{tmp_path}/store with space"
    expect_two(started(lambda _: report(init_method=url)), "shardwise", url)
    assert not list(tmp_path.iterdir())


def test_two_ranks_join_by_a_store_of_the_caller(tmp_path):
    def body(rank):
        return report(store=FileStore(str(tmp_path / "mine"), 2), rank=rank, world_size=2)

    expect_two(started(body), "shardwise", "store")


def test_arguments_win_over_variables(tmp_path):
    def body(rank):
        return report(init_method=f"file://{tmp_path}/store", rank=1 - rank, world_size=2)

    first, second = started(body)
    assert (first["rank"], second["rank"], first["source"]) == (1, 0, "arguments")
    # both are on this host, so each counts the ranks before it there
    assert (first["local_rank"], second["local_rank"]) == (1, 0)


def test_the_tasks_of_srun_join_at_a_derived_port():
    def body(rank):
        adopt(
            {
                "SLURM_JOB_ID": str(os.getppid()),
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NTASKS": "2",
            }
        )
        return report()

    results = started(body)
    assert results[0]["method"].startswith("tcp://127.0.0.1:")
    expect_two(results, "slurm", results[0]["method"])


def test_ranks_of_plain_interpreters_close_at_exit_without_with(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""\
            import atexit
            import torch.distributed as dist
            atexit.register(lambda: print("closed", not dist.is_initialized()))
            from shardwise.dist import world
            me = world(timeout_s=30, device="cpu")
            print(me.rank, me.source, me.sum({"x": 1.0}), me.is_main, me.is_initialized)
            """)
    )
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=rank_environment(rank=rank, world_size=2, local_rank=rank, local_world_size=2, extra=master),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert outputs == [f"{r} shardwise {{'x': 2.0}} {r == 0} True\nclosed True\n" for r in range(2)]
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_a_world_of_one_needs_no_launcher_and_no_port():
    def body():
        with world(device="cpu") as me:
            ones = torch.ones(3)
            dist.all_reduce(ones)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
            model(torch.ones(1, 2)).sum().backward()
            return ones.tolist(), model.module.bias.grad.tolist(), me.size, me.source, me.backend, me.timeout_s

    assert alone(body) == ([1.0, 1.0, 1.0], [1.0], 1, "alone", "gloo", 1800.0)


def leftover(folder):
    """Return the URL of a file whose two ranks ended without closing their world."""
    url = f"file://{folder}/store"
    started(lambda _: world(init_method=url, timeout_s=30, device="cpu").rank)
    return url


def test_a_leftover_file_is_refused_with_what_to_type(tmp_path):
    url = leftover(tmp_path)
    with refuses("rendezvous.file-stale") as caught:
        started(lambda _: report(init_method=url))
    assert caught.value.fix == f"rm {tmp_path}/store"


def test_a_leftover_file_of_a_smaller_world_is_refused_by_ranks_it_never_saw(tmp_path):
    url = leftover(tmp_path)
    with refuses("rendezvous.file-stale"):
        started(lambda rank: report(init_method=url, rank=rank + 2, world_size=4))


def test_two_processes_with_one_rank_are_refused():
    url = f"tcp://127.0.0.1:{free_port()}"

    def body(rank):
        return report(init_method=url, rank=min(rank, 1), world_size=3)

    with refuses("rendezvous.rank-repeated", "rank 1"):
        started(body, 3)


def test_a_rank_that_does_not_come_is_named(tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}"

    def body(rank):
        (tmp_path / f"started.{rank}").touch()
        while not (tmp_path / f"started.{1 - rank}").exists():  # the time limit is not for the start of processes
            time.sleep(0.01)
        with world(init_method=url, rank=rank, world_size=3, timeout_s=2, device="cpu"):
            pass

    with refuses("rendezvous.timeout", "1 of 3 ranks", ": 2"):
        started(body)


def test_a_port_in_use_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with refuses("rendezvous.listen-failed", "127.0.0.1", "in use"):
            world(init_method=url, rank=0, world_size=2, device="cpu")


def test_a_port_in_use_on_every_interface_is_refused():
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        url = f"tcp://localhost:{taken.getsockname()[1]}"
        with refuses("rendezvous.listen-failed", "localhost", "in use"):
            world(init_method=url, rank=0, world_size=2, device="cpu")


def test_a_port_in_use_is_refused_by_env(monkeypatch):
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with refuses("rendezvous.listen-failed", "in use"):
            world(device="cpu")


def test_a_store_that_nobody_hosts_is_refused():
    with refuses("rendezvous.unreachable", "rank 1"):
        world(init_method=f"tcp://127.0.0.1:{free_port()}", rank=1, world_size=2, timeout_s=0.3, device="cpu")


REFUSED = {
    "host that does not resolve": (
        {"init_method": "tcp://no-such-host.invalid:1234"},
        ("rendezvous.host-not-resolved", "no-such-host.invalid"),
    ),
    "file in no folder": (
        {"init_method": "file:///no/such/folder/store"},
        ("rendezvous.file-folder-missing", "/no/such/folder"),
    ),
    "file that is a folder": ({"init_method": "file:///proc/self"}, ("rendezvous.file-write-failed", "/proc/self")),
    "init_method and store": ({"init_method": "env://", "store": HashStore()}, ("world.store-with-init-method",)),
    "no time": ({"timeout_s": 0}, ("world.timeout-invalid", "timeout_s", 0)),
    "endless time": ({"timeout_s": float("inf")}, ("world.timeout-invalid", "timeout_s", "inf")),
    "unknown backend": ({"backend": "ncl"}, ("world.unknown-backend", "'ncl'")),
    "no master": ({}, ("rendezvous.master-not-set", "MASTER_ADDR and MASTER_PORT")),
}


@pytest.mark.parametrize(("arguments", "refusal"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_start_is_refused_in_one_sentence(arguments, refusal, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with refuses(*refusal) as caught:
        world(**({"rank": 1, "world_size": 2, "timeout_s": 0.2, "device": "cpu"} | arguments))
    assert caught.value.fix
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "arguments", [{"init_method": "tcp://127.0.0.1:1"}, {"store": HashStore()}], ids=["url", "store"]
)
def test_a_rendezvous_without_a_rank_is_refused(arguments, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with refuses("world.rank-unknown"):
        world(**arguments)


def test_contradicting_variables_are_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refuses("env.rank-missing", "WORLD_SIZE=2"):
        world()


def test_a_thread_that_computes_is_waited_for_before_a_group_ends():
    wait_for(lambda: not has_runnable_threads())
    thread = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 2_000_000))  # without the GIL
    thread.start()
    assert wait_for(has_runnable_threads)
    thread.join()


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.prove)])
def test_threads_of_gloo_are_done_with_tensors_before_the_interpreter_ends(tmp_path, size):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""\
            import sys
            import torch
            import torch.distributed as dist
            from shardwise.dist import world
            sys.setswitchinterval(1000)  # a thread gets the interpreter's lock only when it is let go
            me = world(timeout_s=30, device="cpu")
            kept = dist.group.WORLD  # as a sharded model keeps it: its threads live on after the group's end
            for value in [torch.ones(10) for _ in range(20)]:
                dist.all_reduce(value)
            me.close()
            """)
    )
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=rank_environment(rank=rank, world_size=size, local_rank=rank, local_world_size=size, extra=master),
        )
        for rank in range(size)
    ]
    assert [rank.wait(200) for rank in ranks] == [0] * size
