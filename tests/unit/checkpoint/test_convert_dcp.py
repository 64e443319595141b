"""Folders of torch.distributed.checkpoint: what plain FSDP2 code saved is ours, and what we write is plain FSDP2's."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from refusals import refuses
from shardwise.checkpoint import load, read_manifest
from shardwise.checkpoint.convert.convert import convert, open_contents
from shardwise.checkpoint.convert.torch_formats import read_listing
from shardwise.checkpoint.disk import DamagedError
from shardwise.checkpoint.spec import ConvertSpec
from shardwise.errors import InputError, ShardwiseError
from shardwise.testing import run_ranks

FORMS = ("nested", "app", "flat")


class Net(nn.Module):
    """Odd shapes, tied weights, a parameter that never gets a gradient, buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.middle = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.middle(self.embed(tokens))))


def built():
    torch.manual_seed(0)
    model = Net().double()
    fully_shard(model.middle)
    fully_shard(model)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return model, torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)


def stepped(model, optimizer, count):
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(torch.arange(7)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def saving(world, directory):
    """Train three steps with plain FSDP2 code, save in every form that people use, train on."""
    model, optimizer = built()
    stepped(model, optimizer, 3)
    weights, states = get_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": weights, "optimizer": states, "epoch": 5}, checkpoint_id=directory / "nested")
    dcp.save({"app": {"model": weights, "optim": states}}, checkpoint_id=directory / "app")
    dcp.save({**weights, "optimizer": flat}, checkpoint_id=directory / "flat")
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in weights.items()}
    whole = {name: value.clone() for name, value in whole.items()}
    return whole, stepped(model, optimizer, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dcp")
    weights, losses = run_ranks(saving, 2, directory)[0]
    return directory, weights, losses


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_directory_reads_the_same(saved, form):
    directory, weights, _ = saved
    contents = open_contents(directory / form)
    found = {
        name.removeprefix("model/"): tensor
        for name, tensor in contents.read(list(contents.forms)).items()
        if name.startswith("model/")
    }
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert contents.step == 3
    assert len(contents.states()) == 5
    assert {tuple(group["params"]) for group in contents.groups} == {
        ("embed.weight", "middle.weight", "unused.weight"),
        ("middle.bias", "norm.weight", "norm.bias", "unused.bias"),
    }
    assert [group["weight_decay"] for group in contents.groups] == [0.01, 0.0]


def continuing(world, path):
    """Load a checkpoint of ours into plain FSDP2 code of this world, and train on."""
    model, optimizer = built()
    tensors = {f"model/{name}": value.detach() for name, value in model.named_parameters()}
    tensors |= {f"model/{name}": value for name, value in model.named_buffers()}
    saved = read_manifest(path).tensors
    for name, parameter in model.named_parameters():
        if f"optimizer/{name}/step" in saved:
            state = optimizer.state[parameter]
            state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter.detach())}
            state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
            tensors |= {f"optimizer/{name}/{key}": value for key, value in state.items()}
    load(path, tensors, group=world.host_group)
    return stepped(model, optimizer, 3)


def test_what_fsdp2_saved_on_two_ranks_resumes_on_four_with_the_same_losses(saved, tmp_path):
    directory, _, losses = saved
    report = convert(ConvertSpec(source=directory / "nested", target=tmp_path / "own", to="shardwise"))
    assert report.tied == {"head.weight": "embed.weight"}
    assert report.left_out == ("epoch: not supported by shardwise checkpoints",)
    for found in run_ranks(continuing, 4, tmp_path / "own"):
        assert found == pytest.approx(losses, rel=1e-9)


def resuming(world, directory):
    """Load a directory with plain FSDP2 code, and train on."""
    model, optimizer = built()
    weights, states = get_state_dict(model, optimizer)
    states["state"] = {
        name: state for name, state in states["state"].items() if not name.startswith("unused")
    }  # torch makes states up for parameters that have none
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=directory)
    options = StateDictOptions(strict=False)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    return stepped(model, optimizer, 3)


def test_what_we_write_resumes_in_plain_fsdp2_code(saved, tmp_path):
    directory, _, losses = saved
    convert(ConvertSpec(source=directory / "nested", target=tmp_path / "own", to="shardwise"))
    assert convert(ConvertSpec(source=tmp_path / "own", target=tmp_path / "dcp", to="dcp")).left_out == ()
    for found in run_ranks(resuming, 2, tmp_path / "dcp"):
        assert found == pytest.approx(losses, rel=1e-9)


def test_equal_matrices_that_are_trained_apart_are_not_tied(tmp_path):
    torch.manual_seed(0)
    same = torch.randn(3, 2)
    state = {name: {"exp_avg": torch.ones(3, 2)} for name in ("a", "b")}
    nested = {"model": {"a": same, "b": same.clone()}, "optimizer": {"state": state, "param_groups": []}}
    dcp.save(nested, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert convert(ConvertSpec(source=tmp_path / "dcp", target=tmp_path / "own", to="shardwise")).tied == {}


def test_constant_matrices_are_not_tied(tmp_path):
    dcp.save({"model": {"a": torch.zeros(3, 2), "b": torch.zeros(3, 2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert convert(ConvertSpec(source=tmp_path / "dcp", target=tmp_path / "own", to="shardwise")).tied == {}


def small(directory, extra=None):
    dcp.save({"model": {"a": torch.arange(6.0)}, "step": 2, **(extra or {})}, checkpoint_id=directory, no_dist=True)
    return directory


class Bomb:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def in_the_metadata(directory, canary):
    (small(directory) / ".metadata").write_bytes(pickle.dumps(Bomb(canary)))


def inside_the_metadata(directory, canary):
    path = small(directory) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data["model.a"] = Bomb(canary)
    path.write_bytes(pickle.dumps(metadata))


def through_a_function_of_torch(directory, canary):
    """A reduce that stays inside torch's own modules still is code."""
    data = b"ctorch.serialization\nload\n(Vx\ntR."
    (small(directory) / ".metadata").write_bytes(data)


def through_an_attribute_of_a_class_we_admit(directory, canary):
    module, name = b"torch.distributed.checkpoint.metadata", b"Metadata.__init__"
    data = b"\x80\x04\x8c%c%b\x8c%c%b\x93." % (len(module), module, len(name), name)
    (small(directory) / ".metadata").write_bytes(data)


def in_place_of_a_tensor(directory, canary):
    small(directory)
    where = read_listing(directory).tensors["model", "a"].chunks[0][2]
    bomb = pickle.dumps(Bomb(canary))
    file = directory / where.file
    data = bytearray(file.read_bytes())
    data[where.offset : where.offset + len(bomb)] = bomb
    file.write_bytes(data)


def in_a_value(directory, canary):
    small(directory, {"optimizer": {"param_groups": [{"lr": Bomb(canary)}]}})


@pytest.mark.parametrize(
    "make",
    [
        in_the_metadata,
        inside_the_metadata,
        through_a_function_of_torch,
        through_an_attribute_of_a_class_we_admit,
        in_place_of_a_tensor,
        in_a_value,
    ],
)
def test_code_in_a_directory_is_refused_and_not_run(tmp_path, make):
    canary = tmp_path / "canary"
    make(tmp_path / "dcp", canary)
    with pytest.raises(ShardwiseError):
        convert(ConvertSpec(source=tmp_path / "dcp", target=tmp_path / "own", to="shardwise"))
    assert not canary.exists()
    assert not (tmp_path / "own").exists()


def test_the_refused_class_is_named(tmp_path):
    in_the_metadata(tmp_path / "dcp", tmp_path / "canary")
    with refuses("checkpoint.contains-code", ".metadata", "posix.system"):
        open_contents(tmp_path / "dcp")


def test_a_pickle_cannot_change_torchs_own_classes(tmp_path):
    """BUILD on a class sets attributes of it: they must land on a stand-in."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    poison = b"\x80\x02" + name + b"N}X\x08\x00\x00\x00poisonedX\x01\x00\x00\x00xs\x86b."
    (small(tmp_path / "dcp") / ".metadata").write_bytes(poison)
    before = dict(vars(dcp.metadata.Metadata))  # after `small`: the first pickle of a class sets __slotnames__
    with refuses("checkpoint.metadata-invalid", kind=DamagedError):
        open_contents(tmp_path / "dcp")
    assert dict(vars(dcp.metadata.Metadata)) == before


def altered(directory, change):
    path = small(directory) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def outside(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"


def compressed(metadata):
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]


def beyond(metadata):
    for info in metadata.storage_data.values():
        info.offset += 1 << 20


def too_large(metadata):
    entry = metadata.state_dict_metadata["model.a"]
    entry.size = torch.Size([1 << 50])
    entry.chunks[0].sizes = torch.Size([1 << 50])


def incomplete(metadata):
    metadata.state_dict_metadata["model.a"].chunks.clear()


@pytest.mark.parametrize(
    ("change", "refusal", "kind"),
    [
        (outside, ("checkpoint.path-escapes", "../../secret"), InputError),
        (compressed, ("checkpoint.dcp-extension",), InputError),
        (beyond, ("checkpoint.file-truncated",), DamagedError),
        (too_large, ("checkpoint.metadata-invalid", "too few"), DamagedError),
        (incomplete, ("checkpoint.metadata-invalid", "do not cover"), DamagedError),
    ],
)
def test_metadata_that_cannot_be_true_is_refused(tmp_path, change, refusal, kind):
    altered(tmp_path / "dcp", change)
    with refuses(*refusal, kind=kind):
        convert(ConvertSpec(source=tmp_path / "dcp", target=tmp_path / "own", to="shardwise"))


def test_truncated_metadata_is_damaged_at_every_length(tmp_path):
    path = small(tmp_path / "dcp") / ".metadata"
    data = path.read_bytes()
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(ShardwiseError):
            open_contents(tmp_path / "dcp")
