"""Search proposes nothing that `train` refuses: both ask the same rules."""

import dataclasses
import random
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import shardwise as sw
from jobs import small_resnet
from refusals import refuses
from shardwise.engines.engine import require_supported
from shardwise.hardware.calibration import default_calibration
from shardwise.hardware.cluster import parse_cluster
from shardwise.parallel import support
from shardwise.planner.search.explain import reason
from shardwise.planner.search.question import Question
from shardwise.planner.search.search import search
from shardwise.planner.search.subject import job_subject, published_subject
from shardwise.planner.trace.trace import describe
from shardwise.training.preflight import ModelRules

SIZE = {"vocab_size": 32, "width": 16, "num_layers": 4, "num_heads": 4, "context": 8}
FOUR = parse_cluster("4xRTX-4090")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return self.inner(x)


class Twins(nn.Module):
    """Two lists of blocks of one size: a pipeline could be split along either, so it is the user who chooses."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (nn.ModuleList(Block() for _ in range(4)) for _ in range(2))

    def forward(self, x):
        for layer in (*self.encoder, *self.decoder):
            x = layer(x)
        return x


class Misplaced(nn.Module):
    """Registers before its blocks the norm that it uses after them, as OPT does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Passed(nn.Module):
    """Passes to every block a weight that it registers after them, as DeBERTa does, or before them."""

    def __init__(self, *, is_behind):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        if not is_behind:
            self.relative = nn.Embedding(6, 6)
        self.blocks = nn.ModuleList(Relative() for _ in range(4))
        if is_behind:
            self.relative = nn.Embedding(6, 6)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, self.relative.weight.tanh())
        return x


class Relative(Block):
    def forward(self, x, relative):
        return super().forward(x) @ relative


def tokens_job(**changes):
    sample = (torch.arange(8), torch.arange(8))
    fields = {
        "model": lambda: sw.models.decoder("gpt2-tiny", **SIZE),
        "data": lambda split: [sample] * 64,
        "loss": sw.losses.token_cross_entropy,
        "optimizer": sw.adamw(lr=1e-3),
        "batch_size": 16,
        "steps": 1,
    }
    return sw.Job(**{**fields, **changes})


def points_job(model, features=(6,), **changes):
    sample = (torch.zeros(features), torch.tensor(1))
    return tokens_job(model=model, data=lambda split: [sample] * 64, loss=sw.losses.cross_entropy, **changes)


JOBS = {
    "tied": tokens_job(),
    "untied": tokens_job(model=lambda: sw.models.decoder("llama-tiny", **SIZE, num_kv_heads=2, mlp_width=32)),
    "adapted": tokens_job(lora=sw.Lora(targets=("qkv",), rank=2)),
    "two lists": points_job(Twins),
    "batch norm": points_job(small_resnet, (1, 8, 8)),
}


def answer_of(subject, *, exhaustive=True):
    question = Question(
        model=subject.model,
        cluster=FOUR,
        calibration=default_calibration(FOUR.node),
        batch_size=subject.batch_size,
        precision=subject.precision,
        optimizer=subject.optimizer,
        accepts=subject.accepts,
    )
    return search(question, exhaustive=exhaustive)


@pytest.mark.representative("batch norm", "tied")
@pytest.mark.parametrize("name", JOBS)
def test_train_accepts_every_plan_that_search_proposes_for_a_job(name):
    job = JOBS[name]
    answer = answer_of(job_subject(job, FOUR, describe, accepts=ModelRules(job)))
    plans = [candidate.plan for candidate in answer.candidates]
    for split in {
        (plan.layout, plan.pipeline, plan.fused_loss, plan.sequence_parallel): plan for plan in plans
    }.values():
        ModelRules(job)(split)
    assert len(plans) > 10


def test_train_accepts_every_plan_that_search_proposes_for_a_published_model():
    job = tokens_job(model=lambda: sw.models.decoder("gpt2"), batch_size=64)
    answer = answer_of(published_subject("gpt2", FOUR, accepts=require_supported, batch_size=64))
    rules = ModelRules(job)
    assert len(answer.candidates) > 2000
    for candidate in random.Random(0).sample(answer.candidates, 500):  # all of them take 10 s
        rules(candidate.plan)


def test_family_that_every_rule_refuses_gives_the_rule():
    job = JOBS["two lists"]
    answer = answer_of(job_subject(job, FOUR, describe, accepts=ModelRules(job)))
    assert "several lists of blocks" in answer.families["pp"].detail


@pytest.mark.parametrize(
    "model",
    [Misplaced, lambda: Passed(is_behind=True), lambda: Passed(is_behind=False)],
    ids=["used behind", "passed from behind", "passed from the front"],
)
def test_pipeline_is_not_proposed_for_a_model_that_its_stages_would_refuse_in_the_first_step(model):
    job = points_job(model)
    answer = answer_of(job_subject(job, FOUR, describe, accepts=ModelRules(job)))
    assert {candidate.plan.layout.pp for candidate in answer.candidates} == {1}
    assert "uses a module before the blocks that is registered after them" in reason(answer, "pp")


class Rescaled(nn.Sequential):
    """Divides weights in place when it is evaluated, as RWKV does."""

    def __init__(self):
        super().__init__(*(Block() for _ in range(4)))

    def forward(self, inputs):
        if not self.training:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.div_(2)
        return super().forward(inputs)


def test_pipeline_is_not_proposed_for_a_model_that_writes_to_its_weights_in_forward():
    job = points_job(Rescaled)
    with refuses("support.pipeline-parameter-write"):
        ModelRules(job)(sw.Plan.preset("pp", 2, batch_size=job.batch_size, accumulation=2))
    answer = answer_of(job_subject(job, FOUR, describe, accepts=ModelRules(job)))
    assert {candidate.plan.layout.pp for candidate in answer.candidates} == {1}
    assert "forward writes to" in reason(answer, "pp")


class Ragged(torch.utils.data.Dataset):
    """Samples of different lengths, which a collate pads to the longest of each micro-batch."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.ones(index // 8 + 1, 6)


def padded(samples):
    rows = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return rows, torch.zeros(len(rows), dtype=torch.long)


def test_pipeline_is_not_proposed_where_micro_batches_differ_in_shape():
    job = dataclasses.replace(points_job(Twins), data=lambda _: Ragged(), collate=padded)
    plan = sw.Plan.preset("pp", 2, batch_size=job.batch_size, accumulation=2)
    with refuses("support.pipeline-micro-batch-shapes"):
        ModelRules(job)(plan)
    ModelRules(tokens_job())(sw.Plan.preset("pp", 2, batch_size=tokens_job().batch_size, accumulation=2))


def muon(named):
    """Orthogonalizes whole matrices: right on whole parameters alone."""
    return torch.optim.Muon([parameter for _, parameter in named if parameter.ndim == 2], lr=0.01)


class Listed(nn.Module):
    """Keeps a registered parameter in a plain list as well."""

    def __init__(self):
        super().__init__()
        self.scales = [nn.Parameter(torch.ones(6))]
        self.register_parameter("scale", self.scales[0])
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x * self.scale)
        return x


class Hooked(Block):
    """Puts a hook on a parameter before the module registers it."""

    def __init__(self):
        super().__init__()
        scale = nn.Parameter(torch.ones(6))
        scale.register_hook(lambda gradient: gradient * 2)
        self.scale = scale

    def forward(self, x):
        return super().forward(x * self.scale)


@pytest.mark.parametrize(
    ("job", "families", "expected"),
    [
        (points_job(Twins, optimizer=muon), {"ddp"}, "optimizer Muon .* on shards"),
        (points_job(Listed), {"ddp", "zero1"}, r"scales\[0\] also refers to scale"),
        (points_job(Hooked), {"ddp", "zero1"}, "gradient hooks, but parameter scale"),
    ],
    ids=["optimizer", "listed", "hooked"],
)
def test_plans_that_split_parameters_are_not_proposed_where_train_would_refuse_them(job, families, expected):
    answer = answer_of(job_subject(job, FOUR, describe, accepts=ModelRules(job)), exhaustive=False)
    assert {candidate.family for candidate in answer.candidates} == families
    assert re.search(expected, answer.families["zero3"].detail)


def test_optimizer_that_looks_at_whole_tensors_is_refused_under_tensor_parallelism_before_any_rank_starts():
    with refuses("optimizer.sharded-update-differs", "Muon"):
        ModelRules(tokens_job(optimizer=muon))(sw.Plan.preset("tp", 2, batch_size=16))


@pytest.mark.parametrize(("version", "is_refused"), [("2.11.0+cu130", True), ("2.13.0", False)])
def test_compiled_tensor_parallel_blocks_are_refused_on_a_torch_that_trains_them_wrongly(
    monkeypatch, version, is_refused
):
    monkeypatch.setattr(support, "package_version", lambda _: version)
    plan = dataclasses.replace(sw.Plan.preset("tp", 2, batch_size=8), compile="blocks")
    with refuses("support.compiled-tensor-parallel", "2.11") if is_refused else nullcontext():
        require_supported(plan)
