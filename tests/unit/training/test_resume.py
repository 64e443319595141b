"""Exact resume: saved under any strategy, resumed under any other, with the losses of the uninterrupted run."""

import dataclasses
import errno
import itertools
import random
from functools import partial
from pathlib import Path

import pytest
import torch

import shardwise as sw
from jobs import FP64, SENTENCES, sentences_job
from refusals import refuses
from shardwise.checkpoint import CheckpointError, DamagedError, read_manifest
from shardwise.checkpoint import write as save
from shardwise.planner.settle import LocalDevice, settle
from shardwise.plans import Precision
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.testing import run_ranks
from shardwise.training.loop import run_loop
from shardwise.training.saving import StoppedError
from shardwise.training.spec import SaveSpec

SAVED, STEPS = 3, 6
ROOT = Path(__file__).resolve().parents[3]
LAYOUTS = {
    "one": (1, "ddp"),
    "ddp2": (2, "ddp"),
    "fsdp2": (2, "fsdp"),
    "fsdp4": (4, "fsdp"),
    "zero1": (2, "zero1"),
    "tp2": (2, "tp"),
    "pp2": (2, "pp"),
    "shard2.tp2": (4, "shard2.tp2"),
}
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
make_job = partial(sentences_job, "llama-tiny", steps=STEPS)


def trained(world, layout, folder=None, *, job=None, precision=FP64, with_notes=False, **saving):
    """Train to the end or to a stop; return the losses by step, on rank 0 the final state, and if asked the notes."""
    job = job or make_job()
    plan = settle(LAYOUTS[layout][1], batch_size=8, world_size=world.size, device=LocalDevice())
    plan = dataclasses.replace(plan, precision=precision)
    losses, notes = {}, []

    def listen(event):
        losses.update(enumerate(event.get("losses", []), event.get("first", 0)))
        notes.append(event.get("text", ""))

    events = EventLog(None, listen)
    try:
        _, step = run_loop(job, plan, world, events, Timeline(), checkpoints=folder, save=SaveSpec(**saving))
    except StoppedError:
        return losses, None
    result = losses, sw.full_state_dict(step.model)
    return (*result, "; ".join(notes)) if with_notes else result


def stopped(world, layout, folder, **options):
    """Train up to step SAVED, save there and leave, as after a stop request."""

    def stop(context):
        if context.step == SAVED:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGTERM)

    return trained(world, layout, folder, job=make_job(on_step=stop, **options))


def check(save_under, load_under, tmp_path):
    whole, state = run_ranks(trained, 1, "one")[0]
    first, _ = run_ranks(stopped, LAYOUTS[save_under][0], save_under, tmp_path)[0]
    then, final = run_ranks(trained, LAYOUTS[load_under][0], load_under, tmp_path)[0]
    assert sorted(first) == list(range(SAVED))
    assert sorted(then) == list(range(SAVED, STEPS))
    assert {**first, **then} == pytest.approx(whole, rel=1e-9)
    for name, value in state.items():
        torch.testing.assert_close(final[name], value, rtol=1e-9, atol=1e-11, msg=name)
    return max(abs(then[step] - whole[step]) / whole[step] for step in then)


@pytest.mark.parametrize(("save_under", "load_under"), random.Random(5).sample(PAIRS, 3))
def test_a_slice_of_saved_layouts_resumes_under_another(save_under, load_under, tmp_path):
    check(save_under, load_under, tmp_path)


def test_parameter_tied_across_stages_is_saved_once_and_resumed_on_both(tmp_path):
    tied = partial(make_job, model=sentences_job("gpt2-tiny").model)
    whole, state = run_ranks(trained, 1, "one", job=tied())[0]
    for saved, resumed in (("pp2", "one"), ("one", "pp2")):
        folder = tmp_path / saved
        first, _ = run_ranks(stopped, LAYOUTS[saved][0], saved, folder, model=tied().model)[0]
        (checkpoint,) = folder.glob("step-*")
        manifest = read_manifest(checkpoint)
        assert manifest.facts["tied"] == {"head.weight": "embed.weight"}
        assert "model/embed.weight" in manifest.tensors
        assert "model/head.weight" not in manifest.tensors
        then, final = run_ranks(trained, LAYOUTS[resumed][0], resumed, folder, job=tied())[0]
        assert {**first, **then} == pytest.approx(whole, rel=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(final[name], value, rtol=1e-9, atol=1e-11, msg=name)


HEAD = f"""# Resume under a different layout

Made by `make prove`. A tiny Llama trains {STEPS} steps in fp64. It receives a stop request after step {SAVED}, saves
and exits, and resumes under the layout of the column. A cell is the largest relative difference of a loss after
resuming from the uninterrupted run, and must stay below 1e-9; final weights are compared, too.

"""


@pytest.fixture(scope="module")
def cells():
    """Gaps by pair of layouts; the docs table is written when all of them are there."""
    found = {}
    yield found
    if len(found) == len(PAIRS):
        lines = [f"| saved under | {' | '.join(LAYOUTS)} |", f"|---|{'---|' * len(LAYOUTS)}"]
        lines += [
            f"| {save_under} | {' | '.join(f'{found[save_under, each]:.0e}' for each in LAYOUTS)} |"
            for save_under in LAYOUTS
        ]
        (ROOT / "docs" / "results" / "resume-table.md").write_text(HEAD + "\n".join(lines) + "\n")


@pytest.mark.prove
@pytest.mark.parametrize("load_under", LAYOUTS)
@pytest.mark.parametrize("save_under", LAYOUTS)
def test_every_saved_layout_resumes_under_every_other(save_under, load_under, tmp_path, cells):
    cells[save_under, load_under] = check(save_under, load_under, tmp_path)


def test_saves_in_the_background_keep_the_newest_and_change_no_number(tmp_path):
    whole, _ = run_ranks(trained, 1, "one")[0]
    losses, _ = run_ranks(trained, 2, "fsdp2", tmp_path, every=1, keep="2")[0]
    assert losses == pytest.approx(whole, rel=1e-9)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000005", "step-00000006"]


def test_the_loss_scale_resumes_at_its_value(tmp_path):
    half = Precision(compute="fp16")
    whole, _ = run_ranks(trained, 2, "ddp2", precision=half)[0]
    before, _ = run_ranks(trained, 2, "ddp2", tmp_path, job=make_job(steps=SAVED), precision=half, every=SAVED)[0]
    after, _ = run_ranks(trained, 2, "ddp2", tmp_path, precision=half)[0]
    assert {**before, **after} == whole


def dropping():
    """A decoder that drops half of what its head is given."""
    model = sw.models.decoder("llama-tiny", vocab_size=50, context=16)
    model.norm = torch.nn.Sequential(model.norm, torch.nn.Dropout(0.5))
    return model


class Noise(torch.nn.Module):
    """Adds noise that it draws itself."""

    def forward(self, x):
        return torch.normal(x, 0.1)


def stochastic():
    """The same with noise before it drops."""
    model = dropping()
    model.norm.insert(1, Noise())
    return model


@pytest.mark.representative("ddp2-1", "tp2-0")
@pytest.mark.parametrize(
    ("layout", "num_workers"), [("one", 0), ("ddp2", 0), ("ddp2", 1), ("fsdp2", 0), ("tp2", 0), ("pp2", 0)]
)
def test_dropout_masks_continue_at_the_same_layout(layout, num_workers, tmp_path):
    def job(**changes):
        return make_job(model=dropping, num_workers=num_workers, **changes)

    nproc = LAYOUTS[layout][0]
    whole, state = run_ranks(trained, nproc, layout, job=job())[0]
    before, _ = run_ranks(trained, nproc, layout, tmp_path, job=job(steps=SAVED), every=SAVED)[0]
    after, final = run_ranks(trained, nproc, layout, tmp_path, job=job())[0]
    assert {**before, **after} == pytest.approx(whole, rel=1e-12)
    for name, value in state.items():
        torch.testing.assert_close(final[name], value, rtol=1e-12, atol=1e-14, msg=name)


def test_dropout_masks_begin_anew_at_another_layout_and_a_note_reports_it(tmp_path):
    whole, _ = run_ranks(trained, 1, "one", job=make_job(model=dropping))[0]
    run_ranks(trained, 1, "one", tmp_path, job=make_job(model=dropping, steps=SAVED), every=SAVED)
    after, _, notes = run_ranks(trained, 2, "ddp2", tmp_path, job=make_job(model=dropping), with_notes=True)[0]
    assert after[SAVED] != pytest.approx(whole[SAVED], rel=1e-6)
    assert "dropout masks use new random streams" in notes


@pytest.mark.representative("zero1-pp2")
@pytest.mark.parametrize(("save_under", "load_under"), [("ddp2", "one"), ("one", "fsdp2"), ("zero1", "pp2")])
def test_counter_based_masks_continue_at_another_layout(save_under, load_under, tmp_path):
    job = partial(make_job, model=stochastic, masks="keyed")
    whole, state = run_ranks(trained, 1, "one", job=job())[0]
    run_ranks(trained, LAYOUTS[save_under][0], save_under, tmp_path, job=job(steps=4), every=4)  # inside epoch 2
    after, final, notes = run_ranks(trained, LAYOUTS[load_under][0], load_under, tmp_path, job=job(), with_notes=True)[
        0
    ]
    assert after == pytest.approx({step: whole[step] for step in range(4, STEPS)}, rel=1e-9)
    assert "begin anew" not in notes
    for name, value in state.items():
        torch.testing.assert_close(final[name], value, rtol=1e-9, atol=1e-11, msg=name)


def flip_a_bit(checkpoint):
    shard = next(checkpoint.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path):
    whole, _ = run_ranks(trained, 1, "one")[0]
    run_ranks(trained, 2, "fsdp2", tmp_path, job=make_job(steps=4), every=2)
    flip_a_bit(tmp_path / "step-00000004")
    after, _, notes = run_ranks(trained, 2, "fsdp2", tmp_path, with_notes=True)[0]
    assert "skipped checkpoint: loading" in notes
    assert "step-00000004/rank-0000" in notes
    assert "MB from 2 files" in notes
    assert after == pytest.approx({step: whole[step] for step in range(2, STEPS)}, rel=1e-9)


def test_a_training_does_not_begin_anew_over_checkpoints_that_are_all_damaged(tmp_path):
    run_ranks(trained, 1, "one", tmp_path, job=make_job(steps=4), every=2)
    for checkpoint in tmp_path.glob("step-*"):
        flip_a_bit(checkpoint)
    with refuses("checkpoint.none-usable", "step-00000004", "step-00000002", kind=DamagedError):
        run_ranks(trained, 1, "one", tmp_path)


def test_a_save_that_fails_is_reported_or_ends_the_training_as_configured(tmp_path):
    (tmp_path / "file").touch()
    losses, _, notes = run_ranks(trained, 1, "one", tmp_path / "file" / "in", every=2, with_notes=True)[0]
    assert sorted(losses) == list(range(STEPS))
    assert notes.count("not saved: ") == 3
    with refuses("checkpoint.not-a-folder", "Not a directory", kind=CheckpointError):
        run_ranks(trained, 1, "one", tmp_path / "file" / "in", every=2, must_save=True)


def test_the_save_after_one_that_failed_has_its_turn(tmp_path):
    real, calls = save.write_shard, itertools.count()

    def full_once(*args, **kwargs):
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    def body(world):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(save, "write_shard", full_once)
            return trained(world, "one", tmp_path, every=2, with_notes=True)

    _, _, notes = run_ranks(body, 1)[0]
    assert notes.count("not saved: ") == 1
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000006"]


def test_the_best_by_a_metric_is_saved_when_it_is_measured_and_stays(tmp_path):
    accuracies = iter([0.5, 0.9, 0.1, 0.2])

    def job():
        best = sw.Metric(sum=lambda output, batch: torch.tensor(next(accuracies)), count=lambda batch: 1)
        return make_job(
            data=lambda split: torch.utils.data.Subset(SENTENCES, range(8 if split == "train" else 1)),
            steps=None,
            epochs=4,
            metrics={"luck": best},
        )

    run_ranks(lambda world: trained(world, "one", tmp_path, job=job(), keep="1,max:luck"), 1)
    kept = {path.name: read_manifest(path).facts["metrics"]["luck"] for path in tmp_path.glob("step-*")}
    assert kept == pytest.approx({"step-00000002": 0.9, "step-00000004": 0.2})


def test_another_seed_is_refused_and_another_length_is_reported(tmp_path):
    run_ranks(stopped, 1, "one", tmp_path)
    *_, notes = run_ranks(trained, 1, "one", tmp_path, job=make_job(steps=STEPS + 2), with_notes=True)[0]
    assert f"schedule follows the new length, {STEPS + 2} steps (before: {STEPS})" in notes
    *_, notes = run_ranks(trained, 1, "one", tmp_path, with_notes=True)[0]
    assert "new length" not in notes
    with refuses("checkpoint.samples-differ"):
        run_ranks(trained, 1, "one", tmp_path, job=make_job(seed=1))


class CountingAdam(torch.optim.Optimizer):
    """Adam that counts its steps in an int and adapts a setting of its group, as optimizers outside torch do."""

    def __init__(self, parameters, *, history=False):
        super().__init__(parameters, {"lr": 1e-2, "boost": 1.0})
        self.history = history

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["boost"] *= 1.25
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                if self.history:
                    state["seen"] = [*state.get("seen", []), parameter.grad.norm()]
                mean = state.setdefault("exp_avg", torch.zeros_like(parameter, requires_grad=False))
                mean.lerp_(parameter.grad, 0.1)
                rate = group["lr"] * group["boost"] / (1 - 0.9 ** state["step"])
                parameter.sub_(mean.sign() * mean.abs().sqrt(), alpha=rate)


@pytest.mark.representative("fsdp2-pp2")
@pytest.mark.parametrize(("save_under", "load_under"), [("one", "one"), ("fsdp2", "pp2"), ("pp2", "zero1")])
def test_optimizer_state_that_is_not_a_tensor_is_resumed(save_under, load_under, tmp_path):
    def counting(named):
        return CountingAdam([parameter for _, parameter in named])

    whole, _ = run_ranks(trained, 1, "one", job=make_job(optimizer=counting))[0]
    first, _ = run_ranks(partial(stopped, optimizer=counting), LAYOUTS[save_under][0], save_under, tmp_path)[0]
    then, _ = run_ranks(trained, LAYOUTS[load_under][0], load_under, tmp_path, job=make_job(optimizer=counting))[0]
    assert {**first, **then} == pytest.approx(whole, rel=1e-9)


def test_optimizer_state_that_a_checkpoint_cannot_hold_is_refused_in_the_first_step(tmp_path):
    def remembering(named):
        return CountingAdam([parameter for _, parameter in named], history=True)

    with refuses("job.state-type-unsupported", "/seen", "CountingAdam['0']", "torch.Tensor"):
        run_ranks(trained, 1, "one", tmp_path, job=make_job(optimizer=remembering), every=STEPS)
