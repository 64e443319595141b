"""A training loop of one's own gives the losses, norms and weights of one process, in fp64."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import shardwise as sw
from jobs import sentences_job
from refusals import refuses
from shardwise.testing import run_ranks

RULES = {"up": "column", "down": "row"}


class Points(Dataset):
    """Points with a class each; 23 of them leave 7 for the last batch of 8, which two ranks cannot share evenly."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), index % 3


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(4, 8)
        self.down = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


def make_net():
    torch.manual_seed(0)
    return Net()


def own_loop(world, name):
    """Train with clipping and two batches to a step; return global losses, norms, accuracy and the whole weights."""
    plan = sw.Plan.preset(name, world.size, precision="fp64")
    model = sw.parallelize(make_net(), plan, world, tensor_rules=RULES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train = sw.dataloader(DataLoader(Points(), batch_size=8, shuffle=True), plan, world, drop_last=False)
    losses, norms = [], []
    for _ in range(2):
        for number, (x, y) in enumerate(train):
            is_update = number % 2 == 1 or number + 1 == len(train)
            with sw.autocast(plan) if is_update else sw.no_sync(model):
                loss = functional.cross_entropy(model(x), y) * train.scale
                (loss / 2).backward()
            losses.append(world.sum({"loss": loss.item()})["loss"] / world.size)
            if is_update:
                norms.append(float(sw.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                optimizer.zero_grad()
    test = sw.dataloader(Points(), plan, world, batch_size=4, evaluate=True)
    with torch.no_grad():
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
    correct = world.sum({"correct": correct})["correct"] * plan.layout.dp / world.size
    return losses, norms, correct, sw.full_state_dict(model)


@pytest.fixture(scope="module")
def one_process():
    return run_ranks(own_loop, 1, "ddp")[0]


@pytest.mark.parametrize(
    ("nproc", "name"), [(2, "ddp"), (2, "zero2"), (2, "fsdp"), (2, "tp"), (4, "hsdp"), (4, "shard2.tp2")]
)
def test_own_loop_matches_one_process(one_process, nproc, name):
    losses, norms, correct, weights = one_process
    assert max(norms) > 0.1  # clipping had something to do
    results = run_ranks(own_loop, nproc, name)
    for other_losses, other_norms, other_correct, _ in results:
        assert other_losses == pytest.approx(losses, rel=1e-9)
        assert other_norms == pytest.approx(norms, rel=1e-9)
        assert other_correct == correct
    for key, value in weights.items():
        torch.testing.assert_close(results[0][3][key], value, rtol=1e-9, atol=1e-11, msg=key)


def lower_precision(world, name):
    """Return the outputs of a model and of its copy with zero weights, and which dtypes the model computed in."""
    plan = sw.Plan.preset(name, world.size, precision="bf16")
    net = make_net()
    seen = []
    net.up.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    copied = None
    if name == "ddp" and world.size == 1:
        net = sw.parallelize(net, plan, world)
        copied = copy.deepcopy(net)
        for parameter in copied.parameters():
            torch.nn.init.zeros_(parameter)
        model = net
    else:
        model = sw.parallelize(net, plan, world)
    x = torch.ones(2, 4)
    output = model(x).detach()
    with sw.autocast(plan):
        product = x @ x.T
    return output, None if copied is None else copied(x).detach(), seen[0], product.dtype


@pytest.mark.parametrize(("nproc", "name"), [(1, "ddp"), (2, "ddp"), (2, "fsdp")])
def test_forward_computes_in_the_precision_of_the_plan_and_returns_fp32(nproc, name):
    with torch.autocast("cpu", torch.bfloat16):
        expected = make_net()(torch.ones(2, 4)).detach()
    output, copied, computed, by_autocast = run_ranks(lower_precision, nproc, name)[0]
    assert (output.dtype, computed, by_autocast) == (torch.float32, torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(output, expected.float(), rtol=2e-2, atol=2e-2)
    if copied is not None:
        assert not copied.any()  # a copy computes with its own weights


def test_options_of_a_preset_become_fields_of_the_plan():
    plan = sw.Plan.preset("fsdp", 8, precision="bf16", recompute="full", communication={"bucket_mb": 50.0})
    assert (plan.precision.compute, plan.precision.parameter) == ("bf16", "fp32")
    assert (plan.recompute, plan.communication.bucket_mb, plan.layout.shard) == ("full", 50.0, 8)
    assert plan.source("precision") == "argument of preset"
    assert str(sw.Plan.preset("ddp", 2, precision="fp64").precision) == "fp64 throughout"
    with refuses("plan.unknown-option", "recompte", "recompute"):
        sw.Plan.preset("ddp", 2, recompte="full")
    with refuses("plan.unknown-option", "communication.bucket"):
        sw.Plan.preset("ddp", 2, communication={"bucket": 50.0})
    with refuses("plan.unknown-choice", "bf61"):
        sw.Plan.preset("ddp", 2, precision="bf61")


def clipped_by_hand(world, name):
    """Train steps of build_step that clip in `before_update`; return the norms, and the whole weights on rank 0."""
    job = sentences_job(clip_norm=None)
    plan = sw.Plan.preset(name, world.size, batch_size=job.batch_size, precision="fp64")
    norms = []
    step = sw.build_step(job, plan, world, before_update=lambda: norms.append(float(sw.clip_grad_norm_(step, 0.5))))
    for batch in step.feed:
        step(batch)
    return norms, sw.full_state_dict(step.model)


def clipped_by_job(world):
    job = sentences_job()
    step = sw.build_step(job, sw.Plan.preset("ddp", 1, batch_size=job.batch_size, precision="fp64"), world)
    norms = [float(step(batch).grad_norm) for batch in step.feed]
    return norms, sw.full_state_dict(step.model)


@pytest.mark.parametrize("name", ["pp", "zero1"])
def test_a_step_is_clipped_by_hand_as_by_its_job(name):
    norms, weights = run_ranks(clipped_by_job, 1)[0]
    results = run_ranks(clipped_by_hand, 2, name)
    for other_norms, _ in results:
        assert other_norms == pytest.approx(norms, rel=1e-9)
    for key, value in weights.items():
        torch.testing.assert_close(results[0][1][key], value, rtol=1e-9, atol=1e-11, msg=key)
