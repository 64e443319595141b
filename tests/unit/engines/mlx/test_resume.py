"""Checkpoints have one form: a training resumes in MLX where torch ended, and vice versa."""

import mlx.core as mx
import pytest
import torch
from engines.mlx.jobs import KINDS, Net, make_job, make_plan, run, save_first_weights, values_of
from mlx import nn, optimizers

import shardwise as sw
from refusals import refuses
from shardwise.checkpoint.manifest import read_manifest
from shardwise.runs import RunDirectory
from shardwise.testing import run_ranks
from shardwise.training.build import build_step

pytestmark = pytest.mark.usefixtures("uncompiled")


def train(folder, engine, steps, *, kind="points", world_size=1, **options):
    """Train to so many steps in a run directory, from where it stands; returns the losses of the new steps."""

    def body(world):
        losses = []
        job = make_job(kind, engine=engine, epochs=None, steps=steps, on_step=losses.append, **options)
        plan = make_plan(job, world.size, engine=engine)
        sw.train(job, plan, world, run=RunDirectory(folder), show_progress=False, save_every=4)
        return [float(context.report.loss_share) for context in losses]

    folder.mkdir(exist_ok=True)
    if world_size == 1:
        with sw.world() as world:
            return body(world)
    return [sum(parts) for parts in zip(*run_ranks(body, world_size), strict=True)]


@pytest.fixture(params=["points", "pictures", "sentences"])
def kind(request):
    return request.param


def options_of(kind, tmp_path):
    weights = save_first_weights(tmp_path / "first.pt", kind)
    # With AdamW, noise in the gradient of a bias before a batch norm becomes steps of full size.
    optimizer = sw.sgd(lr=0.05, momentum=0.9) if kind == "pictures" else sw.adamw(lr=1e-2)
    return {"kind": kind, "weights": weights, "optimizer": optimizer}


@pytest.mark.parametrize(("first", "then"), [("torch", "mlx"), ("mlx", "torch")])
def test_the_other_engine_resumes_with_the_same_losses_and_weights(tmp_path, kind, first, then):
    options = options_of(kind, tmp_path)
    whole = train(tmp_path / "whole", first, 8, **options)
    begun = train(tmp_path / "stopped", first, 4, **options)
    resumed = train(tmp_path / "stopped", then, 8, **options)
    assert begun == whole[:4]
    assert resumed == pytest.approx(whole[4:], rel=2e-6)
    ours, theirs = (torch.load(tmp_path / run / "weights.pt", weights_only=True) for run in ("stopped", "whole"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n} {text}")


def test_weights_of_a_run_load_into_the_torch_form_of_the_model(tmp_path, kind):
    train(tmp_path / "run", "mlx", 2, kind=kind)
    model = KINDS[kind][1]()
    model.load_state_dict(torch.load(tmp_path / "run" / "weights.pt", weights_only=True))


class Masked(Net):
    """Drops half of what it sees."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def __call__(self, x):
        return self.b(nn.relu(self.a(self.drop(x))))


def test_a_resumed_training_draws_the_same_masks_to_the_last_bit(tmp_path):
    whole = train(tmp_path / "whole", "mlx", 8, model=Masked)
    begun = train(tmp_path / "stopped", "mlx", 4, model=Masked)
    assert begun + train(tmp_path / "stopped", "mlx", 8, model=Masked) == whole
    assert whole != train(tmp_path / "other", "mlx", 8, model=Masked, seed=1)


def test_states_that_are_not_shaped_like_a_convolution_are_resumed_to_the_last_bit(tmp_path):
    options = {"kind": "pictures", "optimizer": lambda _: optimizers.Adafactor(1e-2, relative_step=False)}
    whole = train(tmp_path / "whole", "mlx", 8, **options)
    begun = train(tmp_path / "stopped", "mlx", 4, **options)
    assert begun + train(tmp_path / "stopped", "mlx", 8, **options) == whole


def test_one_process_resumes_where_two_ended(tmp_path):
    options = {"kind": "pictures", "optimizer": sw.sgd(lr=0.05)}
    begun = train(tmp_path / "stopped", "mlx", 4, world_size=2, **options)  # first: ranks are forks
    resumed = train(tmp_path / "stopped", "mlx", 8, **options)
    whole = train(tmp_path / "whole", "mlx", 8, **options)
    assert begun + resumed == pytest.approx(whole, rel=1e-5)


def test_a_checkpoint_has_names_groups_and_ties_as_those_of_torch(tmp_path):
    for engine in ("mlx", "torch"):
        train(tmp_path / engine, engine, 4, kind="sentences", optimizer=sw.adamw(lr=0.5, weight_decay=0.25))
    ours, theirs = (read_manifest(tmp_path / engine / "checkpoints" / "step-00000004") for engine in ("mlx", "torch"))
    assert {name: (each.shape, each.dtype) for name, each in ours.tensors.items()} == {
        name: (each.shape, each.dtype) for name, each in theirs.tensors.items()
    }
    for facts in (ours.facts, theirs.facts):
        assert facts["tied"] == {"head.weight": "embed.weight"}
        assert facts["optimizer"]["class"] == "AdamW"
        groups = facts["optimizer"]["groups"]
        assert [(group["params"], group["lr"], group["weight_decay"]) for group in groups] == [
            (["embed.weight", "mix.weight"], 0.5, 0.25),
            (["mix.bias"], 0.5, 0.0),
        ]


def test_weights_of_another_model_are_refused(tmp_path):
    torch.save({"a.weight": torch.zeros(8, 6), "extra": torch.zeros(1)}, tmp_path / "other.pt")
    job = make_job(weights=str(tmp_path / "other.pt"))
    with sw.world() as world, refuses("model.weights-keys-mismatch", "'a.bias', 'b.bias', 'b.weight'", "extra"):
        build_step(job, make_plan(job), world)
    state = KINDS["points"][1]().state_dict() | {"a.weight": torch.zeros(6, 8)}
    torch.save(state, tmp_path / "other.pt")
    with sw.world() as world, refuses("model.weights-shape-mismatch", "a.weight", "[6, 8]", "[8, 6]"):
        build_step(job, make_plan(job), world)


def test_a_snapshot_brings_back_every_bit():
    job = make_job("pictures", model=KINDS["pictures"][0])
    with sw.world() as world:
        step = build_step(job, make_plan(job), world)
        batches = list(step.feed)
        step(batches[0])
        before, streams = values_of(step), step.random_state()
        restore = step.snapshot()
        first = float(step(batches[1]).loss_sum)
        mx.random.normal((3,))
        restore()
        after = values_of(step)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert all(torch.equal(value, step.random_state()[name]) for name, value in streams.items())
        assert float(step(batches[1]).loss_sum) == first


def test_values_written_into_load_targets_are_taken_over():
    job = make_job("pictures")
    with sw.world() as world:
        step = build_step(job, make_plan(job), world)
        run(step, 2)
        targets = step.load_targets(dict.fromkeys(step.local_state().states))
        for tensor in (*targets.values.values(), *targets.states.values()):
            tensor.fill_(7)
        step.optimized.refresh()
        state = step.local_state()
    assert all((tensor == 7).all() for tensor in (*state.values.values(), *state.states.values()))
    assert not any((tensor == 7).any() for tensor in state.buffers.values())
