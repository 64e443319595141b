"""Every sharded strategy gives the losses and weights of one process, in fp64."""

import dataclasses
import functools

import pytest
import torch

import shardwise as sw
from jobs import FP64, SENTENCES, Points, points_job, sentences_job, small_resnet
from refusals import refuses
from shardwise.planner.settle import LocalDevice, settle
from shardwise.plans import Precision
from shardwise.testing import run_ranks
from shardwise.training.build import build_step


def trained(world, job, name, overrides, precision=FP64):
    """Train; return global losses (shares summed over all ranks), gradient norms and, on rank 0, the final state."""
    plan = settle(name, batch_size=job.batch_size, world_size=world.size, device=LocalDevice(), overrides=overrides)
    plan = dataclasses.replace(plan, precision=precision)
    step = build_step(job, plan, world)
    reports = [step(batch) for batch in step.feed]
    losses = torch.stack([report.loss_share.double() for report in reports])
    if world.size > 1:
        torch.distributed.all_reduce(losses)
    norms = [None if report.grad_norm is None else float(report.grad_norm) for report in reports]
    return losses, norms, sw.full_state_dict(step.model)


def check_equal(job, nproc, name, overrides, reference=None):
    """Compare a training under a plan with `reference`, or else with a training of the same job in one process."""
    losses, norms, state = reference or run_ranks(trained, 1, job, "ddp", {})[0]
    results = run_ranks(trained, nproc, job, name, overrides)
    for other_losses, other_norms, _ in results:
        torch.testing.assert_close(other_losses, losses, rtol=1e-9, atol=0)
        assert norms[0] is None or other_norms == pytest.approx(norms, rel=1e-9)
    assert results[0][2].keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(results[0][2][key], value, rtol=1e-9, atol=1e-11, msg=key)


PLANS = [
    (2, "zero1", {}),
    (2, "zero2", {}),
    (2, "zero3", {}),
    (3, "zero1", {}),
    (4, "hsdp", {}),
    (4, "replicate2.shard2", {"zero": "1"}),
    (2, "zero2", {"accumulation": "2"}),
    (2, "zero3", {"accumulation": "2", "gradient_sync": "every"}),
    (2, "zero1", {"accumulation": "4", "gradient_sync": "every"}),
    (2, "zero3", {"recompute": "full"}),
    (2, "ddp", {"recompute": "selective"}),
    (2, "ddp", {"recompute": "full", "recompute_blocks": "1"}),
    (2, "zero3", {"recompute": "selective", "recompute_blocks": "1"}),
    (2, "tp", {"recompute": "full", "recompute_blocks": "1"}),
    (2, "zero3", {"offload.parameters": "cpu", "offload.optimizer": "cpu"}),
    (2, "ddp", {"offload.optimizer": "cpu"}),
    (2, "zero1", {"offload.optimizer": "cpu"}),
    (2, "zero2", {"offload.optimizer": "cpu"}),
    (2, "zero3", {"communication.prefetch": "2"}),
    (2, "tp", {}),
    (4, "shard2.tp2", {"accumulation": "2"}),
    (4, "replicate2.tp2", {"sequence_parallel": "true"}),
    (2, "cp", {}),
    (4, "cp2.tp2", {"sequence_parallel": "true"}),
    (4, "shard2.cp2", {"accumulation": "2"}),
]


@pytest.mark.representative(
    "3-zero1-",
    "4-hsdp-",
    "2-zero2-2",
    "2-zero3-2-every",
    "2-zero3-full",
    "2-ddp-selective",
    "2-zero3-selective-1",
    "2-tp-full-1",
    "2-zero3-cpu-cpu",
    "2-ddp-cpu",
    "2-tp-",
    "4-replicate2.tp2-true",
    "2-cp-",
    "4-shard2.cp2-2",
)
@pytest.mark.parametrize(
    ("nproc", "name", "overrides"), PLANS, ids=[f"{n}-{name}-{'-'.join(over.values())}" for n, name, over in PLANS]
)
def test_sharded_plan_equals_one_process(nproc, name, overrides):
    batch_size = 8 if 8 % nproc == 0 else 6
    check_equal(sentences_job(batch_size=batch_size), nproc, name, overrides, alone(batch_size))


@functools.cache
def alone(batch_size):
    """Return what one process trains of the job that all plans train."""
    return run_ranks(trained, 1, sentences_job(batch_size=batch_size), "ddp", {})[0]


def test_batch_statistics_move_once_when_a_block_is_recomputed():
    job = points_job(small_resnet, Points(11, 1, 8, 8, classes=10), steps=3, batch_size=4)
    check_equal(job, 2, "zero3", {"recompute": "full"})


def test_buffers_behind_the_layers_come_from_the_last_stage():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x):
            return x + torch.relu(self.linear(x))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = torch.nn.Linear(6, 8)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
            self.norm = torch.nn.BatchNorm1d(8)
            self.head = torch.nn.Linear(8, 3)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    job = points_job(Net)
    losses, _, one = run_ranks(trained, 1, job, "ddp", {"accumulation": "2"})[0]
    (found, _, two), _ = run_ranks(trained, 2, job, "pp", {"accumulation": "2"})
    torch.testing.assert_close(two["norm.running_mean"], one["norm.running_mean"], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=0)


@pytest.mark.representative("bf16-zero3", "fp16-ddp", "bf16-zero1")
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_lower_precision_learns_under_every_strategy(name, compute):
    job = sentences_job(steps=8, optimizer=sw.adamw(lr=3e-3))
    exact = run_ranks(trained, 1, job, "ddp", {})[0][0]
    losses = run_ranks(trained, 2, job, name, {}, Precision(compute=compute))[0][0]
    torch.testing.assert_close(losses, exact, rtol=0.02, atol=0)


@pytest.mark.representative("bf16", "powersgd")
@pytest.mark.parametrize("compression", ["bf16", "fp16", "powersgd"])
def test_compressed_gradients_stay_close(compression):
    job = sentences_job(steps=14, optimizer=sw.adamw(lr=3e-3))
    exact = run_ranks(trained, 1, job, "ddp", {})[0][0]
    losses = run_ranks(trained, 2, job, "ddp", {"communication.compression": compression})[0][0]
    assert not torch.equal(losses, exact)
    torch.testing.assert_close(losses, exact, rtol=0.05, atol=0)


def test_a_zero1_rank_keeps_its_share_of_the_optimizer_only():
    def body(world):
        job = sentences_job(steps=1)
        plan = settle("zero1", batch_size=8, world_size=world.size, device=LocalDevice())
        step = build_step(job, plan, world)
        for batch in step.feed:
            step(batch)
        states = step.optimizer.state.values()
        num_local = sum(state["exp_avg"].to_local().numel() for state in states)
        return num_local, sum(parameter.numel() for _, parameter in step.named_parameters())

    results = run_ranks(body, 2)
    assert sum(num_local for num_local, _ in results) == results[0][1]
    assert all(num_local < 0.55 * whole for num_local, whole in results)


def test_a_loop_of_ones_own_is_not_captured():
    def body(world):
        plan = dataclasses.replace(sw.Plan.preset("ddp", world.size), capture="step")
        with refuses("support.own-loop-capture"):
            sw.parallelize(torch.nn.Linear(3, 1), plan, world)
        return True

    assert run_ranks(body, 1) == [True]


def test_parallelize_averages_like_ddp_under_fsdp():
    def body(world, name):
        torch.manual_seed(world.rank)
        model = sw.parallelize(torch.nn.Linear(3, 1, bias=False), sw.Plan.preset(name, world.size), world)
        model(torch.full((1, 3), float(world.rank + 1))).sum().backward()
        grad = model.module.weight.grad if name == "ddp" else model.weight.grad.full_tensor()
        return grad, sw.full_state_dict(model)

    (ddp, ddp_state), _ = run_ranks(body, 2, "ddp")
    (fsdp, fsdp_state), _ = run_ranks(body, 2, "fsdp")
    torch.testing.assert_close(fsdp, ddp)
    torch.testing.assert_close(fsdp_state, ddp_state)


@pytest.mark.parametrize(
    ("name", "overrides", "code"),
    [
        ("ddp", {"offload.parameters": "cpu"}, "support.offload-whole-parameters"),
        ("zero3", {"offload.parameters": "cpu"}, "support.offload-without-optimizer"),
        ("zero3", {"communication.compression": "bf16"}, "support.compression-without-ddp"),
        ("zero3", {"offload.optimizer": "nvme"}, "support.nvme-offload"),
        ("zero3", {"communication.prefetch": "0"}, "plan.prefetch-too-small"),
        ("zero3", {"sequence_parallel": "true"}, "plan.sequence-parallel-without-tp"),
        ("zero3", {"recompute_blocks": "2"}, "plan.recompute-blocks-unused"),
        ("zero3", {"recompute": "full", "recompute_blocks": "-1"}, "plan.recompute-blocks-negative"),
    ],
)
def test_plans_that_make_no_sense_are_refused(name, overrides, code):
    def body(world):
        with refuses(code):
            trained(world, sentences_job(), name, overrides, Precision())

    run_ranks(body, 2)


@pytest.mark.parametrize("name", ["tp", "zero3"])
def test_a_training_whose_first_step_is_short_equals_one_process(name):
    few = torch.utils.data.Subset(SENTENCES, range(5))
    job = sentences_job(data=lambda split: few if split == "train" else None, steps=2)
    check_equal(job, 2, name, {})


def test_gradients_are_reduced_in_bf16_where_compute_is_fp32():
    job = sentences_job(steps=3, clip_norm=None)
    exact = run_ranks(trained, 2, job, "zero3", {}, Precision())[0][0]
    losses = run_ranks(trained, 2, job, "zero3", {}, Precision(reduce="bf16"))[0][0]
    assert losses[0] == exact[0]
    assert losses[1] != exact[1]
    torch.testing.assert_close(losses, exact, rtol=0.02, atol=0)
