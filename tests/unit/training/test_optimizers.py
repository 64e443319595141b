"""Every optimizer of torch, and some that look at whole tensors: equal to plain PyTorch, or refused by name."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook
from training.test_unusual_models import STEPS, Net, job_of, plan_of, points

from refusals import refuses
from shardwise.errors import InputError
from shardwise.testing import run_ranks
from shardwise.training.build import build_step


class Lamb(optim.Optimizer):
    """Scales each update by the norm of the whole parameter."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                update = parameter.grad / (parameter.grad.abs() + 1e-3)
                parameter.sub_(update * (parameter.norm() / (update.norm() + 1e-6)), alpha=group["lr"])


class Centred(Lamb):
    """Takes the mean of the rows it is given, on purpose of the local ones alone."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                own = getattr(parameter.grad, "_local_tensor", parameter.grad)
                mine = getattr(parameter, "_local_tensor", parameter)
                mine.sub_(own - own.mean(dim=0, keepdim=True), alpha=group["lr"])


NAMES = sorted(name for name, kind in vars(optim).items() if isinstance(kind, type) and kind is not optim.Optimizer)
FACTORIES = {
    name: partial(lambda kind, named: kind([parameter for _, parameter in named], lr=0.01), getattr(optim, name))
    for name in NAMES
}
FACTORIES["Muon"] = lambda named: optim.Muon([parameter for _, parameter in named if parameter.ndim == 2], lr=0.01)
FACTORIES["Lamb"] = lambda named: Lamb([parameter for _, parameter in named])
FACTORIES["Centred"] = lambda named: Centred([parameter for _, parameter in named])
FACTORIES["AdamW fused"] = lambda named: optim.AdamW([parameter for _, parameter in named], lr=0.01, fused=True)

NEVER = {"LBFGS": "optimizer.needs-closure", "SparseAdam": "optimizer.sparse-gradients"}
NOT_SHARDED = {
    "Adafactor": "optimizer.sharded-update-failed",
    "Rprop": "optimizer.sharded-update-failed",
    "Muon": "optimizer.sharded-update-differs",
    "Centred": "optimizer.sharded-update-differs",
}
PLANS = ("ddp", "zero1", "zero3", "pp")


class Biasless(Net):
    """Muon is for matrices alone, and every parameter is to move."""

    def set_up(self):
        for linear in (*self.layers, self.head):
            linear.bias = None


def losses_under(world, factory, name):
    try:
        job = dataclasses.replace(job_of(Biasless), optimizer=factory)
        step = build_step(job, plan_of(name, world.size), world)
    except InputError as error:
        return error.code, str(error)
    return [world.sum({"loss": float(step(batch).loss_share)})["loss"] for batch in step.feed]


def plain_losses(factory):
    """Train in plain PyTorch."""
    torch.manual_seed(0)
    model = Biasless().double()
    optimizer = factory(list(model.named_parameters()))
    inputs, targets = points().tensors
    losses = []
    for _ in range(STEPS):
        loss = functional.cross_entropy(model(inputs.double()), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_every_optimizer_trains_as_in_plain_pytorch_or_is_refused_by_name():
    assert {"Adafactor", "LBFGS", "Muon", "Rprop", "SGD", "SparseAdam"} <= FACTORIES.keys()

    def body(world):
        return {(kind, name): losses_under(world, FACTORIES[kind], name) for kind in FACTORIES for name in PLANS}

    # In a process of their own: with CUDA, a process that has run backward cannot be forked.
    trained = [kind for kind in FACTORIES if kind not in NEVER]
    [plain] = run_ranks(lambda _: {kind: plain_losses(FACTORIES[kind]) for kind in trained}, 1)
    for (kind, name), found in run_ranks(body, 2)[0].items():
        refusal = NEVER.get(kind) or (NOT_SHARDED.get(kind) if name.startswith("zero") else None)
        if refusal is not None:
            assert found[0] == refusal, f"{kind} under {name}: {found}"
            assert f"optimizer {kind} " in found[1]
        else:
            assert found == pytest.approx(plain[kind], rel=1e-9), f"{kind} under {name}"


class Complex(Net):
    def set_up(self):
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Looked(Net):
    """A sparse gradient that no module announces."""

    def set_up(self):
        self.table = nn.Parameter(torch.ones(2, 6))

    def forward(self, x):
        rows = torch.zeros(len(x), dtype=torch.long)
        return super().forward(x * functional.embedding(rows, self.table, sparse=True))


@pytest.mark.parametrize(
    ("make_model", "refusal"),
    [
        (Complex, ("model.complex-parameter", "phase is torch.complex")),
        (lambda: nn.Embedding(3, 3, sparse=True), ("model.sparse-gradients", "sparse=True")),
        (Looked, ("model.sparse-gradients", "table")),
    ],
)
def test_complex_parameters_and_sparse_gradients_are_refused_by_name(make_model, refusal):
    def body(world):
        step = build_step(job_of(make_model), plan_of("ddp", world.size), world)
        for batch in step.feed:
            step(batch)

    with refuses(*refusal):
        run_ranks(body, 2)


def test_the_trial_of_an_optimizer_on_shards_calls_no_global_hook():
    def build(world):
        steps = []
        factory = lambda named: optim.Adam([parameter for _, parameter in named], lr=1e-2)  # noqa: E731
        handle = register_optimizer_step_post_hook(lambda *_: steps.append(1))
        step = build_step(dataclasses.replace(job_of(Net), optimizer=factory), plan_of("zero3", world.size), world)
        built = len(steps)
        for batch in step.feed:
            step(batch)
            break
        handle.remove()
        return built, len(steps)

    assert run_ranks(build, 2) == [(0, 1), (0, 1)]
