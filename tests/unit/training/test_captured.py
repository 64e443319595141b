"""capture = "step" where nothing can be captured: a note gives the reason, training is equal, shapes are constant."""

import dataclasses
from types import SimpleNamespace

import torch
from torch.utils.data import TensorDataset

import shardwise as sw
from jobs import FP64, Pooled
from refusals import refuses
from shardwise.cli.main import main
from shardwise.engines.engine import require_supported
from shardwise.plans import Plan
from shardwise.training import loop
from shardwise.training.step.captured import check_shapes, why_not_captured


def rows(split):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(10, 4, generator=generator), torch.arange(10) % 3) if split == "train" else None


def padded_to_own_length(samples):
    """A collate that pads to the longest of each batch, so that lengths differ."""
    inputs, targets = zip(*samples, strict=True)
    length = 5 + int(targets[0])
    return torch.stack([torch.nn.functional.pad(each, (0, length - 4)) for each in inputs]), torch.stack(targets)


def job(**changes):
    fields = {
        "model": lambda: torch.nn.Linear(4, 3),
        "data": rows,
        "loss": sw.losses.cross_entropy,
        "optimizer": sw.adamw(lr=1e-2),
        "batch_size": 4,
        "epochs": 2,
    }
    return sw.Job(**{**fields, **changes})


def losses(job, plan):
    notes = []
    with sw.world(device="cpu") as world:
        step = sw.build_step(job, plan, world, note=notes.append)
        return [float(step(batch).loss_share) for batch in step.feed], notes


def test_without_a_gpu_it_notes_that_and_trains_the_same():
    plain = Plan(micro_batch=4)
    exact, silent = losses(job(), plain)
    found, notes = losses(job(), dataclasses.replace(plain, capture="step"))
    assert found == exact
    assert silent == []
    assert notes == [
        "capture = step: the step is not captured because it requires a CUDA device; kernels are launched one by one",
    ]


def test_a_step_in_fp64_is_not_captured_because_fused_kernels_read_its_rate_in_fp32():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=True)
    parts = SimpleNamespace(
        optimized=SimpleNamespace(optimizer=optimizer),
        autocast=SimpleNamespace(device_type="cuda"),
        before_update=None,
    )
    plan = Plan(micro_batch=4, capture="step")
    assert why_not_captured(job(), plan, parts) is None
    assert "learning rate in fp32" in why_not_captured(job(), dataclasses.replace(plan, precision=FP64), parts)


def test_the_short_step_of_an_epoch_is_not_a_change_of_shape():
    found, _ = losses(job(epochs=3), Plan(micro_batch=2, accumulation=2, capture="step"))
    assert len(found) == 9  # ten samples: two full steps and a short one


def test_batches_of_changing_length_are_refused_before_training_and_run_uncaptured_in_it():
    changing = job(collate=padded_to_own_length, model=Pooled)
    plan = Plan(micro_batch=4, capture="step")
    with refuses("support.capture-shape-changed", "[4, "):
        check_shapes(changing, plan)
    assert losses(changing, plan)[0] == losses(changing, Plan(micro_batch=4))[0]


def test_changing_shapes_end_a_run_in_one_sentence(tmp_path, capfd):
    (tmp_path / "changing.py").write_text(
        "import sys; sys.path.insert(0, {!r})\nfrom test_captured import *\n"
        "job = job(collate=padded_to_own_length, model=lambda: Pooled())\n".format(str(__file__).rpartition("/")[0])
    )
    code = main(["train", str(tmp_path / "changing.py"), "--set", "capture=step", "--run-dir", str(tmp_path / "run")])
    assert code == 2
    assert "capture = step requires batches of constant shape, got [4, 6] after [4, 5]" in capfd.readouterr().err


def test_a_training_of_one_process_leaves_nothing_in_the_way_of_a_graph(monkeypatch, tmp_path):
    given = []
    real = loop.build_step

    def spied(*args, **options):
        given.append(options["before_update"])
        return real(*args, **options)

    monkeypatch.setattr(loop, "build_step", spied)
    with sw.world(device="cpu") as world:
        sw.train(job(), Plan(micro_batch=4, capture="step"), world, run_dir=tmp_path, show_progress=False)
    assert given == [None]


def test_stages_are_refused():
    plan = dataclasses.replace(Plan.preset("pp", 2, batch_size=4), capture="step")
    with refuses("support.capture-with-pipeline", "pp2"):
        require_supported(plan)
