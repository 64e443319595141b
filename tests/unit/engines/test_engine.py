"""One protocol for what trains a model: found by name, named by the job, asked without importing its library."""

import dataclasses
import subprocess
import sys

import torch

import shardwise as sw
from refusals import refuses
from shardwise.engines.engine import engine_for, engine_named
from shardwise.planner.settle import split_settings, with_engine

NAMES = ("torch", "deepspeed", "mlx")


def job_of(model=lambda: torch.nn.Linear(4, 4), **options):
    return sw.Job(
        model=model,
        data=rows,
        loss=sw.losses.cross_entropy,
        optimizer=sw.adamw(lr=1e-3),
        batch_size=8,
        steps=1,
        **options,
    )


def rows(split):
    return torch.utils.data.TensorDataset(torch.ones(8, 4), torch.arange(8) % 4) if split == "train" else None


def plan_of(**fields):
    return dataclasses.replace(sw.Plan.preset("ddp", 1, batch_size=8), **fields)


def test_every_engine_of_a_plan_is_in_the_table_and_answers_to_its_name():
    assert [engine_named(name).name for name in NAMES] == list(NAMES)
    assert [engine_named(name).framework for name in NAMES] == ["torch", "torch", "mlx"]


def test_asking_every_engine_imports_neither_torch_nor_an_engine():
    lines = [
        "import sys",
        "from shardwise.engines.engine import engine_named",
        "from shardwise.plans import Plan",
        f"for name in {NAMES}: engine_named(name).check(Plan(engine=name)); engine_named(name).local_device(None)",
        "print([name for name in ('torch', 'deepspeed', 'mlx.core', 'mpi4py') if name in sys.modules])",
    ]
    found = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_plan_takes_the_engine_of_its_job_unless_it_has_chosen_one():
    plan = plan_of()
    assert with_engine(plan, "torch") is plan
    assert with_engine(plan, "mlx").engine == "mlx"
    assert with_engine(plan, "mlx").source("engine") == "the job's engine"
    assert with_engine(plan_of(engine="deepspeed"), "torch").engine == "deepspeed"
    assert with_engine(plan_of(sources={"engine": "--set"}), "mlx").engine == "torch"


def test_set_engine_chooses_the_engine_of_the_plan(tmp_path):
    (tmp_path / "job.py").write_text("job = None")
    reference, overrides = split_settings(str(tmp_path / "job.py"), ("engine=deepspeed", "seed=3"))
    assert overrides == {"engine": "deepspeed"}
    assert list(reference.overrides) == ["seed"]


def test_a_plan_for_models_of_another_framework_is_refused():
    assert engine_for(job_of(), plan_of(engine="deepspeed")).name == "deepspeed"
    with refuses("job.engine-mismatch", "engine mlx", 'engine="mlx"'):
        engine_for(job_of(), plan_of(engine="mlx"))
    with refuses("job.engine-mismatch", "engine torch", 'engine="torch"'):
        engine_for(job_of(engine="mlx"), plan_of())


def test_an_engine_that_does_not_exist_is_refused_with_those_that_do():
    with refuses("job.unknown-engine", "'jax'", '"torch" or "mlx"'):
        job_of(engine="jax")


RANK = """
import shardwise as sw
import torch

data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.arange(8) % 4)
job = sw.Job(
    model=lambda: torch.nn.Linear(4, 4),
    data=lambda split: data if split == "train" else None,
    loss=sw.losses.cross_entropy,
    optimizer=sw.sgd(lr=0.1),
    batch_size=8,
    steps=1,
)
with sw.world(device="cpu") as world:
    sw.train(job, sw.Plan.preset("ddp", 1, batch_size=8), world, show_progress=False)
"""


def test_a_rank_of_torch_imports_no_other_engine(tmp_path):
    command = [sys.executable, "-X", "importtime", "-c", RANK]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in found.stderr.splitlines()}
    assert {"torch", "shardwise"} <= imported
    assert imported.isdisjoint({"deepspeed", "mpi4py", "mlx"})
