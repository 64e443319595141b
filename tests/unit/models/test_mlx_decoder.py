"""The decoder in MLX: torch's names, logits, gradients and training, whichever of the two began."""

import pytest
import torch
from models.in_both import (
    as_mlx,
    as_torch,
    gradients_in_mlx,
    gradients_in_torch,
    load_into_mlx,
    load_into_torch,
    shake,
    train_in_mlx,
    train_in_torch,
)

from refusals import refuses
from shardwise import datasets, models

mx = pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'shardwise[mlx]'")
from mlx.utils import tree_flatten  # noqa: E402

SHAPES = {
    "gpt2": ("gpt2-tiny", {}),
    "gpt2, head of its own": ("gpt2-tiny", {"tie_head": False}),
    "llama": ("llama-tiny", {}),
    "llama, 2 groups": ("llama-tiny", {"num_kv_heads": 2}),
    "llama, 1 group, tied": ("llama-tiny", {"num_kv_heads": 1, "tie_head": True, "rope_base": 500_000.0}),
}
shapes = pytest.mark.parametrize(("name", "overrides"), SHAPES.values(), ids=SHAPES.keys())


def both(folder, name, overrides):
    torch.manual_seed(0)
    model, other = models.decoder(name, **overrides), models.mlx.decoder(name, **overrides)
    shake(model)
    load_into_mlx(model, other, folder)
    return model, other


@shapes
def test_logits_and_gradients_are_those_of_torch(tmp_path, name, overrides):
    model, other = both(tmp_path, name, overrides)
    rows = torch.randint(256, (2, 33))
    with torch.no_grad():
        expected = model(rows)
    scale = expected.abs().max()
    torch.testing.assert_close(as_torch(other(as_mlx(rows))) / scale, expected / scale, rtol=0, atol=1e-5)
    loss, gradients = gradients_in_torch(model, rows[:, :-1], rows[:, 1:])
    mlx_loss, mlx_gradients = gradients_in_mlx(other, rows[:, :-1], rows[:, 1:])
    assert mlx_loss == pytest.approx(loss, rel=1e-5)
    assert mlx_gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(mlx_gradients[key], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item())


@shapes
def test_parameters_have_the_names_and_shapes_of_torch(name, overrides):
    model, other = models.decoder(name, **overrides), models.mlx.decoder(name, **overrides)
    expected = {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert {key: value.shape for key, value in tree_flatten(other.parameters())} == expected


def text_batches():
    rows = datasets.text(length=32)("train")
    pairs = [rows[i] for i in range(40)]
    inputs, labels = (torch.stack([torch.as_tensor(pair[part]) for pair in pairs]).long() for part in (0, 1))
    return list(zip(inputs.split(4), labels.split(4), strict=True))


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_ten_steps_have_the_losses_of_torch(tmp_path, name):
    model, other = both(tmp_path, name, {})
    losses = train_in_torch(model, text_batches(), lr=1e-3)
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.1
    assert train_in_mlx(other, text_batches(), lr=1e-3) == pytest.approx(losses, rel=2e-5)


def test_ten_steps_from_mlxs_weights_have_its_losses_in_torch(tmp_path):
    mx.random.seed(0)
    model, other = models.decoder("gpt2-tiny"), models.mlx.decoder("gpt2-tiny")
    load_into_torch(other, model, tmp_path)
    losses = train_in_mlx(other, text_batches(), lr=1e-3)
    assert train_in_torch(model, text_batches(), lr=1e-3) == pytest.approx(losses, rel=2e-5)


def test_fresh_weights_are_spread_as_in_torch():
    mx.random.seed(0)
    model = models.mlx.decoder("gpt2-tiny", num_layers=8)
    block = model.blocks[3]
    assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.positions.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attn.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not block.attn.qkv.bias.any().item()


def test_a_bf16_decoder_gives_bf16_logits_near_those_of_fp32():
    mx.random.seed(0)
    model = models.mlx.decoder("llama-tiny")
    rows = mx.random.randint(0, 256, (1, 32))
    exact = model(rows)
    model.set_dtype(mx.bfloat16)
    assert model(rows).dtype == mx.bfloat16
    assert mx.abs(model(rows).astype(mx.float32) - exact).max().item() < 0.02


def test_a_sequence_beyond_the_context_is_refused():
    with refuses("model.context-exceeded", 129, 128):
        models.mlx.decoder("gpt2-tiny")(mx.zeros((1, 129), mx.int32))


def test_an_unknown_size_is_refused_with_the_nearest():
    with refuses("model.unknown-name", "'gpt2'"):
        models.mlx.decoder("gpt-2")
