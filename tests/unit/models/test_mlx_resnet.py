"""ResNets in MLX: torch's names, logits, gradients, statistics and training, whichever of the two began."""

import copy
import math

import pytest
import torch
from models.in_both import (
    as_mlx,
    as_torch,
    gradients_in_mlx,
    gradients_in_torch,
    load_into_mlx,
    shake,
    train_in_mlx,
    train_in_torch,
)

from refusals import refuses
from shardwise import datasets, models

mx = pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'shardwise[mlx]'")
from mlx.utils import tree_flatten  # noqa: E402

SHAPES = [
    ("resnet18", "batch", "small", 16),
    ("resnet50", "group", "imagenet", 32),
    pytest.param("resnet18", "batch", "imagenet", 64, marks=pytest.mark.prove),
]


def both(folder, name, **options):
    torch.manual_seed(0)
    options |= {"num_classes": 4, "in_channels": 2}
    model, other = getattr(models, name)(**options), getattr(models.mlx, name)(**options)
    shake(model)
    load_into_mlx(model, other, folder)
    return model, other


@pytest.mark.parametrize(("name", "norm", "stem", "side"), SHAPES)
def test_logits_gradients_and_statistics_are_those_of_torch(tmp_path, name, norm, stem, side):
    model, other = both(tmp_path, name, norm=norm, stem=stem)
    images, labels = torch.randn(3, 2, side, side), torch.tensor([0, 3, 1])
    loss, gradients = gradients_in_torch(model, images, labels)
    mlx_loss, mlx_gradients = gradients_in_mlx(other, images, labels)
    assert mlx_loss == pytest.approx(loss, rel=1e-4)
    assert mlx_gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert (mlx_gradients[key] - gradient).norm() < 2e-3 * gradient.norm(), key
    buffers = dict(model.named_buffers())
    for key, value in tree_flatten(other.parameters()):
        if key in buffers:
            torch.testing.assert_close(as_torch(value), buffers[key], rtol=1e-4, atol=1e-5)
    model.eval()
    other.eval()
    with torch.no_grad():
        expected = model(images)
    torch.testing.assert_close(as_torch(other(as_mlx(images))), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_parameters_have_the_names_and_shapes_of_torch(name, norm):
    with torch.device("meta"):
        state = getattr(models, name)(norm=norm).state_dict()
    expected = {
        key: tuple(value.movedim(1, -1).shape) if value.dim() == 4 else tuple(value.shape)
        for key, value in state.items()
    }
    found = {key: value.shape for key, value in tree_flatten(getattr(models.mlx, name)(norm=norm).parameters())}
    assert found == {key: shape for key, shape in expected.items() if not key.endswith("num_batches_tracked")}


def digit_batches(size):
    rows = [datasets.digits("train")[i] for i in range(10 * size)]
    images = torch.stack([torch.as_tensor(image) for image, _ in rows])
    labels = torch.tensor([int(label) for _, label in rows])
    return list(zip(images.split(size), labels.split(size), strict=True))


@pytest.mark.prove
def test_with_batch_norm_ten_steps_differ_by_no_more_than_torch_from_itself(tmp_path):
    """Statistics of few images under Adam blow rounding up: torch itself moves by 4e-4 if weights move by 1e-7."""
    torch.manual_seed(0)
    options = {"num_classes": 10, "in_channels": 1, "stem": "small"}
    model, other = models.resnet18(**options), models.mlx.resnet18(**options)
    load_into_mlx(model, other, tmp_path)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
    losses = torch.tensor(train_in_torch(model, digit_batches(8), lr=1e-4))
    noise = (torch.tensor(train_in_torch(moved, digit_batches(8), lr=1e-4)) - losses).abs().max()
    assert noise < 1e-2
    assert (torch.tensor(train_in_mlx(other, digit_batches(8), lr=1e-4)) - losses).abs().max() < 5 * noise


def test_a_fresh_network_is_spread_as_in_torch_and_its_blocks_are_the_identity():
    mx.random.seed(0)
    model = models.mlx.resnet18(norm="group")
    weight = model.stages[1][0].body.conv1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (128 * 9)), rel=0.05)
    x = mx.random.uniform(shape=(2, 4, 4, 64))
    assert mx.array_equal(model.stages[0][1](x), x).item()


@pytest.mark.parametrize(
    ("options", "refusal"),
    [({"norm": "layer"}, ("model.unknown-norm", "'layer'")), ({"stem": "big"}, ("model.unknown-stem", "'big'"))],
)
def test_an_unknown_name_is_refused(options, refusal):
    with refuses(*refusal):
        models.mlx.resnet18(**options)
