"""Conversions lose nothing that the target can hold, list the rest, and run no code that a file brings along."""

import dataclasses
import os
import pickle
import typing
import zipfile

import pytest
import torch
from torch import nn

from refusals import refuses
from shardwise.checkpoint import read_manifest, save
from shardwise.checkpoint.convert.contents import Contents, bytes_of, write_shardwise
from shardwise.checkpoint.convert.convert import KINDS, convert, diff, open_contents
from shardwise.checkpoint.spec import ConvertSpec, DiffSpec, Kind
from shardwise.errors import InputError, ShardwiseError


class Tied(nn.Module):
    """A model with tied weights, a bias, and buffers of three kinds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.middle = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.middle(self.embed(tokens))))


def trained():
    """A tied model and its optimizer of two groups, after two steps."""
    torch.manual_seed(0)
    model = Tied()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def tensors_and_facts():
    """The same training as a checkpoint of ours holds it."""
    model, optimizer = trained()
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model/{name}": value.detach() for name, value in model.state_dict().items() if name != "head.weight"}
    for parameter, state in optimizer.state.items():
        tensors |= {f"optimizer/{names[parameter]}/{key}": value for key, value in state.items()}
    tensors |= {"update/scale": torch.tensor(65536.0), "user/half": torch.randn(3, 2).bfloat16()}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[p] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    facts = {"step": 2, "seed": 0, "optimizer": {"groups": groups}, "tied": {"head.weight": "embed.weight"}}
    return tensors, facts | {"note": "é", "random": {"0": {"cpu": "AAECAw=="}}}


@pytest.fixture
def own(tmp_path):
    tensors, facts = tensors_and_facts()
    return save(tmp_path / "own", 2, tensors, facts, group=None).path


def test_the_command_line_names_every_kind():
    assert set(typing.get_args(Kind)) == set(KINDS)


@pytest.mark.parametrize("kind", ["torch", "dcp", "shardwise"])
def test_a_round_trip_is_bit_exact_in_tensors_and_facts(own, tmp_path, kind):
    there = convert(ConvertSpec(source=own, target=tmp_path / "there", to=kind))
    assert there.left_out == ()
    back = convert(ConvertSpec(source=tmp_path / "there", target=tmp_path / "back", to="shardwise"))
    assert back.left_out == ()
    assert back.source_kind == kind
    report = diff(DiffSpec(left=own, right=tmp_path / "back"))
    assert report.are_tensors_equal
    assert report.facts == ()
    assert report.num_equal == len(tensors_and_facts()[0])


def test_a_torch_file_resumes_in_plain_torch(own, tmp_path):
    convert(ConvertSpec(source=own, target=tmp_path / "all.pt", to="torch"))
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    expected, optimizer = trained()
    model, fresh = trained()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    fresh.state.clear()
    model.load_state_dict(state["model"])
    fresh.load_state_dict(state["optimizer"])
    for each, made in ((expected, optimizer), (model, fresh)):
        made.zero_grad()
        each(torch.arange(7)).square().sum().backward()
        made.step()
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_plain_torch_saved_becomes_a_checkpoint(tmp_path):
    model, optimizer = trained()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "scaler": {"x": torch.ones(1)},
    }
    single = torch.optim.AdamW(model.parameters())
    single.load_state_dict({**single.state_dict(), "state": {0: optimizer.state_dict()["state"][0]}})
    torch.save({**state, "optimizer": single.state_dict()}, tmp_path / "plain.pt")
    report = convert(ConvertSpec(source=tmp_path / "plain.pt", target=tmp_path / "own", to="shardwise"))
    assert report.step == 2  # as the optimizer counts
    assert report.tied == {"head.weight": "embed.weight"}
    assert [text.partition(":")[0] for text in report.left_out] == ["scaler.x", "epoch"]
    manifest = read_manifest(tmp_path / "own")
    assert "optimizer/embed.weight/exp_avg" in manifest.tensors
    assert manifest.facts["optimizer"]["groups"][0]["params"] == [name for name, _ in model.named_parameters()]


def test_numbered_parameters_of_several_groups_are_not_guessed(tmp_path):
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain.pt")
    report = convert(ConvertSpec(source=tmp_path / "plain.pt", target=tmp_path / "own", to="shardwise"))
    assert report.left_out == ("optimizer: its parameters are numbered, and their names cannot be determined",)


def test_numbered_parameters_with_names_are_known(tmp_path):
    model, optimizer = trained()
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"] = ["embed.weight", "middle.weight"]
    state["param_groups"][1]["param_names"] = ["middle.bias", "norm.weight", "norm.bias"]
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "plain.pt")
    contents = open_contents(tmp_path / "plain.pt")
    assert contents.left_out == ()
    found = contents.read(["optimizer/norm.weight/exp_avg"])["optimizer/norm.weight/exp_avg"]
    assert torch.equal(found, optimizer.state[model.norm.weight]["exp_avg"])


def test_groups_that_are_not_given_are_listed_and_the_states_kept(tmp_path):
    tensors, facts = tensors_and_facts()
    for group in facts["optimizer"]["groups"]:
        del group["params"]
    path = save(tmp_path / "own", 2, tensors, facts, group=None).path
    report = convert(ConvertSpec(source=path, target=tmp_path / "all.pt", to="torch"))
    assert "the 2 groups" in report.left_out[0]
    assert diff(DiffSpec(left=path, right=tmp_path / "all.pt")).are_tensors_equal


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_wrappers_put_before_names_is_dropped(tmp_path, prefix):
    state = {prefix + name: value for name, value in trained()[0].state_dict().items()}
    torch.save(state, tmp_path / "wrapped.pt")
    assert "model/embed.weight" in open_contents(tmp_path / "wrapped.pt").forms


def test_weights_alone_are_a_plain_state_dict(own, tmp_path):
    convert(ConvertSpec(source=own, target=tmp_path / "weights.pt", to="torch", weights=True))
    Tied().load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))


def test_tied_weights_stay_one_memory_in_a_torch_file(own, tmp_path):
    convert(ConvertSpec(source=own, target=tmp_path / "weights.pt", to="torch", weights=True))
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"peft"}))  # which takes adapters only
def test_a_damaged_source_leaves_nothing_behind(own, tmp_path, kind):
    shard = own / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first byte of the first tensor, a weight's
    shard.write_bytes(data)
    with refuses("checkpoint.checksum-mismatch", "rank-00000.safetensors", kind=ShardwiseError):
        convert(ConvertSpec(source=own, target=tmp_path / "target.safetensors", to=kind))  # MLX wants the ending
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_a_target_that_is_there_is_not_touched(own, tmp_path):
    (tmp_path / "target").write_text("mine")
    with refuses("checkpoint.target-exists"):
        convert(ConvertSpec(source=own, target=tmp_path / "target", to="torch"))
    assert (tmp_path / "target").read_text() == "mine"


class Bomb:
    """Runs a command when it is unpickled without care."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


def bomb_in_a_new_file(path, canary):
    torch.save({"model": {"weight": torch.ones(2)}, "x": Bomb(canary)}, path)


def bomb_in_an_old_file(path, canary):
    torch.save({"weight": Bomb(canary)}, path, _use_new_zipfile_serialization=False)


def bomb_as_bare_pickle(path, canary):
    path.write_bytes(pickle.dumps(Bomb(canary)))


def bomb_in_the_zip(path, canary):
    torch.save({"weight": torch.ones(2)}, path.with_suffix(".good"))
    with zipfile.ZipFile(path.with_suffix(".good")) as good, zipfile.ZipFile(path, "w") as bad:
        for item in good.namelist():
            data = pickle.dumps(Bomb(canary), 2) if item.endswith("data.pkl") else good.read(item)
            bad.writestr(item, data)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (bomb_in_a_new_file, ("checkpoint.contains-code", ".system")),
        (bomb_in_an_old_file, ("checkpoint.contains-code", ".system")),
        (bomb_in_the_zip, ("checkpoint.contains-code", ".system")),
        (bomb_as_bare_pickle, ("checkpoint.read-failed",)),  # torch never writes such pickles and reads none
    ],
)
def test_code_in_a_torch_file_is_refused_and_not_run(tmp_path, make, refusal):
    canary = tmp_path / "canary"
    make(tmp_path / "bad.pt", canary)
    with refuses(*refusal):
        convert(ConvertSpec(source=tmp_path / "bad.pt", target=tmp_path / "own", to="shardwise"))
    assert not canary.exists()
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04" + b"\0" * 30, pickle.dumps([1, 2])])
def test_a_file_that_is_not_a_checkpoint_is_refused(tmp_path, content):
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(InputError):
        open_contents(tmp_path / "file.pt")


def test_a_sparse_tensor_is_refused_by_name(tmp_path):
    torch.save({"odd": torch.eye(3).to_sparse()}, tmp_path / "file.pt")
    with refuses("checkpoint.tensor-not-plain", "'odd'"):
        open_contents(tmp_path / "file.pt")


def test_our_own_kind_is_written_in_parts(own, tmp_path, monkeypatch):
    """Each tensor is read once, and no more than 200 bytes at a time unless one is larger."""
    monkeypatch.setattr("shardwise.checkpoint.convert.contents.BATCH_BYTES", 200)
    contents = open_contents(own)
    asked = []

    def read(names):
        asked.append(list(names))
        return contents.read(names)

    write_shardwise(dataclasses.replace(contents, read=read), tmp_path / "target")
    sizes = [sum(bytes_of(contents.forms[name]) for name in names) for names in asked]
    assert len(asked) > 3
    assert all(size <= 200 or len(names) == 1 for size, names in zip(sizes, asked, strict=True))
    assert sorted(name for names in asked for name in names) == sorted(contents.forms)
    assert diff(DiffSpec(left=own, right=tmp_path / "target")).are_tensors_equal


@pytest.mark.parametrize(("kind", "share"), [("torch", 1.0), ("shardwise", 1.0), ("hf", 0.3)])
def test_the_host_peak_is_reported_before_anything_is_written(own, tmp_path, kind, share):
    total = sum(tensor.nbytes for tensor in tensors_and_facts()[0].values())
    reported = []

    def announce(peak):
        assert not list(tmp_path.glob("*target*"))
        reported.append(peak)

    convert(ConvertSpec(source=own, target=tmp_path / "target", to=kind), announce=announce)
    assert reported == [pytest.approx(share * total, rel=0.2)]


def test_streaming_bounds_the_peak_by_the_largest_tensor():
    forms = {"model/a": ("F32", (1000,)), "model/b": ("F32", (10,)), "optimizer/a/exp_avg": ("F32", (1000,))}
    contents = Contents(kind="x", step=0, forms=forms, facts={}, read=dict)
    kind = dataclasses.replace(KINDS["shardwise"], max_bytes_in_memory=100)
    assert kind.host_peak_bytes(contents) == 4000
    assert dataclasses.replace(kind, max_bytes_in_memory=5000).host_peak_bytes(contents) == 5000
    assert dataclasses.replace(kind, max_bytes_in_memory=None).host_peak_bytes(contents) == 8040
