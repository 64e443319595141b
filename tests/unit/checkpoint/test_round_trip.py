"""A checkpoint saved under any layout loads under any other, bit for bit."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from refusals import refuses
from shardwise.checkpoint import load, read, read_manifest, save
from shardwise.checkpoint.manifest import box_of
from shardwise.dist import fake_world
from shardwise.testing import run_ranks

LAYOUTS = {"one": 1, "shard2": 2, "shard4": 4, "tp2": 2, "hsdp": 4, "shard2.tp2": 4, "zero1": 2, "stages": 2}
FACTS = {"step": 3, "cursor": [0, 1, 12], "rng": {"0": [2**100, -1]}, "lr": 0.1, "note": "é"}


def truth():
    """Every kind of tensor a job may have: all widths, scalars, odd and empty shapes."""
    torch.manual_seed(0)
    return {
        "model/embed": torch.randn(7, 6),
        "model/mlp": torch.randn(8, 6, dtype=torch.float64),
        "model/conv": torch.randn(5, 3, 2, 2),
        "model/bias": torch.randn(3).bfloat16(),
        "model/half": torch.randn(4, 3).half(),
        "model/scale": torch.tensor(0.1),
        "model/mask": torch.tensor([True, False, True, True, False]),
        "model/none": torch.empty(0, 4),
        "optimizer/embed/exp_avg": torch.randn(7, 6),
        "optimizer/embed/step": torch.tensor(12, dtype=torch.int64),
        "user/bytes": torch.arange(9, dtype=torch.uint8),
        "user/small": torch.arange(-4, 4, dtype=torch.int8),
    }


def fsdp_over_tp(value, mesh):
    """What FSDP2 makes of a tensor that tensor parallelism has sharded along the same dimension."""
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(value, mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["shard"])
    return module.weight


def arranged(layout, rank, values):
    """Return `values` as the ranks of a layout hold them."""
    if layout == "one":
        return dict(values)
    if layout == "stages":  # both ends hold the scalars
        return {name: value for i, (name, value) in enumerate(values.items()) if i % 2 == rank or value.ndim == 0}
    if layout == "shard2.tp2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        return {
            name: fsdp_over_tp(value, mesh) if value.is_floating_point() and value.numel() > 1 else value
            for name, value in values.items()
        }
    meshes = {"hsdp": (2, 2), "shard4": (4,)}
    mesh = init_device_mesh("cpu", meshes.get(layout, (2,)))

    def placed(name, value):
        if value.ndim == 0 or (layout == "zero1" and not name.startswith("optimizer/")):
            return value
        if layout == "tp2":
            return distribute_tensor(value, mesh, [Shard(1) if value.ndim > 1 else Replicate()])
        return distribute_tensor(value, mesh, [Replicate(), Shard(0)] if layout == "hsdp" else [Shard(0)])

    return {name: placed(name, value) for name, value in values.items()}


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def saving(world, layout, directory):
    save(
        directory / layout,
        3,
        arranged(layout, world.rank, truth()),
        FACTS,
        group=world.host_group if world.size > 1 else None,
    )


def loading(world, layout, directory, sources):
    wrong = []
    for source in sources:
        blank = {name: torch.zeros_like(value) for name, value in truth().items()}
        tensors = arranged(layout, world.rank, blank)
        report = load(directory / source / "step-00000003", tensors, group=world.host_group if world.size > 1 else None)
        assert report.facts == FACTS
        assert report.comparison.is_equal
        for name, tensor in tensors.items():
            found, expected = whole(tensor), truth()[name]
            if found.dtype != expected.dtype or not torch.equal(found, expected):
                wrong.append((source, name))
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    for layout, size in LAYOUTS.items():
        run_ranks(saving, size, layout, directory)
    return directory


@pytest.mark.representative("one", "zero1", "stages", "hsdp", "shard2.tp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_what_every_other_saved(saved, layout):
    assert run_ranks(loading, LAYOUTS[layout], layout, saved, list(LAYOUTS)) == [[]] * LAYOUTS[layout]


def test_replicated_tensors_are_written_once_and_by_all_ranks_in_turn(saved):
    manifest = read_manifest(saved / "hsdp" / "step-00000003")
    values = truth()
    assert sum(values[name].nbytes for name in values) == sum(
        torch.Size(piece.shape).numel() * values[name].element_size()
        for name, entry in manifest.tensors.items()
        for piece in entry.pieces
    )
    assert len(manifest.files) == 4


def test_a_shard_file_is_a_safetensors_file(saved):
    values = truth()
    found = load_file(saved / "one" / "step-00000003" / "rank-00000.safetensors")
    assert found.keys() == {name for name, value in values.items() if value.numel()}
    assert all(torch.equal(found[name], values[name]) for name in found)


def split_twice(world, directory):
    """Both splits uneven: rank 3 of 4 has nothing of tensor half 0 and one row of half 1."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "tp"))
    tensor = fsdp_over_tp(torch.arange(9.0).view(9, 1), mesh)
    box = box_of("vocabulary", tensor)
    rows = tensor.to_local().flatten().tolist()
    save(directory, 1, {"vocabulary": tensor}, {}, group=world.host_group)
    return rows, box.offsets[0], box.sizes[0]


def test_rows_split_by_tensor_and_then_by_shard_both_unevenly_are_found(tmp_path):
    for rows, offset, length in run_ranks(split_twice, 8, tmp_path):
        assert rows == list(range(offset, offset + length))
    back = {"vocabulary": torch.zeros(9, 1)}
    load(tmp_path / "step-00000001", back, group=None)
    assert back["vocabulary"].flatten().tolist() == list(range(9))


def test_views_that_are_not_contiguous_come_back(tmp_path):
    value = torch.arange(12.0).view(3, 4)
    save(tmp_path, 1, {"x": value.t(), "y": value[:, 1]}, {}, group=None)
    base = torch.zeros(3, 4)
    back = {"x": base.t(), "y": torch.zeros(3, 2)[:, 0]}
    load(tmp_path / "step-00000001", back, group=None)
    assert torch.equal(base, value)
    assert torch.equal(back["y"], value[:, 1])


def test_whole_rows_need_no_buffer_and_columns_one_of_the_piece_at_most(tmp_path):
    tensors = {"x": torch.randn(64, 64), "y": torch.tensor(1.0)}
    save(tmp_path, 1, tensors, {}, group=None)
    forecasts = []
    load(tmp_path / "step-00000001", tensors, group=None, announce=forecasts.append)
    assert forecasts[0].host_peak_bytes == 0
    assert forecasts[0].num_bytes == 64 * 64 * 4 + 4
    assert str(forecasts[0]) == "16.4 kB from 1 file"
    wide = torch.zeros(64, 128)
    load(tmp_path / "step-00000001", {"x": wide[:, ::2], "y": tensors["y"]}, group=None, announce=forecasts.append)
    assert forecasts[1].host_peak_bytes == tensors["x"].nbytes
    assert "read buffer of 16.4 kB" in str(forecasts[1])
    assert torch.equal(wide[:, ::2], tensors["x"])


def test_a_piece_larger_than_the_buffer_passes_through_it_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "BUFFER", 1000)
    value = torch.randn(64, 8)
    save(tmp_path, 1, {"x": value}, {}, group=None)
    wide = torch.zeros(64, 16)
    report = load(tmp_path / "step-00000001", {"x": wide[:, ::2]}, group=None)
    assert report.host_peak_bytes == 1000
    assert torch.equal(wide[:, ::2], value)


def test_facts_are_json_and_nothing_else(tmp_path):
    from shardwise.checkpoint import CheckpointError

    with refuses("checkpoint.unexpected-error", "object", kind=CheckpointError):
        save(tmp_path, 1, {}, {"x": object()}, group=None)
    assert list(tmp_path.glob("step-*")) == []


def test_ranks_forked_from_a_process_that_had_a_mesh_save_their_own_shards():
    def detached():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
        return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None).detach()

    with fake_world(2):
        detached()  # DTensor caches the result of this call, and its mesh, of rank 0
    assert run_ranks(lambda _: list(box_of("a", detached()).offsets), 2) == [[0], [2]]
