"""Muon beside AdamW: equal to torch.optim.Muon in one process, and to one process under every strategy."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from training.test_resume import LAYOUTS, STEPS, stopped
from training.test_resume import trained as resumed
from training.test_strategies import check_equal, trained

import shardwise as sw
from jobs import FP64, points_job, sentences_job
from refusals import refuses
from shardwise.hardware.cluster import parse_cluster
from shardwise.measurement.memory import LiveBytes
from shardwise.parallel import muon
from shardwise.parallel.collectives import BUCKET_BYTES
from shardwise.parallel.muon import for_model
from shardwise.parallel.muon_matrices import find_matrices
from shardwise.planner.cost.memory import predict_memory
from shardwise.planner.search.subject import describe_job, job_subject, optimizer_shape
from shardwise.plans import Offload
from shardwise.testing import run_ranks
from shardwise.training.preflight import check_job

MUON = sw.muon(lr=0.02, adamw_lr=1e-2, split={"mlp.up": (112, 64)})
"""The parts of mlp.up have different factors of the learning rate."""
PLANS = [
    (2, "ddp", {}),
    (2, "zero1", {}),
    (3, "zero1", {}),
    (2, "zero2", {}),
    (2, "zero3", {"accumulation": "2"}),
    (4, "hsdp", {}),
    (2, "tp", {}),
    (4, "shard2.tp2", {}),
    (4, "replicate2.shard2", {"zero": "1"}),
    (2, "pp", {}),
    (4, "shard2.pp2", {}),
    (2, "cp", {}),
]


def job_of(**changes):
    return sentences_job("llama-tiny", optimizer=MUON, **changes)


@pytest.fixture(scope="module")
def alone():
    return {size: run_ranks(trained, 1, job_of(batch_size=size), "ddp", {})[0] for size in (6, 8)}


@pytest.mark.parametrize(
    ("nproc", "name", "overrides"), PLANS, ids=[f"{n}-{name}-{'-'.join(over.values())}" for n, name, over in PLANS]
)
def test_muon_under_a_plan_equals_one_process(alone, nproc, name, overrides):
    batch_size = 8 if 8 % nproc == 0 else 6
    check_equal(job_of(batch_size=batch_size), nproc, name, overrides, alone[batch_size])


@pytest.mark.parametrize(("before", "after"), [("zero1", "one"), ("fsdp2", "tp2"), ("pp2", "shard2.tp2")])
def test_a_run_with_muon_resumes_under_another_strategy(before, after, tmp_path):
    job = job_of(steps=STEPS)
    expected, state = run_ranks(resumed, 1, "one", job=job)[0]
    run_ranks(stopped, LAYOUTS[before][0], before, tmp_path, optimizer=MUON)
    losses, found = run_ranks(resumed, LAYOUTS[after][0], after, tmp_path, job=job)[0]
    for number, loss in losses.items():
        assert loss == pytest.approx(expected[number], rel=1e-9)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


def layers(num_matrices):
    """Return a model with this number of hidden matrices, which Muon updates, and a head."""
    hidden = []
    for index in range(num_matrices):
        hidden += [nn.Linear(16 if index else 6, 16), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(16, 3))


@pytest.mark.parametrize(("num_matrices", "batch_bytes"), [(2, BUCKET_BYTES), (5, 1)], ids=["few", "batches"])
@pytest.mark.parametrize("name", ["zero1", "zero3", "shard2.tp2"])
def test_ranks_that_own_no_matrix_of_a_batch_take_part(monkeypatch, name, num_matrices, batch_bytes):
    monkeypatch.setattr(muon, "BUCKET_BYTES", batch_bytes)  # 1: each batch has one matrix per rank, the last one fewer
    rules = {"0": "column", "2": "row"} if "tp" in name else None
    job = points_job(partial(layers, num_matrices), steps=3, optimizer=sw.muon(lr=0.02), tensor_rules=rules)
    check_equal(job, 4, name, {})


class Net(nn.Module):
    """A tall fused weight of two matrices of unequal height, a wide hidden layer, an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.fused = nn.Linear(8, 20)
        self.out = nn.Linear(20, 8)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, x):
        return self.head(self.out(torch.tanh(self.fused(self.norm(self.embed(x))))))


class Separate(Net):
    """The same network, whose fused weight is two parameters."""

    def __init__(self):
        super().__init__()
        rows = self.fused.weight.detach()
        self.fused = None
        self.first, self.second = nn.Parameter(rows[:12].clone()), nn.Parameter(rows[12:].clone())
        self.bias = nn.Parameter(torch.zeros(20))

    def forward(self, x):
        hidden = functional.linear(self.norm(self.embed(x)), torch.cat([self.first, self.second]), self.bias)
        return self.head(self.out(torch.tanh(hidden)))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_muon_equals_torch_bit_for_bit(adjust_lr, nesterov):
    torch.manual_seed(0)
    model = Net()
    nn.init.zeros_(model.fused.bias)
    torch.manual_seed(0)
    plain = Separate()
    settings = sw.muon(
        lr=0.02, adamw_lr=0.01, adjust_lr=adjust_lr, nesterov=nesterov, split={"fused": (12, 8)}, weight_decay=0.2
    )
    ours = for_model(settings, model)(model.named_parameters())
    hidden = [plain.first, plain.second, plain.out.weight]
    others = [each for each in plain.parameters() if all(each is not one for one in hidden)]
    groups = [
        {"params": [each for each in others if each.ndim > 1]},
        {"params": [each for each in others if each.ndim == 1], "weight_decay": 0.0},
    ]
    theirs = [
        torch.optim.Muon(hidden, lr=0.02, adjust_lr_fn=adjust_lr, nesterov=nesterov, weight_decay=0.2),
        torch.optim.AdamW(groups, lr=0.01, fused=True),
    ]
    for step in range(4):
        tokens = (torch.arange(16) * (step + 3)) % 10
        for network, optimizers in ((model, [ours]), (plain, theirs)):
            network.zero_grad()
            functional.cross_entropy(network(tokens), (tokens + 1) % 10).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert torch.equal(model.fused.weight, torch.cat([plain.first, plain.second]))
    for name in ("out.weight", "out.bias", "embed.weight", "head.weight", "norm.weight"):
        assert torch.equal(model.get_parameter(name), plain.get_parameter(name)), name


class Conv1D(nn.Module):
    """transformers' linear module, whose weight is [inputs, outputs]."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ self.weight


class Gpt2Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(12, 4), Conv1D(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.filter = nn.Conv1d(4, 4, 3)


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(9, 4), nn.Embedding(5, 4)
        self.table = nn.Parameter(torch.randn(3, 4))
        self.h = nn.ModuleList([Gpt2Block(), Gpt2Block()])
        self.lm_head = nn.Linear(4, 9, bias=False)
        self.lm_head.weight = self.wte.weight


def test_a_conv1d_is_updated_as_the_linear_module_of_its_transpose():
    torch.manual_seed(0)
    weight, gradient = torch.randn(2, 3, 12, 4).unbind()

    def updated(module, parameter, place):
        parameter.data.copy_(place(weight))
        net = nn.Sequential(nn.Sequential(module), nn.Linear(4, 4))
        optimizer = for_model(sw.muon(lr=0.1, split={"0.0": 3}, ns_dtype="fp64"), net)(net.named_parameters())
        parameter.grad = place(gradient)
        optimizer.step()
        return place(parameter.detach())

    weight, gradient = weight[0], gradient[0]
    linear, transposed = nn.Linear(4, 12), Conv1D(12, 4)
    expected = updated(linear, linear.weight, lambda each: each)
    torch.testing.assert_close(updated(transposed, transposed.weight, torch.t), expected, rtol=1e-6, atol=1e-7)


def test_matrices_are_recognised_from_the_model_and_by_patterns():
    found = find_matrices(Gpt2(), sw.muon(lr=0.1))
    block = {"c_attn.weight", "c_proj.weight", "attention.in_proj_weight", "attention.out_proj.weight"}
    assert found.keys() == {f"h.{index}.{name}" for index in range(2) for name in block}
    assert found["h.0.c_attn.weight"].sizes == found["h.0.attention.in_proj_weight"].sizes == (4, 4, 4)
    assert found["h.0.c_attn.weight"].outputs_dim == 1
    chosen = sw.muon(lr=0.1, include=("table", "wpe"), exclude=("h.*.attention", "h.1.c_proj"))
    assert find_matrices(Gpt2(), chosen).keys() == {
        "table", "wpe.weight", "h.0.c_attn.weight", "h.1.c_attn.weight", "h.0.c_proj.weight",
    }  # fmt: skip
    # One layer cannot be a hidden layer and the head.
    resnet = sw.models.resnet18(num_classes=10, in_channels=1)
    with refuses("optimizer.muon-no-matrix", "ResNet"):
        find_matrices(resnet, sw.muon(lr=0.1))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"include": ("tabel",)}, "optimizer.muon-pattern-unmatched"),
        ({"exclude": ("nothing",)}, "optimizer.muon-pattern-unmatched"),
        ({"split": {"wte": 3}}, "optimizer.muon-pattern-unmatched"),
        ({"split": {"c_proj": 3}}, "optimizer.muon-split-uneven"),
        ({"split": {"c_proj": (3, 2)}}, "optimizer.muon-split-uneven"),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(changes, code):
    with refuses(code):
        find_matrices(Gpt2(), sw.muon(lr=0.1, **changes))


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"lr": -1.0}, "optimizer.setting-out-of-range"),
        ({"ns_steps": 0}, "optimizer.setting-out-of-range"),
        ({"ns_dtype": "float64"}, "optimizer.setting-unknown"),
        ({"adjust_lr": "none"}, "optimizer.setting-unknown"),
    ],
)
def test_invalid_settings_are_refused(settings, code):
    with refuses(code):
        sw.muon(**{"lr": 0.1, **settings})
    with refuses("optimizer.muon-without-model"):
        sw.muon(lr=0.1)(nn.Linear(2, 2).named_parameters())


def test_engines_and_offload_that_cannot_gather_matrices_are_refused():
    plan = partial(dataclasses.replace, sw.Plan.preset("zero2", 2, batch_size=8))
    check_job(job_of(), plan())
    for engine in ("deepspeed", "mlx"):
        with refuses("support.muon-engine", engine):
            check_job(job_of(), plan(engine=engine))
    with refuses("support.muon-offload"):
        check_job(job_of(), plan(offload=Offload(optimizer="cpu")))


def test_the_planner_predicts_one_state_for_matrices_and_the_copies_of_the_largest():
    job = sentences_job("llama-tiny", optimizer=sw.muon(lr=0.1), batch_size=1)
    model = job.model()
    optimizer = for_model(job.optimizer, model)(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    with LiveBytes("cpu") as live:
        live.watch("before", [*model.parameters(), *(each.grad for each in model.parameters()), *states])
        before = live.current_bytes
        optimizer.step()
        copies = live.peak_bytes - before
    plan = sw.Plan.preset("ddp", 1, batch_size=1)
    shape, cluster = describe_job(job, "fp32").for_plan(plan), parse_cluster("1xH100")
    predicted = predict_memory(shape, plan, optimizer=optimizer_shape(job), context=0).at_peak
    assert predicted["optimizer states"] == sum(value.nbytes for value in states)
    assert predicted["temporaries"] == pytest.approx(copies, rel=0.01)

    def update(own, job):
        question = job_subject(job, cluster).question(cluster)
        return question.time_model().predict(shape, own).parts["update"]

    sharded = sw.Plan.preset("zero1", 2, batch_size=2)
    assert update(plan, job) > 2 * update(plan, dataclasses.replace(job, optimizer=sw.adamw(lr=0.1)))
    assert update(sharded, job) < 0.6 * update(plan, job)


def test_a_custom_loop_over_shards_equals_one_process():
    tokens = (torch.arange(16) * 7) % 10

    def losses(world, name):
        torch.manual_seed(0)
        plan = dataclasses.replace(sw.Plan.preset(name, world.size, batch_size=16), precision=FP64)
        model = sw.parallelize(Net(), plan, world)
        optimizer = for_model(sw.muon(lr=0.02, split={"fused": 2}), model)(model.named_parameters())
        mine = tokens.chunk(world.size)[world.rank]
        found = []
        for _ in range(3):
            loss = functional.cross_entropy(model(mine), (mine + 1) % 10)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(world.sum({"loss": loss.item()})["loss"] / world.size)
        return found

    expected = run_ranks(losses, 1, "ddp")[0]
    for name in ("ddp", "zero3"):
        assert run_ranks(losses, 2, name)[0] == pytest.approx(expected, rel=1e-9)
