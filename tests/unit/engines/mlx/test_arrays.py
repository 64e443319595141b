"""What comes through the engine's door: floating-point numbers in the plan's precision, all others as they are."""

import mlx.core as mx
import pytest
import torch
from engines.mlx.jobs import Net, make_job, make_plan
from torch.utils.data import TensorDataset

import shardwise as sw
from shardwise.engines.mlx.arrays import to_mlx, to_torch
from shardwise.training.build import build_step
from shardwise.training.evaluate import evaluate

pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.mark.parametrize("given", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("precision", "seen"), [("fp32", mx.float32), ("bf16", mx.bfloat16), ("fp64", mx.float64)])
def test_batches_of_any_floating_point_dtype_are_computed_in_the_plans_precision(given, precision, seen):
    dtypes = set()

    class Watched(Net):
        def __call__(self, x):
            y = super().__call__(x)
            dtypes.update((x.dtype, y.dtype))
            return y

    def data(_):
        return TensorDataset(torch.ones(8, 6, dtype=given), torch.arange(8) % 3)

    job = make_job(model=Watched, data=data)
    plan = make_plan(job, precision=precision)
    with sw.world() as world:
        step = build_step(job, plan, world)
        report = step(next(iter(step.feed)))
        evaluate(step, data("test"))
        stored = {value.dtype for value in step.local_state().values.values()}
    assert dtypes == {seen}
    assert {report.loss_sum.dtype, *stored} == {torch.float64 if precision == "fp64" else torch.float32}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.bfloat16, torch.float16])
def test_a_tensor_comes_back_bit_by_bit(dtype):
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    back = to_torch(to_mlx(tensor))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
