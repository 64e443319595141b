"""Models whose forward writes to their weights: equal to plain PyTorch, or refused by the parameter's name."""

import dataclasses

import pytest
import torch
from torch import nn
from training.test_unusual_models import FP64, ROWS, Net, job_of, plain_losses

from refusals import refuses
from shardwise.errors import InputError
from shardwise.planner.settle import LocalDevice, settle
from shardwise.testing import run_ranks
from shardwise.training.build import build_step


class Teacher(Net):
    """A momentum teacher that starts as a copy, as in MoCo, and follows in forward."""

    def set_up(self):
        self.teacher = nn.Linear(6, 3)
        self.teacher.load_state_dict(self.head.state_dict())
        self.teacher.requires_grad_(requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            for own, followed in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                own.data = own.data * 0.8 + followed.data * 0.2
        return super().forward(x) - self.teacher(x).tanh()


class Clamped(Net):
    def forward(self, x):
        with torch.no_grad():
            self.head.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


class UnitNorm(Net):
    """Writes through `.data`, which no version counter shows."""

    def forward(self, x):
        self.head.weight.data.div_(self.head.weight.data.norm(dim=1, keepdim=True))
        return super().forward(x)


class Renewed(Net):
    def forward(self, x):
        self.head.weight.data = self.head.weight.data.clamp(-0.2, 0.2)
        return super().forward(x)


class BlockClamped(Net):
    """A block of its own writes, so that under FSDP2 an inner unit does."""

    class Layer(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    def set_up(self):
        self.layers = nn.ModuleList([self.Layer(6, 6), self.Layer(6, 6)])


MODELS = {each.__name__: each for each in (Teacher, Clamped, UnitNorm, Renewed, BlockClamped)}
PLANS = (
    "ddp",
    "ddp+accumulation=2",
    "zero1",
    "zero2",
    "zero3",
    "ddp+offload.optimizer=cpu",
    "zero1+offload.optimizer=cpu",
)
REFUSED = {
    "ddp+accumulation=2": {"Teacher": ("teacher.", "2 forward passes")},
    "zero1": {"Renewed": ("head.weight", "zero = 1")},
    "zero2": dict.fromkeys(MODELS, ("zero = 2",)),
    "zero3": dict.fromkeys(MODELS, ("zero = 3",)),
}


def plan_of(text, size):
    preset, *settings = text.split("+")
    overrides = dict(each.split("=") for each in settings)
    plan = settle(preset, batch_size=ROWS, world_size=size, device=LocalDevice(), overrides=overrides)
    return dataclasses.replace(plan, precision=FP64)


def losses_under(world, make_model, name):
    step = build_step(job_of(make_model), plan_of(name, world.size), world)
    try:
        return [world.sum({"loss": float(step(batch).loss_share)})["loss"] for batch in step.feed]
    except InputError as error:
        return error.code, str(error)


@pytest.mark.parametrize("kind", MODELS)
def test_a_forward_that_writes_weights_is_equal_or_refused_by_name(kind):
    make_model = MODELS[kind]
    expected = plain_losses(make_model)

    def body(world):
        return {name: losses_under(world, make_model, name) for name in PLANS}

    for name, found in run_ranks(body, 2)[0].items():
        values = REFUSED.get(name, {}).get(kind)
        if values is None:
            assert found == pytest.approx(expected, rel=1e-9), f"{kind} under {name}"
        else:
            assert found[0] == "support.forward-changes-weights", f"{kind} under {name}: {found}"
            assert [value for value in values if value not in found[1]] == [], found[1]


def test_a_pipeline_refuses_a_forward_that_writes_weights():
    def body(world):
        step = build_step(job_of(BlockClamped), plan_of("pp+accumulation=2", world.size), world)
        for batch in step.feed:
            step(batch)

    with refuses("support.forward-changes-weights", "layers.", ".weight", "pipeline"):
        run_ranks(body, 2)
