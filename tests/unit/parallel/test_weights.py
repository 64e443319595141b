"""Where weights come from: recipes by name, rank 0's model, files; and that ties and buffers survive."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from refusals import refuses
from shardwise.parallel import meta_model as meta_model_module
from shardwise.parallel.apply import MeshContext, materialize
from shardwise.parallel.meta_model import job_meta_model
from shardwise.parallel.skeleton import initialize, skeleton
from shardwise.parallel.weights import BuiltWeights, InitializedWeights, StreamedWeights, open_weights
from shardwise.plans import Plan
from shardwise.testing import run_ranks


class Counted(nn.Module):
    """A weight drawn at once, a buffer that is not saved, and no init_weights."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x * self.scale + self.table)


class Redrawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.init_weights()

    def init_weights(self):
        nn.init.normal_(self.linear.weight, std=0.5)
        nn.init.zeros_(self.linear.bias)


def built(make_model, *, weights=None, seed=0):
    meta_model = job_meta_model(make_model, seed=seed, weights=weights, rank=0, size=1, dtype=torch.float32)
    place = MeshContext(device=torch.device("cpu"), layout=sw.Layout(), rank=0, mesh=None, dp_group=None)
    return materialize(meta_model.module, Plan(), place, meta_model), meta_model.weights


def test_a_skeleton_takes_no_memory_but_keeps_its_buffers():
    module = skeleton(Counted).module
    assert all(parameter.is_meta for parameter in module.parameters())
    assert torch.equal(module.table, torch.arange(3.0))


def test_a_model_with_init_weights_is_drawn_by_name():
    module, weights = built(Redrawn)
    assert isinstance(weights, InitializedWeights)
    assert module.linear.weight.std() > 0.1
    assert torch.equal(module.linear.bias, torch.zeros(3))


def test_drawn_weights_depend_on_name_and_seed_alone():
    recipes = skeleton(Redrawn).recipes
    values = {}
    for key in [("a", 0), ("a", 0), ("b", 0), ("a", 1)]:
        value = torch.empty(3, 3)
        initialize(recipes["linear.weight"], value, name=key[0], seed=key[1])
        if key in values:
            assert torch.equal(value, values[key])
        values[key] = value
    assert not torch.equal(values["a", 0], values["b", 0])
    assert not torch.equal(values["a", 0], values["a", 1])


def test_weights_changed_after_construction_are_never_drawn_anew():
    def make_model():
        model = Redrawn()
        with torch.no_grad():
            model.linear.weight.mul_(0).add_(7)
        return model

    module, weights = built(make_model)
    assert isinstance(weights, BuiltWeights)
    assert torch.equal(module.linear.weight, torch.full((3, 3), 7.0))


def test_weights_loaded_by_the_factory_are_never_drawn_anew():
    saved = {"linear.weight": torch.ones(3, 3), "linear.bias": torch.ones(3)}

    def make_model():
        model = Redrawn()
        model.load_state_dict(saved)
        return model

    module, _ = built(make_model)
    assert torch.equal(module.linear.weight, torch.ones(3, 3))


def test_a_model_without_init_weights_gets_the_values_it_would_have_alone():
    torch.manual_seed(5)
    plain = Counted()
    module, weights = built(Counted, seed=5)
    assert isinstance(weights, BuiltWeights)
    assert torch.equal(module.scale, plain.scale)
    assert torch.equal(module.linear.weight, plain.linear.weight)
    assert torch.equal(module.table, plain.table)


def test_a_model_that_reads_its_weights_while_it_is_built_still_works():
    class SelfInspecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.largest = float(self.linear.weight.detach().max())

    torch.manual_seed(0)
    plain = SelfInspecting()
    module, _ = built(SelfInspecting)
    assert torch.equal(module.linear.weight, plain.linear.weight)


def test_tied_weights_stay_tied():
    module, _ = built(lambda: sw.models.decoder("gpt2-tiny"))
    assert module.head.weight is module.embed.weight


@pytest.mark.parametrize("form", ["torch", "safetensors", "folder"])
def test_weights_are_read_from_files(tmp_path, form):
    state = {"linear.weight": torch.ones(3, 3), "linear.bias": torch.ones(3)}
    path = tmp_path / "model.safetensors" if form != "torch" else tmp_path / "model.pt"
    torch.save(state, path) if form == "torch" else save_file(state, path)
    module, _ = built(Redrawn, weights=str(tmp_path if form == "folder" else path))
    assert torch.equal(module.linear.weight, torch.ones(3, 3))


def test_a_tied_weight_may_be_saved_under_either_name(tmp_path):
    state = sw.models.decoder("gpt2-tiny").state_dict()
    tied = state.pop("embed.weight").clone()
    torch.save({**state, "head.weight": tied}, tmp_path / "w.pt")
    module, _ = built(lambda: sw.models.decoder("gpt2-tiny"), weights=str(tmp_path / "w.pt"))
    assert torch.equal(module.embed.weight, tied)


def test_a_file_of_other_shapes_is_refused(tmp_path):
    torch.save({"linear.weight": torch.ones(2, 3), "linear.bias": torch.ones(3)}, tmp_path / "w.pt")
    with refuses("model.weights-shape-mismatch", "linear.weight"):
        built(Redrawn, weights=str(tmp_path / "w.pt"))


def test_a_model_larger_than_the_host_is_refused_before_it_is_built():
    with refuses("model.exceeds-host-memory"):
        StreamedWeights(lambda: pytest.fail("built"), num_bytes=1 << 60, rank=0, size=1)


def test_only_rank_0_builds_a_model_that_is_too_large_for_every_rank(monkeypatch):
    monkeypatch.setattr(meta_model_module, "_HOST_SHARE", 0.0)

    def body(world):
        built_here = []

        def make_model():
            model = Counted()
            built_here.append(not model.scale.is_meta)
            return model

        meta_model = job_meta_model(
            make_model, seed=0, weights=None, rank=world.rank, size=world.size, dtype=torch.float32
        )
        place = MeshContext(
            device=world.device, layout=sw.Layout(replicate=2), rank=world.rank, mesh=None, dp_group=None
        )
        module = materialize(meta_model.module, Plan.preset("ddp", 2), place, meta_model)
        return any(built_here), module.scale.detach(), module.table

    (first, scale, table), (second, other_scale, other_table) = run_ranks(body, 2)
    assert (first, second) == (True, False)
    assert torch.equal(scale, other_scale)
    assert torch.equal(table, other_table)


def test_weights_of_a_run_directory_are_its_final_ones_and_a_checkpoint_is_refused_with_the_command(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-00000001").mkdir(parents=True)
    (checkpoints / "step-00000001" / "manifest.json").write_text("{}")
    (checkpoints / "best").write_text("step-00000001")
    for checkpoint in (checkpoints / "step-00000001", checkpoints / "best"):
        with refuses("model.weights-checkpoint", "shardwise checkpoint convert"):
            open_weights(checkpoint)
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    assert torch.equal(open_weights(tmp_path)["weight"], torch.ones(2))
