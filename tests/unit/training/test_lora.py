"""Training adapters: what is stored, saved, resumed elsewhere, exported, and started from."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

import shardwise as sw
from jobs import sentences_job
from refusals import refuses
from shardwise.checkpoint.convert.convert import convert, open_contents
from shardwise.checkpoint.spec import ConvertSpec
from shardwise.cli.main import main
from shardwise.parallel.lora import add_adapters
from shardwise.planner.settle import LocalDevice, settle
from shardwise.plans import Precision
from shardwise.runs import RunDirectory
from shardwise.testing import run_ranks

LORA = sw.Lora(rank=3, alpha=6, targets=("qkv", "mlp.down", "head"))


def decoder():
    return sw.models.decoder("gpt2-tiny", vocab_size=50, context=16, tie_head=False)


def make_job(**changes):
    return sentences_job(**{"model": decoder, "lora": LORA, **changes})


def plan_of(name, world, **changes):
    return dataclasses.replace(settle(name, batch_size=8, world_size=world.size, device=LocalDevice()), **changes)


def trained_names(world, name):
    """Train two steps; return names with a gradient bucket or optimizer state, and of frozen weights' gradients."""
    step = sw.build_step(make_job(steps=2), plan_of(name, world), world)
    for batch in step.feed:
        step(batch)
    named = dict(step.named_parameters())
    states = {key.rpartition("/")[0] for key in step.local_state().states}
    frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
    return states, [name for name in frozen if named[name].grad is not None], len(frozen)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_frozen_weights_have_neither_gradient_nor_optimizer_state(name):
    states, with_gradient, num_frozen = run_ranks(trained_names, 2, name)[0]
    assert with_gradient == []
    assert num_frozen == len(list(make_job().model().parameters()))
    assert all(".lora_" in name for name in states)
    assert len(states) == 2 * (2 * len(make_job().model().blocks) + 1)


def half():
    return sw.models.decoder("llama-tiny", vocab_size=50, context=16).bfloat16()


def losses(world, name):
    """Train with a base in bf16; return the losses, and the dtypes of what is frozen and trained."""
    plan = plan_of(name, world, precision=Precision(compute="bf16"))
    step = sw.build_step(make_job(model=half), plan, world)
    means = [world.sum({"loss": float(step(batch).loss_share)})["loss"] for batch in step.feed]
    named = list(step.named_parameters())
    return means, [{value.dtype for _, value in named if value.requires_grad == trained} for trained in (False, True)]


def test_a_frozen_model_in_the_compute_dtype_stays_in_it_under_sharding():
    alone, dtypes = run_ranks(losses, 1, "ddp")[0]
    sharded, same = run_ranks(losses, 2, "fsdp")[0]
    assert dtypes == same == [{torch.bfloat16}, {torch.float32}]
    assert sharded == pytest.approx(alone, rel=0.02)
    assert alone[-1] < alone[0]


def trained(world, folder, name="ddp", options=None, **changes):
    run = RunDirectory(folder)
    sw.train(make_job(**changes), plan_of(name, world), world, run=run, show_progress=False, **(options or {}))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two sharded ranks with a checkpoint after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    run_ranks(trained, 2, folder, "fsdp", {"save_every": 2})
    return folder


def state(run):
    return torch.load(run / "weights.pt", weights_only=True)


def adapters(folder):
    return load_file(folder / "adapter_model.safetensors")


def test_a_checkpoint_resumes_under_another_layout(run, tmp_path):
    half = str(run / "checkpoints" / "step-00000002")
    run_ranks(trained, 2, tmp_path, "tp", {"resume": half})
    torch.testing.assert_close(adapters(tmp_path / "adapter"), adapters(run / "adapter"), rtol=1e-4, atol=1e-6)


def test_another_alpha_is_not_resumed(run, tmp_path):
    with refuses("job.adapter-option-mismatch", "alpha 6", "12"):
        run_ranks(trained, 1, tmp_path, "ddp", {"resume": str(run)}, lora=dataclasses.replace(LORA, alpha=12))


def test_trained_weights_in_the_plain_model_compute_what_the_trained_one_does(run):
    contents = open_contents(run)
    values = {name.removeprefix("model/"): value for name, value in contents.read(list(contents.forms)).items()}
    trained, loaded, base = decoder(), decoder(), decoder()
    add_adapters(trained, LORA)
    trained.to_empty(device="cpu").load_state_dict({name: values[name] for name in trained.state_dict()})
    loaded.load_state_dict(state(run))
    base.load_state_dict({name: values[name] for name in base.state_dict()})
    tokens = torch.arange(16)[None]
    expected = trained.eval()(tokens)
    torch.testing.assert_close(loaded.eval()(tokens), expected)
    assert (base.eval()(tokens) - expected).abs().max() > 0.01


def test_a_checkpoint_becomes_a_folder_of_adapters(run, tmp_path):
    report = convert(ConvertSpec(source=run, target=tmp_path / "adapter", to="peft"))
    assert report.num_tensors == len(adapters(run / "adapter"))
    torch.testing.assert_close(adapters(tmp_path / "adapter"), adapters(run / "adapter"), rtol=0, atol=0)
    config = "adapter_config.json"
    assert (tmp_path / "adapter" / config).read_text() == (run / "adapter" / config).read_text()


@pytest.mark.parametrize(("kind", "name"), [("hf", "folder"), ("torch", "file.pt")])
def test_weights_of_a_checkpoint_come_out_merged(run, tmp_path, kind, name):
    report = convert(ConvertSpec(source=run, target=tmp_path / name, to=kind, weights=True))
    found = open_contents(tmp_path / name)
    values = {key.removeprefix("model/"): value for key, value in found.read(list(found.forms)).items()}
    torch.testing.assert_close(values, state(run), rtol=0, atol=0)
    assert f"adapters: merged into {len(adapters(run / 'adapter')) // 2} weights" in report.left_out


def test_a_checkpoint_without_adapters_gives_none(run, tmp_path):
    convert(ConvertSpec(source=run, target=tmp_path / "plain.pt", to="torch", weights=True))
    with refuses("checkpoint.no-adapters"):
        convert(ConvertSpec(source=tmp_path / "plain.pt", target=tmp_path / "adapter", to="peft"))
    with refuses("checkpoint.adapter-base-missing"):
        convert(ConvertSpec(source=run / "adapter", target=tmp_path / "folder", to="hf"))


def first_values(world, **changes):
    step = sw.build_step(make_job(**changes), plan_of("ddp", world), world)
    return {f"base_model.model.{name}": value.detach() for name, value in step.named_parameters() if ".lora_" in name}


def test_training_starts_from_adapters_that_were_saved(run):
    found = run_ranks(first_values, 1, lora=dataclasses.replace(LORA, weights=str(run / "adapter")))[0]
    torch.testing.assert_close(found, adapters(run / "adapter"), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"rank": 4}, ("job.adapter-option-mismatch", "rank 3", "has 4", "--set lora.rank=3")),
        ({"alpha": 9}, ("job.adapter-option-mismatch", "alpha 6", "has 9")),
        ({"targets": ("qkv",)}, ("job.adapter-keys-mismatch", "mlp.down")),
        ({"weights": "nowhere"}, ("job.adapter-config-invalid", "nowhere")),
    ],
)
def test_adapters_that_do_not_fit_are_refused(run, changes, refusal):
    lora = dataclasses.replace(LORA, **{"weights": str(run / "adapter"), **changes})
    with refuses(*refusal):
        run_ranks(first_values, 1, lora=lora)


def test_deepspeed_is_refused():
    def body(world):
        sw.build_step(make_job(), plan_of("zero2", world, engine="deepspeed"), world)

    with refuses("support.lora-engine", "deepspeed"):
        run_ranks(body, 2)


JOB = """
from jobs import sentences_job

import shardwise as sw
from jobs import sentences_job

job = sentences_job(lora=sw.Lora(targets=("qvk",)))
"""


def test_a_target_that_matches_nothing_ends_before_anything_starts(tmp_path, capfd):
    (tmp_path / "job.py").write_text(JOB)
    arguments = ["--nproc", "2", "--run-dir", str(tmp_path / "run"), "--device", "cpu"]
    assert main(["train", str(tmp_path / "job.py"), *arguments]) == 2
    assert "Lora target 'qvk' matches no linear module: did you mean 'qkv'?" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
