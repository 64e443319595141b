import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import shardwise as sw
from refusals import refuses
from shardwise.job.load import override_job, parse_overrides
from shardwise.job.optimizers import decay_groups


def make(**changes):
    fields = {
        "model": lambda: torch.nn.Linear(2, 2),
        "data": sw.datasets.digits,
        "loss": sw.losses.cross_entropy,
        "optimizer": sw.adamw(lr=1e-3),
        "batch_size": 8,
        "epochs": 1,
    }
    return sw.Job(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"batch_size": 0}, ("job.not-whole-number", "batch_size", 0)),
        ({"batch_size": "8"}, ("job.not-whole-number", "batch_size", "'8'")),
        ({"batch_size": True}, ("job.not-whole-number", "batch_size")),
        ({"epochs": None}, ("job.one-length-needed", "no length")),
        ({"steps": 3}, ("job.one-length-needed", "epochs and steps")),
        ({"model": torch.nn.Linear(1, 1) and 3}, ("job.not-callable", "Job.model", 3)),
        ({"model": torch.nn.Linear(1, 1)}, ("job.model-not-factory", "Linear", "lambda")),
        ({"loss": torch.nn.functional.cross_entropy}, ("job.loss-not-a-loss", "sw.losses.cross_entropy")),
        ({"clip_norm": math.inf}, ("job.clip-norm-invalid", "clip_norm")),
        ({"metrics": {"accuracy": 1}}, ("job.metric-not-a-metric", "accuracy")),
        ({"lora": object()}, ("job.lora-not-a-lora", "sw.Lora")),
        ({"seed": -1}, ("job.not-whole-number", "seed")),
        (
            {"optimizer": torch.optim.SGD([torch.ones(1)])},
            ("job.not-callable", "Job.optimizer", "an instance of SGD"),
        ),
        ({"data": DataLoader([1, 2])}, ("job.not-callable", "Job.data", "DataLoader")),
        ({"schedule": StepLR(torch.optim.SGD([torch.ones(1)]), 2)}, ("job.not-callable", "Job.schedule", "StepLR")),
        ({"schedule": StepLR}, ("job.not-callable", "Job.schedule", "StepLR")),
    ],
)
def test_a_job_that_cannot_be_trained_is_refused(changes, refusal):
    with refuses(*refusal):
        make(**changes)


@pytest.mark.parametrize(
    ("lr", "condition"),
    [(math.nan, "out-of-range"), (-1.0, "out-of-range"), (math.inf, "out-of-range"), ("fast", "not-number")],
)
def test_bad_learning_rate_is_refused(lr, condition):
    with refuses(f"optimizer.setting-{condition}", f"lr={lr!r}"):
        sw.adamw(lr=lr)


def test_override_reaches_the_optimizer():
    assert override_job(make(), {"optimizer.lr": "3e-4"}).optimizer.lr == 3e-4


@pytest.mark.parametrize("is_alone", [True, False])
def test_override_reaches_early_stopping_alone_or_in_a_list(is_alone):
    stopping = sw.EarlyStopping("loss", 2)
    job = make(on_evaluate=stopping if is_alone else [print, stopping])
    changed = override_job(job, {"on_evaluate.min_delta": "0.08"}).on_evaluate
    changed = changed if is_alone else changed[1]
    assert (changed.metric, changed.patience, changed.min_delta, stopping.min_delta) == ("loss", 2, 0.08, 0.0)
    for key, value, refusal in [
        ("min_dleta", "1", ("cli.set-unknown-key", "'min_delta'")),
        ("min_delta", "much", ("job.early-stopping-min-delta", "'much'")),
        ("metric", "accuracy", ("job.early-stopping-mode", "'accuracy'")),
    ]:
        with refuses(*refusal):
            override_job(job, {f"on_evaluate.{key}": value})


def test_overriding_a_length_drops_the_others():
    job = override_job(make(), {"steps": "7"})
    assert (job.epochs, job.steps) == (None, 7)


@pytest.mark.parametrize(
    ("key", "value", "refusal"),
    [
        ("batchsize", "8", ("cli.set-unknown-key", "'batch_size'")),
        ("optimizer.lrr", "1", ("cli.set-unknown-key", "'lr'")),
        ("model", "3", ("cli.set-python-code", "model")),
        ("optimizer.lr", "nan", ("optimizer.setting-out-of-range", "lr=nan")),
        ("batch_size", "many", ("job.not-whole-number", "batch_size")),
        ("seed.x", "1", ("cli.set-no-fields", "seed.x")),
    ],
)
def test_bad_override_names_key_and_fix(key, value, refusal):
    with refuses(*refusal):
        override_job(make(), {key: value})


def test_override_without_equals_is_refused():
    with refuses("cli.set-syntax", "key=value"):
        parse_overrides(["batch_size"])


def test_norms_and_biases_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    decaying, plain = decay_groups(model.named_parameters(), 0.1)
    assert decaying["weight_decay"] == 0.1
    assert [p.ndim for p in decaying["params"]] == [2]
    assert {p.ndim for p in plain["params"]} == {1}
    assert plain["weight_decay"] == 0


def test_sgd_makes_torchs_own():
    model = torch.nn.Linear(2, 2)
    optimizer = sw.sgd(lr=0.1, momentum=0.9)(model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["momentum"] == 0.9


@pytest.mark.parametrize("schedule", [sw.schedules.Cosine(warmup=10), sw.schedules.Linear(warmup=0.1)])
def test_decaying_schedules_rise_then_fall_to_the_floor(schedule):
    factors = [schedule(step, 100) for step in range(100)]
    assert factors[0] < factors[9] < 1
    assert factors[10] == 1
    assert factors[99] == pytest.approx(0)
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_schedule_of_one_step_is_finite():
    assert sw.schedules.Cosine()(0, 1) == 1


def test_reference_of_jobs_lists_every_field():
    page = Path(__file__).resolve().parents[3] / "docs" / "reference" / "jobs.md"
    table = page.read_text().partition("| field |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {field.name for field in dataclasses.fields(sw.Job)}
