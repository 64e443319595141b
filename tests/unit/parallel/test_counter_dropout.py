"""Counter-based dropout gives every layout the numbers of one process."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn

import shardwise as sw
from jobs import FP64, Points, train_split
from refusals import refuses
from shardwise.data.cursor import SamplePositions
from shardwise.parallel.counter_dropout import CounterDropout, dropout_mask, replace_dropouts
from shardwise.parallel.counter_random import CounterRandom, RandomContext
from shardwise.plans import Pipeline
from shardwise.testing import run_ranks
from shardwise.training.build import build_step

DROP = nn.Dropout(0.4)
POINTS = Points(22, 3, 6)  # in batches of 8, the last step of an epoch is short and filled


class Block(nn.Module):
    """Drops twice by one module and once by another, of which the second stands in every block."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop, self.shared = nn.Dropout(0.3), DROP

    def forward(self, x):
        return self.drop(x + self.shared(self.down(torch.relu(self.up(self.drop(x))))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.first = nn.Linear(6, 6), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.channels, self.head = nn.Dropout1d(0.3), nn.Linear(6, 3)

    def forward(self, x):
        rows = x.shape[0]
        x = self.first(self.enter(x.flatten(0, 1))).view(rows, 3, 6)
        for block in self.blocks:
            x = block(x)
        return self.head(self.channels(x).mean(1))


def make_job(model=Net, **changes):
    fields = {
        "data": train_split(POINTS),
        "loss": sw.losses.cross_entropy,
        "optimizer": sw.adamw(lr=1e-2),
        "batch_size": 8,
        "steps": 5,
        "masks": "keyed",
    }
    return sw.Job(model=model, **{**fields, **changes})


def losses(world, preset, job=None, **changes):
    """Train and return the global loss of each step."""
    job = job or make_job()
    accumulation = changes.pop("accumulation", 1)
    plan = sw.Plan.preset(preset, world.size, batch_size=job.batch_size, accumulation=accumulation)
    plan = dataclasses.replace(plan, precision=FP64, **changes)
    step = build_step(job, plan, world)
    found = []
    for batch in step.feed:
        report = step(batch)
        share = float(report.loss_share)
        found.append(world.sum({"loss": share})["loss"])
    return found


@pytest.fixture(scope="module")
def alone():
    return run_ranks(losses, 1, "ddp")[0]


@pytest.mark.representative("1-ddp-changes0", "2-zero1-changes3", "2-fsdp-changes4", "2-pp-changes6")
@pytest.mark.parametrize(
    ("nproc", "preset", "changes"),
    [
        (1, "ddp", {"accumulation": 4, "recompute": "full"}),
        (1, "ddp", {"accumulation": 2, "recompute": "selective"}),
        (2, "ddp", {}),
        (2, "zero1", {"accumulation": 2}),
        (2, "fsdp", {"recompute": "full"}),
        (2, "pp", {"accumulation": 4, "pipeline": Pipeline(schedule="zbv")}),
        (2, "pp", {"accumulation": 4, "recompute": "full", "pipeline": Pipeline(schedule="interleaved_1f1b")}),
    ],
)
def test_every_layout_gives_the_losses_of_one_process(nproc, preset, changes, alone):
    assert run_ranks(losses, nproc, preset, **changes)[0] == pytest.approx(alone, rel=1e-9)


def test_dropout_is_on(alone):
    assert run_ranks(losses, 1, "ddp", make_job(masks="drawn"))[0] != pytest.approx(alone, rel=1e-3)
    assert run_ranks(losses, 1, "ddp", make_job(seed=1))[0] != pytest.approx(alone, rel=1e-3)


class DropPath(nn.Module):
    """Stochastic depth by sample, as timm and torchvision write it."""

    def forward(self, x):
        return x * x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(0.7).div_(0.7)


class StochasticBlock(nn.Module):
    """Attention that drops inside of its kernel, dropout by function, and stochastic depth."""

    def __init__(self):
        super().__init__()
        self.up, self.path = nn.Linear(6, 6), DropPath()

    def forward(self, x):
        mixed = nn.functional.scaled_dot_product_attention(self.up(x), x, x, dropout_p=0.2)
        return x + self.path(nn.functional.dropout(mixed, 0.3))


class Stochastic(nn.Module):
    """Noise of its own before and after the blocks, and tokens hidden as masked autoencoders do."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(StochasticBlock() for _ in range(4))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        hidden = torch.rand(x.shape[0], x.shape[1], device=x.device).argsort(1)[:, :1]
        x = self.enter(x.scatter(1, hidden[..., None].expand(-1, -1, 6), 0.0))
        x = x + 0.1 * torch.randn_like(x)
        for block in self.blocks:
            x = block(x)
        x = torch.normal(x, 0.1) + torch.distributions.Normal(0.0, x.exp()).rsample()
        return self.head(nn.functional.gumbel_softmax(x, dim=-1).mean(1))


@pytest.fixture(scope="module")
def stochastic_alone():
    return run_ranks(losses, 1, "ddp", make_job(Stochastic))[0]


@pytest.mark.representative("1-ddp-changes1", "2-fsdp-changes3", "2-pp-changes5")
@pytest.mark.parametrize(
    ("nproc", "preset", "changes"),
    [
        (1, "ddp", {"accumulation": 4, "recompute": "full"}),
        (1, "ddp", {"accumulation": 2, "recompute": "selective"}),
        (2, "zero1", {"accumulation": 2}),
        (2, "fsdp", {"recompute": "full"}),
        (2, "pp", {"accumulation": 4}),
        (2, "pp", {"accumulation": 4, "recompute": "full", "pipeline": Pipeline(schedule="interleaved_1f1b")}),
    ],
)
def test_whatever_a_model_draws_is_that_of_one_process_under_every_layout(nproc, preset, changes, stochastic_alone):
    found = run_ranks(losses, nproc, preset, make_job(Stochastic), **changes)[0]
    assert found == pytest.approx(stochastic_alone, rel=1e-9)
    assert run_ranks(losses, 1, "ddp", make_job(Stochastic, seed=1))[0] != pytest.approx(stochastic_alone, rel=1e-3)


class Tensored(nn.Module):
    """Two layers that tensor parallelism shards, with dropout outside or inside of the sharded region."""

    def __init__(self, *, inside):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(18, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.before, self.between, self.after = (nn.Dropout(p) for p in (0.3, 0.3 * inside, 0.3))

    def forward(self, x):
        return self.head(self.after(self.down(self.between(torch.relu(self.up(self.before(x.flatten(1))))))))


class TensoredNoise(Tensored):
    """The same with noise in place of dropout."""

    def __init__(self, *, inside):
        super().__init__(inside=False)
        self.inside = inside

    def forward(self, x):
        x = self.up(torch.normal(x.flatten(1), 0.1))
        x = self.down(x + torch.randn_like(x) if self.inside else x)
        return self.head(x * torch.rand_like(x))


def tensored(*, inside, model=Tensored):
    return make_job(lambda: model(inside=inside), tensor_rules={"up": "column", "down": "row"})


@pytest.mark.parametrize("model", [Tensored, TensoredNoise])
def test_tensor_parallel_ranks_drop_and_draw_alike_outside_of_the_sharded_region(model):
    job = tensored(inside=False, model=model)
    assert run_ranks(losses, 2, "tp", job)[0] == pytest.approx(run_ranks(losses, 1, "ddp", job)[0], rel=1e-9)


def test_dropout_inside_of_a_tensor_parallel_region_is_refused_by_name():
    with refuses("support.keyed-masks-tp", "between"):
        run_ranks(losses, 2, "tp", tensored(inside=True))
    with refuses("support.keyed-draws-tp", "the model", "randn_like"):
        run_ranks(losses, 2, "tp", tensored(inside=True, model=TensoredNoise))


def keys(*indices, seed=0, epoch=0):
    halves = SamplePositions(seed=seed, epoch=epoch, indices=indices).keys().view("int32").reshape(-1, 2)
    return torch.from_numpy(halves).T


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_elements_are_dropped_with_their_probability(p):
    kept = dropout_mask(keys(*range(100)), "drop:0", 10_000, p).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * sigma / 1000
    assert (kept.mean(1) - (1 - p)).abs().max() < 5 * sigma / 100
    assert (kept.mean(0) - (1 - p)).abs().max() < 6 * sigma / 10


@pytest.mark.parametrize(
    "other",
    [
        (keys(1), "drop:0"),
        (keys(0, epoch=1), "drop:0"),
        (keys(0, seed=1), "drop:0"),
        (keys(0), "drop:1"),
        (keys(0), "blocks.1.drop:0"),
    ],
)
def test_masks_of_samples_epochs_seeds_calls_and_places_are_independent(other):
    one = dropout_mask(keys(0), "drop:0", 100_000, 0.5)
    agree = (one == dropout_mask(*other, 100_000, 0.5)).double().mean()
    assert abs(agree - 0.5) < 4 * 0.5 / 100_000**0.5


def test_neighbouring_elements_are_independent():
    kept = dropout_mask(keys(3), "drop:0", 100_000, 0.5)[0]
    for shift in (1, 2, 3, 16, 64, 768, 4096):
        agree = (kept[shift:] == kept[:-shift]).double().mean()
        assert abs(agree - 0.5) < 5 * 0.5 / 95_000**0.5


def keyed(dropout, rows):
    model = nn.Sequential(dropout)
    replace_dropouts(model, staged=False)
    model[0].keys = keys(*range(rows))
    return model[0]


def test_what_stays_is_scaled_up():
    made = keyed(nn.Dropout(0.75), 2)(torch.ones(2, 100))
    assert set(made.unique().tolist()) == {0.0, 4.0}


def test_everything_is_dropped_at_a_probability_of_one():
    assert not keyed(nn.Dropout(1.0), 2)(torch.ones(2, 5)).any()


def test_whole_channels_are_dropped_together():
    made = keyed(nn.Dropout2d(0.5), 4)(torch.ones(4, 16, 3, 3)).flatten(2)
    assert set(made.mean(2).unique().tolist()) == {0.0, 2.0}


def test_nothing_is_dropped_in_eval_mode():
    dropout = keyed(nn.Dropout(0.5), 2).eval()
    assert torch.equal(dropout(torch.ones(2, 5)), torch.ones(2, 5))


def test_a_dropout_in_several_places_becomes_one_for_each():
    model = nn.ModuleList([nn.Sequential(DROP), nn.Sequential(DROP)])
    replace_dropouts(model, staged=True)
    assert [part.name for part in model.modules() if isinstance(part, CounterDropout)] == ["0.0", "1.0"]


def test_a_part_in_several_places_is_refused_under_a_pipeline():
    part = nn.Sequential(nn.GELU(), nn.Dropout(0.5))
    with refuses("support.keyed-masks-shared-module", "0.1", "2 times"):
        replace_dropouts(nn.ModuleList([part, part]), staged=True)


class OneForAll(nn.Linear):
    """Drops a layer for the whole micro-batch."""

    def forward(self, x):
        return super().forward(x) if torch.rand([]) > 0.5 else x


class NoisyWeight(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight + torch.randn_like(self.weight), self.bias)


class Shuffled(nn.Linear):
    def forward(self, x):
        return super().forward(x[:, torch.randperm(x.shape[1])])


@pytest.mark.parametrize(
    ("part", "refusal"),
    [
        (OneForAll, ("support.keyed-draws-rows-first", "1.0", "[]", "rand", "8 rows")),
        (NoisyWeight, ("support.keyed-draws-parameter", "1.0 calls randn_like")),
        (Shuffled, ("support.keyed-draws-operator", "1.0", "randperm")),
    ],
)
def test_a_draw_that_belongs_to_no_sample_is_refused_in_the_first_step_by_name(part, refusal):
    job = make_job(lambda: nn.Sequential(nn.Linear(6, 6), nn.Sequential(part(6, 6)), nn.Flatten(), nn.Linear(18, 3)))
    with refuses(*refusal):
        run_ranks(losses, 1, "ddp", job)


def drawn(operation, rows, seed=0):
    draws = CounterRandom()
    with draws.intercepting(RandomContext(keys(*range(rows), seed=seed), Counter(), ("layer",))):
        return operation()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_keyed_numbers_have_the_distributions_of_torch(dtype):
    uniform = drawn(lambda: torch.rand(100, 1000, dtype=dtype), 100)
    assert uniform.dtype == dtype
    assert (uniform.min() >= 0) & (uniform.max() < 1)
    assert abs(uniform.double().mean() - 0.5) < 5 / (12 * 1e5) ** 0.5 + torch.finfo(dtype).eps
    normal = drawn(lambda: torch.empty(100, 1000, dtype=dtype).normal_(2.0, 3.0), 100).double()
    assert normal.isfinite().all()
    assert abs(normal.mean() - 2) < 0.06
    assert abs(normal.std() - 3) < 0.06


def test_integers_and_rates_of_their_own_are_keyed():
    integers = drawn(lambda: torch.randint(2, 5, (100, 1000)), 100)
    assert set(integers.unique().tolist()) == {2, 3, 4}
    rates = torch.tensor([0.1, 0.9]).repeat(100, 500)
    kept = drawn(lambda: torch.bernoulli(rates), 100)
    assert kept[:, 0::2].mean().item() == pytest.approx(0.1, abs=0.01)
    assert kept[:, 1::2].mean().item() == pytest.approx(0.9, abs=0.01)


def test_a_generator_that_the_user_passes_is_left_alone():
    generator = torch.Generator().manual_seed(3)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
    assert torch.equal(drawn(lambda: torch.rand(4, generator=generator), 4), expected)


class TokensFirst(Net):
    def forward(self, x):
        return self.head(self.first(self.enter(x.transpose(0, 1))).mean(0))


def test_rows_that_do_not_come_first_are_refused():
    with refuses("support.keyed-masks-rows-first", "[3, 8, 6]", "8 rows"):
        run_ranks(losses, 1, "ddp", make_job(TokensFirst))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([POINTS[index] for index in range(22)])


def test_a_stream_is_refused():
    with refuses("support.keyed-masks-no-index"):
        run_ranks(losses, 1, "ddp", make_job(data=lambda _: Stream()))


def test_compiled_plans_are_refused():
    with refuses("support.keyed-masks-engine"):
        run_ranks(losses, 1, "ddp", compile="blocks")


def test_other_names_of_masks_are_refused():
    with refuses("job.unknown-masks", "'random'"):
        make_job(masks="random")
