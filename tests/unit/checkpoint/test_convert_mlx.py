"""Files of MLX weights: recognised, loaded by MLX itself, bit-exact there and back."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from refusals import refuses
from shardwise.checkpoint import save
from shardwise.checkpoint.convert.convert import convert, open_contents
from shardwise.checkpoint.disk import DamagedError
from shardwise.checkpoint.spec import ConvertSpec
from shardwise.models import resnet18

mx = pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'shardwise[mlx]'")
from mlx import nn as mlx_nn  # noqa: E402


def values_of(path):
    contents = open_contents(path)
    return {name.removeprefix("model/"): value for name, value in contents.read(list(contents.forms)).items()}


def mx_values(path):
    return {name: torch.from_numpy(np.array(value)) for name, value in mx.load(str(path)).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def trained_resnet():
    """A ResNet whose statistics and counts are no longer fresh."""
    torch.manual_seed(0)
    model = resnet18(num_classes=3, in_channels=2, stem="small")
    model(torch.randn(4, 2, 8, 8))
    return model


def test_weights_statistics_and_counts_come_back_bit_by_bit(tmp_path):
    state = trained_resnet().state_dict()
    torch.save(state, tmp_path / "torch.pt")
    convert(ConvertSpec(source=tmp_path / "torch.pt", target=tmp_path / "mlx.safetensors", to="mlx"))
    convert(ConvertSpec(source=tmp_path / "mlx.safetensors", target=tmp_path / "back.pt", to="torch"))
    assert_same(torch.load(tmp_path / "back.pt"), state)
    assert state["stem.norm.num_batches_tracked"] == 1


def test_what_mlx_loads_and_saves_itself_comes_back_bit_by_bit(tmp_path):
    from shardwise.engines.mlx.models import resnet18 as in_mlx

    model = trained_resnet()
    torch.save(model.state_dict(), tmp_path / "torch.pt")
    convert(ConvertSpec(source=tmp_path / "torch.pt", target=tmp_path / "there.safetensors", to="mlx"))
    other = in_mlx(num_classes=3, in_channels=2, stem="small")
    other.load_weights(str(tmp_path / "there.safetensors"))  # strict: no name too many, none missing, every shape
    other.save_weights(str(tmp_path / "saved.safetensors"))
    found = values_of(tmp_path / "saved.safetensors")
    counts = {name: torch.tensor(0) for name in found if name.endswith("num_batches_tracked")}
    assert_same(found, model.state_dict() | counts)
    model.load_state_dict(found)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_of_every_dimension_are_mlxs_own(tmp_path, dims):
    torch.manual_seed(0)
    ours = getattr(nn, f"Conv{dims}d")(2, 3, kernel_size=3)
    theirs = getattr(mlx_nn, f"Conv{dims}d")(2, 3, kernel_size=3)
    torch.save(ours.state_dict(), tmp_path / "torch.pt")
    convert(ConvertSpec(source=tmp_path / "torch.pt", target=tmp_path / "mlx.safetensors", to="mlx"))
    theirs.load_weights(str(tmp_path / "mlx.safetensors"))
    x = torch.randn(2, 2, *[5] * dims)
    found = theirs(mx.array(x.movedim(1, -1).numpy()))
    torch.testing.assert_close(torch.from_numpy(np.array(found)).movedim(-1, 1), ours(x))
    assert_same(values_of(tmp_path / "mlx.safetensors"), ours.state_dict())


def test_a_checkpoint_keeps_its_ties_and_reports_what_is_left_out(tmp_path):
    tensors = {
        "model/a.weight": torch.randn(4, 3),
        "model/b": torch.randn(5).bfloat16(),
        "optimizer/b/step": torch.tensor(1.0),
    }
    source = save(tmp_path / "own", 1, tensors, {"step": 1, "tied": {"head.weight": "a.weight"}}, group=None).path
    report = convert(ConvertSpec(source=source, target=tmp_path / "mlx.safetensors", to="mlx"))
    assert [text.partition(":")[0] for text in report.left_out] == ["head.weight", "optimizer", "facts (step)"]
    assert report.num_tensors == 2
    assert set(mx.load(str(tmp_path / "mlx.safetensors"))) == {"a.weight", "b"}
    assert open_contents(tmp_path / "mlx.safetensors").tied == {"head.weight": "a.weight"}
    assert_same(
        values_of(tmp_path / "mlx.safetensors"),
        {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")},
    )


def test_files_of_mlx_are_known_from_those_of_others(tmp_path):
    model = mlx_nn.Conv2d(2, 3, 3)
    model.save_weights(str(tmp_path / "own.safetensors"))
    mx.save_safetensors(str(tmp_path / "marked.safetensors"), {"weight": model.weight}, metadata={"format": "mlx"})
    save_file({"weight": torch.ones(3, 2, 3, 3)}, tmp_path / "plain.safetensors")
    save_file({"weight": torch.ones(3, 2, 3, 3)}, tmp_path / "pt.safetensors", metadata={"format": "pt"})
    kinds = {path.stem: open_contents(path).kind for path in tmp_path.iterdir()}
    assert kinds == {"own": "mlx", "marked": "mlx", "plain": "hf", "pt": "hf"}
    assert values_of(tmp_path / "own.safetensors")["weight"].shape == (3, 2, 3, 3)


def test_a_directory_of_mlx_weights_is_read_too(tmp_path):
    mlx_nn.Conv2d(2, 3, 3).save_weights(str(tmp_path / "model.safetensors"))
    assert open_contents(tmp_path).forms["model/weight"] == ("F32", (3, 2, 3, 3))


def test_a_name_that_mlx_would_not_load_is_refused(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "torch.pt")
    with refuses("checkpoint.mlx-file-name", "weights.safetensors"):
        convert(ConvertSpec(source=tmp_path / "torch.pt", target=tmp_path / "weights.bin", to="mlx"))
    assert [path.name for path in tmp_path.iterdir()] == ["torch.pt"]


def test_a_dtype_that_mlx_lacks_is_refused_by_name(tmp_path):
    torch.save({"a": torch.ones(2).to(torch.float8_e4m3fn)}, tmp_path / "torch.pt")
    with refuses("checkpoint.dtype-unsupported", "'a'", "fp8"):
        convert(ConvertSpec(source=tmp_path / "torch.pt", target=tmp_path / "mlx.safetensors", to="mlx"))


@pytest.mark.parametrize(
    "note", ["[1]", "{", json.dumps({"counts": {"n": -1}}), json.dumps({"counts": {"n": 1 << 80}})]
)
def test_an_invalid_header_is_named(tmp_path, note):
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "mlx", "shardwise": note})
    with refuses("checkpoint.mlx-metadata-invalid", kind=DamagedError):
        open_contents(tmp_path / "x.safetensors")


def test_a_report_names_the_tensors_whose_axes_were_moved(tmp_path):
    state = {
        "conv.weight": torch.randn(3, 2, 4),
        "experts.weight": torch.randn(3, 4, 4),
        "head.weight": torch.ones(2, 2),
    }
    torch.save(state, tmp_path / "torch.pt")
    there = convert(ConvertSpec(source=tmp_path / "torch.pt", target=tmp_path / "mlx.safetensors", to="mlx"))
    back = convert(ConvertSpec(source=tmp_path / "mlx.safetensors", target=tmp_path / "back.pt", to="torch"))
    again = convert(ConvertSpec(source=tmp_path / "mlx.safetensors", target=tmp_path / "again.safetensors", to="mlx"))
    assert there.moved == back.moved == ("conv.weight", "experts.weight")
    assert again.moved == ()
    assert_same(mx_values(tmp_path / "again.safetensors"), mx_values(tmp_path / "mlx.safetensors"))


def test_the_report_shows_which_axes_were_moved(tmp_path):
    torch.save({"experts.weight": torch.randn(3, 4, 4)}, tmp_path / "torch.pt")
    report = convert(ConvertSpec(source=tmp_path / "torch.pt", target=tmp_path / "mlx.safetensors", to="mlx"))
    assert "axes permuted (convolution): experts.weight" in report.to_text().splitlines()
