"""Worlds on a GPU."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.gpu


def run_script(text):
    """Run `text` in an interpreter of its own and return what it printed and what it complained of."""
    script = textwrap.dedent(text)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def test_a_world_of_one_runs_nccl_and_ddp_on_the_first_gpu():
    values, errors = run_script("""
        import torch, torch.distributed as dist
        from shardwise.layout import Layout
        from shardwise.dist import world
        with world() as me:
            total = torch.ones(2, device=me.device)
            dist.all_reduce(total)
            me.barrier()
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to(me.device))
            model(total[None]).sum().backward()
            mesh = me.mesh(Layout())
            print(me.device, me.backend, me.timeout_s, me.gather(1), me.sum({"x": 1.0})["x"], mesh.device_type)
        print(dist.is_initialized())
    """)
    assert values == ["cuda:0", "nccl", "600.0", "[1]", "1.0", "cuda", "False"]
    assert "barrier" not in errors  # torch would complain here of a device it had to guess


def test_one_backend_per_device_serves_both():
    values, _ = run_script("""
        import torch, torch.distributed as dist
        from shardwise.dist import world
        with world(backend="cpu:gloo,cuda:nccl") as me:
            for device in ("cpu", me.device):
                dist.all_reduce(torch.ones(2, device=device))
            me.barrier()
            print(me.backend, me.device, me.gather(1), me.sum({"x": 1.0})["x"])
    """)
    assert values == ["cpu:gloo,cuda:nccl", "cuda:0", "[1]", "1.0"]


def test_a_running_nccl_group_is_adopted_with_its_device():
    values, _ = run_script("""
        import torch, torch.distributed as dist
        from shardwise.dist import world
        device = torch.device("cuda", 0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        with world() as me:
            print(me.source, me.device, me.backend, me.timeout_s)
        print(dist.is_initialized())
        dist.destroy_process_group()
    """)
    assert values == ["adopted", "cuda:0", "nccl", "600.0", "True"]


def test_an_exception_ends_nccl_and_is_not_masked():
    values, _ = run_script("""
        import torch, torch.distributed as dist
        from shardwise.dist import world
        try:
            with world() as me:
                dist.all_reduce(torch.ones(2, device=me.device))
                raise ValueError("mine")
        except ValueError as error:
            print(error, dist.is_initialized())
    """)
    assert values == ["mine", "False"]


def test_a_world_that_nobody_closed_ends_without_a_warning():
    _, errors = run_script("""
        import torch, torch.distributed as dist
        from shardwise.dist import world
        me = world()
        dist.all_reduce(torch.ones(2, device=me.device))
    """)
    assert "destroy_process_group" not in errors


def test_gloo_can_be_asked_for_on_a_gpu():
    values, _ = run_script("""
        from shardwise.dist import world
        with world(backend="gloo") as me:
            print(me.device, me.sum({"x": 1.0})["x"], me.gather(1))
    """)
    assert values == ["cuda:0", "1.0", "[1]"]


def test_a_fake_world_lives_on_a_gpu():
    values, _ = run_script("""
        from shardwise.layout import Layout
        from shardwise.dist import fake_world
        with fake_world(512, device="cuda") as me:
            print(me.mesh(Layout(shard=64, tp=8)).device_type)
    """)
    assert values == ["cuda"]
