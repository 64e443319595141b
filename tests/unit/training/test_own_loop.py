"""A training loop of one's own gives the losses, norms and weights of one process, in fp64."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import shardwise as sw
from jobs import sentences_job
from refusals import refuses
from shardwise.parallel.propose_rules import propose_rules
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


class Loop:
    """Two epochs with clipping and accumulation; records the global loss and the gradient norm of every update."""

    def __init__(self, world, name, batch_size=8, accumulation=2):
        self.plan = sw.Plan.preset(name, world.size, precision="fp64")
        self.world = world
        self.model = sw.parallelize(make_net(), self.plan, world, tensor_rules=RULES)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.train = sw.dataloader(
            DataLoader(Points(), batch_size, shuffle=True), self.plan, world, drop_last=False, accumulation=accumulation
        )
        self.losses, self.norms = [], []

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "train": self.train}

    def run(self, num_batches=None):
        """Train until epoch 2, or for a number of micro-batches."""
        total, seen = 0.0, 0
        while self.train.epoch < 2:
            for x, y in self.train:
                with sw.autocast(self.plan), sw.no_sync(self.model, enabled=not self.train.is_update):
                    loss = functional.cross_entropy(self.model(x), y) * self.train.scale
                    loss.backward()
                total, seen = total + loss.item(), seen + 1
                if self.train.is_update:
                    self.losses.append(self.train.mean(total))
                    self.norms.append(float(sw.clip_grad_norm_(self.model.parameters(), 0.1)))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    total = 0.0
                if seen == num_batches:
                    return

    def results(self):
        return self.losses, self.norms, sw.full_state_dict(self.model)


def own_loop(world, name, batch_size=8, accumulation=2):
    """Return global losses and norms of the updates, the whole weights, and the accuracy."""
    loop = Loop(world, name, batch_size, accumulation)
    loop.run()
    test = sw.dataloader(Points(), loop.plan, world, batch_size=4, evaluate=True)
    with torch.no_grad():
        correct = sum((loop.model(x).argmax(1) == y).sum().item() for x, y in test)
    assert test.mean(correct) == test.sum(correct) / 23
    return *loop.results(), test.mean(correct)


@pytest.fixture(scope="module")
def one_process():
    """One process on the large batches: 16 and 7 samples."""
    return run_ranks(own_loop, 1, "ddp", 16, 1)[0]


@pytest.mark.parametrize(
    ("nproc", "name"), [(2, "ddp"), (2, "zero2"), (2, "fsdp"), (2, "tp"), (4, "hsdp"), (4, "shard2.tp2")]
)
def test_own_loop_matches_one_process_on_the_large_batches(one_process, nproc, name):
    losses, norms, weights, accuracy = one_process
    assert len(norms) == 4
    assert max(norms) > 0.1  # clipping had something to do
    results = run_ranks(own_loop, nproc, name)
    for other_losses, other_norms, _, other_accuracy in results:
        assert other_losses == pytest.approx(losses, rel=1e-9)
        assert other_norms == pytest.approx(norms, rel=1e-9)
        assert other_accuracy == accuracy
    for key, value in weights.items():
        torch.testing.assert_close(results[0][2][key], value, rtol=1e-9, atol=1e-11, msg=key)


def interrupted(world, name, folder, num_batches):
    loop = Loop(world, name)
    loop.run(num_batches)
    sw.save(folder, loop.state())
    return loop.norms


def resumed(world, name, folder):
    loop = Loop(world, name)
    sw.load(folder, loop.state())
    loop.run()
    return loop.results()


@pytest.mark.parametrize(("name", "num_batches", "num_updates"), [("ddp", 4, 2), ("fsdp", 5, 3)])
def test_an_accumulation_that_is_interrupted_on_two_ranks_resumes_on_one(
    one_process, tmp_path, name, num_batches, num_updates
):
    """After 4 of 6 micro-batches, an update is incomplete: it is repeated. After 5, the short last update remains."""
    _, norms, weights, _ = one_process
    before = run_ranks(interrupted, 2, name, tmp_path, num_batches)[0]
    _, after, resumed_weights = run_ranks(resumed, 1, name, tmp_path)[0]
    assert (len(before), before + after) == (num_updates, pytest.approx(norms, rel=1e-9))
    for key, value in weights.items():
        torch.testing.assert_close(resumed_weights[key], value, rtol=1e-9, atol=1e-11, msg=key)


def without_rules(world):
    """Propose rules for a bare module, and parallelize the module without rules."""
    rules = propose_rules(make_net(), lambda model: model(torch.ones(2, 4)))
    with refuses("support.tp-no-rules", 'sw.parallelize(model, plan, tensor_rules={"up": "column"', "propose_rules"):
        sw.parallelize(make_net(), sw.Plan.preset("tp", world.size), world)
    return rules


def test_a_loop_without_rules_is_refused_with_those_that_a_bare_module_is_proposed():
    assert run_ranks(without_rules, 2) == [RULES, RULES]


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


def test_an_optimizer_that_was_created_before_sharding_is_refused_in_its_first_step():
    def loop(world, name, *, is_early):
        plan = sw.Plan.preset(name, world.size)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        parallel = None if is_early else sw.parallelize(model, plan, world)
        optimizer = torch.optim.SGD((parallel or model).parameters(), lr=0.1)
        parallel = parallel or sw.parallelize(model, plan, world)
        for _ in range(2):
            parallel(torch.ones(4, 4)).sum().backward()
            optimizer.step()
        return "trained"

    assert run_ranks(loop, 2, "fsdp", is_early=False) == ["trained"] * 2
    assert run_ranks(loop, 2, "ddp", is_early=True) == ["trained"] * 2
    with refuses("train.optimizer-before-parallelize", "SGD"):
        run_ranks(loop, 2, "fsdp", is_early=True)


def test_loaders_reduce_numbers_and_tensors_alike():
    def reduce(world):
        plan = sw.Plan.preset("ddp", world.size)
        train = sw.dataloader(torch.arange(8.0), plan, world, batch_size=4)
        test = sw.dataloader(torch.arange(8.0), plan, world, batch_size=4, evaluate=True)
        value = torch.tensor(1.0 + world.rank)
        return train.mean(value), train.sum(value), test.mean(value), train.mean(float(value))

    assert run_ranks(reduce, 1) == [(1.0, 1.0, 0.125, 1.0)]
    assert run_ranks(reduce, 2) == [(1.5, 3.0, 0.375, 1.5)] * 2


def test_fp16_without_loss_scaling_gets_a_warning():
    def loop(world):
        with pytest.warns(UserWarning, match="GradScaler"):
            sw.parallelize(torch.nn.Linear(2, 2), sw.Plan.preset("ddp", 1, precision="fp16"), world)

    run_ranks(loop, 1)
