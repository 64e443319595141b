"""A save in the background: training waits for a copy, saves never overlap, and no failure is lost."""

import shutil
import subprocess

import pytest
import torch

from refusals import refuses
from shardwise.checkpoint import AsyncSaver, CheckpointDirectory, CheckpointError, load
from shardwise.checkpoint.async_save import Staging
from shardwise.testing import run_ranks


def value_in(path):
    back = {"x": torch.zeros(100_000)}
    load(path, back, group=None)
    assert back["x"].min() == back["x"].max()
    return back["x"][0].item()


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    saver, x = AsyncSaver(None), torch.zeros(100_000)
    facts = {"cursor": [1]}
    for step in range(1, 4):
        x.fill_(step)
        saver.save(tmp_path, step, {"x": x}, facts)
        x.fill_(-1)
        facts["cursor"].append(step)
    saver.close()
    for step in range(1, 4):
        assert value_in(tmp_path / f"step-{step:08d}") == step
    assert load(tmp_path / "step-00000002", {"x": x}, group=None).facts == {"cursor": [1, 1]}


def test_a_save_waits_for_the_previous_one_and_reports_how_long(tmp_path):
    saver, x = AsyncSaver(None), torch.zeros(4_000_000)
    first = saver.save(tmp_path, 1, {"x": x}, {})
    second = saver.save(tmp_path, 2, {"x": x}, {})
    assert first.previous is None
    assert second.previous.step == 1
    assert second.stall_s >= second.waited_s > first.waited_s
    assert saver.finish().path == CheckpointDirectory(tmp_path).latest()
    assert saver.finish() is None
    assert not saver.is_busy


def test_staging_memory_is_kept_between_saves_and_grows_when_it_must():
    staging = Staging()
    first = staging.copy({"a": torch.ones(10), "b": torch.tensor(True)})["a"]
    second = staging.copy({"a": torch.zeros(10), "b": torch.tensor(True)})["a"]
    assert first.data_ptr() == second.data_ptr()
    larger = staging.copy({"a": torch.full((5, 8), 2.0).t(), "b": torch.ones(3, dtype=torch.bfloat16)})
    assert torch.equal(larger["a"], torch.full((8, 5), 2.0))
    assert torch.equal(larger["b"], torch.ones(3, dtype=torch.bfloat16))


def test_pieces_that_outgrow_a_chunk_are_staged_all_the_same(monkeypatch):
    monkeypatch.setattr("shardwise.checkpoint.async_save.CHUNK", 100)
    pieces = {str(size): torch.arange(float(size)) for size in (5, 30, 10, 0, 7)} | {"one": torch.tensor(True)}
    copies = Staging().copy(pieces)
    assert copies.keys() == pieces.keys()
    assert all(torch.equal(copies[name], piece) for name, piece in pieces.items())


def two_ranks(world, directory):
    """Training's own group is busy while the thread saves over another."""
    saver = AsyncSaver(world.own_host_group())
    for step in range(1, 6):
        report = saver.save(directory, step, {"x": torch.full((100_000,), float(step))}, {})
        traffic = torch.ones(1)
        for _ in range(20):
            torch.distributed.all_reduce(traffic)
    saver.close()
    return report.bytes_here


def test_ranks_save_in_the_background_while_training_communicates(tmp_path):
    assert sorted(run_ranks(two_ranks, 2, tmp_path)) == [0, 400_000]
    assert value_in(tmp_path / "step-00000005") == 5


def failing_in_background(world, directory):
    saver = AsyncSaver(world.own_host_group())
    state = {"x": torch.zeros(100_000)}
    saver.save(directory, 1, state, {})
    saver.finish()
    raised = []
    saver.save(directory, 2, {"x": state["x"], "y": torch.zeros(400_000)}, {})  # the disk holds 1 MiB
    for call in (lambda: saver.save(directory, 3, state, {}), saver.finish):
        try:
            call()
        except CheckpointError as error:
            raised.append(str(error))
    saver.save(directory, 3, state, {})
    return raised, saver.finish().step


def test_a_failure_in_the_background_surfaces_once_at_the_next_call_on_every_rank(tmp_path):
    directory = tmp_path / "disk"
    directory.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], check=False).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        (raised, step), (same, _) = run_ranks(failing_in_background, 2, directory)
        assert raised == same
        assert len(raised) == 1
        assert "step-00000002 failed on rank" in raised[0]
        assert "No space left" in raised[0]
        assert step == 3
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def test_a_failure_is_raised_at_finish(tmp_path):
    directory = tmp_path / "checkpoints"
    saver = AsyncSaver(None)
    directory.mkdir()
    (directory / "latest").mkdir()  # a directory cannot be replaced by a file
    saver.save(directory, 1, {"x": torch.zeros(10)}, {})
    with refuses("checkpoint.io-failed", "latest", kind=CheckpointError):
        saver.finish()
    shutil.rmtree(directory)
