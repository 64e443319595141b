"""Checkpoints of a loop of one's own: any plan and world size continues what another one saved, exactly."""

from collections import Counter

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from training.test_own_loop import RULES, Points, make_net

import shardwise as sw
from refusals import refuses
from shardwise.checkpoint import CheckpointDirectory, MismatchError
from shardwise.testing import run_ranks
from shardwise.training.own_state import _decode, _encode


class Run:
    """A training of one's own with everything that a checkpoint has to hold."""

    def __init__(self, world, name):
        self.world = world
        self.plan = sw.Plan.preset(name, world.size, precision="fp64")
        self.model = sw.parallelize(make_net(), self.plan, world, tensor_rules=RULES)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, betas=(0.8, 0.9))
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], gamma=0.3)
        self.train = sw.dataloader(DataLoader(Points(), batch_size=8, shuffle=True), self.plan, world, drop_last=False)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "train": self.train,
            "best": float("inf"),
            "seen": 0,
        }

    def steps(self, epochs):
        """Train until `epochs` are done; yield the global loss of every step."""
        for _ in range(self.train.epoch, epochs):
            for x, y in self.train:
                loss = functional.cross_entropy(self.model(x), y) * self.train.scale
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                mean = self.world.sum({"loss": loss.item()})["loss"] / self.world.size
                self.state["best"], self.state["seen"] = min(self.state["best"], mean), self.state["seen"] + 1
                yield mean


def uninterrupted(world):
    run = Run(world, "ddp")
    losses = list(run.steps(epochs=3))
    return losses, run.state["best"], sw.full_state_dict(run.model)


def interrupted(world, name, folder):
    run = Run(world, name)
    steps = run.steps(epochs=3)
    losses = [next(steps) for _ in range(4)]  # one batch into the second epoch
    sw.save(folder, run.state, step=4)
    return losses


def resumed(world, name, folder):
    run = Run(world, name)
    number = sw.load(folder, run.state)
    assert (number, run.state["seen"]) == (4, 4)
    losses = list(run.steps(epochs=3))
    return losses, run.state["best"], sw.full_state_dict(run.model)


@pytest.fixture(scope="module")
def expected():
    return run_ranks(uninterrupted, 1)[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, "fsdp"), (1, "ddp")), ((1, "ddp"), (2, "tp")), ((2, "tp"), (2, "zero2")), ((2, "ddp"), (4, "shard2.tp2"))],
)
def test_another_plan_and_world_size_continues_exactly(expected, tmp_path, before, after):
    losses, best, weights = expected
    first = run_ranks(interrupted, *before, tmp_path / "checkpoints")[0]
    second, other_best, other_weights = run_ranks(resumed, *after, tmp_path / "checkpoints")[0]
    assert first + second == pytest.approx(losses, rel=1e-9)
    assert other_best == pytest.approx(best, rel=1e-9)
    for key, value in weights.items():
        torch.testing.assert_close(other_weights[key], value, rtol=1e-9, atol=1e-11, msg=key)


def test_nothing_there_is_none_and_what_does_not_fit_changes_nothing(tmp_path):
    net = make_net()
    state = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), "epoch": 3}
    assert sw.load(tmp_path, state) is None
    assert sw.load(tmp_path / "nowhere", state) is None
    foreign = tmp_path / "foreign"
    (foreign / "checkpoint-5").mkdir(parents=True)
    (foreign / "checkpoint-5" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    torch.save(net.state_dict(), foreign / "net.pt")
    for path, kind in ((foreign, "Hugging Face"), (foreign / "net.pt", "torch.save")):
        with refuses("checkpoint.foreign-format", kind, str(path), "shardwise checkpoint convert"):
            sw.load(path, state)
    sw.save(tmp_path, state, step=7)
    with refuses("checkpoint.part-missing", "epochs", "epoch"):
        sw.load(tmp_path, {"model": net, "epochs": 0})
    other = torch.nn.Sequential(torch.nn.Linear(4, 8))
    before = [parameter.clone() for parameter in other.parameters()]
    with refuses("checkpoint.tensors-mismatch", "up.weight", kind=MismatchError):
        sw.load(tmp_path, {"model": other})
    assert all(torch.equal(one, two) for one, two in zip(before, other.parameters(), strict=True))
    with refuses("checkpoint.optimizer-without-model", "optimizer"):
        sw.save(tmp_path, {"optimizer": state["optimizer"]})
    only = {"model": make_net(), "epoch": 0}
    assert sw.load(tmp_path, only) == 7
    assert only["epoch"] == 3
    assert CheckpointDirectory(tmp_path).latest().name == "step-00000007"


def test_several_models_and_optimizers_are_distinguished_and_tied_weights_are_saved_once(tmp_path):
    def make():
        critic = torch.nn.Linear(3, 3)
        tied = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        tied[1].weight = tied[0].weight
        state = {"critic": critic, "generator": tied}
        for name in ("critic", "generator"):
            state[f"{name}_optimizer"] = torch.optim.Adam(state[name].parameters(), lr=0.1)
        return state

    first, second = make(), make()
    for name in ("critic", "generator"):
        first[name](torch.ones(2, 3)).square().sum().backward()
        first[f"{name}_optimizer"].step()
    sw.save(tmp_path, first)
    sw.load(tmp_path, second)
    for name in ("critic", "generator"):
        torch.testing.assert_close(second[name].state_dict(), first[name].state_dict(), rtol=0, atol=0)
        ours, theirs = (state[f"{name}_optimizer"].state_dict() for state in (second, first))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_state_dicts_come_back_as_they_were():
    value = {
        "tuple": (1, 2.5, None),
        "nested": [{"inf": float("-inf"), "flags": [True, "x"]}],
        "counts": Counter({3: 2}),
        "by number": {1: "one", "$key": 2},
        "empty": {},
        "tensor": torch.arange(3),
        "listed": [torch.ones(2)],
    }
    tensors = {}
    found = _decode(_encode(value, "key", tensors), tensors)
    assert len(tensors) == 2
    torch.testing.assert_close([found.pop("tensor"), *found.pop("listed")], [value.pop("tensor"), *value.pop("listed")])
    assert found == value
    assert type(found["counts"]) is Counter
    with refuses("checkpoint.value-unsupported", "key/what", "object"):
        _encode({"what": object()}, "key", {})
