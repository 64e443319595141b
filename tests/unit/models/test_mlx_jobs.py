"""The built-in models as jobs: from the same weights and data, torch and MLX train with the same losses."""

import dataclasses

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.convert.convert import convert
from shardwise.checkpoint.spec import ConvertSpec
from shardwise.training.build import build_step

pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'shardwise[mlx]'")

MODELS = {
    "gpt2": ("decoder", ("gpt2-tiny",), {"num_layers": 2}),
    "llama": ("decoder", ("llama-tiny",), {"num_kv_heads": 2}),
    "resnet": ("resnet18", (), {"num_classes": 10, "in_channels": 1, "stem": "small", "norm": "group"}),
}


def model_of(kind, engine):
    name, arguments, options = MODELS[kind]
    return getattr(sw.models.mlx if engine == "mlx" else sw.models, name)(*arguments, **options)


def losses_of(kind, engine, weights):
    """Return the losses of ten steps of a job that begins with these weights."""
    is_text = kind != "resnet"
    job = sw.Job(
        model=lambda: model_of(kind, engine),
        data=sw.datasets.text(length=32) if is_text else sw.datasets.digits,
        loss=sw.losses.token_cross_entropy if is_text else sw.losses.cross_entropy,
        optimizer=sw.adamw(lr=1e-3 if is_text else 1e-4),
        schedule=sw.schedules.Cosine(warmup=3),
        clip_norm=1.0,
        batch_size=4,
        steps=10,
        weights=str(weights),
        engine=engine,
    )
    plan = dataclasses.replace(sw.Plan.preset("ddp", 1, batch_size=4, accumulation=2), engine=engine)
    with sw.world() as world:
        step = build_step(job, plan, world)
        reports = [step(batch) for batch in step.feed]
        return [(report.loss_sum / report.denominator).item() for report in reports]


@pytest.mark.parametrize(
    "kind", ["gpt2", *(pytest.param(kind, marks=pytest.mark.prove) for kind in ("llama", "resnet"))]
)
def test_ten_steps_of_a_job_have_the_same_losses_in_torch_and_mlx(tmp_path, kind):
    torch.manual_seed(0)
    torch.save(model_of(kind, "torch").state_dict(), tmp_path / "first.pt")
    losses = losses_of(kind, "torch", tmp_path / "first.pt")
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.05
    assert losses_of(kind, "mlx", tmp_path / "first.pt") == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("resnet", marks=pytest.mark.prove)])
def test_a_job_begins_with_what_mlx_itself_saved_and_torch_with_what_is_converted(tmp_path, kind):
    model_of(kind, "mlx").save_weights(str(tmp_path / "saved.safetensors"))
    convert(ConvertSpec(source=tmp_path / "saved.safetensors", target=tmp_path / "converted.pt", to="torch"))
    losses = losses_of(kind, "mlx", tmp_path / "saved.safetensors")
    assert losses_of(kind, "torch", tmp_path / "converted.pt") == pytest.approx(losses, rel=1e-5)
