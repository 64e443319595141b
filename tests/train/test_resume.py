"""Exact resume: saved under any strategy, resumed under any other, with the losses of the uninterrupted run."""

import dataclasses
import itertools
import random
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.errors import JobError
from shardwise.plan import Device, Precision, settle
from shardwise.run import EventLog
from shardwise.run.timeline import Timeline
from shardwise.testing import run_ranks
from shardwise.train.loop import run_loop
from shardwise.train.saving import SavingSpec
from shardwise.train.stop import StoppedError

FP64 = Precision(parameter="fp64", compute="fp64", reduce="fp64", optimizer="fp64")
SAVED, STEPS = 3, 6
ROOT = Path(__file__).resolve().parents[2]
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


class Sentences(torch.utils.data.Dataset):
    """Token rows of which some count less than others; 22 of them make short last steps in batches of 8."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        tokens = torch.randint(0, 50, (9,), generator=torch.Generator().manual_seed(index))
        targets = tokens[1:].clone()
        targets[: index % 5] = -100
        return tokens[:-1], targets


def make_job(**changes):
    fields = {
        "model": lambda: sw.models.decoder("llama-tiny", vocab_size=50, context=16),
        "data": lambda split: Sentences() if split == "train" else None,
        "loss": sw.losses.token_cross_entropy,
        "optimizer": sw.adamw(lr=1e-2, weight_decay=0.1),
        "batch_size": 8,
        "steps": STEPS,
        "clip_norm": 0.5,
    }
    return sw.Job(**{**fields, **changes})


def trained(world, layout, folder=None, *, job=None, precision=FP64, **saving):
    """Train to the end or to a stop; return the losses by step, and on rank 0 the final state."""
    job = job or make_job()
    plan = settle(LAYOUTS[layout][1], batch_size=8, world_size=world.size, device=Device())
    plan = dataclasses.replace(plan, precision=precision)
    losses = {}
    events = EventLog(None, lambda event: losses.update(enumerate(event.get("losses", []), event.get("first", 0))))
    spec = SavingSpec(folder=folder, **saving) if folder is not None else None
    try:
        _, step = run_loop(job, plan, world, events, Timeline(), saving_spec=spec)
    except StoppedError:
        return losses, None
    return losses, sw.full_state_dict(step.model)


def stopped(world, layout, folder, **options):
    """Train up to step SAVED, save there and leave, as after a stop request."""

    def stop(report):
        if report.number == SAVED - 1:
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


@pytest.mark.parametrize(("save_under", "load_under"), random.Random(5).sample(PAIRS, 6))
def test_a_slice_of_saved_layouts_resumes_under_another(save_under, load_under, tmp_path):
    check(save_under, load_under, tmp_path)


HEAD = f"""# Saved under one layout, resumed under another

Made by `make prove`. A tiny Llama trains {STEPS} steps in fp64; after step {SAVED} it is asked to stop, saves and
leaves, and is resumed under the layout of the column. A cell is the largest relative difference of a loss after that
from the run that nobody stopped, and must stay below 1e-9; final weights are compared as well.

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
        (ROOT / "docs" / "resume-table.md").write_text(HEAD + "\n".join(lines) + "\n")


@pytest.mark.prove
@pytest.mark.parametrize("load_under", LAYOUTS)
@pytest.mark.parametrize("save_under", LAYOUTS)
def test_every_saved_layout_resumes_under_every_other(save_under, load_under, tmp_path, cells):
    cells[save_under, load_under] = check(save_under, load_under, tmp_path)


def test_saves_in_the_background_keep_the_newest_and_change_no_number(tmp_path):
    whole, _ = run_ranks(trained, 1, "one")[0]
    losses, _ = run_ranks(trained, 2, "fsdp2", tmp_path, every=1, keep=2)[0]
    assert losses == pytest.approx(whole, rel=1e-9)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000005", "step-00000006"]


def test_loss_scale_and_dropout_go_on_where_they_were(tmp_path):
    half = Precision(compute="fp16")
    whole, _ = run_ranks(trained, 2, "ddp2", precision=half)[0]

    def first(world):
        return stopped_in(world, half)

    def stopped_in(world, precision):
        def stop(report):
            if report.number == SAVED - 1:
                import os
                import signal

                os.kill(os.getpid(), signal.SIGTERM)

        return trained(world, "ddp2", tmp_path, job=make_job(on_step=stop), precision=precision)

    before, _ = run_ranks(first, 2)[0]
    after, _ = run_ranks(trained, 2, "ddp2", tmp_path, precision=half)[0]
    assert {**before, **after} == whole


def test_another_seed_is_refused(tmp_path):
    run_ranks(stopped, 1, "one", tmp_path)
    with pytest.raises(JobError, match="other samples"):
        run_ranks(trained, 1, "one", tmp_path, job=make_job(seed=1))
