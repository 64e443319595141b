import math

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.errors import InputError, JobError
from shardwise.job.optimizers import decay_groups
from shardwise.job.overrides import override_job, parse_overrides


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
    ("changes", "word"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"batch_size": True}, "whole number"),
        ({"epochs": None}, "no length"),
        ({"steps": 3}, "epochs and steps"),
        ({"model": torch.nn.Linear(1, 1) and 3}, "Job.model is 3"),
        ({"model": torch.nn.Linear(1, 1)}, "finished Linear.*lambda"),
        ({"loss": torch.nn.functional.cross_entropy}, "sw.losses.cross_entropy"),
        ({"clip_norm": math.inf}, "clip_norm"),
        ({"metrics": {"accuracy": 1}}, "accuracy"),
        ({"lora": object()}, r"sw\.Lora"),
        ({"seed": -1}, "seed"),
        (
            {"optimizer": torch.optim.SGD([torch.ones(1)])},
            "^Job.optimizer is an instance of SGD, not a function: .*SGD",
        ),
        ({"data": DataLoader([1, 2])}, "^Job.data is an instance of DataLoader, not a function: .*to a dataset"),
        ({"schedule": StepLR(torch.optim.SGD([torch.ones(1)]), 2)}, "^Job.schedule is an instance of StepLR, .*factor"),
        ({"schedule": StepLR}, "^Job.schedule is <class 'torch.*StepLR'>, not a function: .*factor"),
    ],
)
def test_a_job_that_cannot_be_trained_is_refused(changes, word):
    with pytest.raises(JobError, match=word):
        make(**changes)


@pytest.mark.parametrize("lr", [math.nan, -1.0, math.inf, "fast"])
def test_bad_learning_rate_is_refused(lr):
    with pytest.raises(JobError, match="lr"):
        sw.adamw(lr=lr)


def test_override_reaches_the_optimizer():
    assert override_job(make(), {"optimizer.lr": "3e-4"}).optimizer.lr == 3e-4


def test_overriding_a_length_drops_the_others():
    job = override_job(make(), {"steps": "7"})
    assert (job.epochs, job.steps) == (None, 7)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("batchsize", "8", "'batch_size'"),
        ("optimizer.lrr", "1", "'lr'"),
        ("model", "3", "Python code"),
        ("optimizer.lr", "nan", "finite"),
        ("batch_size", "many", "whole number"),
        ("seed.x", "1", "no fields"),
    ],
)
def test_bad_override_names_key_and_fix(key, value, word):
    with pytest.raises(JobError, match=word):
        override_job(make(), {key: value})


def test_override_without_equals_is_refused():
    with pytest.raises(InputError, match="key=value"):
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
