"""Chapter 3 of the gallery: the commands of its README run, and its claims about DeepSpeed's stages are true."""

import importlib.util
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from e2e.gallery import EXAMPLES, Chapter, losses

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed: pip install 'shardwise[deepspeed]'", allow_module_level=True)

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

GUIDE = Chapter(EXAMPLES)
CHAPTER = Chapter(EXAMPLES / "03-deepspeed")
LAUNCHERS = ("deepspeed --num_gpus=2", "torchrun --nproc_per_node=2", "shardwise launch --nproc_per_node=2")
CONFIGS = [f"configs/zero{stage}_config.json" for stage in (1, 2, 3)]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The folder in which the README's line has trained a decoder, and its output."""
    folder = tmp_path_factory.mktemp("trained")
    [line] = CHAPTER.commands("deepspeed_train.py", "--save")
    output = CHAPTER.run(f"{line} --deepspeed_config {CHAPTER.folder / CONFIGS[2]}", folder)
    return folder, output


def difference(output: str) -> float:
    return float(re.search(r"losses differ by at most (\S+)", output)[1])


def stored_bytes(output: str) -> str:
    return re.search(r"stored on rank 0: (\S+) bytes", output)[1]


@pytest.mark.prove
def test_the_chapters_first_command_has_the_losses_of_plain_pytorch(tmp_path):
    line = CHAPTER.commands("deepspeed_train.py", "--check")[0]
    assert line.startswith(LAUNCHERS[0])
    output = CHAPTER.run(f"{line} --steps 5".replace("configs/", f"{CHAPTER.folder}/configs/"), tmp_path)
    assert difference(output) < 1e-5
    assert "32 samples a step = 4 per forward pass x 4 passes x 2 processes" in output
    assert stored_bytes(output) in CHAPTER.readme


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_every_stage_has_the_same_losses_under_every_launcher(tmp_path):
    """The commands of the README, and variants that it does not show: three launchers, three stages."""
    written = [line for line in CHAPTER.commands("deepspeed_train.py", "--check") if any(map(line.count, CONFIGS))]
    found = {}
    for launcher, config in itertools.product(LAUNCHERS, CONFIGS):
        line = f"{launcher} deepspeed_train.py --deepspeed_config {config} --check"
        found[line] = CHAPTER.run(line.replace("configs/", f"{CHAPTER.folder}/configs/"), tmp_path)
    assert set(written) <= set(found)
    for output in found.values():
        assert difference(output) < 1e-5
        assert losses(output) == losses(next(iter(found.values())))
        assert f" {stored_bytes(output)} |" in CHAPTER.readme
    assert losses(output)[-1] < losses(output)[0] - 1


@pytest.mark.prove
def test_the_guides_command_runs_as_written():
    lines = GUIDE.commands("deepspeed --num_gpus=2")
    for line, stage in zip(lines, (2, 3), strict=True):
        assert f"ZeRO stage {stage} on 2 processes" in GUIDE.run(line)


@pytest.mark.prove
def test_the_flag_of_deepspeeds_own_parser_is_taken(tmp_path):
    assert "ZeRO stage 2" in CHAPTER.run(f"{LAUNCHERS[1]} deepspeed_train.py --deepspeed --steps 1", tmp_path)


@pytest.mark.prove
def test_a_saved_decoder_writes_what_plain_pytorch_writes(weights):
    folder, trained = weights
    assert "saved 70 whole tensors" in trained
    lines = CHAPTER.commands("deepspeed_inference.py", "--weights")
    assert len(lines) == 2
    for line in lines:
        output = CHAPTER.run(line, folder)
        assert float(re.search(r"logits differ by at most (\S+)", output)[1]) < 1e-4
        assert re.search(r"rank 0 stores 137,984 of 237,184 parameters", output)
        assert ("without fused kernels: " in output) == ("--kernels" in line)


@pytest.mark.prove
def test_a_llama_over_two_ranks_answers_as_plain_pytorch_with_the_cache_of_the_formula(tmp_path):
    lines = [line for line in CHAPTER.commands("deepspeed_inference.py") if "--weights" not in line]
    assert len(lines) == 2
    for line in lines:
        output = CHAPTER.run(line, tmp_path)
        difference, same = re.search(r"logits differ by at most (\S+), (\d+)% of the answers", output).groups()
        assert float(difference) < (1e-4 if "fp32" in line else 0.1)
        assert same == "100" or "fp32" not in line
        measured, theory = re.search(r"KV cache of rank 0 +(\S+) bytes, (\S+) in theory", output).groups()
        assert measured == theory
        assert len(re.findall(r"^(?:first|each) token.* [\d.]+ ms$", output, re.MULTILINE)) == 3


@pytest.mark.prove
@pytest.mark.parametrize("name", ["zero2_bf16", "zero2_offload", "zero3_offload"])
def test_variants_of_the_configs_train_as_plain_pytorch(name, tmp_path):
    [line] = CHAPTER.commands(f"configs/{name}_config.json")
    output = CHAPTER.run(f"{line} --steps 4".replace("configs/", f"{CHAPTER.folder}/configs/"), tmp_path)
    assert difference(output) < (1e-5 if name == "zero2_offload" else 0.05)


@pytest.mark.prove
def test_heads_that_do_not_divide_are_served_by_plain_pytorch(weights):
    line = "torchrun --nproc_per_node=3 deepspeed_inference.py --weights runs/decoder/weights.pt --bytes 4"
    assert "4 heads do not divide by 3 processes" in CHAPTER.run(line, weights[0])


@pytest.mark.prove
def test_optimizer_states_on_the_host_give_the_same_losses(tmp_path):
    [line] = CHAPTER.commands("zero_offload.py", "--offload cpu")
    output = CHAPTER.run(line, tmp_path)
    assert difference(output) < 1e-5
    assert re.search(r"on rank 0: (\S+) bytes", output)[1] in CHAPTER.readme


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not Path("/usr/include/libaio.h").exists(), reason="AsyncIO needs libaio: apt-get install libaio-dev"
)
def test_optimizer_states_on_disk_give_the_same_losses(tmp_path):
    [line] = CHAPTER.commands("zero_offload.py", "--offload nvme")
    process = CHAPTER.start(line, tmp_path)
    output, _ = process.communicate(timeout=1100)  # the first time AsyncIO compiles: some minutes
    assert process.returncode == 0, output
    assert difference(output) < 1e-5
    memory, disk, files = re.search(r"rank 0: (\S+) bytes .*; (\S+) bytes of all ranks in (\d+) files", output).groups()
    assert int(memory.replace(",", "")) < 1000
    assert (disk, files) == ("39,690,240", "6")
    assert disk in CHAPTER.readme
    on_disk = sum(path.stat().st_size for path in (tmp_path / "runs/nvme").rglob("*") if path.is_file())
    assert f"{on_disk:,}" == disk


@pytest.mark.prove
def test_the_job_trains_on_deepspeed_by_one_option(tmp_path):
    [line] = CHAPTER.commands("shardwise train")
    output = CHAPTER.run(line, tmp_path)
    assert losses(output)[-1] < losses(output)[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_configs_leave_nothing_that_surprises_to_defaults(stage):
    config = json.loads((CHAPTER.folder / CONFIGS[stage - 1]).read_text())
    assert config["zero_optimization"]["stage"] == stage
    assert {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "bf16"} <= set(config)
    assert "gradient_accumulation_steps" not in config


def test_a_script_without_deepspeed_names_the_pip_line(tmp_path):
    (tmp_path / "deepspeed.py").write_text("raise ModuleNotFoundError('deepspeed')")
    for script in ("deepspeed_train.py", "byte_decoder.py"):
        shutil.copy(CHAPTER.folder / script, tmp_path)
    done = Chapter(tmp_path).fork("python deepspeed_train.py", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "DeepSpeed is not installed: pip install 'shardwise[deepspeed]'"


def test_every_command_of_the_readme_is_run_here():
    scripts = [argument for line in CHAPTER.commands() for argument in line.split() if argument.endswith(".py")]
    assert {name: scripts.count(name) for name in scripts} == {
        "deepspeed_train.py": 7,
        "zero_offload.py": 2,
        "deepspeed_inference.py": 4,
        "decoder_job.py": 1,
    }
