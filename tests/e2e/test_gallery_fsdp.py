"""Chapter 2 of the gallery: the commands of its README run, and its claims about sharding are true."""

import argparse
import importlib
import re
import shutil

import pytest
import torch

import shardwise as sw
from e2e.gallery import EXAMPLES, Chapter, losses
from shardwise.testing import run_ranks

pytestmark = pytest.mark.timeout(300)

CHAPTER = Chapter(EXAMPLES / "02-fsdp")


@pytest.fixture
def script(monkeypatch):
    """Import a script of the chapter."""
    monkeypatch.syspath_prepend(CHAPTER.folder)
    return importlib.import_module


@pytest.mark.prove
def test_fsdp_basics_has_the_same_losses_on_any_mesh(tmp_path):
    lines = CHAPTER.commands("fsdp_basics.py")
    assert len(lines) == 3
    one, low, hybrid = (losses(CHAPTER.run(f"{line} --steps 10 --report 5", tmp_path)) for line in lines)
    assert one == pytest.approx(hybrid, abs=2e-4)
    assert one == pytest.approx(low, abs=2e-2)
    assert one[-1] < one[0] - 1
    assert (tmp_path / "runs/fsdp_basics.pt").is_file()


@pytest.mark.slow
def test_fsdp_transformer_trains_in_a_loop_of_ones_own(tmp_path, launched):
    lines = launched(CHAPTER.commands("fsdp_transformer.py", "--plan", "per"))
    full, low = (losses(CHAPTER.run(f"{line} --steps 4", tmp_path)) for line in lines)
    assert full == pytest.approx(low, abs=2e-2)


PLAIN = {
    "policy": "block",
    "recompute": "none",
    "precision": "fp32",
    "size": "llama-tiny",
    "layers": 2,
    "batch_size": 6,
    "steps": 3,
    "lr": 0.003,
    "save_every": None,
    "resume": False,
}


def test_plain_fsdp_of_every_policy_has_the_losses_of_one_process(script, tmp_path):
    chapter = script("fsdp_transformer")

    def body(world, **changes):
        return chapter.train_plain(argparse.Namespace(**(PLAIN | changes), checkpoint=tmp_path), world.device)

    one = run_ranks(body, 1)[0]
    for changes in ({"recompute": "full", "save_every": 2}, {"policy": "size"}, {"policy": "whole"}):
        assert run_ranks(body, 2, **changes)[0] == pytest.approx(one, abs=1e-5)
    assert run_ranks(body, 2, precision="bf16")[0] == pytest.approx(one, abs=5e-2)
    assert run_ranks(body, 3, resume=True)[0] == pytest.approx(one[2:], abs=1e-5)  # saved on two ranks


def test_a_wrap_policy_decides_what_is_gathered_at_once(script):
    chapter = script("fsdp_transformer")
    with torch.device("meta"):
        model = chapter.decoder(num_layers=2)
    units = {name: policy(model) for name, policy in chapter.POLICIES.items()}
    assert units["block"] == list(model.blocks)
    assert units["whole"] == []
    assert all(chapter.own_size(unit) >= 20_000 for unit in units["size"])


@pytest.mark.prove
def test_fsdp_transformer_saves_and_resumes_by_its_own_options(tmp_path, launched):
    first, resumed = (
        CHAPTER.run(line, tmp_path) for line in launched(CHAPTER.commands("fsdp_transformer.py", "--save"))
    )
    assert losses(first)[-1] < losses(first)[0]
    assert "resumed from" in resumed


@pytest.mark.prove
def test_fsdp_transformer_trains_as_a_job(tmp_path):
    [line] = CHAPTER.commands("shardwise train")
    output = CHAPTER.run(f"{line} --set steps=4", tmp_path)
    assert "recompute      full" in output
    assert losses(output)[-1] < losses(output)[0]


@pytest.mark.prove
def test_fsdp_checkpoint_resumes_with_another_number_of_processes(tmp_path, launched):
    lines = launched(line for line in CHAPTER.commands("fsdp_checkpoint.py") if "--measure" not in line)
    save, resume, asynchronous, full, own, own_resumed = (CHAPTER.run(line, tmp_path) for line in lines)
    assert "resumed from runs/fsdp_checkpoint/step-00000010 on 1 processes" in resume
    assert "resumed from runs/shardwise/step-00000010 on 1 processes" in own_resumed
    assert [losses(output) for output in (asynchronous, full, own)] == [losses(save)] * 3
    assert losses(resume) == losses(own_resumed)
    assert losses(resume)[-1] < losses(save)[0]


@pytest.mark.prove
def test_the_table_of_ways_to_save_has_the_rows_of_a_fresh_run(tmp_path, launched):
    [line] = launched(CHAPTER.commands("fsdp_checkpoint.py", "--measure"))
    row = re.compile(r"^\| (\w+) \| \d+\.\d\d \| \d+\.\d\d \| \d+\.\d\d \| \d+\.\d\d \|$", re.MULTILINE)
    measured = row.findall(CHAPTER.run(line, tmp_path))
    assert measured == ["full", "sharded", "async", "shardwise"]
    assert row.findall(CHAPTER.readme) == measured
    assert list((tmp_path / "runs" / "fsdp_checkpoint").iterdir()) == []


@pytest.mark.representative("sharded")
@pytest.mark.parametrize("strategy", ["sharded", "async", "full", "shardwise"])
def test_a_resumed_training_has_the_losses_of_an_uninterrupted_one(strategy, script, tmp_path):
    chapter = script("fsdp_checkpoint")

    def body(world, steps, resumed):
        checkpoints = chapter.Checkpoints()
        model = chapter.sharded_model(chapter.make_mesh(world.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        first = checkpoints.resume(model, optimizer, tmp_path) if resumed else 0
        text = chapter.load_text(10_000)
        found = [
            chapter.train_step(model, optimizer, chapter.global_batch(text, step, 24), accumulate=1)
            for step in range(first, steps)
        ]
        if not resumed:
            checkpoints.save(model, optimizer, tmp_path / f"step-{steps:08d}", strategy)()
        checkpoints.close()
        return found

    whole = run_ranks(body, 2, 4, False)[0]
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    run_ranks(body, 2, 3, False)
    for nproc in (1, 3):
        assert run_ranks(body, nproc, 4, True)[0] == pytest.approx(whole[3:], rel=1e-5)


def test_sharded_weights_are_those_of_a_plain_module(script):
    basics = script("fsdp_basics")

    def body(world):
        model = basics.sharded_model(basics.make_mesh(world.device, replicate=2))
        return sw.full_state_dict(model)

    torch.manual_seed(0)
    torch.testing.assert_close(run_ranks(body, 4)[0], basics.NextByte().state_dict(), rtol=0, atol=0)


def test_fsdp_basics_without_a_launcher_names_the_command(tmp_path):
    done = CHAPTER.fork("python fsdp_basics.py", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "start it by torchrun --nproc_per_node=2 fsdp_basics.py"


def table(text: str) -> dict[str, list[float]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| [A-Z].* \d+\.\d\d \|$", line)]
    return {name: [float(number) for number in numbers] for name, *numbers in rows}


@pytest.mark.prove
def test_the_table_of_strategies_is_what_a_fresh_run_measures(tmp_path, launched):
    [line] = launched(CHAPTER.commands("measure_strategies.py"))
    measured = table(CHAPTER.run(line, tmp_path))
    shown = table((CHAPTER.folder / "sharding_strategies.md").read_text())
    assert measured.keys() == shown.keys()
    assert len(shown) == 5
    for name, numbers in shown.items():
        assert measured[name][:-1] == numbers[:-1]
        assert measured[name][-1] == pytest.approx(numbers[-1], rel=0.02)  # TCP sends some bytes twice


def test_every_command_of_the_readme_is_run_here():
    scripts = {argument for line in CHAPTER.commands() for argument in line.split() if argument.endswith(".py")}
    assert scripts == {"fsdp_basics.py", "fsdp_transformer.py", "fsdp_checkpoint.py", "measure_strategies.py"}
