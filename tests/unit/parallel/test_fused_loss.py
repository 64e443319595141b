"""The fused loss: exact under every plan, no logits in training or evaluation, and refusals where logits are read."""

from pathlib import Path

import pytest
import torch
from parallel.test_linear_cross_entropy import Largest
from torch import nn
from torch.nn import functional

import shardwise as sw
from jobs import Tokens, sentences_job
from refusals import refuses
from shardwise.engines.engine import require_supported
from shardwise.job import losses
from shardwise.parallel.fused_loss import DeferredLogits, fuse_head
from shardwise.parity.verify import verify
from shardwise.planner.settle import LocalDevice, settle
from shardwise.testing import run_ranks
from shardwise.training.evaluate import evaluate
from shardwise.training.preflight import ModelRules

JOBS = Path(__file__).parents[1] / "parity" / "jobs.py"
VOCABULARY = 4096


def verdicts(job, plans, nproc=2):
    return [
        (verdict.status, verdict.reason)
        for verdict in verify(f"{JOBS}:{job}", [f"{plan}+fused_loss=true" for plan in plans], nproc=nproc).verdicts
    ]


def test_a_tied_head_trains_as_one_process_does():
    assert set(verdicts("job", ["ddp", "zero3+accumulation=2", "tp"])) == {("passed", "")}


def test_a_head_of_its_own_trains_as_one_process_does():
    assert set(verdicts("untied", ["zero2", "pp+accumulation=4"])) == {("passed", "")}


@pytest.mark.prove
@pytest.mark.parametrize("job", ["job", "untied"])
def test_every_plan_trains_as_one_process_does(job):
    plans = ["ddp+accumulation=2", "zero1", "zero2", "zero3", "zero3+accumulation=2+gradient_sync=every"]
    plans += ["ddp+recompute=full", "zero3+recompute=full", "zero3+recompute=selective", "tp+sequence_parallel=true"]
    plans += ["ddp+compile=blocks", "zero3+compile=blocks", "ddp+compile=model"]
    plans += ["ddp+precision=bf16", "zero3+precision=bf16", "ddp+precision=fp16"]
    assert set(verdicts(job, plans)) == {("passed", "")}


@pytest.mark.prove
def test_products_train_as_one_process_does():
    plans = ["hsdp", "shard2.tp2", "replicate2.tp2", "pp2.shard2+accumulation=4", "pp2.tp2+accumulation=4"]
    assert set(verdicts("untied", plans, nproc=4)) == {("passed", "")}


def job_of(**changes):
    """A job whose logits outweigh everything else that a step makes."""

    def model():
        return sw.models.decoder("gpt2-tiny", vocab_size=VOCABULARY, width=8, num_heads=2, num_layers=1, context=256)

    fields = {
        "model": model,
        "data": lambda _: Tokens(8, 256, VOCABULARY),
        "loss": losses.token_cross_entropy,
        "steps": 1,
        "batch_size": 8,
    }
    return sw.Job(**{**fields, "optimizer": sw.adamw(lr=1e-3), **changes})


def settled(name, overrides, *, world_size=1):
    return settle(name, batch_size=8, world_size=world_size, device=LocalDevice(), overrides=overrides)


@pytest.mark.parametrize("fused", ["true", "false"])
def test_no_tensor_of_training_or_evaluation_is_as_large_as_the_logits(fused, monkeypatch):
    monkeypatch.setattr("shardwise.planner.model.forms.CHUNK_ELEMENTS", 128 * VOCABULARY)
    job = job_of()

    def body(world):
        plan = settled("ddp", {"fused_loss": fused})
        step = sw.build_step(job, plan, world)
        with Largest() as trained:
            step(next(iter(step.feed)))
        with Largest() as evaluated:
            evaluate(step, job.data("test"))
        return trained.numbers, evaluated.numbers

    logits = 8 * 256 * VOCABULARY
    expected = (logits, logits) if fused == "false" else (128 * VOCABULARY, 128 * VOCABULARY)
    assert run_ranks(body, 1) == [expected]


def test_metrics_get_the_logits_and_the_evaluation_is_that_of_the_plain_loss():
    correct = sw.Metric(sum=lambda output, batch: (output.argmax(-1) == batch[-1]).sum(), count=losses.count_tokens)
    job = sentences_job(metrics={"accuracy": correct})

    def body(world, name, fused):
        plan = settled(name, {"fused_loss": fused}, world_size=world.size)
        step = sw.build_step(job, plan, world)
        found = evaluate(step, job.data("train"))
        step(next(iter(step.feed)))
        return [*found.values(), *evaluate(step, job.data("train")).values()]

    expected = run_ranks(body, 1, "ddp", "false")[0]
    assert run_ranks(body, 2, "zero3", "true")[0] == pytest.approx(expected, rel=1e-4)
    assert expected[0] != expected[2]


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **changes))


def test_the_loss_that_a_transformers_model_computes_itself_is_fused_too():
    tokens = torch.randint(0, 64, (3, 9))
    found = []
    for fuse in (False, True):
        model = llama().train()
        if fuse:
            fuse_head(model)
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        found.append((isinstance(output.logits, DeferredLogits), output.loss.detach(), model.model.norm.weight.grad))
    (_, loss, grad), (is_deferred, fused_loss, fused_grad) = found
    assert is_deferred
    torch.testing.assert_close((fused_loss, fused_grad), (loss, grad))


def test_outside_of_training_a_model_gives_logits():
    model = llama().eval()
    expected = model(torch.arange(5)[None]).logits
    fuse_head(model)
    torch.testing.assert_close(model(torch.arange(5)[None]).logits, expected)


class Capped(nn.Module):
    def __init__(self, touch):
        super().__init__()
        self.head = nn.Linear(4, 8)
        self.touch = touch

    def forward(self, x):
        return self.touch(self.head(x))


@pytest.mark.parametrize(
    ("touch", "how"),
    [
        (lambda logits: logits / 30, "an operator"),
        (lambda logits: 1 / logits, "an operator"),
        (lambda logits: logits @ logits, "an operator"),
        (lambda logits: logits**2, "an operator"),
        (lambda logits: logits == 0, "an operator"),
        (lambda logits: logits > 0, "an operator"),
        (len, "an operator"),
        (lambda logits: logits.flatten(), "flatten"),
        (torch.tanh, "tanh"),
        (lambda logits: logits.argmax(-1), "argmax"),
        (lambda logits: logits[..., :4], "an index"),
        (lambda logits: functional.cross_entropy(logits, torch.tensor([1]), label_smoothing=0.1), "smoothing"),
        (lambda logits: functional.cross_entropy(logits, torch.tensor([1]), reduction="none"), "reduction='none'"),
    ],
)
def test_a_model_that_does_more_with_its_logits_is_refused(touch, how):
    model = Capped(touch)
    fuse_head(model)
    with refuses("support.fused-loss-logits-read", how):
        model(torch.ones(1, 4))


@pytest.mark.parametrize(("logits", "targets"), [((10, 4), (12,)), ((12, 4), (10,)), ((2, 5, 4), (2, 5)), ((4,), ())])
def test_logits_and_targets_that_do_not_match_are_refused(logits, targets):
    model = Capped(lambda deferred: deferred)
    fuse_head(model)
    with refuses("loss.logits-targets-mismatch", "8]"):
        functional.cross_entropy(model(torch.ones(logits)), torch.zeros(targets, dtype=torch.long))


def test_cross_entropy_may_be_called_by_keywords_alone():
    head, hidden, targets = torch.nn.Linear(4, 7), torch.randn(5, 4), torch.arange(5)
    deferred = DeferredLogits(hidden, head)
    found = torch.nn.functional.cross_entropy(input=deferred, target=targets)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(head(hidden), targets))
    with refuses("support.fused-loss-logits-read", "cross_entropy as targets"):
        torch.nn.functional.cross_entropy(head(hidden), deferred)


def test_deferred_logits_have_their_size_and_are_themselves():
    model = Capped(lambda deferred: deferred)
    fuse_head(model)
    deferred = model(torch.ones(2, 3, 4))
    assert (deferred.size(), deferred.size(1)) == (torch.Size((2, 3, 8)), 3)
    assert {deferred: 1}[deferred] == 1


@pytest.mark.parametrize("loss", [losses.labels, losses.next_token])
def test_losses_on_labels_take_the_plain_logits_of_a_model(loss):
    model, x = Capped(lambda logits: logits), torch.randn(2, 3, 4)
    batch = {"labels": torch.tensor([[1, 2, -100], [3, 4, 5]])}
    expected = loss.sum(model(x), batch)
    fuse_head(model)
    torch.testing.assert_close(loss.sum(model(x), batch), expected)


def test_a_model_without_a_known_head_is_refused_before_any_process_starts():
    plan = settled("ddp", {"fused_loss": "true"})
    job = sentences_job(model=lambda: nn.Sequential(nn.Linear(2, 2)))
    with refuses("support.fused-loss-no-head", "`head`", "Sequential"):
        ModelRules(job)(plan)


@pytest.mark.parametrize(
    ("name", "overrides", "refusal"),
    [
        ("ddp", {"communication.find_unused_parameters": "true"}, ("support.unused-parameters-fused-loss",)),
        ("ddp", {"engine": "deepspeed"}, ("support.deepspeed-option", "fused_loss = True")),
        (
            "pp",
            {"pipeline.schedule": "zbv", "accumulation": "4"},
            ("support.split-backward-option", "fused_loss = false"),
        ),
    ],
)
def test_a_plan_under_which_it_would_train_wrongly_is_refused(name, overrides, refusal):
    with refuses(*refusal):
        require_supported(settled(name, {**overrides, "fused_loss": "true"}, world_size=2))
