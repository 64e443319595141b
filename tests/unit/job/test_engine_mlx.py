"""Which engine a job's model is made for is found out without importing or computing anything."""

import dataclasses
import functools
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("mlx.core")

import shardwise as sw
from refusals import refuses
from shardwise.job.engine import engine_of, is_mlx
from shardwise.parallel.blueprint import structure
from shardwise.planner.settle import with_engine_of


def job_of(model):
    return sw.Job(
        model=model,
        data=sw.datasets.digits,
        loss=sw.losses.cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=8,
        steps=1,
    )


def rows(split):
    return torch.utils.data.TensorDataset(torch.ones(8, 4), torch.arange(8) % 4) if split == "train" else None


def num_threads():
    return len(list(Path("/proc/self/task").iterdir()))


def mlx_model():
    from mlx import nn

    return nn.Linear(4, 4)


def test_a_module_of_mlx_is_made_for_mlx_and_computes_nothing():
    import mlx.nn  # noqa: F401 - as a job's file does

    threads = num_threads()
    assert engine_of(job_of(lambda: mlx_model())) == "mlx"  # noqa: PLW0108 - its own code says nothing of MLX
    assert num_threads() == threads


def test_a_module_of_torch_is_made_for_torch_where_mlx_is_imported_too():
    import mlx.nn  # noqa: F401

    assert engine_of(job_of(lambda: torch.nn.Linear(4, 4))) == "torch"


def test_a_model_that_cannot_be_made_is_left_for_ranks_to_tell():
    import mlx.nn  # noqa: F401

    assert engine_of(job_of(lambda: 1 / 0)) == "torch"


def test_a_function_that_speaks_of_mlx_is_taken_at_its_word_and_nothing_is_imported(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx"]:
        monkeypatch.delitem(sys.modules, name)
    assert engine_of(job_of(mlx_model)) == "mlx"
    assert engine_of(job_of(functools.partial(mlx_model))) == "mlx"
    assert engine_of(job_of(lambda: sw.models.mlx.resnet18(num_classes=10))) == "mlx"
    assert engine_of(job_of(lambda: sw.models.resnet18(num_classes=10))) == "torch"
    assert not any(name.partition(".")[0] == "mlx" for name in sys.modules)


def test_only_modules_of_mlx_are_modules_of_mlx():
    assert is_mlx(mlx_model())
    assert not is_mlx(torch.nn.Linear(1, 1))


def test_engine_torch_refuses_a_module_of_mlx_and_says_what_trains_it():
    with refuses("model.mlx-module", "--set engine=mlx"):
        structure(mlx_model, 0)


def test_a_module_of_mlx_that_takes_values_from_torch_is_made_for_mlx():
    import mlx.core as mx
    from mlx import nn

    def model():
        made = nn.Linear(4, 4)
        made.weight = mx.array(torch.ones(4, 4).numpy())
        return made

    assert engine_of(job_of(model)) == "mlx"


def test_a_plan_that_names_its_engine_has_no_model_made_for_asking():
    import mlx.nn  # noqa: F401

    made = []
    job = job_of(lambda: made.append(torch.nn.Linear(4, 4)) or made[-1])
    plan = with_engine_of(sw.Plan.preset("ddp", 1, batch_size=8), job)
    assert (plan.engine, len(made)) == ("torch", 1)
    assert with_engine_of(plan, job) == plan
    assert len(made) == 1
    in_mlx = with_engine_of(sw.Plan.preset("ddp", 1, batch_size=8), job_of(mlx_model))
    assert in_mlx.engine == "mlx"


def test_training_makes_a_model_of_mlx_once_to_look_and_once_to_train():
    import mlx.nn  # noqa: F401

    made = []
    job = dataclasses.replace(job_of(lambda: made.append(1) or mlx_model()), data=rows)
    with sw.world() as world:
        sw.train(job, sw.Plan.preset("ddp", 1, batch_size=8), world, show_progress=False)
    assert len(made) == 2
