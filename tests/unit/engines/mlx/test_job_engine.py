"""A job whose engine is MLX: its model is made once, and one of another framework is refused."""

import pytest
from engines.mlx.jobs import Net, TorchNet, make_job, make_plan

import shardwise as sw
from refusals import refuses
from shardwise.parallel.meta_model import structure


def test_a_module_of_mlx_is_refused_by_engine_torch_with_what_to_give_the_job():
    with refuses("job.model-not-of-engine", "Net", 'Job(engine="mlx")'):
        structure(Net, 0)


@pytest.mark.usefixtures("uncompiled")
def test_a_module_of_torch_is_refused_by_engine_mlx_with_what_to_leave_out():
    job = make_job(model=TorchNet)
    with sw.world() as world, refuses("job.model-not-of-engine", "TorchNet", 'engine="mlx"'):
        sw.train(job, make_plan(job), world, show_progress=False)


@pytest.mark.usefixtures("uncompiled")
def test_training_makes_the_model_once(tmp_path):
    made = []
    job = make_job(model=lambda: made.append(1) or Net(), epochs=None, steps=1)
    with sw.world() as world:
        sw.train(job, sw.Plan.preset("ddp", 1, batch_size=8), world, run_dir=tmp_path, show_progress=False)
    assert len(made) == 1
