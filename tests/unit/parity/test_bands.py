"""Limits of plans in lower precision: how far gradients and norms may be from fp32, by what rounds in one process."""

import pytest
import torch

from shardwise.layout import Layout
from shardwise.parity.capture import Traced, grads_file, values_file
from shardwise.parity.noise import rounding_gaps
from shardwise.parity.runner import Record
from shardwise.planner.settle import LocalDevice, settle

RIGHT = (1.0, 0.0)
ROUNDED = (1.0, 0.02)
"""One process in bf16: 2 % away, with a norm that is right to 0.02 % by chance."""


def record(folder, *gradients):
    """A training of one rank with these gradients, one by step."""
    folder.mkdir()
    values = [torch.tensor(gradient) for gradient in gradients]
    for step, gradient in enumerate(values):
        torch.save({"w": gradient}, grads_file(folder, step))
    for step in (0, len(values)):
        torch.save({"parameters": {"w": torch.full((2,), float(step))}, "buffers": {}}, values_file(folder, step))
    seen = Traced(rank=0, losses=[1.0] * len(values), norms=[float(value.norm()) for value in values])
    seen.gradients, seen.parameters = [{}] * len(values), [{}] * (len(values) + 1)
    return Record(folder=folder, traced=[seen], layout=Layout())


@pytest.mark.parametrize(
    ("spec", "scale", "steps_beyond"),
    [("ddp", 1.05, set()), ("ddp", 1.1, {0}), ("zero2", 1.15, {0}), ("ddp", 1.15, {0, 1}), ("zero2", 2.0, {0, 1})],
)
def test_the_limit_of_a_norm_follows_the_distance_of_gradients_and_widens_after_the_first_step(
    tmp_path, spec, scale, steps_beyond
):
    plan = settle(spec, batch_size=8, world_size=2, device=LocalDevice(), overrides={"precision": "bf16"})
    found, right = (scale, 0.0), record(tmp_path / "right", RIGHT, RIGHT)
    lower, observed = record(tmp_path / "lower", ROUNDED, ROUNDED), record(tmp_path / "plan", found, found)
    gaps = rounding_gaps(observed, right, lower, plan)
    for kind in ("gradient", "gradient norm"):
        assert {gap.step for gap in gaps if gap.kind == kind and gap.beyond > 1} == steps_beyond
