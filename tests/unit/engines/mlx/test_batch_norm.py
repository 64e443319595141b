"""Batch norm in MLX: statistics over the rows of all ranks, forward and backward, compiled too."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from shardwise.engines.mlx.arrays import MlxBatchNorm, counting, foreign_batch_norms, share_batch_norms
from shardwise.engines.mlx.ring import join_group
from shardwise.testing import run_ranks

ROWS = 7


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm, self.flat = nn.BatchNorm(3), nn.BatchNorm(3)
        self.rest = [nn.Linear(12, 5), nn.BatchNorm(5, affine=False), nn.Linear(5, 2)]

    def __call__(self, x):
        places = nn.relu(self.norm(self.conv(x))).reshape(-1, 3)
        x = self.flat(places).reshape(x.shape[0], -1)  # so that rows are not samples
        for layer in self.rest:
            x = layer(x)
        return x


class OwnNorm(nn.BatchNorm):
    pass


def net():
    mx.random.seed(0)
    model = Net()
    model.set_dtype(mx.float64)
    return model


def samples():
    draws = np.random.RandomState(0)
    return draws.randn(ROWS, 4, 4, 2), draws.randn(ROWS, 2)


def share_of(rank, bounds):
    """Return a rank's rows and whether they count: a rank without any has a spare one that must not."""
    images, targets = (part[bounds[rank] : bounds[rank + 1]] for part in samples())
    if len(images):
        return images, targets, True
    return np.full((1, 4, 4, 2), 100.0), np.zeros((1, 2)), False


def two_steps(model, norms, group, batch, *, compiled=False):
    """Train no weight, twice: the second time running statistics have moved before."""

    def loss(model, images, targets, real):
        with counting(norms, real):
            output = model(images)
        return mx.where(real, (output - targets).square().sum(), 0)

    gradient = nn.value_and_grad(model, loss)

    def run(images, targets, real):
        found = gradient(model, images, targets, real)
        return found if group is None else tree_map(lambda each: mx.distributed.all_sum(each, group=group), found)

    if compiled:
        run = mx.compile(run, inputs=[model.state], outputs=[model.state])
    images, targets, real = batch
    for _ in range(2):
        total, gradients = run(mx.array(images, dtype=mx.float64), mx.array(targets, dtype=mx.float64), mx.array(real))
        mx.eval(total, gradients, model.parameters())
    flat = [*tree_flatten(gradients), *(("value " + name, value) for name, value in tree_flatten(model.parameters()))]
    return {"loss": total.item(), **{name: np.array(value) for name, value in flat}}


def alone(_):
    return two_steps(net(), [], None, (*samples(), True))


def on_ranks(world, bounds, compiled):
    model, group = net(), join_group(world)
    norms = share_batch_norms(model, group)
    return two_steps(model, norms, group, share_of(world.rank, bounds), compiled=compiled)


def furthest(found, wanted):
    assert sorted(found) == sorted(wanted)
    return max(np.abs(found[name] - wanted[name]).max() for name in wanted)


@pytest.mark.parametrize(
    ("bounds", "compiled"),
    [((0, 5, 7), True), ((0, 3, 3, 6, 7), False)],
    ids=["two ranks, compiled", "four, one without a row"],
)
def test_uneven_ranks_equal_one_process_in_every_number(bounds, compiled):
    (expected,) = run_ranks(alone, 1)
    for found in run_ranks(on_ranks, len(bounds) - 1, bounds, compiled):
        assert furthest(found, expected) < 1e-12


def outputs_and_statistics(_):
    model = nn.BatchNorm(3)
    share_batch_norms(model, None)
    norm = model
    with counting([norm], mx.array(False)):
        output = norm(mx.ones((4, 3)))
    return np.array(output).shape, np.array(norm.running_var).tolist(), "real" in norm.state


def test_a_batch_without_a_real_row_moves_no_statistics_and_leaves_no_state():
    assert run_ranks(outputs_and_statistics, 1) == [((4, 3), [1.0, 1.0, 1.0], False)]


def test_half_precision_rows_are_normalised_by_fp32_statistics():
    norm = nn.BatchNorm(8)
    share_batch_norms(norm, None)
    mx.random.seed(0)
    rows = (mx.random.normal((64, 8)) * 0.25 + 5).astype(mx.bfloat16)
    output = norm(rows)
    exact = np.array(rows.astype(mx.float32), dtype=np.float64)
    assert output.dtype == mx.bfloat16
    wanted = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + norm.eps)
    assert np.array(output.astype(mx.float32)) == pytest.approx(wanted, rel=2**-8, abs=1e-5)  # bf16 has 8 digits
    assert np.array(norm.running_mean) == pytest.approx(0.1 * exact.mean(0), rel=1e-6)


def test_names_and_shared_modules_stay_and_foreign_norms_are_named():
    model = Net()
    model.twin = model.norm
    model.own = OwnNorm(3)
    before = [name for name, _ in tree_flatten(model.parameters())]
    norms = share_batch_norms(model, None)
    assert [name for name, _ in tree_flatten(model.parameters())] == before
    assert model.twin is model.norm
    assert isinstance(model.norm, MlxBatchNorm)
    assert {norm.name for norm in norms} <= {"norm", "flat", "twin", "rest.1"}
    assert foreign_batch_norms(model) == ["own"]
