"""Checkpoints of tensors on a GPU: saved through pinned memory, loaded straight into place."""

import pytest
import torch

from shardwise.checkpoint import AsyncSaver, load, save
from shardwise.checkpoint.async_save import Staging

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def state(value):
    return {
        "model/x": torch.full((512, 300), float(value), device="cuda"),
        "model/y": torch.full((77,), float(value), device="cuda", dtype=torch.bfloat16),
        "optimizer/step": torch.tensor(float(value)),
    }


def values(path):
    back = state(0)
    load(path, back, group=None)
    return {name: (tensor.min().item(), tensor.max().item()) for name, tensor in back.items()}


def test_what_is_saved_from_a_gpu_loads_on_the_gpu_and_on_the_host(tmp_path):
    report = save(tmp_path, 1, state(3), {}, group=None)
    assert set(values(report.path).values()) == {(3.0, 3.0)}
    host = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in state(0).items()}
    load(report.path, host, group=None)
    assert all(tensor.eq(3).all() for tensor in host.values())


def test_columns_of_a_saved_matrix_load_into_a_gpu(tmp_path):
    whole = torch.randn(64, 48, device="cuda")
    path = save(tmp_path, 1, {"x": whole}, {}, group=None).path
    wide = torch.zeros(64, 96, device="cuda")
    load(path, {"x": wide[:, ::2]}, group=None)
    assert torch.equal(wide[:, ::2], whole)


def test_a_background_save_holds_the_state_at_the_call(tmp_path):
    saver, tensors = AsyncSaver(None), state(0)
    for step in range(1, 4):
        for tensor in tensors.values():
            tensor.fill_(step)
        saver.save(tmp_path, step, tensors, {})
        for tensor in tensors.values():
            tensor.fill_(-1)
    saver.close()
    for step in range(1, 4):
        assert set(values(tmp_path / f"step-{step:08d}").values()) == {(float(step), float(step))}


def test_staging_memory_is_pinned_and_kept():
    staging = Staging()
    first, second = (staging.copy(state(value))["model/x"] for value in (1, 2))
    assert first.is_pinned()
    assert first.data_ptr() == second.data_ptr()
    assert second.eq(2).all()
