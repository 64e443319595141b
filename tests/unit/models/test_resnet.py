"""ResNets: published sizes, both norms and stems, a fresh start as the identity."""

import copy

import pytest
import torch

from refusals import refuses
from shardwise import models
from shardwise.models.resnet import Residual


@pytest.mark.parametrize(
    ("build", "published"),
    [(models.resnet18, 11_689_512), (models.resnet34, 21_797_672), (models.resnet50, 25_557_032)],
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_parameter_count_is_the_published_one(build, published, norm):
    with torch.device("meta"):
        model = build(norm=norm)
    assert sum(parameter.numel() for parameter in model.parameters()) == published


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize(("stem", "side"), [("imagenet", 32), ("small", 8)])
def test_any_channels_and_classes_give_logits(norm, stem, side):
    model = models.resnet18(num_classes=7, in_channels=2, norm=norm, stem=stem)
    logits = model(torch.randn(3, 2, side, side))
    assert logits.shape == (3, 7)
    assert logits.isfinite().all()


def test_imagenet_stem_shrinks_four_times_and_small_stem_not_at_all():
    images = torch.randn(1, 1, 32, 32)
    assert models.resnet18(in_channels=1, stem="imagenet").stem(images).shape == (1, 64, 8, 8)
    assert models.resnet18(in_channels=1, stem="small").stem(images).shape == (1, 64, 32, 32)


def test_bottleneck_stage_gives_four_times_its_width():
    model = models.resnet50(in_channels=1, stem="small", num_classes=2)
    assert model.stages(model.stem(torch.randn(2, 1, 16, 16))).shape == (2, 2048, 2, 2)


@pytest.mark.parametrize("build", [models.resnet18, models.resnet50])
def test_fresh_block_without_projection_is_the_identity_on_positive_input(build):
    model = build(norm="group")
    block = model.stages[0][1]
    assert isinstance(block, Residual)
    x = torch.rand(2, block.out_channels, 4, 4)
    assert torch.equal(block(x), x)


def test_init_weights_fills_a_model_built_on_meta_buffers_too():
    with torch.device("meta"):
        late = models.resnet18(num_classes=3)
    late.to_empty(device="cpu")
    for tensor in (*late.parameters(), *late.buffers()):
        tensor.data.fill_(99)
    late.init_weights()
    fresh = models.resnet18(num_classes=3).state_dict()
    for name, value in late.state_dict().items():
        if "conv" in name or "head" in name:
            assert 0 < value.std() < 1, name
        else:
            assert torch.equal(value, fresh[name]), name


def test_group_norm_model_keeps_double_precision():
    model = models.resnet18(num_classes=2, norm="group", stem="small").double()
    assert model(torch.randn(1, 3, 8, 8, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"norm": "bach"}, ("model.unknown-norm", "'batch'")),
        ({"stem": "imagnet"}, ("model.unknown-stem", "'imagenet'")),
        ({"norm": "x"}, ("model.unknown-norm", "batch, group")),
    ],
)
def test_unknown_norm_or_stem_names_the_nearest(options, refusal):
    with refuses(*refusal):
        models.resnet18(**options)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_bf16_on_a_gpu_is_near_double_on_the_cpu(norm):
    torch.manual_seed(0)
    model = models.resnet18(num_classes=10, in_channels=1, norm=norm, stem="small")
    images = torch.randn(16, 1, 16, 16)
    exact = copy.deepcopy(model).double()(images.double())
    model.cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(images.cuda())
    torch.testing.assert_close(logits.double().cpu(), exact, rtol=0, atol=0.05 * exact.abs().max().item())
