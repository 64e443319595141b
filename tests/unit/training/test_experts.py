"""Models whose ranks use different parameters, and parameters that FSDP2 does not shard, equal one process."""

import dataclasses

import pytest
import torch
from torch import nn
from training.test_strategies import FP64, check_equal, trained

import shardwise as sw
from jobs import Points, points_job
from refusals import refuses
from shardwise.checkpoint import read_manifest
from shardwise.plans import Precision
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.loop import run_loop
from shardwise.training.spec import SaveSpec

UNUSED = {"communication.find_unused_parameters": "true"}


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """Four experts of equal size; each row goes to one of them, by its data."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, route):
        mixed = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (route % 4 == index).nonzero()[:, 0]
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(x[rows]))
        return x + mixed * self.scale


class Units(nn.Module):
    """Each expert is a unit of FSDP2."""

    def __init__(self):
        super().__init__()
        self.stem, self.mixture, self.head = nn.Linear(4, 6), Experts(), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.mixture(self.stem(x), route(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(6), Experts()

    def forward(self, x, route):
        return self.mixture(self.norm(x), route)


class Deep(nn.Module):
    """Experts inside of the units."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 3)  # behind the layers, where a pipeline expects it

    def chosen(self, x):
        return [x.ndim == 2] * len(self.blocks)

    def forward(self, x):
        hidden = self.stem(x)
        for index, (block, runs) in enumerate(zip(self.blocks, self.chosen(x), strict=True)):
            if runs:
                hidden = block(hidden, route(x) // (index + 1))
        return self.head(hidden)


class Dropped(Deep):
    """The data of a rank decides which blocks it runs, from the first step on or after some passes."""

    def __init__(self, after):
        super().__init__()
        self.after, self.calls = after, 0

    def chosen(self, x):
        return [self.calls <= self.after or bool((route(x)[0] + index) % 3) for index in range(len(self.blocks))]

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class OnData(Deep):
    """Blocks read the data itself, which has no gradient; FSDP2 reduces them when backward ends."""

    def forward(self, x):
        wide = torch.cat([x, x[:, :2]], 1)
        hidden = self.stem(x)
        for index, block in enumerate(self.blocks):
            if (route(x)[0] + index) % 2:
                hidden = hidden + block(wide, route(x) // (index + 1))
        return self.head(hidden)


class Odd(nn.Module):
    """A scalar, a parameter without elements, one with fewer rows than ranks, and layers without a forward."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.scale, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 4))
        self.shift = nn.Parameter(torch.ones(1, 3))
        parts = ({"mix": nn.Sequential(nn.Linear(6, 6), nn.ReLU()), "norm": nn.LayerNorm(6)} for _ in range(2))
        self.layers = nn.ModuleList(map(nn.ModuleDict, parts))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer["norm"](x + self.scale * layer["mix"](x))
        return self.head(x) + self.shift + self.none.sum()


class Front(nn.Module):
    """Each expert is a unit of FSDP2 on the first stage of a pipeline, in front of its layers."""

    def __init__(self):
        super().__init__()
        self.stem, self.mixture = nn.Linear(4, 6), Experts()
        self.blocks = nn.ModuleList(wide() for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.mixture(self.stem(x), route(x))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class InLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture, self.wide = Experts(), wide()

    def forward(self, x):
        return self.wide(self.mixture(x, route(x)))


class Inside(nn.Module):
    """Each expert is a unit of FSDP2 within a pipeline layer, since find_blocks looks into a Sequential."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(InLayer()) for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.stem(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def route(x):
    return (x[:, 0] * 100).abs().long()


def wide():
    return nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 6))


def experts_job(model, **changes):
    """Seven steps of 8, of which the sixth is short."""
    return points_job(model, Points(44, 4), **{"steps": 7, **changes})


PLANS = [
    (2, "ddp", UNUSED),
    (2, "ddp", {**UNUSED, "accumulation": "2"}),
    (2, "zero1", UNUSED),
    (2, "zero2", {}),
    (2, "zero3", {}),
    (2, "zero3", {"accumulation": "2"}),
    (2, "zero3", {"accumulation": "2", "gradient_sync": "every"}),
    (2, "zero3", {"recompute": "full"}),
    (2, "zero3", {"communication.prefetch": "2"}),
    (2, "zero3", {"offload.parameters": "cpu", "offload.optimizer": "cpu"}),
    (2, "zero2", {"offload.optimizer": "cpu"}),
    (4, "hsdp", {}),
    (4, "pp2.shard2", {"zero": "2", "accumulation": "2"}),
    (4, "pp2.shard2", {"zero": "3", "accumulation": "2"}),
    (4, "pp2.shard2", {"zero": "3", "accumulation": "2", "recompute": "full"}),
    (4, "pp2.shard2", {"zero": "3", "accumulation": "2", "pipeline.schedule": "interleaved_1f1b"}),
]


@pytest.mark.parametrize(
    ("model", "plan"),
    [(Deep, PLANS[0]), (Deep, PLANS[5]), (Units, PLANS[4]), (Odd, PLANS[4]), (Front, PLANS[13])],
    ids=["ddp", "in-units", "as-units", "odd", "in-stages"],
)
def test_ranks_that_use_different_parameters_equal_one_process(model, plan):
    check_equal(experts_job(model), *plan)


@pytest.mark.prove
@pytest.mark.parametrize("plan", PLANS, ids=[f"{n}-{name}-{'-'.join(over.values())}" for n, name, over in PLANS])
@pytest.mark.parametrize("model", [Deep, Units, Odd, Front, Inside])
def test_every_plan_with_different_parameters_by_rank_equals_one_process(model, plan):
    stages = 4 if "pipeline.schedule" in plan[2] else 2
    if "pp" not in plan[1] or len(getattr(model(), "blocks", ())) >= stages:
        check_equal(experts_job(model), *plan)


def check_like_ddp(job, nproc, name, overrides):
    """Compare with DDP on the same ranks, since what a model runs depends on the rows beside."""
    losses, _, state = run_ranks(trained, nproc, job, "ddp", UNUSED)[0]
    other, _, other_state = run_ranks(trained, nproc, job, name, overrides)[0]
    torch.testing.assert_close(other, losses, rtol=1e-9, atol=0)
    torch.testing.assert_close(other_state, state, rtol=1e-8, atol=1e-10)


DROPPING = {"first": lambda: Dropped(0), "later": lambda: Dropped(3), "on-data": OnData}


@pytest.mark.representative("on-data")
@pytest.mark.parametrize("model", DROPPING.values(), ids=DROPPING)
def test_blocks_that_only_some_ranks_run_train_as_under_ddp(model):
    check_like_ddp(experts_job(model), 2, "zero3", {})


@pytest.mark.prove
@pytest.mark.parametrize("plan", [plan for plan in PLANS[3:] if "accumulation" not in plan[2]], ids=str)
@pytest.mark.parametrize("model", DROPPING.values(), ids=DROPPING)
def test_every_plan_trains_blocks_of_some_ranks_as_ddp_does(model, plan):
    check_like_ddp(experts_job(model), *plan)


def test_blocks_in_another_order_than_at_first_are_refused_by_name():
    class Turned(Deep):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            hidden = self.stem(x)
            for index in (0, 1, 2) if self.calls < 4 else (2, 1, 0):
                hidden = self.blocks[index](hidden, route(x))
            return self.head(hidden)

    with refuses("support.fsdp-block-order", "blocks.1"):
        run_ranks(trained, 2, experts_job(Turned), "zero3", {})


def test_lower_precision_sums_gradients_of_one_dtype():
    def body(world, overrides):
        # FSDP2 casts what enters the model, and with it the routes: both runs are in bf16.
        return trained(world, experts_job(Deep), "zero3", overrides, Precision(compute="bf16"))[0]

    losses, accumulated = (run_ranks(body, 2, overrides)[0] for overrides in ({}, {"accumulation": "2"}))
    torch.testing.assert_close(accumulated, losses, rtol=0.02, atol=0)


def test_ddp_names_parameters_that_a_later_step_does_not_use():
    with refuses("train.unused-parameters", "find_unused_parameters=true"):
        run_ranks(trained, 2, experts_job(Late), "ddp", {})


class Late(nn.Module):
    """Uses all of its parameters at first."""

    def __init__(self):
        super().__init__()
        self.stem, self.extra, self.calls = nn.Linear(4, 3), nn.Linear(4, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.stem(x) if self.calls > 2 else self.stem(x) + self.extra(x)


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({}, ("gathers blocks.0", "blocks.0.norm (LayerNorm)")),
        ({"forward": lambda model, batch: model.stem(batch[0])}, ("stem (Linear)",)),
    ],
)
def test_parameters_used_outside_of_their_unit_are_named(changes, values):
    class Outside(Deep):
        def forward(self, x):
            return self.head(self.blocks[0].norm(self.stem(x)))

    with refuses("support.fsdp-use-outside-block", *values):
        run_ranks(trained, 2, experts_job(Outside, **changes), "zero3", {})


def test_a_loop_of_ones_own_has_no_gradient_where_no_rank_used_a_parameter():
    class Chosen(Units):
        def forward(self, x):
            return self.head(self.mixture(self.stem(x), torch.full((len(x),), int(x[0, 0]))))

    def body(world, name):
        torch.manual_seed(0)
        model = Chosen()
        model.mixture.scale = nn.Parameter(torch.ones(1))
        communication = dataclasses.replace(sw.Plan().communication, find_unused_parameters=True)
        plan = dataclasses.replace(sw.Plan.preset(name, world.size), communication=communication)
        model = sw.parallelize(model, plan, world)
        model(torch.full((2, 4), float(world.rank))).sum().backward()
        named = sw.unwrap(model).named_parameters()
        return {key: None if each.grad is None else whole(each.grad) for key, each in named}

    (ddp, _), (fsdp, _) = run_ranks(body, 2, "ddp"), run_ranks(body, 2, "fsdp")
    assert ddp["mixture.experts.2.up.weight"] is fsdp["mixture.experts.2.up.weight"] is None
    assert ddp["mixture.experts.1.up.weight"] is not None
    torch.testing.assert_close(fsdp, ddp)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def test_scalars_are_refused_where_their_gradients_would_not_be_summed():
    def body(world):
        with refuses("support.fsdp-scalar-parameter", "mixture.scale", "a custom training loop"):
            sw.parallelize(Units(), sw.Plan.preset("fsdp", world.size), world)
        return True

    assert run_ranks(body, 2) == [True, True]


@pytest.mark.representative("fsdp")
@pytest.mark.parametrize("name", ["fsdp", "zero1"])
def test_states_of_scalars_are_resumed(name, tmp_path):
    def body(world, **options):
        job, losses = experts_job(Odd, steps=4), {}
        plan = dataclasses.replace(sw.Plan.preset(name, world.size, batch_size=8), precision=FP64)
        events = EventLog(None, lambda event: losses.update(enumerate(event.get("losses", []), event.get("first", 0))))
        save = SaveSpec(every=2, **options)
        run_loop(job, plan, world, events, Timeline(), checkpoints=tmp_path, save=save)
        return losses

    uninterrupted = run_ranks(body, 2)[0]
    saved = next(path for path in tmp_path.glob("step*") if read_manifest(path).step == 2)
    resumed = run_ranks(body, 2, resume=str(saved))[0]
    assert resumed == pytest.approx({step: uninterrupted[step] for step in (2, 3)}, rel=1e-12)
