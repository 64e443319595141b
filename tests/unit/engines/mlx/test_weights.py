"""First weights of a model in MLX: whatever file they are in, the model holds what was saved."""

import mlx.core as mx
import pytest
import torch
from engines.mlx.jobs import KINDS, make_job, make_plan, run
from mlx import nn

import shardwise as sw
from refusals import refuses
from shardwise.checkpoint.convert.convert import convert
from shardwise.checkpoint.spec import ConvertSpec
from shardwise.engines.mlx.arrays import form_of
from shardwise.engines.mlx.weights import read_weights
from shardwise.training.build import build_step

pytestmark = pytest.mark.usefixtures("uncompiled")


class Shapes(nn.Module):
    """Weights of three dimensions that look alike in a file: of experts, of a convolution and of one transposed."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Module()
        self.experts.weight = mx.random.normal((3, 4, 4))
        self.conv, self.up = nn.Conv1d(4, 3, 4), nn.ConvTranspose1d(2, 2, 2)


def test_what_mlx_saved_is_loaded_as_it_stands(tmp_path):
    saved, model = Shapes(), Shapes()
    saved.save_weights(str(tmp_path / "w.safetensors"))
    read_weights(tmp_path / "w.safetensors", model, form_of(model))
    for name, module in (("experts", model.experts), ("conv", model.conv), ("up", model.up)):
        assert mx.array_equal(module.weight, saved[name].weight), name


def test_a_file_of_mlx_with_other_shapes_is_refused_in_mlxs_own_shapes(tmp_path):
    mx.save_safetensors(str(tmp_path / "w.safetensors"), {"weight": mx.ones((3, 4, 2)), "bias": mx.ones(3)})
    model = nn.Conv1d(4, 3, 2)
    with refuses("model.weights-shape-mismatch", "[3, 4, 2]", "[3, 2, 4]"):
        read_weights(tmp_path / "w.safetensors", model, form_of(model))


@pytest.mark.parametrize("kind", ["torch", "mlx"])
def test_batch_counts_of_a_file_are_continued(tmp_path, kind):
    state = KINDS["pictures"][1]().state_dict() | {"norm.num_batches_tracked": torch.tensor(7)}
    path = tmp_path / "w.pt"
    torch.save(state, path)
    if kind == "mlx":
        path = convert(ConvertSpec(source=path, target=tmp_path / "w.safetensors", to="mlx")).path
    job = make_job("pictures", weights=str(path))
    with sw.world() as world:
        step = build_step(job, make_plan(job), world)
        run(step, 2)
        assert int(step.buffers()["norm.num_batches_tracked"]) == 9


def test_statistics_of_a_model_that_is_a_batch_norm_have_torchs_names():
    job = make_job(model=lambda: nn.BatchNorm(6))
    with sw.world() as world:
        step = build_step(job, make_plan(job), world)
        assert set(step.buffers()) == set(dict(torch.nn.BatchNorm1d(6).named_buffers()))
