"""Strided convolutions of narrow inputs in bf16 on a CPU: their weight gradients are those of fp32, within bf16."""

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.parallel.batch_norm import guard_narrow_convolutions
from shardwise.plans import Plan, Precision
from shardwise.testing import run_ranks
from shardwise.training.build import build_step

CASES = {
    "3x3 on 1x1 maps": (lambda: nn.Conv2d(16, 32, 3, 2, 1), (8, 16, 1, 1)),
    "width alone": (lambda: nn.Conv2d(16, 32, 3, (1, 2), 1, bias=False), (8, 16, 4, 1)),
    "stride 3 on 2x2 maps": (lambda: nn.Conv2d(16, 32, 3, 3, 1), (8, 16, 2, 2)),
    "7x7": (lambda: nn.Conv2d(16, 32, 7, 5, 3), (8, 16, 4, 4)),
    "padded by reflection": (lambda: nn.Conv2d(16, 32, 3, 3, 1, padding_mode="reflect"), (8, 16, 2, 2)),
    "one dimension": (lambda: nn.Conv1d(16, 32, 3, 2, 1), (8, 16, 1)),
    "three dimensions": (lambda: nn.Conv3d(16, 32, 3, 2, 1), (8, 16, 1, 1, 1)),
    "transposed": (lambda: nn.ConvTranspose2d(16, 32, 3, 2, 1), (8, 16, 1, 1)),
}


def fill_free_memory():
    """Leave NaN where the next tensors will lie: what is not written is not right by chance."""
    for size in (1_000, 5_000, 20_000, 100_000):
        torch.full((size,), float("nan"))


def gradients(convolution, images, upstream, dtype):
    images = images.clone().requires_grad_()
    convolution.zero_grad()
    fill_free_memory()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        out = convolution(images)
    assert out.dtype == dtype
    out.float().backward(upstream)
    return {
        "output": out.detach().float(),
        "input": images.grad,
        **{name: value.grad for name, value in convolution.named_parameters()},
    }


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_fp32(case):
    make, shape = CASES[case]
    torch.manual_seed(0)
    convolution = make()
    images = torch.randn(shape)
    upstream = torch.randn_like(convolution(images))
    expected = gradients(convolution, images, upstream, torch.float32)
    guard_narrow_convolutions(convolution)
    for _ in range(3):
        found = gradients(convolution, images, upstream, torch.bfloat16)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.02 * float(value.abs().max()))


def test_wide_inputs_and_other_dtypes_keep_their_own_arithmetic():
    convolution = nn.Conv2d(4, 4, 3, 2, 1)
    images = torch.randn(2, 4, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = convolution(images)
    narrow = convolution(images[..., :1])
    guard_narrow_convolutions(convolution)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(convolution(images), expected)
    assert torch.equal(convolution(images[..., :1]), narrow)


def small_resnet():
    """8x8 images shrink to 1x1 before the last two convolutions, as in a ResNet-18 with the stem for ImageNet."""
    layers = [nn.Conv2d(1 if not index else 16, 16, 3, 2, 1) for index in range(5)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 10))


def updated(world, name, compute):
    """Return the weights of the narrow convolutions after one step."""
    job = sw.Job(
        model=small_resnet,
        data=sw.datasets.digits,
        loss=sw.losses.cross_entropy,
        optimizer=sw.sgd(lr=1.0),
        batch_size=32,
        steps=1,
    )
    plan = Plan.preset(name, world.size, batch_size=job.batch_size)
    step = build_step(job, Plan(**{**vars(plan), "precision": Precision(compute=compute)}), world)
    fill_free_memory()
    before = {name: value.clone() for name, value in step.whole_weights().items()}
    step(next(iter(step.feed)))
    return {name: value - before[name] for name, value in step.whole_weights().items()}


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_training_in_bf16_moves_narrow_convolutions_as_in_fp32(name):
    def body(world):
        return updated(world, name, "bf16"), updated(world, name, "fp32")

    for found, expected in run_ranks(body, 2)[:1]:
        for key in ("3.weight", "4.weight"):
            scale = float(expected[key].abs().max())
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0.1 * scale)
