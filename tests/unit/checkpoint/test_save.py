"""A save is published whole or not at all, and every rank hears the same of it."""

import contextlib
import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import time

import pytest
import torch

from refusals import refuses
from shardwise.checkpoint import (
    CheckpointDirectory,
    CheckpointError,
    check_storage,
    find_damage,
    load,
    load_newest,
    save,
    write,
)
from shardwise.checkpoint.disk import lock
from shardwise.checkpoint.write import PlannedSave
from shardwise.testing import run_ranks


def tensors(step, size=1000):
    return {"model/a": torch.full((size,), float(step)), "model/b": torch.full((size,), -float(step))}


def message_of(work):
    """Return the message of the error that `work` raises; None if it raises none."""
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return None


def loaded_step(directory, size=1000):
    back = tensors(0, size)
    report = load_newest(directory, lambda _: back, group=None)
    assert torch.equal(back["model/a"], tensors(report.step, size)["model/a"])
    return report.step


def leftovers(directory):
    return [path.name for path in directory.glob(".tmp-*")]


def one_rank_fails(world, directory):
    group = world.host_group
    save(directory, 1, tensors(1), {}, group=group)
    if world.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    message = message_of(lambda: save(directory, 2, tensors(2), {}, group=group))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(directory, 3, tensors(3), {}, group=group)
    return message


def test_a_rank_that_fails_half_way_is_named_on_every_rank_and_the_old_checkpoint_stays(tmp_path):
    messages = run_ranks(one_rank_fails, 2, tmp_path)
    assert messages[0] == messages[1]
    assert "step-00000002 failed on rank 1" in messages[0]
    assert "File too large" in messages[0]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]
    assert leftovers(tmp_path) == []


def one_rank_is_killed(world, directory):
    save(directory, 1, tensors(1), {}, group=world.host_group)
    draft = PlannedSave(directory, 2, tensors(2), {}, world.host_group)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    draft.write(lambda: draft.pieces)


def test_a_rank_that_is_killed_half_way_leaves_the_old_checkpoint(tmp_path):
    with pytest.raises(Exception, match=r"rank 1|peer|closed"):
        run_ranks(one_rank_is_killed, 2, tmp_path, timeout_s=20)
    assert loaded_step(tmp_path) == 1
    save(tmp_path, 3, tensors(3), {}, group=None)
    assert leftovers(tmp_path) == []


def saving_twice(world, directory, size):
    small = message_of(lambda: save(directory, 1, tensors(1, size), {}, group=world.host_group))
    large = message_of(lambda: save(directory, 2, tensors(2, 4 * size), {}, group=world.host_group))
    return small, large


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], check=False)
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


def test_a_full_disk_loses_nothing(small_disk):
    size = 50_000
    for small, large in run_ranks(saving_twice, 2, small_disk, size):
        assert small is None
        assert "No space left on device" in large
        assert "free disk space" in large
    assert loaded_step(small_disk, size) == 1
    assert leftovers(small_disk) == []


def test_a_disk_that_turned_read_only_loses_nothing(small_disk):
    save(small_disk, 1, tensors(1), {}, group=None)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    messages = run_ranks(lambda world: message_of(lambda: save(small_disk, 2, {}, {}, group=world.host_group)), 2)
    assert messages[0] == messages[1]
    assert "Read-only file system" in messages[0]
    assert loaded_step(small_disk) == 1


def test_a_directory_that_vanished_is_named(tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    messages = run_ranks(lambda world: message_of(lambda: save(directory, 1, {}, {}, group=world.host_group)), 2)
    assert messages[0] == messages[1]
    assert f"{directory}: No such file or directory" in messages[0]


def test_a_directory_that_vanishes_during_a_save_is_named(tmp_path):
    directory = tmp_path / "checkpoints"
    draft = PlannedSave(directory, 1, tensors(1), {}, None)
    shutil.rmtree(directory)
    with refuses("checkpoint.storage-not-shared", kind=CheckpointError):
        draft.write(lambda: draft.pieces)


def on_a_disk_of_its_own(directory):
    """Give this process a mount namespace in which another disk stands in the place of `directory`."""
    clone_newns = 0x20000
    if ctypes.CDLL(None).unshare(clone_newns):
        return False
    commands = ["mount --make-rprivate /", f"mount -t tmpfs tmpfs {directory}"]
    return all(subprocess.run(command.split(), check=False).returncode == 0 for command in commands)


def looking_at_storage(world, directory, work):
    separate = on_a_disk_of_its_own(directory) if world.rank == 1 else True
    return separate, message_of(lambda: work(directory, world.host_group))


@pytest.mark.parametrize(
    "work",
    [
        lambda directory, group: check_storage(directory, group=group),
        lambda directory, group: save(directory, 1, tensors(1), {}, group=group),
    ],
    ids=["before the first save", "at a save"],
)
def test_storage_that_is_not_shared_is_noticed(tmp_path, work):
    (separate, message), (possible, same_message) = run_ranks(looking_at_storage, 2, tmp_path, work)
    if not possible:
        pytest.skip("cannot make a mount namespace here")
    assert separate
    assert message == same_message
    assert "save to a file system shared by all nodes" in message
    assert list(tmp_path.glob("step-*")) == leftovers(tmp_path) == []


def test_storage_that_is_shared_is_found_so_and_left_clean(tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    assert (
        run_ranks(lambda world: message_of(lambda: check_storage(directory, group=world.host_group)), 2) == [None] * 2
    )
    assert list(directory.iterdir()) == []


def test_a_step_saved_again_replaces_the_old_one_only_when_it_is_whole(tmp_path):
    save(tmp_path, 1, tensors(1), {"try": 1}, group=None)
    report = save(tmp_path, 1, tensors(1), {"try": 2}, group=None)
    assert [path.name for path in tmp_path.glob("step-*")] == [report.path.name] == ["step-00000001~2"]
    assert load(report.path, tensors(0), group=None).facts == {"try": 2}
    assert CheckpointDirectory(tmp_path).latest() == report.path


def test_what_a_dead_save_left_is_cleared_by_the_next(tmp_path):
    (tmp_path / ".tmp-step-00000001-abcd").mkdir()
    (tmp_path / ".tmp-step-00000001-abcd" / "rank-00000.safetensors").write_bytes(b"torn")
    save(tmp_path, 2, tensors(2), {}, group=None)
    assert leftovers(tmp_path) == []


def test_two_saves_into_one_directory_at_once_are_refused(tmp_path, monkeypatch):
    first = PlannedSave(tmp_path, 1, tensors(1), {}, None)
    monkeypatch.setattr(write, "lock", lambda directory: lock(directory, timeout_s=0.1))
    with refuses("checkpoint.save-in-progress", kind=CheckpointError):
        save(tmp_path, 2, tensors(2), {}, group=None)
    first.write(lambda: first.pieces)
    assert loaded_step(tmp_path) == 1


def endless_saves(directory, first, pipe):
    for step in range(first, 1_000_000):
        save(directory, step, tensors(step), {}, group=None)
        os.write(pipe, step.to_bytes(8, "little"))
        for old in CheckpointDirectory(directory).paths()[2:]:
            shutil.rmtree(old)


def kill_during_saves(directory, delay_s, first):
    """Kill -9 a process that saves without end, and return the last step that it reported as saved."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            endless_saves(directory, first, write)
        os._exit(1)
    os.close(write)
    reported = os.read(read, 8)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(read, 8):
        reported = more
    os.close(read)
    return int.from_bytes(reported, "little")


def test_kill_9_at_any_moment_leaves_a_good_checkpoint_no_older_than_the_last_one_reported(tmp_path):
    moments, step = random.Random(5), 0
    for _ in range(20):
        reported = kill_during_saves(tmp_path, moments.uniform(0, 0.05), step + 1)
        step = loaded_step(tmp_path)
        assert step >= reported
        assert find_damage(CheckpointDirectory(tmp_path).paths()[0], deep=True) == []
