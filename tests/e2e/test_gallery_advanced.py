"""Chapter 5 of the gallery: the commands of its README run, and its claims about combined strategies are true."""

import importlib
import re

import pytest
import torch

import shardwise as sw
from e2e.gallery import EXAMPLES, Chapter
from shardwise.runs import RunDirectory
from shardwise.testing import run_ranks

pytestmark = pytest.mark.timeout(300)

CHAPTER = Chapter(EXAMPLES / "05-advanced")


@pytest.fixture
def script(monkeypatch):
    """Import a script of the chapter."""
    monkeypatch.syspath_prepend(CHAPTER.folder)
    return importlib.import_module


@pytest.mark.prove
def test_every_product_has_the_losses_of_every_other(tmp_path):
    lines = CHAPTER.commands("launch", "hybrid_parallelism.py") + CHAPTER.commands("torchrun", "hybrid_parallelism.py")
    outputs = [CHAPTER.run(line, tmp_path) for line in lines]
    assert len(outputs) == 4
    for output in outputs:
        assert float(re.search(r"differ by (\S+)", output)[1]) < 1e-4
    shares = re.findall(r"^(\S.*?)  +(\d+%)", CHAPTER.readme, re.MULTILINE)
    assert len(shares) == 9
    assert re.findall(r"^(\S.*?)  +(\d+%)", outputs[0], re.MULTILINE) == shares


@pytest.mark.prove
def test_the_job_of_hybrid_parallelism_trains_and_verifies(tmp_path):
    lines = CHAPTER.commands("shardwise train hybrid") + CHAPTER.commands("shardwise verify hybrid")
    train, verify = (CHAPTER.run(line, tmp_path) for line in lines)
    assert "pp2.shard2" in train
    assert verify.count("passed") >= 3


@pytest.mark.slow
def test_mean_of_means_is_wrong_and_sums_over_the_count_are_right(tmp_path, launched):
    lines = CHAPTER.commands("gradient_accumulation.py")
    assert len(lines) == 2
    for line in launched(lines):
        output = CHAPTER.run(line, tmp_path)
        printed = [row for row in output.splitlines() if re.match(r"tokens|one step|plain|shardwise, ", row)]
        assert "\n".join(printed) in CHAPTER.readme
        assert re.findall(r"([\d.]+)%", output)[1:] == ["0.00"] * 3


@pytest.mark.prove
def test_communication_overlap_prints_every_way_and_gain(tmp_path, launched):
    lines = CHAPTER.commands("communication_overlap.py")
    assert len(lines) == 2
    names = re.findall(r"^(\S.*?) {2,}[\d.]+ +-?[\d.]+$", CHAPTER.readme, re.MULTILINE)
    assert len(names) == 10
    for line in launched(lines):
        output = CHAPTER.run(f"{line} --rounds 3 --blocks 4 --width 64", tmp_path)
        assert re.findall(r"^(\S.*?) {2,}[\d.]+ +-?[\d.]+$", output, re.MULTILINE) == names
        assert len(re.findall(r"ms saved, [+-]\d+%", output)) == 6


def test_peft_gives_the_logits_that_the_merged_weights_give(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lora = script("lora_finetune")

    def body(world):
        plan = sw.Plan.preset("fsdp", world.size, batch_size=lora.job.batch_size)
        sw.train(lora.job, plan, world, run=RunDirectory(tmp_path), show_progress=False)

    run_ranks(body, 2)
    assert lora.compare(tmp_path) < 1e-5
    assert float(re.search(r"move logits by up to (\S+)", capsys.readouterr().out)[1]) > 0.05
    peft = pytest.importorskip("peft")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")  # finds class and base by itself
    assert type(loaded.get_base_model()).__name__ == "LlamaForCausalLM"


@pytest.mark.prove
def test_adapters_of_a_training_are_given_to_peft(tmp_path):
    train, compare, train_base, compare_base = CHAPTER.commands("lora_finetune.py")
    assert "trainable" in CHAPTER.run(train, tmp_path)  # the line may be wrapped at 80 columns
    (tmp_path / "runs/tiny-llama").rename(tmp_path / "my-llama")
    CHAPTER.run(train_base, tmp_path)
    for line in (compare.replace("runs/lora", "runs/lora --base my-llama"), compare_base):
        assert float(re.search(r"differ by (\S+)", CHAPTER.run(line, tmp_path))[1]) < 1e-5


def test_every_way_of_communicating_gives_the_same_gradients(script):
    overlap = script("communication_overlap")

    def body(world):
        torch.manual_seed(world.rank)
        x = torch.randn(4, 8)
        models = []

        def make():
            models.append(overlap.network(8, 3))
            return models[-1]

        gradients = []
        for step in overlap.all_ways(world, make, x).values():
            step()
            named = models[len(gradients)].named_parameters()
            gradients.append({name: whole(parameter.grad) for name, parameter in named})
        return gradients

    (alone, *first), (other, *second) = run_ranks(body, 2)
    mean = {name: (gradient + other[name]) / 2 for name, gradient in alone.items()}
    for gradients in first + second:
        torch.testing.assert_close(gradients, mean)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def test_every_command_of_the_readme_is_run_here():
    scripts = [argument for line in CHAPTER.commands() for argument in line.split() if argument.endswith(".py")]
    assert [scripts.count(name) for name in sorted(set(scripts))] == [2, 2, 6, 4]
