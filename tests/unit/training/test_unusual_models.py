"""Legal but unusual PyTorch models: each trains as a hand-written loop trains it, or is refused by name."""

import dataclasses
import functools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import shardwise as sw
from jobs import FP64
from refusals import refuses
from shardwise.errors import InputError
from shardwise.parallel import meta_model
from shardwise.planner.settle import LocalDevice, settle
from shardwise.testing import run_ranks
from shardwise.training.build import build_step

ROWS, STEPS = 12, 4


class Net(nn.Module):
    """Two linear layers of six and three features; kinds of models differ in what `set_up` adds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 3)
        self.set_up()

    def set_up(self):
        pass

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Hooked(Net):
    def set_up(self):
        mask = (torch.arange(36) % 3 > 0).view(6, 6)
        self.layers[0].weight.register_hook(lambda gradient: gradient * mask)


class Marked(Net):
    """Attributes that `optimizer` reads: one set after registration, one before."""

    def set_up(self):
        self.head.weight.lr_scale = 0.1
        bias = nn.Parameter(torch.zeros(3))
        bias.lr_scale = 10.0
        self.head.bias = bias


class MarkedByName(Marked):
    """The same, and built on the meta device: its weights are initialized by parameter name."""

    def init_weights(self):
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3)

    def set_up(self):
        super().set_up()
        self.init_weights()


class SlowParameter(nn.Parameter):
    lr_scale = 0.01


class Subclassed(Net):
    def set_up(self):
        self.head.weight = SlowParameter(self.head.weight.detach())


class Shuffled(Net):
    """Values from three generators that are neither parameters nor buffers."""

    def set_up(self):
        self.order = torch.randperm(6)
        self.scale = np.random.rand(6)
        self.signs = [random.choice((-1.0, 1.0)) for _ in range(6)]

    def forward(self, x):
        return super().forward(x[:, self.order] * torch.tensor(self.scale) * torch.tensor(self.signs, dtype=x.dtype))


class ShuffledByName(Shuffled):
    def init_weights(self):
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3)

    def set_up(self):
        self.init_weights()
        super().set_up()


class Listed(Net):
    """Parameters that are registered, and used through a plain list."""

    def set_up(self):
        self.scales = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(3))]
        for index, scale in enumerate(self.scales):
            self.register_parameter(f"scale_{index}", scale)

    def forward(self, x):
        return super().forward(x * self.scales[0]) * self.scales[1]


class Computed(Net):
    def set_up(self):
        self.register_buffer("first", self.head.weight.detach().norm(dim=1))

    def forward(self, x):
        return super().forward(x) / self.first


class Tied(Net):
    """One parameter object that two modules register."""

    def set_up(self):
        weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.layers[0].weight, self.layers[1].weight = weight, weight


def lazy():
    model = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(3))
    model(torch.zeros(1, 6))
    return model


def normed():
    """A batch norm whose output a hook of the user's own changes."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model[1].register_forward_hook(lambda module, inputs, output: output * 2)
    return model


MODELS = {
    "hooked": Hooked,
    "marked": Marked,
    "marked by name": MarkedByName,
    "subclassed": Subclassed,
    "shuffled": Shuffled,
    "shuffled by name": ShuffledByName,
    "listed": Listed,
    "computed": Computed,
    "tied": Tied,
    "lazy": lazy,
    "normed": normed,
}
BY_NAME = {"marked by name", "shuffled by name"}
PLANS = ("ddp", "zero1", "zero2", "zero3", "pp", "zero3+offload")
REFUSED = {
    "hooked": {"zero2", "zero3", "zero3+offload"},
    "subclassed": {"zero1", "zero2", "zero3", "zero3+offload"},
    "listed": {"zero2", "zero3", "zero3+offload", "pp"},
    "tied": {"pp"},
    "lazy": {"pp"},  # no list of layers
    "normed": {"pp"},
}


def optimizer(named):
    """Groups by an attribute of parameters, as the optimizers of Mamba and timm are made."""
    groups = [{"params": [parameter], "lr": 0.1 * getattr(parameter, "lr_scale", 1.0)} for _, parameter in named]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def points():
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(ROWS, 6, generator=generator), torch.arange(ROWS) % 3)


def job_of(make_model):
    return sw.Job(
        model=make_model,
        data=lambda split: points() if split == "train" else None,
        loss=sw.losses.cross_entropy,
        optimizer=optimizer,
        batch_size=ROWS,
        steps=STEPS,
    )


def plain_losses(make_model, start=None):
    """Train in plain PyTorch, on the whole data set in every step, from the weights in `start` where given.

    In a process of its own: with CUDA, a process that has run backward cannot be forked into ranks.
    """
    return run_ranks(lambda _: _plain_losses(make_model, start), 1)[0]


def _plain_losses(make_model, start):
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    model = make_model().double()
    if start is not None:
        model.load_state_dict(start)
    moved = optimizer(model.named_parameters())
    inputs, targets = points().tensors
    losses = []
    for _ in range(STEPS):
        loss = functional.cross_entropy(model(inputs.double()), targets)
        moved.zero_grad()
        loss.backward()
        moved.step()
        losses.append(loss.item())
    return losses


def plan_of(name, size):
    preset, _, offload = name.partition("+")
    overrides = {"offload.optimizer": "cpu", "offload.parameters": "cpu"} if offload else {}
    plan = settle(preset, batch_size=ROWS, world_size=size, device=LocalDevice(), overrides=overrides)
    return dataclasses.replace(plan, precision=FP64)


def losses_under(world, make_model, name):
    """Return losses and the first weights, or the sentence of a refusal."""
    try:
        step = build_step(job_of(make_model), plan_of(name, world.size), world)
    except InputError as error:
        return str(error), None
    start = sw.full_state_dict(step.model)
    return [world.sum({"loss": float(step(batch).loss_share)})["loss"] for batch in step.feed], start


def check(kind, name, found, expected):
    if name in REFUSED.get(kind, ()):
        assert isinstance(found, str), f"{kind} under {name} was not refused"
        return
    assert not isinstance(found, str), f"{kind} under {name}: {found}"
    assert found == pytest.approx(expected(), rel=1e-9), f"{kind} under {name}"


@pytest.mark.parametrize("kind", MODELS)
def test_an_unusual_model_trains_as_in_plain_pytorch_or_is_refused(kind):
    make_model = MODELS[kind]
    plain = functools.cache(lambda: plain_losses(make_model))

    def body(world):
        return {name: losses_under(world, make_model, name) for name in PLANS}

    everywhere = run_ranks(body, 2)[0]
    everywhere["one process"] = run_ranks(lambda world: losses_under(world, make_model, "ddp"), 1)[0]
    for name, (found, start) in everywhere.items():
        check(kind, name, found, functools.partial(plain_losses, make_model, start) if kind in BY_NAME else plain)


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("hooked", ("support.parameter-gradient-hook", "layers.0.weight")),
        ("subclassed", ("support.parameter-subclass", "head.weight", "SlowParameter")),
        ("listed", ("support.parameter-second-reference", "scale_0", "scales[0]")),
    ],
)
def test_a_refusal_names_the_parameter(kind, refusal):
    with refuses(*refusal):
        run_ranks(lambda world: build_step(job_of(MODELS[kind]), plan_of("zero3", 2), world) and None, 2)


def test_a_lazy_module_that_has_seen_no_input_is_refused():
    with refuses("model.lazy-parameter", "weight"):
        run_ranks(lambda world: build_step(job_of(lambda: nn.LazyLinear(3)), plan_of("ddp", 1), world) and None, 1)


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("hooked", "a gradient hook on layers.0.weight"),
        ("shuffled", "order, sampled while it is built"),
        ("listed", "a parameter kept in scales[0]"),
        ("computed", "buffer first, computed from weights"),
    ],
)
def test_a_model_too_large_for_every_rank_is_refused_by_what_it_would_lose(kind, lost, monkeypatch):
    monkeypatch.setattr(meta_model, "_HOST_SHARE", 0.0)
    with refuses("model.meta-loses-state", lost):
        meta_model.job_meta_model(MODELS[kind], seed=0, weights=None, rank=0, size=1, dtype=torch.float32)
