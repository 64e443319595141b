"""`shardwise checkpoint` from the command line, on what a real training of two ranks saved."""

import shutil
import subprocess
import sys

import pytest
import torch

from shardwise.checkpoint import read_manifest, save
from shardwise.cli.main import main

JOB = """
import torch
import shardwise as sw

job = sw.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 12), torch.nn.Linear(12, 10)),
    data=sw.datasets.digits, loss=sw.losses.cross_entropy, optimizer=sw.adamw(lr=1e-3), batch_size=64, steps=6,
    metrics={"accuracy": sw.metrics.accuracy},
)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory, forked_parents):
    """A run of two sharded ranks with checkpoints after steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(JOB)
    run = folder / "run"
    arguments = ["--nproc", "2", "--plan", "fsdp", "--save-every", "2", "--run-dir", str(run), "--device", "cpu"]
    assert main(["train", str(folder / "job.py"), *arguments]) == 0
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def checkpoint(*arguments):
    return main(["checkpoint", *map(str, arguments)])


def step(run, number):
    return run / "checkpoints" / f"step-{number:08d}"


def damage(path):
    shard = path / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_ls_shows_step_layout_metrics_and_latest(run, capfd, place):
    assert checkpoint("ls", run / place) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "2", "4", "6"]
    assert all("shard2" in line and "sound" in line for line in lines[1:])
    assert "accuracy" in lines[3]
    assert lines[3].endswith("step-00000006 (latest)")


def test_ls_names_what_is_torn(run, capfd):
    (step(run, 4) / "rank-00000.safetensors").unlink()
    (step(run, 2) / "manifest.json").write_text("{}")
    assert checkpoint("ls", run) == 0
    shown = capfd.readouterr().out
    assert shown.count(" damaged ") == 2
    assert "rank-00000.safetensors cannot be read" in shown
    assert "manifest.json is not a valid manifest" in shown


def test_inspect_shows_facts_and_tensors(run, capfd):
    assert checkpoint("inspect", step(run, 4), "--tensors") == 0
    shown = capfd.readouterr().out
    assert "shardwise, step 4" in shown
    assert "batch_size: 64" in shown
    assert 'layout = "shard2"' in shown
    assert "model/1.weight" in shown
    assert "12 x 64" in shown


def test_inspect_of_a_run_shows_its_newest(run, capfd):
    assert checkpoint("inspect", run) == 0
    assert "step 6" in capfd.readouterr().out


def test_check_finds_one_flipped_bit_and_exits_with_3(run, capfd):
    assert checkpoint("check", run) == 0
    damage(step(run, 4))
    assert checkpoint("check", run) == 3
    shown = capfd.readouterr()
    assert "step-00000004/rank-00001.safetensors has checksum" in shown.err
    assert shown.out.count("sound: ") == 5  # three before, two after


def test_diff_names_the_tensors_their_differences_and_the_facts(run, capfd):
    assert checkpoint("diff", step(run, 2), step(run, 4)) == 3
    shown = capfd.readouterr().out
    assert "model/1.weight" in shown
    assert "step: 2 | 4" in shown
    assert "the tensors differ: 0 with the same bits" in shown


def test_diff_of_other_shapes_and_names(tmp_path, capfd):
    save(
        tmp_path / "a",
        1,
        {"x": torch.zeros(2), "y": torch.zeros(3), "z": torch.tensor([1.0, float("nan")])},
        {},
        group=None,
    )
    save(tmp_path / "b", 1, {"y": torch.zeros(4), "z": torch.tensor([1.5, 2.0]), "w": torch.ones(1)}, {}, group=None)
    assert checkpoint("diff", tmp_path / "a", tmp_path / "b") == 3
    shown = capfd.readouterr().out
    assert f"only in {tmp_path / 'a'}: x" in shown
    assert f"only in {tmp_path / 'b'}: w" in shown
    assert "y: F32 [3] and F32 [4]" in shown
    assert "2 of 2" in shown
    assert "nan" in shown


def test_prune_keeps_the_newest_and_the_best(run, tmp_path, capfd):
    folder = tmp_path / "folder"
    for number, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        save(folder, number, {"x": torch.zeros(1)}, {"metrics": {"loss": loss}}, group=None)
    assert checkpoint("prune", folder, "--keep", "1,min:loss") == 0
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000002", "step-00000004"]
    assert "2 checkpoints remain" in capfd.readouterr().out


def test_prune_keeps_the_newest_good_one(run):
    damage(step(run, 6))
    assert checkpoint("prune", run, "--keep", 1) == 0
    assert step(run, 4).exists()
    assert not step(run, 2).exists()


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_convert_and_back_gives_the_same_bits(run, tmp_path, capfd, kind):
    assert checkpoint("convert", run, tmp_path / "there", "--to", kind) == 0
    assert f"shardwise -> {kind}: 16 tensors" in capfd.readouterr().out
    assert checkpoint("convert", tmp_path / "there", tmp_path / "back", "--to", "shardwise") == 0
    assert checkpoint("diff", run, tmp_path / "back") == 0
    assert read_manifest(tmp_path / "back").facts == read_manifest(step(run, 6)).facts


def test_convert_to_hugging_face_lists_what_it_cannot_hold(run, tmp_path, capfd):
    assert checkpoint("convert", run, tmp_path / "hf", "--to", "hf") == 0
    shown = capfd.readouterr().out
    assert "left out: optimizer: 12 tensors, the directory contains weights only" in shown
    assert "left out: config.json" in shown


def test_weights_of_a_checkpoint_are_those_of_the_run(run, tmp_path, capfd):
    assert checkpoint("convert", run, tmp_path / "weights.pt", "--to", "torch", "--weights") == 0
    assert "step 6, in" in capfd.readouterr().out
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    expected = torch.load(run / "weights.pt", weights_only=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_converted_checkpoint_can_be_resumed(trained, tmp_path):
    source, there, back = step(trained, 4), tmp_path / "there", tmp_path / "back"
    assert checkpoint("convert", source, there, "--to", "dcp") == 0
    assert checkpoint("convert", there, back, "--to", "shardwise") == 0
    arguments = ["--nproc", "1", "--run-dir", str(tmp_path / "run"), "--resume", str(back), "--device", "cpu"]
    assert main(["train", str(trained.parent / "job.py"), *arguments]) == 0
    found = torch.load(tmp_path / "run" / "weights.pt", weights_only=True)
    expected = torch.load(trained / "weights.pt", weights_only=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


BAD = {
    "nothing there": (["ls", "nowhere"], "contains no checkpoint"),
    "nothing to inspect": (["inspect", "nowhere"], "[checkpoint.not-found]"),
    "no kind": (["convert", "run", "x", "--to", "zip"], "'torch'"),
    "target exists": (["convert", "run", "run", "--to", "torch"], "[checkpoint.target-exists]"),
    "target without directory": (["convert", "run", "no/where", "--to", "torch"], "[checkpoint.target-folder-missing]"),
    "no such metric": (["prune", "run", "--keep", "1,max:accurac"], "'accuracy'"),
    "prune of one": (["prune", "run/checkpoints/step-00000002", "--keep", "1"], "[checkpoint.single-checkpoint]"),
    "keep nothing": (["prune", "run", "--keep", "0"], "keep"),
    "config for torch": (["convert", "run", "x.pt", "--to", "torch", "--config", "job.json"], "remove --config"),
    "no such config": (["convert", "run", "x", "--to", "hf", "--config", "nothing.json"], "not a file"),
    "wrong step in the name": (
        ["convert", "run", "step-00000009", "--to", "shardwise"],
        "the checkpoint is at step 6",
    ),
    "no such command": (["list", "run"], "list"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_exits_with_2_and_one_sentence(run, tmp_path, monkeypatch, capfd, case):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    arguments, expected = BAD[case]
    assert checkpoint(*arguments) == 2
    shown = capfd.readouterr().err.splitlines()
    assert len(shown) == 1
    assert expected in shown[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_help_of_the_verb_does_not_import_torch():
    code = (
        "import sys; from shardwise.cli.main import main;"
        "codes = [main(['checkpoint', *verb, '--help']) for verb in ([], ['ls'], ['convert'])];"
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
