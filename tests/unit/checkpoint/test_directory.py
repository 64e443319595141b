"""A directory of checkpoints: which one is tried first, and which may go."""

import time
from pathlib import Path

import pytest
import torch

from refusals import refuses
from shardwise.checkpoint import (
    CheckpointDirectory,
    CheckpointEntry,
    DamagedError,
    MismatchError,
    load,
    load_newest,
    save,
    to_remove,
)
from shardwise.checkpoint.convert.contents import read_shardwise
from shardwise.checkpoint.directory import find_checkpoints
from shardwise.checkpoint.listing import list_checkpoints, prune_checkpoints
from shardwise.checkpoint.spec import ListSpec, PruneSpec
from shardwise.runs.directory import Keep
from shardwise.testing import run_ranks
from shardwise.training.spec import SaveSpec

LOSSES = [5.0, 3.0, 4.0, 3.0, float("nan")]
ENTRIES = [
    CheckpointEntry(
        Path(f"step-{step:08d}"), step, saved_at=100.0 * step, num_bytes=1, metrics={"loss": LOSSES[step - 1]}
    )
    for step in range(1, 6)
]


def removed(keep, *, now=500.0):
    return [entry.step for entry in to_remove(ENTRIES, keep, now=now)]


@pytest.mark.parametrize(
    ("keep", "gone"),
    [
        (Keep(), []),
        (Keep(last=2), [1, 2, 3]),
        (Keep(last=9), []),
        (Keep(age_s=201), [1, 2]),
        (Keep(age_s=0), [1, 2, 3, 4]),
        (Keep(best=1, metric="loss"), [1, 2, 3]),
        (Keep(best=2, metric="loss"), [1, 3]),
        (Keep(best=1, metric="loss", highest=True), [2, 3, 4]),
        (Keep(last=1, best=1, metric="loss", age_s=301), [1]),
        (Keep(best=1, metric="unknown"), [1, 2, 3, 4]),
    ],
    ids=str,
)
def test_a_checkpoint_stays_if_any_rule_wants_it_and_the_newest_always(keep, gone):
    assert removed(keep) == gone


def test_nothing_is_removed_from_nothing():
    assert to_remove([], Keep(last=1), now=0) == []


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"last": 0}, "checkpoint.keep-last-invalid"),
        ({"age_s": -1}, "checkpoint.keep-age-invalid"),
        ({"best": 1}, "checkpoint.keep-best-invalid"),
        ({"metric": "loss"}, "checkpoint.keep-best-invalid"),
    ],
    ids=str,
)
def test_rules_without_a_meaning_are_refused(wrong, code):
    with refuses(code):
        Keep(**wrong)


def saved(directory, *steps):
    for step in steps:
        save(directory, step, {"x": torch.tensor(float(step))}, {"metrics": {"loss": 1 / step}}, group=None)
    return CheckpointDirectory(directory)


def damage(path):
    shard = path / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def steps(directory):
    return sorted(entry.step for entry in directory.entries())


def test_a_directory_that_does_not_exist_holds_nothing(tmp_path):
    directory = CheckpointDirectory(tmp_path / "none")
    assert (directory.latest(), directory.paths(), directory.newest_good(deep=True)) == (None, [], (None, []))
    assert load_newest(tmp_path / "none", lambda _: {}, group=None) is None


def test_latest_is_tried_first_then_the_highest_step(tmp_path):
    directory = saved(tmp_path, 8, 12, 9)
    assert [path.name for path in directory.paths()] == ["step-00000009", "step-00000012", "step-00000008"]
    assert directory.latest().name == "step-00000009"


@pytest.mark.parametrize("text", ["step-00000099", "../elsewhere", "", "step-00000002/..", "\xff" * 40])
def test_a_latest_file_that_leads_nowhere_is_ignored(tmp_path, text):
    directory = saved(tmp_path, 1, 2)
    (tmp_path / "latest").write_text(text)
    assert directory.latest() is None
    assert directory.paths()[0].name == "step-00000002"


def test_entries_have_the_facts_of_their_manifests(tmp_path):
    entry = saved(tmp_path, 4).entries()[0]
    assert (entry.step, entry.metrics) == (4, {"loss": 0.25})
    assert entry.num_bytes == (tmp_path / "step-00000004" / "rank-00000.safetensors").stat().st_size
    assert abs(entry.saved_at - time.time()) < 60


def test_the_newest_good_one_is_found_and_the_damaged_file_named(tmp_path):
    directory = saved(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-00000003")
    entry, damages = directory.newest_good(deep=True)
    assert entry.step == 2
    assert [(d.checkpoint.name, d.file) for d in damages] == [("step-00000003", "rank-00000.safetensors")]


def test_loading_skips_damaged_checkpoints_on_all_ranks_alike(tmp_path):
    saved(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-00000003")

    def newest(world):
        back = {"x": torch.tensor(0.0)}
        report = load_newest(tmp_path, lambda _: back, group=world.host_group)
        return report.step, back["x"].item(), report.skipped

    (one, other) = run_ranks(newest, 2)
    assert one == other
    assert one[:2] == (2, 2.0)
    assert "step-00000003/rank-00000.safetensors" in one[2][0]


def test_a_directory_of_damaged_checkpoints_is_refused_naming_each(tmp_path):
    for path in saved(tmp_path, 1, 2).paths():
        damage(path)
    with refuses("checkpoint.none-usable", "step-00000002/rank-00000", "step-00000001/rank-00000", kind=DamagedError):
        load_newest(tmp_path, lambda _: {"x": torch.tensor(0.0)}, group=None)


def test_pruning_removes_by_rule_and_leaves_no_trace(tmp_path):
    directory = saved(tmp_path, 1, 2, 3, 4)
    gone = directory.prune(Keep(last=2))
    assert sorted(path.name for path in gone) == ["step-00000001", "step-00000002"]
    assert steps(directory) == [3, 4]
    assert list(tmp_path.glob(".tmp-*")) == []


def test_best_by_the_metric_of_the_rule_is_named_listed_and_found_by_its_name(tmp_path):
    directory = saved(tmp_path, 1, 2, 3)
    directory.prune(Keep(last=3))
    assert directory.named("best") is None
    directory.prune(Keep(last=1, best=1, metric="loss", highest=True))
    one, three = tmp_path / "step-00000001", tmp_path / "step-00000003"
    listing = list_checkpoints(ListSpec(path=tmp_path))
    rows = listing.rows
    assert ["-" in line.split() for line in listing.to_text().splitlines()[1:]] == [True, True]  # no layout was saved
    assert [(row.path, row.is_latest, row.is_best) for row in rows] == [(one, False, True), (three, True, False)]
    for name, path in (("best", one), ("latest", three)):
        assert find_checkpoints(tmp_path / name) == [path]
        assert read_shardwise(tmp_path / name).step == int(path.name[-1])
        assert SaveSpec(resume=str(tmp_path / name)).resolved().resume == str(tmp_path / name)
        with refuses("checkpoint.single-checkpoint"):
            prune_checkpoints(PruneSpec(path=tmp_path / name, keep="1"))


def test_pruning_never_removes_the_newest_good_one(tmp_path):
    directory = saved(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-00000003")
    assert [path.name for path in directory.prune(Keep(last=1), deep=True)] == ["step-00000001"]
    assert steps(directory) == [2, 3]


def test_pruning_removes_nothing_when_nothing_is_good(tmp_path):
    directory = saved(tmp_path, 1, 2)
    for path in directory.paths():
        damage(path)
    assert directory.prune(Keep(last=1), deep=True) == []


def differing(world, directory):
    """Rank 0 asks for `a` and for `c`, which was not saved; rank 1 for `b` in another shape; nobody for `d`."""
    mine = [{"a": torch.zeros(2), "c": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(3)}][world.rank]
    with pytest.raises(MismatchError) as refused:
        load(directory / "step-00000001", mine, group=world.host_group)
    untouched = mine["a"].sum().item()
    report = load(directory / "step-00000001", mine, group=world.host_group, strict=False)
    return str(refused.value), untouched, report.comparison, mine["a"].tolist()


def test_what_differs_is_refused_by_default_and_reported_alike_on_every_rank(tmp_path):
    whole = {name: torch.ones(2) for name in "abd"}
    save(tmp_path, 1, whole, {}, group=None)
    one, other = run_ranks(differing, 2, tmp_path)
    assert one == other
    message, untouched, comparison, values = one
    assert untouched == 0
    assert values == [1, 1]
    assert (comparison.restored, comparison.missing, comparison.unexpected) == (("a",), ("c",), ("d",))
    assert comparison.differing == ("b: saved F32 [2], requested F32 [3]",)
    assert all(part in message for part in ("1 missing (c)", "1 unexpected (d)", "saved F32 [2], requested F32 [3]"))


def test_another_dtype_is_a_difference(tmp_path):
    save(tmp_path, 1, {"a": torch.ones(2)}, {}, group=None)
    with refuses("checkpoint.tensors-mismatch", "F32", kind=MismatchError):
        load(tmp_path / "step-00000001", {"a": torch.ones(2).double()}, group=None)
