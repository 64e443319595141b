"""Exported weights are a plain file that bare torch loads, whatever strategy trained them."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardwise as sw
from env.small_disk import needs_small_disk, on_small_disk
from refusals import refuses
from shardwise.checkpoint import CheckpointError
from shardwise.planner.settle import LocalDevice, settle
from shardwise.testing import run_ranks
from shardwise.training.evaluate import export, write_config


def make_job():
    return sw.Job(
        model=lambda: sw.models.decoder("llama-tiny", vocab_size=50, context=16),
        data=lambda split: [(torch.arange(8), torch.arange(8))] * 8 if split == "train" else None,
        loss=sw.losses.token_cross_entropy,
        optimizer=sw.sgd(lr=0.1),
        batch_size=8,
        steps=1,
    )


def exporting(world, preset, path):
    job = make_job()
    plan = settle(preset, batch_size=8, world_size=world.size, device=LocalDevice())
    step = sw.build_step(job, plan, world)
    for batch in step.feed:
        step(batch)
    export(step.model, path)
    return sw.full_state_dict(step.model)


@pytest.mark.representative("fsdp-2", "tp-2", "pp-2")
@pytest.mark.parametrize(("preset", "ranks"), [("ddp", 1), ("ddp", 2), ("fsdp", 2), ("zero1", 2), ("tp", 2), ("pp", 2)])
def test_bare_torch_loads_what_any_strategy_exported(tmp_path, preset, ranks):
    expected = run_ranks(exporting, ranks, preset, tmp_path / "model.pt")[0]
    model = sw.models.decoder("llama-tiny", vocab_size=50, context=16)
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_tied_weights_are_in_the_file_once(tmp_path):
    model = sw.models.decoder("gpt2-tiny", vocab_size=50, context=16)
    export(model, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len({state[name].data_ptr() for name in names}) == len(list(model.parameters())) < len(names)


def failing(world, path):
    with refuses("checkpoint.folder-missing", "No such file or directory", kind=CheckpointError) as caught:
        export(torch.nn.Linear(2, 2), path)
    return str(caught.value)


def test_a_missing_folder_is_the_same_error_on_every_rank(tmp_path):
    messages = run_ranks(failing, 2, tmp_path / "nowhere" / "model.pt")
    assert messages[0] == messages[1]


def test_a_model_of_mlx_is_refused_with_what_saves_it(tmp_path):
    nn = pytest.importorskip("mlx.nn")
    with refuses("support.export-not-torch", "mlx.nn", "save_weights"):
        export(nn.Linear(2, 2), tmp_path / "model.pt")


@needs_small_disk
def test_export_to_a_full_disk_reports_that_and_leaves_no_file(tmp_path):
    def body(folder):
        with refuses("checkpoint.disk-full", "model.pt", "No space left on device", kind=CheckpointError):
            export(torch.nn.Linear(1024, 1024), folder / "model.pt")
        return list(folder.iterdir())

    assert on_small_disk(tmp_path, body) == []


def test_a_config_that_transformers_rejects_does_not_end_the_run(tmp_path):
    class Rejected:
        architectures = None

        def save_pretrained(self, _folder):
            raise ValueError("temperature without do_sample")

    model = nn.Linear(2, 2)
    model.config, model.generation_config = {"lock": threading.Lock()}, Rejected()
    notes = []
    write_config(model, tmp_path, SimpleNamespace(write=lambda kind, text: notes.append(text)))
    [note] = notes
    assert "temperature" in note
