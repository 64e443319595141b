"""A run keeps its compiled graphs: a restart with an empty cache loads them, unless they cannot be trusted."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.launcher.local.processes import CACHE_VARIABLE
from shardwise.layout import parse_layout
from shardwise.plans import Plan
from shardwise.training.compile_artifact import CompileArtifact, read_artifact, versions_for, write_artifact

TESTS = Path(__file__).parents[2]
TRAIN = """
import json, sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
import shardwise as sw
from jobs import points_job
from shardwise.plans import Plan
from shardwise.runs import RunDirectory

run = RunDirectory(Path(sys.argv[1]))
model = lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
plan = Plan.preset("ddp", 1, batch_size=8, compile="model")
with sw.world() as world:
    job = points_job(model, steps=int(sys.argv[2]))
    sw.train(job, plan, world, run=run, show_progress=False, save_every=3)
print(json.dumps(counters["inductor"]))
"""
CPU = torch.device("cpu")


def train_in_child(run, steps):
    """Train in a fresh process whose compile cache is empty; return inductor's counters and the notes."""
    environ = os.environ | {"PYTHONPATH": str(TESTS), CACHE_VARIABLE: str(run / f"cache{steps}")}
    environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # without vector instructions, which torch would probe with g++
    command = [sys.executable, "-c", TRAIN, str(run), str(steps)]
    done = subprocess.run(command, check=True, env=environ, capture_output=True, text=True)
    events = [json.loads(line) for line in (run / "events" / "rank0.jsonl").read_text().splitlines()]
    notes = [event["text"] for event in events if event["kind"] == "note"]
    return json.loads(done.stdout.splitlines()[-1]), notes


@pytest.mark.prove
def test_a_restart_with_an_empty_cache_finds_every_graph_of_the_run(tmp_path):
    cold, _ = train_in_child(tmp_path, 3)
    assert cold["fxgraph_cache_miss"] > 0
    assert "fxgraph_cache_hit" not in cold
    files = sorted((tmp_path / "compiled").iterdir())
    assert [file.name for file in files] == ["pp0-tp0-cpu.bin", "pp0-tp0-cpu.json"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    written = [file.stat().st_ino for file in files]
    warm, notes = train_in_child(tmp_path, 6)
    assert any("at step 3" in note for note in notes)
    assert not any("compiled" in note for note in notes)
    assert warm["fxgraph_cache_hit"] == cold["fxgraph_cache_miss"]
    assert "fxgraph_cache_miss" not in warm
    assert [file.stat().st_ino for file in files] == written


def make_artifact(folder, notes, *, layout="one", rank=0, device=CPU, **options):
    """Return the artifact of one rank on a node with as many ranks as the layout."""
    layout = parse_layout(layout)
    plan = Plan(layout=layout, zero=min(layout.shard - 1, 1), **{"compile": "blocks", **options})
    world = SimpleNamespace(rank=rank, local_size=layout.world_size, device=device)
    return CompileArtifact(folder, plan, world, notes.append)


def tamper(path):
    path.write_bytes(b"other code")


def change_version(path):
    write_artifact(path, b"graphs", versions_for(CPU) | {"torch": "2.0"})


def open_to_group(path):
    path.chmod(0o620)


def open_facts_to_all(path):
    path.with_suffix(".json").chmod(0o602)


def replace_by_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def damage_facts(path):
    path.with_suffix(".json").write_bytes(b"{")


@pytest.fixture
def loaded(monkeypatch):
    """Return the list of artifacts that reach torch."""
    contents = []

    def load(content):
        contents.append(content)
        return SimpleNamespace(artifacts={"inductor": ["key"]}) if content == b"graphs" else None

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)
    return contents


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (tamper, "checksum"),
        (change_version, "torch 2.0"),
        (open_to_group, "writable"),
        (open_facts_to_all, "writable"),
        (replace_by_link, "symbolic link"),
        (damage_facts, "truncated"),
    ],
    ids=["content", "version", "group", "others", "link", "facts"],
)
def test_an_artifact_that_cannot_be_trusted_is_ignored_with_one_note(tmp_path, loaded, spoil, reason):
    path, notes = tmp_path / "compiled" / "pp0-tp0-cpu.bin", []
    make_artifact(path.parent, notes).load()
    assert (loaded, notes) == ([], [])  # a run that has not saved any
    write_artifact(path, b"graphs", versions_for(CPU))
    make_artifact(path.parent, notes).load()
    assert (loaded, notes) == ([b"graphs"], [])
    spoil(path)
    make_artifact(path.parent, notes).load()
    assert loaded == [b"graphs"]
    (note,) = notes
    assert reason in note


def test_an_artifact_that_torch_cannot_read_is_a_note(tmp_path, loaded):
    notes = []
    write_artifact(tmp_path / "pp0-tp0-cpu.bin", b"of another format", versions_for(CPU))
    make_artifact(tmp_path, notes).load()
    assert len(loaded) == len(notes) == 1


def test_an_artifact_of_another_user_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "compiled" / "x.bin"
    write_artifact(path, b"graphs", versions_for(CPU))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match="belongs to user"):
        read_artifact(path, versions_for(CPU))


@pytest.mark.parametrize("options", [{"layout": "cp2"}, {"compile": "none"}], ids=["cp", "eager"])
def test_context_parallel_and_eager_plans_neither_load_nor_save(tmp_path, monkeypatch, loaded, options):
    notes = []
    write_artifact(tmp_path / "pp0-tp0-cpu.bin", b"graphs", versions_for(CPU))
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: pytest.fail("exported"))
    artifact = make_artifact(tmp_path, notes, **options)
    artifact.load()
    for _ in range(4):
        artifact.after_step()
    artifact.finish()
    assert (loaded, notes) == ([], [])
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("layout", "device", "writers"),
    [
        ("replicate2.shard2", "cpu", {0: "pp0-tp0-cpu"}),
        ("pp2.shard2", "cpu", {0: "pp0-tp0-cpu", 2: "pp1-tp0-cpu"}),
        ("shard2.tp2", "cpu", {0: "pp0-tp0-cpu", 1: "pp0-tp1-cpu"}),
        ("shard2", "cuda", {0: "pp0-tp0-cuda0", 1: "pp0-tp0-cuda1"}),
    ],
)
def test_the_first_rank_of_each_program_saves_once(tmp_path, monkeypatch, layout, device, writers):
    info = SimpleNamespace(artifacts={"inductor": ["key"]})
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"graphs", info))
    monkeypatch.setattr("shardwise.training.compile_artifact.versions_for", lambda _: {})
    found = {}
    for rank in range(parse_layout(layout).world_size):
        place = torch.device(device, rank) if device == "cuda" else CPU
        artifact = make_artifact(tmp_path / str(rank), [], layout=layout, rank=rank, device=place)
        for _ in range(2):
            artifact.after_step()
        assert not (tmp_path / str(rank)).exists()
        for _ in range(2):
            artifact.after_step()
        artifact.finish()
        for file in (tmp_path / str(rank)).glob("*.bin"):
            found[rank] = file.stem
    assert found == writers


def test_a_failed_save_is_a_note(tmp_path, monkeypatch):
    info = SimpleNamespace(artifacts={"inductor": ["key"]})
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"graphs", info))
    (tmp_path / "compiled").touch()
    notes = []
    artifact = make_artifact(tmp_path / "compiled", notes)
    artifact.after_step()
    artifact.finish()  # fewer steps than usual
    (note,) = notes
    assert "not saved" in note
