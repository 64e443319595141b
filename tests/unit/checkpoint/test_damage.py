"""A hundred damaged checkpoints: each is detected and named, none is loaded, nothing in them runs."""

import json
import os
import pickle
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint import DamagedError, find_damage, load, load_newest, save
from shardwise.testing import run_ranks

SHARDS = ("rank-00000.safetensors", "rank-00001.safetensors")
MANIFEST = "manifest.json"


def state(step):
    torch.manual_seed(step)
    return {
        "model/a": torch.randn(64, 16),
        "model/b": torch.randn(64, 16),
        "model/c": torch.randn(31),
        "optimizer/a/exp_avg": torch.randn(64, 16).bfloat16(),
        "optimizer/step": torch.tensor(step),
    }


def saving(world, directory):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    for step in (1, 2):
        sharded = {name: distribute_tensor(x, mesh, [Shard(0)]) if x.ndim else x for name, x in state(step).items()}
        save(directory, step, sharded, {"step": step}, group=world.host_group)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sound")
    run_ranks(saving, 2, directory)
    return directory


class Bomb:
    """Code that runs when it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self):
        return (Path.touch, (self.sign,))


def rewritten(checkpoint, change):
    """Change the manifest and make its checksum agree: a lie, not an accident."""
    path = checkpoint / MANIFEST
    envelope = json.loads(path.read_bytes())
    change(envelope["content"])
    content = json.dumps(envelope["content"], separators=(",", ":")).encode()
    head = {key: value for key, value in envelope.items() if key not in ("content", "checksum")}
    head["checksum"] = f"{zlib.crc32(content):08x}"
    path.write_bytes(json.dumps(head)[:-1].encode() + b',"content":' + content + b"}")


def truncated(checkpoint, chance):
    shard = checkpoint / chance.choice([*SHARDS, MANIFEST])
    os.truncate(shard, chance.randrange(shard.stat().st_size))
    return shard.name


def flipped_shard(checkpoint, chance):
    return flip(checkpoint / chance.choice(SHARDS), chance)


def flipped_manifest(checkpoint, chance):
    return flip(checkpoint / MANIFEST, chance)


def flip(path, chance):
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return path.name


def zeroed(checkpoint, chance):
    path = checkpoint / chance.choice(SHARDS)
    data = bytearray(path.read_bytes())
    begin = chance.randrange(len(data) - 600)
    data[begin : begin + 512] = bytes(512)
    path.write_bytes(data)
    return path.name


def missing(checkpoint, chance):
    path = checkpoint / chance.choice([*SHARDS, MANIFEST])
    path.unlink()
    return path.name


def longer(checkpoint, chance):
    path = checkpoint / chance.choice([*SHARDS, MANIFEST])
    path.write_bytes(path.read_bytes() + chance.randbytes(8))
    return path.name


def swapped_shards(checkpoint, chance):
    one, other = (checkpoint / name for name in SHARDS)
    one.rename(checkpoint / "x")
    other.rename(one)
    (checkpoint / "x").rename(other)
    return SHARDS[0]


def from_another_step(checkpoint, chance):
    name = chance.choice([*SHARDS, MANIFEST])
    shutil.copy(checkpoint.with_name("step-00000001") / name, checkpoint / name)
    return name


def renamed_step(checkpoint, chance):
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("step-00000001"), checkpoint)
    return MANIFEST


def pickled(checkpoint, chance):
    path = checkpoint / chance.choice([*SHARDS, MANIFEST])
    bomb = Bomb(checkpoint.parent / "exploded")
    if chance.random() < 0.5:
        path.write_bytes(pickle.dumps(bomb))
    else:
        torch.save({"model/a": bomb}, path)
    return path.name


def linked(checkpoint, chance):
    path = checkpoint / chance.choice([*SHARDS, MANIFEST])
    elsewhere = checkpoint.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    return path.name


def linked_whole(checkpoint, chance):
    checkpoint.rename(checkpoint.with_name("elsewhere"))
    checkpoint.symlink_to("elsewhere")
    return "step-00000002"


def no_plain_file(checkpoint, chance):
    path = checkpoint / chance.choice([*SHARDS, MANIFEST])
    path.unlink()
    (os.mkfifo if chance.random() < 0.5 else Path.mkdir)(path)
    return path.name


def endless_manifest(checkpoint, chance):
    os.truncate(checkpoint / MANIFEST, 1 << 40)
    return MANIFEST


def deep_manifest(checkpoint, chance):
    depth = 10 ** chance.randrange(4, 7)
    nested = b"[" * depth + b"]" * depth
    envelope = b'{"format":"shardwise-checkpoint","version":1,"checksum":"%08x","content":%s}'
    (checkpoint / MANIFEST).write_bytes(envelope % (zlib.crc32(nested), nested))
    return MANIFEST


def other_header(checkpoint, chance):
    """Two tensors of one shape trade names: every byte of data still has the checksum it had."""
    path = checkpoint / chance.choice(SHARDS)
    data = path.read_bytes().replace(b"model/a", b"model/x").replace(b"model/b", b"model/a")
    path.write_bytes(data.replace(b"model/x", b"model/b"))
    return path.name


def lie(change):
    def damage(checkpoint, chance):
        rewritten(checkpoint, change)
        return MANIFEST

    return damage


def piece(content, name="model/a", number=0):
    return content["tensors"][name]["pieces"][number]


LIES = {
    "gap": lambda c: c["tensors"]["model/a"]["pieces"].pop(),
    "overlap": lambda c: piece(c, number=1).update(offsets=[0, 0]),
    "outside": lambda c: piece(c).update(offsets=[40, 0]),
    "negative offset": lambda c: piece(c).update(offsets=[-1, 0]),
    "other dimensions": lambda c: piece(c).update(shape=[512], offsets=[0]),
    "larger tensor": lambda c: c["tensors"]["model/a"].update(shape=[10**15, 16]),
    "endless shape": lambda c: c["tensors"]["model/c"].update(shape=[1] * 100_000),
    "negative shape": lambda c: c["tensors"]["model/a"].update(shape=[-64, -16]),
    "unknown dtype": lambda c: c["tensors"]["model/a"].update(dtype="OBJECT"),
    "other dtype": lambda c: c["tensors"]["model/a"].update(dtype="F64"),
    "same width": lambda c: c["tensors"]["model/a"].update(dtype="I32"),
    "parent directory": lambda c: (c["files"].update({"../x": 9}), piece(c).update(file="../x")),
    "absolute path": lambda c: (c["files"].update({"/etc/passwd": 9}), piece(c).update(file="/etc/passwd")),
    "unlisted file": lambda c: piece(c).update(file="rank-00009.safetensors"),
    "unused file": lambda c: c["files"].update({"rank-00009.safetensors": 9}),
    "size": lambda c: c["files"].update({SHARDS[0]: 9}),
    "checksum": lambda c: piece(c).update(checksum="zz"),
    "other checksum": lambda c: piece(c).update(checksum="00000000"),
    "twice in a file": lambda c: piece(c, number=1).update(file=SHARDS[0]),
    "step": lambda c: c.update(step=7),
    "step as text": lambda c: c.update(step="two"),
    "no tensors": lambda c: c.pop("tensors"),
    "unknown field": lambda c: c.update(code="__import__('os')"),
    "renamed tensor": lambda c: c["tensors"].update({"model/z": c["tensors"].pop("model/a")}),
}
BLAMED = {"same width": SHARDS[0], "other checksum": SHARDS[0], "renamed tensor": SHARDS[0]}


def envelope(**changes):
    def damage(checkpoint, chance):
        path = checkpoint / MANIFEST
        data = path.read_bytes()
        for old, new in changes.items():
            data = data.replace(*{"version": (b'"version":1', new), "format": (b"shardwise-checkpoint", new)}[old], 1)
        path.write_bytes(data)
        return MANIFEST

    return damage


ACCIDENTS = [
    (truncated, 12),
    (flipped_shard, 14),
    (flipped_manifest, 14),
    (zeroed, 4),
    (missing, 3),
    (longer, 4),
    (swapped_shards, 1),
    (from_another_step, 4),
    (renamed_step, 1),
    (pickled, 6),
    (linked, 3),
    (linked_whole, 1),
    (no_plain_file, 4),
    (endless_manifest, 1),
    (deep_manifest, 3),
    (other_header, 2),
]
DAMAGES = [(f"{kind.__name__} {seed}", kind) for kind, count in ACCIDENTS for seed in range(count)]
DAMAGES += [(f"lie: {name}", lie(change)) for name, change in LIES.items()]
DAMAGES += [("version 2", envelope(version=b'"version":2')), ("other format", envelope(format=b"x"))]
SLICE = random.Random(7).sample(DAMAGES, 30)


def suffer(sound, directory, name, damage):
    """Damage the newer of two checkpoints, and see that it is named, not loaded, and passed over."""
    shutil.copytree(sound, directory, dirs_exist_ok=True)
    checkpoint = directory / "step-00000002"
    blamed = damage(checkpoint, random.Random(name))
    blamed = BLAMED.get(name.removeprefix("lie: "), blamed)
    before = {key: torch.full_like(value, 9) for key, value in state(0).items()}
    tensors = {key: value.clone() for key, value in before.items()}
    assert find_damage(checkpoint, deep=True), "not detected"
    with pytest.raises(DamagedError) as refused:
        load(checkpoint, tensors, group=None)
    assert f"step-00000002/{blamed}" in str(refused.value) or blamed == "step-00000002"
    assert all(torch.equal(tensors[key], before[key]) for key in before), "loaded"
    report = load_newest(directory, lambda _: tensors, group=None)
    assert report.step == 1
    assert "step-00000002" in report.skipped[0]
    assert all(torch.equal(tensors[key], value) for key, value in state(1).items())
    assert not (directory / "exploded").exists(), "ran"


@pytest.mark.parametrize(("name", "damage"), SLICE, ids=[name for name, _ in SLICE])
def test_a_damaged_checkpoint_is_named_and_passed_over(sound, tmp_path, name, damage):
    suffer(sound, tmp_path, name, damage)


@pytest.mark.prove
def test_a_hundred_damaged_checkpoints_are_named_and_passed_over(sound, tmp_path):
    assert len(DAMAGES) >= 100
    for number, (name, damage) in enumerate(DAMAGES):
        suffer(sound, tmp_path / str(number), name, damage)


def test_the_bomb_of_these_tests_is_a_real_one(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "exploded")))
    assert (tmp_path / "exploded").exists()


def test_a_sound_checkpoint_is_found_so(sound):
    assert find_damage(sound / "step-00000001", deep=True) == find_damage(sound / "step-00000002", deep=True) == []


def test_a_shallow_check_sees_a_short_file_but_reads_no_values(sound, tmp_path):
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    shard = tmp_path / "step-00000002" / SHARDS[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert find_damage(shard.parent, deep=False) == []
    shard.write_bytes(data[:-1])
    assert [damage.file for damage in find_damage(shard.parent, deep=False)] == [SHARDS[1]]


def test_every_damaged_file_is_listed(sound, tmp_path):
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    for name in SHARDS:
        flip(tmp_path / "step-00000002" / name, random.Random(1))
    assert {damage.file for damage in find_damage(tmp_path / "step-00000002", deep=True)} == set(SHARDS)
