import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from refusals import refuses
from shardwise.measurement.memory import LiveBytes
from shardwise.parallel import batch_norm
from shardwise.parallel.batch_norm import BatchNorm, foreign_batch_norms, replace_batch_norms
from shardwise.testing import run_ranks

SHAPES = {"1d": (nn.BatchNorm1d, ()), "2d": (nn.BatchNorm2d, (3, 3)), "3d": (nn.BatchNorm3d, (2, 2, 2))}


def make(kind, space):
    torch.manual_seed(1)
    norm = kind(4).double()
    norm.weight.data.uniform_()
    norm.bias.data.uniform_()
    return norm, torch.randn(13, 4, *space, dtype=torch.float64), torch.randn(13, 4, *space, dtype=torch.float64)


def outcome(norm, value, grad):
    value = value.clone().requires_grad_()
    output = norm(value)
    output.backward(grad)
    return output.detach(), value.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("splits", [(7, 6), (13, 0), (1, 5, 7)])
def test_uneven_shards_equal_one_process(shape, splits):
    norm, value, grad = make(*SHAPES[shape])
    whole = outcome(copy.deepcopy(norm), value, grad)

    def on_rank(world):
        ours = replace_batch_norms(nn.Sequential(copy.deepcopy(norm)), dist.group.WORLD)[0]
        start, rows = sum(splits[: world.rank]), splits[world.rank]
        # Every rank gets 13 rows: its own first, then filler that must not count.
        filled = torch.full_like(value, 1e3)
        filled[:rows] = value[start : start + rows]
        filled_grad = torch.zeros_like(grad)
        filled_grad[:rows] = grad[start : start + rows]
        ours.rows = (rows, 13)
        output, value_grad, weight_grad, bias_grad, mean, var = outcome(ours, filled, filled_grad)
        assert not value_grad[rows:].any()
        dist.all_reduce(weight_grad)
        dist.all_reduce(bias_grad)
        return output[:rows], value_grad[:rows], weight_grad, bias_grad, mean, var

    results = run_ranks(on_rank, len(splits))
    torch.testing.assert_close(torch.cat([result[0] for result in results]), whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([result[1] for result in results]), whole[1], rtol=1e-11, atol=1e-12)
    for result in results:
        for ours, theirs in zip(result[2:], whole[2:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_in_chunks_have_the_numbers_of_all_rows_at_once(monkeypatch, shape):
    norm, value, grad = make(*SHAPES[shape])
    ours = replace_batch_norms(nn.Sequential(norm), None)[0]
    ours.rows = (11, 13)
    expected = outcome(copy.deepcopy(ours), value, grad)
    monkeypatch.setattr(batch_norm, "_CHUNK", 3 * value[0].numel() + 1)  # the last of four chunks has two rows
    for mine, other in zip(outcome(ours, value, grad), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_padded_bf16_norm_does_not_copy_its_whole_input_to_fp32(monkeypatch):
    value = torch.randn(64, 8, 16, 16, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(batch_norm, "_CHUNK", value.numel() // 16)
    ours = replace_batch_norms(nn.Sequential(nn.BatchNorm2d(8)), None)[0]
    ours.rows = (60, 64)
    grad = torch.randn_like(value)
    with LiveBytes("cpu") as live:
        ours(value).backward(grad)
    # Beside the input, its gradient, the output and the gradient of the output: a few chunks in fp32.
    bf16_bytes = value.numel() * value.element_size()
    assert live.peak_bytes < 4 * bf16_bytes + 6 * 2 * bf16_bytes // 16


def test_local_norm_passes_over_filler_rows():
    norm, value, grad = make(*SHAPES["2d"])
    whole = outcome(copy.deepcopy(norm), value[:5], grad[:5])
    ours = replace_batch_norms(nn.Sequential(norm), None)[0]
    ours.rows = (5, 13)
    filled_grad = torch.cat([grad[:5], torch.zeros_like(grad[5:])])
    result = outcome(ours, value, filled_grad)
    torch.testing.assert_close(result[0][:5], whole[0])
    torch.testing.assert_close(result[1][:5], whole[1])
    torch.testing.assert_close(result[5], whole[5])


def test_rank_without_rows_leaves_its_local_statistics_alone():
    ours = replace_batch_norms(nn.Sequential(nn.BatchNorm1d(2)), None)[0]
    ours.rows = (0, 3)
    ours(torch.randn(3, 2))
    assert torch.equal(ours.running_var, torch.ones(2))
    assert ours.num_batches_tracked == 0


def test_replacement_keeps_names_parameters_and_mode():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).eval()
    weight, names = model[1].weight, list(model.state_dict())
    replace_batch_norms(model, None)
    assert isinstance(model[1], BatchNorm)
    assert model[1].weight is weight
    assert list(model.state_dict()) == names
    assert not model[1].training


def test_evaluation_uses_the_running_statistics():
    norm = nn.BatchNorm2d(3)
    norm(torch.randn(8, 3, 2, 2))
    value = torch.randn(2, 3, 2, 2)
    ours = replace_batch_norms(nn.Sequential(copy.deepcopy(norm)), None)[0].eval()
    torch.testing.assert_close(ours(value), norm.eval()(value))


def test_norm_over_more_rows_than_the_batch_sees_them_all():
    """Two views stacked into one input, frames folded into rows: not what filler is."""
    norm, value, grad = make(*SHAPES["2d"])
    whole = outcome(copy.deepcopy(norm), value, grad)
    ours = replace_batch_norms(nn.Sequential(norm), None)[0]
    for mine, theirs in zip(outcome(ours, value, grad), whole, strict=True):
        torch.testing.assert_close(mine, theirs)
    ours.rows = (2, 6)
    with refuses("support.batch-norm-filled-rows", 13, 6):
        ours(value)


def test_micro_batch_without_a_row_on_any_rank_gives_no_nan():
    def on_rank(world):
        ours = replace_batch_norms(nn.Sequential(nn.BatchNorm1d(2)), dist.group.WORLD)[0]
        ours.rows = (0, 3)
        value = torch.randn(3, 2, requires_grad=True)
        ours(value)[:0].sum().backward()
        return ours.running_mean, ours.running_var, ours.weight.grad, value.grad, ours.num_batches_tracked

    for mean, var, weight_grad, value_grad, tracked in run_ranks(on_rank, 2):
        assert torch.equal(mean, torch.zeros(2))
        assert torch.equal(var, torch.ones(2))
        assert not weight_grad.any()
        assert not value_grad.any()
        assert tracked == 0


class ReluNorm(nn.BatchNorm2d):
    def forward(self, value):
        return super().forward(value).relu()


def test_class_derived_from_batch_norm_keeps_its_own_forward():
    model = nn.Sequential(ReluNorm(3), nn.BatchNorm2d(3))
    replace_batch_norms(model, None)
    assert type(model[0]) is ReluNorm
    assert isinstance(model[1], BatchNorm)
    assert foreign_batch_norms(model) == ["0"]


def test_norm_used_twice_stays_one_norm():
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Linear(2, 2), norm)
    replace_batch_norms(model, None)
    assert isinstance(model[0], BatchNorm)
    assert model[0] is model[2]


def test_norm_without_running_statistics_evaluates_alone():
    def on_rank(world):
        ours = replace_batch_norms(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)), dist.group.WORLD)
        ours.eval()
        return [ours(torch.randn(4, 2)).shape for _ in range(1 + world.rank)]  # ranks evaluate different numbers

    assert [len(shapes) for shapes in run_ranks(on_rank, 2)] == [1, 2]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_of_lower_precision_have_statistics_of_their_own_precision(device, momentum):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(1)
    plain = nn.BatchNorm2d(4, momentum=momentum).to(device)
    nn.init.uniform_(plain.weight)
    ours = replace_batch_norms(nn.Sequential(copy.deepcopy(plain)), None)[0]
    # What a sharded unit hands in: its weights rounded to the compute dtype, its buffers as they are.
    ours.weight, ours.bias = (nn.Parameter(part.detach().bfloat16()) for part in (ours.weight, ours.bias))
    plain.weight.data.copy_(ours.weight.detach())
    value = torch.randn(8, 4, 6, 6, device=device).bfloat16()
    for is_training in (True, True, False):
        assert torch.equal(ours.train(is_training)(value), plain.train(is_training)(value))
    ours.train()(value).float().sum().backward()
    assert ours.weight.grad.dtype == torch.bfloat16
    assert ours.num_batches_tracked == plain.num_batches_tracked + 1
